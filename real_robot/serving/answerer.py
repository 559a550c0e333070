"""Answers of a served policy to request frames in openpi's format, without a network; see `wire.py`."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from embodied.contract import TensorSpec
from embodied.errors import UserError
from embodied.execution.chunking import InpaintingPolicy, Running
from embodied.policy import MEMORY, Decision, Policy
from embodied.rollout.memory import RecurrentPolicy
from embodied.text import encode_as
from real_robot.serving.wire import OPTIONS, PROMPT, pack, unpack

log = logging.getLogger(__name__)
ROWS = 1024
"""Largest assumed number of rows along an axis of variable length."""
OVERHEAD_BYTES = 64 << 10
PICTURE_BYTES = 1 << 20
"""Further size of a picture in a request, because vla-eval's are larger than the contract's."""
DURATIONS = 20
"""Number of recent decisions; their median duration is the estimate for the next one."""


@dataclass(frozen=True)
class Options:
    """Options of a request; by default a deterministic decision without a deadline."""

    deterministic: bool = True
    seed: int = 0
    running: dict[str, Any] | None = None
    deadline_s: float = math.inf

    @staticmethod
    def parse(message: object) -> Options:
        """Parse the options of a request; raise UserError for unknown ones, wrong types and impossible values."""
        try:
            options = Options(**message)  # type: ignore[arg-type]
        except TypeError as error:
            expected = "deterministic, seed, running and deadline_s"
            raise UserError(f"{OPTIONS}: expected {expected}, got {message!r:.80}") from error
        kinds = type(options.deterministic), type(options.seed)
        numeric = type(options.deadline_s) in (int, float)
        if kinds != (bool, int) or not numeric or not isinstance(options.running, dict | None):
            raise UserError(f"{OPTIONS}: expected a bool, a number, a map and seconds, got {message!r:.80}")
        if not 0 <= options.seed < 2**63 or not options.deadline_s > 0.0:
            raise UserError(f"{OPTIONS}: expected a seed of 0 to 2^63 - 1 and deadline_s above 0, got {message!r:.80}")
        return options


class Answerer:
    """Turns a request frame into a response frame, without a network.

    Attributes:
        specs: observations that the policy reads, by name, including its memory.
        initial_memory: memory [M] of a recurrent policy at the beginning of an episode, else None.
        greeting: message with which the server begins.
        frame_bytes: largest size of a request.
    """

    def __init__(self, policy: Policy, device: torch.device | str) -> None:
        self.policy = policy
        self.device = device
        self.specs = {key: spec for key, spec in policy.contract.observation.items() if not spec.privileged}
        metadata: dict[str, Any] = {"contract": policy.contract.to_dict()}
        self.initial_memory: np.ndarray | None = None
        if isinstance(policy, RecurrentPolicy):
            self.initial_memory = metadata["initial_memory"] = policy.initial_memory(1)[0].detach().cpu().numpy()
            self.specs[MEMORY] = TensorSpec(self.initial_memory.shape)
        if isinstance(policy, InpaintingPolicy):
            metadata["inpaints"] = True
        self.greeting = pack(metadata)
        action = TensorSpec((policy.contract.horizon, *policy.contract.action.shape))
        self.frame_bytes = OVERHEAD_BYTES + 2 * sum(_bytes(spec) for spec in [*self.specs.values(), action])
        self.frame_bytes += PICTURE_BYTES * sum(spec.is_picture for spec in self.specs.values())
        self._durations_s = deque[float](maxlen=DURATIONS)

    def answer(self, request: bytes | str, received_s: float, others_wait: Callable[[], bool]) -> bytes | str | None:
        """Actions for a request received at `received_s` of monotonic time, or a one-line error.

        None if its deadline has passed, or probably will have passed before the answer while `others_wait`.
        """
        start_s = time.monotonic()
        try:
            if isinstance(request, str):
                raise UserError("expected a binary message, got text")
            message = unpack(request)
            options = Options.parse(message.pop(OPTIONS, {}))
            # skip requests that are late already, and while others wait also those that probably will be
            remaining_s = received_s + options.deadline_s - time.monotonic()
            if remaining_s <= 0.0 or (remaining_s < self._expected_s() and others_wait()):
                return None
            reply = self.reply(message, options)
        except Exception as error:
            return explanation(error)
        self._durations_s.append(time.monotonic() - start_s)
        return pack(reply | {"server_timing": {"infer_ms": 1e3 * self._durations_s[-1]}})

    def reply(self, message: dict[str, Any], options: Options) -> dict[str, Any]:
        """Chunk "actions" [H, A] for an observation, with the next memory of a recurrent policy.

        Raises:
            UserError: if the observation does not fit the contract, or the policy's numbers are not finite.
        """
        decision = self._decide(message, options)
        reply: dict[str, Any] = {"actions": _array(decision.actions)}
        if MEMORY in self.specs:
            reply[MEMORY] = _array(decision.sample[MEMORY])
        if broken := [key for key, value in reply.items() if not np.isfinite(value).all()]:
            raise UserError(f"the policy's {' and '.join(broken)} are not finite, though its observation is")
        return reply

    def _expected_s(self) -> float:
        """Median duration of recent decisions, s."""
        return statistics.median(self._durations_s) if self._durations_s else 0.0

    def _decide(self, message: dict[str, Any], options: Options) -> Decision:
        """Call the policy on a batch of one; raise UserError if the message does not fit the contract."""
        arrays = {key: self._checked(key, spec, _entry(message, key, spec)) for key, spec in self.specs.items()}
        batch = {key: torch.from_numpy(value).unsqueeze(0) for key, value in arrays.items()}
        observation = TensorDict(batch, batch_size=[1]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(options.seed)
        if options.running is None:
            return self.policy.act(observation, deterministic=options.deterministic, generator=generator)
        if not isinstance(self.policy, InpaintingPolicy):
            raise UserError(f"{type(self.policy).__name__} cannot continue running chunks")
        running = self._running(options.running)
        return self.policy.inpaint(observation, running, deterministic=options.deterministic, generator=generator)

    def _running(self, message: dict[str, Any]) -> Running:
        """The running actions of a request, as a batch of one; raise UserError if they do not fit the contract."""
        contract = self.policy.contract
        specs = {"actions": TensorSpec((contract.horizon, *contract.action.shape))}
        specs |= {"frozen": TensorSpec((), "int64"), "overlap": TensorSpec((), "int64")}
        arrays = {key: self._checked(key, spec, message.get(key)) for key, spec in specs.items()}
        if not 0 <= arrays["frozen"] <= arrays["overlap"] <= contract.horizon:
            raise UserError(f"expected 0 <= frozen <= overlap <= {contract.horizon} in running")
        return Running(**{key: torch.from_numpy(value).unsqueeze(0).to(self.device) for key, value in arrays.items()})

    @staticmethod
    def _checked(key: str, spec: TensorSpec, value: object) -> np.ndarray:
        """`value` as an array of `spec`; raise UserError for another type, shape, dtype or range."""
        if spec.is_text and isinstance(value, str | list):
            try:
                return encode_as(value, spec.shape)
            except UserError as error:
                raise UserError(f"{key}: {error}") from error
        if not isinstance(value, np.ndarray):
            raise UserError(f"{key}: expected an array of {spec.dtype} {spec.shape}, got {type(value).__name__}")
        # -1 in a spec is an axis of any length
        fits = len(spec.shape) == value.ndim and all(a in (-1, b) for a, b in zip(spec.shape, value.shape, strict=True))
        if str(value.dtype) != spec.dtype or not fits:
            raise UserError(f"{key}: expected {spec.dtype} {spec.shape}, got {value.dtype} {value.shape}")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise UserError(f"{key}: expected finite numbers, got infinity or not a number")
        if value.dtype.kind in "iu" and spec.low and ((value < spec.low) | (value > spec.high)).any():
            raise UserError(f"{key}: expected integers from {spec.low} to {spec.high}, got {value.tolist()}")
        return value


def explanation(error: Exception) -> str:
    """One line about `error` for the client; the log has what is a mistake of ours or of the policy."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    log.error("the policy failed", exc_info=error)
    return "the policy failed; its server's log says why"


def _entry(message: dict[str, Any], key: str, spec: TensorSpec) -> object:
    """The entry `key` of the message; an instruction may be sent under openpi's name PROMPT."""
    instruction = spec.is_text and len(spec.shape) == 1
    return message.get(key, message.get(PROMPT) if instruction else None)


def _bytes(spec: TensorSpec) -> int:
    """Size of an array of `spec`; axes of variable length count as ROWS."""
    return math.prod(ROWS if size < 0 else size for size in spec.shape) * np.dtype(spec.dtype).itemsize


def _array(batch: Any) -> np.ndarray:  # noqa: ANN401 - a Tensor, which TensorDict does not promise
    return batch[0].detach().cpu().numpy()
