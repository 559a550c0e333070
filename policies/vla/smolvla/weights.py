"""Published weights of SmolVLA in LeRobot's layout: its configuration, its tensors, its tokenizer and its statistics.

The sizes of the vision-language model and its tokenizer are in no file of LeRobot's: they are those of its field
`vlm_model_name`, a folder or a name on the hub, whose config.json is read, but no weights. A field of LeRobot's
config.json that changes the computation is read, or raises an error unless its value is supported; fields about
training are options of ours. `prefix_length`, `pad_language_to` and `empty_cameras` add tokens to which nothing
attends, and are not read. All was tested with small models; no published weights have been loaded yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.saving.json_text import loads
from policies.vla import adapters
from policies.vla.checkpoints import statistics
from policies.vla.checkpoints.settings import CONFIG, STEPS, Settings, check_required, modes, pictures
from policies.vla.checkpoints.weights import Published, check_files, fill, load_tokenizer, reading
from policies.vla.inputs import LONGEST
from policies.vla.smolvla.model import (
    PERIODS,
    SELF_ATTENTION_EVERY,
    WIDTH_MULTIPLIER,
    Architecture,
    Network,
    SmolVLAModel,
)

VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
"""Vision-language model where a configuration does not name it."""
LAYERS = 16
CHUNK = 50
SIDE = 512
"""Layers of the language model, actions of a chunk and pixels of a side where a configuration does not name them."""
REQUIRED = {"attention_mode": "cross_attn", "add_image_special_tokens": False}
"""Fields with their only supported value, which is also that of absent fields."""


def load(weights: str, folder: Path, kind: str, key: str | None) -> Published:
    """Load a SmolVLA from its `folder`; `key` is that of `statistics.read`.

    Raises:
        UserError: on one line, for files that are missing, damaged or of another model.
    """
    option = f"policy.weights={weights}"
    check_files(option, folder, kind)
    with reading(f"{option}: cannot read {CONFIG} as that of a {kind}"):
        fields = loads((folder / CONFIG).read_text(encoding="utf-8"))
        if (got := fields.get("type")) != kind:
            raise ValueError(f"it is of type {got}")
        check_required(fields, REQUIRED)
    vlm = vlm_of(folder, fields)
    with reading(f"{option}: cannot read the configuration of vlm_model_name={vlm}; name its folder in {CONFIG}"):
        backbone = _backbone(vlm)
    with reading(f"{option}: cannot read {CONFIG} as that of a {kind}"):
        options = _settings(folder, fields, backbone)
    norm_statistics = statistics.read(folder, options.modes, key)
    tokenizer = load_tokenizer(option, folder, vlm, "SmolVLM2")
    with reading(f"{option}: cannot read the weights"):
        model = SmolVLAModel(Network(options.model))
    fill(model.native, option, folder, kind, own_name)
    return Published(model, tokenizer, options, norm_statistics, weights, adapters.fingerprint(model.native))


def own_name(name: str) -> str:
    """Our name of a tensor; torch.compile, with which LeRobot trained its first weights, has added a beginning."""
    return name.removeprefix("model.").removeprefix("_orig_mod.")


def vlm_of(folder: Path, fields: Mapping[str, Any]) -> str:
    """Folder of the vision-language model, if there is one of that name in `folder`, or else its name."""
    name = str(fields.get("vlm_model_name", VLM))
    return str(folder / name) if (folder / name).is_dir() else name


def _backbone(vlm: str) -> Any:  # noqa: ANN401 - of transformers
    from transformers import AutoConfig, SmolVLMConfig

    config = AutoConfig.from_pretrained(vlm, trust_remote_code=False)
    if not isinstance(config, SmolVLMConfig):
        raise ValueError(f"it is of type {config.model_type}, and not smolvlm")
    return config


def _settings(folder: Path, fields: Mapping[str, Any], backbone: Any) -> Settings:  # noqa: ANN401 - of transformers
    layers = int(fields.get("num_vlm_layers", LAYERS))
    available = backbone.text_config.num_hidden_layers
    layers = min(layers, available) if layers > 0 else available
    experts = fields.get("num_expert_layers", -1)
    if experts > 0 and experts != layers:
        raise ValueError(f"num_expert_layers is {experts}, and only as many as the {layers} layers are supported")
    architecture = Architecture(
        backbone,
        layers,
        _side(fields, backbone),
        int(fields.get("chunk_size", CHUNK)),
        int(fields.get("max_state_dim", 32)),
        int(fields.get("max_action_dim", 32)),
        int(fields.get("self_attn_every_n_layers", SELF_ATTENTION_EVERY)),
        float(fields.get("expert_width_multiplier", WIDTH_MULTIPLIER)),
        (float(fields.get("min_period", PERIODS[0])), float(fields.get("max_period", PERIODS[1]))),
    )
    return Settings(
        architecture,
        [name.removeprefix("observation.images.") for name in pictures(fields)],
        int(fields.get("num_steps", STEPS)),
        modes(folder, fields, "smolvla"),
        states_in_prompt=False,
        antialias=False,
        longest=int(fields.get("tokenizer_max_length", LONGEST)),
    )


def _side(fields: Mapping[str, Any], backbone: Any) -> int:  # noqa: ANN401 - of transformers
    """Pixels of a side of the pictures that the vision tower reads."""
    size = fields.get("resize_imgs_with_padding", [SIDE, SIDE])
    token = backbone.vision_config.patch_size * backbone.scale_factor
    if not size or size[0] != size[1] or size[0] % token:
        raise ValueError(f"resize_imgs_with_padding is {size}, expected a square whose sides are multiples of {token}")
    return int(size[0])
