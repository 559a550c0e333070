"""Published weights of pi0-FAST in LeRobot's layout (`pi0_fast`); openpi publishes its own for JAX alone.

All was tested with small models; no published weights have been loaded yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla.checkpoints import settings, statistics
from policies.vla.checkpoints.settings import CONFIG, UNPADDED, Settings
from policies.vla.checkpoints.weights import TOKENIZER, advice, check_files, fill, folder_of, load_tokenizer, reading
from policies.vla.pi05 import LONGEST as LONGEST_PROMPT

KIND = "pi0_fast"
LONGEST = 256
"""Number of tokens of an answer, with its beginning, where a configuration does not name it."""
SKIPPED = 128
"""Number of the vocabulary's last tokens that are not FAST's."""
STATE = 32
"""Number of elements of a state in the prompt, with padding, where a configuration does not name it."""
PREFIXES = ("paligemma_with_expert.paligemma.model.", "paligemma_with_expert.paligemma.")
EMBEDDING = "language_model.embed_tokens.weight"
"""Name of the embedding, to which the language model's head is tied."""


@dataclass
class Published:
    """PaliGemma `native`, its tokenizer, settings, and `statistics.STATISTICS` by name, if it has any.

    FAST's tokens are the vocabulary's last but `skipped`; the prompt has at least `state` elements of the state, with
    padding, and an answer at most `longest` tokens, with its beginning.
    """

    native: nn.Module
    tokenizer: Any
    settings: Settings
    statistics: dict[str, Tensor]
    skipped: int
    state: int
    longest: int


def published(weights: str, key: str | None = None) -> Published:
    """Load a model from a folder or a name on the hub; statistics are not read if `key` is "demonstrations".

    Raises:
        UserError: on one line, if there is none, it is of another kind or incomplete, or transformers is missing.
    """
    option = f"policy.weights={weights}"
    folder = folder_of(weights, KIND)
    check_files(option, folder, KIND)
    with reading(f"{option}: cannot read {CONFIG} as that of a {KIND}"):
        options = settings.read(folder, KIND, adaptive=None)
        fields = loads((folder / CONFIG).read_text(encoding="utf-8"))
        settings.check_required(fields, {"tokenizer_max_length": LONGEST_PROMPT})
        if options.relative:
            raise ValueError("its actions are relative to the state, which is not supported")
    tokenizer = load_tokenizer(option, folder, TOKENIZER, KIND)
    if tokenizer.bos_token_id is None:
        raise UserError(f"{option} has a tokenizer without a token for the beginning; {advice(KIND)}")
    from transformers import PaliGemmaModel

    native = PaliGemmaModel(options.model.vlm_config)
    fill(native, option, folder, KIND, own_name)
    return Published(
        native,
        tokenizer,
        options,
        statistics.read(Path(folder), options.modes, key),
        int(fields.get("fast_skip_tokens", SKIPPED)),
        0 if UNPADDED in fields else int(fields.get("max_state_dim", STATE)),
        int(fields.get("max_action_tokens", LONGEST)),
    )


def own_name(name: str) -> str:
    """Our name of a tensor of LeRobot's."""
    name = name.removeprefix("model.")
    for layer in ("vision_tower.vision_model.", "language_model.model."):  # of earlier releases of transformers
        name = name.replace(layer, layer.partition(".")[0] + ".")
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return EMBEDDING if name == "lm_head.weight" else name
