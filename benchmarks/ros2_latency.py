"""Round trips over ROS 2 at 500 Hz, run with .venv-ros: `python benchmarks/ros2_latency.py [--checkpoint RUN]`.

    [--rate 500] [--seconds 60] [--slice 5] [--output FILE]

A robot (this process) sends an observation every period and waits for the resulting command:

    echo            a bare rclpy node that returns a message of a command's size: the cost of ROS itself
    policy          policy_node alone: decode, policy, safety, encode
    policy, safety  policy_node and safety_node as separate processes, as on a robot

They alternate in turns of `slice` seconds in one call, for `seconds` each, under the same conditions. A period whose
command came after its end, or not at all, missed its deadline; periods that the robot itself began late are reported
separately. The policy is quadrotor_hover's, trained here unless a run is given, and called `rate` times a second
instead of its own hundred. Times are measured in the receiving process, with one clock; the ratio is the policy's over
the echo's.
"""

from __future__ import annotations

import argparse
import array
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import rclpy  # noqa: E402
import yaml  # noqa: E402
from builtin_interfaces.msg import Time  # noqa: E402
from rclpy.qos import QoSProfile  # noqa: E402
from rosgraph_msgs.msg import Clock  # noqa: E402
from std_msgs.msg import Float64MultiArray  # noqa: E402
from tqdm import tqdm  # noqa: E402

from embodied.command_line.config import compose  # noqa: E402
from embodied.command_line.train_options import GROUPS, TrainConfig  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit  # noqa: E402
from real_robot.ros2.messages.codecs import installed, stamp_s  # noqa: E402
from real_robot.ros2.processes import PROGRAMS, Processes  # noqa: E402
from real_robot.ros2.robots.registry import robot_table  # noqa: E402
from real_robot.ros2.robots.tables import ACTION  # noqa: E402
from sims.quadrotor.task import HoverTask  # noqa: E402

ECHO, POLICY, BOTH = "echo", "policy", "policy, safety"
DISTRIBUTION = HoverTask().distributions[0]
NAMESPACES = {ECHO: "echo", POLICY: "alone", BOTH: "watched"}
SAMPLES = 512
"""Number of different observations, which are sent cyclically."""


@dataclass
class Partner:
    """A tested node: the publisher of its observations, and the result of each period."""

    publisher: Any
    clock: Any
    sent_s: dict[int, float] = field(default_factory=dict)
    took_s: dict[int, float] = field(default_factory=dict)
    late: int = 0
    following: int = 0  # number of the next observation: stamps never decrease

    def answered(self, message: Float64MultiArray, period_s: float) -> None:
        """Handle a command, which has its observation's stamp."""
        now_s, stamp = time.perf_counter(), stamp_s(message)
        assert stamp is not None, "expected a stamped command"
        number = round(stamp / period_s)
        if number in self.sent_s:  # an answer to the first turn may come after it
            self.took_s[number] = now_s - self.sent_s[number]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all partners, print the table, and write the JSON."""
    options = _options(arguments)
    period_s = 1.0 / options.rate
    with tempfile.TemporaryDirectory() as directory, Processes(Path(directory)) as nodes:
        run = _at_rate(options.checkpoint or _trained(Path(directory)), Path(directory) / "run", period_s)
        partners = _start(nodes, run, period_s)
        messages = _observations(run)
        turns = max(1, round(options.seconds / options.slice))
        _turn(nodes, partners[ECHO], messages, 1.0, period_s)  # discovery and first calls do not count
        for name in (POLICY, BOTH):
            _turn(nodes, partners[name], messages, 1.0, period_s)
        for partner in partners.values():
            partner.sent_s.clear()
            partner.took_s.clear()
            partner.late = 0
        for _ in tqdm(range(turns), desc="turns", disable=None):
            for partner in partners.values():
                _turn(nodes, partner, messages, options.slice, period_s)
    report = _report(partners, period_s, options)
    sys.stdout.write(_table(report))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with complete_or_absent(options.output) as temporary:
        temporary.write_text(dumps_rows(report))


def _trained(directory: Path) -> Path:
    run = directory / "hover"
    options = ["task=quadrotor_hover", "control=false", "video=false", "threads=1", f"output={run}"]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *options], check=True)
    return run


def _at_rate(trained: Path, run: Path, period_s: float) -> Path:
    """Policy with the same weights and a contract of another rate, because only timing matters here."""
    saved = checkpoint.load(trained)
    changed = replace(saved.contract, control_dt_s=period_s)
    checkpoint.save(run, checkpoint.Checkpoint(saved.policy, changed, saved.config))
    return run


def _start(nodes: Processes, run: Path, period_s: float) -> dict[str, Partner]:
    """Start all partners and wait until they are connected."""
    nodes.spawn(ECHO, [sys.executable, __file__, "--echo"])
    # The clock follows the observations, so that a command has its observation's stamp.
    limits = nodes.directory / "limits.yaml"
    limits.write_text("observation_timeout_s: 1000.0\ncommand_timeout_s: 1000.0\n")
    settings = {"checkpoint": str(run), "use_sim_time": True, "limits": str(limits)}
    pace = {"pace": "measurement"}
    _node(nodes, POLICY, "policy_node", settings | pace | {"prefix": ""})
    _node(nodes, BOTH, "safety_node", settings | {"heartbeat_timeout_s": 1000.0, "liveliness_s": 1000.0})
    _node(nodes, BOTH, "policy_node", settings | pace)
    partners = {}
    for name, namespace in NAMESPACES.items():
        publisher = nodes.node.create_publisher(Float64MultiArray, f"/{namespace}/observation", QoSProfile(depth=2))
        clock = nodes.node.create_publisher(Clock, f"/{namespace}/clock", QoSProfile(depth=1))
        partners[name] = partner = Partner(publisher, clock)
        hear = lambda message, partner=partner: partner.answered(message, period_s)  # noqa: E731 - one of each
        nodes.node.create_subscription(Float64MultiArray, f"/{namespace}/action", hear, QoSProfile(depth=10))
        subscribers = 2 if name == BOTH else 1  # safety_node measures too
        nodes.wait(lambda p=publisher, w=subscribers: p.get_subscription_count() >= w, f"{name} to listen")
    return partners


def _node(nodes: Processes, partner: str, program: str, parameters: dict[str, Any]) -> None:
    """Start and activate one of our nodes."""
    namespace = NAMESPACES[partner]
    file = nodes.directory / f"{namespace}_{program}.yaml"
    file.write_text(yaml.safe_dump({"/**": {"ros__parameters": parameters}}))
    (nodes.directory / namespace).mkdir(exist_ok=True)
    line = [sys.executable, "-m", f"{PROGRAMS}.{program}", "--ros-args", "--params-file", str(file)]
    name = f"{namespace}/{program}"
    nodes.spawn(name, [*line, "-r", f"__ns:=/{namespace}", "-r", f"/clock:=/{namespace}/clock"])
    nodes.change(name, "configure", "activate")


def _observations(run: Path) -> list[Float64MultiArray]:
    """Messages as sim_node would send them, from the first observations of episodes."""
    saved = checkpoint.load(run)
    contract = saved.contract
    (topic,) = robot_table("simulation", contract, {}).states
    task = compose(TrainConfig, "train", [], GROUPS, saved.config)[0].task
    observation = task.environment(SAMPLES, DISTRIBUTION, "train").reset()
    keys = list(topic.codec.specs)
    return [
        topic.codec.encode({key: observation[key][index].numpy() for key in keys}, installed, 0.0)
        for index in range(SAMPLES)
    ]


def _turn(
    nodes: Processes, partner: Partner, messages: list[Float64MultiArray], seconds: float, period_s: float
) -> None:
    """Send an observation every period and collect the answers; the last one has one more period."""
    begin_s = time.perf_counter() + period_s
    for index in range(round(seconds / period_s)):
        deadline_s = begin_s + index * period_s
        while (left_s := deadline_s - time.perf_counter()) > 0:
            nodes.spin(left_s)
        partner.late += time.perf_counter() - deadline_s > period_s
        number, partner.following = partner.following, partner.following + 1
        message = messages[number % len(messages)]
        message.data[0] = number * period_s
        partner.sent_s[number] = time.perf_counter()
        partner.publisher.publish(message)
        partner.clock.publish(Clock(clock=_time(number * period_s)))
    end_s = time.perf_counter() + 2 * period_s
    while (left_s := end_s - time.perf_counter()) > 0:
        nodes.spin(left_s)


def _time(seconds: float) -> Time:
    nanoseconds = round(1e9 * seconds)
    return Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)


def echo() -> None:
    """A node that answers each observation with a message of a command's size."""
    rclpy.init()
    node = rclpy.create_node("echo", namespace=NAMESPACES[ECHO])
    publisher = node.create_publisher(Float64MultiArray, "action", QoSProfile(depth=1))
    contract = HoverTask().contract(DISTRIBUTION)
    codec = robot_table("simulation", contract, {}).command.codec
    answer = codec.encode({ACTION: np.zeros(4, np.float32)}, installed, 0.0)

    def hear(message: Float64MultiArray) -> None:
        answer.data = array.array("d", [message.data[0], *answer.data[1:]])
        publisher.publish(answer)

    node.create_subscription(Float64MultiArray, "observation", hear, QoSProfile(depth=2))
    rclpy.spin(node)


def _report(partners: dict[str, Partner], period_s: float, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name, partner in partners.items():
        took_ms = 1e3 * np.array(list(partner.took_s.values()) or [np.nan])
        rows.append(
            {
                "partner": name,
                "periods": len(partner.sent_s),
                "unanswered": len(partner.sent_s) - len(partner.took_s),
                "missed_deadlines": len(partner.sent_s) - int((took_ms <= 1e3 * period_s).sum()),
                "began_late": partner.late,
                **{
                    f"{q}_ms": float(np.quantile(took_ms, quantile))
                    for q, quantile in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
                },
            }
        )
    for row in rows:
        row["p50_over_echo"] = row["p50_ms"] / rows[0]["p50_ms"]
        row["p99_over_echo"] = row["p99_ms"] / rows[0]["p99_ms"]
    return {
        "git_commit": git_commit(),
        "rate_hz": options.rate,
        "seconds": options.seconds,
        "rows": rows,
        "machine": _machine(),
    }


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"round trips at {report['rate_hz']:g} Hz, {report['seconds']:g} s each; {report['machine']['cores']} cores, "
        f"load {report['machine']['load']:.1f}",
        "| partner | periods | missed deadlines | no answer | p50 ms | p99 ms | max ms | p50, p99 over echo |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        times = " | ".join(f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms", "max_ms"))
        ratio = f"{row['p50_over_echo']:.1f}, {row['p99_over_echo']:.1f}"
        counts = f"{row['periods']} | {row['missed_deadlines']} | {row['unanswered']}"
        lines.append(f"| {row['partner']} | {counts} | {times} | {ratio} |")
    return "\n".join(lines) + "\n"


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model, "cores": cores, "load": os.getloadavg()[0], "python": platform.python_version()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a run of task=quadrotor_hover; trained here if none is given")
    parser.add_argument("--rate", type=float, default=500.0, help="Hz")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each partner")
    parser.add_argument("--slice", type=float, default=5.0, help="seconds of a turn")
    results = ROOT / "benchmarks" / "results" / "ros2_latency.json"
    parser.add_argument("--output", type=Path, default=results)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:] == ["--echo"]:
        echo()
    else:
        main()
