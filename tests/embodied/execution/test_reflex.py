"""The decision rule of a reflex: what cuts a chunk, what replaces an action, and that nothing is loosened."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.execution.reflex import Reflex, braking

ACTION = TensorSpec((2,), unit="m/s, rad/s", names=("speed", "yaw_rate"), low=(-0.5, -1.0), high=(1.0, 1.0))
CONTRACT = Contract({"clear_m": TensorSpec((1,), unit="m")}, ACTION, 0.1)


def speed_risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
    """The faster and the nearer, the riskier."""
    return (actions[:, 0].abs() / observation["clear_m"].squeeze(1)).clamp(0.0, 1.0)


def check(risk, actions: list[list[float]], clear_m: list[float], cut: list[bool] | None = None, **options):
    reflex = Reflex(risk, CONTRACT, **({"threshold": 0.5, "brake": (0.0, 0.0)} | options))
    observation = TensorDict({"clear_m": torch.tensor(clear_m).unsqueeze(1)}, [len(clear_m)])
    before = torch.tensor(cut or [False] * len(clear_m))
    return reflex.check(observation, torch.tensor(actions), before)


def test_a_risk_above_the_threshold_is_replaced_by_the_safest_candidate():
    actions, cut = check(speed_risk, [[1.0, 0.4], [1.0, 0.4]], [4.0, 1.0])
    assert cut.tolist() == [False, True]
    assert actions[0].tolist() == pytest.approx([1.0, 0.4])
    assert actions[1].tolist() == [0.0, 0.0]


def test_a_slower_action_is_taken_where_it_is_the_safest():
    def risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        return (actions[:, 0] - 0.5).abs() * 2.0

    actions, cut = check(risk, [[1.0, 0.4]], [1.0])
    assert cut.tolist() == [True]
    assert actions[0].tolist() == pytest.approx([0.5, 0.2])


def test_a_chunk_that_was_cut_brakes_until_the_next_decision():
    def risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        return 1.0 - actions[:, 0].abs()  # braking would be the riskiest

    actions, cut = check(risk, [[1.0, 0.4], [1.0, 0.4]], [9.0, 9.0], [True, False])
    assert cut.tolist() == [True, False]
    assert actions.tolist() == [[0.0, 0.0], pytest.approx([1.0, 0.4])]


def test_the_threshold_itself_is_no_cut():
    _, cut = check(speed_risk, [[0.5, 0.0]], [1.0])
    assert cut.tolist() == [False]


def test_an_unknown_risk_brakes_whatever_the_others_are():
    def risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        moving = actions[:, 0]
        return torch.where(moving == 1.0, math.nan, 1.0 - moving)

    actions, cut = check(risk, [[1.0, 0.4]], [1.0], threshold=1.0)
    assert cut.tolist() == [True]
    assert actions[0].tolist() == [0.0, 0.0]


def test_candidates_of_unknown_risk_are_not_taken():
    def risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        return torch.where(actions[:, 0] == 0.0, math.nan, actions[:, 0])

    actions, _ = check(risk, [[1.0, 0.4]], [1.0])
    assert actions[0].tolist() == pytest.approx([0.25, 0.1])


def test_elements_without_a_braking_value_keep_the_policys():
    actions, _ = check(speed_risk, [[1.0, 0.4]], [1.0], brake=(0.0, None))
    assert actions[0].tolist() == pytest.approx([0.0, 0.4])


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2),
    st.floats(-0.5, 1, width=32),
    st.lists(st.floats(0, 1, width=32) | st.just(math.nan), min_size=5, max_size=5),
)
def test_no_action_is_farther_from_braking_than_the_requested_one(action: list[float], stop: float, risks: list[float]):
    draws = iter(risks)

    def risk(observation: TensorDict, actions: torch.Tensor) -> torch.Tensor:
        return torch.tensor([next(draws)])

    taken, _ = check(risk, [action], [1.0], brake=(stop, 0.0))
    brake = torch.tensor([stop, 0.0])
    assert ((taken[0] - brake).abs() <= (torch.tensor(action) - brake).abs() + 1e-6).all()


def test_braking_is_zero_for_velocities_and_named_for_others():
    assert braking(CONTRACT, None) == (0.0, 0.0)
    assert braking(CONTRACT, [0.0, None]) == (0.0, None)
    positions = replace(CONTRACT, action=replace(ACTION, unit="rad"))
    with pytest.raises(UserError, match=r"brake=\[0,0\]"):
        braking(positions, None)
    assert braking(positions, [0.0, 0.5]) == (0.0, 0.5)
    for wrong in ([0.0], [0.0, 2.0], [math.nan, 0.0]):
        with pytest.raises(UserError, match="brake"):
            braking(CONTRACT, wrong)
    with pytest.raises(UserError, match="brake"):
        braking(replace(CONTRACT, action=replace(ACTION, low=(0.1, -1.0))), None)
