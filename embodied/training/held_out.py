"""Evaluations during reinforcement learning: when, on how many episodes, and which policy was the best.

Their initial states occur in no other evaluation: they choose a policy, so that their highest value is biased upwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from embodied import seeding
from embodied.environment import Environment, NumberedStarts
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.in_training import InTraining, Point
from embodied.networks.precision import Precision
from embodied.policy import Policy
from embodied.run_options import AUTO, FIRST_START

SHARE = 0.05
"""Largest share of a run's time for automatic evaluations."""
FEWEST = 5
MOST = 20
USUAL = 10
"""Numbers of evaluations of a run; if fewer than the first are affordable, there is none."""
EPISODES = 20, 100
"""Least and largest number of episodes of an evaluation."""
SHORTEST_S = 20.0
"""Shortest run with automatic evaluations, s; shorter ones end before a curve is useful."""
PHASE = "evaluation in training"
RL_PHASES = "simulation", "policy", "update"


class HeldOut:
    """Evaluator in `env` after every `every` environment steps of training, and at its end; 0 or None: never.

    "auto" chooses the number of episodes and, again after each evaluation, the time of the next one, from their cost
    if each episode took all of its steps: episodes become longer where policies learn not to fail. Points are added to
    `in_training`, which the report shows. `final` initial states of each task, from `first` on, are left to evaluations
    after training.

    Raises:
        UserError: if evaluations were requested but are impossible in `env`, which is None if only training has one.
    """

    def __init__(
        self,
        every: int | str | None,
        env: Environment | None,
        in_training: InTraining,
        *,
        final: int,
        first: int = 0,
        device: str = "cpu",
        precision: Precision = Precision.FLOAT32,
    ) -> None:
        self.env = env
        self.in_training = in_training
        self.device = device
        self.precision = precision
        self.automatic = every == AUTO
        self.every = 0 if every == AUTO else int(every or 0)
        self.longer = 1.0  # factor by which the episodes of the last evaluation can still become longer
        self.planned: int | None = None  # step of the next automatic evaluation; 0: none, None: not chosen yet
        self.starts = 0
        self.refused = "the simulator exists only once, and an evaluation would end training's episodes"
        if env is not None:
            # the held-out starts are the last ones of a limited number, else far above those of other evaluations
            limit = env.num_starts if isinstance(env, NumberedStarts) else None
            max_starts = min(final, -(-EPISODES[1] // len(env.task_names)))
            self.starts = max_starts if limit is None else max(0, min(max_starts, limit - first - final))
            in_training.first_start = FIRST_START if limit is None else limit - self.starts
            self.refused = "" if self.starts else f"each of the {limit} initial states is one of the final evaluation"
        if self.refused and self.every:
            raise UserError(f"evaluate_every_steps={every} cannot work: {self.refused}; use evaluate_every_steps=null")

    def due(self, done: int, total: int, episodes: int, wall_s: Mapping[str, float]) -> bool:
        """Whether an evaluation is due after `done` of `total` environment steps and `episodes` of training.

        `wall_s` is the time of the run's phases so far, from which automatic sizes are chosen.
        """
        if self.automatic and self.planned is None and not self.refused and episodes and done * MOST >= total:
            length = self.env.step_limit if isinstance(self.env, NumberedStarts) else done / episodes
            episode_s = length * (wall_s["simulation"] + wall_s["policy"]) / done
            self._choose_size(done, episode_s, _whole_s(done, total, wall_s))
        last = self.in_training.points[-1]["env_steps"] if self.in_training.points else 0
        following = self.planned if self.automatic else self.every and (last // self.every + 1) * self.every
        return bool(following) and done > last and done >= min(total, following)

    def evaluate(self, policy: Policy, done: int) -> Point:
        """Evaluate `policy` after `done` environment steps, add the point and return it; no generator is disturbed."""
        assert self.env is not None
        with self.precision.on(self.device), seeding.undisturbed():
            first = self.in_training.first_start
            result = evaluate(self.env, policy, starts_per_task=self.starts, first_start=first, device=self.device)
        self.longer = result.step_limit / float(result.steps.double().mean()) if result.step_limit else 1.0
        summary = result.summary()
        point = {"env_steps": done, **{name: summary[name] for name in (result.measure, "low", "high", "episodes")}}
        self.in_training.points.append(point)
        return point

    def plan(self, took_s: float, done: int, total: int, wall_s: Mapping[str, float]) -> None:
        """Schedule the next evaluation after one that `took_s`.

        The affordable number is spread over the rest of training. The last policy is always compared with the others,
        unless that alone takes more than the time allowed for all.
        """
        allowed_s = SHARE * _whole_s(done, total, wall_s)
        # affordable = (time allowed - time spent) / (cost of one evaluation with full-length episodes)
        remaining = min(MOST - len(self.in_training.points), int((allowed_s - wall_s[PHASE]) / (took_s * self.longer)))
        self.planned = 0 if took_s > allowed_s else done + math.ceil((total - done) / max(remaining, 1))

    def _choose_size(self, done: int, episode_s: float, whole_s: float) -> None:
        """Choose as many episodes as allow the usual number of evaluations, if each takes `episode_s`."""
        assert self.env is not None
        affordable = SHARE * whole_s / max(episode_s, 1e-9)
        tasks = len(self.env.task_names)
        episodes = min(max(affordable / USUAL, EPISODES[0]), EPISODES[1])
        self.starts = min(self.starts, math.ceil(episodes / tasks))
        enough = whole_s >= SHORTEST_S and affordable >= FEWEST * self.starts * tasks
        self.planned = done if enough else 0

    def state_dict(self) -> dict[str, Any]:
        """Chosen size and time of evaluations."""
        return {"planned": self.planned, "starts": self.starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.planned = state["planned"]
        self.starts = state["starts"]


def _whole_s(done: int, total: int, wall_s: Mapping[str, float]) -> float:
    """Expected time of the phases before and of all of reinforcement learning, s."""
    learning = sum(wall_s[phase] for phase in RL_PHASES)
    return sum(wall_s.values()) - learning - wall_s.get(PHASE, 0.0) + learning * total / done
