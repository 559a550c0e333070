"""Classifier of success: a network from the pictures and measurements of one moment to the probability of success.

Trained by binary cross entropy on batches of which half are positive, on randomly shifted pictures, as the reward
classifiers of HIL-SERL (arXiv 2410.21845). Differs from the paper: the encoder is a small convolutional network or a
vision transformer in place of a pretrained ResNet-10; the threshold is chosen on validation episodes in place of 0.85;
several consecutive frames may be required. Letters: N observations, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import Configuration, NonNegativeFloat, PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.data.success_frames import NEGATIVE, POSITIVE, Frames
from embodied.errors import DivergedError, UserError
from embodied.evaluation.detection import sustained
from embodied.runtime.progress import Progress
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from policies.encoders.base import Encoder
from policies.flat import FlatEncoder
from policies.vision.augmentation import PictureChanges
from policies.vision.backbones import VisionConfig
from policies.vision.encoder import PictureEncoder, pictures

KIND = "success_classifier"
"""Value of "kind" in a checkpoint's configuration."""
BLOCK = 256
"""Number of frames that are classified at once."""
HELD_BYTES = 1 << 31
"""Largest size of frames that are decoded once and kept in memory; more are decoded for every batch."""


@dataclass
class NetworkConfig(Configuration):
    """Network: an encoder of pictures by `vision`, and of measurements by layers of `width`, then one linear layer."""

    vision: VisionConfig = field(default_factory=lambda: VisionConfig(shift=4, colour=0.1))
    width: PositiveInt = 64


@dataclass
class FitConfig(Configuration):
    """Training by `steps` of AdamW with a `learning_rate` and a `weight_decay`, on batches of `batch` frames."""

    steps: PositiveInt = 1000
    batch: PositiveInt = 128
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 1e-4


class SuccessNetwork(nn.Module):
    """Network from observations [N] to the logit of success [N].

    Raises:
        UserError: for options that the encoders do not have.
    """

    def __init__(self, contract: Contract, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder: Encoder = (
            PictureEncoder(contract, config.width, config.vision)
            if pictures(contract)
            else FlatEncoder(contract, config.width, [], privileged=False)
        )
        self.head = nn.Linear(self.encoder.out_features, 1)

    def forward(self, observation: TensorDict) -> Tensor:
        """Logits [N]."""
        return self.head(self.encoder(observation)).squeeze(-1)


class SuccessClassifier:
    """Probability of success of observations of `contract`; a success is `frames` consecutive ones of `threshold`."""

    def __init__(self, contract: Contract, network: SuccessNetwork, threshold: float = 0.5, frames: int = 1) -> None:
        self.contract = contract
        self.network = network
        self.threshold = threshold
        self.frames = frames

    @staticmethod
    def build(contract: Contract, config: NetworkConfig, frames: int) -> SuccessClassifier:
        """Untrained classifier of the observations of `contract`."""
        return SuccessClassifier(contract, SuccessNetwork(contract, config), frames=frames)

    def __call__(self, observation: Mapping[str, Any]) -> float:
        """Probability of success in one observation: arrays or tensors by name, of the contract's shapes.

        Raises:
            UserError: if an observation is missing, of another shape or type, or not finite.
        """
        return float(self.probability(_batch_of_one(observation, self.contract))[0])

    @torch.no_grad()
    def probability(self, observation: TensorDict) -> Tensor:
        """Probability of success of observations [N], float64 [N].

        Raises:
            UserError: if an observation is missing, of another shape or type, or not finite.
        """
        check(observation, self.contract)
        own = observation.select(*self.contract.observation)
        device = self.network.head.weight.device
        # a run with precision=bfloat16 collects in it, and would judge by 8 bits what evaluations judge by 24
        with torch.autocast(device.type, enabled=False):
            blocks = [self.network(block.to(device)) for block in own.split(BLOCK)]
        # in float32 a probability above 1 - 6e-8 would be 1, and two thresholds the same
        return torch.cat(blocks).double().sigmoid().to(observation.device or device)

    def scores(self, frames: Frames) -> Tensor:
        """Probability of success of all frames, [F]."""
        blocks = torch.arange(len(frames)).split(BLOCK)
        self.network.eval()
        return torch.cat([self.probability(frames.take(block)).cpu() for block in blocks])

    @torch.no_grad()
    def detect(self, observation: TensorDict) -> int | None:
        """First detected success among the observations [L] of an episode; None without one."""
        score = self.probability(observation)
        reached = sustained(score, torch.zeros(len(score)), self.frames) >= self.threshold
        return int(reached.long().argmax()) if bool(reached.any()) else None

    def to(self, device: torch.device | str) -> Self:
        """Move the network to `device`."""
        self.network.to(device)
        return self

    def save(self, folder: Path, record: dict[str, Any]) -> Path:
        """Write a checkpoint into `folder`, with the composed configuration `record`, and return its path."""
        network = asdict(self.network.config)
        network["vision"]["backbone"] = self.network.config.vision.backbone.name
        own = {"kind": KIND, "network": network, "threshold": self.threshold, "frames": self.frames}
        return checkpoint.save(folder, Checkpoint(self.network.state_dict(), self.contract, {**record, **own}))

    @staticmethod
    def load(folder: str | Path) -> SuccessClassifier:
        """Read the classifier that `save` wrote into `folder`.

        Raises:
            UserError: on one line, if there is none, or it is damaged or of another kind.
        """
        saved = _checked(checkpoint.load(folder))
        try:
            merged = OmegaConf.merge(OmegaConf.structured(NetworkConfig), saved.config["network"])
            network = SuccessNetwork(saved.contract, OmegaConf.to_object(merged))  # type: ignore[arg-type]
            network.load_state_dict(saved.policy)
            threshold, frames = float(saved.config["threshold"]), int(saved.config["frames"])
        except (OmegaConfBaseException, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"the success classifier {saved.path} is of another version ({reason})") from error
        network.eval()
        return SuccessClassifier(saved.contract, network, threshold, frames)

    @staticmethod
    def record(folder: str | Path) -> dict[str, Any]:
        """Composed configuration of the classifier in `folder`.

        Raises:
            UserError: see `load`.
        """
        return _checked(checkpoint.load(folder)).config


def _checked(saved: Checkpoint) -> Checkpoint:
    """`saved` itself.

    Raises:
        UserError: if it is of another kind.
    """
    if saved.config.get("kind") != KIND:
        raise UserError(f"{saved.path} is no success classifier; expected a folder that classify.py wrote")
    return saved


def check(observation: TensorDict, contract: Contract) -> None:
    """Check the observations [N] that `contract` names.

    Raises:
        UserError: if one is missing, of another shape or type, or not finite.
    """
    for key, spec in contract.observation.items():
        if key not in observation:
            present = ", ".join(map(str, observation.keys())) or "none"
            raise UserError(f"the success classifier reads {key!r}, which is missing; got {present}")
        value = observation[key]
        shape = tuple(value.shape[1:])
        if shape != spec.shape or value.dtype != getattr(torch, spec.dtype):
            got = f"{str(value.dtype).removeprefix('torch.')} {shape}"
            raise UserError(f"the success classifier reads {key!r} as {spec.dtype} {spec.shape}, got {got}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise UserError(f"the success classifier reads {key!r}, which is not finite")


def _batch_of_one(observation: Mapping[str, Any], contract: Contract) -> TensorDict:
    """The observations of `contract` with a leading axis; what is missing is reported by `check`."""
    arrays = {key: observation[key] for key in contract.observation if key in observation}
    tensors = {
        key: (value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))).unsqueeze(0)
        for key, value in arrays.items()
    }
    return TensorDict(tensors, [1])


def readable(contract: Contract, names: list[str] | None) -> Contract:
    """Contract with the observations `names` alone; by default all pictures or, without any, all measurements.

    Raises:
        UserError: for names that the contract lacks or that only a simulator has, and if nothing can be read.
    """
    specs = {
        key: spec
        for key, spec in contract.observation.items()
        if not spec.privileged and (spec.is_picture or (spec.dtype == "float32" and -1 not in spec.shape))
    }
    own = [key for key, spec in specs.items() if spec.is_picture] or list(specs)
    chosen = own if names is None else names
    if unknown := [name for name in chosen if name not in specs]:
        raise UserError(f"observations={unknown[0]}: expected some of {', '.join(specs) or 'none'}")
    if not chosen:
        raise UserError("a success classifier reads pictures or float32 observations of fixed size, and there are none")
    return replace(contract, observation={key: specs[key] for key in chosen})


def fit(
    classifier: SuccessClassifier, frames: Frames, index: Tensor, config: FitConfig, generator: torch.Generator
) -> list[float]:
    """Train the network on the frames `index`, half of each batch positive; returns the loss of each step.

    `generator` draws the batches, and PyTorch's own the augmentations. The statistics of measurements are those of the
    first training.

    Raises:
        DivergedError: if the loss is not finite.
    """
    network = classifier.network
    take = _reader(frames, index)
    labels = frames.label[index]
    by_label = [(labels == label).nonzero().squeeze(1) for label in (POSITIVE, NEGATIVE)]
    if not _is_fitted(network):
        rows_with_label = torch.cat(by_label)
        network.encoder.fit(take(rows_with_label[: max(BLOCK, config.batch * 32)].sort().values))
    vision = network.config.vision
    change = PictureChanges(pictures(classifier.contract), vision.shift, vision.colour)
    device = network.head.weight.device
    parameters = [each for each in network.parameters() if each.requires_grad]
    optimiser = torch.optim.AdamW(parameters, config.learning_rate, weight_decay=config.weight_decay)
    losses = []
    network.train()
    with Progress("training the classifier", config.steps, "step") as bar:
        for _ in range(config.steps):
            rows, target = _balanced(by_label, config.batch, generator)
            observation, _ = change(take(rows).to(device), target)
            loss = nn.functional.binary_cross_entropy_with_logits(network(observation), target.to(device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
            if not np.isfinite(losses[-1]):
                raise DivergedError(f"the loss is {losses[-1]} after {len(losses)} steps; use a lower learning_rate")
            bar.update(1, f"loss {losses[-1]:.3f}")
    network.eval()
    return losses


def _balanced(by_label: list[Tensor], batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random rows [batch] of which half are positive, and their labels, 1 or 0."""
    sizes = -(-batch // 2), batch // 2
    rows = [
        own[torch.randint(len(own), (size,), generator=generator)] for own, size in zip(by_label, sizes, strict=True)
    ]
    return torch.cat(rows), torch.cat([torch.ones(sizes[0]), torch.zeros(sizes[1])])


def _reader(frames: Frames, index: Tensor) -> Callable[[Tensor], TensorDict]:
    """Function from rows [B] of `index` to their observations, which are decoded once if they are small enough."""
    first = frames.take(index[:1])
    size = sum(value.nbytes for value in first.values()) * len(index)
    if size > HELD_BYTES:
        return lambda rows: frames.take(index[rows])
    held = frames.take(index)
    return lambda rows: held[rows]


def _is_fitted(network: SuccessNetwork) -> bool:
    """Whether the statistics of measurements are known, as in a trained network."""
    encoder = network.encoder
    flat = encoder.state if isinstance(encoder, PictureEncoder) else encoder
    return bool(flat.fitted)
