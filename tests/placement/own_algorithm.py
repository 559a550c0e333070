"""Learners as documents print them, and a program that trains with A2C in this process of torchrun: FOLDER.

Every process writes its weights and its number of environment steps to the folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from embodied.placement.registry import TorchrunConfig
from embodied.training.loop import train
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach

DOCUMENTS = Path(__file__).parents[2] / "docs"


def documented(document: str = "own_algorithm") -> dict[str, Any]:
    """Names that the first program of a document defines before it trains, A2C and A2CConfig among them."""
    path = DOCUMENTS / f"{document}.md"
    program = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {"__name__": document}
    exec(compile(program.partition("\nenv = ")[0], str(path), "exec", dont_inherit=True), names)
    return names


def main(arguments: list[str]) -> None:
    """Train from other weights and in other environments than the other processes."""
    folder = Path(arguments[0])
    torch.set_num_threads(1)
    with TorchrunConfig().start("cpu") as world:
        env = Reach(4, seed=world.rank)
        torch.manual_seed(world.rank)
        policy = MLPConfig(hidden=[16]).build(env.contract)
        before = policy.actor[0].weight.detach().clone()
        *_, last = train(env, policy, documented()["A2CConfig"](), env_steps=1_000, world=world)
        found = {name: value.clone() for name, value in policy.state_dict().items()}
        counted = {"env_steps": torch.tensor(last.env_steps), "before": before, "position": env.position.clone()}
        save_file(found | counted, folder / f"{world.rank}.safetensors")
