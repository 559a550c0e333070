"""Text of train.py --help: the ten options that people set first, and the meanings of the task's distributions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from embodied.command_line import combinations, listing
from embodied.command_line.program import aligned, listed
from embodied.commands import command
from embodied.task import Task, evaluation_distributions

COUNT = 10
DEMONSTRATIONS = "demonstrations"
FIRST = {
    "policy": "Network that is trained{policies}.",
    "algorithm": "Algorithm of reinforcement learning{algorithms}.",
    "task.id": "Id of the environment in its library.",
    "task.env_name": "Name of the environment in robosuite.",
    "task.mdp": "Name of a shipped task, or the Python file of your own.",
    "task.tasks": "Names or numbers of the tasks that one policy learns; [] for the whole suite.",
    "task.airframe": "Quadrotor that flies.",
    "task.map": "Whether the policy observes a map that it builds as it drives.",
    DEMONSTRATIONS: "Data to imitate in place of the task's own: a LeRobot dataset's folder, or files of recordings.",
    "env_steps": "Control steps of reinforcement learning, in all environments together.",
    "num_envs": "Environments that are simulated at the same time.",
    "seed": "Seed of all random numbers; runs of several seeds show how much a result varies.",
    "device": "Device of the policy and the learner: cpu, cuda or cuda:NUMBER.",
    "output": "Folder of the new run; null: outputs/TASK/TIME_seedSEED.",
    "resume": "Folder of a run to continue, after an interruption or with a larger env_steps.",
    "evaluation_starts": "Initial states of each task and distribution on which the policy is evaluated.",
    "threads": "Cores that PyTorch uses; null: all, at most four.",
}
"""Options by their importance, with a sentence each; a task lacks some."""
RECORDED = {
    "policy": FIRST["policy"],
    DEMONSTRATIONS: "Recorded episodes: a folder, a file of recordings, or the name of a data set on the hub.",
    "demonstration_units": "Units that the data set does not state, UNIT or {{NAME:UNIT}}; asked for once.",
    "sft.steps": "Gradient steps of supervised training.",
    "task.image_size": "Largest side of the pictures that the policy sees, pixels.",
    **{name: FIRST[name] for name in ("seed", "device", "output")},
    "resume": "Folder of a run to continue, after an interruption.",
    "threads": FIRST["threads"],
}
"""The same of tasks without a simulator."""


def summary(text: str, arguments: list[str], choices: Mapping[str, str], config: Any) -> str:  # noqa: ANN401 - TrainConfig
    """Summarise the options of the composed `config` with its `choices`, after the `text` of the program."""
    task: Task = config.task
    name = choices["task"]
    policy = choices["policy"]
    values = {option.partition("=")[0]: option for option, _ in listed(OmegaConf.structured(config))}
    values |= {group: f"{group}={choices[group]}" for group in ("policy", "algorithm")}
    imitates = type(task).demonstrations is not Task.demonstrations
    pairs = combinations.valid_pairs(name)
    alternatives = {
        "policies": _alternatives({each for each, _ in pairs} - {policy}, ""),
        "algorithms": _alternatives({each for key, each in pairs if key == policy} - {choices["algorithm"]}, policy),
    }
    simulated = task.held_out_share is None
    sentences = FIRST if simulated else RECORDED
    imitates |= not simulated
    first = [option for option in sentences if option in values and (imitates or option != DEMONSTRATIONS)][:COUNT]
    parts = [text]
    if not any(each.startswith("task=") for each in arguments):
        parts.append(f"Tasks: {', '.join(listing.names('task', {}))}.")
    parts.append(f"task={name}: {listing.described(name)}.")
    parts.append(aligned((values[option], sentences[option].format(**alternatives)) for option in first))
    distributions = [(each, task.meanings.get(each, "")) for each in evaluation_distributions(task)]
    if simulated:
        parts.append(f"Distributions of {name}; training uses the first, evaluation all:\n{aligned(distributions)}")
    others = len(values) - len(first)
    parts.append(
        f"{command('train')} --help=all {' '.join(arguments) or f'task={name}'} lists the other {others} options."
    )
    return "\n\n".join(parts) + "\n"


def _alternatives(names: set[str], policy: str) -> str:
    """Suffix of a sentence: what can be chosen instead, for the `policy` if it depends on one."""
    among = f" with policy={policy}" if policy else ""
    return f"; or{among}: {', '.join(sorted(names))}" if names else ""
