"""Recorded episodes of Reach, of which few come to the goal quickly."""

import torch
from tensordict import TensorDict

from embodied.data.episodes import Episodes
from embodied.environment import Transition
from tests.embodied.reach import Reach

LIMIT = 7


def recorded(count: int = 60, seed: int = 0, *, final: bool = True, mirrored: bool = False) -> Episodes:
    """Episodes of random actions towards the goal or away from it, with the reward of Reach, and their endings.

    If `mirrored`, actions have the opposite effect in task 1, as in MirroredReach.
    """
    generator = torch.Generator().manual_seed(seed)
    episodes = []
    for number in range(count):
        task = float(number // 2 % 2)
        position = (1.0 - 2.0 * (number % 2)) * (0.3 + 0.05 * (number % 11))
        positions, actions = [position], []
        while abs(position) >= 0.1 and len(actions) < LIMIT:
            actions.append(0.5 * float(torch.rand((), generator=generator)) - 0.25)
            position += -actions[-1] if mirrored and task == 1.0 else actions[-1]
            positions.append(position)
        observations = TensorDict(
            {"position": torch.tensor(positions)[:, None], "task": torch.full((len(positions), 1), task)}
        )
        observations = observations.auto_batch_size_(1)
        reached = abs(position) < 0.1
        reward = torch.zeros(len(actions))
        reward[-1] = float(reached)
        episode = Episodes.of(
            observations[:-1],
            torch.tensor(actions)[:, None],
            success=reached,
            reward=reward,
            final_observation=observations[-1] if final else None,
        )
        episodes.append(episode)
    return Episodes.join(episodes)


class MirroredReach(Reach):
    """Reach with the opposite effect of actions in task 1: a real system of which the simulator is wrong there."""

    def step(self, actions: torch.Tensor) -> Transition:
        return super().step(torch.where((self.task_index == 1)[:, None, None], -actions, actions))
