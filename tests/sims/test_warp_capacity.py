"""Room for contacts: measured against what MuJoCo's own arena holds in heaps of bodies."""

import mujoco
import mujoco_warp
import numpy as np
import pytest

from embodied.configuration import with_numbers
from sims.mjcf.task import find_mdp
from sims.warp_capacity import capacity

WALLS = "".join(
    f'<geom type="box" size="{x} {y} 3" pos="{a} {b} 3"/>'
    for x, y, a, b in ((0.05, 0.6, 0.5, 0), (0.05, 0.6, -0.5, 0), (0.6, 0.05, 0, 0.5), (0.6, 0.05, 0, -0.5))
)


def model(bodies: str, option: str = "") -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(
        f'<mujoco>{option}<worldbody><geom type="plane" size="5 5 1"/>{bodies}</worldbody></mujoco>'
    )


def room(of: mujoco.MjModel, contacts: int | None = None, resting: int = 0) -> tuple[int, int]:
    return capacity(of, mujoco_warp.put_model(of), contacts, resting)


@pytest.mark.parametrize(("kind", "size"), [("box", "0.1 0.1 0.1"), ("sphere", "0.1"), ("capsule", "0.08 0.1")])
def test_a_heap_fits(kind: str, size: str):
    place = np.random.default_rng(0).uniform(-0.3, 0.3, (40, 2))
    heap = model(
        WALLS
        + "".join(
            f'<body pos="{x} {y} {0.2 + 0.25 * i}"><freejoint/><geom type="{kind}" size="{size}"/></body>'
            for i, (x, y) in enumerate(place)
        )
    )
    data, contacts, rows = mujoco.MjData(heap), 0, 0
    for _ in range(3000):
        mujoco.mj_step(heap, data)
        contacts, rows = max(contacts, data.ncon), max(rows, data.nefc)
    assert contacts > 40
    assert room(heap)[0] > 1.2 * contacts
    assert room(heap)[1] > 1.2 * rows


def test_the_room_follows_from_bodies_and_pairs():
    box = '<body pos="{} 0 {}"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>'
    assert room(model(box.format(0, 1)))[0] == 8  # all contacts of one pair
    assert room(model(box.format(0, 1) + box.format(3, 1)))[0] == 24  # of three pairs
    assert room(model("".join(box.format(i, 1) for i in range(10))))[0] == 180  # six neighbours of each body
    assert room(model(box.format(0, 1)), resting=36)[0] == 72
    assert room(model(box.format(0, 1)), contacts=50) == (50, 4 * 50 + 6 + 1)
    elliptic = '<option cone="elliptic"/>'
    assert room(model(box.format(0, 1), elliptic), contacts=50) == (50, 3 * 50 + 6 + 1)


def test_tasks_without_contacts_take_next_to_no_room():
    assert room(find_mdp("cartpole").load())[0] == 1
    assert room(find_mdp("quadruped").load())[0] == 16  # mujoco_warp's default: 48
    assert room(with_numbers(find_mdp("quadruped"), {"rough_m": 0.06}, "task.numbers").load())[0] == 90
