"""Risk critic: probability that a failure follows an action soon, learned from recorded episodes (arXiv 2010.15920).

    Q(s, a) <- c + (1 - c) gamma Q'(s', a'),  c = 1 where a failure follows the action, else 0,

lies in [0, 1]: it is the probability of a failure, of which each further control step counts by gamma less. Failures
are episodes that terminate without success, and the steps in which one of the named signals, such as a hold of the
safety layer or a force above its limit, is above 0. A small network reads the numbers that the robot measures, without
pictures, so that it runs at every control step (`execution.reflex`).

Differs from the paper:
    - a' is the next recorded action, not a new one of the policy: Q is the risk of whoever recorded the episodes;
    - Q is a sigmoid, learned by cross-entropy; targets have the mean of the ensemble, at run time its maximum counts;
    - steps shortly before failures are drawn more often, and weighted so that Q remains a probability;
    - the critic does not learn further while the reflex is active, after which failures vanish from the episodes.

Letters: M critics, B rows, N observations, I inputs, S control steps, A action dimension.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from tensordict import TensorDict
from torch import Tensor, nn

from embodied import seeding
from embodied.algorithms.critics import CriticConfig, Critics, approach
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.parts import Composite
from embodied.configuration import Configuration, Fraction, NonNegativeFloat, PositiveInt, Range
from embodied.contract import Contract
from embodied.data.episodes import FAILED, UNKNOWN, Episodes
from embodied.errors import DivergedError, UserError
from embodied.execution.reflex import Reflex, braking, measured_keys
from embodied.export.network import reciprocal
from embodied.saving import sealed
from embodied.saving.files import flush, rename
from embodied.saving.weights import implausible

FORMAT = 2
RECORD = "reflex.json"
WEIGHTS = "risk.safetensors"
"""Files of a reflex, in one folder."""
ROWS = 10_000
"""Largest number of observations for the statistics of inputs."""
CONSTANT = 1e-6
"""Largest deviation of a constant input, as a share of its mean or absolute."""
FARTHEST = 10.0
"""Bound of normalised inputs, so that one broken beam of a lidar does not decide."""


@dataclass
class RiskConfig(Configuration):
    """Hyper-parameters of a risk critic.

    `discount` is gamma for a control step. A share `before_failures` of a minibatch comes from the last `near` steps
    before a failure. `signals` names recorded signals that mark failures where they are above 0, and `reciprocal`
    distances that are read as their reciprocals, which resolves near ones to the centimetre.
    """

    steps: PositiveInt = 4_000
    batch: PositiveInt = 256
    learning_rate: NonNegativeFloat = 1e-3
    discount: Fraction = 0.9
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.01
    hidden: list[PositiveInt] = field(default_factory=lambda: [128, 128])
    ensemble: PositiveInt = 2
    before_failures: Annotated[float, Range(at_least=0, below=1)] = 0.25
    near: PositiveInt = 10
    signals: list[str] = field(default_factory=list)
    reciprocal: list[str] = field(default_factory=list)


class RiskCritic(nn.Module):
    """Networks from observations and actions of `contract` to risks.

    Raises:
        UserError: for a contract without action limits, or without numbers of fixed size that a robot measures, and for
            unknown `reciprocal` observations.
    """

    mean: Tensor
    std: Tensor
    centre: Tensor
    half_range: Tensor

    def __init__(self, contract: Contract, config: RiskConfig) -> None:
        super().__init__()
        self.keys = measured_keys(contract)
        self.reciprocal = frozenset(config.reciprocal)
        if unknown := sorted(self.reciprocal - set(self.keys)):
            raise UserError(f"risk.reciprocal names {unknown[0]!r}; expected some of {', '.join(self.keys)}")
        action = contract.action
        if not action.low:
            raise UserError("a risk critic needs action limits; set low and high in the action spec")
        size = sum(torch.Size(contract.observation[key].shape).numel() for key in self.keys)
        low, high = torch.tensor(action.low), torch.tensor(action.high)
        for name, value in (("mean", torch.zeros(size)), ("std", torch.ones(size))):
            self.register_buffer(name, value)
        self.register_buffer("centre", (high + low) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)
        self.critics = Critics(size + len(low), CriticConfig(hidden=config.hidden, ensemble=config.ensemble))

    def flat(self, observation: TensorDict) -> Tensor:
        """The read observations as one vector, [N, I]."""
        flat = {key: observation[key].to(self.mean.device, self.mean.dtype).flatten(1) for key in self.keys}
        return torch.cat([reciprocal(part) if key in self.reciprocal else part for key, part in flat.items()], -1)

    @torch.no_grad()
    def fit_statistics(self, observation: TensorDict) -> None:
        """Compute means and deviations of the inputs."""
        flat = self.flat(observation)
        self.mean.copy_(flat.mean(0))
        std = flat.std(0)
        self.std.copy_(torch.where(std <= CONSTANT * self.mean.abs().clamp_min(1.0), 1.0, std))

    def logits(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Logits of the risk of each network, [M, N], for `actions` [N, A], which count within their limits."""
        inputs = ((self.flat(observation) - self.mean) / self.std).clamp(-FARTHEST, FARTHEST)
        scaled = ((actions.to(self.centre) - self.centre) / self.half_range).clamp(-1.0, 1.0)
        return self.critics(torch.cat((inputs, scaled), -1)).squeeze(-1)

    def forward(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Largest risk of the networks, [N] in [0, 1]; NaN where an input is NaN."""
        return self.logits(observation, actions).amax(0).sigmoid().to(actions)


class RecordedFailures:
    """Transitions of single control steps of `contract` from `episodes`, and what is known of failures after them.

    Attributes:
        failure: c of each control step, [S]; NaN where it is unknown.
        rows: steps to learn from, whose target is known.
        near: those of `rows` within the last steps before a failure.

    Raises:
        UserError: if a signal is missing, an observation is missing before a step, or no failure is known.
    """

    def __init__(self, episodes: Episodes, contract: Contract, config: RiskConfig) -> None:
        keys = measured_keys(contract)
        if missing := [key for key in keys if key not in episodes.observation]:
            raise UserError(f"the episodes have no observation {missing[0]!r}, which the risk critic reads")
        if not torch.equal(episodes.first, torch.arange(episodes.steps)):
            raise UserError("a risk critic needs an observation before every control step; record with task.executed=1")
        self.observation = episodes.observation.select(*keys)
        self.actions = episodes.actions
        self.failure = failures(episodes, config.signals)
        self.last = torch.zeros(episodes.steps, dtype=torch.bool).index_fill(0, episodes.ends - 1, True)
        succeeded = episodes.terminated & (episodes.success != UNKNOWN)
        # nothing follows a failure, nor a termination
        self.ends = (self.failure == 1.0).index_fill(0, (episodes.ends - 1)[succeeded], True)
        measured = episodes.actions.isfinite().all(1)
        for values in self.observation.values():
            if values.is_floating_point():
                measured = measured & values.flatten(1).isfinite().all(1)
        following = measured.roll(-1) & ~self.last
        self.rows = (measured & self.failure.isfinite() & (self.ends | following)).nonzero().squeeze(1)
        if not bool((self.failure[self.rows] == 1.0).any()):
            raise UserError(
                f"no failure is known in {len(episodes.ends)} episodes: there is no risk to learn; record more, or name"
                " the signals that mark failures in risk.signals"
            )
        self.near = self.rows[self._to_failure()[self.rows] < config.near]

    def _to_failure(self) -> Tensor:
        """Number of control steps from each to the next failure of its episode, [S]; infinite without."""
        distances = []
        distance = torch.inf
        for fails, last in zip(reversed((self.failure == 1.0).tolist()), reversed(self.last.tolist()), strict=True):
            distance = 0.0 if fails else torch.inf if last else distance + 1.0
            distances.append(distance)
        return torch.tensor(distances[::-1])

    def draw(self, count: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Steps [count], of which a `share` is before failures, and their weights, whose expectation is 1."""
        picked = round(share * count)
        every = self.rows[torch.randint(len(self.rows), (count - picked,), generator=generator)]
        near = self.near[torch.randint(len(self.near), (picked,), generator=generator)]
        steps = torch.cat((every, near))
        is_near = torch.isin(steps, self.near)
        # w = p / q: uniform p = 1 / n, drawn with q = (1 - share) / n + share / m near a failure
        uniform = 1.0 - picked / count
        q = uniform + picked / count * is_near * len(self.rows) / len(self.near)
        return steps, 1.0 / q

    def take(self, steps: Tensor) -> TensorDict:
        """{observation, action, failure, ends, next_observation, next_action} of the control steps `steps` [B]."""
        following = torch.where(self.ends[steps], steps, steps + 1)
        return TensorDict(
            {
                "observation": self.observed(steps),
                "action": self.actions[steps],
                "failure": self.failure[steps],
                "ends": self.ends[steps],
                "next_observation": self.observed(following),
                "next_action": self.actions[following],
            },
            batch_size=[len(steps)],
        )

    def observed(self, steps: Tensor) -> TensorDict:
        """Observations before the control steps `steps` [B], as the critic reads them."""
        # several times as fast as observation[steps]
        return self.observation.apply(lambda part: part.index_select(0, steps), batch_size=[len(steps)])


def failures(episodes: Episodes, signals: list[str]) -> Tensor:
    """Whether a failure follows each control step, [S]: 1 or 0, NaN where it is unknown.

    Raises:
        UserError: for signals that were not recorded.
    """
    failure = torch.zeros(episodes.steps)
    recorded = () if episodes.signals is None else tuple(episodes.signals.keys())
    for name in signals:
        if episodes.signals is None or name not in recorded:
            raise UserError(f"the episodes have no signal {name!r}; recorded are: {', '.join(recorded) or 'none'}")
        # a failure by one signal is one, whatever the others say
        signal = episodes.signals[name].float()
        happened = torch.where(signal.isnan(), signal, (signal > 0.0).float())
        failure = torch.where((failure == 1.0) | (happened == 1.0), 1.0, failure + happened)
    ending = episodes.ends - 1
    outcome = torch.where(episodes.success == FAILED, 1.0, failure[ending])
    outcome = torch.where((episodes.success == UNKNOWN) & (outcome != 1.0), torch.nan, outcome)
    failure[ending] = torch.where(episodes.terminated, outcome, failure[ending])
    return failure


class RiskLearner(Composite):
    """Learner of a risk critic of `contract`; `generator` draws weights and minibatches."""

    def __init__(
        self,
        contract: Contract,
        config: RiskConfig,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self.contract = contract
        self.config = config
        self.generator = seeding.child(generator)
        with seeding.undisturbed():
            torch.manual_seed(self.generator.initial_seed())
            self.critic = RiskCritic(contract, config).to(device)
        self.target = copy.deepcopy(self.critic)
        self.optimiser = torch.optim.Adam(self.critic.parameters(), config.learning_rate, fused=True)
        self.gradient_steps = 0

    def fit(self, recorded: RecordedFailures, steps: int) -> dict[str, float]:
        """Take `steps` gradient steps; returns the metrics of the last.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        if not self.gradient_steps:
            spaced = recorded.rows[:: -(-len(recorded.rows) // ROWS)]
            self.critic.fit_statistics(recorded.observed(spaced))
            self.target.load_state_dict(self.critic.state_dict())
        metrics: dict[str, float] = {}
        for _ in range(steps):
            rows, weight = recorded.draw(self.config.batch, self.config.before_failures, self.generator)
            metrics = self._step(recorded.take(rows).to(self.critic.mean.device), weight.to(self.critic.mean.device))
        return metrics

    @torch.no_grad()
    def targets(self, batch: TensorDict) -> Tensor:
        """Targets c + (1 - c) gamma mean_j Q_j'(s', a'), [B]; c alone where nothing follows."""
        following = self.target.logits(batch["next_observation"], batch["next_action"]).sigmoid().mean(0)
        return torch.where(batch["ends"], batch["failure"], self.config.discount * following)

    def _step(self, batch: TensorDict, weight: Tensor) -> dict[str, float]:
        target = self.targets(batch)
        logits = self.critic.logits(batch["observation"], batch["action"])
        # L = sum_j mean w H(y, Q_j), the cross-entropy
        errors = nn.functional.binary_cross_entropy_with_logits(logits, target.expand_as(logits), reduction="none")
        loss = (weight * errors).mean(-1).sum()
        self.optimiser.zero_grad()
        loss.backward()
        gradient = gradient_norm(self.critic.parameters())
        check_finite({"risk_loss": loss.detach(), "gradient of the risk critic": gradient}, self.gradient_steps + 1)
        self.optimiser.step()
        approach(self.target.parameters(), self.critic.parameters(), self.config.averaging)
        self.gradient_steps += 1
        return {"risk_loss": float(loss.detach()), "risk": float((weight * target).mean())}

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimiser's state, counter and generator."""
        return {
            "critic": dict(self.critic.state_dict()),
            "target": dict(self.target.state_dict()),
            "optimiser": self.optimiser.state_dict(),
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.critic.load_state_dict(state["critic"])
        self.target.load_state_dict(state["target"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"].cpu())


def save(
    folder: Path, critic: RiskCritic, config: RiskConfig, reflex: Reflex, validation: list[dict[str, Any]]
) -> None:
    """Write `reflex`, which uses `critic`, into the new folder `folder`, complete or not at all.

    `validation` are the results of the thresholds that were tried.

    Raises:
        UserError: if the folder exists.
        DivergedError: for weights that `load` would not accept.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise UserError(f"{folder} exists; choose another output")
    weights = {name: value.contiguous().cpu() for name, value in critic.state_dict().items()}
    if reason := implausible(weights):
        raise DivergedError(f"the risk critic has diverged and is not saved: {reason}; use a lower learning rate")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir(parents=True)
    save_file(weights, temporary / WEIGHTS)
    flush(temporary / WEIGHTS)
    record = {
        "format": FORMAT,
        "contract": reflex.contract.to_dict(),
        "risk": asdict(config),
        "threshold": reflex.threshold,
        "brake": list(reflex.brake),
        "validation": validation,
    }
    sealed.write(temporary / RECORD, record, [WEIGHTS])
    rename(temporary, folder)


def load(folder: str | Path, device: torch.device | str = "cpu") -> Reflex:
    """Read the reflex that `save` wrote.

    Raises:
        UserError: on one line, if a file is missing, damaged or of another kind.
    """
    from safetensors.torch import load as parse

    folder = Path(folder)
    try:
        record = sealed.read(folder / RECORD, FORMAT)
        sealed.check_files(folder / RECORD, record)
        weights = parse((folder / WEIGHTS).read_bytes())
        contract = Contract.from_dict(record["contract"])
        critic = RiskCritic(contract, RiskConfig(**record["risk"]))
        critic.load_state_dict(weights)
        threshold = float(record["threshold"])
        brake = braking(contract, record["brake"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot read a reflex from {folder}: {' '.join(str(error).split())}") from error
    if reason := implausible(weights):
        raise UserError(f"cannot read a reflex from {folder}: {reason}")
    return Reflex(critic.to(device).eval().requires_grad_(False), contract, threshold, brake)
