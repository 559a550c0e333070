import pickle
from dataclasses import replace

import numpy as np
import pytest

from sims.libero import suite as suite_module
from sims.libero.suite import SUITES, initial_states, load_tasks, package_folder, step_limit_of


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
        package_folder("a_package_that_is_not_there")


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
    monkeypatch.setattr(suite_module, "package_folder", lambda package: tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        initial_states(replace(task, name="evil"))
    assert not (tmp_path / "ran").exists()
