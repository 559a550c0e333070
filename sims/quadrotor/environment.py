"""Quadrotors as a vectorised, differentiable Environment.

Letters in shape comments: N environments, K executed actions of a chunk, M environments that begin an episode, L lanes
(N padded to whole blocks of the kernels). Tensors of rows are [rows, L].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environments.engine import Outcome, RestorableEngine
from embodied.native import choose
from embodied.rollout.rollout import Rollout
from sims.quadrotor.episode import COUNTERS, Episode, Mdp, Record
from sims.quadrotor.observation import History, contract, split_rows
from sims.quadrotor.physics.airframes import CRAZYFLIE, PARAMETERS, SCATTERED, Airframe, hover_speed, scatter
from sims.quadrotor.physics.dynamics import BODY_ROWS, Body, Options, parameters
from sims.quadrotor.physics.variation import DRAWS as VARIED
from sims.quadrotor.physics.variation import Variation
from sims.quadrotor.platforms import DRAWS, Ranges
from sims.quadrotor.starts import draws, keys
from sims.quadrotor.tasks.hover import Hover
from sims.quadrotor.unroll import unroll, unroll_source
from sims.quadrotor.viewing import QuadrotorView
from sims.tracer.kernels import Kernels, pad

STEP_LIMIT = 500


@lru_cache(maxsize=8)
def _kernels(episode: Episode, device: torch.device, backend: str) -> Kernels:
    """Kernels of equal episodes, which are traced once: a run makes a dozen environments, each trace takes 0.1 s."""
    return Kernels(episode.programs(), device, backend=backend, appendix=unroll_source(episode))


class QuadrotorEnvironment(RestorableEngine):
    """N quadrotors, each with its own episode; implements `embodied.environment.DifferentiableEnvironment`.

    Actions are clipped to [-1, 1]. In grad mode rewards and observations carry gradients from the actions of their step
    and of earlier ones, back to `detach` or the episode's beginning.

    An episode is terminated by the task, and truncated at the step limit, or earlier if the task is finished. The
    task defines success and metrics. For hover, success is surviving to the step limit; the metrics are "survive" (1 or
    0; 0 while running) and "position_error_m", the mean distance from the goal over the last second of an episode that
    reached its step limit (otherwise NaN).

    Args:
        num_envs: N.
        mdp: the task.
        airframe: the drone's; None: every episode has a random platform of the ranges `platforms`.
        scatter_width: every episode's parameters differ from `airframe`'s by up to this share.
        variation: ranges of further differences between episodes of `airframe`.
        options: effects of the dynamics.
        split: "train" or "eval", with disjoint initial states, disturbances and noise.
        history: number of observed actions; 1 is `previous_action`, more are `action_history`, oldest first.
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control steps after which an episode is truncated.
        seed: selects the initial states of a reset without starts.
        noise: whether observations are noisy.
        device: "cpu" (compiled C) or a CUDA device.
        backend: "c" or "torch" instead of the device's default.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        mdp: Mdp | None = None,
        airframe: Airframe | None = CRAZYFLIE,
        platforms: Ranges | None = None,
        scatter_width: float = 0.0,
        variation: Variation | None = None,
        options: Options | None = None,
        split: str = "train",
        history: int = 1,
        executed: int = 1,
        step_limit: int = STEP_LIMIT,
        seed: int = 0,
        noise: bool = True,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.mdp: Mdp = mdp or Hover()
        super().__init__(
            contract(self.mdp.OBSERVED, history, executed),
            num_envs,
            step_limit,
            task_names=(type(self.mdp).__name__.lower(),),
            instructions=(self.mdp.INSTRUCTION,),
            seed=seed,
            device=device,
        )
        self.split = split
        self.airframe = airframe
        self.scatter_width = scatter_width
        self.platforms = platforms or Ranges()
        rotors = max(self.platforms.rotors) if airframe is None else int(airframe.rotors)
        self.options = (options or Options()).of_rotors(rotors)
        self.variation = variation
        randomised = airframe is None or scatter_width > 0.0 or variation is not None
        self.episode = Episode(self.mdp, self.options, randomised=randomised, noise=noise)
        self._kernels = _kernels(self.episode, self.device, choose(backend, self.device))
        self._history = History(history, pad(num_envs), self.device)
        self._allocate()

    @property
    def backend(self) -> str:
        """Backend of the dynamics: "c" or "torch"."""
        return self._kernels.backend

    @property
    def pose(self) -> tuple[Tensor, Tensor]:
        """True position [N, 3], m, and rotation matrix [N, 3, 3] from body to world."""
        body = self.body
        return torch.stack(body.position, 1), torch.stack(body.rotation(), 1).view(-1, 3, 3)

    @property
    def plan(self) -> Tensor:
        """The running episodes' plans, [P, N]; see the task."""
        return self._disturbance[self.options.disturbance_rows :, : self.num_envs]

    @property
    def body(self) -> Body:
        """True states of the drones, rows [N], without gradients."""
        return Body.of(self._state[:, : self.num_envs].detach())

    @property
    def rotors(self) -> tuple[Tensor, Tensor]:
        """Speeds of four rotors (see module `rotors`) and last commanded speeds, [4, N], as shares of the highest."""
        lanes = slice(self.num_envs)
        hover = hover_speed(parameters(list(self._airframe[:, lanes])))
        commands = self._state[BODY_ROWS : BODY_ROWS + 4, lanes].detach()
        return torch.stack(self.body.rotor_speed) + hover, 0.5 * (commands + 1.0)

    @property
    def record(self) -> Record:
        """Endings [N] and memory [MEMORY, N] of the episodes."""
        record = self._record[:, : self.num_envs]
        return Record(record[1] > 0.5, record[2] > 0.5, record[COUNTERS:], self.step_limit)

    def view(self) -> QuadrotorView:
        """View of the drones for the viewer."""
        return QuadrotorView(
            self.mdp,
            self.airframe or CRAZYFLIE,
            self.options.ground_z_m,
            self.step_limit,
            lambda: self.plan,
            self.where,
            self.kick,
        )

    def where(self, row: int) -> Tensor:
        """True position, m, and quaternion (w, x, y, z) of quadrotor `row`, [7]."""
        return self._state[:7, row].detach()

    def kick(self, row: int, change_m_s: Tensor) -> None:
        """Change the velocity of quadrotor `row` by `change_m_s` [3], world frame."""
        change = torch.zeros_like(self._state)
        change[7:10, row] = change_m_s.to(change)
        self._state = self._state + change

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Begin episodes in environments `ids` [M]: initial states, disturbances and airframes from `starts` [M]."""
        count = len(ids)
        key = torch.nn.functional.pad(keys(self.split, starts).to(self.device), (0, pad(count) - count))
        airframe = self._platforms(key) if self.episode.randomised else self._airframe
        common = {"key": key, "airframe": airframe, "settings": self._settings}
        rows = self._kernels("begin", common)
        rows |= {"record": torch.zeros(self.episode.record_rows, key.shape[1], device=self.device), "key": key}
        rows |= self._kernels("observe", {**rows, **common})
        for name in ("state", "record", "disturbance", "key"):
            self._put(f"_{name}", ids, rows[name])
        self._put("_seen", ids, rows["observation"])
        if self.episode.randomised:
            self._put("_airframe", ids, airframe)
        self._history.restart(ids, rows["observation"][self.episode.previous])

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Step the kernels, which count steps, limits and endings themselves: `unroll` takes many steps at once."""
        rewards = []
        executions = []
        for action in self._padded(actions):
            results = self.stepped(action)
            self._state = results["state"]
            self._record = results["record"]
            self._seen = results["observation"]
            rewards.append(results["reward"])
            executions.append(results["executed"])
            self._history.push(action, results["executed"])
        lanes = slice(self.num_envs)
        return self.outcome(torch.cat(rewards).t()[lanes], torch.cat(executions).t()[lanes] > 0.5)

    def stepped(self, action: Tensor) -> dict[str, Tensor]:
        """State, record, observation, reward and executed after one step with `action` [4, L]."""
        return self._kernels("step", {"action": action, **self._inputs()})

    def outcome(self, reward: Tensor, executed: Tensor) -> Outcome:
        """Outcome of a chunk from `reward` and `executed` [N, K], and the record."""
        now = self.record
        return Outcome(
            reward,
            executed,
            now.terminated,
            self.mdp.success(now),
            now.truncated,
            metrics=self.mdp.metrics(now),
            failures=self.mdp.failures(now),
        )

    def observe(self) -> TensorDict:
        """Observations of the sensors and past actions after the last step."""
        rows = self._seen[:, : self.num_envs]
        history = self._history.split_rows_input(self.num_envs)
        return TensorDict(split_rows(self.contract.observation, rows, history), batch_size=[self.num_envs])

    def unroll(
        self, layers: Sequence[tuple[Tensor, Tensor]], decisions: int, max_action_gradient: float = math.inf
    ) -> Rollout:
        """Run `decisions` steps with an MLP policy, differentiable by its layers; see `unroll.unroll`."""
        return unroll(self, layers, decisions, max_action_gradient)

    def detach(self) -> None:
        """Detach the current state: gradients of later steps end here."""
        self._state, self._seen = self._state.detach(), self._seen.detach()
        self._history.detach()

    def save(self) -> dict[str, Any]:
        """Rows of the kernels and the history; only the history is copied, because steps never write to the rows."""
        tensors = {name: getattr(self, f"_{name}").detach() for name in SAVED}
        return tensors | {"history": self._history.rows.detach().clone()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        for name in SAVED:
            setattr(self, f"_{name}", state[name].to(self.device, copy=True))
        self._history.rows = state["history"].to(self.device, copy=True)

    def _allocate(self) -> None:
        lanes = pad(self.num_envs)
        device = self.device
        self._state = torch.zeros(self.options.state_rows, lanes, device=device)
        self._state[3] = 1.0  # lanes beyond N compute too: a rotation keeps them finite
        self._record = torch.zeros(self.episode.record_rows, lanes, device=device)
        self._record[1] = 1.0  # frozen until its first reset, as lanes beyond N always are
        self._disturbance = torch.zeros(self.episode.disturbance_rows, lanes, device=device)
        self._key = torch.zeros(2, lanes, dtype=torch.int32, device=device)
        self._seen = torch.zeros(self.episode.observation_rows, lanes, device=device)
        values = self.airframe.values() if self.airframe else [1.0] * len(PARAMETERS)
        shape = (len(PARAMETERS), lanes if self.episode.randomised else 1)
        self._airframe = torch.tensor(values, device=device).unsqueeze(1).expand(shape).contiguous()
        self._settings = torch.tensor(self.episode.settings(self.step_limit), device=device).unsqueeze(1)

    def _inputs(self) -> dict[str, Tensor]:
        """Inputs of the kernels except the action."""
        return {
            "state": self._state,
            "record": self._record,
            "disturbance": self._disturbance,
            "key": self._key,
            "airframe": self._airframe,
            "settings": self._settings,
        }

    def _put(self, name: str, ids: Tensor, rows: Tensor) -> None:
        setattr(self, name, getattr(self, name).index_copy(1, ids, rows[:, : len(ids)]))

    def _platforms(self, key: Tensor) -> Tensor:
        if self.airframe is None:
            return self.platforms.platforms(draws(key, DRAWS))
        first = len(SCATTERED)
        numbers = draws(key, first + VARIED)
        varied = (self.variation or Variation()).airframes(self.airframe, numbers[first:])
        return scatter(varied, numbers[:first], self.scatter_width)

    def _padded(self, actions: Tensor) -> list[Tensor]:
        """Actions [N, K, 4] as K tensors [4, L]."""
        rows = torch.nn.functional.pad(actions.float().permute(1, 2, 0), (0, self._state.shape[1] - self.num_envs))
        return list(rows.contiguous().unbind(0))


SAVED = ("state", "record", "disturbance", "key", "seen", "airframe")
