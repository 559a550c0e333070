"""Comparison of runs that are written by the real reports and checkpoints: rows, their numbers, what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult, wilson
from embodied.evaluation.means import difference_interval, interquartile_interval, mean_interval
from embodied.report.comparison import Comparison, compare
from embodied.report.comparison_report import write
from embodied.report.report import Report
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.training.logging import Logger
from tests.embodied.reach import Reach

VALUES = {"seed": 0, "env_steps": 1000, "device": "cpu", "policy": {"hidden": [16]}, "algorithm": {"epochs": 2}}
CHOICES = {"task": "reach", "policy": "mlp", "algorithm": "ppo"}
STARTS = 10


def outcome(*successes: int, first: int = 0, limit: int = 7) -> EvaluationResult:
    """An evaluation of a task for each of `successes`, of 10 starts, that succeeds from start `first` on."""
    starts = torch.arange(STARTS)
    success = torch.stack([(starts >= first) & (starts < first + count) for count in successes])
    tasks = tuple(f"task {number}" for number in range(len(successes)))
    return EvaluationResult(tasks, success, torch.full_like(success, 5, dtype=torch.int64), limit)


def earned(*returns: Tensor) -> EvaluationResult:
    values = torch.stack(returns)
    nothing = torch.zeros_like(values, dtype=torch.bool)
    return EvaluationResult(("task 0",), nothing, torch.full_like(nothing, 5, dtype=torch.int64), 7, returns=values)


def run(
    directory: Path,
    result: EvaluationResult | dict[str, EvaluationResult],
    seed: int = 0,
    *,
    choices: dict[str, str] | None = None,
    task: str = "reach",
    assets: str | None = None,
    stage: str = "rl",
    **values: Any,
) -> Path:
    """A finished run in `directory`, with its checkpoint."""
    made = Report(task, assets, seed, env_steps=1000 + seed, wall_s={"simulation": 2.0, "update": 3.0}, cpu_s=4.0)
    for name, each in (result if isinstance(result, dict) else {"wide": result}).items():
        made.add(stage, name, each)
        made.add("baseline planner", name, replace(each, success=torch.ones_like(each.success)))
        if stage == "rl":
            made.add("sft", name, replace(each, success=torch.zeros_like(each.success)))
    directory.mkdir(parents=True)
    made.write(directory, {})
    config = {"choices": CHOICES | (choices or {}), "values": VALUES | {"seed": seed} | values}
    checkpoint.save(directory, Checkpoint({"weight": torch.zeros(1)}, Reach(1).contract, config))
    return directory


def names(comparison: Comparison) -> list[str]:
    return [row.name for row in comparison.rows]


def test_runs_that_differ_only_in_seed_are_one_row(tmp_path):
    counts = {1: (4, 6), 3: (5, 6), 4: (5, 8)}
    paths = [run(tmp_path / f"{seed}", outcome(*each), seed, device=f"cuda:{seed}") for seed, each in counts.items()]
    (row,) = compare(paths).rows
    assert row.name == "task=reach policy=mlp algorithm=ppo"
    assert torch.equal(row.scores("wide"), torch.tensor([[0.4, 0.6], [0.5, 0.6], [0.5, 0.8]], dtype=torch.float64))
    found = row.summary()
    assert [each["seed"] for each in found["runs"]] == [1, 3, 4]
    assert (found["env_steps"], found["wall_s"], found["cpu_s"]) == (pytest.approx(1000 + 8 / 3), 5.0, 4.0)
    reached = found["results"]["wide"]
    assert reached["iqm"] == dict(zip(("iqm", "low", "high"), interquartile_interval(row.scores("wide")), strict=True))
    assert reached["iqm"]["iqm"] == pytest.approx(0.55)
    assert list(reached["mean"].values()) == pytest.approx(mean_interval(torch.tensor([0.5, 0.55, 0.65])))


def test_intervals_of_rates_end_at_none_and_all(tmp_path):
    paths = [run(tmp_path / f"{seed}", outcome(count), seed) for seed, count in enumerate((1, 9))]
    (row,) = compare(paths).rows
    assert row.mean("wide") == {"mean": pytest.approx(0.5), "low": 0.0, "high": 1.0}
    assert row.interquartile_mean("wide") == {"iqm": pytest.approx(0.5), "low": 0.0, "high": 1.0}


def test_seeds_that_agree_are_no_more_certain_than_their_episodes(tmp_path):
    paths = [run(tmp_path / f"a{seed}", outcome(10), seed) for seed in (0, 1)]
    paths += [run(tmp_path / f"b{seed}", outcome(9), seed, env_steps=5) for seed in (0, 1)]
    comparison = compare(paths)
    low, _ = wilson(20, 20)
    assert comparison.rows[0].mean("wide") == {"mean": 1.0, "low": pytest.approx(low), "high": 1.0}
    assert comparison.rows[0].interquartile_mean("wide") == {"iqm": 1.0, "low": pytest.approx(low), "high": 1.0}
    (difference,) = comparison.differences()
    assert difference["difference"] == pytest.approx(0.1)
    down, up = wilson(18, 20)
    assert difference["low"] == pytest.approx(0.1 - math.hypot(1.0 - low, up - 0.9))
    assert difference["high"] == pytest.approx(0.1 + 0.9 - down)


def test_rows_go_by_what_differs(tmp_path):
    paths = [
        run(tmp_path / "a", outcome(5), policy={"hidden": [16], "depth": 1}),
        run(tmp_path / "b", outcome(5), env_steps=2000, policy={"hidden": [32, 16], "depth": 1}),
        run(tmp_path / "c", outcome(5), choices={"policy": "flow"}, env_steps=3000, policy={"depth": 2}),
    ]
    comparison = compare(paths)
    mlp = ["policy=mlp env_steps=1000 policy.hidden=[16]", "policy=mlp env_steps=2000 policy.hidden=[32,16]"]
    assert names(comparison) == [*mlp, "policy=flow"]
    assert comparison.options == {
        "policy": ["mlp", "mlp", "flow"],
        "env_steps": [1000, 2000, 3000],
        "policy.hidden": [[16], [32, 16], None],
    }
    assert not any("latency" in note for note in comparison.notes)
    late = [run(tmp_path / f"{time_s}", outcome(5), latency={"action_s": time_s}) for time_s in (0.1, 0.2)]
    assert any("latency, which may change what is evaluated" in note for note in compare(late).notes)


def test_one_run_each_is_paired_on_the_same_starts_and_no_claim(tmp_path):
    after, before = outcome(8, 6), outcome(5, 6)
    comparison = compare([run(tmp_path / "a", after), run(tmp_path / "b", before, algorithm={"epochs": 3})])
    (found,) = comparison.differences()
    gain = after.gain_over(before)
    assert (found["difference"], found["low"], found["high"]) == (gain.difference, gain.low, gain.high)
    assert found["paired"]
    assert found["improvement"] is None
    assert (found["row"], found["over"]) == ("algorithm.epochs=2", "algorithm.epochs=3")
    assert comparison.notes[0].startswith("2 of 2 rows are a single seed")
    low, high = wilson(14, 20)
    assert comparison.rows[0].summary()["results"]["wide"] == {
        "mean": {"mean": 0.7, "low": pytest.approx(low), "high": pytest.approx(high)},
        "iqm": None,
    }
    # as many successes, but of other starts: the difference is as large, and less certain
    run(tmp_path / "c", outcome(5, 6, first=4), algorithm={"epochs": 3})
    (other,) = compare([tmp_path / "a", tmp_path / "c"]).differences()
    assert other["difference"] == found["difference"]
    assert other["low"] < found["low"]


def test_simulators_without_numbered_starts_are_not_paired(tmp_path):
    after, before = (replace(outcome(count), repeatable=False, step_limit=None) for count in (8, 5))
    (found,) = compare([run(tmp_path / "a", after), run(tmp_path / "b", before, env_steps=5)]).differences()
    assert not found["paired"]
    assert found["low"] == pytest.approx(after.gain_over(before).low)


def test_several_seeds_are_compared_as_independent_runs(tmp_path):
    counts = {"a": (9, 8, 9), "b": (4, 6, 2)}
    paths = [
        run(tmp_path / f"{name}{seed}", outcome(count, 10 - seed), seed, algorithm={"epochs": ord(name)})
        for name, row in counts.items()
        for seed, count in enumerate(row)
    ]
    comparison = compare(paths)
    (found,) = comparison.differences()
    means = [row.scores("wide").mean(1) for row in comparison.rows]
    assert (found["difference"], found["low"], found["high"]) == pytest.approx(difference_interval(*means))
    assert not found["paired"]
    assert found["improvement"]["probability"] == pytest.approx((1.0 + 0.5) / 2)  # the second task is a tie
    assert 0 < found["improvement"]["low"] < 0.75 < found["improvement"]["high"] < 1
    assert not any("single seed" in note for note in comparison.notes)
    (mixed,) = compare(paths[:4]).differences()
    assert (mixed["low"], mixed["high"], mixed["improvement"]) == (None, None, None)
    assert mixed["difference"] == pytest.approx(float(means[0].mean()) - 0.7)


def test_the_last_stage_counts(tmp_path):
    paths = [run(tmp_path / "a", outcome(8)), run(tmp_path / "b", outcome(5), stage="sft", stages=["sft"])]
    assert [row.mean("wide")["mean"] for row in compare(paths).rows] == [0.8, 0.5]


def test_returns_are_compared_where_there_is_no_success(tmp_path):
    generator = torch.Generator().manual_seed(0)
    returns = [100 * torch.rand(STARTS, generator=generator, dtype=torch.float64) for _ in range(2)]
    paths = [run(tmp_path / "a", earned(returns[0])), run(tmp_path / "b", earned(returns[1]), env_steps=5)]
    comparison = compare(paths)
    (found,) = comparison.differences()
    expected = mean_interval(returns[0] - returns[1])
    assert (found["difference"], found["low"], found["high"]) == pytest.approx(expected, rel=1e-4)
    assert found["paired"]
    expected = dict(zip(("mean", "low", "high"), mean_interval(returns[0]), strict=True))
    assert comparison.rows[0].mean("wide") == pytest.approx(expected, rel=1e-4)
    text = write(tmp_path / "out", comparison)
    assert f"{expected['mean']:.4g} [{expected['low']:.4g}, {expected['high']:.4g}]" in text
    assert "difference of mean return" in text
    paths += [run(tmp_path / f"{seed}", earned(each), seed) for seed, each in ((1, returns[1]), (2, returns[0] + 50))]
    more = compare(paths).rows[0]
    assert more.mean("wide")["high"] == pytest.approx(mean_interval(more.scores("wide").mean(1))[2])
    assert more.mean("wide")["high"] > 1.0


def test_reports_alone_go_by_their_names(tmp_path):
    for name, count in (("ppo", 5), ("rank", 9)):
        for seed in (0, 1):
            directory = run(tmp_path / f"{name}{seed}", outcome(count + seed), seed)
            (directory / "report.json").rename(tmp_path / f"{name}_seed{seed}.json")
    paths = sorted(tmp_path.glob("*.json"))
    comparison = compare(paths)
    assert names(comparison) == ["run=ppo", "run=rank"]
    assert [len(row.runs) for row in comparison.rows] == [2, 2]
    assert not comparison.options
    assert any("options are unknown" in note for note in comparison.notes)
    mixed = compare([paths[0], run(tmp_path / "known_seed1", outcome(5), 1)])
    assert names(mixed) == ["run=ppo", "run=known"]
    assert not mixed.options


def test_reports_of_earlier_versions_are_not_paired(tmp_path):
    after, before = outcome(8, 6), outcome(5, 6)
    for name, result in (("after", after), ("before", before)):
        record = json.loads((run(tmp_path / name, result) / "report.json").read_text())
        for row in (each for evaluation in record["evaluations"] for each in evaluation["per_task"]):
            del row["outcomes"]
        del record["cpu_s"]
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    comparison = compare([tmp_path / "after.json", tmp_path / "before.json"])
    (found,) = comparison.differences()
    assert not found["paired"]
    assert found["difference"] == pytest.approx(0.15)
    gain = after.gain_over(before)
    assert found["high"] - found["low"] > gain.high - gain.low
    assert comparison.rows[0].summary()["cpu_s"] is None
    assert "| run=after | 1,000 | 5 | " in write(tmp_path / "out", comparison)


def test_published_figures_can_be_compared():
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    paths = [results / f"libero_pick_{name}seed{seed}.json" for name in ("long_", "ppo_") for seed in range(3)]
    comparison = compare(paths)
    assert names(comparison) == ["run=libero_pick_long", "run=libero_pick_ppo"]
    wide = next(each for each in comparison.differences() if each["distribution"] == "wide")
    assert wide["difference"] == pytest.approx((97.2 + 95.2 + 94.4 - 61.8 - 60.0 - 69.0) / 300)
    assert any("stand-in" in note for note in comparison.notes)
    assert any(note.startswith("The runs are of 3 versions of the code: 0b55c041b4, ") for note in comparison.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "push"}, "task is reach and push"),
        ({"assets": "stand-in"}, "assets is None and stand-in"),
        ({"result": outcome(5, 5)}, "list of tasks on wide is task 0 and task 0, task 1"),
        ({"result": outcome(5, limit=9)}, "step limit on wide is 7 and 9"),
        ({"result": {"narrow": outcome(5)}}, "list of distributions is wide and narrow"),
        ({"result": earned(torch.ones(STARTS))}, "measure on wide is success and return"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(tmp_path, changes, said):
    paths = [run(tmp_path / "a", outcome(5)), run(tmp_path / "b", **({"result": outcome(5)} | changes))]
    with pytest.raises(UserError) as error:
        compare(paths)
    assert str(error.value) == f"{paths[0]}/report.json and {paths[1]}/report.json cannot be compared: {said}"


def test_fewer_episodes_are_not_compared(tmp_path):
    few = EvaluationResult(("task 0",), torch.ones(1, 4).bool(), torch.ones(1, 4), 7)
    others: tuple[dict, ...] = ({}, {"far": outcome(5)}, {"far": few})
    paths = [run(tmp_path / str(number), {"wide": outcome(5)} | more) for number, more in enumerate(others)]
    with pytest.raises(UserError, match=r"number of episodes of each task on far is 10 and 4$"):
        compare(paths)


def test_a_seed_counts_once(tmp_path):
    paths = [run(tmp_path / name, outcome(5)) for name in "ab"]
    with pytest.raises(UserError, match=r"a/report.json and .*b/report.json have the same options and seed 0"):
        compare(paths)


def test_rows_may_have_other_distributions_beside_those_they_share(tmp_path):
    paths = [
        run(tmp_path / "a", {"wide": outcome(5), "far": outcome(5)}),
        run(tmp_path / "b", {"near": outcome(4), "wide": outcome(6)}, env_steps=5),
    ]
    comparison = compare(paths)
    assert comparison.distributions == ["wide", "far", "near"]
    assert [each["distribution"] for each in comparison.differences()] == ["wide"]
    write(tmp_path / "out", comparison)
    assert (tmp_path / "out" / "compare.png").stat().st_size > 1000


def test_what_never_succeeds_is_drawn(tmp_path):
    assert wilson(0, 20)[0] > 0  # by rounding
    write(tmp_path / "out", compare([run(tmp_path / "a", outcome(0, 0))]))
    assert (tmp_path / "out" / "compare.png").stat().st_size > 1000


def test_what_is_no_finished_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^expected runs to compare, such as"):
        compare([])
    with pytest.raises(UserError, match=r"^no run in .*nothing; expected a run's folder"):
        compare([tmp_path / "nothing"])
    begun = run(tmp_path / "begun", outcome(5))
    (begun / "report.json").unlink()
    with pytest.raises(UserError, match=rf"begun is not finished .* train.py resume={begun} continues it$"):
        compare([begun])
    for text in ("not JSON", "[]", "{}", '{"evaluations": [{"stage": "rl"}]}', '{"evaluations": 3}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match=r"other.json is no report of train.py \("):
            compare([tmp_path / "other.json"])
    made = Report("reach", None, seed=0)
    made.add("baseline planner", "wide", outcome(3))
    made.write(tmp_path, {})
    with pytest.raises(UserError, match=r"report.json has no evaluation of a policy after training"):
        compare([tmp_path])


def test_an_earlier_report_of_returns_cannot_be_compared(tmp_path):
    record = json.loads((run(tmp_path / "a", earned(torch.ones(STARTS))) / "report.json").read_text())
    for evaluation in record["evaluations"]:
        del evaluation["per_task"][0]["outcomes"]
    (tmp_path / "a" / "report.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="earlier version, without the returns of single episodes"):
        compare([tmp_path / "a"])


def test_the_page_the_record_and_the_figure(tmp_path, monkeypatch):
    from embodied.report import comparison_report

    drawn = []
    lines = comparison_report._lines
    monkeypatch.setattr(comparison_report, "_lines", lambda *given: (drawn.append(given[1]), lines(*given)))
    paths = []
    for epochs in (2, 3):
        for seed in (0, 1):
            paths.append(run(tmp_path / f"{epochs}{seed}", outcome(9 - epochs, 4), seed, algorithm={"epochs": epochs}))
            with Logger(paths[-1]) as logger:
                logger.log(50, {"sft/loss": 1.0})
                for step in range(100, 500 + 100 * seed, 100):
                    logger.log(step, {"rollout/success": step / 1000, "rollout/episode_return": -1.0})
    comparison = compare(paths)
    text = write(tmp_path / "out", comparison)
    assert "| wide | algorithm.epochs=2 | 0, 1 | 55.0% [39.8, 69.3] | 55.0% [39.8, 69.3] |" in text
    assert "| algorithm.epochs=2 over algorithm.epochs=3 | wide | +5.0 points [" in text
    assert "| 75.0% [" in text
    assert "| algorithm.epochs | 2 | 3 |" in text
    assert text.endswith(f"wrote {tmp_path}/out/compare.md, .json and .png")
    page = (tmp_path / "out" / "compare.md").read_text()
    claim = "algorithm.epochs=2 is not significantly better than algorithm.epochs=3 on wide."
    assert page.startswith(
        f"# Comparison on reach\n\n{claim}\n\n| distribution | row | seeds | IQM of success | mean success |\n"
    )
    assert f"| algorithm.epochs=3 | 1 | {paths[3]}/report.json |" in page
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert {key: record[key] for key in comparison.summary()} == comparison.summary()
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    (curves,) = drawn
    assert [[run.tolist() for run in runs] for runs in curves.values()] == 2 * [
        [[[100, 0.1], [200, 0.2], [300, 0.3], [400, 0.4]], [[100, 0.1], [200, 0.2], [300, 0.3], [400, 0.4], [500, 0.5]]]
    ]
    assert write(tmp_path / "out", comparison) == text  # in place of the earlier one
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.json", "compare.md", "compare.png"]
    with pytest.raises(UserError, match=r"report.json is a file; choose another output"):
        write(paths[0] / "report.json", comparison)
