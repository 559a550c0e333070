"""Runs programs with gradients: compiled C on the CPU; plain torch elsewhere, and without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from embodied.native import choose, load
from sims.tracer.emit import LANES, c_source
from sims.tracer.program import UNIFORM, Program, Trace, trace, trace_vjp

SHARE = 4096
"""Smallest number of lanes per thread."""


class Kernels:
    """Runs `programs` on contiguous tensors [rows, N] of `device`, where N is a multiple of `LANES`.

    `library` is the compiled C, or None if torch runs; `backend` is "c" or "torch", see `native.choose`.
    """

    def __init__(
        self, programs: Sequence[Program], device: torch.device, *, backend: str | None = None, appendix: str = ""
    ) -> None:
        self.programs = {program.name: program for program in programs}
        self.library: ctypes.CDLL | None = None
        self.backend = choose(backend, device)
        if self.backend == "torch":
            return
        pairs = [pair for program in programs for pair in _traces(program)]
        self.traces = {pair.name: pair for pair in pairs}
        self.library = load(f"{c_source(pairs)}\n{appendix}")
        self._steps: dict[tuple[str, int], Any] = {}

    def __call__(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run program `name`; the results carry gradients in grad mode if a differentiable input requires them."""
        program = self.programs[name]
        if self.backend == "torch":
            return program.run(inputs)
        tensors = [inputs[group.name] for group in program.inputs]
        needs_gradients = torch.is_grad_enabled() and any(
            tensor.requires_grad and group.differentiable for tensor, group in zip(tensors, program.inputs, strict=True)
        )
        results = _Differentiable.apply(self, name, *tensors) if needs_gradients else self.launch(name, tensors)
        return {group.name: tensor for group, tensor in zip(program.outputs, results, strict=True)}

    def launch(self, name: str, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run kernel `name` (a program, or its `_vjp`) on tensors in its order, into new tensors or `out`."""
        work = self.traces[name]
        like = next(tensor for tensor, group in zip(inputs, work.inputs, strict=True) if group.kind != UNIFORM)
        lanes = like.shape[1]
        results = list(out or (torch.empty(group.rows, lanes, device=like.device) for group in work.outputs))
        self._run(work, [*inputs, *results], lanes, None)
        return results

    def repeat(self, name: str, tensors: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run like `launch`, once for each value of the input that advances, [repetitions, rows, N]; no gradients."""
        program = self.programs[name]
        assert program.repeat is not None
        order = [group.name for group in program.inputs]
        carried, sequence = (order.index(part) for part in program.repeat)
        if self.backend == "torch":
            inputs = dict(zip(order, tensors, strict=True))
            for value in tensors[sequence]:
                inputs |= program.run({**inputs, program.repeat[1]: value})
            return [inputs[group.name] for group in program.outputs]
        results = list(out or [torch.empty_like(tensors[carried])])
        self._run(self.traces[name], [*tensors, *results], tensors[carried].shape[1], len(tensors[sequence]))
        return results

    def _run(self, work: Trace, tensors: list[Tensor], lanes: int, count: int | None) -> None:
        assert all(tensor.is_contiguous() for tensor in tensors)
        size = len(tensors)
        steps = self._steps.get((work.name, lanes))
        if steps is None:
            steps = self._steps[work.name, lanes] = (ctypes.c_int64 * size)(*[lanes] * size)
        pointers = (ctypes.c_void_p * size)(*[tensor.data_ptr() for tensor in tensors])
        function = getattr(self.library, work.name if count is None else f"{work.name}_repeated")
        repetitions = () if count is None else (ctypes.c_int64(count),)

        def part(first: int, last: int) -> None:
            function(ctypes.c_int64(first), ctypes.c_int64(last), *repetitions, pointers, steps)

        split(part, lanes, SHARE // (count or 1))


class _Differentiable(torch.autograd.Function):
    """A program and its vector-Jacobian product, once differentiable."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, name: str, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Run the program."""
        ctx.kernels = kernels
        ctx.name = name
        ctx.save_for_backward(*inputs)
        results = kernels.launch(name, inputs)
        outputs = kernels.programs[name].outputs
        ctx.mark_non_differentiable(*(t for t, group in zip(results, outputs, strict=True) if not group.differentiable))
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Run the program's vector-Jacobian product."""
        program: Program = ctx.kernels.programs[ctx.name]
        seeds = [g.contiguous() for g, group in zip(grads, program.outputs, strict=True) if group.differentiable]
        gradients = iter(ctx.kernels.launch(f"{ctx.name}_vjp", [*ctx.saved_tensors, *seeds]))
        return (None, None, *(next(gradients) if group.differentiable else None for group in program.inputs))


def pad(lanes: int) -> int:
    """The next multiple of `LANES`."""
    return -(-lanes // LANES) * LANES


def split(work: Callable[[int, int], object], lanes: int, share: int = SHARE) -> None:
    """Call `work(first, last)` for parts of [0, lanes), one per torch thread, each with at least `share` lanes."""
    parts = max(1, min(torch.get_num_threads(), lanes // share))
    if parts == 1:
        work(0, lanes)
        return
    edges = [pad(lanes * part // parts) for part in range(parts)] + [lanes]
    others = [_pool(parts).submit(work, first, last) for first, last in pairwise(edges[1:])]
    work(edges[0], edges[1])
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lanes")


def _traces(program: Program) -> list[Trace]:
    backward = any(group.differentiable for group in program.inputs)
    return [trace(program), *([trace_vjp(program)] if backward else [])]
