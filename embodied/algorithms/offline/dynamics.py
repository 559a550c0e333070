"""Models of a task's dynamics, learned from recorded episodes: ensembles of Gaussian networks.

Sources: PETS (arXiv 1805.12114), and the choice of elites of MBPO (arXiv 1906.08253). Differs from the papers:
    - a step of the model is a decision: a chunk of K executed actions, the observation after them, and their reward;
    - all networks see the same minibatches, and differ by their initial weights alone;
    - the loss is beta-NLL with beta = 1 (arXiv 2203.09168), whose means have the gradient of the squared error: rare
      rewards and terminations, which are further targets, make no spikes.

Letters: M networks, B rows, I inputs, T targets, D elements of an observation, H actions of a chunk, K executed ones, A
elements of an action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.critics import CriticConfig, Critics
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.parts import Composite
from embodied.configuration import Configuration, NonNegativeFloat, PositiveInt, Range
from embodied.contract import Contract
from embodied.data.transitions import Transitions, held_out_episodes
from embodied.errors import UserError
from embodied.world import ALONE, World

LOG_STD = -5.0, 1.0
"""Range of the logarithm of a predicted deviation, in deviations of the target."""
ROWS = 10_000
"""Largest number of transitions for statistics and for the choice of elites."""
CONSTANT = 1e-6
"""Largest deviation of a constant input, as a share of its mean or absolute."""


class GaussianEnsemble(nn.Module):
    """M networks from inputs [B, I] to the mean and deviation of targets [B, T], both normalised inside."""

    input_mean: Tensor
    input_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, inputs: int, targets: int, count: int, hidden: list[int]) -> None:
        super().__init__()
        self.targets = targets
        self.network = Critics(inputs, CriticConfig(hidden=hidden, ensemble=count), 2 * targets)
        for name, size in (("input", inputs), ("target", targets)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @torch.no_grad()
    def fit_statistics(self, inputs: Tensor, targets: Tensor, weight: Tensor) -> None:
        """Compute means and deviations of inputs [B, I], and of targets [B, T] where their `weight` [B, T] is not 0."""
        self.input_mean.copy_(inputs.mean(0))
        std = inputs.std(0)
        self.input_std.copy_(torch.where(std <= CONSTANT * self.input_mean.abs().clamp_min(1.0), 1.0, std))
        count = weight.sum(0).clamp_min(1.0)
        self.target_mean.copy_((weight * targets).sum(0) / count)
        self.target_std.copy_(((weight * (targets - self.target_mean).square()).sum(0) / count).sqrt())

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation of normalised targets, [M, B, T] each."""
        mean, raw = self.network((inputs - self.input_mean) / self.input_std).split(self.targets, -1)
        low, high = LOG_STD
        # log std between both limits, smoothly
        return mean, low + (high - low) * torch.sigmoid(raw)

    def predicted(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of targets, [M, B, T] each; those of constant targets are exact."""
        mean, log_std = self(inputs)
        return self.target_mean + self.target_std * mean, self.target_std * log_std.exp()

    def errors(self, mean: Tensor, targets: Tensor) -> Tensor:
        """Errors of normalised means [M, B, T] from `targets` [B, T], in deviations of the targets."""
        std = torch.where(self.target_std > 0.0, self.target_std, 1.0)
        return mean - (targets - self.target_mean) / std

    def loss(self, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Sum over the networks of the mean loss where `weight` [B, T] is not 0, one scalar."""
        mean, log_std = self(inputs)
        error = self.errors(mean, targets)
        variance = (2.0 * log_std).exp()
        # L = sg(std^2) (log std + error^2 / (2 std^2)), whose gradients are error and std^2 - error^2
        loss = variance.detach() * (log_std + error.square() / (2.0 * variance))
        return (weight * loss).sum((1, 2)).sum() / weight.sum().clamp_min(1.0)


@dataclass
class DynamicsConfig(Configuration):
    """Hyper-parameters of a model of the dynamics.

    Of `models` networks with layers `hidden` the `elites` predict, which have the smallest errors on a share `held_out`
    of the episodes.
    """

    models: PositiveInt = 7
    elites: PositiveInt = 5
    hidden: list[PositiveInt] = field(default_factory=lambda: [200, 200, 200, 200])
    learning_rate: NonNegativeFloat = 1e-3
    batch: PositiveInt = 256
    held_out: Annotated[float, Range(above=0, below=1)] = 0.1

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.elites > self.models:
            raise UserError(f"expected elites <= models, got {self.elites} and {self.models}")


class Dynamics(Composite):
    """Model (observation, executed actions) -> (next observation, reward, termination) of the decisions of `contract`.

    It predicts float32 observations; texts stay as they are. Rewards are in the unit of the transitions that it learns.

    Raises:
        UserError: for observations that it cannot predict.
    """

    def __init__(self, contract: Contract, config: DynamicsConfig, device: torch.device | str = "cpu") -> None:
        specs = {key: spec for key, spec in contract.observation.items() if not spec.is_text}
        if others := [key for key, spec in specs.items() if spec.dtype != "float32" or -1 in spec.shape]:
            raise UserError(
                f"models of the dynamics predict float32 observations of fixed size, not {', '.join(others)};"
                " use a learner without a model, such as offline=iql"
            )
        self.config = config
        self.executed = contract.executed
        self.shapes = {key: spec.shape for key, spec in specs.items()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())
        inputs = self.size + self.executed * contract.action.shape[-1]
        # targets: the change of the observation, the reward, and whether the decision terminated the episode
        self.ensemble = GaussianEnsemble(inputs, self.size + 2, config.models, config.hidden).to(device)
        self.elites = torch.arange(config.elites)
        self.optimiser = torch.optim.Adam(self.ensemble.parameters(), config.learning_rate, fused=True)
        self.gradient_steps = 0
        # those that `learn` had last, and of them what it learns from and what is held out
        self._learned: tuple[Transitions, Transitions, Transitions] | None = None

    def fit(
        self, transitions: Transitions, steps: int, generator: torch.Generator, world: World = ALONE
    ) -> dict[str, float]:
        """Take `steps` gradient steps on `transitions` of K executed actions, which the processes of `world` share.

        Returns the metrics of the last step. Call `choose_elites` afterwards.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        if not self.gradient_steps:
            self.ensemble.fit_statistics(*self._examples(transitions, transitions.spaced(ROWS)))
        metrics: dict[str, float] = {}
        for _ in range(steps):
            rows = transitions.draw(self.config.batch, generator, world)
            loss = self.ensemble.loss(*self._examples(transitions, rows))
            self.optimiser.zero_grad()
            loss.backward()
            gradient = gradient_norm(self.ensemble.parameters())
            step = self.gradient_steps + 1
            check_finite({"model loss": loss.detach(), "gradient of the model": gradient}, step)
            self.optimiser.step()
            self.gradient_steps = step
            metrics = {"model_loss": float(loss.detach())}
        return metrics

    def learn(self, transitions: Transitions, generator: torch.Generator, *, is_last: bool) -> dict[str, float]:
        """Take one gradient step on all but the held-out episodes; choose the elites by these if it `is_last`."""
        if self._learned is None or self._learned[0] is not transitions:
            held_out = held_out_episodes(len(transitions.episodes.ends), self.config.held_out)
            self._learned = transitions, transitions.of_episodes(~held_out), transitions.of_episodes(held_out)
        _, learned, held = self._learned
        metrics = self.fit(learned, 1, generator)
        if is_last:
            metrics["held_out_model_error"] = self.choose_elites(held)
        return metrics

    @torch.no_grad()
    def choose_elites(self, held_out: Transitions) -> float:
        """Let the networks with the smallest errors on the transitions `held_out` predict.

        Returns their mean squared error, in variances of the targets: 1 for a model that predicts the mean.
        """
        inputs, targets, weight = self._examples(held_out, held_out.spaced(ROWS))
        error = self.ensemble.errors(self.ensemble(inputs)[0], targets).square()
        error = (weight * error).sum((1, 2)) / weight.sum().clamp_min(1.0)
        self.elites = error.argsort()[: self.config.elites].cpu()
        return float(error[self.elites].mean())

    @torch.no_grad()
    def step(
        self, observation: TensorDict, actions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[TensorDict, Tensor, Tensor]:
        """Next observation [B], reward [B] and probability of a termination [B] after the first K actions [B, H, A].

        They are a sample of a random elite for each row, drawn by `generator`, or without it the mean of all elites.
        """
        flat = self.flat(observation)
        mean, std = self._predicted(flat, actions)
        if generator is None:
            targets = mean.mean(0)
        else:
            count = len(flat)
            elite = torch.randint(len(mean), (count,), generator=generator).to(flat.device)
            rows = torch.arange(count, device=flat.device)
            noise = torch.randn(count, mean.shape[-1], generator=generator).to(flat.device)
            targets = mean[elite, rows] + std[elite, rows] * noise
            targets[:, -1] = mean[elite, rows, -1]  # a probability
        after = observation.copy().update(self._observation(flat + targets[:, : self.size]))
        return after, targets[:, -2], targets[:, -1].clamp(0.0, 1.0)

    @torch.no_grad()
    def disagreement(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Deviation of the predicted changes among the elites, in deviations of these changes, mean over D, [B]."""
        mean, _ = self._predicted(self.flat(observation), actions)
        scale = self.ensemble.target_std[: self.size]
        changes = mean[..., : self.size].std(0, correction=0) / torch.where(scale > 0.0, scale, 1.0)
        return changes.mean(-1)

    def flat(self, observation: TensorDict) -> Tensor:
        """Predicted observations as one vector, [B, D]."""
        return torch.cat([observation[key].flatten(1) for key in self.shapes], -1)

    def _observation(self, flat: Tensor) -> dict[str, Any]:
        """Observations by name; the inverse of `flat`."""
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()], -1)
        return {key: part.unflatten(-1, shape) for (key, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _predicted(self, flat: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the targets by each elite, [elites, B, T]."""
        mean, std = self.ensemble.predicted(self._inputs(flat, actions))
        return mean[self.elites], std[self.elites]

    def _inputs(self, flat: Tensor, actions: Tensor) -> Tensor:
        return torch.cat((flat, actions[:, : self.executed].flatten(1)), -1)

    def _examples(self, transitions: Transitions, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and their weights, 1 where a target is known, of the transitions `rows`."""
        batch = transitions.take(rows, self.executed).to(self._device)
        flat = self.flat(batch["observation"])
        terminated = transitions.terminated[rows].to(self._device)
        whole = batch["valid"].all(1)
        # the observation after a termination need not be recorded, and a time limit cuts chunks short
        is_known = torch.stack((whole & ~terminated, whole | terminated), 1).float()
        weight = is_known.repeat_interleave(torch.tensor([self.size, 2], device=is_known.device), 1)
        change = self.flat(batch["next_observation"]) - flat
        targets = torch.cat((change, batch["reward"].unsqueeze(1), terminated.float().unsqueeze(1)), 1)
        return self._inputs(flat, batch["actions"]), targets, weight

    @property
    def _device(self) -> torch.device:
        return self.ensemble.input_mean.device

    def state_dict(self) -> dict[str, Any]:
        """Weights with statistics, elites, optimiser and counter."""
        return {
            "ensemble": self.ensemble.state_dict(),
            "elites": self.elites,
            "optimiser": self.optimiser.state_dict(),
            "gradient_steps": self.gradient_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.ensemble.load_state_dict(state["ensemble"])
        self.elites = state["elites"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.gradient_steps = state["gradient_steps"]
