"""Observations and commands arrive on time, by hand; random latencies are the same in every run."""

from pathlib import Path

import pytest
import torch

from embodied.environment import DifferentiableEnvironment, NumberedStarts, group_size
from embodied.environments.latency import LatencyConfig, LatencyEnvironment, LatencyTask, _uniform
from embodied.saving.tree import load_tree, save_tree
from embodied.task import Task
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach


def make(executed: int = 1, num_envs: int = 2, **latency) -> LatencyEnvironment:
    env = Reach(num_envs, executed=executed, horizon=executed, step_limit=50)
    return LatencyEnvironment(env, LatencyConfig(**latency))


def run(env: LatencyEnvironment, actions: list[float]) -> tuple[list[float], list[float]]:
    """True and observed positions of environment 0, from x = 0.3 on."""
    seen = [env.reset(starts=torch.zeros(env.num_envs, dtype=torch.long))["position"][0].item()]
    true = [env.env.position[0].item()]
    chunks = torch.tensor(actions).view(-1, 1, env.contract.executed, 1).expand(-1, env.num_envs, -1, -1)
    for chunk in chunks:
        seen.append(env.step(chunk).observation["position"][0].item())
        true.append(env.env.position[0].item())
    return true, seen


MOVES = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]  # the dt of Reach is 0.1 s


def test_observations_are_as_old_as_observed():
    true, seen = run(make(observation_s=[0.15, 0.15]), MOVES)  # arrives after two periods
    assert true == pytest.approx([0.3, 0.31, 0.33, 0.36, 0.40, 0.45, 0.51])
    assert seen == pytest.approx([0.3, 0.3, 0.3, 0.31, 0.33, 0.36, 0.40])


@pytest.mark.parametrize("executed", [1, 2, 3])
def test_commands_act_late_one_by_one_in_chunks_too(executed: int):
    true, _ = run(make(executed, action_s=[0.2, 0.2]), MOVES)
    late = [0.3, 0.31, 0.32, 0.33, 0.35, 0.38, 0.42]  # the first command, until the second one arrives
    assert true == pytest.approx(late[::executed])


def test_observations_of_chunks_are_delayed_by_chunks():
    true, seen = run(make(2, observation_s=[0.1, 0.1]), MOVES)
    assert seen == pytest.approx([true[0], *true[:-1]])


def test_no_latency_is_no_latency():
    true, seen = run(make(), MOVES)
    assert seen == pytest.approx(true)
    assert true[-1] == pytest.approx(0.51)


def test_what_overtakes_counts_and_what_is_overtaken_does_not():
    env = make(num_envs=64, observation_s=[0.1, 0.3], jitter_s=0.15, observed=True)
    env.reset(starts=torch.arange(64))
    ages = []
    for step in range(1, 40):
        observation = env.step(torch.full((64, 1, 1), 0.25 * (1 if step % 2 else -1))).observation
        ages.append((observation["latency"][:, 0] / 0.1).round())
    ages = torch.stack(ages)
    assert (ages[1:] <= ages[:-1] + 1).all()  # never back in time
    assert ages.min() == 0
    assert ages.max() <= 5
    assert len(ages[5:].unique()) >= 4
    assert len(ages[5:].mean(0).unique()) > 10  # each episode has its own


def test_latencies_are_those_of_the_episode_wherever_it_runs():
    first, second = (make(num_envs=n, observation_s=[0.0, 0.3], action_s=[0.0, 0.3], jitter_s=0.1) for n in (2, 6))
    starts = torch.tensor([4, 5])
    first.reset(starts=starts)
    second.reset(starts=torch.tensor([9, 9, 9, 9, 4, 5]))
    for step in range(12):
        chunk = torch.full((6, 1, 1), 0.02 * (-1) ** step)
        here, there = first.step(chunk[:2]).observation, second.step(chunk).observation[4:]
        assert (here == there).all()


def test_an_episode_sees_and_does_nothing_of_the_one_before():
    env = make(observation_s=[0.2, 0.2], action_s=[0.2, 0.2])
    run(env, MOVES)
    begun = env.reset(mask=torch.tensor([True, False]), starts=torch.tensor([2, 2]))["position"][:, 0]
    assert begun.tolist() == pytest.approx(
        [0.4, run(make(observation_s=[0.2, 0.2], action_s=[0.2, 0.2]), MOVES)[1][-1]]
    )
    seen = [env.step(torch.full((2, 1, 1), move)).observation["position"][0].item() for move in MOVES]
    assert env.env.position[0].item() == pytest.approx(0.4 + 3 * 0.01 + 0.02 + 0.03 + 0.04)
    assert seen == pytest.approx([0.4, 0.4, 0.41, 0.42, 0.43, 0.45])


def test_an_ended_episode_sends_nothing_more():
    env = LatencyEnvironment(Reach(2, executed=1, horizon=1, step_limit=3), LatencyConfig(observation_s=[0.2, 0.2]))
    env.reset(starts=torch.zeros(2, dtype=torch.long))
    seen = [env.step(torch.full((2, 1, 1), 0.1)).observation["position"][0].item() for _ in range(6)]
    assert seen == pytest.approx([0.3, 0.3, 0.4, 0.4, 0.4, 0.4])


def test_what_is_under_way_arrives_after_a_restart(tmp_path: Path):
    latency = {"observation_s": [0.0, 0.3], "action_s": [0.0, 0.3], "jitter_s": 0.1}
    stayed, resumed = make(num_envs=6, **latency), make(num_envs=6, **latency)
    stayed.reset()
    chunks = 0.02 * torch.arange(12.0).view(12, 1, 1, 1).expand(-1, 6, -1, -1) - 0.1
    for chunk in chunks[:5]:
        stayed.step(chunk)
    save_tree(tmp_path / "state", stayed.state_dict())
    resumed.load_state_dict(load_tree(tmp_path / "state"))
    for chunk in chunks[5:]:
        assert (stayed.step(chunk).observation == resumed.step(chunk).observation).all()


def test_what_is_under_way_is_on_the_device_of_the_environment():
    env = make(observation_s=[0.1, 0.1])
    env.reset()
    elsewhere = Reach(2, executed=1, horizon=1, step_limit=50)
    elsewhere.device = torch.device("meta")
    resumed = LatencyEnvironment(elsewhere, LatencyConfig(observation_s=[0.1, 0.1]))
    assert {part.device.type for part in resumed.load_state_dict(env.state_dict()).values()} == {"meta"}


def test_the_critic_knows_and_the_actor_if_observed():
    assert make(action_s=[0.1, 0.1]).contract.observation["latency"].privileged
    env = make(observation_s=[0.15, 0.15], action_s=[0.05, 0.05], observed=True)
    assert not env.contract.observation["latency"].privileged
    env.reset()
    for _ in range(3):
        observed = env.step(torch.zeros(2, 1, 1)).observation["latency"]
    torch.testing.assert_close(observed, torch.tensor([0.2, 0.05]).expand(2, -1))


def test_gradients_pass_through_what_was_delayed():
    env = LatencyEnvironment(SmoothReach(2), LatencyConfig(action_s=[0.1, 0.1]))
    assert isinstance(env, DifferentiableEnvironment)
    assert not hasattr(env, "unroll")
    env.reset(starts=torch.zeros(2, dtype=torch.long))
    commands = [torch.full((2, 1, 1), 0.01, requires_grad=True) for _ in range(3)]
    rewards = [env.step(command).reward.sum() for command in commands]
    gradients = torch.autograd.grad(rewards[-1], commands, allow_unused=True)
    assert gradients[0].abs().sum() > 0
    assert gradients[1].abs().sum() > 0
    assert gradients[2] is None or not gradients[2].any()  # still in transit
    env.detach()
    assert not env.step(torch.zeros(2, 1, 1)).reward.requires_grad


def test_it_is_what_the_environment_is():
    env = make()
    assert isinstance(env, NumberedStarts)
    assert not isinstance(env, DifferentiableEnvironment)
    assert group_size(env) == 1


@pytest.mark.parametrize("wrong", [{"observation_s": [0.1]}, {"action_s": [0.2, 0.1]}, {"jitter_s": -0.1}])
def test_impossible_latencies_are_refused(wrong: dict):
    with pytest.raises(ValueError, match="expected"):
        LatencyConfig(**wrong)


class Filmed(Task):
    """A task whose videos have no latency."""

    name, distributions = "filmed", ("reach",)

    def video(self, path, policies, device, distribution, first):
        env = Reach(2, executed=1, horizon=1)
        for policy in policies.values():
            policy.contract.check(env.contract)
            assert policy.act(env.reset(), deterministic=True).actions.shape == (2, 1, 1)
        path.write_text(f"{distribution} from {first}")


@pytest.mark.parametrize("observed", [True, False])
def test_a_policy_that_knows_latencies_is_filmed_without_any(observed: bool, tmp_path: Path):
    env = make(action_s=[0.0, 0.2], observed=observed)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(env.reset(), torch.zeros(2, 1))
    LatencyTask(Filmed(), env.config).video(tmp_path / "video.mp4", {"policy": policy}, "cpu", "reach", 3)
    assert (tmp_path / "video.mp4").read_text() == "reach from 3"


def test_random_numbers_are_those_of_splitmix64():
    def mixed(state: int) -> int:
        """Both multiplications (Steele, Lea and Flood 2014), with unsigned integers of 64 bits."""
        z = state % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ z >> shift) * factor % 2**64
        return z

    keys = [0, 1, 12345, 2**62]
    states = [key * 0x9E3779B97F4A7C15 + 7 * 6364136223846793005 + 3 * 1442695040888963407 for key in keys]
    numbers = _uniform(torch.tensor(keys), torch.tensor(7), 3)
    assert numbers.tolist() == [(mixed(state) >> 11) / 2**53 for state in states]


@pytest.mark.parametrize(
    "latencies",
    [{"observation_s": [0.0, 0.1]}, {"action_s": [0.0, 0.1]}, {"jitter_s": 0.1}, {"observed": True}],
)
def test_latency_is_present_where_something_is_late_or_observed(latencies: dict):
    assert not LatencyConfig().present
    assert LatencyConfig(**latencies).present
