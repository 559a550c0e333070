"""Base of all nodes: settings from ROS parameters, logged lifecycle errors, diagnostics, QoS reports."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rclpy.clock import Clock, ClockType
from rclpy.event_handler import PublisherEventCallbacks, SubscriptionEventCallbacks
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import qos_policy_name_from_kind
from rclpy.signals import SignalHandlerOptions

from embodied.errors import UserError

S, E = TypeVar("S"), TypeVar("E")
OK, WARN, ERROR = (cast(bytes, getattr(DiagnosticStatus, level)) for level in ("OK", "WARN", "ERROR"))
DIAGNOSTICS_PERIOD_S = 0.5
ROS_OWN = ("use_sim_time", "qos_overrides", "start_type_description_service")
"""First parts of the names of ROS's own parameters."""


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
    has deactivated and freed everything declared as its `own`. `reports` are published on /diagnostics twice a second,
    even while a simulator's clock stands still.
    """

    def __init__(self, name: str, settings: type[S]) -> None:
        super().__init__(name, automatically_declare_parameters_from_overrides=True)
        self._settings_type = settings
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
        """Stop, safely; also called after an error, when not everything may exist."""

    def cleanup(self) -> None:
        """Free what `configure` created apart from the node's `own`, as far as it got."""

    def own(self, entity: E) -> E:
        """Register a publisher, subscription, client, service or timer to be destroyed on cleanup; returns it."""
        self._owned.append(entity)
        return entity

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's configure transition."""

        def start() -> None:
            self.settings = read_settings(self, self._settings_type)
            self.configure()

        done = self._try("configure", start)
        if done is not TransitionCallbackReturn.SUCCESS:
            self._free()
            return TransitionCallbackReturn.FAILURE
        return done

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's activate transition."""
        return self._try("activate", self.activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's deactivate transition."""
        return self._try("deactivate", self.deactivate)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's cleanup transition."""
        return self._free()

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's shutdown transition: stops and frees everything, from any state."""
        self._try("deactivate", self.deactivate)
        return self._free()

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """ROS's transition after an error: stops and frees everything, so that the node can be configured again."""
        self._try("deactivate", self.deactivate)
        return self._free()

    def qos_events(self, topic: str) -> dict[str, Any]:
        """Callbacks that report partners with incompatible QoS, for "subscription" and "publisher" of `topic`."""

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
        self.reports.clear()
        self._mismatches.clear()
        freed = self._try("cleanup", self.cleanup)
        kinds = ("timer", "service", "client", "subscription", "publisher")
        for entity in self._owned:
            if not any(getattr(self, f"destroy_{kind}")(entity) for kind in kinds):
                self.get_logger().warning(f"{entity} was not the node's")
        self._owned.clear()
        return freed

    def _publish_diagnostics(self) -> None:
        reports = {name: report() for name, report in self.reports.items()}
        if self._mismatches:
            reports["qos"] = Report("partners with incompatible QoS are not heard", ERROR, self._mismatches)
        message = DiagnosticArray()
        message.header.stamp = self.get_clock().now().to_msg()
        message.status = [
            DiagnosticStatus(
                level=report.level, name=f"{self.get_fully_qualified_name()}: {name}", message=report.message,
                hardware_id="embodied_ros2",
                values=[KeyValue(key=key, value=str(value)) for key, value in report.values.items()],
            )
            for name, report in reports.items()
        ]  # fmt: skip
        self._diagnostics.publish(message)


def read_settings(node: LifecycleNode, cls: type[S]) -> S:
    """The dataclass `cls` from the node's parameters ("a.b" is field b of field a); declares missing ones.

    Raises:
        UserError: for an unknown parameter or a wrong type.
    """
    nested: dict[str, Any] = {}
    for name, parameter in node.get_parameters_by_prefix("").items():
        *parents, last = name.split(".")
        if name.split(".")[0] in ROS_OWN:
            continue
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        value = parameter.value
        place[last] = list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
    try:
        config = OmegaConf.merge(OmegaConf.structured(cls), nested)
    except OmegaConfBaseException as error:
        raise UserError(f"parameters of {node.get_name()}: {str(error).splitlines()[0]}") from error
    for name, value in _leaves(OmegaConf.to_container(config, enum_to_str=True), ""):
        if not node.has_parameter(name):
            node.declare_parameter(name, value)
    return cast(S, OmegaConf.to_object(config))


def spin(make: Callable[[], ManagedNode]) -> None:
    """Run a node until Ctrl-C, SIGTERM or an error, then stop it safely."""
    rclpy.init(
        signal_handler_options=SignalHandlerOptions.NO
    )  # rclpy's handler would close the node before it can hold
    node = make()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            node.get_logger().info("waits to be configured")
            executor.spin()
    finally:  # an error in a callback ends the process, but only after the robot holds
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        node.trigger_shutdown()
        node.destroy_node()
        rclpy.shutdown()


def _leaves(tree: Any, prefix: str) -> list[tuple[str, Any]]:  # noqa: ANN401 - nested containers
    """Names and values in the form that ROS can declare: it has no None and no type for an empty list."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{prefix}.{key}" if prefix else key)]
    unknown = tree is None or (isinstance(tree, list) and (not tree or isinstance(tree[0], dict)))
    return [] if unknown else [(prefix, tree)]
