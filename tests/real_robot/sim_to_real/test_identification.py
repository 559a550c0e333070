"""System identification on recordings of robots whose truth is known: close, with honest intervals, and it predicts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import identify as program_identify
from embodied.command_line import program
from real_robot.recording import driven
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import SimulatedRobot
from real_robot.safety.safety import State, Verdict
from real_robot.sim_to_real.identification import Parameter, Segments, cut, identify, prediction_error
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE_21, Airframe
from sims.quadrotor.physics.dynamics import Options
from sims.quadrotor.physics.fitting import KEYS, FlightModel
from sims.quadrotor.physics.own_airframe import read_airframe
from sims.quadrotor.tasks.hover import Hover
from sims.vehicle import dynamics as vehicle_dynamics
from sims.vehicle.vehicles import F1TENTH, PARAMETERS, Model
from tests.programs import run_program

NAMES = ["mass_kg", "inertia_x", "inertia_z", "lag_rise_s", "lag_fall_s", "delay_s"]
OPTIONS = Options(drag=True, delay_steps=3)


def true_airframe(seed: int) -> Airframe:
    rng = np.random.default_rng(seed)
    factors = {name: getattr(CRAZYFLIE_21, name) * rng.uniform(0.8, 1.2) for name in NAMES[:-1]}
    return replace(CRAZYFLIE_21, **factors, delay_s=rng.uniform(0.004, 0.016))


def fly(path: Path, airframe: Airframe, seed: int, episodes: int = 16) -> Path:
    """Half a second of small random commands about hovering, from random states, with the noise of sensors."""
    rng = np.random.default_rng(seed)
    mdp = Hover(force_scale=0.0, torque_scale=0.0, position_limit_m=50.0)
    env = QuadrotorEnvironment(1, mdp=mdp, airframe=airframe, options=OPTIONS, seed=seed)
    robot = SimulatedRobot(env, lambda _: np.zeros(4))
    with Recorder(path, robot.contract, clock=robot.clock) as recorder:
        for _ in range(episodes):
            reading = robot.reset()
            recorder.begin_episode()
            wander = np.zeros(4)
            for _ in range(60):
                wander = 0.8 * wander + rng.normal(size=4) * 0.04
                action = np.clip(airframe.hover_action + wander, -1.0, 1.0).astype(np.float32)
                now_s = robot.clock()
                robot.write(action)
                recorder.write(now_s, reading, action, Verdict(State.ACTIVE, action))
                reading = robot.read()
    return path


@pytest.mark.parametrize("seed", [0, 1])
def test_a_quadrotor_is_found_within_a_few_percent(tmp_path: Path, seed: int):
    true = true_airframe(seed)
    model = FlightModel(CRAZYFLIE_21, NAMES, OPTIONS)
    flown = (episode for _, episode in driven.episodes(Recording(fly(tmp_path / "a.mcap", true, seed))))
    segments = cut(flown, KEYS, 20, model.past)
    assert segments.measured.shape[1:] == (21, 18)
    held_out = torch.arange(len(segments.measured)) % 4 == 3
    fitted, other = (Segments(segments.measured[rows], segments.actions[rows]) for rows in (~held_out, held_out))
    parameters = [program_identify.parameter(CRAZYFLIE_21, name, 3) for name in NAMES]
    found = identify(model.simulate, parameters, fitted, model.guess(fitted.measured, fitted.actions))
    for name, estimate in found.estimates.items():
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.value == pytest.approx(getattr(true, name), rel=0.03)
        assert estimate.high - estimate.low < 0.1 * estimate.value
    noise = torch.tensor([0.001] * 12 + [0.002] * 6, dtype=torch.float64)  # Hover's
    assert torch.allclose(found.noise, noise, rtol=0.15)
    start = model.guess(other.measured, other.actions)
    before = prediction_error(model.simulate, [p.initial for p in parameters], other, start)
    after = prediction_error(model.simulate, found.values(), other, start)
    best = prediction_error(model.simulate, [getattr(true, name) for name in NAMES], other, start)
    assert (after[12:15] < 0.5 * before[12:15]).all()  # velocity
    assert (after[15:] < 0.2 * before[15:]).all()  # angular velocity
    assert torch.allclose(after, best, rtol=0.2)


def vehicle(theta: Tensor, start: Tensor, actions: Tensor) -> Tensor:
    """A car of F1TENTH's dimensions but for friction, lag and cornering stiffness; what it measures is its state."""
    rows = torch.tensor([getattr(F1TENTH, name) for name in PARAMETERS], dtype=torch.float64).repeat(len(theta), 1)
    for column, name in enumerate(("friction", "lag_s", "front_stiffness")):
        rows[:, PARAMETERS.index(name)] = theta[:, column]
    state, seen = start, [start]
    for command in actions.unbind(1):
        state = vehicle_dynamics.step(Model.DYNAMIC_BICYCLE, state, command, rows, 0.02)
        seen.append(state)
    return torch.stack(seen, 1)[..., :6]


def drives(truth: list[float], seed: int, count: int = 40) -> tuple[Segments, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros(count, 7, dtype=torch.float64)
    start[:, 3] = 2.0 + 3.0 * torch.rand(count, generator=generator, dtype=torch.float64)
    turns = torch.randn(count, 5, 2, generator=generator, dtype=torch.float64).repeat_interleave(8, 1)
    actions = turns * torch.tensor([0.2, 1.5]) + torch.tensor([0.0, 3.5])
    measured = vehicle(torch.tensor(truth, dtype=torch.float64).expand(count, -1), start, actions)
    noise = 0.005 * torch.randn(measured.shape, generator=generator, dtype=torch.float64)
    measured = measured + noise
    return Segments(measured, actions), torch.cat((measured[:, 0], torch.zeros(count, 1)), 1)


VEHICLE = [
    Parameter("friction", 0.8, 0.1, 2.0),
    Parameter("lag_s", 0.15, 0.03, 0.5),
    Parameter("stiffness", 6.0, 1.0, 30.0),
]


def test_friction_and_lag_of_a_car_are_found_and_intervals_cover():
    truth, covered, widths = [1.05, 0.1, 4.7], [], []
    for seed in range(12):
        found = identify(vehicle, VEHICLE, *drives(truth, seed))
        for estimate, value in zip(found.estimates.values(), truth, strict=True):
            assert estimate.value == pytest.approx(value, rel=0.05)
            covered.append(estimate.low <= value <= estimate.high)
            widths.append((estimate.high - estimate.low) / value)
    assert sum(covered) >= 30  # of 36; 34 are expected, fewer than 30 with a probability of 1%
    assert max(widths) < 0.1


def test_what_cannot_be_identified_is_reported():
    segments, start = drives([1.05, 0.1, 4.7], 0)
    straight = Segments(segments.measured, segments.actions * torch.tensor([0.0, 1.0]))
    still = torch.cat((start[:, :4] * 0.0, torch.zeros(len(start), 3)), 1).double()
    parked = Segments(torch.zeros_like(straight.measured), torch.zeros_like(straight.actions))
    with pytest.raises(ValueError, match="no effect on the recorded data: friction, lag_s, stiffness"):
        identify(vehicle, VEHICLE, parked, still)
    few = Segments(segments.measured[:3], segments.actions[:3])
    with pytest.raises(ValueError, match="expected more segments than the 3 parameters, got 3"):
        identify(vehicle, VEHICLE, few, start[:3])
    with pytest.raises(ValueError, match="not finite"):
        identify(lambda *given: vehicle(*given) * torch.nan, VEHICLE, segments, start)
    with pytest.raises(ValueError, match=r"expected lag_s between 0\.1 and 0\.2"):
        Parameter("lag_s", 0.3, 0.1, 0.2)
    with pytest.raises(ValueError, match="unknown parameters colour"):
        FlightModel(CRAZYFLIE_21, ["colour"], OPTIONS)
    with pytest.raises(ValueError, match="more than 21 periods without a break"):
        cut([], KEYS, 20, 1)


def test_identify_py_as_a_user_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture):
    true = true_airframe(3)
    fly(tmp_path / "a.mcap", true, 3, episodes=12)
    options = [
        f"recordings=[{tmp_path / 'a.mcap'}]",
        "airframe=crazyflie_21",
        f"parameters=[{','.join(NAMES)}]",
        "steps=20",
        f"output={tmp_path / 'found.json'}",
        "threads=1",
    ]
    assert program.main(program_identify.run, program_identify.describe, options) == 0
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["estimates"]["mass_kg"]["value"] == pytest.approx(true.mass_kg, rel=0.03)
    assert record["held_out_errors"]["after"]["velocity"] < record["held_out_errors"]["before"]["velocity"]
    assert "error of angular_velocity after 20 steps" in capsys.readouterr().out
    fitted = read_airframe(tmp_path / "found.yaml")
    assert fitted.mass_kg == pytest.approx(record["estimates"]["mass_kg"]["value"])
    assert fitted.thrust_2_n == CRAZYFLIE_21.thrust_2_n
    # the file becomes a run, which needs it no more, and the run becomes C that names it
    sizes = ["num_envs=2", "env_steps=20", "evaluation_starts=1", "evaluation_envs=1", "video=false", "control=false"]
    command = ["task=quadrotor_recover", "task.airframe=found.yaml", "algorithm=ppo", "threads=1", "output=run", *sizes]
    trained = run_program("train.py", *command, "algorithm.rollout_length=5", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "found.yaml").unlink()
    evaluated = run_program("evaluate.py", f"checkpoint={tmp_path / 'run'}", "episodes=1")
    assert evaluated.returncode == 0, evaluated.stderr
    parameters = json.loads((tmp_path / "run" / "evaluation.json").read_text())["task"]["airframes"]["found"]
    assert parameters == pytest.approx(asdict(fitted))
    exported = run_program("export.py", "checkpoint=run", "target=c", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert "found, parameters within 0%" in (tmp_path / "run" / "export" / "c" / "policy.h").read_text()


def test_too_little_to_hold_any_out_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    fly(tmp_path / "a.mcap", CRAZYFLIE_21, 0, episodes=1)
    options = [f"recordings=[{tmp_path / 'a.mcap'}]", "airframe=crazyflie_21", "parameters=[mass_kg]", "threads=1"]
    options += ["steps=18", f"output={tmp_path / 'found.json'}"]
    assert program.main(program_identify.run, program_identify.describe, options) == 1
    assert "expected at least 4 segments of 18 steps, got 3" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()
