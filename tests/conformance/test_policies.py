"""Requirements of every trainable policy, checked on all of them."""

import copy
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.critics import CriticConfig, Critics
from embodied.contract import Contract, TensorSpec
from embodied.evaluation.evaluation import act
from embodied.networks.value_head import CriticHead, ValueHead
from embodied.policy import EXECUTED, MEMORY, RankingPolicy, Reparameterised, unread_observations
from embodied.rollout.memory import Memory
from policies.attention import AttentionConfig
from policies.coarse_to_fine import CoarseToFineConfig
from policies.diffusion import DiffusionConfig, DiffusionPolicy
from policies.encoders.base import Encoder, EncoderKind
from policies.encoders.libero import ObjectEncoder
from policies.flat import FlatObservations
from policies.flow import FlowConfig, FlowPolicy, Sampler
from policies.generation.base import Aggregate
from policies.generation.chunk_networks import NetworkKind
from policies.mlp import GaussianPolicy, MLPConfig
from policies.recurrent import RecurrentConfig, RecurrentPolicy
from policies.squashed import SquashedConfig, SquashedPolicy
from policies.vla.groot.policy import GrootConfig, GrootPolicy
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.pi0_fast.policy import Pi0FastConfig, Pi0FastPolicy
from policies.vla.pi05 import Pi05Config
from policies.vla.smolvla.policy import SmolVLAConfig
from policies.vla.tokens import TokensConfig, TokensPolicy
from sims.libero.observation import action_spec
from tests.policies import observations as given

LOW, HIGH = (-0.5, -1.0, -1.0, -1.0, -1.0, -1.0, 0.0), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
SECRET = {"mass": TensorSpec((2,), privileged=True)}
SEEN = {"front": TensorSpec((8, 12, 3), "uint8", camera="front")}
CONTRACT = Contract(
    given.contract().observation | SEEN | SECRET,
    TensorSpec((7,), names=action_spec().names, low=LOW, high=HIGH),
    control_dt_s=0.05,
    horizon=4,
    executed=3,
)
CLASSES = ValueHead(head=CriticHead.HL_GAUSS, value_low=-1.0, value_high=2.0)
CONFIGS = {
    "flow, flow_sde": FlowConfig(width=32, hidden=32, sampler=Sampler.FLOW_SDE),
    "flow, flow_noise": FlowConfig(width=32, hidden=32, sampler=Sampler.FLOW_NOISE),
    "flow, reinflow": FlowConfig(width=32, hidden=32, sampler=Sampler.REINFLOW, aggregate=Aggregate.MEAN),
    "flow, shortcut": FlowConfig(width=32, hidden=32, sampler=Sampler.FLOW_NOISE, shortcut=0.25),
    "flow, ranking": FlowConfig(width=32, hidden=32, candidates=5, explored_candidates=3, values=CLASSES),
    "flow, flat": FlowConfig(width=32, hidden=32, encoder=EncoderKind.FLAT, reciprocal=["gripper_command"]),
    "coarse_to_fine": CoarseToFineConfig(width=32, hidden=[32]),
    "coarse_to_fine, plain": CoarseToFineConfig(encoder=EncoderKind.PLAIN, hidden=[32], autoregressive=False),
    "diffusion, mlp": DiffusionConfig(width=32, hidden=32, tuned_steps=3),
    "diffusion, unet": DiffusionConfig(width=32, network=NetworkKind.UNET, hidden=16, depth=2, tuned_steps=3),
    "diffusion, dit": DiffusionConfig(width=32, network=NetworkKind.DIT, hidden=32, tuned_steps=3),
    "mlp": MLPConfig(hidden=[32]),
    "attention": AttentionConfig(hidden=[32], values=CLASSES),
    "pi0": Pi0Config(hidden=32),
    "pi05": Pi05Config(hidden=32, frozen=True),
    "pi0_fast": Pi0FastConfig(temperature=1.2, hidden=32, values=CLASSES),
    "smolvla": SmolVLAConfig(hidden=32),
    "groot": GrootConfig(hidden=32),
    "recurrent": RecurrentConfig(hidden=[32]),
    "squashed": SquashedConfig(width=32, hidden=[32], values=CLASSES),
    "squashed, plain": SquashedConfig(encoder=EncoderKind.PLAIN, hidden=[32], reciprocal=["gripper_command"]),
    "tokens": TokensConfig(temperature=1.6, hidden=32, values=CLASSES),
}
GAUSSIAN = ("mlp", "attention", "recurrent")


def observations(count: int, seed: int = 0) -> TensorDict:
    """Observations for all policies, with memory for recurrent ones and a picture for those that see."""
    memory = torch.randn(count, 16, generator=generator(seed))
    mass = torch.randn(count, 2, generator=generator(seed + 1))
    front = torch.randint(256, (count, 8, 12, 3), dtype=torch.uint8, generator=generator(seed + 2))
    return given.observations(count, seed).update({MEMORY: memory, "mass": mass, "front": front})


@pytest.fixture(params=CONFIGS)
def make(request) -> Callable:
    def build(seed: int = 0, fitted: bool = True):
        torch.manual_seed(seed)
        policy = CONFIGS[request.param].build(CONTRACT)
        for parameter in policy.parameters():  # so that no layer has its special initial weights
            parameter.data += 0.05 * torch.randn_like(parameter)
        if request.param == "flow, ranking":
            policy.start_ranking()
        if fitted:
            policy.fit(observations(64), torch.rand(64, 4, 7) - 0.3)
        return policy

    return build


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_shapes(make):
    policy = make()
    parts = {DiffusionPolicy: 3, TokensPolicy: 3 * 7}.get(type(policy), 1)
    decision = policy.act(observations(5))
    assert decision.actions.shape == (5, 4, 7)
    assert decision.log_prob.shape == (5, parts)
    assert decision.sample.batch_size == (5,)
    evaluation = policy.evaluate(observations(5), decision.sample)
    assert evaluation.log_prob.shape == evaluation.entropy.shape == (5, parts)
    assert policy.value(observations(5)).shape == evaluation.value.shape == decision.value.shape == (5,)
    assert policy.act(observations(5), deterministic=True).value is None  # not requested


def test_one_forward_gives_the_value_too(make):
    policy, observation = make(), observations(40, seed=1)
    decision = policy.act(observation, generator=generator())
    evaluation = policy.evaluate(observation, decision.sample)
    assert not decision.value.requires_grad
    assert evaluation.value.requires_grad
    assert decision.value.std() > 0
    torch.testing.assert_close(decision.value, policy.value(observation), atol=0.0, rtol=0.0)
    torch.testing.assert_close(evaluation.value, decision.value, atol=0.0, rtol=0.0)
    # the learner's loss has the gradient of all outputs
    outputs = policy.value_outputs(observation)
    assert outputs.shape == (40, policy.config.values.outputs)
    torch.testing.assert_close(evaluation.value_outputs, outputs, atol=0.0, rtol=0.0)


def test_a_fresh_policy_has_other_weights_and_the_same_statistics(make):
    policy, observation = make(), observations(10)
    policy.eval()
    before = copy.deepcopy(policy.state_dict())
    torch.manual_seed(5)
    fresh = policy.with_new_weights()
    torch.manual_seed(5)
    again = policy.with_new_weights()
    assert type(fresh) is type(policy)
    assert fresh.contract == policy.contract
    assert fresh.training == policy.training
    assert fresh.device == policy.device
    mine, theirs = dict(policy.named_parameters()), dict(fresh.named_parameters())
    moved = [name for name, weights in theirs.items() if weights.min() < weights.max()]  # constants stay constants
    assert moved
    assert not [name for name in moved if torch.equal(mine[name], theirs[name])]
    assert all(torch.equal(theirs[name], weights) for name, weights in again.named_parameters())
    statistics = dict(policy.named_buffers())
    assert all(torch.equal(statistics[name], buffer) for name, buffer in fresh.named_buffers())
    assert fresh.act(observation, deterministic=True).actions.shape == (10, 4, 7)  # it is fitted
    for tensor in fresh.state_dict().values():
        tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_acts_as_in_evaluation_whatever_mode_training_has_set(make, deterministic: bool):
    policy, modes = make(), []
    policy.train()
    frozen = next(policy.children()).eval()
    for module in policy.modules():
        module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    decision = policy.act(observations(3), deterministic=deterministic)
    assert modes
    assert not any(modes)
    assert policy.training
    assert not frozen.training
    modes.clear()
    policy.evaluate(observations(3), decision.sample)
    policy.loss(observations(3), torch.zeros(3, 4, 7), torch.ones(3, 4))
    assert any(modes)  # a learner's mode is respected


def test_evaluate_equals_act(make):
    policy, observation = make(), observations(200, seed=1)
    decision = policy.act(observation, generator=generator())
    log_prob = policy.evaluate(observation, decision.sample).log_prob
    assert ((log_prob - decision.log_prob).abs() <= 1e-6 * decision.log_prob.abs().clamp_min(1.0)).all()
    # in any batch, as minibatches are drawn
    rows = torch.tensor([7, 3, 150])
    some = policy.evaluate(observation[rows], decision.sample[rows]).log_prob
    assert ((some - decision.log_prob[rows]).abs() <= 1e-5 * decision.log_prob[rows].abs().clamp_min(1.0)).all()


def test_actions_depend_on_the_observations_that_are_named_and_on_no_others(make):
    policy, observation = make(), observations(30, seed=1)
    other = observations(30, seed=5)
    first = policy.act(observation, deterministic=True).actions
    assert set(policy.actor_keys) <= set(CONTRACT.observation)
    unread = [key for key in CONTRACT.observation if key not in policy.actor_keys]
    assert [text.split(" (")[0] for text in unread_observations(policy)] == [
        key for key in unread if not CONTRACT.observation[key].privileged
    ]
    changed = observation.copy().update({key: other[key] for key in unread})
    torch.testing.assert_close(policy.act(changed, deterministic=True).actions, first)
    if "front" in policy.actor_keys:
        seen = policy.act(observation.copy().update({"front": other["front"]}), deterministic=True).actions
        assert not torch.equal(seen, first)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_only_executed_actions_are_scored(make, count: int):
    policy, observation = make(), observations(40, seed=1)
    decision = policy.act(observation, generator=generator())
    assert decision.log_prob_terms.shape[:2] == (40, 3)
    whole = policy.evaluate(observation, decision.sample)
    executed = (torch.arange(3) < count).expand(40, 3)
    found = policy.evaluate(observation, decision.sample.copy().update({EXECUTED: executed}))
    expected = decision.log_prob_terms[:, :count].sum(1)
    torch.testing.assert_close(found.log_prob, expected, rtol=1e-5, atol=1e-5)
    if count == 0:  # nothing pulls at the weights
        assert float(found.entropy.detach().abs().max()) == 0.0
        policy.zero_grad(set_to_none=True)
        (found.log_prob.sum() + found.entropy.sum()).backward()
        assert not any(each.grad is not None and each.grad.any() for each in policy.parameters())
    if count == 3:
        torch.testing.assert_close(found.entropy, whole.entropy, rtol=1e-5, atol=1e-5)


def test_likelihood_is_a_matter_of_the_actor_and_value_of_the_critic(make):
    policy, observation = make(), observations(8)
    decision = policy.act(observation)
    policy.evaluate(observation, decision.sample).log_prob.sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in policy.actor_parameters())
    assert all(parameter.grad is None for parameter in policy.critic_parameters())
    policy.zero_grad(set_to_none=True)
    policy.value(observation).sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in policy.critic_parameters())
    assert all(parameter.grad is None for parameter in policy.actor_parameters())
    ranker = policy.advantage_parameters() if isinstance(policy, RankingPolicy) else []
    parts = [*policy.actor_parameters(), *policy.critic_parameters(), *ranker]
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    assert {id(part) for part in parts} == {id(parameter) for parameter in learning}
    assert len(parts) == len(learning)


def test_features_are_what_a_critic_reads(make):
    policy, observation = make(), observations(40, seed=1)
    features = policy.features(observation)
    assert features.shape == (40, policy.feature_size)
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    assert features.detach().std(0).max() > 0
    rows = torch.tensor([7, 3, 30])
    torch.testing.assert_close(policy.features(observation[rows]), features[rows])
    read, other = [], observations(40, seed=5)
    for key in observation.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
        changed = observation.copy().update({key: other[key]})
        read += [] if torch.equal(policy.features(changed), features) else [key]
        if not torch.equal(policy.value(changed), policy.value(observation)):
            assert key in read
    assert (MEMORY in read) == (type(policy) is RecurrentPolicy)
    if isinstance(policy, GaussianPolicy) or isinstance(getattr(policy, "encoder", None), FlatObservations):
        assert "mass" in read


def test_critics_do_not_train_the_actor(make):
    policy, observation = make(), observations(8)
    critics = Critics(policy.feature_size, CriticConfig(hidden=[8]))
    critics.loss(policy.features(observation), torch.zeros(8)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in critics.weights)
    own = {id(parameter) for parameter in policy.critic_parameters()}
    trained = [parameter for parameter in policy.parameters() if parameter.grad is not None]
    assert own.issuperset(map(id, trained))
    encoders = [part for part in policy.modules() if isinstance(part, Encoder)]
    assert bool(trained) == any(list(encoder.parameters()) for encoder in encoders)


def test_gaussian_policies_are_reparameterised(make):
    policy = make()
    assert isinstance(policy, Reparameterised) == isinstance(policy, GaussianPolicy | SquashedPolicy)


@pytest.mark.parametrize("make", GAUSSIAN, indirect=True)
def test_samples_of_noise_are_those_that_are_scored(make):
    policy, observation = make(), observations(200, seed=1)
    noise = torch.randn(200, *policy.noise_shape, generator=generator())
    decision = policy.act(observation, generator=generator())  # draws the same noise
    actions, log_prob = policy.sample(observation, noise)
    assert actions.shape == (200, 4, 7)
    assert (actions == torch.tensor(HIGH)).any()  # clamped
    assert torch.equal(actions, decision.actions)
    assert torch.equal(log_prob, decision.log_prob)
    evaluated = policy.evaluate(observation, decision.sample).log_prob
    assert log_prob.shape == evaluated.shape
    assert ((log_prob - evaluated).abs() <= 1e-6 * evaluated.abs().clamp_min(1.0)).all()
    mean = policy.act(observation, deterministic=True).actions
    # a = clamp(mean + std z) in robot units
    moved = mean + policy.half_range * policy.log_std.exp().view(4, 7) * noise
    torch.testing.assert_close(actions, moved.clamp(torch.tensor(LOW), torch.tensor(HIGH)))


@pytest.mark.parametrize("make", [*GAUSSIAN, "squashed"], indirect=True)
def test_several_samples_of_an_observation_are_those_of_its_copies(make):
    policy, observation = make(), observations(5, seed=1)
    noise = torch.randn(15, *policy.noise_shape, generator=generator())
    copies = observation[torch.arange(5).repeat_interleave(3)]
    for several, single in zip(policy.sample(observation, noise), policy.sample(copies, noise), strict=True):
        torch.testing.assert_close(several, single)


@pytest.mark.parametrize("make", GAUSSIAN, indirect=True)
def test_gradients_of_samples_are_finite_differences(make):
    policy = make().double()
    observation = observations(6).apply(lambda part: part.double() if part.is_floating_point() else part)
    noise = torch.randn(6, *policy.noise_shape, generator=generator(), dtype=torch.float64)
    factors = torch.randn(6, 4, 7, generator=generator(4), dtype=torch.float64)

    def objective() -> torch.Tensor:
        actions, log_prob = policy.sample(observation, noise)
        return (factors * actions).sum() + (torch.arange(6).unsqueeze(1) * log_prob).sum()

    parameters = policy.actor_parameters()
    gradient = torch.autograd.grad(objective(), parameters, materialize_grads=True)
    directions = [torch.randn(each.shape, generator=generator(5), dtype=torch.float64) for each in parameters]
    slope = sum(float((a * b).sum()) for a, b in zip(gradient, directions, strict=True))
    values = []
    for step in (1e-6, -2e-6):
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data += step * direction
        values.append(float(objective().detach()))
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_actions_stay_inside_the_limits_and_reach_them(make):
    policy = make()
    for parameter in policy.parameters():
        parameter.data *= 3
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    for deterministic in (True, False):
        actions = policy.act(observations(300), deterministic=deterministic, generator=generator()).actions
        assert (actions >= low).all()
        assert (actions <= high).all()
    assert ((actions == low) | (actions == high)).any()  # when sampled: a deterministic tanh only comes close


def test_actors_do_without_what_only_a_simulator_knows(make):
    policy, observation = make(), observations(20)
    without = observation.exclude("mass")
    every, least = (policy.act(each, deterministic=True).actions for each in (observation, without))
    assert torch.equal(every, least)
    assert policy.act(observation).value is not None
    assert policy.act(without).value is None  # as on a robot
    policy.loss(without, torch.zeros(20, 4, 7), torch.ones(20, 4))
    policy.start_critic()
    other = observation.clone().set("mass", observation["mass"] + 1.0)
    blind = isinstance(getattr(policy, "encoder", None), ObjectEncoder) or isinstance(
        policy, Pi0Policy | Pi0FastPolicy | TokensPolicy
    )
    assert (
        (policy.value(other) != policy.value(observation)) != blind
    ).all()  # some critics read no more than the actor


def test_deterministic_acting_repeats_whatever_was_drawn_before(make):
    policy, observation = make(), observations(40)
    first = policy.act(observation, deterministic=True).actions
    torch.randn(7)
    assert torch.equal(policy.act(observation, deterministic=True).actions, first)
    other = make(seed=5)
    other.load_state_dict(copy.deepcopy(policy.state_dict()))
    assert torch.equal(other.act(observation, deterministic=True).actions, first)


def test_deterministic_acting_in_evaluation_does_not_depend_on_who_else_runs(make):
    policy = make()
    memory, alone = Memory(policy, 70), Memory(policy, 70)
    some = torch.arange(70) % 3 == 0
    for step in range(3):
        observation = observations(70, step).exclude(MEMORY)
        every = act(policy, observation, torch.ones(70, dtype=torch.bool), "cpu", memory)
        assert torch.equal(act(policy, observation, some, "cpu", alone)[some], every[some])


def test_a_generator_makes_samples_repeat_and_noise_makes_them_differ(make):
    policy, observation = make(), observations(20)
    first, again, other = (policy.act(observation, generator=generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.actions, again.actions)
    assert torch.equal(first.log_prob, again.log_prob)
    assert not torch.equal(first.actions, other.actions)


def test_acting_leaves_no_graph_and_no_trace(make):
    policy, observation = make(), observations(6)
    before, weights = observation.clone(), copy.deepcopy(policy.state_dict())
    decision = policy.act(observation)
    assert not decision.actions.requires_grad
    assert not decision.log_prob.requires_grad
    assert (observation == before).all()
    assert all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())


def test_weights_and_statistics_travel_together(make):
    policy, other, observation = make(), make(seed=5, fitted=False), observations(10)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.value(observation), policy.value(observation))
    draws = [each.act(observation, generator=generator()).actions for each in (policy, other)]
    assert torch.equal(*draws)


def test_a_policy_without_statistics_refuses_to_work(make):
    policy = make(fitted=False)
    for call in (policy.act, policy.value, policy.features):
        with pytest.raises(RuntimeError, match="no normalisation statistics"):
            call(observations(2))


def test_the_supervised_loss_is_a_mean_over_valid_steps(make):
    policy, observation = make(), observations(16)
    actions, valid = torch.zeros(16, 4, 7), torch.zeros(16, 4, dtype=torch.bool)
    assert policy.loss(observation, actions, valid) == 0
    losses = []
    for rows in (slice(8), slice(8, 16), slice(16)):
        valid[:] = False
        valid[rows] = True
        torch.manual_seed(1)
        losses.append(policy.loss(observation, actions, valid))
    torch.testing.assert_close((losses[0] + losses[1]) / 2, losses[2])


def test_the_supervised_loss_falls(make):
    policy, observation = make(), observations(16)
    actions, valid = torch.zeros(16, 4, 7), torch.ones(16, 4)
    actions[..., 6] = 0.25
    # steps of 1e-2 are too large for GR00T's stack of transformers
    optimiser = torch.optim.Adam(policy.actor_parameters(), 3e-3 if isinstance(policy, GrootPolicy) else 1e-2)
    losses = []
    for _ in range(200 if isinstance(policy, FlowPolicy | DiffusionPolicy) else 80):
        loss = policy.loss(observation, actions, valid)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
