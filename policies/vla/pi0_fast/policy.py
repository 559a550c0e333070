"""Pi0-FAST (arXiv 2501.09747): a chunk is the answer of a vision-language model, in few tokens of its frequencies.

The prompt has the instruction and the state in bins, as pi0.5's; the answer is "Action: ", the tokens of FAST
(`fast.py`) and "|". In published weights FAST's tokens are the last of the vocabulary but `skipped`, in reverse order,
as in openpi and LeRobot.
Differs from them: "Action: " is given, not generated; while acting only FAST's tokens and the end are drawn, and scored
among these, so that no answer is a text; the prompt does not attend to the answer's first token, as in LeRobot's
training and unlike its generation. Without published weights the model is a small one of random weights, and FAST is
fitted to the demonstrations.

Letters as in `autoregressive.py`; H actions of a chunk, A action dimension, K executed actions, V tokens of FAST.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.value_head import ValueHead
from embodied.policy import (
    Decision,
    Evaluation,
    PolicyConfig,
    TrainablePolicy,
    inference,
    needs_value,
    sum_of_executed,
)
from policies.vla.checkpoints.statistics import counted, fitting
from policies.vla.computing import Computing, layers, prepare
from policies.vla.critic import Critic, Reads
from policies.vla.inputs import BOS, FIRST_BYTE, VOCABULARY, Tokenizer, quantile
from policies.vla.openvla.parallel import untrained
from policies.vla.pi0_fast import fast
from policies.vla.pi0_fast import weights as fast_weights
from policies.vla.pi0_fast.autoregressive import AutoregressiveModel
from policies.vla.pi05 import ACTION, StatedInputs
from policies.vla.sizes import Size
from policies.vla.tokens import NARROWEST, QUANTILES, chosen

END = "|"
NOTHING = -1
"""Token in a stored answer after its end."""
UNLIKELY = -1e9
"""Score of tokens that are never drawn."""


@dataclass
class Pi0FastConfig(Computing, PolicyConfig):
    """Size, tokens and critic of a Pi0FastPolicy.

    Published `weights` (a folder, or a name on the hub, in LeRobot's layout) define their own size, and statistics,
    unless unnorm_key=demonstrations. `action_tokenizer` is a folder of FAST's encoding, of these weights the one that
    they were trained with; without it (None) one of `vocabulary` tokens is fitted to the demonstrations. An answer has
    at most `max_tokens` (None: one for each number of a chunk, and the end; of published weights as many as they were
    trained with, usually 256). Tokens are drawn and scored at `temperature`, deterministic chunks are the most likely
    tokens. The critic has layers of width `hidden` and a head of `values`.

    `precision`, `gradient_checkpointing` and `compile` configure the computation (`policies.vla.computing`).
    """

    size: Size = Size.TINY
    weights: str | None = None
    unnorm_key: str | None = None
    action_tokenizer: str | None = None
    vocabulary: PositiveInt = 256
    max_tokens: PositiveInt | None = None
    temperature: PositiveFloat = 1.0
    critic: Reads = Reads.AUTO
    hidden: PositiveInt = 256
    values: ValueHead = field(default_factory=ValueHead)

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that exclude each other."""
        super().__post_init__()
        if self.weights and not self.action_tokenizer:
            raise UserError(
                "policy.weights of pi0_fast were trained with FAST's tokens: name their folder in"
                " policy.action_tokenizer"
            )

    def build(self, contract: Contract) -> Pi0FastPolicy:
        """Build the policy for `contract`."""
        return Pi0FastPolicy(contract, self)


class FastInputs(StatedInputs):
    """Inputs of pi0-FAST: pi0.5's without the beginning of the answer."""

    def prompts(self, observation: TensorDict, condition: Tensor | None = None) -> list[str]:
        """Prompts of the observations [N]."""
        return [prompt.removesuffix(ACTION) for prompt in super().prompts(observation, condition)]

    def answer(self, text: str) -> list[int]:
        """Tokens of a `text` in the answer."""
        return (
            [FIRST_BYTE + byte for byte in text.encode()] if self.tokenizer is None else self.tokenizer.following(text)
        )

    @property
    def beginning(self) -> int:
        """First token of prompts and answers."""
        return BOS if self.tokenizer is None else self.tokenizer.tokenizer.bos_token_id


class Pi0FastPolicy(TrainablePolicy):
    """Policy that predicts chunks of H actions as a sequence of tokens, each given those before.

    A chunk's log-probability (one part, P = 1) is the sum over its tokens. No token belongs to one action, so that the
    first executed action contributes all of it.

    Raises:
        UserError: if the action has no limits, the contract has no pictures or state that actors may read, or the
            tokens do not fit.
    """

    kind = fast_weights.KIND
    action_mean: Tensor
    action_std: Tensor
    action_low: Tensor
    action_high: Tensor
    pairs: Tensor
    drawn: Tensor
    lead: Tensor

    def __init__(self, contract: Contract, config: Pi0FastConfig) -> None:
        super().__init__()
        if not contract.action.low:
            raise UserError("policy=pi0_fast needs action limits; set low and high in the action spec")
        self.contract = contract
        self.config = config
        self.actions = contract.action.shape[-1]
        self.weights_of = config.weights
        self.inputs = FastInputs(contract, "policy=pi0_fast")
        checkpoint = fast_weights.published(config.weights, config.unnorm_key) if config.weights else None
        merged = 0 if config.action_tokenizer else config.vocabulary - fast.symbols(contract.horizon)
        if merged < 0:
            raise UserError(
                f"chunks of {contract.horizon} actions have {fast.symbols(contract.horizon)} numbers:"
                f" policy.vocabulary={config.vocabulary} has to be at least as large"
            )
        self.register_buffer("pairs", torch.full((merged, 2), NOTHING, dtype=torch.int32))
        self._fast = fast.read(config.action_tokenizer) if config.action_tokenizer else None
        self._pairs = torch.empty(0)  # those of which `_fast` was built
        self.size = self._fast.size if self._fast else config.vocabulary
        native = checkpoint.native if checkpoint else untrained(config.size, self.size)
        self.model = AutoregressiveModel(native)
        self.model.computing = config
        prepare(self.model, config)
        self.longest = config.max_tokens or (checkpoint.longest if checkpoint else contract.horizon * self.actions + 1)
        self.value_head = config.values
        inputs = self.model.width + self.inputs.state_size
        self.critic = Critic(contract, config.critic, inputs, config.hidden, self.value_head.outputs)
        self.feature_size = self.critic.feature_size
        low, high = torch.tensor(contract.action.low), torch.tensor(contract.action.high)
        self.register_buffer("action_low", low)
        self.register_buffer("action_high", high)
        self.register_buffer("action_mean", (low + high) / 2.0)
        self.register_buffer("action_std", (high - low) / 2.0)
        self.brought_statistics = False
        self.lacks_statistics = ""
        if checkpoint:
            self._take(checkpoint)
        self._choose_tokens(checkpoint)

    def _choose_tokens(self, checkpoint: fast_weights.Published | None) -> None:
        """Choose the tokens of the vocabulary that a chunk is made of, the answer's first ones, and its end."""
        if checkpoint:
            # FAST's token i is the vocabulary's last but skipped + i
            tokens = checkpoint.tokenizer.vocab_size - 1 - checkpoint.skipped - torch.arange(self.size)
            if int(tokens.min()) < 0 or int(tokens.max()) >= self.model.vocabulary:
                raise UserError(
                    f"policy.action_tokenizer={self.config.action_tokenizer} has {self.size} tokens, which do not fit"
                    f" into the vocabulary of policy.weights={self.config.weights}"
                )
        else:
            tokens = VOCABULARY + 1 + torch.arange(self.size)
        end = self.inputs.answer(END)
        stop = checkpoint.tokenizer.eos_token_id if checkpoint else None
        self.after = end[1:] + ([] if stop is None else [stop])  # trained tokens after the end
        lead = [self.inputs.beginning, *self.inputs.answer(ACTION)]
        self.register_buffer("drawn", torch.cat((tokens, torch.tensor(end[:1]))), persistent=False)
        self.register_buffer("lead", torch.tensor([lead]), persistent=False)

    @torch.no_grad()
    def _take(self, checkpoint: fast_weights.Published) -> None:
        """Use the tokenizer and, if they have as many elements, the statistics of published weights."""
        self.inputs.tokenizer = Tokenizer(checkpoint.tokenizer, self.model.vocabulary)
        self.inputs.antialias = checkpoint.settings.antialias
        self.inputs.padded = checkpoint.state
        weights = f"policy.weights={self.config.weights}"
        if not checkpoint.statistics:
            self.lacks_statistics = f"{weights} has no statistics of state and action, or they are left out"
            return
        sizes = {"state": self.inputs.state_size, "action": self.actions}
        pairs = {part: [checkpoint.statistics[f"{part}_{each}"] for each in ("mean", "std")] for part in sizes}
        state, action = (
            fitting(*pairs[part], size, checkpoint.statistics[f"{part}_constant"]) for part, size in sizes.items()
        )
        if state is None or action is None:
            stored_sizes = " and ".join(str(counted(*pair)) for pair in pairs.values())
            raise UserError(
                f"{weights} has statistics of {stored_sizes} elements of state and action, not of this task's"
                f" {sizes['state']} and {sizes['action']}; use policy.unnorm_key=demonstrations"
            )
        self.inputs.state.mean.copy_(state[0])
        self.inputs.state.std.copy_(state[1])
        self.inputs.state.fitted.fill_(True)
        self.action_mean.copy_(action[0])
        self.action_std.copy_(action[1])
        self.brought_statistics = True

    @property
    def actor_keys(self) -> list[str]:
        """Names of the observations that chunks are generated from."""
        return self.inputs.keys

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return list(self.critic.parameters())

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters of the vision-language model."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def blocks(self) -> list[nn.Module]:
        """Layers of all transformers."""
        return layers(self.model)

    @property
    def fast(self) -> fast.Fast:
        """Encoding of chunks, built anew when other pairs were fitted or loaded."""
        if self.config.action_tokenizer:
            assert self._fast is not None
            return self._fast
        pairs = self.pairs.cpu()
        if self._fast is None or not torch.equal(pairs, self._pairs):
            self._fast, self._pairs = fast.built(pairs, self.contract.horizon), pairs.clone()
        return self._fast

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions, unless the weights have some.

        Actions are consecutive ones [N, A], or chunks [N, H, A]. FAST is fitted to them, unless it was read.
        """
        self.critic.fit(observation)
        if not self.brought_statistics:
            self.inputs.fit(observation)
            flat = actions.reshape(-1, self.actions)
            low, high = (quantile(flat, share) for share in QUANTILES)
            # a lower bound of the range, so that actions outside of the data stay possible
            half = ((high - low) / 2.0).maximum(NARROWEST * (self.action_high - self.action_low) / 2.0)
            self.action_mean.copy_((low + high) / 2.0)
            self.action_std.copy_(half)
        horizon = self.contract.horizon
        if len(self.pairs):
            chunks = actions if actions.ndim == 3 and actions.shape[1] == horizon else None
            if chunks is None:
                flat = actions.reshape(-1, self.actions)
                chunks = flat.unfold(0, horizon, 1).transpose(1, 2) if len(flat) >= horizon else flat[:0].unsqueeze(1)
            if len(chunks):
                self.pairs.copy_(fast.fitted(self.normalised(chunks), self.size))

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Draw chunks; the sample has the tokens of their answers [N, longest], `NOTHING` after the end."""
        pictures, (tokens, real) = self._read(observation)
        count = len(tokens)
        reading = self.model.read(pictures, tokens, real, self.lead.expand(count, -1))
        answer = torch.full((count, self.longest), NOTHING, device=self.device)
        total = torch.zeros(count, device=self.device)
        running = torch.ones(count, dtype=torch.bool, device=self.device)
        for place in range(self.longest):
            log_probs = self._log_probs(reading.last)  # [N, V + 1]
            index = log_probs.argmax(-1)
            if not deterministic:
                index = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
            answer[running, place] = index[running]
            total = total + torch.where(running, chosen(log_probs, index), 0.0)
            running = running & (index < self.size)
            if not running.any():
                break
            if place + 1 < self.longest:
                self.model.write(reading, self.drawn[index])
        value = None
        if needs_value(self, observation, deterministic):
            value = self.value_head.values(self._value_outputs(observation, reading.mean))
        sample = TensorDict({"tokens": answer}, batch_size=[count])
        return Decision(self.to_robot(self._decoded(answer)), sample, self._terms(total), value)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability and entropy of stored answers, at the temperature at which they were drawn."""
        answer = sample["tokens"].long()
        counted = answer != NOTHING
        index = torch.where(counted, answer, 0)
        answered = torch.cat((self.lead.expand(len(index), -1), self.drawn[index][:, :-1]), 1)
        hidden, mean = self._answered(observation, answered)
        log_probs = self._log_probs(hidden[:, -self.longest :])
        # log p = sum over tokens of log p(token | those before);  H = sum over tokens of -sum_v p_v log p_v
        log_prob = (chosen(log_probs, index) * counted).sum(-1)
        entropy = (-(log_probs.exp() * log_probs).sum(-1) * counted).sum(-1)
        log_prob, entropy = (sum_of_executed(self._terms(each), sample) for each in (log_prob, entropy))
        outputs = self._value_outputs(observation, mean)
        return Evaluation(log_prob, entropy, self.value_head.values(outputs), outputs)

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return, [N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the critic."""
        return self.critic(self.features(observation))

    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size]: encoded objects, or the prompt's mean hidden state and the robot's state."""
        beginning = self.lead[:, :1].expand(len(observation), -1)
        return self.critic.features(
            observation, lambda: self._summary(observation, self._answered(observation, beginning)[1])
        )

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Cross entropy of the tokens of `actions` [N, H, A], a mean over all tokens; one scalar.

        A token depends on all actions of its chunk: those after the last that is `valid` [N, H] repeat it, and the
        chunk has the mean weight of its actions.
        """
        target, weight = self._targets(self._held(actions, valid))
        beginning = self.lead[:, :1].expand(len(target), -1)
        hidden, _ = self._answered(observation, torch.cat((beginning, target[:, :-1]), 1))
        error = -chosen(self.model.logits(hidden).log_softmax(-1), target)
        # L = sum(w -log p(token | those before)) / sum(w)
        weight = weight * valid.float().mean(-1, keepdim=True)
        return (error * weight).sum() / weight.sum().clamp_min(1e-6)

    def normalised(self, actions: Tensor) -> Tensor:
        """Normalise actions [..., A] in robot units, so that the range of the demonstrations is [-1, 1]."""
        return (actions - self.action_mean) / self.action_std

    def to_robot(self, x: Tensor) -> Tensor:
        """Convert normalised actions [..., A] to robot units, clamped to the contract's limits."""
        return (x * self.action_std + self.action_mean).clamp(self.action_low, self.action_high)

    def _read(self, observation: TensorDict) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Pictures, and tokens of the prompts with the mask of real ones."""
        return self.inputs.pictures(observation, self.model.picture_size), self.inputs.tokens(observation)

    def _answered(self, observation: TensorDict, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [N, M, W] at the tokens of an `answer` [N, M], and the mean one [N, W] of what comes before."""
        pictures, (tokens, real) = self._read(observation)
        return self.model(pictures, tokens, real, answer)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [..., V + 1] of FAST's tokens and the end, from hidden states [..., W]."""
        weight = self.model.native.get_input_embeddings().weight[self.drawn].float()
        scores = hidden @ weight.T / self.config.temperature
        if len(self.pairs):
            # a token without a pair stands for nothing
            unused = nn.functional.pad(self.pairs[:, 0] < 0, (self.size - len(self.pairs), 1))
            scores = scores.masked_fill(unused, UNLIKELY)
        return scores.log_softmax(-1)

    def _targets(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, M] of the answer to each chunk [N, H, A] after its beginning, and where they are real, 1 or 0."""
        first, drawn = self.lead[0, 1:].tolist(), self.drawn.tolist()
        encoded = self.fast.encode(self.normalised(actions))
        longest = self.longest - 1 if self.config.weights else None  # the beginning counts
        rows = [[*first, *(drawn[each] for each in ids), drawn[-1], *self.after][:longest] for ids in encoded]
        length = max(map(len, rows))
        target = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=self.device)
        lengths = torch.tensor([[len(row)] for row in rows], device=self.device)
        return target, (torch.arange(length, device=self.device) < lengths).float()

    def _held(self, actions: Tensor, valid: Tensor) -> Tensor:
        """Chunks [N, H, A] in which actions that are not `valid` [N, H] repeat the last valid one before them."""
        place = torch.where(valid > 0, torch.arange(valid.shape[1], device=valid.device), 0).cummax(1).values
        return actions.gather(1, place.unsqueeze(-1).expand_as(actions))

    def _decoded(self, answer: Tensor) -> Tensor:
        """Normalised chunks [N, H, A] of answers [N, longest]."""
        rows = [[each for each in row if 0 <= each < self.size] for row in answer.tolist()]
        return self.fast.decode(rows, self.contract.horizon, self.actions).to(self.device)

    def _terms(self, total: Tensor) -> Tensor:
        """Contribution [N, K, 1] of each executed action to a sum [N] over tokens: the first has all of it."""
        return nn.functional.pad(total.view(-1, 1, 1), (0, 0, 0, self.contract.executed - 1))

    def _value_outputs(self, observation: TensorDict, mean: Tensor) -> Tensor:
        return self.critic(self.critic.features(observation, lambda: self._summary(observation, mean)))

    def _summary(self, observation: TensorDict, mean: Tensor) -> Tensor:
        """Inputs of a critic that reads hidden states, [N, W + state_size]."""
        state = self.inputs.state.standardised(observation, self.inputs.state.actor_keys)
        return torch.cat((mean, state), -1)
