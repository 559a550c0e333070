"""Published weights of pi0 in the three namings, tried with a small model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from embodied.errors import UserError
from policies.vla.model import untrained
from policies.vla.pi0 import Pi0Config
from policies.vla.sizes import Size
from tests.policies.vla.test_pi0 import SEEING, seen

NAMINGS = ("transformers", "lerobot", "openpi")
STATE, ACTION = ([0.1, 0.2], [0.3, 0.0]), ([1.0, 2.0, 3.0], [0.5, 0.6, 0.7])
OLD = {
    "model.vlm.language_model.embed_tokens.": "paligemma_with_expert.paligemma.lm_head.",
    "model.vlm.": "paligemma_with_expert.paligemma.model.",
    "model.dit.": "paligemma_with_expert.gemma_expert.model.",
    "embed_action_time.": "",
}


def old(name: str) -> str:
    for new, before in OLD.items():
        if name.startswith(new):
            name = before + name.removeprefix(new)
            break
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return untrained(Size.TINY, 4, 2, 3).native.state_dict()


def save(folder: Path, naming: str) -> None:
    """A folder as these publish it, with the small model's sizes in its configuration."""
    native = untrained(Size.TINY, 4, 2, 3).native
    sizes = {key: native.config.to_dict()[key] for key in ("vlm_config", "dit_config")}
    tensors = weights()
    if naming != "transformers":
        prefix = "model." if naming == "lerobot" else ""
        tensors = {prefix + old(name): value for name, value in tensors.items()}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    if naming == "transformers":
        native.config.save_pretrained(folder)
        said = {"state_mean": STATE[0], "state_std": STATE[1], "actions_mean": ACTION[0], "actions_std": ACTION[1]}
        (folder / "processor_config.json").write_text(json.dumps(said))
    elif naming == "lerobot":
        (folder / "config.json").write_text(json.dumps({"type": "pi0", "chunk_size": 4, **sizes}))
        said = {"observation.state.mean": STATE[0], "observation.state.std": STATE[1]}
        said |= {"action.mean": ACTION[0], "action.std": ACTION[1]}
        tensors = {name: torch.tensor(value) for name, value in said.items()}
        save_file(tensors, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    else:
        (folder / "config.json").write_text(json.dumps({"action_horizon": 4, "action_dim": 32, **sizes}))
        (folder / "assets" / "robot").mkdir(parents=True)
        state, action = (
            {"mean": mean + [0.0] * (32 - len(mean)), "std": std + [0.0] * (32 - len(std))}
            for mean, std in (STATE, ACTION)
        )
        said = {"norm_stats": {"state": state, "actions": action}}
        (folder / "assets" / "robot" / "norm_stats.json").write_text(json.dumps(said))
    words = {"<pad>": 0, "<bos>": 1, "<unk>": 2, "pick": 3, "the": 4, "milk": 5, "open": 6}
    found = Tokenizer(models.WordLevel(words, "<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.mark.parametrize("naming", NAMINGS)
def test_weights_statistics_and_tokenizer_of_each_naming(naming: str, tmp_path: Path) -> None:
    save(tmp_path, naming)
    torch.manual_seed(1)
    policy = Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
    found, expected = policy.model.native.state_dict(), weights()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    torch.testing.assert_close(policy.inputs.state.mean, torch.tensor(STATE[0]))
    torch.testing.assert_close(policy.inputs.state.std, torch.tensor([0.3, 1.0]))  # what never varied
    torch.testing.assert_close(policy.action_mean, torch.tensor(ACTION[0]))
    torch.testing.assert_close(policy.action_std, torch.tensor(ACTION[1]))
    assert policy.inputs.tokens(seen(2))[0][:, :5].tolist() == [[1, 3, 4, 5, 0], [1, 6, 0, 0, 0]]
    policy.fit(seen(8), torch.rand(8, 4, 3))
    torch.testing.assert_close(policy.action_mean, torch.tensor(ACTION[0]))  # those of the weights stay
    assert policy.act(seen(2)).actions.shape == (2, 4, 3)


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        with pytest.raises(UserError) as caught:
            Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
        assert "\n" not in str(caught.value)
        assert str(caught.value).count(str(tmp_path)) == 1
        return str(caught.value)

    (tmp_path / "weights").touch()
    with pytest.raises(UserError, match="weights is a file; expected the folder"):
        Pi0Config(weights=str(tmp_path / "weights")).build(SEEING)
    with pytest.raises(UserError, match="expected a folder or a name on the hub of pi0"):
        Pi0Config(weights=str(tmp_path / "nowhere")).build(SEEING)
    assert "cannot read config.json" in refused()
    save(tmp_path, "lerobot")
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"paligemma_variant": "gemma_9b"}))
    assert "paligemma_variant is gemma_9b, which is not gemma_2b" in refused()
    (tmp_path / "config.json").write_text(json.dumps(said | {"type": "pi05"}))
    assert "cannot read config.json as that of a pi0 (it is of type pi05)" in refused()
    (tmp_path / "config.json").write_text(json.dumps(said))
    some = {"model." + old(name): value for name, value in weights().items() if "action_out_proj.bias" not in name}
    save_file(some, tmp_path / "model.safetensors", {"format": "pt"})
    assert "lacks 1 tensors of pi0, such as action_out_proj.bias" in refused()
    save(tmp_path, "lerobot")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "has a tokenizer that cannot be read; put pi0's tokenizer.json and tokenizer_config.json there" in refused()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer, and google/paligemma-3b-pt-224 is not here; put pi0's tokenizer.json and" in refused()
    save(tmp_path, "lerobot")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:1000])
    assert "model.safetensors is damaged, or not whole: download or export it again (Error while" in refused()


def changed(folder: Path, name: str, **fields: object) -> None:
    """The JSON file with other `fields`; those that are None are removed."""
    said = json.loads((folder / name).read_text()) | fields
    (folder / name).write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def retyped(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first layer of actions, changed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("action_in_proj.weight"))
    save_file(tensors | {name: change(tensors[name]).contiguous()}, path, {"format": "pt"})


@pytest.mark.parametrize("naming", ["transformers", "lerobot"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "config.json").write_text("[]"), "cannot read config.json as that of a pi0 ('list'"),
        (lambda at: changed(at, "config.json", chunk_size="a"), "as that of a pi0 (Validation error for field"),
        (lambda at: changed(at, "config.json", max_action_dim=4), "action_out_proj.bias of shape [4] after config"),
        (lambda at: retyped(at, lambda x: x[:, :16]), "of shape [32, 32] after config.json, got [32, 16]"),
        (lambda at: retyped(at, lambda x: x * torch.nan), "infinity or not a number in embed_action_time"),
        (lambda at: retyped(at, torch.Tensor.char), "expected weights of type BF16, F16, F32, F64, got I8 in"),
        (lambda at: (at / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda at: (at / "model.safetensors").write_bytes(b""), "model.safetensors is damaged, or not whole"),
        (lambda at: changed(at, "tokenizer_config.json", bos_token=None), "without a token for the beginning"),
    ],
)
def test_weights_that_are_damaged_are_one_line(tmp_path: Path, naming: str, damage, message: str) -> None:
    save(tmp_path, naming)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_nothing_but_safetensors_is_read(tmp_path: Path) -> None:
    save(tmp_path, "transformers")
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)


def test_a_tokenizer_of_another_model_is_told_by_its_numbers(tmp_path: Path) -> None:
    save(tmp_path, "transformers")
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    said["model"]["vocab"]["milk"] = 99999
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    policy = Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
    with pytest.raises(
        UserError, match=r"has number 99999 in 'pick the milk\\n', they know those below 4097: put pi0's"
    ):
        policy.act(seen(2))


def test_what_the_weights_have_learned_with_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "lerobot")
    shown = {"observation.images.top": {"type": "VISUAL"}, "observation.state": {"type": "STATE"}}
    changed(tmp_path, "config.json", input_features=shown, chunk_size=9)
    for _ in range(2):
        Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
    assert [record.getMessage() for record in caplog.records] == [
        f"policy.weights={tmp_path} has learned chunks of 9 actions, task.horizon=4",
        f"policy.weights={tmp_path} has learned with observation.images.top, and sees front, wrist",
    ]


def test_statistics_of_another_robot_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, "lerobot")
    path = tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors"
    said = {"observation.state.mean": torch.zeros(8), "observation.state.std": torch.ones(8)}
    save_file(said | {"action.mean": torch.zeros(3), "action.std": torch.ones(3)}, path)
    policy = Pi0Config(weights=str(tmp_path), hidden=16).build(SEEING)
    assert policy.lacks_statistics.endswith("has statistics of 8 and 3 elements of state and action, not of 2 and 3")
    with pytest.raises(RuntimeError, match="no normalisation statistics"):
        policy.act(seen(2))
    policy.fit(seen(8), torch.rand(8, 4, 3))
    policy.act(seen(2))
