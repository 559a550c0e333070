"""plan=true: what it tells is what a run takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.imitation.distillation import informed
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.arsq import ARSQConfig
from embodied.algorithms.off_policy.residual import ResidualConfig
from embodied.algorithms.off_policy.sac import SACConfig
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.on_policy.ppo import PPO, PPOConfig
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import META, Passes
from embodied.command_line.config import compose
from embodied.contract import Contract
from embodied.networks.precision import Precision
from embodied.policy import PolicyConfig, Steering
from embodied.task import LearnerConfig
from embodied.training.experiment import ExperimentConfig
from embodied.training.loop import build
from embodied.training.plan import Plan, plan
from policies.coarse_to_fine import CoarseToFineConfig
from policies.flow import FlowConfig, FlowPolicy
from policies.generation.steering import SteeringConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from policies.squashed import SquashedConfig, SquashedPolicy
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import ReachTask
from tests.policies.lerobot import files as lerobot_files
from tests.policies.vla.checkpoints.test_weights import save
from tests.policies.vla.openvla import prismatic
from tests.programs import run_program
from train import GROUPS, TrainConfig

ENVS, LENGTH, ROWS = 32, 16, 128
SMALL_PPO = PPOConfig(rollout_length=LENGTH, minibatch=ROWS, epochs=1, critic_warmup=0)
CASES: dict[str, tuple[PolicyConfig, LearnerConfig]] = {
    "mlp, ppo": (MLPConfig(hidden=[64, 32]), SMALL_PPO),
    "flow, ppo": (FlowConfig(hidden=32), SMALL_PPO),
    "flow, ppo near its start": (FlowConfig(hidden=32), replace(SMALL_PPO, wasserstein=0.1)),
    "recurrent, ppo": (RecurrentConfig(), SMALL_PPO),
    "flow, self-imitation": (
        FlowConfig(hidden=32),
        SelfImitationConfig(rollout_length=LENGTH, gradient_steps=2, capacity=1000, sft=SFTConfig(batch=ROWS)),
    ),
    "mlp, td3": (
        MLPConfig(hidden=[64, 32]),
        TD3Config(rollout_length=LENGTH, minibatch=ROWS, warmup=100, gradient_steps=4),
    ),
    "squashed, sac": (
        SquashedConfig(hidden=[64, 32]),
        SACConfig(rollout_length=LENGTH, minibatch=ROWS, warmup=100, updates=0.01),
    ),
    "coarse_to_fine, arsq": (
        CoarseToFineConfig(hidden=[64, 32]),
        ARSQConfig(LENGTH, minibatch=ROWS, warmup=100, gradient_steps=4, demonstration_share=0.0),
    ),
}


def planned(case: str, **options: object) -> Plan:
    policy, algorithm = CASES[case]
    config = ExperimentConfig(
        num_envs=ENVS, env_steps=10_000, sft=SFTConfig(batch=ROWS), stages=["sft", "rl"], **options
    )
    return plan(config, ReachTask(), policy, algorithm)


def size(tensors: object) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if isinstance(tensor, Tensor))


@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_moments_are_those_of_a_run(case: str) -> None:
    (config, algorithm), env = CASES[case], Reach(ENVS)
    policy = config.build(env.contract)
    seen = env.reset()
    policy.fit(seen, torch.rand(ENVS, *policy.contract.action.shape))
    policy.start_critic()
    demonstrations = ReachTask().demonstrations(Path(), 0)
    learner, collector = build(env, policy, algorithm, demonstrations, 0)
    for _ in range(4):  # TD3 waits until its replay has enough
        learner.update(collector.collect(LENGTH), 0.0)
    told = planned(case).stages["RL"]
    assert told["weights", "cpu"] == size([*policy.parameters(), *policy.buffers()])
    kept = [part for part in vars(learner).values() if isinstance(part, torch.optim.Optimizer)]
    kept += [part.optimiser for part in vars(learner).values() if hasattr(part, "optimiser")]
    assert kept
    weights = [weight for each in kept for group in each.param_groups for weight in group["params"]]
    moments = [value for each in kept for of in each.state.values() for name, value in of.items() if name != "step"]
    assert told["gradients", "cpu"] == size(weights)
    assert told["optimiser", "cpu"] == 2 * size(weights)
    unused = size(policy.noise.parameters()) if isinstance(policy, FlowPolicy) else 0  # of Flow-Noise, with Flow-SDE
    unused += size(policy.critic.parameters()) if isinstance(policy, SquashedPolicy) else 0  # of PPO
    assert size(moments) == told["optimiser", "cpu"] - 2 * unused


@pytest.mark.parametrize("case", ["mlp, ppo", "flow, ppo", "flow, ppo near its start"])
def test_activations_and_the_rollout_are_those_of_a_run(case: str) -> None:
    (config, algorithm), env = CASES[case], Reach(ENVS)
    policy = config.build(env.contract)
    policy.fit(env.reset(), torch.rand(ENVS, *policy.contract.action.shape))
    learner, collector = build(env, policy, algorithm, None, 0)
    rollout = collector.collect(LENGTH)
    rows = torch.arange(ROWS)
    seen, sample = rollout.observation.flatten()[rows], rollout.sample.flatten()[rows]
    told = planned(case).stages["RL"]
    distance = learner._start_distance if algorithm.wasserstein else lambda _: None
    assert told["activations", "cpu"] == saved_bytes(lambda: (policy.evaluate(seen, sample), distance(seen)))
    parts = [
        leaf for part in vars(rollout).values() if isinstance(part, TensorDict) for leaf in part.values(True, True)
    ]
    taken = size([*parts, *vars(rollout).values()])
    assert abs(told["rollout", "cpu"] - taken) < 0.15 * taken


def test_the_replay_of_a_frozen_policy_stores_features() -> None:
    config = FlowConfig(hidden=32, steering=SteeringConfig(kind=Steering.RESIDUAL))
    algorithm = ResidualConfig(rollout_length=LENGTH, minibatch=ROWS, warmup=10**6)
    env = Reach(ENVS)
    policy = config.build(env.contract)
    policy.fit(env.reset(), torch.rand(ENVS, *policy.contract.action.shape))
    learner, collector = build(env, policy, algorithm, None, 0)
    learner.update(collector.collect(LENGTH), 0.0)
    stored = learner.replay.own.decisions(torch.zeros(1, dtype=torch.int64), "observation")
    run = ExperimentConfig(num_envs=ENVS, env_steps=10_000, stages=["rl"])
    replay_bytes = plan(run, ReachTask(), config, algorithm).stages["RL"]["replay", "cpu"]
    rows = 10_000 // policy.contract.executed * 2
    observed = size(stored["observation"].values())
    assert observed > 64
    assert 0 < replay_bytes / rows - observed < 200


class OwnPPO(PPO):
    """An algorithm from outside of the package."""

    def largest_pass(self, passes: Passes) -> int | None:
        return 12_345


class UnknownPPO(PPO):
    """One that does not know its passes."""

    def largest_pass(self, passes: Passes) -> int | None:
        return Composite.largest_pass(self, passes)


@dataclass
class OwnConfig(PPOConfig):
    learner: type[PPO] = OwnPPO

    def build(self, policy, demonstrations, env, generator) -> PPO:
        return self.learner(policy, self, demonstrations, generator)


def test_an_algorithm_from_outside_is_planned_and_what_it_does_not_know_is_unknown() -> None:
    config = ExperimentConfig(num_envs=ENVS)
    own, unknown = (
        plan(config, ReachTask(), MLPConfig(hidden=[64, 32]), OwnConfig(rollout_length=LENGTH, learner=learner))
        for learner in (OwnPPO, UnknownPPO)
    )
    assert own.stages["RL"]["activations", "cpu"] == 12_345
    assert unknown.stages["RL"] == own.stages["RL"] | {("activations", "cpu"): None}
    assert unknown.total("RL", "cpu") == own.total("RL", "cpu") - 12_345
    rows = {line.split()[0]: line for line in unknown.table().splitlines() if line}
    assert rows["activations"].split() == ["activations", "cpu", "unknown"]
    assert "more than" in rows["total"]
    assert any("UnknownPPO" in remark for remark in unknown.remarks)
    assert not any("OwnPPO" in remark for remark in own.remarks)


class Frozen(FlowConfig):
    """Its encoder is not trained."""

    def build(self, contract: Contract) -> FlowPolicy:
        policy = super().build(contract)
        policy.encoder.requires_grad_(False)
        return policy


def test_what_is_frozen_has_neither_gradients_nor_moments() -> None:
    frozen = plan(ExperimentConfig(num_envs=ENVS), ReachTask(), Frozen(hidden=32), SMALL_PPO).stages["RL"]
    whole = planned("flow, ppo").stages["RL"]
    encoder = size(FlowConfig(hidden=32).build(ReachTask().contract("wide")).encoder.parameters())
    assert encoder > 0
    assert whole["gradients", "cpu"] - frozen["gradients", "cpu"] == encoder
    assert whole["optimiser", "cpu"] - frozen["optimiser", "cpu"] == 2 * encoder


def test_a_minibatch_in_pieces_takes_what_was_allowed() -> None:
    whole = planned("flow, ppo").stages["RL"]["activations", "cpu"]
    policy, _ = CASES["flow, ppo"]
    pieces = PPOConfig(rollout_length=LENGTH, minibatch=ROWS, memory_gb=0.3 * whole / 1e9)
    memory_plan = plan(ExperimentConfig(num_envs=ENVS), ReachTask(), policy, pieces)
    assert 0.2 * whole < memory_plan.stages["RL"]["activations", "cpu"] <= 0.31 * whole


def test_a_task_that_does_not_tell_its_demonstrations_says_how_to_count_sft() -> None:
    memory_plan = plan(ExperimentConfig(num_envs=ENVS), ReachTask(), *CASES["flow, ppo"])
    assert list(memory_plan.stages) == ["RL"]
    assert any("stages=[sft,rl]" in remark for remark in memory_plan.remarks)


def test_sft_is_kept_for_the_control_alone() -> None:
    kept = ("SFT's state, for the control", "cpu")
    with_control, without = (planned("flow, ppo", control=control).stages for control in (True, False))
    assert list(with_control) == ["SFT", "RL", "control"]
    assert list(without) == ["SFT", "RL"]
    assert with_control["RL"][kept] > 0
    assert kept not in without["RL"]
    assert with_control["SFT"] == without["SFT"]


def test_nothing_is_computed_with_and_the_table_adds_up() -> None:
    memory_plan = planned("flow, self-imitation")
    assert META.type == "meta"
    for stage, parts in memory_plan.stages.items():
        assert memory_plan.total(stage, "cpu") == sum(size for (_, on), size in parts.items() if on == "cpu")
    lines = memory_plan.table().splitlines()
    assert lines[2].split() == ["on", "SFT", "RL", "control"]
    assert any(line.startswith("total ") for line in lines)


def test_a_part_that_a_stage_lacks_takes_nothing_there() -> None:
    memory_plan = Plan("a run", {"SFT": {("batch", "cpu"): 2000}, "RL": {("rollout", "cpu"): 3000}})
    rows = [" ".join(line.split()) for line in memory_plan.table().splitlines()]
    assert rows[3:6] == ["batch cpu 2 kB 0 B", "rollout cpu 0 B 3 kB", "total cpu 2 kB 3 kB"]


@pytest.mark.parametrize(
    "options",
    [
        "policy=pi0 algorithm=ppo policy.denoising_steps=2",
        "policy=pi0 algorithm=grpo policy.precision=bfloat16 policy.denoising_steps=2",
        "policy=flow",
        "policy=pi05 task=libero_pick task.images=[agentview] algorithm=ppo policy.gradient_checkpointing=true"
        " policy.denoising_steps=2",
        "policy=smolvla algorithm=ppo policy.size=TINY policy.denoising_steps=2",
        "policy=groot algorithm=ppo policy.size=TINY policy.denoising_steps=2",
        "policy=tokens algorithm=ppo",
        "policy=diffusion algorithm=ranking",
        "policy=act algorithm=self_imitation policy.dim_model=16 policy.n_heads=2",
        "task=libero_pick algorithm=ranking",
    ],
)
def test_policies_of_pictures_and_words_are_planned(options: str) -> None:
    chosen = options.split()
    task = [] if any(each.startswith("task=") for each in chosen) else ["task=libero_pictures"]
    config, _ = compose(TrainConfig, "train", [*task, *chosen], GROUPS)
    memory_plan = plan(config, config.task, config.policy, config.algorithm)
    halved = getattr(config.policy, "precision", Precision.FLOAT32) is Precision.BFLOAT16
    assert halved == any("bfloat16" in remark for remark in memory_plan.remarks)
    policy = config.policy.build(config.task.contract(config.task.distributions[0]))
    for parts in memory_plan.stages.values():
        assert parts["weights", "cpu"] == size([*policy.parameters(), *policy.buffers()])
        assert parts["activations", "cpu"] > 0
        assert parts["demonstrations, mapped", "disk"] > 0


def test_published_weights_are_planned_by_their_configuration_and_with_adapters(tmp_path: Path) -> None:
    save(tmp_path, "lerobot")
    read = ["task=libero_pictures", "policy=pi0", "algorithm=ppo", f"policy.weights={tmp_path}", "policy.hidden=16"]
    read.append("policy.denoising_steps=2")
    plans = [planned_of(read + more).stages for more in ([], ["policy.lora_rank=2"])]
    whole, adapted = (stages["RL"] for stages in plans)
    copies = plans[1]["SFT"]["copies of weights", "cpu"]
    assert copies < 0.5 * adapted["weights", "cpu"]  # SFT's average is on the same base
    assert adapted["weights", "cpu"] > whole["weights", "cpu"]
    assert adapted["optimiser", "cpu"] < 0.5 * whole["optimiser", "cpu"]
    config = compose(TrainConfig, "train", read, GROUPS)[0]
    policy = config.policy.build(config.task.contract("areas"))
    assert whole["weights", "cpu"] == size([*policy.parameters(), *policy.buffers()])
    (tmp_path / "model.safetensors").unlink()  # not read
    assert planned_of(read).stages["RL"] == whole


def test_openvla_is_planned_by_the_sizes_in_its_files(tmp_path: Path) -> None:
    prismatic.save(tmp_path, proprio=False)
    read = ["task=libero_pictures", "policy=tokens", "algorithm=ppo", f"policy.weights={tmp_path}", "policy.hidden=16"]
    read.append("policy.unnorm_key=demonstrations")
    whole, adapted = (planned_of(read + more).stages["RL"] for more in ([], ["policy.lora_rank=2"]))
    assert adapted["optimiser", "cpu"] < 0.5 * whole["optimiser", "cpu"]
    config = compose(TrainConfig, "train", read, GROUPS)[0]
    policy = config.policy.build(config.task.contract("areas"))
    assert whole["weights", "cpu"] == size([*policy.parameters(), *policy.buffers()])


def test_policies_of_lerobot_are_planned_by_their_configuration(tmp_path: Path) -> None:
    config = lerobot_files.act_config()
    task = ["task=libero_pictures", "policy=act", "algorithm=self_imitation", f"policy.weights={tmp_path}"]
    contract = compose(TrainConfig, "train", task[:3], GROUPS)[0].task.contract("areas")
    cameras = [key for key, spec in contract.observation.items() if spec.is_picture]
    side = contract.observation[cameras[0]].shape[0]
    state = sum(
        spec.shape[0] for spec in contract.observation.values() if spec.dtype == "float32" and not spec.privileged
    )
    config["input_features"] = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, side, side]} for name in cameras
    }
    config["input_features"]["observation.state"] = {"type": "STATE", "shape": [state]}
    config["output_features"]["action"]["shape"] = [contract.action.shape[0]]
    config["chunk_size"] = contract.horizon
    (tmp_path / "config.json").write_text(json.dumps(config))  # there are no weights
    assert planned_of(task).stages["SFT"]["weights", "cpu"] > 4 * 11_000_000


def test_distillation_counts_the_teacher() -> None:
    options = ["task=quadrotor_any", "policy=recurrent", "algorithm=distillation"]
    config = compose(TrainConfig, "train", options, GROUPS)[0]
    memory_plan = planned_of(options).stages["RL"]
    contract = config.task.contract(config.task.distributions[0])
    teacher = config.algorithm.teacher.build(informed(contract, config.algorithm.privileged))
    assert memory_plan["copies of weights", "cpu"] == size([*teacher.parameters(), *teacher.buffers()])
    student = config.policy.build(contract)
    trained = [*student.actor_parameters(), *teacher.mean_parameters(), *teacher.critic_parameters()]  # BPTT's
    assert memory_plan["gradients", "cpu"] == size(trained)
    assert memory_plan["activations", "cpu"] > 1_000_000


def planned_of(options: list[str]) -> Plan:
    config = compose(TrainConfig, "train", options, GROUPS)[0]
    return plan(config, config.task, config.policy, config.algorithm)


def test_train_py_prints_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ["task=vehicle_navigate", "policy=mlp", "algorithm=ppo", "policy.hidden=[1000000,1000000]", "plan=true"]
    completed = run_program("train.py", *options, f"output={tmp_path / 'run'}", cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert "TB" in completed.stdout + completed.stderr
    assert not list(tmp_path.iterdir())
