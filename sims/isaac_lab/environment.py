"""Any environment of Isaac Lab as an Environment of N worlds.

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

    A world that ends is reset by the simulator in the same step; here it stays frozen with its true last observation,
    which the simulator gives apart, until it is asked to begin. Meanwhile the simulator steps it on without anybody
    seeing it, with actions of zero. It begins with the simulator's own reset where it has not been stepped since, else
    with another one. A world where an observation or a reward is not finite has diverged.

    Initial states cannot be chosen: the simulator draws those of all worlds from one stream. Use it within
    `embodied.environments.engine.Unnumbered`.

    Args:
        num_envs: N.
        options: which environment.
        seed: of the simulator's random numbers.
        split: "train" or "eval": random numbers of their own.
        device: of the simulator.

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
        self._now: dict[str, Tensor] = {}  # of all worlds, as the simulator has them
        self._seen: dict[str, Tensor] = {}  # of all episodes
        self._untouched = torch.zeros_like(self.terminated)  # reset by the simulator: not stepped since, nor begun
        self._earned = torch.zeros(num_envs, device=self.device)  # return of the episode so far
        self._switches = 0

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Begin `ids` wherever the simulator likes; `starts` only count them."""
        stale = ids[~self._untouched[ids]]
        if len(stale):
            fresh = self._reset(stale)
            for name, values in fresh.items():
                self._now.setdefault(name, values)[stale] = values[stale]
        self._untouched[ids], self._earned[ids] = False, 0.0
        self._take_up(self._now, ids)

    def advance(self, actions: Tensor, left: Tensor) -> Outcome:
        """Step all worlds until each that runs has had its chunk, or its episode is over."""
        count = actions.shape[1]
        reward = torch.zeros(self.num_envs, count, device=self.device)
        executed = torch.zeros_like(reward, dtype=torch.bool)
        terminated, truncated, diverged = torch.zeros(3, self.num_envs, dtype=torch.bool, device=self.device)
        chosen = actions.detach().clamp(self._low, self._high)
        for index in range(count):
            going = (left > index) & ~(terminated | truncated | diverged)
            if not bool(going.any()):
                break
            earned, failed, late = self._step(chosen[:, index].masked_fill(~going.unsqueeze(1), 0.0), going)
            broken = going & ~earned.isfinite()
            reward[:, index] = earned.masked_fill(~going | broken, 0.0)
            executed[:, index] = going
            diverged |= broken
            terminated |= going & failed & ~broken
            truncated |= going & late & ~failed & ~broken
        survival = self.options.survival
        success = truncated if survival else torch.zeros_like(truncated)
        self._earned += reward.sum(1)
        metrics = {"return": self._earned.clone()} if survival else {}
        return Outcome(reward, executed, terminated, success, truncated, diverged, metrics, has_success=survival)

    def observe(self) -> TensorDict:
        """What the episodes saw last."""
        return TensorDict({name: values.clone() for name, values in self._seen.items()}, [self.num_envs])

    def switch(self, distribution: str, split: str) -> None:
        """Draw the next initial states for `split`: an evaluation always draws the same ones at first."""
        self._switches += 1
        self.env.seed(_seed(self.seed, split, self._switches if split == "train" else 0))
        self._untouched.fill_(False)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()

    def _step(self, actions: Tensor, going: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step; takes up the true observations of worlds `going`, where all is finite.

        Returns rewards [N], NaN where something is not finite, and whether worlds terminated and were truncated.
        """
        observation, reward, terminated, truncated, extras = self.env.step(actions)
        last = self._now = flat(observation)
        self._untouched = ended = terminated | truncated
        if bool(ended.any()):
            if "final_obs" not in extras:
                raise UserError(f"{self.options.id} does not give the last observations of episodes that end")
            final = flat(extras.pop("final_obs"))  # gone, so that none is taken for that of a later step
            last = {name: values.clone() for name, values in self._now.items()}
            for name, values in last.items():
                values[ended] = final[name][ended]
        finite = reward.isfinite()
        for values in last.values():
            finite = finite & values.reshape(self.num_envs, -1).isfinite().all(1)
        self._take_up(last, (going & finite).nonzero().squeeze(1))
        return reward.float().masked_fill(~finite, torch.nan), terminated.clone(), truncated.clone()

    def _reset(self, ids: Tensor) -> dict[str, Tensor]:
        """Let the simulator reset worlds `ids`, all others as they are; returns the observations of all."""
        env = self.env
        if len(ids) == self.num_envs:
            return flat(env.reset()[0])
        if hasattr(env, "observation_manager"):
            return flat(env.reset(ids)[0])
        # What DirectRLEnv.reset does, which knows no part of the worlds.
        env._reset_idx(ids.int())
        env.scene.write_data_to_sim()
        env.sim.forward()
        return flat(env._compute_observations())

    def _take_up(self, observation: dict[str, Tensor], ids: Tensor) -> None:
        """Show `observation` in episodes `ids`."""
        for name, values in observation.items():
            self._seen.setdefault(name, torch.zeros_like(values))[ids] = values[ids]


def _seed(seed: int, *purpose: str | int) -> int:
    return derive(seed, "isaac_lab", *purpose) % (1 << 31)
