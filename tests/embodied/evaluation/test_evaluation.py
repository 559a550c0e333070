"""Success rates and intervals are correct and repeatable."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract, TensorSpec
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.evaluation.evaluation import Z95, EvaluationResult, _independent_gain, _with_worst, evaluate, wilson
from embodied.evaluation.in_training import odd_episodes
from embodied.policy import Decision
from tests.embodied.nameless import Nameless
from tests.embodied.rollout.test_rollout import Constant

STEP_LIMIT = 60


class ChaoticEnvironment:
    """Doubles its state in every step, so that an action's last bit decides whether an episode succeeds."""

    def __init__(self, num_envs: int, tasks: int = 3, num_starts: int | None = None) -> None:
        self.num_starts = num_starts
        self.contract = Contract({"x": TensorSpec((2,))}, TensorSpec((1,)), control_dt_s=0.1, horizon=4, executed=2)
        self.num_envs, self.device, self.step_limit = num_envs, torch.device("cpu"), STEP_LIMIT
        self.task_names = self.instructions = tuple(f"task {index}" for index in range(tasks))
        self.task_index = torch.arange(num_envs) % tasks
        self.start = torch.full((num_envs,), -1)
        self.steps = torch.zeros(num_envs, dtype=torch.int64)
        self.x = torch.zeros(num_envs, 2, dtype=torch.float64)
        self.frozen = torch.zeros(num_envs, dtype=torch.bool)
        self.episodes: list[tuple[int, int]] = []

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        assert starts is not None
        for row in range(self.num_envs) if mask is None else mask.nonzero().squeeze(1).tolist():
            assert mask is None or self.frozen[row], "only finished episodes are replaced"
            self.start[row], self.steps[row], self.frozen[row] = starts[row], 0, False
            state = [self.task_index[row] + 0.3, starts[row] + 0.7]
            self.x[row] = torch.tensor(state, dtype=torch.float64).sin().abs()
            self.episodes.append((int(self.task_index[row]), int(starts[row])))
        return self._observation()

    @property
    def counted(self) -> list[tuple[int, int]]:
        """Tasks and starts of the episodes without those of the last reset, which only checks repeatability."""
        return self.episodes[: -self.num_envs]

    def close(self) -> None: ...

    def _observation(self) -> TensorDict:
        return TensorDict({"x": self.x.float()}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> Transition:
        assert actions.shape == (self.num_envs, 2, 1)
        live = ~self.frozen
        executed = live.unsqueeze(1).expand(-1, 2)
        for action in actions.unbind(1):
            self.x[live] = (2 * self.x[live] + action.double()[live]).frac().abs()
            self.steps[live] += 1
        length = 10 + 10 * (self.start % 6)
        truncated = live & (self.steps >= length)
        success = truncated & (self.x[:, 0] > 0.5)
        self.frozen |= truncated
        reward = torch.zeros(self.num_envs, 2)
        return Transition(self._observation(), reward, executed, success, truncated & ~success, success)


class NetworkPolicy(nn.Module):
    """A network large enough that its rounding depends on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.contract = ChaoticEnvironment(1).contract
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))

    @torch.no_grad()
    def act(self, observation: TensorDict, *, deterministic: bool = False, generator=None) -> Decision:
        assert deterministic
        actions = self.layers(observation["x"]).unsqueeze(-1)
        return Decision(actions, TensorDict({}, batch_size=[len(actions)]), torch.zeros(len(actions), 1, 1))


def test_every_initial_state_runs_once():
    env = ChaoticEnvironment(num_envs=7)
    result = evaluate(env, NetworkPolicy(), starts_per_task=9)
    assert sorted(env.counted) == [(task, start) for task in range(3) for start in range(9)]
    assert result.success.shape == (3, 9)
    assert result.steps.tolist() == [[10 + 10 * (start % 6) for start in range(9)]] * 3
    assert 0 < result.success.sum() < 27


def test_the_result_depends_neither_on_the_number_of_environments_nor_on_order():
    policy = NetworkPolicy()
    reference = evaluate(ChaoticEnvironment(3), policy, starts_per_task=40)
    for env in (ChaoticEnvironment(3), ChaoticEnvironment(19), ChaoticEnvironment(64), ChaoticEnvironment(150)):
        assert torch.equal(evaluate(env, policy, starts_per_task=40).success, reference.success)


def test_a_task_without_environment_is_an_error():
    with pytest.raises(ValueError, match=r"no environment runs task 2.*num_envs=3"):
        evaluate(ChaoticEnvironment(num_envs=2), NetworkPolicy(), starts_per_task=1)


def test_no_initial_state_runs_twice():
    env = ChaoticEnvironment(4, num_starts=5)
    assert evaluate(env, NetworkPolicy(), starts_per_task=50).success.shape == (3, 5)
    assert sorted(env.counted) == [(task, start) for task in range(3) for start in range(5)]


def test_initial_states_that_do_not_exist_are_refused():
    env = ChaoticEnvironment(4, num_starts=5)
    assert evaluate(env, NetworkPolicy(), starts_per_task=50, first_start=3).success.shape == (3, 2)
    with pytest.raises(UserError, match=r"initial state 5 does not exist: each task has 5, numbered 0 to 4"):
        evaluate(env, NetworkPolicy(), starts_per_task=1, first_start=5)


def test_initial_states_are_those_from_the_first_one_on():
    env = ChaoticEnvironment(4)
    evaluate(env, NetworkPolicy(), starts_per_task=3, first_start=5)
    assert sorted(env.counted) == [(task, start) for task in range(3) for start in (5, 6, 7)]


def test_worlds_that_environments_share_are_filled():
    env = ChaoticEnvironment(6, tasks=1)
    env.group = 3
    assert evaluate(env, NetworkPolicy(), starts_per_task=7).success.shape == (1, 9)
    assert sorted(start for _, start in env.counted) == list(range(9))


def test_nothing_to_run_is_an_error():
    with pytest.raises(ValueError, match="at least one episode of each task, got 0"):
        evaluate(ChaoticEnvironment(4), NetworkPolicy(), starts_per_task=0)


def test_metrics_are_means_over_the_episodes_that_define_them():
    outcome = torch.tensor([[True, True], [True, False]])
    metrics = {"error_m": torch.tensor([[0.1, 0.3], [0.5, torch.nan]]), "laps": torch.full((2, 2), torch.nan)}
    summary = EvaluationResult(("a", "b"), outcome, torch.ones(2, 2), 280, metrics).summary()
    assert summary["error_m"] == pytest.approx(0.3)
    assert [row["error_m"] for row in summary["per_task"]] == pytest.approx([0.2, 0.5])
    assert summary["laps"] is None


@pytest.mark.parametrize(
    ("successes", "episodes", "interval"),
    [
        (8, 10, (0.4901625, 0.9433178)),
        (0, 10, (0.0, 3.8414588 / 13.8414588)),  # z^2 / (n + z^2)
        (500, 500, (500 / 503.8414588, 1.0)),  # n / (n + z^2)
        (1, 2, (0.0945312, 0.9054688)),
    ],
)
def test_wilson_against_numbers_by_hand(successes, episodes, interval):
    assert wilson(successes, episodes) == pytest.approx(interval, abs=1e-6)


@pytest.mark.parametrize(("successes", "episodes"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes, episodes):
    with pytest.raises(ValueError, match="expected 0 <= successes"):
        wilson(successes, episodes)


def result(success: list[bool]) -> EvaluationResult:
    outcome = torch.tensor([success])
    return EvaluationResult(("pick",), outcome, torch.full_like(outcome, 100, dtype=torch.int64), 280)


def test_paired_gain_against_numbers_by_hand():
    # 98 pairs: 20 won, 5 lost. (21 - 6) / 100 +- 1.959964 * sqrt((0.27 - 0.0225) / 100)
    before = result([False] * 20 + [True] * 5 + [True] * 70 + [False] * 3)
    after = result([True] * 20 + [False] * 5 + [True] * 70 + [False] * 3)
    gain = after.gain_over(before)
    assert gain.difference == pytest.approx(15 / 98)
    assert (gain.low, gain.high) == pytest.approx((0.0524929, 0.2475071), abs=1e-6)


def test_no_difference_is_no_certainty():
    gain = result([True] * 20).gain_over(result([True] * 20))
    assert gain.low < 0 < gain.high


def outcomes(successes: int, episodes: int) -> Tensor:
    return torch.arange(episodes).unsqueeze(0) < successes


@pytest.mark.parametrize(
    ("after", "before", "interval"),
    [  # Newcombe 1998, Stat. Med. 17, 873-890, table II, method 10
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((9, 10), (3, 10), (0.1705, 0.8090)),
        ((6, 7), (2, 7), (0.0582, 0.8062)),
        ((5, 56), (0, 29), (-0.0381, 0.1926)),
        ((0, 10), (0, 20), (-0.1611, 0.2775)),
        ((0, 10), (0, 10), (-0.2775, 0.2775)),
        ((10, 10), (0, 20), (0.6791, 1.0)),
    ],
)
def test_the_gain_on_other_episodes_against_published_numbers(after, before, interval):
    gain = _independent_gain(outcomes(*after), outcomes(*before), Z95)
    assert gain.difference == pytest.approx(after[0] / after[1] - before[0] / before[1])
    assert (gain.low, gain.high) == pytest.approx(interval, abs=5e-5)


def test_evaluations_that_are_not_of_the_same_episodes_are_not_paired():
    def of(successes: int, repeatable: bool) -> EvaluationResult:
        success = outcomes(successes, 10)
        return EvaluationResult(("pick",), success, torch.ones_like(success).long(), 280, repeatable=repeatable)

    for pair in ((False, False), (False, True), (True, False)):
        gain = of(9, pair[0]).gain_over(of(3, pair[1]))
        assert (gain.low, gain.high) == pytest.approx((0.1705, 0.8090), abs=5e-5)
    assert of(9, True).gain_over(of(3, True)).low != pytest.approx(0.1705, abs=1e-2)


def test_a_gain_is_that_on_the_episodes_that_both_ran():
    rows = torch.arange(20).view(2, 10)
    after, before = (EvaluationResult(("a", "b"), rows % n > 0, rows, 280) for n in (5, 2))
    few = EvaluationResult(("a", "b"), before.success[:, :4], rows[:, :4], 280)
    assert after.gain_over(few) == after.first(4).gain_over(few) != after.gain_over(before)
    assert after.gain_over(few).difference == pytest.approx((6 - 4) / 8)
    assert few.gain_over(after).difference == -after.gain_over(few).difference


def test_gain_needs_the_same_episodes():
    one = result([True] * 3)
    for other in (replace(one, first_start=3), replace(one, step_limit=7), replace(one, tasks=("other",))):
        with pytest.raises(ValueError, match="same tasks, first start and step limit"):
            one.gain_over(other)


def test_summary_holds_rates_and_intervals_per_task():
    outcome = torch.tensor([[True, True], [True, False]])
    summary = EvaluationResult(("a", "b"), outcome, torch.tensor([[10, 20], [30, 40]]), 280).summary()
    assert (summary["success"], summary["episodes"], summary["step_limit"]) == (0.75, 4, 280)
    assert (summary["low"], summary["high"]) == pytest.approx(wilson(3, 4))
    assert [row["task"] for row in summary["per_task"]] == ["a", "b"]
    assert [row["success"] for row in summary["per_task"]] == [1.0, 0.5]
    assert [row["mean_steps"] for row in summary["per_task"]] == [15.0, 35.0]


def test_without_numbers_every_episode_that_was_dealt_counts() -> None:
    """Successful episodes end early: counting the first to end would overestimate success."""
    env = Nameless(6, tasks=2)
    result = evaluate(env, Constant(env._reach, -0.1), starts_per_task=7)
    assert len(env.begun) == 14
    even = torch.tensor([sum(start % 2 == 0 for at, start in env.begun if at % 2 == task) for task in range(2)])
    assert torch.equal(result.success.sum(1), even)  # even starts are to the right of the goal
    assert ((result.steps == 7) | result.success).all()
    assert 0 < even.sum() < 14
    assert (result.repeatable, result.step_limit) == (False, None)


def test_without_numbers_episodes_take_as_many_steps_as_they_took():
    env = Nameless(3, tasks=1)
    result = evaluate(env, Constant(env._reach, -0.1), starts_per_task=9)
    expected = [-(-(0.2 + 0.05 * (start % 11)) // 0.1) if start % 2 == 0 else 7 for _, start in env.begun]
    assert abs(int(result.steps.sum()) - sum(min(7, each) for each in expected)) <= 9  # 0.1 is no float


def test_what_a_watcher_sees_executed_are_the_episodes_that_count():
    seen = []
    env = ChaoticEnvironment(16)
    result = evaluate(
        env,
        NetworkPolicy(),
        starts_per_task=4,
        watch=lambda env, chunk, transition: seen.append(int(transition.executed.sum())),
    )
    assert sum(seen) == int(result.steps.sum())


def test_divergence_outside_of_counted_episodes_is_not_counted():
    class Breaking(ChaoticEnvironment):
        def step(self, actions: Tensor) -> Transition:
            transition = super().step(actions)
            return replace(transition, events={"diverged": transition.done})

    assert evaluate(Breaking(16), NetworkPolicy(), starts_per_task=4).count("diverged") == 12


class ToldEnvironment(ChaoticEnvironment):
    """Says of starts 0 to 5, one after the other, why they failed; the last succeeded."""

    def step(self, actions: Tensor) -> Transition:
        found = super().step(actions)
        ended, start = found.done, self.start
        return replace(
            found,
            terminated=ended & (start != 1),
            truncated=ended & (start == 1),
            success=ended & (start == 5),
            events={"lost": ended & (start == 2), "diverged": ended & ((start == 2) | (start == 3))},
            failures={"dropped": start == 4, "fell": start >= 4},
        )


def test_a_failure_has_the_first_reason_that_holds_and_its_start():
    found = evaluate(ToldEnvironment(6), NetworkPolicy(), starts_per_task=6)
    columns = {name: failed.any(0).nonzero().flatten().tolist() for name, failed in found.failures.items()}
    assert columns == {
        "the simulator's process died": [2],
        "the simulation diverged": [3],
        "dropped": [4],
        "ended early": [0],
        "time-out": [1],
    }
    told = replace(found, first_start=100).summary()["per_task"][1]["failures"]
    assert told["dropped"] == {"episodes": 1, "starts": [104]}
    assert sum(row["episodes"] for row in told.values()) == 5
    apart = replace(found, repeatable=False).summary()["per_task"][1]["failures"]
    assert apart["dropped"] == {"episodes": 1}


def test_starts_are_numbered_from_the_first_that_is_evaluated():
    found = evaluate(ToldEnvironment(6), NetworkPolicy(), starts_per_task=2, first_start=3)
    assert found.summary()["per_task"][0]["failures"]["dropped"]["starts"] == [4]


def test_episodes_that_succeed_with_their_first_action_are_counted():
    success = torch.tensor([[True, True, False, True]])
    steps = torch.tensor([[1, 2, 1, 5]])
    result = EvaluationResult(("a",), success, steps, 280)
    assert (result.immediate, result.summary()["immediate"]) == (1, 1)
    assert result.remarks() == [
        "1 of 3 successful episodes of an evaluation succeeded with their first action or before it: some initial"
        " states are solved already."
    ]
    before = {"success_at_reset": torch.tensor([[1.0, 0.0, 1.0, 1.0]])}
    assert EvaluationResult(("a",), success, steps, 280, before).immediate == 2


class Costs(ChaoticEnvironment):
    """Every control step costs 1, 2 in start 2; starts 0, 2 and 3 of task 0 diverge in the first chunk."""

    def step(self, actions: Tensor) -> Transition:
        early = ~self.frozen & (self.task_index == 0) & torch.isin(self.start, torch.tensor([0, 2, 3]))
        found = super().step(actions)
        self.frozen |= early
        cost = torch.where(self.start == 2, 2.0, 1.0)
        return replace(
            found,
            reward=-cost.unsqueeze(1) * found.executed,
            terminated=early,
            truncated=self.frozen & ~early,
            success=torch.zeros_like(early),
            events={"diverged": early},
            has_success=False,
        )


def test_an_episode_that_diverges_saves_no_costs():
    result = evaluate(Costs(6), NetworkPolicy(), starts_per_task=6)
    assert result.count("diverged") == 3
    assert result.steps[0].tolist() == [2, 20, 2, 2, 50, 60]
    # As long as the step limit of 60 at their own costs, 1 and 2 a step; the longest of the others cost 60.
    assert result.returns.tolist()[:2] == [[-60, -20, -120, -60, -50, -60], [-10, -20, -60, -40, -50, -60]]
    assert odd_episodes(result.summary()) == ["3 diverged, counted with the worst return"]


def test_rewards_of_others_bound_those_of_an_episode_that_diverged():
    returns, steps = torch.tensor([[0.0, 5.0, -7.0]]).double(), torch.tensor([[1, 9, 9]])
    diverged = torch.tensor([[True, False, False]])
    assert _with_worst(returns, steps, diverged, None).tolist() == [[-7.0, 5.0, -7.0]]
    all_of_them = torch.ones(1, 3, dtype=torch.bool)
    assert _with_worst(-steps.double(), steps, all_of_them, 10).tolist() == [[-10.0, -10.0, -10.0]]
