"""A classifier of success learns from pictures and measurements, repeats bit for bit, and refuses other inputs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.data.pictures import Pictures, encode_all
from embodied.data.success_frames import LabelConfig, labelled_frames
from embodied.errors import DivergedError, UserError
from embodied.networks.precision import Precision
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from policies.success_classifier import FitConfig, NetworkConfig, SuccessClassifier, fit, readable
from policies.vision.backbones import Backbone, VisionConfig, backbone
from policies.vision.encoder import WORD_WIDTH

CONTRACT = Contract(
    {
        "front": TensorSpec((16, 16, 3), "uint8"),
        "height": TensorSpec((1,), unit="m"),
        "secret": TensorSpec((1,), privileged=True),
    },
    TensorSpec((1,)),
    0.1,
)
NETWORK = NetworkConfig(VisionConfig(width=8, features=16, shift=1, colour=0.1), width=16)
LABELS = LabelConfig(positive_last=2, gap=1)


def frames(count: int = 8):
    """Episodes in which a bright square rises, and with it the height; it stops at half in those that fail."""
    episodes = []
    for number in range(count):
        success = number % 2 == 0
        rows = [min(step, 10 if success else 5) for step in range(12)]
        pictures = np.zeros((12, 16, 16, 3), np.uint8)
        for picture, row in zip(pictures, rows, strict=True):
            picture[12 - row : 16 - row, 4 + number % 4 : 10 + number % 4] = 255
        height = torch.tensor(rows)[:, None] * 0.1
        episodes.append(
            Episodes.of(
                TensorDict({"height": height}, [12]),
                torch.zeros(12, 1),
                success=success,
                pictures=Pictures.of({"front": encode_all(pictures)}),
            )
        )
    return labelled_frames(Episodes.join(episodes), LABELS, "logs")[0]


def trained(contract: Contract, steps: int = 60, seed: int = 0, **options) -> tuple[SuccessClassifier, list[float]]:
    seeding.seed_everything(seed)
    classifier = SuccessClassifier.build(contract, NETWORK, 1)
    data = frames()
    config = FitConfig(steps=steps, batch=16, learning_rate=3e-3, **options)
    return classifier, fit(classifier, data, torch.arange(len(data)), config, seeding.generator(seed, "batches"))


@pytest.mark.parametrize("names", [["front"], ["height"], ["front", "height"]])
def test_it_learns_from_pictures_and_from_measurements(names: list[str]):
    data = frames()
    classifier, losses = trained(readable(CONTRACT, names), steps=150)
    assert losses[-1] < losses[0] / 2
    score = classifier.scores(data)
    assert score[data.label == 1].min() > score[data.label == 0].max()


def test_a_run_in_bfloat16_judges_as_its_evaluations():
    contract = readable(CONTRACT, ["front", "height"])
    classifier = SuccessClassifier.build(contract, NETWORK, 1)
    data = frames()
    classifier.network.encoder.fit(data.take(torch.arange(len(data))))
    score = classifier.scores(data)
    with Precision.BFLOAT16.on("cpu"):
        assert torch.equal(classifier.scores(data), score)


def test_the_same_seed_gives_the_same_weights_and_another_one_others():
    contract = readable(CONTRACT, ["front", "height"])
    (one, first), (other, second), (_, third) = (trained(contract, steps=5, seed=seed) for seed in (0, 0, 1))
    assert first == second
    assert first != third
    weights = other.network.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in one.network.state_dict().items())


def test_a_saved_classifier_answers_the_same(tmp_path: Path):
    classifier, _ = trained(readable(CONTRACT, None), steps=5)
    assert [*classifier.contract.observation] == ["front"]  # pictures by default, nothing that only a simulator has
    classifier.threshold, classifier.frames = 0.75, 3
    classifier.save(tmp_path, {"choices": {}, "values": {"seed": 0}})
    loaded = SuccessClassifier.load(tmp_path)
    assert (loaded.threshold, loaded.frames, loaded.contract) == (0.75, 3, classifier.contract)
    picture = np.full((16, 16, 3), 90, np.uint8)
    assert loaded({"front": picture, "other": 1}) == classifier({"front": picture})
    assert 0.0 < loaded({"front": picture}) < 1.0
    assert {path.suffix for path in (tmp_path / "checkpoint" / "000001").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"front": None}, "reads 'front', which is missing; got height"),
        ({"front": np.zeros((8, 16, 3), np.uint8)}, r"'front' as uint8 \(16, 16, 3\), got uint8 \(8, 16, 3\)"),
        ({"front": np.zeros((16, 16, 3), np.float32)}, r"'front' as uint8 \(16, 16, 3\), got float32"),
        ({"height": np.zeros(2, np.float32)}, r"'height' as float32 \(1,\), got float32 \(2,\)"),
        ({"height": np.float32([np.nan])}, "'height', which is not finite"),
        ({"height": np.float32([np.inf])}, "'height', which is not finite"),
    ],
)
def test_what_it_cannot_read_is_one_line(change: dict, message: str):
    classifier, _ = trained(readable(CONTRACT, ["front", "height"]), steps=1)
    observation = {"front": np.zeros((16, 16, 3), np.uint8), "height": np.zeros(1, np.float32)} | change
    with pytest.raises(UserError, match=message) as error:
        classifier({key: value for key, value in observation.items() if value is not None})
    assert "\n" not in str(error.value)


def test_only_what_a_robot_has_can_be_read():
    with pytest.raises(UserError, match="observations=secret: expected some of front, height"):
        readable(CONTRACT, ["secret"])
    nothing = replace(CONTRACT, observation={"secret": CONTRACT.observation["secret"]})
    with pytest.raises(UserError, match="there are none"):
        readable(nothing, None)


def test_a_policy_is_no_classifier(tmp_path: Path):
    checkpoint.save(tmp_path, Checkpoint({"weight": torch.zeros(1)}, CONTRACT, {"choices": {}, "values": {}}))
    with pytest.raises(UserError, match="is no success classifier; expected a folder that"):
        SuccessClassifier.load(tmp_path)
    with pytest.raises(UserError, match="no checkpoint in"):
        SuccessClassifier.load(tmp_path / "nowhere")


def test_a_damaged_classifier_is_refused(tmp_path: Path):
    classifier, _ = trained(readable(CONTRACT, ["height"]), steps=1)
    path = classifier.save(tmp_path, {"choices": {}, "values": {}}) / "policy.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"policy\.safetensors is damaged"):
        SuccessClassifier.load(tmp_path)


def test_a_loss_that_is_not_finite_ends_the_training():
    with pytest.raises(DivergedError, match="use a lower learning_rate"):
        trained(readable(CONTRACT, ["height"]), weight_decay=1e30)


def test_batches_are_balanced_and_unknown_frames_are_in_none(monkeypatch: pytest.MonkeyPatch):
    data = frames()
    seen: list[float] = []
    original = torch.nn.functional.binary_cross_entropy_with_logits
    taken = []
    take = type(data).take
    monkeypatch.setattr(type(data), "take", lambda self, index: taken.append(index) or take(self, index))
    monkeypatch.setattr(
        torch.nn.functional,
        "binary_cross_entropy_with_logits",
        lambda logit, target: seen.append(float(target.mean())) or original(logit, target),
    )
    monkeypatch.setattr("policies.success_classifier.HELD_BYTES", 0)  # decoded for every batch
    seeding.seed_everything(0)
    classifier = SuccessClassifier.build(readable(CONTRACT, ["height"]), NETWORK, 1)
    fit(classifier, data, torch.arange(len(data)), FitConfig(steps=10, batch=16), seeding.generator(0, "batches"))
    assert seen == [0.5] * 10
    assert (data.label[torch.cat(taken[1:])] != -1).all()  # the first measures the size of a frame


def test_a_pretrained_encoder_stays_frozen_and_the_head_learns(tmp_path: Path):
    torch.manual_seed(0)
    small = VisionConfig(Backbone.DINOV2, width=32, features=16)
    backbone(small, 16, 16, WORD_WIDTH).model.save_pretrained(tmp_path / "dinov2")
    (tmp_path / "dinov2" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    )
    vision = replace(small, weights=str(tmp_path / "dinov2"), frozen=True)
    classifier = SuccessClassifier.build(readable(CONTRACT, ["front"]), NetworkConfig(vision, 16), 1)
    frozen = {name: each.clone() for name, each in classifier.network.encoder.transformer.model.state_dict().items()}
    data = frames()
    config = FitConfig(steps=20, batch=16, learning_rate=1e-2)
    losses = fit(classifier, data, torch.arange(len(data)), config, seeding.generator(0, "batches"))
    assert losses[-1] < losses[0]
    after = classifier.network.encoder.transformer.model.state_dict()
    assert all(torch.equal(each, after[name]) for name, each in frozen.items())
    classifier.save(tmp_path / "classifier", {"choices": {}, "values": {}})
    picture = {"front": np.full((16, 16, 3), 90, np.uint8)}
    assert SuccessClassifier.load(tmp_path / "classifier")(picture) == classifier(picture)


def test_continuing_keeps_the_statistics_of_measurements():
    classifier, _ = trained(readable(CONTRACT, ["height"]), steps=2)
    before = classifier.network.encoder.mean.clone()
    data = frames(4)
    fit(classifier, data, torch.arange(18), FitConfig(steps=2, batch=8), seeding.generator(0, "batches"))
    assert torch.equal(classifier.network.encoder.mean, before)
