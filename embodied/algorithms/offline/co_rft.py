"""CO-RFT (arXiv 2508.02219): offline values of chunks that learn from every prefix of a chunk.

A critic values the first h actions of a chunk, for each h up to the number K of executed ones; all learn from the value
of the whole chunk that follows. A further term lowers values of the policy's chunks, not below the returns of the data
(Cal-QL, arXiv 2303.05479). The policy is that of FQL: a behaviour imitates, a one-step actor stays near it and
maximises the value of whole chunks.

Differs from the paper:
    - prefixes are marked inputs of the same dense critics, instead of outputs of a causal transformer;
    - the one-step actor maximises the value, not the policy that imitates; it reads frozen features of its encoder;
    - the conservative term compares one chunk of the actor with that of the data, without a logarithm of a sum;
    - prefixes past a time limit, or that end between observations, are masked; past a termination nothing follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.qc import ranking_policy
from embodied.algorithms.off_policy.residual import with_small_actor
from embodied.algorithms.offline.fql import FQLConfig, OfflineQC
from embodied.algorithms.passes import Passes
from embodied.configuration import NonNegativeFloat
from embodied.contract import Contract, TensorSpec
from embodied.data.transitions import Transitions
from embodied.policy import SteeredPolicy, Steering, TrainablePolicy


@dataclass
class CoRFTConfig(FQLConfig):
    """FQLConfig of critics of prefixes; `conservatism` is the weight of the term that lowers values."""

    conservatism: NonNegativeFloat = 0.1

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> CoRFT:
        """Build the learner of `policy`; `generator` draws minibatches and noise.

        Raises:
            UserError: for a policy without a one-step actor, or actions without limits.
        """
        return CoRFT(with_small_actor(policy, Steering.ONE_STEP, "offline=co_rft"), self, generator)


class CoRFT(OfflineQC):
    """Learner of the values of prefixes, of the behaviour, and of the one-step actor."""

    q: PrefixValues

    def __init__(self, policy: SteeredPolicy, config: CoRFTConfig, generator: torch.Generator) -> None:
        q = PrefixValues(policy, config, config.value_learning_rate)
        super().__init__(ranking_policy(policy, "offline=co_rft"), config, generator, q)
        self.steered = policy
        self.conservatism = config.conservatism

    def _batch(self, transitions: Transitions) -> TensorDict:
        """Minibatch of `transitions`, with those of all prefixes."""
        rows = transitions.draw(self.config.minibatch, self.generator)
        batch = transitions.take(rows, self.policy.contract.horizon)
        return batch.set("prefixes", transitions.prefixes(rows))

    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y_h = R_h + carry_h * mean_i Q_i'(s_(t+h), a') of the known prefixes, by row, then length."""
        prefixes = batch["prefixes"]
        return super()._target(prefixes[prefixes["is_known"]])

    def _update_critics(self, batch: TensorDict, target: Tensor) -> dict[str, Tensor]:
        penalty = self._penalty(batch)
        metrics = self.q.step(batch, target, self.gradient_steps, self.conservatism * penalty)
        return metrics | {"conservative_gap": penalty.detach() / self.q.critics.config.ensemble}

    def _penalty(self, batch: TensorDict) -> Tensor:
        """Sum over the critics of the mean of max(Q(s, mu(s, z)), G) - Q(s, a), for chunks with a known end."""
        rows = batch[batch["prefixes", "is_known"][:, -1]]
        observation = rows["observation"]
        noise = torch.randn((len(rows), *self.steered.steering_noise_shape), generator=self.generator)
        with torch.no_grad():
            actions, *_ = self.steered.steered(observation, noise.to(self.policy.device))
        # Cal-QL: max(Q(s, a), G), G the return of the episode
        own = self.q.values(observation, self.q.scaled(actions)).maximum(rows["returns"])
        gap = own - self.q.values(observation, self.q.scaled(rows["actions"]))
        return gap.sum() / max(1, len(rows))  # a batch may have no such chunk

    def values(self) -> None:
        """No critics to go on with: those of prefixes have further inputs."""


class PrefixValues(ActionValues):
    """Critics of the prefixes of executed chunks.

    A further element of each action is 1 in the prefix; after the prefix all elements are 0.
    """

    def __init__(self, policy: TrainablePolicy, config: FQLConfig, learning_rate: float) -> None:
        super().__init__(policy, config, learning_rate, contract=_marked(policy.contract))

    def scaled(self, actions: Tensor) -> Tensor:
        """Executed actions [B, K, A + 1] of whole chunks [B, H, A], scaled to [-1, 1], with their marks."""
        return super().scaled(nn.functional.pad(actions, (0, 1), value=1.0))

    def loss(self, batch: TensorDict, target: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Sum over the critics of the mean loss of the known prefixes from `target`, one scalar."""
        is_known = batch["prefixes", "is_known"]
        lengths = torch.arange(self.executed, device=is_known.device)
        # is_in[h, k]: the prefix of length h + 1 has action k
        is_in = lengths <= lengths.unsqueeze(1)
        chunks = self.scaled(batch["actions"]).unsqueeze(1) * is_in.unsqueeze(-1)
        rows, _ = is_known.nonzero(as_tuple=True)
        features = self.policy.features(batch["observation"])
        weight = weight[rows] if isinstance(weight, Tensor) else weight
        # L = sum_i mean_(b, h) w_b (Q_i(s_b, a_b[:h]) - y_bh)^2
        return self.critics.loss(torch.cat((features[rows], chunks[is_known].flatten(1)), -1), target, weight)

    def stored_bytes(self, passes: Passes, minibatch: int) -> int:
        """Bytes that the backward pass of all prefixes of a `minibatch` stores."""
        return super().stored_bytes(passes, minibatch * self.executed)


def _marked(contract: Contract) -> Contract:
    """The `contract` with a further element of actions, within -1 and 1."""
    low, high = (*contract.action.low, -1.0), (*contract.action.high, 1.0)
    return replace(contract, action=TensorSpec((len(low),), low=low, high=high))
