"""The state machine, bounds on observations, and guarantees for a robot's own programs."""

import ast
import copy
import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Reading
from real_robot.safety.energy_tank import Tank
from real_robot.safety.filters import Filters, action_names
from real_robot.safety.inputs import Command
from real_robot.safety.limits import ElementLimits, Kind, Limits, ObservedRange, load_limits, read_limits
from real_robot.safety.safety import Bounds, Safety, State, _travel
from tests.real_robot.plant import DT_S, Plant, contract, guarded

ROOT = Path(__file__).parents[3]
VELOCITY = {name: ElementLimits(Kind.VELOCITY, velocity=1.0) for name in "ab"}


def make(limits: Limits | None = None, kind: Kind = Kind.VELOCITY) -> tuple[Plant, Safety]:
    plant = Plant(kind, np.zeros(2))
    return plant, guarded(plant, limits or Limits(dict(VELOCITY)))


def test_from_ready_to_active_to_holding_and_back():
    plant, safety = make()
    assert safety.state is State.READY
    assert safety.command(np.ones(2), plant.tick()).state is State.ACTIVE
    assert safety.command(None, plant.tick()).reason == "no command"
    assert safety.state is State.HOLDING
    assert safety.command(np.ones(2), plant.tick()).state is State.ACTIVE


def test_a_bad_measurement_is_bad_as_often_as_it_is_read():
    plant, safety = make()
    broken = replace(plant.tick(), observation={"position": np.array([np.nan, 0.0])})
    for _ in range(3):
        assert "not finite" in safety.command(np.ones(2), broken).reason
    assert safety.state is State.READY
    assert plant.commands == []  # nothing moved yet


def test_a_measurement_may_be_used_until_it_is_stale():
    plant, safety = make(Limits(dict(VELOCITY), observation_timeout_s=2.5 * DT_S))
    reading = plant.tick()
    plant.ticks -= 1
    states = []
    for _ in range(5):
        plant.ticks += 1
        states.append(safety.command(np.ones(2), reading).state)
    assert states == [State.ACTIVE] * 3 + [State.HOLDING] * 2


def test_stamps_may_lie_as_far_in_the_future_as_clocks_may_differ():
    plant, safety = make(Limits(dict(VELOCITY), clock_error_s=0.005))
    reading = plant.tick()

    def reason(command_s: float, measurement_s: float) -> str:
        ahead = replace(reading, stamp_s=reading.stamp_s + measurement_s)
        return safety.command(Command(np.ones(2), reading.stamp_s + command_s), ahead).reason

    assert reason(0.004, 0.004) == ""
    assert reason(0.006, 0.004).startswith("command from 0.006 s in the future, limit 0.005 s: the computers' clocks")
    assert reason(0.004, 0.016).startswith(
        "measurement from 0.016 s in the future, limit 0.005 s: the computers' clocks"
    )


def test_no_more_commands_than_periods_reach_the_robot():
    plant, safety = make()
    reading = plant.tick()
    verdicts = [safety.command(np.ones(2), reading) for _ in range(5)]
    assert [verdict.action is not None for verdict in verdicts] == [True, True, False, False, False]
    assert verdicts[-1].reason == "sooner than the control period"
    assert verdicts[-1].state is State.ACTIVE
    plant.ticks += 1
    assert safety.command(np.ones(2), reading).action is not None


def test_a_pause_begins_again_from_where_the_robot_is():
    limits = ElementLimits(low=-1.0, high=1.0, velocity=1.0, acceleration=5.0, measured="position.a")
    plant, safety = make(Limits({"a": limits, "b": replace(limits, measured="position.b")}), Kind.POSITION)
    for _ in range(30):
        safety.command(np.ones(2), plant.tick())
    before = plant.position.copy()
    plant.ticks += 50
    for _ in range(4):  # what is measured after a gap has to be consistent, too
        safety.command(np.ones(2), plant.tick())
    np.testing.assert_allclose(plant.position - before, 3 * 5.0 * DT_S**2)  # from rest again: one step, and two more


@pytest.mark.parametrize(
    ("at_rest", "commands"), [((math.nan, math.nan), False), ((math.nan, 0.0), True), ((0.0, 0.0), True)]
)
def test_a_stop_from_rest_commands_only_what_rests_at_a_value(at_rest, commands):
    limits = {
        name: ElementLimits(Kind.POSITION if math.isnan(rest) else Kind.VELOCITY, velocity=1.0, acceleration=5.0)
        for name, rest in zip("ab", at_rest, strict=True)
    }
    filters = Filters(contract(), Limits(limits), at_rest)
    filters.start(Plant(Kind.VELOCITY, np.zeros(2)).tick().observation, math.inf)
    assert filters.begin_stop() is commands


@pytest.mark.parametrize("kind", [Kind.POSITION, Kind.VELOCITY])
def test_reach_is_what_can_be_commanded_next(kind):
    limits = Limits(dict.fromkeys("ab", ElementLimits(kind, velocity=1.0, acceleration=5.0)))
    filters, rng = Filters(contract(), limits, None), np.random.default_rng(0)
    reading = Plant(kind, np.zeros(2)).tick().observation
    filters.start(reading, 0.0)
    for _ in range(20):
        at_least, at_most = zip(*(axis.reach() for axis in filters._axes), strict=True)
        furthest = [copy.deepcopy(filters).apply(np.full(2, 0.9 * sign), reading, 0.0) for sign in (-1.0, 1.0)]
        np.testing.assert_allclose(furthest, [at_least, at_most])
        filters.apply(rng.uniform(-0.2, 0.2, 2), reading, 0.0)


@pytest.mark.parametrize("late", [0, 3])
def test_a_late_measurement_is_moved_on_to_now(late):
    limits = ElementLimits(Kind.VELOCITY, low=-1.0, high=0.505, velocity=1.0, measured="position.a")
    plant, safety = make(Limits({"a": limits, "b": VELOCITY["b"]}, clock_error_s=0.0))
    readings, asked = [], 0
    while True:
        readings.append(plant.tick())
        if safety.command(np.ones(2), readings[max(0, asked - late)]).limited:
            break
        asked += 1
    assert asked == 40  # 50 periods at 1 m/s lead to the wall, and it may be silent for 10


@pytest.mark.parametrize("late", [1, 3, 6])
@pytest.mark.parametrize("acceleration", [math.inf, 5.0])
def test_a_wall_holds_however_late_it_is_measured(late, acceleration):
    limits = ElementLimits(
        Kind.VELOCITY, low=-1.0, high=0.505, velocity=1.0, acceleration=acceleration, measured="position.a"
    )
    plant, safety = make(Limits({"a": limits, "b": VELOCITY["b"]}))
    readings = [plant.tick()]
    for index in range(200):
        safety.command(np.ones(2), readings[max(0, index - late)])
        readings.append(plant.tick())
        assert plant.position[0] <= 0.505 + 1e-12
    assert plant.position[0] > 0.5


@pytest.mark.parametrize(
    ("outside", "velocity", "starts"),
    # within one period of 0.01 s it moves by velocity / 100; by default it may be off by 0.03 m
    [(0.5, 1.0, False), (0.02, 1.0, False), (0.009, 1.0, True), (0.04, 10.0, False), (0.029, 10.0, True)],
)
def test_a_robot_outside_its_limits_by_more_than_a_period_or_what_it_may_be_off_is_not_commanded(
    outside, velocity, starts
):
    limits = ElementLimits(low=-1.0, high=1.0, velocity=velocity, measured="position.a")
    plant = Plant(Kind.POSITION, np.array([1.0 + outside, 0.0]))
    safety = guarded(plant, Limits({"a": limits, "b": replace(limits, measured="position.b")}))
    verdict = safety.command(np.array([1.0, 0.0]), plant.tick())
    assert (verdict.state is State.ACTIVE) == starts
    assert ("a is outside its limits: move it inside by hand" in verdict.reason) != starts
    np.testing.assert_allclose([command for command in plant.commands if command is not None], [[1.0, 0.0]] * starts)


def test_watch_holds_a_robot_whose_program_hangs():
    plant, safety = make(Limits(dict(VELOCITY), command_timeout_s=0.05))
    safety.watch()
    assert plant.commands == []
    safety.command(np.ones(2), plant.tick())
    plant.ticks += 5
    safety.watch()
    assert safety.state is State.ACTIVE
    plant.ticks += 1
    safety.watch()
    assert safety.state is State.HOLDING
    for _ in range(5):
        plant.ticks += 1
        safety.watch()
    speeds = [command[0] for command in plant.commands[:-1]]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == 0.0
    assert plant.commands[-1] is None  # afterwards it is silent
    assert len(plant.commands) <= 5


def test_an_action_that_is_not_finite_in_one_element_stops_the_robot():
    plant, safety = make()
    safety._filters.apply = lambda *arguments: np.array([0.0, np.nan])
    assert safety.command(np.ones(2), plant.tick()).state is State.STOPPED
    assert plant.commands == [None]


def test_after_a_reset_motion_goes_on_from_the_running_stop():
    plant, safety = make(Limits(dict.fromkeys("ab", ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=5.0))))
    for _ in range(10):
        safety.command(np.ones(2), plant.tick())
    for stops in (lambda: safety.trip("button"), lambda: safety.hold("a fault")):
        stops()
        plant.tick()
        safety.reset()
        assert safety.state is State.HOLDING
        assert safety.command(np.ones(2), plant.tick()).state is State.ACTIVE
        np.testing.assert_allclose(plant.commands[-1], 10 * 5.0 * DT_S, atol=2 * 5.0 * DT_S)


def test_elements_without_names_are_numbered():
    assert action_names(Contract({}, TensorSpec((3,)), DT_S)) == ("0", "1", "2")
    assert action_names(contract()) == ("a", "b")


def test_a_robot_that_fails_is_stopped():
    plant, safety = make()
    plant.write = lambda action: (_ for _ in ()).throw(OSError("cable"))
    with pytest.raises(OSError, match="cable"):
        safety.command(np.ones(2), plant.tick())
    assert (safety.state, safety.reason) == (State.STOPPED, "the robot failed: cable")
    assert plant.commands == [None]


def test_after_trip_has_returned_nothing_is_written_by_any_thread():
    plant = Plant(Kind.VELOCITY, np.zeros(2), dt_s=1e-6)
    safety = guarded(plant, Limits(dict(VELOCITY)))
    running, started = True, threading.Event()

    def command() -> None:
        while running:
            safety.command(np.ones(2), plant.tick())
            started.set()

    threads = [threading.Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    for _ in range(50):
        safety.trip("button")
        count = len(plant.commands)
        threading.Event().wait(0.001)
        done = [action for action in plant.commands if action is not None]
        late = done[sum(action is not None for action in plant.commands[:count]) - 1 :]
        # a stop whose period is not over yet is carried on by the next call
        assert all((after < before).all() or not after.any() for before, after in pairwise(late))
        safety.reset()
    running = False
    for thread in threads:
        thread.join()
    assert any(action is not None and action.any() for action in plant.commands)


def test_bounds_of_what_is_observed_stop_and_tell():
    plant, safety = make(Limits(dict(VELOCITY), {"position.b": ObservedRange(-0.5, 0.5)}))
    plant.position = np.array([0.0, 0.51])
    verdict = safety.command(np.ones(2), plant.tick())
    assert verdict.state is State.STOPPED
    assert verdict.reason == "position.b is 0.51, outside -0.5 to 0.5"


@pytest.mark.parametrize("tilt", [0.5, 0.7])
@pytest.mark.parametrize("form", ["matrix", "quaternion"])
def test_tilt(tilt, form):
    matrix = tuple(a + b for a in "xyz" for b in "xyz")
    names = matrix if form == "matrix" else ("x", "y", "z", "w")
    value = np.zeros(len(names))
    if form == "matrix":
        value[8] = math.cos(tilt)
    else:
        value[:] = 0.6 * math.sin(tilt / 2), 0.8 * math.sin(tilt / 2), 0.0, math.cos(tilt / 2)
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    plant.contract = Contract({"attitude": TensorSpec((len(names),), names=names)}, contract().action, DT_S)
    safety = Safety(plant, Limits(dict(VELOCITY), attitude="attitude", tilt_rad=0.6), plant.clock)
    verdict = safety.command(np.ones(2), Reading({"attitude": value}, 0.0, 0))
    assert (verdict.state is State.STOPPED) == (tilt > 0.6)
    assert (f"tilted by {tilt} rad" in verdict.reason) == (tilt > 0.6)


class Flier:
    """A point in the air that accelerates as commanded, and brakes when it holds."""

    DECELERATION = 4.0

    def __init__(self, dt_s: float) -> None:
        spec = TensorSpec((1,), unit="m", names=("x",))
        self.contract = Contract({"position": spec, "velocity": spec}, TensorSpec((1,), low=(-9.0,), high=(9.0,)), dt_s)
        self.x = self.v = 0.0
        self.ticks = self.held = 0
        self.at_rest = self.stops_after_s = None

    def clock(self) -> float:
        return self.ticks * self.contract.control_dt_s

    def read(self) -> Reading:
        return Reading({"position": np.array([self.x]), "velocity": np.array([self.v])}, self.clock(), self.ticks)

    def write(self, action: np.ndarray) -> None:
        self._accelerate(float(action[0]))

    def hold(self) -> None:
        self.held += 1
        dt = self.contract.control_dt_s
        self._accelerate(-math.copysign(min(self.DECELERATION, abs(self.v) / dt), self.v))

    def close(self) -> None: ...

    def _accelerate(self, a: float) -> None:
        dt = self.contract.control_dt_s
        self.x += self.v * dt + 0.5 * a * dt * dt
        self.v += a * dt
        self.ticks += 1


@pytest.mark.parametrize("wanted", [9.0, -9.0, 1.0])
def test_a_geofence_is_kept_by_holding_in_time_whatever_the_action_means(wanted):
    flier = Flier(0.01)
    fence = ObservedRange(-3.0, 3.0, rate="velocity.x", acceleration=9.0, deceleration=Flier.DECELERATION)
    safety = Safety(flier, Limits(observed={"position.x": fence}, clock_error_s=0.0), flier.clock)
    furthest = 0.0
    for _ in range(2000):
        safety.command(np.array([wanted]), flier.read())
        furthest = max(furthest, abs(flier.x))
    assert safety.state is not State.STOPPED
    assert flier.held > 0
    assert 2.7 < furthest <= 3.0


@pytest.mark.parametrize(
    ("rate", "distance"),
    # for 2 s it gains 3 m/s^2, then it loses 4: (1 + 3) 2 + 7^2 / 8; from -7 to -1 it goes back alone
    [(1.0, 8.0 + 6.125), (-7.0, -8.0)],
)
def test_the_way_of_a_command_and_of_holding_after_it(rate: float, distance: float):
    fence = ObservedRange(-20.0, 20.0, "velocity.x", acceleration=3.0, deceleration=4.0)
    assert _travel(rate, 2.0, fence) == distance
    bounds = Bounds(Flier(0.1).contract, Limits(observed={"position.x": fence}, lag_s=0.3, command_timeout_s=0.7))
    for off, kept in ((-1e-9, True), (1e-9, False)):
        for side in (1.0, -1.0):
            at = {"position": np.array([side * (20.0 - distance + off)]), "velocity": np.array([side * rate])}
            assert (bounds.ahead(at, 1.0) == "") == kept


LIMITS = """
commands:
  a: {kind: VELOCITY, velocity: 0.5, acceleration: 2.0, low: -1.0, high: 1.0, measured: position.a}
  b: {kind: VELOCITY, velocity: 0.5}
observed:
  position.a: {low: -1.1, high: 1.1}
distance: {elements: [a, b], position: position, spheres: [[1.0, 0.0, 0.2]], margin_m: 0.05, acceleration: 2.0}
command_timeout_s: 0.2
"""


def test_limits_are_one_yaml_file(tmp_path):
    path = tmp_path / "limits.yaml"
    path.write_text(LIMITS)
    plant, safety = make(load_limits(path))
    for _ in range(400):
        assert safety.command(np.array([9.0, 0.0]), plant.tick()).action[0] <= 0.5
    assert 0.7 < plant.position[0] <= 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("commands: {a: {speed: 1}}", "speed"),
        ("commands: {a: {kind: velocity}}", "VELOCITY"),
        ("commands: {a: {velocity: fast}}", "fast"),
        ("commands: {a: {velocity: -1}}", r"limits.yaml: commands\.a\.velocity=-1: expected a number above 0, or inf"),
        ("commands: {a: {low: .nan}}", r"commands\.a\.low=nan: expected a finite number, or inf"),
        ("distance: {elements: [a], position: p, planes: [[1, .nan]]}", r"distance\.planes"),
        ("[1, 2]", "limits.yaml"),
        ("commands: {a: {kind: DELTA, high: 1}}", "`measured`"),
        ("tilt_rad: 4", "tilt_rad=4: expected a number above 0 and of at most 3.14"),
        ("tilt_rad: 0.5", "`attitude` and `tilt_rad` together"),
        ("attitude: rotation", "`attitude` and `tilt_rad` together"),
        ("observed: {position.a: {low: -1, high: 1, deceleration: 2}}", "expected `rate`"),
        ("commands: [", "is no YAML"),
        ("observed: {position.a: {low: 1, high: 0}}", "low < high"),
        ("commands: {a: {low: 1, high: 1}}", "low < high"),
    ],
)
def test_wrong_files_are_reported_on_one_line(tmp_path, text, message):
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_limits(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits({"c": ElementLimits(), **VELOCITY}), "unknown elements \\['c'\\] in limits"),
        (Limits({"a": VELOCITY["a"]}), "no limits for action element 'b'"),
        (Limits(dict(VELOCITY), {"position.c": ObservedRange()}), "no observed element 'position.c'"),
        (Limits({"a": VELOCITY["a"], "b": ElementLimits(Kind.VELOCITY)}), "no limits for action element 'b'"),
        (Limits(dict(VELOCITY), attitude="position", tilt_rad=0.5), "attitude"),
        (Limits({"a": VELOCITY["a"], "b": ElementLimits(low=1.0, high=2.0)}), "expected rest inside"),
        (Limits(dict(VELOCITY), tank=Tank(["a", "c"], ["position.a"] * 2)), r"no action elements \['c'\]"),
    ],
)
def test_limits_that_do_not_fit_the_robot_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        make(limits)


ROBOTS = {
    "learning/disturbances.py": "a simulated robot, which safety writes to, whose measurements are disturbed",
    "robots/robot.py": "a simulated robot holds by executing an action",
    "ros2/nodes/sim.py": "it is the robot's side",
}
"""Robots themselves: they may move what they are made of."""
ELSEWHERE = {
    *("examples", "file", "graph", "graphs", "recorder", "report", "sealed", "sim_to_real_report", "stdout"),
    *("lerobot_dataset", "margins", "stream", "writer"),
}
"""What else is written to; everything else that has a `write` is taken for a robot."""


def writes(path: Path) -> list[str]:
    """Receivers of every `.write` in a file, called or passed on, and of getattr(..., "write")."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "write":
            found.append(ast.unparse(node.value).split(".")[-1].lstrip("_"))
        if isinstance(node, ast.Constant) and node.value == "write":
            found.append('"write"')
    return found


def test_safety_alone_writes_to_a_robot():
    sources = [*(ROOT / "real_robot").rglob("*.py"), *ROOT.glob("*.py")]
    callers = {
        str(path.relative_to(ROOT / "real_robot")) if path.is_relative_to(ROOT / "real_robot") else path.name
        for path in sources
        if set(writes(path)) - ELSEWHERE
    }
    assert callers - set(ROBOTS) == {"safety/safety.py"}
    assert writes(ROOT / "real_robot" / "safety" / "safety.py") == ["robot"]


def test_walls_may_be_written_in_whole_numbers(tmp_path):
    path = tmp_path / "limits.yaml"
    path.write_text("distance: {elements: [a], position: p, planes: [[1, 0]], margin_m: 1}")
    distance = load_limits(path).distance
    assert distance is not None
    assert (distance.planes, distance.margin_m) == ([[1.0, 0.0]], 1.0)


def test_without_a_file_only_the_limits_of_the_contract_hold(tmp_path):
    assert read_limits("") == Limits()
    path = tmp_path / "limits.yaml"
    path.write_text("observation_timeout_s: 0.7\n")
    assert read_limits(str(path)) == Limits(observation_timeout_s=0.7)
