"""Why an episode failed: by what the hand has held and still holds, read from observations once a chunk.

So it is the same with every physics, and costs control steps next to nothing. Letters in shape comments: N
environments, M objects (the largest number of any task).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from sims.libero.scene.scene import Scene

LIFTED_M = 0.02
"""How much higher than where it began an object is that is held."""
NEAR_M = 0.2
"""Largest distance of its middle from the grip point: that of a pan held by its handle."""
REASONS = ("not placed", "dropped", "wrong object", "no grasp")
NONE = -1
STATE = ("start_m", "grasped", "reason")


class Handling:
    """What was held in N environments of `scenes` that observe M objects.

    An object is held that is in the air, near the grip point of a hand that closes: without the last, what is wedged
    or pushed over something would count. `reason` [N] are indices into `REASONS`; `NONE`: not failed, or for another.
    """

    def __init__(self, scenes: Sequence[Scene], most: int, device: torch.device) -> None:
        self._movable = [len(scene.objects) for scene in scenes]
        numbers = [{int(body): number for number, body in enumerate(scene.object_body)} for scene in scenes]
        self._goals = [  # which object each part of a goal is about; None: a drawer, a knob
            [of.get(part.a) for part in scene.goal] for of, scene in zip(numbers, scenes, strict=True)
        ]
        self.start_m = torch.zeros(len(scenes), most, device=device)
        self.held, self.grasped = torch.zeros(2, len(scenes), most, dtype=torch.bool, device=device)
        self.reason = torch.full((len(scenes),), NONE, device=device)

    def see(self, seen: TensorDict, steps: Tensor) -> None:
        """Take note of the observations `seen` [N] after `steps` [N] of the episodes; those of none begin."""
        place, fresh = seen["object_position"], steps == 0
        begin = fresh.unsqueeze(1)
        self.start_m = torch.where(begin, place[..., 2], self.start_m)
        near = (place - seen["end_effector_position"].unsqueeze(1)).norm(dim=2) < NEAR_M
        self.held = near & (place[..., 2] > self.start_m + LIFTED_M) & (seen["gripper_command"] > 0.0)
        self.grasped = (self.grasped & ~begin) | self.held
        self.reason = torch.where(fresh, NONE, self.reason)

    def judge(self, env: int, achieved: Sequence[bool]) -> None:
        """Find the reason why `env` has just failed; `achieved` says which parts of its goal hold.

        It is that of the objects that are not where they belong; there is none where all are, but a drawer is not shut.
        """
        goals = self._goals[env]
        missing = [number for number, holds in zip(goals, achieved, strict=True) if number is not None and not holds]
        if not missing:
            return
        grasped = self.grasped[env, : self._movable[env]].nonzero().flatten().tolist()
        if self.held[env, missing].any():
            reason = "not placed"
        elif set(missing) & set(grasped):
            reason = "dropped"
        else:
            reason = "wrong object" if set(grasped) - set(goals) else "no grasp"
        self.reason = self.reason.clone()  # transitions have the other
        self.reason[env] = REASONS.index(reason)

    def failures(self) -> dict[str, Tensor]:
        """As `Transition.failures`."""
        return {name: self.reason == number for number, name in enumerate(REASONS)}

    def state_dict(self) -> dict[str, Tensor]:
        """What observations do not show, copied."""
        return {name: getattr(self, name).clone() for name in STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        for name in STATE:
            setattr(self, name, state[name].to(self.reason.device, copy=True))
