"""Parts of a learner: networks, optimisers, replays and choices of initial states, wherever their classes are defined.

Processes that train together average the gradients of the listed optimisers, give the listed networks the same
weights, and let each process have its own of the listed starts; the plan of a run counts the memory of all parts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from embodied.data.store import EpisodeStore
from embodied.errors import UserError
from embodied.rollout.starts import OwnStarts
from embodied.world import World

if TYPE_CHECKING:
    from embodied.algorithms.passes import Passes

KINDS = (nn.Module, Optimizer, EpisodeStore, OwnStarts)


class Composite:
    """Base class of learners, and of objects inside them that have parts."""

    def parts(self) -> dict[str, Any]:
        """Parts by name; by default all attributes that are parts, contain some, or are composites with some.

        A learner that stores parts elsewhere, such as in an object that is not a composite, adds them here.
        """
        return {name: value for name, value in vars(self).items() if any(True for _ in iter_parts(value, KINDS))}

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the learner's largest backward pass stores, for the plan of a run's memory; None: unknown."""
        return None


def iter_parts(value: object, kinds: tuple[type, ...], visited: set[int] | None = None) -> Iterator[Any]:
    """Iterate over the parts of `kinds` in `value`, each once.

    The `value` is a part, a list, tuple or mapping of parts, or a composite.
    """
    visited = set() if visited is None else visited
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from iter_parts(each, kinds, visited)
    elif id(value) not in visited:
        visited.add(id(value))
        if isinstance(value, kinds):
            yield value
        elif isinstance(value, Composite):
            yield from iter_parts(value.parts(), kinds, visited)


@contextmanager
def only_listed_optimisers(learner: object) -> Iterator[None]:
    """Context that checks that every optimiser that steps in this thread is a part of `learner`.

    Raises:
        UserError: before the step of another optimiser, whose gradients processes would not average.
    """
    thread = threading.get_ident()
    listed = list(iter_parts(learner, (Optimizer,)))

    def check(optimiser: Optimizer, *_: object) -> None:
        if threading.get_ident() != thread or any(each is optimiser for each in listed):
            return
        listed[:] = iter_parts(learner, (Optimizer,))  # it may have been created in this update
        if not any(each is optimiser for each in listed):
            raise UserError(
                f"{name_of(learner)} steps an optimiser ({type(optimiser).__name__}) that is none of its parts: derive"
                " the learner from embodied.algorithms.parts.Composite, or add the optimiser to its parts()"
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def check_policy_is_listed(learner: object, policy: object) -> None:
    """Check that `policy` is a part of `learner`, and with it gets the same weights in all processes.

    Raises:
        UserError: if it is not.
    """
    if not any(module is policy for module in iter_parts(learner, (nn.Module,))):
        raise UserError(
            f"{name_of(learner)} does not list its policy, so that each process would train a policy of its own: derive"
            " the learner from embodied.algorithms.parts.Composite, or add the policy to its parts()"
        )


def check_equal_weights(learner: object, world: World) -> None:
    """Check that the networks of `learner` have the same weights in all processes, as averaged gradients leave them.

    Weights that are divided among processes are left out: there is one of each.

    Raises:
        UserError: in all processes, if an update was not the same everywhere.
    """
    networks = iter_parts(learner, (nn.Module,))
    weights = [each for network in networks for each in network.parameters() if not hasattr(each, "full_tensor")]
    if not weights:
        return
    # two sums of each tensor, [number of tensors, 2], which differ where the tensor does
    sums = torch.stack([torch.stack((each.sum(), each.abs().sum())) for each in (w.detach().double() for w in weights)])
    mean = world.sum(sums) / world.size
    # sums of equal weights may differ in their last digits between kinds of hardware
    differs = (sums - mean).abs() > 1e-6 * mean[:, 1:]
    if int(world.sum(differs.sum())):
        raise UserError(
            f"{name_of(learner)} left different weights in {world.size} processes after its first update: average what"
            " it computes of decisions with world.sum, and change weights by gradients and an optimiser of its parts()"
        )


def name_of(learner: object) -> str:
    """Module and name of the class of `learner`."""
    return f"{type(learner).__module__}.{type(learner).__qualname__}"
