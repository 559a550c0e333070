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


def test_assets_of_make_assets_are_found_first_and_by_name(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    tree(tmp_path / ".cache" / "libero" / "assets")
    assert find_assets().root == tmp_path / ".cache" / "libero" / "assets"
    with pytest.raises(ValueError, match=r"assets=package: .* run `make assets`"):
        find_assets("package")
    folder = tree(assets.package_folder())
    assert find_assets() == find_assets("package") == assets.Assets(folder, "official")
    assert find_assets("stand-in") == STAND_IN
    monkeypatch.setenv("LIBERO_ASSETS", "package")
    assert find_assets().root == folder


def test_the_source_names_the_folder_or_the_command_that_fetches_them(tmp_path):
    assert str(tmp_path) in find_assets(tree(tmp_path)).source
    assert "official assets" in find_assets(tmp_path).source
    assert "make assets" in STAND_IN.source
    assert "stand-ins" in STAND_IN.source
