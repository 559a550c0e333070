"""Quadrotors as a vectorised, differentiable Environment.

Letters in shape comments: N environments, K executed actions of a chunk, M environments that begin an episode, L lanes
(N padded to whole blocks of the kernels). Tensors of rows are [rows, L].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.rollout import Rollout
from sims.quadrotor.airframes import CRAZYFLIE, DRAWS, PARAMETERS, Airframe, sample_platforms, scatter
from sims.quadrotor.dynamics import DT_S, Body, Options
from sims.quadrotor.episode import COUNTERS, Episode, Mdp
from sims.quadrotor.observation import History, action_spec, observation_specs, split_rows
from sims.quadrotor.starts import Stream, draws, keys
from sims.quadrotor.tasks.hover import Hover
from sims.quadrotor.unroll import unroll, unroll_source
from sims.tracer.kernels import Kernels, pad

STEP_LIMIT = 500


class QuadrotorEnvironment:
    """N quadrotors, each in an episode of its own; implements `embodied.environment.DifferentiableEnvironment`.

    An episode is terminated where the task says so, and truncated at the step limit, or before where the task is done.
    What success is, and the transition's metrics, are the task's. Hover's: it has survived to the step limit; "survive"
    (1 or 0; 0 while it runs) and "position_error_m", the mean distance from the goal over the last second of an episode
    that reached its step limit (NaN elsewhere).

    Args:
        num_envs: N.
        mdp: the task.
        airframe: what flies; None: every episode has a random platform, see `airframes.sample_platforms`.
        scatter_width: every episode's parameters differ from `airframe`'s by up to this share.
        options: effects of the dynamics.
        split: "train" or "eval": initial states, disturbances and noise that have none in common.
        history: actions that are observed; 1 is `previous_action`, more are `action_history`, oldest first.
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control steps after which an episode is truncated.
        seed: which initial states an unnamed reset takes.
        noise: whether observations are noisy.
        device: where it runs: "cpu" (compiled C) or a CUDA device.
        backend: "c", "cuda" or "torch" in place of the device's own.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        mdp: Mdp | None = None,
        airframe: Airframe | None = CRAZYFLIE,
        scatter_width: float = 0.0,
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
        if min(num_envs, step_limit, history, executed) < 1:
            got = f"num_envs={num_envs}, step_limit={step_limit}, history={history}, executed={executed}"
            raise UserError(f"expected at least one of each, got {got}")
        self.num_envs, self.step_limit, self.split = num_envs, step_limit, split
        self.device, self.airframe, self.scatter_width = torch.device(device), airframe, scatter_width
        self.mdp: Mdp = mdp or Hover()
        self.options = options or Options()
        specs = observation_specs(self.mdp.OBSERVED, history)
        self.contract = Contract(specs, action_spec(), DT_S, horizon=executed, executed=executed)
        self.task_names: tuple[str, ...] = (type(self.mdp).__name__.lower(),)
        self.task_index = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.start = torch.full((num_envs,), -1, device=self.device)
        self.num_starts = None
        self.episode = Episode(self.mdp, self.options, randomised=airframe is None or scatter_width > 0.0, noise=noise)
        programs = self.episode.programs()
        self._kernels = Kernels(programs, self.device, backend=backend, appendix=unroll_source(self.episode))
        self._history = History(history, pad(num_envs), self.device)
        self._stream = Stream(seed)
        self._begun = False
        self._allocate()

    @property
    def backend(self) -> str:
        """What runs the dynamics: "c", "cuda" or "torch"."""
        return self._kernels.backend

    @property
    def steps(self) -> Tensor:
        """Control steps executed in the running episode, [N] int64."""
        return self._record[0, : self.num_envs].long()

    @property
    def pose(self) -> tuple[Tensor, Tensor]:
        """True position [N, 3], m, and rotation matrix [N, 3, 3] from body to world."""
        body = Body.of(self._state[:, : self.num_envs].detach())
        return torch.stack(body.position, 1), torch.stack(body.rotation(), 1).view(-1, 3, 3)

    @property
    def plan(self) -> Tensor:
        """What the running episodes began with, [P, N]; see the task."""
        return self._disturbance[self.options.disturbance_rows :, : self.num_envs]

    def reset(self, mask: Tensor | None = None, seed: int | None = None, starts: Tensor | None = None) -> TensorDict:
        """Start new episodes where `mask` [N] is True (everywhere if None); returns the observations of all.

        Args:
            mask: which environments.
            seed: begin the stream of initial states anew from this seed.
            starts: [N] initial states by number; the next ones of the stream if None.

        Raises:
            ValueError: for shapes other than [N] or negative initial states.
        """
        if seed is not None:
            self._stream = Stream(seed)
        if mask is None:
            ids = torch.arange(self.num_envs, device=self.device)
        else:
            ids = self._vector("mask", mask).bool().nonzero().squeeze(1)
        if len(ids):
            chosen = self._stream.take(len(ids)).to(self.device)
            if starts is not None:
                self._stream.taken -= len(ids)
                chosen = self._vector("starts", starts)[ids].long()
            if bool((chosen < 0).any()):
                raise ValueError(f"expected initial states >= 0, got {int(chosen.min())}")
            self._begin(ids, chosen)
        return self._observed()

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, 4], clipped to [-1, 1]; environments whose episode has ended stay frozen.

        In grad mode the reward and the observation carry gradients from the actions, of this step and of earlier ones
        since `detach` or the episode's beginning.

        Raises:
            ValueError: for another shape, an action that is not finite, or before the first reset.
        """
        self._check(actions)
        rows = self._padded(actions)
        reward, executed = [], []
        for action in rows:
            found = self._kernels("step", {"action": action, **self._inputs()})
            self._state, self._record, self._seen = found["state"], found["record"], found["observation"]
            reward.append(found["reward"])
            executed.append(found["executed"])
            self._history.push(action, found["executed"])
        lanes = slice(self.num_envs)
        return self._transition(torch.cat(reward).t()[lanes], torch.cat(executed).t()[lanes] > 0.5)

    def unroll(self, layers: Sequence[tuple[Tensor, Tensor]], decisions: int) -> Rollout:
        """Fly `decisions` steps with an MLP policy, differentiable by its layers; see `unroll.unroll`."""
        return unroll(self, layers, decisions)

    def detach(self) -> None:
        """Forget how the present state came about: gradients of later steps end here."""
        self._state, self._seen = self._state.detach(), self._seen.detach()
        self._history.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as a tree of tensors and numbers."""
        tensors = {name: getattr(self, f"_{name}").detach().clone() for name in SAVED}
        return {
            **tensors,
            "start": self.start.clone(),
            "history": self._history.rows.detach().clone(),
            "seed": self._stream.seed,
            "taken": self._stream.taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments.

        Raises:
            UserError: where the state is of other environments.
        """
        mine = self.state_dict()
        for name in (*SAVED, "start", "history"):
            if state[name].shape != mine[name].shape:
                raise UserError(
                    f"the saved {name} has shape {tuple(state[name].shape)}, expected {tuple(mine[name].shape)}; "
                    "use the num_envs, history and options that it was saved with"
                )
        for name in SAVED:
            setattr(self, f"_{name}", state[name].to(self.device, copy=True))
        self.start, self._history.rows = (state[name].to(self.device, copy=True) for name in ("start", "history"))
        self._stream, self._begun = Stream(state["seed"]), False
        self._stream.taken = state["taken"]
        return self._observed()

    def _allocate(self) -> None:
        lanes, device = pad(self.num_envs), self.device
        self._state = torch.zeros(self.options.state_rows, lanes, device=device)
        self._state[3] = 1.0  # lanes beyond N compute, too: a rotation keeps them finite
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
        """Inputs of the kernels, but for the action."""
        return {
            "state": self._state, "record": self._record, "disturbance": self._disturbance, "key": self._key,
            "airframe": self._airframe, "settings": self._settings,
        }  # fmt: skip

    def _begin(self, ids: Tensor, starts: Tensor) -> None:
        """Put environments `ids` [M] at the beginning of episodes `starts` [M]."""
        count = len(ids)
        key = torch.nn.functional.pad(keys(self.split, starts).to(self.device), (0, pad(count) - count))
        airframe = self._platforms(key) if self.episode.randomised else self._airframe
        common = {"key": key, "airframe": airframe, "settings": self._settings}
        fresh = self._kernels("begin", common)
        fresh |= {"record": torch.zeros(self.episode.record_rows, key.shape[1], device=self.device), "key": key}
        fresh |= self._kernels("observe", {**fresh, **common})
        for name in ("state", "record", "disturbance", "key"):
            self._put(f"_{name}", ids, fresh[name])
        self._put("_seen", ids, fresh["observation"])
        if self.episode.randomised:
            self._put("_airframe", ids, airframe)
        self._history.restart(ids, fresh["observation"][self.episode.previous])
        self.start = self.start.index_copy(0, ids, starts)

    def _put(self, name: str, ids: Tensor, rows: Tensor) -> None:
        setattr(self, name, getattr(self, name).index_copy(1, ids, rows[:, : len(ids)]))

    def _platforms(self, key: Tensor) -> Tensor:
        if self.airframe is None:
            return sample_platforms(draws(key, DRAWS))
        return scatter(self.airframe, draws(key, len(PARAMETERS)), self.scatter_width)

    def _transition(self, reward: Tensor, executed: Tensor) -> Transition:
        lanes = slice(self.num_envs)
        terminated, truncated = self._record[1:3, lanes] > 0.5
        memory = self._record[COUNTERS:, lanes]
        return Transition(
            observation=self._observed(),
            reward=reward,
            executed=executed,
            terminated=terminated,
            truncated=truncated,
            success=self.mdp.success(truncated, memory).clone(),
            metrics=self.mdp.metrics(truncated, memory, self.step_limit),
        )

    def _observed(self) -> TensorDict:
        seen, history = self._seen[:, : self.num_envs], self._history.seen(self.num_envs)
        parts = split_rows(self.contract.observation, seen, history)
        return TensorDict(parts, batch_size=[self.num_envs])

    def _padded(self, actions: Tensor) -> list[Tensor]:
        """Actions [N, K, 4] as K tensors [4, L]."""
        rows = torch.nn.functional.pad(actions.float().permute(1, 2, 0), (0, self._state.shape[1] - self.num_envs))
        return list(rows.contiguous().unbind(0))

    def _check(self, actions: Tensor) -> None:
        expected = (self.num_envs, self.contract.executed, 4)
        if actions.shape != expected:
            raise ValueError(f"expected actions of shape {expected}, got {tuple(actions.shape)}")
        self.check_begun()
        if not math.isfinite(float(actions.detach().sum())) and not bool(actions.isfinite().all()):
            broken = (~actions.isfinite().all(-1).all(-1)).nonzero().flatten().tolist()
            raise ValueError(f"actions of environments {broken} are not finite; check the policy's output")

    def check_begun(self) -> None:
        """Raise ValueError where an environment has no episode yet."""
        self._begun = self._begun or bool((self.start >= 0).all())
        if not self._begun:
            raise ValueError("an environment has no episode yet; call reset() first")

    def _vector(self, name: str, values: Tensor) -> Tensor:
        if values.shape != (self.num_envs,):
            raise ValueError(f"expected {name} of shape ({self.num_envs},), got {tuple(values.shape)}")
        return values.to(self.device)


SAVED = ("state", "record", "disturbance", "key", "seen", "airframe")
