"""Pictures of mujoco_warp's worlds, drawn where they are simulated, against those of the host's renderer."""

import numpy as np
import pytest
import torch

from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.physics.backend import LiberoSim
from sims.libero.physics.warp_simulation import WarpSimulation
from sims.libero.randomisation import Draws, Randomisation
from sims.libero.rendering.batched import BatchedCameras
from sims.libero.rendering.cameras import AGENT_VIEW, WRIST, Cameras
from sims.libero.scene.placement import Placement
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks

pytestmark = pytest.mark.assets
SIZE = 48
TASKS = load_tasks("libero_object", [0, 1])
VARIED = Randomisation(light=[0.3, 0.6], light_colour=0.3, light_m=0.5, camera_m=0.05, camera_rad=0.1)


@pytest.fixture(scope="module")
def simulation():
    """Worlds 0 and 2 of one scene, 1 of another; lights and cameras of world 2 are not the scene's."""
    scenes = [build_scene(task, find_assets()) for task in TASKS]
    simulation = WarpSimulation([scenes[0], scenes[1], scenes[0]], device="cpu", varied=VARIED.fields())
    for i, options in enumerate((Randomisation(), Randomisation(), VARIED)):
        scene = simulation.scenes[i]
        state = Placement(scene, "wide", "train")(i)
        simulation.write(i, **state._replace(model_fields=Draws(scene, options, "train")(i))._asdict())
    return simulation


@pytest.fixture(scope="module")
def cameras(simulation):
    return BatchedCameras(simulation, (AGENT_VIEW, WRIST), SIZE, SIZE)


def agreement(first, second):
    """Share of the pixels of each picture [n, cameras, H, W, 3] that look the same."""
    return (np.abs(first.astype(int) - second.astype(int)).max(-1) <= 4).mean((2, 3))


def test_they_are_the_hosts_pictures_but_for_single_precision(simulation, cameras):
    pictures, host = cameras.pictures(), Cameras(simulation, width=SIZE, height=SIZE, backend="rays").render()
    assert pictures.shape == host.shape == (3, 2, SIZE, SIZE, 3)
    assert pictures.dtype == torch.uint8
    assert pictures.device == simulation.torch_device
    assert (agreement(pictures.numpy(), host) > 0.98).all()
    for other in (0, 1):
        assert (agreement(host[[2]], host[[other]]) < 0.9).all(), "these pictures would show a mistake"


def test_worlds_are_drawn_alone_as_together_and_looking_changes_nothing(simulation, cameras):
    before, together = simulation.state_dict(), cameras.pictures()
    for ids in ([2, 0], [1], [0], [2, 1, 0]):
        assert torch.equal(cameras.pictures(torch.tensor(ids)), together[ids])
    assert cameras.pictures(torch.tensor([], dtype=torch.long)).shape == (0, 2, SIZE, SIZE, 3)
    for name, values in simulation.state_dict().items():
        np.testing.assert_array_equal(values, before[name])


def test_environments_show_what_their_cameras_see_now():
    env = LiberoEnvironment(
        TASKS[:1], 2, step_limit=1, executed=1, image_size=SIZE, images=[AGENT_VIEW, WRIST], sim=LiberoSim.mjwarp
    )
    views = Cameras(env.simulation, width=SIZE, height=SIZE, backend="rays")

    def check(observation):
        shown = torch.stack((observation["agentview_image"], observation["wrist_image"]), 1).numpy()
        assert (agreement(shown, views.render()) > 0.98).all()
        return shown

    before = check(env.reset(starts=torch.tensor([0, 1])))
    began, down = env.state_dict(), torch.zeros(2, 1, 7)
    down[..., 2] = -1.0
    ended = env.step(down)
    assert ended.truncated.all()
    moved = check(ended.observation)
    assert (moved != before).any((1, 2, 3, 4)).all()
    restarted = check(env.reset(mask=torch.tensor([False, True]), starts=torch.tensor([0, 5])))
    np.testing.assert_array_equal((restarted != moved).any((1, 2, 3, 4)), [False, True])
    frozen = check(env.step(down).observation)  # world 0 has ended, though the physics takes it along
    np.testing.assert_array_equal((frozen != restarted).any((1, 2, 3, 4)), [False, True])
    np.testing.assert_array_equal(check(env.load_state_dict(began)), before)


def test_unknown_cameras_are_listed_with_the_known_ones(simulation):
    with pytest.raises(ValueError, match=r"unknown cameras: overhead; expected some of .*agentview"):
        BatchedCameras(simulation, ("overhead",), SIZE, SIZE)
