"""Causes of failed episodes, from the objects that the hand has held, read from observations once a chunk.

They are therefore the same with every physics library, and cost hardly any time. Letters in shape comments: N
environments, M objects (the largest number of any task).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import Scene

LIFTED_M = 0.02
"""Height above its initial height from which on an object can count as held."""
NEAR_M = 0.2
"""Largest distance of a held object's middle from the grip point: that of a pan held by its handle."""
REASONS = ("not placed", "dropped", "wrong object", "no grasp")
NONE = -1
STATE = ("start_m", "grasped", "reason")


class Handling:
    """Objects held in N environments of `scenes` that observe M objects.

    An object is held if it is in the air, near the grip point of a hand that closes; without the last condition, wedged
    objects and objects pushed over others would count. `reason` [N] are indices into `REASONS`, or `NONE` for episodes
    that have not failed, or have failed for another reason.
    """

    def __init__(self, scenes: Sequence[Scene], most: int, device: torch.device) -> None:
        self._movable = [len(scene.objects) for scene in scenes]
        numbers = [{int(body): number for number, body in enumerate(scene.object_body)} for scene in scenes]
        self._numbers = numbers
        self._goals: list[list[int | None]] = [[] for _ in scenes]
        for env, scene in enumerate(scenes):
            self.aim(env, scene.goal)
        self.start_m = torch.zeros(len(scenes), most, device=device)
        self.in_hand, self.grasped = torch.zeros(2, len(scenes), most, dtype=torch.bool, device=device)
        self.reason = torch.full((len(scenes),), NONE, device=device)

    def aim(self, env: int, goal: Sequence[Predicate]) -> None:
        """Judge the episodes of `env` by `goal` from now on."""
        # the object of each part; None for a drawer or a knob
        self._goals[env] = [self._numbers[env].get(part.a) for part in goal]

    def see(self, observation: TensorDict, steps: Tensor) -> None:
        """Update from `observation` [N] after `steps` [N] control steps; episodes with 0 steps begin."""
        position = observation["object_position"]
        new_episode = steps == 0
        new_rows = new_episode.unsqueeze(1)
        self.start_m = torch.where(new_rows, position[..., 2], self.start_m)
        near = (position - observation["end_effector_position"].unsqueeze(1)).norm(dim=2) < NEAR_M
        self.in_hand = near & (position[..., 2] > self.start_m + LIFTED_M) & (observation["gripper_command"] > 0.0)
        self.grasped = (self.grasped & ~new_rows) | self.in_hand
        self.reason = torch.where(new_episode, NONE, self.reason)

    def judge(self, env: int, achieved: Sequence[bool]) -> None:
        """Set the cause of the failed episode of `env`; `achieved` are the parts of its goal that hold.

        The cause depends on the objects that are not at their goals; without such objects (if only a drawer is not
        shut) there is none.
        """
        goals = self._goals[env]
        missing = [number for number, holds in zip(goals, achieved, strict=True) if number is not None and not holds]
        if not missing:
            return
        grasped = self.grasped[env, : self._movable[env]].nonzero().flatten().tolist()
        if self.in_hand[env, missing].any():
            reason = "not placed"
        elif set(missing) & set(grasped):
            reason = "dropped"
        else:
            reason = "wrong object" if set(grasped) - set(goals) else "no grasp"
        self.reason = self.reason.clone()  # earlier transitions keep the old tensor
        self.reason[env] = REASONS.index(reason)

    def failures(self) -> dict[str, Tensor]:
        """Whether each cause applies, [N] bool, see `Transition.failures`."""
        return {name: self.reason == number for number, name in enumerate(REASONS)}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the state that observations do not contain."""
        return {name: getattr(self, name).clone() for name in STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        for name in STATE:
            setattr(self, name, state[name].to(self.reason.device, copy=True))
