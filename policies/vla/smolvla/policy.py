"""SmolVLA (arXiv 2506.01844), of LeRobot: a small vision-language-action model that predicts chunks by flow matching.

It is trained, scored and steered as pi0 is (`policies.vla.pi0`); the network and its inputs are others. Pictures are
larger, and padded at the top and left; the instruction ends with a new line and has no token for the beginning; the
state is a token of the prefix, which the critic's hidden states include.
Differs from LeRobot: instructions that are too long are refused, not truncated; cameras that a task lacks are left out;
`frozen` is false unless it is set, where LeRobot freezes the vision-language model in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from policies.vla.checkpoints.weights import Published, published
from policies.vla.inputs import Inputs, Tokenizer
from policies.vla.model import Prefix
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.smolvla import weights as smolvla_weights
from policies.vla.smolvla.model import SmolVLAModel, untrained


@dataclass
class SmolVLAConfig(Pi0Config):
    """See Pi0Config; builds a SmolVLAPolicy. Published `weights` are a folder of LeRobot's, or its name on the hub."""

    def build(self, contract: Contract) -> SmolVLAPolicy:
        """Build the policy for `contract`."""
        return SmolVLAPolicy(contract, self)


class CorneredInputs(Inputs):
    """Inputs as pi0's, with pictures at the bottom right of their squares, and not resized with antialiasing."""

    centred = False


class SmolVLATokenizer(Tokenizer):
    """Tokenizer of SmolVLM2, which adds no token for the beginning."""

    kind = "SmolVLM2"
    has_beginning = False
    spaces_underscores = False


class LearnedCameras(Pi0Policy):
    """Policy that reads the task's cameras in the order in which its published weights have learned them."""

    def _match_cameras(self, learned: list[str]) -> None:
        """Read the task's cameras in the order of the cameras `learned`, by name, or with a warning as they are.

        Raises:
            UserError: if the task has more cameras than the weights were trained with.
        """
        own = self.inputs.cameras
        if learned and len(own) > len(learned):
            raise UserError(
                f"policy.weights={self.config.weights} has learned with {', '.join(learned)}; "
                f"the task has {', '.join(own)}: set task.images"
            )
        if set(own) <= set(learned):
            self.inputs.cameras = [name for name in learned if name in own]
        else:
            super()._match_cameras(learned)


class SmolVLAPolicy(LearnedCameras):
    """Policy that predicts chunks like Pi0Policy, with SmolVLA."""

    kind = "smolvla"
    reads = CorneredInputs
    tokenizes = SmolVLATokenizer
    model: SmolVLAModel

    def _published(self, weights: str) -> Published:
        return published(weights, self.kind, self.config.unnorm_key, smolvla_weights.load)

    def _new(self) -> SmolVLAModel:
        self.inputs.antialias = False
        return untrained(self.config.size, self.generated, self.inputs.state_size, self.actions)

    @torch.no_grad()
    def _take(self, pretrained: Published) -> None:
        super()._take(pretrained)
        assert self.inputs.tokenizer
        self.inputs.tokenizer.longest = pretrained.settings.longest

    def _prefix(self, observation: TensorDict, condition: Tensor | None = None) -> Prefix:
        state = self._state(observation)
        padded = nn.functional.pad(state, (0, self.model.state_size - state.shape[-1]))
        pictures = self.inputs.pictures(observation, self.model.picture_size)
        tokens, real = self.inputs.tokens(observation, condition)
        return self.model.prefix(pictures, tokens, real, padded.repeat(len(tokens) // len(padded), 1))
