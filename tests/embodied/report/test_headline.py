"""The sentence that a report begins with claims no more than the figures do."""

import pytest

from embodied.report.headline import WORDS, headline, intervals, regressions


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
        "Reinforcement learning raised success on libero_pick from 57.8% to 97.2%; more supervised training reached"
        " 60.0%."
    )
    assert intervals(record(rows, [gained("sft", 0.394), gained("sft_control", 0.01)])) == (
        "97.2% [95.2, 99.2] on 500 held-out starts (wide), after 1,500 episodes; +39.4 points [+36.4, +42.4] over sft;"
        " +1.0 points [-2.0, +4.0] over sft_control, not significant. Brackets are 95% intervals."
    )


@pytest.mark.parametrize(
    ("sft", "control", "claim"),
    [
        (0.02, 0.05, "did not significantly change success on libero_pick: 57.8% before, 60.0% after; more supervised"),
        (-0.2, 0.05, "Reinforcement learning lowered success"),
        (0.2, 0.05, "more supervised training reached 60.0%; the planner map reached 60.0%."),
        (0.2, 0.01, "more supervised training reached 60.0%, not significantly less."),
        (0.2, -0.1, "more supervised training reached 60.0%, significantly more."),
    ],
)
def test_what_is_not_significant_is_not_claimed_and_headlines_are_short(sft, control, claim):
    rows = [evaluated(stage, 0.6) for stage in ("sft_control", "rl", "baseline map")]
    text = headline(record([evaluated("sft", 0.578), *rows], [gained("sft", sft), gained("sft_control", control)]))
    assert claim in text
    assert len(text.split()) <= WORDS


def test_without_something_to_compare_with():
    assert headline(record([evaluated("rl", 0.97)])) == "Reinforcement learning reached 97.0% success on libero_pick."
    assert headline(record([evaluated("sft", 0.5)])) == "Supervised training reached 50.0% success on libero_pick."
    for rows in ([], [evaluated("baseline DWA", 0.9)]):
        assert headline(record(rows)) == "No policy was evaluated in this run of libero_pick."
        assert intervals(record(rows)) == ""


def test_the_best_planner_stand_ins_and_new_episodes_are_named():
    rows = [evaluated("baseline DWA", 0.9), evaluated("baseline map", 0.99), evaluated("rl", 0.95, repeatable=False)]
    assert headline(record(rows)).endswith("; the best of 2 planners, map, reached 99.0%.")
    assert headline(record(rows[1:])).endswith("; the planner map reached 99.0%.")
    assert "500 new episodes (wide, stand-in assets)" in intervals(record(rows, assets="stand-in"))


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
