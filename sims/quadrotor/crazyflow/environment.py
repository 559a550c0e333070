"""Quadrotors whose bodies crazyflow moves; starts, noise, rewards and endings are ours.

This runs under an interpreter that has crazyflow 0.4; see `interpreter`. Letters: N environments, L lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.errors import UserError
from sims.quadrotor.airframes import GRAVITY, PARAMETERS, hover_speed
from sims.quadrotor.dynamics import BODY_ROWS, DT_S, parameters
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.tracer.kernels import Kernels

FREQUENCY_HZ = 500
"""Steps of crazyflow's integration; its default."""
SUBSTEPS = round(FREQUENCY_HZ * DT_S)
LIFT_M = 10.0
"""Its world lies so much lower than ours: it has a floor at zero."""
DRONE = "cf2x_L250"
"""Whose propellers and drag are used; everything else is that of our airframe."""
ROLL, PITCH, YAW = (-1.0, -1.0, 1.0, 1.0), (-1.0, 1.0, 1.0, -1.0), (-1.0, 1.0, -1.0, 1.0)
"""Signs of the torques of our rotors, whose order is crazyflow's too."""


class CrazyflowEnvironment(QuadrotorEnvironment):
    """N quadrotors in crazyflow's first-principles dynamics, at rotor level.

    Mass, inertia, arms, thrust and torque curves and rotor lags are those of the airframe. Crazyflow adds what ours
    leaves out: the gyroscopic and reaction torques of a Crazyflie's propellers and its drag. It integrates in its own
    way (Euler at 500 Hz); the rotors' set-points, in rpm, are held for 10 ms. Forces and torques of the episode act as
    in ours. A state is all that a step needs, so that episodes are saved and restored as ours. Without `effects` there
    is nothing that ours leaves out, and the classical Runge-Kutta method: a check of both.

    Raises:
        UserError: for options that crazyflow lacks, or where it is not installed.
    """

    def __init__(self, num_envs: int, *, effects: bool = True, **options: Any) -> None:  # noqa: ANN401 - the parent's
        super().__init__(num_envs, **options)
        if self.options.wind or self.options.ground_effect or self.options.delay_steps:
            raise UserError("crazyflow has neither wind nor ground effect nor delays; evaluate with sim=own")
        self._judge = Kernels([self.episode.judge()], self.device, backend=options.get("backend"))
        self._step = _control_step(num_envs, effects=effects)

    def stepped(self, action: Tensor) -> dict[str, Tensor]:
        """As in ours, from the bodies that crazyflow moved."""
        count = self.num_envs
        state = self._state[:, :count].double().numpy()
        airframe = self._airframe.expand(-1, self._state.shape[1])[:, :count].double()
        hover = hover_speed(parameters(list(airframe))).numpy()
        highest = airframe[PARAMETERS.index("speed_max_rpm")].numpy()
        given = {
            "pos": state[:3] + np.array([[0.0], [0.0], [LIFT_M]]),
            "quat": state[[4, 5, 6, 3]],
            "vel": state[7:10],
            "ang_vel": state[10:13],
            "rotor_vel": (state[13:17] + hover) * highest,
        }
        command = (action[:, :count].double().numpy().clip(-1.0, 1.0) + 1.0) / 2.0 * highest
        force, torque = self._disturbance[:6, :count].double().numpy().reshape(2, 3, count)
        found = self._step(given, command, force, torque, airframe.numpy())
        rotors = found["rotor_vel"] / highest - hover
        place = found["pos"] - np.array([[0.0], [0.0], [LIFT_M]])
        body = np.concatenate((place, found["quat"][[3, 0, 1, 2]], found["vel"], found["ang_vel"], rotors))
        moved = self._state.clone()
        moved[:BODY_ROWS, :count] = torch.from_numpy(body).float()
        moved[BODY_ROWS:] = action.clamp(-1.0, 1.0)
        return self._judge("judge", {"moved": moved, "action": action, **self._inputs()})


def _control_step(num_envs: int, *, effects: bool) -> Any:  # noqa: ANN401 - a function of arrays by name
    """A function of states, rpm [4, N], force [3, N] in the world, torque [3, N] in the body and airframes [P, N]."""
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
    for stage in ("clip_rotor_vel_cmd", "clip_floor_pos"):  # limits of its own drone; a floor that hover has not
        sim.step_pipeline.pop(stage)
    one_step, base = sim.build_step_fn(), sim.data
    of_drone = {"prop_inertia": base.params.prop_inertia, "drag_matrix": base.params.drag_matrix}
    kept = of_drone if effects else {name: 0.0 * values for name, values in of_drone.items()}

    @jax.jit
    def run(given: Any, command: Any, force: Any, torque: Any, airframe: Any) -> Any:  # noqa: ANN401
        rows = {key: values.T[:, None] for key, values in given.items()}
        states = base.states.replace(**rows, force=force.T[:, None], torque=jnp.zeros_like(force.T[:, None]))
        data = base.replace(
            states=states,
            params=base.params.replace(**_params(jnp, airframe), **kept),
            controls=base.controls.replace(rotor_vel=command.T[:, None]),
        )
        for _ in range(SUBSTEPS):  # its torques are the world's, ours the body's
            turned = Rotation.from_quat(data.states.quat[:, 0]).apply(torque.T)
            data = one_step(data.replace(states=data.states.replace(torque=turned[:, None])), n_steps=1)
        return {key: getattr(data.states, key)[:, 0].T for key in given}

    def step(*arrays: Any) -> dict[str, np.ndarray]:  # noqa: ANN401
        return {key: np.asarray(values) for key, values in run(*arrays).items()}

    return step


def _params(jnp: Any, rows: Any) -> dict[str, Any]:  # noqa: ANN401 - jax's
    """Crazyflow's parameters, for each world, of airframes [P, N]."""
    frame = parameters(list(rows[:, :, None]))  # of [N, 1]
    inertia = jnp.stack((frame.inertia_x, frame.inertia_y, frame.inertia_z), -1)[..., None] * jnp.eye(3)
    highest = frame.speed_max_rpm
    thrust = jnp.stack((frame.thrust_0_n, frame.thrust_1_n / highest, frame.thrust_2_n / highest**2), -1)[:, :, None]
    rise, fall, zero = 1.0 / frame.lag_rise_s, 1.0 / frame.lag_fall_s, jnp.zeros_like(highest)
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
