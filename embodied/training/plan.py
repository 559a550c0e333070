"""Memory plan of a run, computed from shapes on torch's meta device, where tensors have no values.

The policy and its learner are built there, whatever their size, and the passes of training run through them. The plan
counts tensors that persist, not the temporary memory of PyTorch itself, the simulator and single layers. N are
environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied import seeding
from embodied.algorithms.off_policy.replay import MixedReplay
from embodied.algorithms.parts import Composite, iter_parts, name_of
from embodied.algorithms.passes import META, VARIABLE, MetaValues, Passes, meta_observation, on_meta
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.networks.precision import Precision, precision_of
from embodied.placement.local import divided_envs, divides
from embodied.placement.ray import RayConfig
from embodied.placement.registry import TorchrunConfig
from embodied.policy import PolicyConfig, TrainablePolicy
from embodied.rollout.storage import Storage
from embodied.run_options import ExperimentConfig
from embodied.task import LearnerConfig, OfflineLearnerConfig, Task

MOMENTS = 2
"""Numbers that Adam stores for each weight."""
DISK = "disk"
Parts: TypeAlias = dict[tuple[str, str], int | None]
"""Bytes by part and device; None: unknown."""


@dataclass
class Plan:
    """Memory of each stage by part and device (`stages[stage][part, device]`, bytes; None: unknown), and remarks."""

    title: str
    stages: dict[str, Parts] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def total(self, stage: str, device: str) -> int:
        """Known bytes of a stage on a device."""
        return sum(size for (_, on), size in self.stages[stage].items() if on == device and size)

    def most(self, device: str) -> tuple[str, int]:
        """Stage that takes most of a device, and its bytes there."""
        stage = max(self.stages, key=lambda each: self.total(each, device))
        return stage, self.total(stage, device)

    def _total_text(self, stage: str, device: str) -> str:
        is_complete = None not in [size for (_, on), size in self.stages[stage].items() if on == device]
        return ("" if is_complete else "more than ") + size_text(self.total(stage, device))

    def table(self) -> str:
        """Table of the parts of every stage, the totals by device, and the remarks."""
        keys = list(dict.fromkeys(key for parts in self.stages.values() for key, size in parts.items() if size != 0))
        rows = [["", "on", *self.stages]]
        rows += [
            [part, on, *(size_text(each.get((part, on), 0)) for each in self.stages.values())] for part, on in keys
        ]
        for device in dict.fromkeys(on for _, on in keys):
            rows.append(["total", device, *(self._total_text(stage, device) for stage in self.stages)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, second, *others = widths
        lines = [
            "  ".join([name.ljust(first), on.ljust(second), *map(str.rjust, sizes, others)])
            for name, on, *sizes in rows
        ]
        return "\n".join([self.title, "", *lines, "", *self.remarks])


def plan(
    config: ExperimentConfig,
    task: Task,
    policy: PolicyConfig,
    algorithm: LearnerConfig | None,
    *,
    offline: OfflineLearnerConfig | None = None,
    device: str = "cpu",
    demonstrations: Sequence[str | Path] | None = None,
    placement: object = None,
) -> Plan:
    """Plan the memory of each process of a run with these parts; the other arguments are those of `Experiment`.

    Nothing is written. `placement` is a config of a placement; None: a run in one process.

    Raises:
        UserError: where the parts do not go together.
    """
    config.check_learners(algorithm, offline)
    contract = task.contract(task.distributions[0])
    halved = precision_of(config.precision, policy.own_precision) is Precision.BFLOAT16
    steps = task.max_demonstration_steps
    requested = config.stages or (["sft", "rl"] if steps or demonstrations else ["rl"])
    torchrun = placement if isinstance(placement, TorchrunConfig) else None
    shard = torchrun is not None and divides(torchrun.shard, device)
    scope = f", in each of {torchrun.size} processes" if torchrun else ""
    memory = Plan(f"Memory of task={task.name}{scope}, computed from shapes: nothing was allocated or written.")
    has_control = config.control and "sft" in requested and len(requested) > 1
    with MetaValues():
        planned = _Planned(contract, config, policy, device, torchrun.size if torchrun else 1, shard)
        if "sft" in requested:
            memory.stages["SFT"] = planned.supervised(config.sft)
        if offline is not None:
            memory.stages["offline"] = planned.supervised(offline) | (planned.stored_state() if has_control else {})
        if "rl" in requested and algorithm is not None:
            memory.stages["RL"] = planned.reinforced(algorithm, "sft" in requested)
        if has_control:
            memory.stages["control"] = planned.supervised(config.sft) | planned.stored_state() | planned.others()
    row = sum(spec_bytes(spec.shape, spec.dtype) for spec in (*contract.observation.values(), contract.action))
    data = sum(_file_bytes(Path(scope)) for scope in demonstrations) if demonstrations else steps * row
    reads_demonstrations = requested != ["rl"] or (algorithm is not None and algorithm.reads_demonstrations)
    for parts in memory.stages.values() if data and reads_demonstrations else ():
        parts["demonstrations, mapped", DISK] = data
    for name in dict.fromkeys(planned.unknown):
        memory.remarks.append(
            f"Unknown of {name}: what its parts() and largest_pass() leave out (docs/own_algorithm.md)."
        )
    if halved:
        memory.remarks.append("Activations are counted in float32; in bfloat16 they take up to a half less.")
    if isinstance(placement, RayConfig):
        memory.remarks.append("Of the learner: its collectors have environments and copies of the policy elsewhere.")
    if not (config.stages or steps or demonstrations):
        memory.remarks.append("The task does not tell of demonstrations: stages=[sft,rl] counts SFT, too.")
    return _remarked(memory, contract, bool(steps) and reads_demonstrations and not demonstrations)


class _Planned:
    """Policy of a run on the meta device, and the memory of its stages."""

    def __init__(
        self,
        contract: Contract,
        config: ExperimentConfig,
        policy: PolicyConfig,
        device: str,
        processes: int,
        shard: bool,
    ) -> None:
        self.contract = contract
        self.device = device
        self.processes = processes
        self.config = replace(config, num_envs=divided_envs(config.num_envs, processes))
        with seeding.undisturbed():
            self.policy: TrainablePolicy = on_meta(lambda: policy.build(contract))
            passing = self.policy
            if policy.own_precision is Precision.BFLOAT16:
                whole = replace(cast(Any, policy), precision=Precision.FLOAT32)  # meta tensors do not support autocast
                passing = on_meta(lambda: whole.build(contract))
        self.passes = Passes(passing, self.config.num_envs, 1, processes)
        self.parts = processes if shard and self.policy.blocks() else 1
        """Number of processes that share weights and optimiser."""
        self.weights = _bytes(_tensors(self.policy))
        self.unknown: list[str] = []  # names of learners whose passes are unknown

    def supervised(self, config: OfflineLearnerConfig) -> Parts:
        """Memory of SFT, or of another learner of demonstrations, by part and device, bytes."""
        with seeding.undisturbed():
            learner = config.build(self.policy, seeding.generator(0, "plan"))
        return self._learned(learner, 1)

    def stored_state(self) -> Parts:
        """Bytes of SFT's state that is stored for the control: both sets of weights and the optimiser's state."""
        stored = _bytes(list(self.policy.state_dict().values()))
        trained = _bytes([weight for weight in self.policy.actor_parameters() if weight.requires_grad])
        return {("SFT's state, for the control", self.aside): self._part(2 * stored + MOMENTS * trained)}

    def others(self) -> Parts:
        """Bytes that the policy after RL takes while another copy is trained."""
        with seeding.undisturbed():
            tensors = [*_tensors(self.policy.with_new_weights()), *_tensors(self.policy)]
        return {("policy after RL", self.device): self._part(_bytes(tensors) - self.weights)}

    @property
    def aside(self) -> str:
        """Device on which the state of another stage is stored."""
        return "cpu" if self.processes == 1 else self.device

    def _part(self, size: int) -> int:
        """Bytes in each process of a size that is divided among processes."""
        return -(-size // self.parts)

    def reinforced(self, algorithm: LearnerConfig, after_sft: bool) -> Parts:
        """Bytes of reinforcement learning, while SFT's state is stored."""
        env = _Shapes(self.contract, self.config.num_envs)
        no_episodes = Episodes.of(TensorDict({}, [0]), torch.zeros(0, *self.contract.action.shape))
        with seeding.undisturbed():
            learner = algorithm.build(self.policy, no_episodes, cast(Any, env), seeding.generator(0, "plan"))
        length = algorithm.rollout_length
        count = self.config.num_envs
        parts = self._learned(learner, length)
        before = {("weights as RL begins", self.aside): self._part(_bytes(list(self.policy.state_dict().values())))}
        parts |= self.stored_state() if after_sft and self.config.control else before
        row = self._row_bytes()
        places = {Storage.DEVICE: "simulator", Storage.CPU: "cpu", Storage.DISK: DISK}
        storage_device = (
            places[self.config.storage] if self.device != "cpu" or self.config.storage is Storage.DISK else "cpu"
        )
        parts["rollout", storage_device] = length * count * row + count * self._observation_bytes()
        decisions = self.config.env_steps // self.contract.executed
        replays = iter_parts(learner, (MixedReplay, EpisodeStore))
        parts["replay", "cpu"] = sum(self._replay_bytes(each, decisions, row) for each in replays)
        return parts

    def _replay_bytes(self, replay: MixedReplay | EpisodeStore, decisions: int, row: int) -> int:
        """Bytes of the rows of a `replay` after so many decisions, whose rollouts have `row` bytes each."""
        if isinstance(replay, EpisodeStore):
            return replay.max_rows(decisions) * row
        stored = _bytes(_leaves(replay.stored(self.passes.observation(1))))
        return replay.own.max_rows(decisions) * (row - self._observation_bytes() + stored)

    def _learned(self, learner: object, rollout_length: int) -> Parts:
        """Bytes of all networks of `learner`, the state of its optimisers, and its largest pass."""
        optimisers = list(iter_parts(learner, (torch.optim.Optimizer,)))
        trained = [weight for each in optimisers for group in each.param_groups for weight in group["params"]]
        networks = [tensor for module in iter_parts(learner, (nn.Module,)) for tensor in _tensors(module)]
        copies = _bytes([*networks, *_tensors(self.policy)]) - self.weights
        is_listed = isinstance(learner, Composite)
        passes = replace(self.passes, rollout_length=rollout_length)
        activations = learner.largest_pass(passes) if is_listed else None
        if activations is None:
            self.unknown.append(name_of(learner))
        trained_bytes = _bytes([weight for weight in trained if weight.requires_grad])
        parts: dict[str, int | None] = {
            "weights": self._part(self.weights),
            "weights, gathered as they run": self.weights if self.parts > 1 else 0,
            "copies of weights": self._part(copies) if is_listed else None,
            "gradients": self._part(trained_bytes) if is_listed else None,
            "optimiser": self._part(MOMENTS * trained_bytes) if is_listed else None,
            "activations": activations,
        }
        return {(part, self.device): size for part, size in parts.items()}

    def _observation_bytes(self) -> int:
        return _bytes(_leaves(self.passes.observation(1)))

    def _row_bytes(self) -> int:
        """Bytes of one decision of a rollout, as `Collector.collect` stores it."""
        decision = self.passes.decision()
        executed = self.contract.executed
        tensors = [
            decision.actions,
            decision.log_prob,
            *_leaves(decision.sample),
            *([decision.value] if decision.value is not None else []),
        ]
        # reward 4 + executed 1 + its copy in the sample 1 = 6 bytes per executed action; three flags, an int64, two
        # float32
        ends = 3
        start = 8
        totals = 8
        return self._observation_bytes() + _bytes(tensors) + 6 * executed + ends + start + totals


class _Shapes:
    """Environments of one task whose observations have shapes but no values."""

    group = 1
    step_limit = 1
    num_starts = None
    task_names = ("planned",)
    instructions = ("",)

    def __init__(self, contract: Contract, num_envs: int) -> None:
        self.contract = contract
        self.num_envs = num_envs
        self.device = META
        self.task_index = self.start = torch.zeros(1, dtype=torch.int64).expand(num_envs)

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """Observations [N] without values."""
        return meta_observation(self.contract, self.num_envs)

    def step(self, actions: Tensor) -> Transition:
        """Transition of shapes only."""
        flag = torch.empty(self.num_envs, dtype=torch.bool, device=META)
        per_action = actions[..., 0]
        return Transition(self.reset(), per_action, per_action > 0.0, flag, flag, flag)

    def detach(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


def spec_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of a contract, with length `VARIABLE` where its length is open."""
    return torch.Size(VARIABLE if size < 0 else size for size in shape).numel() * getattr(torch, dtype).itemsize


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _leaves(rows: TensorDict) -> list[Tensor]:
    return cast(list[Tensor], list(rows.values(include_nested=True, leaves_only=True)))


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes of `tensors`; tensors that share memory count once."""
    return sum({each.untyped_storage()._cdata: each.numel() * each.itemsize for each in tensors}.values())


def _file_bytes(source: Path) -> int:
    """Bytes of a file, or of all files in a folder.

    Raises:
        UserError: where there is none.
    """
    if not source.exists():
        raise UserError(f"demonstrations={source}: there is no such file or folder")
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def _remarked(plan: Plan, contract: Contract, own: bool) -> Plan:
    remarks = [
        *plan.remarks,
        "Not counted: PyTorch itself, the simulator, and what single layers take while they run.",
    ]
    if varying := [key for key, spec in contract.observation.items() if -1 in spec.shape]:
        remarks.append(f"Axes of unknown length count as {VARIABLE}: {', '.join(varying)}.")
    if own:
        remarks.append("Demonstrations are the task's own, which are made by the run: at most as many bytes.")
    if any("simulator" in key for parts in plan.stages.values() for key in parts):
        remarks.append("simulator: the device of the simulator, the policy's if it can run there, else the CPU.")
    plan.remarks = remarks
    return plan


def size_text(size: int | None) -> str:
    """Size in decimal units, as in data sheets of memory and GPUs; None: "unknown"."""
    if size is None:
        return "unknown"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"
