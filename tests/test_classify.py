"""classify.py as a person uses it: recorded frames, a classifier, its report; and a policy that exploits it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import classify
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes, EpisodeWriter, read
from embodied.data.pictures import Pictures, decode, encode_all
from embodied.data.rewards import check_rewards
from embodied.environments.classified import FALSE_NEGATIVE, FALSE_POSITIVE, SUCCESS, ClassifiedEnvironment
from embodied.evaluation.evaluation import evaluate
from embodied.saving import checkpoint
from embodied.training.loop import train
from policies.mlp import MLPConfig, MLPPolicy
from policies.success_classifier import SuccessClassifier
from sims.quadrotor.task import HoverTask
from tests.embodied.drifting_point import CONTRACT, DriftingPoint, episode, write_demonstrations
from tests.programs import run_program

ROOT = Path(__file__).parent.parent
SMALL = ["positive_last=1", "gap=1", "steps=300", "batch=64", "learning_rate=3e-3", "threads=1"]


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    return write_demonstrations(tmp_path_factory.mktemp("data") / "logs")


@pytest.fixture(scope="module")
def classifier(demonstrations: Path, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("classifier") / "first"
    done = run_program("classify.py", f"demonstrations={demonstrations}", f"output={output}", *SMALL)
    assert done.returncode == 0, done.stderr
    return output


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_it_writes_a_classifier_and_its_report(classifier: Path, demonstrations: Path):
    record = results(classifier)
    assert record["parts"]["training"]["episodes"] == 36
    assert record["held_out"]["episode_accuracy"]["total"] == 12
    assert record["held_out"]["episode_accuracy"]["rate"] > 0.9
    assert record["threshold"] >= 0.5
    for name in ("report.md", "report.html"):
        assert "12 held-out episodes" in (classifier / name).read_text()
    page = (classifier / "report.html").read_text()
    assert "<script" not in page
    assert "data:image/png;base64," in page
    loaded = SuccessClassifier.load(classifier)
    assert loaded({"position": torch.tensor([1.0, 0.0])}) >= record["threshold"]
    assert loaded({"position": torch.tensor([0.3, 0.0])}) < record["threshold"]
    assert sorted(path.name for path in classifier.parent.iterdir()) == ["first"]


def learned(folder: Path) -> tuple[MLPPolicy, dict]:
    """Policy trained by the rewards of the classifier in `folder`, and its evaluation with the true success."""
    found = SuccessClassifier.load(folder)
    env = ClassifiedEnvironment(DriftingPoint(64), found, true_success=False)
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[32]).build(CONTRACT)
    config = PPOConfig(rollout_length=20, minibatch=320, learning_rate=3e-3, target_kl=1.0, discount=0.95)
    for _ in train(env, policy, config, env_steps=60_000):
        pass
    judged = ClassifiedEnvironment(DriftingPoint(20), found, true_success=True)
    return policy, evaluate(judged, policy, starts_per_task=20).summary()


def played(policy: MLPPolicy, classifier: Path, folder: Path) -> Path:
    """Episodes of the policy until the classifier detects a success, which a person marks as they truly ended."""
    env = ClassifiedEnvironment(DriftingPoint(40), SuccessClassifier.load(classifier), true_success=False)
    observation = env.reset(starts=torch.arange(40))
    positions, actions, executed = [observation["position"]], [], []
    for _ in range(20):
        actions.append(policy.act(observation).actions[:, 0].detach())
        transition = env.step(actions[-1][:, None])
        observation = transition.observation
        positions.append(observation["position"])
        executed.append(transition.executed[:, 0])
    with EpisodeWriter(folder, CONTRACT) as writer:
        for index, length in enumerate(torch.stack(executed).sum(0).tolist()):
            recorded = torch.stack(positions)[: length + 1, index], torch.stack(actions)[:length, index]
            writer.add(episode(*recorded))
    return folder


@pytest.mark.evidence
def test_a_policy_exploits_the_classifier_until_its_failures_are_negatives(classifier: Path, tmp_path: Path):
    # The person's failures stop too early, so that the classifier reads how far the point is, and not how far aside.
    policy, before = learned(classifier)
    assert before[SUCCESS] > 0.9
    assert before["success"] < 0.5
    assert before[FALSE_POSITIVE] > 0.5
    failures = played(policy, classifier, tmp_path / "failures")
    second = tmp_path / "second"
    done = run_program("classify.py", f"classifier={classifier}", f"negatives={failures}", f"output={second}")
    assert done.returncode == 0, done.stderr
    _, after = learned(second)
    assert after["success"] > 0.7
    assert after[FALSE_POSITIVE] < 0.3


def test_negatives_move_no_demonstration_from_one_part_to_another(classifier: Path, tmp_path: Path):
    failures = tmp_path / "failures"
    with EpisodeWriter(failures, CONTRACT) as writer:
        for number in range(5):
            positions = torch.stack((torch.linspace(0, 1, 9), torch.linspace(0, 0.8, 9) + 0.01 * number), 1)
            writer.add(episode(positions, torch.zeros(8, 2)))
    second = tmp_path / "second"
    run_program("classify.py", f"classifier={classifier}", f"negatives={failures}", f"output={second}", "steps=5")
    before, after = results(classifier)["parts"], results(second)["parts"]
    for name, more in (("training", 3), ("validation", 1), ("test", 1)):
        assert after[name]["episodes"] == before[name]["episodes"] + more
        assert after[name]["negative_frames"] == before[name]["negative_frames"] + 9 * more
        assert after[name]["positive_frames"] == before[name]["positive_frames"]
    again = tmp_path / "again"  # a third training has all negatives of the second
    done = run_program("classify.py", f"classifier={second}", f"output={again}", "steps=5")
    assert done.returncode == 0, done.stderr
    assert results(again)["parts"] == after


def test_an_episode_that_was_learned_is_never_held_out_later(classifier: Path, tmp_path: Path):
    failures = tmp_path / "failures"
    folders = classifier, tmp_path / "second", tmp_path / "third"
    # a folder of failures that has grown, then another seed
    for before, after, count, options in zip(folders[:2], folders[1:], (6, 15), ([], ["seed=1"]), strict=True):
        shutil.rmtree(failures, ignore_errors=True)
        with EpisodeWriter(failures, CONTRACT) as writer:
            for _ in range(count):
                writer.add(episode(torch.zeros(9, 2), torch.zeros(8, 2)))
        added = [f"negatives={failures}"] if before is classifier else []
        done = run_program("classify.py", f"classifier={before}", f"output={after}", "steps=2", *added, *options)
        assert done.returncode == 0, done.stderr
    first, second, third = (SuccessClassifier.record(folder)["parts"] for folder in folders)
    assert len(second) == len(first) + 6
    assert len(third) == len(first) + 15
    assert second.items() >= first.items()
    assert third.items() >= second.items()
    parts = results(folders[2])["parts"].values()
    assert [each["episodes"] for each in parts] == torch.tensor([*third.values()]).bincount().tolist()


def test_the_same_command_gives_the_same_bits(classifier: Path, demonstrations: Path, tmp_path: Path):
    output = tmp_path / "again"
    run_program("classify.py", f"demonstrations={demonstrations}", f"output={output}", *SMALL)
    weights = "checkpoint/000001/policy.safetensors"
    assert (output / weights).read_bytes() == (classifier / weights).read_bytes()
    assert results(output)["held_out"] == results(classifier)["held_out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gap=-1"], "gap=-1: expected a number of at least 0"),
        (["threshold=1"], "threshold=1: expected a number above 0 and below 1"),
        (["observations=[wrist]"], "observations=wrist: expected some of position"),
        (["positive_key=mark"], "has no signal mark for positive_key; it has none"),
        (["negatives=nowhere"], "nowhere"),
        (["demonstration_weights=[1.0]"], "batches are balanced by label: leave out demonstration_weights"),
        (["stepps=3"], "unknown option 'stepps'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    demonstrations: Path, tmp_path: Path, options: list[str], message: str
):
    done = run_program(
        "classify.py", f"demonstrations={demonstrations}", f"output={tmp_path / 'out'}", *SMALL, *options
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_episodes_of_unknown_outcome_are_counted_or_refused(tmp_path: Path):
    with EpisodeWriter(tmp_path / "logs", CONTRACT) as writer:
        for _ in range(3):
            positions = torch.zeros(9, 2)
            writer.add(Episodes.of(episode(positions, torch.zeros(8, 2)).observation, torch.zeros(8, 2), success=None))
    done = run_program("classify.py", f"demonstrations={tmp_path / 'logs'}", f"output={tmp_path / 'out'}", *SMALL)
    assert done.returncode == 1
    assert "has no episodes of known outcome among its 3" in done.stderr


def test_no_data_and_another_network_are_refused(classifier: Path, tmp_path: Path):
    done = run_program("classify.py", f"output={tmp_path / 'out'}")
    assert "error: expected demonstrations=DIR" in done.stderr
    done = run_program("classify.py", f"classifier={classifier}", "width=8", f"output={tmp_path / 'out'}")
    assert "has its own vision, width and observations: leave them out" in done.stderr
    done = run_program("classify.py", f"classifier={classifier}", f"output={classifier}")
    assert f"error: {classifier} exists; choose another output" in done.stderr


def test_interrupted_it_leaves_nothing(demonstrations: Path, tmp_path: Path):
    command = [sys.executable, "classify.py", f"demonstrations={demonstrations}", f"output={tmp_path / 'out'}", *SMALL]
    process = subprocess.Popen(
        [*command, "steps=1000000"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # a shell's background job ignores interrupts, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline_s = time.monotonic() + 120
        while not (tmp_path / ".out.tmp" / "data_0").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_task_without_its_observations_is_refused(classifier: Path, tmp_path: Path):
    done = run_program(
        "train.py", "task=vehicle_navigate", f"success_classifier={classifier}", f"output={tmp_path / 'run'}"
    )
    assert done.returncode == 1
    assert "the success classifier reads other observations than the task has" in done.stderr


def test_a_run_by_a_classifier_reports_the_true_success_beside_it(tmp_path: Path):
    contract = HoverTask().contract(HoverTask().distributions[0])
    with EpisodeWriter(tmp_path / "logs", replace(contract, horizon=1, executed=1)) as writer:
        for number in range(12):
            last = 0.0 if number % 3 else 0.5
            specs = contract.observation.items()
            observation = {key: torch.zeros(20, *spec.shape) for key, spec in specs if not spec.privileged}
            observation["position"] += torch.linspace(1.0, last, 20)[:, None]
            data = TensorDict(observation, [20]), torch.zeros(20, *contract.action.shape)
            writer.add(Episodes.of(*data, success=last == 0.0))
    output, run = tmp_path / "classifier", tmp_path / "run"
    options = ["task=quadrotor_hover", "observations=[position]", f"output={output}", *SMALL]
    done = run_program("classify.py", f"demonstrations={tmp_path / 'logs'}", *options)
    assert done.returncode == 0, done.stderr
    sizes = ["env_steps=400", "num_envs=4", "evaluation_starts=4", "evaluation_envs=4", "task.step_limit=20"]
    options = ["algorithm=ppo", f"success_classifier={output}", f"output={run}", *sizes, "video=false", "threads=1"]
    done = run_program("train.py", "task=quadrotor_hover", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((run / "report.json").read_text())
    assert any("those of a success classifier" in note for note in report["notes"])
    assert {SUCCESS, FALSE_POSITIVE, FALSE_NEGATIVE} <= report["evaluations"][0].keys()
    assert FALSE_POSITIVE in (run / "report.md").read_text()
    assert f"rollout/{FALSE_POSITIVE}" in (run / "metrics.jsonl").read_text()
    done = run_program("evaluate.py", f"checkpoint={run}", "episodes=4", "num_envs=4", "video=false")
    assert done.returncode == 0, done.stderr
    row = json.loads((run / "evaluation.json").read_text())
    assert row["success_classifier"] == str(output)
    assert SUCCESS in json.dumps(row)
    done = run_program("evaluate.py", f"checkpoint={run}", "episodes=4", "num_envs=4", "success_classifier=null")
    assert done.returncode == 0, done.stderr
    assert SUCCESS not in (run / "evaluation.json").read_text()


def test_logs_of_unknown_outcome_are_labelled_and_trained_on(classifier: Path, tmp_path: Path):
    with EpisodeWriter(tmp_path / "logs", CONTRACT) as writer:
        for number in range(6):
            last = 1.1 if number % 2 else 0.4
            positions = torch.stack((torch.linspace(0, last, 12), torch.zeros(12)), 1)
            recorded = episode(positions, torch.full((11, 2), 0.01))
            unknown = torch.tensor([UNKNOWN if number < 4 else FAILED], dtype=torch.int8)
            writer.add(replace(recorded, success=unknown, terminated=torch.tensor([False])))
    output = tmp_path / "labelled"
    done = run_program("classify.py", f"classifier={classifier}", f"label={tmp_path / 'logs'}", f"output={output}")
    assert done.returncode == 0, done.stderr
    assert "of 6 episodes 4 had an unknown outcome: 2 are successes, 2 failures" in done.stdout
    labelled, contract, _ = read(output)
    assert contract.observation == CONTRACT.observation
    assert labelled.success.tolist() == [FAILED, SUCCEEDED] * 2 + [FAILED] * 2  # the person's verdict remains
    assert labelled.reward.sum() == 2.0
    assert labelled.steps < 66
    check_rewards(labelled)
    done = run_program("classify.py", f"label={tmp_path / 'logs'}", f"output={tmp_path / 'other'}")
    assert done.returncode == 1


def test_logs_are_labelled_by_the_threshold_of_the_command(classifier: Path):
    chosen = SuccessClassifier.load(classifier).threshold
    for options, threshold in (([], chosen), (["threshold=0.99"], 0.99)):
        (config, task), _ = classify.composed([f"classifier={classifier}", "label=logs", *options])
        assert classify.begun(config, task).threshold == threshold


def test_code_that_a_classifier_names_is_not_run(classifier: Path, tmp_path: Path):
    saved = checkpoint.load(classifier)
    saved.config["train"]["values"]["task"]["name"] = "evil.py"
    checkpoint.save(tmp_path / "other", saved)
    done = run_program("classify.py", f"classifier={tmp_path / 'other'}", f"output={tmp_path / 'out'}")
    assert done.returncode == 1
    assert "names code or files outside the run" in done.stderr


def test_the_report_shows_pictures_of_the_worst_errors(tmp_path: Path):
    contract = Contract({"front": TensorSpec((16, 24, 3), "uint8")}, CONTRACT.action, 0.1)
    with EpisodeWriter(tmp_path / "logs", contract) as writer:
        for number in range(9):
            pictures = np.zeros((12, 16, 24, 3), np.uint8)
            pictures[:, :, : 2 * number + 2, 0] = 200
            pictures[10:, 4:12, 4:12] = 255 if number % 3 else 0
            encoded = Pictures.of({"front": encode_all(pictures)})
            success = bool(number % 3)
            writer.add(Episodes.of(TensorDict({}, [12]), torch.zeros(12, 2), success=success, pictures=encoded))
    output = tmp_path / "out"
    options = ["positive_last=2", "gap=2", "steps=4", "batch=8", "threshold=0.9999", "vision.width=4", "threads=1"]
    done = run_program("classify.py", f"demonstrations={tmp_path / 'logs'}", f"output={output}", *options)
    assert done.returncode == 0, done.stderr
    record = results(output)
    assert record["held_out"]["missed_successes"]["rate"] == 1.0
    assert record["observations"] == ["front"]
    shown = sorted(output.glob("error_*.png"))
    assert shown
    picture = decode(shown[0].read_bytes())
    assert picture.shape == (256, 384, 3)  # enlarged, with its proportions
    assert (255, 255, 255) in {tuple(colour) for colour in picture.reshape(-1, 3).tolist()}  # the square of a success
    page = (output / "report.md").read_text()
    assert "missed success: episode" in page
    assert shown[0].name in page
    assert (output / "report.html").read_text().count("data:image/png") == 1 + len(shown)
