"""Policies, learners, collectors and evaluations do not mix devices.

The device is a double (`device_double.py`), as most machines that run the tests have no GPU. Not covered: missing or
differently rounding CUDA kernels, CUDA's own checks, its memory, asynchronous streams, autocast, its random numbers and
generator states, and timing. Devices of gradients are less strict here: autograd sees tensors of the CPU.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.algorithms.imitation.distillation import DistillationConfig
from embodied.algorithms.imitation.one_step import OnlineOneStepConfig
from embodied.algorithms.imitation.self_imitation import SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.off_policy.arsq import ARSQConfig
from embodied.algorithms.off_policy.dsrl import DSRLConfig
from embodied.algorithms.off_policy.qc import QCConfig, QCFQLConfig
from embodied.algorithms.off_policy.sac import SACConfig
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.algorithms.on_policy.ranking import RankingConfig
from embodied.evaluation.evaluation import evaluate
from embodied.policy import DeterministicPolicy, RankingPolicy, Steering, TrainablePolicy
from embodied.rollout.rollout import Collector
from embodied.rollout.storage import Storage
from embodied.saving import checkpoint
from embodied.saving.tree import load_tree, save_tree
from embodied.task import Learner
from embodied.training.loop import build, train
from policies.coarse_to_fine import CoarseToFineConfig
from policies.flow import FlowConfig
from policies.generation.steering import SteeringConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from policies.squashed import SquashedConfig
from tests.conformance.device_double import DEVICE, DeviceDouble, DoubleTensor, MixedError
from tests.conformance.test_policies import CONFIGS, CONTRACT, observations
from tests.embodied.algorithms.imitation.test_self_imitation import demonstrations
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach
from tests.embodied.windy_reach import WindyReach


@pytest.fixture
def double() -> Iterator[DeviceDouble]:
    torch.manual_seed(0)
    with DeviceDouble() as double:
        yield double


def everywhere(value: object, there: bool) -> None:
    """All tensors of `value` are on the double, or none is."""
    if isinstance(value, TensorDict):
        value = list(value.values(include_nested=True, leaves_only=True))
    if isinstance(value, torch.Tensor):
        assert isinstance(value, DoubleTensor) == there, value
    elif isinstance(value, list | tuple):
        for part in value:
            everywhere(part, there)
    elif hasattr(value, "__dataclass_fields__"):
        everywhere([getattr(value, name) for name in value.__dataclass_fields__], there)


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda there, here: there + here,
    "product of matrices": lambda there, here: there @ here,
    "stack": lambda there, here: torch.stack((there, here)),
    "stack of numbers": lambda there, here: torch.stack((there.sum(), here.sum())),
    "index": lambda there, here: there[here[0].long()],
    "mask": lambda there, here: there[here > 0],
    "index of the CPU": lambda there, here: here[there[0].long()],
    "assignment": lambda there, here: there.__setitem__(here > 0, 0.0),
    "in place on the CPU": lambda there, here: here.add_(there.sum()),
    "number in place on the CPU": lambda there, here: here.sum().add_(there.sum()),
    "where": lambda there, here: torch.where(there > 0, there, here),
    "noise": lambda there, here: torch.randn(2, generator=torch.Generator(device=DEVICE)),
    "noise there": lambda there, here: torch.randn(2, device=DEVICE, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_double_refuses_what_a_device_refuses(double: DeviceDouble, name: str) -> None:
    with pytest.raises(MixedError):
        REFUSED[name](torch.ones(2, 2, device=DEVICE), torch.ones(2, 2))


def test_the_double_computes_and_counts_what_is_carried(double: DeviceDouble) -> None:
    x = torch.arange(4.0, device=DEVICE, requires_grad=True)
    y = torch.ones(4, requires_grad=True)
    (2.0 * x + y.to(DEVICE) * torch.tensor(3.0)).square().sum().backward()
    assert x.grad.tolist() == [12.0, 20.0, 28.0, 36.0]
    assert type(y.grad) is torch.Tensor
    assert y.grad.tolist() == [18.0, 30.0, 42.0, 54.0]
    assert x.device == DEVICE
    assert float(x.detach().sum().cpu()) == 6.0
    assert dict(double.transfers) == {"to the device": 1, "to the host": 2}
    assert bool(x[1] > 0)
    assert double.transfers["number"] == 1
    for read in (torch.Tensor.numpy, lambda tensor: tensor.__array__()):
        with pytest.raises(TypeError, match=r"Tensor\.cpu"):
            read(x.detach())
    held = torch.zeros(3, 4)
    held[1] = x.detach()
    assert held.sum(1).tolist() == [0.0, 6.0, 0.0]
    assert double.transfers["copy_"] == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_policies_stay_where_they_are(
    double: DeviceDouble, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mlp", "squashed"):  # the device's tanh, for the copy on the CPU too: bits are compared
        monkeypatch.setattr(f"policies.{module}.tanh", torch.tanh)
    policy = CONFIGS[name].build(CONTRACT).to(DEVICE)
    if name == "flow, ranking":
        policy.start_ranking()
    seen, actions = observations(12).to(DEVICE), (torch.rand(12, 4, 7) - 0.3).to(DEVICE)
    policy.fit(seen, actions)
    policy.start_critic()
    generator = seeding.generator(0, "noise", device=policy.device)
    valid = torch.ones(12, 4, dtype=torch.bool, device=DEVICE)
    before = +double.transfers
    for deterministic in (False, True):
        decision = policy.act(seen, deterministic=deterministic, generator=generator)
        everywhere(decision, True)
    # Fixed noise is drawn on the CPU, and words are looked up there.
    if not name.startswith(("flow", "diffusion", "pi0", "smolvla", "groot", "tokens")) and name not in (
        "squashed",
        "coarse_to_fine",
    ):
        assert not (double.transfers - before).keys() - {"number"}
    decision = policy.act(seen, generator=generator)
    evaluation = policy.evaluate(seen, decision.sample)
    everywhere(evaluation, True)
    everywhere(policy.value(seen), True)
    loss = policy.loss(seen, actions, valid) + evaluation.log_prob.sum() + evaluation.value.sum()
    if isinstance(policy, RankingPolicy):
        loss = loss + policy.advantage_loss(seen, actions, torch.zeros(12, device=DEVICE))
    loss.backward()
    for parameter in policy.parameters():
        everywhere(parameter.grad, True)
    if isinstance(policy, DeterministicPolicy):
        everywhere(policy.dense_layers(), True)
    fresh = policy.with_new_weights()
    everywhere(list(fresh.state_dict().values()), True)
    fresh.load_state_dict(policy.state_dict())
    saved = checkpoint.Checkpoint(policy.state_dict(), CONTRACT, state={"generator": generator.get_state()})
    checkpoint.save(tmp_path, saved)
    checkpoint.load(tmp_path).restore(fresh)
    everywhere(list(fresh.state_dict().values()), True)
    for mine, theirs in zip(policy.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    copied = copy.deepcopy(policy).to("cpu")
    everywhere(list(copied.state_dict().values()), False)
    expected = copied.act(seen.cpu(), deterministic=True).actions
    assert torch.equal(policy.act(seen, deterministic=True).actions.cpu(), expected)
    if hasattr(policy, "deployable") and name != "squashed":  # it reads objects here, which it cannot export
        everywhere(list(policy.deployable().state_dict().values()), False)


MLP = MLPConfig(hidden=[8])
SQUASHED = SquashedConfig(hidden=[8])
PPO = PPOConfig(rollout_length=6, minibatch=16, critic_warmup=0)
BPTT = BPTTConfig(rollout_length=6, critic=True, discount=0.9)
SFT = SFTConfig(steps=4, batch=16)
IMITATION = SelfImitationConfig(rollout_length=6, gradient_steps=2, rounds=2, sft=SFT)
OFF_POLICY = {"rollout_length": 6, "capacity": 900, "warmup": 20, "minibatch": 16, "hidden": [8]}


def steered(kind: Steering) -> FlowConfig:
    return FlowConfig(width=8, hidden=8, explored_candidates=3, steering=SteeringConfig(kind=kind, hidden=[8]))


LEARNERS = {
    "ppo": (Reach, MLP, PPO),
    "ppo, in pieces": (Reach, MLP, replace(PPO, memory_gb=1e-6)),
    "ppo, recurrent": (Reach, RecurrentConfig(hidden=[8]), PPO),
    "ppo, flow": (Reach, FlowConfig(width=8, hidden=8), PPO),
    "td3": (Reach, MLP, TD3Config(rollout_length=6, capacity=900, warmup=20, gradient_steps=3, minibatch=16)),
    "sac": (Reach, SQUASHED, SACConfig(rollout_length=6, capacity=900, warmup=20, updates=0.02, minibatch=16)),
    "arsq": (
        Reach,
        CoarseToFineConfig(hidden=[8]),
        ARSQConfig(6, gradient_steps=3, minibatch=16, demonstration_share=0.0, capacity=900, warmup=20),
    ),
    "bptt": (SmoothReach, MLP, BPTT),
    "bptt, by steps": (SmoothReach, MLP, BPTT),
    "self-imitation": (Reach, MLP, IMITATION),
    "ranking": (
        Reach,
        FlowConfig(width=8, hidden=8, explored_candidates=3),
        RankingConfig(IMITATION, gradient_steps=2, warmup=1, minibatch=16, value_minibatch=16),
    ),
    "qc": (Reach, steered(Steering.NONE), QCConfig(gradient_steps=3, demonstration_share=0.0, sft=SFT, **OFF_POLICY)),
    "qc_fql": (
        Reach,
        steered(Steering.ONE_STEP),
        QCFQLConfig(gradient_steps=3, demonstration_share=0.0, sft=SFT, **OFF_POLICY),
    ),
    "one_step": (
        Reach,
        steered(Steering.ONE_STEP),
        OnlineOneStepConfig(16, rollout_length=6, gradient_steps=3, warmup=1),
    ),
    "dsrl": (Reach, steered(Steering.NOISE), DSRLConfig(updates=0.02, final_lr_share=0.5, **OFF_POLICY)),
    "distillation": (
        WindyReach,
        RecurrentConfig(hidden=[8]),
        DistillationConfig(MLP, BPTT, rollout_length=6, privileged=["wind"], teacher_steps=40, epochs=1, minibatch=4),
    ),
    "distillation, ppo": (
        WindyReach,
        MLP,
        DistillationConfig(MLP, PPO, rollout_length=6, privileged=["wind"], teacher_steps=40, epochs=1, minibatch=4),
    ),
}
"""Environment, policy and learner."""


@pytest.mark.parametrize("env_device", ["cpu", "cuda"])
def test_training_begins_with_random_play(double: DeviceDouble, env_device: str) -> None:
    env = Reach(64, device=env_device)
    policy = MLP.build(env.contract).to(DEVICE)
    assert next(train(env, policy, PPO, env_steps=1)).env_steps > 0
    everywhere(list(policy.state_dict().values()), True)


def test_sft_trains_there_on_episodes_that_lie_here(double: DeviceDouble) -> None:
    policy = MLP.build(Reach(1).contract).to(DEVICE)
    policy.fit(Reach(8).reset().to(DEVICE), torch.zeros(1, 1))
    learner = SFT.build(policy, torch.Generator().manual_seed(0))
    assert learner.fit(demonstrations(), 2)["loss"] > 0.0
    everywhere(list(policy.state_dict().values()), True)


@pytest.mark.parametrize("config", [MLP, RecurrentConfig(hidden=[8])])
@pytest.mark.parametrize("env_device", ["cpu", "cuda"])
@pytest.mark.parametrize("storage", Storage)
def test_rollouts_lie_where_they_are_wanted(
    double: DeviceDouble, storage: Storage, env_device: str, config: MLPConfig, tmp_path: Path
) -> None:
    env = Reach(6, device=env_device)
    policy = config.build(env.contract).to(DEVICE)
    policy.fit(env.reset().to(DEVICE), torch.zeros(1, 1))
    learner = PPOConfig(minibatch=16, critic_warmup=0).build(policy, None, env, torch.Generator().manual_seed(0))
    collector = Collector(env, policy, seeding.generator(0, "noise", device=DEVICE), None, storage, tmp_path)
    for _ in range(2):
        rollout = collector.collect(5)
        stored = [rollout.observation, rollout.actions, rollout.sample, rollout.reward, rollout.done]
        everywhere(stored, storage is Storage.DEVICE and env_device == "cuda")
        assert learner.update(rollout, 0.0)["minibatches"] > 0


@pytest.mark.parametrize("config", [MLP, RecurrentConfig(hidden=[8]), FlowConfig(width=8, hidden=8)])
@pytest.mark.parametrize("env_device", ["cpu", "cuda"])
def test_evaluations_run_there_as_here(double: DeviceDouble, env_device: str, config: MLPConfig) -> None:
    policy = config.build(Reach(1).contract)
    policy.fit(Reach(8).reset(), torch.zeros(8, 1))
    expected = evaluate(Reach(4), policy, starts_per_task=5)
    found = evaluate(Reach(4, device=env_device), policy.to(DEVICE), starts_per_task=5, device=DEVICE)
    everywhere([found.success, found.steps], False)
    assert torch.equal(found.success, expected.success)
    assert torch.equal(found.steps, expected.steps)


@pytest.mark.parametrize("env_device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LEARNERS)
def test_learners_learn_there_and_go_on_from_what_was_saved(
    double: DeviceDouble, name: str, env_device: str, tmp_path: Path
) -> None:
    kind, config, algorithm = LEARNERS[name]

    def make() -> tuple[TrainablePolicy, Learner, Collector]:
        env = kind(8, device=env_device)
        if name == "bptt, by steps":
            env.unroll = None
        policy = config.build(env.contract).to(DEVICE)
        policy.fit(env.reset().to(DEVICE), torch.zeros(8, 1, device=DEVICE))
        return policy, *build(env, policy, algorithm, demonstrations(), 0)

    policy, learner, collector = make()
    for _ in range(2):
        learner.update(collector.collect(algorithm.rollout_length), 0.1)
    save_tree(tmp_path / "state", {"learner": learner.state_dict(), "collector": collector.state_dict()})
    other_policy, other, other_collector = make()
    other_policy.load_state_dict(policy.state_dict())
    state = load_tree(tmp_path / "state")
    other.load_state_dict(state["learner"])
    other_collector.load_state_dict(state["collector"])
    other.update(other_collector.collect(algorithm.rollout_length), 0.2)
    everywhere(list(other_policy.state_dict().values()), True)
    assert all(weights.isfinite().all() for weights in other_policy.state_dict().values())
