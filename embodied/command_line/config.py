"""Configuration: Hydra composes YAML and the command line, dataclasses check the values; errors are one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from embodied.command_line import combinations
from embodied.command_line.settings import settings
from embodied.command_line.suggestion import did_you_mean
from embodied.commands import CONFIGS, typed
from embodied.configuration import Configuration, check_ranges
from embodied.errors import UserError
from embodied.runtime import foreign_code as foreign
from embodied.saving.resume import MOVABLE

WHOLE = re.compile(r"(?<![^\[,:])\d+(\.\d+)?[eE]\+?\d{1,2}(?![^\],}])")
"""Pattern of a number with a positive exponent, as a whole value or an element of a list."""
NUMBERS = "task.numbers"
AIRFRAMES = "task.airframes"
"""Options with numbers of a task by name; the task itself checks the names."""
NAMED = (NUMBERS, AIRFRAMES, "options", "axes", "tune.options", "robot.options", "robot.axes")
"""Options with entries by name, whose owner checks the names."""
REMOVED = "bc_coefficient", "bc_batch"
"""Options of algorithms that runs of earlier versions recorded, for imitation beside reinforcement learning."""
C = TypeVar("C")
Groups = Mapping[str, Mapping[str, type]]
"""Config classes by name, for each config group."""


def compose(
    root: type[C], name: str, overrides: Sequence[str], groups: Groups, saved: Mapping[str, Any] | None = None
) -> tuple[C, dict[str, Any]]:
    """Compose configs/`name`.yaml with `overrides` ("key=value") into a `root` object and its JSON-ready form.

    `saved` is the JSON-ready form of an earlier run: its choices and values replace the defaults, and its "arguments",
    all of the earlier command lines, precede `overrides`.

    Raises:
        UserError: on one line, for an unknown key, name or type, listing the valid ones, for invalid combinations, and
            for `saved` of another version, with other choices, or that names code which `overrides` do not (`foreign`).
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    _check_choices(overrides, groups, [entry.name for entry in fields(cast(Any, root))])
    if groups and not saved:
        overrides = combinations.completed(overrides)
    if saved:
        foreign.check(saved, overrides)
        for group in groups:
            _check_saved(group, saved, groups)
    arguments = [*(saved or {}).get("arguments", []), *overrides]
    overrides = [whole(override) for override in overrides]
    _store(f"{name}_schema", root)
    _store("settings", {})  # empty until the choices are known
    for group, classes in groups.items():
        for key, node in classes.items():
            _store(key, node, group)
    chosen_now = [override for override in overrides if override.partition("=")[0] in groups]
    before: Mapping[str, str] = saved["choices"] if saved else {}
    named = {override.partition("=")[0] for override in chosen_now}
    unchanged_groups = [group for group in groups if group in before and not (group in MOVABLE and group in named)]
    choices = [f"{group}={before[group]}" for group in unchanged_groups]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra_compose(name, [*choices, *chosen_now], return_hydra_config=True)
            chosen = composed.hydra.runtime.choices
            choices_now = {group: chosen[group] for group in groups if chosen[group] is not None}
            _check_chosen(overrides, choices_now, groups)
            overrides = [_member(override, composed) for override in overrides]
            if groups and not saved:  # of a run, options that it did not record keep the defaults of their class
                published = dict(each.split("=", 1) for each in overrides).get("policy.weights", "null") != "null"
                _store("settings", settings(choices_now, published=published), package="_global_")
            plain = [override for override in overrides if _names_folder(override, groups)]
            others = [override for override in overrides if override not in plain]
            config = hydra_compose(name, [*choices, *map(_addable, others)])
            for key, value in parsed(plain).items():
                OmegaConf.update(config, key, value)
        if saved:
            _check_same({group: choices_now[group] for group in unchanged_groups}, before)
            value_overrides = [override for override in overrides if override.split("=")[0] not in groups]
            dropped_groups = [group for group in MOVABLE if group not in unchanged_groups]
            values = {name: value for name, value in saved["values"].items() if name not in dropped_groups}
            config = _saved(config, values)
            for name, value in parsed(value_overrides).items():
                OmegaConf.update(config, name, value, merge=True)
        check_ranges(config)
        values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, enum_to_str=True))
        result = cast(C, OmegaConf.to_object(config))
        for group in groups:
            if isinstance(part := getattr(result, group), Configuration):
                values[group] |= part.recorded()
        return result, {"choices": choices_now, "values": values, "arguments": arguments}
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error)) from error


def _store(name: str, node: Any, group: str | None = None, package: str | None = None) -> None:  # noqa: ANN401 - Hydra's
    """Give Hydra the config class or values `node` by name. Classes are converted once: all of them take 65 ms."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    registered = (store.repo.get(group, {}) if group else store.repo).get(f"{name}.yaml")
    if registered is None or not isinstance(node, type) or OmegaConf.get_type(registered.node) is not node:
        store.store(name=name, node=node, group=group, package=package)


def parsed(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse `overrides` ("key=value") with Hydra to values by key.

    Raises:
        UserError: for text that it cannot parse, and for a list without brackets.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed_overrides = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(_explain(error)) from error
    if sweep := next((each for each in parsed_overrides if each.is_sweep_override()), None):
        raise UserError(_one_value(sweep.key_or_group, sweep.get_value_string()))
    return {each.key_or_group: each.value() for each in parsed_overrides}


def names(group: str, groups: Groups) -> list[str]:
    """Choices of a group: its YAML files, or its classes if it has none; both for placements."""
    files = {path.stem for path in (CONFIGS / group).glob("*.yaml")}
    return sorted(files if files and group not in MOVABLE else files | groups[group].keys())


def _check_choices(overrides: Sequence[str], groups: Groups, options: Sequence[str]) -> None:
    for override in overrides:
        key, _, value = override.partition("=")
        if not value or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise UserError(f"expected key=value, got {override!r}; --help=all lists the options")
        if key.partition(".")[0] not in options:  # Hydra may accept another program's option
            raise UserError(_unknown("option", key, options, _nested(groups)))
        if key in groups and value not in names(key, groups):
            raise UserError(_unknown(key, value, names(key, groups)))


def _check_chosen(overrides: Sequence[str], choices: Mapping[str, str], groups: Groups) -> None:
    """Raise UserError for an option of a group of which nothing is chosen."""
    for override in overrides:
        name = override.partition("=")[0]
        group, dot, _ = name.partition(".")
        if dot and group in groups and group not in choices:
            raise UserError(
                f"{name} is an option of {group}=, which is not set; use one of {', '.join(names(group, groups))}"
            )


def _check_saved(group: str, saved: Mapping[str, Any], groups: Groups) -> None:
    """Raise UserError unless the choice of `group` in `saved`, if any, is one of ours."""
    choice = saved["choices"].get(group)
    if choice is not None and choice not in names(group, groups):
        valid_names = ", ".join(names(group, groups))
        raise UserError(
            f"the saved configuration is of another version: unknown {group} {choice!r}; expected {valid_names}"
        )


def _unknown(kind: str, name: str, names: Sequence[str], longer: Collection[str] = ()) -> str:
    """Error message on the unknown `name` of a `kind`, with suggestions from `names` or their `longer` names."""
    suggestion = (did_you_mean(name, longer) or did_you_mean(name, names)) if "." in name else ""
    suggestion = suggestion or did_you_mean(name, names) or did_you_mean(name, longer)
    return f"unknown {kind} {name!r}; expected one of {', '.join(names)}{suggestion}"


def _nested(groups: Groups) -> list[str]:
    """Options of all classes of `groups`, as typed."""
    classes = ((group, kind) for group, kinds in groups.items() for kind in kinds.values())
    return list(dict.fromkeys(f"{group}.{entry.name}" for group, kind in classes for entry in fields(kind)))


def whole(override: str) -> str:
    """Write out whole numbers such as 1e6 and 1.5e3 in `override`, as integer options need them."""
    key, _, value = override.partition("=")
    return f"{key}={WHOLE.sub(lambda match: _written_out(match[0]), value)}"


def _member(override: str, config: Any) -> str:  # noqa: ANN401 - OmegaConf's
    """Replace a choice in `override` by the name of its enumeration member: precision=bfloat16 is BFLOAT16."""
    key, _, value = override.partition("=")
    outer, _, last = key.rpartition(".")
    group = OmegaConf.select(config, outer) if outer else config
    kind = OmegaConf.get_type(group, last) if OmegaConf.is_dict(group) and last in group else None
    if kind is None or not issubclass(kind, Enum):
        return override
    names = {name.lower(): name for name in kind.__members__}
    return f"{key}={names.get(value.lower(), value)}"


def _names_folder(override: str, groups: Groups) -> bool:
    """Whether `override` sets an option with the name of another program's group, which Hydra would look for."""
    key = override.partition("=")[0]
    return key not in groups and (CONFIGS / key).is_dir()


def _addable(override: str) -> str:
    """Mark `override` for Hydra as an addition where needed."""
    return f"++{override}" if override.startswith(tuple(f"{each}{end}" for each in NAMED for end in ".=")) else override


def _written_out(number: str) -> str:
    return f"{float(number):.0f}" if float(number).is_integer() else number


def _check_same(chosen: Mapping[str, str], before: Mapping[str, str]) -> None:
    for group, name in chosen.items():
        if name != before[group]:
            raise UserError(f"the saved run has {group}={before[group]}, got {group}={name}; start a new run for that")


def _saved(config: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - OmegaConf's
    from omegaconf.errors import OmegaConfBaseException

    algorithm = values.get("algorithm")
    if algorithm and not algorithm.get("bc_coefficient"):  # a run that imitated beside would go on without it
        values = {**values, "algorithm": {name: each for name, each in algorithm.items() if name not in REMOVED}}
    for option in (NUMBERS, AIRFRAMES):
        if (numbers := OmegaConf.select(config, option)) is not None:
            OmegaConf.set_struct(numbers, False)
    try:
        return OmegaConf.merge(config, values)
    except OmegaConfBaseException as error:
        raise UserError(f"the saved configuration is of another version ({_explain(error)}); train again") from error


def _explain(error: Exception) -> str:
    """Explain an error in one line: the wrong option, and the values that it accepts."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}; write lists as [a,b] and text with special characters in quotes"
    if ambiguous := re.match(r"Ambiguous value for argument '([^']*)'", str(error)):
        key, _, value = ambiguous[1].partition("=")
        return _one_value(key, value)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        return " ".join(str(error).split())
    if isinstance(cause, MissingMandatoryValue):
        return f"expected {cause.full_key}=...; --help describes it"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        options = [str(key) for key in cause.parent_node if key != "hydra"]
        name = str(cause.full_key)
        prefix = name.rpartition(".")[0]
        return _unknown("option", name, options, [f"{prefix}.{each}" for each in options] if prefix else ())
    if "is not a ListConfig" in (message := str(cause).splitlines()[0]):
        return f"{cause.full_key}: expected a list, {cause.full_key}=[...]"
    return f"{cause.full_key}: {message}"


def _one_value(key: str, value: str) -> str:
    """Error message on a `value` with a comma: use quotes for a path, else a list, or -m."""
    advice = f"{key}=[{value}] for a list, or -m for a run of each"
    return f"expected one value of {key}, got {value}; write {typed(key, value) if '/' in value else advice}"
