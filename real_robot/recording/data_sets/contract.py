"""Contract of recorded episodes: names, shapes and rate as the files state them, units as a person adds them once.

LeRobot's files have no units. `demonstration_units` adds them; they are stored beside the data set if that can be
written, else in the cache of data sets, where the next run finds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from embodied.contract import DIMENSIONLESS, Contract, TensorSpec
from embodied.data import episodes as stored
from embodied.data.cache import cache_folder
from embodied.errors import UserError
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import loads
from embodied.text import text_spec
from real_robot.recording.data_sets.data_set_reading import DataSource, feature_names, source_of
from real_robot.recording.data_sets.lerobot_files import TASK
from real_robot.recording.data_sets.matching import MatchOptions
from real_robot.recording.data_sets.outcomes import is_number
from real_robot.recording.demonstrations import episode_folder, recordings_in
from real_robot.recording.lerobot_dataset import ACTION, CAMERA
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Array

log = logging.getLogger(__name__)
UNITS = "embodied_units.json"
"""File beside a data set with the units of its elements."""
PREFIX = "observation."
MARGIN = 0.05
"""Share of the recorded range by which the limits of actions exceed it."""
Units = str | Mapping[str, str]
"""One unit of all elements, or units by the names of elements, in which * stands for any text."""


def data_contract(
    path: Path, options: MatchOptions, units: Units | None, image_size: int, instruction: bool | None
) -> Contract:
    """Contract of the data set at `path`: a LeRobot data set, arrays, episodes of a run, or recordings.

    Names of `options` map those of the contract to those of a data set. Pictures of others' data sets are reduced to at
    most `image_size` pixels. The text of their tasks is an `instruction` if that is True; if None, where there are
    several. Actions without limits have those that were recorded, and a margin.

    Raises:
        UserError: if the data set has no contract of its own and lacks names, units or a rate, and for further units of
            one that has its own.
    """
    source = None
    if folder := episode_folder(path):
        episodes, contract, _ = stored.read(folder)
        actions = episodes.actions.numpy()
    elif recordings := recordings_in(path):
        contract = Recording(recordings[0]).contract
        actions = None
    else:
        source = source_of(path, options)
        actions = source.column(ACTION) if ACTION in source.features else None
        contract = source.contract or _derived(source, options.names, units, image_size, instruction)
    if units is not None and (source is None or source.contract is not None):
        raise UserError(f"{path} has units of its own: leave out demonstration_units")
    observation = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
    action = contract.action
    if actions is not None and not action.low:
        low, high = _limits(actions)
        action = replace(action, low=low, high=high)
    return replace(contract, observation=observation, action=action)


def _derived(
    source: DataSource,
    names: Mapping[str, str],
    units: Units | None,
    image_size: int,
    instruction: bool | None,
) -> Contract:
    """Contract of a data set of somebody else."""
    own_names = {theirs: ours for ours, theirs in names.items()}
    features = {key: each for key, each in source.features.items() if key.startswith(PREFIX) or key == ACTION}
    flat = {key: each for key, each in features.items() if len(each["shape"]) == 1 and is_number(each["dtype"])}
    if ACTION not in flat or not flat[ACTION]["dtype"].startswith("float"):
        expected = f"expected a feature {ACTION!r} of floating-point numbers"
        has = ", ".join(f"{key} of {each['dtype']}" for key, each in features.items())
        raise UserError(f"{source.directory}: {expected}; it has {has}")
    if not source.rate_hz:
        raise UserError(f"{source.directory} does not state the rate of its rows; add demonstration_rate_hz=HZ")
    element_units = _units(source, {key: _elements(key, each) for key, each in flat.items()}, units)
    specs: dict[str, TensorSpec] = {}
    for feature, each in features.items():
        key = own_names.get(feature) or feature.removeprefix(CAMERA).removeprefix(PREFIX)
        key = own_names.get(key, key)
        if "." in key:
            raise UserError(
                f"{source.directory}: the name {key} has dots, which names of observations do not have; add"
                f" 'demonstration_names={{{key.replace('.', '_')}:{feature}}}'"
            )
        if feature in flat:
            own = [own_names.get(name, name) for name in feature_names(each)]
            named = tuple(own) if len(own) == each["shape"][0] else ()
            specs[key] = TensorSpec(tuple(each["shape"]), unit=_joined(element_units[feature]), names=named)
        elif each["dtype"] in ("image", "video") and each["shape"][-1] == 3:
            specs[key] = TensorSpec(_reduced(each["shape"], image_size), dtype="uint8", camera=key)
        else:
            kind = f"{each['dtype']} of shape {each['shape']}"
            expected = "neither a row of numbers nor RGB pictures of uint8"
            log.warning(f"{source.directory}: {feature}, {kind}, is {expected}, and is not read")
    action = specs.pop(ACTION)
    texts = {text.strip() for text in source.tasks.values() if text.strip()} if TASK in source.features else set()
    if texts and (len(texts) > 1 if instruction is None else instruction):
        specs["instruction"] = text_spec(max(len(text.encode()) for text in texts))
    return Contract(specs, action, 1.0 / source.rate_hz)


def _limits(actions: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Recorded limits of `actions` [S, A] with a margin; elements that never change have one, too."""
    low = np.nanmin(actions, 0).astype(float)
    high = np.nanmax(actions, 0).astype(float)
    margin = np.maximum(MARGIN * (high - low), 1e-3 * np.maximum(1.0, np.abs(high)))
    return tuple(float(f"{each:.5g}") for each in low - margin), tuple(float(f"{each:.5g}") for each in high + margin)


def _reduced(shape: list[int], size: int) -> tuple[int, int, int]:
    """Largest shape with sides of at most `size` pixels, of which a picture's are the same multiple."""
    height, width, _ = shape
    common = gcd(height, width)
    factors = [each for each in range(1, common + 1) if common % each == 0 and max(height, width) <= each * size]
    factor = factors[0] if factors else common
    return height // factor, width // factor, 3


def _elements(key: str, feature: Mapping[str, Any]) -> list[str]:
    """Names of a feature's elements, or numbered ones."""
    names = feature_names(feature)
    size = feature["shape"][0]
    return names if len(names) == size else [f"{key.removeprefix(PREFIX)}_{index}" for index in range(size)]


def _joined(units: list[str]) -> str:
    return units[0] if len(set(units)) == 1 else ", ".join(units)


def _units(source: DataSource, elements: Mapping[str, list[str]], units: Units | None) -> dict[str, list[str]]:
    """Units of the `elements` of each feature: those of the option `units`, else those stored with the data set.

    Raises:
        UserError: for elements without a unit; it names them with the option to add.
    """
    before = _stored(source)
    result = {}
    for key, names in elements.items():
        for name in names:
            result[f"{key}.{name}"] = _unit_of(key, name, units) or before.get(f"{key}.{name}")
    if missing := [label for label, unit in result.items() if not unit]:
        raise UserError(_request(source, elements, missing))
    if isinstance(units, Mapping):
        _check_patterns(source, elements, units)
    if result != before:
        _store(source, result)
    return {key: [str(result[f"{key}.{name}"]) for name in names] for key, names in elements.items()}


def _unit_of(key: str, name: str, units: Units | None) -> str | None:
    """Unit of an element in the option: the most exact of the names that match it."""
    if units is None or isinstance(units, str):
        return units
    labels = _labels(key, name)
    matches = [pattern for pattern in units if any(fnmatchcase(label, pattern) for label in labels)]
    exact = [label for label in labels if label in units]
    return units[exact[0]] if exact else units[max(matches, key=len)] if matches else None


def _labels(key: str, name: str) -> tuple[str, ...]:
    """Names of an element of the feature `key` in the option, from the most exact one on."""
    return f"{key}.{name}", f"{key.removeprefix(PREFIX)}.{name}", name


def _check_patterns(source: DataSource, elements: Mapping[str, list[str]], units: Mapping[str, str]) -> None:
    """Raise UserError for names in the option `units` that are those of no element: their unit would be another."""
    labels = [label for key, names in elements.items() for name in names for label in _labels(key, name)]
    if unknown := [pattern for pattern in units if not any(fnmatchcase(label, pattern) for label in labels)]:
        names = ", ".join(dict.fromkeys(name for each in elements.values() for name in each))
        raise UserError(f"demonstration_units has {', '.join(unknown)}; expected names of {source.directory}: {names}")


def _request(source: DataSource, elements: Mapping[str, list[str]], missing: list[str]) -> str:
    """Error message that asks for the units of the elements `missing`, with their recorded values."""
    ranges: dict[str, str] = {}
    for key, names in elements.items():
        values = source.column(key).reshape(-1, len(names))
        for index, name in enumerate(names):
            if f"{key}.{name}" in missing:
                low = np.nanmin(values[:, index])
                high = np.nanmax(values[:, index])
                ranges.setdefault(name, f"{name} ({low:.4g} to {high:.4g})")
    gripper = next((name for name in ranges if "gripper" in name), None)
    option = f"'demonstration_units={{*:deg,{gripper}:percent}}'" if gripper else "demonstration_units=rad"
    return (
        f"{source.directory} does not state the units of {', '.join(ranges.values())}; add them once, such as {option}"
        f" or demonstration_units=percent for all of them ({DIMENSIONLESS} for plain numbers)"
    )


def _stored(source: DataSource) -> dict[str, str]:
    """Units that an earlier run stored, by feature and element."""
    for path in (_beside(source), _cached(source)):
        if path.exists():
            try:
                units = loads(path.read_text(encoding="utf-8"))
                assert isinstance(units, dict)
                return {str(key): str(unit) for key, unit in units.items()}
            except (OSError, ValueError, AssertionError) as error:
                raise UserError(f"cannot read the units in {path}: {error}; delete it and add them again") from error
    return {}


def _store(source: DataSource, units: Mapping[str, str | None]) -> None:
    for place in (_beside(source), _cached(source)):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with complete_or_absent(place) as temporary:
                temporary.write_text(json.dumps(units, indent=2) + "\n", encoding="utf-8")
        except OSError:
            continue
        log.info(f"the units of {source.directory} are now in {place}")
        return
    log.warning(f"the units of {source.directory} could not be stored: the next run needs demonstration_units, too")


def _beside(source: DataSource) -> Path:
    path = source.directory
    return path / UNITS if path.is_dir() else path.with_name(f"{path.stem}_{UNITS}")


def _cached(source: DataSource) -> Path:
    digest = hashlib.sha256(source.identity).hexdigest()
    return cache_folder().parent / "units" / f"{digest[:32]}.json"
