"""ManiSkill's tasks: what is told of them, true endings, numbered starts, demonstrations, errors in one line."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from embodied.data.episodes import EpisodeWriter, read
from embodied.environment import NumberedStarts, Restorable
from embodied.errors import UserError
from sims.maniskill import vulkan
from sims.maniskill.contract import describe, flat
from sims.maniskill.demonstrations import collect
from sims.maniskill.environment import BatchedManiSkillEnvironment, ManiSkillEnvironment, seed_of
from sims.maniskill.task import ManiSkillTask
from sims.maniskill.worlds import Options

if find_spec("mani_skill") is None:  # importing it here would be too early: see sims/maniskill/vulkan.py
    pytest.skip("needs the extra maniskill", allow_module_level=True)
PUSH, PICK = Options("PushCube-v1"), Options("PickCube-v1")
PRIVATE = {"obj_pose", "tcp_to_obj_pos", "obj_to_goal_pos"}


@pytest.fixture(scope="module")
def push() -> ManiSkillEnvironment:
    env = ManiSkillEnvironment(2, options=PUSH)
    yield env
    env.close()


@pytest.fixture(scope="module")
def pick() -> ManiSkillEnvironment:
    env = ManiSkillEnvironment(1, options=PICK, executed=2)
    yield env
    env.close()


def chunk(env: ManiSkillEnvironment, **named: float) -> torch.Tensor:
    """The same action for all, of the elements `named` and zero elsewhere."""
    action = torch.zeros(env.num_envs, env.contract.executed, *env.contract.action.shape)
    for name, value in named.items():
        action[..., env.contract.action.names.index(name)] = value
    return action


def test_elements_have_names_units_and_frames(pick):
    action, seen = pick.contract.action, pick.contract.observation
    assert action.names == ("x", "y", "z", "rotation_x", "rotation_y", "rotation_z", "gripper")
    assert action.low == pytest.approx((-0.1,) * 6 + (-0.01,))
    assert action.high == pytest.approx((0.1,) * 6 + (0.04,))
    assert action.frame == "base"
    assert action.unit.startswith("m (x, y, z); rad")
    assert seen["qpos"].names[-2:] == ("panda_finger_joint1", "panda_finger_joint2")
    assert seen["qpos"].unit.endswith("m (panda_finger_joint1, panda_finger_joint2)")
    assert seen["obj_pose"].names == ("x", "y", "z", "qw", "qx", "qy", "qz")
    assert seen["goal_pos"].frame == seen["obj_pose"].frame == "world"
    assert not any(spec.privileged for spec in seen.values())  # without pictures a policy reads poses
    assert pick.contract.control_dt_s == pytest.approx(0.05)
    assert pick.step_limit == 50


@pytest.mark.parametrize(("element", "index", "sign"), [("x", 0, 1), ("y", 1, 1), ("z", 2, 1), ("rotation_z", None, 1)])
def test_actions_move_the_tool_as_their_names_say(push, element, index, sign):
    # The library turns the tool the other way round than its action says.
    from mani_skill.utils.geometry.rotation_conversions import matrix_to_euler_angles, quaternion_to_matrix

    before = push.reset(starts=torch.tensor([3, 4]))["tcp_pose"]
    for _ in range(4):
        after = push.step(chunk(push, **{element: 0.05})).observation["tcp_pose"]
    if index is None:
        turn = quaternion_to_matrix(after[:, 3:]) @ quaternion_to_matrix(before[:, 3:]).transpose(1, 2)
        moved = matrix_to_euler_angles(turn, "XYZ")
        assert (moved[:, 2] > 0.05).all()
        assert (moved[:, :2].abs() < 0.02).all()
    else:
        moved = after[:, :3] - before[:, :3]
        assert (moved[:, index] * sign > 0.03).all()
        assert (moved.abs().sum(1) - moved[:, index].abs() < 0.02).all()


def test_a_step_is_the_librarys_own(push):
    push.reset(starts=torch.tensor([0, 1]))
    ours = push.step(chunk(push, x=0.1, gripper=0.04))
    world = PUSH.make()
    world.reset(seed=seed_of(1, "train"))
    observation, reward, _, _, _ = world.step(torch.tensor([[1.0, 0, 0, 0, 0, 0, 1.0]]))
    for name, values in flat(observation):
        torch.testing.assert_close(ours.observation[name][1:], values, rtol=0, atol=1e-6)
    assert float(ours.reward[1, 0]) == pytest.approx(float(reward), abs=1e-6)
    world.close()


def test_splits_share_no_start_and_seeds_are_the_librarys():
    train, evaluation = ({seed_of(start, split) for start in range(500)} for split in ("train", "eval"))
    assert not train & evaluation
    assert len(train) == len(evaluation) == 500
    assert 0 <= min(train | evaluation) <= max(train | evaluation) < 1 << 32


def test_a_start_forgets_the_episode_before(pick):
    # What touches what is known from the last step alone: the cube of the last episode was held at its end.
    first = pick.reset(starts=torch.tensor([11])).clone()
    lift(pick)
    again = pick.reset(starts=torch.tensor([11]))
    for name in first.keys():  # noqa: SIM118
        assert torch.equal(first[name], again[name]), name
    assert not bool(again["is_grasped"])


def lift(env: ManiSkillEnvironment) -> None:
    """Grasp the cube, and hold it."""
    for step in range(20):
        observation = env.observe()
        error = observation["tcp_to_obj_pos"][0]
        action = dict(zip("xyz", error.clamp(-0.1, 0.1).tolist(), strict=True))
        transition = env.step(chunk(env, **action, gripper=0.04 if step < 14 else -0.01))
    assert bool(transition.observation["is_grasped"])


def test_success_ends_an_episode_with_what_is_true_then(tmp_path: Path):
    env = ManiSkillEnvironment(1, options=PICK, step_limit=100)
    with EpisodeWriter(tmp_path / "shown", env.contract) as writer:
        collect(writer, env, 2, 0.0, torch.Generator())
    shown, contract, _ = read(tmp_path / "shown")
    assert contract == env.contract
    assert shown.success.all()
    assert not shown.terminated.any()  # a dense reward would have gone on
    last = shown.final_observation
    assert (last["obj_to_goal_pos"].norm(dim=1) <= 0.025).all()
    assert float(shown.reward[shown.ends - 1].min()) == 1.0
    assert not torch.equal(last["obj_pose"][0], env.reset()["obj_pose"][0])
    assert (shown.ends.diff(prepend=torch.zeros(1, dtype=torch.int64)) < 60).all()
    # In chunks, the episode ends in the middle of the last one.
    length = int(shown.ends[0])
    options = Options("PickCube-v1", reward="sparse")
    replayed = ManiSkillEnvironment(1, options=options, step_limit=100, executed=length + 5)
    replayed.reset(starts=torch.tensor([0]))
    chunk_of_all = torch.cat((shown.actions[:length], shown.actions[length - 1 :][:1].expand(5, -1)))
    transition = replayed.step(chunk_of_all.unsqueeze(0))
    assert int(transition.executed.sum()) == length
    assert bool(transition.terminated)
    assert bool(transition.success)
    assert float(transition.reward.sum()) == 1.0
    for each in (env, replayed):
        each.close()


def test_episodes_that_fail_are_not_shown(tmp_path: Path):
    env = ManiSkillEnvironment(1, options=PUSH, step_limit=3)
    with pytest.raises(UserError, match="0 of 5 episodes succeeded"):  # noqa: SIM117
        with EpisodeWriter(tmp_path / "shown", env.contract) as writer:
            collect(writer, env, 1, 0.0, torch.Generator())
    assert not (tmp_path / "shown").exists()
    env.close()


def test_poses_of_objects_are_privileged_beside_pictures(monkeypatch):
    # What the library tells beside pictures, of a scene that nobody sees.
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    world = PICK.make()
    world._obs_mode, world.obs_mode_struct = "state_dict+rgb", parse_obs_mode_to_struct("state_dict+rgb")
    monkeypatch.setattr(world, "get_sensor_params", dict)
    monkeypatch.setattr(world, "_get_obs_sensor_data", lambda *_: {})
    contract, _ = describe(world)
    assert {name for name, spec in contract.observation.items() if spec.privileged} == PRIVATE
    assert world._obs_mode == "state_dict+rgb"
    world.close()


@pytest.mark.parametrize("task", ["StackCube-v1", "PegInsertionSide-v1"])
def test_other_tasks_run(task):
    env = ManiSkillEnvironment(1, options=Options(task))
    first = env.reset(starts=torch.tensor([5]))
    transition = env.step(chunk(env, z=0.05))
    assert bool(transition.executed.all())
    assert torch.equal(env.reset(starts=torch.tensor([5]))["qpos"], first["qpos"])
    env.close()


def test_other_control_modes_are_named_by_their_joints():
    env = ManiSkillEnvironment(1, options=Options("PushCube-v1", control_mode="pd_joint_delta_pos"))
    assert env.contract.action.names == (*(f"panda_joint{number}" for number in range(1, 8)), "gripper")
    before = env.reset()["qpos"]
    after = env.step(chunk(env, panda_joint1=0.1)).observation["qpos"]
    assert float(after[0, 0] - before[0, 0]) > 0.01
    env.close()


def test_a_scene_of_many_worlds_does_as_single_ones():
    # As near as a CPU comes: a batched scene of one world, through the same calls as on a GPU.
    env = BatchedManiSkillEnvironment(1, options=PUSH, device="cpu", executed=2, step_limit=3)
    single = ManiSkillEnvironment(1, options=PUSH, executed=2, step_limit=3)
    for start in (7, 8, 7):
        first, same = (each.reset(starts=torch.tensor([start])) for each in (env, single))
        for name in first.keys():  # noqa: SIM118
            torch.testing.assert_close(first[name], same[name], rtol=0, atol=1e-6)
    ours, theirs = (each.step(chunk(each, x=0.1)) for each in (env, single))
    torch.testing.assert_close(ours.reward, theirs.reward, rtol=0, atol=1e-5)
    ended = env.step(chunk(env, x=0.1))
    assert ended.executed.tolist() == [[True, False]]
    assert bool(ended.truncated)
    later = env.step(chunk(env, x=0.1))
    assert not later.executed.any()
    assert torch.equal(later.observation["tcp_pose"], ended.observation["tcp_pose"])
    assert env.num_starts == 1024
    for each in (env, single):
        each.close()


def test_it_claims_no_more_than_it_can(push):
    # The order of PhysX's contacts depends on what ran before: states continue, but not to the last bit.
    assert isinstance(push, NumberedStarts)
    assert not isinstance(push, Restorable)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "PickTea-v1"}, "unknown task.id 'PickTea-v1'; expected one of .*PickCube-v1"),
        ({"control_mode": "telepathy"}, "control_mode=telepathy.*pd_ee_delta_pose"),
        ({"id": "TwoRobotPickCube-v1", "control_mode": None}, "several"),
        ({"id": "PickSingleYCB-v1"}, "download_asset PickSingleYCB-v1"),
    ],
)
def test_what_there_is_not_is_one_line(options, message):
    with pytest.raises(UserError, match=message) as caught:
        ManiSkillTask(**options).contract("initial_states")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "love"}, "normalized_dense, dense, sparse"),
        ({"images": 0}, "images=0: expected a number of at least 1 and of at most 4096"),
        ({"executed": 0}, "executed=0"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_made(options, message):
    with pytest.raises(UserError, match=message):
        ManiSkillTask(**options)


def test_cameras_without_vulkan_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("sims.maniskill.vulkan.has_vulkan", lambda: False)
    with pytest.raises(UserError, match=r"task\.images needs Vulkan") as caught:
        ManiSkillTask(images=64).contract("initial_states")
    assert "\n" not in str(caught.value)


def test_without_demonstrations_a_task_is_learned_from_scratch(tmp_path: Path):
    assert ManiSkillTask().demonstrations(tmp_path, 0) is None
    with pytest.raises(UserError, match=r"no demonstrations.*PickCube-v1"):
        ManiSkillTask(id="PokeCube-v1", episodes=1).demonstrations(tmp_path, 0)
    with pytest.raises(UserError, match=r"control_mode=pd_ee_delta_pose\|pd_ee_delta_pos"):
        ManiSkillTask(control_mode="pd_joint_pos", episodes=1).demonstrations(tmp_path, 0)


@pytest.mark.skipif(not vulkan.has_vulkan(), reason="no Vulkan device")
def test_pictures_come_with_privileged_poses():
    env = ManiSkillEnvironment(1, options=Options("PickCube-v1", images=32))
    seen = env.reset()
    spec = env.contract.observation["base_camera_rgb"]
    assert spec.is_picture
    assert spec.camera == "base_camera"
    assert spec.frame == "world"
    assert seen["base_camera_rgb"].float().std() > 5
    private = {name for name, each in env.contract.observation.items() if each.privileged}
    assert private == PRIVATE
    env.close()
