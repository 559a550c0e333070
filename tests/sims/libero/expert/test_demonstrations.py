from pathlib import Path

import pytest
import torch

from sims.libero.assets import STAND_IN
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert import demonstrations
from sims.libero.expert.demonstrations import collect, load
from sims.libero.suite import load_tasks

TASKS = load_tasks("libero_object", [1, 4])


def make(**options):
    return collect(TASKS, **{"episodes": 2, "assets": STAND_IN, "seed": 3, "threads": 1, "progress": False} | options)


@pytest.fixture(scope="module")
def made():
    return make()


def same(first, second):
    tensors = ("actions", "lengths", "task_index", "start")
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in tensors)
    assert (first.observation == second.observation).all()
    assert (first.contract, first.origin) == (second.contract, second.origin)


def test_every_task_has_its_episodes_in_order(made):
    assert made.task_index.tolist() == [0, 0, 1, 1]
    starts = made.start.view(2, 2)
    assert (starts[:, 1] > starts[:, 0]).all()
    assert made.lengths.sum() == len(made.actions) == len(made.observation)
    assert made.origin == {
        "tasks": [task.name for task in TASKS],
        "assets": "stand-in",
        "seed": 3,
        "noise": 0.1,
        "step_limit": 280,
        "failed": [0, 0],
    }


def test_replaying_the_actions_gives_the_observations_and_success_at_the_last_step(made):
    episodes = list(made.episodes())
    for index in (0, 3):
        task = TASKS[made.task_index[index]]
        env = LiberoEnvironment([task], 1, assets=STAND_IN, horizon=1, executed=1, threads=1)
        observation = env.reset(starts=made.start[index : index + 1])
        seen, actions = episodes[index]
        for step, action in enumerate(actions):
            assert (observation[0] == seen[step]).all()
            transition = env.step(action.view(1, 1, 7))
            observation = transition.observation
            assert bool(transition.success) == (step == len(actions) - 1)


def test_the_contract_binds_to_the_environment_they_teach(made):
    env = LiberoEnvironment(TASKS, 2, assets=STAND_IN, threads=1)
    env.contract.bind(made.contract)
    assert made.actions.abs().max() <= 1


def test_a_file_gives_back_the_same(made, tmp_path):
    path = tmp_path / "demonstrations.safetensors"
    made.save(path)
    same(load(path), made)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_they_depend_on_the_seed_alone(made):
    same(make(threads=2), made)
    assert not torch.equal(make(episodes=1, seed=4).start, made.start[::2])


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_or_missing_file_is_one_line(tmp_path, content, made):
    path = tmp_path / "demonstrations.safetensors"
    if content is None:
        made.save(path)
        content = Path(path).read_bytes()[:-1000]
    path.write_bytes(content)
    for broken in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(ValueError, match="cannot read") as caught:
            load(broken)
        assert "\n" not in str(caught.value)


def test_another_kind_of_file_is_refused(tmp_path):
    demonstrations.save_tree(tmp_path / "other.safetensors", {"weights": torch.zeros(3)})
    with pytest.raises(ValueError, match="expected demonstrations"):
        load(tmp_path / "other.safetensors")


def test_a_task_that_the_expert_cannot_do_stops_with_its_name():
    with pytest.raises(ValueError, match="the scripted expert failed in 11 of 11 episodes of pick_up_the_cream_cheese"):
        make(step_limit=5)
    with pytest.raises(ValueError, match="at least one episode"):
        make(episodes=0)
