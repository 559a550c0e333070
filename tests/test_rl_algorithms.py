"""The table of algorithms: every row is a valid run, and an interrupted one goes on."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import rl_algorithms, tuning
from embodied.command_line.config import compose, parsed
from train import GROUPS, TrainConfig


@pytest.mark.parametrize("name", rl_algorithms.ROWS)
def test_a_row_is_a_valid_configuration(name: str) -> None:
    config, record = compose(TrainConfig, "train", [*rl_algorithms.COMMON, *rl_algorithms.ROWS[name]], GROUPS)
    assert config.task.name == "libero_pick"
    squashed = name in ("rlpd", "wsrl", "iql, then online")
    assert record["choices"]["policy"] == ("diffusion" if "DPPO" in name else "squashed" if squashed else "flow")


@pytest.mark.parametrize("name", tuning.SPACES)
def test_a_search_chooses_three_options_that_exist(name: str) -> None:
    options = parsed([f"tune.options={{{', '.join(tuning.SPACES[name])}}}"])["tune.options"]
    assert len(options) == 3
    for bound in (0, 1):
        values = [f"{option}={bounds[bound]}" for option, bounds in options.items()]
        compose(TrainConfig, "train", [*rl_algorithms.COMMON, *rl_algorithms.ROWS[name], *values], GROUPS)


def test_an_interrupted_run_goes_on_or_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command[2:]))
    run = tmp_path / "row_0"
    (run / "demonstrations").mkdir(parents=True)
    rl_algorithms._train(["seed=0"], run)  # killed before anything was saved
    assert not run.exists()
    (run / "checkpoint" / ".000001.tmp").mkdir(parents=True)
    rl_algorithms._train(["seed=0"], run)
    (run / "checkpoint" / "000001").mkdir(parents=True)
    rl_algorithms._train(["seed=0"], run)
    assert commands == [["seed=0", f"output={run}"], ["seed=0", f"output={run}"], [f"resume={run}"]]
    assert run.exists()


def test_rows_of_one_policy_have_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    monkeypatch.setattr(rl_algorithms, "_train", lambda options, run: trained.append((run, options)))
    for options in rl_algorithms.ROWS.values():
        rl_algorithms.supervised_start(tmp_path, (*rl_algorithms.COMMON, *options), 0)
    starts = {run: options for run, options in trained}
    policies = ["diffusion", "flow", "flow_hl_gauss", "squashed"]
    assert sorted(run.name for run in starts) == [f"start_{policy}_0" for policy in policies]
    assert all(options == starts[run] for run, options in trained)
