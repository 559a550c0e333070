"""A reflex between a policy's chunk executor and safety, see `embodied.execution.reflex`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.execution.reflex import Reflex, measured_keys
from real_robot.robots.robot import Array, Reading
from real_robot.serving.chunk_executor import ChunkExecutor

CUT = "the reflex has cut the chunk"
UNKNOWN = "the risk of the action is unknown"


class Reflexive:
    """An executor whose actions `reflex` checks against the newest measurement of a robot of `contract`.

    An action whose risk is too high cuts the chunk: the safest action is commanded once, then the robot holds until the
    policy's next chunk. Without a finite measurement the risk is unknown, and the robot holds at once. Everything goes
    through `Safety` afterwards, which also does what holding is.

    Raises:
        UserError: if the robot does not serve the reflex's contract.
    """

    def __init__(self, executor: ChunkExecutor, reflex: Reflex, contract: Contract) -> None:
        self._executor = executor
        self._reflex = reflex
        self._specs = {key: reflex.contract.observation[key] for key in measured_keys(reflex.contract)}
        self._binding = reflex.contract.bind(replace(contract, horizon=1, executed=1))
        self._observation: TensorDict | None = None

    def reset(self) -> None:
        """Begin an episode."""
        self._executor.reset()
        self._observation = None

    def observe(self, reading: Reading) -> None:
        """Pass in the newest measurement."""
        self._observation = None if reading.fault else self._measured(reading)
        self._executor.observe(reading)

    def action(self, now_s: float) -> Array | None:
        """The executor's action [A] for the time `now_s`, a safer one in its place, or None: hold."""
        requested = self._executor.action(now_s)
        if requested is None or not np.isfinite(requested).all():
            return requested  # safety holds
        if self._observation is None:
            self._executor.drop(UNKNOWN)
            return None
        order = self._binding.action
        # the robot's order -> the reflex's: the inverse of a permutation is its argsort
        action = torch.from_numpy(np.float32(requested))
        action = (action if order is None else action[order.argsort()]).unsqueeze(0)
        safer, cut = self._reflex.check(self._observation, action, torch.tensor([False]))
        if not bool(cut):
            return requested
        self._executor.drop(CUT)
        if bool(self._reflex.risk(self._observation, action).isnan()):
            return None
        return (safer if order is None else safer[:, order])[0].numpy().astype(requested.dtype)

    def _measured(self, reading: Reading) -> TensorDict:
        """The measurement in the reflex's order, [1]."""
        values = {}
        for key, spec in self._specs.items():
            value = torch.from_numpy(np.array(reading.observation[key])).to(getattr(torch, spec.dtype))
            order = self._binding.observation[key]
            values[key] = (value if order is None else value[..., order]).unsqueeze(0)
        return TensorDict(values, [1])
