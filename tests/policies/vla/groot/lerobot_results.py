"""Program of an interpreter with LeRobot 0.4.4: its GR00T, processors included, as test_groot_lerobot.py compares it.

python lerobot_results.py FOLDER: FOLDER has the folders `base` and `eagle` (files.py), and inputs.safetensors. The
policy and its processors are written into `policy`, or read from it where it exists, and its results into
outputs.safetensors. Attention is torch's, since flash-attn needs CUDA.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.groot import groot_n1, processor_groot
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig
from lerobot.policies.groot.eagle2_hg_model.image_processing_eagle2_5_vl_fast import Eagle25VLImageProcessorFast
from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import Eagle25VLForConditionalGeneration
from lerobot.policies.groot.eagle2_hg_model.processing_eagle2_5_vl import Eagle25VLProcessor
from lerobot.policies.groot.modeling_groot import GrootPolicy
from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.siglip.modeling_siglip import SiglipVisionModel


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def use_local_files(eagle: Path) -> None:
    """Let LeRobot read Eagle's small files in place of the hub's; its classes are its own."""

    def build(config: Any, **_: Any) -> Any:
        return Eagle25VLForConditionalGeneration(config, vision_model=SiglipVisionModel(config.vision_config))

    def processor(*_: Any) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(eagle, padding_side="left")
        template = read(eagle / "chat_template.json")["chat_template"]
        images = Eagle25VLImageProcessorFast(**read(eagle / "preprocessor_config.json"))
        tokens = read(eagle / "processor_config.json")["tokens_per_tile"]
        return Eagle25VLProcessor(images, tokenizer, chat_template=template, tokens_per_tile=tokens)

    config = Eagle25VLConfig(**read(eagle / "config.json"))
    groot_n1.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: config)
    groot_n1.AutoModel = SimpleNamespace(from_config=build)
    groot_n1.ensure_eagle_cache_ready = lambda *_: None
    processor_groot._build_eagle_processor = processor


def built(folder: Path, inputs: dict[str, Tensor]) -> tuple[Any, Any, Any]:
    """Policy and processors: those in `policy`, or new ones of the base, which are written there."""
    path = folder / "policy"
    if path.exists():
        read_pipeline = PolicyProcessorPipeline.from_pretrained
        before = read_pipeline(path, config_filename="policy_preprocessor.json")
        converters = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
        after = read_pipeline(path, config_filename="policy_postprocessor.json", **converters)
        return GrootPolicy.from_pretrained(path), before, after
    features = {
        name: PolicyFeature(FeatureType.VISUAL, tuple(inputs[name].shape[1:]))
        for name in inputs
        if name.startswith("observation.images")
    }
    features["observation.state"] = PolicyFeature(FeatureType.STATE, tuple(inputs["observation.state"].shape[1:]))
    config = GrootConfig(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, tuple(inputs["action"].shape[2:]))},
        chunk_size=inputs["action"].shape[1],
        n_action_steps=inputs["action"].shape[1],
        max_state_dim=read(folder / "base" / "config.json")["action_head_cfg"]["max_state_dim"],
        base_model_path=str(folder / "base"),
        tokenizer_assets_repo=str(folder / "eagle"),
        embodiment_tag="so100",
        device="cpu",
        use_bf16=False,
    )
    policy = GrootPolicy(config)
    statistics = {
        key: {name: inputs[f"{key}.{name}"] for name in ("min", "max")} for key in ("observation.state", "action")
    }
    before, after = processor_groot.make_groot_pre_post_processors(config, statistics)
    for part in (policy, before, after):
        part.save_pretrained(path)
    return policy, before, after


def main(folder: Path) -> None:
    inputs = load_file(folder / "inputs.safetensors")
    tasks = read(folder / "tasks.json")
    use_local_files(folder / "eagle")
    policy, before, after = built(folder, inputs)
    policy.eval()
    head, outputs = policy._groot_model.action_head, {}
    draw = torch.randn
    for row, task in enumerate(tasks):  # one by one: in a batch LeRobot gives all the first instruction
        observation = {name: value[row] / 255.0 for name, value in inputs.items() if "images" in name}
        observation["observation.state"] = inputs["observation.state"][row]
        batch = before({**observation, "task": task})
        noise = inputs["noise"][row : row + 1]
        torch.randn = lambda *_, noise=noise, **__: noise
        chunk = policy.predict_action_chunk(dict(batch))
        # its processor keeps a chunk's last action alone: each is passed by itself
        actions = torch.stack([after(action) for action in chunk[0].unsqueeze(1)]).squeeze(1)
        head.sample_time = lambda *_, row=row, **__: 1.0 - inputs["time"][row : row + 1]
        batch = before({**observation, "action": inputs["action"][row : row + 1], "task": task})
        with torch.no_grad():
            loss, _ = policy.forward(dict(batch))
        torch.randn = draw
        tokens, pictures = batch["eagle_input_ids"][0], batch["eagle_pixel_values"]
        results = {"actions": actions, "loss": loss, "tokens": tokens, "pictures": pictures, "state": batch["state"]}
        outputs |= {f"{name}.{row}": value.detach().contiguous() for name, value in results.items()}
    save_file(outputs, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
