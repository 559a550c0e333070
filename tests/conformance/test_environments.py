"""Requirements of every Environment, checked on all of them."""

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from embodied.contract import Contract
from embodied.environment import NumberedStarts, Restorable
from embodied.environments.delay import DelayEnvironment
from embodied.environments.engine import EpisodeEngine, Unnumbered
from embodied.environments.latency import LatencyConfig, LatencyEnvironment
from embodied.environments.reflex import ReflexEnvironment
from embodied.execution.reflex import Reflex
from embodied.saving.tree import load_tree, save_tree
from sims.backend import Sim
from sims.gym.environment import GymEnvironment
from sims.isaac_lab.task import IsaacLabTask
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.randomisation import Randomisation
from sims.libero.suite import load_tasks
from sims.maniskill.environment import ManiSkillEnvironment
from sims.maniskill.worlds import Options
from sims.mjcf.environment import MjcfEnvironment
from sims.mjcf.task import SHIPPED, find_mdp
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.flights import HISTORY
from sims.quadrotor.physics.variation import TRAINED
from sims.quadrotor.task import AnyPlatformTask, QuadrotorTask, RaceTask, RecoverTask, TrackTask
from sims.quadrotor.tasks.robust import OPTIONS, RobustHover
from sims.remote.children import Pool
from sims.remote.task import in_processes
from sims.robosuite.environment import RobosuiteEnvironment
from sims.robosuite.world import Options as RobosuiteOptions
from sims.swarm.environment import SwarmEnvironment
from sims.swarm.mdp import Swarm
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import Navigate
from sims.vehicle.practice import Practice
from sims.vehicle.race import Race
from sims.vehicle.vehicles import F1TENTH, JACKAL
from tests.embodied.counter import Counter
from tests.embodied.reach import Reach
from tests.sims.remote.made import MadeTask, in_children

LIMIT = 6
"""Control steps of an episode: it ends in the second chunk of four."""


def reach(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> Reach:
    return Reach(num_envs, executed=executed, horizon=4, step_limit=step_limit, seed=seed)


def counter(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> Counter:
    return Counter(num_envs, step_limit, executed=executed, seed=seed)


def late_reach(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> LatencyEnvironment:
    latency = LatencyConfig(action_s=[0.05, 0.15])
    return LatencyEnvironment(reach(num_envs, executed, step_limit, seed), latency)


def waiting_reach(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> DelayEnvironment:
    return DelayEnvironment(reach(num_envs, executed, step_limit, seed), 2)


def checked_reach(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> ReflexEnvironment:
    env = Reach(num_envs, executed=1, horizon=1, step_limit=step_limit, seed=seed)
    risk = Reflex(lambda observation, actions: actions.abs().sum(1), env.contract, 0.2, (0.0,))
    return ReflexEnvironment(env, risk, horizon=4, executed=executed)


ASSETS = find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in")


def swarm(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> SwarmEnvironment:
    # One drone per world; tests/sims/swarm tests worlds with several.
    mdp = Swarm(drones=1)
    return SwarmEnvironment(num_envs, mdp=mdp, executed=executed, step_limit=step_limit, seed=seed)


def quadrotor(goal: type[QuadrotorTask]) -> Callable[..., QuadrotorEnvironment]:
    def make(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> QuadrotorEnvironment:
        mdp = next(iter(goal.MDPS.values()))
        return QuadrotorEnvironment(
            num_envs, mdp=mdp, options=goal.OPTIONS, executed=executed, step_limit=step_limit, seed=seed
        )

    return make


def robust_hover(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> QuadrotorEnvironment:
    return QuadrotorEnvironment(
        num_envs,
        mdp=RobustHover(),
        options=OPTIONS,
        variation=TRAINED,
        history=HISTORY,
        executed=executed,
        step_limit=step_limit,
        seed=seed,
    )


def libero(distribution: str, randomisation: Randomisation | None = None) -> Callable[..., LiberoEnvironment]:
    def make(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> LiberoEnvironment:
        return LiberoEnvironment(
            load_tasks("libero_object", [0, 3]),
            num_envs,
            distribution=distribution,
            horizon=4,
            executed=executed,
            step_limit=step_limit,
            seed=seed,
            threads=1,
            assets=ASSETS,
            randomisation=randomisation,
        )

    return make


def maniskill(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> ManiSkillEnvironment:
    options = Options("PushCube-v1")
    return ManiSkillEnvironment(num_envs, options=options, executed=executed, step_limit=step_limit, seed=seed)


def vehicle(goal: str) -> Callable[..., VehicleEnvironment]:
    def make(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> VehicleEnvironment:
        goals = {"navigate": (Navigate(), JACKAL), "race": (Race(), F1TENTH), "practice": (Practice(), F1TENTH)}
        mdp, who = goals[goal]
        return VehicleEnvironment(
            num_envs, mdp=mdp, vehicle=who, executed=executed, step_limit=step_limit, seed=seed, randomisation=0.1
        )

    return make


def remote(kind: str) -> Callable[..., NumberedStarts]:
    def make(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> NumberedStarts:
        tasks = 1 if kind == "reach" else 2  # it is no engine, which deals tasks over processes
        task = MadeTask(kind=kind, processes=2, executed=executed, step_limit=step_limit, tasks=tasks)
        return in_children(task).environment(num_envs, "anywhere", "train", seed)

    return make


ISAAC = Pool(".venv-isaac/bin/python", "sims")
"""Children that run Isaac Lab, which has one environment a process."""


def isaac_lab(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> Unnumbered:
    task = IsaacLabTask(assets="own", action_limit=1.0, executed=executed, step_limit=step_limit, python=ISAAC.python)
    apart = in_processes(task)
    apart._pool = ISAAC
    return apart.environment(num_envs, task.id, "train", seed)


def robosuite(shaped: bool) -> Callable[..., RobosuiteEnvironment]:
    def make(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> RobosuiteEnvironment:
        return RobosuiteEnvironment(
            num_envs,
            options=RobosuiteOptions("Lift", shaped=shaped),
            horizon=4,
            executed=executed,
            step_limit=step_limit,
            seed=seed,
        )

    return make


def mjcf(name: str, sim: Sim = Sim.mujoco) -> Callable[..., MjcfEnvironment]:
    def make(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> MjcfEnvironment:
        return MjcfEnvironment(
            num_envs, mdp=find_mdp(name), executed=executed, step_limit=step_limit, seed=seed, sim=sim, threads=1
        )

    return make


def pendulum(num_envs: int = 4, executed: int = 4, step_limit: int = LIMIT, seed: int = 0) -> GymEnvironment:
    return GymEnvironment(num_envs, "Pendulum-v1", executed=executed, step_limit=step_limit, seed=seed)


# A new environment is a row here: what makes it, for `num_envs`, `executed` (K), `step_limit` and `seed`.
ENVIRONMENTS = {
    "engine": counter,
    "reach": reach,
    "reach, late": late_reach,
    "reach, waiting": waiting_reach,
    "reach, with a reflex": checked_reach,
    "libero wide": libero("wide"),
    "libero official": libero("official"),
    "libero randomised": libero("wide", Randomisation(friction=[0.5, 2.0], mass=[0.5, 2.0])),
    "maniskill": maniskill,
    "quadrotor hover": robust_hover,
    "quadrotor track": quadrotor(TrackTask),
    "quadrotor recover": quadrotor(RecoverTask),
    "quadrotor race": quadrotor(RaceTask),
    "quadrotor any": quadrotor(AnyPlatformTask),
    "quadrotor swarm": swarm,
    "robosuite lift": robosuite(shaped=True),
    **{f"mjcf {name}": mjcf(name) for name in SHIPPED},
    "mjcf cartpole, warp": mjcf("cartpole", Sim.mjwarp),
    "gym": pendulum,
    **{f"vehicle {goal}": vehicle(goal) for goal in ("navigate", "race", "practice")},
    **{f"remote {kind}": remote(kind) for kind in ("counter", "reach")},
}
if os.environ.get("CI_ISAAC") == "required":  # by `make test-isaac`
    ENVIRONMENTS["isaac lab"] = isaac_lab


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.assets) if "libero" in name else name for name in ENVIRONMENTS],
)
def name(request) -> str:
    return request.param


@pytest.fixture
def make(name: str) -> Iterator[Callable[..., NumberedStarts]]:
    """Makes environments, which are closed after the test, as often as one likes."""
    made = []

    def keep(**options: int) -> NumberedStarts:
        made.append(ENVIRONMENTS[name](**options))
        return made[-1]

    yield keep
    for env in made:
        env.close()
        env.close()


@pytest.fixture(scope="module")
def env(name: str) -> Iterator[NumberedStarts]:
    """An environment that tests share, as making some takes seconds; each test begins with a reset."""
    made = ENVIRONMENTS[name]()
    yield made
    made.close()


def actions(env: NumberedStarts, seed: int) -> torch.Tensor:
    """Random chunks [N, K, A] inside the limits, small enough that none succeeds by chance at once."""
    spec = env.contract.action
    low, high = torch.tensor(spec.low), torch.tensor(spec.high)
    shape = (env.num_envs, env.contract.executed, *spec.shape)
    return low + (high - low) * (0.4 + 0.2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)))


def same(first, second) -> bool:
    """Equality of trees, bit for bit."""
    if isinstance(first, TensorDictBase):
        return set(first.keys()) == set(second.keys()) and all(same(first[key], second[key]) for key in first.keys())  # noqa: SIM118
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if first is None or second is None:
        return first is second
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and same(first.cpu().numpy(), second.cpu().numpy())
    return bool(np.array_equal(first, second, equal_nan=True))  # NaN: a metric that is undefined so far


def books(env: NumberedStarts | Unnumbered) -> EpisodeEngine:
    """Who keeps the books of the episodes of `env`."""
    wrapped = isinstance(env, DelayEnvironment | LatencyEnvironment | ReflexEnvironment)
    return env.env if wrapped else env.engine if isinstance(env, Unnumbered) else env


def steps(env: NumberedStarts) -> torch.Tensor:
    return books(env).steps


def restorable(env: NumberedStarts) -> NumberedStarts:
    """`env` where it claims that it can be put back; skips the test where it does not."""
    if not isinstance(env, Restorable):
        pytest.skip("does not claim to be Restorable")
    return env


def only(env: NumberedStarts, *rows: int) -> torch.Tensor:
    mask = torch.zeros(env.num_envs, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


def test_everything_about_it_is_readable_before_the_first_reset_and_a_step_is_refused(make):
    env = make()
    assert isinstance(env, NumberedStarts) != isinstance(env, Unnumbered)
    assert len(env.instructions) == len(env.task_names)
    assert Contract.from_dict(env.contract.to_dict()) == env.contract
    assert env.num_envs == len(env.task_index) == 4
    assert set(env.task_index.tolist()) == set(range(len(env.task_names)))
    if isinstance(env, NumberedStarts):
        assert env.step_limit == LIMIT
    with pytest.raises(ValueError, match="reset"):
        env.step(actions(env, 0))


def test_observations_fit_the_contract(env):
    for observation in (env.reset(), env.step(actions(env, 0)).observation, env.step(actions(env, 1)).observation):
        assert set(observation.keys()) == set(env.contract.observation)
        assert observation.batch_size == (4,)
        for key, spec in env.contract.observation.items():
            shape = observation[key].shape[1:]
            assert len(shape) == len(spec.shape)
            assert all(wanted in (-1, got) for wanted, got in zip(spec.shape, shape, strict=True))
            assert str(observation[key].dtype) == f"torch.{spec.dtype}"
            assert observation[key].device == env.device
            assert observation[key].is_floating_point() <= bool(observation[key].isfinite().all())
            if spec.low:
                assert (observation[key] >= torch.tensor(spec.low) - 1e-6).all(), key
                assert (observation[key] <= torch.tensor(spec.high) + 1e-6).all(), key


def test_transitions_have_their_types_and_lie_on_its_device(env):
    env.reset()
    transition = env.step(actions(env, 0))
    assert transition.reward.dtype == torch.float32
    flags = [transition.terminated, transition.truncated, transition.success]
    flags += transition.events.values()
    for flag in (transition.executed, *flags):
        assert flag.dtype == torch.bool
    start = books(env).start
    for values in (*flags, *transition.metrics.values(), start, env.task_index):
        assert values.shape == (4,)
    for values in (transition.reward, transition.executed, *flags, start, env.task_index):
        assert values.device == env.device
    assert transition.observation.batch_size == (4,)


def test_a_chunk_says_how_much_of_it_ran(env):
    env.reset()
    before = steps(env).clone()
    for seed in range(3):
        transition = env.step(actions(env, seed))
        assert transition.executed.shape == transition.reward.shape == (4, 4)
        assert (transition.executed[:, 1:] <= transition.executed[:, :-1]).all()  # nothing runs after a stop
        assert (transition.reward[~transition.executed] == 0).all()
        assert torch.equal(steps(env) - before, transition.executed.sum(1))
        assert not (transition.terminated & transition.truncated).any()
        assert (transition.success <= transition.done).all()
        before = steps(env).clone()


def test_the_observation_at_the_end_is_the_true_one_and_chunks_equal_single_steps(make):
    chunked, single = make(), make(executed=1, step_limit=100)
    assert same(chunked.reset(), single.reset())
    chunks = [actions(chunked, seed) for seed in range(2)]
    for chunk in chunks:
        ending = chunked.step(chunk)
    for step in torch.cat(chunks, 1)[:, :LIMIT].unbind(1):
        true = single.step(step.unsqueeze(1))
    assert ending.truncated.all()
    assert not true.done.any()
    assert same(ending.observation, true.observation)
    if isinstance(chunked, LiberoEnvironment):
        assert same(chunked.simulation.state_dict(), single.simulation.state_dict())


def test_it_is_frozen_after_the_end_while_others_go_on(env):
    env.reset()
    env.step(actions(env, 0))
    env.reset(mask=only(env, 0))  # now two chunks behind the others
    ended = env.step(actions(env, 1))
    assert ended.done.tolist() == [False, True, True, True]
    before = steps(env).clone()
    later = env.step(actions(env, 2))
    assert later.executed[0].any()
    assert not later.executed[1:].any()
    assert (later.reward[1:] == 0).all()
    assert same(later.observation[1:], ended.observation[1:])
    assert not same(later.observation[0], ended.observation[0])
    assert torch.equal(steps(env)[1:], before[1:])
    for flag in ("terminated", "truncated", "success"):
        assert torch.equal(getattr(later, flag)[1:], getattr(ended, flag)[1:])


def test_a_masked_reset_leaves_the_others_untouched(make):
    env, undisturbed = make(), make()
    for each in (env, undisturbed):
        each.reset()
        each.step(actions(each, 0))
    before = env.reset(mask=only(env))
    after = env.reset(mask=only(env, 2))
    assert steps(env)[2] == 0
    others = torch.tensor([0, 1, 3])
    assert same(before[others], after[others])
    assert not same(before[2], after[2])
    # and what they do next
    assert same(env.step(actions(env, 1)).observation[others], undisturbed.step(actions(env, 1)).observation[others])


def test_a_named_start_is_the_same_wherever_and_whenever(env, make):
    if not isinstance(env, NumberedStarts):
        pytest.skip("does not claim to have NumberedStarts")
    first = env.reset(starts=torch.tensor([5, 6, 7, 8]))
    assert env.start.tolist() == [5, 6, 7, 8]
    env.step(actions(env, 0))
    second = env.reset(starts=torch.tensor([7, 8, 5, 6]))
    assert same(first, second[torch.tensor([2, 3, 0, 1])])  # environments 0 and 2, 1 and 3 run the same task
    fewer, chunk = make(num_envs=2, seed=7), actions(env, 0)
    assert same(fewer.reset(starts=torch.tensor([7, 8])), first[2:])
    for each in (env, fewer):
        each.step(chunk[: each.num_envs])
    assert same(env.step(chunk).observation[:2], fewer.step(chunk[:2]).observation)


def test_a_seed_chooses_the_stream_of_starts(make):
    env, again, other = make(seed=3), make(seed=3), make(seed=4)
    first, following = env.reset(), env.reset()
    assert not same(first, following)
    assert same(again.reset(), first)
    assert same(again.reset(), following)
    assert not same(other.reset(), first)


def test_a_saved_state_continues_bit_for_bit(make, tmp_path):
    env, other = restorable(make(step_limit=9)), make(step_limit=9, seed=9)
    env.reset()
    env.step(actions(env, 0))
    env.reset(mask=only(env, 1))
    save_tree(tmp_path / "state", env.state_dict())
    now = env.reset(mask=only(env))
    other.reset()
    other.step(actions(other, 5))
    assert same(other.load_state_dict(load_tree(tmp_path / "state")), now)
    for seed in (1, 2, 3):  # some end in between
        here, there = env.step(actions(env, seed)), other.step(actions(other, seed))
        assert same(vars(here), vars(there))
    assert same(env.reset(), other.reset())  # the next starts too
    assert same(env.state_dict(), other.state_dict())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_action_that_is_no_number_is_refused_and_changes_nothing(env, value):
    restorable(env).reset()
    before = env.state_dict()
    broken = actions(env, 0)
    broken[2, 1, 0] = value
    with pytest.raises(ValueError, match="finite"):
        env.step(broken)
    assert same(env.state_dict(), before)
