"""A planner of the race: follows the fastest lap by a geometric controller (Lee, Leok and McClamroch 2010, CDC).

Unlike a learned policy it has the track, the airframe and the rotors' speeds. It computes its place on the track from a
policy's observations. It controls the direction of the thrust; the heading drifts, because no lap needs it.

Letters: N observations, M samples of the lap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.policy import Decision
from sims.quadrotor.physics.airframes import GRAVITY, Airframe
from sims.quadrotor.planners.lap import Limits, drag, fastest
from sims.quadrotor.tasks.race import TRACK

MARGIN = 20
"""Samples of the lap before the last gate and after the next in which the drone's place is searched."""


@dataclass(frozen=True)
class Numbers:
    """Parameters, tuned on training starts, see README.md.

    Attributes:
        limits: limits of the lap.
        place_1_s2, speed_1_s: gains of distance and velocity across the lap.
        along_1_s: gain of the speed along it.
        tilt_1_s2, rate_1_s: gains of tilt and body rates.
        yaw_1_s: gain that brakes turning about the thrust.
        lead_s: time in which commands bring rotors to their thrust.
        late_s: time by which the state is predicted before acting, besides the airframe's delay.
    """

    limits: Limits = field(default_factory=Limits)
    place_1_s2: float = 30.0
    speed_1_s: float = 8.0
    along_1_s: float = 6.0
    tilt_1_s2: float = 400.0
    rate_1_s: float = 40.0
    yaw_1_s: float = 5.0
    lead_s: float = 0.02
    late_s: float = 0.005


class Raceline:
    """Flies the fastest lap."""

    def __init__(self, contract: Contract, airframe: Airframe, numbers: Numbers | None = None) -> None:
        self.contract = contract
        self.airframe = airframe
        self.numbers = numbers or Numbers()
        self.lap = fastest(TRACK, airframe, self.numbers.limits)
        self.centres = torch.tensor([gate[:3] for gate in TRACK])
        self.normals = torch.tensor([[*gate.normal, 0.0] for gate in TRACK])

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Rotor set-points [N, H, 4] for the N observations; nothing is random."""
        inputs = {key: observation[key].cpu().float() for key in ("rotation", "velocity", "angular_velocity", "gate")}
        attitude = inputs["rotation"].view(-1, 3, 3)
        velocity = torch.einsum("nij,nj->ni", attitude, inputs["velocity"])
        gate, position = self._place(attitude, inputs["gate"])
        turning = inputs["angular_velocity"]
        late = self.airframe.delay_s + self.numbers.late_s
        attitude = attitude @ torch.linalg.matrix_exp(late * _skew(turning))
        force, spin, spinning = self._desired_acceleration(
            gate, position + late * velocity, velocity, attitude[:, :, 2]
        )
        thrust = (force * attitude[:, :, 2]).sum(1)
        torque = self._torque(attitude, turning, force, spin, spinning)
        actions = self._commands(thrust, torque, observation["rotor_speed"].cpu().float())
        actions = actions.to(observation.device or "cpu").unsqueeze(1).expand(-1, self.contract.horizon, -1)
        empty = TensorDict({}, batch_size=[len(actions)])
        return Decision(actions, empty, torch.zeros(len(actions), 1, 1, device=actions.device))

    def _place(self, attitude: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Number of the next gate [N], identified by its heading, and position [N, 3], m."""
        heading = torch.einsum("nij,nj->ni", attitude, gate[:, 3:])
        number = (heading @ self.normals.T).argmax(1)
        return number, self.centres[number] - torch.einsum("nij,nj->ni", attitude, gate[:, :3])

    def _desired_acceleration(
        self, gate: Tensor, position: Tensor, moving: Tensor, up: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Force of the rotors [N, 3], N, and angular velocity and acceleration of its direction, all in the world."""
        numbers = self.numbers
        lap = self.lap
        frame = self.airframe
        nearest = self._nearest(gate, position)
        speed = lap.velocity[nearest].float().norm(dim=1, keepdim=True)
        along = lap.velocity[nearest].float() / speed
        going = (moving * along).sum(1, keepdim=True)
        share = (going / speed).clamp(0.0, 1.2)
        aside = lap.position[nearest].float() - position
        aside = aside - (aside * along).sum(1, keepdim=True) * along
        drift = going * along - moving
        planned = lap.acceleration[nearest].float()
        tangential = (planned * along).sum(1, keepdim=True)
        # Across the lap: centripetal acceleration at this speed, plus a PD controller of distance and drift.
        across = (
            share.square() * (planned - tangential * along) + numbers.place_1_s2 * aside + numbers.speed_1_s * drift
        )
        faster = tangential + numbers.along_1_s * (speed - going)
        needed = frame.mass_kg * (across + torch.tensor([0.0, 0.0, GRAVITY])) + drag(moving, up, frame)
        more = frame.mass_kg * faster * along
        force = needed + self._remaining(needed, more) * more
        return force, share * lap.turning[nearest].float(), share.square() * lap.spinning[nearest].float()

    def _nearest(self, gate: Tensor, position: Tensor) -> Tensor:
        """The sample of the lap [N] nearest to the drone, between its gates."""
        lap = self.lap
        spacing = len(lap.position) // len(TRACK)
        candidates = spacing * gate.unsqueeze(1) + torch.arange(-spacing - MARGIN, MARGIN)
        candidates = candidates % len(lap.position)
        distance = (lap.position.float()[candidates] - position.unsqueeze(1)).square().sum(2)
        return candidates.gather(1, distance.argmin(1, keepdim=True))[:, 0]

    def _remaining(self, needed: Tensor, more: Tensor) -> Tensor:
        """Share [N, 1] of the force `more` that the rotors can produce in addition to the `needed` force."""
        most = 4.0 * self.numbers.limits.highest * self._most
        # Largest s with |needed + s more| <= most: a s^2 + 2 b s + c = 0.
        a = more.square().sum(1, keepdim=True)
        b = (needed * more).sum(1, keepdim=True)
        c = needed.square().sum(1, keepdim=True) - most**2
        root = (b.square() - a * c).clamp_min(0.0).sqrt()
        return ((root - b) / a.clamp_min(1e-6)).clamp(0.0, 1.0)

    @property
    def _most(self) -> float:
        return self.airframe.thrust_0_n + self.airframe.thrust_1_n + self.airframe.thrust_2_n

    def _torque(self, attitude: Tensor, turning: Tensor, force: Tensor, spin: Tensor, spinning: Tensor) -> Tensor:
        """Torque [N, 3], N m, body, that turns the thrust towards `force` and damps other rotations."""
        numbers = self.numbers
        frame = self.airframe
        inertia = torch.tensor([frame.inertia_x, frame.inertia_y, frame.inertia_z])
        desired, spin, spinning = (torch.einsum("nji,nj->ni", attitude, each) for each in (force, spin, spinning))
        desired = desired / desired.norm(dim=1, keepdim=True)
        angle = torch.atan2(desired[:, :2].norm(dim=1), desired[:, 2])
        error = torch.stack((-desired[:, 1], desired[:, 0], torch.zeros_like(angle)), 1)  # z x desired
        error = error * (angle / error.norm(dim=1).clamp_min(1e-6)).unsqueeze(1)
        gains = torch.tensor([numbers.rate_1_s, numbers.rate_1_s, numbers.yaw_1_s])
        flat = torch.tensor([1.0, 1.0, 0.0])
        # Feedforward, tilt error, and rate error; yaw has no target and is damped only.
        acceleration = flat * spinning + numbers.tilt_1_s2 * error + gains * (flat * spin - turning)
        # Inverse dynamics of Euler's equations: I a + omega x I omega.
        return inertia * acceleration + torch.linalg.cross(turning, inertia * turning)

    def _commands(self, thrust: Tensor, torque: Tensor, speed: Tensor) -> Tensor:
        """Set-points [N, 4] with which rotors at `speed` [N, 4] reach `thrust` [N] and `torque` [N, 3]."""
        frame = self.airframe
        numbers = self.numbers
        roll = torque[:, 0] / (4.0 * frame.arm_y_m)
        pitch = torque[:, 1] / (4.0 * frame.arm_x_m)
        yaw = torque[:, 2] / (4.0 * frame.torque_per_thrust_m)
        tilting = torch.stack((-roll - pitch, -roll + pitch, roll + pitch, roll - pitch), 1)
        # Priorities where rotors saturate: tilting first, then thrust, then yaw.
        room = tilting.abs().amax(1)
        middle = torch.minimum(torch.maximum(0.25 * thrust, room), self._most - room)
        spare = (torch.minimum(middle - room, self._most - room - middle)).clamp_min(0.0)
        yaw = torch.minimum(torch.maximum(yaw, -spare), spare)
        each = middle.unsqueeze(1) + tilting + torch.stack((-yaw, yaw, -yaw, yaw), 1)
        each = each.clamp(0.0, self._most)
        more = (each - frame.thrust_0_n).clamp_min(0.0)  # as in `airframes.hover_speed`
        desired = 2.0 * more / (frame.thrust_1_n + (frame.thrust_1_n**2 + 4.0 * frame.thrust_2_n * more).sqrt() + 1e-9)
        lag = torch.where(desired > speed, frame.lag_rise_s, frame.lag_fall_s)
        # A first-order lag covers the share 1 - exp(-t / lag) of a command's change in time t.
        reached = 1.0 - torch.exp(-numbers.lead_s / lag)
        return (2.0 * (speed + (desired - speed) / reached) - 1.0).clamp(-1.0, 1.0)


def _skew(vector: Tensor) -> Tensor:
    """Cross product matrices [N, 3, 3]."""
    x, y, z = vector.unbind(1)
    zero = torch.zeros_like(x)
    return torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), 1).view(-1, 3, 3)
