"""Swarm environments: collisions and their effects, practice, resuming, gradients, evaluation."""

import numpy as np
import pytest
import torch

from embodied.environment import DifferentiableEnvironment, group_size
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.saving.tree import load_tree, save_tree
from embodied.task import evaluation_distributions
from policies.attention import AttentionConfig, AttentionPolicy
from sims.quadrotor.physics.airframes import CRAZYFLIE, GRAVITY
from sims.quadrotor.physics.dynamics import DT_S
from sims.swarm.environment import SwarmEnvironment
from sims.swarm.mdp import AWAY_M, FLYING, HIT_DRONE, HIT_OBSTACLE, HIT_ROOM, Swarm
from sims.swarm.pictures import fly
from sims.swarm.practice import CAPACITY, EVERY, FIRST_LEVEL, RISE, SLOTS, WINDOW, Curriculum
from sims.swarm.task import SwarmTask
from tests.conformance.test_environments import same

CALM = Swarm(
    drones=4,
    density=0.0,
    force_scale=0.0,
    torque_scale=0.0,
    initial_velocity_m_s=0.0,
    initial_tilt=0.0,
    initial_angular_velocity_rad_s=0.0,
)


def make(worlds: int = 2, split: str = "train", mdp: Swarm = CALM, **options) -> SwarmEnvironment:
    env = SwarmEnvironment(worlds * mdp.drones, mdp=mdp, split=split, noise=False, **options)
    env.reset()
    for world in range(worlds):  # far from one another
        for drone in range(mdp.drones):
            put(env, world, drone, (2.0 * drone - 3.0, 0.0, 2.0))
    return env


def put(env: SwarmEnvironment, world: int, drone: int, at: tuple[float, float, float]) -> None:
    env.worlds.state[world, drone, :3] = torch.tensor(at)


def hover(env: SwarmEnvironment, scatter: float = 0.0, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(env.num_envs, 1, 4, generator=torch.Generator().manual_seed(seed))
    return CRAZYFLIE.hover_action + scatter * noise


def policy(env: SwarmEnvironment) -> AttentionPolicy:
    torch.manual_seed(0)
    found = AttentionConfig().build(env.contract)
    found.actor[-2].weight.data += 0.1 * torch.randn_like(found.actor[-2].weight)
    found.fit(env.reset(starts=torch.arange(env.num_envs)), torch.zeros(1, 4))
    return found


def test_a_film_shows_an_episode_from_its_first_state_to_its_last():
    env = make(split="eval", step_limit=7)
    flown = fly(env, policy(env), "cpu", stride=3)
    assert flown.positions.shape == (4, 2, CALM.drones, 3)  # after 0, 3, 6 and 7 steps
    assert (np.abs(np.diff(flown.positions, axis=0)).max((1, 2, 3)) > 0.0).all()


def test_it_is_differentiable_and_shared():
    env = SwarmEnvironment(20)
    assert isinstance(env, DifferentiableEnvironment)
    assert group_size(env) == env.mdp.drones > 1
    assert env.num_envs == 24  # whole worlds
    assert all(spec.unit for spec in env.contract.observation.values())


def test_in_training_a_collision_ends_the_world():
    env = make()
    put(env, 0, 1, (-2.88, 0.0, 2.0))  # 0.12 m from the first
    transition = env.step(hover(env))
    assert transition.executed.all()
    assert transition.terminated.tolist() == [True, True, False, False] + [False] * 4
    assert transition.truncated.tolist() == [False, False, True, True] + [False] * 4
    assert not transition.success.any()
    before = transition.observation
    after = env.step(hover(env, 0.1))
    assert after.executed.squeeze(1).tolist() == [False] * 4 + [True] * 4
    assert same(after.observation[:4], before[:4])
    assert (after.reward[:4] == 0).all()


def test_in_evaluation_who_collides_is_gone_and_the_others_fly_on():
    env = make(split="eval", step_limit=30)
    put(env, 0, 1, (-2.88, 0.0, 2.0))
    put(env, 0, 2, (-2.0, 0.0, 2.0))
    env.worlds.cylinders[1, 0] = torch.tensor([3.2, 0.0])  # on the last drone of the second world
    first = env.step(hover(env))
    assert not first.done.any()
    assert env.worlds.fate.tolist() == [[HIT_DRONE, HIT_DRONE, FLYING, FLYING], [FLYING] * 3 + [HIT_OBSTACLE]]
    third = first.observation["neighbours"][2]
    assert third[:, -1].tolist() == [1.0, 1.0, 0.0]  # seen as they were hit; the last drone is out of range
    second = env.step(hover(env))
    assert second.executed.squeeze(1).tolist() == [False, False, True, True, True, True, True, False]
    assert second.observation["neighbours"][2, :, -1].tolist() == [0.0, 0.0, 0.0]
    for _ in range(28):
        last = env.step(hover(env))
    assert last.done.all()
    assert last.terminated.tolist() == [True, True, False, False, False, False, False, True]
    assert env.steps.tolist() == [1, 1, 30, 30, 30, 30, 30, 1]
    assert last.metrics["collision_free"].tolist() == [0, 0, 1, 1, 1, 1, 1, 0]
    assert last.metrics["world_collision_free"].tolist() == [0] * 8
    assert last.metrics["hit_drone"].tolist() == [1, 1] + [0] * 6
    assert last.metrics["hit_obstacle"].tolist() == [0] * 7 + [1]
    assert last.failures["hit drone"].tolist() == [True] * 2 + [False] * 6
    assert last.failures["hit obstacle"].tolist() == [False] * 7 + [True]
    assert not last.failures["hit room"].any()
    assert last.metrics["position_error_m"].isnan().tolist() == [bool(step == 1) for step in env.steps]


def test_a_spin_that_numbers_cannot_follow_is_a_crash():
    env = make(split="eval")
    env.worlds.state[0, 1, 10:13] = 1e15
    transition = env.step(hover(env))
    assert env.worlds.fate[0].tolist() == [FLYING, HIT_ROOM, FLYING, FLYING]
    assert transition.reward.isfinite().all()
    assert all(part.isfinite().all() for part in transition.observation.values())


def test_an_evaluated_world_is_over_when_no_drone_is_left():
    env = make(1, split="eval")
    for drone in range(4):
        put(env, 0, drone, (0.0, 0.05 * drone, 2.0))
    assert env.step(hover(env)).terminated.all()


def test_success_is_to_be_at_the_goal_over_the_last_second():
    env = make(1, split="eval", step_limit=120)
    env.worlds.goals[:] = env.worlds.state[0, :, :3]
    env.worlds.goals[:, :, 1, 1] += 0.4
    env.worlds.goals[:, :, 2, 1] += 0.6
    for _ in range(120):
        transition = env.step(hover(env))
    assert transition.truncated.all()
    assert transition.metrics["position_error_m"].tolist() == pytest.approx([0.0, 0.4, 0.6, 0.0], abs=0.01)
    assert transition.success.tolist() == [True, True, False, True]
    assert transition.metrics["world_collision_free"].tolist() == [1.0] * 4


def test_downwash_pushes_who_is_below():
    env = make(1)
    put(env, 0, 1, (-3.0, 0.0, 1.6))  # 0.4 m under the first: 6 g on 34 g
    env.step(hover(env))
    speed = env.worlds.state[0, :, 9]
    assert float(speed[1]) == pytest.approx(-6 / 34 * GRAVITY * DT_S, rel=1e-3)
    assert speed[[0, 2, 3]].abs().max() < 1e-6


def test_worlds_are_reset_whole_and_leave_others_untouched():
    env, undisturbed = make(3, mdp=Swarm(drones=2)), make(3, mdp=Swarm(drones=2))
    mask = torch.tensor([False, False, True, True, False, False])
    before = env.step(hover(env)).observation
    undisturbed.step(hover(env))
    after = env.reset(mask=mask)
    assert same(after[~mask], before[~mask])
    assert not same(after[mask], before[mask])
    later, other = env.step(hover(env, 0.1)), undisturbed.step(hover(env, 0.1))
    assert same(later.observation[~mask], other.observation[~mask])
    with pytest.raises(ValueError, match=r"the 2 environments of a world begin together.*parts of \[1\]"):
        env.reset(mask=torch.tensor([False, False, True, False, False, False]))


def test_the_curriculum_rises_with_success_alone():
    curriculum = Curriculum()
    curriculum.add(WINDOW, WINDOW // 10)
    assert curriculum.level == FIRST_LEVEL
    curriculum.add(WINDOW - 1, WINDOW - 1)
    assert curriculum.level == FIRST_LEVEL  # not enough yet
    curriculum.add(1, 0)
    assert curriculum.level == FIRST_LEVEL + RISE
    for _ in range(20):
        curriculum.add(WINDOW, WINDOW)
    assert curriculum.level == 1.0


def test_worlds_in_training_have_the_curriculums_share_of_obstacles():
    mdp = Swarm(density=0.5)
    train, evaluated = (SwarmEnvironment(16, mdp=mdp, split=split) for split in ("train", "eval"))
    for env, level in ((train, FIRST_LEVEL), (evaluated, 1.0)):
        env.reset()
        assert (env.worlds.cylinders[..., 0] < AWAY_M).sum(1).tolist() == [round(level * 32)] * 2
    train.curriculum.level = 1.0
    train.reset()
    assert (train.worlds.cylinders[..., 0] < AWAY_M).sum(1).tolist() == [32] * 2
    for _ in range(5):
        train.step(-torch.ones(16, 1, 4))
    limit = SwarmEnvironment(16, mdp=CALM, step_limit=3)
    limit.reset()
    for _ in range(3):
        limit.step(hover(limit))
    assert (limit.curriculum.ended, limit.curriculum.free) == (4, 4)


def test_a_collision_is_flown_again_from_a_moment_before():
    env = make()
    pictures = []
    for _ in range(4 * EVERY + 10):
        env.step(hover(env))
        if int(env.steps[0]) % EVERY == 0:
            pictures.append(env.worlds.at(torch.tensor([0])))
    put(env, 0, 1, (-2.88, 0.0, 2.0))
    assert env.step(hover(env)).terminated[:2].all()
    assert env._replay.count == 1
    kept, expected = env._replay.archive.at(torch.tensor([0])), pictures[-SLOTS]
    assert same(kept.tensors(), expected.tensors())
    assert int(kept.steps[0, 0]) == 2 * EVERY
    over = torch.tensor([True] * 4 + [False] * 4)
    replayed = 0
    for _ in range(40):
        env.reset(mask=over)
        if int(env.steps[0]):
            replayed += 1
            assert torch.equal(env.worlds.state[0], expected.state[0])
            assert (env.worlds.fate[0] == FLYING).all()
            assert env.step(hover(env)).executed[:4].all()
    assert 4 <= replayed <= 22  # 12 of 40
    env.reset(mask=over, starts=torch.full((8,), 5))  # given starts are not replays of collisions
    assert int(env.steps[0]) == 0


def test_a_collision_soon_after_the_beginning_is_flown_again_from_there_not_from_the_episode_before():
    env = make()
    for _ in range(2 * EVERY):
        env.step(hover(env))
    env.reset(mask=torch.tensor([True] * 4 + [False] * 4))
    begun = env.worlds.at(torch.tensor([0]))
    put(env, 0, 0, (-3.0, 0.0, 2.0))
    put(env, 0, 1, (-2.88, 0.0, 2.0))
    assert env.step(hover(env)).terminated[:2].all()
    assert same(env._replay.archive.at(torch.tensor([0])).tensors(), begun.tensors())


def test_more_collisions_than_there_is_room_for_replace_the_oldest():
    env = make(4)
    for _ in range(CAPACITY // 4 + 1):
        env._replay.keep(torch.arange(4))
    assert env._replay.take(torch.rand(50)).steps.shape == (50, 4)
    assert env._replay.count == CAPACITY + 4


def test_nothing_is_practised_in_evaluation():
    env = make(split="eval")
    assert env.curriculum is None
    assert "replay" not in env.state_dict()


def test_a_resumed_environment_continues_bit_for_bit_through_collisions_and_replays(tmp_path):
    one, other = SwarmEnvironment(32, seed=1), SwarmEnvironment(32, seed=2)
    one.reset()
    for step in range(120):
        one.reset(mask=one.step(hover(one, 0.2, step)).done)
    assert one._replay.count > 0
    save_tree(tmp_path / "state", one.state_dict())
    other.reset()
    assert same(other.load_state_dict(load_tree(tmp_path / "state")), one.observe())
    for step in range(120):
        here, there = (env.step(hover(env, 0.2, 500 + step)) for env in (one, other))
        assert same(vars(here), vars(there))
        assert same(*(env.reset(mask=here.done) for env in (one, other)))
    assert same(one.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match="has num_envs=8, got 32"):
        other.load_state_dict(make().state_dict())


def test_the_gradient_through_steps_is_that_of_differences():
    mdp = Swarm(drones=3, density=0.8)
    env = SwarmEnvironment(48, mdp=mdp, noise=False)
    env.reset()
    saved = env.state_dict()
    generator = torch.Generator().manual_seed(4)
    actions = [hover(env, 0.05, seed).requires_grad_() for seed in range(12)]
    direction = [torch.randn(action.shape, generator=generator) for action in actions]

    def total(share: float) -> torch.Tensor:
        env.load_state_dict(saved)
        value = torch.zeros((), dtype=torch.float64)
        for action, way in zip(actions, direction, strict=True):
            transition = env.step(action + share * way)
            value = value + transition.reward.double().sum()
        return value + transition.observation["neighbours"].double().square().sum()

    slopes = torch.autograd.grad(total(0.0), actions)
    expected = sum(float((slope * way).sum()) for slope, way in zip(slopes, direction, strict=True))
    with torch.no_grad():
        found = float(total(2e-3) - total(-2e-3)) / 4e-3
    assert found == pytest.approx(expected, rel=0.02)
    assert all(slope.abs().max() > 0 for slope in slopes)


def test_gradients_reach_the_actions_of_others_and_end_at_detach():
    env = make(2, mdp=Swarm(drones=2, density=0.0))
    put(env, 0, 0, (0.0, 0.0, 2.0))
    put(env, 0, 1, (0.4, 0.0, 2.0))
    first = hover(env).requires_grad_()
    env.step(first)
    for _ in range(5):
        transition = env.step(hover(env))
    (slope,) = torch.autograd.grad(transition.reward[1].sum(), first, retain_graph=True)
    assert slope[0].abs().max() > 0
    assert (slope[2:] == 0).all()
    env.detach()
    third = env.step(hover(env).requires_grad_())
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(third.reward.sum(), first)


def test_an_evaluation_does_not_depend_on_the_number_of_environments():
    mdp = Swarm(initial_velocity_m_s=2.0)
    envs = [SwarmEnvironment(num_envs, mdp=mdp, split="eval", step_limit=60) for num_envs in (8, 40)]
    flown = policy(envs[0])
    results = [evaluate(env, flown, starts_per_task=37) for env in envs]  # 40 fill the worlds
    assert results[0].success.shape == (1, 40)
    assert torch.equal(results[0].steps, results[1].steps)
    assert same(results[0].metrics, results[1].metrics)
    assert 0 < results[0].metrics["collision_free"].sum() < 40


def test_wrong_input_is_refused():
    env = SwarmEnvironment(16)
    with pytest.raises(ValueError, match="reset"):
        env.step(hover(env))
    env.reset()
    with pytest.raises(ValueError, match=r"actions of shape \(16, 1, 4\)"):
        env.step(torch.zeros(16, 4))
    with pytest.raises(ValueError, match="initial states >= 0"):
        env.reset(starts=torch.full((16,), -1))
    with pytest.raises(ValueError, match="num_envs=0"):
        SwarmEnvironment(0)


def test_drones_observe_the_way_around_what_is_before_the_goal() -> None:
    env = make(worlds=1)
    env.worlds.goals[0, :, 0] = torch.tensor([-3.0, 3.0, 2.0])
    env.worlds.cylinders[0, :2] = torch.tensor([[-2.5, 1.5], [-3.5, 1.5]])  # a gap of 0.4 m on the straight line
    way = env.step(hover(env)).observation["way"][0]
    assert way.norm() == pytest.approx(2.0, abs=1e-4)
    assert way[0].abs() > 0.5
    assert way[1] > 0.5


@pytest.mark.parametrize(("name", "drones"), [("density_20", 8), ("drones_16", 16), ("drones_32", 32)])
def test_larger_swarms_fly_with_the_same_policy(name: str, drones: int) -> None:
    task = SwarmTask(step_limit=20)
    assert task.contract(name) == task.contract("density_20")
    env = task.environment(2 * drones, name, "eval")
    assert env.group == drones
    found = evaluate(env, policy(env), starts_per_task=2 * drones)
    assert found.success.shape == (1, 2 * drones)
    away = torch.cdist(env.worlds.goals[:, -1], env.worlds.goals[:, -1]) + 9.0 * torch.eye(drones)
    assert away.min() > 0.9  # each has its own


def test_the_final_policy_alone_is_measured_in_larger_swarms() -> None:
    assert SwarmTask().distributions == ("density_20",)
    assert evaluation_distributions(SwarmTask()) == ("density_20", "drones_16", "drones_32")
    with pytest.raises(UserError, match=r"drones_99.*density_20, drones_16, drones_32"):
        SwarmTask().environment(8, "drones_99", "eval")
