"""Checkpoints as LeRobot publishes them: files with its names of tensors, fields and statistics, and random numbers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PICTURE = (40, 72)
STATE, ENVIRONMENT, ACTIONS, CHUNK = 5, 3, 4, 6
WIDTH, HEADS, FEED, LATENT = 16, 2, 24, 3
CAMERAS = ("observation.images.wrist", "observation.images.top")
MODES = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ENV": "MEAN_STD", "ACTION": "MEAN_STD"}
NAMES = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features() -> dict[str, dict[str, Any]]:
    """Features by LeRobot's names."""
    entries = {camera: {"type": "VISUAL", "shape": [3, *PICTURE]} for camera in CAMERAS}
    entries["observation.state"] = {"type": "STATE", "shape": [STATE]}
    entries["observation.environment_state"] = {"type": "ENV", "shape": [ENVIRONMENT]}
    return entries | {"action": {"type": "ACTION", "shape": [ACTIONS]}}


def statistics() -> dict[str, Tensor]:
    """Statistics of all features, with a constant element of the state and of the action."""
    tensors, noise = {}, generator(7)
    for name, feature in features().items():
        shape = (3, 1, 1) if feature["type"] == "VISUAL" else feature["shape"]
        low = torch.rand(*shape, generator=noise) - 1.0
        high = low + 1.0 + torch.rand(*shape, generator=noise)
        if name == "observation.state":
            high[2] = low[2]
        std = 0.2 + torch.rand(*shape, generator=noise)
        if name == "action":
            std[1] = 0.0
        values = {"min": low, "max": high, "mean": (low + high) / 2, "std": std, "q01": low + 0.1, "q99": high - 0.1}
        tensors |= {f"{name}.{statistic}": value for statistic, value in values.items()}
    return tensors


class Tensors(dict[str, Tensor]):
    """Tensors by name, drawn as they are added."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix, self.noise = prefix, generator()

    def add(self, name: str, *shape: int, scale: float = 0.3, centre: float = 0.0) -> None:
        self[self.prefix + name] = centre + scale * torch.randn(*shape, generator=self.noise)

    def dense(self, name: str, outputs: int, *inputs: int) -> None:
        self.add(f"{name}.weight", outputs, *inputs)
        self.add(f"{name}.bias", outputs)

    def batch_norm(self, name: str, channels: int) -> None:
        self.add(f"{name}.weight", channels, centre=1.0, scale=0.1)
        self.add(f"{name}.bias", channels, scale=0.1)
        self.add(f"{name}.running_mean", channels, scale=0.1)
        self[f"{self.prefix}{name}.running_var"] = 0.5 + torch.rand(channels, generator=self.noise)

    def resnet18(self, name: str) -> None:
        def convolution(part: str, norm: str, outputs: int, inputs: int, kernel: int) -> None:
            self.add(
                f"{name}.{part}.weight", outputs, inputs, kernel, kernel, scale=(2.0 / (outputs * kernel**2)) ** 0.5
            )
            self.batch_norm(f"{name}.{norm}", outputs)

        convolution("conv1", "bn1", 64, 3, 7)
        before = 64
        for layer, width in enumerate((64, 128, 256, 512), 1):
            for block in range(2):
                at, inputs = f"layer{layer}.{block}", before if block == 0 else width
                convolution(f"{at}.conv1", f"{at}.bn1", width, inputs, 3)
                convolution(f"{at}.conv2", f"{at}.bn2", width, width, 3)
                if layer > 1 and block == 0:
                    convolution(f"{at}.downsample.0", f"{at}.downsample.1", width, inputs, 1)
            before = width

    def attention(self, name: str) -> None:
        self.add(f"{name}.in_proj_weight", 3 * WIDTH, WIDTH)
        self.add(f"{name}.in_proj_bias", 3 * WIDTH)
        self.dense(f"{name}.out_proj", WIDTH, WIDTH)

    def layer(self, name: str, *, decoder: bool) -> None:
        self.attention(f"{name}.self_attn")
        if decoder:
            self.attention(f"{name}.multihead_attn")
        self.dense(f"{name}.linear1", FEED, WIDTH)
        self.dense(f"{name}.linear2", WIDTH, FEED)
        for norm in range(1, 4 if decoder else 3):
            self.norm(f"{name}.norm{norm}")

    def norm(self, name: str) -> None:
        self.add(f"{name}.weight", WIDTH, centre=1.0, scale=0.1)
        self.add(f"{name}.bias", WIDTH, scale=0.1)


def act_tensors(*, pre_norm: bool = False) -> Tensors:
    """Weights of an ACT with two encoder layers and one decoder layer."""
    tensors = Tensors("model.")
    for part, depth in (("vae_encoder", 1), ("encoder", 2), ("decoder", 1)):
        for index in range(depth):
            tensors.layer(f"{part}.layers.{index}", decoder=part == "decoder")
        if part == "decoder" or pre_norm:
            tensors.norm(f"{part}.norm")
    tensors.add("vae_encoder_cls_embed.weight", 1, WIDTH)
    for name, size in (
        ("vae_encoder_robot_state", STATE),
        ("vae_encoder_action", ACTIONS),
        ("encoder_robot_state", STATE),
        ("encoder_env_state", ENVIRONMENT),
        ("encoder_latent", LATENT),
    ):
        tensors.dense(f"{name}_input_proj", WIDTH, size)
    tensors.dense("vae_encoder_latent_output_proj", 2 * LATENT, WIDTH)
    tensors["model.vae_encoder_pos_enc"] = sinusoids(torch.arange(CHUNK + 2).double())[None]
    tensors.resnet18("backbone")
    tensors.dense("encoder_img_feat_input_proj", WIDTH, 512, 1, 1)
    tensors.add("encoder_1d_feature_pos_embed.weight", 3, WIDTH)
    tensors.add("decoder_pos_embed.weight", CHUNK, WIDTH)
    tensors.dense("action_head", ACTIONS, WIDTH)
    return tensors


def sinusoids(places: Tensor, size: int = WIDTH) -> Tensor:
    """Table [L, size] of the paper on transformers, element by element."""
    table = torch.zeros(len(places), size, dtype=torch.float64)
    for row, place in enumerate(places):
        for column in range(size):
            angle = place / 10000 ** (2 * (column // 2) / size)
            table[row, column] = angle.cos() if column % 2 else angle.sin()
    return table.float()


def act_config(**changes: Any) -> dict[str, Any]:
    """config.json."""
    outputs = {"action": features()["action"]}
    inputs = {name: feature for name, feature in features().items() if name != "action"}
    return {
        "type": "act",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": dict.fromkeys(MODES, "IDENTITY"),  # a processor's come first
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "vision_backbone": "resnet18",
        "pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1",
        "replace_final_stride_with_dilation": False,
        "pre_norm": False,
        "dim_model": WIDTH,
        "n_heads": HEADS,
        "dim_feedforward": FEED,
        "feedforward_activation": "relu",
        "n_encoder_layers": 2,
        "n_decoder_layers": 1,
        "use_vae": True,
        "latent_dim": LATENT,
        "n_vae_encoder_layers": 1,
        "temporal_ensemble_coeff": None,
        "dropout": 0.1,
        "kl_weight": 10.0,
    } | changes


def save(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    modes: dict[str, str] = MODES,
    values: dict[str, Tensor] | None = None,
) -> Path:
    """Write a folder `pretrained_model`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    values = statistics() if values is None else values
    pre, post = (
        f"policy_{part}processor_step_{step}_{kind}_processor.safetensors"
        for part, step, kind in (("pre", 3, "normalizer"), ("post", 0, "unnormalizer"))
    )
    save_file({name: value for name, value in values.items() if not name.startswith("action.")}, folder / pre)
    save_file(values, folder / post)
    normalizer = {"eps": 1e-8, "features": features(), "norm_map": modes}
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
        {"registry_name": "normalizer_processor", "config": normalizer, "state_file": pre},
    ]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    last = {"registry_name": "unnormalizer_processor", "config": normalizer, "state_file": post}
    steps = [last, {"registry_name": "device_processor", "config": {"device": "cpu"}}]
    (folder / "policy_postprocessor.json").write_text(json.dumps({"name": "policy_postprocessor", "steps": steps}))
    return folder


def normalised(name: str, value: Tensor, modes: dict[str, str] = MODES) -> Tensor:
    """`value` [N, size] of the feature `name` as the network reads it; pictures [N, 3, height, width]."""
    mode = modes[features()[name]["type"]]
    if mode == "IDENTITY":
        return value
    first, second = (statistics()[f"{name}.{statistic}"] for statistic in NAMES[mode])
    if mode == "MEAN_STD":
        return (value - first) / (second + 1e-8)
    width = torch.where(second == first, 1e-8, second - first)
    return 2.0 * (value - first) / width - 1.0


def unnormalised(value: Tensor, modes: dict[str, str] = MODES) -> Tensor:
    """Normalised actions [N, H, A] in robot units."""
    mode = modes["ACTION"]
    first, second = (statistics()[f"action.{statistic}"] for statistic in NAMES[mode])
    return value * second + first if mode == "MEAN_STD" else (value + 1.0) / 2.0 * (second - first) + first
