"""The wheel holds the programs and their configurations: `embodied train ...` works anywhere, without a clone."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
BUILD = "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d"
"""Command of the release workflow."""


@pytest.fixture(scope="module")
def embodied(tmp_path_factory):
    """Runs the command `embodied` of a wheel that is built from this tree, in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, *BUILD, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (sources,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    site, here = folder / "site", folder / "here"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    here.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(site / "bin" / "embodied"), *arguments]
        return subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    run.site, run.here, run.sources = site, here, sources
    return run


def test_a_run_trains_and_is_evaluated_without_a_clone(embodied):
    small = [
        "env_steps=400",
        "num_envs=4",
        "evaluation_starts=4",
        "evaluation_envs=4",
        "task.step_limit=20",
        "video=false",
    ]
    trained = embodied("train", "task=quadrotor_hover", "output=run", *small)
    assert trained.returncode == 0, trained.stderr
    assert "embodied evaluate checkpoint=run" in trained.stdout + trained.stderr
    report = json.loads((embodied.here / "run" / "report.json").read_text())
    assert report["git_commit"] == "unknown"
    evaluated = embodied("train", "resume=run", "eval_only=true")  # becomes the program evaluate
    assert evaluated.returncode == 0, evaluated.stderr
    assert (embodied.here / "run" / "evaluation.json").exists()
    exported = embodied("export", "checkpoint=run", "target=c")
    assert exported.returncode == 0, exported.stderr


def test_it_says_what_there_is(embodied):
    listed = embodied("train", "list=tasks")
    assert "quadrotor_hover" in listed.stdout + listed.stderr
    assert "embodied train task=NAME" in listed.stdout + listed.stderr
    nothing, wrong = embodied(), embodied("fly")
    assert (nothing.returncode, wrong.returncode) == (0, 1)
    assert all("embodied evaluate --help" in each.stdout for each in (nothing, wrong))
    assert "name: quadrotor_hover" in embodied("train", "--cfg", "job", "task=quadrotor_hover").stdout


def test_all_that_runs_comes_from_the_wheel(embodied):
    shown = "import embodied.commands as p, embodied; print(embodied.__file__, p.PROGRAMS, p.CLONE)"
    run = subprocess.run(
        [sys.executable, "-c", shown],
        cwd=embodied.here,
        env=os.environ | {"PYTHONPATH": str(embodied.site)},
        capture_output=True,
        text=True,
        check=True,
    )
    package, programs, clone = run.stdout.split()
    assert Path(package).is_relative_to(embodied.site)
    assert Path(programs) == embodied.site / "embodied" / "programs"
    assert clone == "False"
    here = {str(path.relative_to(ROOT)) for path in ROOT.glob("configs/**/*.yaml")}
    there = {str(path.relative_to(programs)) for path in Path(programs).glob("configs/**/*.yaml")}
    assert here == there


def test_a_release_builds_the_same_from_its_sources(embodied):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    assert f"python {' '.join(BUILD)} dist" in steps
    with tarfile.open(embodied.sources) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    packages = {str(path.relative_to(embodied.site)) for path in embodied.site.rglob("*") if path.is_file()}
    own = {name for name in packages if name.startswith(("embodied/", "policies/", "real_robot/", "sims/"))}
    missing = {
        name for name in own - sources if not name.startswith("embodied/programs/") and "__pycache__" not in name
    }
    assert len(own) > 500
    assert not missing


def test_the_wheel_does_not_run_among_files_of_another_package_embodied(embodied):
    other = embodied.site / "embodied-1.2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: embodied\nVersion: 1.2\n")
    refused = embodied("train", "list=tasks")
    shutil.rmtree(other)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: embodied 1.2 is another package")
    assert len(refused.stderr.splitlines()) == 1
