"""The storage of a rollout changes no value and leaves no files; every image is stored once."""

import gc
import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract, TensorSpec
from embodied.environments.engine import EpisodeEngine, Outcome
from embodied.policy import Decision
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.storage import Storage
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach

SIDE = 128


class Cameras(EpisodeEngine):
    """Two images of noise; nothing else happens."""

    def __init__(self, num_envs: int, step_limit: int = 5) -> None:
        picture = TensorSpec((SIDE, SIDE, 3), dtype="uint8")
        specs = {"front": picture, "wrist": picture, "state": TensorSpec((2,))}
        super().__init__(Contract(specs, TensorSpec((1,)), 0.1), num_envs, step_limit, task_names=("look",))
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, ids: Tensor, starts: Tensor) -> None: ...

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        executed, none = remaining_steps.unsqueeze(1) > 0, torch.zeros(self.num_envs, dtype=torch.bool)
        return Outcome(executed.float(), executed, none, none)

    def observe(self) -> TensorDict:
        shape = (self.num_envs, SIDE, SIDE, 3)
        front, wrist = (
            torch.randint(256, shape, dtype=torch.uint8, generator=self.generator) for _ in ("front", "wrist")
        )
        return TensorDict({"front": front, "wrist": wrist, "state": torch.zeros(self.num_envs, 2)}, [self.num_envs])


class Still:
    """Commands zeros."""

    def __init__(self, env: EpisodeEngine) -> None:
        self.contract = env.contract

    def act(self, observation, *, deterministic=False, generator=None) -> Decision:
        n = len(observation)
        return Decision(torch.zeros(n, 1, 1), TensorDict({}, [n]), torch.zeros(n, 1, 1))


def tensors(rollout: Rollout) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for field in fields(Rollout):
        value = getattr(rollout, field.name)
        if isinstance(value, TensorDict):
            found |= {f"{field.name} {key}": leaf for key, leaf in value.items(include_nested=True, leaves_only=True)}
        elif isinstance(value, Tensor):
            found[field.name] = value
    return found


def collected(storage: Storage, folder: Path | None = None) -> tuple[Collector, Rollout]:
    torch.manual_seed(0)
    env = Reach(6)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(Reach(6).reset(starts=torch.arange(6)), torch.zeros(1, 1))
    collector = Collector(env, policy, torch.Generator().manual_seed(0), None, storage, folder)
    collector.collect(3)
    return collector, collector.collect(8)


@pytest.mark.parametrize("storage", [Storage.CPU, Storage.DISK])
def test_where_a_rollout_lies_changes_no_number(storage: Storage, tmp_path: Path) -> None:
    (here, first), (there, second) = collected(Storage.DEVICE), collected(storage, tmp_path)
    for _ in range(2):
        expected, found = tensors(first), tensors(second)
        assert {"final_observation position", "observation position", "sample raw", "value"} <= expected.keys()
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert value.dtype == found[name].dtype, name
            assert torch.equal(value, found[name]), name
        learned = []
        for collector, rollout in ((here, first), (there, second)):
            learner = PPOConfig(minibatch=16, critic_warmup=0).build(
                collector.policy, None, collector.env, torch.Generator().manual_seed(1)
            )
            learned.append(learner.update(rollout, 0.0))
        assert learned[0] == learned[1]
        (first, second) = here.collect(4), there.collect(4)


def test_an_earlier_rollout_on_disk_is_not_written_over(tmp_path: Path) -> None:
    collector, first = collected(Storage.DISK, tmp_path)
    kept = {name: value.clone() for name, value in tensors(first).items()}
    collector.collect(8)
    assert all(torch.equal(kept[name], value) for name, value in tensors(first).items())


def mapped(folder: Path) -> int:
    """Mappings of this process to files that are, or were, in `folder`."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_nothing_stays_of_what_lay_on_disk(tmp_path: Path) -> None:
    collector, rollout = collected(Storage.DISK, tmp_path)
    assert not list(tmp_path.iterdir())  # no other process can open it
    opened = len(os.listdir("/proc/self/fd"))
    if Path("/proc/self/maps").exists():
        assert mapped(tmp_path) > 0  # it is on disk
    for _ in range(3):
        rollout = collector.collect(8)
    assert len(os.listdir("/proc/self/fd")) == opened
    del rollout
    gc.collect()
    assert mapped(tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_every_picture_is_held_once() -> None:
    env, decisions = Cameras(4, step_limit=50), 24
    rollout = Collector(env, Still(env), torch.Generator()).collect(decisions)
    held = sum(storage.nbytes() for storage in storages(rollout))
    pictures = 2 * SIDE * SIDE * 3 * env.num_envs
    assert decisions * pictures < held < 1.05 * (decisions + 1) * pictures
    assert held < 0.55 * (2 * decisions * pictures)  # of observations and those that follow
    following = rollout.next_observation()
    assert following["front"].dtype == torch.uint8
    assert torch.equal(following["wrist"][:-1], rollout.observation["wrist"][1:])
    assert torch.equal(following["wrist"][-1], rollout.last_observation["wrist"])


def storages(rollout: Rollout) -> list[torch.UntypedStorage]:
    """Of all its tensors, each once."""
    return list({each.data_ptr(): each for each in (t.untyped_storage() for t in tensors(rollout).values())}.values())


def test_endings_are_held_as_rows_of_their_own() -> None:
    env = Cameras(3, step_limit=2)
    rollout = Collector(env, Still(env), torch.Generator()).collect(7)
    # every episode takes two decisions: the last of them ends where the rollout does not
    assert rollout.final_rows.tolist() == [3 * t + n for t in (1, 3, 5) for n in range(3)]
    following = rollout.next_observation()
    for t in (1, 3, 5):
        assert not torch.equal(following["front"][t], rollout.observation["front"][t + 1])
    for t in (0, 2, 4):
        assert torch.equal(following["front"][t], rollout.observation["front"][t + 1])
    assert len(rollout.final_observation) == 9
