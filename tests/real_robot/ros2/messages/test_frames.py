"""Frames: conversions by hand, and properties that hold for every vector and attitude."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from real_robot.ros2.messages import frames

numbers = st.floats(-100, 100, allow_nan=False)
vectors = arrays(np.float64, 3, elements=numbers)
rotations = (
    arrays(np.float64, 4, elements=st.floats(-1, 1))
    .filter(lambda q: np.linalg.norm(q) > 0.1)
    .map(lambda q: q / np.linalg.norm(q))
)
HALF = np.sqrt(0.5)


def test_north_east_down_is_y_x_minus_z():
    np.testing.assert_array_equal(frames.world_ned_enu([1.0, 2.0, -3.0]), [2.0, 1.0, 3.0])
    np.testing.assert_array_equal(frames.body_frd_flu([1.0, 2.0, -3.0]), [1.0, -2.0, 3.0])


@pytest.mark.parametrize(
    ("ned", "enu"),
    [
        ((1, 0, 0, 0), (HALF, 0, 0, HALF)),  # level, nose north: in ENU a quarter turn from east
        ((HALF, 0, 0, HALF), (1, 0, 0, 0)),  # level, nose east
        ((HALF, HALF, 0, 0), (0.5, 0.5, 0.5, 0.5)),  # nose north, right wing down
    ],
)
def test_attitudes_by_hand(ned, enu):
    np.testing.assert_allclose(frames.attitude_ned_enu(ned), enu, atol=1e-12)


def test_quaternion_order():
    np.testing.assert_array_equal(frames.wxyz([1, 2, 3, 4]), [4, 1, 2, 3])
    np.testing.assert_array_equal(frames.xyzw([4, 1, 2, 3]), [1, 2, 3, 4])


def test_matrix_of_a_quarter_turn_to_the_left():
    np.testing.assert_allclose(
        frames.matrix((HALF, 0, 0, HALF)), [[0, -1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-12
    )  # x to y


def test_thrust_is_the_square_of_speed():
    np.testing.assert_allclose(frames.thrust_of_rotor([-1.0, 0.0, 1.0]), [0.0, 0.25, 1.0])


@pytest.mark.parametrize("broken", [(0, 0, 0, 0), (np.nan, 0, 0, 1), (2, 0, 0, 0)])
def test_a_quaternion_that_was_not_filled_in_is_refused(broken):
    with pytest.raises(ValueError, match="expected unit quaternions"):
        frames.matrix(broken)


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match="expected 3 elements"):
        frames.world_ned_enu([1.0, 2.0])


@given(vectors)
def test_exchanges_undo_themselves(vector):
    for exchange in (frames.world_ned_enu, frames.body_frd_flu):
        np.testing.assert_array_equal(exchange(exchange(vector)), vector)


@given(rotations)
def test_attitudes_undo_themselves(quaternion):
    np.testing.assert_allclose(frames.attitude_ned_enu(frames.attitude_ned_enu(quaternion)), quaternion, atol=1e-12)


@given(rotations, vectors)
def test_attitude_and_vectors_convert_consistently(ned, body_frd):
    # A body vector, turned into the world in PX4's frames and converted, is the converted one turned in ours.
    there = frames.world_ned_enu(frames.to_world(frames.matrix(ned), body_frd))
    here = frames.to_world(frames.matrix(frames.attitude_ned_enu(ned)), frames.body_frd_flu(body_frd))
    np.testing.assert_allclose(here, there, atol=1e-9)


@given(rotations)
def test_matrices_and_quaternions_are_the_same_rotation(quaternion):
    matrix = frames.matrix(quaternion)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1.0)
    back = frames.quaternion(matrix)
    np.testing.assert_allclose(np.abs(back @ quaternion), 1.0, atol=1e-12)
    assert back[0] >= 0
    np.testing.assert_allclose(frames.from_two_columns(frames.two_columns(matrix)), matrix, atol=1e-12)


@given(rotations, vectors)
def test_world_and_body_undo_each_other(quaternion, vector):
    matrix = frames.matrix(quaternion)
    np.testing.assert_allclose(frames.to_body(matrix, frames.to_world(matrix, vector)), vector, atol=1e-9)


@given(arrays(np.float64, 4, elements=st.floats(-1, 1)))
def test_thrust_and_rotor_undo_each_other(action):
    np.testing.assert_allclose(frames.rotor_of_thrust(frames.thrust_of_rotor(action)), action, atol=1e-7)
