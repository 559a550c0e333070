"""Every interval that a document prints is in a linked result, and every result's intervals follow from its counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import asynchronous_ppo, charts, libero_expert
from benchmarks.figures import (
    COMMIT,
    commits,
    discordant_pairs,
    linked_results,
    measured_intervals,
    printed_intervals,
    rates,
)
from embodied.evaluation.evaluation import Z95, EvaluationResult, rate_over_seeds, wilson

ROOT = Path(__file__).parent.parent
RESULTS = {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("sims/*/README.md")),
    *sorted(ROOT.glob("policies/**/README.md")),
    *sorted(ROOT.glob("real_robot/**/README.md")),
]
WITHOUT_COMMIT = {
    "libero_over_ros2_delay.json",
    "libero_over_ros2_impedance.json",
    "libero_over_ros2_official.json",
    "libero_over_ros2_wide.json",
    "libero_parity.json",
    "mjcf_speed.json",
    "quadrotor_speed.json",
    "remote_speed.json",
    "shared_cores.json",
    "safety_speed.json",
    "vehicle_speed.json",
}
"""Results measured before their programs recorded a commit: documents say so beside the link."""


def test_intervals_and_results_of_a_document():
    first, second, third, fourth = printed_intervals(
        "# Hand\n[figures](../benchmarks/results/hand.json)\n\n"
        "| 94.0% [92.0,\n96.1] | `[0, 1]` | +6.5 points [-1.9, +11.0] |\n"
        "# Arm\n**98 of 100** [93.0, 99.4] or 0.060 m ± 0.002; scores in [-1, 1]\n"
    )
    assert (first.estimate, first.low, first.high, first.line) == ("94.0", "92.0", "96.1", 4)
    assert first.results == second.results == {"hand.json"}
    assert (second.estimate, second.low, second.high) == ("+6.5", "-1.9", "+11.0")
    assert (third.estimate, third.results) == ("98.0", frozenset())
    assert (fourth.estimate, fourth.half_width) == ("0.060", "0.002")


@pytest.mark.parametrize(
    ("printed", "result", "equal"),
    [
        ("94.0% [92.0, 96.1]", {"success": 0.94, "low": 0.9199, "high": 0.9613}, True),
        ("94.0% [92.0, 96.1]", {"success": 0.94, "low": 0.9189, "high": 0.9613}, False),
        ("93.0% [92.0, 96.1]", {"success": 0.94, "low": 0.92, "high": 0.961}, False),
        ("0.30 s [0.17, 0.42]", {"time_s": -0.298, "low": -0.424, "high": -0.173}, True),
        ("+0.30 [+0.17, +0.42]", {"time_s": -0.298, "low": -0.424, "high": -0.173}, False),
        ("0.060 m ± 0.002", {"mean": 0.0601, "half_width": 0.0019}, True),
        ("0.060 m ± 0.002", {"mean": 0.0601, "half_width": 0.0029}, False),
    ],
)
def test_a_printed_interval_equals_a_measured_one_as_it_is_rounded(printed: str, result: Any, equal: bool):
    (interval,) = printed_intervals(printed)
    assert any(interval.equals(measured) for measured in measured_intervals([result])) == equal


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_intervals_are_in_results_that_their_section_links_to(page: Path):
    missing = [
        f"line {printed.line}: {printed.text}"
        for printed in printed_intervals(page.read_text())
        if not any(printed.equals(each) for name in printed.results for each in measured_intervals(RESULTS[name]))
    ]
    assert not missing


@pytest.mark.parametrize("name", RESULTS)
def test_rates_have_wilsons_interval_of_their_episodes(name: str):
    for rate in rates(RESULTS[name]):
        successes = rate["success"] * rate["episodes"]
        assert successes == pytest.approx(round(successes), abs=1e-6)
        assert (rate["low"], rate["high"]) == pytest.approx(wilson(round(successes), rate["episodes"]), abs=1e-9)


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if "gains" in result])
def test_gains_follow_from_the_episodes(name: str):
    result = RESULTS[name]
    evaluations = {(row["stage"], row["distribution"]): row for row in result["evaluations"]}
    for gain in [*result["gains"], *result["gains_over_better"]] if "gains_over_better" in result else result["gains"]:
        after, before = evaluations["rl", gain["distribution"]], evaluations.get((gain["over"], gain["distribution"]))
        interval = gain["difference"], gain["low"], gain["high"]
        if before is None or "success" not in after:
            continue
        if all("outcomes" in task for row in (after, before) for task in row["per_task"]):
            own = outcomes(after).gain_over(outcomes(before))
            assert interval == pytest.approx((own.difference, own.low, own.high), abs=1e-9)
        else:
            won, lost = discordant_pairs(*interval, pairs=after["episodes"], z=Z95)
            assert after["success"] - before["success"] == pytest.approx(gain["difference"], abs=1e-9)
            assert (won, lost) == pytest.approx((round(won), round(lost)), abs=1e-3)


def outcomes(evaluation: dict[str, Any]) -> EvaluationResult:
    """The evaluation with the success of each of its episodes."""
    tasks = [task["task"] for task in evaluation["per_task"]]
    rows = [[float(outcome) for outcome in task["outcomes"].split()] for task in evaluation["per_task"]]
    success = torch.tensor(rows) > 0.5
    return EvaluationResult(tuple(tasks), success, torch.zeros_like(success), evaluation["step_limit"])


def test_means_over_seeds_follow_from_the_rows():
    result = RESULTS["asynchronous_ppo.json"]
    assert result["means"] == asynchronous_ppo.means(result["rows"])
    plain = next(row for row in result["means"] if (row["task"], row["row"]) == ("libero_pick", "4, naive"))
    # by seed -1.2, -12.0 and -4.0 points, a deviation of 5.6; Student's quantile of two degrees of freedom is 4.303
    assert plain["over"]["0"]["difference"] == pytest.approx(-0.0573, abs=1e-4)
    assert plain["over"]["0"]["high"] == pytest.approx(-0.0573 + 4.303 * 0.0561 / 3**0.5, abs=1e-3)


def test_rates_of_the_scripted_expert_follow_from_its_episodes():
    result = RESULTS["libero_expert.json"]
    assert result["rates"] == libero_expert.rates(result["results"])


def test_rates_over_seeds_count_seeds_and_starts():
    mean, low, high = rate_over_seeds([0.95, 0.96, 0.97], 500)
    seeds = 4.303 * 0.01 / 3**0.5
    starts_low, starts_high = wilson(480, 500)
    assert mean == pytest.approx(0.96)
    assert low == pytest.approx(0.96 - ((0.96 - starts_low) ** 2 + seeds**2) ** 0.5, abs=1e-5)
    assert high == pytest.approx(0.96 + ((starts_high - 0.96) ** 2 + seeds**2) ** 0.5, abs=1e-5)
    assert rate_over_seeds([0.96, 0.96], 500)[1:] == pytest.approx((starts_low, starts_high))
    assert rate_over_seeds([0.96], 500)[1:] == pytest.approx((starts_low, starts_high))


@pytest.mark.parametrize("name", RESULTS)
def test_results_name_a_clean_commit_or_documents_say_that_they_do_not(name: str):
    named = list(commits(RESULTS[name]))
    assert (not named) == (name in WITHOUT_COMMIT)
    assert all(COMMIT.fullmatch(commit) for commit in named)
    words = "no commit" if name in WITHOUT_COMMIT else ""
    paragraphs = [block for page in PAGES for block in page.read_text().split("\n\n") if name in linked_results(block)]
    silent = [block for block in paragraphs if words not in " ".join(block.split())]
    assert not silent


@pytest.mark.parametrize("name", charts.CHARTS)
def test_charts_are_drawn_from_todays_results(name: str):
    stored = (charts.IMAGES / f"chart_{name}.svg").read_text()
    assert stored == charts.svg(charts.CHARTS[name]), "python -m benchmarks.charts draws them again"


def test_a_chart_shows_rates_in_percent_with_their_intervals():
    (axes,) = charts.hover().axes
    row = [label.get_text() for label in axes.get_yticklabels()].index("mass +20%, thrust -15%")
    segments = axes.collections[0].get_segments()
    assert axes.lines[0].get_xdata()[row] == pytest.approx(85.1, abs=0.05)
    assert segments[row][:, 0] == pytest.approx([81.8, 87.9], abs=0.05)
