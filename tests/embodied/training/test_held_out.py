"""Evaluations during training: they change nothing, cost little, and the best policy is kept as what it is."""

import json
import signal
from pathlib import Path

import pytest
import torch

import embodied.training.experiment
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.in_training import InTraining, best
from embodied.run_options import AUTO, ExperimentConfig
from embodied.runtime.interrupt import Stopped
from embodied.saving import checkpoint
from embodied.training.experiment import Experiment
from embodied.training.held_out import FIRST_START, MOST, PHASE, SHARE, SHORTEST_S, HeldOut
from embodied.training.run_directory import run_of
from policies.mlp import MLPConfig
from sims.quadrotor.task import HoverTask
from tests.embodied.counter import Counter
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import LEARNERS, POLICY, SCRATCH, STUDENT, ReachTask, ScratchTask

STEPS = 480


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(embodied.training.experiment, "CURVES", {})


def run(directory: Path, every: int | str | None, algorithm: str = "ppo") -> Path:
    """A run with evaluations `every` so many steps, continued until it is done."""
    config = ExperimentConfig(
        num_envs=8,
        env_steps=STEPS,
        checkpoint_every=2,
        evaluation_starts=6,
        evaluation_envs=4,
        video=False,
        stages=["rl"],
        evaluate_every_steps=every,
    )
    task = ScratchTask() if algorithm in SCRATCH else ReachTask()
    policy = STUDENT if algorithm == "distillation" else POLICY
    record = {"values": {"env_steps": STEPS, "evaluate_every_steps": every}}
    while True:
        try:
            Experiment(config, task, policy, (LEARNERS | SCRATCH)[algorithm], directory, record=record).run()
        except Stopped:
            continue
        return directory


def report(directory: Path) -> dict:
    return json.loads((directory / "report.json").read_text())


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("algorithm", [*LEARNERS, *SCRATCH])
def test_evaluations_change_no_bit_of_the_training(tmp_path: Path, algorithm: str) -> None:
    without, having = run(tmp_path / "without", None, algorithm), run(tmp_path / "with", 50, algorithm)
    assert len(report(having)["in_training"]["points"]) > 3
    assert report(without)["in_training"] is None
    assert same(checkpoint.load(without).policy, checkpoint.load(having).policy)
    assert report(without)["evaluations"] == report(having)["evaluations"]
    assert not (without / "best").exists()


def test_evaluations_change_no_bit_of_flying(tmp_path: Path) -> None:
    """With a simulator in C, whose policy and environments use all generators."""

    def weights(every: int | None) -> dict:
        config = ExperimentConfig(4, 256, evaluation_starts=3, evaluation_envs=2, video=False)
        config.evaluate_every_steps = every
        task = HoverTask(name="quadrotor_hover", step_limit=40)
        Experiment(config, task, MLPConfig(hidden=[8]), LEARNERS["ppo"], tmp_path / str(every), record={}).run()
        return dict(checkpoint.load(tmp_path / str(every)).policy)

    assert same(weights(None), weights(64))


def test_an_evaluation_disturbs_no_generator() -> None:
    class Drawing(Reach):
        """Draws from the global generator."""

        def reset(self, mask=None, starts=None):
            torch.rand(1)
            seen = super().reset(mask, starts)
            self.position = self.position / 10  # every episode succeeds with its first chunk
            return seen

    policy = POLICY.build(Reach(1).contract)
    policy.fit(Reach(4).reset(), torch.zeros(4, 2, 1))
    looker, before = HeldOut(1, Drawing(4), InTraining("wide"), final=6), torch.get_rng_state()
    looker.evaluate(policy, 100)
    assert torch.equal(before, torch.get_rng_state())
    assert looker.longer >= 7 / 2


def test_a_run_that_stops_in_its_evaluations_gives_the_same(tmp_path: Path, monkeypatch) -> None:
    """A stop is requested in every second evaluation during training."""
    whole, original, calls = run(tmp_path / "whole", 80), HeldOut.evaluate, [0]

    def stopped(held_out, policy, done):
        calls[0] += 1
        if calls[0] % 2:
            signal.raise_signal(signal.SIGTERM)
        return original(held_out, policy, done)

    monkeypatch.setattr(HeldOut, "evaluate", stopped)
    parts = run(tmp_path / "parts", 80)
    assert calls[0] > 2 * len(report(whole)["in_training"]["points"]) - 2
    assert report(whole)["in_training"] == report(parts)["in_training"]
    for place in ("", "best"):
        assert same(checkpoint.load(whole / place).policy, checkpoint.load(parts / place).policy)
    assert checkpoint.load(whole / "best").chosen == checkpoint.load(parts / "best").chosen


def test_the_best_is_kept_with_the_figure_that_it_was_chosen_by(tmp_path: Path) -> None:
    directory = run(tmp_path / "run", 80)
    found = report(directory)["in_training"]
    steps = [point["env_steps"] for point in found["points"]]
    assert [step // 80 for step in steps] == sorted({step // 80 for step in steps})
    assert steps[-1] == report(directory)["env_steps"]
    assert found["best"] == best(found["points"])
    saved = checkpoint.load(directory / "best")
    assert saved.chosen == found["best"] | {
        "distribution": "wide",
        "first_start": FIRST_START,
        "best_of": 1 + found["points"].index(found["best"]),
    }
    policy = POLICY.build(Reach(1).contract)
    saved.restore(policy)
    again = evaluate(Reach(4), policy, starts_per_task=6, first_start=FIRST_START).summary()
    assert {name: again[name] for name in ("success", "low", "high", "episodes")}.items() <= found["best"].items()
    assert checkpoint.load(directory).chosen is None
    assert len(list((directory / "best").iterdir())) == 1
    with pytest.raises(UserError, match=r"best is a policy alone: resume=.*run, or begin a run with start_from="):
        run_of(directory / "best")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = [(row["step"], row["evaluation/success"]) for row in rows if "evaluation/success" in row]
    assert logged == [(point["env_steps"], point["success"]) for point in found["points"]]
    page = (directory / "report.md").read_text()
    assert "chosen as the best of 5 evaluated during training" in page
    assert 'class="band"' in (directory / "report.html").read_text()


def test_of_equal_figures_the_last_is_the_best() -> None:
    points = [{"env_steps": steps, "success": success} for steps, success in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 0.5))]
    assert best(points)["env_steps"] == 3
    assert best([{"env_steps": 1, "return": -2.0}, {"env_steps": 2, "return": -3.0}])["env_steps"] == 1


def automatic(env: Reach | Counter, **times: float) -> tuple[HeldOut, list[int]]:
    """Simulates a run of 10,000 steps, by times in s; returns where it was evaluated."""
    looker, wall_s, looked = HeldOut(AUTO, env, InTraining(), final=50), dict(times), []
    took_s = wall_s.pop("evaluation")
    for done in range(100, 10_001, 100):
        share = {name: wall_s[name] * done / 10_000 for name in ("simulation", "policy", "update")}
        if looker.due(done, 10_000, done // 10, wall_s | share):
            looked.append(done)
            looker.in_training.points.append({"env_steps": done})
            looker.plan(took_s, done, 10_000, wall_s | share | {PHASE: len(looked) * took_s})
    return looker, looked


def test_the_first_evaluation_tells_how_many_more_are_affordable() -> None:
    times = {"simulation": 300.0, "policy": 100.0, "update": 500.0, "SFT": 100.0}
    looker, looked = automatic(Reach(4, step_limit=10), evaluation=10.0, **times)
    assert looked == [500, 2900, 5300, 7700, 10_000]  # 5 of 10 s are 5% of 1000 s
    assert looker.starts == 10  # of two tasks: 20 episodes at least, although only 12 allow ten evaluations
    looker, looked = automatic(Reach(4, step_limit=10), evaluation=0.01, **times | {"simulation": 5.0, "policy": 0.0})
    assert len(looked) == MOST
    assert looker.starts == 50  # as in the evaluations at the end
    again = HeldOut(AUTO, Reach(4), InTraining(), final=50)
    again.load_state_dict(looker.state_dict() | {"starts": 3, "planned": 7})
    assert (again.starts, again.planned) == (3, 7)


@pytest.mark.parametrize(
    ("simulation", "update", "evaluation", "points"),
    [(5.0, 10.0, 0.01, 0), (9_000.0, 500.0, 1.0, 0), (100.0, 300.0, 1e6, 1), (100.0, 300.0, 15.0, 2)],
    ids=[
        "a short run",
        "one of few episodes",
        "evaluations that take too long",
        "and so long that only the end follows",
    ],
)
def test_what_costs_more_than_it_is_worth_is_not_evaluated(simulation, update, evaluation, points) -> None:
    _, looked = automatic(
        Reach(4, step_limit=10), simulation=simulation, policy=0.0, update=update, evaluation=evaluation
    )
    assert len(looked) == points


def test_a_run_is_evaluated_from_the_shortest_time_on() -> None:
    for whole_s, points in ((SHORTEST_S, MOST), (SHORTEST_S - 0.1, 0)):
        times = {"simulation": 4.0, "policy": 0.0, "update": whole_s - 4.0}
        assert len(automatic(Reach(4, step_limit=10), evaluation=0.01, **times)[1]) == points


def test_longer_episodes_are_evaluated_less_often() -> None:
    looker, spent_s = HeldOut(AUTO, Reach(4, step_limit=10), InTraining(), final=50), 0.0
    for done in range(100, 10_001, 100):
        wall_s = {"simulation": done / 25, "policy": 0.0, "update": done / 10, PHASE: spent_s}
        if looker.due(done, 10_000, done // 10, wall_s):
            took_s, looker.longer = (1.0, 10.0) if done < 2000 else (10.0, 1.0)
            spent_s += took_s
            looker.in_training.points.append({"env_steps": done})
            looker.plan(took_s, done, 10_000, wall_s | {PHASE: spent_s})
    assert [point["env_steps"] < 2000 for point in looker.in_training.points].count(True) == 1
    assert 0.5 * SHARE * 1400.0 < spent_s <= SHARE * 1400.0
    assert looker.in_training.points[-1]["env_steps"] == 10_000


def test_evaluations_take_the_share_of_the_time_that_was_promised() -> None:
    for took_s in (0.5, 1.0, 3.0, 7.0, 20.0):
        _, looked = automatic(Reach(4, step_limit=10), simulation=400.0, policy=0.0, update=1000.0, evaluation=took_s)
        assert 1 < len(looked) <= min(MOST, SHARE * 1400.0 / took_s)


def test_an_interval_that_was_asked_for_is_kept_and_no_point_is_made_twice() -> None:
    looker = HeldOut(100, Reach(4), InTraining(), final=50)

    def due(done: int, total: int = 1000) -> bool:
        return looker.due(done, total, 1, {})

    assert [done for done in (0, 99, 100, 130) if due(done)] == [100, 130]
    assert due(99, 99)  # the end
    looker.in_training.points.append({"env_steps": 250})
    assert [done for done in (250, 299, 300, 1000) if due(done)] == [300, 1000]
    assert not due(250, 250)
    assert not HeldOut(None, Reach(4), InTraining(), final=50).due(1000, 1000, 1, {})


def test_initial_states_are_those_of_no_other_evaluation() -> None:
    env = Counter(num_envs=4, num_starts=60)
    looker = HeldOut(100, env, InTraining(), final=50)
    assert (looker.in_training.first_start, looker.starts) == (50, 10)
    assert HeldOut(100, Reach(4), InTraining(), final=50).in_training.first_start > 10**6
    with pytest.raises(UserError, match=r"each of the 60 initial states is .*; use evaluate_every_steps=null"):
        HeldOut(100, env, InTraining(), final=60)
    assert not HeldOut(AUTO, env, InTraining(), final=60).due(10, 10, 5, {})
    with pytest.raises(UserError, match="the simulator exists only once"):
        HeldOut(100, None, InTraining(), final=60)


@pytest.mark.parametrize("every", ["often", -1])
def test_other_intervals_are_refused(every) -> None:
    with pytest.raises(UserError, match=r"evaluate_every_steps=(auto, null or a number|-1: expected a number)"):
        ExperimentConfig(evaluate_every_steps=every)
