"""Which measurements are accepted after which."""

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Reading
from real_robot.safety.inputs import Command, Inputs, _values_fault
from real_robot.safety.limits import Limits

CONTRACT = Contract({"position": TensorSpec((1,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), control_dt_s=0.1)


@pytest.mark.parametrize(
    ("stamp_s", "sequence", "accepted"),
    [
        (5.0, 3, True),  # the same again
        (5.1, 4, True),
        (5.0, 4, True),  # two of one time
        (5.1, 3, False),  # the same number, another time
        (4.9, 3, False),
        (4.9, 4, False),  # a later number, an earlier time
        (5.1, 2, False),
    ],
)
def test_a_measurement_follows_the_one_before_in_number_and_time(stamp_s: float, sequence: int, accepted: bool):
    inputs = Inputs(CONTRACT, Limits(observation_timeout_s=1.0))
    assert not inputs.reading_fault(Reading({"position": np.zeros(1)}, 5.0, 3), 5.0)
    fault = inputs.reading_fault(Reading({"position": np.zeros(1)}, stamp_s, sequence), 5.1)
    assert ("reordered measurement" in fault) != accepted


@pytest.mark.parametrize(("stamp_s", "accepted"), [(5.05, True), (5.0, True), (4.95, False)])
def test_a_command_may_not_be_older_than_the_one_before(stamp_s: float, accepted: bool):
    inputs = Inputs(CONTRACT, Limits(command_timeout_s=1.0))
    assert not inputs.command_fault(Command(np.zeros(1), 5.0), 5.1)
    fault = inputs.command_fault(Command(np.zeros(1), stamp_s), 5.1)
    assert ("reordered command: 0.05 s older" in fault) != accepted
    assert inputs.command_fault(Command(np.zeros(1), 4.99), 5.1)  # compared with the newest one


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (np.zeros((5, 3)), ""),
        (np.zeros((0, 3), np.int64), ""),
        ([[True, False, True]], ""),
        (np.zeros((5, 2)), "x of shape (5, 2), expected (-1, 3)"),
        (np.zeros(3), "x of shape (3,), expected (-1, 3)"),
        (np.array([[0.0, np.inf, 0.0]]), "x is not finite"),
        (np.array([["a", "b", "c"]]), "x of <U1, expected numbers"),
    ],
)
def test_values_of_any_number_of_rows(values: object, fault: str):
    assert _values_fault("x", values, TensorSpec((-1, 3))) == fault
