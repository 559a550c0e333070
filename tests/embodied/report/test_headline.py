"""The sentence that a report begins with claims no more than the figures do."""

import pytest

from embodied.report.headline import headline, regressions


def evaluated(stage: str, success: float, **more: object) -> dict:
    row = {"stage": stage, "title": stage, "distribution": "wide", "success": success, "episodes": 500}
    return {**row, "low": success - 0.02, "high": success + 0.02, "per_task": [], **more}


def gained(over: str, difference: float, spread: float = 0.03, **more: object) -> dict:
    row = {"over": over, "distribution": "wide", "difference": difference, "measure": "success", "per_task": []}
    return {**row, "low": difference - spread, "high": difference + spread, **more}


def record(evaluations: list, gains: list | None = None, assets: str | None = "official") -> dict:
    return {
        "task": "libero_pick",
        "assets": assets,
        "distributions": ["wide", "official"],
        "env_steps": 90_000,
        "episodes": 1500,
        "evaluations": evaluations,
        "gains": gains or [],
    }


def test_a_gain_over_sft_and_its_control():
    rows = [evaluated("sft", 0.578), evaluated("sft_control", 0.6), evaluated("rl", 0.972)]
    assert headline(record(rows, [gained("sft", 0.394), gained("sft_control", 0.372)])) == (
        "Reinforcement learning raised success on held-out starts of libero_pick (wide) from 57.8% to 97.2%"
        " [95.2, 99.2] over 1,500 episodes; supervised training for as many steps reached 60.0%."
    )


@pytest.mark.parametrize(
    ("sft", "control", "told"),
    [
        (gained("sft", 0.02), gained("sft_control", 0.05), "made no significant difference to success on held-out"),
        (gained("sft", 0.02), gained("sft_control", 0.05), "after 1,500 episodes (+2.0 points [-1.0, +5.0]); superv"),
        (gained("sft", -0.2), gained("sft_control", 0.05), "Reinforcement learning lowered success"),
        (gained("sft", 0.2), gained("sft_control", 0.05), "reached 60.0%."),
        (gained("sft", 0.2), gained("sft_control", 0.01), "60.0%, and the difference from that is not significant (+1"),
        (
            gained("sft", 0.2),
            gained("sft_control", -0.1),
            "reached 60.0%, which is better (-10.0 points [-13.0, -7.0])",
        ),
    ],
)
def test_what_is_not_significant_is_not_claimed(sft, control, told):
    rows = [evaluated("sft", 0.578), evaluated("sft_control", 0.6), evaluated("rl", 0.6)]
    assert told in headline(record(rows, [sft, control]))


def test_without_something_to_compare_with():
    after = "After 1,500 episodes of reinforcement learning the policy succeeded on 97.0% [95.0, 99.0] of 500 held-out"
    assert headline(record([evaluated("rl", 0.97)])).startswith(after)
    only = headline(record([evaluated("sft", 0.5)]))
    assert only.startswith("After supervised training, without reinforcement learning, the policy succeeded on 50.0%")
    for rows in ([], [evaluated("baseline DWA", 0.9)]):
        assert headline(record(rows)) == "No policy was evaluated in this run of libero_pick."


def test_the_best_planner_and_stand_ins_are_told():
    rows = [evaluated("baseline DWA", 0.9), evaluated("baseline map", 0.99), evaluated("rl", 0.95)]
    told = headline(record(rows, assets="stand-in"))
    assert told.endswith("(wide, stand-in assets); the best of 2 planners, map, reached 99.0%.")
    assert headline(record(rows[1:])).endswith("; the planner map reached 99.0%.")


def test_episodes_that_cannot_be_repeated_are_no_held_out_starts():
    told = headline(record([evaluated("rl", 0.9, repeatable=False)]))
    assert "500 new episodes of libero_pick" in told


def test_only_the_distribution_of_training_is_told():
    rows = [evaluated("rl", 0.1, distribution="official"), evaluated("rl", 0.9)]
    assert "90.0%" in headline(record(rows))


def test_tasks_that_fell_from_what_learning_began_with_are_listed():
    tasks = [{"task": "a", "difference": -0.1}, {"task": "b", "difference": 0.0}, {"task": "c", "difference": 0.2}]
    fell = [{"task": "c", "difference": -0.3}]
    rows = [evaluated("sft", 0.5), evaluated("sft_control", 0.5), evaluated("rl", 0.5)]
    gains = [gained("sft", 0.0, per_task=tasks), gained("sft_control", 0.0, per_task=fell)]
    gains.append(gained("sft", 0.0, per_task=fell, distribution="official"))
    found = [(row["task"], row["distribution"]) for row in regressions(record(rows, gains))]
    assert found == [("a", "wide"), ("c", "official")]
