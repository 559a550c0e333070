"""Quadrotors simulated by crazyflow; starts, noise, rewards and endings of episodes are ours.

This runs under an interpreter that has crazyflow 0.4; see `interpreter`. Letters: N environments, L lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.errors import UserError
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import GRAVITY, PARAMETERS, hover_speed
from sims.quadrotor.physics.dynamics import BODY_ROWS, DT_S, parameters
from sims.tracer.kernels import Kernels

FREQUENCY_HZ = 500
"""Rate of crazyflow's integration; its default."""
SUBSTEPS = round(FREQUENCY_HZ * DT_S)
LIFT_M = 10.0
"""Height of our origin in crazyflow's world, which has a floor at z = 0."""
DRONE = "cf2x_L250"
"""Crazyflow's drone model, of which propeller inertia and drag are used; all other parameters are our airframe's."""
ROLL = (-1.0, -1.0, 1.0, 1.0)
PITCH = (-1.0, 1.0, 1.0, -1.0)
YAW = (-1.0, 1.0, -1.0, 1.0)
"""Signs of the torques of our rotors; their order is the same in crazyflow."""


class CrazyflowEnvironment(QuadrotorEnvironment):
    """N quadrotors in crazyflow's first-principles dynamics, at rotor level.

    Mass, inertia, arms, thrust and torque curves and rotor lags come from the airframe. Crazyflow adds effects that our
    dynamics leave out: the gyroscopic and reaction torques of a Crazyflie's propellers and its drag. It integrates with
    Euler steps at 500 Hz; the rotors' set-points, in rpm, are held for 10 ms. Forces and torques of the episode act as
    in our dynamics. A step depends on the state alone, so that episodes are saved and restored as ours. Without
    `effects`, crazyflow leaves these effects out too and integrates by the classical Runge-Kutta method, so that both
    simulators can be compared.

    Raises:
        UserError: for options that crazyflow lacks, or if it is not installed.
    """

    def __init__(self, num_envs: int, *, effects: bool = True, **options: Any) -> None:  # noqa: ANN401 - the parent's
        super().__init__(num_envs, **options)
        if self.options.wind or self.options.ground_effect or self.options.delay_steps:
            raise UserError("crazyflow has neither wind nor ground effect nor delays; evaluate with sim=own")
        self._judge = Kernels([self.episode.judge()], self.device, backend=options.get("backend"))
        self._step = _control_step(num_envs, effects=effects)

    def stepped(self, action: Tensor) -> dict[str, Tensor]:
        """State, record, observation, reward and executed after a step of crazyflow with `action` [4, L]."""
        count = self.num_envs
        state = self._state[:, :count].double().numpy()
        airframe = self._airframe.expand(-1, self._state.shape[1])[:, :count].double()
        hover = hover_speed(parameters(list(airframe))).numpy()
        highest = airframe[PARAMETERS.index("speed_max_rpm")].numpy()
        states = {
            "pos": state[:3] + np.array([[0.0], [0.0], [LIFT_M]]),
            "quat": state[[4, 5, 6, 3]],  # (w, x, y, z) to scipy's (x, y, z, w)
            "vel": state[7:10],
            "ang_vel": state[10:13],
            "rotor_vel": (state[13:17] + hover) * highest,
        }
        command = (action[:, :count].double().numpy().clip(-1.0, 1.0) + 1.0) / 2.0 * highest
        force, torque = self._disturbance[:6, :count].double().numpy().reshape(2, 3, count)
        results = self._step(states, command, force, torque, airframe.numpy())
        rotors = results["rotor_vel"] / highest - hover
        position = results["pos"] - np.array([[0.0], [0.0], [LIFT_M]])
        body = np.concatenate((position, results["quat"][[3, 0, 1, 2]], results["vel"], results["ang_vel"], rotors))
        moved = self._state.clone()
        moved[:BODY_ROWS, :count] = torch.from_numpy(body).float()
        moved[BODY_ROWS:] = action.clamp(-1.0, 1.0)
        return self._judge("judge", {"moved": moved, "action": action, **self._inputs()})


def _control_step(num_envs: int, *, effects: bool) -> Any:  # noqa: ANN401 - a function of arrays by name
    """Control step of states, rpm [4, N], force [3, N] (world), torque [3, N] (body) and airframes [P, N]."""
    try:
        import jax
        import jax.numpy as jnp
        from crazyflow.control import Control
        from crazyflow.drones import Drone
        from crazyflow.dynamics import Dynamics
        from crazyflow.sim import Sim
        from crazyflow.sim.integration import Integrator
        from jax.scipy.spatial.transform import Rotation
    except ImportError as error:
        raise UserError(f"{error.name} is not installed, which sim=crazyflow needs; leave out task.python") from error
    jax.config.update("jax_enable_x64", True)
    sim = Sim(
        n_worlds=num_envs,
        drone=Drone(DRONE),
        dynamics=Dynamics.first_principles,
        control=Control.rotor_vel,
        freq=FREQUENCY_HZ,
        integrator=Integrator.default if effects else Integrator.rk4,
    )
    # Limits of crazyflow's own drone, and a floor, which hover lacks.
    for stage in ("clip_rotor_vel_cmd", "clip_floor_pos"):
        sim.step_pipeline.pop(stage)
    one_step = sim.build_step_fn()
    base = sim.data
    drone_effects = {"prop_inertia": base.params.prop_inertia, "drag_matrix": base.params.drag_matrix}
    active_effects = drone_effects if effects else {name: 0.0 * values for name, values in drone_effects.items()}

    @jax.jit
    def run(state_arrays: Any, command: Any, force: Any, torque: Any, airframe: Any) -> Any:  # noqa: ANN401
        rows = {key: values.T[:, None] for key, values in state_arrays.items()}
        states = base.states.replace(**rows, force=force.T[:, None], torque=jnp.zeros_like(force.T[:, None]))
        data = base.replace(
            states=states,
            params=base.params.replace(**_params(jnp, airframe), **active_effects),
            controls=base.controls.replace(rotor_vel=command.T[:, None]),
        )
        for _ in range(SUBSTEPS):  # crazyflow takes torques in the world frame, ours are in the body frame
            world_torque = Rotation.from_quat(data.states.quat[:, 0]).apply(torque.T)
            data = one_step(data.replace(states=data.states.replace(torque=world_torque[:, None])), n_steps=1)
        return {key: getattr(data.states, key)[:, 0].T for key in state_arrays}

    def step(*arrays: Any) -> dict[str, np.ndarray]:  # noqa: ANN401
        return {key: np.asarray(values) for key, values in run(*arrays).items()}

    return step


def _params(jnp: Any, rows: Any) -> dict[str, Any]:  # noqa: ANN401 - jax's
    """Crazyflow's parameters, one row a world, from airframes [P, N]."""
    frame = parameters(list(rows[:, :, None]))  # of [N, 1]
    inertia = jnp.stack((frame.inertia_x, frame.inertia_y, frame.inertia_z), -1)[..., None] * jnp.eye(3)
    highest = frame.speed_max_rpm
    # Our curves are polynomials of the fraction u = rpm / highest, crazyflow's of rpm.
    thrust = jnp.stack((frame.thrust_0_n, frame.thrust_1_n / highest, frame.thrust_2_n / highest**2), -1)[:, :, None]
    rise = 1.0 / frame.lag_rise_s
    fall = 1.0 / frame.lag_fall_s
    zero = jnp.zeros_like(highest)
    arms = (jnp.array(ROLL) * frame.arm_y_m[..., None], jnp.array(PITCH) * frame.arm_x_m[..., None])
    return {
        "mass": frame.mass_kg[..., None],
        "L": jnp.ones_like(highest)[..., None],
        "J": inertia,
        "J_inv": jnp.linalg.inv(inertia),
        "gravity_vec": jnp.array([0.0, 0.0, -GRAVITY]),
        "rpm2thrust": thrust,
        "rpm2torque": thrust * frame.torque_per_thrust_m[..., None, None],
        "mixing_matrix": jnp.stack((*arms, jnp.array(YAW) + zero[..., None]), -2),
        "rotor_dyn_coef": jnp.stack((rise, zero, fall, zero), -1)[:, :, None],
    }
