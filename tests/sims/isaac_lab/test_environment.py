"""Isaac Lab on its Newton backend, in this process; `tests/conformance` runs it in children too."""

import math

import pytest
import torch

import train
from embodied.environment import NumberedStarts, Restorable, SwitchableEnvironment
from embodied.errors import UserError
from sims.isaac_lab.environment import IsaacLabEngine
from sims.isaac_lab.task import IsaacLabTask
from sims.isaac_lab.worlds import Options, contract

ID = "Isaac-Cartpole-Direct"


@pytest.fixture
def make():
    made = []

    def keep(num_envs=4, seed=0, id=ID, executed=1, step_limit=None, overrides=(), survival=False) -> IsaacLabEngine:
        options = Options(id, "own", overrides, executed, step_limit, 1.0, survival)
        made.append(IsaacLabEngine(num_envs, options=options, seed=seed))
        return made[-1]

    yield keep
    for env in made:
        env.close()


def push(env: IsaacLabEngine, share: float = 0.0) -> torch.Tensor:
    return torch.full((env.num_envs, env.contract.executed, 1), share)


def counted(env: IsaacLabEngine, monkeypatch) -> list[list[int]]:
    """The worlds of each later reset by the simulator."""
    calls, reset = [], env.env._reset_idx
    monkeypatch.setattr(env.env, "_reset_idx", lambda ids: (calls.append(ids.tolist()), reset(ids))[1])
    return calls


def test_it_is_what_isaac_lab_says(make):
    env = make()
    assert env.contract.control_dt_s == pytest.approx(1 / 60, abs=1e-8)
    assert env.contract.observation["policy"].shape == (4,)
    assert (env.contract.action.low, env.contract.action.high) == ((-1.0,), (1.0,))
    assert env.step_limit == 300
    with pytest.raises(UserError, match=r"no limits; set task.action_limit"):
        contract(env.env, Options(ID))


def test_physics_is_that_of_a_cart_with_a_pole(make):
    # From rest, 100 N against the drive's damping: a cart of 1 kg, a uniform pole of 1 kg and 2 l = 1 m at angle q.
    # Lagrange: 2 x'' + l q'' cos q - l q'^2 sin q = F - 10 x',  l x'' cos q + (l^2 + 1/12) q'' = g l sin q
    env = make(overrides=["env.initial_cart_velocity_range=[0,0]", "env.initial_pole_velocity_range=[0,0]"])
    x, q, v, w = env.reset()["policy"].double().unbind(1)
    assert (v == 0).all()
    assert (w == 0).all()
    half, parts = 0.5, 2000
    dt = env.contract.control_dt_s / parts
    for _ in range(parts):
        force = 100.0 - 10.0 * v + half * w**2 * q.sin()
        tip = 9.81 * half * q.sin()
        determinant = 2.0 * (half**2 + 1 / 12) - (half * q.cos()) ** 2
        a = ((half**2 + 1 / 12) * force - half * q.cos() * tip) / determinant
        b = (2.0 * tip - half * q.cos() * force) / determinant
        v, w = v + dt * a, w + dt * b
        x, q = x + dt * v, q + dt * w
    seen = env.step(push(env, 1.0)).observation["policy"].double()
    torch.testing.assert_close(seen[:, 2], v, rtol=0.1, atol=0.0)
    torch.testing.assert_close(seen[:, 3], w, rtol=0.1, atol=0.02)


def test_rewards_and_endings_are_the_simulators_own(make):
    env = make(num_envs=8, seed=2)
    env.reset()
    for _ in range(120):  # pushed until the cart leaves, at 3 m
        transition = env.step(push(env, 1.0))
        x, q, v, w = transition.observation["policy"].unbind(1)
        ended = transition.terminated & transition.executed[:, 0]
        angle = torch.atan2(q.sin(), q.cos())
        reward = (torch.where(ended, -2.0, 1.0) - angle**2 - 0.01 * v.abs() - 0.005 * w.abs()) / 60
        ran = transition.executed[:, 0]
        torch.testing.assert_close(transition.reward[ran, 0], reward[ran], atol=1e-5, rtol=1e-4)
        assert (x[ran].abs() > 3.0).tolist() == transition.terminated[ran].tolist()
    assert transition.terminated.all()
    assert (x.abs() > 3.0).all()  # the last observations, not those of the next episodes
    assert not transition.has_success


def test_a_linear_controller_balances_the_pole_for_the_whole_episode(make):
    # Gains of the linear-quadratic regulator of that cart without damping; 32 of 32 in the simulator's own range.
    env = make(num_envs=32, survival=True)
    env.reset()
    env.step(push(env))
    gains = torch.tensor([0.256, 1.711, 0.293, 0.380])  # m, rad, m/s, rad/s
    observation, earned = env.reset()["policy"], torch.zeros(32)
    for _ in range(300):
        transition = env.step((observation @ gains).view(32, 1, 1))
        observation, earned = transition.observation["policy"], earned + transition.reward[:, 0]
    assert transition.success.all()
    assert transition.truncated.all()
    assert (observation[:, 1].abs() < 0.1).all()
    assert (earned > 4.0).all()  # 5 at most
    torch.testing.assert_close(transition.metrics["return"], earned)  # of this episode alone


def test_who_survives_succeeds_where_that_is_asked_for(make):
    env = make(step_limit=80, survival=True)
    env.reset()
    shares = torch.tensor([1.0, -1.0, 0.0, 0.0]).view(4, 1, 1)
    for _ in range(80):  # two carts leave their rail, two lie still below their pole
        transition = env.step(shares)
    assert transition.has_success
    assert transition.terminated.tolist() == [True, True, False, False]
    assert transition.success.tolist() == transition.truncated.tolist() == [False, False, True, True]
    assert (transition.metrics["return"][2:] < 0.0).all()  # which tells that the pole hangs


def test_a_world_that_begins_at_once_takes_the_simulators_own_reset(make, monkeypatch):
    env = make(step_limit=3)
    env.reset()
    calls = counted(env, monkeypatch)
    for _ in range(3):
        ended = env.step(push(env))
    assert ended.truncated.all()
    assert calls == [[0, 1, 2, 3]]
    now = env.env.obs_buf["policy"].clone()
    mask = torch.tensor([True, False, True, False])
    begun = env.reset(mask)["policy"]
    assert calls == [[0, 1, 2, 3]]
    assert torch.equal(begun[mask], now[mask])
    assert torch.equal(begun[~mask], ended.observation["policy"][~mask])
    later = env.step(push(env))
    assert later.executed[:, 0].tolist() == mask.tolist()
    env.reset(~mask)  # which were stepped on meanwhile
    assert calls == [[0, 1, 2, 3], [1, 3]]
    assert env.env.episode_length_buf.tolist() == [1, 0, 1, 0]


def test_an_old_last_observation_is_never_taken_for_a_new_one(make):
    env = make(step_limit=2)
    env.reset()
    env.step(push(env))
    env.step(push(env))
    env.env.cfg.compute_final_obs = False
    env.reset()
    env.step(push(env))
    with pytest.raises(UserError, match="does not give the last observations"):
        env.step(push(env))


@pytest.mark.parametrize("id", [ID, "Isaac-Cartpole"])
def test_a_world_that_blows_up_ends_alone(make, id):
    env = make(id=id)
    env.reset()
    before = env.step(push(env)).observation["policy"]
    robot = env.env.scene["cartpole" if id == ID else "robot"]
    robot.write_joint_velocity_to_sim_index(velocity=torch.full((1, 2), math.nan), env_ids=torch.tensor([1]).int())
    transition = env.step(push(env))
    assert transition.events["diverged"].tolist() == transition.terminated.tolist() == [False, True, False, False]
    assert torch.equal(transition.observation["policy"][1], before[1])
    assert transition.reward.isfinite().all()
    again = env.reset(transition.done)["policy"]
    assert again.isfinite().all()
    assert not env.step(push(env)).done.any()


def test_environments_of_managers_begin_in_parts_too(make):
    env = make(id="Isaac-Cartpole", executed=2, step_limit=3)
    assert env.contract.observation["policy"].shape == (4,)
    env.reset()
    env.step(push(env))
    ended = env.step(push(env))
    assert ended.truncated.all()
    assert ended.executed.tolist() == [[True, False]] * 4
    begun = env.reset(torch.tensor([False, True, False, False]))["policy"]
    others = torch.tensor([0, 2, 3])
    assert torch.equal(begun[others], ended.observation["policy"][others])
    assert not torch.equal(begun[1], ended.observation["policy"][1])
    assert env.step(push(env)).executed.sum(1).tolist() == [0, 2, 0, 0]


def test_an_evaluation_always_begins_alike_and_training_never(make):
    env = make()
    first = env.reset()["policy"]
    begun = {}
    for split in ("eval", "train", "eval", "train"):
        env.switch(ID, split)
        begun.setdefault(split, []).append(env.reset()["policy"][:, :2])
    assert torch.equal(*begun["eval"])
    assert not torch.equal(*begun["train"])
    assert not torch.equal(begun["eval"][0], first[:, :2])


def test_a_process_has_one_environment(make):
    task = IsaacLabTask(assets="own", action_limit=1.0)
    env = task.environment(2, ID, "train")
    with pytest.raises(UserError, match=r"room for one environment of Isaac Lab: close the other one, or use task\.p"):
        make()
    env.close()
    assert make().num_envs == 4


def test_capabilities_are_those_that_it_has():
    env = IsaacLabTask(assets="own", action_limit=1.0).environment(2, ID, "train")
    assert isinstance(env, SwitchableEnvironment)
    assert not isinstance(env, NumberedStarts)
    assert not isinstance(env, Restorable)
    env.close()


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("Isaac-Cartpole-Dirct", "did you mean .*Isaac-Cartpole-Direct"),
        ("Isaac-Ant-Direct", "task.assets=own has a cartpole and no more; Isaac-Ant-Direct needs .*ant"),
    ],
)
def test_what_there_is_not_is_told_on_one_line(make, id, said):
    with pytest.raises(UserError, match=said) as caught:
        make(id=id)
    assert "\n" not in str(caught.value)
    assert make().num_envs == 4  # nothing is left of it


@pytest.mark.parametrize(("where", "survival"), [("", "true"), ("task.processes=1", "false")])
def test_a_run_trains_evaluates_and_says_what_it_cannot_repeat(tmp_path, where, survival):
    options = [f"task.survival={survival}", *([where] if where else [])]
    sizes = ["num_envs=8", "env_steps=256", "evaluation_starts=4", "evaluation_envs=4", "task.step_limit=10"]
    run = tmp_path / "run"
    train.run(["task=isaac_lab_cartpole", f"output={run}", *sizes, *options])
    report = (run / "report.md").read_text()
    assert "no numbered initial states" in report
    assert "cannot be restored" in report
    assert "Stand-in assets" in report
    assert ("success" if survival == "true" else "return") in report
