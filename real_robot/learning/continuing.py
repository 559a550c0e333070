"""A simulator whose scene stays as it is between episodes, as that of a real robot does."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, Transition
from embodied.environments.wrapping import WrappedEnvironment
from embodied.errors import UserError


class ContinuingSimulation(WrappedEnvironment):
    """Environment `env` (N = 1) whose episodes begin where the last one ended, until the scene is put back.

    Its simulation also goes on after the end of an episode. Where it diverged the next reset puts the scene back.

    Raises:
        UserError: for a simulator that cannot go on, which has no method `go_on`.
    """

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        go_on = getattr(env, "go_on", None)
        if go_on is None:
            raise UserError(
                "robot.reset=policy needs a simulator that goes on from where it is, which this task's cannot; use"
                " task=libero_pick, or robot.reset=person"
            )
        self._go_on = go_on
        self._is_placed = False  # whether a scene is there
        self._is_over = False

    def put_back(self) -> None:
        """Let the next reset put the scene back."""
        self._is_placed = False

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """Begin an episode where the simulator is, or in a new scene once it is put back."""
        self._is_over = False
        if self._is_placed:
            return self._go_on()
        self._is_placed = True
        return super().reset(mask, starts)

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`; after the end of an episode another one begins at once."""
        if self._is_over:
            self._go_on()
        transition = super().step(actions)
        self._is_over = bool(transition.done.any())
        diverged = transition.events.get("diverged")
        self._is_placed &= diverged is None or not bool(diverged.any())
        return transition
