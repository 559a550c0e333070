"""Gymnasium environments as a vectorised Environment.

Letters in shape comments: N worlds, K executed actions of a chunk, A action dimension, M worlds that begin an episode.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from PIL import Image
from tensordict import TensorDict
from torch import Tensor

from embodied.environments.engine import Outcome, RestorableEngine
from embodied.errors import UserError
from embodied.evaluation.evaluation import SUCCESS_AT_RESET
from embodied.seeding import derive
from sims.gym.spaces import RENDER, Actions, Array, Observations, contract

log = logging.getLogger(__name__)
SUCCESS = "is_success", "success"
"""Keys of success in the info of a step or a reset; the first one that exists is used."""
WITHOUT_FRAMES = "video=false and task.images=[]"
"""Options without which an environment need not render."""


class GymEnvironment(RestorableEngine):
    """N worlds of one Gymnasium environment, stepped one after another; the engine resets them.

    Initial state `start` is `reset(seed=...)` with a seed derived from the environment's name, `split` and `start`. An
    episode succeeded if the info of its last step has a success (`SUCCESS`), or its return reached `success_return`;
    without both, success is not defined, and returns are reported. A world where an observation or a reward is not
    finite has diverged. A saved state contains the actions of the running episodes, which `restore` repeats.

    Args:
        num_envs: N.
        id: the environment's id, for gymnasium.make.
        options: further arguments of gymnasium.make.
        split: "train" or "eval", with different seeds.
        executed: K, actions of a chunk that are executed, of the H = `horizon` that a policy predicts (K if None).
        image_size: pixels a side of the frames of the environment's own renderer, which are observed once a chunk; no
            frames if None.
        privileged: observations that only critics read.
        step_limit: control steps after which an episode is truncated; the environment's own if None.
        control_dt_s: time between actions; the environment's own if None.
        action_limit: bound of action elements without limits in the environment.
        success_return: an episode with at least this return succeeded.
        seed: selects the initial states of a reset without starts.

    Raises:
        UserError: for an unknown environment, or one that cannot be used.
    """

    def __init__(
        self,
        num_envs: int,
        id: str,
        *,
        options: Mapping[str, Any] | None = None,
        split: str = "train",
        executed: int = 1,
        horizon: int | None = None,
        image_size: int | None = None,
        privileged: Sequence[str] = (),
        step_limit: int | None = None,
        control_dt_s: float | None = None,
        action_limit: float | None = None,
        success_return: float | None = None,
        seed: int = 0,
    ) -> None:
        self.id = id
        self.split = split
        self.success_return = success_return
        self.has_success = success_return is not None
        if image_size is not None:
            options = {**(options or {}), "render_mode": "rgb_array"}
        first = make(id, step_limit, options)
        described = contract(first, executed, control_dt_s, action_limit, horizon, image_size, privileged)
        super().__init__(described, num_envs, limit(first), task_names=(id,), seed=seed)
        self.worlds = [first, *(make(id, step_limit, options) for _ in range(num_envs - 1))]
        self._actions = Actions(first.action_space, action_limit, id)
        self._observations = Observations(first.observation_space, num_envs)
        self._frames = None if image_size is None else np.zeros((num_envs, image_size, image_size, 3), np.uint8)
        self._past_actions: list[list[Array]] = [[] for _ in self.worlds]
        self._returns = np.zeros(num_envs)
        self._success_at_reset = np.full(num_envs, np.nan)  # from the info of the reset; NaN without it

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Reset the worlds with the seeds of `starts`."""
        rows = ids.tolist()
        first = []
        for row, start in zip(rows, starts.tolist(), strict=True):
            observation, info = self.worlds[row].reset(seed=derive(start, self.id, self.split) % (1 << 31))
            first.append(observation)
            if (success := _success(info)) is not None:
                self.has_success = True
                self._success_at_reset[row] = success
            self._past_actions[row] = []
            self._returns[row] = 0.0
        if broken := self._observations.read(rows, first):
            start = int(starts[rows.index(broken[0])])
            raise UserError(f"{self.id} begins with an observation that is not finite, initial state {start}")
        self._render(rows)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Step each world until the end of its chunk or its episode."""
        world_actions = self._actions.chosen(actions.detach().numpy())
        reward = np.zeros(world_actions.shape[:2])
        executed = np.zeros(world_actions.shape[:2], dtype=bool)
        terminated, truncated, success, diverged = np.zeros((4, self.num_envs), dtype=bool)
        counts = remaining_steps.tolist()
        last_observations = {}
        rows = [row for row, count in enumerate(counts) if count]
        for k in range(world_actions.shape[1]):
            if not rows:
                break
            stepped = slice(None) if len(rows) == self.num_envs else rows  # a slice is several times as fast as indices
            results = [self._step(row, action) for row, action in zip(rows, world_actions[stepped, k], strict=True)]
            observations, earned, terminations, truncations, infos = zip(*results, strict=True)
            reward[stepped, k] = earned
            executed[stepped, k] = True
            terminated[stepped] = terminations
            truncated[stepped] = truncations
            success[stepped] = self._reported_success(infos)
            last_observations.update(zip(rows, observations, strict=True))
            if not all(map(math.isfinite, earned)):
                diverged |= ~np.isfinite(reward[:, k])
                reward[diverged, k] = 0.0
            ended = terminated | truncated | diverged
            rows = [row for row in rows if counts[row] > k + 1 and not ended[row]]
        diverged[self._observations.read(list(last_observations), list(last_observations.values()))] = True
        self._render(list(last_observations))
        self._returns += reward.sum(1)
        metrics = {}
        if self.has_success:
            success = self._succeeded(success, terminated | truncated | diverged, executed)
            metrics = {"return": torch.from_numpy(self._returns.copy())}
            if np.isfinite(self._success_at_reset).any():
                metrics[SUCCESS_AT_RESET] = torch.from_numpy(self._success_at_reset.copy())
        flags = (terminated, success, truncated, diverged)
        return Outcome(reward.astype(np.float32), executed, *flags, metrics, has_success=self.has_success)

    def observe(self) -> TensorDict:
        """The latest observations of all worlds."""
        observation = {name: torch.from_numpy(buffer.copy()) for name, buffer in self._observations.buffers.items()}
        if self._frames is not None:
            observation[f"{RENDER}_image"] = torch.from_numpy(self._frames.copy())
        return TensorDict(observation, batch_size=[self.num_envs])

    def close(self) -> None:
        """Close the worlds."""
        for world in self.worlds:
            world.close()

    def save(self) -> dict[str, Any]:
        """Actions of the running episodes, their latest observations and their returns."""
        histories = [torch.from_numpy(np.array(actions)) for actions in self._past_actions]
        return {"actions": histories, "observation": self.observe().to_dict(), "returns": self._returns.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        """Repeat the actions of the running episodes.

        Raises:
            UserError: if the observations differ from the saved ones.
        """
        started = (self.start >= 0).nonzero().squeeze(1)
        self.begin(started, self.start[started])
        for row in started.tolist():
            observations = [self._step(row, action.copy())[0] for action in state["actions"][row].numpy()]
            self._observations.read([row] * bool(observations), observations[-1:])
        self._render(started.tolist())
        self._returns = np.array(state["returns"])
        for name, observations in self.observe().items():
            if not torch.equal(observations[started], state["observation"][name][started]):
                raise UserError(
                    f"{self.id} is not the same twice: the same seeds and actions lead to another {name}, so its runs "
                    "cannot be resumed; start a new one"
                )

    def _render(self, rows: Sequence[int]) -> None:
        """Store frames of the worlds `rows`, unless frames are not observed."""
        if self._frames is not None:
            for row in rows:
                self._frames[row] = resized(frame(self.worlds[row], self.id), self._frames.shape[1])

    def _step(self, row: int, action: Array) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step world `row`; the history has a copy of `action`, which the world may modify."""
        self._past_actions[row].append(action.copy())
        return self.worlds[row].step(action)

    def _reported_success(self, infos: Sequence[dict[str, Any]]) -> list[bool]:
        """Success flags of `infos`, False without one; sets `has_success` once one exists."""
        flags = [_success(info) for info in infos]
        self.has_success = self.has_success or any(each is not None for each in flags)
        return [bool(each) for each in flags]

    def _succeeded(self, reported: Array, ended: Array, executed: Array) -> Array:
        """Whether episodes that end now succeeded, [N] bool; they end where `ended`, or at the step limit."""
        success = reported if self.success_return is None else self._returns >= self.success_return
        late = self.steps.numpy() + executed.sum(1) >= self.step_limit
        return success & (ended | late)


def _success(info: Mapping[str, Any]) -> bool | None:
    """Success in the `info` of a step or a reset; None if it has no such key."""
    success = info.get(SUCCESS[0], info.get(SUCCESS[1]))
    return None if success is None else bool(success)


def located(id: str) -> tuple[str, Path | None]:
    """Id "module:Id-v0" of a user's module and the module's folder, from which it can be imported afterwards.

    `id` may begin with the folder, "path/module.py:Id-v0"; otherwise the working directory is searched. The folder is
    None for installed modules and ids without a module.

    Raises:
        UserError: if the folder does not have the module, or another one of its name would be imported.
    """
    place, separator, name = id.rpartition(":")
    path = Path(place).expanduser().absolute()
    module = path.name.removesuffix(".py")
    folder = path.parent.resolve()
    top = module.partition(".")[0]
    exists = bool(top) and ((folder / f"{top}.py").is_file() or (folder / top).is_dir())
    has_path = place != module
    if not separator or not (exists or has_path):
        return id, None
    if not exists:
        raise UserError(
            f"there is no module {module} in {folder}; if it has moved, use task.id=FOLDER/{module}.py:{name}"
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(top)
    origin = Path((spec.origin or next(iter(spec.submodule_search_locations or ()), "")) if spec else "").resolve()
    if not origin.is_relative_to(folder):
        if has_path:
            raise UserError(f"another module {top}, {origin}, hides the one in {folder}; rename yours")
        return id, None
    return f"{module}:{name}", folder


def make(id: str, step_limit: int | None = None, options: Mapping[str, Any] | None = None) -> gymnasium.Env:
    """One world of environment `id`; "module:Id-v0" imports the module that registers it first, see `located`.

    Raises:
        UserError: if it does not exist, lacks a package or a time limit, resets itself, or refuses `options`.
    """
    id, _ = located(id)
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it when it is imported; its default needs a display
    try:
        with _each_warning_once():
            world = gymnasium.make(id, max_episode_steps=step_limit, disable_env_checker=True, **(options or {}))
    except gymnasium.error.UnregisteredEnv as error:
        near = difflib.get_close_matches(id.rpartition(":")[2], gymnasium.registry, n=4)
        hint = f"did you mean {', '.join(near)}?" if near else "one of another package is named module:Id-v0"
        raise UserError(f"Gymnasium knows no environment {id!r}; {hint}") from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        elsewhere = "; a module in another folder is named FOLDER/module.py:Id-v0"
        hint = elsewhere if isinstance(error, ImportError) and ":" in id else ""
        raise UserError(f"{id} cannot be made: {error}{hint}") from error
    except Exception as error:  # graphics libraries raise errors of any kind
        if "render_mode" not in (options or {}):
            raise
        raise _not_rendered(id, error) from error
    layer = world
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, gymnasium.wrappers.Autoreset):
            raise UserError(f"{id} resets itself, which hides how episodes end; register it without Autoreset")
        layer = layer.env
    if world.spec is None or world.spec.max_episode_steps is None:
        raise UserError(f"{id} has no time limit; set task.step_limit")
    return world


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Context in which MuJoCo's warnings about a model are logged once, not for each of N worlds."""
    if importlib.util.find_spec("mujoco") is None:
        yield
        return
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(_warn_once)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


@cache
def _warn_once(text: str) -> None:
    log.warning(f"MuJoCo: {text}")


def frame(world: gymnasium.Env, id: str) -> Array:
    """Frame [height, width, 3] of the renderer of `world`, the environment `id`.

    Raises:
        UserError: if it cannot render here.
    """
    try:
        picture = np.asarray(world.render(), dtype=np.uint8)
    except Exception as error:  # graphics libraries raise errors of any kind
        raise _not_rendered(id, error) from error
    if picture.ndim != 3 or picture.shape[2] != 3:
        raise UserError(f"{id} renders {list(picture.shape)} in place of [height, width, 3]; use {WITHOUT_FRAMES}")
    return picture


def _not_rendered(id: str, error: Exception) -> UserError:
    cause = " ".join(str(error).split())
    return UserError(f"{id} cannot be rendered here ({cause}); use {WITHOUT_FRAMES}")


def resized(picture: Array, size: int) -> Array:
    """The middle square of `picture` [height, width, 3], averaged to `size` pixels a side."""
    height, width, _ = picture.shape
    edge = min(height, width)
    top = (height - edge) // 2
    left = (width - edge) // 2
    box = (left, top, left + edge, top + edge)
    return np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BOX, box))


def limit(world: gymnasium.Env) -> int:
    """Control steps after which an episode of `world`, one of `make`, is truncated."""
    assert world.spec is not None
    assert world.spec.max_episode_steps is not None
    return world.spec.max_episode_steps
