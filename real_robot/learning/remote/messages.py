"""Messages between the robot's computer (the actor) and the learner: maps of tensors in msgpack, never pickled.

A message is a map with a "kind". The learner begins with "greeting", then sends "order", "weights" and "stored"; the
actor sends "rollout" and "result". See `inbox.py` and `outbox.py` for their entries.

Letters: T decisions of a rollout, N = 1 robot, H predicted and K executed actions, A action size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.rollout.joining import DECISIONS, ENVIRONMENTS, NAMED
from embodied.rollout.rollout import Rollout
from real_robot.serving.wire import array, pack, unpack

MESSAGE_BYTES = 64 << 20
"""Largest message to the learner: a rollout, or the result of an order."""
WEIGHTS_BYTES = 4 << 30
"""Largest message to the actor."""
OPTIONAL = "start", "value", "episode_return", "episode_steps"
NUMBERS = "vanished", "policy_version", "simulation_s", "policy_s", "has_success", "starts", "placement_metrics"
FLAGS = "terminated", "truncated", "success"


def packed(message: Mapping[str, Any]) -> bytes:
    """Encode `message`: tensors, TensorDicts, numbers, text, lists and maps.

    Raises:
        UserError: if it contains anything else.
    """
    return pack(dict(message), _encode)


def unpacked(data: bytes | str) -> dict[str, Any]:
    """Decode a message of `packed`; tensors are copies.

    Raises:
        UserError: in one line, for anything else. Its content is never executed.
    """
    if isinstance(data, str):
        raise UserError("expected a message of bytes, got text")
    message = unpack(data, _decode)
    if not isinstance(message.get("kind"), str):
        raise UserError("expected a message with a kind")
    return message


def entry(message: Mapping[str, Any], name: str, kind: type) -> Any:  # noqa: ANN401 - of `kind`
    """Entry `name` of `message`.

    Raises:
        UserError: if it is missing or not of `kind`.
    """
    value = message.get(name)
    if type(value) is not kind:
        raise UserError(f"{message.get('kind')}: expected {name} of type {kind.__name__}, got {type(value).__name__}")
    return value


def help_of(message: Mapping[str, Any]) -> dict[str, int]:
    """Used part of a scripted person's budget (`Help.state_dict`) in a `message`; {} without such a person.

    Raises:
        UserError: for anything else than counts by name.
    """
    used = entry(message, "help", dict)
    if not all(isinstance(name, str) and type(count) is int and count >= 0 for name, count in used.items()):
        raise UserError(f"{message['kind']}: expected counts by name in help, got {used!r:.80}")
    return used


def rollout_entries(rollout: Rollout) -> dict[str, Any]:
    """Entries of a message that contain `rollout`."""
    return dict(vars(rollout))


def rollout_of(entries: Mapping[str, Any], contract: Contract) -> Rollout:
    """Rollout of one robot from the `entries` of a message, checked against the `contract` of the policy.

    Raises:
        UserError: for missing or unknown entries, other shapes and types, and numbers that are not finite.
    """
    known = {each.name for each in fields(Rollout)}
    if different := known ^ entries.keys():
        raise UserError(f"expected the entries of a rollout, which differ in {', '.join(sorted(map(str, different)))}")
    reward = entries["reward"]
    if not isinstance(reward, Tensor) or reward.ndim != 3 or not len(reward):
        raise UserError("reward: expected a tensor [T, 1, K]")
    batch = len(reward), 1
    for name in DECISIONS:
        if entries[name] is not None or name not in OPTIONAL:
            _check_batch(name, entries[name], batch)
    for name in ENVIRONMENTS:
        _check_batch(name, entries[name], (1,))
    for name in NAMED:
        for key, value in _map(name, entries[name]).items():
            _check_batch(f"{name}.{key}", value, batch)
    for name in NUMBERS:
        values = _map(name, entries[name]).values() if name in ("starts", "placement_metrics") else [entries[name]]
        if not all(type(value) in (int, float, bool) for value in values):
            raise UserError(f"{name}: expected numbers, got {entries[name]!r:.80}")
    _check_content(entries, contract, batch)
    return Rollout(**entries)


def play_of(result: object, contract: Contract) -> tuple[TensorDict, Tensor]:
    """Observations [B] and actions [B, K, A] of the `result` of random play, checked against the `contract`.

    Raises:
        UserError: for anything else, and for numbers that are not finite.
    """
    entries = _map("result", result)
    observation, actions = entries.get("observation"), entries.get("actions")
    _check_tensor("actions", actions, (), TensorSpec((-1, contract.executed, *contract.action.shape)))
    assert isinstance(actions, Tensor)
    _check_observation("observation", observation, (len(actions),), contract)
    assert isinstance(observation, TensorDict)
    return observation, actions


def _check_content(entries: Mapping[str, Any], contract: Contract, batch: tuple[int, ...]) -> None:
    """Check shapes, types and numbers of the tensors whose meaning is known."""
    actions = TensorSpec((contract.horizon, *contract.action.shape))
    _check_tensor("actions", entries["actions"], batch, actions)
    _check_tensor("reward", entries["reward"], batch, TensorSpec((contract.executed,)))
    _check_tensor("executed", entries["executed"], batch, TensorSpec((contract.executed,), "bool"))
    for name in FLAGS:
        _check_tensor(name, entries[name], batch, TensorSpec((), "bool"))
    for name, flags in entries["events"].items():
        _check_tensor(f"events.{name}", flags, batch, TensorSpec((), "bool"))
    for name, values in entries["signals"].items():
        _check_batch(f"signals.{name}", values, (*batch, contract.executed))
    for name in ("sample", "log_prob"):
        _check_finite(name, entries[name])
    if not isinstance(entries["sample"], TensorDictBase):
        raise UserError(f"sample: expected a map of tensors, got {_described(entries['sample'])}")
    ends, after = entries["final_rows"], entries["final_observation"]
    if (ends is None) != (after is None):
        raise UserError("expected final_rows with final_observation")
    parts = [("observation", batch), ("last_observation", (1,))]
    if ends is not None:
        _check_tensor("final_rows", ends, (), TensorSpec((-1,), "int64"))
        if bool((ends < 0).any() or (ends >= batch[0]).any() or (ends.diff() <= 0).any()):
            raise UserError(f"final_rows: expected ascending decisions below {batch[0]}, got {ends.tolist()}")
        parts.append(("final_observation", (len(ends),)))
    for name, size in parts:
        _check_observation(name, entries[name], size, contract)


def _check_observation(name: str, value: object, batch: tuple[int, ...], contract: Contract) -> None:
    _check_batch(name, value, batch)
    if not isinstance(value, TensorDictBase):
        raise UserError(f"{name}: expected a map of tensors, got {_described(value)}")
    for key, spec in contract.observation.items():
        _check_tensor(f"{name}.{key}", value.get(key, None), batch, spec)


def _check_batch(name: str, value: object, batch: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor | TensorDictBase) or tuple(value.shape[: len(batch)]) != batch:
        raise UserError(f"{name}: expected a tensor {list(batch)}, got {_described(value)}")


def _check_tensor(name: str, value: object, batch: tuple[int, ...], spec: TensorSpec) -> None:
    _check_batch(name, value, batch)
    assert isinstance(value, Tensor | TensorDictBase)
    shape = tuple(value.shape[len(batch) :])
    fits = len(shape) == len(spec.shape) and all(a in (-1, b) for a, b in zip(spec.shape, shape, strict=True))
    if not fits or value.dtype != getattr(torch, spec.dtype):
        expected = f"{spec.dtype} {[*batch, *spec.shape]}"
        raise UserError(f"{name}: expected {expected}, got {_described(value)}")
    _check_finite(name, value)


def _check_finite(name: str, value: Tensor | TensorDictBase) -> None:
    parts = value.values(True, True) if isinstance(value, TensorDictBase) else [value]
    if not all(bool(each.isfinite().all()) for each in parts):
        raise UserError(f"{name}: expected finite numbers, got infinity or not a number")


def _map(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name}: expected a map, got {type(value).__name__}")
    return value


def _described(value: object) -> str:
    is_tensor = isinstance(value, Tensor | TensorDictBase)
    return f"{value.dtype} {list(value.shape)}" if is_tensor else type(value).__name__


def _encode(value: object) -> dict[bytes, Any]:
    if isinstance(value, TensorDictBase):
        return {b"__tensordict__": list(value.batch_size), b"entries": dict(value.items())}
    if isinstance(value, Tensor):
        try:
            content = value.detach().cpu().contiguous().numpy()
        except TypeError as error:  # bfloat16
            raise TypeError(f"a tensor of {value.dtype}") from error
        return {b"__tensor__": content.tobytes(), b"dtype": content.dtype.str, b"shape": content.shape}
    raise TypeError(f"a {type(value).__name__}; expected tensors, numbers, text, lists and maps")


def _decode(message: dict[Any, Any]) -> Any:  # noqa: ANN401 - any message
    if b"__tensor__" in message:
        return torch.from_numpy(array(message[b"dtype"], message[b"shape"], message[b"__tensor__"]))
    if b"__tensordict__" in message:
        try:
            return TensorDict(message[b"entries"], batch_size=message[b"__tensordict__"])
        except (RuntimeError, AttributeError) as error:
            raise UserError(f"tensors of other sizes: {error}") from error
    return message
