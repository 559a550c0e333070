"""GR00T N1.5 (arXiv 2503.14734), as LeRobot trains it: a vision-language-action model of many embodiments.

It is trained, scored and steered as pi0 is (`policies.vla.pi0`); the network and its inputs are others. Pictures are
stretched to squares, whose tokens are in a chat with the instruction; state and actions are normalised by their range.
Differs from LeRobot: padding of instructions is not attended to, so that a chunk does not depend on the others of a
batch; there is no dropout; constant elements of the state are divided by 1, not set to zero; `frozen` is false unless
it is set, where LeRobot freezes the vision-language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from policies.generation.base import SMALLEST_STD
from policies.vla.checkpoints.weights import Published, published
from policies.vla.computing import layers
from policies.vla.groot import weights as groot_weights
from policies.vla.groot.model import GrootModel, untrained
from policies.vla.inputs import Inputs, Tokenizer
from policies.vla.pi0 import Pi0Config
from policies.vla.smolvla.policy import LearnedCameras

DEFAULT_INSTRUCTION = "Perform the task."
PICTURE = "<IMG_CONTEXT>"
"""Placeholder of a picture's token in a prompt."""


@dataclass
class GrootConfig(Pi0Config):
    """See Pi0Config; builds a GrootPolicy. Published `weights` are a folder of LeRobot's or NVIDIA's, or a hub name."""

    def __post_init__(self) -> None:
        """Raise UserError for options of pi0 that GR00T has not."""
        super().__post_init__()
        if self.trained_delay:
            raise UserError("policy=groot has one denoising time for a whole chunk; leave out policy.trained_delay")

    def build(self, contract: Contract) -> GrootPolicy:
        """Build the policy for `contract`.

        Raises:
            UserError: for one with a delay, under which actions of a chunk have times of their own.
        """
        if contract.delay:
            raise UserError("policy=groot has one denoising time for a whole chunk; leave out delay")
        return GrootPolicy(contract, self)


class StretchedInputs(Inputs):
    """Inputs of GR00T: pictures are stretched to squares, and the range of each element of the state is [-1, 1].

    The range is stored in `state` as middle and half width. Without a tokenizer a prompt is `picture_token`, as often
    as `placeholders` says, then the words.
    """

    picture_token = 0
    placeholders = 0

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Compute the range of the state from observations [N]."""
        super().fit(observation)
        middle, half = _range(self.state.concatenated(observation, self.state.keys))
        self.state.mean.copy_(middle)
        self.state.std.copy_(half)

    def pictures(self, observation: TensorDict, size: int) -> Tensor:
        """Pictures [N, C, 3, size, size] in [-1, 1]."""
        return torch.stack([stretched(observation[key], size) for key in self.cameras], 1)

    def tokens(self, observation: TensorDict, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [N, L] of the prompt and where they are real; see `Inputs.tokens`."""
        tokens, real = super().tokens(observation, condition)
        if self.tokenizer:
            return tokens, real
        places = tokens.new_full((len(tokens), self.placeholders), self.picture_token)
        return torch.cat((places, tokens), 1), torch.cat((torch.ones_like(places), real), 1)


def stretched(images: Tensor, size: int) -> Tensor:
    """Stretch images [N, height, width, 3], uint8, to squares [N, 3, size, size] in [-1, 1], as Eagle's processor does.

    Pixels are interpolated by cubic polynomials with antialiasing, first along rows and then along columns, and rounded
    after each, as torch does with integers on CPUs.
    """
    scaled = images.movedim(-1, 1).float()
    for shape in ((scaled.shape[-2], size), (size, size)):
        if scaled.shape[-2:] != shape:
            scaled = nn.functional.interpolate(scaled, shape, mode="bicubic", antialias=True)
            scaled = scaled.round().clamp(0.0, 255.0)
    return scaled / 127.5 - 1.0


def _range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half width [A] of the range of rows [N, A]."""
    low, high = rows.amin(0), rows.amax(0)
    return (low + high) / 2.0, (high - low) / 2.0


class GrootTokenizer(Tokenizer):
    """Tokenizer of Eagle, whose chat has `pictures` with `tokens_of_picture` placeholders each before the instruction.

    The instruction is written as a list in Python, as in GR00T's training: "['pick the milk']".
    """

    kind = "Eagle"
    has_beginning = False
    spaces_underscores = False
    longest = None
    pictures = 1
    tokens_of_picture = 1

    def prompt(self, instruction: str) -> str:
        """Chat that asks for an action."""
        content = [*[{"type": "image", "image": ""}] * self.pictures, {"type": "text", "text": str([instruction])}]
        messages = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for number in range(1, self.pictures + 1):
            picture = f"<image {number}><img>{PICTURE * self.tokens_of_picture}</img>"
            text = text.replace(f"<image-{number}>", picture, 1)
        return text

    def _ids(self, instruction: str) -> list[int]:
        ids = self.encode(self.prompt(instruction or DEFAULT_INSTRUCTION))
        expected = self.pictures * self.tokens_of_picture
        if (count := ids.count(self.tokenizer.convert_tokens_to_ids(PICTURE))) != expected:
            raise UserError(f"expected {expected} tokens {PICTURE} in the prompt, got {count}: {instruction!r}")
        return ids


class GrootPolicy(LearnedCameras):
    """Policy that predicts chunks like Pi0Policy, with GR00T."""

    kind = "groot"
    reads = StretchedInputs
    tokenizes = GrootTokenizer
    centres_constants = True
    model: GrootModel
    inputs: StretchedInputs

    def _published(self, weights: str) -> Published:
        return published(weights, self.kind, self.config.unnorm_key, groot_weights.load)

    def _new(self) -> GrootModel:
        model = untrained(self.config.size, self.contract.horizon, self.inputs.state_size, self.actions)
        self.inputs.picture_token = model.native.architecture.picture_token
        self.inputs.placeholders = len(self.inputs.cameras) * model.tokens_of_picture
        return model

    def _check_sizes(self) -> None:
        super()._check_sizes()
        longest = self.model.native.architecture.head.longest
        if self.contract.horizon > longest:
            raise UserError(f"policy.weights={self.config.weights} know chunks of up to {longest} actions")

    def blocks(self) -> list[nn.Module]:
        """Layers of Eagle; the action head's are not gathered as they run, since they also compute keys of features."""
        return layers(self.model.vision_language)

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute the ranges of state and actions from observations [N] and actions [..., A]; see `Pi0Policy.fit`."""
        super().fit(observation, actions)
        if not self.brought_statistics:
            middle, half = _range(actions.reshape(-1, actions.shape[-1]))
            self.action_mean.copy_(middle)
            # a lower bound of the width, so that actions outside of the data stay possible
            self.action_std.copy_(half.maximum(SMALLEST_STD * (self.action_high - self.action_low) / 2))

    @torch.no_grad()
    def _take(self, pretrained: Published) -> None:
        super()._take(pretrained)
        assert isinstance(self.inputs.tokenizer, GrootTokenizer)
        self.inputs.tokenizer.pictures = len(self.inputs.cameras)
        self.inputs.tokenizer.tokens_of_picture = self.model.tokens_of_picture
