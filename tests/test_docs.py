"""Programs in docs/ run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_run_as_they_are_printed(page: Path, tmp_path: Path):
    program = "\n".join(blocks(page)).replace("env_steps=100_000", "env_steps=50_000")
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    if page.name == "own_simulator.md":
        report = (tmp_path / "outputs/rest/report.md").read_text()
        assert "no numbered initial states" in report
        assert "cannot be restored" in report
        assert re.search(r"RL +anywhere +(9\d|100)\.\d%", run.stdout), run.stdout


def test_the_simulator_is_as_short_as_it_says():
    first = blocks(ROOT / "docs" / "own_simulator.md")[0]
    code = first[first.index("class Spring") : first.index("sizes = ")]
    assert len([line for line in code.splitlines() if line.strip()]) < 60
