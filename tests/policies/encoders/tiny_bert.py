"""A tiny random sentence encoder in the layout of all-MiniLM-L6-v2's files, made without any download."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = "pick up the milk and place it in basket soup put please cream cheese take"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]


def write(folder: Path, seed: int = 0, width: int = 384) -> str:
    """Write config.json, model.safetensors and the tokenizer's files to `folder`; returns its path."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=width,
            num_hidden_layers=1,
            num_attention_heads=12,
            intermediate_size=32,
            max_position_embeddings=64,
            initializer_range=0.5,
        )
        BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)
    return str(folder)
