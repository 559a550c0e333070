"""Drive a robot by hand and record it: python record.py task=NAME [device=gamepad] [robot=ROW] [key=value ...].

Without `robot` the task's simulator is driven on this machine, in real time. Others are rows of real_robot/ros2, whose
observations and actions are the task's; safety_node passes commands on. Keys: w s a d r f move, u o i k j l turn, space
is the gripper; enter begins an episode, and ends it as a success, backspace as a failure; escape stops the robot, and
between episodes the program. Written are recording.mcap and a LeRobot dataset: train.py demonstrations=FOLDER/lerobot.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path

from embodied.command_line import combinations, program
from embodied.command_line.config import compose
from embodied.command_line.train_options import GROUPS, TrainConfig
from embodied.errors import UserError
from embodied.interrupt import GracefulStop
from embodied.saving import checkpoint
from embodied.task import Task
from embodied.training.run_directory import new_directory
from embodied.viewer.options import viewing
from policies.registry import trained_policy
from real_robot.recording import lerobot_dataset
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots import teleoperation
from real_robot.robots.control_loop import Watchdog, prefer_real_time
from real_robot.robots.teleoperation import SIMULATION, Driver, RecordConfig, Session, Station
from real_robot.safety.safety import Safety
from sims.registry import SHOWN

log = logging.getLogger("embodied")


def run(arguments: list[str]) -> None:
    """Episodes until the person ends them, then the dataset."""
    (config, task), _ = composed(arguments)
    folder = Path(config.output or new_directory(task.name, outputs="outputs/recordings"))
    for refused in prefer_real_time() if config.real_time else ():
        log.warning(refused)
    with GracefulStop() as stop, ExitStack() as opened:
        station = opened.enter_context(_station(config, task, opened))
        person = opened.enter_context(closing(teleoperation.person(config, station)))
        contract, clock = station.contract, station.clock
        limits = teleoperation.limits(config.limits, contract.control_dt_s)
        safety = Safety(station.robot, limits, clock, relocates=config.robot == SIMULATION or config.simulated_time)
        policy = None
        if config.checkpoint:
            policy = teleoperation.acting(trained_policy(checkpoint.load(config.checkpoint)), station)
            opened.callback(policy.close)
        if config.robot != SIMULATION:  # its time stands still while this program does
            opened.callback(Watchdog(safety, contract.control_dt_s).close)
        folder.mkdir(parents=True)
        origin = {"robot": config.robot, "device": config.device.value, "checkpoint": config.checkpoint}
        recorder = opened.enter_context(Recorder(folder / "recording.mcap", contract, origin=origin, clock=clock))
        driver = Driver(person, policy, safety.trip)
        session = Session(station, safety, driver, recorder, task.name, lambda: stop.requested)
        outcomes = session.run(config.episodes)
    log.info(f"recorded {len(outcomes)} episodes, {sum(outcomes)} of them successes: {folder / 'recording.mcap'}")
    if config.lerobot and any(outcomes):
        recording = Recording(folder / "recording.mcap")
        count = lerobot_dataset.write([recording], folder / "lerobot", robot=config.robot, pictures=config.pictures)
        log.info(f"wrote {folder / 'lerobot'}: {count} episodes")


def _station(config: RecordConfig, task: Task, opened: ExitStack) -> AbstractContextManager[Station]:
    distribution = task.distributions[0]
    if config.robot == SIMULATION:
        shown = opened.enter_context(viewing(config, SHOWN))(task)
        return nullcontext(teleoperation.simulated(shown.environment(1, distribution, "train")))
    try:
        from real_robot.ros2 import teleoperated
    except ImportError as error:
        raise UserError(f"robot={config.robot} needs ROS 2 ({error}); see real_robot/ros2/README.md") from error
    return teleoperated.station(
        config.robot,
        task.contract(distribution),
        config.options,
        prefix=config.prefix,
        leader=config.leader,
        leader_joints=config.leader_joints,
        simulated_time=config.simulated_time,
    )


def composed(arguments: list[str]) -> tuple[tuple[RecordConfig, Task], dict[str, object]]:
    """The options, and the task as train.py composes it, for single actions; and the record of both."""
    own = [each for each in arguments if not each.startswith(("task=", "task."))]
    config, record = compose(RecordConfig, "record", own, {})
    trained, used = compose(TrainConfig, "train", combinations.task_options(arguments, "record"), GROUPS)
    if hasattr(trained.task, "executed"):
        trained.task.horizon = trained.task.executed = 1
    record["values"]["task"] = used["values"]["task"]
    return (config, trained.task), record


def describe(_: list[str]) -> str:
    """Options."""
    return program.options(__doc__, RecordConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed))
