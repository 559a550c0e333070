"""report.html shows what report.json says, in one file that loads nothing and renders without an error."""

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from embodied.evaluation.evaluation import EvaluationResult
from embodied.evaluation.in_training import InTraining
from embodied.report.curves import CURVES
from embodied.report.page import page as pages
from embodied.report.report import Report
from embodied.training.logging import Logger

CHROMIUM = shutil.which("chromium")
REQUIRED = os.environ.get("CI_CHROMIUM") == "required"
browsed = pytest.mark.skipif(not CHROMIUM and not REQUIRED, reason="needs chromium")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
ITS_OWN = re.compile(r"https?://([\w.-]+\.)?(google|googleapis|gstatic)\.com/")
"""What Chromium asks for whatever it shows."""
HOSTILE = 'pick <b id="x">&amp; "go"'
NAMES = (HOSTILE, "pick_butter", "pick_milk")


def outcome(*successes: int, starts: int = 20, first: int = 0) -> EvaluationResult:
    """Each of `NAMES` has so many successes; of the failures the first is a drop, the others are time-outs."""
    success = torch.stack([torch.arange(starts) < each for each in successes])
    dropped = torch.stack([torch.arange(starts) == each for each in successes])
    failures = {"dropped": dropped, "time-out": ~success & ~dropped}
    steps = torch.full_like(success, 90, dtype=torch.int64)
    return EvaluationResult(NAMES[: len(successes)], success, steps, 280, failures=failures, first_start=first)


def report(assets: str | None = "official") -> Report:
    made = Report("libero_pick", assets, seed=3, export_target="c", env_steps=1_050_000, episodes=8000, cpu_s=480.0)
    made.arguments = ["task=libero_pick", "seed=3", "output=/tmp/x"]
    made.wall_s = {"SFT": 61.0, "simulation": 3600.0, "policy": 300.0, "update": 12.5}
    made.phase_cpu_s = {"SFT": 100.0}
    made.meanings = {"wide": "Anywhere.", "areas": "Of no evaluation."}
    made.add("sft", "wide", outcome(12, 10, 8))
    made.add("sft_control", "wide", outcome(13, 10, 9))
    made.add("rl", "wide", outcome(20, 6, 17))
    made.add("rl", "official", outcome(20, 20, 20))
    return made


def written(directory: Path, made: Report | None = None) -> str:
    made_page = pages.page((made or report()).to_dict(), directory, ["next <this>"])
    (directory / "report.html").write_text(made_page)
    return made_page


class Reader(HTMLParser):
    """Texts of a page, what it refers to, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.links, self.tags = "", [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def log_training(directory: Path) -> None:
    with Logger(directory) as logger:
        for step in range(1000):
            logger.log(1000 * step, {"rollout/success": step / 1000})


def test_a_run_writes_the_page_from_the_record_of_the_other_reports(tmp_path):
    report().write(tmp_path, {})
    page = read((tmp_path / "report.html").read_text())
    record = json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "report.md").read_text().splitlines()[2] == record["headline"]
    assert "Fell**: pick_butter on wide from SFT to RL: -20.0 points" in (tmp_path / "report.md").read_text()
    assert report().summary(tmp_path).splitlines()[0] == record["headline"]
    assert page.text.count(record["headline"]) == 1
    assert (
        page.text.index(record["headline"])
        < page.text.index("71.7% [59.2, 81.5] on 60")
        < page.text.index("By task on official")
    )
    assert page.text.index("By task on wide") < page.text.index("By task on official")
    assert (tmp_path / "report.md").read_text().splitlines()[4] == record["headline_intervals"]
    assert record["meanings"] == {"wide": "Anywhere."}
    assert "wideAnywhere." in page.text
    assert "- wide: Anywhere." in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob(".report*"))


def test_figures_are_those_of_the_record(tmp_path):
    text = read(written(tmp_path)).text
    assert "50.0% [37.7, 62.3]" in text
    gain = report().gains()["sft", "wide"]
    assert f"+21.7 points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]" in text
    for told in ("commit", "8,000", "1,050,000", "1 min 01 s", "1 h 05 min", "8 min 00 s", "9 min 40 s"):
        assert told in text, told
    assert "train.py task=libero_pick seed=3" in text
    assert "output=" not in text
    assert "next <this>" in text


def trained(made: Report) -> Report:
    """With evaluations during training on wide."""
    bounds = [(steps, value, value - 0.1, value + 0.1) for steps, value in ((500_000, 0.6), (1_050_000, 0.5))]
    points = [dict(zip(("env_steps", "success", "low", "high"), each, strict=True), episodes=90) for each in bounds]
    made.in_training = InTraining("wide", 1000, points)
    return made


def test_evaluations_during_training_are_a_curve_with_intervals_on_their_distribution(tmp_path):
    page = written(tmp_path, trained(report()))
    assert page.count('class="band"') == 1
    assert "Held-out success on wide." in page
    assert "after 500,000 steps: 60.0% [50.0%, 70.0%]" in page
    told = "best has the policy after 500,000 environment steps, chosen as the best of 2 evaluated during training"
    assert f"{told}: success 60.0% [50.0, 70.0] on 90 held-out episodes" in read(page).text
    assert told in trained(report()).summary(tmp_path)
    trained(report()).write(tmp_path, {})
    text = (tmp_path / "report.md").read_text()
    assert "| 1,050,000 | 50.0% [40.0%, 60.0%] | 90 |" in text
    again = report()
    again.load_state_dict(trained(report()).state_dict())
    assert again.in_training.points == trained(report()).in_training.points


def test_curves_show_them_too(tmp_path):
    made = trained(report())
    with Logger(tmp_path) as logger:
        for point in made.in_training.points:
            logger.log(point["env_steps"], {f"evaluation/{name}": point[name] for name in ("success", "low", "high")})
    made.write(tmp_path, CURVES)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert made._marks_along()["SFT"][:2] == (0, 0.5)
    assert made._marks_along()["RL"][0] == 1_050_000


def test_names_are_text(tmp_path):
    page = written(tmp_path)
    assert HOSTILE in read(page).text
    assert HOSTILE not in page
    assert 'id="x"' not in page


def test_the_page_refers_to_nothing_but_files_beside_it(tmp_path):
    (tmp_path / "video.mp4").write_bytes(b"film")
    (tmp_path / "trajectories.png").write_bytes(b"\x89PNG")
    page = read(written(tmp_path))
    files = {link for link in page.links if not link.startswith("data:")}
    assert files == {"report.json", "report.md", "video.mp4", "trajectories.png"}
    assert "data:video/mp4;base64,ZmlsbQ==" in page.links


def test_a_large_video_is_linked_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "VIDEO_BYTES", 3)
    (tmp_path / "video.mp4").write_bytes(b"film")
    page = read(written(tmp_path))
    assert "too large" in page.text
    assert "video" not in page.tags


def test_a_task_that_fell_is_told_in_words(tmp_path):
    text = read(written(tmp_path)).text
    assert "One task fell with reinforcement learning" in text
    assert "pick_butter (wide): -20.0 points [-38.6, +2.3] since SFT, not significant" in text
    assert text.count("▲ rose") == 2
    assert "▼ fell" not in text  # no arrow without significance


def test_failures_are_counted_by_reason_and_their_starts_filmed_by_a_command(tmp_path):
    made = Report("libero_pick", "official", seed=0)
    made.add("rl", "wide", outcome(20, 6, 17, first=100))
    text = read(written(tmp_path, made)).text
    assert "1 dropped, 13 time-out" in text
    command = f"evaluate.py checkpoint={tmp_path} 'distributions=[wide]' first_start=106 episodes=1"
    assert f"{command} 'task.tasks=[pick_butter]' video=true" in text


def test_starts_without_numbers_are_only_counted(tmp_path):
    made = Report("rest", None, seed=0)
    made.add("rl", "anywhere", replace(outcome(15), repeatable=False))
    text = read(written(tmp_path, made)).text
    assert "1 dropped, 4 time-out" in text
    assert "first_start=" not in text


def test_returns_take_the_place_of_success(tmp_path):
    made, returns = Report("line", None, seed=0), torch.tensor([[1.0, 2.0, 4.5]])
    for stage, shift in (("start", 0.0), ("rl", -3.0)):
        found = replace(outcome(0, starts=3), returns=returns + shift, failures={})
        made.add(stage, "Line-v0", found)
    text = read(written(tmp_path, made)).text
    assert "lowered mean return on line from 2.5 to -0.5." in text
    assert "One task fell" in text
    assert "success" not in text.split("Files beside")[0]


def test_conditions_are_rows_of_one_table_without_empty_columns(tmp_path):
    made = Report("hover", None, seed=0)
    for number in range(10):
        made.add(
            "rl",
            f"condition_{number}",
            replace(outcome(20 - number), metrics={"unknown": torch.full((1, 20), math.nan)}),
        )
    made.add("untrained", "condition_0", outcome(5))
    made.write(tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    assert page.count("<table") == page.count('<table class="results"') + 2  # costs and files
    head = read(page.split('<table class="results">')[1].split("</thead>")[0]).text
    assert head == "conditionstagesuccessgain of RLfailures"
    assert "raised success on hover from 25.0% to 100.0%" in page
    assert "unknown" not in page + (tmp_path / "report.md").read_text()


def test_what_is_missing_is_left_out(tmp_path):
    text = read(written(tmp_path, Report("nothing", None, seed=0))).text
    assert "No policy was evaluated in this run of nothing." in text
    assert "Video" not in text
    assert "A program made the parts of this run" in text


def test_stand_ins_and_notes_are_warned_of(tmp_path):
    made = report("stand-in")
    made.notes = ["No video: no display."]
    text = read(written(tmp_path, made)).text
    assert "(wide, stand-in assets)" in text
    assert "not benchmark numbers" in text
    assert "No video: no display." in text


def browse(page: Path, tmp_path: Path) -> tuple[str, str, set[str]]:
    """The page as it is after its scripts ran, what Chromium logged, and the addresses that the page asked for."""
    assert CHROMIUM, "CI_CHROMIUM=required, but there is no chromium"
    own = f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={tmp_path / 'net.json'}"
    command = [CHROMIUM, *OPTIONS, *own, "--dump-dom", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    asked = re.findall(r'"url":"(http[^"]+)"', (tmp_path / "net.json").read_text())
    return run.stdout, run.stderr, {url for url in asked if not ITS_OWN.match(url)}


@browsed
def test_a_browser_shows_the_page_without_an_error_or_a_request(tmp_path):
    log_training(tmp_path)
    (tmp_path / "video.mp4").write_bytes(b"film")
    written(tmp_path)
    dom, log, asked = browse(tmp_path / "report.html", tmp_path)
    assert "CONSOLE" not in log
    assert dom.count('class="chart"') == 1
    assert dom.count('<svg class="bar"') == 4
    assert asked == set()


@browsed
@pytest.mark.parametrize("guarded", [True, False])
def test_a_request_or_an_error_would_be_seen(tmp_path, guarded):
    page = written(tmp_path).replace("</main>", '<img src="http://192.0.2.1/x.png"><script>nothing();</script></main>')
    (tmp_path / "report.html").write_text(page if guarded else page.replace(pages.POLICY, ""))
    _, log, asked = browse(tmp_path / "report.html", tmp_path)
    assert "nothing is not defined" in log
    assert ("Content Security Policy" in log) == guarded
    assert asked == (set() if guarded else {"http://192.0.2.1/x.png"})


CLICK = """
const head = [...document.querySelectorAll("table.tasks")][0].tHead.rows[0].cells;
const names = () => [...document.querySelectorAll("table.tasks")[0].tBodies].map((b) => b.rows[0].cells[0].textContent);
const seen = { before: names() };
const click = (column) => { head[column].firstChild.click(); return names(); };
seen.up = click(3); seen.down = click(3); seen.named = click(0); seen.sorted = head[0].getAttribute("aria-sort");
const row = document.querySelectorAll("table.tasks")[0].tBodies[1];
row.querySelector("button.task").click();
seen.open = !row.rows[1].hidden;
row.querySelectorAll(".chip")[2].click();
seen.command = row.querySelector("pre").textContent;
document.title = JSON.stringify(seen);
"""


@browsed
def test_headings_sort_and_tasks_open(tmp_path):
    page = written(tmp_path).replace("</body>", f"<script>{CLICK}</script></body>")
    (tmp_path / "clicked.html").write_text(page)
    dom, log, _ = browse(tmp_path / "clicked.html", tmp_path)
    assert "CONSOLE" not in log
    title = re.search(r"<title>(.*)</title>", dom)
    assert title
    seen = json.loads(read(title[1]).text)
    assert seen["before"] == list(NAMES)
    assert seen["up"] == ["pick_butter", "pick_milk", HOSTILE]
    assert seen["down"] == seen["up"][::-1]
    assert (seen["named"], seen["sorted"]) == ([HOSTILE, "pick_butter", "pick_milk"], "ascending")
    assert seen["open"]
    assert "first_start=8 episodes=1 'task.tasks=[pick_butter]'" in seen["command"]
