"""Base of policies that generate action chunks from noise: flow matching and diffusion.

An encoder reads the observation, a network denoises the chunk, a critic with its own encoder computes the value. After
`start_ranking` such a policy draws several candidates for each chunk and executes the one of highest learned advantage
(IDQL, arXiv 2304.10573; for chunks Q-chunking, arXiv 2507.07969); after `start_steering` a small actor steers it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import NonNegativeFloat, PositiveInt
from embodied.contract import ACTION_PREFIX, Contract
from embodied.errors import UserError
from embodied.export.chunk_network import ChunkNetwork
from embodied.export.network import Network
from embodied.policy import (
    CONDITION,
    Condition,
    Decision,
    RankingPolicy,
    Steering,
    inference,
    needs_value,
    value_if_needed,
)
from embodied.seeding import fixed_noise
from policies.encoders.base import Encoder
from policies.encoders.choice import fit_encoders, observation_encoder
from policies.encoders.choice_of_augmentation import AugmentedConfig, augmentation
from policies.flat import FlatEncoder, PlainEncoder
from policies.generation.chunk_networks import NetworkKind
from policies.generation.steering import ENCODED, Steerable, SteeringConfig

SMALLEST_STD = 0.2
"""Smallest deviation for normalising actions, in half ranges, so that unseen actions stay possible."""
CONDITION_SCALE = 4.0
"""Factor of the learned condition relative to the features, so that training learns it early."""


class Aggregate(Enum):
    """Reduction of the log-probabilities of noisy steps and of the K executed actions' elements to one of the chunk.

    SUM is the joint log-probability; STEP_MEAN averages over steps (pi_RL, arXiv 2510.25889), PATH_MEAN over steps and
    the initial noise, whose constant term is left out (pi_RL in RLinf's code), MEAN over steps and elements (ReinFlow,
    arXiv 2505.22094; DPPO, arXiv 2409.00588, whose steps stay separate). In a chunk that the end of an episode cuts
    short the mean has the same divisor, and actions that were not executed count as 0.
    """

    SUM = "sum"
    STEP_MEAN = "step_mean"
    PATH_MEAN = "path_mean"
    MEAN = "mean"

    def of_actions(self, elements: Tensor) -> Tensor:
        """Contribution of each of K actions with `elements` [..., K, A] to the log-probability of a step, [..., K]."""
        return elements.mean(-1) / elements.shape[-2] if self is Aggregate.MEAN else elements.sum(-1)

    def divisor(self, steps: int) -> int:
        """Divisor of the sum over so many noisy steps."""
        return {Aggregate.SUM: 1, Aggregate.PATH_MEAN: steps + 1}.get(self, steps)


@dataclass
class GenerativeConfig(AugmentedConfig):
    """Networks of a policy that generates chunks; for its encoders and augmentations see AugmentedConfig.

    The `network` has layers of width `hidden` and `depth` residual blocks, a UNet as many levels. Augmentations also
    change the samples of the advantage's loss. When ranking, the best of `candidates` chunks by advantage is executed,
    of `explored_candidates` while exploring. The log-probability of a chunk is an `aggregate` over noisy denoising
    steps and the executed actions' elements: sum, step_mean, path_mean or mean. The supervised loss is a mean over
    `draws` noises of each chunk, which cost little where encoding the observation costs much. With `steering` a small
    actor is trained in place of the policy, which stays frozen.

    With an `advantage_guidance` the network also reads whether an action is among the better ones, which
    offline=recap trains, and chunks are generated under that condition, by classifier-free guidance with this weight:
    0 ignores the condition, 1 samples from the conditional policy, and more leads further away from the average one.
    """

    network: NetworkKind = NetworkKind.MLP
    hidden: PositiveInt = 256
    depth: PositiveInt = 1
    candidates: PositiveInt = 32
    explored_candidates: PositiveInt = 8
    aggregate: Aggregate = Aggregate.SUM
    draws: PositiveInt = 1
    advantage_guidance: NonNegativeFloat | None = None
    steering: SteeringConfig = field(default_factory=SteeringConfig)


class GenerativePolicy(Steerable, RankingPolicy):
    """Policy that predicts chunks of H actions from noise.

    The advantage that ranks candidates reads objects instead of pictures where a simulator has them: such a policy
    `teaches` itself. It ranks only while it explores, and imitation transfers the choices to an actor that reads
    pictures.

    Raises:
        UserError: if the action has no limits, or the contract lacks observations of encoder or augmentation.
    """

    action_mean: Tensor
    action_std: Tensor
    action_low: Tensor
    action_high: Tensor
    generates_from_features = True

    def __init__(
        self,
        contract: Contract,
        config: GenerativeConfig,
        kind: str,
        past: int,
        generated: int,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__()
        if not contract.action.low:
            raise UserError(f"policy={kind} needs action limits; set low and high in the action spec")
        self.contract = contract
        self.config = config
        # number of generated actions before the present, and in total
        self.past = past
        self.generated = generated
        self.encoder = observation_encoder(contract, config) if encoder is None else encoder
        self.augment = augmentation(contract, config, self.encoder)
        self.value_encoder = observation_encoder(contract, config, objects=True, privileged=True, lender=self.encoder)
        self.advantage_encoder = observation_encoder(contract, config, objects=True, lender=self.encoder)
        actions = contract.action.shape[-1]
        hidden = config.hidden
        self.feature_size = self.value_encoder.out_features + prefix_size(contract, self.value_encoder)
        self.critic_reads = self.value_encoder.reads
        self.value_head = config.values
        # A = Q - V of values in [low, high] lies in [low - high, high - low], for learners of Q in their union
        self.advantage_values = config.values.of_differences()
        self.critic = head(self.feature_size, hidden, self.value_head.outputs)
        inputs = self.advantage_encoder.out_features + prefix_size(contract, self.advantage_encoder)
        inputs += contract.executed * actions
        self.advantage_head = head(inputs, hidden, self.advantage_values.outputs)
        if config.advantage_guidance is not None:
            self.conditioned = True
            self.condition = nn.Embedding(len(Condition), self.encoder.out_features, padding_idx=Condition.NONE)
            nn.init.zeros_(self.condition.weight)  # at first no condition makes a difference
            self.register_load_state_dict_pre_hook(_with_own_condition)
        self.add_steering(config.steering, self.encoder.out_features, actions)
        self.register_buffer("ranks", torch.zeros((), dtype=torch.bool))
        self.register_buffer("action_mean", torch.zeros(actions))
        self.register_buffer("action_std", torch.ones(actions))
        self.register_buffer("action_low", torch.tensor(contract.action.low))
        self.register_buffer("action_high", torch.tensor(contract.action.high))

    @property
    def actor_keys(self) -> Sequence[str]:
        """Names of the observations that chunks are generated from."""
        return self.encoder.reads

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences for reports on how the actor reads observations."""
        return self.encoder.remarks

    @property
    def teaches(self) -> bool:
        """Whether the advantage reads observations that the actor does not."""
        return type(self.advantage_encoder) is not type(self.encoder)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return [*self.critic.parameters(), *self.value_encoder.parameters()]

    def advantage_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `advantage` uses."""
        return [*self.advantage_head.parameters(), *self.advantage_encoder.parameters()]

    def start_critic(self) -> None:
        """Initialise the critics' encoders from the actor's where they are alike; not that of a ranking advantage."""
        for critic in (self.value_encoder,) if self.ranks else (self.value_encoder, self.advantage_encoder):
            if type(critic) is type(self.encoder):
                critic.begin_like(self.encoder)

    def start_ranking(self) -> None:
        """Execute the candidate of highest advantage from now on; if the policy `teaches`, only while exploring."""
        self.ranks.fill_(True)
        self.stop_steering()

    def start_steering(self, *, keep_ranking: bool = False) -> None:
        """See `SteeredPolicy.start_steering`."""
        super().start_steering()
        if not (keep_ranking and self.steering is Steering.ONE_STEP):
            self.ranks.fill_(False)

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions [..., A].

        Raises:
            UserError: for observations that lack inputs of the critic; `first_decisions` of a simulator have them.
        """
        fit_encoders(self.contract, (self.encoder, self.value_encoder, self.advantage_encoder), observation)
        flat = actions.reshape(-1, actions.shape[-1])
        self.action_mean.copy_(flat.mean(0))
        # a lower bound of the deviation, so that actions outside of the data stay possible
        self.action_std.copy_(flat.std(0).maximum(SMALLEST_STD * (self.action_high - self.action_low) / 2))

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks; `sample` has the variables of their log-probability, for the executed candidates."""
        observation = self.encoder.read(observation)
        noise = self._noise(observation, deterministic, generator)
        if self.steers and not self.ranks:
            return self.steered_decision(observation, noise[:, 0], deterministic)
        count = noise.shape[1]
        features = self.actor_features(observation).repeat_interleave(count, 0)
        chunk, sample, log_prob = self._generate_or_map(noise.flatten(0, 1), features, deterministic, generator)
        actions = self.predicted(chunk)
        rows = self._best(observation, actions, count)
        return Decision(actions[rows], sample[rows], log_prob[rows], value_if_needed(self, observation, deterministic))

    def actor_features(self, observation: TensorDict) -> Tensor:
        """Features [N, F] from which chunks are generated, with the condition POSITIVE if the policy is conditioned."""
        features = self.encoder(observation)
        return features + self._positive if self.conditioned else features

    def _inputs_of(self, observation: TensorDict) -> Tensor:
        encoded = observation.get(ENCODED, None)
        return self.actor_features(self.encoder.read(observation)) if encoded is None else encoded

    def guided(self, predict: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        """Prediction, from `actor_features`, of a network that generates chunks, with classifier-free guidance."""
        weight = self.config.advantage_guidance
        if weight is None or weight == 1.0:
            return predict(features)
        # v = (1 - w) v(none) + w v(positive)
        return torch.lerp(predict(features - self._positive), predict(features), weight)

    @property
    def _positive(self) -> Tensor:
        """Difference of features under the condition POSITIVE and under none, [F]."""
        return CONDITION_SCALE * self.condition.weight[Condition.POSITIVE]

    @abstractmethod
    def _error(self, target: Tensor, features: Tensor) -> Tensor:
        """Supervised error [N, H] of denoising normalised chunks `target` [N, H, A]."""

    def _noise(self, observation: TensorDict, deterministic: bool, generator: torch.Generator | None) -> Tensor:
        """Initial noise of C candidates, [N, C, H, A]."""
        count = 1
        if self.ranks and (not self.teaches or needs_value(self, observation, deterministic)):
            count = self.config.candidates if deterministic else self.config.explored_candidates
        rows = self.steering_noise_shape[0] if self.steers and not deterministic else self.generated
        shape = (count, rows, self.contract.action.shape[-1])
        if deterministic:
            # a fixed function of the observation, so that the same observation gives the same chunk
            shared = self.steers and self.config.steering.shared_noise
            identity = torch.zeros(len(observation), 0) if shared else self.encoder.identity(observation)
            return fixed_noise(identity, shape).to(self.device)
        return torch.randn(observation.batch_size[0], *shape, device=self.device, generator=generator)

    def candidates(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Deterministic chunks [N, C, H, A] from `noise` [N, C, generated, A], and their advantage [N, C] if C > 1."""
        if self.steers and not self.ranks:
            actions, *_ = self.steered(observation, noise[:, 0])
            return actions.unsqueeze(1), actions.new_zeros(len(actions), 1)
        count = noise.shape[1]
        features = self.actor_features(observation).unsqueeze(1).expand(-1, count, -1).flatten(0, 1)
        chunk, _, _ = self._generate_or_map(noise.flatten(0, 1), features, True, None)
        actions = self.predicted(chunk).unflatten(0, (-1, count))
        return actions, self.advantage(observation, actions) if count > 1 else actions.new_zeros(len(actions), 1)

    def deployable(self) -> ChunkNetwork | Network:
        """Network for export: candidates from noise, of which the best is executed as in `act`.

        A one-step actor that ranks no candidates, with shared noise, is a network of dense layers.

        Raises:
            UserError: without normalisation statistics.
        """
        if not all(flag for name, flag in self.encoder.named_buffers() if name.split(".")[-1] == "fitted"):
            raise UserError("the policy has no normalisation statistics; train it before exporting")
        self.encoder.check_export()
        shared = bool(self.steers) and self.config.steering.shared_noise
        if shared and not self.ranks and isinstance(self.encoder, FlatEncoder | PlainEncoder):
            return self._dense(self.encoder)
        policy = copy.deepcopy(self).cpu().requires_grad_(False).eval()
        del policy.critic, policy.value_encoder
        encoder = policy.encoder
        count = self.config.candidates if self.ranks and not self.teaches else 1
        if count == 1:
            del policy.advantage_head, policy.advantage_encoder
        return ChunkNetwork(
            replace(self.contract, observation={key: self.contract.observation[key] for key in self.actor_keys}),
            {key: table.words for key, table in encoder.tables.items()},
            (count, self.generated, self.contract.action.shape[-1]),
            () if shared else encoder.seeds,
            policy,
        )

    def _dense(self, encoder: FlatEncoder | PlainEncoder) -> Network:
        """Network of the encoder and the one-step actor."""
        layers = list(encoder.layers) if isinstance(encoder, FlatEncoder) else []
        added = self._positive if self.conditioned else encoder.mean.new_zeros(encoder.out_features)
        distances = [key for key in encoder.reciprocal if key in encoder.actor_keys]
        mean, scale = encoder.mean[: encoder.observed], encoder.scale[: encoder.observed]
        return Network.of(self.contract, mean, scale, [*layers, *self.layers_of_one_step(added)], distances)

    def example(self, count: int, rows: int, generator: torch.Generator) -> TensorDict:
        """Random observations [count], see `Encoder.example`."""
        return self.encoder.example(self.contract, count, rows, generator)

    def _best(self, observation: TensorDict, actions: Tensor, count: int) -> Tensor:
        """Rows [N] of `actions` [N * C, H, A] with the highest advantage among their C = `count` candidates."""
        rows = torch.arange(0, len(actions), count, device=actions.device)
        if count > 1:
            rows = rows + self.advantage(observation, actions.unflatten(0, (-1, count))).argmax(1)
        return rows

    def advantage(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Advantage of each of C candidates [N, C, H, A] over the policy's average, in units of the return, [N, C]."""
        return self.advantage_values.values(self._advantage_outputs(observation, actions))

    def _advantage_outputs(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Outputs [N, C, O] of the advantage's network for candidates [N, C, H, A]."""
        executed = self.normalised(actions)[:, :, : self.contract.executed]
        features = self._encoded(self.advantage_encoder, observation).unsqueeze(1).expand(-1, actions.shape[1], -1)
        return self.advantage_head(torch.cat((features, executed.flatten(2)), -1))

    def advantage_loss(self, observation: TensorDict, actions: Tensor, target: Tensor) -> Tensor:
        """Mean error of the advantage of executed `actions` [N, H, A] from `target` [N], one scalar."""
        observation, actions = self._augmented(observation, actions)
        outputs = self._advantage_outputs(observation, actions.unsqueeze(1)).squeeze(1)
        return self.advantage_values.errors(outputs, target).mean()

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return, [N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the critic."""
        return self.critic(self.features(observation))

    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size] of the critic's own encoder, which their gradients reach."""
        return self._encoded(self.value_encoder, observation)

    def normalised(self, actions: Tensor) -> Tensor:
        """Normalised `actions` [..., A]."""
        return (actions - self.action_mean) / self.action_std

    def _encoded(self, encoder: Encoder, observation: TensorDict) -> Tensor:
        """Features of a critic's `encoder`, and the normalised action prefix unless the encoder reads it, [N, F]."""
        features = encoder(observation)
        if not prefix_size(self.contract, encoder):
            return features
        return torch.cat((features, self.normalised(observation[ACTION_PREFIX]).flatten(1)), -1)

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Denoising error, averaged over actions with weights `valid` [N, H]; one scalar."""
        condition = observation.get(CONDITION, None) if self.conditioned else None
        observation, actions = self._augmented(observation, actions)
        target = self.normalised(self._window(observation, actions))
        draws = self.config.draws
        features = self.encoder(observation)
        if condition is not None:
            features = features + CONDITION_SCALE * self.condition(condition)
        # encoding costs much, noise little: each encoded observation is used for `draws` noises
        error = self._error(*(each.repeat_interleave(draws, 0) for each in (target, features)))
        error = error[:, -valid.shape[1] :]
        # L = sum(valid * mean over draws of the error) / sum(valid)
        return (error.unflatten(0, (-1, draws)).mean(1) * valid).sum() / valid.sum().clamp_min(1)

    def _augmented(self, observation: TensorDict, actions: Tensor) -> tuple[TensorDict, Tensor]:
        observation = self.encoder.read(observation)
        if not self.augment:
            return observation, actions
        if not (delay := self.contract.delay):
            return self.augment(observation, actions)
        # actions of the prefix are changed like those of the chunk
        observation, actions = self.augment(observation, torch.cat((observation[ACTION_PREFIX], actions), 1))
        return observation.copy().update({ACTION_PREFIX: actions[:, :delay]}), actions[:, delay:]

    def _window(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Actions [B, G, A] that the network denoises or reads beside them, which end with `actions` [B, H, A]."""
        return actions

    def _aggregated(self, elementwise: Tensor) -> Tensor:
        """Terms [..., K] of the executed actions, from elements [..., generated, A]."""
        return self.config.aggregate.of_actions(elementwise[..., self.past : self.past + self.contract.executed, :])


def _with_own_condition(policy: GenerativePolicy, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Add the condition of `policy` to weights of the same policy without one, before they are loaded."""
    state.setdefault(f"{prefix}condition.weight", policy.condition.weight.detach())


def prefix_size(contract: Contract, encoder: Encoder) -> int:
    """Number of elements of the action prefix of `contract` that a critic reads beside its `encoder`."""
    return 0 if ACTION_PREFIX in encoder.reads else contract.delay * contract.action.shape[-1]


def head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Network with two hidden layers from features [N, inputs] to the outputs [N, outputs] of a value."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )
