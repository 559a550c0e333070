"""Metrics survive a kill and are continuous after a resume."""

import logging
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from embodied.runtime.console import setup_console
from embodied.saving.metrics import METRICS, read_metrics
from embodied.training.logging import Logger


def curve(directory, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[name]) for row in read_metrics(directory) if name in row]


def tensorboard(directory, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_metrics_are_on_disk_at_once(tmp_path):
    with Logger(tmp_path) as logger:
        logger.log(8, {"rollout/success": 0.5, "ppo/kl": 0.25})
        assert curve(tmp_path, "rollout/success") == [(8, 0.5)]
    assert tensorboard(tmp_path, "ppo/kl") == [(8, 0.25)]


def test_a_resumed_run_drops_what_its_checkpoint_did_not_know(tmp_path):
    with Logger(tmp_path) as logger:
        logger.log(900, {"sft/loss": 2.0})
        logger.log(10, {"rollout/success": 0.125})
        rows = logger.rows
        logger.log(20, {"rollout/success": 0.9})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 30, "rollout/succ')  # killed while writing
    with Logger(tmp_path, rows=rows) as logger:
        logger.log(20, {"rollout/success": 0.25})
    expected = [(10, 0.125), (20, 0.25)]
    assert curve(tmp_path, "rollout/success") == expected
    assert curve(tmp_path, "sft/loss") == [(900, 2.0)]
    assert tensorboard(tmp_path, "rollout/success") == expected


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda text: text[:-20], [0, 1, 2]),
        (lambda text: text.replace('"step": 1', '"step" 1'), [0, 2, 3]),
        (lambda text: text.replace('"step": 1', '"stop": 1'), [0, 2, 3]),
        (lambda text: "\x00\n" * 9, []),
        (None, []),
    ],
)
def test_damaged_metrics_are_set_aside_and_reported(tmp_path, capsys, damage, kept):
    setup_console()
    with Logger(tmp_path) as logger:
        for step in range(4):
            logger.log(step, {"loss": 0.5})
    path = tmp_path / METRICS
    if damage:
        path.write_text(damage(path.read_text()))
        before = path.read_bytes()
    else:
        path.unlink()
    with Logger(tmp_path, rows=4) as logger:
        logger.log(4, {"loss": 0.25})
        assert logger.rows == len(kept) + 1
    assert [step for step, _ in curve(tmp_path, "loss")] == [*kept, 4]
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 1
    assert f"{len(kept)} of 4 rows could be read" in message[0]
    aside = tmp_path / f"{METRICS}.aside"
    assert aside.read_bytes() == before if damage else not aside.exists()


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'embodied-rl\[wandb\]'"):
        Logger(tmp_path, wandb_project="pick")
    assert list(tmp_path.iterdir()) == []


def test_console_lines_appear_once_beside_a_bar(capsys):
    setup_console()
    setup_console()
    with tqdm(total=2, file=sys.stdout):
        logging.getLogger("embodied.training.experiment").info("saved %s", "here")
    assert capsys.readouterr().out.count("saved here\n") == 1
