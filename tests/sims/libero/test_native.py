"""Loading the compiled stepping: one warning where it is missing or does not fit."""

import ctypes
import warnings

import pytest

import hatch_build
from sims.libero import native
from sims.libero.predicates import Predicate


@pytest.fixture
def fresh():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_missing_library_warns_once_and_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libnative.so")
    with pytest.warns(RuntimeWarning, match="install a C compiler") as caught:
        assert native.library() is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None


@pytest.mark.usefixtures("fresh")
def test_a_library_of_another_mujoco_is_not_used(monkeypatch):
    if not native.LIBRARY.exists():
        pytest.skip("not compiled here")
    monkeypatch.setattr(native.mujoco, "mj_version", lambda: 3001000)
    with pytest.warns(RuntimeWarning, match="another MuJoCo"):
        assert native.library() is None


@pytest.mark.usefixtures("fresh")
def test_a_library_of_other_structs_is_not_used(monkeypatch):
    if not native.LIBRARY.exists():
        pytest.skip("not compiled here")

    class Larger(ctypes.Structure):
        _fields_ = (("a", ctypes.c_double * 99),)

    monkeypatch.setattr(native, "NativeScene", Larger)
    with pytest.warns(RuntimeWarning, match="another version"):
        assert native.library() is None


def test_too_many_joints_in_a_goal_are_refused():
    with pytest.raises(ValueError, match="9 joints"):
        native.NativePredicate.of(Predicate("joint", addresses=tuple(range(9))))


def test_build_without_a_compiler_says_so_and_leaves_no_old_library(monkeypatch, tmp_path):
    library = tmp_path / hatch_build.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("old")
    monkeypatch.setattr(hatch_build.shutil, "which", lambda _: None)
    assert hatch_build.compile_library(tmp_path) == "no C compiler found"
    assert not library.exists()


def test_build_that_fails_to_compile_leaves_nothing(tmp_path):
    source = tmp_path / hatch_build.SOURCE
    source.parent.mkdir(parents=True)
    source.write_text("not C")
    if (problem := hatch_build.compile_library(tmp_path)) != "no C compiler found":
        assert "failed" in problem
    assert [path.name for path in source.parent.iterdir()] == ["native.c"]
