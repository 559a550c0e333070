"""Nested data in one file, without pickle: tensors as safetensors, everything else as JSON in the header.

A tree is None, bool, int, float, str, bytes, a tensor, ndarray or TensorDict, or a list, tuple or dict of trees. It is
read back bit for bit, on the CPU; NumPy scalars become Python numbers. A checksum of everything in the header detects
damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import loads

Tree = Any
"""A tree as defined in the module docstring; Python has no checkable type for it."""

_SCALARS = (bool, int, float, str)


def save_tree(path: str | Path, tree: Tree) -> None:
    """Write `tree` to `path`, completely and synced, or not at all.

    Raises:
        UserError: with the place, if the tree contains another type than listed above.
    """
    writer = _Writer()
    structure = json.dumps(writer.encode(tree, ()))
    with complete_or_absent(Path(path)) as temporary:
        # one entry, because the order of several is not fixed in safetensors, and equal trees must give equal files
        _save_file(writer.tensors, temporary, {"tree": _digest(structure, writer.tensors) + structure})


def _save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):  # such as a full disk
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
        raise


def load_tree(path: str | Path) -> Tree:
    """Read a tree that `save_tree` wrote.

    Raises:
        UserError: if the file is missing, damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            sealed = (file.metadata() or {}).get("tree", "")
        digest = sealed[:64]
        structure = sealed[64:]
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UserError(f"cannot read {path}: it is not a tree with a checksum; delete it to make it again")
        if digest != _digest(structure, tensors):
            raise UserError(
                f"cannot read {path}: it is damaged, its checksum does not match; delete it to make it again"
            )
        return _decode(loads(structure), tensors)
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def copy_tree(tree: Tree, device: str | None = None) -> Tree:
    """Copy `tree` deeply, including its tensors, to `device` if it is not None."""
    if isinstance(tree, Tensor) and device is not None:
        return tree.detach().to(device, copy=True)
    if isinstance(tree, Tensor | TensorDictBase):
        return (tree.detach() if device is None else tree.detach().to(device)).clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        return {key: copy_tree(value, device) for key, value in tree.items()}
    return type(tree)(copy_tree(value, device) for value in tree) if isinstance(tree, list | tuple) else tree


class _Writer:
    """Encoder that collects the tensors of a tree and returns JSON with their names."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def encode(self, node: Tree, place: tuple[str, ...]) -> Tree:
        """Encode `node`, which is at `place` in the tree, as JSON."""
        if isinstance(node, np.generic):
            node = node.item()
        if node is None or isinstance(node, _SCALARS):
            return node
        if isinstance(node, list):
            return self._items(node, place)
        if isinstance(node, tuple):
            return {"tuple": self._items(node, place)}
        if isinstance(node, TensorDictBase):
            return {"tensordict": self._pairs(dict(node.items()), place), "batch_size": list(node.batch_size)}
        if isinstance(node, dict):
            return {"dict": self._pairs(node, place)}
        if isinstance(node, Tensor):
            return {"tensor": self._add(node.detach().cpu(), place)}
        if isinstance(node, np.ndarray):
            return {"array": self._add(_from_numpy(node, place), place)}
        if isinstance(node, bytes):
            return {"bytes": self._add(torch.tensor(list(node), dtype=torch.uint8), place)}
        raise ValueError(f"cannot store {type(node).__name__} at {_name(place)}; expected tensors or JSON values")

    def _items(self, nodes: list[Any] | tuple[Any, ...], place: tuple[str, ...]) -> list[Any]:
        return [self.encode(node, (*place, str(index))) for index, node in enumerate(nodes)]

    def _pairs(self, nodes: dict[Any, Any], place: tuple[str, ...]) -> list[Any]:
        return [[self.encode(key, place), self.encode(node, (*place, str(key)))] for key, node in nodes.items()]

    def _add(self, tensor: Tensor, place: tuple[str, ...]) -> str:
        name = _name(place)
        while name in self.tensors:  # the keys 0 and "0" of one dict
            name += "_"
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._storages:  # safetensors does not accept tensors that share memory
            tensor = tensor.clone()
        self._storages.add(storage)
        self.tensors[name] = tensor
        return name


def _digest(structure: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a tree: of its JSON, and of the name, type, shape and bytes of each tensor."""
    digest = hashlib.sha256(structure.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.as_strided((tensor.numel(),), (1,))  # contiguous; the strides of a single element are arbitrary
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _name(place: tuple[str, ...]) -> str:
    return "/".join(place) or "tree"


def _from_numpy(array: np.ndarray, place: tuple[str, ...]) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot store an array of {array.dtype} at {_name(place)}; expected numbers") from error


def _decode(node: Tree, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    (kind, content), *more = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "bytes":
        return tensors[content].numpy().tobytes()
    if kind == "tuple":
        return tuple(_decode(content, tensors))
    pairs = {_decode(key, tensors): _decode(value, tensors) for key, value in content}
    return TensorDict(pairs, batch_size=more[0][1]) if kind == "tensordict" else pairs
