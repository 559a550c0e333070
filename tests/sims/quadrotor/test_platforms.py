"""Random platforms observed by a teacher, and platforms that are held out from training."""

from types import SimpleNamespace

import pytest
import torch

from embodied.errors import UserError
from embodied.seeding import generator
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import AIRFRAMES, GRAVITY, PARAMETERS, Airframe, hover_speed
from sims.quadrotor.physics.dynamics import Options, parameters
from sims.quadrotor.platforms import DRAWS, INSIDE, MARGIN, MEASURED, OUTSIDE, RANGES, Ranges
from sims.quadrotor.task import AnyPlatformTask
from sims.quadrotor.tasks.any_platform import POSITION_LIMIT_M, AnyHover
from sims.quadrotor.tasks.hover import Hover


def sampled(ranges: Ranges | None = None) -> dict[str, torch.Tensor]:
    """Parameters of many random platforms, by name."""
    draws = torch.rand(DRAWS, 1 << 16, generator=generator(0, "draws"))
    return dict(zip(PARAMETERS, (ranges or Ranges()).platforms(draws), strict=True))


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_what_a_teacher_observes_makes_the_platform_that_flies(backend: str):
    env = QuadrotorEnvironment(20, mdp=AnyHover(), airframe=None, backend=backend)
    platform = env.reset(starts=torch.arange(20))["platform"]
    assert env.contract.observation["platform"].privileged
    flying = env._airframe[:, :20]
    made = Ranges().platforms(torch.cat((platform.T, (flying[-1:] - 3.0) / 6.0)))  # rotors are not told
    torch.testing.assert_close(made, flying, rtol=1e-6, atol=0)
    assert platform.min() > 0
    assert platform.max() < 1
    assert len(platform.unique()) > 250
    after = env.step(torch.zeros(20, 1, 4)).observation
    torch.testing.assert_close(after["platform"], platform)


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_a_teacher_observes_disturbances_and_rotors(backend: str):
    env = QuadrotorEnvironment(20, mdp=AnyHover(), airframe=None, backend=backend)
    env.reset(starts=torch.arange(20))
    seen = env.step(torch.linspace(-1.0, 1.0, 80).view(20, 1, 4)).observation
    drawn = dict(zip(PARAMETERS, env._airframe[:, :20], strict=True))
    weight = GRAVITY * drawn["mass_kg"].unsqueeze(1)
    force, torque = seen["disturbance"].split(3, 1)
    torch.testing.assert_close(force * weight / 20.0, seen["force"])
    torch.testing.assert_close(torque * weight / 10000.0, seen["torque"])
    hover = hover_speed(SimpleNamespace(**drawn))
    torch.testing.assert_close(seen["rotor_excess"] + hover.unsqueeze(1), seen["rotor_speed"])
    assert seen["rotor_excess"].std() > 0.05


def test_compiled_and_stepwise_unrolls_of_a_teacher_agree():
    weights = 0.1 * torch.randn(4, 22 + AnyHover.PLAN + 4, generator=generator(0, "weights"))
    rollouts = []
    for backend in ("c", "torch"):
        env = QuadrotorEnvironment(5, mdp=AnyHover(), airframe=None, backend=backend)
        env.reset(starts=torch.arange(5))
        rollouts.append(env.unroll([(weights, torch.zeros(4))], 6))
    torch.testing.assert_close(rollouts[0].actions, rollouts[1].actions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rollouts[0].reward, rollouts[1].reward, rtol=1e-4, atol=1e-5)


def test_no_training_draws_the_mass_of_a_named_platform():
    drawn = sampled()["mass_kg"]
    edges = []
    for airframe in MEASURED.values():
        away = (drawn / airframe.mass_kg - 1.0).abs()
        edges.append(float(away.min()))
        assert edges[-1] > 0.999 * MARGIN
    assert sorted(edges)[len(edges) // 2] < MARGIN + 1e-3  # and no more is left out


def test_platforms_cover_their_ranges_and_could_fly():
    drawn = sampled()
    weight = drawn["mass_kg"] * GRAVITY
    found = drawn | {
        "thrust_to_weight": 4.0 * (drawn["thrust_0_n"] + drawn["thrust_1_n"] + drawn["thrust_2_n"]) / weight,
        "arm_ratio": drawn["arm_x_m"] / drawn["arm_y_m"],
    }
    for name in RANGES:
        low, high = getattr(Ranges(), name)
        assert found[name].min() >= low * (1.0 - 1e-5)
        assert found[name].max() <= high * (1.0 + 1e-5)
        assert found[name].min() == pytest.approx(low, rel=0.05)
        assert found[name].max() == pytest.approx(high, rel=0.05)
    assert (drawn["lag_fall_s"] >= drawn["lag_rise_s"]).all()
    assert (drawn["inertia_z"] <= (drawn["inertia_x"] + drawn["inertia_y"]) * (1.0 + 1e-5)).all()
    assert all((values >= 0.0).all() for values in drawn.values())
    hover = hover_speed(parameters(list(drawn.values())))
    assert ((hover > 0.2) & (hover < 0.95)).all()
    # Neither all alike nor implausible: as different as the known airframes.
    for name in ("inertia_x", "arm_x_m", "torque_per_thrust_m"):
        known = [getattr(frame, name) for frame in AIRFRAMES.values()]
        assert drawn[name].min() <= min(known), name
        assert drawn[name].max() >= 0.6 * max(known), name


def test_all_parameters_are_scattered_between_their_bounds():
    drawn = sampled()
    arm, mass = (drawn["arm_x_m"] * drawn["arm_y_m"]).sqrt(), drawn["mass_kg"]
    share = {
        "torque_per_thrust_m": (arm, 0.1, 0.25),
        "drag_x": (mass, 0.0, 0.4),
        "drag_y": (mass, 0.0, 0.4),
        "inertia_x": (mass * drawn["arm_y_m"].square(), 0.1, 0.6),
        "inertia_z": (drawn["inertia_x"] + drawn["inertia_y"], 0.75, 1.0),
    }
    for name, (unit, low, high) in share.items():
        values, room = drawn[name] / unit, 0.02 * (high - low)
        assert low - 1e-5 <= values.min() < low + room, name
        assert high - room < values.max() <= high + 1e-5, name


def test_small_masses_are_as_frequent_as_large_ones():
    drawn = sampled(Ranges(mass_kg=[0.5 * 0.6, 2.0 * 0.6]))["mass_kg"]
    assert float((drawn < 0.6).float().mean()) == pytest.approx(0.5, abs=0.06)


def test_other_ranges_hold_as_well():
    drawn = sampled(Ranges(mass_kg=[0.5, 0.6], lag_rise_s=[0.1, 0.1], lag_fall_s=[0.2, 0.3], arm_ratio=[1.0, 1.0]))
    assert 0.5 <= drawn["mass_kg"].min() < drawn["mass_kg"].max() <= 0.6 * (1.0 + 1e-6)
    assert (drawn["lag_rise_s"] == 0.1).all()
    assert 0.2 <= drawn["lag_fall_s"].min() < drawn["lag_fall_s"].max() <= 0.3
    assert torch.equal(drawn["arm_x_m"], drawn["arm_y_m"])


def test_four_six_and_eight_rotors_are_as_frequent():
    counts = sampled()["rotors"].unique(return_counts=True)
    assert counts[0].tolist() == [4.0, 6.0, 8.0]
    assert counts[1] / (1 << 16) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert sampled(Ranges(rotors=[6]))["rotors"].unique().tolist() == [6.0]
    assert Ranges().platforms(torch.ones(DRAWS, 1))[-1].tolist() == [8.0]  # a draw is below 1 only before rounding


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"mass_kg": [1.0, 0.5]}, r"platforms\.mass_kg as \[lowest, highest\], got \[1\.0, 0\.5\]"),
        ({"arm_ratio": [0.0, 1.0]}, r"arm_ratio=\[0,1\]: expected a number above 0"),
        ({"lag_fall_s": [0.1]}, "platforms.lag_fall_s"),
        ({"thrust_to_weight": [1.0, 2.0]}, r"thrust_to_weight=\[1,2\]: expected a number above 1"),
        ({"lag_fall_s": [0.03, 0.1]}, "lag_fall_s to reach as far"),
        ({"rotors": [4, 5]}, r"platforms.rotors as some of .4, 6, 8., got .4, 5."),
        ({"rotors": []}, "platforms.rotors"),
    ],
)
def test_ranges_that_are_none_are_refused(ranges: dict[str, list[float]], said: str):
    with pytest.raises(UserError, match=said):
        Ranges(**ranges)


def test_masses_that_are_all_near_a_named_platforms_are_refused():
    with pytest.raises(UserError, match=r"0\.99 to 1\.01 kg: all near"):
        sampled(Ranges(mass_kg=[0.99, 1.01]))


def test_only_those_called_outside_are_outside_the_ranges():
    def inside(airframe: Airframe) -> bool:
        mine = {name: getattr(airframe, name) for name in RANGES if name != "arm_ratio"}
        mine["arm_ratio"] = airframe.arm_x_m / airframe.arm_y_m
        bounds = {name: getattr(Ranges(), name) for name in RANGES}
        return airframe.rotors in Ranges().rotors and all(
            low <= mine[name] <= high for name, (low, high) in bounds.items()
        )

    assert [name for name, airframe in MEASURED.items() if not inside(airframe)] == list(OUTSIDE)
    masses = [airframe.mass_kg for name, airframe in INSIDE.items() if name.startswith("unseen")]
    assert (min(masses), max(masses), len(masses)) == (0.032, 2.4, 10)
    assert {"crazyflie", "crazyflie_21", "slow_rotors", "low_thrust", "high_thrust"} < INSIDE.keys()
    for name, airframe in MEASURED.items():
        assert airframe.inertia_z <= airframe.inertia_x + airframe.inertia_y
        if not name.startswith("crazyflie"):  # rotors leave room beside each other
            assert airframe.rotor_radius_m == pytest.approx(0.8 * min(airframe.arm_x_m, airframe.arm_y_m))


def test_the_unseen_fly_as_themselves():
    hover = Hover(position_limit_m=POSITION_LIMIT_M)
    for airframe in MEASURED.values():
        env = QuadrotorEnvironment(1, mdp=hover, airframe=airframe, noise=False)
        env.reset(starts=torch.zeros(1))
        for _ in range(30):
            moved = env.step(torch.full((1, 1, 4), airframe.hover_action))
        assert not moved.terminated.any()


def test_the_task_trains_on_random_platforms_of_its_ranges_alone():
    task = AnyPlatformTask(platforms=Ranges(thrust_to_weight=[2.0, 2.1]))
    assert task.distributions == ("random", *MEASURED)
    env = task.environment(64, "random", "train")
    env.reset()
    drawn = dict(zip(PARAMETERS, env._airframe, strict=True))
    ratio = 4.0 * (drawn["thrust_1_n"] + drawn["thrust_2_n"]) / (drawn["mass_kg"] * GRAVITY)
    assert ((ratio >= 1.999) & (ratio <= 2.101)).all()
    for name, airframe in MEASURED.items():
        env = task.environment(2, name, "eval")
        assert env.airframe == airframe
        assert "platform" not in env.contract.observation


def test_commands_are_late_in_training_and_where_a_platform_says_so():
    task = AnyPlatformTask()
    speeds = {}
    for name in ("crazyflie", "crazyflie_late_10_ms", "crazyflie_late_20_ms"):
        env = task.environment(1, name, "eval")
        env.reset(starts=torch.zeros(1))
        before = env.observe()["rotor_speed"]
        seen = [env.step(torch.ones(1, 1, 4)).observation["rotor_speed"] for _ in range(3)]
        speeds[name] = [bool((after > before + 1e-3).all()) for after in seen]
    assert list(speeds.values()) == [[True, True, True], [False, True, True], [False, False, True]]
    delays = sampled()["delay_s"]
    assert (delays.min(), delays.max()) == (pytest.approx(0.0, abs=1e-5), pytest.approx(0.02, abs=1e-5))
    assert task.environment(1, "random", "train").options == Options(drag=True, delay_steps=2, many_rotors=True)


def test_the_task_says_what_it_prepares_for():
    told = AnyPlatformTask(platforms=Ranges(mass_kg=[0.1, 0.5], rotors=[4])).conditions
    assert told.first_action == 0.0
    env = QuadrotorEnvironment(1, mdp=AnyHover(), airframe=None)
    assert float(env.reset(starts=torch.zeros(1))["previous_action"].abs().max()) < 1e-6  # as episodes begin
    assert "platforms of 0.1 to 0.5 kg with 4 rotors, thrust-to-weight 1.3 to 6" in told.trained_for
    assert any("0 to 20 ms late" in line for line in told.trained_for)
    assert told.caution is None


def test_training_sees_beginnings_more_often_than_evaluation():
    task = AnyPlatformTask()
    assert task.environment(2, "random", "train").step_limit == 150
    assert task.environment(2, "random", "eval").step_limit == 500
    assert AnyPlatformTask(step_limit=40).environment(2, "random", "train").step_limit == 40
    with pytest.raises(UserError, match="training_steps"):
        AnyPlatformTask(training_steps=0)
