from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from embodied.environment import OVERFLOW
from embodied.errors import UserError
from sims.backend import Sim
from sims.mjcf.environment import MjcfEnvironment
from sims.mjcf.mdp import Draws, Mdp, Moment, Start, keys
from sims.mjcf.tasks.cartpole import Cartpole
from sims.mjcf.tasks.reacher import Reacher

SLIDER = """<mujoco><option timestep="0.01" gravity="0 0 0"/><worldbody><body name="block">
<joint type="slide" name="x" axis="1 0 0"/><geom name="block" size="0.1" mass="2"/></body></worldbody>
<actuator><motor name="force" joint="x" {range}/></actuator></mujoco>"""


class Slider(Mdp):
    """A mass of 2 kg under a force, whose episodes have friction and mass of their own."""

    MODEL = SLIDER.format(range='ctrllimited="true" ctrlrange="-1 3"')
    INSTRUCTION, SUBSTEPS, STEP_LIMIT, OBSERVED = "slide", 4, 5, {}

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        place = draws.uniform(0.0, 1.0, 1)
        masses = torch.from_numpy(model.body_mass).repeat(len(place), 1)
        masses[:, 1] += torch.arange(len(place))
        return Start({"qpos": place}, {"body_mass": masses}, {"gone_m": 0.0 * place[:, 0]})

    def observe(self, now: Moment) -> dict[str, torch.Tensor]:
        return {"x": now.qpos}

    def update(self, now: Moment) -> dict[str, torch.Tensor]:
        return {"gone_m": now.memory["gone_m"] + now.qvel[:, 0] * now.dt_s}

    def reward(self, now: Moment) -> torch.Tensor:
        return 1.0 + now.action[:, 0] - now.previous[:, 0]

    def terminated(self, now: Moment) -> torch.Tensor:
        return now.qpos[:, 0] > 10.0

    def success(self, now: Moment) -> torch.Tensor:
        return now.memory["gone_m"] > 0.005

    def metrics(self, now: Moment) -> dict[str, torch.Tensor]:
        return dict(now.memory)


def make(mdp: Mdp | None = None, count: int = 2, **options) -> MjcfEnvironment:
    return MjcfEnvironment(count, mdp=mdp or Slider(), threads=1, **options)


def force(env: MjcfEnvironment, *values: float) -> torch.Tensor:
    return torch.tensor(values).view(1, -1, 1).expand(env.num_envs, -1, -1)


def numbers(task: str, split: str, starts: torch.Tensor) -> list[tuple[float, ...]]:
    drawn = Draws(keys(task, split, starts), torch.zeros_like(starts)).uniform(0.0, 1.0, 2)
    return [tuple(row) for row in drawn.tolist()]


def test_the_contract_is_that_of_the_actuators():
    action = make().contract.action
    assert (action.names, action.low, action.high) == (("force",), (-1.0,), (3.0,))
    assert make().contract.control_dt_s == 0.04
    free = Slider()
    object.__setattr__(free, "MODEL", SLIDER.format(range=""))
    with pytest.raises(UserError, match="actuator force has no ctrlrange"):
        make(free)


def test_worlds_move_as_mujocos_own_loop_with_their_own_masses():
    env = make(executed=2)
    place = env.reset(starts=torch.tensor([3, 4]))["x"].double()
    env.step(force(env, 2.0, 9.0))  # the second is clipped to 3 N
    model = env.mdp.load()
    for row in range(2):
        model.body_mass[1] = 2.0 + row
        data = mujoco.MjData(model)
        mujoco.mj_setConst(model, data)
        data.qpos[0] = place[row, 0]
        for control in (2.0, 3.0):
            data.ctrl[0] = control
            mujoco.mj_step(model, data, 4)
        assert env.now.qpos[row, 0] == pytest.approx(data.qpos[0], abs=1e-7)  # the start is told in single precision
        assert env.now.qvel[row, 0] == pytest.approx(data.qvel[0], abs=1e-12)


def test_rewards_see_the_last_two_actions_in_half_ranges():
    env = make(executed=3)
    env.reset()
    assert env.step(force(env, 3.0, 1.0, -1.0)).reward[0].tolist() == [2.0, 0.0, 0.0]
    assert env.step(force(env, -1.0, -1.0, -1.0)).reward[0].tolist() == [1.0, 1.0, 0.0]  # five steps an episode


class Finishing(Slider):
    """A slider that is finished after its second control step."""

    def finished(self, now: Moment) -> torch.Tensor:
        return now.steps >= 2


def test_a_finished_task_truncates_its_episode_which_then_executes_no_more():
    env = make(Finishing(), executed=3)
    env.reset()
    transition = env.step(force(env, 3.0, 3.0, 3.0))
    assert transition.executed.tolist() == [[True, True, False]] * 2
    assert (transition.truncated.tolist(), transition.terminated.tolist()) == ([True, True], [False, False])
    assert transition.success.tolist() == (env.now.memory["gone_m"] > 0.005).tolist() == [True, False]


def test_success_counts_at_the_end_alone():
    env = make(executed=3)
    env.reset()
    assert not env.step(force(env, 3.0, 3.0, 3.0)).success.any()
    ending = env.step(force(env, 3.0, 3.0, 3.0))
    assert ending.truncated.all()
    assert ending.success.all()
    env.reset()
    for _ in range(2):
        ending = env.step(force(env, 0.0, 0.0, 0.0))
    assert not ending.success.any()


def test_who_falls_has_terminated_and_freezes_with_what_it_remembers():
    env = make(executed=2)
    env.reset()
    env.worlds.batch.bind("qpos")[0] = 11.0
    ended = env.step(force(env, 3.0, 3.0))
    assert ended.terminated.tolist() == [True, False]
    assert ended.executed.tolist() == [[True, False], [True, True]]
    later = env.step(force(env, 3.0, 3.0))
    assert later.metrics["gone_m"][0] == ended.metrics["gone_m"][0]
    assert later.metrics["gone_m"][1] > ended.metrics["gone_m"][1]


@pytest.mark.parametrize("value", [1e30, np.nan])
def test_broken_numbers_end_an_episode_and_leave_none_behind(value: float):
    env = make()
    env.reset()
    env.worlds.batch.bind("qvel")[1] = value
    ended = env.step(force(env, 1.0))
    assert ended.events["diverged"].tolist() == ended.terminated.tolist() == [False, True]
    assert ended.reward.tolist() == [[1.0], [0.0]]
    assert ended.observation["x"].isfinite().all()
    assert env.now.qvel[1, 0] == 0.0
    assert not env.step(force(env, 1.0)).executed[1].any()


def test_starts_depend_on_task_split_and_number_alone():
    starts = torch.tensor([0, 1, 1 << 40])
    seen = {
        (task, split, int(start)): numbers(task, split, start.view(1))[0]
        for task in ("a", "b")
        for split in ("train", "eval")
        for start in starts
    }
    assert len(set(seen.values())) == 12
    assert numbers("a", "train", starts) == [seen["a", "train", int(start)] for start in starts]


def test_draws_of_a_step_go_on_and_differ_by_stream_and_step():
    env = make()
    env.reset()
    here = env.now.draws()
    numbers = [here.uniform(0, 1, 1), here.uniform(0, 1, 1), env.now.draws(1).uniform(0, 1, 1)]
    env.step(force(env, 1.0))
    numbers.append(env.now.draws().uniform(0, 1, 1))
    assert len(set(torch.cat(numbers, 1)[0].tolist())) == 4


def test_threads_change_nothing():
    one, two = make(Cartpole(), 5), MjcfEnvironment(5, mdp=Cartpole(), threads=2)
    for env in (one, two):
        env.reset()
        for _ in range(3):
            last = env.step(force(env, 4.0))
        env.last = last
    assert torch.equal(one.now.qpos, two.now.qpos)


def test_what_is_not_read_says_how_to_read_it():
    env = make()
    with pytest.raises(AttributeError, match="READS"):
        env.now.xpos  # noqa: B018

    class Misread(Slider):
        READS = ("xposs",)

    with pytest.raises(UserError, match="xposs"):
        make(Misread())


@pytest.mark.parametrize("mdp", [Cartpole(), Reacher()])
def test_mujoco_warp_moves_like_mujoco(mdp: Mdp):
    # Ten control steps in single precision: 1e-4 of every unit. Numbers that a start does not name are the same, too.
    exact, single = make(mdp, 3), MjcfEnvironment(3, mdp=mdp, sim=Sim.mjwarp)
    assert torch.allclose(exact.reset()["velocity"], single.reset()["velocity"], atol=1e-6)
    high = torch.tensor(exact.contract.action.high)
    for step in range(10):
        action = (0.5 if step % 4 else -0.5) * high.expand(3, 1, -1)
        left, right = exact.step(action), single.step(action)
        if step == 4:
            mask = torch.tensor([False, True, False])
            left.observation, right.observation = exact.reset(mask), single.reset(mask)
        for name, values in left.observation.items():
            assert torch.allclose(values, right.observation[name], atol=1e-4), (step, name)
        assert torch.allclose(left.reward, right.reward, atol=1e-4)


def boxes(count: int, **fields: object) -> Mdp:
    """Boxes that fall from 1 mm above the floor, and a block on a rail."""
    floor = "".join(
        f'<body pos="{0.3 * (i % 8)} {0.3 * (i // 8)} 0.101"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>'
        for i in range(count)
    )
    model = SLIDER.format(range='ctrllimited="true" ctrlrange="-1 3"').replace(' gravity="0 0 0"', "")
    model = model.replace("<worldbody>", f'<worldbody><geom type="plane" pos="0 0 0" size="9 9 1"/>{floor}')

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        return Start({"qpos": torch.from_numpy(model.qpos0).repeat(draws._key.shape[1], 1)})

    own = {"MODEL": model.replace('name="block">', 'name="block" pos="0 0 5">', 1), "reset": reset, "STEP_LIMIT": 20}
    empty = {name: lambda self, now: {} for name in ("update", "metrics", "failures")}
    own |= empty | {"success": lambda self, now: now.steps < 0, "terminated": lambda self, now: now.steps < 0}
    return type("Boxes", (Slider,), own | fields)()


def test_mujoco_warp_has_room_for_the_contacts_of_many_bodies():
    """Its own default is 48 contacts a world: 36 of 40 boxes fell through the floor."""
    env = MjcfEnvironment(2, mdp=boxes(40), sim=Sim.mjwarp)
    env.reset()
    for _ in range(3):  # 12 physics steps
        transition = env.step(force(env, 0.0))
    assert not transition.events["diverged"].any()
    height = env.now.qpos[:, :280].view(2, 40, 7)[..., 2]
    assert height.min() > 0.099
    assert height.max() < 0.1011


def test_a_world_without_room_for_its_contacts_ends_as_diverged_and_says_why(caplog):
    env = MjcfEnvironment(2, mdp=boxes(40, CONTACTS=40), sim=Sim.mjwarp)
    env.reset()
    transition = env.step(force(env, 0.0))
    assert transition.events["diverged"].all()
    assert transition.terminated.all()
    assert transition.failures[OVERFLOW].all()
    assert OVERFLOW in caplog.text
    assert env.now.qpos.isfinite().all()


def test_models_of_tasks_lie_beside_them():
    for mdp in (Cartpole(), Reacher()):
        assert isinstance(mdp.MODEL, Path)
        assert mdp.MODEL.with_suffix(".py").is_file()
        assert mdp.load().camera(mdp.CAMERA) is not None
