"""Policies: reinforcement learning needs one that samples and scores its samples.

One forward pass returns everything a learner needs, so that shared layers run once. Letters in shape comments:
N observations, T decisions, H actions of a chunk, of which K are executed, A action dimension, P parts of a
log-probability.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import Configuration
from embodied.contract import Contract, TensorSpec
from embodied.networks.precision import Precision
from embodied.networks.value_head import ValueHead
from embodied.world import World

Module = TypeVar("Module", bound=nn.Module)
Arguments = ParamSpec("Arguments")

EXECUTED = "executed"
"""Key of a stored sample: mask of the actions executed before the episode's end, [..., K] bool; absent: all."""
MEMORY = "memory"
"""Observation key of a recurrent policy's memory [N, M], and key of the next memory in `Decision.sample`."""
INITIAL_NOISE = "initial_noise"
"""Key of the initial noise of denoising [N, G, A] in the sample of a steered policy."""
BASE = "base"
"""Key of the executed actions [N, K, A] that a residual corrects, in robot units, in the sample of a steered policy."""
CONDITION = "condition"
"""Observation key of the `Condition` [N] of a supervised loss, int64; absent: NONE of all."""


class Condition(IntEnum):
    """Whether an action has a large advantage, as a policy may be conditioned on it; NONE: it does not say."""

    NONE = 0
    NEGATIVE = 1
    POSITIVE = 2


@dataclass
class Decision:
    """Sampled action chunk and the variables of its log-probability."""

    actions: Tensor  # [N, H, A] in robot units, inside the contract's limits
    sample: TensorDict  # [N] pre-squash action, tokens, or the denoising path
    log_prob_terms: Tensor  # [N, K, P] contribution of each of the first K actions to each part of the log-probability
    value: Tensor | None = None  # [N] or None, see `value_if_needed`

    def __post_init__(self) -> None:
        """Assert that the log-probability is divided into terms of actions."""
        assert self.log_prob_terms.ndim == 3, f"expected [N, K, P], got {list(self.log_prob_terms.shape)}"

    @property
    def log_prob(self) -> Tensor:
        """Log-probability of all K actions, [N, P]."""
        return self.log_prob_terms.sum(-2)


def sum_of_executed(terms: Tensor, sample: TensorDict) -> Tensor:
    """Sum the `terms` [..., K, P] of log-probability or entropy over the executed actions of `sample`, [..., P]."""
    if (executed := sample.get(EXECUTED, None)) is None:
        return terms.sum(-2)
    assert terms.shape[-2] == executed.shape[-1], f"{terms.shape[-2]} terms of {executed.shape[-1]} actions"
    return torch.where(executed.unsqueeze(-1), terms, 0.0).sum(-2)


@dataclass
class Evaluation:
    """Differentiable score of stored samples [N] or sequences [T, N], and the value of their observations.

    Actions that were not executed count neither in the log-probability nor in the entropy (`sum_of_executed`).
    """

    log_prob: Tensor  # [..., P]
    entropy: Tensor  # [..., P]
    value: Tensor  # [...]
    value_outputs: Tensor | None = None  # [..., O], from which `value_head` read the value; None of scalar values


class Policy(Protocol):
    """Map from observations to action chunks."""

    contract: Contract

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample a chunk for each of the N observations; `deterministic` returns the same chunk every time."""
        ...


class TrainablePolicy(nn.Module, ABC):
    """A torch module whose samples can be scored, with a value head and a supervised loss.

    `actor_keys` are the names of the observations that `act` reads.
    """

    contract: Contract
    config: Any
    """Config of the policy, its second argument after the contract; None without one."""
    actor_keys: Sequence[str]
    feature_size: int
    """Number of `features`."""
    scores: bool = True
    """Whether samples have a log-probability."""
    conditioned: bool = False
    """Whether `loss` reads `CONDITION`; `act` then samples under the condition POSITIVE, after `start_conditioning`."""
    value_head: ValueHead = ValueHead()
    """Kind of values: scalars, trained by the squared error, or categorical ones."""
    lacks_statistics: str = ""
    """Message if pretrained weights have no normalisation statistics, so that `fit` needs demonstrations."""

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences for reports on how the policy reads observations."""
        return ()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @abstractmethod
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """See `Policy.act`; decorated with `inference`."""

    @abstractmethod
    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Score stored samples; value and log_prob of executed actions equal `act`'s at unchanged weights."""

    @abstractmethod
    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return [N]; for observations without a sample, such as after the last decision."""

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the value network, from which `value_head` reads the value."""
        return self.value(observation).unsqueeze(-1)

    @abstractmethod
    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size] that `value` reads, with privileged observations; and a recurrent policy's memory.

        They are normalised. Their gradients reach `critic_parameters` alone: no critic trains the actor's encoder.
        """

    @abstractmethod
    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Supervised loss, a mean over `actions` [N, H, A] where `valid` [N, H], or with its weights; one scalar."""

    @abstractmethod
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions [..., A]."""

    @abstractmethod
    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the value function uses, neither the supervised loss nor the samples."""

    def actor_parameters(self) -> list[nn.Parameter]:
        """All other parameters."""
        critic = set(self.critic_parameters())
        return [parameter for parameter in self.parameters() if parameter not in critic]

    def start_critic(self) -> None:
        """Prepare `value` for reinforcement learning, after supervised training of the actor."""

    def start_conditioning(self) -> None:
        """Let `act` sample under the condition POSITIVE from now on, which `loss` learns.

        Nothing to do for a policy in which a condition makes no difference before it is learned.
        """

    def renormalise(self, observation: TensorDict, world: World) -> None:
        """Update running statistics with observations [...] of all processes of `world`, between update and rollout."""

    def anneal(self, progress: float) -> None:
        """Reduce exploration at the share `progress` of the training, between updates; nothing to do by default."""

    def blocks(self) -> list[nn.Module]:
        """Large layers, each a module that is called, by which processes may divide the weights; [] of small ones."""
        return []

    def with_new_weights(self) -> Self:
        """Build a policy with the same contract, configuration, statistics, mode and device, and with new weights.

        The weights are drawn from torch's global generator; the policies share no memory.
        """
        policy = type(self)(self.contract, self.config).to(self.device).train(self.training)
        copy_statistics(policy, self)
        return policy


class PolicyConfig(Configuration, ABC):
    """Base class of the options of a policy, which are dataclasses."""

    @property
    def own_precision(self) -> Precision | None:
        """Precision of the policy in training and deployment; None: the run chooses it."""
        return None

    @abstractmethod
    def build(self, contract: Contract) -> TrainablePolicy:
        """Build the policy for `contract`."""


def unread_observations(policy: TrainablePolicy) -> list[str]:
    """Names and kinds of the observations that actors may read and `policy` does not, such as "wrist (picture)"."""

    def kind(spec: TensorSpec) -> str:
        shape = " x ".join("any" if size < 0 else str(size) for size in spec.shape)
        return "picture" if spec.is_picture else "text" if spec.is_text else f"{spec.dtype}, {shape}"

    specs = policy.contract.observation
    keys = set(policy.actor_keys)
    return [f"{key} ({kind(spec)})" for key, spec in specs.items() if not spec.privileged and key not in keys]


def inference(
    act: Callable[Concatenate[Module, Arguments], Decision],
) -> Callable[Concatenate[Module, Arguments], Decision]:
    """Decorate a module's `act`: it runs without gradients and always in evaluation mode.

    Dropout and batch statistics are for learners: stored samples must be those that `evaluate` scores later.
    """

    @wraps(act)
    @torch.no_grad()
    def in_evaluation_mode(policy: Module, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Decision:
        training = [module for module in policy.modules() if module.training]
        for module in training:
            vars(module)["training"] = False  # setting the attribute would search the module's parameters
        try:
            return act(policy, *args, **kwargs)
        finally:
            for module in training:
                vars(module)["training"] = True

    return in_evaluation_mode


def needs_value(policy: Policy, observation: TensorDict, deterministic: bool) -> bool:
    """Whether `act` returns a value: False if no learner uses it.

    No learner uses it if the policy acts deterministically, or on a robot, where privileged observations are missing.
    """
    privileged = [key for key, spec in policy.contract.observation.items() if spec.privileged]
    return not deterministic and set(privileged).issubset(observation.keys())


def value_if_needed(policy: TrainablePolicy, observation: TensorDict, deterministic: bool) -> Tensor | None:
    """Value [N] that `act` returns; None if no learner uses it."""
    return policy.value(observation) if needs_value(policy, observation, deterministic) else None


@torch.no_grad()
def copy_statistics(policy: nn.Module, other: nn.Module) -> None:
    """Copy the buffers (normalisation statistics) of `other` into those of `policy`, which has the same layers."""
    buffers = dict(other.named_buffers())
    for name, own_buffer in policy.named_buffers():
        own_buffer.copy_(buffers[name])


class RankingPolicy(TrainablePolicy):
    """A policy that can execute the best of several candidate chunks, by a learned advantage."""

    @abstractmethod
    def start_ranking(self) -> None:
        """Let `act` draw candidates and execute the one with the highest advantage from now on."""

    @abstractmethod
    def advantage_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the advantage uses."""

    @abstractmethod
    def advantage_loss(self, observation: TensorDict, actions: Tensor, target: Tensor) -> Tensor:
        """Squared error of the advantage of `actions` [N, H, A] from `target` [N]; one scalar."""

    def actor_parameters(self) -> list[nn.Parameter]:
        """All parameters that neither the value nor the advantage uses alone."""
        critics = {*self.critic_parameters(), *self.advantage_parameters()}
        return [parameter for parameter in self.parameters() if parameter not in critics]


class Steering(Enum):
    """Quantity that a small actor chooses for a policy that generates chunks from noise.

    NOISE is the initial noise of denoising, RESIDUAL a correction of the executed actions, ONE_STEP the chunk itself,
    in place of denoising. NONE: there is no such actor.
    """

    NONE = "none"
    NOISE = "noise"
    RESIDUAL = "residual"
    ONE_STEP = "one_step"


class SteeredPolicy(TrainablePolicy):
    """A policy that generates chunks from noise, and may have a small actor that steers it.

    Letters: G generated actions, whose noise is [N, G, A].
    """

    steering: Steering
    generated: int
    steers: Tensor | bool
    """Whether `act` uses the small actor."""

    @property
    @abstractmethod
    def noise_bound(self) -> float:
        """Largest absolute value of the initial noise that the small actor chooses."""

    @abstractmethod
    def start_steering(self, *, keep_ranking: bool = False) -> None:
        """Let `act` use the small actor from now on.

        Candidates are no longer ranked, unless they are generated in one step and `keep_ranking`.
        """

    @abstractmethod
    def stop_steering(self) -> None:
        """Let `act` generate chunks without the small actor from now on."""

    @abstractmethod
    def steering_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the small actor uses."""

    @abstractmethod
    def encoded(self, observation: TensorDict, *, generates: bool) -> TensorDict:
        """Observations [N] that learners of the small actor store: those of critics, and features of the frozen policy.

        They replace the `observation` for critics and `initial_noise`, and if the policy also `generates` chunks from
        them, for all methods. A policy without such features returns the `observation` itself.
        """

    @abstractmethod
    def generate(self, observation: TensorDict, noise: Tensor) -> Tensor:
        """Chunks [N, H, A] in robot units from initial `noise` [N, G, A], without the small actor or exploration."""

    @property
    @abstractmethod
    def steering_noise_shape(self) -> tuple[int, int]:
        """Shape of the noise of one observation in `steered`: (G, A), or (G + K, A) if the actor chooses a residual."""

    @abstractmethod
    def steered(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks [N, H, A] of `act` for standard normal `noise`, their log_prob [N, 1], and initial noise [N, G, A].

        Gradients reach the small actor alone, and from chunks only if it chooses a residual or the chunk itself.
        """

    @abstractmethod
    def initial_noise(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Initial noise [N, G, A] that the small actor chooses for standard normal `noise`, and its log_prob [N, 1].

        The log-probability is that of the initial noise scaled to [-1, 1].
        """

    @abstractmethod
    def distance_of_one_step(self, observation: TensorDict, noise: Tensor) -> Tensor:
        """Mean squared distance of the chunks of one step from the generated ones, in half ranges; one scalar."""


class DeterministicPolicy(TrainablePolicy):
    """A policy whose deterministic actions are a differentiable function of the observation alone."""

    @abstractmethod
    def actions(self, observation: TensorDict) -> Tensor:
        """Deterministic chunks [N, H, A] in robot units, differentiable."""

    @abstractmethod
    def mean_parameters(self) -> list[nn.Parameter]:
        """Parameters that `actions` depends on."""

    def dense_layers(self) -> list[tuple[Tensor, Tensor]] | None:
        """Layers (weight [out, in], bias [out]) to normalised actions, tanh after each, differentiable.

        None: `actions` is not a chain of dense layers.
        """
        return None


class Reparameterised(TrainablePolicy):
    """A policy whose samples are a differentiable function of its weights and of standard normal noise."""

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the noise of one observation."""

    @abstractmethod
    def sample(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, H, A] in robot units from `noise` [N, *noise_shape], and their log_prob [N, P].

        They are those of `act` for the same noise. The log-probability is that of all K executed actions. There may be
        several noises, one after another, for each of fewer observations, which are encoded once.
        """


def repeated(parts: Tensor, count: int) -> Tensor:
    """`parts` [N, ...], each several times, one after another, so that there are `count`."""
    return parts if len(parts) == count else parts.repeat_interleave(count // len(parts), 0)


class DiscretePolicy(TrainablePolicy):
    """A policy whose actions are points of a grid, coded by successive choices among bins.

    Letters: k actions of a chunk, k <= H, L levels of choices for each element of an action, G bins of each choice.
    """

    @abstractmethod
    def code(self, actions: Tensor) -> Tensor:
        """Choices [N, k, L, A], int64, whose actions are nearest to `actions` [N, k, A] in robot units."""

    @abstractmethod
    def log_probs(self, observation: TensorDict, code: Tensor) -> Tensor:
        """Log-probabilities [N, k, L, A, G] of all bins, each given the choices of `code` [N, k, L, A] before it."""
