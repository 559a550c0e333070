"""What reinforcement learning needs from a policy: it can sample, and can score what it sampled.

One forward pass gives all that a learner needs: networks that share layers run them once. Letters in shape comments:
N observations, T decisions, H actions of a chunk, A action dimension, P parts of a log-probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.world import World

Module = TypeVar("Module", bound=nn.Module)
Given = ParamSpec("Given")


@dataclass
class Decision:
    """A sampled action chunk and what its log-probability is defined on."""

    actions: Tensor  # [N, H, A] in robot units, inside the contract's limits
    sample: TensorDict  # [N] pre-squash action, tokens, or the denoising path
    log_prob: Tensor  # [N, P]
    value: Tensor | None = None  # [N] where a policy explores and sees what its critic reads, see `explored_value`


@dataclass
class Evaluation:
    """Differentiable score of stored samples [N], or of sequences of them [T, N], and the value of what was seen."""

    log_prob: Tensor  # [..., P]
    entropy: Tensor  # [..., P]
    value: Tensor  # [...]


class Policy(Protocol):
    """Maps observations to action chunks."""

    contract: Contract

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample a chunk for each of the N observations; `deterministic` gives the same chunk every time."""
        ...


class TrainablePolicy(Policy, Protocol):
    """A torch module whose samples can be scored, with a value head and a supervised loss.

    `critic_parameters` are those that `value` alone uses; `scores` is False where samples have no log-probability.
    """

    device: torch.device
    scores: bool

    def to(self, device: torch.device | str) -> Self:
        """Move the weights."""
        ...

    def start_critic(self) -> None:
        """Prepare `value` for reinforcement learning, once the actor has been trained."""
        ...

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters of the value function, which the supervised loss and the samples do not depend on."""
        ...

    def actor_parameters(self) -> list[nn.Parameter]:
        """All others."""
        ...

    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Take normalisation statistics from observations [N] and actions [..., A]."""
        ...

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Score stored samples; log_prob and value equal `act`'s at unchanged weights."""
        ...

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return where nothing is to be scored, such as after the last decision, [N]."""
        ...

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Supervised loss for `actions` [N, H, A] where `valid` [N, H]; one scalar."""
        ...

    def fresh(self) -> Self:
        """A new policy for the same contract with the same configuration, statistics, mode and device.

        Its weights are new, drawn from torch's global generator; it shares no memory with this one.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Weights and normalisation statistics."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:  # noqa: ANN401 - torch's
        """Take them over."""
        ...


def acting(act: Callable[Concatenate[Module, Given], Decision]) -> Callable[Concatenate[Module, Given], Decision]:
    """Decorate a module's `act`: it makes no graph, and acts as in evaluation mode whatever mode a learner has set.

    Dropout and batch statistics are a learner's business: what is stored has to be what `evaluate` scores later.
    """

    @wraps(act)
    @torch.no_grad()
    def in_evaluation_mode(policy: Module, *args: Given.args, **kwargs: Given.kwargs) -> Decision:
        training = [module for module in policy.modules() if module.training]
        for module in training:
            vars(module)["training"] = False  # set as an attribute, every module would search its parameters for it
        try:
            return act(policy, *args, **kwargs)
        finally:
            for module in training:
                vars(module)["training"] = True

    return in_evaluation_mode


def explored_value(policy: TrainablePolicy, observation: TensorDict, deterministic: bool) -> Tensor | None:
    """The value [N] that `act` gives, None where nobody learns from it.

    That is where a policy acts deterministically, and on a robot, where privileged observations are missing.
    """
    privileged = [key for key, spec in policy.contract.observation.items() if spec.privileged]
    if deterministic or not set(privileged).issubset(observation.keys()):
        return None
    return policy.value(observation)


@torch.no_grad()
def take_statistics(policy: nn.Module, other: nn.Module) -> None:
    """Copy the buffers of `other`, which hold normalisation statistics, into those of `policy`, built alike."""
    theirs = dict(other.named_buffers())
    for name, mine in policy.named_buffers():
        mine.copy_(theirs[name])


@runtime_checkable
class RenormalisedPolicy(TrainablePolicy, Protocol):
    """A policy whose normalisation statistics may follow what it sees, where that moves as it learns (locomotion)."""

    def renormalise(self, observation: TensorDict, world: World) -> None:
        """Take observations [...] of every process of `world` into the statistics, between an update and a rollout."""
        ...


@runtime_checkable
class RankingPolicy(TrainablePolicy, Protocol):
    """A policy that can execute the best of several candidate chunks, by an advantage that it learns."""

    def start_ranking(self) -> None:
        """From now on `act` draws candidates and executes the one of highest advantage."""
        ...

    def advantage_parameters(self) -> list[nn.Parameter]:
        """Parameters that the advantage alone uses."""
        ...

    def advantage_loss(self, observation: TensorDict, actions: Tensor, target: Tensor) -> Tensor:
        """Squared error of the advantage of `actions` [N, H, A] from `target` [N]; one scalar."""
        ...


@runtime_checkable
class DeterministicPolicy(TrainablePolicy, Protocol):
    """A policy whose deterministic actions are a differentiable function of the observation alone."""

    feature_size: int

    def actions(self, observation: TensorDict) -> Tensor:
        """Deterministic chunks [N, H, A] in robot units, differentiable."""
        ...

    def features(self, observation: TensorDict) -> Tensor:
        """Normalised observations [N, feature_size], privileged ones included: what critics read."""
        ...

    def mean_parameters(self) -> list[nn.Parameter]:
        """Parameters that `actions` depends on."""
        ...


@runtime_checkable
class DensePolicy(DeterministicPolicy, Protocol):
    """A DeterministicPolicy that is a chain of dense layers."""

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """The map to normalised actions as (weight [out, in], bias [out]), tanh after each, differentiable."""
        ...
