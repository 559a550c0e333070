"""Labels of unknown actions by an inverse-dynamics model (SS-ORL, arXiv 2210.06518).

A model learns from the steps with known actions which action leads from the observations before a step to the one after
it, and predicts the unknown ones. Every learner of episodes can then use them all.

Differs from the paper: the label is the mean of the model's Gaussian, not a sample; the model reads two observations
from before a step where the paper's default is one, as commands may act late; it has no dropout.

Letters: S control steps, B rows, A elements of an action, D elements of an observation.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from embodied.algorithms.finite import check_finite
from embodied.algorithms.offline.dynamics import GaussianEnsemble
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.data.transitions import held_out_episodes
from embodied.errors import UserError
from embodied.saving.files import complete_or_absent

FILE = "predicted_actions.pt"
"""File of a run with the predictions of unknown actions."""
HIDDEN = [256, 256]
LEARNING_RATE = 1e-3
BATCH = 256
HELD_OUT = 0.1
"""Layers of the model, its optimiser, and the share of the episodes that it does not learn from."""
PAST = 2
"""Number of observations before those around a step that the model reads."""
CHECKS = 20
"""Number of times that the error on held-out episodes is measured; the best weights are kept."""


def labelled(episodes: Episodes, contract: Contract, steps: int, seed: int, run: Path) -> tuple[Episodes, str]:
    """The `episodes` with predictions in place of unknown actions, and a note about them; "" if all are known.

    A model learns them in `steps` gradient steps.

    They are stored in the folder `run`, and read from there if they exist.

    Raises:
        UserError: for unknown actions if `steps` is 0, and without known actions, or observations before every step.
    """
    unknown = episodes.actions.isnan().any(1)
    if not bool(unknown.any()):
        return episodes, "All recorded actions are known, so that label_actions predicts none." if steps else ""
    if not steps:
        raise UserError(
            f"actions are unknown in {int(episodes.unlabelled.sum()):,} of {len(episodes.ends):,} episodes: add"
            " label_actions=2000, gradient steps of a model that predicts them, or leave these episodes out"
        )
    path = run / FILE
    if path.exists():
        saved = torch.load(path, weights_only=True)
        predicted, error = saved["actions"], saved["error"]
    else:
        predicted, error = _predictions(episodes, contract, steps, seed)
        run.mkdir(parents=True, exist_ok=True)
        with complete_or_absent(path) as temporary:
            torch.save({"actions": predicted, "error": error}, temporary)
    actions = episodes.actions.clone()
    actions[unknown] = predicted
    note = (
        f"Actions of {int(unknown.sum()):,} of {episodes.steps:,} recorded steps are unknown and predicted by an"
        f" inverse-dynamics model, whose error on held-out episodes is {100.0 * error:.0f}% of their deviation."
    )
    return replace(episodes, actions=actions), note


def _predictions(episodes: Episodes, contract: Contract, steps: int, seed: int) -> tuple[Tensor, float]:
    """Unknown actions [U, A], and the model's error in deviations of the actions."""
    inputs = _windows(episodes, contract)
    unknown = episodes.actions.isnan().any(1)
    labelled_steps = (~unknown).nonzero().squeeze(1)
    owner = _episode_of_steps(episodes)
    labelled_episodes = owner[labelled_steps].unique()
    if len(labelled_episodes) < 2:
        raise UserError("label_actions needs at least 2 episodes with known actions; add some to demonstrations=")
    is_held_out = torch.zeros(len(episodes.ends), dtype=torch.bool)
    is_held_out[labelled_episodes] = held_out_episodes(len(labelled_episodes), HELD_OUT)
    train = labelled_steps[~is_held_out[owner[labelled_steps]]]
    test = labelled_steps[is_held_out[owner[labelled_steps]]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GaussianEnsemble(inputs.shape[1], episodes.actions.shape[1], 1, HIDDEN)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    targets = episodes.actions
    model.fit_statistics(inputs[train], targets[train], torch.ones_like(targets[train]))
    best = float("inf")
    weights = model.state_dict()
    every = max(1, steps // CHECKS)
    for step in range(1, steps + 1):
        rows = train[torch.randint(len(train), (BATCH,), generator=generator)]
        loss = model.loss(inputs[rows], targets[rows], torch.ones_like(targets[rows]))
        check_finite({"loss of the inverse dynamics": loss.detach()}, step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % every == 0 or step == steps:
            with torch.no_grad():
                error = float(model.errors(model(inputs[test])[0], targets[test]).square().mean().sqrt())
            if error < best:
                best = error
                weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    with torch.no_grad():
        predicted = model.predicted(inputs[unknown])[0].squeeze(0)
    if contract.action.low:
        predicted = predicted.clamp(torch.tensor(contract.action.low), torch.tensor(contract.action.high))
    return predicted, best


def _windows(episodes: Episodes, contract: Contract) -> Tensor:
    """Inputs of each step: s_{t-2}, s_{t-1}, s_t and s_{t+1}, and whether the last is known, [S, 4 D + 1].

    Observations from before an episode are its first, an unknown one after it its last.
    """
    if len(episodes) != episodes.steps:
        raise UserError("label_actions needs an observation before every step of the episodes; record at each step")
    names = set(episodes.observation.keys())
    keys = [key for key, spec in contract.observation.items() if spec.dtype == "float32" and key in names]
    if not keys:
        raise UserError("label_actions predicts actions from float32 observations, which these episodes lack")
    flat = torch.cat([episodes.observation[key].flatten(1) for key in keys], -1)
    owner = _episode_of_steps(episodes)
    step = torch.arange(episodes.steps)
    begin = torch.cat((episodes.ends.new_zeros(1), episodes.ends[:-1]))[owner]
    end = episodes.ends[owner]
    after = flat[torch.minimum(step + 1, end - 1)]
    is_known = step + 1 < end
    final = episodes.final_observation
    if final is not None and set(keys) <= set(final.keys()):
        last = torch.cat([final[key].flatten(1) for key in keys], -1)
        after = torch.where(is_known.unsqueeze(1), after, last[owner])
        is_known = torch.ones_like(is_known)
    before = [flat[torch.maximum(step - shift, begin)] for shift in range(PAST, -1, -1)]
    return torch.cat([*before, after, is_known.float().unsqueeze(1)], -1)


def _episode_of_steps(episodes: Episodes) -> Tensor:
    """Index of each step's episode, [S]."""
    return torch.searchsorted(episodes.ends, torch.arange(episodes.steps), right=True)
