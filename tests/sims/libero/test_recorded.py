import json
import os
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from embodied.data.episodes import EpisodeWriter, columns
from embodied.errors import UserError
from real_robot.recording.demonstrations import demonstrations
from sims.libero import recorded as recorded_files
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask

pytestmark = pytest.mark.assets
ASSETS = os.environ.get("LIBERO_ASSETS") or "stand-in"
OFFICIAL = pytest.mark.skipif(ASSETS == "stand-in", reason="needs LIBERO's official assets in LIBERO_ASSETS")
ENV_ARGS = {
    "type": 1,
    "env_kwargs": {
        "control_freq": 20,
        "controller_configs": {"type": "OSC_POSE", "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5], "kp": 150},
    },
}


def played(suite, index, starts):
    """Expert's episodes: (states, actions, observations with the last, model_file) of each."""
    task = load_tasks(suite, [index])[0]
    env = LiberoEnvironment(
        [task], len(starts), distribution="official", horizon=1, executed=1, assets=find_assets(ASSETS), threads=1
    )
    observation = env.reset(starts=torch.tensor(starts))
    expert, scene = Expert(env.simulation), env.scenes[0]
    states, actions, seen = ([[] for _ in starts] for _ in range(3))
    running = torch.ones(len(starts), dtype=torch.bool)
    while running.any():
        chosen = torch.from_numpy(expert.act()).float()
        for i in running.nonzero().flatten().tolist():
            data = env.simulation.data[i]
            states[i].append(np.concatenate(([data.time], data.qpos, data.qvel)))
            actions[i].append(chosen[i].numpy().astype(np.float64))
            seen[i].append(observation[i].clone())
        transition = env.step(chosen[:, None])
        observation = transition.observation
        for i in (running & transition.done).nonzero().flatten().tolist():
            assert transition.success[i]
            seen[i].append(observation[i].clone())
        running &= ~transition.done
    models = []
    for model in env.simulation.models:
        bodies = "".join(
            f'<body name="{fixture.name}_main" pos="{" ".join(map(str, model.body_pos[fixture.body]))}"'
            f' quat="{" ".join(map(str, model.body_quat[fixture.body]))}"/>'
            for fixture in scene.fixtures
        )
        models.append(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")
    env.close()
    return task, [(np.stack(s), np.stack(a), o, m) for s, a, o, m in zip(states, actions, seen, models, strict=True)]


def write(folder, task, episodes):
    """A file as LIBERO ships them."""
    path = folder / f"{task.name}_demo.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["bddl_file_name"] = f"libero/libero/bddl_files/{task.suite}/{task.name}.bddl"
        data.attrs["env_args"] = json.dumps(ENV_ARGS)
        data.attrs["problem_info"] = json.dumps({"language_instruction": task.problem.language})
        data.attrs["num_demos"] = len(episodes)
        for number, (states, actions, _, model) in enumerate(episodes):
            demo = data.create_group(f"demo_{number}")
            last = np.arange(len(states)) == len(states) - 1
            demo["states"], demo["actions"], demo["robot_states"] = states, actions, states[:, :9]
            demo["rewards"] = demo["dones"] = last.astype(np.uint8)
            demo["obs/agentview_rgb"] = np.zeros((len(states), 4, 4, 3), np.uint8)
            demo["obs/joint_states"] = states[:, 1:8]
            demo.attrs["model_file"], demo.attrs["num_samples"] = model, len(states)
    return path


@pytest.fixture(scope="module")
def butter():
    return played("libero_object", 6, [0, 3])


def same(episodes, number, recorded):
    """Compares an episode that was read with what was seen when it was played."""
    begin = 0 if number == 0 else int(episodes.ends[number - 1])
    end = int(episodes.ends[number])
    _, actions, seen, _ = recorded
    assert end - begin == len(actions)
    np.testing.assert_array_equal(episodes.actions[begin:end].numpy(), actions.astype(np.float32))
    for key in ("joint_position", "end_effector_position", "object_position", "object_rotation", "gripper_command"):
        expected = torch.stack([row[key] for row in seen])
        got = torch.cat((episodes.observation[key][begin:end], episodes.final_observation[key][number : number + 1]))
        torch.testing.assert_close(
            got[:-1], expected[:-1], atol=1e-6, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
        )
        torch.testing.assert_close(got[-1], expected[-1], atol=5e-3, rtol=0)  # replayed, without the controller's past


def test_what_was_played_is_read_back(butter, tmp_path, monkeypatch):
    task, recorded = butter
    write(tmp_path, task, recorded)
    options = LiberoTask(tasks=["6"], assets=ASSETS)
    episodes = demonstrations(tmp_path, options.contract("wide"), tmp_path / "run", options)
    assert episodes.ends.tolist() == np.cumsum([len(each[1]) for each in recorded]).tolist()
    for number, each in enumerate(recorded):
        same(episodes, number, each)
    assert episodes.success.all()
    assert episodes.reward.sum() == len(recorded)
    again = demonstrations(tmp_path, options.contract("wide"), tmp_path / "run", options)
    for name, values in columns(episodes).items():
        assert torch.equal(values, columns(again)[name]), name
    monkeypatch.setattr(recorded_files, "collect", None)  # another run shares the copy
    other = demonstrations(tmp_path, options.contract("wide"), tmp_path / "other", options)
    for name, values in columns(episodes).items():
        assert torch.equal(values, columns(other)[name]), name
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["demonstrations.json"]
    imitated = demonstrations(tmp_path / "run", options.contract("wide"), tmp_path / "imitating", options)
    assert imitated.ends.tolist() == episodes.ends.tolist()
    with pytest.raises(UserError, match=f"no episodes of .*salad_dressing.* which has: {task.name}"):
        demonstrations(
            tmp_path / "run", options.contract("wide"), tmp_path / "third", LiberoTask(tasks=["2"], assets=ASSETS)
        )
    next(tmp_path.glob("*.hdf5")).unlink()
    with pytest.raises(UserError, match=r"has changed since .*other began"):
        demonstrations(tmp_path, options.contract("wide"), tmp_path / "other", options)


def test_what_follows_the_goal_is_cut_and_what_misses_it_left_out(butter, tmp_path, caplog):
    task, ((states, actions, *rest), other) = butter
    after = np.repeat(np.array([[0, 0, 0, 0, 0, 0, -1.0]]), 5, 0)
    longer = (np.concatenate((states, states[-1:].repeat(5, 0))), np.concatenate((actions, after)), *rest)
    # states that reach the goal early: the last ones again
    final = played_state(task, states, actions)
    longer[0][len(states) :, 1:] = final
    short = tuple(part[:40] if number < 2 else part for number, part in enumerate(other))
    path = write(tmp_path, task, [longer, short])
    options = LiberoTask(tasks=["6"], assets=ASSETS)
    episodes = options.recorded_demonstrations(path, tmp_path / "run")
    assert episodes.ends.tolist() == [len(states)]
    assert "1 recorded episodes do not reach their goal" in caplog.text


def test_omitted_episodes_are_logged_and_counted_by_task(butter, tmp_path, caplog):
    task, (recorded, other) = butter
    again = replace(task, name="another_task")
    short = tuple(part[:5] if number < 2 else part for number, part in enumerate(other))
    paths = [write(tmp_path, task, [recorded]), write(tmp_path, again, [short, recorded])]
    contract = LiberoTask(tasks=["6"], assets=ASSETS).contract("wide")
    with EpisodeWriter(tmp_path / "written", contract) as writer:
        recorded_files.collect(writer, paths, [task, again], find_assets(ASSETS))
    assert writer.origin == {"tasks": [task.name, "another_task"], "left_out": [0, 1]}
    assert "1 recorded episodes do not reach their goal" in caplog.text


def played_state(task, states, actions):
    """qpos and qvel after the last of `actions`."""
    env = LiberoEnvironment([task], 1, horizon=1, executed=1, assets=find_assets(ASSETS), threads=1)
    nq = env.scenes[0].model.nq
    simulation = env.simulation
    simulation.write(0, states[-1, 1 : 1 + nq], states[-1, 1 + nq :])
    simulation.memory["fresh"] = 0.0
    simulation.step([0], actions[None, -1:])
    data = simulation.data[0]
    return np.concatenate((data.qpos, data.qvel))


@OFFICIAL
def test_fixtures_stand_where_they_stood(tmp_path):
    task, recorded = played("libero_goal", 7, [1, 2])
    write(tmp_path, task, recorded)
    options = LiberoTask(suite="libero_goal", tasks=["7"], assets=ASSETS)
    episodes = options.recorded_demonstrations(tmp_path, tmp_path / "run")
    for number, each in enumerate(recorded):
        same(episodes, number, each)


def spoiled(path, kind):
    with h5py.File(path, "a") as file:
        data = file["data"]
        if kind == "no data":
            file.move("data", "other")
        elif kind == "no states":
            del data["demo_0/states"]
        elif kind == "another scene":
            states = data["demo_0/states"][()]
            del data["demo_0/states"]
            data["demo_0/states"] = states[:, :-13]
        elif kind == "nan":
            data["demo_0/actions"][3, 2] = np.nan
        elif kind == "joint actions":
            arguments = json.loads(json.dumps(ENV_ARGS))
            arguments["env_kwargs"]["controller_configs"]["type"] = "JOINT_POSITION"
            data.attrs["env_args"] = json.dumps(arguments)
        elif kind == "no object":
            data.attrs["env_args"] = "[1, 2]"
        elif kind == "a link":
            del data["demo_0/states"]
            data["demo_0/states"] = h5py.ExternalLink("elsewhere.hdf5", "states")
        elif kind == "a file":
            del data["demo_0/states"]
            storage = [("/etc/passwd", 0, 800)]
            data.create_dataset("demo_0/states", (10, 10), np.float64, external=storage)
        elif kind == "huge":
            del data["demo_0/states"]
            data.create_dataset("demo_0/states", (1 << 20, 300), np.float64, chunks=(1 << 10, 300))
        elif kind == "text":
            del data["demo_0/states"]
            data["demo_0/states"] = ["one", "two"]
        elif kind == "unknown task":
            data.attrs["bddl_file_name"] = "bddl_files/libero_object/wash_the_car.bddl"
    if kind == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no data", "is no file of LIBERO: it has no group data with the attribute bddl_file_name"),
        ("no states", "cannot read .*states"),
        ("another scene", r"demo_0: expected states \[T, \d+\] and actions \[T, 7\] of pick_up_the_butter"),
        ("nan", "demo_0: expected finite states and actions"),
        ("joint actions", "expected actions of .*OSC_POSE.* at 20 Hz in env_args, got .*JOINT_POSITION"),
        ("unknown task", "no demonstrations of pick_up_the_butter.*the files are of libero_object/wash_the_car"),
        ("no object", "cannot read LIBERO demonstrations from .* env_args is damaged: AttributeError"),
        ("a link", "cannot read .*states is missing, or is a link to elsewhere"),
        ("a file", "cannot read .*states is stored in another file"),
        ("huge", r"states: expected numbers that take at most 134,217,728 bytes, got float64 \[1048576, 300\]"),
        ("text", "states: expected numbers that take"),
        ("cut", "cannot read .*hdf5"),
    ],
)
def test_a_bad_file_gives_one_line(butter, tmp_path, kind, message):
    task, recorded = butter
    spoiled(write(tmp_path, task, recorded[:1]), kind)
    options = LiberoTask(tasks=["6"], assets=ASSETS)
    with pytest.raises(UserError, match=message) as error:
        options.recorded_demonstrations(tmp_path, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/demonstrations.json").exists()
