"""Isaac Lab's environments as an Environment of N worlds.

Letters in shape comments: N worlds, K executed actions of a chunk, A action dimension, M worlds that begin an episode.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environments.engine import EpisodeEngine, Outcome
from embodied.errors import UserError
from embodied.seeding import derive
from sims.isaac_lab.worlds import Options, contract, flat, make


class IsaacLabEngine(EpisodeEngine):
    """N worlds of one environment of Isaac Lab, which steps all of them at once.

    The simulator resets a world in the step in which it ends; here it stays frozen with its true last observation,
    which the simulator returns separately, until its next `begin`. Meanwhile the simulator continues to step the world
    with actions of zero, and the results are ignored. An episode begins with the simulator's own reset if the world has
    not been stepped since, and otherwise with another reset. A world where an observation or a reward is not finite has
    diverged.

    Initial states cannot be chosen: the simulator draws those of all worlds from one stream. Use it within
    `embodied.environments.engine.Unnumbered`.

    Args:
        num_envs: N.
        options: the environment and its settings.
        seed: seed of the simulator's random numbers.
        split: "train" or "eval", with different random numbers.
        device: device of the simulator.

    Raises:
        UserError: for an environment that cannot be made or used.
    """

    def __init__(
        self, num_envs: int, *, options: Options, seed: int = 0, split: str = "train", device: str = "cpu"
    ) -> None:
        self.options = options
        self.env = make(options, num_envs, device, _seed(seed, split, 0))
        try:
            described = contract(self.env, options)
        except UserError:
            self.env.close()
            raise
        limit = int(self.env.max_episode_length)
        super().__init__(described, num_envs, limit, task_names=(options.id,), seed=seed, device=self.env.device)
        self._low, self._high = (
            torch.tensor(bound, device=self.device) for bound in (described.action.low, described.action.high)
        )
        self._now: dict[str, Tensor] = {}  # present observations of all worlds in the simulator
        self._latest: dict[str, Tensor] = {}  # latest observations of all episodes
        # Worlds that the simulator has reset, and that were neither stepped nor begun since.
        self._untouched = torch.zeros_like(self.terminated)
        self._earned = torch.zeros(num_envs, device=self.device)  # return of the episode so far
        self._switches = 0

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Begin episodes in worlds `ids` from initial states that the simulator draws; `starts` only count them."""
        stale = ids[~self._untouched[ids]]
        if len(stale):
            observations = self._reset(stale)
            for name, values in observations.items():
                self._now.setdefault(name, values)[stale] = values[stale]
        self._untouched[ids] = False
        self._earned[ids] = 0.0
        self._take_up(self._now, ids)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Step all worlds until each running one has executed its chunk, or its episode is over."""
        count = actions.shape[1]
        reward = torch.zeros(self.num_envs, count, device=self.device)
        executed = torch.zeros_like(reward, dtype=torch.bool)
        terminated, truncated, diverged = torch.zeros(3, self.num_envs, dtype=torch.bool, device=self.device)
        clamped = actions.detach().clamp(self._low, self._high)
        for index in range(count):
            running = (remaining_steps > index) & ~(terminated | truncated | diverged)
            if not bool(running.any()):
                break
            step_reward, failed, limit_reached = self._step(
                clamped[:, index].masked_fill(~running.unsqueeze(1), 0.0), running
            )
            broken = running & ~step_reward.isfinite()
            reward[:, index] = step_reward.masked_fill(~running | broken, 0.0)
            executed[:, index] = running
            diverged |= broken
            terminated |= running & failed & ~broken
            truncated |= running & limit_reached & ~failed & ~broken
        survival = self.options.survival
        success = truncated if survival else torch.zeros_like(truncated)
        self._earned += reward.sum(1)
        metrics = {"return": self._earned.clone()} if survival else {}
        return Outcome(reward, executed, terminated, success, truncated, diverged, metrics, has_success=survival)

    def observe(self) -> TensorDict:
        """Latest observations of the episodes."""
        return TensorDict({name: values.clone() for name, values in self._latest.items()}, [self.num_envs])

    def switch(self, distribution: str, split: str) -> None:
        """Draw the next initial states for `split`; every evaluation starts with the same ones."""
        self._switches += 1
        self.env.seed(_seed(self.seed, split, self._switches if split == "train" else 0))
        self._untouched.fill_(False)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()

    def _step(self, actions: Tensor, going: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make one step; stores the true observations of the worlds `going` where all numbers are finite.

        Returns rewards [N], NaN where something is not finite, and whether worlds terminated and were truncated.
        """
        observation, reward, terminated, truncated, extras = self.env.step(actions)
        last = self._now = flat(observation)
        self._untouched = ended = terminated | truncated
        if bool(ended.any()):
            if "final_obs" not in extras:
                raise UserError(f"{self.options.id} does not give the last observations of episodes that end")
            final = flat(extras.pop("final_obs"))  # removed, so that it is not used in a later step
            last = {name: values.clone() for name, values in self._now.items()}
            for name, values in last.items():
                values[ended] = final[name][ended]
        finite = reward.isfinite()
        for values in last.values():
            finite = finite & values.reshape(self.num_envs, -1).isfinite().all(1)
        self._take_up(last, (going & finite).nonzero().squeeze(1))
        return reward.float().masked_fill(~finite, torch.nan), terminated.clone(), truncated.clone()

    def _reset(self, ids: Tensor) -> dict[str, Tensor]:
        """Reset worlds `ids` in the simulator, without changing the others; returns the observations of all worlds."""
        env = self.env
        if len(ids) == self.num_envs:
            return flat(env.reset()[0])
        if hasattr(env, "observation_manager"):
            return flat(env.reset(ids)[0])
        # The steps of DirectRLEnv.reset, which can only reset all worlds.
        env._reset_idx(ids.int())
        env.scene.write_data_to_sim()
        env.sim.forward()
        return flat(env._compute_observations())

    def _take_up(self, observation: dict[str, Tensor], ids: Tensor) -> None:
        """Store `observation` as the latest one of the episodes `ids`."""
        for name, values in observation.items():
            self._latest.setdefault(name, torch.zeros_like(values))[ids] = values[ids]


def _seed(seed: int, *purpose: str | int) -> int:
    return derive(seed, "isaac_lab", *purpose) % (1 << 31)
