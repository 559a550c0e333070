"""A small policy that ranks candidates, for tests of the learner."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.policy import Decision, RankingPolicy
from policies.mlp import MLPConfig, MLPPolicy

CANDIDATES = 8


@dataclass
class RankingMLPConfig(MLPConfig):
    def build(self, contract: Contract) -> "RankingMLP":
        return RankingMLP(contract, self)


class RankingMLP(MLPPolicy, RankingPolicy):
    """Gaussian candidates, ranked by a network on the observation and the executed actions."""

    def __init__(self, contract: Contract, config: MLPConfig) -> None:
        super().__init__(contract, config)
        inputs = len(self.mean) + contract.executed * contract.action.shape[-1]
        self.ranker = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("ranks", torch.zeros((), dtype=torch.bool))

    def start_ranking(self) -> None:
        self.ranks.fill_(True)

    def advantage_parameters(self) -> list[nn.Parameter]:
        return list(self.ranker.parameters())

    def advantage(self, observation: TensorDict, actions: Tensor) -> Tensor:
        executed = ((actions - self.centre) / self.half_range)[:, : self.contract.executed]
        return self.ranker(torch.cat((self._inputs(observation), executed.flatten(1)), -1)).squeeze(-1)

    def advantage_loss(self, observation: TensorDict, actions: Tensor, target: Tensor) -> Tensor:
        return (self.advantage(observation, actions) - target).square().mean()

    @torch.no_grad()
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        if not self.ranks or deterministic:
            return super().act(observation, deterministic=deterministic, generator=generator)
        count = len(observation)
        rows = torch.arange(count).repeat_interleave(CANDIDATES)
        every = super().act(observation[rows], generator=generator)
        best = self.advantage(observation[rows], every.actions).view(count, CANDIDATES).argmax(1)
        best = best + torch.arange(0, len(rows), CANDIDATES)
        assert every.value is not None
        return Decision(every.actions[best], every.sample[best], every.log_prob_terms[best], every.value[best])
