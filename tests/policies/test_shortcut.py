"""With shortcuts one denoising step does what many do; a plain flow's single step lands between the modes."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig, FlowPolicy, Sampler
from policies.kernels.shortcut import LENGTHS, length_of, random_steps, two_steps

CONTRACT = Contract({"x": TensorSpec((1,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), 0.1)
CONFIG = FlowConfig(
    width=8, hidden=64, encoder=EncoderKind.FLAT, denoising_steps=16, sampler=Sampler.REINFLOW, shortcut=0.25
)


def observations(count: int) -> TensorDict:
    return TensorDict({"x": torch.randn(count, 1)}, [count])


def trained(config: FlowConfig, steps: int = 800) -> FlowPolicy:
    """Imitates actions of -0.8 and 0.8, equally often."""
    torch.manual_seed(0)
    policy, observation, actions = config.build(CONTRACT), observations(512), 0.8 * torch.randn(512, 1, 1).sign()
    policy.fit(observation, actions)
    optimiser = torch.optim.Adam(policy.actor_parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        policy.loss(observation, actions, torch.ones(512, 1)).backward()
        optimiser.step()
        schedule.step()
    return policy


def ends(policy: FlowPolicy, steps: int, x: torch.Tensor) -> torch.Tensor:
    """Normalised actions [N, 1, 1] from noise `x` in `steps` steps, with the weights of `policy`."""
    other = replace(policy.config, denoising_steps=steps).build(CONTRACT)
    other.load_state_dict(policy.state_dict())
    features = other.encoder(other.encoder.read(observations(len(x))))
    return other._denoise(x, features, deterministic=True, generator=None)[0][:, -1].detach()


def test_one_step_ends_where_many_do_if_shortcuts_were_learned() -> None:
    apart, x = {}, torch.randn(500, 1, 1)
    for share in (0.0, 0.25):
        policy = trained(replace(CONFIG, shortcut=share))
        many = ends(policy, 16, x)
        assert float((many.abs() - 1.0).abs().mean()) < 0.1  # at the modes
        apart[share] = float((ends(policy, 1, x) - many).abs().mean())
    assert apart[0.0] > 0.8
    assert apart[0.25] < 0.2


def test_a_long_step_should_equal_two_short_ones_by_hand() -> None:
    seen = []

    def field(x: torch.Tensor, time: torch.Tensor, features: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        seen.append((time.item(), number.item()))
        return 3.0 * x + time.view(-1, 1, 1)

    found = two_steps(field, torch.full((1, 1, 1), 2.0), torch.tensor([0.75]), torch.zeros(1, 0), torch.tensor([3]))
    # length 1/4 from 0.75, so halves of 1/8: 3 * 2 + 0.75 = 6.75; x = 2 - 6.75 / 8; 3 x + 0.625
    assert seen == [(0.75, 2), (0.625, 2)]
    assert found.item() == pytest.approx((6.75 + 3.0 * (2.0 - 6.75 / 8.0) + 0.625) / 2.0)


def test_steps_that_are_learned_are_those_that_sampling_takes() -> None:
    time, number = random_steps(20_000, torch.device("cpu"))
    length = torch.tensor(LENGTHS)[number]
    assert set(number.tolist()) == {1, 2, 3, 4, 5}
    assert set(time[number == 3].tolist()) == {0.25, 0.5, 0.75, 1.0}
    assert set(time[number == 5].tolist()) == {1.0}
    assert (time - length >= 0.0).all()


@pytest.mark.parametrize(("steps", "number"), [(1, 5), (4, 3), (16, 1)])
def test_acting_and_scoring_ask_for_steps_of_their_length(steps: int, number: int) -> None:
    policy, asked = replace(CONFIG, denoising_steps=steps).build(CONTRACT), []
    policy.fit(observations(64), 0.5 * torch.randn(64, 1, 1))
    policy.velocity.register_forward_hook(lambda _, given, velocity: asked.append(given[3]))
    decision = policy.act(observations(7))
    policy.evaluate(observations(7), decision.sample)
    assert len(asked) == 2 * steps
    assert (torch.cat(asked) == number).all()


def test_the_length_of_a_step_changes_the_velocity() -> None:
    policy = CONFIG.build(CONTRACT)
    x, time, features = torch.randn(4, 1, 1), torch.full((4,), 0.5), torch.randn(4, policy.encoder.out_features)
    at_a_point, long = (policy.velocity(x, time, features, torch.full((4,), number)) for number in (0, 4))
    assert (at_a_point != long).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"denoising_steps": 3}, "denoising_steps among 1, 2, 4, 8, 16 with policy.shortcut, got 3"),
        ({"denoising_steps": 32}, "got 32"),
        ({"shortcut": 1.0}, "shortcut=1: expected a number of at least 0 and below 1"),
        ({"initial_std": 0.5}, "choose one"),
    ],
)
def test_what_does_not_go_with_shortcuts_is_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **settings)


def test_steps_of_every_length_have_a_number() -> None:
    assert [LENGTHS[length_of(steps)] for steps in (1, 2, 4, 8, 16)] == [1.0, 0.5, 0.25, 0.125, 0.0625]
