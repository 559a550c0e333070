"""task=dataset: recorded episodes of an arm train a policy without a simulator."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.offline.inverse_dynamics import labelled
from embodied.command_line import combinations
from embodied.command_line.config import compose
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import FAILED, Episodes, EpisodeWriter
from embodied.data.pictures import Pictures, encode
from embodied.errors import UserError
from embodied.evaluation.open_loop import OpenLoop, split
from embodied.policy import Decision
from embodied.saving import checkpoint
from embodied.training.stages import offline
from policies.registry import trained_policy
from real_robot.recording.data_sets import contract as data_contracts
from real_robot.recording.data_sets.contract import UNITS, data_contract
from real_robot.recording.data_sets.matching import MatchOptions
from real_robot.recording.demonstrations import demonstrations, reader
from real_robot.recording.recorded_task import join, units
from real_robot.ros2.robots.registry import robot_table
from tests.programs import ROOT, Completed, run_program
from tests.real_robot.recording.arm_data import LENGTH, MOTORS, record
from train import GROUPS, TrainConfig

BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ASKED = {"*": "deg", "gripper.pos": "percent"}
SMALL = ["sft.batch=4", "threads=1", "policy.draws=1", "policy.hidden=16", "policy.vision.width=4"]
SMALL_ACT = ["policy.dim_model=16", "policy.n_heads=2", "policy.latent_dim=2"]


STAND_IN = """
import numpy as np


class Robot:
    def __init__(self):
        self.position = {"shoulder_pan.pos": 0.0, "elbow_flex.pos": 0.0, "gripper.pos": 50.0}

    def get_observation(self):
        return self.position | {key: np.zeros((64, 64, 3), np.uint8) for key in ("front", "wrist")}

    def send_action(self, action):
        self.position = dict(action)

    def disconnect(self):
        pass


connect = Robot
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("arm") / "so101_lift", failed=True)


@pytest.fixture(scope="module")
def tutorial(data: Path) -> list[Completed]:
    """The commands of docs/tutorials/own_data.md, on six gradient steps with checkpoints after every third."""
    folder, completed = data.parent, []
    (folder / "lerobot_arm.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "SEGMENT", 3)
        patch.syspath_prepend(folder)
        for language, title, text in BLOCK.findall((ROOT / "docs/tutorials/own_data.md").read_text()):
            if title:
                (folder / title).write_text(text)
            for command in text.replace("\\\n", "").splitlines() if language == "bash" else ():
                _, name, *options = shlex.split(command)
                few = ["sft.steps=6", *SMALL] if name == "train.py" else []
                program = str(folder / name) if (folder / name).exists() else name
                completed.append(run_program(program, *options, *few, cwd=folder))
    return completed


@pytest.fixture(scope="module")
def run(data: Path, tutorial: list[Completed]) -> Path:
    assert [each.returncode for each in tutorial] == [0] * 3, tutorial[0].stderr
    return data.parent / "outputs" / "lift"


def test_the_tutorial_moves_an_arm_and_learns_from_it(run: Path, tutorial: list[Completed]):
    assert re.match(r"ACTIVE; \d+ of 30 periods missed", tutorial[-1].stdout)
    recording = run.parent / "arm.mcap"
    both = f"demonstrations=[{run.parents[1] / 'so101_lift'},{recording}]"
    config, _ = compose(TrainConfig, "train", ["task=dataset", both], GROUPS)
    join(config)
    episodes = reader(config, config.task)(config.task.contract("recorded"), run.parent / "both")
    assert set(episodes.dataset_index.tolist()) == {0, 1}


def train(data: Path, output: Path, *options: str) -> Completed:
    return run_program("train.py", "task=dataset", f"demonstrations={data}", f"output={output}", *options)


def contract_of(data: Path, units: object = "rad", names: dict[str, str] | None = None) -> Contract:
    return data_contract(data, MatchOptions(names=names or {}), units, 16, None)


@pytest.mark.parametrize(
    ("option", "read"),
    [(None, None), ("deg", "deg"), (1, "1"), ({"*": "deg", "gripper": 1}, {"*": "deg", "gripper": "1"})]
    + [(wrong, UserError) for wrong in ({}, "", 2, ["deg"], {"*": 2}, {"*": "deg", "gripper": ""})],
)
def test_units_are_texts_or_one(option: object, read: object):
    if read is UserError:
        with pytest.raises(UserError, match="expected demonstration_units=UNIT"):
            units(option)
    else:
        assert units(option) == read


def test_limits_of_actions_are_the_recorded_ones_with_a_margin():
    actions = np.array([[0.0, 5.0, 200.0, np.nan], [10.0, 5.0, 200.0, 0.5]])
    low, high = data_contracts._limits(actions)
    margin = 10.0 * data_contracts.MARGIN
    assert low == pytest.approx((-margin, 4.995, 199.8, 0.499))
    assert high == pytest.approx((10.0 + margin, 5.005, 200.2, 0.501))


def test_a_run_reports_errors_in_their_units(run: Path):
    report = json.loads((run / "report.json").read_text())
    summary = report["open_loop"]
    assert (summary["trained_episodes"], summary["held_out_episodes"]) == (5, 2)  # of eight, of which one failed
    assert [(row["name"], row["unit"]) for row in summary["elements"]] == list(
        zip(MOTORS, ["deg", "deg", "percent"], strict=True)
    )
    assert report["evaluations"] == []
    assert any(note.startswith("No episode was executed") for note in report["notes"])
    assert "1 failed and are not imitated" in "".join(report["notes"])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["sft/held_out_loss"] == summary["held_out_loss"]
    assert len([row for row in logged if "sft/held_out_loss" in row]) == 2
    page = (run / "report.html").read_text()
    assert "Open-loop error" in page
    assert page.count("data:image/png") == 2
    assert "Open-loop error" in (run / "report.md").read_text()


def test_evaluation_repeats_the_errors(run: Path):
    reported = json.loads((run / "report.json").read_text())["open_loop"]
    assert json.loads((run / "evaluation.json").read_text())["open_loop"] == reported
    refused = run_program("evaluate.py", f"checkpoint={run}", "video=true")
    assert "no simulator for video" in refused.stderr


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offline, "SEGMENT", 3)
    resumed = run.with_name("resumed")
    shutil.copytree(run, resumed)
    for path in sorted((resumed / "checkpoint").iterdir())[1:]:
        shutil.rmtree(path)
    assert checkpoint.load(resumed).counters["stage"] == "sft"
    completed = run_program("train.py", f"resume={resumed}", cwd=run.parents[1])
    assert completed.returncode == 0, completed.stderr
    after, before = (checkpoint.load(each).policy for each in (resumed, run))
    assert all(torch.equal(after[name], before[name]) for name in before)
    reports = (json.loads((each / "report.json").read_text())["open_loop"] for each in (resumed, run))
    assert next(reports) == next(reports)


def test_a_trained_policy_is_for_robots_of_its_names(run: Path, tmp_path: Path):
    policy = trained_policy(checkpoint.load(run))
    assert (policy.contract.horizon, policy.contract.executed) == (10, 5)
    assert policy.contract.observation["front"].shape == (32, 32, 3)
    assert robot_table("simulation", policy.contract, {}).name == "simulation"
    joints = {"rate_hz": 10.0, "joints": ["pan", "elbow", "grip"]}
    with pytest.raises(UserError, match=r"(?s)action elements.*demonstration_names=\{ROBOT'S:DATA'S\}"):
        robot_table("joint_trajectory", policy.contract, joints)
    names = dict(zip(joints["joints"], MOTORS, strict=True)) | {"joint_position": "observation.state"}
    cameras = {"cameras": {key: f"{key}/image_raw" for key in ("front", "wrist")}}
    mapped = contract_of(record(tmp_path / "data", 2), "rad", names)
    assert mapped.differences(robot_table("joint_trajectory", mapped, joints | cameras).served) == []


def test_an_offline_learner_needs_rewards(data: Path, tmp_path: Path):
    options = ["demonstration_units=deg", "stages=[offline]", "offline=iql", *SMALL[1:]]
    refused = train(data, tmp_path / "run", *options)
    assert "rewards are unknown in " in refused.stderr


@pytest.mark.parametrize("policy", [name for name, _ in combinations.valid_pairs("dataset")])
def test_its_policies_build_and_learn(policy: str, data: Path):
    chosen = [
        f"policy={policy}",
        "demonstration_units=deg",
        "task.image_size=16",
        *{"flow": ["policy.vision.width=4"], "diffusion": ["policy.vision.width=4"], "act": SMALL_ACT}.get(policy, []),
    ]
    config, _ = compose(TrainConfig, "train", ["task=dataset", f"demonstrations={data}", *chosen], GROUPS)
    join(config)
    contract = config.task.contract("recorded")
    episodes = reader(config, config.task)(contract, data.parent / policy)
    built = config.policy.build(contract)
    built.fit(*episodes.by_weight())
    batch = episodes.sample(2, contract.horizon, torch.Generator().manual_seed(0))
    loss = built.loss(batch["observation"], batch["actions"], batch["valid"])
    loss.backward()
    assert 0.0 < float(loss.detach()) < 100.0


def test_an_offline_learner_learns_from_failures_alone(tmp_path: Path):
    position = TensorSpec((1,), unit="m", names=("x",))
    contract = Contract({"position": position}, replace(position, low=(-1.0,), high=(1.0,)), 0.1)
    with EpisodeWriter(tmp_path / "logs", contract) as writer:
        for number in range(6):
            x = torch.arange(4.0).unsqueeze(1) + number
            options = {"success": False, "reward": -x[:, 0], "final_observation": TensorDict({"position": x[-1]})}
            writer.add(Episodes.of(TensorDict({"position": x}, [4]), x / 10.0, **options))
    options = ["policy=mlp", "policy.hidden=[8]", "threads=1", "offline=iql", "offline.steps=2", "offline.batch=4"]
    completed = train(tmp_path / "logs", tmp_path / "run", *options, "stages=[offline]")
    assert completed.returncode == 0, completed.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert "Of 6 demonstrations 6 failed and are not imitated, but learned from offline." in report["notes"]
    assert report["open_loop"]["trained_episodes"] == 4
    imitating = ["stages=[sft,offline]"], ["stages=[offline]", "rounds.count=2", "rounds.imitate_anew=true"]
    for number, stages in enumerate(imitating):
        refused = train(tmp_path / "logs", tmp_path / f"refused {number}", *options, *stages)
        assert "all 6 episodes of" in refused.stderr, stages


def test_a_single_step_has_no_statistics(tmp_path: Path):
    position = TensorSpec((1,), unit="m", names=("x",))
    contract = Contract({"position": position}, replace(position, low=(-1.0,), high=(1.0,)), 0.1)
    with EpisodeWriter(tmp_path / "logs", contract) as writer:
        for success in (True, True, False):
            writer.add(Episodes.of(TensorDict({"position": torch.ones(1, 1)}, [1]), torch.ones(1, 1), success=success))
    completed = train(tmp_path / "logs", tmp_path / "run", "policy=mlp", "policy.hidden=[8]", "sft.steps=2")
    assert "the episodes to imitate have a single step" in completed.stderr


def test_a_folder_of_other_shapes_than_its_contract_is_refused(tmp_path: Path):
    position = TensorSpec((1,), unit="m", names=("x",))
    contract = Contract({"position": position}, replace(position, low=(-1.0,), high=(1.0,)), 0.1)
    good = TensorDict({"position": torch.zeros(4, 1)}, [4]), torch.zeros(4, 1)
    for number, (observation, actions, message) in enumerate(
        (
            (TensorDict({"position": torch.zeros(4, 2)}, [4]), good[1], r"position of shape \[1\] .*got \[2\]"),
            (TensorDict({"other": torch.zeros(4, 1)}, [4]), good[1], r"position of shape \[1\] .*got none"),
            (good[0], torch.zeros(4, 2), r"action of shape \[1\] .*got \[2\]"),
            (good[0], torch.zeros(4), r"action of shape \[1\] .*got none"),
        )
    ):
        folder = tmp_path / str(number)
        with EpisodeWriter(folder, contract) as writer:
            writer.add(Episodes.of(observation, actions))
        with pytest.raises(UserError, match=message):
            demonstrations(folder, contract, tmp_path / f"run {number}")


def test_units_are_asked_for_once(tmp_path: Path):
    data = record(tmp_path / "data", 2)
    with pytest.raises(UserError, match=r"shoulder_pan.pos \(.* to .*'demonstration_units=\{\*:deg,gripper.pos:perc"):
        contract_of(data, None)
    units = contract_of(data, ASKED).action.unit
    assert units == "deg, deg, percent"
    assert contract_of(data, None).action.unit == units
    assert contract_of(data, {"action.gripper.pos": "m"}).observation["state"].unit == units
    assert contract_of(data, None).action.unit == "deg, deg, m"


def test_units_of_a_folder_of_others_are_stored_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = record(tmp_path / "data", 2)
    monkeypatch.setenv("EMBODIED_CACHE", str(tmp_path / "cache"))
    written = data_contracts.complete_or_absent

    def read_only(path: Path):
        if path.is_relative_to(data):  # chmod does not stop root
            raise PermissionError(13, "read-only", str(path))
        return written(path)

    monkeypatch.setattr(data_contracts, "complete_or_absent", read_only)
    assert contract_of(data, "deg").action.unit == "deg"
    assert not (data / UNITS).exists()
    assert contract_of(data, None).action.unit == "deg"
    assert len([*(tmp_path / "cache" / "units").iterdir()]) == 1


def test_a_contract_has_the_names_and_limits_of_the_data(tmp_path: Path):
    names = {"joint_position": "observation.state", "pan": "shoulder_pan.pos"}
    contract = contract_of(record(tmp_path / "data", 2, actions=2, texts=("lift", "push it")), "rad", names)
    assert contract.observation["joint_position"].names == ("pan", *MOTORS[1:])
    assert contract.action.names == ("pan", "elbow_flex.pos")
    assert contract.observation["wrist"].shape == (16, 16, 3)
    assert contract.observation["instruction"].shape == (len("push it"),)
    assert "instruction" not in contract_of(record(tmp_path / "one", 2)).observation
    assert contract.control_dt_s == pytest.approx(0.1)
    assert all(low < 0 < high for low, high in zip(contract.action.low, contract.action.high, strict=True))


def test_whole_numbers_of_a_data_set_are_observations(tmp_path: Path):
    data = record(tmp_path / "data", 2, columns={"observation.contact": 1})
    info = json.loads((data / "meta/info.json").read_text())
    info["features"]["observation.contact"] = {"dtype": "uint8", "shape": [1], "names": None}
    (data / "meta/info.json").write_text(json.dumps(info))
    contract = contract_of(data)
    assert contract.observation["contact"].shape == (1,)
    read = demonstrations(data, contract, tmp_path / "run")
    assert read.observation["contact"].unique().tolist() == [1.0]


def test_units_of_names_that_a_data_set_does_not_have_are_refused(tmp_path: Path):
    data = record(tmp_path / "data", 2)
    with pytest.raises(UserError, match=r"demonstration_units has griper\.pos; expected names of .*gripper\.pos"):
        contract_of(data, {"*": "deg", "griper.pos": "percent"})
    assert not (data / "embodied_units.json").exists()


def test_data_sets_with_units_take_no_others(tmp_path: Path):
    contract = Contract({"joint": TensorSpec((1,), unit="rad")}, TensorSpec((1,), unit="rad"), control_dt_s=0.1)
    with EpisodeWriter(tmp_path / "data", contract) as writer:
        observation = TensorDict({"joint": torch.zeros(2, 1)}, [2])
        writer.add(Episodes.of(observation, torch.zeros(2, 1)))
    with pytest.raises(UserError, match="has units of its own: leave out demonstration_units"):
        contract_of(tmp_path / "data", "deg")


def test_episodes_may_have_unknown_actions(tmp_path: Path):
    data = record(tmp_path / "data", 3, unlabelled=1)
    contract = contract_of(data)
    assert all(low < high for low, high in zip(contract.action.low, contract.action.high, strict=True))
    read = demonstrations(data, contract, tmp_path / "run")
    assert read.unlabelled.tolist() == [False, False, True]
    made, _ = labelled(read, contract, 5, 0, tmp_path / "run")
    assert not made.unlabelled.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_hz": 0}, "does not state the rate of its rows; add demonstration_rate_hz=HZ"),
        ({"nan": 3}, "has infinity or not a number in action, from row 0 on"),
        ({"episodes": 1}, "expected at least 2 episodes that did not fail"),
    ],
)
def test_unfit_data_sets_are_refused(tmp_path: Path, changes: dict[str, int], message: str):
    data = record(tmp_path / "data", **changes)
    completed = train(data, tmp_path / "run", "demonstration_units=deg", "policy=mlp", "sft.steps=1")
    assert completed.returncode == 1
    assert message in completed.stderr


def episodes(lengths: list[int], success: list[bool]) -> Episodes:
    """Actions count the steps of all episodes; pictures of one pixel have the same number."""
    parts, step = [], 0
    for length, succeeded in zip(lengths, success, strict=True):
        actions = torch.arange(step, step + length).float().unsqueeze(1)
        pixels = [
            encode(torch.full((1, 1, 3), number, dtype=torch.uint8).numpy()) for number in actions.flatten().int()
        ]
        pictures = Pictures.of({"front": pixels})
        observation = TensorDict({"state": actions}, [length])
        parts.append(Episodes.of(observation, actions, success=succeeded, pictures=pictures))
        step += length
    return Episodes.join(parts)


def test_failures_are_held_out_where_fewer_than_two_episodes_succeeded():
    whole = episodes([2] * 5, [False] * 4 + [True])
    learned, held_out = split(whole, 0.3, failures=True)
    assert held_out.success.tolist() == [FAILED] * 2
    assert sorted(learned.success.tolist()) == [FAILED, FAILED, 1]
    with pytest.raises(UserError, match="at least 2 episodes that did not fail"):
        split(whole, 0.3)


def test_held_out_episodes_are_none_that_failed_nor_all():
    whole = episodes([2] * 11, [False] + [True] * 10)
    learned, held_out = split(whole, 0.3)
    assert len(held_out.ends) == 3
    assert len(learned.ends) == 8
    assert not held_out.failed.any()
    assert int((learned.success == FAILED).sum()) == 1
    together = torch.cat([learned.actions, held_out.actions]).flatten().sort().values
    assert torch.equal(together, torch.arange(22.0))
    chunks = held_out.chunks(torch.arange(6), 2)
    assert torch.equal(chunks["observation"]["front"][:, 0, 0, 0].float(), held_out.actions.flatten())
    assert torch.equal(chunks["observation"]["state"], held_out.actions)
    packed = Episodes.join([held_out]).chunks(torch.arange(6), 2)
    assert torch.equal(packed["observation"]["front"], chunks["observation"]["front"])


class Constant:
    """Predicts 10 whatever it observes."""

    def act(self, observation: TensorDict, *, deterministic: bool) -> Decision:
        assert deterministic
        return Decision(torch.full((len(observation), 2, 1), 10.0), TensorDict(), torch.zeros(1, 1, 1))

    def loss(self, observation: TensorDict, actions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return torch.tensor(0.5)


def test_errors_are_means_over_valid_actions():
    spec = TensorSpec((1,), unit="deg", names=("pan",))
    contract = Contract({"state": spec}, spec, 0.1, horizon=2, executed=2)
    whole = episodes([LENGTH, 4], [True, True])
    trained, held_out = (whole.selected(torch.tensor([number])) for number in (0, 1))
    result = OpenLoop(held_out, trained, contract).evaluate(Constant())
    # actions 12 to 15: chunks at the second and fourth step, (13, 14) and (15): the next has no action any more
    assert result.errors.flatten().tolist() == pytest.approx([(3 + 4 + 5) / 3, (1 + 2 + 1) / 3, 7.5 + 1.0])
    assert result.summary()["error_of_range"]["hold"] == pytest.approx((4 / 3) / (LENGTH - 1))
    assert result.summary()["elements"][0]["low"] is None
    assert result.loss == 0.5
