"""A test double of a GPU: tensors that claim to be on a GPU, compute on the CPU, and refuse what a GPU refuses.

Inside `with DeviceDouble() as double:` the name "cuda" means the double. Tensors, modules and generators are moved and
made there as usual (`.to("cuda")`, `device=...`). Operations that mix its tensors with others raise `MixedError`, also
where CUDA would copy silently: a tensor of the double indexed by one of the CPU. As with CUDA, zero-dimensional CPU
tensors may be mixed in elementwise operations. Explicit transfers are counted in `double.transfers`: "to the device",
"to the host", "number" (item, float, bool) and "copy_" into a tensor elsewhere.

Every tensor wraps one of the CPU, so results are those of the CPU, bit for bit. Autograd only sees the CPU, so it must
not create tensors by itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
SCALARS_TOO = {
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.masked_fill.Tensor,
    torch.ops.aten.masked_fill_.Tensor,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.lerp_.Tensor,
}
"""Operations that take numbers of the CPU beside tensors of CUDA, without being number by number."""
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.copy.default}
CpuGenerator = torch.Generator


class MixedError(RuntimeError):
    """Tensors of the double and of the CPU in one operation."""


class DoubleTensor(Tensor):
    """A tensor of the double; `inner`, of the CPU, holds its numbers."""

    inner: Tensor
    transfers: ClassVar[Counter[str]] = Counter()  # of the active double
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        assert type(inner) is Tensor, type(inner)
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return _moved(self, args, kwargs)  # own methods: a TensorDict moves tensors in threads, without the mode

    def cpu(self, **kwargs: Any) -> Tensor:
        return _moved(self, ("cpu",), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> DoubleTensor:
        copied = _placed(self.inner.detach().clone()).requires_grad_(self.requires_grad)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "inner"})
        return memo.setdefault(id(self), copied)

    def __repr__(self) -> str:
        return f"DoubleTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _check(func, given)
        if func is torch.ops.aten._local_scalar_dense.default:
            cls.transfers["number"] += 1
        known = {id(each.inner): each for each in given if isinstance(each, DoubleTensor)}
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        for each in known.values():
            assert each.shape == each.inner.shape, f"{func} changes a shape in place, which is not modelled"
        if func in COPIES and not isinstance(args[0], DoubleTensor):
            return result  # into the CPU's
        return tree_map(lambda out: _outer(out, known) if isinstance(out, Tensor) else out, result)


def _check(func: Any, given: list[Tensor]) -> None:
    """Raise `MixedError` where CUDA would fail or copy silently."""
    others = [each for each in given if not isinstance(each, DoubleTensor)]
    if not others:
        return
    if func in COPIES:
        DoubleTensor.transfers["copy_"] += 1
        return
    scalars = torch.Tag.pointwise in func.tags or func in SCALARS_TOO
    written = func._schema.is_mutable and any(given[0] is other for other in others)
    if written or not scalars or any(other.dim() for other in others):
        shapes = [(list(each.shape), str(each.device)) for each in given]
        raise MixedError(f"{func} of tensors on two devices: {shapes}")


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, DoubleTensor) else leaf


def _outer(out: Tensor, known: dict[int, DoubleTensor]) -> DoubleTensor:
    return known[id(out)] if id(out) in known else DoubleTensor(out)


class _ToDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return DoubleTensor(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _inner(grad).clone()


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DoubleTensor) -> Tensor:
        return x.inner.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return DoubleTensor(grad.clone()) if type(grad) is Tensor else grad


class DoubleGenerator(CpuGenerator):
    """A generator that only draws tensors of the double."""

    @property
    def device(self) -> torch.device:
        return DEVICE


class _Generator(CpuGenerator):
    """Replaces torch.Generator."""

    def __new__(cls, device: torch.device | str = "cpu") -> Any:
        return DoubleGenerator() if ours(device) else CpuGenerator(device)


class DeviceDouble(TorchFunctionMode):
    """Context in which "cuda" is the double."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: ClassVar[Counter[str]] = Counter()
        self.depth = 0

    def __enter__(self) -> Self:
        if not self.depth:
            self.found = torch.Generator, torch.cuda.current_device
            torch.Generator, torch.cuda.current_device = _Generator, lambda: 0
            # Modules get new parameters when they move, since a tensor cannot change its class.
            self.overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            DoubleTensor.transfers = self.transfers
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.depth -= 1
        if not self.depth:
            torch.Generator, torch.cuda.current_device = self.found
            torch.__future__.set_overwrite_module_params_on_conversion(self.overwrites)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for kind in types:
            if issubclass(kind, TensorDictBase):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if func in (Tensor.to, Tensor.cuda):
            return _moved(first, args[1:] if func is Tensor.to else (DEVICE,), kwargs)
        if isinstance(first, DoubleTensor) and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if isinstance(first, DoubleTensor) and func is Tensor.tolist:
            self.transfers["number" if first.dim() == 0 else "to the host"] += 1
            return first.inner.tolist()
        if func is torch.as_tensor and isinstance(first, DoubleTensor):
            return _moved(first, (), kwargs)
        if func is nn.functional.embedding_bag and isinstance(first, DoubleTensor) and first.dim() == 2:
            kwargs["offsets"] = _placed(torch.arange(0, first.numel(), first.shape[1]))  # which it would make itself
            return func(first.reshape(-1), *args[1:], **kwargs)
        _check_generator(name, args, kwargs)
        if kwargs.get("device") is None or name == "_parse_to":
            return func(*args, **kwargs)
        there = ours(kwargs.pop("device"))
        made = func(*args, **kwargs)
        if there == isinstance(made, DoubleTensor):
            return made
        return _across(made, there) if not there or isinstance(first, Tensor) else _placed(made)


def _moved(tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """As Tensor.to, with its arguments."""
    if args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        copied = kwargs.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        tensor = tensor.clone() if copied else tensor
    tensor = tensor if dtype is None else Tensor.to(tensor, dtype)
    if device is None or ours(device) == isinstance(tensor, DoubleTensor):
        return tensor
    return _across(tensor, ours(device))


def _across(tensor: Tensor, there: bool) -> Tensor:
    DoubleTensor.transfers["to the device" if there else "to the host"] += 1
    return _ToDouble.apply(tensor) if there else _ToHost.apply(tensor)


def ours(device: torch.device | str | int) -> bool:
    """Whether `device` is the double's."""
    return torch.device(device).type == DEVICE.type


def _placed(made: Tensor) -> DoubleTensor:
    """A new tensor on the double."""
    return DoubleTensor(made.detach()).requires_grad_(made.requires_grad)


def _check_generator(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    generator = kwargs.get("generator")
    if generator is None:
        return
    target = kwargs.get("device")
    if target is None:
        target = args[0].device if args and isinstance(args[0], Tensor) else "cpu"
    if ours(target) != ours(generator.device):
        raise MixedError(f"{name} on {target} draws from a generator of {generator.device}")
