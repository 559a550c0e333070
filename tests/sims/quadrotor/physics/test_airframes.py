"""Physical parameters, and random platforms that could be built."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sims.quadrotor.physics.airframes import (
    AIRFRAMES,
    CRAZYFLIE,
    CRAZYFLIE_21,
    GRAVITY,
    PARAMETERS,
    SCATTERED,
    hover_speed,
    scatter,
)


def rows(tensor):
    return dict(zip(PARAMETERS, tensor, strict=True))


def plausible(found):
    top = found["thrust_0_n"] + found["thrust_1_n"] + found["thrust_2_n"]
    ratio = 4 * top / (found["mass_kg"] * GRAVITY)
    assert ((ratio > 1.15) & (ratio < 8)).all()
    x, y, z = (found[f"inertia_{axis}"] for axis in "xyz")
    assert (z <= (x + y) * (1 + 1e-6)).all()
    assert all((value >= 0).all() for value in found.values())


@pytest.mark.parametrize("name", AIRFRAMES)
def test_airframes_are_plausible(name):
    plausible(rows(torch.tensor(AIRFRAMES[name].values())))


def test_the_newer_crazyflie_is_another_set():
    shared = [name for name in PARAMETERS if getattr(CRAZYFLIE, name) == getattr(CRAZYFLIE_21, name)]
    assert not {"mass_kg", "thrust_2_n", "torque_per_thrust_m", "lag_rise_s", "inertia_x"} & set(shared)
    lift = [4 * (0.00352526 + 0.01437313 * u + 0.09223048 * u * u) for u in [CRAZYFLIE_21.hover_speed]]
    assert lift == pytest.approx([0.0319 * GRAVITY])


def test_hover_speed_also_solves_a_curve_without_a_square():
    linear = replace(CRAZYFLIE, thrust_1_n=0.2, thrust_2_n=0.0)
    assert hover_speed(linear) == pytest.approx(0.027 * GRAVITY / 4 / 0.2)


def test_scatter_stays_around_its_airframe():
    draws = torch.rand(len(SCATTERED), 1000, generator=torch.Generator().manual_seed(0))
    found = scatter(torch.tensor(CRAZYFLIE_21.values()).unsqueeze(1), draws, 0.3)
    plausible(rows(found))
    share = found / torch.tensor(CRAZYFLIE_21.values()).unsqueeze(1)
    used = [i for i, name in enumerate(SCATTERED) if getattr(CRAZYFLIE_21, name) > 0 and "thrust_" not in name]
    assert ((share[used] > 0.69) & (share[used] < 1.31)).all()
    thrust = [PARAMETERS.index(f"thrust_{power}_n") for power in range(3)]
    assert torch.allclose(share[thrust[0]], share[thrust[2]])
    assert (found[-1] == 4.0).all()  # rotors are counted
    assert torch.equal(scatter(found, draws, 0.0), found)


@pytest.mark.parametrize(("field", "value"), [("mass_kg", 0.0), ("inertia_z", -1.0), ("lag_rise_s", float("nan"))])
def test_impossible_parameters_are_refused(field, value):
    with pytest.raises(ValueError, match=f"expected {field} .* got {value}"):
        replace(CRAZYFLIE, **{field: value})


def test_what_cannot_fly_is_refused():
    with pytest.raises(ValueError, match="thrust-to-weight ratio above 1"):
        replace(CRAZYFLIE, mass_kg=0.1)
    with pytest.raises(ValueError, match="width"):
        scatter(torch.ones(len(PARAMETERS), 2), torch.rand(len(SCATTERED), 2), 0.6)


def test_the_documents_name_the_airframes_as_the_option_takes_them():
    text = (Path(__file__).parents[4] / "sims" / "quadrotor" / "README.md").read_text()
    sentence = text[text.index("`task.airframe=` takes") :].partition(";")[0]
    named = re.findall(r"`([a-z0-9_]+)`", sentence)
    assert named == list(AIRFRAMES)
