"""The dynamics without a task: many steps of many quadrotors in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from sims.quadrotor.physics import dynamics
from sims.quadrotor.physics.airframes import PARAMETERS, Airframe
from sims.quadrotor.physics.dynamics import Options
from sims.tracer.arithmetic import Rows
from sims.tracer.kernels import Kernels
from sims.tracer.program import UNIFORM, Group, Program


class Simulator:
    """Quadrotors of one airframe. L lanes are a multiple of `emit.LANES`; see `dynamics.step` for the rows.

    Args:
        airframe: airframe of all drones.
        options: effects of the dynamics.
        device: "cpu" or a CUDA device.
        backend: "c" or "torch" instead of the device's default, which is C on the CPU and torch elsewhere.
    """

    def __init__(
        self,
        airframe: Airframe,
        options: Options | None = None,
        *,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.options = (options or Options()).of_rotors(int(airframe.rotors))
        self.device = torch.device(device)
        self.parameters = torch.tensor(airframe.values(), device=self.device).unsqueeze(1)
        program = Program(
            "fly",
            (
                Group("state", self.options.state_rows, differentiable=True),
                Group("action", 4, differentiable=True),
                Group("disturbance", self.options.disturbance_rows),
                Group("airframe", len(PARAMETERS), UNIFORM),
            ),
            (Group("state", self.options.state_rows, differentiable=True),),
            self._fly,
            repeat=("state", "action"),
        )
        self.kernels = Kernels([program], self.device, backend=backend)

    def step(self, state: Tensor, action: Tensor, disturbance: Tensor) -> Tensor:
        """The state [S, L] after one step with `action` [4, L] and `disturbance` [D, L]; carries gradients."""
        inputs = {"state": state, "action": action, "disturbance": disturbance, "airframe": self.parameters}
        return self.kernels("fly", inputs)["state"]

    def steps(self, state: Tensor, actions: Tensor, disturbance: Tensor, out: Tensor | None = None) -> Tensor:
        """The state [S, L] after K steps with `actions` [K, 4, L] in one call, into `out` if given; no gradients."""
        inputs = [state, actions, disturbance, self.parameters]
        return self.kernels.repeat("fly", inputs, None if out is None else [out])[0]

    def _fly(self, state: Rows, action: Rows, disturbance: Rows, airframe: Rows) -> dict[str, Rows]:
        return {"state": dynamics.step(state, action, disturbance, dynamics.parameters(airframe), self.options)}
