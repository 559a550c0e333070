"""Pictures of a model's cameras as observations: by both renderers, of worlds that differ, and for policies."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.training.loop import train
from policies.flow import FlowConfig
from sims.libero.rendering import rasteriser
from sims.mjcf import cameras
from sims.mjcf.environment import MjcfEnvironment
from sims.mjcf.mdp import Draws, Start
from sims.mjcf.task import MjcfTask
from sims.opengl import opengl
from tests.sims.mjcf.test_pictures import Box

pytestmark = pytest.mark.skipif(rasteriser.library() is None or opengl() is None, reason="no compiler or no OpenGL")
CAMERA = '<worldbody><camera name="top" pos="0 0 5"/>'


@dataclass(frozen=True)
class Shifted(Box):
    """The box of `Box` under a camera; with `vary`, the box of odd starts is 0.5 m further along x in its body."""

    vary: str = ""

    # MuJoCo ignores the position of geoms whose frame was their body's when the model was compiled
    MODEL = Box.MODEL.replace("<worldbody>", CAMERA).replace('size="0.3 0.3 0.1"', 'size="0.3 0.3 0.1" pos="0 0 0.01"')

    def reset(self, model, draws: Draws) -> Start:
        start = super().reset(model, draws)
        if self.vary:
            values = torch.tensor(getattr(model, self.vary)).repeat(len(start.state["qpos"]), 1, 1)
            values[1::2, 1, 0] += 0.5
            start.model[self.vary] = values
        return start


def black(pictures: torch.Tensor) -> list[float]:
    """Mean column of the black pixels of each picture [N, height, width, 3], as a share of the width."""
    return [float(np.nonzero(picture.numpy().sum(-1) < 60)[1].mean()) / picture.shape[1] for picture in pictures]


@pytest.mark.parametrize("compiled", [True, False])
def test_pictures_follow_their_worlds(monkeypatch, compiled: bool):
    if not compiled:
        monkeypatch.setattr(rasteriser, "library", lambda: None)
    env = MjcfEnvironment(2, mdp=Shifted(vary="geom_pos"), images=["top"], image_size=32, executed=2, horizon=4)
    assert type(env._cameras._renderer).__name__ == ("Rasteriser" if compiled else "GLRenderer")
    spec = env.contract.observation["top_image"]
    assert (spec.shape, spec.camera, spec.frame, env.contract.horizon) == ((32, 32, 3), "top", "world", 4)
    pictures = env.reset()["top_image"]
    middle, right = black(pictures)
    assert middle == pytest.approx(0.5, abs=0.03)
    assert right > middle + 0.05
    env.worlds.batch.bind("qpos")[0, 0] = 0.5
    moved = env.step(torch.zeros(2, 2, 1)).observation["top_image"]
    assert black(moved)[0] > middle + 0.05
    # a reset draws the world that begins, and only that
    calls = []
    monkeypatch.setattr(
        env._cameras, "draw", lambda poses, draw=env._cameras.draw: calls.append(len(poses)) or draw(poses)
    )
    again = env.reset(torch.tensor([True, False]), starts=torch.tensor([0, 0]))["top_image"]
    assert calls == [1]
    assert torch.equal(again[0], pictures[0])
    assert torch.equal(again[1], moved[1])
    saved = env.state_dict()
    restored = MjcfEnvironment(2, mdp=Shifted(vary="geom_pos"), images=["top"], image_size=32, executed=2, horizon=4)
    restored.load_state_dict(saved)
    assert torch.equal(restored.observe()["top_image"], again)


def test_looks_that_a_renderer_reads_once_are_refused():
    env = MjcfEnvironment(2, mdp=Shifted(vary="geom_size"), images=["top"], image_size=8)
    with pytest.raises(UserError, match=r"pictures cannot show geom_size of each world; leave out task.images"):
        env.reset()
    MjcfEnvironment(2, mdp=Shifted(vary="geom_size")).reset()


def test_what_cannot_be_drawn_here_is_one_line(monkeypatch):
    model = Shifted().load()
    monkeypatch.setattr(cameras, "opengl", lambda: None)
    monkeypatch.setattr(rasteriser, "library", lambda: None)
    with pytest.raises(UserError, match="pictures need a C compiler, or OpenGL; install gcc or libegl1"):
        cameras.Cameras(model, ["top"], 8)
    model.geom_rgba[0, 3] = 0.5
    with pytest.raises(UserError, match="of transparent geoms need OpenGL; install libegl1"):
        cameras.Cameras(model, ["top"], 8)
    with pytest.raises(UserError, match="unknown cameras: front; expected some of top"):
        cameras.Cameras(model, ["front"], 8)


def test_a_policy_trains_from_pictures():
    options = {"images": ["film"], "image_size": 16, "privileged": ["target", "error"], "step_limit": 4}
    task = MjcfTask(mdp="reacher", **options)
    env = task.environment(2, "own", "train")
    assert env.contract == task.contract("own")
    policy = FlowConfig(hidden=8).build(env.contract)
    assert policy.encoder.reads == ["film_image", "elbow", "velocity"]
    *_, step = train(env, policy, PPOConfig(rollout_length=4, minibatch=8, epochs=1), env_steps=8)
    assert math.isfinite(step.metrics["policy_loss"])
