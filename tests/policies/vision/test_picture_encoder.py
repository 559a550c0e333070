"""Policies that see: encoders of pictures, instructions and the robot's state."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import Steering
from embodied.text import encode, text_spec
from policies.diffusion import DiffusionConfig
from policies.encoders.base import EncoderKind
from policies.encoders.libero import ObjectEncoder
from policies.flow import FlowConfig
from policies.generation.steering import SteeringConfig
from policies.vision.augmentation import PictureChanges, recoloured, shifted
from policies.vision.backbones import Backbone, SpatialCNN, VisionConfig, backbone
from policies.vision.encoder import WORD_WIDTH, PictureEncoder

TEXT = 40
SEEING = Contract(
    {
        "front": TensorSpec((16, 24, 3), "uint8", camera="front", frame="world"),
        "wrist": TensorSpec((16, 16, 3), "uint8", camera="wrist", frame="hand"),
        "depth": TensorSpec((16, 16, 3), "uint8", camera="depth", privileged=True),
        "fingers": TensorSpec((2,), unit="m"),
        "cube": TensorSpec((-1, 3), unit="m", privileged=True),
        "instruction": text_spec(TEXT),
    },
    TensorSpec((2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    0.05,
    horizon=4,
    executed=2,
)
SMALL = VisionConfig(width=8, features=16)


def said(*texts: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([encode(text, TEXT) for text in texts]))


def seen(count: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    pictures = {
        key: torch.randint(256, (count, *spec.shape), dtype=torch.uint8, generator=generator)
        for key, spec in SEEING.observation.items()
        if spec.is_picture
    }
    words = [("pick the milk", "open the drawer")[row % 2] for row in range(count)]
    state = {"fingers": torch.rand(count, 2, generator=generator), "cube": torch.rand(count, 5, 3, generator=generator)}
    return TensorDict(pictures | state | {"instruction": said(*words)}, [count])


def libero_seen(contract: Contract, count: int) -> TensorDict:
    """Two objects with names, at random poses, and whatever else LIBERO's `contract` has."""
    shapes = {key: [2 if size < 0 else size for size in spec.shape] for key, spec in contract.observation.items()}
    observation = TensorDict(
        {
            key: (torch.rand(count, *shapes[key]) * (255 if spec.is_picture else 1)).to(getattr(torch, spec.dtype))
            for key, spec in contract.observation.items()
        },
        [count],
    )
    names = np.stack([encode(name, shapes["object_names"][-1]) for name in ("the milk", "the basket")])
    observation["object_names"] = torch.from_numpy(names).expand(count, -1, -1).clone()
    observation["object_mask"] = torch.ones(count, 2, dtype=torch.bool)
    instruction = encode("pick the milk", shapes["instruction"][-1])
    observation["instruction"] = torch.from_numpy(instruction).expand(count, -1).clone()
    return observation


def encoder() -> PictureEncoder:
    torch.manual_seed(0)
    made = PictureEncoder(SEEING, 8, SMALL)
    for film in (film for eye in made.eyes.values() for film in eye.films):  # no longer neutral
        torch.nn.init.normal_(film[-1].weight)
    made.fit(seen(8))
    return made


def changed(key: str, value: torch.Tensor) -> float:
    """How much the features of two observations change when `key` of the second is another."""
    made, before = encoder(), seen(2)
    after = before.clone()
    after[key][1] = value
    difference = (made(before) - made(after)).abs().amax(1)
    assert difference[0] == 0.0
    return float(difference[1].detach())


def test_cameras_instruction_and_state_are_read_and_what_is_privileged_is_not() -> None:
    assert changed("front", torch.tensor(0)) > 1e-4
    assert changed("wrist", torch.tensor(0)) > 1e-4
    assert changed("fingers", torch.tensor(3.0)) > 1e-4
    assert changed("instruction", said("pick the milk")[0]) > 1e-4
    assert changed("depth", torch.tensor(0)) == 0.0
    assert changed("cube", torch.tensor(9.0)) == 0.0


def test_words_that_training_did_not_have_change_nothing() -> None:
    assert changed("instruction", said("open the drawer zebra")[0]) == 0.0


def test_the_instruction_decides_what_a_camera_looks_for() -> None:
    eye, pictures = encoder().eyes["front"], torch.rand(1, 3, 16, 24)
    one, other = eye(pictures, torch.zeros(1, WORD_WIDTH)), eye(pictures, torch.ones(1, WORD_WIDTH))
    assert not torch.allclose(one, other)


def test_places_are_told_to_a_fraction_of_a_pixel() -> None:
    """A dot's place is a linear function of what an untrained network makes of it, to a tenth of a pixel on average."""
    torch.manual_seed(0)
    network = SpatialCNN(32, 32, 1, 32, 64)
    torch.nn.init.zeros_(network.coarse[-1].weight)  # the places alone
    column = torch.arange(32.0)
    places = torch.linspace(10.0, 22.0, 60)
    rows = torch.exp(-((column - 16.0) ** 2) / 8.0)
    pictures = torch.stack([rows[:, None] * torch.exp(-((column - place) ** 2) / 8.0) for place in places])
    with torch.no_grad():
        features = network(pictures.unsqueeze(1).expand(-1, 3, -1, -1), torch.zeros(60, 1))
    features = torch.cat((features, torch.ones(60, 1)), 1).double()
    fitted = torch.linalg.lstsq(features[::2], places[::2].double().unsqueeze(1), driver="gelsd").solution
    assert (features[1::2] @ fitted - places[1::2, None]).abs().mean() < 0.1


def test_a_contract_without_pictures_is_refused() -> None:
    blind = replace(SEEING, observation={key: SEEING.observation[key] for key in ("fingers", "instruction")})
    with pytest.raises(UserError, match=r"pictures, which this task lacks; name cameras in task\.images"):
        FlowConfig(encoder=EncoderKind.PICTURES).build(blind)


def test_without_instructions_pictures_alone_are_read() -> None:
    silent = {key: spec for key, spec in SEEING.observation.items() if key != "instruction"}
    made = PictureEncoder(replace(SEEING, observation=silent), 8, SMALL)
    observation = seen(4).exclude("instruction")
    made.fit(observation)
    assert made(observation).shape == (4, made.out_features)


@pytest.mark.parametrize("config", [FlowConfig, DiffusionConfig])
def test_policies_that_see_score_what_they_sample(config: type) -> None:
    policy = config(width=8, hidden=32, vision=replace(SMALL, shift=2, colour=0.3)).build(SEEING)
    observation = seen(6)
    policy.fit(observation, torch.rand(6, 4, 2))
    decision = policy.act(observation, generator=torch.Generator().manual_seed(0))
    scored = policy.evaluate(observation, decision.sample)
    torch.testing.assert_close(scored.log_prob, decision.log_prob, rtol=1e-5, atol=1e-5)
    policy.loss(observation, torch.rand(6, 4, 2), torch.ones(6, 4, dtype=torch.bool)).backward()
    eyes = [parameter for name, parameter in policy.encoder.named_parameters() if "eyes" in name and "first" in name]
    assert eyes
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in eyes)


def test_the_critic_of_libero_reads_objects_that_only_a_simulator_knows() -> None:
    from sims.libero.observation import contract

    policy = FlowConfig(width=16, vision=SMALL).build(contract(8, 4, 16))
    assert isinstance(policy.encoder, PictureEncoder)
    assert isinstance(policy.value_encoder, ObjectEncoder)
    assert isinstance(policy.advantage_encoder, ObjectEncoder)
    policy.start_critic()
    assert isinstance(FlowConfig(width=16).build(contract(8, 4)).encoder, ObjectEncoder)


def test_an_advantage_that_reads_objects_chooses_while_exploring_and_not_on_a_robot() -> None:
    from sims.libero.observation import contract

    told = contract(8, 4, 16)
    policy = FlowConfig(width=16, vision=SMALL, candidates=5, explored_candidates=3).build(told)
    assert policy.teaches
    observation = libero_seen(told, 6)
    policy.fit(observation, torch.rand(6, 8, 7) - 0.5)
    blind = observation.exclude(*(key for key, spec in told.observation.items() if spec.privileged))
    alone = policy.act(blind, deterministic=True).actions
    asked = []
    policy.advantage_head.register_forward_hook(lambda _, given, __: asked.append(given[0].shape[:2]))
    policy.start_ranking()
    policy.act(observation, generator=torch.Generator().manual_seed(0))
    assert asked == [(6, 3)]
    assert torch.equal(policy.act(observation, deterministic=True).actions, alone)
    assert torch.equal(policy.act(blind, deterministic=True).actions, alone)
    policy.act(blind, generator=torch.Generator().manual_seed(0))
    assert asked == [(6, 3)]


def test_encoded_observations_have_features_in_place_of_pictures_that_the_critic_does_not_read() -> None:
    from sims.libero.observation import contract

    libero = contract(8, 4, 16)
    steering = SteeringConfig(kind=Steering.RESIDUAL)
    policy = FlowConfig(width=16, vision=SMALL, steering=steering).build(libero)
    observation = libero_seen(libero, 6)
    policy.fit(observation, torch.rand(6, 8, 7) - 0.5)
    encoded = policy.encoded(observation, generates=True)
    pictures = {key for key, spec in libero.observation.items() if spec.is_picture}
    assert pictures
    assert not pictures & set(encoded.keys())
    noise = torch.randn(6, *policy.steering_noise_shape)
    assert torch.equal(policy.steered(encoded, noise)[0], policy.steered(observation, noise)[0])
    assert torch.equal(policy.generate(encoded, noise[:, :8]), policy.generate(observation, noise[:, :8]))
    assert torch.equal(policy.features(encoded), policy.features(observation))
    assert policy.encoded(encoded, generates=True) is encoded


def test_the_advantage_that_reads_objects_learns_from_them_and_leaves_the_actor_alone() -> None:
    from sims.libero.observation import contract

    told = contract(8, 4, 16)
    policy = FlowConfig(width=16, vision=SMALL).build(told)
    observation, actions = libero_seen(told, 6), torch.rand(6, 8, 7) - 0.5
    policy.fit(observation, actions)
    policy.advantage_loss(observation, actions, torch.rand(6)).backward()
    assert all(parameter.grad is None for parameter in policy.actor_parameters())
    assert any(
        parameter.grad is not None and parameter.grad.any() for parameter in policy.advantage_encoder.parameters()
    )


def test_shifts_move_each_picture_by_whole_pixels() -> None:
    torch.manual_seed(0)
    picture = torch.arange(10 * 10, dtype=torch.uint8).view(1, 10, 10, 1).expand(512, -1, -1, 3)
    moved = shifted(picture, 2)
    assert moved.shape == picture.shape
    assert moved.dtype == torch.uint8
    steps = {int(moved[row, 5, 5, 0]) for row in range(512)}
    assert steps == {10 * (5 + down) + 5 + right for down in range(-2, 3) for right in range(-2, 3)}
    assert (moved[:, 1:, 1:, 0].int() - moved[:, :-1, :-1, 0]).max() <= 11


def test_colours_change_within_bounds_and_nothing_else() -> None:
    torch.manual_seed(0)
    picture = torch.full((200, 4, 4, 3), 100, dtype=torch.uint8)
    brightness = recoloured(picture, 0.2).float().mean((1, 2, 3))
    assert brightness.min() >= 79
    assert brightness.max() <= 120
    assert brightness.std() > 5
    observation = seen(2)
    actions = torch.rand(2, 4, 2)
    other, same = PictureChanges(["front"], 1, 0.5)(observation, actions)
    assert same is actions
    assert not torch.equal(other["front"], observation["front"])
    assert torch.equal(other["wrist"], observation["wrist"])
    assert torch.equal(observation["front"], seen(2)["front"])


@pytest.mark.parametrize("kind", [Backbone.SIGLIP, Backbone.DINOV2])
def test_vision_transformers_start_small_or_from_a_folder(kind: Backbone, tmp_path) -> None:
    torch.manual_seed(0)
    first = backbone(VisionConfig(kind, width=32, features=16), 16, 24, 5)
    pictures, given = torch.rand(2, 3, 16, 24), torch.rand(2, 5)
    assert first(pictures, given).shape == (2, 16)
    assert first.size == 24  # the longer side
    first.model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}')
    loaded = backbone(VisionConfig(kind, str(tmp_path), frozen=True, features=16), 16, 24, 5)
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], value)
    assert loaded.mean.flatten().tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    loaded(pictures, given).sum().backward()
    other = Backbone.DINOV2 if kind is Backbone.SIGLIP else Backbone.SIGLIP
    for path, what in ((tmp_path / "missing", kind), (tmp_path, other)):
        with pytest.raises(UserError, match=r"policy\.vision\.weights=.*" + what.value):
            backbone(VisionConfig(what, str(path), features=16), 16, 24, 5)


def dino(folder, **sizes: int) -> str:
    """Write a random DINOv2 in the layout of transformers, trained with pictures of 70 pixels, patches of 14."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(3)
    own = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 70,
        "patch_size": 14,
    } | sizes
    Dinov2Model(Dinov2Config(**own)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}')
    return str(folder)


def test_a_frozen_transformer_is_one_for_all_cameras_and_critics(tmp_path) -> None:
    frozen = VisionConfig(Backbone.DINOV2, dino(tmp_path), frozen=True, size=28, features=16)
    policy = FlowConfig(width=8, hidden=16, vision=frozen).build(SEEING)
    transformer = policy.encoder.transformer
    one = sum(parameter.numel() for parameter in transformer.parameters())
    in_all = sum(parameter.numel() for name, parameter in policy.named_parameters() if "transformer" in name)
    assert in_all == one
    assert isinstance(policy.value_encoder, PictureEncoder)
    assert all(each._source.transformer is transformer for each in (policy.value_encoder, policy.advantage_encoder))
    assert not any(parameter.requires_grad for parameter in transformer.parameters())
    observation = seen(4)
    policy.fit(observation, torch.rand(4, 4, 2))
    # 28 pixels are four patches and the class token, of both cameras
    assert transformer.patches(torch.rand(2, 3, 16, 24)).shape == (2, 5, 24)
    decision = policy.act(observation)
    policy.start_critic()  # the critics begin with the actor's weights, of which the frozen ones are not copied
    torch.testing.assert_close(policy.value_encoder(observation), policy.encoder(observation))
    policy.loss(observation, torch.rand(4, 4, 2), torch.ones(4, 4)).backward()
    assert policy.encoder.eyes["front"].query.weight.grad is not None
    other = FlowConfig(width=8, hidden=16, vision=frozen).build(SEEING)
    other.load_state_dict(policy.state_dict())
    torch.testing.assert_close(
        other.act(observation, deterministic=True).actions, policy.act(observation, deterministic=True).actions
    )
    copied = copy.deepcopy(policy)
    assert copied.value_encoder._source is copied.encoder
    assert decision.actions.shape == (4, 4, 2)


def test_pictures_of_another_size_are_read_as_transformers_itself_reads_them(tmp_path) -> None:
    from transformers import Dinov2Model

    loaded = backbone(VisionConfig(Backbone.DINOV2, dino(tmp_path), size=42, features=16), 42, 42, 5)
    pictures = torch.rand(2, 3, 42, 42)
    standardised = (pictures - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(
        3, 1, 1
    )
    expected = Dinov2Model.from_pretrained(tmp_path)(pixel_values=standardised).last_hidden_state
    torch.testing.assert_close(loaded.patches(pictures), expected, rtol=1e-4, atol=1e-5)
    assert expected.shape == (2, 10, 24)
    with pytest.raises(UserError, match=r"vision\.size=40: expected a multiple of 14 pixels"):
        backbone(VisionConfig(Backbone.DINOV2, str(tmp_path), size=40, features=16), 42, 42, 5)


def test_dinov2_small_is_22_million_parameters_for_two_cameras_and_all_critics(tmp_path) -> None:
    from transformers import Dinov2Config

    Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14
    ).save_pretrained(tmp_path)
    vision = VisionConfig(Backbone.DINOV2, str(tmp_path), frozen=True, size=98)
    with torch.device("meta"):
        policy = FlowConfig(vision=vision).build(SEEING)
    assert 22e6 < sum(parameter.numel() for parameter in policy.parameters()) < 30e6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": Backbone.DINOV2, "size": 98}, "size=98 needs policy.vision.weights"),
        ({"weights": "somewhere"}, "vision.backbone=siglip or dinov2"),
        ({"backbone": Backbone.SIGLIP, "frozen": True}, "needs policy.vision.weights"),
        ({"colour": 1.0}, "colour=1: expected a number of at least 0 and below 1"),
        ({"shift": -1}, "shift=-1: expected a number of at least 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        VisionConfig(**settings)


def test_statistics_without_what_the_critic_reads_are_refused() -> None:
    specs = SEEING.observation | {key: TensorSpec((3,), privileged=True) for key in ("force", "torque")}
    blind = {key: spec for key, spec in specs.items() if not spec.is_picture and key not in ("cube", "instruction")}
    policy = FlowConfig(encoder=EncoderKind.FLAT).build(replace(SEEING, observation=blind))
    with pytest.raises(UserError, match="fit needs all observations that actor and critic read; add force, torque"):
        policy.fit(TensorDict({"fingers": torch.rand(6, 2)}, [6]), torch.rand(6, 4, 2))
