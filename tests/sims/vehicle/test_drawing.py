"""Drawings: every room fills its image, with or without a dividing wall."""

import numpy as np
import torch

from sims.vehicle.drawing import GOAL, WALL, Map, draw
from sims.vehicle.navigate import Navigate
from sims.vehicle.worlds import worlds


def test_every_room_fills_its_picture_and_shows_its_goal():
    made = worlds(Navigate(), "eval", torch.arange(16))
    divided = (made["segments"][:, 4] < 1e5).all(1)
    assert 0 < divided.sum() < 16
    for row in range(16):
        world = Map(*(made[name][row].numpy() for name in ("circles", "segments", "route")), size=128)
        pose = made["pose"][row].numpy()
        picture = draw(world, pose[None], (0.5, 0.4), pose[:2], np.zeros((0, 2)))
        walls = (np.abs(picture.astype(int) - WALL) < 30).all(-1)
        where = np.argwhere(walls)
        assert ((where.max(0) - where.min(0)) > 0.7 * 128).all()  # boxes may extend beyond the room
        assert (np.abs(picture.astype(int) - GOAL) < 30).all(-1).any()
