"""Practice without resets: crashes and standstill are noticed, recoveries back out, and everything is counted."""

import math
from pathlib import Path

import pytest
import torch

from embodied.environment import Restorable
from embodied.environments.engine import Unnumbered
from sims.vehicle.episode import FORWARD, STEERING, YAW, X, Y
from sims.vehicle.places.tracks import POINTS
from sims.vehicle.practice import AIMED_RAD, LEG_STEPS, RECOVERY_STEPS, STUCK_STEPS, PracticeEnvironment
from sims.vehicle.task import PracticeTask

SPEED = 3.0


def practising(**options) -> PracticeEnvironment:
    env = PracticeTask(**options).environment(1, "track", "train")
    assert isinstance(env, Unnumbered)  # nobody chooses where an episode begins
    assert isinstance(env.engine, PracticeEnvironment)
    return env.engine


def action(steering: float = 0.0, speed: float = SPEED) -> torch.Tensor:
    return torch.tensor([[[steering, speed]]])


def crash(env: PracticeEnvironment, steering: float = 0.0):
    """Drive on until the car touches a wall; the last transition."""
    for _ in range(200):
        transition = env.step(action(steering))
        if bool(transition.done):
            return transition
    raise AssertionError("no wall within 200 steps")


def angle(env: PracticeEnvironment) -> float:
    x, y = env.observe()["checkpoint"][0].tolist()
    return math.atan2(y, x)


def test_the_next_checkpoint_is_a_half_to_one_and_a_half_spacings_ahead() -> None:
    env = practising()
    env.reset()
    now, mdp = env.now, env.mdp
    spacing = float(now.world["length_m"]) / mdp.checkpoints
    points = now.world["route"][0, :: POINTS // mdp.checkpoints]
    for ahead, number in ((0.0, 1), (0.49, 1), (0.51, 2), (14.51, 0), (15.49, 0), (15.51, 1)):
        now.memory[0, 1] = ahead * spacing
        x, y = env.observe()["checkpoint"][0]
        heading = now.state[0, YAW]
        offset = torch.stack((heading.cos() * x - heading.sin() * y, heading.sin() * x + heading.cos() * y))
        assert torch.allclose(now.state[0, [X, Y]] + offset, points[number], atol=1e-4), ahead


def test_the_reward_is_the_distance_by_which_the_next_checkpoint_comes_nearer() -> None:
    env = practising(numbers={"weight_steering": 0.0})
    env.reset()
    for _ in range(3):
        before, place = env.observe()["checkpoint"][0].norm(), env.now.memory[0, 1].clone()
        transition = env.step(action())
        after = env.now.memory.clone()
        env.now.memory[0, 1] = place  # the same checkpoint
        expected = before - env.observe()["checkpoint"][0].norm()
        env.now.memory = after
        assert transition.reward.item() == pytest.approx(float(expected), abs=1e-5)


def test_a_crash_terminates_and_the_car_backs_out_by_itself() -> None:
    env = practising()
    env.reset()
    transition = crash(env)
    assert (bool(transition.terminated), bool(transition.truncated)) == (True, False)
    assert bool(transition.failures["collision"])
    assert transition.reward.item() < -9.0
    at, turned = env.now.state[0, [X, Y]].clone(), abs(angle(env))
    env.reset()
    assert not bool(env.now.hit)
    assert env.now.state[0, FORWARD:].tolist() == [0.0] * 4
    assert 0.2 < float((env.now.state[0, [X, Y]] - at).norm()) < 3.0
    assert abs(angle(env)) <= max(AIMED_RAD, turned)
    first, second = env.step(action()), env.step(action())
    assert first.executed.all()
    assert not bool(first.done)
    assert first.signals["recoveries"].tolist() == [[1.0]]
    assert 0 < first.signals["recovery_steps"].item() <= RECOVERY_STEPS
    assert [second.signals[name].item() for name in ("recoveries", "recovery_steps", "requests")] == [0.0] * 3


def test_a_car_that_faces_the_wrong_way_turns_round() -> None:
    env = practising()
    env.reset()
    env.now.state[0, YAW] += math.pi
    assert abs(angle(env)) > 2.5
    crash(env)
    env.reset()
    assert abs(angle(env)) <= AIMED_RAD
    assert LEG_STEPS < env._pending[0, 1] < RECOVERY_STEPS


def test_a_car_that_stands_still_is_stuck_which_truncates() -> None:
    env = practising()
    env.reset()
    for step in range(STUCK_STEPS):
        transition = env.step(action(speed=0.0))
        assert bool(transition.done) == (step == STUCK_STEPS - 1)
    assert (bool(transition.terminated), bool(transition.truncated)) == (False, True)
    assert bool(transition.failures["stuck"])
    assert not bool(transition.success)
    env.reset()
    assert env.step(action()).signals["recoveries"].item() == 1.0


def test_a_car_that_moves_is_not_stuck() -> None:
    env = practising()
    env.reset()
    for _ in range(STUCK_STEPS + 5):
        assert not bool(env.step(action(speed=0.5)).truncated)


def test_after_the_time_limit_the_next_episode_begins_where_the_car_is_at_its_speed() -> None:
    env = practising(train_step_limit=20)
    env.reset()
    for _ in range(20):
        transition = env.step(action(speed=1.0))
    assert bool(transition.truncated)
    state = env.now.state.clone()
    env.reset()
    assert torch.equal(env.now.state, state)
    assert state[0, FORWARD] > 0.9
    assert env.step(action()).signals["recoveries"].item() == 0.0


def test_a_person_puts_back_a_car_that_comes_to_no_checkpoint_in_so_many_recoveries() -> None:
    env = practising(tries=2)
    env.reset()
    begin = env.now.state.clone()
    requests = []
    for _ in range(4):
        crash(env, steering=0.4)
        env.reset()
        requests.append(int(env._pending[0, 2]))
        if requests[-1]:
            break
    assert requests == [0, 0, 1]
    assert torch.equal(env.now.state, begin)
    assert env.step(action()).signals["requests"].item() == 1.0


def test_practice_continues_exactly() -> None:
    env, other = practising(), practising()
    assert isinstance(env, Restorable)
    env.reset()
    crash(env)
    env.reset()
    other.load_state_dict(env.state_dict())
    for each in (env, other):
        crash(each, steering=0.1)
        each.reset()
    for name in ("_placed", "_free", "_pending", "_failed", "_reached"):
        assert torch.equal(getattr(env, name), getattr(other, name)), name
    assert torch.equal(env.now.state, other.now.state)
    assert torch.equal(env.now.memory, other.now.memory)
    first, second = (each.step(action()) for each in (env, other))
    assert all(torch.equal(first.observation[key], second.observation[key]) for key in first.observation.keys())  # noqa: SIM118


def test_evaluations_are_laps_of_the_same_track_from_its_beginning() -> None:
    task = PracticeTask()
    env = task.environment(3, "track", "eval")
    env.reset()
    train = practising()
    train.reset()
    route = env.now.world["route"]
    assert torch.equal(route[0], route[2])
    assert torch.equal(route[0], train.now.world["route"][0])
    assert not torch.equal(env.now.state[0], env.now.state[1])
    assert env.now.state[:, FORWARD : STEERING + 1].abs().max() == 0.0
    other = PracticeTask(numbers={"track": 1}).environment(1, "track", "eval")
    other.reset()
    assert not torch.equal(other.now.world["route"][0], route[0])


def test_the_demonstration_is_one_slow_lap(tmp_path: Path) -> None:
    task = PracticeTask()
    lap = task.demonstrations(tmp_path, 0)
    assert len(lap.ends) == 1
    assert lap.failed.tolist() == [False]
    length = float(practising().now.world["length_m"])
    speeds = lap.actions[:, 1]
    assert speeds.max() <= task.demonstrated_m_s
    assert float(speeds.sum()) * 0.05 > 0.95 * length
    assert float(lap.reward.sum()) == pytest.approx(length, rel=0.1)
