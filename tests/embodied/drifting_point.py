"""A point that drifts sideways: a goal that people reach by steering, and a classifier by half of what they do."""

from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.environments.engine import EpisodeEngine, Outcome

DRIFT = 0.1
LIMIT = torch.tensor([0.2, 0.12])
CONTRACT = Contract(
    {"position": TensorSpec((2,), unit="m", names=("x", "y"))},
    TensorSpec((2,), unit="m", names=("dx", "dy"), low=(-0.2, -0.12), high=(0.2, 0.12)),
    0.1,
)


def moved(position: Tensor, action: Tensor) -> Tensor:
    """Position [..., 2] after one step; sideways an action is hardly stronger than the drift."""
    return position + action.clamp(-LIMIT, LIMIT) + torch.tensor([0.0, DRIFT])


def reached(position: Tensor) -> Tensor:
    """Whether positions [..., 2] are in the goal, beyond x = 0.9 and within |y| < 0.15."""
    return (position[..., 0] > 0.9) & (position[..., 1].abs() < 0.15)


class DriftingPoint(EpisodeEngine):
    """N points that begin around the origin."""

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        super().__init__(CONTRACT, num_envs, 20, task_names=("goal",), seed=seed)
        self.position = torch.zeros(num_envs, 2)

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        self.position = self.position.clone()
        self.position[ids] = torch.stack((0.01 * (starts % 10), 0.01 * (starts % 7) - 0.03), 1).float()

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        runs = remaining_steps > 0
        self.position = torch.where(runs[:, None], moved(self.position, actions[:, 0]), self.position)
        success = runs & reached(self.position)
        return Outcome(success.float()[:, None], runs[:, None], success, success)

    def observe(self) -> TensorDict:
        return TensorDict({"position": self.position.clone()}, [self.num_envs])


def write_demonstrations(folder: Path, count: int = 60) -> Path:
    """Episodes of a person who steers to the goal, somewhere between its sides; every third stops early and fails."""
    generator = torch.Generator().manual_seed(0)
    with EpisodeWriter(folder, CONTRACT) as writer:
        for number in range(count):
            fails = number % 3 == 0
            position = 0.05 * torch.randn(2, generator=generator)
            aside = 0.24 * torch.rand((), generator=generator) - 0.12
            positions, actions = [position], []
            while not reached(positions[-1]) and len(actions) < 20:
                forward = 0.0 if fails and positions[-1][0] > 0.5 else 0.08
                velocity = torch.stack((torch.tensor(forward), -DRIFT - 0.5 * (positions[-1][1] - aside)))
                actions.append((velocity + 0.01 * torch.randn(2, generator=generator)).clamp(-LIMIT, LIMIT))
                positions.append(moved(positions[-1], actions[-1]))
            writer.add(episode(torch.stack(positions), torch.stack(actions)))
    return folder


def episode(positions: Tensor, actions: Tensor, success: bool | None = None) -> Episodes:
    """Episode of `positions` [L + 1, 2]; its success is the goal's unless it is passed."""
    observation = TensorDict({"position": positions}, [len(positions)])
    outcome = bool(reached(positions[-1])) if success is None else success
    return Episodes.of(observation[:-1], actions, success=outcome, final_observation=observation[-1])
