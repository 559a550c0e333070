"""The nearest velocity that keeps the distance is found exactly, and the distance is kept."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Reading
from real_robot.safety.barrier import Barrier, Distance, Motion, _inside, nearest, share
from real_robot.safety.filters import Filters
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety
from tests.real_robot.plant import DT_S, Plant, guarded


def exhaustive(velocity: np.ndarray, normals: np.ndarray, speed: np.ndarray) -> float:
    """Distance to the nearest of all points where some half-spaces are tight and none is violated."""
    best = math.inf
    for size in range(len(velocity) + 1):
        for rows in map(list, itertools.combinations(range(len(normals)), size)):
            tight = normals[rows]
            multipliers = np.linalg.lstsq(tight @ tight.T, -(tight @ velocity + speed[rows]), rcond=None)[0]
            point = velocity + multipliers @ tight
            if (normals @ point >= -speed - 1e-9).all():
                best = min(best, float(np.linalg.norm(point - velocity)))
    return best


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3), count=st.integers(0, 6), tight=st.booleans())
def test_the_nearest_velocity_is_found(seed, size, count, tight):
    rng = np.random.default_rng(seed)
    normals = rng.normal(size=(count, size))
    if count > 1 and rng.random() < 0.2:
        normals[1] = normals[0]  # parallel
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    speed = rng.uniform(0.0, 1.0, count) * (rng.random(count) > 0.4 * tight)
    velocity = 2.0 * rng.normal(size=size)
    found = nearest(velocity, normals, speed)
    assert found is not None
    assert (normals @ found >= -speed - 2e-9).all()
    assert np.linalg.norm(found - velocity) <= exhaustive(velocity, normals, speed) + 1e-7


def test_half_spaces_that_contradict_each_other_have_no_nearest_point():
    normals = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert nearest(np.array([3.0, 1.0]), normals, np.array([-1.0, -1.0, 0.0])) is None


def test_one_half_space_is_the_closed_form():
    normal, velocity = np.array([0.6, 0.8]), np.array([-1.0, -1.0])
    wanted = velocity + (1.4 - 0.5) * normal  # n v = -1.4, allowed -0.5
    np.testing.assert_allclose(nearest(velocity, normal[None], np.array([0.5])), wanted)


def clearance(position: np.ndarray, planes: list, spheres: list) -> float:
    flat = [
        np.dot(row[:-1], position) / np.linalg.norm(row[:-1]) - row[-1] / np.linalg.norm(row[:-1]) for row in planes
    ]
    round_ = [np.linalg.norm(position - row[:-1]) - row[-1] for row in spheres]
    return float(min(flat + round_))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), limited=st.booleans(), kind=st.sampled_from([Kind.VELOCITY, Kind.DELTA]))
def test_a_point_keeps_its_distance_whatever_is_asked_for(seed, limited, kind):
    rng = np.random.default_rng(seed)
    planes = [[2.0, 0.0, 0.0, -1.6], [-1.0, -1.0, 0.0, -1.5]]
    spheres = [[*rng.uniform(-1, 1, 3), 0.1] for _ in range(3)]
    start = rng.uniform(-0.6, 0.6, 3)
    if clearance(start, planes, spheres) < 0.1:
        return
    plant = Plant(kind, start)
    # braking in any direction is at least as hard as along one axis
    element = ElementLimits(kind, velocity=2.0, acceleration=8.0 if limited else math.inf)
    distance = Distance(
        ["a", "b", "c"],
        position="position",
        planes=planes,
        spheres=spheres,
        margin_m=0.05,
        acceleration=4.0 if limited else math.inf,
    )
    safety = guarded(plant, Limits(dict.fromkeys("abc", element), distance=distance))
    for _ in range(15):
        wanted = 3.0 * rng.normal(size=3) * (DT_S if kind is Kind.DELTA else 1.0)
        for _ in range(20):
            assert safety.command(wanted, plant.tick()).action is not None
            # exact without other limits; in corners, braking of each element may use up some of the margin
            assert clearance(plant.position, planes, spheres) >= (0.04 if limited else 0.05 - 1e-9)


def test_a_limit_that_is_exceeded_slows_the_velocity_and_does_not_turn_it_toward_an_obstacle():
    plant = Plant(Kind.VELOCITY, np.full(3, -5.0))
    slow, free = (
        ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=5.0),
        ElementLimits(Kind.VELOCITY, velocity=1.0),
    )
    planes = [[-0.6, -0.8, 0.0, 0.0], [0.0, 0.0, -1.0, 0.0]]
    distance = Distance(["a", "b", "c"], position="position", planes=planes, acceleration=5.0)
    safety = guarded(plant, Limits({"a": free, "b": free, "c": slow}, distance=distance))
    for _ in range(40):
        safety.command(np.array([0.0, 0.0, 1.0]), plant.tick())
    plant.position[:] = 0.0  # c can't brake at once, so no command within all limits keeps distance
    action = safety.command(np.array([-1.0, 1.0, 1.0]), plant.tick()).action
    assert action is not None
    np.testing.assert_allclose(action[:2], np.array([-1.12, 0.84]) / 1.12)  # along the first plane


class Vehicle:
    """A point with a heading among round posts, which it sees all around."""

    ANGLES = np.linspace(-math.pi, math.pi, 181)[:-1]

    def __init__(self, seed: int, motion: Motion) -> None:
        rng = np.random.default_rng(seed)
        self.posts = [(x, y, 0.15) for x, y in rng.uniform(-3.0, 3.0, (25, 2)) if math.hypot(x, y) > 0.9]
        action = TensorSpec((2,), names=("speed", "turn"), low=(-1.0, -0.5), high=(1.0, 0.5))
        self.contract = Contract({"ranges": TensorSpec((180,), unit="m")}, action, 0.05)
        self.x = self.y = self.heading = 0.0
        self.ticks, self.motion = 0, motion
        self.at_rest = (0.0, math.nan if motion is Motion.STEERED else 0.0)
        self.stops_after_s = None

    def clock(self) -> float:
        return self.ticks * 0.05

    def read(self) -> Reading:
        ranges = np.full(180, 10.0)
        for x, y, radius in self.posts:
            dx, dy = x - self.x, y - self.y
            far = math.hypot(dx, dy)
            off = (self.ANGLES + self.heading - math.atan2(dy, dx) + math.pi) % math.tau - math.pi
            across = far * np.sin(off)
            hit = (np.abs(across) < radius) & (np.abs(off) < math.pi / 2)
            seen = far * np.cos(off) - np.sqrt(np.maximum(radius**2 - across**2, 0.0))
            ranges = np.where(hit, np.minimum(ranges, seen), ranges)
        return Reading({"ranges": ranges}, self.clock(), self.ticks)

    def write(self, action: np.ndarray) -> None:
        speed, turn = action
        if self.motion is Motion.STEERED:
            turn = speed * math.tan(turn) / 0.3
        self.heading += turn * 0.05
        self.x += speed * math.cos(self.heading) * 0.05
        self.y += speed * math.sin(self.heading) * 0.05
        self.ticks += 1

    def hold(self) -> None:
        self.ticks += 1

    def close(self) -> None: ...

    def clearance(self) -> float:
        front = self.x + 0.2 * math.cos(self.heading), self.y + 0.2 * math.sin(self.heading)
        return min(math.hypot(x - front[0], y - front[1]) - radius for x, y, radius in self.posts)


@pytest.mark.parametrize("motion", [Motion.TURNING, Motion.STEERED])
@pytest.mark.parametrize("seed", range(6))
def test_a_vehicle_keeps_its_distance_by_what_it_sees(motion, seed):
    vehicle, rng = Vehicle(seed, motion), np.random.default_rng(seed)
    distance = Distance(
        ["speed", "turn"],
        motion,
        ranges="ranges",
        first_angle_rad=-math.pi,
        angle_step_rad=math.tau / 180,
        ahead_m=0.2,
        wheelbase_m=0.3,
        margin_m=0.2,
        acceleration=3.0,
    )
    turn = ElementLimits(velocity=20.0) if motion is Motion.STEERED else ElementLimits(Kind.VELOCITY, acceleration=20.0)
    commands = {"speed": ElementLimits(Kind.VELOCITY, acceleration=4.0), "turn": turn}
    safety = Safety(vehicle, Limits(commands, distance=distance), vehicle.clock)
    changed, travelled = 0, 0.0
    for _ in range(20):
        wanted = np.array([1.0, rng.uniform(-0.5, 0.5)])
        for _ in range(20):
            verdict = safety.command(wanted, vehicle.read())
            assert verdict.action is not None
            changed += verdict.limited
            travelled += abs(verdict.action[0]) * 0.05
            assert vehicle.clearance() > 0.1
    assert changed > 3  # by more than the acceleration at the beginning
    assert travelled > 0.3


@pytest.mark.parametrize("motion", [Motion.TURNING, Motion.STEERED])
def test_a_vehicle_that_cannot_reverse_moves_and_keeps_its_distance(motion):
    vehicle = Vehicle(2, motion)
    vehicle.contract = replace(vehicle.contract, action=replace(vehicle.contract.action, low=(0.0, -0.5)))
    distance = Distance(
        ["speed", "turn"],
        motion,
        ranges="ranges",
        first_angle_rad=-math.pi,
        angle_step_rad=math.tau / 180,
        ahead_m=0.2,
        wheelbase_m=0.3,
        margin_m=0.2,
        acceleration=3.0,
    )
    turn = ElementLimits(velocity=20.0) if motion is Motion.STEERED else ElementLimits(Kind.VELOCITY, acceleration=20.0)
    commands = {"speed": ElementLimits(Kind.VELOCITY, acceleration=4.0), "turn": turn}
    safety, speeds = Safety(vehicle, Limits(commands, distance=distance), vehicle.clock), []
    for index in range(200):
        verdict = safety.command(np.array([1.0, 0.3 * (-1) ** (index // 40)]), vehicle.read())
        assert verdict.action is not None
        speeds.append(verdict.action[0])
        assert vehicle.clearance() > 0.1
    assert min(speeds) >= 0.0
    assert sum(speeds) * 0.05 > 0.5


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.0)])
def test_a_wall_is_kept_by_every_kind_that_distance_takes_whatever_side_is_closed(kind, low, high):
    plant = Plant(kind, np.zeros(2))
    scale = DT_S if kind is Kind.DELTA else 1.0
    action = replace(plant.contract.action, low=(low * scale,) * 2, high=(high * scale,) * 2)
    plant.contract = replace(plant.contract, action=action)
    walls = [[1.0, 0.0, -0.3], [-1.0, 0.0, -0.3], [0.0, 1.0, -0.3], [0.0, -1.0, -0.3]]
    distance = Distance(["a", "b"], position="position", planes=walls)
    limits = Limits(dict.fromkeys("ab", ElementLimits(kind, velocity=1.0)), distance=distance)
    if kind is Kind.POSITION:
        with pytest.raises(ValueError, match=r"kind VELOCITY or DELTA of 'a' .* `distance` changes velocities"):
            guarded(plant, limits)
        return
    safety, rng = guarded(plant, limits), np.random.default_rng(0)
    for index in range(300):
        wanted = rng.uniform(-2.0, 2.0, 2) + (1.0 if high else -1.0) * (index > 100)
        safety.command(scale * wanted, plant.tick())
        assert (np.abs(plant.position) <= 0.3 + 1e-9).all()
    assert (np.abs(plant.position) > 0.2).all()  # it moved


def test_an_element_without_a_kind_is_no_velocity():
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    plant.contract = replace(plant.contract, action=replace(plant.contract.action, low=(-1.0,) * 2, high=(1.0,) * 2))
    distance = Distance(["a", "b"], position="position", planes=[[1.0, 0.0, -1.0]])
    with pytest.raises(ValueError, match="kind VELOCITY or DELTA of 'a' in `commands`"):
        guarded(plant, Limits(distance=distance))


@pytest.mark.parametrize("braking", [{}, {"acceleration": 6.0}, {"acceleration": 4.0, "jerk": 90.0}])
def test_a_distance_that_counts_on_more_braking_than_the_limits_allow_is_refused(braking):
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    element = ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=5.0, jerk=80.0)
    distance = Distance(["a", "b"], position="position", planes=[[1.0, 0.0, -1.0]], **braking)
    with pytest.raises(ValueError, match="the robot could not stop in time; use distance"):
        Safety(plant, Limits(dict.fromkeys("ab", element), distance=distance), plant.clock)


@pytest.mark.parametrize("motion", [Motion.TURNING, Motion.STEERED])
def test_a_vehicle_slows_down_for_a_post_on_its_left_as_far_as_it_turns_there(motion):
    distance = Distance(
        ["speed", "turn"],
        motion,
        ranges="r",
        first_angle_rad=-math.pi / 4,
        angle_step_rad=math.pi / 4,
        ahead_m=0.2,
        wheelbase_m=0.3,
        margin_m=0.2,
    )
    barrier, seen = Barrier(distance, dt_s=0.05, pause_s=0.95), {"r": np.array([10.0, 10.0, 0.5])}
    way = np.array([0.5 * math.cos(math.pi / 4) - 0.2, 0.5 * math.sin(math.pi / 4)])  # from the point in front
    room = np.linalg.norm(way) - 0.2  # within a second, which braking takes
    toward = way / np.linalg.norm(way)
    for turn in (-0.5, 0.5):
        speed, kept = barrier.filter(np.array([1.0, turn]), seen)
        sideways = 0.2 * kept if motion is Motion.TURNING else 0.2 * speed * math.tan(kept) / 0.3
        pace = toward @ (speed, sideways)
        free = toward @ (1.0, 0.2 * turn if motion is Motion.TURNING else 0.2 * math.tan(turn) / 0.3)
        assert pace == pytest.approx(min(free, room))
        assert (speed, kept) == pytest.approx((1.0, turn)) or free > room
        assert motion is Motion.TURNING or kept == turn
    assert (free > room, speed < 1.0) == (True, True)  # to the left


@pytest.mark.parametrize(("jerk", "lag_s"), [(math.inf, 0.05), (10.0, 0.15)])
def test_speed_toward_an_obstacle_is_what_braking_allows(jerk, lag_s):
    distance = Distance(["a"], position="p", planes=[[1.0, 0.0]], margin_m=0.1, acceleration=2.0, jerk=jerk)
    barrier = Barrier(distance, dt_s=0.01, pause_s=0.04)
    for x in (0.1, 0.2, 1.0):
        speed = -barrier.filter(np.array([-99.0]), {"p": np.array([x])})[0]
        assert speed * lag_s + speed**2 / (2 * 2.0) == pytest.approx(x - 0.1, abs=1e-12)
    assert barrier.filter(np.array([3.0]), {"p": np.array([0.0])})[0] == 3.0  # away, also from inside the margin
    assert barrier.filter(np.array([-1.0]), {"p": np.array([0.0])})[0] == 0.0


@pytest.mark.parametrize(
    ("recent", "nearer_m"),  # newest first, m/s in periods of 0.1 s
    [
        ([[-1.0, 0.0], [-2.0, 0.0]], 0.3),  # both may not be measured yet
        ([[-1.0, 0.0], [2.0, 0.0]], 0.1),  # the newer one alone
        ([[1.0, 0.0], [-2.0, 0.0]], 0.1),
        ([[0.5, -3.0], [0.5, -3.0]], 0.0),
    ],
)
def test_motion_that_is_not_measured_yet_uses_up_room(recent, nearer_m):
    distance = Distance(["a", "b"], position="p", planes=[[1.0, 0.0, 0.0]], acceleration=2.0)
    barrier = Barrier(distance, dt_s=0.1)
    velocity, position = np.array([-9.0, 1.0]), np.array([1.0, 0.0])
    found = barrier.filter(velocity, {"p": position}, recent=np.array(recent))
    expected = barrier.filter(velocity, {"p": position - [nearer_m, 0.0]})
    assert found == pytest.approx(expected, abs=1e-12)
    assert found[0] < 0.0


@pytest.mark.parametrize(
    ("distance", "observation", "normals", "room"),
    [
        # 5 m from the sphere's centre, and 3 m on the far side of the plane 0.6 x + 0.8 y >= 2
        (
            Distance(["a", "b"], position="p", planes=[[3.0, 4.0, 10.0]], spheres=[[0.0, 0.0, 1.0]], margin_m=0.5),
            {"p": np.array([3.0, 4.0])},
            [[0.6, 0.8], [0.6, 0.8]],
            [5.0 - 2.0 - 0.5, 5.0 - 1.0 - 0.5],
        ),
        # posts at (1.2, 0) and (0, 0.6), seen from the point (0.2, 0)
        (
            Distance(
                ["v", "w"],
                Motion.TURNING,
                ranges="p",
                first_angle_rad=0.0,
                angle_step_rad=math.pi / 2,
                ahead_m=0.2,
                margin_m=0.5,
            ),
            {"p": np.array([1.2, 0.6])},
            [[-1.0, 0.0], [0.2 / math.sqrt(0.4), -0.6 / math.sqrt(0.4)]],
            [1.0 - 0.5, math.sqrt(0.4) - 0.5],
        ),
    ],
)
def test_directions_away_from_obstacles_and_the_room(distance: Distance, observation, normals, room):
    barrier = Barrier(distance, dt_s=0.1)
    measure = barrier._from_shapes if distance.position else barrier._from_ranges
    away, left = measure(observation["p"])
    np.testing.assert_allclose(away, normals, atol=1e-12)
    np.testing.assert_allclose(left, room, atol=1e-12)


@pytest.mark.parametrize(
    ("motion", "velocity", "of_point"),
    [
        (Motion.POINT, (2.0, 3.0), (2.0, 3.0)),
        (Motion.TURNING, (2.0, 3.0), (2.0, 0.6)),
        (Motion.STEERED, (2.0, math.pi / 4), (2.0, 2.0 * 0.2 / 0.4)),
    ],
)
def test_velocity_of_the_point_ahead(motion: Motion, velocity: tuple[float, float], of_point: tuple[float, float]):
    where = {"position": "p", "planes": [[1.0, 0.0, 0.0]]} if motion is Motion.POINT else {"ranges": "p"}
    distance = Distance(["v", "w"], motion, **where, angle_step_rad=0.1, ahead_m=0.2, wheelbase_m=0.4)
    np.testing.assert_allclose(Barrier(distance, dt_s=0.1)._of_point(np.array(velocity)), of_point)


def test_half_spaces_beyond_reach_are_exceeded_as_little_as_possible():
    reach = np.array([-1.0, 0.4]), np.array([1.0, 2.0])
    cases = [
        ([[0.0, -1.0]], [-3.0], [0.5, 0.4]),  # y <= -3 is not in reach: what brakes most is
        ([[0.0, -1.0]], [1.0], [0.5, 1.0]),  # y <= 1
        ([[1.0, 0.0], [-1.0, 0.0]], [-0.6, -0.6], [0.0, 1.5]),  # x >= 0.6 and x <= -0.6: both by 0.6
    ]
    for normals, speed, nearest_point in cases:
        point = _inside(np.array([0.5, 1.5]), np.array(normals), np.array(speed), reach)
        assert point == pytest.approx(nearest_point, abs=0.01)
    assert _inside(np.array([9.0, 0.0]), np.array([[1.0, 0.0]]), np.array([0.0]), reach) == pytest.approx([1.0, 0.4])


def test_who_goes_on_for_the_time_out_of_commands_keeps_room_for_it():
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    distance = Distance(["a", "b"], position="position", planes=[[1.0, 0.0, -1.0]])
    for kinds, pause_s in (("VV", 0.2), ("VD", 0.2), ("DV", 0.2), ("DD", 0.0)):
        commands = {
            name: ElementLimits({"V": Kind.VELOCITY, "D": Kind.DELTA}[kind], velocity=1.0)
            for name, kind in zip("ab", kinds, strict=True)
        }
        filters = Filters(plant.contract, Limits(commands, distance=distance, command_timeout_s=0.2), (0.0, 0.0))
        assert filters._distance._barrier._lag == pytest.approx(DT_S + pause_s)


def test_the_largest_share_of_a_velocity_that_keeps_every_distance():
    normals = np.array([[-1.0, 0.0], [0.0, -1.0], [1.0, 0.0]])
    assert share(np.array([2.0, 4.0]), normals, np.array([1.0, 3.0, 0.0])) == 0.5
    assert share(np.array([2.0, 4.0]), normals, np.array([1.9, 1.0, 0.0])) == 0.25
    assert share(np.array([2.0, 4.0]), normals, np.array([2.0, 4.0, 0.0])) == 1.0


WALL = [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elements": ["a"]}, "expected `position`"),
        ({"elements": ["a"], "position": "p", "planes": [[1.0]]}, "rows of 2 numbers"),
        ({"elements": ["a"], "position": "p"}, "expected `planes` or `spheres`"),
        ({"elements": ["a", "b"], "motion": Motion.TURNING, "ranges": "r", "ahead_m": 0.1}, "expected angle_step_rad"),
        ({"elements": ["a"], "motion": Motion.TURNING, "ranges": "r"}, "two elements"),
        ({"elements": ["a", "b"], "motion": Motion.STEERED, "ranges": "r", "ahead_m": 0.1}, "wheelbase_m"),
        (
            {"elements": ["a"], "position": "p", "planes": WALL, "acceleration": 0.0},
            "acceleration=0: expected a number above 0",
        ),
        ({"elements": ["a"], "position": "p", "planes": WALL, "jerk": 9.0}, "acceleration together"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Distance(**fields)
