import numpy as np
import pytest

from sims.libero.expert.grasping import _heights, _stretched, _touched, best_grasp, free_yaw

BASE = np.array([-0.6, 0.0, 0.0])
NOTHING = np.empty((0, 3))


def block(size, centre=(0.0, 0.0), bottom=0.0, spacing=0.005):
    axes = [np.linspace(-extent / 2, extent / 2, 1 + round(extent / spacing)) for extent in size]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    return points + np.array([*centre, bottom + size[2] / 2])


def ring(radius, height, thickness=0.006):
    angle, up, out = np.meshgrid(np.arange(0, 2 * np.pi, 0.05), np.arange(0, height, 0.004), [0.0, thickness])
    return np.stack(((radius - out) * np.cos(angle), (radius - out) * np.sin(angle), up), -1).reshape(-1, 3)


def across(grasp):
    return np.array([np.cos(grasp.yaw), np.sin(grasp.yaw)])


@pytest.mark.parametrize("turn", [0.0, 0.5, 2.0])
def test_a_block_is_taken_across_its_narrow_side(turn):
    matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    points = block((0.04, 0.08, 0.02))
    points[:, :2] = points[:, :2] @ matrix.T
    grasp = best_grasp(points, NOTHING, BASE, turn, np.pi / 2)
    assert abs(across(grasp) @ matrix[:, 0]) == pytest.approx(1.0)
    np.testing.assert_allclose(grasp.position, (0, 0, 0.0125), atol=1e-6)
    assert abs(grasp.yaw - np.pi / 2) <= np.pi / 2


def test_a_tall_object_is_taken_near_its_top_where_the_palm_has_room():
    grasp = best_grasp(block((0.05, 0.05, 0.15)), NOTHING, BASE, 0.0, 0.0)
    assert grasp.position[2] == pytest.approx(0.125)


def test_a_bowl_is_taken_by_its_rim():
    grasp = best_grasp(ring(0.054, 0.05), NOTHING, BASE, 0.0, 0.0)
    assert np.linalg.norm(grasp.position[:2]) == pytest.approx(0.051, abs=0.004)
    assert abs(across(grasp) @ grasp.position[:2]) == pytest.approx(np.linalg.norm(grasp.position[:2]))


def test_neighbours_where_the_fingers_go_turn_the_hand():
    cube = block((0.05, 0.05, 0.05))
    walls = np.concatenate([block((0.02, 0.05, 0.05), (side * 0.06, 0.0)) for side in (-1, 1)])
    free = best_grasp(cube, NOTHING, BASE, 0.0, 0.0)
    assert abs(across(free)[0]) == pytest.approx(1.0)
    beside = best_grasp(cube, walls, BASE, 0.0, 0.0)
    assert abs(across(beside)[1]) == pytest.approx(1.0)


def test_a_neighbour_on_one_side_shifts_the_hand_away_along_the_grasp_line():
    plank = block((0.03, 0.12, 0.03))
    wall = block((0.02, 0.3, 0.03), (0.0675, 0.0))
    grasp = best_grasp(plank, wall, BASE, 0.0, 0.0)
    assert abs(across(grasp)[0]) == pytest.approx(1.0)
    assert grasp.position[0] < -0.01


def test_what_is_too_wide_everywhere_has_no_grasp_but_an_answer():
    assert best_grasp(block((0.2, 0.2, 0.05)), NOTHING, BASE, 0.0, 0.0).cost == np.inf


def test_the_rim_has_to_reach_above_the_grip_point():
    tilt = np.radians(30.0)
    axis = np.array([[1, 0, 0], [0, np.cos(tilt), np.sin(tilt)], [0, -np.sin(tilt), np.cos(tilt)]])
    bowl = ring(0.054, 0.05) @ axis.T
    for depth in (0.006, 0.015):
        place = best_grasp(bowl, NOTHING, BASE, 0.0, 0.0, depth).position
        beside = bowl[np.linalg.norm(bowl[:, :2] - place[:2], axis=1) < 0.02]
        assert beside[:, 2].max() >= place[2] + depth


def test_a_hand_turns_away_from_a_wall():
    wall = block((0.3, 0.01, 0.3), centre=(0.0, 0.08))
    place = np.array([0.0, 0.0, 0.02])
    assert free_yaw(NOTHING, [place], np.pi / 2) == np.pi / 2
    assert abs(np.sin(free_yaw(wall, [place], np.pi / 2))) < 0.6
    assert abs(np.sin(free_yaw(wall, [place + 1.0, place], np.pi / 2))) < 0.6


@pytest.mark.parametrize(
    ("point", "margin", "own", "touched"),
    # along and across the closing direction, and above the grip point at 0.02 along and a height of 1 m
    [
        ((0.0, 0.0, 0.0), 0.0, 0, 1),  # between the fingers
        ((0.038, 0.0089, 0.0099), 0.0, 0, 1),
        ((0.0, 0.0091, 0.0), 0.0, 0, 0),
        ((0.0, 0.0, 0.0101), 0.0, 0, 0),
        ((0.0, 0.0, -0.0106), 0.0, 0, 0),
        ((-0.067, -0.012, -0.01), 0.0, 1, 1),  # in a finger
        ((0.039, 0.0124, 0.049), 0.0, 1, 1),
        ((0.069, 0.0, 0.0), 0.0, 0, 0),
        ((0.05, 0.0126, 0.0), 0.0, 0, 0),
        ((0.05, 0.0, -0.0106), 0.0, 0, 0),
        ((0.075, 0.02, 0.0), 0.008, 0, 1),
        ((0.0685, 0.013, 0.0), 0.008, 1, 1),  # of the object only 1 mm
        ((0.105, 0.033, 0.031), 0.0, 1, 1),  # in the palm
        ((0.107, 0.0, 0.031), 0.0, 0, 0),
        ((0.08, 0.035, 0.031), 0.0, 0, 0),
        ((0.08, 0.0, 0.029), 0.0, 0, 0),
        ((0.113, 0.041, 0.031), 0.008, 0, 1),
    ],
)
def test_what_open_fingers_and_the_palm_touch(point, margin: float, own: int, touched: int):
    place = np.array([point]) + np.array([0.02, 0.0, 1.0])
    assert _touched(NOTHING, place, 0.02, 1.0, margin) == touched
    assert _touched(place, NOTHING, 0.02, 1.0, margin) == own


def test_heights_of_grasps_and_reach_of_the_wrist():
    assert _heights(block((0.05, 0.05, 0.1), bottom=1.0)) == pytest.approx((1.1 - 0.025, 1.1 - 0.0125))
    assert _heights(block((0.05, 0.05, 0.02))) == pytest.approx((0.0125, 0.0125))  # above what it lies on
    # the lifted wrist is 0.31 m above the grip point and 0.088 m nearer
    assert _stretched(np.array([0.42, 0.56, 0.05])) == pytest.approx(np.hypot(0.7 - 0.088, 0.36) - 0.64)
    assert _stretched(np.array([0.3, 0.4, -0.2])) == 0.0
