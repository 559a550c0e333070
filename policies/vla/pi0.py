"""Pi0 (arXiv 2410.24164): a vision-language-action model that predicts chunks by flow matching.

Reinforcement learning follows pi_RL (arXiv 2510.25889). Differences: the noisy step of Flow-SDE is drawn per
observation; the log-probabilities of learned noise are added unless policy.aggregate=step_mean; the critic reads the
mean hidden state of the vision-language model and the robot's state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.execution.chunking import Running
from embodied.policy import (
    Decision,
    Evaluation,
    PolicyConfig,
    Steering,
    inference,
    needs_value,
    sum_of_executed,
)
from embodied.seeding import fixed_noise
from embodied.value_head import ValueHead
from policies.generative import SMALLEST_STD, Aggregate
from policies.kernels.flow import TimeGrid, prefix_mask
from policies.kernels.sampling import Field, FlowSampling, Sampler, check_delay, trained_for, undefined_log_prob
from policies.steering import Steerable, SteeringConfig
from policies.vla import adapters
from policies.vla.computing import Computing, layers, prepare
from policies.vla.critic import Critic, Reads
from policies.vla.inputs import Inputs, Tokenizer
from policies.vla.model import Pi0Model, Prefix, untrained
from policies.vla.sizes import Size
from policies.vla.statistics import DEMONSTRATIONS, PARTS, counted, fitting
from policies.vla.weights import Published, published

log = logging.getLogger(__name__)
NEW_STEPS = 4
"""Denoising steps of a new model."""


@dataclass
class Pi0Config(Computing, PolicyConfig):
    """Size, sampler and critic of a Pi0Policy.

    Published `weights` (a folder, or a name on the hub) define their own size, and statistics, which are used if the
    contract's state and action have as many elements; otherwise, as for a new model, they are computed from the
    demonstrations. Where openpi stored statistics of several data sets, `unnorm_key` names one;
    unnorm_key=demonstrations uses those of the demonstrations. Adapters in peft's format are merged into the weights
    that they name.
    Chunks are denoised in the `denoising_steps` that published weights name, 10 if they name none, and 4 for a new
    model (None).

    `frozen` keeps the vision-language model as it is and trains the action expert alone. With a `lora_rank` low-rank
    adapters are trained on frozen `weights` (`policies.vla.adapters`), new ones or those in `weights`; checkpoints
    then refer to the weights, and contain no copy.

    While exploring, the `sampler` adds noise to one random step (flow_sde) or learned noise to all (flow_noise;
    reinflow, at most 3 deviations). `noise_level` is Flow-SDE's a, `std_min` and `std_max` bound the learned deviation,
    in units of the normalised action. `guidance` bounds the pull towards a running chunk (arXiv 2506.07339's beta). The
    log-probability of a chunk is an `aggregate` over noisy denoising steps and the executed actions' elements: sum,
    step_mean or mean. The supervised loss is a mean over `draws` noises of each chunk, which cost little compared with
    encoding pictures. The inputs of the `critic` pass layers of width `hidden` to a head of `values`.

    With a `trained_delay` supervised training conditions on up to that number of first actions of a chunk and predicts
    the rest (arXiv 2512.05964); running chunks with at most that delay are then continued so, instead of guided.
    With `steering` by noise a small actor is trained in place of the model, which stays frozen; it reads the mean
    hidden state and the robot's state.
    `precision`, `gradient_checkpointing` and `compile` configure the computation (`policies.vla.computing`).
    """

    size: Size = Size.TINY
    weights: str | None = None
    unnorm_key: str | None = None
    frozen: bool = False
    lora_rank: NonNegativeInt = 0
    denoising_steps: PositiveInt | None = None
    sampler: Sampler = Sampler.FLOW_SDE
    noise_level: PositiveFloat = 0.5
    std_min: PositiveFloat = 0.08
    std_max: PositiveFloat = 0.16
    guidance: NonNegativeFloat = 5.0
    trained_delay: NonNegativeInt = 0
    aggregate: Aggregate = Aggregate.SUM
    draws: PositiveInt = 1
    critic: Reads = Reads.AUTO
    hidden: PositiveInt = 256
    values: ValueHead = field(default_factory=ValueHead)
    steering: SteeringConfig = field(default_factory=SteeringConfig)

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that exclude each other."""
        super().__post_init__()
        if self.std_min > self.std_max:
            raise UserError(f"expected policy.std_min <= std_max, got {self.std_min} and {self.std_max}")
        if self.lora_rank and not self.weights:
            raise UserError(f"lora_rank={self.lora_rank} adapts published weights: name them in policy.weights")
        if self.lora_rank and self.frozen:
            raise UserError("policy.frozen trains the whole action expert, lora_rank adapters on it: choose one")

    def build(self, contract: Contract) -> Pi0Policy:
        """Build the policy for `contract`."""
        return Pi0Policy(contract, self)


class Pi0Policy(Steerable, adapters.AdaptablePolicy):
    """Policy that predicts chunks of H actions by integrating a velocity field; pictures are encoded once a chunk.

    Actions are normalised and padded with zeros to the model's D elements; padding is neither scored nor in the loss.
    A chunk's log-probability (one part, P = 1) is that of its noisy denoising steps, added or averaged.

    Raises:
        UserError: if the action has no limits, or the contract has no pictures or state that actors may read.
    """

    action_mean: Tensor
    action_std: Tensor
    action_low: Tensor
    action_high: Tensor
    relative: Tensor
    kind = "pi0"
    reads = Inputs
    tokenizes = Tokenizer

    def __init__(self, contract: Contract, config: Pi0Config) -> None:
        super().__init__()
        if not contract.action.low:
            raise UserError(f"policy={self.kind} needs action limits; set low and high in the action spec")
        check_delay(config.trained_delay, contract)
        self.contract = contract
        self.config = config
        self.actions = contract.action.shape[-1]
        self.inputs = self.reads(contract, f"policy={self.kind}")
        checkpoint = self._published(config.weights) if config.weights else None
        self.model = checkpoint.model if checkpoint else self._new()
        self.grid = TimeGrid(
            config.denoising_steps or (checkpoint.settings.denoising_steps if checkpoint else NEW_STEPS)
        )
        self._check_sizes()
        if checkpoint:
            self._adapt(checkpoint)
        if config.frozen:
            self.model.vision_language.requires_grad_(False)
        self.model.computing = config
        prepare(self.model, config)
        self.noise = nn.Sequential(
            nn.Linear(self.model.expert_width, 64), nn.Tanh(), nn.Linear(64, self.model.action_size)
        )
        self.value_head = config.values
        inputs = self.model.width + self.inputs.state_size
        self.critic = Critic(contract, config.critic, inputs, config.hidden, self.value_head.outputs)
        self.feature_size = self.critic.feature_size
        if config.steering.kind not in (Steering.NONE, Steering.NOISE):
            raise UserError(f"policy={self.kind} is steered by its noise alone; use policy.steering.kind=noise")
        self.past = 0
        self.generated = contract.horizon
        self.add_steering(config.steering, inputs, self.model.action_size)
        self.register_buffer("action_mean", torch.zeros(self.actions))
        self.register_buffer("action_std", torch.ones(self.actions))
        self.register_buffer("action_low", torch.tensor(contract.action.low))
        self.register_buffer("action_high", torch.tensor(contract.action.high))
        self.register_buffer("relative", self._relative(checkpoint), persistent=False)
        self.brought_statistics = False
        self.lacks_statistics = ""
        self.weights_of = checkpoint.base if checkpoint else None
        if checkpoint:
            self._take(checkpoint)

    @property
    def actor_keys(self) -> list[str]:
        """Names of the observations that chunks are generated from."""
        return self.inputs.keys

    @property
    def scores(self) -> bool:
        """Whether the sampler adds noise, so that a path has a likelihood."""
        return super().scores and self.config.sampler is not Sampler.ODE

    @property
    def sampling(self) -> FlowSampling:
        """Sampler of paths, which also scores them."""
        config = self.config
        return FlowSampling(
            self.grid,
            config.sampler,
            config.noise_level,
            config.std_min,
            config.std_max,
            self._spread,
            self._part,
            config.aggregate is not Aggregate.SUM,
        )

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return list(self.critic.parameters())

    def actor_parameters(self) -> list[nn.Parameter]:
        """Parameters of pi0 that are trained, and of the learned noise."""
        return [weight for part in (self.model, self.noise) for weight in part.parameters() if weight.requires_grad]

    def blocks(self) -> list[nn.Module]:
        """Layers of all transformers."""
        return layers(self.model)

    @torch.no_grad()
    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N] and actions [..., A], unless the weights have some."""
        self.critic.fit(observation)
        if self.brought_statistics:
            return
        self.inputs.fit(observation)
        flat = actions.reshape(-1, actions.shape[-1])
        self.action_mean.copy_(flat.mean(0))
        # a lower bound of the deviation, so that actions outside of the data stay possible
        self.action_std.copy_(flat.std(0).maximum(SMALLEST_STD * (self.action_high - self.action_low) / 2))

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks; the denoising path [N, S+1, H, D] and its noisy step's index [N] are the sample.

        If a small actor steers the policy, the sample is the initial noise [N, H, D].
        """
        x = self._noise(observation, deterministic, generator)
        if self.steers:
            return self.steered_decision(observation, x, deterministic)
        state, prefix = inputs = self._inputs_of(observation)
        chunk, sample, log_prob = self._generate(x, inputs, deterministic, generator)
        has_value = needs_value(self, observation, deterministic)
        value = self.value_head.values(self._value_outputs(observation, state, prefix)) if has_value else None
        return Decision(self.to_robot(chunk, self._offset(observation)), sample, log_prob, value)

    def _inputs_of(self, observation: TensorDict) -> tuple[Tensor, Prefix]:
        return self._state(observation), self._prefix(observation)

    def _features_of(self, inputs: tuple[Tensor, Prefix]) -> Tensor:
        return self._hidden(*inputs)

    def _generate(
        self, x: Tensor, inputs: tuple[Tensor, Prefix], deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, TensorDict, Tensor]:
        path, noisy, log_prob = self.sampling.denoise(x, self._field(*inputs), deterministic, generator)
        return path[:, -1], TensorDict({"path": path, "noisy": noisy}, batch_size=[len(path)]), log_prob

    @inference
    def inpaint(
        self,
        observation: TensorDict,
        running: Running,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Act like `act`, guided to `running` (arXiv 2506.07339); padding of actions is not guided.

        If training covered as many frozen actions, the chunk is continued from them instead (arXiv 2512.05964).

        Raises:
            UserError: for a policy that a small actor steers.
        """
        self.check_inpaints()
        state = self._state(observation)
        prefix = self._prefix(observation)
        x = self._noise(observation, deterministic, generator)
        offset = self._offset(observation)
        target = self._padded((running.actions - offset - self.action_mean) / self.action_std)
        if trained_for(running, self.config.trained_delay):
            velocity = lambda x, times: self._velocity(state, prefix, x, times)[0]  # noqa: E731 - of this prefix
            x = self.sampling.continued(x, velocity, target, running.keeps())
        else:
            mask = self._padded(running.soft_mask().unsqueeze(-1).expand_as(running.actions))
            x = self.sampling.inpaint(x, self._field(state, prefix), target, mask, self.config.guidance)
        actions = torch.where(running.keeps().unsqueeze(-1), running.actions, self.to_robot(x, offset))
        no_sample = TensorDict({}, batch_size=list(observation.batch_size))
        return Decision(actions, no_sample, undefined_log_prob(len(actions), self.contract, x.device))

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability of stored denoising paths: one pass of the expert for Flow-SDE, S for learned noise."""
        state = self._state(observation)
        prefix = self._prefix(observation)
        log_prob, entropy = self.sampling.score(sample["path"], sample["noisy"], self._field(state, prefix))
        log_prob, entropy = (sum_of_executed(terms, sample) for terms in (log_prob, entropy))
        outputs = self._value_outputs(observation, state, prefix)
        return Evaluation(log_prob, entropy, self.value_head.values(outputs), outputs)

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return, [N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [N, O] of the critic."""
        return self.critic(self.features(observation))

    def features(self, observation: TensorDict) -> Tensor:
        """Features [N, feature_size]: encoded objects, or the model's mean hidden state and the robot's state."""
        return self.critic.features(
            observation, lambda: self._hidden(self._state(observation), self._prefix(observation))
        )

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """|v(x_t, t) - (noise - action)|^2 over actions that are `valid` [N, H], at pi0's times; one scalar."""
        draws = self.config.draws
        prefix = self._prefix(observation).repeated(self.config.draws)
        target = self._padded((actions - self._offset(observation) - self.action_mean) / self.action_std)
        state, target, valid = (x.repeat_interleave(draws, 0) for x in (self._state(observation), target, valid))
        noise = torch.randn_like(target)
        time = 0.999 * torch.rand(len(target), device=target.device) ** (1.0 / 1.5) + 0.001  # Beta(1.5, 1), scaled
        is_prefix = prefix_mask(*target.shape[:2], self.config.trained_delay, target.device)
        times = torch.where(is_prefix, 0.0, time.unsqueeze(-1))
        valid = valid * ~is_prefix
        t = times.unsqueeze(-1)
        network_time = times if self.config.trained_delay else time
        # x_t = t noise + (1 - t) action;  L = sum(valid |v - (noise - action)|^2) / sum(valid)
        velocity, _ = self._velocity(state, prefix, t * noise + (1.0 - t) * target, network_time)
        error = (velocity - (noise - target))[..., : self.actions].square().mean(-1)
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def to_robot(self, x: Tensor, offset: Tensor | float = 0.0) -> Tensor:
        """Convert normalised, padded actions [..., D] to robot units, clamped to the contract's limits, [..., A].

        The `offset` [..., A] is added to relative actions.
        """
        actions = x[..., : self.actions] * self.action_std + self.action_mean + offset
        return actions.clamp(self.action_low, self.action_high)

    def _offset(self, observation: TensorDict) -> Tensor | float:
        """State [N, 1, A] to which the `relative` elements of actions refer, 0 for the others."""
        if not self.has_relative:
            return 0.0
        state = nn.functional.pad(self.inputs.identity(observation), (0, self.actions))[:, : self.actions]
        return (state * self.relative).unsqueeze(1)

    def _published(self, weights: str) -> Published:
        return published(weights, self.kind, self.config.unnorm_key)

    def _new(self) -> Pi0Model:
        return untrained(self.config.size, self.contract.horizon, self.inputs.state_size, self.actions)

    def _adapt(self, pretrained: Published) -> None:
        """Merge the adapters of a published model, or train them or new ones on its weights."""
        rank = self.config.lora_rank
        present_rank = adapters.rank_of(pretrained.model.native)
        if not rank:
            return adapters.merge(pretrained.model) if present_rank else None
        if present_rank not in (0, rank):
            raise UserError(f"the adapters in {self.config.weights} are of rank {present_rank}, got lora_rank={rank}")
        if not present_rank:
            adapters.adapt(pretrained.model, rank)
        self.register_buffer("base", pretrained.fingerprint)

    def _check_sizes(self) -> None:
        for name, size, limit in (
            ("state", self.inputs.state_size, self.model.state_size),
            ("action", self.actions, self.model.action_size),
        ):
            if size > limit:
                raise UserError(
                    f"policy.weights={self.config.weights} take {name}s of up to {limit} elements, got {size}"
                )

    def _relative(self, pretrained: Published | None) -> Tensor:
        """Mask [A] of actions that are relative to the state, 1 or 0, from the settings of published weights.

        Raises:
            UserError: if the state lacks elements to which they refer, or a small actor is to steer the policy.
        """
        listed = pretrained.settings.relative if pretrained else ()
        mask = [*listed[: self.actions], *[bool(listed)] * (self.actions - len(listed))]
        self.has_relative = any(mask)
        if self.has_relative and self.config.steering.kind is not Steering.NONE:
            raise UserError("weights with actions relative to the state cannot be steered; leave out policy.steering")
        if any(mask[self.inputs.state_size :]):
            raise UserError(
                f"policy.weights={self.config.weights} have {sum(mask)} actions relative to the state, "
                f"which has {self.inputs.state_size} elements in this task"
            )
        return torch.tensor(mask, dtype=torch.float32)

    @torch.no_grad()
    def _take(self, pretrained: Published) -> None:
        """Use the tokenizer and, if they have as many elements, the statistics of a published model."""
        self.inputs.tokenizer = self.tokenizes(pretrained.tokenizer, self.model.vocabulary)
        self.inputs.antialias = pretrained.settings.antialias
        weights = f"policy.weights={self.config.weights}"
        sizes = (self.inputs.state_size, self.actions)
        if self.has_relative:
            elements = " ".join(map(str, self.relative.nonzero().flatten().tolist()))
            _warn(f"{weights} has actions whose elements {elements} are relative to the state", logging.INFO)
        trained_horizon = pretrained.settings.model.chunk_size
        if trained_horizon != (horizon := self.contract.horizon):
            _warn(f"{weights} has learned chunks of {trained_horizon} actions, task.horizon={horizon}")
        self._match_cameras(pretrained.settings.cameras)
        self.lacks_statistics = "" if pretrained.statistics else f"{weights} has no statistics of state and action"
        if self.config.unnorm_key == DEMONSTRATIONS:
            self.lacks_statistics = f"policy.unnorm_key={DEMONSTRATIONS} leaves the statistics of weights out"
        if self.has_relative and self.lacks_statistics:
            raise UserError(f"{self.lacks_statistics}, and those of relative actions cannot be computed here")
        if not pretrained.statistics:
            return
        pairs = [(pretrained.statistics[f"{part}_mean"], pretrained.statistics[f"{part}_std"]) for part in PARTS]
        state, action = (fitting(*pair, size) for pair, size in zip(pairs, sizes, strict=True))
        if state is None or action is None:
            published_sizes, own_sizes = (
                " and ".join(map(str, each)) for each in ([counted(std) for _, std in pairs], sizes)
            )
            self.lacks_statistics = (
                f"{weights} has statistics of {published_sizes} elements of state and action, not of {own_sizes}"
            )
            if self.has_relative:
                raise UserError(f"{self.lacks_statistics}; those of relative actions cannot be computed here")
            return _warn(f"{self.lacks_statistics}: they are not used")
        self.inputs.state.mean.copy_(state[0])
        self.inputs.state.std.copy_(state[1])
        self.inputs.state.fitted.fill_(True)
        self.action_mean.copy_(action[0])
        self.action_std.copy_(action[1])
        self.brought_statistics = True

    def _match_cameras(self, learned: list[str]) -> None:
        """Warn if the weights were trained with the cameras `learned`, and the task has others."""
        if learned and learned != self.inputs.cameras:
            names = ", ".join(learned), ", ".join(self.inputs.cameras)
            _warn(f"policy.weights={self.config.weights} has learned with {names[0]}, and sees {names[1]}")

    def _noise(self, observation: TensorDict, deterministic: bool, generator: torch.Generator | None) -> Tensor:
        """Initial noise [N, H, D] of chunks."""
        shape = (self.contract.horizon, self.model.action_size)
        if deterministic:
            # a fixed function of the observation, so that the same observation gives the same chunk
            return fixed_noise(self.inputs.identity(observation), shape).to(self.device)
        return torch.randn(observation.batch_size[0], *shape, device=self.device, generator=generator)

    def _padded(self, actions: Tensor) -> Tensor:
        return nn.functional.pad(actions, (0, self.model.action_size - self.actions))

    def _state(self, observation: TensorDict) -> Tensor:
        return self.inputs.standardised_state(observation)

    def _prefix(self, observation: TensorDict) -> Prefix:
        pictures = self.inputs.pictures(observation, self.model.picture_size)
        return self.model.prefix(pictures, *self.inputs.tokens(observation))

    def _velocity(self, state: Tensor, prefix: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        padded = nn.functional.pad(state, (0, self.model.state_size - state.shape[-1]))
        return self.model.velocity(prefix, padded, x, time)

    def _field(self, state: Tensor, prefix: Prefix) -> Field:
        return lambda x, index: self._velocity(state, prefix, x, self.grid.times(index))

    def _spread(self, hidden: Tensor, index: Tensor) -> Tensor:
        return self.noise(hidden)

    def _value_outputs(self, observation: TensorDict, state: Tensor, prefix: Prefix) -> Tensor:
        return self.critic(self.critic.features(observation, lambda: self._hidden(state, prefix)))

    def _hidden(self, state: Tensor, prefix: Prefix) -> Tensor:
        """Inputs of a critic that reads hidden states, [N, W + state_size]."""
        return torch.cat((prefix.mean(), state), -1)

    def _part(self, elementwise: Tensor) -> Tensor:
        """Terms [N, K, 1] of the executed actions, from elements [N, H, D]."""
        executed = elementwise[..., : self.contract.executed, : self.actions]
        return self.config.aggregate.of_actions(executed).unsqueeze(-1)


@cache
def _warn(message: str, level: int = logging.WARNING) -> None:
    """Log `message` once: a run builds several policies of the same weights."""
    log.log(level, message)
