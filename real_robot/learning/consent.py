"""Consent to a policy's motion of a robot, where something beside the robot and the person has to agree."""

from __future__ import annotations


class Consent:
    """Consent to every step and episode: the learner is in the robot's own program."""

    def begin(self) -> str:
        """Reason why no episode may begin now, nor the robot move home for one; "" if it may."""
        return ""

    def act(self, human: bool) -> str:
        """Reason why the robot may not take a step of the person (`human`) or the policy now; "" if it may."""
        return ""
