"""ManiSkill's scenes as vectorised Environments: many of one world on the CPU, or one of many worlds on a GPU.

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
"""Initial states of a scene of many worlds: each is made once, by a reset of its own."""


def seed_of(start: int, split: str) -> int:
    """The library's seed, in [0, 2^32), of an initial state; those of "train" are odd, those of "eval" even."""
    return derive(start, "maniskill") % (1 << 31) * 2 + (split == "train")


class ManiSkillEnvironment(EpisodeEngine):
    """N worlds of one task, in scenes of their own on the CPU, stepped one after another.

    Initial state `start` is the library's of the seed `seed_of(start)`, whatever else runs. An episode ends where the
    task succeeds or fails: a dense reward would go on after a success, so that it counts as truncated, and as
    terminated with a sparse one.

    Args:
        num_envs: N.
        options: the task and how it is played.
        split: "train" or "eval": initial states that they do not share.
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control steps after which an episode is truncated; the library's if None.
        seed: which initial states an unnamed reset takes.

    Raises:
        UserError: for what the library has not.
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
        self.worlds: list[BaseEnv] = [options.make()]  # the others when they are first needed
        self._set_up(num_envs, options, split, executed, step_limit, seed, "cpu")
        self._seen = [dict(flat(self.worlds[0].get_obs(unflattened=True)))] * num_envs

    def _set_up(
        self, num_envs: int, options: Options, split: str, executed: int, limit: int | None, seed: int, device: str
    ) -> None:
        self.options, self.split = options, split
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
        """A world is reset twice, with a step between: what touches what is known only after a step."""
        for i, start in zip(ids.tolist(), starts.tolist(), strict=True):
            while len(self.worlds) <= i:
                self.worlds.append(self.options.make())
            world, seed = self.worlds[i], seed_of(start, self.split)
            if not world.reconfiguration_freq:
                world.reset(seed=seed)
                world.scene.step()
            self._seen[i] = dict(flat(world.reset(seed=seed)[0]))

    def advance(self, actions: Tensor, left: Tensor) -> Outcome:
        """One world after another; each stops where its episode ends."""
        commands = self.scale(actions)
        reward, executed = np.zeros(commands.shape[:2], dtype=np.float32), np.zeros(commands.shape[:2], dtype=bool)
        won, failed, diverged = np.zeros((3, self.num_envs), dtype=bool)
        for i, count in enumerate(left.tolist()):
            for k in range(count):
                observation, earned, ended, _, info = self.worlds[i].step(commands[i, k : k + 1])
                value = float(earned)
                executed[i, k] = True
                if math.isfinite(value):
                    reward[i, k] = value
                if bool(ended) or not math.isfinite(value):
                    diverged[i] = not math.isfinite(value)
                    won[i] = bool(info.get("success", False)) and not diverged[i]
                    failed[i] = not won[i] and not diverged[i]
                    break
            if count:
                self._seen[i] = dict(flat(observation))
        return self._outcome(reward, executed, won, failed, diverged)

    def _outcome(self, reward: Light, executed: Light, won: Light, failed: Light, diverged: Light) -> Outcome:
        sparse = self.options.reward == "sparse"
        return Outcome(reward, executed, failed | won if sparse else failed, won, None if sparse else won, diverged)

    def observe(self) -> TensorDict:
        """All that the library tells of each world."""
        seen = {name: torch.cat([each[name] for each in self._seen]) for name in self.contract.observation}
        return TensorDict(seen, batch_size=[self.num_envs])

    def close(self) -> None:
        """Free the scenes."""
        for world in self.worlds:
            world.close()
        self.worlds = []


class BatchedManiSkillEnvironment(ManiSkillEnvironment):
    """N worlds of one task in one scene, simulated and observed on a GPU; arguments as `ManiSkillEnvironment`'s.

    Initial states are numbered from 0 to `BANK` - 1 and kept: a state is made by resetting the first world alone, and
    copied from there. The simulator moves frozen worlds on; what was seen of them at their end is kept.
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
        """Put the worlds into kept states, all at once."""
        kept = [self._kept(start % BANK) for start in starts.tolist()]
        states = {
            kind: {name: torch.cat([state[kind][name] for state in kept]) for name in kept[0][kind]} for kind in kept[0]
        }
        options = {"env_idx": ids, "reset_to_env_states": {"env_states": states}}
        seen = dict(flat(self.worlds[0].reset(options=options)[0]))
        self._now = {name: values.index_copy(0, ids, seen[name][ids]) for name, values in self._now.items()}

    def advance(self, actions: Tensor, left: Tensor) -> Outcome:
        """All worlds at once; of those that are frozen nothing is taken."""
        commands = self.scale(actions)
        won, failed, diverged = torch.zeros(3, self.num_envs, dtype=torch.bool, device=self.device)
        rewards, ran = [], []
        for k in range(commands.shape[1]):
            active = (left > k) & ~(won | failed | diverged)
            observation, earned, ended, _, info = self.worlds[0].step(commands[:, k])
            self._take(observation, active)
            broken = active & ~earned.isfinite()
            success = info["success"] & active & ~broken
            won, failed, diverged = won | success, failed | (ended & active & ~success & ~broken), diverged | broken
            rewards.append(torch.where(active & ~broken, earned.float(), 0.0))
            ran.append(active)
        return self._outcome(torch.stack(rewards, 1), torch.stack(ran, 1), won, failed, diverged)

    def observe(self) -> TensorDict:
        """All that the library tells, as tensors of the scene's device."""
        return TensorDict({name: values.clone() for name, values in self._now.items()}, batch_size=[self.num_envs])

    def _take(self, observation: dict, active: Tensor) -> None:
        for name, values in flat(observation):
            mask = active.view(-1, *(1,) * (values.dim() - 1))
            self._now[name] = torch.where(mask, values, self._now[name])

    def _kept(self, start: int) -> dict[str, dict[str, Tensor]]:
        """The initial state as the library's tree, one row of each; the first world is put back afterwards."""
        if start not in self._bank:
            world, first = self.worlds[0], torch.zeros(1, dtype=torch.int64, device=self.device)
            before = _rows(world.get_state_dict(), first)
            world.reset(seed=seed_of(start, self.split), options={"env_idx": first})
            self._bank[start] = _rows(world.get_state_dict(), first)
            world.set_state_dict(before, first)
        return self._bank[start]


def _rows(state: dict[str, dict[str, Tensor]], ids: Tensor) -> dict[str, dict[str, Tensor]]:
    kinds = ("actors", "articulations")
    return {kind: {name: values[ids].clone() for name, values in state.get(kind, {}).items()} for kind in kinds}
