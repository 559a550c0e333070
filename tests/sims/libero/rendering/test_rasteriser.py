"""The rasteriser's pictures are the ray tracer's."""

from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np
import pytest

from embodied.errors import UserError
from sims.libero.assets import find_assets
from sims.libero.physics.simulation import Simulation
from sims.libero.randomisation import Draws, Randomisation
from sims.libero.rendering import rasteriser
from sims.libero.rendering.cameras import AGENT_VIEW, Cameras, choose_backend
from sims.libero.rendering.poses import Poses
from sims.libero.rendering.rasteriser import Rasteriser
from sims.libero.rendering.ray_tracer import RayTracer
from sims.libero.scene.placement import Placement
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks

pytestmark = [pytest.mark.assets, pytest.mark.skipif(rasteriser.library() is None, reason="no C compiler")]
OFFICIAL = find_assets().root is not None
TASKS = [*load_tasks("libero_object", [0, 3])]
if OFFICIAL:
    TASKS += [*load_tasks("libero_goal", [0]), *load_tasks("libero_10", [0, 9])]
VARIED = Randomisation(light=[0.3, 0.6], light_colour=0.3, light_m=0.5, camera_m=0.05, camera_rad=0.1)
STATES = 4  # of each task; every other with other lights and cameras


@pytest.fixture(scope="module")
def simulation():
    """Arms in random poses, fingers open or closed, objects anywhere."""
    scenes = [build_scene(task, find_assets()) for task in TASKS for _ in range(STATES)]
    simulation = Simulation(scenes, varied=VARIED.fields())
    for i, scene in enumerate(scenes):
        options = VARIED if i % 2 else Randomisation()
        state = Placement(scene, "wide", "train")(i)
        simulation.write(i, **state._replace(model_fields=Draws(scene, options, "train")(i))._asdict())
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (simulation.num, 1, 7)) * (1, 1, 1, 0.3, 0.3, 0.3, 1) - (0, 0, 0.7, 0, 0, 0, 0)
    simulation.step(np.arange(simulation.num), np.clip(actions, -1, 1).repeat(20, 1), stop_on_success=False)
    yield simulation
    simulation.close()


def check_same(drawn, traced, agreement, mean=0.5):
    """Pixels within 4 of 255 of the ray tracer's, the others within a pixel of where it has their colour.

    No picture differs by more than `mean` on average.
    """
    assert drawn.shape == traced.shape
    assert drawn.dtype == np.uint8
    difference = np.abs(drawn.astype(int) - traced.astype(int))
    same = difference.max(-1) <= 4
    assert same.mean((-2, -1)).min() >= agreement
    assert difference.mean((-3, -2, -1)).max() < mean
    shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    around = np.stack([np.roll(traced, shift, (-3, -2)) for shift in shifts]).astype(int)
    near = ((drawn >= around.min(0) - 8) & (drawn <= around.max(0) + 8)).all(-1)
    assert near.mean() > 0.999


@pytest.mark.parametrize("size", [64, 128])
def test_they_are_the_ray_tracers_pictures(simulation, size):
    pictures = {
        backend: Cameras(simulation, width=size, height=size, backend=backend) for backend in ("raster", "rays")
    }
    drawn, traced = (cameras.render() for cameras in pictures.values())
    # Some of the official fixtures have two surfaces in one place (a stove's burners), where rounding decides.
    check_same(drawn, traced, *((0.96, 1.0) if OFFICIAL else (0.99, 0.5)))
    assert (np.abs(traced[:-1].astype(int) - traced[1:]).max(-1) <= 4).mean((2, 3)).max() < 0.9, "all look alike"


SOLIDS = """
<mujoco>
  <visual><headlight active="{headlight}" ambient=".1 .12 .14" diffuse=".3 .3 .2" specular=".4 .5 .6"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".3 .5 .7" rgb2=".9 .2 .1" width="32" height="192"/>
    <texture name="flat" type="2d" builtin="checker" rgb1=".9 .7 .1" rgb2=".1 .3 .6" width="30" height="20" mark="edge"
      markrgb="1 0 0"/>
    <texture name="cube" type="cube" builtin="gradient" rgb1=".9 .7 .1" rgb2=".1 .3 .6" width="24" height="144"/>
    <material name="flat" texture="flat" texrepeat="3 2" specular=".7" shininess=".3"/>
    <material name="even" texture="flat" texrepeat="3 2" texuniform="true" emission=".2"/>
    <material name="cube" texture="cube" specular=".2" shininess=".9"/>
    <material name="dull" rgba=".8 .4 .3 1" specular="0" shininess="0"/>
    <mesh name="bare" vertex="-.1 -.1 0  .1 -.1 0  .1 .1 0  -.1 .1 0  0 0 .2"/>
    <mesh name="sheet" vertex="-.1 -.1 0  .1 -.1 0  .1 .1 .02  -.1 .1 0  0 0 -.05" texcoord="0 0 1 0 1 1 0 1 .5 .5"
      face="0 1 2  0 2 3  1 0 4  2 1 4  3 2 4  0 3 4"/>
  </asset>
  <default><geom group="1"/></default>
  <worldbody>
    <light pos="1 .5 2" dir="-.4 -.2 -1" cutoff="35" exponent="8" attenuation="1 .1 .05" diffuse=".8 .7 .6"/>
    <light directional="true" dir=".3 .5 -1" diffuse=".2 .3 .3" specular=".3 .2 .1" ambient=".02 .03 .01"/>
    <light pos="-1 -1 1" dir="0 0 -1" type="point" diffuse=".3 .2 .3"/>
    <light active="false" pos="0 0 2" dir="0 0 -1" diffuse="1 1 1"/>
    <geom type="plane" size="2 1.5 .1" material="flat" pos="0 0 -.4"/>
    <geom type="plane" size="0 0 .1" material="even" pos="0 0 -.8"/>
    <body euler="{turn}">
      <geom type="sphere" size=".15" pos="-.5 .3 0" material="{material}" euler="20 30 40"/>
      <geom type="ellipsoid" size=".2 .1 .14" pos="0 .3 0" material="{material}" euler="50 10 40"/>
      <geom type="capsule" size=".08 .15" pos=".5 .3 0" material="{material}" euler="60 30 10"/>
      <geom type="cylinder" size=".1 .15" pos="-.5 -.2 0" material="{material}" euler="30 70 40"/>
      <geom type="box" size=".2 .1 .14" pos="0 -.2 0" material="{material}" euler="20 60 40"/>
      <geom type="mesh" mesh="bare" pos=".5 -.2 0" material="{material}" euler="20 60 70"/>
      <geom type="mesh" mesh="sheet" pos=".3 -.5 .1" material="{material}" euler="20 60 -30"/>
      <geom type="box" size=".1 .1 .1" pos="0 0 .3" rgba=".2 .9 .4 1"/>
      <geom type="box" size=".1 .1 .1" pos="0 0 .3" rgba=".9 .2 .4 1"/>
      <geom type="sphere" size=".3" pos="0 0 .3" rgba="1 1 1 0"/>
      <geom type="sphere" size=".3" pos="0 0 .3" group="0"/>
    </body>
    <camera name="whole" pos="0 -1.6 .9" xyaxes="1 0 0 0 .5 1" fovy="50"/>
    <camera name="in the box" pos=".01 .02 .31" xyaxes="0 1 0 -.3 0 1" fovy="110"/>
    <camera name="touching" pos="0 -.37 .12" xyaxes="1 .1 0 0 .8 1" fovy="100"/>
  </worldbody>
</mujoco>
"""
NAMES = ("whole", "in the box", "touching")


def states(model, data, count):
    """Poses of `count` states with all geoms turned about."""
    random, result = np.random.default_rng(1), []
    for _ in range(count):
        mujoco.mj_forward(model, data)
        turned = data.geom_xmat.reshape(-1, 3, 3).copy()
        for matrix in turned[2:]:  # not the planes
            quaternion, rotation = random.normal(size=4), np.empty(9)
            mujoco.mju_quat2Mat(rotation, quaternion / np.linalg.norm(quaternion))
            matrix[:] = rotation.reshape(3, 3) @ matrix if len(result) else matrix
        cameras, lights = data.cam_xmat.reshape(-1, 3, 3).copy(), (model.light_diffuse, model.light_specular)
        placed = (data.cam_xpos.copy(), cameras, data.light_xpos.copy(), data.light_xdir.copy())
        result.append(Poses(data.geom_xpos.copy(), turned, *placed, *(light.copy() for light in lights)))
    return result


@pytest.mark.parametrize(("material", "headlight"), [("flat", 1), ("even", 1), ("cube", 0), ("dull", 1)])
def test_every_kind_of_geom_light_and_texture_looks_as_traced(material, headlight):
    def model():
        text = SOLIDS.format(material=material, headlight=headlight, turn="0 0 15")
        return mujoco.MjModel.from_xml_string(text)

    poses = states(model(), mujoco.MjData(model()), 3)
    width, height = 50, 37  # rows that don't fill registers
    drawn, traced = (kind(model(), NAMES, width, height, film=False).draw(poses) for kind in (Rasteriser, RayTracer))
    assert drawn.shape == (3, len(NAMES), height, width, 3)
    check_same(drawn, traced, 0.98)
    assert len(np.unique(drawn[0, 0].reshape(-1, 3), axis=0)) > 300


def test_several_threads_draw_the_same_picture(simulation):
    cameras = Cameras(simulation, width=64, height=64, backend="raster")
    alone = cameras.render()
    poses = cameras._poses(0, np.arange(STATES))
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: cameras._renderers[0].draw(poses), range(8)))
    for pictures in together:
        np.testing.assert_array_equal(pictures, alone[:STATES])


def test_scenes_share_meshes_and_textures_until_none_needs_them(simulation):
    first = Cameras(simulation, (AGENT_VIEW,), 16, 16, backend="raster")
    shared = [{id(mesh) for mesh in renderer._meshes.values()} for renderer in first._renderers]
    assert len(shared[0] & shared[1]) > 10, "the robot's"
    before = len(rasteriser._MESHES), len(rasteriser._TEXTURES)
    second = Cameras(simulation, (AGENT_VIEW,), 16, 16, backend="raster")
    assert (len(rasteriser._MESHES), len(rasteriser._TEXTURES)) == before
    del first, second
    assert len(rasteriser._MESHES) < before[0]


def test_films_and_machines_without_a_compiler_have_the_ray_tracer(simulation, monkeypatch):
    with pytest.raises(UserError, match=r'"raster" has no shadows for films; use "rays" or "gl"'):
        Cameras(simulation, backend="raster", film=True)
    monkeypatch.setattr("sims.libero.rendering.cameras.graphics_card", lambda: False)
    monkeypatch.setattr("warp.is_cuda_available", lambda: False)
    assert choose_backend() == "raster"
    monkeypatch.setattr(rasteriser, "library", lambda: None)
    assert choose_backend() == "rays"
    with pytest.raises(UserError, match='"raster" needs a C compiler; install one, or use backend="rays"'):
        Cameras(simulation, backend="raster")
