"""Whether a run fits into a device: the options that are told were tried, and recipes are what they say."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from embodied.command_line.config import compose
from embodied.errors import UserError
from embodied.placement.registry import TorchrunConfig
from embodied.training.fitting_memory import check
from embodied.training.plan import Plan, plan
from tests.policies.vla.checkpoints.test_weights import save
from train import GROUPS, TrainConfig, run

RUN = ("task=libero_pick", "policy=flow", "algorithm=ppo", "num_envs=6", "policy.hidden=16")
PICTURES = ("task=libero_pictures", "policy=pi0", "algorithm=ppo", "policy.hidden=16")


def planned(options: Sequence[str], run: Sequence[str] = RUN) -> Plan:
    config = compose(TrainConfig, "train", [*run, *options], GROUPS)[0]
    parts = config.task, config.policy, config.algorithm
    return plan(config, *parts, device=config.device, placement=config.placement)


def test_what_fits_is_not_complained_of() -> None:
    found = planned([])
    check(found, "cpu", found.most("cpu")[1], lambda _: pytest.fail("nothing is to be tried"))


def test_options_that_are_told_make_it_fit_and_none_of_them_is_too_much() -> None:
    most = planned([]).most("cpu")[1]
    memory = 0.7 * most
    with pytest.raises(UserError, match=r"RL would take .* of cpu; with .* it would be ") as refused:
        run([*RUN, "plan=true", f"device_gb={memory / 1e9}"])
    told = re.search(r"with (.*) it would be", str(refused.value))[1].split()
    assert planned(told).most("cpu")[1] <= memory
    assert len(told) > 1
    for option in told:
        assert planned([each for each in told if each != option]).most("cpu")[1] > memory


def test_an_option_that_another_makes_needless_is_dropped() -> None:
    savings = {"policy.gradient_checkpointing=true": 100, "control=false": 600}

    def again(options: Sequence[str]) -> Plan:
        return Plan("a run", {"RL": {("rollout", "cpu"): 1000 - sum(savings.get(option, 0) for option in options)}})

    with pytest.raises(UserError, match=r"; with control=false it would be 400 B$"):
        check(again([]), "cpu", 450.0, again)


def test_what_cannot_be_helped_says_so() -> None:
    with pytest.raises(UserError, match=r"still .*; use a smaller model, a larger GPU, or several") as refused:
        run([*RUN, "plan=true", "device_gb=0.001"])
    assert "\n" not in str(refused.value)


@pytest.mark.evidence
@pytest.mark.parametrize("recipe", ["gpu_24gb", "gpu_80gb", "gpus_8"])
def test_recipes_fit_pi0_of_the_published_size_where_they_say(recipe: str, tmp_path, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    save(tmp_path, "lerobot")
    (tmp_path / "model.safetensors").unlink()  # not read
    (tmp_path / "config.json").write_text('{"type": "pi0", "chunk_size": 50}')  # of the published sizes
    read = ["num_envs=64", "task.image_size=224", f"placement={recipe}", f"policy.weights={tmp_path}"]
    config = compose(TrainConfig, "train", [*PICTURES, *read], GROUPS)[0]
    assert (config.device, config.sft.batch) == ("cuda", 32)
    assert config.device_gb == (24 if recipe == "gpu_24gb" else 80)
    found = planned(read, PICTURES)
    assert found.most("cuda")[1] > 10e9
    check(found, "cuda", 1e9 * config.device_gb, lambda _: pytest.fail("nothing is to be tried"))


def test_several_processes_have_their_share_and_parts_of_divided_weights() -> None:
    one = planned(["num_envs=12"], PICTURES).stages["RL"]
    four = ["num_envs=12", "placement=torchrun", "placement.processes=4"]
    whole, divided = (
        planned([*four, f"placement.shard={shard}"], PICTURES).stages["RL"] for shard in ("false", "true")
    )
    for part in ("weights", "gradients", "optimiser"):
        assert whole[part, "cpu"] == one[part, "cpu"]
        assert divided[part, "cpu"] == pytest.approx(one[part, "cpu"] / 4, abs=1)
    assert divided["weights, gathered as they run", "cpu"] == one["weights", "cpu"]
    assert whole["rollout", "cpu"] == one["rollout", "cpu"] / 4
    with pytest.raises(UserError, match="num_envs=7 does not divide among 4 processes"):
        planned(["num_envs=7", "placement=torchrun", "placement.processes=4"])


def test_torchrun_has_to_start_as_many_processes_as_a_recipe_is_for(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UserError, match=r"expected placement\.processes=8, but torchrun has started 2: use --nproc"),
        TorchrunConfig(processes=8).start("cpu"),
    ):
        pass
