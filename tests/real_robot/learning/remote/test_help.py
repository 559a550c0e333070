"""A scripted person's budget: what is used goes to the learner with the experience, and to the next actor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import actor as program
from embodied.command_line.train_options import TrainConfig
from embodied.errors import UserError
from policies.squashed import SquashedConfig
from real_robot.learning.environment import RobotEnvironment
from real_robot.learning.remote.actor import Actor
from real_robot.learning.remote.inbox import Inbox, Sent
from real_robot.learning.remote.journal import Journal
from real_robot.learning.remote.messages import packed, unpacked
from real_robot.learning.remote.outbox import Outbox
from real_robot.learning.scripted import HelpConfig, ScriptedPerson
from tests.real_robot.learning.remote.test_actor import ArmTask, example
from tests.real_robot.learning.worlds import ReachExpert, reaching


def helped() -> tuple[RobotEnvironment, ScriptedPerson]:
    """The toy as a robot, with a scripted person who takes over in every episode."""
    help = HelpConfig(patience=1, lasting=1, budget=100, per_episode=1)
    env, _ = reaching(lambda toy: ScriptedPerson(ReachExpert(toy), help), executed=2, speed=0.01, steps=4)
    assert isinstance(env.scripted_help, ScriptedPerson)
    return env, env.scripted_help


def test_rollouts_and_random_play_carry_the_used_budget(tmp_path: Path) -> None:
    env, person = helped()
    policy = SquashedConfig(hidden=[8]).build(env.contract)
    policy.fit(TensorDict({"position": torch.randn(9, 1), "task": torch.zeros(9, 1)}, [9]), torch.zeros(9, 2, 1))
    box = Inbox(Journal(tmp_path), env.contract, {"max_staleness": 9})
    outbox = Outbox("learner")
    outbox.connect(box.greeting(outbox.session))
    actor = Actor(env, policy, outbox, 0, "reach")

    def carried_out(**order) -> int:
        """Used budget that the learner would give to another actor, after an order of this one."""
        sent = Sent()
        box.order(**order)
        box.publish(0, policy.state_dict())
        for message in iter(lambda: box.next(sent, 0.0), None):
            outbox.receive(message)
        actor._carry_out(outbox.order())
        box.receive(outbox.session, outbox.next(0.0))
        return unpacked(box.greeting("0" * 16))["help"]["takeovers"]

    assert carried_out(do="play", seed=0) == person.takeovers > 5
    before = person.takeovers
    for number in range(3):
        assert carried_out(do="collect", decisions=4) == person.takeovers
        rollout = box.rollout(number)
        before += int(rollout.signals["takeovers"].sum())
        assert before == person.takeovers
    restarted = Inbox(Journal(tmp_path), env.contract, {"max_staleness": 9})
    assert unpacked(restarted.greeting("0" * 16))["help"] == {"takeovers": before}


def test_an_actor_goes_on_with_what_is_left_of_the_budget(monkeypatch) -> None:
    env, person = helped()
    begun = []

    class HelpedTask(ArmTask):
        def contract(self, distribution: str):
            return env.contract

        def environment(self, num_envs, distribution, split, seed=0, device="cpu"):
            return env

        def close(self) -> None: ...

    class Recorded(Actor):
        def run(self) -> None:
            begun.append(self.env.scripted_help.takeovers)

    monkeypatch.setattr(program, "robot_task", lambda config: HelpedTask())
    monkeypatch.setattr(program, "Actor", Recorded)
    config = TrainConfig(task=None, policy=SquashedConfig(hidden=[8]), algorithm=None)
    greeting = {"seed": 0, "total": 4, "distribution": "reach", "contract": env.contract.to_dict()}
    for used, expected in (({}, 0), ({"takeovers": 97}, 97), ({"takeovers": 130}, 130)):
        program.act(Outbox("x"), greeting | {"help": used}, config, "cpu")
        assert begun.pop() == expected
    person.begin(training=True)  # of a smaller budget than was used
    assert [person.action(None) for _ in range(9)] == [None] * 9
    with pytest.raises(UserError, match="expected help of type dict"):
        program.act(Outbox("x"), greeting, config, "cpu")


@pytest.mark.parametrize("used", [None, {"takeovers": -1}, {"takeovers": 0.5}, {b"takeovers": 1}])
def test_a_budget_that_is_none_is_refused(used, tmp_path: Path) -> None:
    box, entries = example(tmp_path)
    with pytest.raises(UserError, match="help"):
        box.receive("0" * 16, packed({"kind": "rollout", "sequence": 0, "rollout": entries, "help": used}))
    assert box.journal.total == 0


def test_a_rollout_that_arrives_after_a_later_result_gives_nothing_back(tmp_path: Path) -> None:
    box, entries = example(tmp_path)
    order = box.order(do="evaluate")
    box.receive("0" * 16, packed({"kind": "result", "id": order, "result": {}, "help": {"takeovers": 7}}))
    late = {"kind": "rollout", "sequence": 0, "rollout": entries, "help": {"takeovers": 5}}  # waited for the network
    box.receive("0" * 16, packed(late))
    assert unpacked(box.greeting("1" * 16))["help"] == {"takeovers": 7}
