"""Base class of all nodes: settings from ROS parameters, logged lifecycle errors, diagnostics, QoS reports."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rcl_interfaces.msg import SetParametersResult
from rclpy._rclpy_pybind11 import RCLError
from rclpy.clock import Clock, ClockType, JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.event_handler import PublisherEventCallbacks, SubscriptionEventCallbacks
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import qos_policy_name_from_kind
from rclpy.signals import SignalHandlerOptions

from embodied import without_dynamo  # noqa: F401 - first
from embodied.configuration import Configuration, check_ranges
from embodied.errors import UserError

S = TypeVar("S", bound=Configuration)
E = TypeVar("E")
OK, WARN, ERROR = (cast(bytes, getattr(DiagnosticStatus, level)) for level in ("OK", "WARN", "ERROR"))
DIAGNOSTICS_PERIOD_S = 0.5
PR_SET_PDEATHSIG = 1
AUTOSTART = "autostart"
"""Parameter of a node that ends with its parent process: the state, one of `STARTS`, to which it starts itself."""
STARTS = ("unconfigured", "inactive", "active")
NO_SETTINGS = (AUTOSTART, "use_sim_time", "qos_overrides", "start_type_description_service")
"""First parts of the names of parameters that are no settings of a node: ours, and ROS's own."""


@dataclass
class Report:
    """One entry of /diagnostics: `level` is OK, WARN or ERROR."""

    message: str = ""
    level: bytes = OK
    values: Mapping[str, Any] = field(default_factory=dict)


class ManagedNode(LifecycleNode, Generic[S]):
    """A lifecycle node with `settings`, read from its parameters when it is configured.

    Subclasses implement `configure`, `activate`, `deactivate` and `cleanup`. A UserError in them is logged on one line,
    any other error with its traceback. After a failed configure the node is unconfigured. After any other failure it
    has been deactivated, and everything registered with `own` is destroyed. An error in a callback deactivates the node
    (`fail`); no error ends it. `reports` are published on /diagnostics twice a second, even while a simulator's clock
    stands still. Parameters are read when the node is configured; afterwards only `live` parameters can be set.
    """

    live: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, settings: type[S]) -> None:
        super().__init__(name, automatically_declare_parameters_from_overrides=True)
        self._settings_type = settings
        self._configured = False
        self._failure = ""
        self.add_on_set_parameters_callback(self._settable)
        change = self._service_change_state.callback
        # rclpy's own callback raises RCLError for an impossible transition, which would end the process
        self._service_change_state.callback = lambda request, response: self._change(change, request, response)
        backwards = JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=False)
        self._jumps = self.get_clock().create_jump_callback(backwards, post_callback=self._jumped)
        self.on_jump: list[Callable[[float], None]] = []
        """Callbacks for a clock that has jumped back by a time in s, as a simulator's clock does on a reset."""
        self.settings: S
        self.reports: dict[str, Callable[[], Report]] = {}
        self.steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._mismatches: dict[str, str] = {}
        self._owned: list[Any] = []
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self.create_timer(DIAGNOSTICS_PERIOD_S, self._publish_diagnostics, clock=self.steady)

    def configure(self) -> None:
        """Create everything that `settings` require."""

    def activate(self) -> None:
        """Start."""

    def deactivate(self) -> None:
        """Stop safely; also called after an error, when some attributes may not exist."""

    def cleanup(self) -> None:
        """Free everything that `configure` created without `own`, even if it failed halfway."""

    def own(self, entity: E) -> E:
        """Register a publisher, subscription, client, service or timer to be destroyed on cleanup; returns it."""
        self._owned.append(entity)
        return entity

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's configure transition."""

        def start() -> None:
            self.settings = read_settings(self, self._settings_type)
            self.configure()

        result = self._try("configure", start)
        if result is not TransitionCallbackReturn.SUCCESS:
            self._free()
            return TransitionCallbackReturn.FAILURE
        self._configured = True
        self._failure = ""
        return result

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's activate transition."""
        self._failure = ""
        return self._try("activate", self.activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's deactivate transition."""
        return self._try("deactivate", self.deactivate)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's cleanup transition."""
        return self._free()

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's shutdown transition: stops and frees everything, from any state."""
        if state.label == "active":
            self._try("deactivate", self.deactivate)
        return self._free()

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's transition after an error: stops and frees everything, so that the node can be configured again."""
        self._try("deactivate", self.deactivate)
        return self._free()

    def fail(self, error: Exception) -> None:
        """Deactivate after an unexpected error in a callback, so that the robot holds; /diagnostics names it."""
        self._failure = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        self.get_logger().error(f"an error deactivates the node: {trace}", throttle_duration_sec=1.0)
        if self.active:
            self.trigger_deactivate()

    @property
    def steady_s(self) -> float:
        """Steady time in s, which is independent of jumps and standstills of ROS time."""
        return self.steady.now().nanoseconds / 1e9

    @property
    def active(self) -> bool:
        """Whether the node's lifecycle state is active."""
        return self._state_machine.current_state[1] == "active"

    def autostart(self) -> None:
        """Take the node to the state of its parameter `AUTOSTART`, if set, and let it end with its parent process."""
        target_state = self.get_parameter(AUTOSTART).value if self.has_parameter(AUTOSTART) else ""
        if target_state:
            _end_with_parent()
        if target_state not in ("", *STARTS):
            self.get_logger().error(
                f"expected {AUTOSTART} {', '.join(STARTS[:-1])} or {STARTS[-1]}, got {target_state!r}"
            )
        elif target_state not in ("inactive", "active"):
            self.get_logger().info("waits to be configured")
        elif self.trigger_configure() is TransitionCallbackReturn.SUCCESS and target_state == "active":
            self.trigger_activate()

    def end(self) -> None:
        """Stop safely from any state that is not final, even in the middle of a transition."""
        state = self._state_machine.current_state[1]
        if state in ("unconfigured", "inactive", "active"):
            self.trigger_shutdown()
        elif state != "finalized":
            self._try("deactivate", self.deactivate)
            self._free()

    def qos_events(self, topic: str) -> dict[str, Any]:
        """Callbacks by "subscription" and "publisher" that report partners with incompatible QoS on `topic`."""

        def mismatch(event: Any) -> None:  # noqa: ANN401 - rclpy's
            policy = qos_policy_name_from_kind(event.last_policy_kind)
            self._mismatches[topic] = f"{event.total_count} with incompatible {policy}"
            self.get_logger().error(f"{topic}: a node with incompatible QoS is not heard ({policy})")

        return {
            "subscription": SubscriptionEventCallbacks(incompatible_qos=mismatch),
            "publisher": PublisherEventCallbacks(incompatible_qos=mismatch),
        }

    def _try(self, what: str, action: Callable[[], None]) -> TransitionCallbackReturn:
        try:
            action()
        except UserError as error:
            self.get_logger().error(f"{what}: {' '.join(str(error).split())}")
            return TransitionCallbackReturn.ERROR
        except Exception:  # rclpy would swallow it
            self.get_logger().error(f"{what} failed: {traceback.format_exc()}")
            return TransitionCallbackReturn.ERROR
        return TransitionCallbackReturn.SUCCESS

    def _free(self) -> TransitionCallbackReturn:
        self._configured = False
        self.reports.clear()
        self.on_jump.clear()
        self._mismatches.clear()
        result = self._try("cleanup", self.cleanup)
        kinds = ("timer", "service", "client", "subscription", "publisher")
        for entity in self._owned:
            if not any(getattr(self, f"destroy_{kind}")(entity) for kind in kinds):
                self.get_logger().warning(f"{entity} was not the node's")
        self._owned.clear()
        return result

    def _change(self, change: Callable[[Any, Any], Any], request: Any, response: Any) -> Any:  # noqa: ANN401 - rclpy's
        """Answer a request with failure if the node's state does not allow it; rclpy would end the process."""
        try:
            return change(request, response)
        except RCLError:
            transition = request.transition.label or request.transition.id
            state = self._state_machine.current_state[1]
            self.get_logger().warning(
                f"transition {transition!r} is not possible while {state}", throttle_duration_sec=1.0
            )
            response.success = False
            return response

    def _settable(self, parameters: Sequence[Parameter]) -> SetParametersResult:
        """Refuse parameters that would have no effect."""
        fixed = [parameter.name for parameter in parameters if parameter.name not in self.live]
        if not self._configured or not fixed:
            return SetParametersResult(successful=True)
        reason = f"{', '.join(fixed)}: read when {self.get_name()} is configured; clean it up first"
        return SetParametersResult(successful=False, reason=reason)

    def _jumped(self, jump: TimeJump) -> None:
        back_s = -jump.delta.nanoseconds / 1e9
        self.get_logger().error(f"the clock has jumped back by {back_s:.3f} s")
        for forget in self.on_jump:
            forget(back_s)

    def _publish_diagnostics(self) -> None:
        reports = {name: report() for name, report in self.reports.items()}
        if self._failure:
            reports["node"] = Report(f"deactivated by {self._failure}; activate it to try again", ERROR)
        if self._mismatches:
            reports["qos"] = Report("partners with incompatible QoS are not heard", ERROR, self._mismatches)
        message = DiagnosticArray()
        message.header.stamp = self.get_clock().now().to_msg()
        message.status = [
            DiagnosticStatus(
                level=report.level,
                name=f"{self.get_fully_qualified_name()}: {name}",
                message=report.message,
                hardware_id="embodied_ros2",
                values=[KeyValue(key=key, value=str(value)) for key, value in report.values.items()],
            )
            for name, report in reports.items()
        ]
        self._diagnostics.publish(message)


def read_settings(node: LifecycleNode, cls: type[S]) -> S:
    """Build the dataclass `cls` from the node's parameters ("a.b" is field b of field a); declare missing ones.

    Raises:
        UserError: for an unknown parameter, a wrong type, or a number that is not finite or out of range.
    """
    nested: dict[str, Any] = {}
    for name, parameter in node.get_parameters_by_prefix("").items():
        *parents, last = name.split(".")
        if name.split(".")[0] in NO_SETTINGS:
            continue
        node_settings = nested
        for parent in parents:
            node_settings = node_settings.setdefault(parent, {})
        value = parameter.value
        node_settings[last] = list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
    try:
        config = OmegaConf.merge(OmegaConf.structured(cls), nested)
    except OmegaConfBaseException as error:
        raise UserError(f"parameters of {node.get_name()}: {str(error).splitlines()[0]}") from error
    for name, value in _leaves(OmegaConf.to_container(config, enum_to_str=True), ""):
        if not node.has_parameter(name):
            node.declare_parameter(name, value)
    check_ranges(config, f"parameters of {node.get_name()}: ")
    return cast(S, OmegaConf.to_object(config))


def spin(make: Callable[[], ManagedNode]) -> None:
    """Run a node until Ctrl-C, SIGTERM, or the end of the launch that started it, then stop it safely.

    A callback, such as a deactivation that stops the robot, is interrupted only by the second signal. All errors of
    callbacks are caught here: the node deactivates and continues.
    """
    rclpy.init(
        signal_handler_options=SignalHandlerOptions.NO
    )  # rclpy's handler would close the node before it can hold
    node = make()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    signals: list[int] = []

    def interrupt(number: int, frame: Any) -> None:  # noqa: ANN401 - of Python
        signals.append(number)
        if len(signals) > 1:
            signal.default_int_handler(number, frame)

    try:
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)
        node.autostart()
        while not signals:
            try:
                executor.spin_once()
            except Exception as error:  # after any error the robot holds, and the emergency stop still works
                node.fail(error)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        node.end()
        node.destroy_node()
        rclpy.shutdown()


def _end_with_parent() -> None:
    """Let Linux send SIGTERM when the launching process ends, however it ends, because nodes would outlive it."""
    parent = os.getppid()
    terminate = int(signal.SIGTERM)
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, terminate) == 0 and os.getppid() != parent:
        raise KeyboardInterrupt  # the parent ended in between


def _leaves(tree: Any, prefix: str) -> list[tuple[str, Any]]:  # noqa: ANN401 - nested containers
    """Names and values that ROS can declare, which has no None and no type for an empty list."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else key)]
    undeclarable = tree is None or (isinstance(tree, list) and (not tree or isinstance(tree[0], dict)))
    return [] if undeclarable else [(prefix, tree)]
