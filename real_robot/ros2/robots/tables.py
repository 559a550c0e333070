"""The interface of a robot: topic, message and QoS of each array of a contract.

`registry.py` has one function per robot, which makes the robot's table for a policy's contract. Names of topics and
services are relative, so that a node's namespace and remappings apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from real_robot.robots.control_loop import Executor
from real_robot.ros2.messages.cartesian_codecs import Picture
from real_robot.ros2.messages.codecs import Arrays, Codec, LabelledArrays, Message, Types, fill, set_stamp
from real_robot.safety.limits import Kind, Limits

ACTION = "action"
"""Key of the action in a command's codec."""
REMEMBERED = ("previous_action", "action_history")
"""Observations without a topic: past actions, oldest first, stored by the program that writes them."""


@dataclass(frozen=True)
class Qos:
    """Quality of service of a topic; the names are those of rclpy's policies.

    `lease_s` is the longest time without a sign of life of a publisher, 0 for no limit. The middleware sends signs of
    life while the process runs; with `manual` the publisher sends them, so that a process that hangs counts as dead.
    """

    depth: int = 1
    reliability: str = "reliable"
    durability: str = "volatile"
    lease_s: float = 0.0
    manual: bool = False


STATE = Qos(depth=1, reliability="best_effort")
"""Newest value only; matches reliable and best-effort publishers."""
COMMAND = Qos(depth=1)
LATCHED = Qos(depth=1, durability="transient_local")
IMAGES = Qos(depth=2)
"""Reliable: an image is many packets, and with best effort one lost packet loses the image."""
PX4 = Qos(depth=1, reliability="best_effort", durability="transient_local")
"""QoS that the uXRCE-DDS agent offers."""
PX4_COMMAND = Qos(depth=1, reliability="best_effort")
"""QoS that the agent requests. It is volatile, so that an agent that starts later gets no old command."""


@dataclass(frozen=True)
class Topic:
    """A topic and its codec; messages of a `lasting` topic never become stale.

    `jump` describes how a message contradicts the previous one, as after a reset of the robot's estimator; "" if not.
    """

    name: str
    codec: Codec
    qos: Qos
    lasting: bool = False
    jump: Callable[[Message, Message], str] | None = None


@dataclass(frozen=True)
class Fixed:
    """A constant message except for its stamp: `fields` by path, all others zero."""

    name: str
    type: str
    fields: Mapping[str, Any]
    qos: Qos = COMMAND

    def message(self, types: Types, stamp_s: float) -> Message:
        """Build the message with a stamp."""
        message = fill(types(self.type)(), self.fields)
        set_stamp(message, stamp_s)
        return message


@dataclass(frozen=True)
class Behaviour:
    """A request to the robot that is no command: to follow commands, to hold, or to stop.

    When it begins, `messages` are published and `services`, each a std_srvs/Trigger, called once.
    """

    messages: tuple[Fixed, ...] = ()
    services: tuple[str, ...] = ()


@dataclass(frozen=True)
class Heartbeat:
    """A message that the robot requires in order to follow, sent at `rate_hz` while commands arrive.

    The robot is requested to follow after `before_s` of heartbeats.
    """

    message: Fixed
    rate_hz: float
    before_s: float


@dataclass(frozen=True)
class Condition:
    """Content of a robot's status.

    Attributes:
        follows: whether the robot takes our commands; at other times they would disturb its pilot or failsafe.
        fault: reason for not executing our commands; "" if it does.
        stopped: whether an emergency stop has taken effect.
        request: next step towards following; None if somebody else steers, or no step is needed.
        beat: whether the heartbeat may begin; False if the robot would then resume following by itself.
    """

    follows: bool
    fault: str = ""
    stopped: bool = False
    request: Behaviour | None = None
    beat: bool = True


@dataclass(frozen=True)
class Status:
    """Status topic of a robot that others may steer, too; it is published at least every `timeout_s`.

    `requests` are all possible values of `Condition.request`.
    """

    name: str
    type: str
    qos: Qos
    read: Callable[[Message], Condition]
    requests: tuple[Behaviour, ...]
    timeout_s: float


@dataclass(frozen=True)
class Mode:
    """A topic on which an arm's driver reports whether the arm moves: `refusal` returns the cause of a standstill.

    The driver repeats its message within `timeout_s`; None: only changes are published, and the publisher has to exist.
    """

    name: str
    type: str
    qos: Qos
    refusal: Callable[[Message], str]
    timeout_s: float | None = None


@dataclass(frozen=True)
class Pause:
    """Bridges missing commands to a robot with a status for `longest_s` after the last one; then it holds for good.

    `action` computes the action written meanwhile from the last action [A]; None: nothing is written.
    """

    longest_s: float = 0.1
    action: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class Derived:
    """Observations `specs` computed from several topics' arrays; arrays in `used` are no observations themselves.

    `invert`, for simulators, computes topics' arrays for which `compute` returns given observations.
    """

    specs: Mapping[str, TensorSpec]
    used: tuple[str, ...]
    compute: Callable[[Arrays], dict[str, np.ndarray]]
    invert: Callable[[Arrays], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Table:
    """One robot: its topics, and its behaviours of holding and stopping.

    Attributes:
        name: name in the registry.
        states: topics that together make an observation.
        command: the topic of the action, under the key `ACTION`.
        control_dt_s: time between actions.
        stops_after_s: time without commands after which the robot stands still, see `Robot.stops_after_s`.
        stamped: whether commands to `safety_node` contain their decision time. The age of other commands is the age of
            the policy's newest heartbeat.
        at_rest: commands that stop the robot, see `Robot.at_rest`; None if only its own behaviour makes it safe.
        hold: the robot's own safe behaviour, from which it recovers.
        emergency: behaviour that stops the robot permanently.
        heartbeat, status, pause, derived: see their classes; the first three belong to robots that others may steer.
        modes: further conditions of motion; commands are refused until each has been published.
        remembered: observations of past actions; see `REMEMBERED`.
        initial: action [A] with which past actions begin.
        policy_action: spec of the policy's action, if it differs from the robot's.
        translate: converts an executor of the policy's actions to one of the robot's.
        advice: advice for the person who runs a policy; "" if there is none.
    """

    name: str
    states: tuple[Topic, ...]
    command: Topic
    control_dt_s: float
    stops_after_s: float | None
    stamped: bool = True
    hold: Behaviour = Behaviour()
    emergency: Behaviour = Behaviour()
    at_rest: tuple[float, ...] | None = None
    heartbeat: Heartbeat | None = None
    status: Status | None = None
    pause: Pause = Pause()
    derived: Derived | None = None
    modes: tuple[Mode, ...] = ()
    remembered: Mapping[str, TensorSpec] = field(default_factory=dict)
    initial: tuple[float, ...] = ()
    policy_action: TensorSpec | None = None
    translate: Callable[[Executor], Executor] = lambda executor: executor
    advice: str = ""

    @property
    def served(self) -> Contract:
        """Contract of the policies that this robot serves: `contract`, except for a translated action."""
        return replace(self.contract, action=self.policy_action) if self.policy_action else self.contract

    @property
    def sign_s(self) -> float:
        """Longest time in s between signs of life of a policy's publisher of commands."""
        return min(max(self.control_dt_s, 0.02), 0.1)

    @property
    def contract(self) -> Contract:
        """Contract of the robot's observations and action, for `Contract.bind`."""
        observation = {key: spec for topic in self.states for key, spec in topic.codec.specs.items()}
        if self.derived:
            measured = {key: spec for key, spec in observation.items() if key not in self.derived.used}
            observation = measured | dict(self.derived.specs)
        action = self.command.codec.specs[ACTION]
        return Contract(observation | dict(self.remembered), action, self.control_dt_s)

    def observe(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Compute the contract's observations, except `remembered`, from the arrays of all `states`."""
        if self.derived is None:
            return dict(arrays)
        measured = {key: value for key, value in arrays.items() if key not in self.derived.used}
        return measured | self.derived.compute(arrays)

    def within(self, limits: Limits) -> Table:
        """Copy of the table with the position limits of `limits`, which also bound the stop of a trajectory."""
        spec = self.command.codec.specs[ACTION]
        low, high = (
            np.array(bound or (side * np.inf,) * spec.shape[0]) for side, bound in ((-1, spec.low), (1, spec.high))
        )
        for index, name in enumerate(spec.names):
            element = limits.commands.get(name)
            if element and element.kind is Kind.POSITION:
                low[index] = max(low[index], element.low / element.scale)
                high[index] = min(high[index], element.high / element.scale)
        codec = replace(self.command.codec, specs={ACTION: replace(spec, low=tuple(low), high=tuple(high))})
        return replace(self, command=replace(self.command, codec=codec))

    def measured(self, observation: Arrays) -> dict[str, np.ndarray]:
        """Arrays of all `states` from which `observe` computes `observation`, for a simulator to publish."""
        return dict(observation) | (self.derived.invert(observation) if self.derived else {})


def remembered(contract: Contract, action: TensorSpec) -> dict[str, TensorSpec]:
    """Specs of the observations in `contract` that are past actions of a robot with the action spec `action`."""
    size = action.shape[0]
    specs = {}
    for key in (key for key in REMEMBERED if key in contract.observation):
        steps = max(1, contract.observation[key].shape[0] // size) if key == "action_history" else 1
        ages = [f"_{age}" for age in range(steps, 0, -1)] if key == "action_history" else [""]
        names = tuple(f"{name}{age}" for age in ages for name in action.names)
        specs[key] = TensorSpec((steps * size,), unit=action.unit, frame=action.frame, names=names)
    return specs


def action_spec(contract: Contract, names: Sequence[str], unit: str, frame: str = "") -> TensorSpec:
    """Spec of an action with elements `names` in this order, with the policy's limits if it has the same elements."""
    spec = TensorSpec((len(names),), unit=unit, frame=frame, names=tuple(names))
    if not contract.action.low or set(names) != set(contract.action.names):
        return spec
    order = [contract.action.names.index(name) for name in names]
    low, high = ([values[index] for index in order] for values in (contract.action.low, contract.action.high))
    return replace(spec, low=tuple(low), high=tuple(high))


def camera_topics(contract: Contract, cameras: Mapping[str, str]) -> list[Topic]:
    """Topics of images, by observation of `contract`.

    Raises:
        UserError: for a camera that the policy does not observe.
    """
    if unknown := [key for key in cameras if key not in contract.observation]:
        raise UserError(f"camera {unknown[0]!r} is no observation of the policy; it reads {list(contract.observation)}")
    specs = {key: {key: contract.observation[key]} for key in cameras}
    return [
        Topic(topic, Picture(specs[key], compressed=topic.endswith("compressed")), IMAGES)
        for key, topic in cameras.items()
    ]


def make_table(
    name: str,
    contract: Contract,
    rate_hz: float,
    states: Sequence[Topic],
    command: Topic,
    arrays: Sequence[str],
    stops_after_s: float | None,
    **others: Any,  # noqa: ANN401 - the fields of Table
) -> Table:
    """Make the table of a robot, with the labelled arrays and past actions in `contract`.

    Raises:
        UserError: for `arrays` that the policy does not observe.
    """
    if missing := [key for key in arrays if key not in contract.observation]:
        raise UserError(f"arrays {missing} are no observations of the policy; it reads {list(contract.observation)}")
    specs = {key: contract.observation[key] for key in arrays}
    labelled = (Topic("observation", LabelledArrays(specs), COMMAND),) if specs else ()
    action = command.codec.specs[ACTION]
    initial = action.low if name == "px4_actuators" else (0.0,) * len(action.names)  # rotors begin at standstill
    return Table(
        name,
        (*states, *labelled),
        command,
        1.0 / rate_hz,
        stops_after_s,
        remembered=remembered(contract, action),
        initial=initial,
        **others,
    )
