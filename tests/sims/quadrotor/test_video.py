"""Videos of quadrotors: the camera follows smoothly, gates change colour, instruments tell what happens."""

import dataclasses
import math
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from PIL import Image

from policies.mlp import MLPConfig
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.task import AnyPlatformTask, HoverTask, RaceTask, RecoverTask, TrackTask
from sims.quadrotor.tasks import race
from sims.quadrotor.tasks.race import Race
from sims.quadrotor.video import filming, gates, hud
from sims.quadrotor.video.camera import Camera, Follow, Spring
from sims.quadrotor.video.canvas import HORIZON, Canvas
from sims.quadrotor.video.gates import State
from sims.quadrotor.video.hud import Instruments

SIZE, FOCAL, DT_S = (320, 240), 230.0, 0.04
SHOWN = Instruments(1.25, 4.0, 8.0, np.full(4, 0.6), np.full(4, 0.7), "lap 1 of 3", pips=(State.next.colour,))


def close_to(picture: np.ndarray, colour: tuple[int, int, int], within: int = 30) -> int:
    """How many pixels of `picture` have about this colour."""
    return int((np.abs(picture.astype(int) - colour).max(-1) < within).sum())


def test_points_are_where_a_pinhole_sees_them():
    camera = Camera(np.zeros(3), np.array([1.0, 0.0, 0.0]), 100.0, (200, 100))
    left, up = camera.pixels(camera.projected(np.array([[2.0, 1.0, 0.0], [4.0, 0.0, 1.0]])))
    np.testing.assert_allclose(left, [50.0, 50.0])  # y is to the left of x
    np.testing.assert_allclose(up, [100.0, 25.0])
    tilted = Camera(np.array([0.0, 0.0, 2.0]), np.array([3.0, 1.0, 1.0]), 100.0, (200, 100))
    far = tilted.pixels(tilted.projected(np.array([3e6, 1e6, 2.0])))
    assert far[1] == pytest.approx(tilted.horizon, abs=1e-3)
    down = Camera(np.array([0.0, 0.0, 2.0]), np.zeros(3), 100.0, (200, 100))
    assert np.isfinite(down.axes).all()
    assert down.horizon < -1000.0


def test_a_spring_follows_without_going_beyond():
    spring = Spring(5.0)
    found = [float(spring.follow(np.array([goal]), DT_S)[0]) for goal in [0.0] + 40 * [1.0]]
    steps = np.diff(found)
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(1.0, abs=0.01)
    assert (steps > 0.0).all()  # so that it never exceeds 1
    assert steps[0] < 0.5 * steps.max()  # it begins slowly


def circle(frames: int):
    """Positions, velocities and the way to the next gate of a drone that flies a circle at 9 m/s."""
    radius, speed = 4.0, 9.0
    for frame in range(frames):
        angle = speed / radius * DT_S * frame
        ahead = np.array([-math.sin(angle), math.cos(angle)])
        to_gate = round(angle / 1.0) + 0.5  # jumps from gate to gate
        to_gate = np.array([-math.sin(to_gate), math.cos(to_gate)])
        position = np.array([radius * math.cos(angle), radius * math.sin(angle), 2.0 + 0.5 * math.sin(angle)])
        yield position, 0.15 * speed * ahead + to_gate


def test_a_chasing_camera_keeps_the_drone_in_the_middle_and_does_not_jerk():
    follow, eyes, views = Follow(1.7, 0.5, 0.0, 0.12), [], []
    for position, ahead in circle(100):
        camera = follow.camera(position, ahead, DT_S, FOCAL, SIZE)
        column, row = camera.pixels(camera.projected(position))
        assert abs(column - SIZE[0] / 2) < 1.0
        assert 0.4 * SIZE[1] < row < 0.7 * SIZE[1]
        assert 1.0 < np.linalg.norm(camera.eye - position) < 4.0
        eyes.append(camera.eye)
        views.append(camera.axes[2])
    turns = np.degrees(np.arccos(np.clip((np.array(views[1:]) * views[:-1]).sum(-1), -1.0, 1.0)))
    assert turns.max() < 9.0  # the drone itself turns by 5 degrees in a frame
    assert np.abs(np.diff(turns)).max() < 1.5
    jerks = np.linalg.norm(np.diff(eyes, n=3, axis=0), axis=1)
    assert jerks[10:].max() < 0.1  # m, of a drone that flies 0.36 m in a frame


def test_the_camera_stays_above_the_floor():
    follow = Follow(1.0, 0.36, -0.65)
    lowest = min(
        follow.camera(np.array([0.0, 0.0, -0.05 * frame]), None, DT_S, FOCAL, SIZE).eye[2] for frame in range(80)
    )
    assert lowest > -0.65


def test_what_is_partly_behind_the_camera_is_cut_off():
    camera = Camera(np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0]), FOCAL, SIZE)
    canvas = Canvas(camera, 1.0)
    before = np.asarray(canvas.image).copy()
    wall = np.array([[-1.0, 0.5, 0.0], [2.0, -1.0, 0.0], [2.0, -1.0, 0.8], [-1.0, 0.5, 0.8]])  # behind it to the left
    canvas.faces(wall[None], np.array([[255.0, 0.0, 0.0]]))
    canvas.lines(np.array([[[-1.0, -0.5, 0.9], [2.0, 1.0, 0.5]]]), 0.02, (0, 255, 0))  # behind it to the right
    picture = np.asarray(canvas.finished()).astype(int)
    changed = (picture != before).any(-1)
    assert not changed[: SIZE[1] // 2].any()  # all of it is below the eye
    red, green = picture[..., 0] - picture[..., 1] > 100, picture[..., 1] - picture[..., 0] > 100
    middle = SIZE[0] // 2
    assert red[:, middle:].any()
    assert green[:, :middle].any()
    assert not red[:, : middle - 5].any()
    assert not green[:, middle + 5 :].any()


def test_what_is_near_hides_what_is_far():
    camera = Camera(np.zeros(3), np.array([1.0, 0.0, 0.0]), FOCAL, SIZE)
    square = np.array([[0.0, 1.0, 1.0], [0.0, -1.0, 1.0], [0.0, -1.0, -1.0], [0.0, 1.0, -1.0]])
    canvas = Canvas(camera, 10.0)
    for depth, colour in ((2.0, (255.0, 0.0, 0.0)), (5.0, (0.0, 0.0, 255.0))):
        canvas.faces((square + np.array([depth, 0.0, 0.0]))[None], np.array([colour]))
    red, _, blue = canvas.finished().getpixel((SIZE[0] // 2, SIZE[1] // 2))
    assert red > 180 > 60 > blue


def test_gates_are_passed_next_or_ahead():
    kinds = gates.states(4, 2, hit=False, done=False, now=5)
    assert kinds == [State.next, State.ahead, State.ahead, State.ahead, State.passed, State.now]
    assert gates.states(4, 2, hit=True, done=False, now=None)[0] is State.hit
    assert set(gates.states(4, 0, hit=False, done=True, now=None)) == {State.passed}


def racing(aside_m: float) -> tuple[QuadrotorEnvironment, filming._Flight, int]:
    """A race whose drone is about to cross the plane of its first gate, `aside_m` from the middle, and the gate."""
    env = QuadrotorEnvironment(1, mdp=Race(), split="eval")
    env.reset(starts=torch.tensor([0]))
    number = int(env.plan[0, 0])
    gate = race.TRACK[number]
    nx, ny = gate.normal
    state = env._state.clone()
    state[:3, 0] = torch.tensor([gate.x - 1.6 * nx - aside_m * ny, gate.y - 1.6 * ny + aside_m * nx, gate.z])
    state[7:10, 0] = torch.tensor([8.0 * nx, 8.0 * ny, 0.0])
    env._state = state
    return env, filming._Flight(env, 0.05), number


@pytest.mark.parametrize(("aside_m", "after"), [(0.0, State.now), (0.9, State.hit)])
def test_the_next_gate_changes_its_colour_when_it_is_passed_or_hit(aside_m: float, after: State):
    env, flight, number = racing(aside_m)
    (before,) = flight.render(np.arange(1))
    assert before.shape == (filming.HEIGHT, filming.WIDTH, 3)
    for _ in range(24):
        env.step(torch.zeros(1, 1, 4))
    (passed,) = flight.render(np.arange(1))
    scene = slice(55, 210), slice(0, 280)  # neither instruments nor the map
    framed = (0.8 * np.array(State.next.colour) + 0.2 * np.array(HORIZON)).astype(int)
    assert close_to(before[scene], framed) > 1000
    assert close_to(passed[scene], framed) < 50
    pips = slice(27, 37), slice(7, 20)
    assert close_to(before[pips], State.next.colour) > 20
    assert close_to(passed[pips], after.colour) > 20
    assert flight.races[0].last == (number if after is State.now else None)


def test_a_gate_is_shown_as_passed_now_for_a_moment_only():
    env, flight, number = racing(0.0)
    colours = []
    for _ in range(20):
        flight.render(np.arange(1))
        found = filming.states(number, filming.Snapshot.of(env), 0, flight.races[0], env.mdp)
        colours.append(found[number])
        for _ in range(4):
            env.step(torch.full((1, 1, 4), 0.3))
    assert colours[0] is State.next
    assert State.now in colours
    assert colours[-1] is State.passed


def test_a_race_keeps_the_step_at_which_each_lap_ended():
    env, flight, number = racing(0.0)
    for laps, ended in ((0, 0), (1, 300), (1, 300), (2, 570)):
        snapshot = dataclasses.replace(filming.Snapshot.of(env), memory=np.array([[0.0, laps, ended, 0.0]]))
        filming.states(number, snapshot, 0, flight.races[0], env.mdp)
    assert flight.races[0].laps == [0, 300, 570]


def test_instruments_are_drawn_in_their_corners():
    def drawn(**changes) -> np.ndarray:
        image = Image.new("RGB", SIZE)
        hud.draw(image, dataclasses.replace(SHOWN, **changes))
        return np.asarray(image).astype(int)

    plain = drawn()
    width, height = SIZE
    corners = {
        "time_s": (slice(0, 40), slice(width // 2, width)),
        "speed_m_s": (slice(height - 60, height), slice(0, width // 2)),
        "rotors": (slice(height - 60, height), slice(width // 2, width)),
        "title": (slice(0, 40), slice(0, width // 2)),
    }
    others = {"time_s": 9.5, "speed_m_s": 7.5, "rotors": np.array([0.1, 0.2, 0.9, 1.0]), "title": "lap 2 of 3"}
    for name, corner in corners.items():
        changed = (drawn(**{name: others[name]}) != plain).any(-1)
        assert changed[corner].any(), name
        changed[corner] = False
        assert not changed.any(), name
    middle = slice(height // 2, height - 50), slice(70, width - 70)
    assert close_to(drawn(ending="3 laps in 9.90 s", won=True)[middle], hud.GOOD) > 20
    assert close_to(drawn(ending="hit a gate")[middle], hud.BAD) > 20
    full = np.array([0.0, 0.0, 0.0, 1.0])
    bars = drawn(rotors=full, commanded=full)[height - 53 : height - 20, width - 55 :]
    filled = [close_to(bars[:, 12 * number : 12 * number + 12], hud.ROTOR, 5) > 100 for number in range(4)]
    assert filled == [False, False, False, True]


@pytest.mark.parametrize("kind", [HoverTask, TrackTask, RecoverTask, RaceTask, AnyPlatformTask])
def test_every_task_is_filmed_with_a_drone_in_the_middle(kind: type, tmp_path: Path):
    task = kind(step_limit=8)
    env = task.environment(8, task.distributions[0], "train")
    policy = MLPConfig().build(env.contract)
    policy.fit(env.reset(), torch.zeros(8, 1, 4))
    task.video(tmp_path / "video.mp4", {"before": policy}, "cpu")
    video = iio.imread(tmp_path / "video.mp4", plugin="FFMPEG")
    assert video.shape == (3, filming.HEIGHT + 34, filming.FILMED * (filming.WIDTH + 8), 3)
    assert (tmp_path / "trajectories.png").exists()
    for column in range(filming.FILMED):
        left = column * (filming.WIDTH + 8) + 4
        middle = video[0, 30 + 90 : 30 + 200, left + 120 : left + 250].astype(int)
        assert (middle[..., 0] - middle[..., 2] > 60).sum() > 20, column  # its red rotors
