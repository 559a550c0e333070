"""Train a classifier of success from recorded frames: python classify.py demonstrations=DIR [key=value ...].

DIR is any data set that train.py reads, with successful and failed episodes. The classifier replaces a reward that
nobody measures: train.py ... success_classifier=DIR. A policy exploits what is a success by mistake; its own failures
continue the training: classify.py classifier=DIR negatives=RECORDINGS. And classify.py classifier=DIR label=LOGS
output=FOLDER writes logs with known rewards. task.* and demonstration_* are as in train.py.
"""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from embodied import start_up  # noqa: F401 - before PyTorch
from embodied.command_line import program
from embodied.command_line.config import compose, parsed
from embodied.command_line.train_options import GROUPS, TrainConfig
from embodied.commands import command
from embodied.configuration import Fraction, PositiveInt, Range, Seed
from embodied.contract import Contract
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, EpisodeWriter
from embodied.data.judging import judged
from embodied.data.success_frames import PARTS, Frames, LabelConfig, as_earlier, joined, labelled_frames, split
from embodied.errors import UserError
from embodied.evaluation.detection import choose_threshold
from embodied.report import success_classifier as report
from embodied.saving.files import complete_or_absent_folder
from embodied.seeding import generator, seed_everything
from embodied.task import Task
from embodied.training.compute import prepare
from embodied.training.run_directory import new_directory
from policies.success_classifier import FitConfig, NetworkConfig, SuccessClassifier, fit, readable
from real_robot.recording.demonstrations import DemonstrationOptions, demonstrations, sources
from real_robot.recording.recorded_task import join

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("embodied")


@dataclass
class ClassifyConfig(NetworkConfig, FitConfig, LabelConfig, DemonstrationOptions):
    """Options of the program.

    The classifier reads the `observations` by name; null: all pictures, or all measurements if there are none. A
    success is `frames` consecutive ones with a probability of the `threshold`; null: the smallest of at least 0.5 by
    which at most a share `false_positives` of the validation episodes ends wrongly. `classifier` continues the training
    of an earlier one, with its options and data, and `negatives` adds data sets of which the episodes that a person
    marked as failures are used. With `label`, a data set, the `classifier` is not trained: it decides episodes of
    unknown outcome. `seed` determines all random numbers. PyTorch uses `threads` cores and the `device`. `output` is
    the classifier's folder, or that of the labelled episodes; null: outputs/classifiers/<time>.
    """

    observations: list[str] | None = None
    frames: PositiveInt = 1
    threshold: Annotated[float, Range(above=0, below=1)] | None = None
    false_positives: Fraction = 0.0
    classifier: str | None = None
    negatives: Any = None
    label: str | None = None
    seed: Seed = 0
    device: str = "cpu"
    threads: PositiveInt | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that do not go together."""
        super().__post_init__()
        if self.demonstration_weights is not None:
            raise UserError("batches are balanced by label: leave out demonstration_weights")
        if self.label is not None and self.classifier is None:
            raise UserError(f"label={self.label} needs a trained classifier: add classifier=DIR")


def run(arguments: list[str]) -> None:
    """Train the classifier, choose its threshold, and write it with its report; or label a data set."""
    (config, task), record = composed(arguments)
    prepare(config.device, config.threads)
    seed_everything(config.seed)
    classifier = begun(config, task)
    output = Path(config.output or new_directory("classifiers", f"_seed{config.seed}"))
    if config.label is not None:
        return label(config, task, classifier, output)
    with complete_or_absent_folder(output) as folder:
        frames, part, notes = labelled_data(config, task, classifier.contract, folder, record["parts"])
        train, validation, test = (frames.of_part(part, number) for number in PARTS)
        fit(classifier, frames, train, config, generator(config.seed, "batches"))
        score = classifier.scores(frames)
        own = score[validation], frames.label[validation], frames.episode[validation]
        threshold = config.threshold or choose_threshold(*own, config.frames, config.false_positives)
        results = report.measured(frames, part, score, threshold, config.frames)
        results |= {"notes": notes, "observations": [*classifier.contract.observation], "seed": config.seed}
        results |= {"command": f"{command('classify')} {shlex.join(record['arguments'])}"}
        drawn = frames, score, test, threshold
        report.plot_scores(folder / report.SCORES, *drawn, classifier.contract.control_dt_s)
        report.write(folder, results, report.worst_errors(*drawn, classifier.contract))
        classifier.threshold = threshold
        classifier.save(folder, record | {"parts": dict(zip(frames.names, part.tolist(), strict=True))})
    log.info(f"{report.headline(results)}\nwrote {output}: look at {output / 'report.html'}")
    log.info(f"Next: {command('train')} task=NAME success_classifier={shlex.quote(str(output))}")


def label(config: ClassifyConfig, task: Task, classifier: SuccessClassifier, output: Path) -> None:
    """Write the episodes of the data set `label` into `output`, with known rewards and outcomes."""
    contract = replace(task.contract(task.distributions[0]), horizon=1, executed=1)
    counted = dict.fromkeys((SUCCEEDED, FAILED), 0)
    origin = {"labelled": config.label, "classifier": config.classifier}
    with TemporaryDirectory() as index, EpisodeWriter(output, contract, origin) as writer:
        episodes = demonstrations(str(config.label), contract, Path(index), task, options=config.matching)
        for before, episode in zip(episodes.success.tolist(), judged(episodes, classifier.detect), strict=True):
            writer.add(episode)
            counted[int(episode.success[0])] += before == UNKNOWN
    log.info(
        f"of {len(episodes.ends):,} episodes {sum(counted.values()):,} had an unknown outcome: {counted[SUCCEEDED]:,}"
        f" are successes, {counted[FAILED]:,} failures\nwrote {output}: {command('train')} demonstrations={output}"
    )


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
    classifier.threshold = config.threshold or classifier.threshold
    return classifier.to(config.device)


def labelled_data(
    config: ClassifyConfig, task: Task, contract: Contract, folder: Path, earlier: dict[str, int]
) -> tuple[Frames, Tensor, list[str]]:
    """Frames of all data sets, the part of each episode (see `as_earlier`), and notes; indices go into `folder`."""
    paths = {path: False for path in sources(config.demonstrations, None) or ()}
    paths |= {path: True for path in sources(config.negatives, None, "negatives") or ()}
    labelled, parts, notes = [], [], []
    for number, (path, failed_only) in enumerate(paths.items()):
        own_folder = folder / f"data_{number}"
        episodes = demonstrations(path, contract, own_folder, task, options=config.matching)
        frames, own_notes = labelled_frames(episodes, config, path, failed_only=failed_only)
        rng = generator(config.seed, "split", number)  # of its own, so that further data sets change nothing
        parts.append(as_earlier(frames, split(frames.success, config, rng), earlier))
        labelled.append(frames)
        notes += own_notes
    if not labelled:
        raise UserError("expected demonstrations=DIR, recorded episodes with their outcomes")
    frames, part = joined(labelled, parts)
    if not bool((frames.success == FAILED).any()):
        notes.append("No episode failed: what the classifier answers to a failure is unknown. Record some.")
    for note in notes:
        log.warning(note)
    return frames, part, notes


def composed(arguments: list[str]) -> tuple[tuple[ClassifyConfig, Task], dict[str, Any]]:
    """The options, the task of train.py from which the contract is derived, and the record of both.

    An earlier classifier's record has both, too, which `arguments` replace.
    """
    own = [each for each in arguments if not each.startswith(("task=", "task."))]
    read = [each for each in arguments if each not in own or each.startswith("demonstration")]
    folder = parsed([each for each in own if each.startswith("classifier=")]).get("classifier")
    saved = SuccessClassifier.record(str(folder)) if folder else None
    if saved is None:
        config, record = compose(ClassifyConfig, "classify", own, {})
        is_named = any(each.startswith("task=") for each in read)
        trained, train_record = compose(TrainConfig, "train", [*["task=dataset"][is_named:], *read], GROUPS)
    else:
        before = sources(saved["values"]["negatives"], None, "negatives") or []
        values = saved["values"] | {"output": None, "negatives": None}
        config, record = compose(ClassifyConfig, "classify", own, {}, saved | {"values": values})
        config.negatives = [*before, *(sources(config.negatives, None, "negatives") or [])] or None
        record["values"]["negatives"] = config.negatives
        trained, train_record = compose(TrainConfig, "train", read, GROUPS, saved["train"])
    join(trained)
    record |= {"train": train_record, "parts": saved.get("parts", {}) if saved else {}}
    return (config, trained.task), record


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ClassifyConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed))
