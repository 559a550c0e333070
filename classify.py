"""Train a classifier of success from recorded frames: python classify.py demonstrations=DIR [key=value ...].

DIR is any data set that train.py reads, with successful and failed episodes. The classifier replaces a reward that
nobody measures: train.py ... success_classifier=DIR. A policy exploits what is a success by mistake; its own failures
continue the training: classify.py classifier=DIR negatives=RECORDINGS. task.* and demonstration_* are as in train.py.
"""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from embodied import seeding
from embodied.command_line import program
from embodied.command_line.config import compose, parsed
from embodied.command_line.train_options import GROUPS, TrainConfig
from embodied.commands import command
from embodied.configuration import Fraction, PositiveInt, Range, Seed
from embodied.contract import Contract
from embodied.data.success_frames import (
    TEST,
    TRAIN,
    VALIDATION,
    Frames,
    LabelConfig,
    check_parts,
    counts,
    labelled_frames,
    split,
)
from embodied.errors import UserError
from embodied.evaluation.detection import Detection, choose_threshold, sustained
from embodied.report import success_classifier as report
from embodied.saving.files import complete_or_absent_folder
from embodied.saving.versions import git_commit, versions
from embodied.task import Task
from embodied.training.compute import prepare
from embodied.training.run_directory import new_directory
from policies.success_classifier import FitConfig, NetworkConfig, SuccessClassifier, fit, readable
from real_robot.recording.demonstrations import DemonstrationOptions, demonstrations, sources
from real_robot.recording.recorded_task import join

log = logging.getLogger("embodied")


@dataclass
class ClassifyConfig(NetworkConfig, FitConfig, LabelConfig, DemonstrationOptions):
    """Options of the program.

    The classifier reads the `observations` by name; null: all pictures, or all measurements if there are none. A
    success is `frames` consecutive ones with a probability of the `threshold`; null: the smallest of at least 0.5 by
    which at most a share `false_positives` of the validation episodes ends wrongly. `classifier` continues the training
    of an earlier one, with its options and data, and `negatives` adds data sets of which the episodes that a person
    marked as failures are used. `seed` determines all random numbers. PyTorch uses `threads` cores and the `device`.
    `output` is the classifier's folder; null: outputs/classifiers/<time>.
    """

    observations: list[str] | None = None
    frames: PositiveInt = 1
    threshold: Annotated[float, Range(above=0, below=1)] | None = None
    false_positives: Fraction = 0.0
    classifier: str | None = None
    negatives: Any = None
    seed: Seed = 0
    device: str = "cpu"
    threads: PositiveInt | None = None
    output: str | None = None


def run(arguments: list[str]) -> None:
    """Train the classifier, choose its threshold, and write it with its report."""
    (config, task), record = composed(arguments)
    prepare(config.device, config.threads)
    seeding.seed_everything(config.seed)
    classifier = begun(config, task)
    output = Path(config.output or new_directory("classifiers", f"_seed{config.seed}"))
    with complete_or_absent_folder(output) as folder:
        frames, part, notes = labelled_data(config, task, classifier.contract, folder)
        train, validation, test = (frames.of_part(part, number) for number in (TRAIN, VALIDATION, TEST))
        fit(classifier, frames, train, config, seeding.generator(config.seed, "batches"))
        score = classifier.scores(frames)
        classifier.threshold = config.threshold or chosen_threshold(config, frames, score, validation)
        typed = shlex.join(record["arguments"])
        results = {"threshold": classifier.threshold, "frames": config.frames, "parts": counts(frames, part)}
        results |= {"observations": [*classifier.contract.observation], "notes": notes, "seed": config.seed}
        results |= {"command": f"{command('classify')} {typed}", "git_commit": git_commit(), "versions": versions()}
        detection = Detection.of(*labels(frames, score, test), frames.success, classifier.threshold, config.frames)
        results["held_out"] = detection.summary()
        drawn = frames, score, test, classifier.threshold
        report.plot_scores(folder / report.SCORES, *drawn, classifier.contract.control_dt_s)
        report.write(folder, results, report.worst_errors(*drawn, classifier.contract))
        classifier.save(folder, record)
    log.info(f"{report.headline(results)}\nwrote {output}: look at {output / 'report.html'}")
    log.info(f"Next: {command('train')} task=NAME success_classifier={shlex.quote(str(output))}")


def begun(config: ClassifyConfig, task: Task) -> SuccessClassifier:
    """Untrained classifier, or that of an earlier training.

    Raises:
        UserError: for options of another network than that of the earlier training.
    """
    network = NetworkConfig(config.vision, config.width)
    if config.classifier is None:
        contract = readable(task.contract(task.distributions[0]), config.observations)
        return SuccessClassifier.build(contract, network, config.frames).to(config.device)
    classifier = SuccessClassifier.load(config.classifier)
    names = [*classifier.contract.observation]
    if network != classifier.network.config or config.observations not in (None, names):
        raise UserError(f"classifier={config.classifier} has its own vision, width and observations: leave them out")
    classifier.frames = config.frames
    return classifier.to(config.device)


def labelled_data(
    config: ClassifyConfig, task: Task, contract: Contract, folder: Path
) -> tuple[Frames, Tensor, list[str]]:
    """Frames of all data sets with labels, the part of each episode, and notes; their indices go into `folder`."""
    paths = {path: False for path in sources(config.demonstrations, None) or ()}
    paths |= {path: True for path in sources(config.negatives, None, "negatives") or ()}
    labelled, parts, notes = [], [], []
    for number, (path, failed_only) in enumerate(paths.items()):
        own_folder = folder / f"data_{number}"
        episodes = demonstrations(path, contract, own_folder, task, options=config.matching, imitated=False)
        frames, own_notes = labelled_frames(episodes, config, path, failed_only=failed_only)
        # each data set is split by its own draw, which further data sets do not change
        parts.append(split(frames.success, config, seeding.generator(config.seed, "split", number)))
        labelled.append(frames)
        notes += own_notes
    frames, part = Frames.join(labelled), torch.cat(parts)
    check_parts(frames, part)
    if not bool((frames.success == 0).any()):
        notes.append("No episode failed: what the classifier answers to a failure is unknown. Record some.")
    for note in notes:
        log.warning(note)
    return frames, part, notes


def labels(frames: Frames, score: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and episodes of the frames `index`."""
    return score[index], frames.label[index], frames.episode[index]


def chosen_threshold(config: ClassifyConfig, frames: Frames, score: Tensor, index: Tensor) -> float:
    """Threshold for the validation frames `index`."""
    own, label, episode = labels(frames, score, index)
    return choose_threshold(sustained(own, episode, config.frames), label, episode, config.false_positives)


def composed(arguments: list[str]) -> tuple[tuple[ClassifyConfig, Task], dict[str, Any]]:
    """The options, the task of train.py from which the contract is derived, and the record of both."""
    is_task = lambda each: each.startswith(("task=", "task."))  # noqa: E731
    own = [each for each in arguments if not is_task(each)]
    folder = parsed([each for each in own if each.startswith("classifier=")]).get("classifier")
    saved = dict(SuccessClassifier.record(str(folder))) if folder else None
    if saved:
        before = sources(saved["values"]["negatives"], None, "negatives") or []
        saved["values"] = saved["values"] | {"output": None, "negatives": None}
    config, record = compose(ClassifyConfig, "classify", own, {}, saved)
    if saved:
        config.negatives = [*before, *(sources(config.negatives, None, "negatives") or [])] or None
        record["values"]["negatives"] = config.negatives
    every = [*(saved["arguments"] if saved else ()), *arguments]
    # of an option that was typed twice the last value
    options = {each.partition("=")[0]: each for each in every if is_task(each) or each.startswith("demonstration")}
    trained, train_record = compose(TrainConfig, "train", [*({"task": "task=dataset"} | options).values()], GROUPS)
    join(trained)
    record |= {"arguments": every, "task": train_record["values"]["task"]}
    return (config, trained.task), record


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ClassifyConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed))
