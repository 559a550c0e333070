"""Functions of the tasks, conditions, variation and air, by hand: most of them take plain numbers."""

from dataclasses import replace

import pytest
import torch

from sims.quadrotor.episode import Episode, Mdp, Moment, Record
from sims.quadrotor.flights import DRAG_PER_S, MEANINGS, SWEEPS, named_flights, swept
from sims.quadrotor.physics import air
from sims.quadrotor.physics.airframes import CRAZYFLIE, CRAZYFLIE_21, PARAMETERS, RACER_5_INCH
from sims.quadrotor.physics.dynamics import Body, Options
from sims.quadrotor.physics.fitting import _quaternion
from sims.quadrotor.physics.variation import DRAWS, Variation
from sims.quadrotor.tasks.hover import Hover
from sims.quadrotor.tasks.race import BACK_M, TRACK, Race, crossing, next_gate, way, within
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.robust import RobustHover
from sims.quadrotor.tasks.track import Track, position, velocity

HOVER = CRAZYFLIE.hover_action
WEIGHTS = {
    "weight_position": 2.0,
    "weight_rotation": 3.0,
    "weight_velocity": 0.5,
    "weight_angular_velocity": 0.1,
    "weight_action": 10.0,
    "weight_action_change": 4.0,
}
SINE = torch.zeros(18, dtype=torch.float64)
SINE[0], SINE[6], SINE[12] = 1.0, 3.0, -4.5
"""Plan of a reference with x = sin(3 t - 4.5): at the origin at 1.5 s, with a velocity of 3 m/s along x."""


def moment(place=(0.1, 0.2, -0.2), memory=(0.0, 0.0), plan=SINE, steps=150.0, before: Moment | None = None) -> Moment:
    """Squares: 0.09 of the position, 9 of the velocity, 49 of the angular velocity, 0.09 and 0.25 of the actions."""
    body = Body(list(place), [0.8, 0.2, 0.4, 0.4], [1.0, 2.0, -2.0], [2.0, 3.0, 6.0], [0.0] * 4)
    action = [HOVER + 0.1, HOVER - 0.2, HOVER + 0.2, HOVER]
    previous = [action[0] - 0.3, action[1], action[2] + 0.4, action[3]]
    return Moment(body, steps, [*plan], [*memory], CRAZYFLIE, None, 400.0, action, previous, before)


SHARED = 0.5 * 9.0 + 0.1 * 49.0 + 10.0 * 0.09 + 4.0 * 0.25
"""Costs of velocity, angular velocity and actions."""


@pytest.mark.parametrize(
    ("mdp", "cost"),
    [
        (Hover, 2.0 * 0.09 + 3.0 * (1.0 - 0.8**2) + SHARED),
        (Recover, 3.0 * 2.0 * (0.2**2 + 0.4**2) + SHARED),
        (
            RobustHover,
            4.0 * 0.09 + 3.0 * (1.0 - 0.8**2) + SHARED + 9.0 * 0.5 * 9.0 + 20.0 * 10.0 * 0.25,
        ),
        # relative to the reference: the velocity (1 - 3, 2, -2); of the rotation, yaw
        (Track, 2.0 * 0.09 + 3.0 * 0.4**2 + SHARED + 0.5 * (12.0 - 9.0)),
    ],
)
def test_rewards(mdp: type[Hover], cost: float):
    assert float(mdp(**WEIGHTS, reward_alive=1.5).reward(moment())) == pytest.approx(1.5 - cost)


def test_references():
    assert position([*SINE], 1.5) == pytest.approx([0.0, 0.0, 0.0])
    assert velocity([*SINE], 1.5) == pytest.approx([3.0, 0.0, 0.0])
    observed = [float(row) for row in Track().observe(moment())]
    assert observed[:3] == pytest.approx([-0.1, -0.2, 0.2])
    assert observed[12:15] == pytest.approx([2.0, -2.0, 2.0])


def test_curves_of_references():
    track = Track(size_m=2.0)
    r = 3.0 / (2.0**0.5 * 2.0)  # in the middle sqrt(2) A times the rate
    assert track._eight(3.0, 0.5) == pytest.approx([2, 0, 1, 0, 0, 0, r, 0, 2 * r, 0, 0, 0, 0.5, 0, 1, 0, 0, 0])
    plan = track._lissajous(3.0, 0.5)
    amplitudes, rates, phases = plan[:6], plan[6:12], plan[12:]
    assert sum((a * w) ** 2 for a, w in zip(amplitudes, rates, strict=True)) == pytest.approx(3.0**2)
    assert amplitudes == [2.0, 0.0, 2.0, 0.0, 0.5, 0.0]
    assert [rate / rates[4] for rate in rates] == pytest.approx([3.0, 0.0, 2.0, 0.0, 1.0, 0.0])
    assert phases == pytest.approx([1.5, 0.0, 1.0 + 0.5 * torch.pi, 0.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("mdp", "place", "memory", "ended"),
    [
        *(
            (Hover(), place, (0.0,), ended)
            for place, ended in (((0.59, -0.59, 0.59), False), ((0.0, 0.0, -0.61), True))
        ),
        (Hover(), (0.61, 0.0, 0.0), (0.0,), True),
        (Hover(), (0.0, -0.61, 0.0), (0.0,), True),
        (RobustHover(), (0.0, 0.0, 0.0), (0.0, 1.0), True),
        (RobustHover(), (0.0, 0.0, 0.0), (1.0, 0.0), False),
        # of the reference at the origin
        (Track(), (0.0, 0.99, 0.0), (0.0,), False),
        (Track(), (0.0, 1.01, 0.0), (0.0,), True),
        # a hit gate; the flying space is 16 m wide, and from 0 to 4 m high
        (Race(), (7.9, -7.9, 3.9), (0.0, 0.0, 0.0, 0.0), False),
        (Race(), (0.0, 0.0, 2.0), (0.0, 0.0, 0.0, 1.0), True),
        (Race(), (8.1, 0.0, 2.0), (0.0, 0.0, 0.0, 0.0), True),
        (Race(), (0.0, -8.1, 2.0), (0.0, 0.0, 0.0, 0.0), True),
        (Race(), (0.0, 0.0, 4.1), (0.0, 0.0, 0.0, 0.0), True),
        (Race(), (0.0, 0.0, -0.1), (0.0, 0.0, 0.0, 0.0), True),
    ],
)
def test_endings(mdp: Hover, place: tuple, memory: tuple, ended: bool):
    assert bool(mdp.terminated(moment(place, memory))) is ended


@pytest.mark.parametrize(
    ("mdp", "place", "steps", "memory"),
    [
        # the distance of 0.3 m counts in the last 100 of 400 steps
        (Hover(), (0.1, 0.2, -0.2), 301.0, [7.3]),
        (Hover(), (0.1, 0.2, -0.2), 300.0, [7.0]),
        # its square after the first 100
        (Track(), (0.1, 0.2, -0.2), 101.0, [7.0 + 0.01 + 0.04 + 0.04]),
        (Track(), (0.1, 0.2, -0.2), 100.0, [7.0]),
        # down at 2 m/s on the ground at -0.59
        (RobustHover(), (0.0, 0.0, -0.6), 1.0, [7.0, 1.0]),
        (RobustHover(), (0.0, 0.0, -0.5), 1.0, [7.0, 0.0]),
        (RobustHover(ground_m=0.0), (0.0, 0.0, -0.6), 1.0, [7.0, 0.0]),
    ],
)
def test_memories(mdp: Mdp, place: tuple, steps: float, memory: list[float]):
    before = moment(memory=(7.0, 0.0))
    now = moment(place, plan=0.0 * SINE, steps=steps, before=before)
    assert [float(row) for row in mdp.update(now)] == pytest.approx(memory)


def record(terminated: bool, memory: list[float], limit: int = 300) -> Record:
    flags = torch.tensor([terminated]), torch.tensor([not terminated])
    return Record(*flags, torch.tensor(memory).unsqueeze(1), limit)


def test_metrics_and_failures():
    assert Hover().metrics(record(False, [7.0]))["position_error_m"].item() == pytest.approx(0.07)
    assert Hover().metrics(record(False, [7.0], limit=50))["position_error_m"].item() == pytest.approx(0.14)
    assert Hover().metrics(record(True, [7.0]))["position_error_m"].isnan()
    assert Track().metrics(record(False, [18.0]))["position_error_m"].item() == pytest.approx(0.3)
    assert Track().metrics(record(False, [18.0], limit=100))["position_error_m"].isnan()
    lap = Race().metrics(record(False, [2.0, 2.0, 1200.0, 0.0]))
    assert (lap["laps"].item(), lap["lap_time_s"].item()) == pytest.approx((2.0, 6.0))
    assert Race().metrics(record(False, [2.0, 0.0, 0.0, 0.0]))["lap_time_s"].isnan()
    for memory, laps, success in (([0.0, 3.0, 9.0, 0.0], False, True), ([0.0, 2.0, 9.0, 0.0], False, False)):
        assert Race().success(record(laps, memory)).item() is success
    for mdp, memory, cause in (
        (RobustHover(), [0.0, 1.0], "hit the ground"),
        (RobustHover(), [0.0, 0.0], "out of bounds"),
        (Race(), [0.0, 0.0, 0.0, 1.0], "hit a gate"),
        (Race(), [0.0, 0.0, 0.0, 0.0], "out of bounds"),
    ):
        failures = mdp.failures(record(True, memory))
        assert next(name for name, failed in failures.items() if failed.item()) == cause
        assert not any(failed.item() for failed in mdp.failures(record(False, memory)).values())


def test_the_way_to_a_gate_is_a_parabola_and_leads_back_from_behind_it():
    x, y, z, _ = TRACK[5]  # in the direction of x
    ahead = moment((x - 1.2, y + 1.0, z + 0.5), (0.0,), plan=[5.0])
    direction = [each / 6.69**0.5 for each in (1.3, -2.0, -1.0)]  # sqrt(1.2^2 + 1/4) towards it, twice the offset
    assert way(ahead) == pytest.approx(direction)
    behind = moment((x + 1.0, y + 1.0, z + 0.5), (0.0,), plan=[5.0])
    back = [each / (9.0 + 1.0 + 0.25) ** 0.5 for each in (-BACK_M - 1.0, -1.0, -0.5)]
    assert way(behind) == pytest.approx(back)
    now = moment(before=ahead)
    now.body.velocity = [10.0 * each + e for each, e in zip(direction, (1.0, -2.0, 2.0), strict=True)]
    race = Race(**WEIGHTS, speed_m_s=10.0)
    assert race.reward(now) == pytest.approx(1.0 - (0.5 / 100.0 * 9.0 + 0.1 * 49.0 + 4.0 * 0.25))


def test_gates_follow_each_other_around_the_track():
    for first, passed, further, number in ((0.0, 0.0, 0, 0), (4.0, 1.0, 0, 5), (4.0, 3.0, 0, 1), (5.0, 0.0, 1, 0)):
        gate = TRACK[number]
        assert next_gate(moment(memory=(passed,), plan=[first]), further) == [*gate[:3], *gate.normal]


def test_where_a_step_crosses_the_plane_of_a_gate():
    gate = [1.0, 2.0, 3.0, 0.6, 0.8]

    def at(along: float, aside: float, above: float) -> Moment:
        return moment((1.0 + 0.6 * along - 0.8 * aside, 2.0 + 0.8 * along + 0.6 * aside, 3.0 + above))

    near, far = at(-0.5, 0.2, 0.1), at(1.5, 0.6, 0.5)
    assert crossing(near, far, gate) == (True, False, pytest.approx([0.3**2, 0.2**2]))
    assert crossing(far, near, gate) == (False, True, pytest.approx([0.3**2, 0.2**2]))
    assert crossing(near, at(-0.1, 0.6, 0.5), gate)[:2] == (False, False)
    assert [within([a**2, b**2], 0.6) for a, b in ((0.5, 0.5), (0.7, 0.5), (0.5, 0.7))] == [True, False, False]


def test_quaternions_of_rotation_matrices():
    quaternions = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0, 0, 0], [1, 2, 3, 4], [1, -2, 3, -4], [2, 0, 0, 5]])
    )
    rotations = torch.stack(Body.of([*torch.zeros(3, 4), *quaternions.T, *torch.zeros(10, 4)]).rotation(), 1)
    torch.testing.assert_close(_quaternion(rotations.view(-1, 3, 3)), quaternions)


def test_measurements_between_two_steps():
    options = Options(drag=True, wind=True, senses=True)
    late = replace(CRAZYFLIE, observation_delay_s=0.0025)  # a quarter of a step
    now = moment()
    now.body.quaternion = [1.0, 0.0, 0.0, 0.0]
    before = [0.5, 0.2, -0.2, 0.0, 1.0, 0.0, 0.0, 5.0, 2.0, -2.0, 2.0, 7.0, 6.0]
    measured = Episode(RobustHover(), options)._measured(now, [0.0] * options.dynamic_rows + before, late).body
    assert measured.position == pytest.approx([0.2, 0.2, -0.2])
    assert measured.quaternion == pytest.approx([0.75 / 0.625**0.5, 0.25 / 0.625**0.5, 0.0, 0.0])
    assert measured.velocity == pytest.approx([2.0, 2.0, -2.0])
    assert measured.angular_velocity == pytest.approx([2.0, 4.0, 6.0])
    assert measured.rotor_speed == now.body.rotor_speed


def test_flights_by_name():
    assert list(named_flights("crazyflie", CRAZYFLIE)) == [name for name in MEANINGS if name != "disturbed"]
    other = named_flights("racer", RACER_5_INCH)
    assert list(other) == [name for name in MEANINGS if name != "disturbed" and "crazyflie" not in name]
    flights = named_flights("crazyflie", CRAZYFLIE)
    assert (flights["robust"].variation.other, other["robust"].variation.other) == (CRAZYFLIE_21, None)
    late = flights["late_30_ms_in_all"].variation
    assert (late.action_delay_s, late.observation_delay_s) == ((0.02, 0.02), (0.01, 0.01))
    heavy = flights["mass_120_thrust_85_percent"].variation
    assert (heavy.mass, heavy.thrust) == ((1.2, 1.2), (0.85, 0.85))
    begins = {name: (flight.mdp.take_off_share, flight.airframe) for name, flight in flights.items()}
    assert begins["take_off"] == (1.0, CRAZYFLIE)
    assert begins["crazyflie_21_take_off"] == (1.0, CRAZYFLIE_21)
    assert begins["crazyflie_21"] == (0.0, CRAZYFLIE_21)
    assert begins["robust"] == (RobustHover.take_off_share, CRAZYFLIE)


def test_points_of_sweeps_differ_in_one_quantity():
    nominal = swept(CRAZYFLIE, "mass=1")
    for quantity in SWEEPS:
        flight = swept(CRAZYFLIE, f"{quantity}=0.5")
        variation = {
            "latency": {"action_delay_s": (0.5, 0.5)},
            "mass": {"mass": (0.5, 0.5)},
            "thrust": {"thrust": (0.5, 0.5)},
            "wind": {"drag_per_s": (DRAG_PER_S, DRAG_PER_S)},
        }.get(quantity, {})
        mdp = {
            "wind": {"wind_m_s": 0.5},
            "velocity_bias": {"bias_velocity_m_s": 0.5},
            "attitude_bias": {"bias_attitude_rad": 0.5},
        }.get(quantity, {})
        assert flight.variation == replace(nominal.variation, **variation)
        assert flight.mdp == replace(nominal.mdp, **mdp)
        assert flight.options.delay_steps == (5 if quantity == "latency" else nominal.options.delay_steps)


def test_parameters_of_a_varied_drone():
    ranges = {
        "mass": (0.8, 1.2),
        "thrust": (0.9, 0.9),
        "inertia": (0.5, 1.5),
        "lag": (1.0, 3.0),
        "sag": (0.0, 0.2),
        "drag_per_s": (0.1, 0.3),
        "action_delay_s": (0.0, 0.02),
        "observation_delay_s": (0.0, 0.01),
    }
    quarter = torch.full((DRAWS, 1), 0.25, dtype=torch.float64)
    varied = Variation(**ranges, other=CRAZYFLIE_21).airframes(CRAZYFLIE, quarter)[:, 0]
    between = {name: 0.75 * getattr(CRAZYFLIE, name) + 0.25 * getattr(CRAZYFLIE_21, name) for name in PARAMETERS}
    mass = 0.9 * between["mass_kg"]
    expected = between | {
        "mass_kg": mass,
        **{name: 0.9 * between[name] for name in ("thrust_0_n", "thrust_1_n", "thrust_2_n")},
        **{name: 0.75 * between[name] for name in ("inertia_x", "inertia_y", "inertia_z")},
        **{name: 1.5 * between[name] for name in ("lag_rise_s", "lag_fall_s")},
        **{name: between[name] + 0.15 * mass for name in ("drag_x", "drag_y", "drag_z")},
        "delay_s": 0.005,
        "observation_delay_s": 0.0025,
        "sag": 0.05,
    }
    assert dict(zip(PARAMETERS, varied.tolist(), strict=True)) == pytest.approx(expected)
    weak = replace(Variation(**ranges), thrust=(0.1, 0.2)).airframes(CRAZYFLIE, quarter)[:, 0]
    rows = dict(zip(PARAMETERS, weak.tolist(), strict=True))
    assert 4.0 * rows["thrust_2_n"] * 0.95 == pytest.approx(1.25 * rows["mass_kg"] * 9.81)


def test_turbulent_air():
    wind = [3.0, 4.0, 1.0]
    across, vertical = (0.5**0.5 * (3.0**0.5 * a + (1.0 - 3.0**0.5) * b) for a, b in ((2.0, 3.0), (4.0, 5.0)))
    blown = air.velocity([1.0, 2.0, 3.0, 4.0, 5.0], wind)  # 0.2 of 5 m/s along (0.6, 0.8) and across, 0.1 vertically
    assert blown == pytest.approx([3.0 + 0.6 - 0.8 * across, 4.0 + 0.8 + 0.6 * across, 1.0 + 0.5 * vertical])
    assert air.begin([1.0, 2.0, 4.0, 6.0, 10.0]) == [1.0, 2.0, 3.0, 6.0, 8.0]
    states = air.after([1.0, 2.0, 3.0, 4.0, 5.0], wind, [0.1, 0.2, 0.3])
    along, slow = 5.0 * 0.01 / 7.9, 5.0 * 0.01 / 1.0

    def driven(state: float, share: float, noise: float) -> float:
        return (1.0 - share) * state + (1.0 - (1.0 - share) ** 2) ** 0.5 * noise

    expected = [driven(1.0, along, 0.1), driven(2.0, along, 0.2), 3.0 - along, driven(4.0, slow, 0.3), 5.0 - slow]
    assert states == pytest.approx(expected)
