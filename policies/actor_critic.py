"""Base of policies whose actor and critic have an encoder each, on top of which they are dense layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.products import Dense
from embodied.policy import TrainablePolicy
from policies.encoders.base import EncoderKind
from policies.encoders.choice import fit_encoders, observation_encoder
from policies.encoders.choice_of_augmentation import AugmentedConfig, augmentation


@dataclass
class ActorCriticConfig(AugmentedConfig):
    """Layer widths of actor and critic after their encoders.

    For encoders and augmentations of the supervised loss see AugmentedConfig. An `encoder` of auto is plain where a
    task has neither objects nor pictures.
    """

    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])


class ActorCritic(TrainablePolicy):
    """Policy with the encoder of an actor, which subclasses add, and a critic with an encoder of its own.

    Actions are scaled to the contract's limits. Errors name `option`.

    Raises:
        UserError: if the action has no limits, or the contract lacks observations of the encoder.
    """

    centre: Tensor
    half_range: Tensor

    def __init__(self, contract: Contract, config: ActorCriticConfig, option: str) -> None:
        super().__init__()
        if not contract.action.low:
            raise UserError(f"{option} needs action limits; set low and high in the action spec")
        self.contract = contract
        self.config = config
        self.encoder = observation_encoder(contract, config, fixed_size=EncoderKind.PLAIN)
        self.augment = augmentation(contract, config, self.encoder)
        self.value_encoder = observation_encoder(
            contract, config, objects=True, privileged=True, fixed_size=EncoderKind.PLAIN, lender=self.encoder
        )
        self.feature_size = self.value_encoder.out_features
        self.actor = self.new_actor()
        self.value_head = config.values
        self.critic = dense_layers([self.feature_size, *config.hidden, self.value_head.outputs])
        low = torch.tensor(contract.action.low)
        high = torch.tensor(contract.action.high)
        self.register_buffer("centre", (low + high) / 2)
        self.register_buffer("half_range", (high - low) / 2)

    @abstractmethod
    def new_actor(self) -> nn.Module:
        """Build the layers of the actor after its encoder; the constructor calls it once."""

    @property
    def actor_keys(self) -> Sequence[str]:
        """Names of the observations that the actor reads."""
        return self.encoder.reads

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences for reports on how the actor reads observations."""
        return self.encoder.remarks

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return [*self.critic.parameters(), *self.value_encoder.parameters()]

    def start_critic(self) -> None:
        """Initialise the critic's encoder from the actor's if they are alike."""
        if type(self.value_encoder) is type(self.encoder):
            self.value_encoder.begin_like(self.encoder)

    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N]; actions are scaled by the contract's limits."""
        fit_encoders(self.contract, (self.encoder, self.value_encoder), observation)

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return [N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the critic."""
        return self.critic(self.features(observation))

    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size] of the critic's own encoder, which their gradients reach."""
        return self.value_encoder(observation)

    def augmented(self, observation: TensorDict, actions: Tensor) -> tuple[TensorDict, Tensor]:
        """Observations, with word ids, and `actions` [N, H, A] of the supervised loss, with its augmentation."""
        observation = self.encoder.read(observation)
        return self.augment(observation, actions) if self.augment else (observation, actions)

    def normalised(self, actions: Tensor) -> Tensor:
        """Normalise actions [..., A] in robot units, so that the contract's limits are -1 and 1."""
        return (actions - self.centre) / self.half_range

    def to_robot(self, x: Tensor) -> Tensor:
        """Convert normalised actions [..., A] to robot units."""
        return x * self.half_range + self.centre


def dense_layers(sizes: Sequence[int]) -> nn.Sequential:
    """Dense layers of `sizes` with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [Dense(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
