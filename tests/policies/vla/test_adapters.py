"""Low-rank adapters on pi0: what learns, what a checkpoint holds, peft's format, merging, and folders for the hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from transformers import PI0Config, PI0ForConditionalGeneration

import export
from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import TensorSpec
from embodied.errors import UserError
from embodied.networks.precision import Precision
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.saving.publishing import push
from embodied.training import loop
from policies.vla import adapters
from policies.vla.checkpoints.publishing import publish
from policies.vla.model import Pi0Model, untrained
from policies.vla.pi0 import Pi0Config, Pi0Policy
from policies.vla.sizes import Size
from tests.embodied.reach import Reach
from tests.policies.vla.checkpoints.test_weights import save
from tests.policies.vla.test_pi0 import SEEING, seen


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    save(tmp_path / "base", "transformers")
    return tmp_path / "base"


def policy(weights: Path, rank: int = 2, **options: object) -> Pi0Policy:
    torch.manual_seed(0)
    return Pi0Config(weights=str(weights), lora_rank=rank, hidden=16, **options).build(SEEING)


def trained(made: Pi0Policy) -> Pi0Policy:
    """With some other values of whatever it trains."""
    torch.manual_seed(1)
    for weight in made.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn_like(weight)
    return made


def native(folder: Path) -> PI0ForConditionalGeneration:
    return PI0ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def acts(made: Pi0Policy) -> torch.Tensor:
    return made.act(seen(3), deterministic=True).actions


def test_new_adapters_change_nothing_and_learn_all_there_is_to_learn(base: Path) -> None:
    whole, made = policy(base, 0), policy(base)
    assert torch.equal(acts(whole), acts(made))
    before = {name: weight.clone() for name, weight in made.named_parameters()}
    optimiser = torch.optim.Adam(made.actor_parameters(), 1e-2)
    for _ in range(2):  # the second half of an adapter has no gradient before the first has moved
        optimiser.zero_grad()
        loss = made.loss(seen(4), torch.rand(4, 4, 3), torch.ones(4, 4))
        (loss - made.evaluate(seen(4), made.act(seen(4)).sample).log_prob.mean()).backward()
        optimiser.step()
    moved = {name for name, weight in made.named_parameters() if not torch.equal(weight, before[name])}
    adapted = {name for name in before if ".lora_" in name}
    assert len(adapted) == 2 * (7 + 2 + 2 * 7)  # a layer and what the expert reads of the last, and the expert's two
    full = {name for name in before if "embed_action_time" in name or "action_out_proj" in name}
    assert moved == adapted | full


def test_every_weight_that_is_trained_has_a_gradient(base: Path) -> None:
    for made in (policy(base), policy(base, 0), policy(base, 0, frozen=True)):
        made.loss(seen(2), torch.rand(2, 4, 3), torch.ones(2, 4)).backward()
        weights = [weight for weight in made.model.parameters() if weight.requires_grad]
        assert weights
        assert all(weight.grad is not None for weight in weights)


def test_a_checkpoint_holds_what_is_trained_and_refers_to_the_rest(tmp_path: Path) -> None:
    text = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 300}
    settings = untrained(Size.TINY, 4, 2, 3).native.config.to_dict()
    settings["vlm_config"]["text_config"] |= text
    settings["vlm_config"]["projection_dim"] = 256
    settings["dit_config"] |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    torch.manual_seed(0)
    sizes = {key: settings[key] for key in ("vlm_config", "dit_config", "chunk_size", "max_state_dim")}
    (tmp_path / "base").mkdir()
    save(tmp_path / "base", "transformers")  # the tokenizer and the statistics
    PI0ForConditionalGeneration(PI0Config(**sizes)).save_pretrained(tmp_path / "base")
    made = trained(policy(tmp_path / "base"))
    files = {}
    for name, each in (("adapters", made), ("whole", policy(tmp_path / "base", 0))):
        directory = checkpoint.save(tmp_path / name, Checkpoint(dict(each.state_dict()), SEEING))
        files[name] = (directory / checkpoint.WEIGHTS).stat().st_size
    assert files["adapters"] < 0.05 * files["whole"]
    again = policy(tmp_path / "base")
    checkpoint.load(tmp_path / "adapters").restore(again)
    assert torch.equal(acts(again), acts(made))
    fresh = made.with_new_weights()
    fresh.load_state_dict(made.state_dict())
    assert torch.equal(acts(fresh), acts(made))
    trained(fresh)
    assert torch.equal(acts(again), acts(made))  # nothing that learns is shared


def test_adapters_of_the_published_size_are_under_a_twentieth() -> None:
    with torch.device("meta"):
        model = Pi0Model(PI0ForConditionalGeneration(PI0Config()))
        adapters.adapt(model, 32)
    sizes = {kept: sum(w.numel() for w in model.parameters() if w.requires_grad == kept) for kept in (True, False)}
    assert sizes[False] > 3e9
    assert sizes[True] < 0.05 * sizes[False]


def write_of_peft(folder: Path, base: Path, modules_to_save: list[str], **options: Any) -> Any:
    """Trained model of peft on the weights `base`, with `options` of its LoraConfig, which is written to `folder`."""
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "v_proj"], **options)
    config.base_model_name_or_path, config.modules_to_save = str(base), modules_to_save
    model = get_peft_model(native(base), config)
    torch.manual_seed(2)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight) * weight.requires_grad
    model.save_pretrained(folder)
    return model


def test_peft_reads_ours_and_we_read_theirs(base: Path, tmp_path: Path) -> None:
    made = trained(policy(base))
    publish(made, tmp_path / "ours", tmp_path, peft=True)
    theirs = PeftModel.from_pretrained(native(base), tmp_path / "ours").merge_and_unload().state_dict()
    ours = policy(tmp_path / "ours", 0).model.native.state_dict()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name])
    assert torch.equal(acts(policy(tmp_path / "ours")), acts(made))  # trained on as adapters
    expected = write_of_peft(tmp_path / "theirs", base, ["action_out_proj"]).merge_and_unload().state_dict()
    for name, weight in policy(tmp_path / "theirs", 0).model.native.state_dict().items():
        torch.testing.assert_close(weight, expected[name])


def test_scales_of_single_layers_are_kept(base: Path, tmp_path: Path) -> None:
    write_of_peft(tmp_path / "theirs", base, ["embed_action_time", "action_out_proj"], alpha_pattern={"v_proj": 3})
    made = policy(tmp_path / "theirs", 3)
    publish(made, tmp_path / "ours", tmp_path, peft=True)
    assert torch.equal(acts(policy(tmp_path / "ours", 3)), acts(made))


def test_adapters_of_peft_with_dropout_score_what_they_sampled(base: Path, tmp_path: Path) -> None:
    write_of_peft(tmp_path / "theirs", base, ["embed_action_time", "action_out_proj"], lora_dropout=0.5)
    made = policy(tmp_path / "theirs", 3).train()
    decision = made.act(seen(3))
    torch.testing.assert_close(
        made.evaluate(seen(3), decision.sample).log_prob, decision.log_prob, atol=1e-4, rtol=1e-4
    )


def test_adapters_are_merged_into_a_base_stored_in_bfloat16_as_they_were_trained(base: Path, tmp_path: Path) -> None:
    made = trained(policy(base, precision=Precision.BFLOAT16))
    layer = made.model.native.model.dit.layers[0].mlp.up_proj
    expected = layer.weight.float() + layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    publish(made, tmp_path / "merged", tmp_path, peft=False)
    found = native(tmp_path / "merged").model.dit.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.0)


def test_wrong_adapters_are_one_line(base: Path, tmp_path: Path) -> None:
    def refused(call: object) -> str:
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    made = trained(policy(base))
    saved, ours = Checkpoint(made.state_dict(), SEEING, path=tmp_path), tmp_path / "ours"
    publish(made, ours, tmp_path, peft=True)
    assert "adapts published weights: name them in policy.weights" in refused(lambda: Pi0Config(lora_rank=2))
    assert "choose one" in refused(lambda: Pi0Config(weights="x", lora_rank=2, frozen=True))
    assert "of policy.lora_rank=4, got adapters of rank 2" in refused(lambda: saved.restore(policy(base, 4)))
    assert "of rank 2, got lora_rank=4" in refused(lambda: policy(ours, 4))
    whole = Checkpoint(policy(base, 0).state_dict(), SEEING, path=tmp_path)
    assert "policy.lora_rank=2, got no adapters" in refused(lambda: whole.restore(policy(base)))
    assert "exists; choose another output" in refused(lambda: publish(made, ours, tmp_path, peft=True))
    plain = policy(base, 0)
    assert "none of; use target=transformers" in refused(lambda: publish(plain, tmp_path / "no", tmp_path, peft=True))
    config = json.loads((ours / adapters.CONFIG).read_text())
    (ours / adapters.CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    assert "another kind; expected plain LoRA" in refused(lambda: policy(ours))
    (ours / adapters.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    assert "expected a folder or a name on the hub" in refused(lambda: policy(ours))
    (ours / adapters.CONFIG).write_text(json.dumps(config | {"target_modules": ["nothing"]}))
    assert "do not fit" in refused(lambda: policy(ours))
    (ours / adapters.CONFIG).write_text(json.dumps(config))
    some = load_file(ours / adapters.WEIGHTS)
    save_file(dict(list(some.items())[1:]), ours / adapters.WEIGHTS)
    assert "are of another model: 1 tensors differ" in refused(lambda: policy(ours))
    (ours / adapters.WEIGHTS).write_bytes((ours / adapters.WEIGHTS).read_bytes()[:1000])
    assert "cannot read the adapters in" in refused(lambda: policy(ours))


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    made = trained(policy(base))
    publish(made, tmp_path / "ours", tmp_path, peft=True)
    tensors = load_file(base / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    tensors[name] += 1e-3
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"trained on other weights than policy\.weights=.* now has"):
        policy(base).load_state_dict(made.state_dict())
    with pytest.raises(UserError, match=r"trained on other weights than .* now has"):
        policy(tmp_path / "ours")


def test_without_peft_the_extra_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UserError, match=r"peft is not installed: pip install 'embodied-rl\[vla\]'"):
        policy(base)


class Watched(Reach):
    """Reach with a picture of nothing."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, horizon=4)
        front = {"front": TensorSpec((16, 24, 3), "uint8", camera="front")}
        self.contract = replace(self.contract, observation=self.contract.observation | front)

    def _observation(self) -> TensorDict:
        black = torch.zeros(self.num_envs, 16, 24, 3, dtype=torch.uint8)
        return super()._observation().set("front", black)


def test_imitation_and_ppo_of_adapters_and_their_export(base: Path, tmp_path: Path, monkeypatch: object) -> None:
    env, config = Watched(4), Pi0Config(weights=str(base), lora_rank=2, hidden=16, denoising_steps=2)
    torch.manual_seed(0)
    made = config.build(env.contract)
    made.fit(env.reset(), torch.rand(4, 4, 1) - 0.5)
    batch = {"observation": env.reset(), "actions": torch.rand(4, 4, 1), "valid": torch.ones(4, 4)}
    learner = SFT(made, SFTConfig(average=0.5), torch.Generator())
    losses = [learner.step(TensorDict(batch, [4]), 0.0) for _ in range(3)]
    before = {name: value.clone() for name, value in made.state_dict().items()}
    assert len({round(loss, 6) for loss in losses}) == 3
    ppo = PPOConfig(rollout_length=4, epochs=1, minibatch=8, critic_warmup=0)
    *_, last = loop.train(env, made, ppo, env_steps=32)
    assert last.metrics["minibatches"] == 2.0
    moved = [name for name, value in made.state_dict().items() if ".lora_" in name and not value.equal(before[name])]
    assert len(moved) == sum(".lora_" in name for name in before)

    options = {"weights": str(base), "lora_rank": 2, "hidden": 16}
    record = {"choices": {"policy": "pi0"}, "values": {"policy": options}}
    run = tmp_path / "run"
    checkpoint.save(run, Checkpoint(made.state_dict(), env.contract, config=record))
    (run / "report.md").write_text("# Pushed\n\n![curves](curves.png)\n\n9 of 10\n")
    for target in ("peft", "transformers"):
        export.run([f"checkpoint={run}", f"target={target}"])
    card = (run / "export" / "peft" / "README.md").read_text()
    assert f"base_model: {base}" in card
    assert "| action | float32 [1] |" in card
    assert card.endswith("# Pushed\n\n\n9 of 10\n")
    again = Pi0Config(weights=str(run / "export" / "transformers"), hidden=16).build(env.contract)
    mine, theirs = made.state_dict(), again.state_dict()
    for name in ("inputs.state.mean", "inputs.state.std", "action_mean", "action_std"):
        torch.testing.assert_close(theirs[name], mine[name])
    adapters.merge(made.model)
    for name, weight in made.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], weight)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(UserError, match="written, but not uploaded to hub=me/robot"):
        push(run / "export" / "peft", "me/robot")
    for arguments, message in (
        (["target=c", "hub=me/robot"], "hub=me/robot is for target=hub, transformers, peft, lerobot or openpi, got c"),
        (["target=peft", "opset=17"], "target=peft takes neither weights= nor opset="),
    ):
        with pytest.raises(UserError, match=message):
            export.run([f"checkpoint={run}", *arguments])
