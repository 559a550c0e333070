"""ACT (arXiv 2304.13705): action chunking with transformers, a policy of pictures for imitation.

The policy is the decoder of a conditional variational auto-encoder: it predicts a chunk from the observation and a
latent variable z, which stands for the style of a demonstration. In training an encoder reads the demonstrated chunk:

    z ~ q(z | s, a_1..H) = N(mu, sigma^2),   L = |a - decoder(o, z)| + kl_weight KL(q || N(0, 1))

When the policy acts z is 0, so that it is deterministic and its chunks have no likelihood.

Differs from the paper: one decoder layer, as in its code and in LeRobot; no temporal ensemble; padded actions leave the
mean of the loss, and the KL divergence has the weight of the sample's valid actions; a critic for weighted imitation
(offline=iql) reads encoded tokens, which it does not train, or the objects of a simulator. Without pictures the
networks read the state alone. Letters as in `policies.lerobot.act_network`; K executed actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import NonNegativeFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.value_head import ValueHead
from embodied.policy import (
    Decision,
    Evaluation,
    PolicyConfig,
    TrainablePolicy,
    copy_statistics,
    inference,
    value_if_needed,
)
from policies.flat import FlatObservations, divisor
from policies.kernels.sampling import undefined_log_prob
from policies.lerobot.act_network import ACTNetwork, ACTSizes, VisionBackbone
from policies.lerobot.checkpoint import (
    ACTION,
    ENVIRONMENT,
    STATE,
    Checkpoint,
    Layout,
    check_sizes,
    fill,
    matched_cameras,
    read,
    warn,
)
from policies.vision.encoder import pictures
from policies.vision.resnet import MEAN, STD
from policies.vla.checkpoints.weights import planned, reading
from policies.vla.critic import Critic, Reads

REQUIRED = {"n_obs_steps": 1, "feedforward_activation": "relu", "replace_final_stride_with_dilation": False}
"""Fields of LeRobot's config.json with their only supported value."""


@dataclass
class ACTConfig(ACTSizes, PolicyConfig):
    """Sizes of an ACTPolicy, by LeRobot's names, and its training.

    `weights` is a policy that LeRobot has saved, a folder `pretrained_model` or a name on the hub: its sizes and its
    normalisation replace those here, and it predicts chunks of its own length, of which the first task.horizon actions
    are used. Without it normalisation is that of the demonstrations, pictures are normalised by ImageNet's statistics,
    and the `vision_backbone` begins with `backbone_weights`, a file of torchvision's tensors (.safetensors or .pth), or
    with random ones, which learn slowly. Batch normalisation in the backbone is frozen.

    The supervised loss is the absolute error plus `kl_weight` times the KL divergence of the latent variable, if the
    policy has one (`use_vae`). The inputs of the `critic` pass layers of width `hidden` to a head of `values`.
    """

    weights: str | None = None
    backbone_weights: str | None = None
    kl_weight: NonNegativeFloat = 10.0
    critic: Reads = Reads.AUTO
    hidden: PositiveInt = 256
    values: ValueHead = field(default_factory=ValueHead)

    def __post_init__(self) -> None:
        """Raise UserError for options that are out of range or exclude each other."""
        super().__post_init__()
        if self.weights and self.backbone_weights:
            raise UserError("policy.weights have a backbone: leave policy.backbone_weights out")

    def build(self, contract: Contract) -> ACTPolicy:
        """Build the policy for `contract`."""
        if self.weights is None:
            return ACTPolicy(contract, self)
        checkpoint = read(self.weights, "act", "chunk_size")
        policy = ACTPolicy(
            contract,
            _with_sizes(self, checkpoint),
            checkpoint.layout,
            matched_cameras(checkpoint, contract, pictures(contract)),
        )
        check_sizes(checkpoint, policy.state.observed, contract)
        if not planned():
            policy.adopt(checkpoint)
        return policy


class ACTPolicy(TrainablePolicy):
    """Policy that predicts chunks of H actions by a transformer over the state and the patches of all pictures.

    It reads float32 observations of fixed size as the robot's state, and no texts. `actor_keys` are the names of all
    observations that chunks are predicted from. A `layout` of a checkpoint has its own length of chunks and names its
    own cameras, which are the pictures `cameras`; the first elements of the state are the robot's, the rest are the
    environment's.

    Raises:
        UserError: if the contract has neither pictures nor a state that actors may read.
    """

    scores = False
    kind = "act"
    action_offset: Tensor
    action_scale: Tensor
    action_low: Tensor
    action_high: Tensor
    picture_mean: Tensor
    picture_std: Tensor

    def __init__(
        self, contract: Contract, config: ACTConfig, layout: Layout | None = None, cameras: list[str] | None = None
    ) -> None:
        super().__init__()
        self.contract = contract
        self.config = config
        self.cameras = pictures(contract) if cameras is None else cameras
        specs = {
            key: spec for key, spec in contract.observation.items() if not spec.privileged and -1 not in spec.shape
        }
        self.state = FlatObservations(
            replace(contract, observation=specs), [], "policy=act", "another policy", required=not self.cameras
        )
        self.actor_keys = [*self.cameras, *self.state.actor_keys]
        actions = contract.action.shape[-1]
        self.layout = layout or Layout(
            {name: contract.observation[name].shape[:2] for name in self.cameras},  # pyright: ignore[reportArgumentType]
            self.state.observed,
            0,
            actions,
            contract.horizon,
        )
        if self.layout.chunk < contract.horizon:
            raise UserError(
                f"policy.weights={config.weights} predicts {self.layout.chunk} actions, the task asks for "
                f"{contract.horizon}: set a smaller task.horizon or executed"
            )
        self.network = ACTNetwork(self.layout, config)
        if config.backbone_weights and self.cameras and not planned():
            self.network.backbone.adopt(config.backbone_weights)
        self.value_head = config.values
        self.critic = Critic(contract, config.critic, config.dim_model, config.hidden, self.value_head.outputs)
        self.feature_size = self.critic.feature_size
        self.pretrained = layout is not None
        self.weights_of = config.weights
        unlimited = (torch.inf,) * actions
        self.register_buffer("action_low", torch.tensor(contract.action.low or [-value for value in unlimited]))
        self.register_buffer("action_high", torch.tensor(contract.action.high or unlimited))
        self.register_buffer("action_offset", torch.zeros(actions))
        self.register_buffer("action_scale", torch.ones(actions))
        count = len(self.cameras)
        self.register_buffer("picture_mean", torch.tensor(MEAN).expand(count, 3).clone())
        self.register_buffer("picture_std", torch.tensor(STD).expand(count, 3).clone())

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return list(self.critic.parameters())

    def with_new_weights(self) -> Self:
        """See `TrainablePolicy.with_new_weights`; the policy has the sizes of the checkpoint, if there is one."""
        layout = self.layout if self.pretrained else None
        policy = type(self)(self.contract, self.config, layout, self.cameras).to(self.device).train(self.training)
        copy_statistics(policy, self)
        return policy

    @torch.no_grad()
    def adopt(self, checkpoint: Checkpoint) -> None:
        """Load the weights and the normalisation of `checkpoint`.

        Raises:
            UserError: for the first tensor that is missing, misshapen, not finite or unknown.
        """
        fill(self.network, checkpoint.tensors, f"policy.weights={checkpoint.source}")
        normalisers = checkpoint.normalisers
        present = [normalisers[name] for name in (STATE, ENVIRONMENT) if name in normalisers]
        if present:
            offset, scale = (torch.cat(values) for values in zip(*present, strict=True))
            self.state.mean.copy_(offset)
            self.state.std.copy_(scale)
        self.state.fitted.fill_(True)
        self.action_offset.copy_(normalisers[ACTION][0])
        self.action_scale.copy_(normalisers[ACTION][1])
        for camera, name in enumerate(checkpoint.layout.cameras):
            self.picture_mean[camera], self.picture_std[camera] = normalisers[name]

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions [..., A]; those of a checkpoint stay."""
        self.critic.fit(observation)
        if self.pretrained:
            return
        if self.state.actor_keys:
            self.state.fit_statistics(observation)
        self.state.fitted.fill_(True)
        flat = actions.reshape(-1, actions.shape[-1])
        self.action_offset.copy_(flat.mean(0))
        self.action_scale.copy_(flat.std(0))

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Predict chunks with the latent variable 0, deterministic or not; they have no likelihood."""
        encoded, position = self._encoded(observation)
        actions = self.to_robot(self.network.chunk(encoded, position)[:, : self.contract.horizon])
        no_sample = TensorDict({}, batch_size=[len(actions)], device=self.device)
        log_prob = undefined_log_prob(len(actions), self.contract, actions.device)
        return Decision(actions, no_sample, log_prob, value_if_needed(self, observation, deterministic))

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Raise UserError: chunks have no likelihood."""
        raise UserError("policy=act is for imitation: its chunks have no likelihood; use policy=flow or diffusion")

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return, [N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the critic."""
        return self.critic(self.features(observation))

    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size]: encoded objects, or the mean of the encoded tokens."""
        return self.critic.features(observation, lambda: self._encoded(observation)[0].mean(1))

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Absolute error and KL divergence, a mean over `actions` [N, H, A] with weights `valid` [N, H]; one scalar."""
        target = (actions - self.action_offset) / divisor(self.action_scale, self.action_offset)
        latent, divergence = self._drawn_latent(observation, target, valid > 0)
        encoded, position = self._encoded(observation, latent)
        predicted = self.network.chunk(encoded, position)[:, : target.shape[1]]
        # L = sum(valid (|a - a'| + kl_weight KL)) / sum(valid)
        error = (predicted - target).abs().mean(-1) + self.config.kl_weight * divergence.unsqueeze(-1)
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def to_robot(self, x: Tensor) -> Tensor:
        """Convert normalised actions [..., A] to robot units, clamped to the contract's limits."""
        return (x * self.action_scale + self.action_offset).clamp(self.action_low, self.action_high)

    def _drawn_latent(self, observation: TensorDict, target: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
        """Latent variable [N, Z] drawn from its posterior given chunks [N, H, A], and its KL divergence [N]."""
        if not self.config.use_vae:
            return None, target.new_zeros(len(target))
        # chunks of a checkpoint may be longer than the target
        missing = self.layout.chunk - target.shape[1]
        chunk = nn.functional.pad(target, (0, 0, 0, missing))
        robot, _ = self._states(observation)
        mean, log_variance = self.network.posterior(robot, chunk, nn.functional.pad(valid, (0, missing)))
        # KL(N(mu, sigma^2) || N(0, 1)) = -1/2 sum(1 + log sigma^2 - mu^2 - sigma^2)
        divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return mean + (0.5 * log_variance).exp() * torch.randn_like(mean), divergence

    def _encoded(self, observation: TensorDict, latent: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encoded tokens and their positions; without a `latent` variable it is 0."""
        robot, environment = self._states(observation)
        if latent is None:
            latent = robot.new_zeros(len(robot), self.config.latent_dim)
        return self.network.encoded(latent, robot, environment, self._pictures(observation))

    def _states(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        """Normalised states of the robot [N, S] and of the environment [N, E]; RuntimeError before `fit`."""
        state = self.state.standardised(observation, self.state.actor_keys)
        return state[:, : self.layout.state], state[:, self.layout.state :]

    def _pictures(self, observation: TensorDict) -> list[Tensor]:
        """Normalised pictures [N, 3, height, width] of each camera."""
        normalised = []
        for index, name in enumerate(self.cameras):
            mean, std = (values[index].view(3, 1, 1) for values in (self.picture_mean, self.picture_std))
            normalised.append((observation[name].movedim(-1, 1).to(mean.dtype) / 255.0 - mean) / std)
        return normalised


def _with_sizes(config: ACTConfig, checkpoint: Checkpoint) -> ACTConfig:
    """Copy `config` with the sizes of `checkpoint`.

    Raises:
        UserError: for values that are not supported.
    """
    option = f"policy.weights={checkpoint.source}"
    published = checkpoint.config
    for name, expected in REQUIRED.items():
        if (value := published.get(name, expected)) != expected:
            raise UserError(f"{option} has {name}={value}, and only {expected} is supported")
    if published.get("temporal_ensemble_coeff") is not None:
        warn(f"{option} was evaluated with averages of overlapping chunks (temporal_ensemble_coeff), not computed here")
    backbones = {backbone.value: backbone for backbone in VisionBackbone}
    if (kind := published.get("vision_backbone", VisionBackbone.RESNET18.value)) not in backbones:
        raise UserError(f"{option} has vision_backbone={kind}; expected one of {', '.join(backbones)}")
    names = {each.name for each in fields(ACTSizes)} - {"vision_backbone", "dropout"}
    sizes = {name: published[name] for name in names if name in published}
    with reading(f"{option}: cannot read config.json"):
        return replace(config, **sizes, vision_backbone=backbones[kind])
