"""ManiSkill's scenes as vectorised Environments: many scenes of one world on the CPU, or one of many on a GPU.

Letters in shape comments: N environments, K executed actions of a chunk, A action dimension, M of the environments.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environments.engine import EpisodeEngine, Light, Outcome
from embodied.errors import UserError
from embodied.seeding import derive
from sims.maniskill.contract import describe, flat
from sims.maniskill.worlds import BATCHED, Options

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv

BANK = 1024
"""Number of initial states of a scene of many worlds; each is made once, by a separate reset."""


def seed_of(start: int, split: str) -> int:
    """The library's seed, in [0, 2^32), of an initial state, odd for "train" and even for "eval"."""
    return derive(start, "maniskill") % (1 << 31) * 2 + (split == "train")


class ManiSkillEnvironment(EpisodeEngine):
    """N worlds of one task, in scenes of their own on the CPU, stepped one after another.

    Initial state `start` is the library's initial state for the seed `seed_of(start)`. An episode ends when the task
    succeeds or fails. A success counts as truncation with a dense reward, which would continue after it, and as
    termination with a sparse one.

    Args:
        num_envs: N.
        options: the task and its settings.
        split: "train" or "eval", with disjoint initial states.
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control steps after which an episode is truncated; the library's if None.
        seed: selects the initial states of a reset without starts.

    Raises:
        UserError: for an unknown split; see also `worlds.Options.make` and `contract.describe`.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        options: Options,
        split: str = "train",
        executed: int = 1,
        step_limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self.worlds: list[BaseEnv] = [options.make()]  # the others are made when they are first needed
        self._set_up(num_envs, options, split, executed, step_limit, seed, "cpu")
        self._latest = [dict(flat(self.worlds[0].get_obs(unflattened=True)))] * num_envs

    def _set_up(
        self, num_envs: int, options: Options, split: str, executed: int, limit: int | None, seed: int, device: str
    ) -> None:
        self.options = options
        self.split = split
        if split not in ("train", "eval"):
            raise UserError(f"unknown split {split!r}; expected train or eval")
        contract, self.scale = describe(self.worlds[0], executed)
        limit = options.step_limit if limit is None else limit
        instruction = options.id.partition("-")[0]
        words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in instruction).strip()
        EpisodeEngine.__init__(
            self, contract, num_envs, limit, task_names=(options.id,), instructions=(words,), seed=seed, device=device
        )

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Reset each world twice, with a step between, because contacts are only known after a step."""
        for i, start in zip(ids.tolist(), starts.tolist(), strict=True):
            while len(self.worlds) <= i:
                self.worlds.append(self.options.make())
            world = self.worlds[i]
            seed = seed_of(start, self.split)
            if not world.reconfiguration_freq:
                world.reset(seed=seed)
                world.scene.step()
            self._latest[i] = dict(flat(world.reset(seed=seed)[0]))

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk in one world after another; each stops when its episode ends."""
        commands = self.scale(actions)
        reward = np.zeros(commands.shape[:2], dtype=np.float32)
        executed = np.zeros(commands.shape[:2], dtype=bool)
        succeeded, failed, diverged = np.zeros((3, self.num_envs), dtype=bool)
        for i, count in enumerate(remaining_steps.tolist()):
            for k in range(count):
                observation, step_reward, ended, _, info = self.worlds[i].step(commands[i, k : k + 1])
                value = float(step_reward)
                executed[i, k] = True
                if math.isfinite(value):
                    reward[i, k] = value
                if bool(ended) or not math.isfinite(value):
                    diverged[i] = not math.isfinite(value)
                    succeeded[i] = bool(info.get("success", False)) and not diverged[i]
                    failed[i] = not succeeded[i] and not diverged[i]
                    break
            if count:
                self._latest[i] = dict(flat(observation))
        return self._outcome(reward, executed, succeeded, failed, diverged)

    def _outcome(self, reward: Light, executed: Light, won: Light, failed: Light, diverged: Light) -> Outcome:
        sparse = self.options.reward == "sparse"
        return Outcome(reward, executed, failed | won if sparse else failed, won, None if sparse else won, diverged)

    def observe(self) -> TensorDict:
        """The simulator's observations of each world."""
        observation = {name: torch.cat([each[name] for each in self._latest]) for name in self.contract.observation}
        return TensorDict(observation, batch_size=[self.num_envs])

    def close(self) -> None:
        """Free the scenes."""
        for world in self.worlds:
            world.close()
        self.worlds = []


class BatchedManiSkillEnvironment(ManiSkillEnvironment):
    """N worlds of one task in one scene, simulated and observed on a GPU; arguments as `ManiSkillEnvironment`'s.

    Initial states are numbered from 0 to `BANK` - 1 and stored: a state is made by a reset of the first world only, and
    copied from it. The simulator continues to step frozen worlds; their last observations are stored.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        options: Options,
        split: str = "train",
        executed: int = 1,
        step_limit: int | None = None,
        seed: int = 0,
        device: str = "cuda",
    ) -> None:
        if options.id not in BATCHED:
            raise UserError(f"{options.id} runs on the CPU alone; on a GPU there are {', '.join(BATCHED)}")
        self.worlds = [options.make(max(1, num_envs), device)]
        self._set_up(num_envs, options, split, executed, step_limit, seed, str(self.worlds[0].device))
        self.num_starts = BANK
        self._bank: dict[int, dict[str, dict[str, Tensor]]] = {}
        self._now = dict(flat(self.worlds[0].get_obs(unflattened=True)))

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Set the worlds to stored initial states, all at once."""
        stored = [self._start_state(start % BANK) for start in starts.tolist()]
        states = {
            kind: {name: torch.cat([state[kind][name] for state in stored]) for name in stored[0][kind]}
            for kind in stored[0]
        }
        options = {"env_idx": ids, "reset_to_env_states": {"env_states": states}}
        observations = dict(flat(self.worlds[0].reset(options=options)[0]))
        self._now = {name: values.index_copy(0, ids, observations[name][ids]) for name, values in self._now.items()}

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk in all worlds at once; results of frozen worlds are ignored."""
        commands = self.scale(actions)
        succeeded, failed, diverged = torch.zeros(3, self.num_envs, dtype=torch.bool, device=self.device)
        rewards = []
        executions = []
        for k in range(commands.shape[1]):
            active = (remaining_steps > k) & ~(succeeded | failed | diverged)
            observation, step_reward, ended, _, info = self.worlds[0].step(commands[:, k])
            self._take(observation, active)
            broken = active & ~step_reward.isfinite()
            success = info["success"] & active & ~broken
            succeeded = succeeded | success
            failed = failed | (ended & active & ~success & ~broken)
            diverged = diverged | broken
            rewards.append(torch.where(active & ~broken, step_reward.float(), 0.0))
            executions.append(active)
        return self._outcome(torch.stack(rewards, 1), torch.stack(executions, 1), succeeded, failed, diverged)

    def observe(self) -> TensorDict:
        """The simulator's observations, as tensors on the scene's device."""
        return TensorDict({name: values.clone() for name, values in self._now.items()}, batch_size=[self.num_envs])

    def _take(self, observation: dict, active: Tensor) -> None:
        for name, values in flat(observation):
            mask = active.view(-1, *(1,) * (values.dim() - 1))
            self._now[name] = torch.where(mask, values, self._now[name])

    def _start_state(self, start: int) -> dict[str, dict[str, Tensor]]:
        """An initial state as the library's tree with one row each; afterwards the first world's state is restored."""
        if start not in self._bank:
            world = self.worlds[0]
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            before = _rows(world.get_state_dict(), first)
            world.reset(seed=seed_of(start, self.split), options={"env_idx": first})
            self._bank[start] = _rows(world.get_state_dict(), first)
            world.set_state_dict(before, first)
        return self._bank[start]


def _rows(state: dict[str, dict[str, Tensor]], ids: Tensor) -> dict[str, dict[str, Tensor]]:
    kinds = ("actors", "articulations")
    return {kind: {name: values[ids].clone() for name, values in state.get(kind, {}).items()} for kind in kinds}
