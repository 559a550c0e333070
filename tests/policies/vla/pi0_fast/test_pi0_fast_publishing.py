"""pi0-FAST in LeRobot's layout: what is written, read again, and computed by LeRobot's own class from it.

LEROBOT6_PYTHON names an interpreter with LeRobot 0.6, see ../checkpoints/test_lerobot_publishing.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.text import encode
from policies.lerobot.publishing import publish
from policies.vla.checkpoints.settings import processor_steps
from policies.vla.pi0_fast.policy import Pi0FastConfig, Pi0FastPolicy
from tests.policies.vla.checkpoints import test_lerobot_publishing
from tests.policies.vla.checkpoints.test_lerobot_publishing import (
    ACTIONS,
    NORMALISER,
    PYTHON,
    TASKS,
    improve,
    statistics_in,
)
from tests.policies.vla.checkpoints.test_openpi_publishing import loaded_by_openpi
from tests.policies.vla.checkpoints.test_weights import changed
from tests.policies.vla.pi0_fast.test_pi0_fast import save
from tests.policies.vla.test_pi0 import SEEING, TEXT, seen

PROGRAM = '''
"""FAST's processor as LeRobot uses it: a scale, the smallest number and the tokenizer."""
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast


class Processor:
    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        pass

    @classmethod
    def from_pretrained(cls, folder: str, **options: object) -> "Processor":
        processor, fields = cls(), json.loads((Path(folder) / "processor_config.json").read_text())
        processor.scale, processor.min_token = fields["scale"], fields["min_token"]
        processor.bpe_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
        return processor
'''
VALUES = {"observation.state": ([-0.2, -0.1], [1.1, 0.9]), "action": ([-0.3, -0.8, 1.5], [0.5, 1.2, 3.0])}
"""Statistics with which chunks are within the limits of the action, to which LeRobot does not clamp them."""
DEMONSTRATIONS = {"unnorm_key": "demonstrations"}
CASES = [("QUANTILES", {}), ("MEAN_STD", {"max_tokens": 20}), ("MIN_MAX", DEMONSTRATIONS)]


def source(folder: Path, mode: str = "QUANTILES", **fields: object) -> Path:
    """Small published weights of LeRobot 0.6, with statistics of a `mode` and FAST's files below `fast`."""
    folder.mkdir()
    mapping = dict.fromkeys(("STATE", "ACTION"), mode)
    save(folder, **{"use_relative_actions": False, "normalization_mapping": mapping, "max_action_tokens": 24, **fields})
    improve(folder / "tokenizer.json")
    statistics = {
        f"{feature}.{name}": torch.tensor(value)
        for feature, pair in VALUES.items()
        for name, value in zip(ACTIONS[mode], pair, strict=True)
    }
    save_file(statistics, folder / NORMALISER.format("pre", 2, ""))
    (folder / "fast" / "processing.py").write_text(PROGRAM)
    changed(folder / "fast", "processor_config.json", auto_map={"AutoProcessor": "processing.Processor"})
    return folder


def loaded(folder: Path, contract: Contract = SEEING, **options: object) -> Pi0FastPolicy:
    return Pi0FastConfig(weights=str(folder), action_tokenizer=str(folder / "fast"), hidden=16, **options).build(
        contract
    )


def trained(folder: Path, observation: TensorDict, steps: int = 2, **options: object) -> Pi0FastPolicy:
    """A policy of the weights in `folder` after `steps` of SFT, with other chunks for every observation."""
    torch.manual_seed(0)
    policy = loaded(folder, **options)
    many = seen(64)
    policy.fit(many, torch.rand(64, 4, 3) * torch.tensor([0.9, 2.0, 3.5]))
    slope = torch.linspace(-0.4, 0.4, 4).view(1, 4, 1)
    normalised = torch.linspace(-1.0, 1.0, len(observation)).view(-1, 1, 1) * slope.expand(-1, -1, 3)
    actions = normalised * policy.action_std + policy.action_mean
    optimiser = torch.optim.Adam(policy.actor_parameters(), 3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = policy.loss(observation, actions, torch.ones(actions.shape[:2]))
        loss.backward()
        optimiser.step()
    return policy


def observed() -> TensorDict:
    observation = seen(3)
    observation["instruction"] = torch.stack([torch.from_numpy(encode(task, TEXT)) for task in TASKS])
    return observation


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_what_is_written_is_read_again(mode: str, options: dict[str, object], tmp_path: Path) -> None:
    policy = trained(source(tmp_path / "published", mode), observed(), **options)
    out = tmp_path / "out"
    publish(policy, out, tmp_path)
    again = loaded(out)
    own, theirs = policy.model.native.state_dict(), again.model.native.state_dict()
    assert own.keys() == theirs.keys()
    assert [name for name, value in own.items() if not torch.equal(value, theirs[name])] == []
    assert again.brought_statistics
    assert again.longest == policy.longest == options.get("max_tokens", 24)
    assert again.inputs.standardised_state(observed()).shape == (3, 2)  # LeRobot 0.6 does not pad it
    torch.testing.assert_close(again.inputs.tokens(observed()), policy.inputs.tokens(observed()))
    torch.testing.assert_close(again._targets(torch.ones(1, 4, 3)), policy._targets(torch.ones(1, 4, 3)))
    for each in (policy, again):
        each.longest = 8  # answers of random weights do not end
    found, expected = (each.act(observed(), deterministic=True) for each in (again, policy))
    assert torch.equal(found.sample["tokens"], expected.sample["tokens"])
    torch.testing.assert_close(found.actions, expected.actions)
    with pytest.raises(UserError, match="out exists; choose another output"):
        publish(policy, out, tmp_path)


def test_tensors_statistics_and_processors_are_those_that_lerobot_expects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = trained(source(tmp_path / "published"), observed())
    (tmp_path / "report.md").write_text("It succeeds.\n")
    out = tmp_path / "out"
    publish(policy, out, tmp_path)
    later = [f"layers.{index}." for index in range(2, 27)]
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    written = load_file(out / "model.safetensors")
    assert written.keys() == {
        f"model.{name}"
        for name in loaded_by_openpi("pi0")
        if name.startswith("paligemma_with_expert.paligemma.")
        and "embed_tokens" not in name
        and not any(layer in name for layer in later)
    }
    assert torch.equal(written[head], policy.model.native.get_input_embeddings().weight)
    fields = json.loads((out / "config.json").read_text())
    fast = str(out / "fast")
    assert (fields["type"], fields["fast_skip_tokens"], fields["action_tokenizer_name"]) == ("pi0_fast", 20, fast)
    # LeRobot decodes chunks of n_action_steps
    assert (fields["chunk_size"], fields["n_action_steps"]) == (4, 4)
    assert (fields["max_action_tokens"], fields["max_decoding_steps"]) == (24, 26)
    assert fields["image_resolution"] == [32, 32]
    assert fields["normalization_mapping"] == {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    steps = dict(processor_steps(out))
    assert list(steps)[2:6] == [
        *("normalizer_processor", "pi0_fast_prepare_state_tokenizer_processor_step"),
        *("tokenizer_processor", "action_tokenizer_processor"),
    ]
    assert steps["pi0_fast_prepare_state_tokenizer_processor_step"] == {"max_state_dim": 2}
    assert steps["action_tokenizer_processor"]["fast_skip_tokens"] == 20
    statistics = statistics_in(out, "QUANTILES")
    assert statistics["observation.state.q99"] == pytest.approx([1.1, 0.9])
    assert statistics["action.q01"] == pytest.approx([-0.3, -0.8, 1.5])
    for file in (tmp_path / "published" / "fast").iterdir():
        assert (out / "fast" / file.name).read_bytes() == file.read_bytes()
    card = (out / "README.md").read_text()
    assert "policy = PI0FastPolicy.from_pretrained(FOLDER)" in card
    assert "`policy.action_tokenizer=FOLDER/fast` belongs to" in card
    assert "Its chunks have 4 actions: execute 2 of them." in card
    assert card.endswith("It succeeds.\n")
    assert Contract.from_dict(json.loads((out / "contract.json").read_text())) == SEEING
    assert "select_action executes all 4 actions of a chunk, this policy 2" in caplog.text
    assert "beginning" not in caplog.text
    assert "lacks the Python file" not in caplog.text


def test_statistics_of_the_demonstrations_are_named_as_they_were_computed(tmp_path: Path) -> None:
    policy = trained(source(tmp_path / "published", "MEAN_STD"), observed(), **DEMONSTRATIONS)
    publish(policy, tmp_path / "out", tmp_path)
    statistics = statistics_in(tmp_path / "out", "QUANTILES")
    assert sorted(statistics) == ["action.q01", "action.q99", "observation.state.q01", "observation.state.q99"]
    low, high = (seen(64)["fingers"].quantile(share, 0) for share in (0.01, 0.99))
    assert statistics["observation.state.q01"] == pytest.approx(low.tolist(), abs=1e-6)
    assert statistics["observation.state.q99"] == pytest.approx(high.tolist(), abs=1e-6)
    assert statistics["action.q99"] == pytest.approx((policy.action_mean + policy.action_std).tolist())


def test_what_lerobot_cannot_represent_is_refused_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"names the vision-language model of policy\.weights"):
        publish(Pi0FastConfig(hidden=16).build(SEEING), out, tmp_path)
    folder = source(tmp_path / "published")
    with pytest.raises(UserError, match=r"begin 1 steps late \(delay\); use target=hub"):
        publish(loaded(folder, SEEING.delayed(1)), out, tmp_path)
    (folder / "fast" / "processing.py").unlink()
    fields = json.loads((folder / "config.json").read_text())
    del fields["use_relative_actions"]  # LeRobot 0.4 has no such field, and pads the state to four elements
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"learned 4 elements for 2: train with max_state_dim=2 in config\.json"):
        publish(loaded(folder), out, tmp_path)
    assert not out.exists()
    changed(folder, "config.json", max_state_dim=2)
    publish(loaded(folder, replace(SEEING, executed=4)), out, tmp_path)
    assert "lacks the Python file of FAST's processor" in caplog.text
    assert "select_action" not in caplog.text


def prepared(folder: Path, mode: str, options: dict[str, object]) -> Tensor:
    """Our normalised actions [3, 4, 3]; `folder` has policy and inputs for lerobot_results.py afterwards."""
    folder.mkdir()
    observation = observed()
    policy = trained(source(folder / "published", mode), observation, steps=60, **options)
    publish(policy, folder / "policy", folder)
    inputs = {
        f"observation.images.{name}": observation[name].permute(0, 3, 1, 2).contiguous() for name in ("front", "wrist")
    }
    save_file(
        inputs | {"observation.state": observation["fingers"], "scale": policy.action_std},
        folder / "inputs.safetensors",
    )
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    decided = policy.act(observation, deterministic=True)
    assert (decided.sample["tokens"] == policy.size).any(-1).all()  # every answer ends
    normalised = decided.actions / policy.action_std
    assert float((normalised[0] - normalised[2]).abs().max()) > 0.4
    return normalised


@pytest.mark.skipif(not PYTHON, reason="LEROBOT6_PYTHON names no interpreter with LeRobot 0.6")
def test_lerobot_s_own_class_loads_it_strictly_and_acts_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(len(CASES))]
    expected = [prepared(folder, *case) for folder, case in zip(folders, CASES, strict=True)]
    command = [str(PYTHON), Path(test_lerobot_publishing.__file__).with_name("lerobot_results.py"), *folders]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, (mode, options), own in zip(folders, CASES, expected, strict=True):
        scale = load_file(folder / "inputs.safetensors")["scale"]
        difference = float((load_file(folder / "outputs.safetensors")["actions"] / scale - own).abs().max())
        print(f"pi0_fast of {mode}, {options}: actions differ by {difference:.1e} of their normalisation")
        assert difference < 1e-5
        assert json.loads((folder / "names.json").read_text()) == {
            f"model.{name}": list(shape)
            for name, shape in loaded_by_openpi("pi0").items()
            if name.startswith("paligemma_with_expert.paligemma.")
        }
