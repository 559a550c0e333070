"""Published weights of OpenVLA and OpenVLA-OFT, a tiny model in their layout against an independent computation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.networks.precision import Precision
from embodied.text import encode, text_spec
from policies.vla.checkpoints import starting_points
from policies.vla.computing import layers
from policies.vla.openvla.model import LONGEST, cropped, lanczos
from policies.vla.tokens import Decoding, Head, Reading, TokensConfig, TokensPolicy, bins_of, centres
from tests.policies.vla.openvla import prismatic

TEXT = 16
PROMPTS = {"Pick the milk": "pick the milk", "open": "open"}
"""Instructions, and as they stand in the prompt."""
ARM = Contract(
    {
        "front": TensorSpec((28, 28, 3), "uint8", camera="front", frame="world"),
        "wrist": TensorSpec((28, 28, 3), "uint8", camera="wrist", frame="hand"),
        "fingers": TensorSpec((2,), unit="m"),
        "instruction": text_spec(TEXT),
    },
    TensorSpec((3,), names=("x", "y", "gripper"), low=(-1.0, -2.0, -1.0), high=(1.0, 2.0, 1.0)),
    0.05,
    horizon=prismatic.CHUNK,
    executed=prismatic.CHUNK,
)


def seen(count: int) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    picture = {"dtype": torch.uint8, "generator": generator}
    said = [list(PROMPTS)[row % 2] for row in range(count)]
    return TensorDict(
        {
            "front": torch.randint(256, (count, 28, 28, 3), **picture),
            "wrist": torch.randint(256, (count, 28, 28, 3), **picture),
            "fingers": torch.rand(count, 2, generator=generator),  # some beyond the published range
            "instruction": torch.stack([torch.from_numpy(encode(words, TEXT)) for words in said]),
        },
        [count],
    )


def policy(folder: Path, contract: Contract = ARM, **options: object) -> TokensPolicy:
    torch.manual_seed(1)
    return TokensConfig(**{"weights": str(folder), "hidden": 16, **options}).build(contract)


def single(folder: Path, code: str | None = "class OpenVLAForActionPrediction: ...", **options: object) -> TokensPolicy:
    """OpenVLA's policy in `folder`: one picture, no state, single actions, the authors' `code` beside the weights."""
    prismatic.save(folder, proprio=False)
    (folder / "modeling_prismatic.py").unlink(missing_ok=True)
    if code is not None:
        (folder / "modeling_prismatic.py").write_text(code)
    seeing = {key: spec for key, spec in ARM.observation.items() if key != "wrist"}
    return policy(folder, replace(ARM, observation=seeing, horizon=1, executed=1), **options)


def prompts(count: int) -> list[list[int]]:
    """Tokens of the prompts of `seen`, without the beginning."""
    words = {word: number for number, word in enumerate(prismatic.WORDS)}
    instructions = [list(PROMPTS.values())[row % 2] for row in range(count)]
    frame = "In : What action should the robot take to {} ? \n Out : ▁"
    return [[words[word] for word in frame.format(each).split(" ")] for each in instructions]


def expected(made: TokensPolicy, observation: TensorDict, state: bool = True) -> torch.Tensor:
    """Hidden states [N, CHUNK * ACTIONS, width]."""
    pictures = made.inputs.pictures(observation, prismatic.SIDE).movedim(2, -1)  # tested below
    tensors = prismatic.weights()
    states = [
        prismatic.hidden(
            tensors,
            list((pictures[row] + 1.0) / 2.0),
            prompt,
            observation["fingers"][row].double().numpy() if state else None,
        )
        for row, prompt in enumerate(prompts(len(observation)))
    ]
    return torch.stack(states)


def close(found: torch.Tensor, wanted: torch.Tensor | np.ndarray | list[list[float]]) -> None:
    torch.testing.assert_close(found.detach().double(), torch.as_tensor(wanted).double(), atol=1e-4, rtol=1e-4)


def test_logits_and_actions_equal_those_of_an_independent_computation(tmp_path: Path) -> None:
    prismatic.save(tmp_path)
    made, observation = policy(tmp_path), seen(4)
    read = expected(made, observation)
    state, hidden = made.inputs.standardised_state(observation), made._read(observation)
    assert bool((state.abs() == 1.0).any())  # clipped, as published
    close(hidden.flatten(1, 2), read)
    logits = prismatic.scores(prismatic.weights(), read)
    bins = slice(prismatic.TOKENS - 256, prismatic.TOKENS)
    close(made.model.logits(hidden).flatten(1, 2), logits[..., bins])
    decision = made.act(observation, deterministic=True)
    tokens = logits[..., bins].argmax(-1).numpy() + bins.start
    wanted = [prismatic.to_robot(prismatic.from_tokens(row)) for row in tokens]
    assert made.scores
    close(decision.actions, np.stack(wanted).clip(ARM.action.low, ARM.action.high))


def test_elements_that_are_written_in_turn_equal_an_independent_computation(tmp_path: Path) -> None:
    """As OpenVLA's own weights do; prompts are padded, and every element depends on those before."""
    made, observation = single(tmp_path), seen(6)
    pictures = made.inputs.pictures(observation, prismatic.SIDE).movedim(2, -1)
    inputs = zip(pictures, prompts(6), strict=True)
    results = [prismatic.written_bins(prismatic.weights(), list((of + 1.0) / 2.0), prompt, 3) for of, prompt in inputs]
    decision = made.act(observation, deterministic=True)
    assert made.autoregressive
    assert decision.sample["bins"].flatten(1).tolist() == [bins for bins, _ in results]
    actions = [
        prismatic.to_robot(prismatic.from_tokens(np.array(bins) + prismatic.TOKENS - 256)) for bins, _ in results
    ]
    close(decision.actions, np.stack(actions).clip(ARM.action.low, ARM.action.high))
    rated = torch.stack([scores for _, scores in results]).log_softmax(-1)
    close(made._log_probs(made._read(observation, decision.sample["bins"].long())).flatten(1, 2), rated)
    close(decision.log_prob.flatten(1), rated.amax(-1))
    at_once = policy(tmp_path, made.contract, decoding=Decoding.PARALLEL)
    assert (at_once.act(observation, deterministic=True).sample["bins"] != decision.sample["bins"]).any()


def test_written_elements_are_drawn_scored_and_learned(tmp_path: Path) -> None:
    made, observation = single(tmp_path, gradient_checkpointing=True), seen(4)
    made.fit(observation, torch.rand(4, 1, 3))
    decision = made.act(observation, generator=torch.Generator().manual_seed(0))
    again = made.act(observation, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(decision.sample["bins"], again.sample["bins"])
    evaluated = made.evaluate(observation, decision.sample)
    close(evaluated.log_prob, decision.log_prob)
    assert torch.equal(made.value(observation), evaluated.value)  # whatever was written
    actions, valid = torch.rand(4, 1, 3) - 0.5, torch.ones(4, 1)
    optimiser = torch.optim.Adam(made.actor_parameters(), 3e-3)
    before = made.loss(observation, actions, valid)
    for _ in range(60):
        optimiser.zero_grad()
        loss = made.loss(observation, actions, valid)
        loss.backward()
        optimiser.step()
    assert loss < 0.2 < before
    learned = made.act(observation, deterministic=True).actions
    close(learned[..., :2], made.to_robot(centres(bins_of(made.normalised(actions), 256), 256))[..., :2])
    drawn = policy(tmp_path, made.contract, reading=Reading.DRAWN)
    drawn.load_state_dict(made.state_dict())
    same = [drawn.act(observation, deterministic=True).sample["bins"] for _ in range(2)]
    assert torch.equal(*same)


@pytest.mark.parametrize(
    ("code", "in_turn"),
    [("from constants import NUM_ACTIONS_CHUNK", False), ("class OpenVLA: ...", True), (None, False)],
)
def test_how_weights_decode_is_said_by_the_code_beside_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str | None, in_turn: bool
) -> None:
    caplog.set_level("INFO", logger="embodied")
    assert single(tmp_path, code).autoregressive is in_turn
    assert ("OpenVLA's own need policy.decoding=autoregressive" in caplog.text) is (code is None)
    assert single(tmp_path, code, decoding=Decoding.AUTOREGRESSIVE).autoregressive
    start = starting_points.read(str(tmp_path))
    assert (start.program, start.horizon, start.cameras) == (("OpenVLA", 1, 1) if in_turn else ("OpenVLA-OFT", 8, 1))


def test_what_cannot_be_written_in_turn_is_refused(tmp_path: Path) -> None:
    prismatic.save(tmp_path, head=True)
    (tmp_path / "modeling_prismatic.py").write_text("")
    assert not policy(tmp_path).autoregressive  # its .pt files are OpenVLA-OFT's
    with pytest.raises(UserError, match=r"head=l1 regresses a chunk at once; use policy\.decoding=parallel"):
        policy(tmp_path, decoding=Decoding.AUTOREGRESSIVE)
    with pytest.raises(UserError, match=r"decoding=autoregressive is that of published weights"):
        TokensConfig(decoding=Decoding.AUTOREGRESSIVE)


def test_the_regression_equals_an_independent_computation(tmp_path: Path) -> None:
    prismatic.save(tmp_path, head=True)
    made, observation = policy(tmp_path), seen(2)
    normalised = [prismatic.from_head(row) for row in expected(made, observation)]
    close(made.regression(made._read(observation)), np.stack(normalised))  # type: ignore[misc]
    wanted = np.stack([prismatic.to_robot(row) for row in normalised])
    close(made.act(observation).actions, wanted.clip(ARM.action.low, ARM.action.high))
    assert not made.scores
    assert policy(tmp_path, head=Head.BINS).scores
    (tmp_path / "action_head--150000_checkpoint.pt").unlink()
    assert policy(tmp_path).scores
    assert policy(tmp_path, head=Head.L1).act(observation).actions.shape == (2, 4, 3)  # a new one


def test_one_camera_and_no_state_token(tmp_path: Path) -> None:
    prismatic.save(tmp_path, proprio=False)
    seeing = {key: spec for key, spec in ARM.observation.items() if key != "wrist"}
    made, observation = policy(tmp_path, replace(ARM, observation=seeing)), seen(2)
    made.fit(observation, torch.rand(2, 4, 3))
    close(made._read(observation).flatten(1, 2), expected(made, observation, state=False))


def test_a_gripper_whose_limits_begin_at_zero_is_as_published(tmp_path: Path) -> None:
    prismatic.save(tmp_path)
    action = replace(ARM.action, low=(-1.0, -2.0, 0.0))
    x = torch.tensor([[-1.0, 1.0, 0.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.25]])
    made = policy(tmp_path, replace(ARM, action=action))
    close(made.to_robot(x), [[-0.5, 1.5, 0.0], [0.75, -1.0, 1.0], [0.125, 0.25, 0.25]])
    turned = policy(tmp_path)
    close(turned.to_robot(x), [[-0.5, 1.5, 1.0], [0.75, -1.0, -1.0], [0.125, 0.25, 1.0]])  # the sign alone
    close(made.normalised(made.to_robot(x)), x)
    close(turned.normalised(turned.to_robot(x[:2])), x[:2])


@pytest.mark.parametrize("head", ["bins", "l1"])
def test_an_element_of_the_action_that_never_varied_has_a_loss(tmp_path: Path, head: str) -> None:
    prismatic.save(tmp_path)
    constant = prismatic.ACTION | {"q01": [-0.5, 0.75, 0.0], "q99": [0.75, 0.75, 1.0]}
    statistics = {prismatic.KEY: {"action": constant, "proprio": prismatic.PROPRIO}}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(statistics))
    made, observation = policy(tmp_path, head=Head(head)), seen(2)
    actions = torch.tensor([0.1, 0.75, 1.0]).expand(2, 4, 3)
    assert made.normalised(actions)[0, 0, 1] == 0.0
    assert made.loss(observation, actions, torch.ones(2, 4)).isfinite()
    close(made.to_robot(torch.zeros(3))[1], 0.75)


def test_statistics_stay_unless_those_of_demonstrations_are_asked_for(tmp_path: Path) -> None:
    prismatic.save(tmp_path)
    made, observation = policy(tmp_path), seen(50)
    before, state = made.act(observation[:2], deterministic=True).actions, made.inputs.standardised_state(observation)
    made.fit(observation, torch.rand(50, 4, 3))
    assert torch.equal(made.inputs.standardised_state(observation), state)
    assert torch.equal(made.act(observation[:2], deterministic=True).actions, before)
    other = policy(tmp_path, unnorm_key="demonstrations")
    assert not made.lacks_statistics
    assert (
        "policy.unnorm_key=demonstrations leaves" in other.lacks_statistics
    )  # a run without demonstrations is refused
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        other.act(observation)
    shown = torch.stack([torch.linspace(0.0, 1.0, 200)] * 3, -1)
    other.fit(observation, shown.view(50, 4, 3))
    close(other.to_robot(torch.tensor([[-1.0] * 3, [1.0] * 3])), [[0.01] * 3, [0.99] * 3])
    ends = torch.stack([observation["fingers"].quantile(share, 0) for share in (0.01, 0.99)])
    asked = observation[:2].clone()
    asked["fingers"] = ends
    close(other.inputs.standardised_state(asked), [[-1.0] * 2, [1.0] * 2])


def test_it_learns_and_what_it_drew_is_scored_alike(tmp_path: Path) -> None:
    prismatic.save(tmp_path)
    made, observation = policy(tmp_path, temperature=1.6, gradient_checkpointing=True), seen(4)
    made.fit(observation, torch.rand(4, 4, 3))
    decision = made.act(observation, generator=torch.Generator().manual_seed(0))
    close(made.evaluate(observation, decision.sample).log_prob, decision.log_prob)
    loss = made.loss(observation, decision.actions, torch.ones(4, 4))
    loss.backward()
    silent = [name for name, weight in made.model.named_parameters() if weight.grad is None]
    assert silent == []
    assert len(layers(made.model)) == 2 + 3 + 2  # those whose activations are forgotten: DINOv2's, SigLIP's, Llama's
    optimiser = torch.optim.SGD(made.actor_parameters(), 1e-4)
    optimiser.step()
    assert made.loss(observation, decision.actions, torch.ones(4, 4)) < loss
    assert policy(tmp_path).with_new_weights().act(observation).actions.shape == (4, 4, 3)


def test_adapters_learn_alone_and_checkpoints_refer_to_the_rest(tmp_path: Path) -> None:
    prismatic.save(tmp_path, head=True)
    whole, made, observation = policy(tmp_path), policy(tmp_path, lora_rank=2), seen(4)
    assert torch.equal(whole.act(observation).actions, made.act(observation).actions)
    before = {name: weight.clone() for name, weight in made.named_parameters()}
    optimiser = torch.optim.Adam(made.actor_parameters(), 1e-2)
    for _ in range(2):  # the second half of an adapter has no gradient before the first has moved
        optimiser.zero_grad()
        made.loss(observation, torch.rand(4, 4, 3), torch.ones(4, 4)).backward()
        optimiser.step()
    moved = {name for name, weight in made.named_parameters() if not torch.equal(weight, before[name])}
    adapted = {name for name in before if ".lora_" in name}
    assert len(adapted) == 2 * (6 * 2 + 6 * 3 + 7 * 2 + 3)  # DINOv2's, SigLIP's, Llama's layers, and the projector
    assert moved == adapted | {name for name in before if name.startswith(("model.state.", "regression."))}
    saved = made.state_dict()
    assert not any(name.startswith("model.native.") and ".lora_" not in name for name in saved)
    again = policy(tmp_path, lora_rank=2, precision=Precision.BFLOAT16)
    again.load_state_dict(saved)
    assert again.model.native.language_model.embed_tokens.weight.dtype is torch.bfloat16
    away = again.act(observation).actions - made.act(observation).actions
    assert away[..., :2].abs().max() < 0.1  # of the gripper only the sign is executed
    fresh = made.with_new_weights()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.act(observation).actions, made.act(observation).actions)
    assert fresh.model.native.bins.weight.data_ptr() == made.model.native.bins.weight.data_ptr()
    with pytest.raises(UserError, match=r"adapters of policy\.lora_rank=4, got adapters of rank 2"):
        policy(tmp_path, lora_rank=4).load_state_dict(saved)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file({name: 1.1 * value for name, value in load_file(shard).items()}, shard)
    with pytest.raises(UserError, match=r"the adapters were trained on other weights than policy\.weights="):
        policy(tmp_path, lora_rank=2).load_state_dict(saved)
    with pytest.raises(UserError, match=r"lora_rank=2 adapts published weights: name them in policy\.weights"):
        TokensConfig(lora_rank=2)


def test_pictures_are_resized_and_cropped() -> None:
    generator = np.random.default_rng(0)
    for shape in ((28, 28), (40, 64), (256, 256), (20, 28)):
        picture = generator.integers(60, 195, size=(*shape, 3), dtype=np.uint8)
        found = (cropped(torch.from_numpy(picture)[None], 28)[0].permute(1, 2, 0) + 1.0) * 127.5
        wanted = prismatic.prepared(picture)
        away = np.abs(found.numpy() - wanted)
        assert away.max() <= (1.001 if shape == (28, 28) else 2.001)  # Pillow rounds, and clips, between passes
        assert (away > 0.001).mean() < (0.002 if shape == (28, 28) else 0.5)
    white = torch.zeros(1, 40, 40, 3, dtype=torch.uint8)
    white[:, 10:30, 10:30] = 255  # what is sharper than the kernel swings beyond, and is clipped
    found = cropped(white, 28)
    assert (found.min(), found.max()) == (-1.0, 1.0)
    assert torch.allclose(lanczos(28, 28), torch.eye(28), atol=1e-6)


def test_what_is_wrong_with_a_folder_is_one_line(tmp_path: Path) -> None:
    def refused(contract: Contract = ARM, **options: object) -> str:
        with pytest.raises(UserError) as caught:
            policy(tmp_path, contract, **options)
        assert "\n" not in str(caught.value)
        prismatic.save(tmp_path)
        return str(caught.value)

    def configured(**changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(prismatic.config() | changes))

    assert "expected OpenVLA's published files (" in refused()  # nothing is there
    configured(model_type="llava")
    assert "config.json is of type llava" in refused()
    configured(timm_model_ids=["vit_so400m_patch14_siglip_224"])
    assert "pictures are seen by vit_so400m_patch14_siglip_224, expected vit_large_patch14_reg4_dinov2" in refused()
    configured(n_action_bins=128)
    assert "n_action_bins is 128, expected 256" in refused()
    configured(image_sizes=[28, 42])
    assert "image_sizes are [28, 42], expected the same for both" in refused()
    configured(text_config={"model_type": "phi"})
    assert "the language model is phi, expected llama" in refused()
    configured(text_config=prismatic.TEXT | {"hidden_size": "many", "vocab_size": 339})
    assert "text_config cannot be read: Validation error for field 'hidden_size'" in refused()
    shard = tmp_path / "model-00001-of-00002.safetensors"
    some = load_file(shard)
    gone = next(name for name in some if name.endswith("blocks.0.attn.qkv.weight"))
    save_file({name: value for name, value in some.items() if name != gone}, shard)
    assert f"1 tensors are missing, such as {gone}" in refused()
    save_file(some | {gone: some[gone][:-3].contiguous()}, shard)
    assert f"expected {gone} of " in refused()
    shard.write_bytes(shard.read_bytes()[:1000])
    assert "Error while deserializing header" in refused()
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert "there is no model*.safetensors" in refused()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refused()
    (tmp_path / "tokenizer.json").unlink()
    assert "there is no tokenizer.json" in refused()
    (tmp_path / "proprio_projector--5_checkpoint.pt").write_bytes(b"")
    assert "there are 2 files proprio_projector--*_checkpoint.pt, expected one" in refused()


def test_what_is_wrong_with_oft_s_parts_is_one_line(tmp_path: Path) -> None:
    prismatic.save(tmp_path, head=True)

    def refused(contract: Contract = ARM) -> str:
        with pytest.raises(UserError) as caught:
            policy(tmp_path, contract)
        assert "\n" not in str(caught.value)
        prismatic.save(tmp_path, head=True)
        return str(caught.value)

    long = replace(ARM, observation=ARM.observation | {"fingers": TensorSpec((5,), unit="m")})
    assert "take a state of 2 elements, the task's has 5" in refused(long)
    wide = replace(ARM, action=TensorSpec((7,), low=(-1.0,) * 7, high=(1.0,) * 7))
    said = "take an action of 3 elements, the task's has 7"
    (tmp_path / "action_head--150000_checkpoint.pt").unlink()
    assert said in refused(wide)
    part = tmp_path / "action_head--150000_checkpoint.pt"
    head = prismatic.parts()["action_head"]
    torch.save({name: value for name, value in head.items() if "fc2" not in name}, part)
    assert "the action_head has other layers than OpenVLA-OFT's: 2 tensors differ, such as fc2.bias" in refused()
    torch.save(head | {"module.model.fc2.bias": torch.zeros(7)}, part)
    assert "the action_head does not fit: expected fc2.bias of (3,), got (7,)" in refused()
    part.write_bytes(part.read_bytes()[:100])
    assert "expected OpenVLA's published files (" in refused()
    (tmp_path / "vision_backbone--150000_checkpoint.pt").write_bytes(b"")
    assert "vision_backbone--150000_checkpoint.pt is of FiLM, which is not read here" in refused()


def test_statistics_that_are_missing_or_unknown_are_one_line(tmp_path: Path) -> None:
    prismatic.save(tmp_path)
    with pytest.raises(UserError, match=f"no statistics of unnorm_key=bridge; expected one of {prismatic.KEY}"):
        policy(tmp_path, unnorm_key="bridge")
    path = tmp_path / "dataset_statistics.json"
    path.write_text(json.dumps({prismatic.KEY: {"action": {"mean": [0.0] * 3}}}))
    with pytest.raises(UserError, match=f"the statistics of {prismatic.KEY} lack q01 or q99 of action"):
        policy(tmp_path)
    path.write_text(json.dumps({prismatic.KEY: {"action": prismatic.ACTION}}))
    with pytest.raises(UserError, match=f"the statistics of {prismatic.KEY} lack q01 or q99 of proprio"):
        policy(tmp_path)
    path.write_text(json.dumps({"aloha1_fold_shirt": {"action": prismatic.ACTION, "proprio": prismatic.PROPRIO}}))
    with pytest.raises(UserError, match=r"aloha1_fold_shirt is normalised by its extremes.*unnorm_key=demonstrations"):
        policy(tmp_path)
    path.unlink()  # then those of config.json hold, as of OpenVLA itself
    with pytest.raises(UserError, match=r"of 2 data sets; choose policy\.unnorm_key=bridge_orig\|fractal"):
        policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(prismatic.config() | {"norm_stats": None}))
    with pytest.raises(UserError, match=r"no statistics in .*; policy\.unnorm_key=demonstrations takes those of"):
        policy(tmp_path)
    assert policy(tmp_path, unnorm_key="demonstrations").scores


def test_prompts_are_padded_in_front_and_too_long_ones_refused(tmp_path: Path) -> None:
    prismatic.save(tmp_path)
    contract = replace(ARM, observation=ARM.observation | {"instruction": text_spec(300)})
    made, observation = policy(tmp_path, contract), seen(1)
    tokens, real = made.inputs.tokens(seen(2))
    assert tokens.shape == real.shape == (2, LONGEST)
    assert real.sum(-1).tolist() == [17, 15]
    assert real[:, -15:].all()
    assert tokens[:, -1].tolist() == [prismatic.WORDS.index("▁")] * 2
    observation["instruction"] = torch.from_numpy(encode("pick " * 51, 300))[None]
    with pytest.raises(UserError, match="expected an instruction of at most 64 tokens, got 65"):
        made.inputs.tokens(observation)
