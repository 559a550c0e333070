"""Pictures show what is simulated, where it is, the right way up, from either back end."""

import sys

import numpy as np
import pytest
import torch

from embodied.errors import UserError
from embodied.evaluation.video import averaged
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.physics.simulation import Simulation
from sims.libero.rendering.cameras import AGENT_VIEW, WRIST, Cameras, choose_backend
from sims.libero.rendering.poses import check_size
from sims.libero.rendering.textures import shrink
from sims.libero.scene.scene import build_scene
from sims.libero.suite import initial_states, load_tasks
from sims.opengl import context, opengl

pytestmark = pytest.mark.assets
SIZE = 96
AWAY = (0.0, 0.0, -3.0)  # under the floor


@pytest.fixture(scope="module")
def simulation():
    tasks = load_tasks("libero_object", [0, 1])
    scenes = [build_scene(task, find_assets()) for task in tasks]
    simulation = Simulation([scenes[0], scenes[1], scenes[0]])
    yield simulation
    simulation.close()


@pytest.fixture(scope="module")
def cameras(simulation):
    return Cameras(simulation, width=SIZE, height=SIZE, backend="rays")


@pytest.fixture(autouse=True)
def start(simulation):
    for i, (scene, number) in enumerate(zip(simulation.scenes, (0, 0, 1), strict=True)):
        state = initial_states(scene.task)[number]
        simulation.write(i, state[1 : 1 + scene.model.nq], state[1 + scene.model.nq :])


def without(simulation, i, name):
    """Simulation `i`'s qpos with the object `name` out of sight."""
    scene = simulation.scenes[i]
    qpos = simulation.data[i].qpos.copy()
    address = scene.object_qposadr[scene.objects.index(name)]
    qpos[address : address + 3] = AWAY
    return qpos


def pixel(scene, data, camera, point):
    """(row, column) at which a pinhole camera shows `point` [3], m."""
    camera = scene.model.camera(camera).id
    local = data.cam_xmat[camera].reshape(3, 3).T @ (point - data.cam_xpos[camera])
    focal = SIZE / 2 / np.tan(np.deg2rad(scene.model.cam_fovy[camera]) / 2)
    return np.array([SIZE / 2 - local[1] / -local[2] * focal, SIZE / 2 + local[0] / -local[2] * focal])


def check_where(simulation, renderer, camera, name):
    """What disappears from the picture with an object is around the place where the object is."""
    scene, data = simulation.scenes[0], simulation.data[0]
    place = pixel(scene, data, camera, data.body(f"{name}_main").xpos)
    seen = renderer.render([0])[0, renderer.names.index(camera)].astype(int)
    simulation.write(0, without(simulation, 0, name), np.zeros(scene.model.nv))
    gone = renderer.render([0])[0, renderer.names.index(camera)].astype(int)
    rows, columns = np.nonzero(np.abs(seen - gone).sum(-1) > 20)
    assert 10 < len(rows) < SIZE * SIZE / 10
    np.testing.assert_allclose((rows.mean(), columns.mean()), place, atol=0.04 * SIZE)


@pytest.mark.parametrize("name", ["tomato_sauce_1", "milk_1", "butter_1"])
def test_objects_are_where_the_camera_must_see_them(simulation, cameras, name):
    check_where(simulation, cameras, AGENT_VIEW, name)


def test_the_wrist_camera_moves_with_the_hand(simulation, cameras):
    check_where(simulation, cameras, WRIST, "butter_1")


def test_pictures_are_of_the_simulations_asked_for(simulation, cameras):
    together = cameras.render()
    assert together.shape == (3, 2, SIZE, SIZE, 3)
    assert together.dtype == np.uint8
    alone = np.concatenate([cameras.render([i]) for i in range(3)])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(cameras.render([2, 0]), together[[2, 0]])
    assert (together[0] != together[1]).any()
    assert (together[0] != together[2]).any()


def test_no_ids_no_pictures(cameras):
    assert cameras.render([]).shape == (0, 2, SIZE, SIZE, 3)


def test_everything_is_shown_after_steps_in_which_it_slept(simulation, cameras):
    before = cameras.render([1])[:, 0].astype(int)
    simulation.step([1], np.tile([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0], (1, 20, 1)))
    after = cameras.render([1])[:, 0].astype(int)
    assert (np.abs(after - before).sum(-1) > 60).mean() < 0.1


def test_fixtures_are_shown_where_the_simulation_has_them(simulation, cameras):
    model, data = simulation.models[0], simulation.data[0]
    before = cameras.render([0, 2])
    placed = model.body_pos.copy()
    placed[model.body("robot0_base").id] += (0.0, 0.2, 0.0)
    simulation.write(0, data.qpos, data.qvel, body_pos=placed)
    after = cameras.render([0, 2])
    assert (after[0] != before[0]).any()
    np.testing.assert_array_equal(after[1], before[1])


def test_looking_changes_nothing(simulation, cameras):
    before = simulation.state_dict()
    cameras.render()
    for name, values in simulation.state_dict().items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.skipif(opengl() is None, reason="OpenGL does not work here")
def test_both_back_ends_show_the_same(simulation, cameras):
    rays = cameras.render().astype(int)
    gl = Cameras(simulation, width=SIZE, height=SIZE, backend="gl")
    difference = np.abs(gl.render().astype(int) - rays)
    assert difference.mean() < 25
    assert np.median(difference) < 20
    check_where(simulation, gl, AGENT_VIEW, "tomato_sauce_1")


@pytest.mark.skipif(opengl() is None, reason="OpenGL does not work here")
def test_another_renderer_of_this_process_changes_no_picture(simulation):
    gl = Cameras(simulation, width=SIZE, height=SIZE, backend="gl")
    before = gl.render()
    other = type(context()[0])(32, 32)
    other.make_current()
    np.testing.assert_array_equal(gl.render(), before)
    other.make_current()
    other.free()  # now no context is current
    np.testing.assert_array_equal(Cameras(simulation, width=SIZE, height=SIZE, backend="gl").render(), before)
    np.testing.assert_array_equal(gl.render(), before)


def test_unknown_cameras_are_listed_with_the_known_ones(simulation):
    with pytest.raises(ValueError, match=r"unknown cameras: overhead; expected some of .*agentview"):
        Cameras(simulation, ("overhead",), backend="rays")


def test_a_back_end_that_does_not_work_is_refused(simulation, monkeypatch):
    monkeypatch.setattr("sims.libero.rendering.cameras.opengl", lambda: None)
    with pytest.raises(ValueError, match='backend="gl" needs OpenGL'):
        Cameras(simulation, backend="gl")
    monkeypatch.setitem(sys.modules, "warp", None)
    assert choose_backend() == "raster"
    monkeypatch.setattr("sims.libero.rendering.rasteriser.library", lambda: None)
    with pytest.raises(ValueError, match=r"no renderer works here .*embodied-rl\[libero\]"):
        choose_backend()


@pytest.mark.parametrize(
    ("card", "cuda", "expected"), [(False, False, "raster"), (True, False, "gl"), (True, True, "rays")]
)
def test_opengl_is_chosen_only_on_a_graphics_card_without_cuda(monkeypatch, card, cuda, expected):
    monkeypatch.setattr("sims.libero.rendering.cameras.graphics_card", lambda: card)
    monkeypatch.setattr("warp.is_cuda_available", lambda: cuda)
    assert choose_backend() == expected


@pytest.mark.parametrize(
    ("works", "cuda", "expected"), [("llvmpipe", False, "gl"), (None, False, "rays"), ("llvmpipe", True, "rays")]
)
def test_films_are_drawn_by_opengl_where_it_works_and_there_is_no_cuda(monkeypatch, works, cuda, expected):
    monkeypatch.setattr("sims.libero.rendering.cameras.opengl", lambda: works)
    monkeypatch.setattr("sims.libero.rendering.cameras.graphics_card", lambda: False)
    monkeypatch.setattr("warp.is_cuda_available", lambda: cuda)
    assert choose_backend(film=True) == expected


BACKENDS = ["rays", pytest.param("gl", marks=pytest.mark.skipif(opengl() is None, reason="OpenGL does not work here"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_films_have_a_shadow_and_soft_edges_and_observations_stay_as_they_are(simulation, backend):
    def cameras(size, film):
        return Cameras(simulation, (AGENT_VIEW,), size, size, backend=backend, film=film)

    def present(of):
        return of.render([0])[0, 0].astype(int)

    observing, before = cameras(SIZE, film=False), simulation.data[0].qpos.copy()
    address = simulation.scenes[0].object_qposadr[simulation.scenes[0].objects.index("milk_1")]
    before[address + 2] += 0.12  # above the floor, its shadow beside it
    nothing = np.zeros(simulation.scenes[0].model.nv)
    simulation.write(0, before, nothing)
    observed = present(observing)
    filming = cameras(SIZE, film=True)
    filmed = present(filming)
    np.testing.assert_array_equal(present(observing), observed)
    np.testing.assert_array_equal(present(cameras(SIZE, film=False)), observed)
    # averaged from more pixels
    larger = averaged(present(cameras(3 * SIZE, film=False)).astype(np.uint8), 3).astype(int)
    lit = np.abs(filmed - larger).sum(-1) < 60  # elsewhere there is shadow
    assert lit.mean() > 0.7
    rough = lit & (np.abs(observed - larger).sum(-1) > 36)  # at edges and fine textures
    assert rough.sum() > 30
    assert np.abs(filmed - larger)[rough].mean() < 0.7 * np.abs(observed - larger)[rough].mean()
    simulation.write(0, without(simulation, 0, "milk_1"), nothing)
    alone, gone = present(filming), present(observing)
    box = np.abs(gone - observed).sum(-1) > 12
    rows, columns = np.nonzero(box)
    around = np.zeros_like(box)
    around[max(0, rows.min() - 2) : rows.max() + 3, max(0, columns.min() - 2) : columns.max() + 3] = True
    assert around.mean() < 0.1  # observations have no shadow: nothing else changes
    darker = (alone - filmed).sum(-1) > 60
    assert 15 < (darker & ~around).sum() < 400


def test_textures_are_averaged_down_to_the_limit():
    pixels = np.arange(5 * 4).reshape(5, 4, 1)
    np.testing.assert_array_equal(shrink(pixels[:4], 2)[..., 0], [[2.5, 4.5], [10.5, 12.5]])
    assert shrink(pixels, 2).shape == (1, 1, 1)
    np.testing.assert_array_equal(shrink(pixels, 5), pixels)


def test_environments_show_what_their_cameras_see_now():
    env = LiberoEnvironment(load_tasks("libero_object", [0]), 3, step_limit=4, executed=2, image_size=48)
    spec = env.contract.observation["wrist_image"]
    assert (spec.shape, spec.dtype) == ((48, 48, 3), "uint8")
    views = Cameras(env.simulation, width=48, height=48)

    def check(observation):
        now = views.render()
        np.testing.assert_array_equal(observation["agentview_image"].numpy(), now[:, 0])
        np.testing.assert_array_equal(observation["wrist_image"].numpy(), now[:, 1])
        return now

    before = check(env.reset(starts=torch.tensor([0, 1, 2])))
    down = torch.zeros(3, 2, 7)
    down[..., 2] = -1.0
    stepped = check(env.step(down).observation)
    assert (stepped != before).any((1, 2, 3, 4)).all()
    ended = env.step(down)
    assert ended.truncated.all()
    frozen = check(ended.observation)
    restarted = check(env.reset(mask=torch.tensor([False, True, False]), starts=torch.tensor([0, 5, 0])))
    np.testing.assert_array_equal((restarted != frozen).any((1, 2, 3, 4)), [False, True, False])
    check(env.load_state_dict(env.state_dict()))


def test_without_an_image_size_there_are_no_pictures():
    env = LiberoEnvironment(load_tasks("libero_object", [0]), 1)
    assert not any("image" in key for key in (*env.contract.observation, *env.reset().keys()))


def test_more_pixels_than_are_counted_in_32_bits_are_refused():
    check_size(63, 2, 4096, 4096)
    with pytest.raises(
        UserError, match=r"64 worlds with 2 cameras of 4096x4096 pixels .* use a smaller task.image_size"
    ):
        check_size(64, 2, 4096, 4096)
