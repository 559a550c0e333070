"""Random flights, and the dynamics in double precision, one operation at a time: what kernels are compared with."""

import torch
from torch import Tensor

from sims.quadrotor.physics import dynamics
from sims.quadrotor.physics.airframes import CRAZYFLIE, GRAVITY, Airframe
from sims.quadrotor.physics.dynamics import Options

LANES = 128
PLAIN = Options()
FULL = Options(drag=True, wind=True, ground_effect=True, delay_steps=2)


def states(airframe: Airframe = CRAZYFLIE, options: Options = PLAIN, seed: int = 0, lanes: int = LANES) -> Tensor:
    """States [S, L] as a flight passes through, float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(rows: int, scale: float) -> Tensor:
        return scale * torch.randn(rows, lanes, dtype=torch.float64, generator=g)

    quaternion = torch.nn.functional.normalize(normal(4, 1.0), dim=0)
    rotors = 0.04 * (torch.rand(4, lanes, dtype=torch.float64, generator=g) - 0.5)
    past = normal(4 * options.past_actions, 0.2) + airframe.hover_action
    return torch.cat((normal(3, 0.2), quaternion, normal(3, 0.5), normal(3, 0.5), rotors, past.clamp(-1.0, 1.0)))


def commands(steps: int, airframe: Airframe = CRAZYFLIE, seed: int = 1, lanes: int = LANES) -> Tensor:
    """Actions [T, 4, L] around hover, float64."""
    g = torch.Generator().manual_seed(seed)
    return airframe.hover_action + 0.1 * torch.randn(steps, 4, lanes, dtype=torch.float64, generator=g)


def disturbances(airframe: Airframe = CRAZYFLIE, options: Options = PLAIN, seed: int = 2, lanes: int = LANES) -> Tensor:
    """Force, torque and, where it is on, wind: [D, L], float64."""
    g = torch.Generator().manual_seed(seed)
    weight = airframe.mass_kg * GRAVITY
    scale = torch.tensor([weight / 20] * 3 + [weight / 10000] * 3 + [1.0] * 3, dtype=torch.float64)
    return (scale.unsqueeze(1) * torch.randn(9, lanes, dtype=torch.float64, generator=g))[: options.disturbance_rows]


def oracle(
    state: Tensor, action: Tensor, disturbance: Tensor, airframe: Airframe = CRAZYFLIE, options: Options = PLAIN
) -> Tensor:
    """One step in double precision."""
    exact = dynamics.parameters(list(torch.tensor(airframe.values(), dtype=torch.float64)))
    rows = dynamics.step(list(state), list(action), list(disturbance), exact, options)
    return torch.stack([row + torch.zeros_like(state[0]) for row in rows])
