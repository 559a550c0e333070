import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest

from sims.libero import suite as suite_module
from sims.libero.assets import STAND_IN, package_folder
from sims.libero.environment import LiberoEnvironment
from sims.libero.scene.scene import build_scene
from sims.libero.suite import PERTURBED, SUITES, initial_states, installed_folder, load_tasks, step_limit_of


def test_order_and_instructions_are_the_benchmarks():
    tasks = load_tasks("libero_object")
    assert [task.index for task in tasks] == list(range(10))
    assert tasks[0].language == "pick up the alphabet soup and place it in the basket"
    assert tasks[7].name == "pick_up_the_milk_and_place_it_in_the_basket"
    assert [len(load_tasks(name)) for name in SUITES] == [10, 10, 10, 90, 10]


def test_scene_names_are_no_part_of_the_instruction():
    languages = [task.language for task in load_tasks("libero_90") + load_tasks("libero_10")]
    assert "close the microwave" in languages
    assert not any("SCENE" in language or language != language.strip() for language in languages)


def test_selects_by_index_and_name_in_the_order_asked():
    name = "pick_up_the_butter_and_place_it_in_the_basket"
    assert [task.index for task in load_tasks("libero_object", [3, name, 0])] == [3, 6, 0]


@pytest.mark.parametrize("key", [10, -1, "pick_up_nothing"])
def test_unknown_task_is_an_error_that_lists_the_tasks(key):
    with pytest.raises(ValueError, match="pick_up_the_milk"):
        load_tasks("libero_object", [key])


def test_unknown_suite_is_an_error_that_lists_the_suites():
    with pytest.raises(ValueError, match="libero_spatial, libero_object"):
        load_tasks("libero_objects")


def test_step_limits_are_those_of_each_suite_and_the_longest_where_they_mix():
    limits = [step_limit_of(load_tasks(suite, [0])) for suite in SUITES]
    assert dict(zip(SUITES, limits, strict=True)) == {
        "libero_spatial": 220,
        "libero_object": 280,
        "libero_goal": 300,
        "libero_90": 400,
        "libero_10": 520,
    }
    assert step_limit_of(load_tasks("libero_spatial", [0]) + load_tasks("libero_10", [0])) == 520


def test_missing_package_says_how_to_install_it():
    with pytest.raises(ValueError, match="pip install --no-deps hf-libero"):
        installed_folder("a_package_that_is_not_there")


def test_every_task_has_fifty_initial_states():
    for name in SUITES:
        for task in load_tasks(name):
            states = initial_states(task)
            assert states.shape[0] == 50
            assert states.dtype == np.float64
            assert np.isfinite(states).all()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_initial_states_run_no_code_from_the_file(tmp_path, monkeypatch):
    task = load_tasks("libero_object", [0])[0]
    folder = tmp_path / "libero" / "init_files" / task.suite
    folder.mkdir(parents=True)
    (folder / "evil.pruned_init").write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=2))
    monkeypatch.setattr(suite_module, "installed_folder", lambda package: tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        initial_states(replace(task, name="evil"))
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def perturbed(monkeypatch, tmp_path):
    """Task descriptions and states of one suite of LIBERO-PRO, made from LIBERO's, where `make assets` puts them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    suite_module._load.cache_clear()
    folder = package_folder().parents[1] / "libero" / "libero"
    base = load_tasks("libero_object")
    descriptions, states = folder / "bddl_files" / "libero_object_lan", folder / "init_files" / "libero_object_lan"
    states.mkdir(parents=True)
    shutil.copytree(base[0].bddl.parent, descriptions)
    soup = descriptions / base[0].bddl.name
    text = soup.read_text()
    assert "Pick the alphabet soup and place it in the basket" in text
    soup.write_text(text.replace("Pick the alphabet soup and place it in the basket", "grab the soup"))
    for task in base[:2]:
        np.savez_compressed(states / f"{task.name}.pruned_init.npz", states=initial_states(task) + 0.001)
    yield base
    suite_module._load.cache_clear()


def test_a_perturbed_suite_has_its_own_words_and_states_and_its_suites_order(perturbed):
    tasks = load_tasks("libero_object_lan")
    assert [task.name for task in tasks] == [task.name for task in perturbed]
    assert [tasks[0].language, tasks[1].language] == ["grab the soup", perturbed[1].language]
    np.testing.assert_array_equal(initial_states(tasks[1]), initial_states(perturbed[1]) + 0.001)
    assert step_limit_of(tasks) == 280
    env, before = (
        LiberoEnvironment(each[:1], 1, distribution="official", assets=STAND_IN, threads=1)
        for each in (tasks, perturbed)
    )
    difference = env.reset()["object_position"] - before.reset()["object_position"]
    assert difference.abs().max() > 5e-4


def test_a_perturbed_suite_that_is_not_there_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    suite_module._load.cache_clear()
    with pytest.raises(ValueError, match=r"libero_goal_swap needs LIBERO-PRO's tasks in .*; run `make assets`$"):
        load_tasks("libero_goal_swap")
    with pytest.raises(ValueError, match=r"unknown LIBERO suite 'libero_goal_object'; expected .*libero_goal_swap"):
        load_tasks("libero_goal_object")


@pytest.mark.skipif(not package_folder().exists(), reason="`make assets` has not run here")
def test_all_perturbed_suites_are_complete():
    assert len(PERTURBED) == 21
    for name, base in PERTURBED.items():
        for task, original in zip(load_tasks(name), load_tasks(base), strict=True):
            states = initial_states(task)
            assert states.shape[1] == initial_states(original).shape[1], (name, task.name)
            assert task.problem.objects == original.problem.objects
            assert task.problem.fixtures == original.problem.fixtures
            if name.endswith(("_lan", "_task")):
                assert task.language != original.language
            else:
                assert task.language == original.language, name
    soup = load_tasks("libero_object_temp_x0.5", [0])[0]
    scene = build_scene(soup, STAND_IN)
    shift = initial_states(soup)[:, 1:] - initial_states(load_tasks("libero_object", [0])[0])[:, 1:]
    assert shift[:, scene.object_qposadr[0]].mean() == pytest.approx(0.35, abs=0.02)
