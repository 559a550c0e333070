"""Programs in documents run as they are printed, and links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("sims/*/README.md")),
    *ROOT.glob("real_robot/**/README.md"),
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.evidence
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_programs_run_as_they_are_printed(page: Path, tmp_path: Path):
    program = "\n".join(blocks(page))
    if page.name == "own_simulator.md":
        program = program.replace("env_steps=100_000", "env_steps=50_000")
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    if page.name == "own_simulator.md":
        report = (tmp_path / "outputs/rest/report.md").read_text()
        assert "no numbered initial states" in report
        assert "cannot be restored" in report
        assert re.search(r"RL +anywhere +(9\d|100)\.\d%", run.stdout), run.stdout
    if page.name in ("own_algorithm.md", "own_policy.md"):
        returns = re.findall(r"'episode_return': ([\d.]+)", run.stdout)
        assert max(map(float, returns[-5:])) > 400.0, run.stdout  # of 500; random actions get 20
    if page.name == "own_offline_learner.md":
        returns = re.search(r"offline +CartPole-v1 +([\d.]+)", run.stdout)
        assert float(returns[1]) > 400.0, run.stdout  # of 500; the demonstrations get 112
        assert (tmp_path / "outputs" / "awr" / "report.html").exists()
    if page.name == "own_dataset.md":
        assert re.search(r"of 500: (4[5-9]\d|500)", run.stdout), run.stdout
        assert (tmp_path / "my_dataset" / "meta" / "info.json").exists()
    if page.name == "own_robot.md":
        assert re.search(r"HOLDING: stale measurement: .*; velocity 0\.0\n", run.stdout), run.stdout
        assert "STOPPED: a person pressed the button" in run.stdout
    if page.name == "library.md":
        assert re.search(r"survives (9\d|100)\.\d%", run.stdout), run.stdout


def test_the_simulator_is_as_short_as_it_says():
    first = blocks(ROOT / "docs" / "own_simulator.md")[0]
    code = first[first.index("class Spring") : first.index("sizes = ")]
    assert len([line for line in code.splitlines() if line.strip()]) < 60


def test_the_first_page_has_at_most_700_words():
    first, _, _ = (ROOT / "README.md").read_text().partition("\n## More\n")
    assert 500 < len(first.split()) <= 700
