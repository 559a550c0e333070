import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embodied.errors import UserError
from embodied.export.network import without_unit
from embodied.saving.resume import check_continues
from sims.mjcf.environment import MjcfEnvironment
from sims.mjcf.task import SHIPPED, MjcfTask, find_mdp
from sims.mjcf.tasks.cartpole import Cartpole
from sims.mjcf.tasks.in_hand import InHand
from sims.mjcf.tasks.lift import Lift
from sims.mjcf.tasks.quadruped import HEIGHT_M, STANCE, Quadruped, gravity, terrain
from sims.mjcf.tasks.reacher import Reacher
from tests.sims.mjcf.test_environment import force, make

OWN = """
from dataclasses import dataclass
from sims.mjcf.tasks.cartpole import Cartpole

@dataclass(frozen=True)
class Mine(Cartpole):
    upright_rad: float = 0.1
"""


def stand(env: MjcfEnvironment) -> torch.Tensor:
    return torch.tensor(STANCE).expand(env.num_envs, env.contract.executed, -1)


def test_a_users_folder_has_models_meshes_and_modules_with_relative_paths(tmp_path: Path, monkeypatch):
    (tmp_path / "helper_of_mine.py").write_text("CAMERA = 'film'\n")
    faces = [(0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3)]
    lines = ["v 0 0 0", "v 1 0 0", "v 0 1 0", "v 0 0 1", *(f"f {a + 1} {b + 1} {c + 1}" for a, b, c in faces)]
    (tmp_path / "solid.obj").write_text("\n".join(lines))
    mesh = '<mesh name="solid" file="solid.obj"/>'
    cartpole = (Path(find_mdp.__code__.co_filename).parent / "tasks" / "cartpole.xml").read_text()
    text = (
        cartpole.replace("</asset>", f"{mesh}</asset>")
        if "</asset>" in cartpole
        else cartpole.replace("<worldbody>", f"<asset>{mesh}</asset><worldbody>")
    )
    (tmp_path / "own.xml").write_text(text)
    for model in ("'own.xml'", repr(text)):
        body = f"    MODEL, CAMERA = {model}, helper_of_mine.CAMERA\n"
        (tmp_path / "own.py").write_text("import helper_of_mine\n" + OWN + body)
        monkeypatch.chdir(tmp_path)
        recorded = MjcfTask(mdp="own.py").recorded()["mdp"]
        monkeypatch.chdir("/")
        assert recorded == str(tmp_path / "own.py")
        assert MjcfTask(mdp=recorded).environment(1, "own", "train").model.nmesh == 1
    # runs that recorded a relative path go on, and those with another task do not
    check_continues({"values": {"task": {"mdp": "own.py"}}}, {"values": {"task": {"mdp": recorded}}}, ())
    with pytest.raises(UserError, match=r"the saved run has task.mdp=other.py"):
        check_continues({"values": {"task": {"mdp": "other.py"}}}, {"values": {"task": {"mdp": recorded}}}, ())
    (tmp_path / "own.xml").unlink()
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text().replace(repr(text), "'own.xml'"))
    with pytest.raises(UserError, match=r"MuJoCo cannot read the model of Mine: .*own\.xml"):
        MjcfTask(mdp=recorded).contract("own")
    (tmp_path / "own.py").unlink()
    with pytest.raises(
        UserError, match=r"there is no task file .*own\.py; if it has moved, use task.mdp=FOLDER/own.py"
    ):
        MjcfTask(mdp=recorded)


def test_a_users_file_is_a_task_with_numbers_of_its_own(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    task = MjcfTask(mdp=str(tmp_path / "mine.py"), numbers={"held_s": 1.0}, step_limit=7)
    env = task.environment(2, "own", "train")
    assert (type(env.mdp).__name__, env.mdp.held_s, env.mdp.upright_rad, env.step_limit) == ("Mine", 1.0, 0.1, 7)
    assert task.contract("own") == env.contract
    with pytest.raises(
        UserError, match=r"unknown task.mdp 'cart'; expected the path of a Python file, or one of cartpole"
    ):
        find_mdp("cart")
    with pytest.raises(UserError, match="unknown number 'mass'"):
        MjcfTask(numbers={"mass": 1.0})


@pytest.mark.parametrize("mdp", SHIPPED)
def test_contracts_have_the_units_that_firmware_needs(mdp: str):
    assert without_unit(MjcfTask(mdp=mdp).contract("own")) == []


def test_the_readmes_task_runs(tmp_path: Path):
    text = (Path(__file__).parents[3] / "sims" / "mjcf" / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 48
    (tmp_path / "my_task.py").write_text(code)
    env = MjcfTask(mdp=str(tmp_path / "my_task.py"), numbers={"near_m": 3.0}, step_limit=2).environment(
        2, "own", "train"
    )
    env.reset()
    env.step(force(env, 5.0))
    ending = env.step(force(env, 5.0))
    assert ending.success.all()
    assert (ending.observation["block"][:, 1] > 0).all()


def test_a_pole_has_to_stay_up_for_as_long_as_the_task_says():
    env = make(Cartpole(held_s=0.2), executed=12, step_limit=12)
    env.reset()
    env.worlds.batch.bind("qpos")[:] = [[0.0, 0.0], [0.0, math.pi]]
    env.worlds.batch.bind("qvel")[:] = 0.0
    ending = env.step(force(env, *[0.0] * 12))
    assert ending.success.tolist() == [True, False]
    assert ending.metrics["held_s"].tolist() == pytest.approx([0.24, 0.0], abs=1e-6)
    assert ending.reward[0].min() > 0.95 > 0.1 > ending.reward[1].max()


def test_a_reacher_sees_where_its_target_is():
    env = make(Reacher())
    seen = env.reset()
    assert ((seen["target"].norm(dim=1) > 0.06) & (seen["target"].norm(dim=1) < 0.22)).all()
    # The upper arm to the left, its elbow straight or bent to the right: 12 and 12 cm; targets at (0.1, 0.05).
    env.worlds.batch.bind("qpos")[:] = [[0.5 * math.pi, 0.0], [0.5 * math.pi, -0.5 * math.pi]]
    env.worlds.batch.bind("qvel")[:] = 0.0
    env.worlds.batch.bind("mocap_pos")[:, 0, :2] = [0.1, 0.05]
    seen = env.step(torch.zeros(2, 1, 2)).observation
    assert torch.allclose(seen["elbow"], torch.tensor([[1.0, 0.0], [0.0, -1.0]]), atol=1e-5)
    assert torch.allclose(seen["target"], torch.tensor([0.05, -0.1]), atol=1e-5)
    assert torch.allclose(seen["error"], torch.tensor([[-0.19, -0.1], [-0.07, 0.02]]), atol=1e-5)


def test_a_gripper_lifts_only_what_it_holds():
    env = make(Lift(place_m=0.0, turn_rad=0.0), executed=25)
    env.reset()
    around, up = [0.0, 1.166, 1.548, 0.427], [0.0, 0.669, 1.679, 0.794]  # of the four joints
    phases = [[(around, 0.04)] * 2, [(around, 0.0), (around, 0.04)], [(up, 0.0), (up, 0.04)]]
    for width in phases:
        chunk = torch.tensor([[*arm, gripper] for arm, gripper in width]).unsqueeze(1).expand(-1, 25, -1)
        ending = env.step(chunk)
    assert ending.success.tolist() == [True, False]
    assert ending.metrics["height_m"].tolist() == pytest.approx([0.175, 0.0], abs=0.01)
    assert ending.observation["touch"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert (ending.reward[0, 5:] > ending.reward[1, 5:] + 3.0).all()


def test_fingers_turn_a_cube_and_turns_are_counted_past_a_side():
    env = make(InHand(turned_rad=2.0), executed=28, step_limit=84)
    env.reset()
    for _ in range(3):  # back, in, forth, out: the first world turns it to the left, the second to the right
        gait = [(0.5, 0.0, 0.3)] * 8 + [(0.5, 0.35, 0.6)] * 6 + [(-0.5, 0.35, 0.6)] * 8 + [(-0.5, 0.0, 0.3)] * 6
        left = torch.tensor(gait).repeat(1, 4)
        right = left * torch.tensor([-1.0, 1.0, 1.0] * 4)
        ending = env.step(torch.stack((left, right)))
    turned = ending.metrics["turned_rad"]
    assert turned[0] > math.pi
    assert turned[1] < -math.pi
    assert ending.success.tolist() == [True, False]
    assert ending.reward.sum(1)[0] > 0.0 > ending.reward.sum(1)[1]


@pytest.mark.parametrize(
    ("name", "values"),
    [("qpos", [0.05, 0.0, 0.026]), ("qpos", [0.0, 0.0, -0.05])],
)
def test_a_cube_beside_or_below_the_palm_has_dropped(name: str, values: list[float]):
    env = make(InHand(), executed=1)
    env.reset()
    env.worlds.batch.bind(name)[0, 12:15] = values
    ending = env.step(torch.zeros(2, 1, 12))
    assert ending.terminated.tolist() == [True, False]
    assert ending.reward[0] < -4.0


def test_gravity_in_the_bases_frame():
    half = math.sqrt(0.5)
    turned = torch.tensor([[1.0, 0, 0, 0], [half, half, 0, 0], [half, 0, half, 0], [half, 0, 0, half]])
    # upright; rolled to its right side down; nose down; turned to the left
    expected = torch.tensor([[0, 0, -1.0], [0, -1.0, 0], [1.0, 0, 0], [0, 0, -1.0]])
    assert torch.allclose(gravity(turned), expected, atol=1e-6)


def test_a_quadruped_stands_in_its_stance_and_falls_when_tilted():
    env = make(Quadruped(), executed=50)
    env.reset()
    after = env.step(stand(env))
    assert not after.done.any()
    assert (after.observation["contact"] == 1).all()
    assert torch.allclose(after.observation["gravity"], torch.tensor([0.0, 0.0, -1.0]), atol=0.05)
    assert (env.now.qpos[:, 2] > HEIGHT_M - 0.05).all()
    env.worlds.batch.bind("qpos")[0, 3:7] = [math.cos(0.6), math.sin(0.6), 0.0, 0.0]
    assert env.step(stand(env)).terminated.tolist() == [True, False]


def test_following_a_command_is_measured_once_it_has_settled():
    env = make(Quadruped(command_s=1.5), executed=100, step_limit=100)
    env.reset()
    env.now.memory["command"][:] = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.5]])
    command = env.now.memory["command"].clone()
    ending = env.step(stand(env))  # of the two seconds, 1 to 1.5 s count, and no other has settled
    assert env.now.memory["errors"][:, 2].tolist() == [25.0, 25.0]
    assert not torch.equal(env.now.memory["command"], command)
    assert ending.success.tolist() == [True, False]
    assert ending.metrics["speed_error_m_s"].tolist() == pytest.approx([0.0, 1.0], abs=0.05)
    assert ending.metrics["turn_error_rad_s"].tolist() == pytest.approx([0.0, 0.5], abs=0.05)


def test_feet_in_the_air_are_timed_and_rewarded_on_landing():
    env = make(Quadruped(), executed=1)
    env.reset()
    env.worlds.batch.bind("qpos")[:, 2] += 0.5
    landed = []
    for _ in range(40):
        env.step(stand(env))
        landed.append(env.now.memory["landed"].max())
    assert min(landed) == 0.0
    assert 0.0 < max(landed) < 4 * 0.6


def test_pushes_come_when_they_should_and_depend_on_the_start():
    calm, pushed = (make(Quadruped(push_m_s=push, push_every_s=0.1), executed=1) for push in (0.0, 0.5))
    again = make(Quadruped(push_m_s=0.5, push_every_s=0.1), 3, executed=1)
    starts = torch.tensor([4, 9])
    calm.reset(starts=starts), pushed.reset(starts=starts), again.reset(starts=torch.tensor([1, 4, 9]))
    for step in range(6):
        left, right = (env.step(stand(env)).observation["linear_velocity"] for env in (calm, pushed))
        there = again.step(stand(again)).observation["linear_velocity"]
        assert torch.equal(right, there[1:])
        assert torch.equal(left, right) == (step < 5)


def test_friction_differs_between_starts_and_is_the_feets():
    env = make(Quadruped(friction_range=0.4), 8)
    env.reset()
    friction = env.worlds.batch.expanded("geom_friction")[..., 0]
    feet = [env.model.geom(f"{leg}_foot").id for leg in ("FL", "FR", "RL", "RR")]
    assert len(set(friction[:, feet[0]].tolist())) == 8
    assert (friction[:, feet] == friction[:, feet[:1]]).all()
    assert ((friction[:, feet] > 0.4) & (friction[:, feet] < 1.2)).all()
    assert (friction[:, env.model.geom("torso").id] == 0.8).all()
    assert (env.model.geom_priority[feet] == 1).all()


def test_rough_ground_is_as_high_as_asked_and_stood_on():
    heights = terrain()
    assert (heights.min(), heights.max()) == (0.0, 1.0)
    assert np.array_equal(heights, terrain())
    env = make(Quadruped(rough_m=0.08), 6, executed=50)
    assert env.model.hfield_size[0, 2] == 0.08
    env.reset()
    after = env.step(stand(env))
    assert not after.terminated.any()
    assert after.observation["contact"].sum(1).min() >= 2
    assert len(set(after.observation["joint_position"][:, 1].tolist())) == 6


def test_a_task_file_finds_modules_and_models_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside_the_task.py").write_text("NAME = 'robot.xml'\n", encoding="utf-8")
    text = (Path(__file__).parents[3] / "sims" / "mjcf" / "README.md").read_text(encoding="utf-8")
    source = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
    model = re.search(r'MODEL = """(.*?)"""', source, re.DOTALL)
    (tmp_path / "robot.xml").write_text(model[1], encoding="utf-8")
    source = source.replace(model[0], "MODEL = NAME").replace(
        "import torch\n", "import torch\nfrom beside_the_task import NAME\n"
    )
    (tmp_path / "my_task.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(Path(__file__).parent)  # neither beside the task nor the clone
    task = MjcfTask(mdp=str(tmp_path / "my_task.py"))
    env = task.environment(2, "own", "train")
    assert env.reset()["block"].shape == (2, 3)


def test_the_cartpoles_reward_is_that_of_its_equation():
    now = SimpleNamespace(
        qpos=torch.tensor([[0.4, 0.3]]), qvel=torch.tensor([[5.0, 2.0]]), action=torch.tensor([[0.5]])
    )
    expected = 0.5 * (1.0 + math.cos(0.3)) * (1.0 - 0.4**2 / 4.0) / (1.0 + 2.0**2 / 10.0) - 0.5**2 / 50.0
    assert Cartpole().reward(now).tolist() == pytest.approx([expected])
