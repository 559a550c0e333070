"""Collection: episodes, true final observations and initial states are correct."""

import copy
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.advantage import gae
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.policy import Decision
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Cancelled, Collector, Rollout
from embodied.rollout.starts import RetryStarts
from tests.embodied.nameless import Nameless
from tests.embodied.reach import Reach


class Constant:
    """Always commands the same velocity."""

    def __init__(self, env: Reach, action: float) -> None:
        self.contract, self.action = env.contract, action

    def act(self, observation, *, deterministic=False, generator=None):
        n = len(observation)
        actions = torch.full((n, self.contract.horizon, 1), self.action)
        return Decision(actions, TensorDict({"raw": actions}, batch_size=[n]), torch.zeros(n, 2, 1))


class FirstTwo:
    """Two environments always begin from the first two initial states."""

    def __call__(self, finished: torch.Tensor, success: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0, 1])

    def abandon(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def collect(action: float, decisions: int, starts=None):
    env = Reach(3)
    return env, Collector(env, Constant(env, action), torch.Generator(), starts).collect(decisions)


def test_next_observation_of_a_success_is_the_terminal_one() -> None:
    # starts 0: x = .3, moves -.1 a step: .2, .1 | 0 (success after 3 of 4 steps); then start 1: x = -.35
    _, rollout = collect(-0.1, 3)
    assert rollout.executed[:2, 0].tolist() == [[True, True], [True, False]]
    assert rollout.terminated[:, 0].tolist() == [False, True, False]
    torch.testing.assert_close(rollout.next_observation()["position"][1, 0], torch.zeros(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(rollout.observation["position"][2, 0], torch.tensor([-0.35]))
    assert rollout.start[:, 0].tolist() == [0, 0, 1]


def test_step_limit_truncates_with_the_true_observation() -> None:
    _, rollout = collect(0.1, 4)  # runs away; 7 steps end in the fourth chunk after one step
    assert rollout.truncated[:, 0].tolist() == [False, False, False, True]
    assert rollout.executed[3, 0].tolist() == [True, False]
    torch.testing.assert_close(rollout.next_observation()["position"][3, 0], torch.tensor([1.0]))
    assert rollout.env_steps == 21


def test_failed_starts_come_back_until_attempts_are_used_up() -> None:
    env = Reach(1, tasks=1)
    starts = RetryStarts(env.task_index, retry=1.0, attempts=2, generator=torch.Generator())
    rollout = Collector(env, Constant(env, 0.1), torch.Generator(), starts).collect(
        16
    )  # start 0 fails, odd starts succeed
    begun = rollout.start[torch.cat((torch.tensor([True]), rollout.done[:-1, 0]))].flatten().tolist()
    first = begun[0]
    failing = [2, 1] if first % 2 == 0 else [1, 2]  # attempts that even and odd starts need
    expected = [first + offset for offset in range(4) for _ in range(failing[offset % 2])]
    assert begun[: len(expected)] == expected[: len(begun)]


def test_retry_starts_continue_from_their_state() -> None:
    def run(starts, env, decisions):
        return Collector(env, Constant(env, 0.1), torch.Generator(), starts).collect(decisions).start

    def fresh(env):
        return RetryStarts(env.task_index, retry=0.5, attempts=3, generator=torch.Generator().manual_seed(0))

    env = Reach(2)
    starts = fresh(env)
    run(starts, env, 20)
    copy = fresh(env)
    copy.load_state_dict(starts.state_dict())
    copy.generator.set_state(starts.generator.get_state())
    finished, success = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    for _ in range(5):
        assert starts(finished, success).tolist() == copy(finished, success).tolist()


def test_a_saved_failure_knows_how_often_it_was_tried() -> None:
    starts = RetryStarts(torch.tensor([0]), retry=1.0, attempts=3, generator=torch.Generator())
    fresh = starts.fresh[0]
    starts.load_state_dict(starts.state_dict() | {"failed": [torch.tensor([[7, 2]])]})
    failed = torch.tensor([True]), torch.tensor([False])
    assert [int(starts(*failed)) for _ in range(2)] == [7, fresh]  # its third attempt was the last one


def test_the_success_of_first_attempts_counts_no_retries() -> None:
    env = Reach(1, tasks=1)
    starts = RetryStarts(env.task_index, retry=1.0, attempts=2, generator=torch.Generator())
    done = torch.tensor([True])
    starts(done, torch.tensor([False]))  # nothing has run yet
    assert starts.metrics() == {}
    for success in (False, True, True):  # a first attempt, its retry, another first attempt
        starts(done, torch.tensor([success]))
    assert starts.metrics() == {"first_attempts_success": 0.5}


def test_the_first_to_end_do_not_tell_how_many_succeed() -> None:
    def fresh() -> RetryStarts:
        return RetryStarts(Reach(3).task_index, retry=0.0, attempts=1, generator=torch.Generator())

    starts, ended = fresh(), torch.tensor([True, True, True])
    starts(ended, ~ended)
    for _ in range(2):  # one environment succeeds, again and again, while the others still run
        starts(torch.tensor([True, False, False]), torch.tensor([True, False, False]))
        assert starts.metrics() == {}
    copied = fresh()
    copied.load_state_dict(starts.state_dict())
    for each in (starts, copied):
        each(torch.tensor([False, True, True]), torch.tensor([False, False, False]))
        assert each.metrics() == {"first_attempts_success": 0.5}


def test_returns_and_steps_of_episodes_go_on_across_rollouts() -> None:
    # from .3 by -.1 a step, two a decision: |x| < .1 in the third step, with reward 1; from -.35 away, till the limit
    def run(env: Reach) -> Collector:
        return Collector(env, Constant(env, -0.1), torch.Generator(), FirstTwo())

    collector = run(Reach(2, tasks=1))
    first = collector.collect(1)
    assert first.ended() == {}
    resumed = run(Reach(2, tasks=1))
    resumed.load_state_dict(copy.deepcopy(collector.state_dict()))
    for each in (collector, resumed):
        rollout = each.collect(3)
        assert rollout.episode_return.tolist() == [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        assert rollout.episode_steps.tolist() == [[3.0, 4.0], [2.0, 6.0], [3.0, 7.0]]
        ended = {"success": 2 / 3, "episode_return": 2 / 3, "episode_steps": 13 / 3}
        assert rollout.ended() == pytest.approx(ended)


def test_first_decisions_are_of_many_episodes_and_actions_cover_the_limits() -> None:
    env = Reach(8)
    observation, actions = first_decisions(env, torch.Generator().manual_seed(0), 300)
    assert len(observation) == len(actions) == 5 * 8 * 8  # episodes, decisions, environments
    assert env.start.tolist() == [4] * 8
    assert observation["position"][:8].abs().min() >= 0.3 - 1e-6  # where episodes begin
    assert observation["position"].abs().min() < 0.3  # and the observations after them
    assert actions.abs().max() <= 0.25
    assert actions.std() == pytest.approx(0.5 / 12**0.5, rel=0.1)


class Buffered(Reach):
    """Returns the same tensors every time, as simulators on GPUs do."""

    buffer: TensorDict | None = None

    def _observation(self) -> TensorDict:
        seen = super()._observation()
        self.buffer = seen if self.buffer is None else self.buffer
        for key, value in seen.items():
            self.buffer[key].copy_(value)
        return self.buffer


def test_a_simulator_that_writes_over_its_observations_gives_the_same_rollouts() -> None:
    found = []
    for kind in (Reach, Buffered):
        env = kind(3)
        collector = Collector(env, Constant(env, -0.1), torch.Generator())
        found.append([collector.collect(3), collector.collect(3)])
    for copied, buffered in zip(*found, strict=True):
        for name in ("observation", "last_observation"):
            assert torch.equal(getattr(copied, name)["position"], getattr(buffered, name)["position"]), name
        assert torch.equal(copied.next_observation()["position"], buffered.next_observation()["position"])


def test_first_decisions_of_a_simulator_that_writes_over_its_observations() -> None:
    copied, buffered = (first_decisions(kind(3), torch.Generator().manual_seed(0), 50)[0] for kind in (Reach, Buffered))
    assert torch.equal(copied["position"], buffered["position"])


def test_a_state_without_initial_states_says_how_to_go_on() -> None:
    env = Reach(3)
    starts = RetryStarts(env.task_index, retry=1.0, attempts=3, generator=torch.Generator())
    collector = Collector(env, Constant(env, 0.1), torch.Generator(), starts)
    state = collector.state_dict()
    del state["starts"]
    with pytest.raises(UserError, match="earlier release"):
        collector.load_state_dict(state)


def test_abandoned_episodes_did_not_fail() -> None:
    env = Reach(3)
    starts = RetryStarts(env.task_index, retry=1.0, attempts=3, generator=torch.Generator())
    collector = Collector(env, Constant(env, 0.1), torch.Generator(), starts)
    collector.collect(2)
    assert not collector.finished.any()
    collector.abandon()
    collector.collect(1)
    assert not len(starts.firsts)
    assert not any(map(len, starts.failed))


def test_a_resumed_collector_knows_how_many_updates_its_policy_has_had() -> None:
    def run() -> Collector:
        env = Reach(2)
        return Collector(env, Constant(env, 0.1), torch.Generator())

    collector, resumed = run(), run()
    collector.version = 5
    collector.collect(1)
    resumed.load_state_dict(collector.state_dict())
    assert resumed.collect(1).policy_version == 5


def test_put_back_where_the_simulator_cannot_be_every_episode_begins_anew() -> None:
    env = Nameless(3)
    collector = Collector(env, Constant(env, 0.01), torch.Generator())
    collector.collect(1)
    state = collector.state_dict()
    collector.collect(1)
    assert len(env.begun) == 3  # all still run
    collector.load_state_dict(state)
    rollout = collector.collect(1)
    assert [row for row, _ in env.begun[3:]] == [0, 1, 2]
    assert rollout.episode_steps.tolist() == [[2.0, 2.0, 2.0]]


class Diverging(Reach):
    """Environment 0 diverges in its second chunk, and every control step costs 1."""

    def step(self, actions: torch.Tensor) -> Transition:
        found = super().step(actions)
        broken = (self.steps > 2) & (torch.arange(self.num_envs) == 0)
        self.frozen |= broken
        return replace(
            found,
            reward=-found.executed.float(),
            terminated=found.terminated | broken,
            truncated=found.truncated & ~broken,
            events={"diverged": broken},
        )


def test_a_decision_that_the_simulation_did_not_survive_is_not_the_policys() -> None:
    env = Diverging(2)
    rollout = Collector(env, Constant(env, 0.01), torch.Generator()).collect(5)
    assert rollout.odd_episodes()["diverged"] == 2
    diverged = rollout.events["diverged"]
    assert diverged.tolist() == [[False, False], [True, False], [False, False], [True, False], [False] * 2]
    assert torch.equal(rollout.own, ~diverged)
    assert rollout.cut[:, 0].tolist() == [True, False, True, False, False]  # the value before it stands for the rest
    assert rollout.done[:, 0].tolist() == [False, True, False, True, False]
    assert rollout.ended()["episode_return"] == -7.0  # that of environment 1: the others are no better


def test_only_decisions_that_were_simulated_get_advantages() -> None:
    value = torch.tensor([[-5.0], [-5.0]])
    reward, executed = -torch.ones(2, 1, 1), torch.ones(2, 1, 1, dtype=torch.bool)
    none = torch.zeros(2, 1, dtype=torch.bool)
    ends = torch.tensor([[False], [True]])
    rollout = Rollout(
        TensorDict({}, [2, 1]),
        TensorDict({}, [1]),
        torch.zeros(2, 1, 1, 1),
        TensorDict({}, [2, 1]),
        torch.zeros(2, 1, 1),
        reward,
        executed,
        ends,
        none,
        none,
        torch.zeros(1),
        events={"diverged": ends},
    )
    seen = (reward, executed, ends, rollout.cut, value, torch.full((2, 1), -5.0))
    advantage, _ = gae(*seen, discount=1.0, gae_lambda=1.0)
    assert float(advantage[0]) == -1.0  # -1 - 5 + 5: not the 5 that an early end would save
    assert rollout.own.flatten().tolist() == [True, False]


def test_decisions_before_an_episode_that_does_not_begin_are_kept() -> None:
    """As of a robot whose learner orders something else while a person puts the scene back."""
    env = Reach(1, step_limit=3)  # of two decisions
    collector = Collector(env, Constant(env, 0.0), torch.Generator())
    begin = env.reset

    def refuse(*arguments: object, **options: object) -> TensorDict:
        raise Cancelled

    def begin_once(*arguments: torch.Tensor) -> TensorDict:
        env.reset = refuse
        return begin(*arguments)

    env.reset = begin_once
    rollout = collector.collect(5)
    assert rollout.executed.sum((1, 2)).tolist() == [2, 1]
    assert rollout.truncated.squeeze(1).tolist() == [False, True]
    assert torch.equal(rollout.next_observation()[-1]["position"], rollout.last_observation["position"])
    with pytest.raises(Cancelled):
        collector.collect(5)
