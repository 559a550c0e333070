"""The compiled stepping: one warning where it can't be compiled."""

import warnings

import pytest

from embodied import native as compiling
from sims.libero.physics import native
from sims.libero.scene.predicates import Predicate


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    compiling.forget()
    yield
    native.library.cache_clear()
    compiling.forget()


def warned_once(match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match) as caught:
        assert native.library() is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_it_warns_once_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    warned_once("no C compiler found .* install one")


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(compiling.compiler() is None, reason="no C compiler")
def test_without_headers_it_warns_once_with_the_compilers_message(monkeypatch, tmp_path):
    headers = tmp_path / "none" / "include"
    headers.mkdir(parents=True)
    monkeypatch.setattr(native, "HEADERS", headers)
    warned_once(r"LIBERO runs in numpy, .*mujoco\.h")


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(compiling.compiler() is None, reason="no C compiler")
def test_it_is_compiled_at_first_use():
    assert native.library() is not None


def test_too_many_joints_in_a_goal_are_refused():
    with pytest.raises(ValueError, match=r"at most 8 joints .*got 9"):
        native.NativePredicate.of(Predicate("joint", addresses=tuple(range(9))))
