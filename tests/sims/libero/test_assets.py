from pathlib import Path

import pytest

from sims.libero import assets
from sims.libero.assets import FOLDERS, STAND_IN, find_assets


@pytest.fixture(autouse=True)
def nothing_downloaded(monkeypatch, tmp_path):
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    monkeypatch.setattr(assets, "_downloaded", lambda: [tmp_path / "nothing"])


def tree(folder: Path) -> Path:
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    return folder


def test_stand_ins_when_there_is_nothing_else():
    assert find_assets() == STAND_IN
    assert find_assets(None).kind == "stand-in"


def test_argument_before_variable_before_download(monkeypatch, tmp_path):
    given, variable, downloaded = (tree(tmp_path / name) for name in ("given", "variable", "downloaded"))
    monkeypatch.setattr(assets, "_downloaded", lambda: [downloaded])
    assert find_assets().root == downloaded
    monkeypatch.setenv("LIBERO_ASSETS", str(variable))
    assert find_assets().root == variable
    assert find_assets(given).root == given
    assert find_assets(given).kind == "official"


def test_stand_ins_can_be_asked_for_although_official_ones_are_there(monkeypatch, tmp_path):
    monkeypatch.setenv("LIBERO_ASSETS", str(tree(tmp_path / "official")))
    assert find_assets("stand-in") == STAND_IN


def test_a_wrong_folder_is_an_error_not_a_silent_stand_in(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"assets=.*hf download lerobot/libero-assets"):
        find_assets(tmp_path)
    monkeypatch.setenv("LIBERO_ASSETS", str(tmp_path / "typo"))
    with pytest.raises(ValueError, match="LIBERO_ASSETS="):
        find_assets()
