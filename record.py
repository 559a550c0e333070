"""Drive a robot by hand and record it: python record.py task=NAME [device=gamepad] [robot=ROW] [key=value ...].

Without `robot` the task's simulator runs on this machine, in real time. Robots are rows of real_robot/ros2 with the
task's observations and actions; safety_node passes commands on. Keys: w s a d r f move, u o i k j l turn, space is the
gripper; enter begins an episode, and ends it as a success, backspace as a failure; escape stops the robot, and between
episodes the program. The output is recording.mcap and a LeRobot dataset for train.py demonstrations=FOLDER/lerobot.
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
from embodied.runtime.interrupt import GracefulStop
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
from sims.registry import VIEWABLE

log = logging.getLogger("embodied")


def run(arguments: list[str]) -> None:
    """Record episodes until the person ends the program, then write the dataset."""
    (config, task), _ = composed(arguments)
    folder = Path(config.output or new_directory(task.name, outputs="outputs/recordings"))
    for refusal in prefer_real_time() if config.real_time else ():
        log.warning(refusal)
    with GracefulStop() as stop, ExitStack() as stack:
        station = stack.enter_context(_station(config, task, stack))
        person = stack.enter_context(closing(teleoperation.person(config, station, alone=not config.checkpoint)))
        contract, clock = station.contract, station.clock
        limits = teleoperation.limits(config.limits, contract.control_dt_s)
        relocates = config.robot == SIMULATION or config.simulated_time
        safety = Safety(station.robot, limits, clock, station.steady, relocates=relocates)
        policy = None
        if config.checkpoint:
            policy = teleoperation.acting(trained_policy(checkpoint.load(config.checkpoint)), station)
            stack.callback(policy.close)
        if config.robot != SIMULATION:  # a simulator's time stands still while this program hangs
            stack.callback(Watchdog(safety, contract.control_dt_s).close)
        folder.mkdir(parents=True)
        origin = {"robot": config.robot, "device": config.device.value, "checkpoint": config.checkpoint}
        recorder = stack.enter_context(Recorder(folder / "recording.mcap", contract, origin=origin, clock=clock))
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
        shown = opened.enter_context(viewing(config, VIEWABLE))(task)
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
    """The options and the task of train.py, for single actions, and the record of both."""
    own = [each for each in arguments if not each.startswith(("task=", "task."))]
    config, record = compose(RecordConfig, "record", own, {})
    train_config, train_record = compose(TrainConfig, "train", combinations.task_options(arguments, "record"), GROUPS)
    if hasattr(train_config.task, "executed"):
        train_config.task.horizon = train_config.task.executed = 1
    record["values"]["task"] = train_record["values"]["task"]
    return (config, train_config.task), record


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, RecordConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed))
