"""The benchmark beside RAPTOR: what RAPTOR reads and commands, its process, the statistics; itself if it is there."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import quadrotor_raptor
from benchmarks.quadrotor_raptor import CLIPS, PACKAGES, Forgetful, Raptor, explained, observed, paired, row, told
from benchmarks.quadrotor_training import RESULTS
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult, evaluate
from embodied.policy import MEMORY
from embodied.seeding import generator
from policies.recurrent import RecurrentConfig
from sims.interpreter import own_python
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.observation import contract
from sims.quadrotor.physics.airframes import CRAZYFLIE
from sims.quadrotor.task import AnyPlatformTask
from sims.quadrotor.tasks.hover import Hover

NEEDED = pytest.mark.skipif(
    os.environ.get("CI_RAPTOR") != "required", reason="needs RAPTOR's package from PyPI: CI_RAPTOR=required"
)
STAND_IN = """
import numpy as np

class Sum:
    initial_hidden_state, state = np.array([1.0, 2.0, 3.0]), None

class Raptor:
    def __init__(self):
        self.layers = [object(), Sum()]

    def evaluate_step(self, observation):
        memory = self.layers[1]
        memory.state = memory.state + observation.sum(1, keepdims=True)
        return np.concatenate((memory.state, observation[:, :1]), 1)
"""
"""Another policy in the shape of the package's: its memory is 1, 2, 3 and the sum of all that it has read."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "foundation_policy.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    policy = Raptor(sys.executable)
    yield policy
    policy.close()


def random_policy():
    policy = RecurrentConfig().build(contract(Hover.OBSERVED))
    env = QuadrotorEnvironment(64)
    policy.fit(env.reset(starts=torch.arange(64)), torch.zeros(1, 4))
    with torch.no_grad():
        policy.gru.initial += torch.randn(policy.gru.size, generator=generator(0, "initial"))
        nn.init.orthogonal_(policy.actor[3].weight)
    return policy


def test_the_simulator_commands_and_turns_as_raptor_expects():
    """Rotors front-right, back-right, back-left, front-left; x forward, y left, z up, so right-handed turns."""
    env = QuadrotorEnvironment(3, mdp=Hover(force_scale=0.0, torque_scale=0.0), airframe=CRAZYFLIE, noise=False)
    before = env.reset(starts=torch.arange(3))["angular_velocity"]
    stronger = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])  # left, back, turn left
    for _ in range(5):
        observation = env.step(stronger.unsqueeze(1)).observation
    turned = observation["angular_velocity"] - before
    assert (turned.diagonal() > 1.0).all()
    torch.testing.assert_close(observation["previous_action"], stronger)
    assert env.contract.control_dt_s == 0.01
    specs = env.contract.observation
    frames = [specs[name].frame for name in ("position", "rotation", "velocity", "angular_velocity")]
    assert frames == ["world", "world", "world", "body"]
    assert env.contract.action.names == specs["previous_action"].names
    assert (env.contract.action.low, env.contract.action.high) == ((-1.0,) * 4, (1.0,) * 4)


def test_raptor_reads_position_rotation_velocities_and_the_last_action_in_this_order():
    env = QuadrotorEnvironment(2, noise=False)
    observation = env.reset(starts=torch.arange(2))
    rotation = env.pose[1]
    observation["position"] = torch.tensor([[0.7, -0.6, 0.1], [0.5, 0.0, -0.5]])
    observation["velocity"] = torch.tensor([[2.0, -3.0, 0.5], [0.0, 1.0, -1.0]])
    seen = observed(observation, {})
    assert seen.shape == (2, 22)
    torch.testing.assert_close(seen[:, :3], observation["position"])
    torch.testing.assert_close(seen[:, 3:12], rotation.flatten(1))  # by rows
    torch.testing.assert_close(seen[:, 12:15], observation["velocity"])
    torch.testing.assert_close(seen[:, 15:18], torch.stack(env.body.angular_velocity, 1))
    assert torch.equal(seen[:, 18:], observation["previous_action"])
    clipped = observed(observation, CLIPS)
    assert clipped[0, :3].tolist() == pytest.approx([0.5, -0.5, 0.1])
    assert clipped[0, 12:15].tolist() == [1.0, -1.0, 0.5]
    assert torch.equal(clipped[1], seen[1])
    assert torch.equal(clipped[:, 15:], seen[:, 15:])


def test_its_process_returns_actions_and_the_memory_of_each_episode(stand_in: Raptor):
    env = QuadrotorEnvironment(3)
    observation = env.reset(starts=torch.arange(3))
    memory = stand_in.initial_memory(3)
    assert memory.tolist() == [[1.0, 2.0, 3.0]] * 3
    memory = memory + torch.tensor([[0.0], [10.0], [20.0]])
    decision = stand_in.act(observation.copy().update({MEMORY: memory}), deterministic=True)
    total = observed(observation, {}).sum(1, keepdim=True)
    torch.testing.assert_close(decision.sample[MEMORY], memory + total)
    torch.testing.assert_close(decision.actions[:, 0, :3], memory + total)
    torch.testing.assert_close(decision.actions[:, 0, 3], observation["position"][:, 0])
    result = evaluate(QuadrotorEnvironment(3, split="eval"), stand_in, starts_per_task=3)
    assert result.success.shape == (1, 3)


def test_an_interpreter_without_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "foundation_policy.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="needs foundation-policy: --python PATH"):
        Raptor(sys.executable)


def test_a_forgetful_policy_acts_as_in_the_first_step():
    policy, env = random_policy(), QuadrotorEnvironment(2)
    observation = env.reset(starts=torch.arange(2))
    remembering = observation.copy().update({MEMORY: 3.0 * torch.ones(2, policy.gru.size)})
    first = observation.copy().update({MEMORY: policy.initial_memory(2)})
    expected = policy.act(first, deterministic=True).actions
    assert torch.equal(Forgetful(policy).act(remembering, deterministic=True).actions, expected)
    assert not torch.allclose(policy.act(remembering, deterministic=True).actions, expected)


def test_rows_have_wilsons_interval_and_differences_are_of_the_same_episodes():
    def result(success: list[int], error: list[float]) -> EvaluationResult:
        alive, metrics = torch.tensor([success]).bool(), {"position_error_m": torch.tensor([error]).double()}
        return EvaluationResult(("hover",), alive, torch.ones(1, len(success)), 500, metrics)

    ours = result([1, 1, 1, 0], [0.1, 0.2, 0.3, torch.nan])
    found = row(ours)
    assert (found["survive"], found["position_error_m"]) == (0.75, pytest.approx(0.2))
    assert found["survive_95"] == pytest.approx((0.3006, 0.9544), abs=1e-4)
    difference, low, high = paired(ours, result([0, 1, 0, 0], [torch.nan] * 4))
    assert difference == 0.5
    assert low < difference < high


def test_what_inputs_explain_is_measured_on_other_rows():
    inputs = torch.randn(4000, 3, generator=generator(0, "inputs"))
    noise = torch.randn(4000, generator=generator(0, "noise"))
    linear = inputs @ torch.tensor([1.0, 2.0, -1.0]) + 5.0
    half = linear + noise * 6.0**0.5  # as much noise as the inputs vary
    found = explained(inputs, torch.stack((linear, half, noise), 1))
    assert found.tolist() == pytest.approx([1.0, 0.5, 0.0], abs=0.05)


def test_what_a_memory_tells_is_measured_for_each_number():
    found = told(random_policy(), AnyPlatformTask(), 64)
    assert list(found) == ["thrust_to_weight", "mass", "lag_rise", "lag_fall"]
    assert all(scores.keys() == {"memory", "observation"} for scores in found.values())


def test_results_come_from_a_clean_commit(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quadrotor_raptor, "git_commit", lambda: "0123-dirty")
    with pytest.raises(SystemExit):
        quadrotor_raptor.main(["run"])
    assert "measured on a clean commit, this is 0123-dirty" in capsys.readouterr().err


def test_the_stored_result_compares_all_platforms_for_five_seeds():
    record = json.loads((RESULTS / "quadrotor_raptor.json").read_text())
    assert re.fullmatch("[0-9a-f]{40}", record["git_commit"])
    assert [each["platform"] for each in record["rows"]] == list(AnyPlatformTask().distributions)
    assert record["episodes"] == 256
    assert f"foundation-policy=={record['raptor']['foundation-policy']}" in PACKAGES
    for each in record["rows"]:
        assert [ours["seed"] for ours in each["ours"]] == [0, 1, 2, 3, 4]


@NEEDED
def test_raptor_hovers_a_platform_of_middle_size():
    raptor = Raptor(str(own_python("RAPTOR's policy", "raptor", "20 MB", ("numpy",), (), PACKAGES)))
    env = AnyPlatformTask().environment(32, "unseen_0250_g", "eval")
    result = evaluate(env, raptor, starts_per_task=32)
    raptor.close()
    assert float(result.success.float().mean()) > 0.95
