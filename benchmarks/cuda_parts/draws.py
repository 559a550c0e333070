"""Random numbers that are the same on every device, so that a device can be compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NEW = {"bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"}
LIKE = {"rand_like", "randint_like", "randn_like"}
IN_PLACE = {"bernoulli_", "exponential_", "normal_", "random_", "uniform_"}


class CpuDraws(TorchFunctionMode):
    """Context in which random numbers for another device are drawn on the CPU and moved there.

    A generator of the device is replaced by one of the CPU with its initial seed, which draws what a generator of the
    CPU of that seed does; torch's global generator is replaced by that of the CPU. Transposed tensors are filled as on
    the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replaced: list[tuple[torch.Generator, torch.Generator]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),  # noqa: ANN401 - of any function
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - the result of any function
        """Call `func`, on the CPU if it draws random numbers."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name not in NEW | LIKE | IN_PLACE:
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        device = torch.device(kwargs.get("device") or (first.device if first is not None else "cpu"))
        if device.type == "cpu":
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if kwargs.get("generator") is not None:
            kwargs["generator"] = self._on_cpu(kwargs["generator"])
        values = func(*(arg.cpu() if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        return first.copy_(values) if name in IN_PLACE and first is not None else values.to(device)

    def _on_cpu(self, generator: torch.Generator) -> torch.Generator:
        for original, replacement in self._replaced:
            if original is generator:
                return replacement
        self._replaced.append((generator, torch.Generator().manual_seed(generator.initial_seed())))
        return self._replaced[-1][1]
