"""LIBERO's policy on an arm over ROS 2: `python benchmarks/libero_over_ros2.py --checkpoint RUN`, with .venv-ros.

    [--episodes 5] [--distribution official] [--output trajectory|pose] [--delay 0.0] [--tasks 0 1 ...] [--json FILE]

policy_node -> safety_node -> cartesian_node -> a Panda in LIBERO's scene under position control (`libero_arm.py`), as
four processes in lock-step; then the same policy from the same numbered starts in sims/libero, whose controller it was
trained with. `--output pose` drives a Cartesian impedance controller instead. `--delay` is the time from a measurement
to the arrival of its command, in s.

Tracking is reported for both: the hand's motion in each period along the displacement that the model of robosuite's
controller predicts (`real_robot/robots/displacement.py`), which is also the command to cartesian_node.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from scipy.spatial.transform import Rotation  # noqa: E402
from std_msgs.msg import String  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.libero_arm import FINGERS, JOINTS, MODEL_JOINTS, SITE, write_arm_model  # noqa: E402
from embodied.evaluation.evaluation import EvaluationResult, evaluate  # noqa: E402
from embodied.policy import TrainablePolicy  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit  # noqa: E402
from policies.registry import trained_policy  # noqa: E402
from real_robot.firmware.record import read_contract  # noqa: E402
from real_robot.robots.displacement import Response  # noqa: E402
from real_robot.ros2.messages.frames import from_two_columns  # noqa: E402
from real_robot.ros2.processes import Processes  # noqa: E402
from sims.libero.assets import find_assets  # noqa: E402
from sims.libero.environment import LiberoEnvironment  # noqa: E402
from sims.libero.suite import load_tasks  # noqa: E402

EPISODE_S = 600.0
CONTROLLERS = {
    "trajectory": "joint trajectories by inverse kinematics, position control of the joints",
    "pose": "target poses, Cartesian impedance control",
}
LIMITS = ROOT / "launch/config/arm_cartesian_limits.yaml"


def over_ros(options: argparse.Namespace, directory: Path) -> list[list[dict[str, Any]]]:
    """Run each episode of each task with the nodes; returns the outcomes."""
    write_arm_model(directory / "arm.xml")
    contract = read_contract(options.checkpoint)
    row = {"checkpoint": options.checkpoint, "robot": "cartesian", "use_sim_time": True}
    objects = [key for key in contract.observation if key.startswith(("object_", "instruction"))]
    row["options"] = {"rate_hz": 1.0 / contract.control_dt_s, "arrays": objects}
    limits = {"limits": str(LIMITS)}
    arm = {
        "output": options.output,
        "joints": list(JOINTS),
        "model": str(directory / "arm.xml"),
        "site": SITE,
        "model_joints": list(MODEL_JOINTS),
        "base_frame": "world",
        "lag_s": options.lag,
        "gripper": {"kind": "trajectory", "name": "gripper_controller/joint_trajectory", "fingers": list(FINGERS)},
    }
    with Processes(directory) as nodes:
        outcomes: list[dict[str, Any]] = []
        nodes.node.create_subscription(String, "/arm/episode", lambda m: outcomes.append(json.loads(m.data)), 10)
        node_options = {
            "checkpoint": options.checkpoint,
            "distribution": options.distribution,
            "delay_s": options.delay,
        }
        parameters = [part for key, value in node_options.items() for part in ("-p", f"{key}:={value}")]
        program = [sys.executable, str(ROOT / "benchmarks/libero_arm.py"), "--ros-args", *parameters]
        nodes.spawn("arm", program)
        nodes.start("cartesian_node", row | arm)
        nodes.start("safety_node", row | limits | {"heartbeat_timeout_s": 30.0, "liveliness_s": 30.0})
        nodes.start("policy_node", row | limits | {"pace": "measurement"})
        for name in ("cartesian_node", "safety_node", "policy_node"):
            nodes.change(name, "configure", "activate")
        starts = range(options.episodes)
        return [
            [_episode(nodes, outcomes, task, start) for start in starts]
            for task in tqdm(options.tasks, "tasks over ROS 2")
        ]


def _episode(nodes: Processes, outcomes: list[dict[str, Any]], task: int, start: int) -> dict[str, Any]:
    outcomes.clear()
    for name in ("policy_node", "safety_node", "cartesian_node"):
        nodes.change(name, "deactivate", "activate")
    nodes.set("arm", task=task, start=start)
    nodes.trigger("/safety_node/reset")
    nodes.trigger("/arm/reset", 30.0)
    nodes.wait(lambda: bool(outcomes), f"the end of task {task}, start {start}", EPISODE_S)
    return outcomes[0]


def in_simulation(options: argparse.Namespace, policy: TrainablePolicy) -> EvaluationResult:
    """Run the same episodes with the simulator's own controller."""
    tasks = load_tasks("libero_object", options.tasks)
    contract = policy.contract
    environment = LiberoEnvironment(
        tasks,
        len(tasks),
        distribution=options.distribution,
        split="eval",
        horizon=contract.horizon,
        executed=contract.executed,
        threads=1,
    )
    return evaluate(environment, policy, starts_per_task=options.episodes)


def simulators_tracking(options: argparse.Namespace, policy: TrainablePolicy) -> list[dict[str, list[float]]]:
    """Commanded and actual motion of every period of one episode of each task under the simulator's own controller."""
    trace = []
    for task in options.tasks:
        environment = LiberoEnvironment(
            load_tasks("libero_object", [task]),
            1,
            distribution=options.distribution,
            split="eval",
            horizon=policy.contract.horizon,
            executed=1,
            threads=1,
        )
        observation, response = environment.reset(starts=torch.tensor([0])), Response(policy.contract.control_dt_s)
        velocity, done = np.zeros(6), False
        while not done:
            actions = policy.act(observation, deterministic=True).actions
            for step in range(policy.contract.executed):
                action = actions[:, step : step + 1]
                mean, velocity = response.after(action[0, 0, :6].clamp(-1.0, 1.0).numpy(), velocity)
                observation_before, transition = observation, environment.step(action)
                observation, done = transition.observation, bool(transition.done[0])
                commanded = mean * policy.contract.control_dt_s
                trace.append(
                    {"commanded": commanded.tolist(), "moved": _moved(observation_before, observation).tolist()}
                )
                if done:
                    break
    return trace


def _moved(before: TensorDict, after: TensorDict) -> np.ndarray:
    position_after, position_before = (
        observation["end_effector_position"][0].numpy() for observation in (after, before)
    )
    turned, turn = (
        from_two_columns(observation["end_effector_rotation"][0].numpy()) for observation in (after, before)
    )
    return np.append(position_after - position_before, Rotation.from_matrix(turned @ turn.T).as_rotvec())


def tracking(trace: list[dict[str, list[float]]]) -> dict[str, float]:
    """Motion along the commanded motion as a share of it (least squares over periods), and the remaining error."""
    commanded, moved = (np.array([entry[name] for entry in trace]) for name in ("commanded", "moved"))
    figures: dict[str, float] = {"periods": len(trace)}
    for name, part, unit in (("translation", slice(0, 3), "mm"), ("rotation", slice(3, 6), "mrad")):
        c, m = commanded[:, part], moved[:, part]
        # least squares of moved = share * commanded: sum(c m) / sum(c^2)
        figures[f"{name}_share"] = round(float((c * m).sum() / (c * c).sum()), 4)
        for quantity, values in (("error", m - c), ("commanded", c)):
            figures[f"{name}_{quantity}_rms_{unit}"] = round(1e3 * float(np.sqrt((values**2).sum(1).mean())), 3)
    return figures


def main() -> None:
    """Run both controllers, print the comparison and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--episodes", type=int, default=5, help="of each task")
    parser.add_argument("--tasks", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--distribution", default="official")
    parser.add_argument("--output", default="trajectory", choices=("trajectory", "pose"))
    parser.add_argument("--delay", type=float, default=0.0, help="s from measurement to the command's arrival")
    parser.add_argument("--lag", type=float, default=0.0, help="s by which target poses lead")
    parser.add_argument("--policy", default="", help="how the policy was trained, for the record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = trained_policy(checkpoint.load(options.checkpoint))
    with tempfile.TemporaryDirectory() as directory:
        episodes = over_ros(options, Path(directory))
    direct = in_simulation(options, policy)
    grid = {
        name: torch.tensor([[episode[name] for episode in row] for row in episodes]) for name in ("success", "steps")
    }
    ros = EvaluationResult(direct.tasks, grid["success"], grid["steps"], direct.step_limit)
    gain = ros.gain_over(direct)
    record = {
        "git_commit": git_commit(),
        "policy": options.policy,
        "distribution": options.distribution,
        "assets": find_assets(None).kind,
        "controller": CONTROLLERS[options.output],
        "delay_s": options.delay,
        "lag_s": options.lag,
        "over_ros2": ros.summary(),
        "simulator": direct.summary(),
        "difference": {"success": gain.difference, "low": gain.low, "high": gain.high},
        "periods_without_a_command": sum(episode["held"] for row in episodes for episode in row),
        "tracking": {
            "over_ros2": tracking([entry for row in episodes for episode in row for entry in episode["trace"]]),
            "simulator": tracking(simulators_tracking(options, policy)),
        },
    }
    print(json.dumps({key: value for key, value in record.items() if key not in ("over_ros2", "simulator")}, indent=2))
    for name in ("over_ros2", "simulator"):
        figures = record[name]
        print(
            f"{name}: {figures['success']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}] of {figures['episodes']}"
        )
    if options.json:
        with complete_or_absent(options.json) as temporary:
            temporary.write_text(dumps_rows(record))


if __name__ == "__main__":
    main()
