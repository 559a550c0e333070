"""What processes of torchrun run in tests: closed loops of updates on `Reach`, whose weights are written to a folder.

Every process simulates all environments with the same noise, and learns from its share: together that is the batch of
one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict import TensorDict

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import TensorSpec
from embodied.data.episodes import Episodes
from embodied.placement.local import Local, Processes
from embodied.rollout.rollout import Rollout
from embodied.training.loop import build
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from policies.vla.pi0 import Pi0Config
from tests.embodied.reach import Reach
from tests.embodied.smooth_reach import SmoothReach
from tests.placement.own_algorithm import documented

UPDATES = 5
PPO = {"rollout_length": 6, "epochs": 2, "minibatch": 20, "learning_rate": 1e-3, "critic_warmup": 1, "target_kl": 0.05}


class Seen(Reach):
    """`Reach` whose position is also a picture."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        picture = TensorSpec((16, 16, 3), "uint8", camera="front", frame="world")
        specs = self.contract.observation | {"front": picture}
        self.contract = replace(self.contract, observation=specs)

    def _observation(self) -> TensorDict:
        seen = super()._observation()
        bright = (128 + 120 * self.position.clamp(-1.0, 1.0)).to(torch.uint8)
        return seen.set("front", bright.view(-1, 1, 1, 1).expand(-1, 16, 16, 3).contiguous())


def half(rollout: Rollout, world: Processes) -> Rollout:
    """The share of the environments that is this process's."""
    count = rollout.done.shape[1]
    columns = slice(world.rank * count // world.size, (world.rank + 1) * count // world.size)
    parts = {
        field.name: value[:, columns]
        for field in fields(Rollout)
        if (value := getattr(rollout, field.name)) is not None and getattr(value, "ndim", 0) >= 2
    }
    if rollout.final_rows is not None and rollout.final_observation is not None:
        env = rollout.final_rows % count
        mine = (env >= columns.start) & (env < columns.stop)
        rows = rollout.final_rows[mine] // count * (count // world.size) + env[mine] - columns.start
        parts |= {"final_rows": rows, "final_observation": rollout.final_observation[mine]}
    last, index = rollout.last_observation[columns], rollout.task_index[columns]
    return replace(rollout, **parts, last_observation=last, task_index=index)


def reinforced(world: Processes, policy: Any, config: Any, env: Any, updates: int = UPDATES) -> dict[str, torch.Tensor]:
    """Weights after `updates` on the same environments."""
    torch.manual_seed(0)
    learned = policy.build(env.contract)
    learned.fit(env.reset(), torch.rand(32, env.contract.horizon, 1, generator=torch.Generator().manual_seed(0)) - 0.5)
    learned = world.place(learned)
    learner, collector = build(env, learned, config, None, 0, Local())
    world.join(learner)
    for update in range(updates):
        rollout = collector.collect(config.rollout_length)
        told = world.mean(learner.update(half(rollout, world), update / updates, world))
    return state(learned) | {f"metric/{name}": torch.tensor(value) for name, value in told.items()}


def supervised(world: Processes) -> dict[str, torch.Tensor]:
    """Weights after supervised steps on demonstrations, some of which end within a chunk."""
    env = Reach(4, horizon=3)
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[16]).build(env.contract)
    seen = TensorDict({"position": torch.randn(40, 1), "task": torch.zeros(40, 1)}, [40])
    parts = zip(seen.split([3, 2, 4, 13, 18]), torch.rand(40, 1).split([3, 2, 4, 13, 18]), strict=True)
    episodes = Episodes.join([Episodes.of(observation, 0.25 * actions) for observation, actions in parts])
    policy.fit(seen, torch.rand(40, 3, 1))
    learner = SFTConfig(steps=20, batch=10).build(policy, torch.Generator().manual_seed(0))
    world.join(learner)
    metrics = learner.fit(episodes, 20, world)
    return state(policy) | {"metric/loss": torch.tensor(metrics["loss"])}


def state(policy: Any) -> dict[str, torch.Tensor]:
    """All weights, whole."""
    weights = policy.state_dict()
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in weights.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


VLA = Pi0Config(hidden=16, denoising_steps=2)
CASES: dict[str, Callable[[Processes], dict[str, torch.Tensor]]] = {
    "mlp": lambda world: reinforced(world, MLPConfig(hidden=[16]), PPOConfig(**PPO), Reach(8)),
    "recurrent": lambda world: reinforced(
        world, RecurrentConfig(hidden=[16], encoder=8, memory=8), PPOConfig(**PPO), Reach(8)
    ),
    "flow": lambda world: reinforced(
        world, FlowConfig(hidden=16, width=8, initial_std=0.4), PPOConfig(**PPO, memory_gb=1e-5), Reach(8)
    ),
    "grpo": lambda world: reinforced(
        world,
        MLPConfig(hidden=[16]),
        GRPOConfig(rollout_length=8, epochs=2, minibatch=20, group=4, lowest=0.0, highest=1.0),
        Reach(16, tasks=1),
    ),
    "bptt": lambda world: reinforced(
        world,
        MLPConfig(hidden=[16]),
        BPTTConfig(rollout_length=5, critic=True, discount=0.9, value_minibatch=11),
        SmoothReach(8),
    ),
    "supervised": supervised,
    "pi0": lambda world: reinforced(world, VLA, PPOConfig(**PPO), Seen(8)),
    "own_algorithm": lambda world: reinforced(
        world, MLPConfig(hidden=[16]), documented()["A2CConfig"](rollout_length=6), Reach(8)
    ),
}


def main(arguments: list[str]) -> None:
    """Run the cases that follow a folder in this process of torchrun; the first one writes their weights there."""
    from embodied.placement.torchrun import Torchrun

    folder, *names = arguments
    torch.set_num_threads(1)
    with Torchrun("cpu", 60.0) as world:
        for name in names:
            world.shard = name.endswith("sharded")
            found = CASES[name.removesuffix("_sharded")](world)
            if not world.rank:
                save_file(found, Path(folder) / f"{name}.safetensors")
