"""Tasks of LIBERO-plus, with small data in its package's form; and its counts where its package is at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.errors import UserError
from embodied.saving.starting_point import StartingPoint
from sims.libero import suite
from sims.libero.assets import STAND_IN, find_assets, plus_folder
from sims.libero.environment import LiberoEnvironment
from sims.libero.perturbed import plus, selection
from sims.libero.perturbed.plus import PIVOT, SUITES, UNTURNED, Perturbation, turned_camera
from sims.libero.perturbed.selection import lacking
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.robot import INITIAL_ARM
from sims.libero.scene.scene import build_scene
from sims.libero.suite import initial_states, load_tasks, step_limit_of
from sims.libero.task import LiberoTask

SOUP = "pick_up_the_alphabet_soup_and_place_it_in_the_basket"
MILK = "pick_up_the_milk_and_place_it_in_the_basket"
VIEW = "view_0_0_100_0_0_initstate"
TASKS = [
    f"{SOUP}_view_30_15_100_0_0_initstate_0",
    f"{SOUP}_{VIEW}_2",
    f"{SOUP}_{VIEW}_0_noise_14",
    f"{SOUP}_language_1_{VIEW}_0",
    f"{SOUP}_language_2_{VIEW}_0",
    f"{SOUP}_light_7",
    f"{SOUP}_table_3",
    f"{SOUP}_tb_4",
    f"{SOUP}_add_1",
    f"{MILK}_level1_sample2",
]
WORDS = {1: "Could you fetch the letters in a can", 2: "please " * 20 + "fetch the soup"}
JOINTS = [0.1, -0.2, 0.05, -2.4, -0.1, 2.3, 0.7]
ROBOTS = f"""import numpy as np


class MountedPanda(object):
    @property
    def init_qpos(self):
        return np.array([0, -1.61037389e-01, 0.00, -2.44459747e00, 0.00, 2.22675220e00, np.pi / 4])


class MountedPanda2(MountedPanda):
    @property
    def init_qpos(self):
        return np.array({JOINTS})
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data of ten tasks, of all categories, in the form of the package; made from LIBERO's own."""
    suite._load.cache_clear()
    own = {task.name: task for task in load_tasks("libero_object")}
    for folder in ("benchmark", "envs/robots", "bddl_files/libero_object", "init_files/libero_object"):
        (tmp_path / folder).mkdir(parents=True)
    names = {each: TASKS if each == "libero_object" else [] for each in set(SUITES.values())}
    (tmp_path / "benchmark" / "libero_suite_task_map.py").write_text(f"libero_task_map = {names!r}\n")
    (tmp_path / "envs" / "robots" / "mounted_panda.py").write_text(ROBOTS)
    soup, milk = (own[name].bddl.read_text() for name in (SOUP, MILK))
    words = "Pick the alphabet soup and place it in the basket"
    problem = "LIBERO_Floor_Manipulation"
    assert soup.count(words) == soup.count(problem) == 1
    texts = {SOUP: soup, f"{MILK}_level1_sample2": milk}
    texts |= {f"{SOUP}_language_{number}": soup.replace(words, text) for number, text in WORDS.items()}
    for kind, scene in (("light_7", "light_sync_modified_7"), ("table_3", "floor_x"), ("tb_4", "floor_y")):
        texts[f"{SOUP}_{kind}"] = soup.replace(problem, f"Libero_Floor_Manipulation_{scene}")
    texts[f"{SOUP}_add_1"] = soup.replace("(:objects", "(:objects\n    can_of_soda__1_1 - can_of_soda__1")
    for name, text in texts.items():
        (tmp_path / "bddl_files" / "libero_object" / f"{name}.bddl").write_text(text)
    states = {name: initial_states(own[name]) for name in (SOUP, MILK)}
    torch.save(states[SOUP], tmp_path / "init_files" / "libero_object" / f"{SOUP}.pruned_init")
    other = tmp_path / "init_files" / "libero_newobj" / "libero_object"
    other.mkdir(parents=True)
    torch.save(states[MILK][3] + 0.001, other / f"{MILK}_level1_sample2.pruned_init")  # one state, without a row
    monkeypatch.setattr(plus, "plus_folder", lambda: tmp_path)
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    for cached in (suite._load, suite._names, suite._parse, plus._task_map, plus._initial_joints):
        cached.cache_clear()


NAMES = [
    ("libero_goal", "put_the_bowl_on_the_plate_view_0_0_100_2_354_initstate_0", "camera", (0, 0, 100, 2, 354), 0, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_view_0_0_100_0_0_initstate_213", "robot", UNTURNED, 213, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_view_0_0_100_0_0_initstate_0_noise_38", "noise", UNTURNED, 0, 38),
    ("libero_goal", "put_the_bowl_on_the_plate_language_1_view_0_0_100_0_0_initstate_0", "language", UNTURNED, 0, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_light_12", "light", UNTURNED, 0, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_table_1", "background", UNTURNED, 0, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_tb_10", "background", UNTURNED, 0, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_add_30", "layout", UNTURNED, 0, 0),
    ("libero_goal", "put_the_bowl_on_the_plate_moved_level1_sample1", "layout", UNTURNED, 0, 0),
]


@pytest.mark.parametrize(("base", "name", "category", "view", "robot", "noise"), NAMES)
def test_names_of_tasks_are_read(base, name, category, view, robot, noise) -> None:
    found = Perturbation.parse(name)
    assert found.base == "put_the_bowl_on_the_plate"
    assert (found.category, found.view, found.robot, found.noise) == (category, view, robot, noise)
    assert found.file == (name.partition("_view_")[0] if "_view_" in name else name)


def test_a_table_in_the_task_s_own_words_is_no_perturbation() -> None:
    name = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"
    assert Perturbation.parse(f"{name}_table_11").base == name
    with pytest.raises(UserError, match="expected the name of a task of LIBERO-plus"):
        Perturbation.parse(name)


def test_suites_have_the_tasks_of_their_category_in_order(data: Path) -> None:
    assert len(SUITES) == 4 * 8
    assert [task.name for task in load_tasks("libero_object_plus")] == TASKS
    categories = {name: [task.name for task in load_tasks(f"libero_object_plus_{name}")] for name in plus.CATEGORIES}
    assert {name: len(tasks) for name, tasks in categories.items()} == {
        **{"camera": 1, "robot": 1, "language": 2, "light": 1, "background": 2, "noise": 1, "layout": 2}
    }
    assert categories["background"] == TASKS[6:8]
    assert step_limit_of(load_tasks("libero_object_plus_camera")) == 280
    assert load_tasks("libero_object_plus", [9])[0].name == TASKS[9]


def test_missing_data_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plus, "plus_folder", lambda: tmp_path / "nowhere")
    _forget()
    with pytest.raises(UserError, match=r"expected its tasks in .*nowhere; run `make assets ARGS=plus`$"):
        load_tasks("libero_goal_plus_camera")
    with pytest.raises(UserError, match=r"unknown LIBERO suite 'libero_90_plus'; expected .*libero_goal_plus_camera"):
        load_tasks("libero_90_plus")


def test_only_what_is_perturbed_differs(data: Path) -> None:
    camera, robot, noise, fetch, *_, layout = load_tasks("libero_object_plus")
    soup, milk = load_tasks("libero_object", [SOUP, MILK])
    assert camera.language == robot.language == noise.language == soup.language  # no numbers of the file's name
    assert fetch.language == WORDS[1].lower()
    assert layout.language == milk.language
    for task in (camera, robot, noise, fetch):
        assert task.problem == (soup.problem if task is not fetch else task.problem)
        np.testing.assert_array_equal(initial_states(task), initial_states(soup))
    np.testing.assert_array_equal(initial_states(layout), initial_states(milk)[3:4] + 0.001)


POSITION = np.array([0.6586131746834771, 0.0, 1.6103500240372423])
QUATERNION = np.array([0.6380177736282349, 0.3048497438430786, 0.30484986305236816, 0.6380177736282349])


def looking(quaternion: np.ndarray) -> np.ndarray:
    """Direction in which a camera looks, against its z axis."""
    w, x, y, z = quaternion / np.linalg.norm(quaternion)
    return -np.array([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])


@pytest.mark.parametrize(
    ("view", "position", "direction"),
    [
        # looks along (-0.778, 0, -0.628)
        (UNTURNED, (0.6586, 0.0, 1.6104), (-0.778, 0.0, -0.6282)),
        ((90, 0, 100, 0, 0), (0.0, 0.6586, 1.6104), (0.0, -0.778, -0.6282)),
        # around (0, 0, 0.8): (0.6586, 0.8104) becomes (-0.8104, 0.6586)
        ((0, 90, 100, 0, 0), (-0.8104, 0.0, 1.4586), (0.6282, 0.0, -0.778)),
        ((0, 0, 50, 0, 0), (0.3293, 0.0, 1.2052), (-0.778, 0.0, -0.6282)),
        ((0, 0, 100, 90, 0), (0.6586, 0.0, 1.6104), (0.0, -0.778, -0.6282)),
        ((0, 0, 100, 0, 90), (0.6586, 0.0, 1.6104), (0.6282, 0.0, -0.778)),
    ],
)
def test_views_by_hand(view, position, direction) -> None:
    found, quaternion = turned_camera(POSITION, QUATERNION, view)
    np.testing.assert_allclose(found, position, atol=1.01e-4)
    np.testing.assert_allclose(looking(quaternion), direction, atol=5e-4)
    np.testing.assert_array_equal(found, found.round(4))
    np.testing.assert_array_equal(quaternion, quaternion.round(4))


def test_a_view_keeps_the_distance_from_the_pivot_and_the_angle_to_it() -> None:
    turned, quaternion = turned_camera(POSITION, QUATERNION, (37, 21, 100, 0, 0))
    before, after = POSITION - PIVOT, turned - PIVOT
    assert np.linalg.norm(after) == pytest.approx(np.linalg.norm(before), abs=2e-4)
    assert looking(quaternion) @ after == pytest.approx(looking(QUATERNION) @ before, abs=5e-4)
    back, _ = turned_camera(POSITION, QUATERNION, (323, 0, 100, 0, 0))  # degrees below 360 in place of negative ones
    assert back[1] == pytest.approx(-POSITION[0] * np.sin(np.radians(37)), abs=1e-4)


def test_the_scene_has_the_camera_and_the_robot_of_the_task(data: Path) -> None:
    camera, robot, *_ = load_tasks("libero_object_plus")
    soup = load_tasks("libero_object", [SOUP])[0]
    turned, other, own = (build_scene(task, STAND_IN) for task in (camera, robot, soup))
    expected = turned_camera(own.model.camera("agentview").pos, own.model.camera("agentview").quat, (30, 15, 100, 0, 0))
    np.testing.assert_allclose(turned.model.camera("agentview").pos, expected[0], atol=1e-9)
    np.testing.assert_allclose(
        turned.model.camera("agentview").quat, expected[1] / np.linalg.norm(expected[1]), atol=2e-4
    )
    np.testing.assert_allclose(turned.initial_arm, INITIAL_ARM)
    np.testing.assert_allclose(other.initial_arm, JOINTS)
    # LIBERO writes the initial state after the reset: only the controller remembers the other joints
    state = initial_states(soup)[0, 1:]
    parts = np.split(state, [own.model.nq])
    perturbed, told = Simulation([other], threads=1), Simulation([own], threads=1)
    perturbed.write(0, *parts)
    told.write(0, *parts, initial_joint=JOINTS)
    rest = np.zeros((1, 10, 7))
    for simulation in (perturbed, told):
        np.testing.assert_array_equal(simulation.data[0].qpos, parts[0])
        simulation.step([0], rest)
    np.testing.assert_array_equal(perturbed.data[0].qpos, told.data[0].qpos)
    assert np.abs(perturbed.data[0].qpos[own.arm_qposadr] - INITIAL_ARM).max() > 0.05


def test_what_no_package_has_is_counted_and_refused_by_name(data: Path) -> None:
    reasons = {task.name: lacking(task) for task in load_tasks("libero_object_plus")}
    assert [name for name, reason in reasons.items() if not reason] == [*TASKS[:4], TASKS[9]]
    assert reasons[TASKS[5]] == "needs the scene light_sync_modified_7, for which there are no stand-ins"
    assert reasons[TASKS[8]] == "needs models of can_of_soda__1, for which there are no stand-ins"
    assert reasons[TASKS[4]] == "has an instruction of 154 bytes, where 128 fit"
    task = LiberoTask(suite="libero_object_plus", assets="stand-in")
    assert task.left_out == {"language": 1, "light": 1, "background": 2, "layout": 1}
    assert {kind: len(names) for kind, names in task.kinds.items()} == {
        **{"camera": 1, "robot": 1, "noise": 1, "language": 1, "layout": 1}
    }
    with pytest.raises(UserError, match=r"libero_object_plus: 1 of 2 tasks cannot run here, such as .*_add_1, which"):
        LiberoTask(suite="libero_object_plus", tasks=["0", TASKS[8]])._tasks()
    with pytest.raises(UserError, match=r"_plus_light: 1 of 1 tasks .* needs the scene light_sync_modified_7, for"):
        LiberoTask(suite="libero_object_plus_light")._tasks()


def test_evaluations_alone_from_one_start(data: Path) -> None:
    task = LiberoTask(suite="libero_object_plus", assets="stand-in", images=["agentview"], image_size=256)
    assert (task.distributions, task.variants, task.default_starts) == (("official",), (), 1)
    with pytest.raises(UserError, match="LIBERO-plus only evaluates"):
        task.environment(10, "official", "train")
    env = LiberoEnvironment(load_tasks("libero_object_plus", [3, 9]), 2, distribution="official", assets=STAND_IN)
    assert env.num_starts == 1
    assert env.instructions[0] == WORDS[1].lower()
    env.reset()


def test_published_weights_have_the_settings_of_the_perturbed_suite() -> None:
    names = ("libero_spatial_no_noops", "libero_goal_no_noops")
    start = StartingPoint("w", "tokens", "LeRobot", 8, 8, 2, names, "libero")
    options = LiberoTask(suite="libero_spatial_plus_camera").published_options(start)
    assert "policy.unnorm_key=libero_spatial_no_noops" in options
    assert "task.step_limit=280" in options
    assert options == LiberoTask(suite="libero_spatial").published_options(start)


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (0, {"images": []}, "LIBERO-plus's camera perturbs pictures of agentview, which are not observed"),
        (2, {"images": ["robot0_eye_in_hand"]}, "LIBERO-plus's noise perturbs pictures of agentview"),
        (2, {"images": ["agentview"], "image_size": 128}, "noise is for task.image_size=256, got 128"),
    ],
)
def test_perturbations_without_effect_are_refused(data: Path, number: int, options, message: str) -> None:
    task = LiberoTask(suite="libero_object_plus", tasks=[str(number)], assets="stand-in", **options)
    with pytest.raises(UserError, match=message):
        task.environment(1, "official", "eval")


def test_noise_is_in_the_agent_camera_s_pictures_alone(data: Path) -> None:
    noisy = load_tasks("libero_object_plus", [2])[0]
    plain = load_tasks("libero_object_plus", [3])[0]  # with other words
    env = LiberoEnvironment([noisy, plain], 2, distribution="official", assets=STAND_IN, image_size=256, threads=1)
    observation = env.reset()
    first, second = observation["agentview_image"].float()
    assert torch.equal(*observation["wrist_image"])
    assert 1.0 < (first - second).abs().mean() < 40.0
    assert (
        torch.equal(env.pictures(torch.tensor([0]))["agentview_image"][0].float(), first)
        if hasattr(env, "pictures")
        else True
    )


def test_scenes_that_look_alike_share_a_renderer_and_are_drawn_as_alone(data: Path) -> None:
    tasks = load_tasks("libero_object_plus", [0, 3])  # another camera, and other words
    together = LiberoEnvironment(tasks, 4, distribution="official", assets=STAND_IN, image_size=64, threads=1)
    first, second = (
        LiberoEnvironment([task], 1, distribution="official", assets=STAND_IN, image_size=64, threads=1)
        for task in tasks
    )
    starts = torch.zeros(4, dtype=torch.int64)
    pictures = together.reset(starts=starts)["agentview_image"]
    alone = [env.reset(starts=starts[:1])["agentview_image"][0] for env in (first, second)]
    cameras = together._observer._cameras
    assert len(cameras._renderers) == min(2, cameras._renderers[0].threads)
    for row in range(4):
        assert torch.equal(pictures[row], alone[row % 2])
    assert (pictures[0].float() - pictures[1].float()).abs().mean() > 2.0


at_hand = pytest.mark.skipif(not plus_folder().exists(), reason="`make assets ARGS=plus` has not run here")


@at_hand
def test_the_package_has_ten_thousand_tasks_of_which_two_thirds_run() -> None:
    _forget()
    tasks = [task for base in ("spatial", "object", "goal", "10") for task in load_tasks(f"libero_{base}_plus")]
    assert Counter(task.perturbation.category for task in tasks) == {
        **{"camera": 1599, "robot": 1550, "language": 1537, "light": 1142},
        **{"background": 1076, "noise": 1601, "layout": 1525},
    }
    assert selection.left_out(tasks) == {"language": 119, "light": 1142, "background": 1076, "layout": 829}
    assert np.linalg.norm(plus.initial_joints(500) - INITIAL_ARM) == pytest.approx(0.5, abs=1e-6)
    for task in tasks[::97]:
        own = load_tasks(SUITES[task.suite], [task.perturbation.base])[0]
        if task.perturbation.category != "layout":
            np.testing.assert_array_equal(initial_states(task), initial_states(own))
        elif not lacking(task):
            assert initial_states(task).shape == (1, initial_states(own).shape[1])
            assert task.problem.objects == own.problem.objects


@at_hand
@pytest.mark.assets
@pytest.mark.skipif(find_assets().root is None, reason="needs LIBERO's official assets")
@pytest.mark.parametrize("category", ["camera", "robot", "language", "layout"])
def test_scenes_of_every_suite_are_built(category: str) -> None:
    _forget()
    for base in ("spatial", "goal", "10"):
        name = f"libero_{base}_plus_{category}"
        task = next(each for each in load_tasks(name) if not lacking(each))
        scene = build_scene(task, find_assets())
        assert initial_states(task).shape[1] == 1 + scene.model.nq + scene.model.nv
