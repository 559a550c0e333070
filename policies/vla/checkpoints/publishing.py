"""Publishes a trained pi0 as a folder for transformers or peft, and `policy.weights`; with a model card for the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.vla import adapters
from policies.vla.inputs import Tokenizer
from policies.vla.pi0 import Pi0Policy
from policies.vla.pi0_fast.policy import Pi0FastPolicy
from policies.vla.pi05 import Pi05Policy

CONTRACT = "contract.json"
CARD = "README.md"
STATISTICS = "processor_config.json"
VLA = Pi0Policy | Pi0FastPolicy
"""Policies that begin with published weights: pi0 with its kin (pi0.5, SmolVLA, GR00T), and pi0-FAST."""


def publish(policy: TrainablePolicy, folder: Path, run: Path, *, peft: bool) -> None:
    """Write weights, statistics, tokenizer, contract and model card into `folder`, which must not exist.

    With `peft` the weights are adapters, which refer to their base; otherwise adapters are merged into the weights of
    `policy`, which has none afterwards. The card ends with the report of the directory `run`, if there is one.

    Raises:
        UserError: for a folder that exists, a policy that is no pi0, and with `peft` for one without adapters.
    """
    if not isinstance(policy, Pi0Policy):
        target = "peft" if peft else "transformers"
        raise UserError(f"target={target} is for policy=pi0, got {type(policy).__name__}; use target=hub")
    check_publishable(policy, folder)
    native = policy.model.native
    if peft and not adapters.rank_of(native):
        raise UserError("target=peft writes adapters, which this policy has none of; use target=transformers")
    if not peft and policy.has_relative:
        raise UserError("transformers' format has no actions relative to the state; use target=lerobot, or serve.py")
    if not peft and policy.kind != "pi0":
        name = {"pi05": "pi0.5", "smolvla": "SmolVLA", "groot": "GR00T"}[policy.kind]
        raise UserError(f"transformers has no {name}; use target=lerobot, or serve the checkpoint")
    folder.mkdir(parents=True)
    if peft:
        adapters.write(native, folder, str(policy.weights_of), policy.base)
    else:
        merge_adapters(policy)
        native.config.chunk_size = policy.contract.horizon
        native.save_pretrained(folder)
        if isinstance(policy.inputs.tokenizer, Tokenizer):
            policy.inputs.tokenizer.tokenizer.save_pretrained(folder)
    (folder / STATISTICS).write_text(json.dumps(_statistics(policy), indent=2) + "\n", encoding="utf-8")
    write_description(policy, folder, run, "peft" if peft else "transformers")


def check_publishable(policy: VLA, folder: Path) -> None:
    """Raise UserError for a policy of more than the published model, and for a `folder` that exists."""
    if isinstance(policy, Pi0Policy) and policy.steers:
        raise UserError("published weights have no small actor; use algorithm=self_imitation to distil it, or serve.py")
    if isinstance(policy, Pi0Policy) and policy.is_guided:
        raise UserError("published weights do not name the label of their prompt (offline=recap); use serve.py")
    if delay := policy.contract.delay:
        raise UserError(f"published weights cannot say that chunks begin {delay} steps late (delay); use target=hub")
    check_new(folder)


def check_unpadded(policy: Pi05Policy | Pi0FastPolicy) -> None:
    """Raise UserError for a policy whose prompts have a padded state, as those of LeRobot 0.4 have."""
    size, padded = policy.inputs.state_size, policy.inputs.padded
    if padded > size:
        raise UserError(
            f"LeRobot no longer pads the state in prompts, nor does openpi, and these weights have learned {padded}"
            f" elements for {size}: train with max_state_dim={size} in config.json of policy.weights, or use target=hub"
        )


def check_new(folder: Path) -> None:
    """Raise UserError for a `folder` that exists."""
    if folder.exists():
        raise UserError(f"{folder} exists; choose another output")


def merge_adapters(policy: VLA) -> None:
    """Merge adapters, if there are any, into the weights of `policy`, which are float32 afterwards."""
    policy.model.float()  # frozen weights may be in lower precision, in which the adapters' changes would be lost
    if adapters.rank_of(policy.model.native):
        adapters.merge(policy.model)


class Described(Protocol):
    """Policy of a `kind`, that of policy=..., which began with the published weights `weights_of`, if any."""

    contract: Contract
    kind: str
    weights_of: str | None


def write_description(policy: Described, folder: Path, run: Path, library: str, usage: Sequence[str] = ()) -> None:
    """Write the contract and the model card of `card`, with the report of the directory `run`, into `folder`."""
    (folder / CONTRACT).write_text(policy.contract.to_json() + "\n", encoding="utf-8")
    report = run / "report.md"
    text = report.read_text(encoding="utf-8") if report.exists() else ""
    (folder / CARD).write_text(card(policy, library, text, usage), encoding="utf-8")


def card(policy: Described, library: str, report: str, usage: Sequence[str] = ()) -> str:
    """Model card in Markdown for a folder that `library` reads; pictures of the `report` are left out.

    Lines of `usage` say how the library reads it.
    """
    from huggingface_hub import ModelCardData

    peft = library == "peft"
    words = any(spec.is_text for spec in policy.contract.observation.values())
    data = ModelCardData(
        base_model=policy.weights_of,
        library_name=library,
        pipeline_tag="robotics",
        tags=[policy.kind, *(["vision-language-action"] if words else []), *(["lora"] if peft else [])],
    )
    contract = policy.contract
    specs = [*contract.observation.items(), ("action", contract.action)]
    rows = [f"| {name} | {spec.dtype} {list(spec.shape)} | {spec.unit or ''} |" for name, spec in specs]
    report_lines = [line for line in report.splitlines() if not line.startswith("![")] or ["Nothing was measured."]
    lines = [
        "---",
        data.to_yaml(),
        "---",
        "",
        f"# {policy.kind}: " + ("adapters" if peft else "weights"),
        "",
        f"`python train.py policy={policy.kind} policy.weights=FOLDER` continues from this folder, or its name on the"
        " hub" + ("; with `policy.lora_rank` it trains the adapters on." if peft else "."),
        "",
        f"Chunks of {contract.horizon} actions, of which {contract.executed} are executed, {contract.control_dt_s:g} s"
        " each. `contract.json` has the names of the elements and their limits.",
        *(["", *usage] if usage else []),
        "",
        "| observed, and action | type | unit |",
        "|---|---|---|",
        *rows,
        "",
        *report_lines,
    ]
    return "\n".join(lines) + "\n"


def _statistics(policy: Pi0Policy) -> dict[str, list[float]]:
    """Mean and deviation of state and actions, by transformers' names."""
    size = policy.inputs.state_size
    state = policy.inputs.state
    return {
        "state_mean": state.mean[:size].tolist(),
        "state_std": state.std[:size].tolist(),
        "actions_mean": policy.action_mean.tolist(),
        "actions_std": policy.action_std.tolist(),
    }
