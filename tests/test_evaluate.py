"""Where evaluate.py and export.py put results: those of one policy of a run never replace another's."""

import json
import os
import shutil
from pathlib import Path

import pytest

import evaluate
import export
import train
from embodied.errors import UserError
from embodied.saving import checkpoint

SMALL = ["env_steps=3000", "evaluation_starts=3", "evaluation_envs=3", "threads=1", "task.step_limit=30"]
SHORT = ["episodes=3", "num_envs=3", "threads=1"]


def content(directory: Path) -> dict[str, bytes]:
    """What is in the files of `directory` itself."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name != "run.log"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished, evaluated and filmed run with a best policy and an earlier checkpoint; copy it before changing it."""
    directory = tmp_path_factory.mktemp("runs") / "hover"
    train.run(["task=quadrotor_hover", *SMALL, f"output={directory}"])
    saved = checkpoint.load(directory)
    shutil.rmtree(directory / "best", ignore_errors=True)
    checkpoint.save_best(directory, saved)
    checkpoint.save(directory, saved)
    evaluate.run([f"checkpoint={directory}", *SHORT, "video=true"])
    return directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_an_evaluation_leaves_the_video_and_the_paths_of_the_report(run: Path):
    before, late = content(run), ["distributions=[disturbed]", "first_start=7", "video=true"]
    evaluate.run([f"checkpoint={run}", *SHORT, *late])
    changed = {name for name, data in content(run).items() if before.get(name) != data}
    assert changed == {"evaluation.json", "evaluation.mp4", "evaluation_trajectories.png"}
    assert {"video.mp4", "trajectories.png"} <= before.keys()


@pytest.mark.parametrize("numbered", [False, True])
def test_results_of_the_best_policy_do_not_replace_those_of_the_run(
    run: Path, numbered: bool, caplog: pytest.LogCaptureFixture
):
    before, best = content(run), checkpoint.load(run / "best").path
    assert best is not None
    with caplog.at_level("INFO", "embodied"):
        evaluate.run([f"checkpoint={best if numbered else run / 'best'}", *SHORT, "first_start=3", "video=true"])
    assert content(run) == before
    assert json.loads((run / "best" / "evaluation.json").read_text())["checkpoint"] == str(best)
    assert {"evaluation.mp4", "evaluation_trajectories.png"} <= content(run / "best").keys()
    assert f"wrote {run / 'best' / 'evaluation.json'}" in caplog.text
    assert f"wrote {run / 'best' / 'evaluation.mp4'}" in caplog.text
    assert checkpoint.load(run / "best").path == best


def test_results_of_an_earlier_checkpoint_are_in_its_folder_and_those_of_the_newest_in_the_run(run: Path):
    earlier, newest = sorted((run / "checkpoint").iterdir())[-2:]
    before = content(run)
    evaluate.run([f"checkpoint={earlier}", *SHORT, "first_start=3"])
    assert content(run) == before
    assert (earlier / "evaluation.json").is_file()
    assert checkpoint.load(earlier).path == earlier  # still whole
    evaluate.run([f"checkpoint={newest}", *SHORT, "first_start=3"])
    assert content(run)["evaluation.json"] != before["evaluation.json"]
    assert not (newest / "evaluation.json").exists()


def test_an_evaluation_that_cannot_be_written_is_told(run: Path, caplog: pytest.LogCaptureFixture):
    for name, more in (("evaluation.json", []), ("margins.json", ["margins=true", "task.step_limit=12"])):
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()
        caplog.clear()
        with caplog.at_level("INFO", "embodied"), pytest.raises(IsADirectoryError):
            evaluate.run([f"checkpoint={run}", *SHORT, *more])
        assert "100.0% [" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("seed=-1", "seed=-1: expected a number of at least 0"),
        ("margins=true video=true", "margins=true sweeps by itself; leave out .*video"),
        ("sim_to_real=[simulator] video=true", "nothing is filmed; use video=false"),
        ("sim=[own,mjwarp] render=true", "nothing is filmed; use render=false"),
        ("sim_to_real=[simulator] distributions=[own,robust]", r"on one distribution; use distributions=\[own\]"),
        ("sim=[own,mjwarp] distributions=[own,robust]", r"on one distribution; use distributions=\[own\]"),
    ],
)
def test_options_that_would_not_be_read_are_refused(run: Path, options: str, message: str):
    with pytest.raises(UserError, match=message):
        evaluate.run([f"checkpoint={run}", *SHORT, *options.split()])


def test_a_copied_policy_keeps_its_results(run: Path, tmp_path: Path):
    (best,) = (run / "best").iterdir()
    alone = Path(shutil.copytree(best, tmp_path / "elsewhere" / "alone"))
    evaluate.run([f"checkpoint={alone}", *SHORT])
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["alone"]
    assert (alone / "evaluation.json").is_file()


def test_an_export_of_the_best_policy_does_not_replace_that_of_the_run(run: Path):
    for place in (run, run / "best"):
        export.run([f"checkpoint={place}", "target=c"])
        assert len(os.listdir(place / "export" / "c")) > 2
        export.run([f"checkpoint={place}", "target=hub"])
        assert checkpoint.load(place / "export" / "hub").path is not None


def test_margins_are_swept_plotted_and_of_these_weights(run: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", "embodied"):
        evaluate.run([f"checkpoint={run}", *SHORT, "margins=true", "task.step_limit=12"])
    assert {"margins.json", "margins.md", "margins.png"} <= content(run).keys()
    record = json.loads((run / "margins.json").read_text())
    assert record["weights_sha256"] == checkpoint.load(run).weights_sha256
    assert record["margins"]["mass"]["successes"] == [3] * 8  # nobody falls out of the box in 0.12 s
    assert record["margins"]["mass"]["words"] == "0.7 or less to 1.4 or more"
    assert "| latency | 0.05 | s | 100.0% [" in caplog.text
    with pytest.raises(ValueError, match="margins=true sweeps by itself"):
        evaluate.run([f"checkpoint={run}", "margins=true", "distributions=[robust]"])
