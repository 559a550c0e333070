"""The child's side: makes a task, steps its environment, writes observations into shared memory."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from embodied import seeding
from embodied.environment import (
    Environment,
    NumberedStarts,
    Restorable,
    SwitchableEnvironment,
    Transition,
    group_size,
)
from embodied.environments.engine import EpisodeEngine, first_environment
from embodied.errors import UserError
from embodied.saving.tree import load_tree, save_tree
from sims.remote.channel import Channel
from sims.remote.memory import Layout, arrays, from_json

Reply = dict[str, Any]
TRANSITION = ("reward", "executed", "terminated", "truncated", "success")


class Server:
    """Answers messages {"do": NAME, "id": NUMBER, ...} in order, with {"id": NUMBER, ...}."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.env: Environment | None = None
        self.rows = slice(0, 0)
        self.memory: dict[str, dict[str, np.ndarray]] = {}
        self.layouts: dict[str, Layout] = {}  # of this child's arrays, without their rows
        self.waiting: dict[str, dict[str, np.ndarray]] = {}  # tensors to write once their memory is mapped

    def serve(self) -> None:
        """Answer until the parent closes the connection."""
        while True:
            try:
                message, file = self.channel.receive()
            except (EOFError, OSError):
                return
            command = message.pop("do")
            number = message.pop("id")
            extra = {} if file is None else {"file": file}
            try:
                reply = getattr(self, f"_{command}")(**message, **extra)
            except Exception as error:
                reply = {"error": " ".join(str(error).split()), "kind": type(error).__name__}
                reply["traceback"] = traceback.format_exc()
            try:
                self.channel.send({"id": number, **(reply or {})})
            except OSError:
                return

    def _make(
        self, task: str, options: Reply, num_envs: int, first: int, distribution: str, split: str, seed: int
    ) -> Reply:
        """Make environments `first` and following of `task`, `distribution` and `split`; returns their description."""
        self._close()
        seeding.seed_everything(seed)
        with first_environment(first):
            env = self.env = _task(task, options).environment(num_envs, distribution, split, seed, "cpu")
        numbered = isinstance(env, NumberedStarts)
        return {
            "contract": env.contract.to_dict(),
            "num_envs": env.num_envs,
            "task_names": list(env.task_names),
            "instructions": list(env.instructions),
            "task_index": env.task_index.tolist(),
            "step_limit": env.step_limit if numbered else None,
            "num_starts": env.num_starts if numbered else None,
            "numbered": numbered,
            "restorable": isinstance(env, Restorable),
            "switchable": isinstance(env, SwitchableEnvironment),
            "group": group_size(env),
        }

    def _map(self, name: str, layout: dict[str, Any], rows: list[int], file: int) -> None:
        """Map the memory `name`, of which `rows` are this child's; then write pending tensors into it."""
        self.memory[name], self.rows = arrays(file, from_json(layout)), slice(*rows)
        os.close(file)
        if name in self.waiting:
            self._write(name, self.waiting.pop(name))

    def _ready(self) -> None:
        """No-op, whose reply confirms that all earlier messages are processed."""

    def _reset(self, named: bool) -> Reply:
        """Reset by the mask and the starts in the shared memory; `named`: the caller has chosen these starts."""
        env = self.env
        mask = torch.from_numpy(self.memory["commands"]["mask"][self.rows].copy())
        starts = torch.from_numpy(self.memory["commands"]["starts"][self.rows].copy())
        if not isinstance(env, NumberedStarts):
            observation = cast(Environment, env).reset(mask)
        elif isinstance(env, EpisodeEngine) and not named:
            # An engine may treat the next starts of its stream differently from named ones.
            env.next_starts = lambda ids: starts[ids]
            observation = env.reset(mask)
        else:
            observation = env.reset(mask, starts)
        return self._put("observation", observation)

    def _step(self) -> Reply:
        actions = torch.from_numpy(self.memory["commands"]["actions"][self.rows].copy())
        with torch.no_grad():
            transition = cast(Environment, self.env).step(actions)
        if transition.actions is not None or "human" in transition.signals:
            raise UserError("environments in which people take over run in one process; use task.processes=0")
        reply = self._put("observation", transition.observation)
        return reply | self._put("transition", _flat(transition))

    def _save(self, path: str) -> None:
        save_tree(path, cast(Restorable, self.env).state_dict())

    def _load(self, path: str) -> Reply:
        return self._put("observation", cast(Restorable, self.env).load_state_dict(load_tree(path)))

    def _switch(self, distribution: str, split: str) -> None:
        cast(SwitchableEnvironment, self.env).switch(distribution, split)

    def _contract(self, task: str, options: Reply, distribution: str) -> Reply:
        return {"contract": _task(task, options).contract(distribution).to_dict()}

    def _demonstrate(self, task: str, options: Reply, directory: str, seed: int) -> Reply:
        """Write the task's demonstrations to `directory`."""
        return {"found": _task(task, options).demonstrations(Path(directory), seed) is not None}

    def _close(self) -> None:
        """Close the environment; another may be made afterwards."""
        if self.env is not None:
            self.env.close()
        self.env = None
        self.memory = {}
        self.layouts = {}
        self.waiting = {}

    def _put(self, name: str, tensors: Mapping[str, Tensor]) -> Reply:
        """Write `tensors` into the memory `name`; without one, keep them and return the layout that it needs."""
        arrays = {key: tensor.detach().cpu().numpy() for key, tensor in tensors.items()}
        layout = {key: (array.dtype.name, array.shape[1:]) for key, array in arrays.items()}
        if layout != self.layouts.setdefault(name, layout):
            raise ValueError(f"the {name} was {self.layouts[name]} at first and is {layout} now")
        if name in self.memory:
            self._write(name, arrays)
            return {}
        self.waiting[name] = {key: array.copy() for key, array in arrays.items()}
        return {name: layout}

    def _write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        for key, array in arrays.items():  # an axis is longer in memory if another process has more rows of it
            self.memory[name][key][(self.rows, *(slice(length) for length in array.shape[1:]))] = array


def _task(kind: str, options: Reply) -> Any:  # noqa: ANN401 - a dataclass
    module, _, name = kind.partition(":")
    config = OmegaConf.structured(getattr(importlib.import_module(module), name))
    return OmegaConf.to_object(OmegaConf.merge(config, options))


def _flat(transition: Transition) -> dict[str, Tensor]:
    tensors = {name: getattr(transition, name) for name in TRANSITION}
    tensors["has_success"] = torch.full_like(transition.terminated, transition.has_success)
    tensors |= {f"failure.{name}": failed for name, failed in transition.failures.items()}
    tensors |= {f"metric.{name}": values for name, values in transition.metrics.items()}
    tensors |= {f"signal.{name}": values for name, values in transition.signals.items()}
    return tensors | {f"event.{name}": happened for name, happened in transition.events.items()}
