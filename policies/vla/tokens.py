"""Actions as tokens of a vision-language model, all of a chunk at once: OpenVLA-OFT (arXiv 2502.19645).

OpenVLA's own weights (arXiv 2406.09246) write an action's elements one after the other. Bins and their statistics are
OpenVLA's, the tempered likelihood is that of SimpleVLA-RL (arXiv 2509.09674). Differs from OpenVLA-OFT: without
published weights the model is a stock PaliGemma instead of Prismatic, the empty token of each element is learned, bins
are wider, and all elements are normalised, the gripper's too; only the vocabulary's bins are scored; the critic reads
the robot's state and the mean hidden state of the elements, or that of the first of those written in turn.
Letters as in `policies.vla.openvla.parallel`; K executed actions, P parts of a log-probability, B bins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import NonNegativeInt, PositiveFloat, PositiveInt, Range
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.value_head import ValueHead
from embodied.policy import Decision, Evaluation, PolicyConfig, inference, needs_value, sum_of_executed
from embodied.seeding import fixed_noise
from policies.vla import adapters
from policies.vla.computing import Computing, layers, prepare
from policies.vla.critic import Critic, Reads
from policies.vla.inputs import Inputs, quantile
from policies.vla.openvla.model import OpenVLAModel, PromptedInputs, PromptTokenizer
from policies.vla.openvla.parallel import BINS, ParallelModel, Regression, untrained
from policies.vla.openvla.weights import Published, action_range, fill, published, state_range, two_valued
from policies.vla.sizes import Size

log = logging.getLogger("embodied")
QUANTILES = 0.01, 0.99
"""Shares of demonstrated actions below -1 and up to 1 when normalised."""
COARSE = 32
"""Number of bins without published weights: with 256, few demonstrations would have to train each separately."""
NARROWEST = 0.2
"""Smallest range of normalised actions, as a share of the limits' range, so that unseen actions stay possible."""


class Head(Enum):
    """Readout of a chunk from the hidden states: BINS (a distribution over values), or L1 regression.

    AUTO is L1 if published weights have such a head, otherwise BINS.
    """

    AUTO = "auto"
    BINS = "bins"
    L1 = "l1"


class Reading(Enum):
    """Choice of deterministic chunks.

    It is the most likely bin of each element (MODE), the MEDIAN, also within its bin, or a bin DRAWN by noise that
    depends on the observation alone, as in generative policies. AUTO is MODE of published weights, as in OpenVLA.
    Little data leaves wide distributions, whose most likely bin is of little use: from scratch AUTO is MEDIAN.
    Reinforcement learning improves drawn chunks, and may change neither mode nor median.
    """

    AUTO = "auto"
    MODE = "mode"
    MEDIAN = "median"
    DRAWN = "drawn"


class Decoding(Enum):
    """Decoding of a chunk's elements: all at once (PARALLEL), or one after the other (AUTOREGRESSIVE).

    AUTO is as the published weights have learned, by the files beside them, and PARALLEL where nothing says so.
    """

    AUTO = "auto"
    PARALLEL = "parallel"
    AUTOREGRESSIVE = "autoregressive"


class Part(Enum):
    """Unit of a part of the log-probability, which PPO clips by itself: a TOKEN, an ACTION, or the CHUNK."""

    TOKEN = "token"
    ACTION = "action"
    CHUNK = "chunk"


@dataclass
class TokensConfig(Computing, PolicyConfig):
    """Size, head and critic of a TokensPolicy.

    Published `weights` (a folder, or a name on the hub, of OpenVLA or OpenVLA-OFT) define their own size, and the
    statistics of the data set `unnorm_key`, which may be left out if it is the only one; unnorm_key=demonstrations
    uses those of the demonstrations instead. With a `lora_rank` low-rank adapters are trained on frozen
    `weights` (`policies.vla.adapters`); checkpoints then refer to the weights, and contain no copy.

    An element is one of `bins` values: OpenVLA's 256 of published weights, 32 from scratch (None). Sampled tokens are
    drawn and scored at `temperature`, deterministic ones read by `reading`. Published weights decode by `decoding`. A
    `part` of the log-probability is the sum over its tokens. The critic has layers of width `hidden` and a
    head of `values`.

    `precision`, `gradient_checkpointing` and `compile` configure the computation (`policies.vla.computing`).
    """

    size: Size = Size.TINY
    weights: str | None = None
    unnorm_key: str | None = None
    lora_rank: NonNegativeInt = 0
    head: Head = Head.AUTO
    bins: Annotated[int, Range(at_least=2, at_most=BINS)] | None = None
    temperature: PositiveFloat = 1.0
    reading: Reading = Reading.AUTO
    decoding: Decoding = Decoding.AUTO
    part: Part = Part.TOKEN
    critic: Reads = Reads.AUTO
    hidden: PositiveInt = 256
    values: ValueHead = field(default_factory=ValueHead)

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that exclude each other."""
        super().__post_init__()
        if self.lora_rank and not self.weights:
            raise UserError(f"lora_rank={self.lora_rank} adapts published weights: name them in policy.weights")
        if self.weights and self.bins not in (None, BINS):
            raise UserError(f"policy.weights have {BINS} bins, and policy.bins={self.bins}: leave one of them out")
        if self.decoding is Decoding.AUTOREGRESSIVE and not self.weights:
            raise UserError("policy.decoding=autoregressive is that of published weights: name them in policy.weights")

    def build(self, contract: Contract) -> TokensPolicy:
        """Build the policy for `contract`."""
        return TokensPolicy(contract, self)


class TokensPolicy(adapters.AdaptablePolicy):
    """Policy that predicts chunks of H actions, a token of B for each element, in one pass of a vision-language model.

    Bins divide [-1, 1], which is the range between the 1% and 99% quantiles of demonstrated actions. Elements are
    independent given the observation, or written one after the other and given those before: the log-probability of a
    chunk is a sum over K * A tokens.

    Raises:
        UserError: if the action has no limits, the contract has no pictures or state that actors may read, or published
            weights are of another size of state or action.
    """

    action_from: Tensor
    action_to: Tensor
    action_low: Tensor
    action_high: Tensor
    two_valued: Tensor

    def __init__(self, contract: Contract, config: TokensConfig) -> None:
        super().__init__()
        if not contract.action.low:
            raise UserError("policy=tokens needs action limits; set low and high in the action spec")
        self.contract = contract
        self.config = config
        self.actions = contract.action.shape[-1]
        checkpoint = published(config.weights, config.unnorm_key) if config.weights else None
        self.bins = config.bins or (BINS if checkpoint else COARSE)
        self.autoregressive = config.decoding is Decoding.AUTOREGRESSIVE
        if checkpoint and config.decoding is Decoding.AUTO:
            self.autoregressive = checkpoint.autoregressive is True
            if checkpoint.autoregressive is None:
                log.info(
                    f"no file of policy.weights={config.weights} says how they decode: at once, as OpenVLA-OFT; "
                    "OpenVLA's own need policy.decoding=autoregressive"
                )
        self.inputs = (PromptedInputs if checkpoint else Inputs)(contract, "policy=tokens")
        self.model = self._model(checkpoint)
        self.model.computing = config
        prepare(self.model, config)
        regresses = config.head is Head.L1 or (
            config.head is Head.AUTO and checkpoint is not None and checkpoint.head is not None
        )
        if regresses and self.autoregressive:
            raise UserError("policy.head=l1 regresses a chunk at once; use policy.decoding=parallel")
        self.regression = Regression(self.model.width, self.actions) if regresses else None
        self.value_head = config.values
        inputs = self.model.width + self.inputs.state_size
        self.critic = Critic(contract, config.critic, inputs, config.hidden, self.value_head.outputs)
        self.feature_size = self.critic.feature_size
        low = torch.tensor(contract.action.low)
        high = torch.tensor(contract.action.high)
        self.register_buffer("action_low", low)
        self.register_buffer("action_high", high)
        self.register_buffer("action_from", low.clone())
        self.register_buffer("action_to", high.clone())
        self.register_buffer("two_valued", torch.zeros(self.actions, dtype=torch.bool), persistent=False)
        self.brought_actions = self.brought_state = False
        self.lacks_statistics = ""
        if checkpoint:
            self._take(checkpoint)

    @property
    def actor_keys(self) -> list[str]:
        """Names of the observations that chunks are generated from."""
        return self.inputs.keys

    @property
    def scores(self) -> bool:
        """Whether chunks have a likelihood."""
        return self.regression is None

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return list(self.critic.parameters())

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters of the vision-language model that are trained, and of the regression."""
        parts = [self.model, *([self.regression] if self.regression else [])]
        return [weight for part in parts for weight in part.parameters() if weight.requires_grad]

    def blocks(self) -> list[nn.Module]:
        """Layers of all transformers."""
        return layers(self.model)

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions [..., A], unless the weights have some."""
        self.critic.fit(observation)
        if not self.brought_state:
            self.inputs.fit(observation)
        if self.brought_actions:
            return
        flat = actions.reshape(-1, actions.shape[-1])
        lower, upper = (quantile(flat, share) for share in QUANTILES)
        missing = (NARROWEST * (self.action_high - self.action_low) - (upper - lower)).clamp_min(0.0) / 2
        # narrow ranges are widened on both sides to the smallest one
        self.action_from.copy_(lower - missing)
        self.action_to.copy_(upper + missing)

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Draw chunks; the sample has the bins of their elements [N, H, A], uint8 (with L1 regression, nothing)."""
        how = self._reading if deterministic else None
        noise = None
        if how is Reading.DRAWN:
            shape = self.contract.horizon, self.actions
            noise = fixed_noise(self.inputs.identity(observation), shape).to(self.device)

        def pick(log_probs: Tensor, noise: Tensor | None) -> Tensor:
            return self._picked(log_probs, how, noise, generator)

        bins = None
        if self.autoregressive:
            hidden, bins = self._written(observation, noise, pick)
        else:
            hidden = self._read(observation)
        has_value = needs_value(self, observation, deterministic)
        value = self.value_head.values(self._value_outputs(observation, hidden)) if has_value else None
        if self.regression:
            no_sample = TensorDict({}, batch_size=[len(hidden)], device=self.device)
            return Decision(
                self.to_robot(self.regression(hidden)),
                no_sample,
                hidden.new_zeros(len(hidden), self.contract.executed, 1),
                value,
            )
        log_probs = self._log_probs(hidden)
        bins = pick(log_probs, noise) if bins is None else bins
        x = centres(bins, self.bins)
        if how is Reading.MEDIAN:
            x = x + self._within(log_probs, bins)
        sample = TensorDict({"bins": bins.to(torch.uint8)}, batch_size=[len(hidden)])
        return Decision(self.to_robot(x), sample, self._terms(chosen(log_probs, bins)), value)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability and entropy of stored bins, at the temperature at which they were drawn.

        Raises:
            UserError: with L1 regression, whose chunks have no likelihood.
        """
        if self.regression:
            raise UserError("head=l1 has no likelihood; use policy.head=bins")
        bins = sample["bins"].long()
        hidden = self._read(observation, bins)
        log_probs = self._log_probs(hidden)
        # H = -sum_b p_b log p_b
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        terms = self._terms(chosen(log_probs, bins)), self._terms(entropy)
        log_prob, entropy = (sum_of_executed(each, sample) for each in terms)
        outputs = self._value_outputs(observation, hidden)
        return Evaluation(log_prob, entropy, self.value_head.values(outputs), outputs)

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return, [N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the critic."""
        return self.critic(self.features(observation))

    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size]: encoded objects, or the elements' mean hidden state and the robot's state."""
        return self.critic.features(observation, lambda: self._summary(observation, self._read(observation)))

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Cross entropy of tokens, or absolute error, of `actions` [N, H, A] that are `valid` [N, H]; one scalar."""
        target = self.normalised(actions)
        bins = bins_of(target, self.bins)
        hidden = self._read(observation, bins)
        if self.regression:
            error = (self.regression(hidden) - target).abs()
        else:
            # L = sum(valid * mean over elements of -log p(bin of a)) / sum(valid)
            error = -chosen(self.model.logits(hidden).log_softmax(-1), bins)
        return (error.mean(-1) * valid).sum() / valid.sum().clamp_min(1)

    def normalised(self, actions: Tensor) -> Tensor:
        """Normalise actions [..., A] in robot units, so that the range of the demonstrations is [-1, 1].

        Elements without a range, of published statistics, are 0, as in OpenVLA's training.
        """
        width = self.action_to - self.action_from
        x = 2.0 * (actions - self.action_from) / torch.where(width == 0.0, 1.0, width) - 1.0
        return torch.where(width == 0.0, 0.0, x)

    def to_robot(self, x: Tensor) -> Tensor:
        """Convert normalised actions [..., A] to robot units, clamped to the contract's limits.

        Of the gripper of published weights only the sign is left, as in their evaluation.
        """
        actions = self.action_from + (x + 1.0) / 2.0 * (self.action_to - self.action_from)
        actions = torch.where(self.two_valued, actions.sign(), actions)
        return actions.clamp(self.action_low, self.action_high)

    def _model(self, pretrained: Published | None) -> ParallelModel | OpenVLAModel:
        state = self.inputs.state_size
        elements = self.contract.horizon * self.actions
        if not pretrained:
            return ParallelModel(untrained(self.config.size, self.bins), state, elements, self.bins)
        model = OpenVLAModel(
            pretrained.native,
            state if pretrained.proprio else 0,
            elements,
            pretrained.means,
            pretrained.deviations,
            autoregressive=self.autoregressive,
            first_bin=pretrained.first_bin,
        )
        if pretrained.proprio and model.state:
            self._check_size("a state", pretrained.proprio["fc1.weight"].shape[1], state)
            fill(model.state, pretrained.proprio, "the proprio_projector")
        if self.config.lora_rank:
            self.register_buffer("base", adapters.fingerprint(model.native))
            adapters.adapt(model, self.config.lora_rank)
        return model

    def _check_size(self, what: str, size: int, own: int) -> None:
        if size != own:
            raise UserError(
                f"policy.weights={self.config.weights} take {what} of {size} elements, the task's has {own}"
            )

    @torch.no_grad()
    def _take(self, pretrained: Published) -> None:
        """Use tokenizer, regression and statistics of published weights."""
        self.inputs.tokenizer = PromptTokenizer(
            pretrained.tokenizer, pretrained.native.language_model.config.vocab_size
        )
        if self.regression and pretrained.head:
            fill(self.regression, pretrained.head, "the action_head")
        if not pretrained.statistics:
            self.lacks_statistics = f"policy.unnorm_key={self.config.unnorm_key} leaves the statistics of weights out"
            return
        self._check_size("an action", len(pretrained.statistics["action"]["q01"]), self.actions)
        begin, end = action_range(pretrained.statistics["action"], self.contract.action.low)
        self.action_from.copy_(torch.tensor(begin))
        self.action_to.copy_(torch.tensor(end))
        self.two_valued.copy_(torch.tensor(two_valued(pretrained.statistics["action"], self.contract.action.low)))
        self.brought_actions = True
        if isinstance(self.model, OpenVLAModel) and self.model.state and isinstance(self.inputs, PromptedInputs):
            self._check_size("a state", len(pretrained.statistics["proprio"]["q01"]), self.inputs.state_size)
            self.inputs.take(*map(torch.tensor, state_range(pretrained.statistics["proprio"])))
            self.brought_state = True

    def _read(self, observation: TensorDict, bins: Tensor | None = None) -> Tensor:
        """Hidden states [N, H, A, W] of the elements.

        Elements that are written one after the other are those of `bins` [N, H, A]; None: the first alone.
        """
        inputs = self._inputs(observation)
        if not self.autoregressive:
            return self.model(*inputs).unflatten(1, (self.contract.horizon, self.actions))
        before = torch.zeros_like(inputs[0][:, :0]) if bins is None else bins.flatten(1)[:, :-1]
        hidden = self.model(*inputs, before)
        return hidden.unsqueeze(1) if bins is None else hidden.unflatten(1, bins.shape[1:])

    @torch.no_grad()
    def _written(
        self, observation: TensorDict, noise: Tensor | None, pick: Callable[[Tensor, Tensor | None], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and bins [N, H, A] of elements that `pick` chooses one after the other."""
        assert isinstance(self.model, OpenVLAModel)
        flat = None if noise is None else noise.flatten(1)

        def choose(hidden: Tensor, element: int) -> Tensor:
            return pick(self._log_probs(hidden), None if flat is None else flat[:, element])

        hidden, bins = self.model.write(*self._inputs(observation), choose)
        shape = self.contract.horizon, self.actions
        return hidden.unflatten(1, shape), bins.unflatten(1, shape)

    def _inputs(self, observation: TensorDict) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Tokens of the prompt, which of them are real, pictures, and the state, if the model reads it."""
        state = self.inputs.standardised_state(observation) if self.model.state else None
        pictures = self.inputs.pictures(observation, self.model.picture_size)
        return *self.inputs.tokens(observation), pictures, state

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the bins [N, H, A, B]."""
        return (self.model.logits(hidden) / self.config.temperature).log_softmax(-1)

    @property
    def _reading(self) -> Reading:
        """How deterministic chunks are read."""
        if self.config.reading is Reading.AUTO:
            return Reading.MODE if self.config.weights else Reading.MEDIAN
        return self.config.reading

    def _picked(
        self, log_probs: Tensor, how: Reading | None, noise: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Bins [...] of `log_probs` [..., B], read as `how`; None: drawn by `generator`."""
        if how is None:
            draws = torch.multinomial(log_probs.exp().flatten(0, -2), 1, generator=generator)
            return draws.view(log_probs.shape[:-1])
        if how is Reading.MODE:
            return log_probs.argmax(-1)
        # the median, or inverse transform sampling with a uniform number per element
        share = 0.5 if noise is None else torch.special.ndtr(noise).unsqueeze(-1)
        cumulative = log_probs.exp().cumsum(-1)  # from the largest value downwards
        return (cumulative < share).sum(-1).clamp_max(self.bins - 1)

    def _within(self, log_probs: Tensor, bins: Tensor) -> Tensor:
        """Distance of the median from the centre of its bin, of normalised actions."""
        cumulative = log_probs.exp().cumsum(-1)
        share = (chosen(cumulative, bins) - 0.5) / chosen(log_probs, bins).exp()  # share of the bin that is smaller
        return (2.0 * share.clamp(0.0, 1.0) - 1.0) / (self.bins - 1)

    def _value_outputs(self, observation: TensorDict, hidden: Tensor) -> Tensor:
        return self.critic(self.critic.features(observation, lambda: self._summary(observation, hidden)))

    def _summary(self, observation: TensorDict, hidden: Tensor) -> Tensor:
        """Inputs of a critic that reads hidden states, [N, W + state_size]."""
        # elements that are written depend on those before, the first on the observation alone
        mean = hidden[:, 0, 0] if self.autoregressive else hidden.mean((1, 2))
        return torch.cat((mean, self.inputs.standardised_state(observation)), -1)

    def _terms(self, elementwise: Tensor) -> Tensor:
        """Contribution [N, K, P] of each executed action to each part, from elements [N, H, A].

        With a part for each token, an action contributes only to the parts of its own tokens.
        """
        executed = elementwise[:, : self.contract.executed]
        if self.config.part is not Part.TOKEN:
            executed = executed.sum(-1, keepdim=True)
        if self.config.part is Part.CHUNK:
            return executed
        # [N, K, A] -> [N, K, K * A]: action k contributes to its own A parts only
        return torch.diag_embed(executed.transpose(1, 2)).permute(0, 2, 3, 1).flatten(2)


def bins_of(x: Tensor, bins: int) -> Tensor:
    """Bins of normalised actions, int64 from `bins` - 1 at -1 to 1 below 1, and 0 at 1 and above: OpenVLA's order.

    OpenVLA counts edges from the vocabulary's end; 256 edges divide [-1, 1] into 255 intervals.
    """
    return bins - 1 - ((x.clamp(-1.0, 1.0) + 1.0) / 2.0 * (bins - 1)).long()


def centres(chosen: Tensor, bins: int) -> Tensor:
    """Normalised actions at the centres of the `chosen` bins of `bins`; bins 0 and 1 are the same interval."""
    interval = (bins - 1 - chosen).clamp_max(bins - 2)
    return 2.0 * (interval + 0.5) / (bins - 1) - 1.0


def chosen(log_probs: Tensor, bins: Tensor) -> Tensor:
    """Select the entries `bins` [...] of log-probabilities [..., B]."""
    return log_probs.gather(-1, bins.unsqueeze(-1)).squeeze(-1)
