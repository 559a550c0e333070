"""Several processes learn the same as one with all environments; here they are threads."""

import copy
import threading
from dataclasses import fields, replace

import pytest
import torch

from embodied.algorithms.on_policy.ppo import PPO
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE
from tests.embodied.algorithms.on_policy.test_ppo_by_hand import make, taken_over


class Two:
    """One thread's view of a world of two threads."""

    size = 2

    def __init__(self, rank: int, shared: list, barrier: threading.Barrier) -> None:
        self.rank, self.shared, self.barrier = rank, shared, barrier

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.shared[self.rank] = values.detach().clone()
        self.barrier.wait(60)
        total = self.shared[0] + self.shared[1]
        self.barrier.wait(60)
        return total


def half(rollout: Rollout, rank: int) -> Rollout:
    """The first or second half of the environments."""
    count = rollout.done.shape[1]
    columns = slice(rank * count // 2, (rank + 1) * count // 2)
    parts = {
        field.name: value[:, columns]
        for field in fields(Rollout)
        if (value := getattr(rollout, field.name)) is not None and getattr(value, "ndim", 0) >= 2
    }
    parts["signals"] = {name: values[:, columns] for name, values in rollout.signals.items()}
    env = rollout.final_rows % count
    mine = (env >= columns.start) & (env < columns.stop)
    rows = rollout.final_rows[mine] // count * (count // 2) + env[mine] - columns.start
    last, final = rollout.last_observation[columns], rollout.final_observation[mine]
    return replace(
        rollout,
        **parts,
        last_observation=last,
        task_index=rollout.task_index[columns],
        final_rows=rows,
        final_observation=final,
    )


def averaged(learner: PPO, world: Two) -> None:
    """Averages gradients as the wrapper of modules in several processes does."""

    def average(*_: object) -> None:
        for parameter in (parameter for group in learner.parameters for parameter in group):
            if parameter.grad is not None:
                parameter.grad = world.sum(parameter.grad) / world.size

    learner.optimiser.register_step_pre_hook(average)


def together(rollout: Rollout, before: dict, **settings: float) -> dict[int, tuple]:
    """Policy, metrics and advantages of two threads that learn from half of `rollout` each."""
    shared, barrier = [None, None], threading.Barrier(2)
    found: dict[int, tuple] = {}
    policies, learners = zip(*(make(**settings)[:2] for _ in range(2)), strict=True)

    def process(rank: int) -> None:
        try:
            world, mine = Two(rank, shared, barrier), half(rollout, rank)
            averaged(learners[rank], world)
            metrics = learners[rank].update(mine, 0.0, world)
            found[rank] = policies[rank], metrics, learners[rank]._prepare(mine, world)[0]["advantage"]
        except BaseException:
            barrier.abort()
            raise

    for each in policies:
        each.load_state_dict(before)
    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {0, 1}
    return found


def led(rollout: Rollout) -> Rollout:
    """A person controls the first half of the environments, except in the last two decisions."""
    human = torch.zeros_like(rollout.executed)
    human[:-2, : human.shape[1] // 2] = True
    return replace(rollout, signals={"human": human})


@pytest.mark.parametrize("person", [False, True])
def test_two_processes_learn_what_one_with_all_environments_would(person: bool) -> None:
    settings = {"envs": 8, "epochs": 12, "learning_rate": 0.03, "target_kl": 0.01, "discount": 0.9}
    policy, learner, collector = make(**settings)
    before = copy.deepcopy(policy.state_dict())
    rollout = collector.collect(20)
    rollout = replace(rollout, reward=rollout.reward + (torch.arange(8) / 4).view(1, 8, 1) * rollout.executed)
    rollout = led(rollout) if person else rollout
    assert len(rollout.final_rows)
    expected = learner.update(rollout, 0.0)
    assert 1 < expected["minibatches"] < 12  # stopped by the KL divergence
    found = together(rollout, before, **settings)
    whole = learner._prepare(rollout, ALONE)[0]["advantage"]
    torch.testing.assert_close(torch.cat([found[rank][2] for rank in range(2)], 1), whole, rtol=1e-3, atol=1e-4)
    for rank in range(2):
        theirs, metrics, _ = found[rank]
        for name in ("reward_scale", "advantage_std", "explained_variance"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-6)
        assert metrics["minibatches"] == expected["minibatches"]
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(value, policy.state_dict()[name], rtol=1e-3, atol=1e-4)
    means = {name: sum(found[rank][1][name] for rank in range(2)) / 2 for name in ("kl", "policy_loss", "value_loss")}
    assert means == pytest.approx({name: expected[name] for name in means}, rel=1e-3, abs=1e-4)
    assert found[0][1]["kl"] != pytest.approx(found[1][1]["kl"], rel=1e-2)  # alone they stop at different steps


def test_a_process_without_own_decisions_in_a_minibatch_steps_with_the_other() -> None:
    settings = {"envs": 8, "epochs": 2, "minibatch": 4, "learning_rate": 0.03, "target_kl": 10.0}
    policy, learner, collector = make(**settings)
    before = copy.deepcopy(policy.state_dict())
    rollout = led(collector.collect(10))
    expected = learner.update(rollout, 0.0)["minibatches"]
    (one, metrics, _), (other, others, _) = together(rollout, before, **settings).values()
    assert metrics["minibatches"] == others["minibatches"] == expected
    assert 2 * 80 / 4 - 4 < expected < 2 * 80 / 4  # of a few a person made all
    for mine, theirs, whole in zip(one.parameters(), other.parameters(), policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, whole, rtol=1e-3, atol=1e-4)


def test_minibatches_that_a_person_made_everywhere_are_left_out() -> None:
    settings = {"envs": 2, "epochs": 1, "minibatch": 1}
    _, learner, collector = make(**settings)
    rollout = collector.collect(6)
    human = torch.zeros_like(rollout.executed)
    human[:4] = True
    assert learner.update(replace(rollout, signals={"human": human}), 0.0)["minibatches"] == 4


def test_a_process_whose_environments_a_person_controlled_waits_for_no_other() -> None:
    _, learner, rollout = taken_over()
    asked: list[int] = []

    class Counted:
        rank, size = 0, 2

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            asked.append(values.numel())
            return values * 0  # no process has own decisions

    assert learner.update(rollout, 0.0, Counted()) == {}
    assert len(asked) == 2  # the reward scale and the number of decisions
