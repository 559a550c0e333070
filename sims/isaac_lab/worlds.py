"""Construction of Isaac Lab's environments, and their spaces as our contract.

Letters in shape comments: N worlds, K executed actions of a chunk, A action dimension.
"""

from __future__ import annotations

import difflib
import io
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import spaces
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError
from sims.gym.spaces import Actions, Observations

log = logging.getLogger(__name__)
PYTHON = ".venv-isaac/bin/python"
"""Interpreter that `make isaac` installs."""
CARTPOLE = "Robots/Classic/Cartpole/cartpole.usd"
"""End of the path of Isaac Lab's cartpole."""
READ = "policy"
"""Observation group of actors; all other groups are privileged."""


@dataclass(frozen=True)
class Options:
    """An environment and its settings; see `task.IsaacLabTask`."""

    id: str
    assets: str = "stock"
    overrides: tuple[str, ...] = ()
    executed: int = 1
    step_limit: int | None = None
    action_limit: float | None = None
    survival: bool = False


def make(options: Options, num_envs: int, device: str, seed: int) -> Any:  # noqa: ANN401 - of two unrelated classes
    """Make the simulator's environment of N worlds. A process can have one at a time.

    Raises:
        UserError: if Isaac Lab is missing, has no such environment, or cannot make it; if its version does not return
            true last observations; if this process already has an environment.
    """
    try:
        if int(version("isaaclab").partition(".")[0]) < 3:  # from the metadata: without Isaac Sim it cannot be imported
            raise _hidden()
        import isaaclab_tasks  # noqa: F401 - registers the environments
        from isaaclab.sim import SimulationContext
        from isaaclab_tasks.utils import parse_env_cfg
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed in {sys.executable}: make isaac, then add task.python={PYTHON}"
        ) from error
    if SimulationContext.instance() is not None:
        raise UserError(
            "a process has room for one environment of Isaac Lab: close the other one, or use task.processes=1"
        )
    if options.id not in gymnasium.registry:
        names = [name for name in gymnasium.registry if name.startswith("Isaac")]
        near = difflib.get_close_matches(options.id, names, n=4, cutoff=0.0)
        raise UserError(f"Isaac Lab has no environment {options.id!r}; did you mean {', '.join(near)}?")
    log.info(f"Starting {options.id}; the first start on a machine compiles its kernels, which takes a minute or more")
    with tempfile.TemporaryDirectory() as folder, _quiet():
        try:
            cfg = parse_env_cfg(options.id, device, num_envs, overrides=options.overrides)
            _adapt(cfg, options, device, seed, Path(folder))
            env = gymnasium.make(options.id, cfg=cfg).unwrapped
        except (ImportError, FileNotFoundError, ValueError, TypeError) as error:
            raise UserError(f"{options.id} cannot be made: {' '.join(str(error).split())}{_hint(options)}") from error
    return env


def contract(env: Any, options: Options) -> Contract:  # noqa: ANN401
    """Contract derived from the spaces of `env`: chunks of K actions, all of which are executed.

    Raises:
        UserError: for several agents, spaces that are no boxes, and actions without limits.
    """
    if not hasattr(env, "single_action_space"):
        raise UserError(f"{options.id} has several agents or none; expected an environment with one")
    observation_space = env.single_observation_space
    if others := [name for name, space in _leaves(observation_space) if not isinstance(space, spaces.Box)]:
        raise UserError(f"observation {others[0]!r} of {options.id} is no box of numbers; choose another environment")
    if not isinstance(env.single_action_space, spaces.Box):
        raise UserError(f"{options.id} takes actions in {env.single_action_space}; expected a box of numbers")
    specs = {
        name: replace(spec, privileged=name.partition(".")[0] != READ)
        for name, spec in Observations(observation_space, 0).specs.items()
    }
    action = Actions(env.single_action_space, options.action_limit, options.id).spec
    return Contract(specs, action, round(float(env.step_dt), 9), horizon=options.executed, executed=options.executed)


def flat(observation: Mapping[str, Any], outer: str = "") -> dict[str, Tensor]:
    """Copies of the tensors of a nested `observation`, by "outer.inner"."""
    tensors: dict[str, Tensor] = {}
    for name, value in observation.items():
        tensors |= flat(value, f"{outer}{name}.") if isinstance(value, Mapping) else {f"{outer}{name}": value.clone()}
    return tensors


def _leaves(space: spaces.Space, outer: str = "") -> Iterator[tuple[str, spaces.Space]]:
    if isinstance(space, spaces.Dict):
        for name, part in space.items():
            yield from _leaves(part, f"{outer}.{name}" if outer else name)
    else:
        yield outer, space


def _adapt(cfg: Any, options: Options, device: str, seed: int, folder: Path) -> None:  # noqa: ANN401
    """Change the settings `cfg` according to `options`."""
    if not hasattr(cfg, "compute_final_obs"):
        raise _hidden()
    cfg.compute_final_obs = True
    cfg.seed = seed
    if options.step_limit is not None:  # half a step less, as the simulator rounds up
        cfg.episode_length_s = (options.step_limit - 0.5) * cfg.sim.dt * cfg.decimation
    if not device.startswith("cuda") and hasattr(cfg.sim.physics, "use_cuda_graph"):
        cfg.sim.physics.use_cuda_graph = False
    if options.assets == "own":
        _use_own(cfg.scene, options.id, folder)


def _use_own(scene: Any, id: str, folder: Path) -> None:  # noqa: ANN401
    """Remove the ground plane of `scene`, and replace Isaac Lab's cartpole with ours.

    Raises:
        UserError: if it needs other files from NVIDIA's server.
    """
    from sims.isaac_lab.cartpole import write_cartpole

    for name, asset in list(vars(scene).items()):
        path = getattr(getattr(asset, "spawn", None), "usd_path", None)
        if path is None:
            continue
        if path.endswith(CARTPOLE):
            asset.spawn.usd_path = str(write_cartpole(folder / "cartpole.usda"))
        elif type(asset.spawn).__name__ == "GroundPlaneCfg":
            setattr(scene, name, None)
        else:
            raise UserError(f"task.assets=own has a cartpole and no more; {id} needs {path}: use task.assets=stock")


def _hidden() -> UserError:
    return UserError(
        f"isaaclab {version('isaaclab')} hides the last observations of episodes; expected 3.0.0, whose settings have"
        " compute_final_obs"
    )


def _hint(options: Options) -> str:
    return "" if options.assets == "own" else "; where its assets cannot be had, task.assets=own has a cartpole"


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirect Isaac Lab's output to the debug log, and restore the handlers of the root logger."""
    root = logging.getLogger()
    output = io.StringIO()
    handlers = list(root.handlers)
    level = root.level
    try:
        with redirect_stdout(output):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        log.debug(output.getvalue())
