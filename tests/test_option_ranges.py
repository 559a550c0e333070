"""Every number of every configuration has a declared range; numbers outside it are refused, naming the option."""

import math
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, get_args, get_origin

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from actor import ActorConfig
from classify import ClassifyConfig
from compare import CompareConfig
from embodied.command_line.config import compose
from embodied.configuration import INF, Configuration, Range, check_ranges, type_hints
from embodied.errors import UserError
from evaluate import EvaluateConfig
from export import ExportConfig
from identify import IdentifyConfig
from real_robot.ros2.software_in_the_loop import Episodes
from real_robot.safety.barrier import Distance
from real_robot.safety.energy_tank import Tank
from real_robot.safety.limits import ElementLimits, Limits, ObservedRange
from record import RecordConfig
from reflex import ReflexConfig
from replay import ReplayConfig
from serve import ServeConfig
from sims.mjcf.task import SHIPPED, find_mdp
from sims.quadrotor.episode import weights
from sims.registry import TASKS
from sims.vehicle.task import NavigateTask, PracticeTask, RaceTask
from train import GROUPS, TrainConfig
from tune import TuneConfig

PROGRAMS = (
    *(ActorConfig, ClassifyConfig, CompareConfig, EvaluateConfig, ExportConfig, IdentifyConfig, RecordConfig),
    *(ReflexConfig, ReplayConfig, ServeConfig, Episodes, TrainConfig, TuneConfig),
)
NONSENSE = (math.nan, math.inf, -math.inf, -1, 0)


def field_types(kind):
    """Types of the fields of a configuration, by name."""
    return {field.name: type_hints(kind)[field.name] for field in fields(kind)}


def reachable(kinds):
    """Classes of all configurations among `kinds` and their fields."""
    classes = dict.fromkeys(kinds)
    for kind in classes:
        inner = [each for hint in field_types(kind).values() for each in (hint, *get_args(hint))]
        inner = [each for each in inner if isinstance(each, type) and is_dataclass(each)]
        if new := [each for each in inner if each not in classes]:
            return reachable([*classes, *new])
    return list(classes)


CONFIGURATIONS = reachable([*PROGRAMS, Limits, *(kind for group in GROUPS.values() for kind in group.values())])
EXAMPLES = {
    Distance: Distance(elements=["a"], position="p", planes=[[1.0, 0.0]]),
    ElementLimits: ElementLimits(measured="position.a"),
    ObservedRange: ObservedRange(rate="velocity.a"),
    Tank: Tank(elements=["a"], conjugate=["a"]),
}
"""Configurations of classes whose fields have to go together."""


def numbers(hint, inside=()):
    """Types of numbers in a field's type, with their declared range (None if undeclared) and the containers around."""
    if hint in (int, float):
        yield None, inside
    elif get_origin(hint) is Annotated:
        yield next((each for each in get_args(hint) if isinstance(each, Range)), None), inside
    else:
        around = (*inside, get_origin(hint)) if get_origin(hint) in (list, dict) else inside
        for arm in get_args(hint):
            yield from numbers(arm, around)


def valued(number, containers):
    for container in reversed(containers):
        number = [number] if container is list else {"any": number}
    return number


def numbers_of(kind):
    """Numbers of the fields of a configuration: field, declared range, containers around."""
    return [(name, *number) for name, hint in field_types(kind).items() for number in numbers(hint)]


NUMBERS = [(kind, *number) for kind in CONFIGURATIONS for number in numbers_of(kind)]


def test_the_walk_reaches_every_kind_of_configuration():
    assert len(CONFIGURATIONS) > 40
    assert len(NUMBERS) > 250
    walked = {(kind.__name__, name) for kind, name, _, _ in NUMBERS}
    assert walked >= {
        *{("PPOConfig", "clip"), ("Randomisation", "friction"), ("TorchrunConfig", "timeout_s")},
        *{("ServeConfig", "port"), ("TrainConfig", "evaluate_every_steps"), ("MLPConfig", "hidden")},
        *{("Distance", "planes"), ("ElementLimits", "velocity"), ("ObservedRange", "low"), ("Tank", "start_j")},
    }


@pytest.mark.parametrize("kind", CONFIGURATIONS, ids=lambda kind: kind.__name__)
def test_every_number_has_a_declared_range(kind):
    assert issubclass(kind, Configuration)
    assert [name for name, accepted, _ in numbers_of(kind) if accepted is None] == []


@pytest.mark.parametrize("kind", CONFIGURATIONS, ids=lambda kind: kind.__name__)
def test_a_field_accepts_what_it_declares(kind):
    check_accepts_what_it_declares(kind, EXAMPLES.get(kind) or kind())


def check_accepts_what_it_declares(kind, example):
    composed = OmegaConf.structured(kind)
    for name, accepted, containers in numbers_of(kind):
        for number in NONSENSE:
            value, allowed = valued(number, containers), number in accepted
            # Fields that do not go together may be refused, too, in other words.
            assert refusal(replace, example, **{name: value}).startswith(name) != allowed, (name, number)
            config = composed.copy()
            try:
                OmegaConf.update(config, name, value, merge=False)
            except ValidationError:  # no number of the field's type, such as NaN of an integer
                assert isinstance(number, float)
                continue
            assert refusal(check_ranges, config, "part.").startswith(f"part.{name}") != allowed, (name, number)


def refusal(function, *arguments, **options):
    """The message of UserError, or nothing."""
    try:
        function(*arguments, **options)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("accepted", "members", "others", "words"),
    [
        (Range(), (-1, 0, 1e30, 10**400), (math.nan, INF, -INF), ""),
        (Range(at_least=0), (0, 5), (-1e-9, math.nan, INF), "of at least 0"),
        (Range(above=0, at_most=1), (1e-9, 1), (0, 1.1, math.nan), "above 0 and of at most 1"),
        (Range(at_least=0, below=1), (0, 0.9), (1, -0.1, math.nan), "of at least 0 and below 1"),
        (Range(above=0, at_most=INF), (1, INF), (0, -INF, math.nan), "above 0, or inf"),
        (Range(at_least=-INF, at_most=INF), (-1, INF, -INF), (math.nan,), ", or inf"),
    ],
)
def test_a_range_has_its_numbers_and_never_nan(accepted, members, others, words):
    assert all(number in accepted for number in members)
    assert not any(number in accepted for number in others)
    assert str(accepted) == words


PPO = "algorithm=ppo"
HOVER = "task=quadrotor_hover"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([PPO, "algorithm.clip=-1"], "algorithm.clip=-1: expected a number above 0"),
        ([PPO, "algorithm.max_gradient_norm=-1"], "algorithm.max_gradient_norm=-1: expected a number above 0, or inf"),
        ([PPO, "algorithm.gae_lambda=-1"], "algorithm.gae_lambda=-1: expected a number of at least 0 and of at most 1"),
        ([PPO, "algorithm.target_kl=nan"], "algorithm.target_kl=nan: expected a finite number above 0, or inf"),
        ([PPO, "algorithm.final_lr_share=-5"], "algorithm.final_lr_share=-5: expected"),
        ([HOVER, "policy.hidden=[64,0]"], r"policy.hidden=\[64,0\]: expected a number of at least 1 in place of 0"),
        ([HOVER, "algorithm=td3", "algorithm.noise_clip=-1"], "algorithm.noise_clip=-1: expected a number of at least"),
        (["task=gym_pusher", "task.control_dt_s=nan"], "task.control_dt_s=nan: expected a finite number above 0"),
        (["task.randomisation.mass=[1,inf]"], r"task.randomisation.mass=\[1,inf\]: expected a finite number"),
        (["algorithm.imitation.sft.weight_decay=-1"], "algorithm.imitation.sft.weight_decay=-1: expected"),
        (["placement=torchrun", "placement.timeout_s=inf"], "placement.timeout_s=inf: expected a finite number"),
        (["seed=-1"], "seed=-1: expected a number of at least 0"),
        ([HOVER, "task.reward.weight_position=-1"], "task.reward.weight_position=-1: expected a number of at least 0"),
        (["task=vehicle_race", "task.vehicle.friction=nan"], "task.vehicle.friction=nan: expected a finite number"),
        (["task=vehicle_race", "task.lidar.beams=1"], "task.lidar.beams=1: expected a number of at least 2"),
        (["task=vehicle_race", "task.numbers.laps=1.5"], "task.numbers.laps=1.5: expected a whole number"),
        (["task=mjcf_cartpole", "task.numbers.held_s=-1"], "task.numbers.held_s=-1: expected a number of at least 0"),
    ],
)
def test_nonsense_is_refused_by_the_name_that_was_typed(options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        compose(TrainConfig, "train", options, GROUPS)


NAMED = [
    *((kind.MDP, None) for kind in (NavigateTask, PracticeTask, RaceTask)),
    *((kind.MDP.LIDAR, None) for kind in (NavigateTask, PracticeTask, RaceTask)),
    *((kind.VEHICLE, None) for kind in (NavigateTask, PracticeTask, RaceTask)),
    *((find_mdp(name), None) for name in SHIPPED),
    *((mdp, weights(mdp)) for kind in TASKS.values() if hasattr(kind, "MDPS") for mdp in kind.MDPS.values()),
]


@pytest.mark.parametrize(("record", "known"), NAMED, ids=lambda each: type(each).__name__)
def test_numbers_that_a_task_takes_by_name_have_declared_ranges(record, known):
    names = [field.name for field in fields(record)] if known is None else known
    assert names
    undeclared = [name for name in names for accepted, _ in numbers(type_hints(type(record))[name]) if not accepted]
    assert undeclared == []
