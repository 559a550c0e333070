"""Settings of configs/settings: a run takes each section by its names, and the later one wins."""

from collections import Counter
from itertools import product

import pytest
from omegaconf import OmegaConf

from embodied.command_line import combinations
from embodied.command_line.config import compose, names
from embodied.command_line.settings import places, settings, table
from embodied.commands import CONFIGS
from train import GROUPS, TrainConfig


def composed(*overrides: str) -> TrainConfig:
    return compose(TrainConfig, "train", overrides, GROUPS)[0]


def test_a_run_takes_each_section():
    runs = ((task, *pair) for task in names("task", GROUPS) for pair in combinations.valid_pairs(task))
    taken = set()
    for (task, policy, algorithm), placement in product(runs, names("placement", GROUPS)):
        choices = {"task": task, "policy": policy, "algorithm": algorithm, "placement": placement}
        for offline in names("offline", GROUPS):
            taken |= set(places(choices | {"offline": offline, "robot": "simulation"}, published=True))
    sections = {(owner, name) for owner, sections in table().items() for name in sections}
    assert not sections - taken  # of an unknown task, policy or algorithm, or of a combination that no task takes


def test_an_owner_is_in_one_file():
    owners = Counter(owner for path in (CONFIGS / "settings").glob("*.yaml") for owner in OmegaConf.load(path))
    assert set(owners.values()) == {1}
    assert owners.keys() == table().keys()


def test_the_later_section_wins(monkeypatch: pytest.MonkeyPatch):
    sections = [("arm", "flow"), ("arm", "ppo"), ("arm", "flow_ppo"), ("gpu", "flow"), ("published", "flow")]
    numbered: dict[str, dict] = {}
    for number, (owner, name) in enumerate(sections):
        numbered.setdefault(owner, {})[name] = {"seed": number, "sft": {f"of_{number}": number}}
    monkeypatch.setattr("embodied.command_line.settings.table", lambda: numbered)
    choices = {"task": "arm", "policy": "flow", "algorithm": "ppo", "placement": "gpu"}
    assert settings(choices, published=True) == {"seed": 4, "sft": {f"of_{number}": number for number in range(5)}}
    for last in range(3, -1, -1):
        owner, name = sections[last + 1]
        numbered[owner][name] = {}
        assert settings(choices, published=True)["seed"] == last
    assert settings(choices | {"task": "leg", "placement": "cpu"}, published=True) == {}


def test_published_settings_are_for_published_weights():
    choices = {"task": "libero_pick", "policy": "pi0", "algorithm": "ppo", "placement": "local"}
    assert "sft" not in settings(choices, published=False)
    assert settings(choices, published=True).sft.learning_rate == 2.5e-5


def test_settings_win_over_the_task_and_the_command_line_over_both():
    pictures = ["task=libero_pictures", "policy=pi0", "algorithm=ppo"]
    sft = composed(*pictures).sft
    assert (sft.steps, sft.learning_rate) == (3000, 5e-4)  # 6000 in configs/task
    large = [*pictures, "placement=gpu_24gb", "policy.weights=DIR"]
    config = composed(*large, "algorithm.memory_gb=7")
    assert (config.sft.batch, config.sft.learning_rate, config.policy.lora_rank) == (32, 2.5e-5, 16)
    assert (config.algorithm.memory_gb, config.algorithm.gae_lambda) == (7.0, 0.8)


@pytest.mark.parametrize(
    ("task", "hidden", "epochs", "minibatch"),
    [("cartpole", [64, 64], 8, 1024), ("in_hand", [128, 128], 5, 1024), ("quadruped_rough", [128, 128], 4, 1536)],
)
def test_tasks_of_a_family_share_settings(task: str, hidden: list[int], epochs: int, minibatch: int):
    config = composed(f"task=mjcf_{task}")
    assert config.policy.hidden == hidden
    assert (config.algorithm.epochs, config.algorithm.minibatch) == (epochs, minibatch)
    assert config.algorithm.gae_lambda == 0.95
