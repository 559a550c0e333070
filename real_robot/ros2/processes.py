"""Runs nodes as processes in one ROS domain, with a client that configures them, calls services and subscribes."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import rclpy
import yaml
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from std_srvs.srv import Trigger

from embodied.errors import UserError

TRANSITIONS = {
    "configure": Transition.TRANSITION_CONFIGURE,
    "activate": Transition.TRANSITION_ACTIVATE,
    "deactivate": Transition.TRANSITION_DEACTIVATE,
    "cleanup": Transition.TRANSITION_CLEANUP,
}
PATIENCE_S = 90.0
STOP_S = 5.0
DOMAINS = range(20, 100)
"""Domains to choose from: 101 have their own ports on Linux, and people use the first ones."""
PROGRAMS = "real_robot.ros2.embodied_ros2"


class Processes:
    """A context manager that starts nodes in their own ROS domain on this machine, and ends them on exit.

    With `shared` the nodes use this process's domain, in which a robot may be. `directory` stores their parameters and
    output; None is a temporary folder, without ROS's own log. All waits raise UserError after `PATIENCE_S`, with the
    node's last lines of output.
    """

    def __init__(self, directory: Path | None = None, shared: bool = False) -> None:
        self._claim: int | None = None
        domain = int(os.environ.get("ROS_DOMAIN_ID", "0"))
        if not shared:
            os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
            self._claim, domain = claim_domain()
        self._temporary = tempfile.TemporaryDirectory() if directory is None else None
        self.directory = directory or Path(self._temporary.name)  # type: ignore[union-attr]
        self._environment = os.environ | {"ROS_DOMAIN_ID": str(domain), "PYTHONUNBUFFERED": "1"}
        self.domain = domain
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._context = rclpy.Context()
        rclpy.init(context=self._context, domain_id=domain)
        self.node = rclpy.create_node(f"client_{os.getpid()}", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._clients: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """The context manager itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes."""
        self.close()

    def start(
        self,
        name: str,
        parameters: Mapping[str, Any],
        program: str | None = None,
        files: Sequence[str | Path] = (),
        remap: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run `program` (`name` if None) as node `name` with the parameters of `files` and `parameters`.

        The node ends with this process, however that ends, because nobody else would stop the robot.
        """
        file = self.directory / f"{name}.yaml"
        values = {"autostart": "unconfigured"} | dict(parameters)
        file.write_text(yaml.safe_dump({f"/{name}": {"ros__parameters": values}}), encoding="utf-8")
        command = [sys.executable, "-m", f"{PROGRAMS}.{program or name}", "--ros-args"]
        for old_name, new_name in ({"__node": name} | dict(remap or {})).items():
            command += ["-r", f"{old_name}:={new_name}"]
        return self.spawn(name, [*command, *(part for each in (*files, file) for part in ("--params-file", str(each)))])

    def spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Run `command` in this domain as `name`."""
        with self._log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
        return self.running[name]

    def change(self, name: str, *transitions: str) -> None:
        """Take node `name` through `transitions`: configure, activate, deactivate, cleanup.

        Raises:
            UserError: if a transition fails.
        """
        self.state(name)  # answered once its process is up; one of the same name may have just been killed
        for transition in transitions:
            request = ChangeState.Request()
            request.transition.id = TRANSITIONS[transition]
            if not self.call(ChangeState, f"/{name}/change_state", request).success:
                raise UserError(f"{name} failed to {transition}; its output: {self.output_of(name)}")

    def state(self, name: str) -> str:
        """The lifecycle state of node `name`: "unconfigured", "inactive", "active", "finalized"."""
        return self.call(GetState, f"/{name}/get_state", GetState.Request(), again_s=1.0).current_state.label

    def set(self, name: str, **parameters: Any) -> None:  # noqa: ANN401 - as ROS
        """Set parameters of node `name`."""
        request = SetParameters.Request()
        request.parameters = [Parameter(key, value=value).to_parameter_msg() for key, value in parameters.items()]
        results = self.call(SetParameters, f"/{name}/set_parameters", request).results
        if reasons := [result.reason for result in results if not result.successful]:
            raise UserError(f"{name} refuses parameters: {'; '.join(reasons)}")

    def trigger(self, service: str, patience_s: float = 0.0) -> str:
        """Call a std_srvs/Trigger service, repeating for `patience_s` if it fails; returns its message.

        Raises:
            UserError: if the service fails until then.
        """
        deadline = time.monotonic() + patience_s
        while not (answer := self.call(Trigger, service, Trigger.Request())).success:
            if time.monotonic() >= deadline:
                raise UserError(f"{service} failed: {answer.message}")
            self.spin(0.05)
        return answer.message

    def call(self, kind: Any, service: str, request: Any, again_s: float = math.inf) -> Any:  # noqa: ANN401 - of ROS
        """Call a service and wait for the response; repeats the call after `again_s`."""
        if service not in self._clients:
            self._clients[service] = self.node.create_client(kind, service)
        client = self._clients[service]
        self.wait(client.service_is_ready, f"service {service}")
        calls: list[tuple[float, Any]] = []

        def answered() -> bool:
            if not calls or time.monotonic() - calls[-1][0] > again_s:
                calls.append((time.monotonic(), client.call_async(request)))
            return any(future.done() for _, future in calls)

        self.wait(answered, f"a response of {service}")
        return next(future.result() for _, future in calls if future.done())

    def wait(self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Handle messages until `condition` is true.

        Raises:
            UserError: if the condition does not become true in time, or a process has ended.
        """
        deadline = time.monotonic() + patience_s
        while not condition():
            names = [name for name, process in self.running.items() if process.poll() is not None]
            if names or time.monotonic() > deadline:
                output = "; ".join(f"{name}: {self.output_of(name)}" for name in names or self.running)
                raise UserError(f"waited for {what}, but {names or 'nothing'} ended; {output}")
            self._executor.spin_once(timeout_sec=0.05)

    def spin(self, seconds: float) -> None:
        """Handle one message, if one arrives within `seconds`."""
        self._executor.spin_once(timeout_sec=seconds)

    def output_of(self, name: str) -> str:
        """The last lines of output of node `name`."""
        return " | ".join(self._log(name).read_text(errors="replace", encoding="utf-8").splitlines()[-5:])

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End one process and wait for it."""
        self.running[name].send_signal(how)
        self._wait_for(self.running.pop(name))

    def close(self) -> None:
        """End all processes and the client."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            self._wait_for(process)
        self._executor.shutdown()
        self.node.destroy_node()
        self._context.try_shutdown()
        if self._claim is not None:
            os.close(self._claim)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def claim_domain() -> tuple[int, int]:
    """Claim a ROS domain for this process; returns it with the open file that holds the claim until closed."""
    for domain in DOMAINS:
        claim = os.open(Path(tempfile.gettempdir()) / f"ros_domain_{domain}.lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            # the lock ends with the process, also if it is killed
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return claim, domain
        except OSError:
            os.close(claim)
    raise UserError(f"ROS domains {DOMAINS.start} to {DOMAINS.stop - 1} are all taken; end what runs there")
