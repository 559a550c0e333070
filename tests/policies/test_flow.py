"""Sampling and scoring of the flow policy agree, in every sampler."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.execution.chunking import Running
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector
from embodied.seeding import fixed_noise
from policies.encoders.augmentation import AugmentationKind, CartesianScene
from policies.encoders.base import EncoderKind
from policies.encoders.libero import ObjectEncoder
from policies.flat import FlatEncoder
from policies.flow import FlowConfig, FlowPolicy, Sampler
from policies.generation.base import Aggregate
from policies.generation.chunk_networks import NetworkKind
from policies.vision.augmentation import PictureChanges
from policies.vision.backbones import VisionConfig
from policies.vision.encoder import PictureEncoder
from policies.vla.pi0 import Pi0Policy
from sims.libero.observation import action_spec
from tests.embodied.reach import Reach
from tests.policies.observations import contract, observations


def make(sampler: Sampler = Sampler.FLOW_SDE, **settings) -> FlowPolicy:
    torch.manual_seed(0)
    config = FlowConfig(width=32, hidden=32, sampler=sampler, noise_level=0.5, turn_rad=0.0, **settings)
    policy = config.build(contract())
    policy.fit(observations(64), torch.randn(64, 4, 2) * 0.3)
    return policy


SCORED = [Sampler.FLOW_SDE, Sampler.FLOW_NOISE, Sampler.REINFLOW]


@pytest.mark.parametrize("aggregate", Aggregate)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("sampler", SCORED)
def test_evaluate_equals_act(sampler: Sampler, steps: int, aggregate: Aggregate) -> None:
    policy, observation = make(sampler, denoising_steps=steps, aggregate=aggregate), observations(50, seed=1)
    decision = policy.act(observation)
    evaluation = policy.evaluate(observation, decision.sample)
    assert (evaluation.log_prob - decision.log_prob).abs().max() < 1e-6 * decision.log_prob.abs().max()
    torch.testing.assert_close(torch.exp(evaluation.log_prob - decision.log_prob), torch.ones(50, 1), rtol=1e-5, atol=0)


def test_chunks_of_a_new_policy_lie_as_near_as_its_initial_deviation_says() -> None:
    spread = {}
    for deviation in (None, 0.2):
        policy = make(initial_std=deviation, denoising_steps=20)
        same = observations(1).expand(2000)
        chunk = policy.act(same, deterministic=False, generator=torch.Generator().manual_seed(0)).sample["path"]
        ends = ode_ends(policy, chunk[:, 0], same)
        spread[deviation] = float(ends.std(0).mean())
    assert spread[None] > 0.6
    assert spread[0.2] == pytest.approx(0.2, abs=0.03)


def ode_ends(policy: FlowPolicy, x: torch.Tensor, observation: TensorDict) -> torch.Tensor:
    """Normalised chunks generated from noise `x`."""
    with torch.no_grad():
        path, _, _ = policy._denoise(x, policy.encoder(observation), deterministic=True, generator=None)
    return path[:, -1]


def test_an_impossible_initial_deviation_is_refused() -> None:
    with pytest.raises(UserError, match="initial_std=0: expected a number above 0"):
        FlowConfig(initial_std=0.0)


def test_log_prob_is_that_of_the_noisy_step_over_executed_actions() -> None:
    policy, observation = make(), observations(6, seed=1)
    decision = policy.act(observation)
    for row in range(6):
        step = int(decision.sample["noisy"][row])
        x, following = decision.sample["path"][row, step], decision.sample["path"][row, step + 1]
        features = policy.encoder(observation[row : row + 1])
        t = 1.0 - step / 4
        v = policy.velocity(x[None], torch.tensor([t]), features)[0].detach()
        sigma = 0.5 * math.sqrt(t / (0.25 if step == 0 else 1.0 - t))
        mean = x - 0.25 * v - sigma**2 * 0.25 / (2 * t) * (x + (1 - t) * v)
        std = 0.5 * sigma
        total = sum(
            -0.5 * ((float(following[i, d]) - float(mean[i, d])) / std) ** 2
            - math.log(std)
            - 0.5 * math.log(2 * math.pi)
            for i in range(3)  # executed is 3 of 4
            for d in range(2)
        )
        assert decision.log_prob[row].item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("aggregate", "share"), [("SUM", 1.0), ("STEP_MEAN", 1 / 2), ("PATH_MEAN", 1 / 3), ("MEAN", 1 / 12)]
)
@pytest.mark.parametrize("sampler", [Sampler.FLOW_NOISE, Sampler.REINFLOW])
def test_learned_noise_is_scored_over_the_whole_path(sampler: Sampler, aggregate: str, share: float) -> None:
    """Of two steps, each of three executed actions of two elements; the noise that begins the path is not scored."""
    policy, observation = make(sampler, aggregate=Aggregate[aggregate], denoising_steps=2), observations(5, seed=1)
    decision = policy.act(observation)
    path, features, total = decision.sample["path"], policy.encoder(policy.encoder.read(observation)), 0.0
    for step, t in enumerate((1.0, 0.5)):
        time = torch.full((5,), t)
        mean = path[:, step] - 0.5 * policy.velocity(path[:, step], time, features)
        raw = policy.noise(torch.cat((features, time.unsqueeze(1)), 1)).view(5, 4, 2)
        spread = 0.08 * 2.0 ** ((raw.tanh() + 1.0) / 2.0)  # from 0.08 to 0.16, evenly in its logarithm
        normal = torch.distributions.Normal(mean, spread)
        total = total + normal.log_prob(path[:, step + 1])[:, :3].sum((1, 2))
    torch.testing.assert_close(decision.log_prob.squeeze(1), share * total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", [Sampler.FLOW_NOISE, Sampler.REINFLOW])
def test_learned_noise_has_the_deviation_that_scores_it(sampler: Sampler) -> None:
    policy = make(sampler, denoising_steps=2, std_min=0.1, std_max=0.5)
    same = observations(1, seed=1).expand(20_000)
    path = policy.act(same, generator=torch.Generator().manual_seed(0)).sample["path"]
    features = policy.encoder(policy.encoder.read(same))
    for step, t in enumerate((1.0, 0.5)):
        time = torch.full((20_000,), t)
        with torch.no_grad():
            mean = path[:, step] - 0.5 * policy.velocity(path[:, step], time, features)
            std = 0.1 * 5.0 ** ((policy._spread(features, torch.full((20_000,), step)).tanh() + 1.0) / 2.0)
        z = (path[:, step + 1] - mean) / std
        torch.testing.assert_close(z.mean(0), torch.zeros(4, 2), atol=0.03, rtol=0.0)
        torch.testing.assert_close(z.std(0), torch.ones(4, 2), atol=0.02, rtol=0.0)
        widest = float(z.abs().max())
        assert (widest <= 3.001) if sampler is Sampler.REINFLOW else (widest > 3.5)


@pytest.mark.parametrize("sampler", [Sampler.FLOW_NOISE, Sampler.REINFLOW])
def test_policy_gradients_widen_noise_that_was_too_narrow(sampler: Sampler) -> None:
    """Where far samples are rewarded the deviation grows, at every step; the velocity has a gradient, too."""
    policy, observation = make(sampler), observations(500, seed=1)
    sample = policy.act(observation).sample
    features = policy.encoder(policy.encoder.read(observation)).detach()
    far = (sample["path"][:, 1:] - sample["path"][:, :-1]).square().sum((1, 2, 3))
    advantage = (far - far.mean()) / far.std()

    def deviations() -> torch.Tensor:
        raw = [policy._spread(features, torch.full((500,), step)) for step in range(4)]
        return torch.stack([each[:, :3].mean() for each in raw])

    before = deviations().detach()
    optimiser = torch.optim.SGD(policy.noise.parameters(), 1e-3)
    (-advantage * policy.evaluate(observation, sample).log_prob.squeeze(1)).mean().backward()
    assert all(bool(weight.grad.any()) for weight in policy.noise.parameters())
    assert bool(policy.velocity.network.out.weight.grad.any())
    optimiser.step()
    assert (deviations() > before).all()


def test_deterministic_actions_repeat_and_respect_limits() -> None:
    policy, observation = make(), observations(20, seed=2)
    first, second = (policy.act(observation, deterministic=True).actions for _ in range(2))
    assert torch.equal(first, second)
    assert first.abs().max() <= 1.0


def test_generator_makes_sampling_repeat() -> None:
    policy, observation = make(), observations(20, seed=2)
    draws = [policy.act(observation, generator=torch.Generator().manual_seed(3)).actions for _ in range(2)]
    assert torch.equal(*draws)


def test_the_ode_has_no_likelihood() -> None:
    policy, observation = make(Sampler.ODE), observations(2)
    with pytest.raises(ValueError, match="no likelihood"):
        policy.evaluate(observation, policy.act(observation).sample)


def test_invalid_steps_do_not_train() -> None:
    policy, observation = make(), observations(8)
    actions, valid = torch.zeros(8, 4, 2), torch.ones(8, 4, dtype=torch.bool)
    valid[:, 2:] = False
    torch.manual_seed(1)
    loss = policy.loss(observation, actions, valid)
    policy.zero_grad()
    loss.backward()
    rows = policy.velocity.network.out.weight.grad.view(4, 2, -1)
    assert rows[:2].abs().sum() > 0
    assert rows[2:].abs().sum() == 0


def test_the_loss_is_that_of_flow_matching_at_all_times() -> None:
    policy, observation = make(), observations(2000)
    actions, seen = torch.rand(2000, 4, 2) - 0.5, []
    policy.velocity.register_forward_hook(lambda _, given, velocity: seen.append((*given[:2], velocity)))
    loss = policy.loss(observation, actions, torch.ones(2000, 4, dtype=torch.bool))
    x, time, velocity = seen[0]
    tenths = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(time.quantile(tenths), tenths, atol=0.04, rtol=0.0)  # uniform
    t, target = time.view(-1, 1, 1), (actions - policy.action_mean) / policy.action_std
    noise = (x - (1.0 - t) * target) / t
    assert noise[time > 0.01].std() == pytest.approx(1.0, abs=0.03)
    torch.testing.assert_close(loss, (velocity - (noise - target)).square().mean(), rtol=1e-3, atol=0.0)


def test_supervised_training_recovers_actions_that_depend_on_the_observation() -> None:
    policy, observation = make(), observations(128)
    actions = 0.8 * torch.tanh(observation["end_effector_position"][:, :2]).unsqueeze(1).expand(-1, 4, -1)
    policy.fit(observation, actions)
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(320):
        optimiser.zero_grad()
        policy.loss(observation, actions, torch.ones(128, 4, dtype=torch.bool)).backward()
        optimiser.step()
    error = (policy.act(observation, deterministic=True).actions - actions).abs().mean()
    assert error < 0.1  # the mean action misses by 0.46


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_candidate_of_highest_advantage_is_executed(deterministic: bool) -> None:
    policy, observation = make(), observations(30, seed=4)
    policy.config.candidates, policy.config.explored_candidates = (6, 3) if deterministic else (3, 6)
    seen = {}
    advantage = policy.advantage

    def watched(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        seen["actions"], seen["advantage"] = actions, advantage(observation, actions)
        return seen["advantage"]

    policy.advantage = watched
    one = policy.act(observation, deterministic=deterministic).actions
    assert not seen  # until ranking starts
    policy.start_ranking()
    decision = policy.act(observation, deterministic=deterministic)
    assert seen["actions"].shape == (30, 6, 4, 2)
    best = seen["advantage"].argmax(1)
    assert len(set(best.tolist())) > 1
    assert torch.equal(decision.actions, seen["actions"][torch.arange(30), best])
    assert not torch.equal(decision.actions, one)
    if not deterministic:  # sample and score belong to the chunk that was chosen
        torch.testing.assert_close(policy.evaluate(observation, decision.sample).log_prob, decision.log_prob)
        assert torch.equal(policy.to_robot(decision.sample["path"][:, -1]), decision.actions)


def test_actions_stay_within_the_limits_of_the_contract() -> None:
    far = torch.full((1, 4, 2), 100.0)
    assert make().to_robot(torch.cat((far, -far))).unique().tolist() == [-1.0, 1.0]


def test_every_parameter_has_one_trainer() -> None:
    policy = make()
    parts = policy.actor_parameters(), policy.critic_parameters(), policy.advantage_parameters()
    assert len({*parts[0], *parts[1], *parts[2]}) == sum(map(len, parts)) == len(list(policy.parameters()))


def test_critics_begin_with_what_the_actor_has_learned_to_see() -> None:
    policy = make()
    policy.start_critic()
    for critic in (policy.value_encoder, policy.advantage_encoder):
        for mine, learned in zip(critic.parameters(), policy.encoder.parameters(), strict=True):
            assert torch.equal(mine, learned)
            assert mine is not learned


def test_the_advantage_learns_which_executed_actions_are_better() -> None:
    policy, observation = make(), observations(512)
    actions = torch.rand(512, 4, 2) * 2.0 - 1.0
    goal = 0.7 * observation["gripper_command"].sign().unsqueeze(-1).expand(-1, -1, 2)
    target = -(actions[:, :3] - goal).square().mean((1, 2))  # the fourth action is never executed
    optimiser = torch.optim.Adam(policy.advantage_parameters(), 3e-3)
    for _ in range(300):
        optimiser.zero_grad()
        policy.advantage_loss(observation, actions, target).backward()
        optimiser.step()
    better, worse = goal.expand(-1, 4, -1), -goal.expand(-1, 4, -1)
    rated = policy.advantage(observation, torch.stack((better, worse), 1))
    assert (rated[:, 0] > rated[:, 1]).float().mean() > 0.97
    other = torch.stack((better, better), 1)
    other[:, 1, 3] = 0.9
    rated = policy.advantage(observation, other)
    assert torch.equal(rated[:, 0], rated[:, 1])


SCENE = replace(contract(), action=TensorSpec((7,), names=action_spec().names, low=(-1.0,) * 7, high=(1.0,) * 7))
FLAT = Contract(
    {
        "speed": TensorSpec((3,), unit="m/s"),
        "lidar": TensorSpec((5,), unit="m"),
        "picture": TensorSpec((4, 4, 3), dtype="uint8"),
        "friction": TensorSpec((1,), privileged=True),
    },
    TensorSpec((2,), low=(0.0, -400.0), high=(20.0, 400.0)),
    0.05,
)


def flat(**settings) -> FlowPolicy:
    torch.manual_seed(0)
    return FlowConfig(width=16, hidden=32, **{"encoder": EncoderKind.FLAT} | settings).build(FLAT)


def driving(count: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            key: 1.0 + torch.rand(count, *spec.shape, generator=generator)
            for key, spec in FLAT.observation.items()
            if spec.dtype == "float32"
        },
        [count],
    )


def test_several_noises_of_a_chunk_count_for_it_alone() -> None:
    policy = flat(draws=5)
    observation, actions = driving(3), torch.rand(3, policy.contract.horizon, 2)
    policy.fit(observation, actions)
    valid = torch.tensor([[True], [False], [False]]).expand(-1, policy.contract.horizon)

    def loss(actions: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return policy.loss(observation, actions, valid)

    others = actions.clone()
    others[1:] += 9.0
    assert torch.equal(loss(others), loss(actions))
    others[0] += 9.0
    assert not torch.equal(loss(others), loss(actions))


def test_encoder_and_augmentation_follow_from_the_contract() -> None:
    policy = FlowConfig(width=16).build(SCENE)
    assert isinstance(policy.encoder, ObjectEncoder)
    assert isinstance(policy.augment, CartesianScene)
    other = FlowConfig(width=16).build(contract())  # objects, but actions without a known rotation
    assert isinstance(other.encoder, ObjectEncoder)
    assert other.augment is None
    assert isinstance(flat().encoder, FlatEncoder)
    assert flat().augment is None
    seeing = FlowConfig(width=16, vision=VisionConfig(shift=1)).build(FLAT)
    assert isinstance(seeing.encoder, PictureEncoder)
    assert isinstance(seeing.augment, PictureChanges)


@pytest.mark.parametrize(
    ("settings", "on", "message"),
    [
        ({"augmentation": AugmentationKind.CARTESIAN_SCENE}, contract(), "set turn_rad=0"),
        ({"augmentation": AugmentationKind.CARTESIAN_SCENE}, FLAT, "use augmentation=none"),
        ({"encoder": EncoderKind.OBJECTS}, FLAT, "reads end_effector_position, .*; use encoder=flat"),
        (
            {"encoder": EncoderKind.FLAT, "reciprocal": ["wind"]},
            FLAT,
            r"names .'wind'.; expected some of speed, lidar",
        ),
        ({"reciprocal": ["gripper_command"]}, contract(), r"expected policy.reciprocal=\[\] with encoder=objects"),
        (
            {},
            replace(FLAT, observation={"near": TensorSpec((-1, 3))}),
            "encoder=flat reads .*: use encoder=objects",
        ),
        ({}, replace(FLAT, action=TensorSpec((2,))), "needs action limits"),
    ],
)
def test_what_a_contract_does_not_have_is_one_line_that_says_what_to_use(settings, on, message) -> None:
    with pytest.raises(UserError, match=message) as caught:
        FlowConfig(**settings).build(on)
    assert "\n" not in str(caught.value)


def test_a_flat_actor_acts_in_the_units_of_its_contract() -> None:
    policy = flat(reciprocal=["lidar"])
    low, high = torch.tensor(FLAT.action.low), torch.tensor(FLAT.action.high)
    policy.fit(driving(64), (low + high) / 2 + torch.zeros(64, 2))  # actions never varied
    torch.testing.assert_close(policy.action_std, 0.1 * (high - low))
    actions = policy.act(driving(200, 1), deterministic=True).actions[:, 0]
    assert ((low <= actions) & (actions <= high)).all()
    assert (actions.std(0) > 0.02 * (high - low)).all()
    near, far = driving(1), driving(1)
    far["lidar"] += 1e3
    farther = far.clone().set("lidar", 2.0 * far["lidar"])
    features = [policy.encoder(each) for each in (near, far, farther)]
    assert (features[0] - features[1]).abs().max() > 100 * (features[1] - features[2]).abs().max()


def test_deterministic_noise_differs_wherever_the_actor_sees_a_difference() -> None:
    policy = flat()
    policy.fit(driving(64), torch.zeros(64, 2))
    seen = driving(3)
    for key, tells in (("speed", True), ("lidar", True), ("friction", False)):
        other = seen.clone()
        other[key][:, -1] += 1e-6
        same = fixed_noise(policy.encoder.identity(seen), (4,)) == fixed_noise(policy.encoder.identity(other), (4,))
        assert (~same).all() if tells else same.all()


def test_a_critic_begins_with_the_eye_of_the_actor_and_sees_more() -> None:
    policy = flat()
    policy.fit(driving(64), torch.zeros(64, 2))
    policy.start_critic()
    actor, critic = (encoder.layers[0].weight for encoder in (policy.encoder, policy.value_encoder))
    assert critic.shape == (32, 9)
    assert torch.equal(critic[:, :8], actor)
    assert critic[:, 8].any()
    assert torch.equal(policy.advantage_encoder.layers[0].weight, actor)  # the ranking input has no other actions


def test_it_learns_to_reach_by_ppo() -> None:
    """Learning from scratch with sparse reward, as policy=flow algorithm=ppo does."""
    torch.manual_seed(0)
    env = Reach(64)
    policy = FlowConfig(width=16, hidden=32).build(env.contract)
    policy.fit(*first_decisions(Reach(64), torch.Generator().manual_seed(0), 512))
    config = PPOConfig(minibatch=256, learning_rate=3e-3, target_kl=1.0, discount=0.9)
    learner = config.build(policy, None, env, torch.Generator().manual_seed(0))
    collector = Collector(env, policy, torch.Generator().manual_seed(0))
    rates = []
    for _ in range(18):
        rollout = collector.collect(16)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.0)
    assert rates[0] < 0.5
    assert rates[-1] > 0.95
    assert evaluate(Reach(16), policy, starts_per_task=32).success.float().mean() > 0.95


def running(actions: torch.Tensor, frozen: int, overlap: int) -> Running:
    count = len(actions)
    return Running(actions, torch.full((count,), frozen), torch.full((count,), overlap))


@pytest.mark.parametrize("ranks", [False, True])
def test_a_chunk_continues_the_running_one(ranks: bool) -> None:
    policy, observation = make(guidance=5.0), observations(40, seed=2)
    if ranks:
        policy.start_ranking()
    alone = policy.act(observation, deterministic=True).actions
    known = torch.full_like(alone, 0.3)
    unguided = policy.inpaint(observation, running(known, 0, 0), deterministic=True).actions
    torch.testing.assert_close(unguided, alone)
    decision = policy.inpaint(observation, running(known, 1, 3), deterministic=True)
    assert torch.equal(decision.actions[:, :1], known[:, :1])
    assert decision.log_prob.isnan().all()
    apart = (decision.actions - known).abs().mean((0, 2)) / (alone - known).abs().mean((0, 2))
    assert apart[1] < 0.5
    assert apart[1] < apart[2] < apart[3]
    again = policy.inpaint(observation[:7], running(known[:7], 1, 3), deterministic=True).actions
    torch.testing.assert_close(again, decision.actions[:7])


def two_ways(count: int, horizon: int, size: torch.Tensor) -> torch.Tensor:
    """Chunks [N, H, A] that turn right or left throughout, by `size` [A]."""
    signs = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)
    return signs.view(-1, 1, 1) * size.expand(horizon, -1)


def taught_two_ways(policy: FlowPolicy | Pi0Policy, see: Callable[..., TensorDict], steps: int, rate: float) -> None:
    """`policy` with what it has learned of chunks that go one of two ways, which no observation tells."""
    horizon, high = policy.contract.horizon, torch.tensor(policy.contract.action.high)
    low = torch.tensor(policy.contract.action.low)
    middle, size = (high + low) / 2, 0.6 * (high - low) / 2
    policy.fit(see(64), middle + two_ways(64, horizon, size))
    optimiser = torch.optim.Adam(policy.actor_parameters(), rate)
    for step in range(steps):
        rows = 64 if step % 2 else 63
        loss = policy.loss(see(rows, seed=step), middle + two_ways(rows, horizon, size), torch.ones(rows, horizon))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def kept_ways(policy: FlowPolicy | Pi0Policy, see: Callable[..., TensorDict], frozen: int) -> float:
    """Share of chunks that go on as the frozen actions of the running ones went."""
    high, low = (torch.tensor(limit) for limit in (policy.contract.action.high, policy.contract.action.low))
    size = 0.6 * (high - low) / 2
    ways = two_ways(40, policy.contract.horizon, size)
    going_on = running((high + low) / 2 + ways, frozen, policy.contract.horizon)
    actions = policy.inpaint(see(40, seed=9999), going_on, deterministic=True).actions
    assert torch.equal(actions[:, :frozen], going_on.actions[:, :frozen])
    return float(((actions - (high + low) / 2) * ways > 0.0).all(-1).all(-1).float().mean())


@pytest.mark.parametrize("network", [NetworkKind.MLP, NetworkKind.DIT])
def test_trained_with_given_actions_it_goes_on_with_them_without_guidance(network: NetworkKind) -> None:
    long = replace(FLAT, horizon=4)
    torch.manual_seed(0)
    made = {
        delay: FlowConfig(
            encoder=EncoderKind.FLAT, network=network, hidden=32, trained_delay=delay, guidance=0.0
        ).build(long)
        for delay in ((0, 2) if network is NetworkKind.MLP else (2,))
    }
    for policy in made.values():
        taught_two_ways(policy, driving, 400, 3e-3)
    for frozen in (1, 2):
        assert kept_ways(made[2], driving, frozen) > 0.9
        assert 0 not in made or kept_ways(made[0], driving, frozen) < 0.7
    assert kept_ways(made[2], driving, 3) < 0.7  # more than were given in training: guided, here by nothing
    alone = made[2].act(driving(60), deterministic=True).actions[:, 0, 1]
    assert 0.2 < float((alone > 0.0).float().mean()) < 0.8  # without given actions it goes both ways still


def test_given_actions_are_not_in_the_loss_and_more_than_a_chunk_is_refused() -> None:
    policy, observation = (
        FlowConfig(encoder=EncoderKind.FLAT, trained_delay=3).build(replace(FLAT, horizon=4)),
        driving(64),
    )
    actions = torch.rand(64, policy.contract.horizon, 2)
    policy.fit(observation, actions)
    target = (actions - policy.action_mean) / policy.action_std
    torch.manual_seed(0)
    error = policy._error(target, policy.encoder(observation))
    left_out = (error == 0.0).sum(1)
    assert set(left_out.tolist()) == {0, 1, 2, 3}
    assert all(not row[:count].any() for row, count in zip(error, left_out, strict=True))
    features, times = policy.encoder(observation), torch.full((64, 4), 0.5)
    unmarked = policy.velocity(target, times, features)
    times[:, 0] = 0.0
    assert (policy.velocity(target, times, features)[:, 1:] != unmarked[:, 1:]).any()  # they know what is given
    with pytest.raises(UserError, match=r"policy\.trained_delay below task\.horizon=1, got 1"):
        flat(trained_delay=1)


def test_candidates_that_continue_are_ranked_by_what_would_run() -> None:
    policy, observation = make(), observations(10, seed=4)
    policy.start_ranking()
    seen = []
    policy.advantage = lambda observation, actions: seen.append(actions) or actions[..., 2, 0]
    known = torch.full((10, 4, 2), 0.25)
    decision = policy.inpaint(observation, running(known, 2, 2), deterministic=True)
    assert torch.equal(seen[0][:, :, :2], known[:, None, :2].expand(-1, 32, -1, -1))
    assert torch.equal(decision.actions, seen[0][torch.arange(10), seen[0][..., 2, 0].argmax(1)])
