"""Chunks begin late, by hand; what runs meanwhile is observed, restored, and the same in films and demonstrations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import ACTION_PREFIX, TensorSpec
from embodied.data.delayed import with_action_prefix
from embodied.data.episodes import Episodes
from embodied.environment import Transition
from embodied.environments.delay import DelayEnvironment, DelayTask, with_delay
from embodied.errors import UserError
from embodied.execution.chunking import Execution
from embodied.execution.delay import DelayedPolicy
from embodied.policy import Decision
from embodied.rollout.memory import Memory
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector
from embodied.saving.tree import load_tree, save_tree
from embodied.task import Task
from policies.flow import FlowConfig
from policies.recurrent import RecurrentConfig
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach


class Logged(Reach):
    """Reach that logs the actions of its first environment."""

    def __init__(self, num_envs: int = 2, executed: int = 4, horizon: int = 4, step_limit: int = 100) -> None:
        super().__init__(num_envs, executed=executed, horizon=horizon, step_limit=step_limit)
        self.log: list[float] = []

    def step(self, actions: torch.Tensor) -> Transition:
        transition = super().step(actions)
        self.log += actions[0, transition.executed[0], 0].tolist()
        return transition


def numbered(begin: int, count: int, num_envs: int = 2) -> torch.Tensor:
    """Actions 0.001 begin, 0.001 (begin + 1), ... [N, count, 1], which reach nothing."""
    return 0.001 * torch.arange(float(begin), begin + count).view(1, count, 1).expand(num_envs, -1, -1)


def thousandths(values: torch.Tensor | list[float]) -> list[int]:
    return [round(1000 * value) for value in torch.as_tensor(values).flatten().tolist()]


def test_a_chunk_begins_two_of_four_steps_late_after_the_end_of_the_one_before() -> None:
    env = DelayEnvironment(Logged(), 2)
    assert env.contract.delay == 2
    assert env.contract.observation[ACTION_PREFIX] == TensorSpec((2, 1), low=(-0.25,), high=(0.25,))
    observations = [env.reset(), *(env.step(numbered(10 * chunk + 1, 4)).observation for chunk in range(3))]
    assert thousandths(env.env.log) == [0, 0, 1, 2, 3, 4, 11, 12, 13, 14, 21, 22]
    prefixes = [thousandths(each[ACTION_PREFIX][0]) for each in observations]
    assert prefixes == [[0, 0], [3, 4], [13, 14], [23, 24]]


def test_chunks_may_be_shorter_than_the_delay() -> None:
    env = DelayEnvironment(Logged(executed=1, horizon=1), 3)
    env.reset()
    seen = [env.step(numbered(number, 1)).observation[ACTION_PREFIX][0] for number in range(1, 6)]
    assert thousandths(env.env.log) == [0, 0, 0, 1, 2]
    assert [thousandths(each) for each in seen] == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_an_episode_begins_without_the_actions_of_the_one_before() -> None:
    env = DelayEnvironment(Logged(), 2)
    env.reset()
    env.step(numbered(1, 4))
    observation = env.reset(torch.tensor([False, True]))
    assert [thousandths(row) for row in observation[ACTION_PREFIX]] == [[3, 4], [0, 0]]
    assert [thousandths(row) for row in env.reset()[ACTION_PREFIX]] == [[0, 0], [0, 0]]


def test_rewards_and_ends_are_those_of_executed_steps() -> None:
    env = DelayEnvironment(Logged(step_limit=6), 2)
    env.reset(starts=torch.zeros(2, dtype=torch.long))  # at 0.3: -0.25 reaches |x| < 0.1
    moves = torch.tensor([0.01, -0.25, 0.0, 0.0]).view(1, 4, 1).expand(2, -1, -1)
    transition = env.step(moves)
    assert transition.reward[0].tolist() == [0, 0, 0, 1]
    assert transition.terminated.all()


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    stayed, resumed = DelayEnvironment(Logged(), 2), DelayEnvironment(Logged(), 2)
    stayed.reset()
    stayed.step(numbered(1, 4))
    save_tree(tmp_path / "state", stayed.state_dict())
    observation = resumed.load_state_dict(load_tree(tmp_path / "state"))
    assert thousandths(observation[ACTION_PREFIX][0]) == [3, 4]
    for chunk in (numbered(11, 4), numbered(21, 4)):
        here, there = stayed.step(chunk).observation, resumed.step(chunk).observation
        assert (here == there).all()
    assert stayed.env.log[4:] == resumed.env.log


def test_a_collector_goes_on_with_the_same_rollouts(tmp_path: Path) -> None:
    def collector() -> Collector:
        env = DelayEnvironment(Reach(4, executed=4, horizon=4, step_limit=10), 2)
        torch.manual_seed(0)
        policy = FlowConfig(width=8, hidden=8, denoising_steps=2).build(env.contract)
        policy.fit(*first_decisions(DelayEnvironment(Reach(4, executed=4, horizon=4), 2), torch.Generator(), 64))
        return Collector(env, policy, torch.Generator().manual_seed(1))

    stayed, resumed = collector(), collector()
    stayed.collect(3)  # ends within an episode
    save_tree(tmp_path / "state", stayed.state_dict())
    resumed.load_state_dict(load_tree(tmp_path / "state"))
    here, there = stayed.collect(5), resumed.collect(5)
    assert here.done.any()
    assert here.observation[ACTION_PREFIX].any()
    for name in ("observation", "last_observation", "sample"):
        assert (getattr(here, name) == getattr(there, name)).all()
    assert torch.equal(here.log_prob, there.log_prob)
    # between decisions of an episode, the prefix is the end of the chunk before
    goes_on = ~here.done[:-1]
    assert torch.equal(here.observation[ACTION_PREFIX][1:][goes_on], here.actions[:-1, :, 2:][goes_on])


def test_gradients_pass_through_what_waits() -> None:
    env = DelayEnvironment(SmoothReach(2), 1)
    env.reset()
    first = torch.full((2, env.contract.executed, 1), 0.01, requires_grad=True)
    env.step(first)
    (gradient,) = torch.autograd.grad(env.step(torch.zeros_like(first)).reward.sum(), first)
    assert gradient[:, -1].abs().min() > 0.0
    env.step(first)
    env.detach()
    assert not env.prefix.requires_grad


class Limited(Logged):
    """Logged, whose guard executes half of each action."""

    def step(self, actions: torch.Tensor) -> Transition:
        return replace(super().step(0.5 * actions), actions=0.5 * actions)


def test_what_a_guard_executes_is_stored_where_it_was_decided() -> None:
    env = DelayEnvironment(Limited(), 1)
    env.reset()
    actions = env.step(numbered(2, 4)).actions
    assert actions is not None
    # 2, 3 and 4 were executed by half; 5 has yet to be
    assert thousandths(actions[0]) == [1, 2, 2, 5]


def test_limits_without_zero_are_refused() -> None:
    env = Reach(1)
    env.contract = replace(env.contract, action=TensorSpec((1,), low=(0.1,), high=(0.2,)))
    with pytest.raises(UserError, match=r"commands of zero, .* use delay=0"):
        DelayEnvironment(env, 1)


class Numbers:
    """Numbered actions, 100 n + i of chunk n, which its memory counts; it notes the prefixes that it reads."""

    def __init__(self, horizon: int = 6, executed: int = 4, delay: int = 2) -> None:
        self.contract = Reach(1, horizon=horizon, executed=executed).contract.delayed(delay)
        self.prefixes: list[list[int]] = []

    def initial_memory(self, count: int) -> torch.Tensor:
        return torch.ones(count, 1)

    def act(self, observation, *, deterministic=False, generator=None):
        if ACTION_PREFIX in observation:
            self.prefixes.append(thousandths(observation[ACTION_PREFIX][0]))
        number = observation["memory"]
        actions = 0.001 * (10.0 * number + torch.arange(float(self.contract.horizon))).unsqueeze(-1)
        return Decision(actions, TensorDict({"memory": number + 1}, [len(number)]), torch.zeros(len(number), 1, 1))


def executed(env: Logged | DelayEnvironment, policy: object, decisions: int) -> list[float]:
    log = env.env.log if isinstance(env, DelayEnvironment) else env.log
    memory, observation = Memory(policy, env.num_envs), env.reset()
    for _ in range(decisions):
        decision = policy.act(memory.with_observation(observation))
        memory.keep([decision])
        observation = env.step(decision.actions[:, : env.contract.executed]).observation
    return thousandths(log)


class Filmed(Task):
    """A task whose film shows its first environment."""

    name = "logged"
    distributions = ("all",)

    def contract(self, distribution: str):
        return Reach(1, horizon=6, executed=4).contract

    def video(self, path, policies, device, distribution=None, first=0) -> None:
        self.ran = {caption: executed(Logged(horizon=6), policy, 4) for caption, policy in policies.items()}


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_films_show_what_environments_execute(delay: int) -> None:
    task, policy, unaware = Filmed(), Numbers(delay=delay), Numbers(delay=0)
    DelayTask(task, delay).video(Path(), {"aware": policy, "unaware": unaware}, "cpu")
    filmed, policy.prefixes = policy.prefixes, []
    expected = executed(DelayEnvironment(Logged(horizon=6), delay), policy, 4)
    assert task.ran == {"aware": expected, "unaware": expected}
    assert filmed == policy.prefixes


def test_a_recurrent_policy_has_its_memory_in_films() -> None:
    env = DelayEnvironment(Logged(horizon=6), 2)
    policy = RecurrentConfig(memory=4).build(env.contract)
    policy.fit(env.reset(), torch.zeros(2, 6, 1))
    act = policy.act
    policy.act = lambda observation, **options: act(observation, deterministic=True)
    task = Filmed()
    DelayTask(task, 2).video(Path(), {"policy": policy}, "cpu")
    assert task.ran["policy"] == executed(DelayEnvironment(Logged(horizon=6), 2), policy, 4)
    assert len(task.ran["policy"]) == 16


def test_a_policy_without_delay_executes_as_a_naive_robot_does() -> None:
    unaware = Numbers(delay=0)
    late = executed(DelayEnvironment(Logged(horizon=6), 2), unaware, 4)
    naive = executed(Logged(horizon=6), DelayedPolicy(unaware, 0.2, Execution.NAIVE), 4)
    # an episode begins with two commands of zero here, with the first chunk there
    assert late[6:] == naive[6:] == [20, 21, 22, 23, 30, 31, 32, 33, 40, 41]


def test_recorded_actions_are_where_they_have_to_be_decided() -> None:
    def episode(values: list[float], reward: list[float]) -> Episodes:
        steps = torch.tensor(values)
        return Episodes.of(
            TensorDict({"x": steps}, [len(steps)]),
            steps.unsqueeze(1),
            reward=torch.tensor(reward),
            human=steps == 13.0,
            final_observation=TensorDict({"x": torch.zeros(())}, []),
        )

    late = with_action_prefix(
        Episodes.join([episode([1.0, 2.0, 3.0], [0, 0, 1]), episode([11.0, 12, 13, 14], [0] * 4)]), 2
    )
    assert late.actions.flatten().tolist() == [3, 3, 3, 13, 14, 14, 14]
    assert late.observation[ACTION_PREFIX].squeeze(-1).tolist() == [
        [1, 2],
        [2, 3],
        [3, 3],
        [11, 12],
        [12, 13],
        [13, 14],
        [14, 14],
    ]
    assert late.final_observation[ACTION_PREFIX].squeeze(-1).tolist() == [[3, 3], [14, 14]]
    assert late.reward.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert late.human.tolist() == [False] * 3 + [True] + [False] * 3
    assert late.observation["x"].tolist() == [1, 2, 3, 11, 12, 13, 14]
    unknown = Episodes.of(TensorDict({}, [2]), torch.tensor([[1.0], [torch.nan]]))
    with pytest.raises(UserError, match=r"without actions .* delay=0"):
        with_action_prefix(unknown, 1)


def test_without_a_delay_a_task_stays_as_it_is() -> None:
    task = Filmed()
    assert with_delay(task, 0) is task
    assert with_delay(task, 2).contract("all").delay == 2


def test_a_contract_with_another_delay_is_refused() -> None:
    plain = Reach(1).contract
    assert plain.delayed(3).delayed(0) == plain
    assert plain.differences(plain.delayed(2)) == []  # whoever knows of no delay
    for provider, number in ((plain, 0), (plain.delayed(3), 3)):
        with pytest.raises(UserError, match=f"delay: expected 2 control steps, got {number}"):
            plain.delayed(2).bind(provider)
    assert type(plain.delayed(2)).from_dict(plain.delayed(2).to_dict()).delay == 2
