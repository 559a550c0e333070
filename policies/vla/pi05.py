"""Pi0.5 (arXiv 2504.16054) on the parts of pi0: the state is in the prompt, and time scales and gates the expert.

Each element of the state is one of 256 bins, whose number is in the prompt; there is no token of the state. The
expert's norms are adaptive (AdaRMS): scale, shift and gate are linear in an embedding of the denoising time.
Differs from the paper: no subtasks are predicted, as in the published code. Reinforcement learning is pi0's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.policy import Condition
from embodied.text import decode
from policies.vla.adaptive import Pi05Model
from policies.vla.checkpoints.weights import Published
from policies.vla.inputs import BOS, FIRST_BYTE, LABELS, PAD, Inputs, quantile
from policies.vla.pi0 import Pi0Config, Pi0Policy

BINS = 256
LONGEST = 200
"""Number of tokens of a prompt of published models, with padding."""
FRAME = "Task: {}, State: {};\n"
ACTION = "Action: "


@dataclass
class Pi05Config(Pi0Config):
    """See Pi0Config; builds a Pi05Policy."""

    def build(self, contract: Contract) -> Pi05Policy:
        """Build the policy for `contract`."""
        return Pi05Policy(contract, self)


class StatedInputs(Inputs):
    """Inputs of pi0.5: as pi0's, but the state is in the prompt, in bins of its range.

    The range, between the first and the last of a hundred quantiles, is stored in `state` as middle and half width.
    Weights of openpi that were trained with discrete_state_input=False, and set `states_in_prompt` so, read no state.
    The prompt has at least `padded` elements of the state, of which further ones are 0 when normalised.
    """

    states_in_prompt = True
    padded = 0

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Compute the range of the state from observations [N]."""
        super().fit(observation)
        values = self.state.concatenated(observation, self.state.keys)
        low, high = (quantile(values, share) for share in (0.01, 0.99))
        self.state.mean.copy_((low + high) / 2.0)
        self.state.std.copy_((high - low) / 2.0)

    def prompts(self, observation: TensorDict, condition: Tensor | None = None) -> list[str]:
        """Prompts of the observations [N], with the label of the `condition` before the action, see `Inputs.tokens`."""
        labels = [LABELS[Condition(each)] for each in condition.tolist()] if condition is not None else []
        labels = labels or [""] * len(observation)
        texts = observation[self.instruction].cpu().numpy() if self.instruction else [None] * len(observation)
        turns = len(labels) // max(1, len(observation))
        instructions = ["" if text is None else " ".join(decode(text).replace("_", " ").split()) for text in texts]
        instructions *= turns
        if not self.states_in_prompt:
            lines = [f"{label}\n" if label else "" for label in labels]
            return [f"{words}\n{line}" for words, line in zip(instructions, lines, strict=True)]
        edges = torch.linspace(-1.0, 1.0, BINS + 1, device=self.state.mean.device)[:-1]
        state = self.standardised_state(observation)
        state = nn.functional.pad(state, (0, max(0, self.padded - self.state_size))).contiguous()
        bins = (torch.bucketize(state, edges, right=True) - 1).tolist()
        lines = [f"{label};\n" if label else "" for label in labels]
        states = [" ".join(map(str, row)) for row in bins] * turns
        return [
            f"{FRAME.format(words, state)}{line}{ACTION}"
            for words, state, line in zip(instructions, states, lines, strict=True)
        ]

    def tokens(self, observation: TensorDict, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [N, L] of the prompt, with the label of the `condition`, and where they are real; see `Inputs.tokens`.

        Raises:
            UserError: for a prompt of more than `LONGEST` tokens of a published model.
        """
        longest = LONGEST
        if self.tokenizer is None:  # at most four letters per element
            text = observation[self.instruction].shape[-1] if self.instruction else 0
            longest = 1 + len(FRAME + ACTION) + text + 4 * max(self.padded, self.state_size)
            longest += 0 if condition is None else 2 + max(map(len, LABELS.values()))
        rows = [self._ids(prompt) for prompt in self.prompts(observation, condition)]
        if too_long := max(0, *map(len, rows), longest) - longest:
            raise UserError(f"expected a prompt of at most {longest} tokens, got {longest + too_long}")
        device = self.state.mean.device
        tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], device=device)
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        return tokens, (torch.arange(longest, device=device) < lengths).long()

    def _ids(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            return [BOS, *(FIRST_BYTE + byte for byte in prompt.encode())]
        return self.tokenizer.encode(prompt)


class Pi05Policy(Pi0Policy):
    """Policy that predicts chunks like Pi0Policy, with pi0.5."""

    kind = "pi05"
    reads = StatedInputs
    inputs: StatedInputs

    def _new(self) -> Pi05Model:
        return Pi05Model(super()._new().native)

    def _take(self, pretrained: Published) -> None:
        super()._take(pretrained)
        self.inputs.states_in_prompt = pretrained.settings.states_in_prompt
        self.inputs.padded = pretrained.settings.padded
