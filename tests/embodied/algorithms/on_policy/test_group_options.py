"""GRPO's options of SimpleVLA-RL, RIPT-VLA and others: groups drawn again, baselines, episodes across updates."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algorithms.on_policy.grpo import GRPO, GRPOConfig, compared, lengthened
from embodied.errors import UserError
from embodied.rollout.groups import WholeRollout
from embodied.rollout.rollout import Rollout
from embodied.saving.tree import load_tree, save_tree
from embodied.training.own_state import load, load_moved, own_state
from embodied.world import ALONE
from policies.recurrent import RecurrentConfig
from tests.embodied.algorithms.on_policy.test_grpo import make, outcomes, whole
from tests.embodied.reach import Reach


def test_leaving_itself_out_an_episode_is_compared_with_the_others() -> None:
    """Group 0: 1, 0, 0, 1 of one, one, two and two decisions; group 1: 0, 1; group 2 is one alone."""
    outcome = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 7.0])
    episodes = whole([1, 1, 2, 2, 1, 1, 1], [0, 0, 0, 0, 1, 1, 2])
    found = compared(outcome, episodes, of_running=False, by_deviation=False, leave_one_out=True).advantage
    third = 1 / 3
    first = [1 - third, -2 * third, -2 * third, 1 - third, -1.0, 1.0, 0.0]
    torch.testing.assert_close(found, torch.tensor([first, [0.0, 0.0, -2 * third, 1 - third, 0.0, 0.0, 0.0]]))
    running = compared(outcome, episodes, of_running=True, by_deviation=False, leave_one_out=True).advantage
    # only two of group 0 have a second decision: each is compared with the other
    torch.testing.assert_close(running, torch.tensor([first, [0.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0]]))


HALF, NONE = [env % 4 < 2 for env in range(16)], [False] * 16
"""Successes of sixteen environments, four groups of four: of half of each group; of none."""


def test_an_update_waits_for_enough_groups_that_differ() -> None:
    policy, learner, collector = make(min_groups=5, of_running=False)
    before = copy.deepcopy(policy.state_dict())
    uniform, mixed = outcomes(collector.collect(4), NONE), outcomes(collector.collect(4), HALF)
    assert learner.update(uniform, 0.0)["waiting_groups"] == 0.0
    assert learner.update(mixed, 0.0)["waiting_groups"] == 4.0
    assert learner.gradient_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    metrics = learner.update(mixed, 0.0)
    assert metrics["waiting_groups"] == 0.0
    assert learner.gradient_steps == 1
    # the same step as from both rollouts at once: their decisions are there twice
    other_policy, other, _ = make(of_running=False)
    other_policy.load_state_dict(before)
    other.update(mixed, 0.0)
    for ours, theirs in zip(policy.parameters(), other_policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)
    assert learner.update(mixed, 0.0)["waiting_groups"] == 4.0  # those that were used have gone


def test_only_environments_of_groups_that_differ_wait() -> None:
    """Groups that are left out may be collected for long: they take no memory."""
    _, learner, collector = make(min_groups=99, of_running=False)
    for _ in range(3):
        learner.update(outcomes(collector.collect(4), [True, *NONE[1:]]), 0.0)  # of the group 0, 2, 4, 6
    assert learner.waiting_groups == 3
    assert learner.waiting.batch_size == (4, 3 * 4)
    assert learner.waiting["own"].any(0).all()


def test_a_long_wait_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    _, learner, collector = make(min_groups=4)
    none = outcomes(collector.collect(4), NONE)
    for _ in range(19):
        learner.update(none, 0.0)
    assert not caplog.messages
    for _ in range(21):
        learner.update(none, 0.0)
    assert [each.split(":")[0] for each in caplog.messages] == [f"no update for {n} iterations" for n in (20, 40)]
    assert "0 groups" in caplog.messages[0]
    assert "algorithm.min_groups=4" in caplog.messages[0]
    learner.update(outcomes(collector.collect(4), HALF), 0.0)
    assert learner.waited == 0


@pytest.mark.parametrize("min_groups", [0, 4])
def test_a_run_that_never_has_a_group_to_use_ends_in_a_line(min_groups: int) -> None:
    _, learner, collector = make(min_groups=min_groups)
    none = outcomes(collector.collect(4), NONE)
    for _ in range(99):
        learner.update(none, 0.0)
    assert learner.waiting is None  # nothing is kept of such rollouts
    with pytest.raises(UserError, match="none of the groups of 100 iterations has successes and failures") as info:
        learner.update(none, 0.0)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("min_groups", [0, 5])
def test_a_run_goes_on_where_all_groups_have_come_to_succeed(min_groups: int) -> None:
    _, learner, collector = make(min_groups=min_groups)
    learner.update(outcomes(collector.collect(4), HALF), 0.0)
    same = outcomes(collector.collect(4), [True] * 16)
    for _ in range(110):
        learner.update(same, 0.0)


def test_shorter_rollouts_are_lengthened_by_decisions_that_do_not_count() -> None:
    _, learner, collector = make()
    batch, _ = learner._prepare(outcomes(collector.collect(4), HALF), ALONE)
    longer = lengthened(batch, 6)
    assert longer.batch_size == (6, 16)
    assert torch.equal(longer["own"].sum(), batch["own"].sum())
    assert lengthened(batch, 3) is batch


def resumed(tmp_path: Path, iterations: int, decisions: int, **settings: Any) -> tuple[list[dict], list[dict]]:
    """Metrics of the iterations after a pause, of a learner that goes on and of one that was loaded from files."""
    policy, learner, collector = make(**settings)
    for _ in range(iterations):
        learner.update(collector.collect(decisions), 0.0)
    save_tree(tmp_path / "learner", learner.state_dict())
    save_tree(tmp_path / "collector", collector.state_dict())
    other_policy, other, other_collector = make(seed=1, **settings)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(load_tree(tmp_path / "learner"))
    other_collector.load_state_dict(load_tree(tmp_path / "collector"))
    found = [
        [each.update(gather.collect(decisions), 0.0) for _ in range(3)]
        for each, gather in ((learner, collector), (other, other_collector))
    ]
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)
    return found[0], found[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"min_groups": 7},
        {"partial": True},
        {"partial": True, "min_groups": 3},
        {"partial": True, "patience": 1.0},
        {"patience": 1.0, "rollout_length": 12},
        {"partial": True, "min_groups": 5, "policy": RecurrentConfig(hidden=[8], encoder=8, memory=8, initial_std=0.5)},
    ],
    ids=["groups", "partial", "partial groups", "early stop across updates", "early stop", "with memory"],
)
def test_what_waits_goes_on_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    decisions = settings.get("rollout_length", 3)
    ours, theirs = resumed(tmp_path, 4, decisions, **{"minibatch": 20, "epochs": 2, **settings})
    assert ours == theirs
    assert any("kl" in metrics for metrics in ours)


@pytest.mark.parametrize("settings", [{"partial": True}, {"min_groups": 99}], ids=["partial", "groups"])
def test_what_waits_belongs_to_its_process(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The second of two processes goes on with its own decisions; on another number of processes none wait."""
    runs = [make(seed=seed, **settings) for seed in range(3)]
    for (_, learner, collector), decisions in zip(runs[:2], (3, 2), strict=True):
        learner.update(outcomes(collector.collect(decisions), HALF), 0.0)
    (_, first, _), (_, second, collector), (_, other, _) = runs
    save_tree(tmp_path / "first", first.state_dict())
    save_tree(tmp_path / "own", own_state({"collector": collector, "learner": second}))
    load(other, load_tree(tmp_path / "first"), load_tree(tmp_path / "own"))
    for part in ("waiting", "open"):
        ours, theirs = getattr(other, part), getattr(second, part)
        if part == "open":
            ours, theirs = (each.rollout and each.rollout.log_prob for each in (ours, theirs))
        assert (ours is None) == (theirs is None)
        assert ours is None or bool((ours == theirs).all())
    assert (other.waiting is not None) == ("min_groups" in settings)
    assert (other.open.rollout is not None) == ("partial" in settings)
    load_moved(other, load_tree(tmp_path / "first"))
    assert (other.waiting, other.waiting_groups, other.open.rollout) == (None, 0, None)


def test_with_partial_rollouts_a_group_is_used_once_when_all_of_it_has_ended() -> None:
    """Every executed decision of complete groups is used exactly once, whichever rollout it is from."""
    _, learner, collector = make(12, partial=True, learning_rate=0.0, lowest=0.0, highest=1.0)
    used, groups, ended = 0, 0.0, 0
    for _ in range(30):
        rollout = collector.collect(3)
        assert rollout.executed.any(-1).all()  # no environment waits
        ended += int(rollout.done.sum())
        batch, metrics = learner._prepare(rollout, ALONE)
        used += int(batch["own"].sum())
        groups += metrics["groups"]
        joined = learner.open.rollout
        assert joined is None or len(joined.done) <= 2 * 4 + 3  # an episode has at most four decisions
    starts = learner.starts
    assert groups * 4 <= ended
    # complete are all groups but those that environments are still in
    assert ended - groups * 4 <= 12 + 2 * 4
    assert int(starts.episode_counts.sum()) == ended + int((~collector.finished).sum())
    assert used > 0


def test_partial_groups_have_the_advantages_of_whole_ones() -> None:
    """Rollouts of one decision, put together, are learned from as a rollout of all of them."""
    _, learner, collector = make(8, partial=True, learning_rate=0.0, lowest=0.0, highest=1.0)
    _, other, other_collector = make(8, partial=True, learning_rate=0.0, lowest=0.0, highest=1.0)
    batch, metrics = other._prepare(other_collector.collect(9), ALONE)
    pieces = [learner._prepare(collector.collect(1), ALONE) for _ in range(9)]
    assert sum(each["groups"] for _, each in pieces) == metrics["groups"] > 2
    for name in ("advantage", "log_prob"):
        ours = torch.cat([piece[piece["own"]][name] for piece, _ in pieces]).flatten().sort().values
        torch.testing.assert_close(ours, batch[batch["own"]][name].flatten().sort().values)


def test_what_waited_is_dropped_when_running_episodes_are() -> None:
    """An evaluation in the same simulator abandons episodes: no decision before it meets one after it."""
    _, learner, collector = make(8, partial=True, learning_rate=0.0)
    learner.update(collector.collect(2), 0.0)
    assert learner.open.rollout is not None
    collector.abandon()
    learner.update(rollout := collector.collect(2), 0.0)
    assert len(learner.open.rollout.done) == 2
    assert torch.equal(learner.open.rollout.start, rollout.start)


def test_a_hopeless_episode_is_a_failure_that_ends_early() -> None:
    _, learner, collector = make(16, patience=1.0)
    collector.patience.lengths = [[1, 2] * 5, [3] * 9]  # a tenth success of the second task is missing
    rollout = collector.collect(4)
    episodes = WholeRollout.of(rollout)
    lengths = torch.bincount(episodes.episode[episodes.episode >= 0])
    first = episodes.task == 0
    assert lengths[first].max() == 2
    assert lengths[~first].max() == 4
    stopped = rollout.events["stopped"]
    assert stopped.any()
    assert (rollout.truncated & ~rollout.success)[stopped].all()
    assert not stopped[:, 1::2].any()
    _, metrics = learner._prepare(rollout, ALONE)
    assert metrics["groups"] == 4.0


def test_a_rollout_ends_once_all_episodes_have() -> None:
    _, _, collector = make(16, patience=1.0)
    collector.patience.lengths = [[1] * 10, [2] * 10]
    rollout = collector.collect(4)
    assert len(rollout.done) == 2
    assert (rollout.done.sum(0) == 1).all()
    assert rollout.observation.batch_size == (2, 16)


def rates_of(settings: dict[str, Any], iterations: int, decisions: int) -> tuple[list[float], GRPO]:
    _, learner, collector = make(64, **settings)
    rates = []
    for _ in range(iterations):
        rollout: Rollout = collector.collect(decisions)
        rates.append(float(rollout.success.sum() / rollout.done.sum().clamp_min(1)))
        learner.update(rollout, 0.0)
    return rates, learner


@pytest.mark.parametrize(
    "options",
    [
        {"min_groups": 12, "of_running": False},
        {"min_groups": 12, "leave_one_out": True, "by_deviation": False, "of_running": False},
        {"partial": True},
        {"partial": True, "patience": 1.5},
    ],
    ids=["SimpleVLA-RL", "RIPT-VLA", "partial rollouts", "early stop"],
)
def test_learns_to_reach(options: dict[str, Any]) -> None:
    common = {"group": 8, "minibatch": 256, "epochs": 4, "learning_rate": 3e-3, "target_kl": 1.0}
    rates, learner = rates_of(common | options, 40, 8)
    assert sum(rates[:2]) / 2 < 0.6
    assert sum(rates[-3:]) / 3 > 0.9
    if options.get("min_groups"):
        assert learner.iterations < 40  # uniform groups were drawn again, more of them the better it is


def test_remote_environments_are_refused_in_one_line() -> None:
    env = Reach(8)
    for option, value in (("partial", True), ("patience", 1.5)):
        with pytest.raises(UserError, match=rf"algorithm\.{option} needs environments in the learner's process"):
            GRPOConfig(**{option: value}).remote_starts(env, torch.Generator())
    assert GRPOConfig(min_groups=4).remote_starts(env, torch.Generator()).group == 8
    with pytest.raises(UserError, match="patience"):
        GRPOConfig(patience=0.5)
