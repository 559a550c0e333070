"""Published weights of GR00T N1.5, in NVIDIA's layout or LeRobot's: sizes, tensors, tokenizer and statistics.

NVIDIA's config.json (`gr00t_n1_5`) has the sizes of the action head. LeRobot's (`groot`) names its folder as
`base_model_path`, and that of Eagle's configuration, tokenizer and chat template as `tokenizer_assets_repo`, which
NVIDIA's weights need, too. Each is a folder, also within the policy's, or a name on the hub. Their weights are not
read, and no code is run but the chat template, by transformers' sandbox. A field that changes the computation is
read, or raises an error unless its value is supported. LeRobot's statistics are read; NVIDIA's, which are of parts of
states and actions by name, are not. All was tested with small models; no published weights have been loaded yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla import adapters
from policies.vla.checkpoints import statistics
from policies.vla.checkpoints.settings import CONFIG, Settings, check_required, pictures, processor_steps
from policies.vla.checkpoints.statistics import Mode
from policies.vla.checkpoints.weights import Published, check_files, fill, folder_of, load_tokenizer, reading
from policies.vla.groot.head import Head
from policies.vla.groot.model import Architecture, GrootModel, Network

RAW = "gr00t_n1_5"
"""Type of model in NVIDIA's configuration."""
BASE = "nvidia/GR00T-N1.5-3B"
EAGLE = "lerobot/eagle2hg-processor-groot-n1p5"
"""Names of the base and of Eagle's files where a configuration does not name them."""
TEMPLATE = "chat_template.json"
PACKING = "groot_pack_inputs_v3"
"""Step of LeRobot's processor that normalises, pads and names the embodiment."""
EMBODIMENT = "new_embodiment"
EMBODIMENTS = {
    "new_embodiment": 31,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "gr1": 24,
    "so100": 2,
    "unitree_g1": 3,
}
"""Numbers of the embodiments by LeRobot's names."""
HEAD = {
    "add_pos_embed": True,
    "use_vlln": True,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
    "noise_s": 0.999,
    "expand_batch": None,
}
TRANSFORMER = {
    "positional_embeddings": None,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_eps": 1e-5,
}
DIFFUSION = {
    **TRANSFORMER,
    "interleave_self_attention": True,
    "norm_type": "ada_norm",
    "norm_elementwise_affine": False,
}
BACKBONE = {"project_to_dim": None, "reproject_vision": False}
VISION_LANGUAGE = {
    "select_layer": -1,
    "use_pixel_shuffle": False,
    "mlp_connector_layers": 1,
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
}
LANGUAGE = {"tie_word_embeddings": True}
PACKED = {"formalize_language": False, "state_horizon": 1}
"""Fields of each part with their only supported value."""
OTHER_DEFAULTS = {
    "positional_embeddings": "sinusoidal",
    "interleave_self_attention": False,
    "project_to_dim": 1536,
    "select_layer": -4,
    "use_pixel_shuffle": True,
    "mlp_connector_layers": 2,
    "tie_word_embeddings": False,
}
"""Values of absent fields, where these are not the supported ones."""
SHORTENED = "eagle_model.vision_model."
"""Beginning of our names of SigLIP's tensors, whose published names have one more `vision_model`."""


def load(weights: str, folder: Path, kind: str, key: str | None) -> Published:
    """Load a GR00T from its `folder`; `key` is that of `statistics.read`.

    Raises:
        UserError: on one line, for files that are missing, damaged or of another model.
    """
    option = f"policy.weights={weights}"
    check_files(option, folder, kind)
    with reading(f"{option}: cannot read {CONFIG} as that of a {kind}"):
        fields = loads((folder / CONFIG).read_text(encoding="utf-8"))
        if fields.get("type", fields.get("model_type")) not in (kind, RAW):
            raise ValueError(f"it is of type {fields.get('type', fields.get('model_type'))}")
        packing = dict(processor_steps(folder)).get(PACKING, {})
        check_required(packing, PACKED)
    base, eagle = base_of(weights, folder, fields), eagle_of(folder, fields)
    with reading(f"{option}: cannot read the configuration of base_model_path={base}; name its folder in {CONFIG}"):
        sizes = loads((texts_of(base) / CONFIG).read_text(encoding="utf-8"))
        layers = _checked(sizes["backbone_cfg"], BACKBONE)["select_layer"]
        head = _head(sizes["action_head_cfg"])
    advice = f"name its folder as tokenizer_assets_repo in {CONFIG}"
    with reading(f"{option}: cannot read the configuration of Eagle in {eagle}; {advice}"):
        eagle_folder = texts_of(eagle)
        vision_language = loads((eagle_folder / CONFIG).read_text(encoding="utf-8"))
        embodiment = _embodiment(fields, packing, head)
        architecture = _architecture(vision_language, layers, head, embodiment)
    mode = Mode.MIN_MAX if packing.get("normalize_min_max", True) else Mode.IDENTITY
    options = Settings(
        architecture,
        sorted(name.removeprefix("observation.images.") for name in pictures(fields)),  # as LeRobot reads them
        int(sizes["action_head_cfg"]["num_inference_timesteps"]),
        (mode, mode),
        states_in_prompt=False,
    )
    norm_statistics = statistics.read(folder, options.modes, key)
    tokenizer = load_tokenizer(option, folder, str(eagle_folder), "Eagle")
    with reading(f"{option}: cannot read {TEMPLATE} in {eagle}"):
        tokenizer.chat_template = _template(eagle_folder) or tokenizer.chat_template
    if not tokenizer.chat_template:
        raise UserError(f"{option}: there is no {TEMPLATE} in {eagle}; {advice}")
    with reading(f"{option}: cannot read the weights"):
        model = GrootModel(Network(architecture))
    fill(model.native, option, folder, kind, own_name)
    return Published(model, tokenizer, options, norm_statistics, weights, adapters.fingerprint(model.native))


def own_name(name: str) -> str:
    """Our name of a tensor of NVIDIA's or LeRobot's, which stores the embedding as the vocabulary's head, its equal."""
    name = name.removeprefix("_groot_model.").replace(f"{SHORTENED}vision_model.", SHORTENED)
    return name.replace("language_model.lm_head.", "language_model.model.embed_tokens.")


def published_name(name: str) -> str:
    """LeRobot's name of one of our tensors."""
    return f"_groot_model.{name.replace(SHORTENED, f'{SHORTENED}vision_model.')}"


def base_of(weights: str, folder: Path, fields: Mapping[str, Any]) -> str:
    """Folder or name on the hub of NVIDIA's configuration; NVIDIA's own `weights` are their own."""
    return weights if fields.get("model_type") == RAW else _within(folder, str(fields.get("base_model_path", BASE)))


def eagle_of(folder: Path, fields: Mapping[str, Any]) -> str:
    """Folder or name on the hub of Eagle's configuration and tokenizer."""
    return _within(folder, str(fields.get("tokenizer_assets_repo", EAGLE)))


def texts_of(name: str) -> Path:
    """Folder of that name, or a download of the texts of that name on the hub; OSError if there is none."""
    try:
        return folder_of(name, RAW, tensors=False)
    except UserError as error:
        raise OSError(str(error.__cause__ or error)) from error


def _within(folder: Path, name: str) -> str:
    return str(folder / name) if (folder / name).is_dir() else name


def _template(eagle: Path) -> str | None:
    path = eagle / TEMPLATE
    return loads(path.read_text(encoding="utf-8"))["chat_template"] if path.exists() else None


def _embodiment(fields: Mapping[str, Any], packing: Mapping[str, Any], head: Head) -> int:
    """Number of the embodiment that the weights were trained for."""
    tag = packing.get("embodiment_tag", fields.get("embodiment_tag", EMBODIMENT))
    number = packing.get("embodiment_mapping", EMBODIMENTS).get(tag, 0)
    if not 0 <= number < head.embodiments:
        raise ValueError(f"the embodiment {tag} is number {number} of {head.embodiments}")
    return number


def _checked(fields: Mapping[str, Any], required: Mapping[str, Any]) -> Mapping[str, Any]:
    check_required({name: OTHER_DEFAULTS[name] for name in required if name in OTHER_DEFAULTS} | dict(fields), required)
    return fields


def _head(fields: Mapping[str, Any]) -> Head:
    options = _checked(fields, HEAD)
    diffusion = _checked(options["diffusion_model_cfg"], DIFFUSION)
    context = _checked(options["vl_self_attention_cfg"], TRANSFORMER)
    head = Head(
        width=diffusion["num_attention_heads"] * diffusion["attention_head_dim"],
        heads=diffusion["num_attention_heads"],
        layers=diffusion["num_layers"],
        hidden=options["hidden_size"],
        context=options["backbone_embedding_dim"],
        context_heads=context["num_attention_heads"],
        context_layers=context["num_layers"],
        state=options["max_state_dim"],
        action=options["action_dim"],
        embodiments=options.get("max_num_embodiments", 32),
        future=options.get("num_target_vision_tokens", 32),
        chunk_size=options["action_horizon"],
        longest=options.get("max_seq_len", 1024),
        buckets=options.get("num_timestep_buckets", 1000),
    )
    pairs = {
        "input_embedding_dim": (options["input_embedding_dim"], head.width),
        "output_dim": (diffusion["output_dim"], head.hidden),
        "cross_attention_dim": (diffusion["cross_attention_dim"], head.context),
        "attention_head_dim": (context["attention_head_dim"] * context["num_attention_heads"], head.context),
    }
    for name, (value, expected) in pairs.items():
        if value != expected:
            raise ValueError(f"{name} makes a width of {value}, expected {expected}")
    return head


def _architecture(fields: Mapping[str, Any], layers: int, head: Head, embodiment: int) -> Architecture:
    """Architecture with the first `layers` of Eagle's language model."""
    from transformers import Qwen3Config, SiglipVisionConfig

    _checked(fields, VISION_LANGUAGE)
    if (name := fields["text_config"]["architectures"][0]) != "Qwen3ForCausalLM":
        raise ValueError(f"the language model is {name}, and only Qwen3ForCausalLM is supported")
    language = _checked(fields["text_config"], LANGUAGE)
    text = Qwen3Config.from_dict({**language, "num_hidden_layers": layers, "layer_types": None})
    vision = SiglipVisionConfig.from_dict({**fields["vision_config"], "vision_use_head": False})
    if text.hidden_size != head.context:
        raise ValueError(f"its hidden_size is {text.hidden_size}, and the action head reads {head.context}")
    return Architecture(text, vision, int(fields["image_token_index"]), head, embodiment)
