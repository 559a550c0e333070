"""Distillation: order of phases, inference of privileged observations by the student, and resuming."""

import copy
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied.algorithms.imitation.distillation import Distillation, DistillationConfig, informed
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import DivergedError
from embodied.evaluation.evaluation import evaluate
from embodied.rollout.rollout import Collector
from embodied.rollout.storage import Storage
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from tests.embodied.windy_reach import WindyReach

CONFIG = DistillationConfig(
    MLPConfig(hidden=[32]),
    BPTTConfig(rollout_length=6, learning_rate=1e-2, terminal_weight=1.0),
    privileged=["wind"],
    teacher_steps=30_000,
    rollout_length=24,
    epochs=4,
    minibatch=32,
    learning_rate=5e-3,
)
STUDENT = RecurrentConfig(hidden=[8], encoder=8, memory=8, initial_std=0.05)


def make(policy=STUDENT, config=CONFIG, envs: int = 64) -> tuple[MLPPolicy, Distillation, Collector]:
    torch.manual_seed(0)
    env = WindyReach(envs)
    student = policy.build(env.contract)
    student.fit(env.reset(), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(0)
    learner = config.build(student, None, env, generator)
    return student, learner, learner.collector(env, student, generator, learner.starts)


def train(learner: Distillation, collector: Collector, iterations: int) -> list[float]:
    """Both phases; returns the student's losses."""
    while not learner.taught:
        learner.update(collector.collect(24), 0.3 * learner.steps_taught / 30_000)
    shares = (0.3 + 0.7 * iteration / iterations for iteration in range(iterations))
    return [learner.update(collector.collect(24), share)["loss"] for share in shares]


def test_a_student_with_memory_infers_the_teachers_privileged_observations() -> None:
    student, learner, collector = make()
    losses = train(learner, collector, 40)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    blind, blind_learner, blind_collector = make(MLPConfig(hidden=[16], initial_std=0.05))
    train(blind_learner, blind_collector, 40)
    policies = learner.teacher, student, blind
    informed, found_out, unaware = (
        evaluate(WindyReach(32), policy, starts_per_task=64).summary() for policy in policies
    )
    assert informed["success"] > 0.95
    assert found_out["success"] > 0.9
    assert found_out["success"] > unaware["success"] + 0.1


def test_the_teacher_learns_first_and_then_stays_as_it_is() -> None:
    student, learner, collector = make(config=replace(CONFIG, teacher_steps=500))
    before = student.state_dict()["actor.0.weight"].clone()
    phases = []
    for _ in range(4):
        rollout = collector.collect(24)
        phases.append(("memory" in rollout.observation.keys(), len(rollout.reward)))  # noqa: SIM118 - a TensorDict
        learner.update(rollout, 0.0)
        if not learner.taught:
            assert torch.equal(student.state_dict()["actor.0.weight"], before)
            taught = learner.teacher.state_dict()["actor.0.weight"].clone()
    assert phases == [(False, 6), (False, 6), (True, 24), (True, 24)]
    assert not torch.equal(student.state_dict()["actor.0.weight"], before)
    frozen = learner.teacher.state_dict()["actor.0.weight"].clone()
    assert not torch.equal(frozen, taught)  # by the update that ended its phase
    learner.update(collector.collect(24), 0.0)
    assert torch.equal(learner.teacher.state_dict()["actor.0.weight"], frozen)
    assert learner.gradient_steps == 2 + 3 * 4 * 2


def test_rollouts_of_the_teacher_lie_where_those_of_the_student_do(tmp_path: Path) -> None:
    _, learner, collector = make(config=replace(CONFIG, teaching=PPOConfig(rollout_length=4), teacher_steps=200))
    collector.storage, collector.folder = Storage.DISK, tmp_path
    while not learner.taught:
        rollout = collector.collect(24)
        mapped = Path("/proc/self/maps").read_text()
        assert str(tmp_path) in mapped
        learner.update(rollout, 0.0)
        del rollout
        gc.collect()


def test_processes_end_the_teachers_phase_together() -> None:
    class Two:
        rank, size = 0, 2

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values * 2

    _, learner, collector = make(config=replace(CONFIG, teacher_steps=1500))
    rollout = collector.collect(24)
    learner.update(rollout, 0.0, Two())
    assert learner.steps_taught == 2 * rollout.env_steps


def test_labels_are_the_teachers_actions_with_its_privileged_observations() -> None:
    _, learner, collector = make(config=replace(CONFIG, teacher_steps=1))
    learner.update(collector.collect(24), 0.0)
    rollout = collector.collect(24)
    labels = learner._labels(rollout.observation)
    assert labels.shape == (24, 64, 1, 1)
    expected = learner.teacher.actions(rollout.observation[3])
    torch.testing.assert_close(labels[3], expected)
    changed = rollout.observation.clone()
    changed["wind"] += 0.1
    assert (learner._labels(changed) != labels).all()


@pytest.mark.parametrize("taught", [False, True])
def test_a_resumed_run_takes_the_same_steps(taught: bool) -> None:
    config = replace(CONFIG, teacher_steps=300 if taught else 2000)
    student, learner, collector = make(config=config)
    other, resumed, again = make(config=config)
    for iteration in range(3):
        learner.update(collector.collect(24), iteration / 10)
    assert learner.taught == taught
    other.load_state_dict(student.state_dict())
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    again.load_state_dict(copy.deepcopy(collector.state_dict()))
    for iteration in range(3, 6):
        for one, rollouts in ((learner, collector), (resumed, again)):
            one.update(rollouts.collect(24), iteration / 10)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in student.state_dict().items())
    mine, theirs = learner.teacher.state_dict(), resumed.teacher.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_the_students_rate_falls_from_where_its_phase_begins() -> None:
    _, learner, collector = make(config=replace(CONFIG, teacher_steps=1, learning_rate=8e-3, final_lr_share=0.5))
    rates = []
    for progress in (0.5, 0.5, 0.75, 1.0):
        learner.update(collector.collect(24), progress)
        rates.append(learner.optimiser.param_groups[0]["lr"])
    assert rates[1:] == pytest.approx([8e-3, 6e-3, 4e-3])


def test_any_learner_teaches() -> None:
    _, learner, collector = make(config=replace(CONFIG, teaching=PPOConfig(rollout_length=8), teacher_steps=600))
    metrics = [learner.update(collector.collect(24), 0.1 * iteration) for iteration in range(3)]
    assert "teacher_policy_loss" in metrics[0]
    assert list(metrics[-1]) == ["loss"]


def test_only_privileged_observations_are_named() -> None:
    contract = WindyReach(1).contract
    assert not informed(contract, ["wind"]).observation["wind"].privileged
    assert contract.observation["wind"].privileged
    for wrong in ("weather", "position"):
        with pytest.raises(ValueError, match="privileged to be among the privileged") as caught:
            informed(contract, [wrong])
        assert "\n" not in str(caught.value)


def test_the_student_does_not_learn_from_labels_that_are_not_finite() -> None:
    student, learner, collector = make(config=replace(CONFIG, teacher_steps=1))
    learner.update(collector.collect(24), 0.0)
    rollout, before = collector.collect(24), [part.clone() for part in student.parameters()]
    learner._labels = lambda observation: torch.full((*observation.batch_size, 1, 1), torch.nan)
    with pytest.raises(DivergedError, match="imitation loss became nan"):
        learner.update(rollout, 0.5)
    for old, new in zip(before, student.parameters(), strict=True):
        assert torch.equal(old, new)
