"""Statistics that published weights bring, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from embodied.errors import UserError
from policies.vla.checkpoints.statistics import Mode, counted, fitting, read

NORMALIZER = "policy_preprocessor_step_5_normalizer_processor.safetensors"
GOOD = {"state": ([0.1, 0.2], [0.3, 0.0]), "action": ([1.0, 2.0, 3.0], [0.5, 0.6, 0.7])}
MEANS = (Mode.MEAN_STD, Mode.MEAN_STD)
NAMINGS = ("transformers", "lerobot", "openpi")


def write(folder: Path, naming: str, names: tuple[str, str] = ("mean", "std"), **parts: tuple[list, list]) -> Path:
    """A file of statistics as these leave it; returns its path."""
    said = GOOD | parts
    if naming == "lerobot":
        keys = {"state": "observation.state", "action": "action"}
        pairs = {f"{keys[of]}.{what}": values for of in keys for what, values in zip(names, said[of], strict=True)}
        save_file({key: torch.tensor(values) for key, values in pairs.items()}, folder / NORMALIZER)
        return folder / NORMALIZER
    short = {"state": "state", "action": "actions"}
    if naming == "openpi":
        stats = {short[of]: dict(zip(names, said[of], strict=True)) for of in short}
        path, said = folder / "norm_stats.json", {"norm_stats": stats}
    else:
        path = folder / "processor_config.json"
        said = {f"{short[of]}_{what}": values for of in short for what, values in zip(names, said[of], strict=True)}
    path.write_text(json.dumps(said))
    return path


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"state": ([float("nan"), 0.0], [1.0, 1.0])}, "state: infinity or not a number in mean"),
        ({"action": ([0.0] * 3, [float("inf")] * 3)}, "action: infinity or not a number in std"),
        ({"state": ([0.0] * 2, [1.0, -0.5])}, "state: expected std of at least 0, got -0.5 of element 1"),
        ({"action": ([0.0] * 3, [0.0] * 3)}, "action: std is 0 of all 3 elements"),
        ({"action": ([0.0] * 3, [1.0] * 2)}, "action: expected mean and std of as many elements, got [3] and [2]"),
        ({"state": ([[0.0], [0.0]], [[1.0], [1.0]])}, "state: expected mean and std of as many elements, got [2, 1]"),
    ],
)
def test_wrong_statistics_are_one_line_that_names_the_file(tmp_path: Path, naming: str, parts, message: str) -> None:
    path = write(tmp_path, naming, **parts)
    with pytest.raises(UserError) as caught:
        read(tmp_path, MEANS)
    assert f"wrong statistics in {path} ({message}" in str(caught.value)
    assert str(caught.value).endswith("; mend this file, or remove it to take those of demonstrations")
    path.unlink()
    assert read(tmp_path, MEANS) == {}


@pytest.mark.parametrize("name", ["trossen", "lerobot/aloha_sim_transfer_cube_human"])
def test_openpi_s_statistics_of_turned_joints_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    write(tmp_path / name, "openpi")
    with pytest.raises(UserError, match=r"joints openpi turns.*; use policy\.unnorm_key=demonstrations$"):
        read(tmp_path, MEANS, Path(name).name)
    assert read(tmp_path, MEANS, "demonstrations") == {}


@pytest.mark.parametrize("naming", ["lerobot", "openpi"])
def test_quantiles_in_the_wrong_order_are_told_by_their_element(tmp_path: Path, naming: str) -> None:
    path = write(tmp_path, naming, ("q01", "q99"), state=([0.0, 0.0], [1.0, 1.0]), action=([0.0] * 3, [1.0, 1.0, -2.0]))
    with pytest.raises(UserError) as caught:
        read(tmp_path, (Mode.QUANTILES, Mode.QUANTILES))
    assert f"{path} (action: expected q99 - q01 of at least 0, got -2 of element 2)" in str(caught.value)


@pytest.mark.parametrize(
    ("naming", "content", "message"),
    [
        ("transformers", '{"state_mean": [3', "Expecting ',' delimiter"),
        ("transformers", '{"state_mean": [3], "actions_mean": [2]}', "it lacks 'state_std'"),
        ("transformers", '{"state_mean": ["a"], "state_std": [1], "actions_mean": [2], "actions_std": [1]}', "str"),
        ("transformers", "[]", "'list' object has no attribute 'get'"),
        ("openpi", '{"norm_stats": {"state": {"mean": [1], "std": [1]}}}', "it lacks 'actions'"),
        ("openpi", '{"norm_stats": 3}', "subscriptable"),
        ("lerobot", "cut", "Error while deserializing header"),
    ],
)
def test_damaged_statistics_are_one_line_that_names_the_file(
    tmp_path: Path, naming: str, content: str, message: str
) -> None:
    path = write(tmp_path, naming)
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path, MEANS)
    assert f"cannot read the statistics in {path} (" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def padded(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


@pytest.mark.parametrize("size", [5, 7, 8, 31])
def test_padded_statistics_of_another_number_of_elements_do_not_fit(size: int) -> None:
    six = padded(0.1, -0.2, 0.3, 0.0, 0.5, 0.6), padded(1.0, 1.0, 2.0, 0.0, 1.0, 1.0)
    assert counted(*six) == 6
    assert fitting(*six, size) is None
    mean, std = fitting(*six, 6) or pytest.fail("they are of six elements")
    assert mean.tolist() == six[0][:6].tolist()
    assert std.tolist() == [1.0, 1.0, 2.0, 1.0, 1.0, 1.0]  # what never varied is divided by 1


def test_a_constant_at_the_end_is_no_padding_unless_it_is_0() -> None:
    mean, std = padded(0.1, 0.2, 0.04), padded(1.0, 1.0, 0.0)
    assert fitting(mean, std, 2) is None
    assert fitting(mean, std, 3) is not None
    assert fitting(padded(0.1, 0.2), padded(1.0, 1.0), 3) is None
    # without padding, all elements count
    whole = fitting(torch.tensor([0.1, 0.2, 0.0]), torch.tensor([1.0, 1.0, 0.0]), 3)
    assert whole is not None
    assert whole[1].tolist() == [1.0, 1.0, 1.0]
    assert fitting(torch.tensor([0.1, 0.2]), torch.tensor([1.0, 1.0]), 3) is None
