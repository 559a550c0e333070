"""Episodes: what ends them, rewards and metrics by hand, both back ends, options of the task."""

import math
from dataclasses import replace

import pytest
import torch

from embodied import native
from embodied.errors import UserError
from embodied.policy import Decision
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.episode import Moment
from sims.vehicle.navigate import REPLACED, Navigate
from sims.vehicle.race import Race
from sims.vehicle.task import NavigateTask, RaceTask
from sims.vehicle.vehicles import F1TENTH, JACKAL, PARAMETERS
from sims.vehicle.worlds import worlds


def navigate(count: int = 4, **options) -> VehicleEnvironment:
    return VehicleEnvironment(count, mdp=Navigate(), vehicle=JACKAL, **options)


def race(count: int = 4, **options) -> VehicleEnvironment:
    return VehicleEnvironment(count, mdp=Race(), vehicle=F1TENTH, **options)


def put(env: VehicleEnvironment, row: int, x: float, y: float, yaw: float = 0.0) -> None:
    env.now.state[row] = torch.tensor([x, y, yaw, 0.0, 0.0, 0.0, 0.0])


def test_who_reaches_the_goal_succeeds_and_its_way_is_measured():
    env = navigate()
    env.reset()
    goal = env.now.world["route"][0, 0].tolist()
    put(env, 0, goal[0] - 0.36, goal[1])
    env.now.state[0, 3] = 1.0
    found = env.step(torch.tensor([[[1.0, 0.0]]] * 4))
    assert found.terminated.tolist() == found.success.tolist() == [True, False, False, False]
    assert found.metrics["path_m"][0] == pytest.approx(0.1, abs=1e-4)
    assert found.metrics["time_s"][0] == pytest.approx(0.1)
    assert found.metrics["time_s"][1:].isnan().all()
    mdp = Navigate()
    assert found.reward[0, 0] == pytest.approx(0.1 + mdp.reward_goal - 0.1 * mdp.weight_time, abs=1e-2)  # a grid's way
    assert found.observation["goal_distance"][0] == pytest.approx(0.26, abs=1e-4)


def test_who_touches_a_wall_has_failed():
    env = navigate()
    env.reset()
    put(env, 1, 5.0 - 0.254 - 0.02, 0.0)
    env.now.world["segments"][1, 4:], env.now.world["circles"][1] = 1e6, 1e6
    env.now.state[1, 3] = 1.0
    found = env.step(torch.tensor([[[1.0, 0.0]]] * 4))
    assert found.terminated.tolist() == [False, True, False, False]
    assert not found.success.any()
    assert found.metrics["collision"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert found.failures["collision"].tolist() == [False, True, False, False]
    assert found.reward[1, 0] < -7.0
    after = env.step(torch.zeros(4, 1, 2))
    assert after.metrics["collision"].tolist() == [0.0, 1.0, 0.0, 0.0]  # still
    assert after.reward[1, 0] == 0.0
    assert after.reward[0, 0] != 0.0


def test_changes_of_the_turning_command_cost_in_half_its_range():
    rewards = []
    for weight in (0.0, 1.0):
        env = VehicleEnvironment(2, mdp=Navigate(weight_turn=weight), vehicle=JACKAL)
        env.reset()
        steps = [[[1.0, 0.0], [0.0, 1.5]], [[0.0, 0.75], [0.0, 0.75]]]  # 1.5 rad/s is half the range
        rewards.append(torch.cat([env.step(torch.tensor(step).unsqueeze(1)).reward for step in steps], 1))
    torch.testing.assert_close(rewards[0] - rewards[1], torch.tensor([[0.0, 0.25], [1.0, 0.25]]))


def test_a_wall_counts_before_the_goal_and_the_step_limit():
    env = navigate(step_limit=1)
    env.reset()
    for row in (1, 2):
        put(env, row, 5.0 - 0.254 - 0.02, 0.0)
        env.now.world["segments"][row, 4:], env.now.world["circles"][row] = 1e6, 1e6
        env.now.world["route"][row, 0] = torch.tensor([5.0, 0.0])
    env.now.state[1, 3] = 1.0  # into the wall, by which the goal is; the other one stops in time
    found = env.step(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]]]))
    assert found.success.tolist() == [False, False, True, False]
    assert found.terminated.tolist() == [False, True, True, False]
    assert found.truncated.tolist() == [True, False, False, True]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_episodes_happen_in_the_worlds_of_their_split(split):
    env, starts = navigate(3, split=split), torch.tensor([5, 0, 300])
    env.reset(starts=starts)
    assert torch.equal(env.now.world["circles"], worlds(Navigate(), split, starts)["circles"])
    assert torch.equal(env.now.state[:, :3], worlds(Navigate(), split, starts)["pose"])


def test_the_goal_is_seen_from_the_vehicle():
    mdp, env = Navigate(), navigate(1)
    env.reset()
    world, state = env.now.world, torch.tensor([[1.0, 2.0, math.pi / 2.0, 0.5, 0.0, -0.3, 0.0]])
    world["route"][0, 0] = torch.tensor([-2.0, 6.0])  # 3 m to the left, 4 m ahead of a vehicle facing along y
    seen = mdp.observe(Moment(state, env.now.ranges, torch.tensor([30]), env.now.memory, world))
    assert seen["goal_distance"].tolist() == [[5.0]]
    assert seen["goal_direction"][0].tolist() == pytest.approx([0.8, 0.6], abs=1e-6)
    assert seen["velocity"][0].tolist() == pytest.approx([0.5, -0.3])
    assert seen["time"][0].tolist() == pytest.approx([3.0])
    assert env.contract.observation["path_length"].privileged


def test_odometry_drifts_by_what_the_world_says():
    env = navigate(64, split="eval")
    drifting = NavigateTask(guard=False).environment(64, "drift", "eval")
    for each in (env, drifting):
        each.reset(starts=torch.arange(64))
    ahead = torch.tensor([[[0.6, 0.3]]]).expand(64, 1, 2)
    found = [[each.step(ahead).observation for _ in range(40)][-1] for each in (env, drifting)]
    path = env.now.memory[:, 0]
    kept = (env.now.steps == 40) & (path > 1.5)  # the others have touched something
    assert kept.sum() > 20
    goals = [each["goal_distance"] * each["goal_direction"] for each in found]
    off = (goals[1] - goals[0]).norm(dim=1)[kept]
    limit = 0.01 * path + 0.005 * path * (path + env.now.world["length_m"])
    assert (off < limit[kept]).all()
    assert off.mean() > 0.02
    drift = env.now.world["odometry"][:, 1]
    assert torch.allclose(drifting.now.memory[:, 3], 0.005 * drift * path, atol=1e-4)
    assert torch.equal(env.now.state, drifting.now.state)
    assert not torch.equal(env.now.ranges, drifting.now.ranges)  # three times the noise


def test_maps_go_on_where_they_were_saved_and_begin_anew_with_episodes():
    env = navigate(3, mapped=True)
    env.reset(starts=torch.arange(3))
    first = env.now.map.clone()
    turn = torch.tensor([[[0.5, 0.5]]]).expand(3, 1, 2)
    for _ in range(7):
        env.step(turn)
    saved = env.state_dict()
    after = [env.step(turn).observation for _ in range(7)][-1]
    env.load_state_dict(saved)
    again = [env.step(turn).observation for _ in range(7)][-1]
    assert torch.equal(after["waypoints"], again["waypoints"])
    seen = env.map.hit_cells(env.now.map).sum((1, 2))
    assert (seen > env.map.hit_cells(first).sum((1, 2))).all()
    env.reset(torch.tensor([False, True, False]), starts=torch.arange(3))
    assert torch.equal(env.now.map[1], first[1])


def test_what_maps_tell_is_always_that_of_now():
    env = navigate(3, mapped=True)
    turn = torch.tensor([[[0.5, 1.0]]] * 3)

    def fresh(observation) -> bool:
        return all(torch.equal(observation[key], told) for key, told in env.map.observe(env.now.map).items())

    assert fresh(env.reset(starts=torch.arange(3)))
    saved = env.state_dict()
    assert fresh([env.step(turn).observation for _ in range(9)][-1])
    assert fresh(env.reset(torch.tensor([False, True, False]), starts=torch.arange(3, 6)))
    env.load_state_dict(saved)
    assert fresh(env.observe())


def stepped(mdp, before: Moment, state: torch.Tensor, steps: torch.Tensor) -> Moment:
    """A control step of one vehicle from `before` to `state`, without contact or a change of command."""
    still, zero = torch.zeros(1, dtype=torch.bool), torch.zeros(1, 2)
    now = replace(before, state=state, steps=steps, hit=still, action=zero, previous=zero, before=before)
    now.memory = mdp.update(now)
    return now


class LateSuccess(Navigate):
    """A task that only the step limit ends: with success, except after two steps."""

    def terminated(self, now: Moment) -> torch.Tensor:
        return torch.zeros_like(now.hit)

    def success(self, now: Moment) -> torch.Tensor:
        return now.steps != 2


@pytest.mark.parametrize("executed", [1, 2])
@pytest.mark.parametrize("step_limit", [2, 4])
def test_success_is_that_at_the_end_of_an_episode(executed: int, step_limit: int):
    env = VehicleEnvironment(2, mdp=LateSuccess(), vehicle=JACKAL, executed=executed, step_limit=step_limit)
    env.reset()
    actions, successes = torch.zeros(2, executed, 2), []
    while not env.done.all():
        successes.append(env.step(actions).success.tolist())
    assert successes[-1] == [step_limit != 2] * 2
    assert not any(map(any, successes[:-1]))


def test_laps_are_counted_forwards_and_a_race_ends_after_the_last():
    env = race(1)
    env.reset(starts=torch.tensor([3]))
    mdp, line, length = Race(), env.now.world["route"][0], float(env.now.world["length_m"][0])
    now = env.now
    for step in range(1, 2 * 3 * 64 + 3):
        state = env.now.state.clone()
        state[0, :2] = line[(2 * step) % 128]
        now = stepped(mdp, now, state, torch.tensor([step], dtype=torch.int32))
        assert bool(mdp.success(now)) == bool(mdp.finished(now))
        if mdp.finished(now):
            break
    assert now.memory[0, 2] == 3.0
    assert abs(step - 192) <= 1
    assert now.memory[0, 0] == pytest.approx(3.0 * length, rel=0.01)
    assert mdp.metrics(now)["lap_time_s"][0] == pytest.approx(64 * 0.05, abs=0.02)
    # backwards is no lap
    now = env.now
    for step in range(1, 100):
        state[0, :2] = line[(-2 * step) % 128]
        now = stepped(mdp, now, state.clone(), env.now.steps)
        assert mdp.reward(now)[0] < 0
    assert now.memory[0, 2] == 0.0


def test_progress_between_two_points_of_the_middle_line_is_even_not_in_jumps_from_one_to_the_next():
    env = race(1)
    env.reset(starts=torch.tensor([3]))
    mdp, line, length = Race(), env.now.world["route"][0], float(env.now.world["length_m"][0])
    now, state = env.now, env.now.state.clone()
    rewards = []
    for tenths in range(100):
        share = tenths % 10 / 10.0
        state[0, :2] = (1.0 - share) * line[tenths // 10] + share * line[tenths // 10 + 1]
        now = stepped(mdp, now, state.clone(), env.now.steps)
        rewards.append(float(mdp.reward(now)[0]))
    assert rewards[1:] == pytest.approx([length / 1280] * 99, rel=0.3)


def test_the_critic_observes_the_centre_line_in_the_frame_of_the_car():
    env = race(8)
    observation = env.reset()
    route = observation["route"]
    assert (route[:, 0].norm(dim=1) < 0.6).all()
    assert (route[:, 5, 0] > 1.0).all()  # ahead
    assert env.contract.observation["route"].privileged


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("make", [navigate, race])
def test_both_back_ends_drive_the_same_episodes(make):
    ours, oracle = make(16, backend="c"), make(16, backend="torch")
    for env in (ours, oracle):
        env.reset()
    low, high = torch.tensor(ours.contract.action.low), torch.tensor(ours.contract.action.high)
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        actions = low + (high - low) * torch.rand(16, 1, 2, generator=g)
        one, two = ours.step(actions), oracle.step(actions)
    assert torch.equal(one.done, two.done)
    assert torch.allclose(ours.now.state, oracle.now.state, atol=2e-3)
    assert ((one.observation["lidar"] - two.observation["lidar"]).abs() > 2e-2).float().mean() < 0.01


def test_options_of_the_task_reach_its_environments():
    task = RaceTask(vehicle={"friction": 0.6}, lidar={"beams": 31.0}, numbers={"laps": 1.0}, randomisation=0.2)
    env = task.environment(50, "tracks", "train")
    observation = env.reset()
    assert observation["lidar"].shape == (50, 31)
    friction = env.parameters[:, PARAMETERS.index("friction")]
    assert 0.48 <= friction.min() < 0.55 < 0.65 < friction.max() <= 0.72
    assert env.mdp.laps == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vehicle": {"weight": 1.0}}, "mass_kg"),
        ({"numbers": {"laps": 1.0}}, "goal_m"),
        ({"lidar": {"beams": 1.0}}, "beams"),
        ({"randomisation": 1.0}, "randomisation"),
        ({"step_limit": 0}, "step_limit"),
    ],
)
def test_options_that_there_are_not_are_refused(options, message: str):
    with pytest.raises(ValueError, match=message):
        NavigateTask(**options)


@pytest.mark.parametrize("kind", [NavigateTask, RaceTask])
def test_options_are_the_goals_own_numbers(kind):
    task = kind()
    assert task.driven == (kind.VEHICLE, kind.MDP.LIDAR, kind.MDP)
    assert task.numbers.keys() == vars(kind.MDP).keys()
    for options in (task.vehicle, task.numbers, task.lidar):
        assert all(type(value) is float for value in options.values())


def test_pictures_and_films_of_policies(tmp_path):
    task = NavigateTask(step_limit=6)

    class Straight:
        contract = task.contract("rooms")

        def act(self, observation, *, deterministic=False, generator=None) -> Decision:
            actions = torch.tensor([[[1.0, 0.0]]]).expand(len(observation), 1, 2)
            return Decision(actions, observation.empty(), torch.zeros(len(observation), 1, 1))

    task.video(tmp_path / "video.mp4", {"straight": Straight()}, "cpu")
    assert (tmp_path / "video.mp4").stat().st_size > 1000
    assert (tmp_path / "trajectories.png").exists()


def test_a_guard_replaces_dangerous_commands_of_the_environment_and_tells_how_many():
    alone, behind = (NavigateTask(guard=guard).environment(64, "rooms", "eval") for guard in (False, True))
    ahead = torch.tensor([[[1.0, 0.0]]]).expand(64, 1, 2)
    ended = [torch.zeros(64, dtype=torch.bool) for _ in range(2)]
    hits, shares = [0, 0], []
    for env, over, which in ((alone, ended[0], 0), (behind, ended[1], 1)):
        env.reset(starts=torch.arange(64))
        for _ in range(150):
            before = env.now.replaced.clone(), env.now.memory[:, REPLACED].clone()
            transition = env.step(ahead)
            if which:
                differs = (env.now.memory[:, REPLACED] - before[1]) == 1.0
                executed = transition.observation["previous_action"]
                assert ((executed != ahead[:, 0]).any(1) <= differs)[~over].all()
                shares.append(float(differs[~over].float().mean()) if (~over).any() else 0.0)
            over |= transition.done
        hits[which] = int(env.now.hit.sum())
        told = env.mdp.metrics(replace(env.now, succeeded=env.success))["replaced"]
        assert bool((told > 0.0).any()) is bool(which)
        assert torch.allclose(told, env.now.memory[:, REPLACED] / env.now.steps)
    assert hits[0] > 40
    assert hits[1] <= 2
    assert max(shares) > 0.3


def test_a_replaced_command_costs():
    env = NavigateTask(numbers={"weight_replaced": 0.5}).environment(32, "rooms", "eval")
    free = NavigateTask(numbers={"weight_replaced": 0.0}).environment(32, "rooms", "eval")
    ahead = torch.tensor([[[1.0, 0.0]]]).expand(32, 1, 2)
    for each in (env, free):
        each.reset(starts=torch.arange(32))
    seen = 0
    for _ in range(60):
        alive = ~env.done
        rewards = [each.step(ahead).reward for each in (env, free)]
        replaced = env.now.replaced.bool() & alive
        seen += int(replaced.sum())
        assert torch.allclose((rewards[1] - rewards[0])[:, 0], 0.5 * replaced.float(), atol=1e-5)
    assert seen > 20


def test_a_guard_without_a_map_is_refused():
    with pytest.raises(UserError, match=r"use task\.guard=false with task\.map=false"):
        NavigateTask(map=False)
    assert "remembered" not in NavigateTask(map=False, guard=False).contract("rooms").observation


def test_what_is_exported_tells_of_the_guard_that_is_not():
    assert NavigateTask().conditions.trained_for == ("commands that a guard checks, which is not exported",)
    assert NavigateTask(guard=False).conditions.trained_for == ("commands that nobody checks",)


def test_odometry_turns_every_step_by_the_drift_that_there_was_half_way():
    """The estimated path is that of steps, each turned by the drift until its middle: to the left if it is positive."""
    env = NavigateTask(guard=False).environment(16, "drift", "eval")
    env.reset(starts=torch.arange(16))
    ahead = torch.tensor([[[0.6, 0.3]]]).expand(16, 1, 2)
    share, drift = env.now.world["odometry"].unbind(1)
    error, angle = torch.zeros(16, 2), torch.zeros(16)
    for _ in range(20):
        before, running = env.now.state[:, :2].clone(), ~env.done
        env.step(ahead)
        step = env.now.state[:, :2] - before
        turned = env.mdp.odometry_yaw_rad_m * drift * step.norm(dim=1)
        middle = angle + 0.5 * turned
        turn = torch.stack((middle.cos(), -middle.sin(), middle.sin(), middle.cos()), 1).view(-1, 2, 2)
        estimated = (1.0 + env.mdp.odometry_share * share)[:, None] * (turn @ step.unsqueeze(2)).squeeze(2)
        error += torch.where(running[:, None], estimated - step, 0.0)
        angle += torch.where(running, turned, 0.0)
    assert angle.abs().max() > 0.004
    torch.testing.assert_close(env.now.memory[:, 1:3], error, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(env.now.memory[:, 3], angle, atol=1e-5, rtol=1e-3)
