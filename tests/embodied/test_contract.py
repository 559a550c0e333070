"""Contracts agree on names, units, frames, limits and chunk sizes, or a table lists the differences."""

import dataclasses
import json
import math

import pytest
import torch

from embodied.contract import Contract, TensorSpec

POSITION = TensorSpec((3,), unit="m", frame="world", names=("x", "y", "z"))
ACTION = TensorSpec((2,), unit="m/s", frame="base", names=("left", "right"), low=(-1.0, -2.0), high=(1.0, 2.0))
CONTRACT = Contract({"position": POSITION, "objects": TensorSpec((-1, 3))}, ACTION, 0.05, horizon=8, executed=4)


def changed(**changes) -> Contract:
    return dataclasses.replace(CONTRACT, **changes)


def position(**changes) -> Contract:
    return changed(observation=CONTRACT.observation | {"position": dataclasses.replace(POSITION, **changes)})


def action(**changes) -> Contract:
    return changed(action=dataclasses.replace(ACTION, **changes))


def differences(provider: Contract) -> list[str]:
    with pytest.raises(ValueError, match=r"^contracts differ:\n") as caught:
        CONTRACT.bind(provider)
    return [row.strip() for row in str(caught.value).splitlines()[1:]]


def test_equal_contracts_bind_without_reordering():
    plan = CONTRACT.bind(CONTRACT)
    assert plan.observation == {"position": None, "objects": None}
    assert plan.action is None


def test_observations_are_gathered_into_the_policys_order():
    plan = CONTRACT.bind(position(names=("z", "x", "y")))
    provided = torch.tensor([30.0, 10.0, 20.0])  # z, x, y
    assert provided[plan.observation["position"]].tolist() == [10.0, 20.0, 30.0]


def test_a_provider_with_more_elements_serves_those_asked_for():
    plan = CONTRACT.bind(position(shape=(4,), names=("time", "z", "y", "x")))
    assert torch.tensor([0.0, 3.0, 2.0, 1.0])[plan.observation["position"]].tolist() == [1.0, 2.0, 3.0]


def test_actions_are_put_into_the_providers_order():
    # three wheels, so that gathering one way is not the same as the other
    def wheels(*names: str) -> Contract:
        return changed(action=TensorSpec((3,), names=names))

    plan = wheels("a", "b", "c").bind(wheels("b", "c", "a"))
    assert torch.tensor([1.0, 2.0, 3.0])[plan.action].tolist() == [2.0, 3.0, 1.0]  # commands for a, b, c


def test_limits_belong_to_names_and_not_to_places():
    swapped = action(names=("right", "left"), low=(-2.0, -1.0), high=(2.0, 1.0))
    assert CONTRACT.bind(swapped).action.tolist() == [1, 0]
    assert len(differences(action(names=("right", "left")))) == 2  # low and high


def test_tensors_are_used_as_they_are_in_one_order_alone():
    CONTRACT.check(changed(executed=1, observation={"camera": TensorSpec((8, 8, 3)), **CONTRACT.observation}))
    swapped = action(names=("right", "left"), low=(-2.0, -1.0), high=(2.0, 1.0))
    for provider, what in (
        (position(names=("z", "x", "y")), "observation 'position' order"),
        (position(shape=(4,), names=("x", "y", "z", "time")), "observation 'position' order"),
        (swapped, "action order"),
    ):
        CONTRACT.bind(provider)
        with pytest.raises(ValueError, match=what) as caught:
            CONTRACT.check(provider)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("executed", [1, 8])
def test_a_provider_may_execute_up_to_the_whole_chunk(executed):
    CONTRACT.bind(changed(executed=executed))


def test_what_else_a_provider_shows_is_not_in_the_way():
    provider = changed(observation={"camera": TensorSpec((8, 8, 3), dtype="uint8"), **CONTRACT.observation})
    assert set(CONTRACT.bind(provider).observation) == {"position", "objects"}


@pytest.mark.parametrize("count", [1, 12])
def test_a_varying_axis_takes_any_length(count):
    CONTRACT.bind(changed(observation={"position": POSITION, "objects": TensorSpec((count, 3))}))


@pytest.mark.parametrize(
    ("provider", "row"),
    [
        (changed(observation={"objects": TensorSpec((-1, 3))}), "observation 'position': missing"),
        (position(dtype="float64"), "observation 'position' dtype: expected 'float32', got 'float64'"),
        (position(unit="mm"), "observation 'position' unit: expected 'm', got 'mm'"),
        (position(frame="base"), "observation 'position' frame: expected 'world', got 'base'"),
        (position(shape=(2,), names=("x", "y")), "observation 'position' elements: missing ['z']"),
        (position(names=()), "observation 'position' elements: missing ['x', 'y', 'z']"),
        (
            changed(observation={"position": POSITION, "objects": TensorSpec((-1, 4))}),
            "observation 'objects' shape: expected (-1, 3), got (-1, 4)",
        ),
        (
            changed(observation={"position": POSITION, "objects": TensorSpec((3,))}),
            "observation 'objects' shape: expected (-1, 3), got (3,)",
        ),
        (action(unit="rad/s"), "action unit: expected 'm/s', got 'rad/s'"),
        (
            action(low=(-1.0, -1.0)),
            "action low: expected {'left': -1.0, 'right': -2.0}, got {'left': -1.0, 'right': -1.0}",
        ),
        (action(high=()), "action high: expected {'left': 1.0, 'right': 2.0}, got {}"),
        (changed(control_dt_s=0.02), "control_dt_s: expected 0.05, got 0.02"),
        (changed(control_dt_s=0.0501), "control_dt_s: expected 0.05, got 0.0501"),
        (changed(horizon=9, executed=9), "chunk: provider executes 9 actions, policy predicts 8"),
    ],
)
def test_each_difference_is_one_row(provider, row):
    assert differences(provider) == [row]


def test_other_action_elements_are_listed_for_both_sides():
    # one more at the provider would run without a command, one fewer would drop one
    three = action(shape=(3,), names=("left", "right", "tail"), low=(-1.0, -2.0, 0.0), high=(1.0, 2.0, 1.0))
    row = "action elements: policy commands ('left', 'right'), provider takes ('left', 'right', 'tail')"
    assert row in differences(three)
    with pytest.raises(ValueError, match=r"missing \['tail'\]"):
        three.bind(CONTRACT)
    unnamed = changed(action=TensorSpec((2,)))
    with pytest.raises(ValueError, match=r"policy commands \(\), provider takes \('left', 'right'\)"):
        unnamed.bind(changed(action=TensorSpec((2,), names=("left", "right"))))


def test_plain_numbers_fit_where_no_unit_is_told():
    position(unit="1").bind(position(unit=""))
    position(unit="").bind(position(unit="1"))  # a policy that was trained before its task told the unit
    with pytest.raises(ValueError, match="unit: expected '', got 'm'"):
        position(unit="").bind(CONTRACT)


def test_all_differences_are_listed_at_once():
    assert len(differences(changed(control_dt_s=0.1, observation={}, action=action(unit="m").action))) == 4


def test_json_round_trip():
    assert Contract.from_dict(json.loads(CONTRACT.to_json())) == CONTRACT


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("action"),
        lambda data: data.update(rate_hz=20),
        lambda data: data.update(control_dt_s="fast"),
        lambda data: data.update(observation=[1]),
        lambda data: data["action"].update(shape=2),
        lambda data: data["action"].update(colour="red"),
        lambda data: data["action"].pop("shape"),
        lambda data: data["action"].update(names=["left"]),
    ],
)
def test_a_malformed_contract_is_one_line(damage):
    data = json.loads(CONTRACT.to_json())
    damage(data)
    with pytest.raises(ValueError, match=r"not a contract|has 1 names") as caught:
        Contract.from_dict(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"control_dt_s": 0.0}, r"control_dt_s=0\.0: expected a finite number above 0"),
        ({"control_dt_s": math.nan}, "control_dt_s=nan: expected a finite number above 0"),
        ({"executed": 9}, "executed=9, horizon=8"),
        ({"executed": 0}, "need 1 <= executed"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        changed(**change)
