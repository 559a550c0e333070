"""Tests that `make test-changed` runs: those that depend on what differs."""

import subprocess
from pathlib import Path

import pytest

from tests import changed, imports
from tests.imports import ROOT

FILES = {
    "policies/net.py": "WIDTH = 3",
    "policies/registry.py": "from policies import net",
    "sims/tasks.py": 'import importlib\nload = lambda name: importlib.import_module(f"sims.worlds.{name}")',
    "sims/worlds/lift.py": "NAME = 'lift'",
    "sims/worlds/lift.xml": "<mujoco/>",
    "train.py": "def run():\n    from policies import registry",
    "configs/task/lift.yaml": "name: lift",
    "embodied/config.py": 'FOLDER = "configs"\nRESUME = "python train.py"',
    "docs/lift.md": "# Lift",
    "tests/conftest.py": "",
    "tests/policies/conftest.py": "from sims import tasks",
    "tests/policies/test_net.py": "from policies.net import WIDTH",
    "tests/test_lift.py": "from sims.tasks import load",
    "tests/test_program.py": '"""Of lift.md."""\nCOMMAND = ["python", "train.py"]',
    "tests/test_config.py": "import embodied.config",
    "tests/test_docs.py": 'PAGES = "*.md"',
}
"""A small tree: a policy and its registry, a world loaded by name with its data, a program, options, documents."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # as in a hook
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("policies/net.py", ["policies/test_net", "test_program"]),  # the nearest first
        ("policies/registry.py", ["test_program"]),
        ("sims/worlds/lift.py", ["test_lift", "policies/test_net"]),  # loaded by name; by a conftest.py
        ("sims/worlds/lift.xml", ["test_lift", "policies/test_net"]),
        ("train.py", ["test_program"]),  # not test_config, which imports a message that names it
        ("configs/task/lift.yaml", ["test_config"]),
        ("docs/lift.md", ["test_docs"]),
        ("tests/policies/conftest.py", ["policies/test_net"]),
        ("tests/test_lift.py", ["test_lift"]),
    ],
)
def test_tests_depend_on_what_they_import_start_load_and_read(tree: Path, name: str, tests: list[str]):
    arrows = changed.dependencies({tree / each for each in FILES})
    assert changed.tests_of({tree / name}, arrows) == [f"tests/{each}.py" for each in tests]


def test_what_differs_is_committed_modified_new_or_gone_since_the_branch_began(tree: Path):
    def git(*command: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *command], cwd=tree, check=True, capture_output=True)

    def commit() -> None:
        git("add", ".")
        git("commit", "--no-verify", "-m", "more")

    git("init", "--initial-branch=main")
    (tree / ".gitignore").write_text("ignored.py\n")
    commit()
    git("switch", "--create", "branch")
    (tree / "sims" / "committed.py").touch()
    commit()
    git("switch", "main")
    (tree / "sims" / "elsewhere.py").touch()
    commit()
    git("switch", "branch")
    (tree / "train.py").write_text("RUN = 1")
    (tree / "new.py").touch()
    (tree / "ignored.py").touch()
    (tree / "policies" / "net.py").unlink()
    names = {str(path.relative_to(tree)) for path in changed.changed_files("main")}
    assert names == {"sims/committed.py", "train.py", "new.py", "policies/net.py"}


def test_programs_that_tests_of_this_tree_start_are_among_their_dependencies():
    present = changed.git("ls-files", "--cached", "--others", "--exclude-standard")
    arrows = changed.dependencies({path for path in present if path.is_file()})
    for name, test in (
        ("train.py", "tests/embodied/runtime/test_streams.py"),
        ("sims/mjcf/tasks/reacher.py", "tests/sims/mjcf/test_tasks.py"),
        ("configs/combinations.yaml", "tests/test_combinations.py"),
        (".ci/run", "tests/test_ci.py"),
    ):
        assert test in changed.tests_of({ROOT / name}, arrows)
