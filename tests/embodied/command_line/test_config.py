"""Options are checked before anything heavy starts, and a resumed run keeps its own."""

import json

import pytest

from embodied.command_line.config import compose
from embodied.errors import UserError
from policies.flow import FlowConfig, Sampler
from policies.generation.chunk_networks import NetworkKind
from sims.backend import Sim
from sims.libero.task import LiberoTask
from train import GROUPS, TrainConfig


def composed(*overrides: str, saved=None):
    return compose(TrainConfig, "train", overrides, GROUPS, saved)


def test_objects_are_typed_and_the_record_is_json():
    config, record = composed("num_envs=12", "policy.sampler=FLOW_NOISE", "task.tasks=[0,3]")
    assert isinstance(config, TrainConfig)
    assert isinstance(config.task, LiberoTask)
    assert isinstance(config.policy, FlowConfig)
    assert (config.num_envs, config.policy.sampler, config.task.tasks) == (12, Sampler.FLOW_NOISE, ["0", "3"])
    assert config.task.name == "libero_pick"
    record = json.loads(json.dumps(record))
    assert record["choices"]["task"] == "libero_pick"
    assert record["values"]["policy"]["sampler"] == "FLOW_NOISE"


@pytest.mark.parametrize(("group", "listed"), [("task", "libero_pick"), ("policy", "flow"), ("algorithm", "ppo")])
def test_an_unknown_name_lists_the_known_ones(group, listed):
    with pytest.raises(ValueError, match=rf"^unknown {group} 'nope'; expected one of .*\b{listed}\b"):
        composed(f"{group}=nope")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_env=3", "unknown option 'num_env'; expected one of num_envs, env_steps"),
        ("policy.wide=3", "unknown option 'policy.wide'; expected one of encoder"),
        ("+more=1", r"expected key=value, got '\+more=1'"),
        ("~task=1", "expected key=value"),
        ("num_envs", "expected key=value, got 'num_envs'"),
        ("num_envs=", "expected key=value, got 'num_envs='"),
        ("num_envs=a", "num_envs: .*'a'.* Integer"),
        ("seed=1.5", "seed: .*Integer"),
        ("seed=null", "seed: .*not Optional"),
        ("video=perhaps", "video: .*bool"),
        ("task.tasks=0", "task.tasks: .*list"),
        ("task.tasks=[0", r"cannot read 'task.tasks=\[0'"),
        ("policy.sampler=loud", "policy.sampler: .*expected one of .*FLOW_SDE"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_is_expected(override, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        composed(override)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "value"), [("1e3", 1000), ("1.05e6", 1_050_000), ("2e0", 2), ("64", 64), ("1_000", 1000)]
)
def test_a_whole_number_may_have_an_exponent(override, value):
    config, record = composed(f"env_steps={override}", "algorithm.learning_rate=1e-3", "wandb='1e3'")
    assert (config.env_steps, config.algorithm.learning_rate, config.wandb) == (value, 1e-3, "1e3")
    assert composed(f"num_envs={override}", saved=record)[0].num_envs == value
    assert composed(f"task.tasks=[0,{override}]")[0].task.tasks == ["0", str(value)]


@pytest.mark.parametrize("choice", ["unet", "UNET", "Unet"])
def test_choices_are_spelled_in_any_case(choice: str):
    config, record = composed("policy=flow", f"policy.network={choice}")
    assert config.policy.network is NetworkKind.UNET
    assert record["values"]["policy"]["network"] == "UNET"
    again, _ = composed("policy.network=dit", "storage=disk", saved=record)
    assert (again.policy.network, again.storage.name) == (NetworkKind.DIT, "DISK")


def test_a_number_that_is_not_whole_is_none_with_an_exponent_either():
    with pytest.raises(UserError, match=r"env_steps: .*1\.05.*Integer"):
        composed("env_steps=1.05e0")


def test_every_reward_weight_is_an_option():
    config, _ = composed("task=quadrotor_hover", "task.reward.weight_action_change=3")
    assert config.task.reward["weight_action_change"] == 3.0
    with pytest.raises(ValueError, match=r"^unknown option 'task\.reward\.weight'; expected one of reward_alive"):
        composed("task=quadrotor_hover", "task.reward.weight=3")


def test_saved_values_win_over_defaults_and_the_command_line_over_both():
    _, saved = composed("num_envs=12", "task.episodes=3", "policy.width=32", "algorithm=ppo", "algorithm.epochs=2")
    saved = json.loads(json.dumps(saved))
    config, record = composed("policy.width=16", "task.tasks=[1]", saved=saved)
    assert (config.num_envs, config.task.episodes, config.algorithm.epochs) == (12, 3, 2)
    assert (config.policy.width, config.task.tasks) == (16, ["1"])
    assert record["choices"] == saved["choices"]
    assert record["values"]["policy"]["width"] == 16


def test_a_saved_run_takes_no_settings_that_are_newer():
    new, saved = composed("task=quadrotor_hover", "algorithm=sac")
    assert new.task.executed == 2
    del saved["values"]["task"]["executed"]  # of a version without this option
    assert composed(saved=saved)[0].task.executed == 1


def test_a_saved_run_keeps_its_parts():
    _, saved = composed("algorithm=ppo")
    assert composed("algorithm=ppo", saved=saved)[1]["choices"]["algorithm"] == "ppo"
    with pytest.raises(ValueError, match="the saved run has algorithm=ppo, got algorithm=self_imitation"):
        composed("algorithm=self_imitation", saved=saved)


def test_a_saved_run_of_an_earlier_version_without_imitation_beside_goes_on():
    config, saved = composed("algorithm=ppo", "algorithm.epochs=2")
    saved["values"]["algorithm"] |= {"bc_coefficient": 0.0, "bc_batch": 256}
    assert composed(saved=saved)[0] == config
    saved["values"]["algorithm"]["bc_coefficient"] = 0.1
    with pytest.raises(ValueError, match=r"another version .*bc_coefficient"):
        composed(saved=saved)


def test_a_configuration_of_another_version_is_one_line():
    _, saved = composed()
    saved["values"]["policy"]["retired"] = 3
    with pytest.raises(ValueError, match=r"saved configuration is of another version .*'policy\.retired'") as caught:
        composed(saved=saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        *("num_envs=0", "env_steps=-1", "checkpoint_every=0", "evaluation_starts=0", "sft.batch=0"),
        *("algorithm.imitation.rollout_length=0", "policy.denoising_steps=0"),
    ],
)
def test_impossible_sizes_are_refused(override):
    with pytest.raises(ValueError, match=f"^{override}: expected a number of at least"):
        composed(override)


def test_every_number_of_a_task_is_an_option_and_is_kept():
    config, record = composed("task=mjcf_cartpole", "task.numbers.held_s=1", "task.sim=mjwarp")
    assert (config.task.numbers, config.task.sim) == ({"held_s": 1.0}, Sim.mjwarp)
    assert composed(saved=record)[0].task.numbers == {"held_s": 1.0}
    for task, known in (("mjcf_cartpole", "upright_rad"), ("vehicle_race", "laps")):
        with pytest.raises(UserError, match=rf"^unknown number 'mass' in task\.numbers; expected one of {known}"):
            composed(f"task={task}", "task.numbers.mass=1")
    with pytest.raises(UserError, match=r"^task\.sim: .*expected one of \[mujoco, mjwarp\]"):
        composed("task=mjcf_cartpole", "task.sim=warp")


@pytest.mark.parametrize(
    ("policy", "task", "algorithm"),
    [
        ("pi0", "libero_pick", "ppo"),
        ("pi0", "libero_pictures", "grpo"),
        ("tokens", "libero_pick", "grpo"),
        ("tokens", "libero_pictures", "ppo"),
    ],
)
def test_published_weights_are_trained_at_the_rates_of_the_field(policy: str, task: str, algorithm: str):
    def rates(*more: str) -> tuple[float, float, int, float]:
        config, _ = composed(f"task={task}", f"policy={policy}", f"algorithm={algorithm}", *more)
        return (
            config.sft.learning_rate,
            config.sft.final_learning_rate,
            config.sft.warmup,
            config.algorithm.learning_rate,
        )

    assert rates("policy.weights=DIR") == (2.5e-5, 2.5e-6, 1000, 5e-6)
    assert rates("policy.weights=DIR", "sft.learning_rate=1e-4", "algorithm.learning_rate=2e-6") == (
        1e-4,
        2.5e-6,
        1000,
        2e-6,
    )
    scratch = rates()
    assert scratch == rates("policy.weights=null")
    assert min(scratch[0], scratch[3]) >= 2e-5
    assert scratch[2] == 0


def test_act_has_rates_of_its_own():
    options = ("task=libero_pictures", "policy=act", "algorithm=self_imitation")
    config, _ = composed(*options)
    assert (config.sft.learning_rate, config.algorithm.sft.learning_rate) == (1e-4, 1e-4)
    config, _ = composed(*options, "policy.weights=DIR")
    assert (config.sft.learning_rate, config.sft.final_learning_rate) == (1e-5, 1e-5)


def test_weights_of_a_policy_without_rates_of_its_own_leave_them():
    plain, _ = composed("policy=diffusion", "algorithm=ppo")
    config, record = composed("policy=diffusion", "algorithm=ppo", "policy.weights=DIR")
    assert config.sft == plain.sft
    assert config.algorithm.learning_rate == plain.algorithm.learning_rate
    assert record["choices"].keys() == GROUPS.keys() - {"offline", "robot"}  # of which none is chosen


def test_a_saved_run_has_its_offline_learner():
    config, record = composed("stages=[offline]", "offline=iql", "offline.expectile=0.8")
    again, _ = compose(TrainConfig, "train", [], GROUPS, record)
    assert again.offline == config.offline
    assert again.offline.expectile == 0.8
    with pytest.raises(UserError, match="has offline=iql, got offline=rebrac"):
        compose(TrainConfig, "train", ["offline=rebrac"], GROUPS, record)


def test_a_saved_run_keeps_its_rates():
    _, record = composed("policy=pi0", "algorithm=ppo", "policy.weights=DIR", "sft.learning_rate=3e-4")
    again, _ = composed("env_steps=9e6", saved=record)
    assert (again.sft.learning_rate, again.sft.warmup, again.algorithm.learning_rate) == (3e-4, 1000, 5e-6)
