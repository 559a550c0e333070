"""A swarm among obstacles: the drones of a world fly to goals that they exchange (after arXiv 2309.13285).

The room, the grid of obstacles, the episode's length and exchanged goals follow that paper. Differences: drones observe
the nearest obstacles, not a distance field, and plan the shortest way around the observed ones; any collision ends a
drone's flight; the reward has slopes, which analytic gradients need. Letters in shape comments: W worlds, M drones of a
world, C cells of the grid, K visible tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

import sims.mdp
from embodied.configuration import FiniteFloat, NonNegativeFloat
from embodied.contract import TensorSpec
from embodied.export.network import PRESENT
from sims.quadrotor.observation import ANGULAR_VELOCITY, AXES, ROTATION, VELOCITY
from sims.quadrotor.tasks.hover import ERROR_STEPS

GRID = 8
"""Cells of 1 m along each side of the central square with the obstacles and drones."""
CELLS = GRID * GRID
OBSTACLE_RADIUS_M = 0.3
"""Radius of the cylinders from floor to ceiling."""
HALF_ROOM_M = 5.0
"""Distance from the middle to the walls; the ceiling is twice as high."""
RADIUS_M = 0.063
"""Distance from a Crazyflie's middle to its rotor tips: two collide at twice this distance."""
LOW_M = 1.0
HIGH_M = 3.0
"""Range of heights of initial positions and goals."""
AWAY_M = 100.0
"""Position of absent drones and obstacles."""
WASH_RADIUS_M = 0.1
"""Radius of the column of air below a drone."""
WASH_AT_ROTOR = 14.0 / 34.0
WASH_PER_M = 20.0 / 34.0
"""Downwash on a drone d m below, in its weights: 14/34 - 20/34 d. Neural-Swarm (arXiv 2003.02992, figure 3)
measured 10 g at 0.2 m and 4 g at 0.5 m with drones of 34 g."""
CLOSE_M = 0.2
"""The gap at which closeness is one half."""
FLYING, HIT_DRONE, HIT_OBSTACLE, HIT_ROOM = range(4)
"""Fates of a drone."""
HITS = {"hit_drone": HIT_DRONE, "hit_obstacle": HIT_OBSTACLE, "hit_room": HIT_ROOM}


@dataclass(frozen=True)
class Swarm(sims.mdp.Mdp):
    """Numbers of the task.

    Attributes:
        drones: M, number of drones of a world.
        density: share of the cells with an obstacle.
        neighbours, obstacles: numbers of the nearest ones that are observed.
        neighbour_range_m, obstacle_range_m: distance up to which they are observed.
        carrot_m: the way to a goal is observed up to this length.
        exchange_low_s, exchange_high_s: goals are exchanged twice, after a time between these and after twice that.
        success_error_m: largest mean distance from the goal over the last second of a successful episode.
        initial_velocity_m_s, initial_angular_velocity_rad_s, initial_tilt: bounds of each coordinate; of the rotation
            vector, rad.
        force_scale, torque_scale: standard deviation of the episode's force and torque per axis, in weights.
        speed_m_s: desired speed far from the goal.
        slow_m: distance from the goal at which the desired speed is 0.7 of that.
        neighbour_margin_m, obstacle_margin_m, room_margin_m: gaps without penalty.
        foresight_s: closing gaps are predicted this far ahead.
        reward_alive, weight_*: see `reward`.
    """

    drones: int = 8
    density: float = 0.2
    neighbours: int = 3
    obstacles: int = 4
    neighbour_range_m: float = 3.0
    obstacle_range_m: float = 2.0
    carrot_m: float = 2.0
    exchange_low_s: float = 4.0
    exchange_high_s: float = 5.0
    success_error_m: float = 0.5
    initial_velocity_m_s: float = 0.5
    initial_angular_velocity_rad_s: float = 1.0
    initial_tilt: float = 0.3
    force_scale: float = 1.0 / 50.0
    torque_scale: float = 1.0 / 10000.0
    speed_m_s: float = 4.0
    slow_m: float = 1.0
    neighbour_margin_m: float = 0.5
    obstacle_margin_m: float = 0.3
    room_margin_m: float = 0.5
    foresight_s: float = 0.4
    reward_alive: FiniteFloat = 1.0
    weight_velocity: NonNegativeFloat = 2.0
    weight_angular_velocity: NonNegativeFloat = 0.01
    weight_rotation: NonNegativeFloat = 0.2
    weight_action_change: NonNegativeFloat = 0.05
    weight_neighbour: NonNegativeFloat = 4.0
    weight_obstacle: NonNegativeFloat = 1.5
    weight_room: NonNegativeFloat = 6.0

    INSTRUCTION: ClassVar[str] = "fly to the goals without a collision"
    STEP_LIMIT: ClassVar[int] = 1500

    @property
    def OBSERVED(self) -> dict[str, TensorSpec]:  # noqa: N802 - a constant in other tasks
        """Specs of a drone's observations."""
        names = ("x", "y", "z", "velocity_x", "velocity_y", "velocity_z", "closeness", PRESENT)
        return {
            "way": TensorSpec((3,), unit="m", frame="world", names=AXES),
            "rotation": ROTATION,
            "velocity": VELOCITY,
            "angular_velocity": ANGULAR_VELOCITY,
            "height": TensorSpec((1,), unit="m", frame="world", names=("z",)),
            "neighbours": TensorSpec((self.neighbours, 8), unit="m, m/s, 1", frame="world", names=names),
            "obstacles": TensorSpec(
                (self.obstacles, 4), unit="m, 1", frame="world", names=("x", "y", "closeness", PRESENT)
            ),
        }

    def reward(self, now: Moment) -> Tensor:
        """A constant for staying alive minus squared penalties, [W, M].

        Penalties are the velocity's distance from the desired one, turning, yawing, jerk, and how far margins to
        drones, obstacles and the room are entered. The desired velocity points along the way and decreases near the
        goal.
        """
        position = now.position
        near = now.near
        world = torch.arange(len(position), device=position.device).view(-1, 1, 1)
        relative = position[world, near.neighbour] - position.unsqueeze(2)
        neighbour_gap = foreseen(self, relative, now.velocity[world, near.neighbour] - now.velocity.unsqueeze(2))
        neighbour_gap = torch.where(near.neighbour_gap < AWAY_M - 1.0, neighbour_gap - 2.0 * RADIUS_M, AWAY_M)
        relative = now.cylinders[world, near.obstacle] - position[..., :2].unsqueeze(2)
        desired = now.way * (self.speed_m_s / (length(now.way).square() + self.slow_m**2).sqrt()).unsqueeze(-1)
        obstacle_gap = foreseen(self, relative, -now.velocity[..., :2].unsqueeze(2)) - (OBSTACLE_RADIUS_M + RADIUS_M)
        from_middle = position - position.new_tensor([0.0, 0.0, HALF_ROOM_M])
        closing = (now.velocity * from_middle.sign()).clamp_min(0.0)
        wall_gap = HALF_ROOM_M - RADIUS_M - from_middle.abs() - self.foresight_s * closing
        upright = now.rotation[..., 0] + now.rotation[..., 4] + now.rotation[..., 8]
        # r = c - w_v |v - v*|^2 / V^2 - w_w |omega|^2 - w_R (3 - tr R) - w_a |da|^2 - sum of w ((1 - gap / margin)+)^2.
        cost = (
            self.weight_velocity / self.speed_m_s**2 * (now.velocity - desired).square().sum(-1)
            + self.weight_angular_velocity * now.angular_velocity.square().sum(-1)
            + self.weight_rotation * (3.0 - upright)
            + self.weight_action_change * now.change.square().sum(-1)
            + self.weight_neighbour * entered(neighbour_gap, self.neighbour_margin_m)
            + self.weight_obstacle * entered(obstacle_gap, self.obstacle_margin_m)
            + self.weight_room * entered(wall_gap, self.room_margin_m)
        )
        return self.reward_alive - cost

    def success(self, now: Record) -> Tensor:
        """Whether drones that flew to the end were near their goals over the last second, [W, M]."""
        return self._error(now) <= self.success_error_m

    def failures(self, now: Record) -> dict[str, Tensor]:
        """Whether each drone has hit a drone, an obstacle or the room, [W, M] each."""
        return {name.replace("_", " "): now.fate == fate for name, fate in HITS.items()}

    def metrics(self, now: Record) -> dict[str, Tensor]:
        """No collision of the drone, none in the whole world, what was hit, and the position error, [W, M] each."""
        whole = now.whole
        return {
            "collision_free": whole.float(),
            "world_collision_free": whole.all(1, keepdim=True).expand_as(whole).float(),
            **{name: (now.fate == fate).float() for name, fate in HITS.items()},
            "position_error_m": self._error(now),
        }

    def _error(self, now: Record) -> Tensor:
        """Mean distance from the goal over the last second, m, [W, M]; NaN for drones that did not fly to the end."""
        return torch.where(now.whole, now.error / min(ERROR_STEPS, now.limit), torch.nan)


class Around(NamedTuple):
    """The objects near each drone, nearest first, with the gaps between surfaces, m.

    Attributes:
        neighbour, neighbour_gap: index in the world and gap [W, M, K]; the gap of absent ones is large.
        obstacle, obstacle_gap: cell and gap [W, M, K].
    """

    neighbour: Tensor
    neighbour_gap: Tensor
    obstacle: Tensor
    obstacle_gap: Tensor


def around(mdp: Swarm, position: Tensor, flying: Tensor, cylinders: Tensor) -> Around:
    """The drones `flying` [W, M] and the `cylinders` [W, C, 2] nearest to `position` [W, M, 3].

    There are always K entries: worlds with few drones are padded with absent ones.
    """
    gaps = torch.cdist(position, position, compute_mode="donot_use_mm_for_euclid_dist") - 2.0 * RADIUS_M
    others = flying.unsqueeze(1) & ~torch.eye(mdp.drones, dtype=torch.bool, device=position.device)
    gaps = torch.where(others, gaps, AWAY_M)
    if mdp.neighbours > mdp.drones:
        gaps = torch.nn.functional.pad(gaps, (0, mdp.neighbours - mdp.drones), value=AWAY_M)
    gap, neighbour = gaps.topk(mdp.neighbours, largest=False)
    horizontal_distance = torch.cdist(position[..., :2], cylinders, compute_mode="donot_use_mm_for_euclid_dist")
    obstacle_gap, obstacle = (horizontal_distance - (OBSTACLE_RADIUS_M + RADIUS_M)).topk(mdp.obstacles, largest=False)
    return Around(neighbour.clamp(max=mdp.drones - 1), gap, obstacle, obstacle_gap)


def collisions(position: Tensor, near: Around) -> Tensor:
    """Fate of the drones at `position` [W, M, 3], [W, M] int64: `FLYING` or what they hit."""
    x, y, z = position.unbind(-1)
    inside = HALF_ROOM_M - RADIUS_M
    room = (x.abs() > inside) | (y.abs() > inside) | ((z - HALF_ROOM_M).abs() > inside)
    fate = torch.where(room, HIT_ROOM, FLYING)
    fate = torch.where(near.obstacle_gap[..., 0] < 0.0, HIT_OBSTACLE, fate)
    return torch.where(near.neighbour_gap[..., 0] < 0.0, HIT_DRONE, fate)


def downwash(position: Tensor, flying: Tensor) -> Tensor:
    """Downward force on each drone from those above it, in weights, [W, M]."""
    above = position.unsqueeze(1) - position.unsqueeze(2)  # [W, below, above, 3]
    height = above[..., 2]
    aside = above[..., :2].square().sum(-1)
    share = (WASH_AT_ROTOR - WASH_PER_M * height).clamp_min(0.0)
    in_column = (height > 0.0) & (aside < WASH_RADIUS_M**2) & flying.unsqueeze(1) & flying.unsqueeze(2)
    return torch.where(in_column, share, 0.0).sum(-1)


def tokens(mdp: Swarm, position: Tensor, velocity: Tensor, cylinders: Tensor, near: Around) -> tuple[Tensor, Tensor]:
    """Neighbours [W, M, K, 8] and obstacles [W, M, K, 4] as observed from `position` and `velocity` [W, M, 3]."""
    motion = torch.cat((position, velocity), -1)
    world = torch.arange(len(position), device=position.device).view(-1, 1, 1)
    relative = motion[world, near.neighbour] - motion.unsqueeze(2)
    visible = near.neighbour_gap < mdp.neighbour_range_m
    gap = length(relative[..., :3]) - 2.0 * RADIUS_M
    neighbours = torch.cat((relative, closeness(gap), visible.unsqueeze(-1)), -1) * visible.unsqueeze(-1)
    relative_obstacle = cylinders[world, near.obstacle] - position[..., :2].unsqueeze(2)
    visible = near.obstacle_gap < mdp.obstacle_range_m
    gap = length(relative_obstacle) - (OBSTACLE_RADIUS_M + RADIUS_M)
    return neighbours, torch.cat((relative_obstacle, closeness(gap), visible.unsqueeze(-1)), -1) * visible.unsqueeze(-1)


def carrot(mdp: Swarm, way: Tensor) -> Tensor:
    """The vector `way` [..., 3], of length `carrot_m` at most."""
    return way * (mdp.carrot_m / length(way)).clamp(max=1.0).unsqueeze(-1)


def closeness(gap: Tensor) -> Tensor:
    """1 where surfaces touch, decreasing to 0 with the gap [...], m; [..., 1]."""
    return (CLOSE_M / (CLOSE_M + gap.clamp_min(0.0))).unsqueeze(-1)


def length(vector: Tensor) -> Tensor:
    """Euclidean length over the last axis, with a derivative at zero."""
    return (vector.square().sum(-1) + 1e-8).sqrt()


class Moment(NamedTuple):
    """True states after a step, each [W, M, ...], way to the goal (`ways.Ways`), actions' change, and surroundings."""

    position: Tensor
    rotation: Tensor
    velocity: Tensor
    angular_velocity: Tensor
    to_goal: Tensor
    way: Tensor
    change: Tensor
    cylinders: Tensor  # [W, C, 2]
    near: Around


class Record(NamedTuple):
    """Fates, control steps and summed errors over the last second of drones [W, M], with the step `limit`."""

    fate: Tensor
    steps: Tensor
    error: Tensor
    limit: int

    @property
    def whole(self) -> Tensor:
        """Whether drones flew to the end, [W, M] bool."""
        return (self.fate == FLYING) & (self.steps >= self.limit)


def foreseen(mdp: Swarm, relative: Tensor, moving: Tensor) -> Tensor:
    """Distance after `foresight_s` of objects at `relative` [..., D], m, with velocity `moving`, m/s.

    If the distance grows, it is the current one.
    """
    distance = length(relative)
    return distance - mdp.foresight_s * (-(relative * moving).sum(-1) / distance).clamp_min(0.0)


def entered(gap: Tensor, margin_m: float) -> Tensor:
    """Sum over the last axis of ((1 - gap / margin)+)^2, the squared share of the margin that `gap` [..., K] enters."""
    return (1.0 - gap / margin_m).clamp_min(0.0).square().sum(-1)
