"""Actions as successive choices among bins, from coarse to fine, each given those before: the policy of ARSQ.

Source: ARSQ (arXiv 2502.00288) with the discretisation of CQN (arXiv 2407.07787): at each level the interval of every
element is divided into bins, of which one is the interval of the next level. Differs from the papers:
    - actions of a chunk are chosen one after another, so that the log-probability of those that were executed does not
    depend on the others;
    - outputs are logarithms of probabilities; a learner of values scales them to advantages by its temperature;
    - the outermost points of the grid are the limits of the actions, not centres of intervals: a gripper closes;
    - one network for all choices: it reads the features, an embedding of the choice, and the centres of the intervals.
Letters: G bins, L levels, D choices of a chunk, W width of a layer, k <= H first actions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import Range
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.products import Dense
from embodied.policy import Decision, DiscretePolicy, Evaluation, inference, sum_of_executed, value_if_needed
from policies.actor_critic import ActorCritic, ActorCriticConfig, dense_layers

MAX_CHOICES = 128
"""Largest number of choices of a chunk: every choice is a pass of the network that waits for the one before."""


@dataclass
class CoarseToFineConfig(ActorCriticConfig):
    """Options of ActorCriticConfig; each element of an action is chosen in `levels` of `bins` each.

    With `autoregressive=false` the elements of an action do not depend on one another within a level, as in CQN.
    """

    levels: Annotated[int, Range(at_least=1, at_most=4)] = 3
    bins: Annotated[int, Range(at_least=2, at_most=16)] = 5
    autoregressive: bool = True

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range, and without layers."""
        super().__post_init__()
        if not self.hidden:
            raise UserError("expected at least one layer in policy.hidden for policy=coarse_to_fine, got []")

    def build(self, contract: Contract) -> CoarseToFinePolicy:
        """Build the policy for `contract`; only the critic reads privileged observations."""
        return CoarseToFinePolicy(contract, self)


class CoarseToFinePolicy(ActorCritic, DiscretePolicy):
    """Policy of actions on a grid of G^L points per element, within the contract's limits.

    `sample` has the chosen bins "code" [N, H, L, A], uint8. P = 1: the log-probability is that of all choices of the K
    executed actions. Entropies are those of each choice given the sampled ones before it, whose mean over samples is
    the entropy of the policy.

    Raises:
        UserError: if the action has no limits, the contract lacks observations of the encoder, or chunks have too many
            choices.
    """

    config: CoarseToFineConfig
    actor: ChoiceNetwork

    def __init__(self, contract: Contract, config: CoarseToFineConfig) -> None:
        super().__init__(contract, config, "policy=coarse_to_fine")
        # number of points of the grid in an interval before each level, and after the last
        self.points = [config.bins ** (config.levels - level) for level in range(config.levels + 1)]

    def new_actor(self) -> ChoiceNetwork:
        """Build the network of choices.

        Raises:
            UserError: for chunks with too many choices.
        """
        contract = self.contract
        elements = contract.action.shape[-1]
        choices = contract.horizon * self.config.levels * elements
        if choices > MAX_CHOICES:
            raise UserError(
                f"policy=coarse_to_fine makes {contract.horizon} actions x {self.config.levels} levels x {elements}"
                f" elements = {choices} choices one after another, at most {MAX_CHOICES}: predict shorter chunks, such"
                " as task.horizon=1 task.executed=1, or use fewer policy.levels"
            )
        sizes = self.config.hidden, contract.horizon * elements, choices, self.config.bins
        return ChoiceNetwork(self.encoder.out_features, *sizes)

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks [N, H, A]; deterministic ones have the most likely bin of every choice."""
        observation = self.encoder.read(observation)
        x, code, log_prob = self._draw(self.encoder(observation), deterministic, generator)
        sample = TensorDict({"code": code.to(torch.uint8)}, batch_size=[len(code)])
        value = value_if_needed(self, observation, deterministic)
        return Decision(self.to_robot(x), sample, self._terms(log_prob), value)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability and entropy of stored choices."""
        code = sample["code"].long()[:, : self.contract.executed]
        log_probs = self.log_probs(observation, code)
        # H = -sum_g p_g log p_g of each choice
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        terms = self._terms(chosen(log_probs, code)), self._terms(entropy)
        log_prob, entropy = (sum_of_executed(each, sample) for each in terms)
        outputs = self.value_outputs(observation)
        return Evaluation(log_prob, entropy, self.value_head.values(outputs), outputs)

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Cross entropy of the choices of `actions` [N, H, A] that are `valid` [N, H]; one scalar."""
        observation, actions = self.augmented(observation, actions)
        code = self.code(actions)
        # L = sum(valid * mean over choices of -log p(bin of a)) / sum(valid)
        error = -chosen(self.log_probs(observation, code), code).mean((-1, -2))
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def code(self, actions: Tensor) -> Tensor:
        """Choices [N, k, L, A], int64, whose actions are nearest to `actions` [N, k, A] in robot units."""
        share = (self.normalised(actions).clamp(-1.0, 1.0) + 1.0) / 2.0
        point = (share * (self.points[0] - 1)).round().long()
        # digits of the point's number in base G, the most significant first
        return torch.stack([point // size % self.config.bins for size in self.points[1:]], -2)

    def log_probs(self, observation: TensorDict, code: Tensor) -> Tensor:
        """Log-probabilities [N, k, L, A, G] of all bins, each given the choices of `code` [N, k, L, A] before it."""
        features = self.actor.of_features(self.encoder(self.encoder.read(observation)))
        intervals = self._intervals(code).flatten(-2).flatten(1, -2)
        logits = self.actor(features.unsqueeze(1), intervals, slice(intervals.shape[1]))
        return logits.view(*code.shape, -1).log_softmax(-1)

    def _draw(
        self, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised actions [N, H, A], their choices [N, H, L, A], int64, and log-probabilities [N, H, L, A]."""
        elements = self.contract.action.shape[-1]
        hidden = self.actor.of_features(features)
        intervals = features.new_zeros(len(features), self.contract.horizon, elements)
        codes: list[Tensor] = []
        scores: list[Tensor] = []
        for action in range(self.contract.horizon):
            first = torch.zeros_like(intervals[:, action], dtype=torch.int64)
            for size in self.points[1:]:
                for element in range(elements):
                    log_probs = self.actor(hidden, intervals.flatten(1), len(codes)).log_softmax(-1)
                    if deterministic:
                        bins = log_probs.argmax(-1)
                    else:
                        bins = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(-1)
                    codes.append(bins)
                    scores.append(chosen(log_probs, bins))
                    first[:, element] += bins * size
                    if self.config.autoregressive:
                        intervals[:, action, element] = self._centre(first[:, element], size)
                intervals[:, action] = self._centre(first, size)
        shape = self.contract.horizon, self.config.levels, elements
        # the last intervals are points
        return intervals, *(torch.stack(each, -1).unflatten(-1, shape) for each in (codes, scores))

    def _intervals(self, code: Tensor) -> Tensor:
        """Centres of the intervals of all elements before each choice of `code` [N, k, L, A], [N, k, L, A, H, A].

        They are 0, the centre of all limits, where nothing is chosen yet.
        """
        rows, count, levels, elements = code.shape
        sizes = torch.tensor(self.points, device=code.device).unsqueeze(-1)
        # number of the first point in the interval after l levels: sum_i<l digit_i G^(L - 1 - i)
        first = nn.functional.pad((code * sizes[1:]).cumsum(-2), (0, 0, 1, 0))
        centres = self._centre(first, sizes)
        # [N, k, L, 1, A] before and after the level of a choice
        before, after = centres[:, :, :-1].unsqueeze(-2), centres[:, :, 1:].unsqueeze(-2)
        is_chosen = torch.ones(elements, elements, dtype=torch.bool, device=code.device).tril(-1)
        own = torch.where(is_chosen & self.config.autoregressive, after, before)
        intervals = centres.new_zeros(rows, count, levels, elements, self.contract.horizon, elements)
        for action in range(count):
            intervals[:, action, :, :, :action] = centres[:, None, None, :action, -1]
            intervals[:, action, :, :, action] = own[:, action]
        return intervals

    def _centre(self, first: Tensor, size: Tensor | int) -> Tensor:
        """Centres, normalised, of intervals of `size` points from the point number `first` on."""
        return (2 * first + size - 1) / (self.points[0] - 1) - 1.0

    def _terms(self, choices: Tensor) -> Tensor:
        """Sums [N, K, 1] over the choices of each executed action, from choices [N, H or K, L, A]."""
        return choices[:, : self.contract.executed].sum((-1, -2)).unsqueeze(-1)


class ChoiceNetwork(nn.Module):
    """Network from features, the centres of intervals and the number of a choice to logits of its `bins`.

    All bins are equally likely at first.
    """

    def __init__(self, features: int, hidden: list[int], elements: int, choices: int, bins: int) -> None:
        super().__init__()
        self.of_features = Dense(features, hidden[0])
        self.of_intervals = nn.Linear(elements, hidden[0], bias=False)
        self.of_choice = nn.Parameter(torch.randn(choices, hidden[0]))
        self.layers = dense_layers([*hidden, bins])
        last = self.layers[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, features: Tensor, intervals: Tensor, choices: int | slice) -> Tensor:
        """Logits [..., G] from `of_features` [..., W], `intervals` [..., H * A] and the numbers of `choices`."""
        # one dense layer of all three, with one-hot choices
        x = features + self.of_intervals(intervals) + self.of_choice[choices]
        return self.layers(x.relu().flatten(0, -2)).unflatten(0, x.shape[:-1])


def chosen(log_probs: Tensor, code: Tensor) -> Tensor:
    """Select the entries `code` [...] of log-probabilities [..., G]."""
    return log_probs.gather(-1, code.unsqueeze(-1)).squeeze(-1)
