"""Open-loop evaluation: predicted chunks of actions beside those that were recorded in held-out episodes.

Nothing is executed, so that there is no success rate: a policy's own mistakes never change what it observes next.
Letters: E episodes, D decisions, H actions of a chunk, A elements of an action.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from embodied import seeding
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.means import mean_interval
from embodied.policy import Policy, TrainablePolicy
from embodied.runtime.progress import Progress

BATCH = 64
"""Decisions whose pictures are in memory at a time."""
LOSS_ROWS = 256
"""Largest number of observations in a held-out loss."""
SHOWN = 2
"""Held-out episodes whose chunks a report shows."""
PREDICTORS = "policy", "hold", "mean"
"""The policy, and the baselines: hold the action before, and the mean action of training."""


def split(episodes: Episodes, share: float, *, failures: bool = False) -> tuple[Episodes, Episodes]:
    """Divide `episodes` into those to train on, and a `share` that is held out, the same in every run.

    Only episodes that did not fail and have known actions are held out, two or more where at least four remain, and
    never all of a data set. If there are fewer than two of these, `failures` are.

    Raises:
        UserError: if there are fewer than two that can be held out.
    """
    imitated = (~episodes.failed & ~episodes.unlabelled).nonzero().squeeze(1)
    if failures and len(imitated) < 2:
        imitated = (episodes.failed & ~episodes.unlabelled).nonzero().squeeze(1)
    if len(imitated) < 2:
        raise UserError(
            "expected at least 2 episodes that did not fail and have known actions, one of them to be held out, got"
            f" {len(imitated)}; record more"
        )
    count = max(round(share * len(imitated)), 2 if len(imitated) >= 4 else 1)
    order = imitated[torch.randperm(len(imitated), generator=torch.Generator().manual_seed(0))]
    data_set = torch.zeros_like(episodes.ends) if episodes.dataset_index is None else episodes.dataset_index
    kept = data_set[imitated].bincount()  # episodes of each data set that can be imitated
    held_out: list[int] = []
    for episode in order.tolist():
        if kept[data_set[episode]] > 1 and len(held_out) < count:
            kept[data_set[episode]] -= 1
            held_out.append(episode)
    is_held_out = torch.zeros(len(episodes.ends), dtype=torch.bool)
    is_held_out[held_out] = True
    trained, others = ((is_held_out == wanted).nonzero().squeeze(1) for wanted in (False, True))
    return episodes.selected(trained), episodes.selected(others)


@dataclass
class OpenLoopResult:
    """Errors of predicted actions on E held-out episodes, and the chunks to show.

    `errors` [3, E, A] are mean absolute errors of `PREDICTORS`, in `units`; `ranges` [A] are those of the actions in
    `trained` episodes. `shown` has, of each shown episode, its recorded `actions` [L, A], the rows [D] of `decisions`
    and the predicted `chunks` [D, H, A].
    """

    names: list[str]
    units: list[str]
    control_dt_s: float
    trained: int
    loss: float
    errors: Tensor
    ranges: Tensor
    shown: list[dict[str, Tensor]]

    def summary(self) -> dict[str, Any]:
        """Means over episodes with 95% intervals, by element and relative to the ranges; bounds of one episode: None.

        Elements that never changed in training have no relative error.
        """
        changing = self.ranges > 0
        relative = (self.errors[..., changing] / self.ranges[changing]).mean(-1)  # [3, E]
        return {
            "trained_episodes": self.trained,
            "held_out_episodes": self.errors.shape[1],
            "held_out_loss": self.loss,
            "error_of_range": _row(relative),
            "elements": [
                {"name": name, "unit": unit, **_row(self.errors[..., index])}
                for index, (name, unit) in enumerate(zip(self.names, self.units, strict=True))
            ],
        }


def _row(errors: Tensor) -> dict[str, float | None]:
    """Mean of the policy's errors [3, E] with its interval, and means of the baselines'."""
    mean, low, high = mean_interval(errors[0])
    # the gain over the better baseline, paired by episode
    better = errors[1:][errors[1:].mean(1).argmin()]
    _, gain_low, _ = mean_interval(better - errors[0])
    bounds = {"low": low, "high": high, "gain_low": gain_low}
    row: dict[str, float | None] = {name: value if isfinite(value) else None for name, value in bounds.items()}
    return {"policy": mean, **row, "hold": float(errors[1].mean()), "mean": float(errors[2].mean())}


class OpenLoop:
    """Evaluator on `held_out` episodes of policies that were trained on the episodes `trained`."""

    def __init__(self, held_out: Episodes, trained: Episodes, contract: Contract, device: str = "cpu") -> None:
        self.held_out = held_out
        self.contract = contract
        self.device = device
        _, actions = trained.by_weight()
        self.mean = actions.double().mean(0).float()
        self.ranges = actions.amax(0) - actions.amin(0)
        self.trained = int((~trained.failed).sum()) or len(trained.ends)

    @torch.no_grad()
    def loss(self, policy: TrainablePolicy) -> float:
        """Supervised loss of `policy` on held-out chunks, with the same noise at every call."""
        count = len(self.held_out)
        rows = torch.arange(min(count, LOSS_ROWS)) * count // min(count, LOSS_ROWS)
        total = valid = 0.0
        with seeding.undisturbed():
            torch.manual_seed(0)
            for part in rows.split(BATCH):
                batch = self.held_out.chunks(part, self.contract.horizon).to(self.device)
                weight = float(batch["valid"].sum())
                total += weight * float(policy.loss(batch["observation"], batch["actions"], batch["valid"]))
                valid += weight
        return total / valid

    def evaluate(self, policy: TrainablePolicy) -> OpenLoopResult:
        """Predict a chunk wherever the policy would decide, at every `executed`-th row from the second one on.

        The first row has no action before it, which a baseline holds. Chunks are compared up to the episode's end.
        """
        episodes = self.held_out
        executed = self.contract.executed
        rows_of = [(episodes.episode == number).nonzero().squeeze(1) for number in range(len(episodes.ends))]
        errors = []
        shown = []
        with Progress("open-loop evaluation", len(rows_of), "episode") as bar:
            for number, rows in enumerate(rows_of):
                decisions = rows[min(1, len(rows) - 1) :: executed]
                chunks = torch.cat([self._predicted(policy, part) for part in decisions.split(BATCH)])
                errors.append(self._errors(decisions, chunks))
                if number < SHOWN:
                    begin, end = (int(episodes.ends[each]) if each >= 0 else 0 for each in (number - 1, number))
                    first = episodes.first[decisions] - begin
                    shown.append({"actions": episodes.actions[begin:end], "decisions": first, "chunks": chunks})
                bar.update()
        spec = self.contract.action
        size = self.contract.action.shape[-1]
        units = spec.unit.split(", ") if ", " in spec.unit else [spec.unit] * size
        names = list(spec.names) or [f"action_{index}" for index in range(size)]
        loss = self.loss(policy)
        stacked = torch.stack(errors, 1)
        return OpenLoopResult(names, units, self.contract.control_dt_s, self.trained, loss, stacked, self.ranges, shown)

    def _predicted(self, policy: Policy, rows: Tensor) -> Tensor:
        """Chunks [D, H, A] of the policy, by the recorded observations `rows` [D]."""
        observation = self.held_out.chunks(rows, 1)["observation"].to(self.device)
        return policy.act(observation, deterministic=True).actions.float().cpu()

    def _errors(self, decisions: Tensor, chunks: Tensor) -> Tensor:
        """Mean absolute errors of `PREDICTORS` in one episode, [3, A]."""
        batch = self.held_out.chunks(decisions, self.contract.horizon)
        first = self.held_out.first[decisions]
        before = self.held_out.actions[(first - 1).clamp_min(0)].unsqueeze(1)  # [D, 1, A]
        valid = batch["valid"].unsqueeze(-1)
        predictions = chunks, before, self.mean.expand_as(before)
        # sum over valid actions of |a - a_recorded| / number of them
        sums = [((each - batch["actions"]).abs() * valid).sum((0, 1)) for each in predictions]
        return torch.stack(sums) / valid.sum()
