"""compare.py and plot.py as a user runs them: on real runs of train.py."""

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import compare
import plot
import train
from embodied.command_line import program
from embodied.report.curves import draw_band
from embodied.report.finished_run import SUMMARY, SWEEP, run_folders
from embodied.report.plot import Axis, read

SMALL = ("env_steps=3000", "evaluation_starts=4", "evaluation_envs=4", "threads=1", "task.step_limit=30", "video=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two seeds of one experiment, then one of another; copy them before changing them."""
    threads, memory = torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_DATA)
    folder = tmp_path_factory.mktemp("runs")
    varied = (("seed=0",), ("seed=1",), ("seed=0", "policy.hidden=[32]"))
    for number, options in enumerate(varied):
        train.run(["task=quadrotor_hover", *SMALL, *options, f"output={folder / str(number)}"])
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, memory)
    return [folder / str(number) for number in range(len(varied))]


def asked(capsys, *arguments: object) -> tuple[int, str, str]:
    status = program.main(compare.run, compare.describe, [str(each) for each in arguments])
    return status, *capsys.readouterr()


def test_runs_are_compared_and_written(runs: list[Path], tmp_path: Path, capsys):
    status, told, errors = asked(capsys, *runs, f"output={tmp_path / 'out'}")
    assert (status, errors) == (0, "")
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    first, second = record["rows"]
    assert first["name"].startswith("policy.hidden=[")
    assert second["name"] == "policy.hidden=[32]"
    assert [[run["seed"] for run in row["runs"]] for row in record["rows"]] == [[0, 1], [0]]
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    assert first["env_steps"] == (reports[0]["env_steps"] + reports[1]["env_steps"]) / 2
    assert second["wall_s"] == pytest.approx(sum(reports[2]["wall_s"].values()))
    mean = second["results"]["robust"]["mean"]
    assert (mean["mean"], mean["low"]) == tuple(reports[2]["evaluations"][0][name] for name in ("success", "low"))
    assert f"| {first['name']} over policy.hidden=[32] | robust | " in told
    assert "1 of 2 rows are a single seed" in told
    assert (tmp_path / "out" / "compare.md").exists()
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000


def test_folders_of_sweeps_are_their_runs(runs: list[Path], tmp_path: Path, capsys):
    sweep = tmp_path / "sweep"
    shutil.copytree(runs[0].parent, sweep)
    for name in (SWEEP, SUMMARY):
        (sweep / name).write_text("")
    expected = [sweep / run.name for run in runs]
    assert run_folders([sweep]) == run_folders(sorted(sweep.iterdir())) == expected
    status, _, errors = asked(capsys, sweep, f"output={tmp_path / 'out'}")
    assert (status, errors) == (0, "")
    assert len(json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]) == 2


def test_one_run_each_is_paired_and_written_under_the_time(runs: list[Path], tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, told, _ = asked(capsys, runs[2], runs[0] / "report.json")
    assert status == 0
    assert ", paired, not significant |\n" in told or ", paired |\n" in told  # no column of probabilities
    assert "better than" in told.splitlines()[0]
    (directory,) = (tmp_path / "outputs" / "comparisons").iterdir()
    assert told.strip().endswith(f"wrote {directory.relative_to(tmp_path)}/compare.md, .json and .png")


def test_mistakes_are_one_line_and_write_nothing(runs: list[Path], tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = Path(shutil.copytree(runs[0], tmp_path / "begun"))
    (begun / "report.json").unlink()
    damaged = Path(shutil.copytree(runs[0], tmp_path / "damaged"))
    for path in damaged.glob("checkpoint/*/checkpoint.json"):
        path.write_text(path.read_text().replace("quadrotor", "quadrotar"))
    for arguments, said in (
        ((), "expected runs to compare"),
        (("nowhere",), "no run in nowhere"),
        ((begun,), "is not finished"),
        ((damaged, runs[1]), "checksum does not match"),
        ((runs[0], runs[0]), "have the same options and seed 0"),
        ((runs[0], "outptu=x"), "unknown option 'outptu'; expected one of output"),
        ((runs[0], f"output={begun / 'config.yaml'}"), "is a file; choose another output"),
    ):
        status, told, errors = asked(capsys, *arguments)
        assert (status, told) == (1, "")
        assert len(errors.splitlines()) == 1
        assert errors.startswith("error: ")
        assert said in errors
    assert not (tmp_path / "outputs").exists()


def drawn(capsys, *arguments: object) -> tuple[int, str, str]:
    status = program.main(plot.run, plot.describe, [str(each) for each in arguments])
    return status, *capsys.readouterr()


def test_a_metric_is_plotted_with_a_band_over_seeds_and_metrics_are_listed(runs: list[Path], tmp_path: Path, capsys):
    file = tmp_path / "new" / "return.svg"
    for x in ("env_steps", "wall_s", "cpu_s"):
        options = ("metric=rollout/episode_return", f"x={x}", f"output={file}")
        assert drawn(capsys, *runs, *options) == (0, f"wrote {file}\n", "")
    assert file.read_text().count("<svg") == 1
    lines = drawn(capsys, runs[0])[1].splitlines()
    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)
    assert any(line.startswith("rollout/episode_return ") and " values, last -" in line for line in lines)
    logged = read(runs[0])
    cost = logged.curve("rollout/episode_return", Axis.CPU_S)
    steps = logged.curve("rollout/episode_return", Axis.ENV_STEPS)
    assert (cost[:, 1] == steps[:, 1]).all()
    assert (np.diff(cost[:, 0]) > 0).all()
    assert cost[-1, 0] == json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])["time/cpu_s"]


def test_mistakes_of_a_plot_are_one_line(runs: list[Path], tmp_path: Path, capsys):
    for arguments, said in (
        ((), "expected runs to plot"),
        ((tmp_path,), "no metrics of a run in"),
        ((runs[0], "metric=rollout/sucess"), "no run has the metric rollout/sucess; did you mean rollout/success?"),
        ((runs[0], "metric=success"), "did you mean rollout/success?"),
        ((runs[0], "metric=rollout/success", f"output={tmp_path}/x.gif"), "expected an output of .png, .svg, .pdf"),
    ):
        status, text, errors = drawn(capsys, *arguments)
        assert (status, text, len(errors.splitlines())) == (1, "", 1)
        assert said in errors


def test_a_band_is_the_interval_of_the_mean_over_seeds_and_of_two_their_range():
    axis = Figure().subplots()
    curves = [np.array([[0.0, value], [10.0, value]]) for value in (1.0, 2.0, 6.0)]
    draw_band(axis, curves, "C0", "three")
    draw_band(axis, curves[:2], "C1", "two")
    three, two = (
        (band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max())
        for band in axis.collections
    )
    spread = 4.3027 * np.std([1.0, 2.0, 6.0], ddof=1) / np.sqrt(3)  # Student's t of 2 degrees of freedom
    assert three == pytest.approx((3.0 - spread, 3.0 + spread), rel=1e-3)
    assert two == (1.0, 2.0)
    assert [line.get_label() for line in axis.lines] == ["three (3 seeds)", "two (2 seeds)"]


def test_help_lists_the_option(capsys):
    status, told, _ = asked(capsys, "--help")
    assert status == 0
    assert "output=null" in told
