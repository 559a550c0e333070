"""Program of an interpreter with LeRobot 0.6: its pi0, pi0.5 and pi0-FAST, processors included, for two tests.

python lerobot_results.py FOLDER ...: FOLDER has the folder `policy`, inputs.safetensors and tasks.json. The chunks of
LeRobot's class go into outputs.safetensors, and the names and shapes of the tensors that it has at its published size
into names.json. LeRobot has no small sizes: those of config.json replace its own while a model is built.
"""

import importlib
import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig, PaliGemmaConfig

CLASSES = {"pi0": "PI0", "pi05": "PI05", "pi0_fast": "PI0Fast"}


def use_sizes(modeling: Any, sizes: dict[str, Any]) -> None:
    """Let LeRobot build its own classes of these sizes."""
    language = modeling.PaliGemmaForConditionalGenerationWithPiGemma
    modeling.PaliGemmaForConditionalGenerationWithPiGemma = lambda config: language(
        PaliGemmaConfig(**sizes["vlm_config"])
    )
    if "dit_config" in sizes:
        use_expert(modeling, sizes["dit_config"], sizes["vlm_config"]["text_config"])


def use_expert(modeling: Any, expert: dict[str, Any], text: dict[str, Any]) -> None:
    """Let LeRobot build an action expert of these sizes."""
    acting = modeling.PiGemmaForCausalLM

    def adaptive(config: Any) -> dict[str, Any]:
        return {
            "use_adarms": config.use_adarms,
            "adarms_cond_dim": expert["hidden_size"] if config.use_adarms else None,
        }

    modeling.PiGemmaForCausalLM = lambda config: acting(
        GemmaConfig(**{**expert, "vocab_size": text["vocab_size"]}, **adaptive(config))
    )
    modeling.get_gemma_config = lambda variant: SimpleNamespace(
        width=expert["hidden_size"] if variant == "gemma_300m" else text["hidden_size"],
        depth=expert["num_hidden_layers"],
        mlp_dim=expert["intermediate_size"],
        num_heads=expert["num_attention_heads"],
        num_kv_heads=expert["num_key_value_heads"],
        head_dim=expert["head_dim"],
    )


@cache
def names(modeling: Any, kind: str) -> dict[str, list[int]]:
    """Names and shapes of the tensors of LeRobot's class of its published size."""
    config = getattr(modeling, f"{CLASSES[kind]}Config")(device="cpu")
    with torch.device("meta"):
        network = getattr(modeling, f"{CLASSES[kind]}Pytorch")(config)
    return {f"model.{name}": list(value.shape) for name, value in network.state_dict().items()}


def main(folder: Path) -> None:
    path = folder / "policy"
    fields = json.loads((path / "config.json").read_text())
    kind = fields["type"]
    modeling = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    originals = dict(vars(modeling))
    (folder / "names.json").write_text(json.dumps(names(modeling, kind)))
    sizes = {name: fields.pop(name) for name in ("vlm_config", "dit_config") if name in fields}
    (path / "config.json").write_text(json.dumps(fields))
    use_sizes(modeling, sizes)
    config = PreTrainedConfig.from_pretrained(path)
    config.device = "cpu"
    words = {"tokenizer_processor": {"tokenizer_name": str(path)}}
    if kind == "pi0_fast":
        config.text_tokenizer_name = str(path)
        words["action_tokenizer_processor"] = {"paligemma_tokenizer_name": str(path)}
    policy = getattr(modeling, f"{CLASSES[kind]}Policy").from_pretrained(path, config=config)
    # again, since from_pretrained only warns of missing and unexpected tensors
    tensors = policy._fix_pytorch_state_dict_keys(load_file(path / "model.safetensors"), config)
    policy.load_state_dict(tensors, strict=True)
    before, after = make_pre_post_processors(config, str(path), preprocessor_overrides=words)
    inputs, chunks = load_file(folder / "inputs.safetensors"), []
    for row, task in enumerate(json.loads((folder / "tasks.json").read_text())):
        observation = {name: value[row] / 255.0 for name, value in inputs.items() if "images" in name}
        batch = before({**observation, "observation.state": inputs["observation.state"][row], "task": task})
        noise = {"noise": inputs["noise"][row : row + 1]} if "noise" in inputs else {}
        chunks.append(after(policy.predict_action_chunk(batch, **noise)))
    save_file({"actions": torch.cat(chunks)}, folder / "outputs.safetensors")
    vars(modeling).update(originals)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
