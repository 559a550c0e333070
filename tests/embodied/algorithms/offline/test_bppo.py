"""BPPO over denoising steps: losses by hand, better than imitation, falling clip range, processes, resumption."""

import copy
import threading

import pytest
import torch

from embodied import seeding
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.offline.bppo import BPPO, BPPOConfig
from embodied.algorithms.parts import iter_parts, only_listed_optimisers
from embodied.errors import DivergedError, UserError
from embodied.policy import Steering, TrainablePolicy
from embodied.world import ALONE
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.kernels.sampling import Sampler
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from tests.embodied.algorithms.off_policy.test_steering import steered
from tests.embodied.algorithms.offline.test_offline import IMPLICIT, batch_of, make, success
from tests.embodied.algorithms.on_policy.test_ppo_in_processes import Two
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same

SIZES = {"width": 16, "hidden": 32, "turn_rad": 0.0}
POLICIES = {
    "flow": FlowConfig(**SIZES, denoising_steps=2),
    "diffusion": DiffusionConfig(**SIZES, denoising_steps=4, tuned_steps=3),
    "mlp": MLPConfig(hidden=[32]),
}
SMALL = IMPLICIT | {"steps": 500, "behaviour_steps": 10, "learning_rate": 1e-3}


def learner_of(name: str, seed: int = 0, **options) -> tuple[TrainablePolicy, BPPO]:
    return make(BPPOConfig(**SMALL | options), seed, POLICIES[name])


def improving(name: str, **options) -> BPPO:
    """A learner of which the policy has moved away from its behaviour."""
    policy, learner = learner_of(name, behaviour_steps=1000, **options)
    with torch.no_grad():
        for parameter in policy.actor_parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    learner.gradient_steps = learner.value_steps
    return learner


@pytest.mark.parametrize("name", POLICIES)
def test_it_is_better_than_imitation_of_the_same_episodes(name: str) -> None:
    policy, imitation = make(SFTConfig(steps=300, batch=64, learning_rate=3e-3, average=0.95), policy=POLICIES[name])
    imitation.fit(recorded(), 300)
    before = success(policy)
    learner = BPPOConfig(**SMALL).build(policy, torch.Generator().manual_seed(0))
    actor = [each.clone() for each in policy.actor_parameters()]
    with only_listed_optimisers(learner):
        learner.fit(recorded(), 250)
        assert all(map(torch.equal, actor, policy.actor_parameters()))  # these steps are of the critics
        learner.fit(recorded(), 150)
    assert learner.gradient_steps == 400
    assert success(policy) > max(0.95, before + 0.2)


def test_each_denoising_step_has_a_ratio_and_all_share_the_advantage() -> None:
    learner = improving("diffusion", clip=0.01)
    batch = batch_of_states(learner)
    drawn = torch.Generator()
    drawn.set_state(learner.generator.get_state())
    chunks = learner.behaviour.act(batch, generator=seeding.child(drawn))
    sampled, metrics = learner._sample(batch, ALONE)
    q = learner.critics.q.targets.values(
        torch.cat((learner.policy.features(batch), chunks.actions.flatten(1) / 0.25), -1)
    ).amin(0)
    advantage = q - learner.critics.v.values(learner.policy.features(batch))[0]
    assert metrics["advantage"] == pytest.approx(float(advantage.detach().mean()), abs=1e-5)
    normalised = ((advantage - advantage.mean()) / advantage.std()).detach()
    torch.testing.assert_close(sampled["advantage"], normalised, atol=1e-4, rtol=1e-4)
    old = learner.behaviour.evaluate(batch, chunks.sample).log_prob
    torch.testing.assert_close(sampled["log_prob"], old.detach(), atol=1e-4, rtol=1e-4)
    ratio = (learner.policy.evaluate(batch, chunks.sample).log_prob - old).exp()
    assert ratio.shape == (64, 3)
    assert 0 < int(((ratio - 1.0).abs() > 0.01).sum()) < ratio.numel()
    terms = torch.minimum(ratio * normalised[:, None], ratio.clamp(0.99, 1.01) * normalised[:, None])
    loss, _ = learner._losses(sampled, 64)
    torch.testing.assert_close(loss, -terms.mean(), atol=1e-5, rtol=1e-3)


def batch_of_states(learner: BPPO) -> torch.Tensor:
    learner.config.discount = learner.options.discount
    return batch_of(learner, torch.arange(64))["observation"]


def test_the_clip_range_and_the_learning_rate_fall_and_the_policy_becomes_the_behaviour() -> None:
    policy, learner = learner_of("mlp", steps=40, behaviour_steps=5, clip=0.2, final_clip_share=0.5, final_lr_share=0.1)
    ranges, is_behaviour = [], []
    for _ in range(40):
        learner.fit(recorded(), 1)
        low, high, _ = learner._of_parts(torch.ones(1, 1))
        assert low == high
        ranges.append(low)
        is_behaviour.append(all(map(torch.equal, policy.actor_parameters(), learner.behaviour.actor_parameters())))
    assert ranges[20::5] == pytest.approx([0.2, 0.175, 0.15, 0.125])
    assert ranges[-1] == pytest.approx(0.105)
    assert learner.optimiser.param_groups[0]["lr"] == pytest.approx(1e-3 * (1.0 - 0.9 * 19 / 20))
    assert [index for index, flag in enumerate(is_behaviour[20:], 1) if flag] == [5, 10, 15, 20]


@pytest.mark.parametrize("name", ["flow", "diffusion"])
@pytest.mark.parametrize("done", [3, 23])
def test_a_resumed_learner_has_the_weights_of_an_uninterrupted_one(name: str, done: int) -> None:
    policy, learner = learner_of(name, steps=40)
    learner.fit(recorded(), done)
    other_policy, other = learner_of(name, seed=1, steps=40)
    other_policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert same(other.state_dict(), learner.state_dict())
    metrics = [each.fit(recorded(), 17) for each in (learner, other)]
    assert metrics[0] == metrics[1]
    assert same(other.state_dict(), learner.state_dict())
    assert same(dict(other_policy.state_dict()), dict(policy.state_dict()))


def test_two_processes_have_equal_weights_and_noise_of_their_own() -> None:
    shared, barrier = [None, None], threading.Barrier(2)
    learners = [learner_of("flow", steps=20)[1] for _ in range(2)]
    sampled = {}

    def process(rank: int) -> None:
        try:
            world = Two(rank, shared, barrier)
            learner = learners[rank]

            def average(optimiser: torch.optim.Optimizer, *_: object) -> None:
                for parameter in (each for group in optimiser.param_groups for each in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad = world.sum(parameter.grad) / world.size

            for optimiser in iter_parts(learner, (torch.optim.Optimizer,)):
                optimiser.register_step_pre_hook(average)
            learner.fit(recorded(), 15, world)
            sampled[rank] = learner._sample(batch_of_states(learner), world)[0]
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, weight in learners[0].policy.state_dict().items():
        torch.testing.assert_close(learners[1].policy.state_dict()[name], weight, msg=name)
    assert not torch.equal(sampled[0]["sample"]["path"], sampled[1]["sample"]["path"])
    both = torch.cat([sampled[rank]["advantage"] for rank in range(2)])
    assert float(both.mean()) == pytest.approx(0.0, abs=1e-4)  # normalised over both
    assert float(both.std()) == pytest.approx(1.0, abs=1e-3)


def test_the_critics_go_on_in_the_stage_rl_in_the_unit_of_rewards() -> None:
    _, learner = learner_of("flow", steps=10)
    learner.fit(recorded(), 2)
    last = learner.critics.q.critics.weights[-1] * learner.transitions.scale
    values = learner.values()
    assert values is not None
    assert any(torch.equal(each, last) for each in values["critics"].values())


def test_what_it_cannot_learn_is_refused_in_one_line() -> None:
    contract = Reach(1).contract
    ode = FlowConfig(**SIZES, sampler=Sampler.ODE).build(contract)
    with pytest.raises(UserError, match=r"log-probability for offline=bppo; use policy\.sampler=flow_sde"):
        BPPOConfig().build(ode, torch.Generator())
    policy = steered(Steering.ONE_STEP)
    policy.start_steering()
    with pytest.raises(UserError, match=r"log-probability for offline=bppo.* weights before steering"):
        BPPOConfig().build(policy, torch.Generator())
    with pytest.raises(UserError, match=r"without a memory; use policy=mlp"):
        BPPOConfig().build(RecurrentConfig(hidden=[8]).build(contract), torch.Generator())
    _, learner = learner_of("flow")
    episodes = recorded()
    episodes.reward[0] = torch.nan
    with pytest.raises(UserError, match="rewards are unknown"):
        learner.fit(episodes, 1)
    episodes = recorded()
    episodes.observation["position"][0] = torch.nan
    with pytest.raises(UserError, match="not a number in position"):
        learner.fit(episodes, 1)
    learner = improving("flow")
    learner.critics.v.biases[-1].data.fill_(torch.nan)
    with pytest.raises(DivergedError, match="policy loss became nan"):
        learner.fit(recorded(), 1)
