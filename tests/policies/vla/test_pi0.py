"""pi0 with a small random model: what it reads, how it samples and scores, and a run of train.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.off_policy.dsrl import DSRLConfig
from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import INITIAL_NOISE, Steering
from embodied.text import encode, text_spec
from policies.generation.base import Aggregate
from policies.generation.steering import SteeringConfig
from policies.vla.groot.policy import GrootTokenizer
from policies.vla.inputs import VOCABULARY, Tokenizer, squared
from policies.vla.model import untrained
from policies.vla.openvla.model import PromptTokenizer
from policies.vla.pi0 import Pi0Config, Pi0Policy, Sampler
from policies.vla.sizes import Size
from policies.vla.smolvla.policy import SmolVLATokenizer
from tests.programs import run_program

TEXT = 16
SEEING = Contract(
    {
        "front": TensorSpec((16, 24, 3), "uint8", camera="front", frame="world"),
        "wrist": TensorSpec((16, 16, 3), "uint8", camera="wrist", frame="hand"),
        "depth": TensorSpec((16, 16, 3), "uint8", camera="depth", privileged=True),
        "fingers": TensorSpec((2,), unit="m"),
        "cube": TensorSpec((-1, 3), unit="m", privileged=True),
        "instruction": text_spec(TEXT),
    },
    TensorSpec((3,), low=(-1.0, -2.0, 0.0), high=(1.0, 2.0, 4.0)),
    0.05,
    horizon=4,
    executed=2,
)
RUN = [
    *("task=libero_pick", "policy=pi0", "algorithm=ppo", "task.assets=stand-in", "task.tasks=[0]", "task.episodes=1"),
    *("task.step_limit=100", "num_envs=2", "env_steps=32", "evaluation_starts=1", "evaluation_envs=1", "control=false"),
    *("video=false", "threads=1", "sft.steps=3", "sft.batch=8", "algorithm.rollout_length=4", "algorithm.epochs=1"),
    *("algorithm.minibatch=4", "algorithm.critic_warmup=0", "policy.hidden=16", "policy.denoising_steps=2"),
]


def seen(count: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    images = {
        key: torch.randint(256, (count, *spec.shape), dtype=torch.uint8, generator=generator)
        for key, spec in SEEING.observation.items()
        if spec.is_picture
    }
    words = [("pick the milk", "open")[row % 2] for row in range(count)]
    state = {"fingers": torch.rand(count, 2, generator=generator), "cube": torch.rand(count, 5, 3, generator=generator)}
    said = {"instruction": torch.stack([torch.from_numpy(encode(word, TEXT)) for word in words])}
    return TensorDict(images | state | said, [count])


def policy(**options: object) -> Pi0Policy:
    torch.manual_seed(0)
    made = Pi0Config(**{"hidden": 16, **options}).build(SEEING)
    for parameter in made.parameters():  # so that no layer has its special initial weights
        parameter.data += 0.05 * torch.randn_like(parameter)
    made.fit(seen(16), torch.rand(16, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    return made


def rolled(made: Pi0Policy, observation: TensorDict) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """Velocities as transformers computes them from everything at once."""
    state, images = made._state(observation), made.inputs.pictures(observation, 32)
    tokens, real = made.inputs.tokens(observation)
    image_token = made.model.native.config.vlm_config.image_token_id
    places = torch.full((len(state), 2 * made.model.tokens_of_picture), image_token)

    def velocity(x: torch.Tensor, time: float) -> torch.Tensor:
        return made.model.native(
            state=torch.nn.functional.pad(state, (0, 30)),
            noise=x,
            timestep=torch.full((len(x),), time),
            input_ids=torch.cat((places, tokens), 1),
            attention_mask=torch.cat((torch.ones_like(places), real), 1),
            pixel_values=images,
            pixel_attention_mask=torch.ones(len(x), 2, dtype=torch.bool),
        ).logits

    return velocity


def test_the_cached_prefix_gives_what_a_whole_pass_gives_at_every_step() -> None:
    made, observation = policy(denoising_steps=3), seen(3)
    path = made.act(observation, deterministic=True), made.act(observation, deterministic=True)
    assert torch.equal(path[0].actions, path[1].actions)
    whole, steps = rolled(made, observation), path[0].sample["path"]
    with torch.no_grad():
        for step, time in enumerate((1.0, 2 / 3, 1 / 3)):
            expected = steps[:, step] - whole(steps[:, step], time) / 3
            torch.testing.assert_close(steps[:, step + 1], expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("sampler", [Sampler.FLOW_SDE, Sampler.FLOW_NOISE, Sampler.REINFLOW])
def test_what_acted_is_scored_the_same_and_padding_is_not_scored(sampler: Sampler) -> None:
    made, observation = policy(sampler=sampler), seen(6)
    decision = made.act(observation)
    assert decision.sample["path"].shape == (6, 5, 4, 32)
    scored = made.evaluate(observation, decision.sample)
    torch.testing.assert_close(scored.log_prob, decision.log_prob, atol=1e-5, rtol=1e-5)
    rows = torch.tensor([4, 1])
    some = made.evaluate(observation[rows], decision.sample[rows])
    torch.testing.assert_close(some.log_prob, decision.log_prob[rows], atol=1e-5, rtol=1e-5)
    # Elements of the last state are scored, but do not go through the model.
    for place, counts in (((0, 0), True), ((1, 2), True), ((0, 3), False), ((2, 0), False)):
        moved = decision.sample.clone()
        moved["noisy"].fill_(3 if sampler is Sampler.FLOW_SDE else 0)
        before = made.evaluate(observation, moved).log_prob
        moved["path"][(slice(None), -1, *place)] += 0.1
        assert bool((made.evaluate(observation, moved).log_prob != before).any()) == counts


def test_a_small_actor_chooses_the_noise_of_a_frozen_model() -> None:
    torch.manual_seed(0)
    steering = SteeringConfig(Steering.NOISE, hidden=[8])
    alone, made, observation = policy(denoising_steps=2), policy(denoising_steps=2, steering=steering), seen(4)
    made.load_state_dict(alone.state_dict())  # weights from before there was a small actor
    torch.testing.assert_close(
        made.act(observation, deterministic=True).actions, alone.act(observation, deterministic=True).actions
    )
    config = DSRLConfig(hidden=[8], capacity=8, learning_rate=0.1)
    learner = config.build(made, None, None, torch.Generator())
    decision = made.act(observation)
    initial = decision.sample[INITIAL_NOISE]
    assert initial.shape == (4, 4, 32)
    assert initial.abs().max() <= 1.5
    state, prefix = alone._state(observation), alone._prefix(observation)
    path, *_ = alone.sampling.denoise(initial, alone._field(state, prefix), True, None)
    torch.testing.assert_close(decision.actions, alone.to_robot(path[:, -1]))
    assert not made.scores
    hidden = torch.cat((prefix.mean(), state), -1)
    expected, _ = made.steering_actor.variables(hidden, initial)
    torch.testing.assert_close(made.initial_noise(observation, initial)[0], 1.5 * expected)
    before = [weight.clone() for weight in made.parameters()]
    transitions = {"observation": observation, "actions": decision.actions, "next_observation": seen(4, seed=1)}
    transitions |= {"reward": torch.ones(4), "carry": torch.full((4,), 0.9)}
    learner._update_critics(TensorDict(transitions, [4]))
    learner._update_actor(observation)
    changed = {id(weight) for weight, old in zip(made.parameters(), before, strict=True) if not weight.equal(old)}
    assert changed == {id(weight) for weight in made.steering_parameters()}
    with pytest.raises(UserError, match=r"cannot inpaint; use execution=blend"):
        made.inpaint(observation, None)
    with pytest.raises(UserError, match=r"policy\.steering\.kind=noise"):
        policy(steering=SteeringConfig(Steering.RESIDUAL))


def test_the_mean_log_probability_is_that_of_two_actions_of_three_elements() -> None:
    observation, summed, mean = seen(3), policy(), policy(aggregate=Aggregate.MEAN)
    sample = summed.act(observation).sample
    of = [made.evaluate(observation, sample).log_prob for made in (summed, mean)]
    torch.testing.assert_close(of[0], 6.0 * of[1])
    learned = [policy(sampler=Sampler.REINFLOW, aggregate=each) for each in Aggregate]
    sample = learned[0].act(observation).sample
    of = [made.evaluate(observation, sample).log_prob for made in learned]
    torch.testing.assert_close(of[0], 4.0 * of[1])  # steps
    torch.testing.assert_close(of[0], 5.0 * of[2])  # and the initial noise
    torch.testing.assert_close(of[0], 24.0 * of[3])


def test_padding_is_not_in_the_loss_and_learns_nothing() -> None:
    made = policy()
    made.loss(seen(4), torch.rand(4, 4, 3), torch.ones(4, 4)).backward()
    last = made.model.native.action_out_proj.weight.grad
    assert (last[:3].abs().sum(1) > 0.0).all()
    assert not last[3:].any()


def test_the_loss_is_that_of_flow_matching_on_normalised_actions() -> None:
    made, observation, actions = policy(), seen(4), torch.rand(4, 4, 3)
    torch.manual_seed(2)
    loss = made.loss(observation, actions, torch.ones(4, 4))
    torch.manual_seed(2)
    noise = torch.randn(4, 4, 32)
    time = 0.999 * torch.rand(4) ** (2 / 3) + 0.001
    target = torch.zeros(4, 4, 32)
    target[..., :3] = (actions - made.action_mean) / made.action_std
    whole = [
        rolled(made, observation[[row]])((t * noise + (1 - t) * target)[[row]], float(t)) for row, t in enumerate(time)
    ]
    error = (torch.cat(whole) - noise + target)[..., :3].square().mean()
    torch.testing.assert_close(loss, error, atol=1e-5, rtol=1e-5)


def test_cameras_words_and_state_are_read_and_what_is_privileged_is_not() -> None:
    made, before = policy(), seen(2)
    first = made.act(before, generator=torch.Generator().manual_seed(0))
    other = torch.from_numpy(encode("close", TEXT))
    changes = {"front": 0, "wrist": 0, "fingers": 3.0, "instruction": other, "depth": 0, "cube": 9.0}
    for key, value in changes.items():
        after = before.clone()
        after[key][1] = value
        second = made.act(after, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(first.actions[0], second.actions[0], atol=1e-6)
        reads = key not in ("depth", "cube")
        assert bool((first.actions[1] != second.actions[1]).any()) == reads
        assert bool(first.value[1] != second.value[1]) == reads


def test_frozen_words_and_pictures_leave_the_expert_to_learn() -> None:
    made = policy(frozen=True)
    made.evaluate(seen(2), made.act(seen(2)).sample).log_prob.sum().backward()
    made.loss(seen(2), torch.rand(2, 4, 3), torch.ones(2, 4)).backward()
    assert all(weight.grad is None for weight in made.model.native.model.vlm.parameters())
    assert all(weight.grad is not None for weight in made.model.native.model.dit.layers.parameters())


def test_pictures_keep_their_aspect_in_a_black_square() -> None:
    image = torch.full((1, 8, 16, 3), 255, dtype=torch.uint8)
    square = squared(image, 16)
    assert square.shape == (1, 3, 16, 16)
    assert torch.equal(square[0, 0, :, 5], torch.tensor([-1.0] * 4 + [1.0] * 8 + [-1.0] * 4))
    assert torch.equal(squared(image.transpose(1, 2), 16)[0, 0, 5], square[0, 0, :, 5])
    assert squared(image[:, :, :8], 32).min() == 1.0
    ramp = torch.arange(64, dtype=torch.uint8).view(1, 1, 64, 1).expand(1, 64, 64, 3)
    torch.testing.assert_close(squared(ramp, 64)[0, 1, 7], torch.arange(64) / 127.5 - 1.0)


def test_sides_of_pictures_are_rounded_down_as_in_openpi_and_lerobot() -> None:
    white = torch.full((1, 480, 848, 3), 255, dtype=torch.uint8)
    square = squared(white, 224)[0, 0].round()
    # int(480 / (848 / 224)) = int(126.8) = 126 rows, of the 98 others 49 above
    assert square[:, 0].tolist() == [-1.0] * 49 + [1.0] * 126 + [-1.0] * 49


def test_tokens_are_words_without_a_tokenizer() -> None:
    made, observation = policy(), seen(2)  # "pick the milk", "open"
    tokens, real = made.inputs.tokens(observation)
    assert tokens.shape == (2, 3)
    assert real.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert len(set(tokens[real.bool()].tolist())) == 4
    assert int(tokens.max()) < VOCABULARY
    observation["instruction"][:] = torch.from_numpy(encode("The MILK", TEXT))
    assert made.inputs.tokens(observation)[0].tolist() == [tokens[0, 1:].tolist()] * 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Tokenizer, "pick the cube"),
        (SmolVLATokenizer, "pick_the cube"),
        (GrootTokenizer, "pick_the cube"),
        (PromptTokenizer, "pick_the cube"),
    ],
)
def test_only_openpi_replaces_underscores_in_instructions(kind: type[Tokenizer], expected: str) -> None:
    instructions = []

    class Recorded(kind):
        def _ids(self, instruction: str) -> list[int]:
            instructions.append(instruction)
            return [1]

    Recorded(None, 2)(torch.from_numpy(encode("pick_the  cube", 20))[None])
    assert instructions == [expected]


def test_the_loss_of_several_noises_is_their_mean_and_reads_pictures_once() -> None:
    made, observation, actions = policy(), seen(4), torch.rand(4, 4, 3)
    valid = torch.tensor([[1.0, 1.0, 1.0, 1.0]] * 3 + [[1.0, 0.0, 0.0, 0.0]])
    twice = [row for row in range(4) for _ in range(2)]
    torch.manual_seed(2)
    expected = made.loss(observation[twice], actions[twice], valid[twice])
    several = policy(draws=2)
    read: list[int] = []
    several.model.native.model.vlm.register_forward_hook(lambda *args: read.append(1))
    torch.manual_seed(2)
    torch.testing.assert_close(several.loss(observation, actions, valid), expected)
    assert len(read) == 1


def test_what_it_cannot_work_with_is_one_line() -> None:
    blind = {key: spec for key, spec in SEEING.observation.items() if not spec.is_picture}
    with pytest.raises(UserError, match=r"reads pictures, .* name cameras in task\.images"):
        Pi0Config().build(replace(SEEING, observation=blind))
    with pytest.raises(UserError, match="needs action limits"):
        Pi0Config().build(replace(SEEING, action=TensorSpec((3,))))
    numb = {key: spec for key, spec in SEEING.observation.items() if key != "fingers"}
    with pytest.raises(UserError, match="policy=pi0 reads float32 observations of fixed size"):
        Pi0Config().build(replace(SEEING, observation=numb))
    with pytest.raises(UserError, match=r"denoising_steps=.*: expected a number of at least 1"):
        Pi0Config(denoising_steps=0)
    made = policy(sampler=Sampler.ODE)
    with pytest.raises(UserError, match="sampler=ode has no likelihood"):
        made.evaluate(seen(2), made.act(seen(2)).sample)


def test_without_an_instruction_and_with_a_long_state() -> None:
    assert untrained(Size.TINY, 4, 40, 50).state_size == 40
    long = {"front": SEEING.observation["front"], "angles": TensorSpec((40,))}
    made = Pi0Config(hidden=16).build(replace(SEEING, observation=long))
    observation = TensorDict({"front": seen(3)["front"], "angles": torch.randn(3, 40)}, [3])
    made.fit(observation, torch.rand(3, 4, 3))
    assert made.act(observation).actions.shape == (3, 4, 3)
    assert sum(weight.numel() for weight in made.parameters()) < 5_000_000


def test_a_run_of_imitation_and_ppo_from_pictures(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    completed = run_program("train.py", *RUN, f"output={tmp_path / 'run'}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["task"] == "libero_pick"
    told = {key for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert {"sft/loss", "rl/policy_loss", "rl/value_loss"} <= told
