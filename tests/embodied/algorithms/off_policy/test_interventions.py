"""A person's actions are learned from twice: as the learner's experience, and as demonstrations (arXiv 2410.21845)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied.algorithms.off_policy.qc import QCFQLConfig
from embodied.algorithms.off_policy.sac import RLPDConfig, SACConfig
from embodied.errors import UserError
from embodied.rollout.rollout import Collector, Rollout
from policies.squashed import SquashedConfig
from tests.embodied.algorithms.off_policy.test_sac import episodes, make
from tests.embodied.reach import Reach


def helped(rollout: Rollout, decision: int, env: int) -> Rollout:
    """`rollout` in which a person acted in one decision of one environment."""
    human = torch.zeros_like(rollout.executed)
    human[decision, env] = rollout.executed[decision, env]
    assert human.any()
    return replace(rollout, signals={"human": human})


def test_they_are_drawn_with_the_demonstrations_in_proportion_to_their_number() -> None:
    _, learner, collector = make(0, RLPDConfig(), episodes())
    learner.replay.add(helped(collector.collect(2), 0, 3))
    own, recorded = learner.replay.draw(8000, learner.generator)
    assert len(own) + len(recorded) == 8000
    # half is demonstrated: eight recorded decisions, and one of the person
    assert (own == 3).sum() == pytest.approx(4000 / 9 + 4000 / len(learner.replay), rel=0.15)
    assert len(recorded) == pytest.approx(4000 * 8 / 9, rel=0.02)
    batch = learner.replay.transitions((own[-1:], recorded[:0]), 1, 0.9)
    assert torch.equal(
        batch["observation", "position"], learner.replay.own.decisions(own[-1:])["observation"]["position"]
    )


def test_without_a_person_batches_are_those_of_before() -> None:
    batches = []
    for kept in (True, False):
        _, learner, collector = make(0, replace(RLPDConfig(), keep_interventions=kept), episodes())
        learner.replay.add(collector.collect(4))
        batches.append(learner._batch())
    assert (batches[0] == batches[1]).all()


def test_they_can_be_left_out() -> None:
    _, learner, collector = make(0, replace(RLPDConfig(), keep_interventions=False), episodes())
    learner.replay.add(helped(collector.collect(2), 0, 3))
    assert len(learner.replay.draw(64, learner.generator)[1]) == 32


class Beside(Reach):
    """The toy as a robot's environment, in which a person demonstrates."""

    real_time = True


def without_demonstrations(env: Reach, config: SACConfig | None = None):
    policy = SquashedConfig(hidden=[32]).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(0)
    small = RLPDConfig(hidden=[16], ensemble=2, warmup=0, minibatch=64, updates=0.1)
    learner = (config or small).build(policy, None, env, generator)
    return learner, Collector(env, policy, generator)


def test_a_person_may_give_the_first_demonstrations() -> None:
    with pytest.raises(UserError, match="demonstrations"):
        without_demonstrations(Reach(32))
    learner, collector = without_demonstrations(Beside(32))
    rollout = collector.collect(2)
    metrics = learner.update(rollout, 0.0)
    assert "interventions" not in metrics
    assert [len(part) for part in learner.replay.draw(64, learner.generator)] == [64, 0]
    metrics = learner.update(helped(collector.collect(2), 1, 3), 0.0)
    assert metrics["interventions"] == 1.0
    own, recorded = learner.replay.draw(64, learner.generator)
    assert len(recorded) == 0
    assert (own[32:] == int(learner.replay.interventions)).all()
    with pytest.raises(UserError, match="demonstrations"):
        without_demonstrations(Beside(32), replace(RLPDConfig(hidden=[16]), keep_interventions=False))


def test_q_chunking_keeps_them_too() -> None:
    assert QCFQLConfig().keep_interventions
