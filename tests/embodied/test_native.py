"""C compiled at first use: once, completely or not at all, and again if any dependency changes."""

import ctypes
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from embodied import native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
ANSWER = "int answer(void) { return 42; }"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.forget()
    yield tmp_path / "embodied-rl"
    native.forget()


def test_libraries_are_compiled_once_into_the_cache(folder):
    assert native.load(ANSWER).answer() == 42
    (made,) = folder.iterdir()
    before = made.stat().st_mtime_ns
    native.forget()
    assert native.load(ANSWER).answer() == 42
    assert made.stat().st_mtime_ns == before


def test_what_fails_to_compile_is_one_line_and_leaves_nothing(folder):
    with pytest.raises(ValueError, match=r"could not compile .*set CC") as caught:
        native.load("int broken(void) { return")
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())


def test_source_flags_and_headers_each_make_another_library(folder, tmp_path):
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "answer.h").write_text("#define ANSWER 1")
    source = '#include "answer.h"\nint answer(void) { return ANSWER; }'
    assert native.load(source, include=(headers,)).answer() == 1
    assert native.load(source, ("-O1",), (headers,)).answer() == 1
    assert native.load(source + "\n", include=(headers,)).answer() == 1
    (headers / "answer.h").write_text("#define ANSWER 2")
    native.forget()
    assert native.load(source, include=(headers,)).answer() == 2
    assert len(list(folder.iterdir())) == 4


def test_processes_that_compile_the_same_at_once_all_get_it(folder):
    program = f"from embodied import native; print(native.load({ANSWER!r}).answer())"
    runs = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate()[0].strip() for run in runs] == ["42"] * 2
    (made,) = folder.iterdir()  # nothing temporary stays
    assert ctypes.CDLL(str(made)).answer() == 42


def test_the_wheel_is_for_every_platform_and_carries_the_sources():
    # hatchling takes every file of these folders that git does not ignore; a build hook could make it another wheel.
    project = tomllib.loads((Path(native.__file__).parent.parent / "pyproject.toml").read_text())
    build = project["tool"]["hatch"]["build"]
    assert set(build) == {"targets"}
    wheel, root = build["targets"]["wheel"], Path(native.__file__).parent.parent
    assert wheel["packages"] == ["embodied", "policies", "real_robot", "sims"]
    assert set(wheel["force-include"]) == {"configs", *(path.name for path in root.glob("*.py"))}
    assert set(wheel) == {"packages", "force-include"}
