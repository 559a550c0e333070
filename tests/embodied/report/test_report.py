"""The report contains the measurements, in the format that programs expect."""

import json
import re
from dataclasses import replace

import pytest
import torch

from embodied.evaluation.evaluation import EvaluationResult
from embodied.report.repeating import resume_command
from embodied.report.report import Report, write_evaluation
from embodied.saving.tree import load_tree, save_tree
from embodied.saving.versions import git_commit
from embodied.training.logging import Logger


def outcome(successes: int, starts: int = 10) -> EvaluationResult:
    success = torch.stack([torch.arange(starts) < successes, torch.arange(starts) < successes - 1])
    return EvaluationResult(("pick_milk", "pick_butter"), success, torch.full_like(success, 90, dtype=torch.int64), 280)


def report(assets: str = "stand-in") -> Report:
    made = Report("libero_pick", assets, seed=3, env_steps=1234567, episodes=8000)
    made.wall_s = {"simulation": 600.126, "update": 12.0}
    for stage, successes in (("rl", 10), ("sft", 4), ("sft_control", 5)):
        made.add(stage, "wide", outcome(successes))
    made.add("rl", "official", outcome(10))
    return made


def test_json_holds_what_the_documentation_promises(tmp_path):
    report().write(tmp_path, {})
    record = json.loads((tmp_path / "report.json").read_text())
    assert (record["task"], record["assets"], record["seed"]) == ("libero_pick", "stand-in", 3)
    assert (record["env_steps"], record["episodes"]) == (1234567, 8000)
    assert record["wall_s"] == {"simulation": 600.13, "update": 12.0}
    assert record["git_commit"] == git_commit()
    assert {"python", "torch", "numpy"} <= record["versions"].keys()
    stages = [(row["stage"], row["distribution"]) for row in record["evaluations"]]
    assert stages == [("sft", "wide"), ("sft_control", "wide"), ("rl", "wide"), ("rl", "official")]
    sft = record["evaluations"][0]
    assert (sft["success"], sft["episodes"], sft["step_limit"]) == (0.35, 20, 280)
    assert 0 < sft["low"] < 0.35 < sft["high"] < 1
    assert sft["per_task"][0]["task"] == "pick_milk"
    assert {"success", "low", "high", "episodes"} <= sft["per_task"][0].keys()
    over_control = record["gains"][1]
    assert (over_control["over"], over_control["distribution"]) == ("sft_control", "wide")
    assert over_control["difference"] == pytest.approx(10 / 20)
    assert over_control["low"] > 0
    assert record["gains_over_better"] == [{key: each for key, each in over_control.items() if key != "per_task"}]
    butter = outcome(10).of_task(1).gain_over(outcome(5).of_task(1))
    assert over_control["per_task"][1] == {
        "task": "pick_butter",
        "difference": butter.difference,
        "low": butter.low,
        "high": butter.high,
    }
    assert butter.difference == pytest.approx(0.5)


@pytest.mark.parametrize(("sft", "control", "better"), [(6, 4, "sft"), (4, 6, "sft_control"), (5, 5, "sft_control")])
def test_the_gain_is_reported_over_the_better_of_sft_and_its_control(tmp_path, sft, control, better):
    made = Report("libero_pick", "official", seed=0)
    for stage, successes in (("rl", 10), ("sft", sft), ("sft_control", control), ("baseline planner", 9)):
        made.add(stage, "wide", outcome(successes))
    made.add("rl", "official", outcome(10))
    made.add("sft", "official", outcome(5))
    assert made.gains_over_better() == {"wide": (better, outcome(10).gain_over(outcome(max(sft, control))))}
    made.write(tmp_path, {})
    name = {"sft": "SFT", "sft_control": "SFT control"}[better]
    line = f"RL over the better of SFT and SFT control on wide, which is {name}: +{(10 - max(sft, control)) * 10}.0"
    assert line in (tmp_path / "report.md").read_text()
    assert line in made.summary(tmp_path)


def test_page_shows_intervals_gains_and_stand_ins(tmp_path):
    (tmp_path / "video.mp4").touch()
    report().write(tmp_path, {})
    page = (tmp_path / "report.md").read_text()
    assert "Stand-in assets" in page
    assert "| SFT control | wide | 45.0% [25.8%, 65.8%] | 20 | 280 |" in page
    assert "RL over SFT control on wide: +50.0 points" in page
    assert "[video.mp4](video.mp4)" in page
    assert "(curves.png)" in page
    assert f"evaluate.py checkpoint={tmp_path}" in page


def test_official_assets_get_no_warning(tmp_path):
    made = report("official")
    made.write(tmp_path, {})
    assert "tand-in" not in (tmp_path / "report.md").read_text() + made.summary(tmp_path)


def test_summary_names_results_files_and_the_next_command(tmp_path):
    text = report().summary(tmp_path)
    assert "RL" in text
    assert "95.0% [76.4%, 99.1%]" in text
    assert "stand-in" in text
    assert f"{tmp_path}/report.html" in text
    assert f"evaluate.py checkpoint={tmp_path}" in text
    assert "export.py" not in text
    assert resume_command(tmp_path).endswith(f"train.py resume={tmp_path}")


def test_a_policy_that_can_be_exported_is_reported_as_such(tmp_path):
    made = Report("quadrotor_hover", None, seed=0, export_target="c")
    assert f"export.py checkpoint={tmp_path} target=c" in made.summary(tmp_path)
    made.export_target = "onnx"
    assert "target=onnx" in made.summary(tmp_path)


def test_curves_are_drawn_from_the_metrics(tmp_path):
    with Logger(tmp_path) as logger:
        for step in range(3):
            logger.log(step, {"rollout/success": step / 3, "ppo/kl": 0.01})
    report().write(tmp_path, {"rollout/success": "environment steps", "ppo/kl": "environment steps", "never": "logged"})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_evaluations_survive_in_a_checkpoint(tmp_path):
    save_tree(tmp_path / "state.safetensors", report().state_dict())
    back = Report("libero_pick", "stand-in", seed=3)
    back.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    assert back.to_dict()["evaluations"] == report().to_dict()["evaluations"]


def test_a_baseline_is_compared_by_its_name(tmp_path):
    made = report()
    made.add("baseline planner", "wide", outcome(9))
    made.write(tmp_path, {})
    assert "| planner | wide | 85.0%" in (tmp_path / "report.md").read_text()
    assert "RL over planner on wide: +10.0 points" in made.summary(tmp_path)


def test_an_evaluation_tells_the_paired_difference_from_each_baseline(tmp_path, caplog):
    results = {("policy", "wide"): outcome(9), ("planner", "wide"): outcome(6), ("policy", "official"): outcome(10)}
    with caplog.at_level("INFO", "embodied"):
        write_evaluation(tmp_path / "evaluation.json", {"task": "reach"}, results)
    text = caplog.text
    assert re.search(r"policy over planner on wide: \+30\.0 points \[.*\], paired\n", text)
    assert "| task | wide | planner, wide | official |" in text
    record = json.loads((tmp_path / "evaluation.json").read_text())
    rows = [(row["stage"], row["distribution"], row["success"]) for row in record["evaluations"]]
    assert rows == [("policy", "wide", 0.85), ("baseline planner", "wide", 0.55), ("policy", "official", 0.95)]
    assert record["evaluations"][1]["low"] < 0.55 < record["evaluations"][1]["high"]
    assert record["gains"] == [
        {"over": "baseline planner", "distribution": "wide", **vars(outcome(9).gain_over(outcome(6)))}
    ]
    assert 0.0 < record["gains"][0]["low"] < 0.3 < record["gains"][0]["high"]


def test_gains_on_other_episodes_are_not_called_paired(tmp_path, caplog):
    results = {(who, "wide"): replace(outcome(number), repeatable=False) for who, number in (("policy", 9), ("p", 6))}
    with caplog.at_level("INFO", "embodied"):
        write_evaluation(tmp_path / "evaluation.json", {}, results)
    assert "points" in caplog.text
    assert "paired" not in caplog.text
    assert [row["repeatable"] for row in json.loads((tmp_path / "evaluation.json").read_text())["evaluations"]] == [
        False,
        False,
    ]


def test_an_unknown_stage_is_refused():
    stages = "start, untrained, sft, sft_control, offline, rl, one_step"
    expected = f"unknown stage 'bc'; expected one of {stages}, or baseline NAME"
    with pytest.raises(ValueError, match=expected):
        report().add("bc", "wide", outcome(1))


def test_a_report_without_evaluations_can_be_written(tmp_path):
    made = Report("libero_pick", "official", seed=0)
    made.write(tmp_path, {})
    assert json.loads((tmp_path / "report.json").read_text())["evaluations"] == []
    assert (tmp_path / "report.md").exists()


def test_names_from_outside_are_shown_as_they_are(tmp_path):
    name = "<img src=x onerror=alert(1)> | `a` [link](javascript:alert(1))\n# title"
    result = replace(outcome(9), tasks=(name, "plain"))
    report = Report(name, None, 0)
    report.add("rl", name, result)
    report.notes = [name]
    report.write(tmp_path, {})
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<img" not in text
    assert "](javascript" not in text
    assert "\n# title" not in text
    assert text.splitlines()[0].startswith("# &lt;img src=x onerror=alert(1)> \\| \\`a\\` ")
    cells = {re.sub(r"\\\|", "", line).count("|") for line in text.splitlines() if line.startswith("| &lt;img")}
    assert cells == {3}


def test_a_checkpoint_of_an_earlier_release_keeps_its_numbers_of_odd_episodes() -> None:
    made = Report("pick", None, 0)
    success = torch.tensor([[True, False], [False, False]])
    before = vars(EvaluationResult(("milk", "butter"), success, torch.ones(2, 2), 280)) | {"diverged": 3, "pushed": 1}
    del before["events"]
    made.load_state_dict({"results": [["rl", "near", before]]})
    summary = made.results["rl", "near"].summary()
    assert (summary["diverged"], summary["pushed"]) == (3, 1)
    made.load_state_dict(made.state_dict())
    assert made.results["rl", "near"].count("diverged") == 3
