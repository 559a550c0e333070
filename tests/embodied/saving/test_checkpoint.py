"""Work is never lost: a kill while saving, a full disk, a damaged file, the wrong task."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from embodied.contract import Contract, TensorSpec
from embodied.errors import DivergedError
from embodied.saving import checkpoint as checkpoints
from embodied.saving import sealed, sharding
from embodied.saving.checkpoint import Checkpoint, load, save
from embodied.saving.tree import save_tree


def contract(**changes) -> Contract:
    action = TensorSpec((2,), unit="m", frame="world", names=("x", "y"), low=(-1.0, -1.0), high=(1.0, 1.0))
    base = Contract({"position": TensorSpec((2,), unit="m", frame="world", names=("x", "y"))}, action, 0.05, 8, 4)
    return dataclasses.replace(base, **changes)


def example(value: float = 1.0) -> Checkpoint:
    return Checkpoint(
        policy={"layer.weight": torch.full((3, 2), value), "layer.bias": torch.full((3,), value)},
        contract=contract(),
        config={"seed": 3, "policy": {"width": 64}},
        counters={"env_steps": value},
        state={"values": torch.full((100,), value)},
    )


def test_everything_comes_back(tmp_path):
    path = save(tmp_path, example())
    for place in (tmp_path, tmp_path / "checkpoint", path):
        back = load(place)
        assert back.path == path
        assert (back.contract, back.config, back.counters) == (contract(), example().config, {"env_steps": 1.0})
        assert torch.equal(back.policy["layer.weight"], torch.ones(3, 2))
        assert torch.equal(back.state["values"], torch.ones(100))


def test_weights_are_readable_by_any_program(tmp_path):
    assert sorted(load_file(save(tmp_path, example()) / "policy.safetensors")) == ["layer.bias", "layer.weight"]


def test_the_newest_counts_and_the_one_before_is_kept(tmp_path):
    for value in range(4):
        save(tmp_path, example(value))
    assert load(tmp_path).counters == {"env_steps": 3}
    assert [child.name for child in sorted((tmp_path / "checkpoint").iterdir())] == ["000003", "000004"]
    assert load(tmp_path / "checkpoint" / "000003").counters == {"env_steps": 2}


def test_training_continues_bit_for_bit(tmp_path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 1)
        return model, torch.optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}])

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    model, optimizer = make()
    train(model, optimizer)
    state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    save(tmp_path, Checkpoint(model.state_dict(), contract(), state=state))
    train(model, optimizer)

    resumed, resumed_optimizer = make()
    back = load(tmp_path)
    resumed.load_state_dict(back.policy)
    resumed_optimizer.load_state_dict(back.state["optimizer"])
    torch.set_rng_state(back.state["rng"])
    train(resumed, resumed_optimizer)
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(resumed.bias, model.bias)


@pytest.mark.parametrize("failing", ["replace", "mkdir", "fsync"])
def test_a_failed_save_leaves_the_previous_checkpoint_and_no_litter(failing, tmp_path, monkeypatch):
    save(tmp_path, example(1))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, example(2))
    assert load(tmp_path).counters == {"env_steps": 1}
    assert [child.name for child in (tmp_path / "checkpoint").iterdir()] == ["000001"]


def save_again_and_again(folder, saved):
    for value in itertools.count(1):
        save(folder, example(value))
        saved.send(value)


def test_kill_9_while_saving_loses_nothing(tmp_path):
    forks = multiprocessing.get_context("fork")
    for pause in (0.0, 0.002, 0.005):
        saved, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=save_again_and_again, args=(tmp_path, sender))
        process.start()
        sender.close()
        reported = [saved.recv() for _ in range(3)]
        time.sleep(pause)
        process.kill()
        process.join()
        back = load(tmp_path)
        assert back.counters["env_steps"] >= reported[-1]
        assert back.state["values"].unique().tolist() == [back.counters["env_steps"]]
        assert back.policy["layer.bias"].unique().tolist() == [back.counters["env_steps"]]
    save(tmp_path, example())
    assert len(list((tmp_path / "checkpoint").iterdir())) == checkpoints.KEEP


@pytest.mark.parametrize("file", ["policy.safetensors", "state.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", None])
def test_a_damaged_checkpoint_is_one_line_that_names_another(file, damage, tmp_path):
    previous, newest = save(tmp_path, example(1)), save(tmp_path, example(2))
    broken = newest / file
    if damage:
        broken.write_bytes(damage(broken.read_bytes()))
    else:
        broken.unlink()
    with pytest.raises(ValueError, match=r"cannot be read|no checkpoint") as error:
        load(newest if file == "checkpoint.json" else tmp_path)
    assert "\n" not in str(error.value)
    if file != "checkpoint.json":
        assert str(previous) in str(error.value)
    assert load(previous).counters == {"env_steps": 1}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("file", ["policy.safetensors", "state.safetensors", "checkpoint.json"])
def test_a_flipped_bit_anywhere_is_one_line_that_names_the_file_and_a_checkpoint_that_loads(file, tmp_path):
    save(tmp_path, example(1))
    damaged = save(tmp_path, example(2)) / file
    whole = damaged.read_bytes()
    for bit in random.Random(file).sample(range(8 * len(whole)), 100):
        damaged.write_bytes(flipped(whole, bit))
        with pytest.raises(ValueError, match=f"{file} is damaged") as error:
            load(tmp_path)
        assert "\n" not in str(error.value), bit
        assert load(str(error.value).rpartition("; use ")[2]).counters == {"env_steps": 1}, bit
    damaged.write_bytes(whole)
    assert load(tmp_path).counters == {"env_steps": 2}


def test_only_a_checkpoint_that_loads_is_recommended(tmp_path):
    previous, newest = save(tmp_path, example(1)), save(tmp_path, example(2))
    for directory in (previous, newest):
        (directory / "state.safetensors").write_bytes(flipped((directory / "state.safetensors").read_bytes(), 800))
    with pytest.raises(ValueError, match="no other checkpoint of this run can be read: train again"):
        load(tmp_path)


def test_files_of_two_checkpoints_are_not_mixed(tmp_path):
    previous, newest = save(tmp_path, example(1)), save(tmp_path, example(2))
    (newest / "policy.safetensors").write_bytes((previous / "policy.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"policy\.safetensors is damaged"):
        load(tmp_path)


def test_a_checkpoint_without_checksums_is_recognised(tmp_path):
    directory = save(tmp_path, example())
    record = json.loads((directory / "checkpoint.json").read_text())
    earlier = {name: value for name, value in record.items() if name not in ("files", "sha256")} | {"format": 1}
    (directory / "checkpoint.json").write_text(json.dumps(earlier, indent=2) + "\n")
    for read in (load, checkpoints.load_contract):
        with pytest.raises(ValueError, match=r"written by an earlier version, without checksums.*train again") as error:
            read(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layer.weight", float("nan"), "infinity or not a number in layer.weight"),
        ("layer.weight", -float("inf"), "infinity or not a number in layer.weight"),
        ("layer.bias", -4.86e37, "layer.bias reaches 4.86e\\+37, expected at most 1e\\+06"),
        ("action_std", 0.0, "action_std is a standard deviation of 0, expected more than 0"),
        ("normaliser.std", -1.0, "normaliser.std is a standard deviation of -1"),
    ],
)
def test_weights_of_no_policy_are_refused_on_one_line(name, value, message, tmp_path):
    previous, newest = save(tmp_path, example(1)), save(tmp_path, example(2))
    broken = {**example(2).policy, name: torch.tensor([1.0, value])}
    with pytest.raises(DivergedError, match=f"diverged and is not saved: {message}"):
        save(tmp_path, Checkpoint(broken, contract()))
    save_tree(newest / "policy.safetensors", broken)
    record = json.loads((newest / "checkpoint.json").read_text())
    sealed.write(newest / "checkpoint.json", record, checkpoints.FILES)
    with pytest.raises(ValueError, match=f"policy.safetensors is not a policy: {message}.*; use {previous}$") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_that_may_be_so_are_loaded(tmp_path):
    weights = {
        "log_std": torch.tensor([-5.0]),
        "count": torch.tensor(2**40),
        "none": torch.empty(0),
        "far": torch.tensor(9e5),
    }
    save(tmp_path, Checkpoint(weights, contract()))
    assert load(tmp_path).policy["count"] == 2**40


def test_a_directory_without_checkpoint_says_so(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        load(tmp_path)


def test_a_checkpoint_of_another_contract_is_refused_on_one_line(tmp_path):
    save(tmp_path, example())
    back = load(tmp_path)
    back.check(contract())
    others = [
        {"control_dt_s": 0.1},
        {"horizon": 10, "executed": 10},
        {"observation": {}},
        {"executed": 3},
        {"horizon": 9},
    ]
    for other in (contract(**change) for change in others):
        with pytest.raises(ValueError, match="another contract") as error:
            back.check(other)
        assert "\n" not in str(error.value)


def test_weights_of_another_network_are_refused_on_one_line(tmp_path):
    more = contract(observation={**contract().observation, "wrist": next(iter(contract().observation.values()))})
    save(tmp_path, Checkpoint(nn.Linear(4, 1).state_dict(), contract()))
    load(tmp_path).restore(nn.Linear(4, 1))
    other = nn.Linear(5, 1)
    for given, reason in ((contract(), "size mismatch"), (more, "it has never seen the observations 'wrist'")):
        other.contract = given
        with pytest.raises(ValueError, match=f"are of another network .*{reason}") as error:
            load(tmp_path).restore(other)
        assert "\n" not in str(error.value)


@pytest.fixture
def written(monkeypatch) -> list[tuple[str, str]]:
    """Names of what is synced and renamed, in order, while the real calls run."""
    events: list[tuple[str, str]] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def moved(old, new, move) -> None:
        move(old, new)
        events.append(("rename", Path(new).name))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda old, new: moved(old, new, rename))
    monkeypatch.setattr(os, "replace", lambda old, new: moved(old, new, replace))
    return events


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@needs_proc
def test_a_power_failure_after_saving_loses_nothing(tmp_path, written):
    """Files and their folder reach the disk before the checkpoint has its name, and the name after that."""
    save(tmp_path, example())
    named = written.index(("rename", "000001"))
    assert {name for kind, name in written[:named] if kind == "sync"} >= {"checkpoint.json", ".000001.tmp"}
    assert written[named - 1] == ("sync", ".000001.tmp")
    assert written[named + 1 :] == [("sync", "checkpoint")]


@needs_proc
def test_the_name_of_a_file_is_synced_with_its_folder(tmp_path, written):
    save_tree(tmp_path / "tree", {"values": torch.zeros(2)})
    (content, *_), *rest = written[0], *written[1:]
    assert content == "sync"
    assert rest == [("rename", "tree"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_shard_is_named(damage: str, tmp_path):
    shards = tmp_path / "written"
    sharding.write(shards, {f"{checkpoints.POLICY}half": torch.arange(64.0)})
    (tmp_path / "run").mkdir()
    path = save(tmp_path / "run", dataclasses.replace(example(), shards=shards))
    assert torch.equal(load(path).policy["half"], torch.arange(64.0))
    [shard] = (path / "shards").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # a bit of the last number: no reader but the checksum finds it
    shard.unlink()
    if damage == "changed":
        shard.write_bytes(data)
    message = "its checksum differs" if damage == "changed" else "is missing"
    with pytest.raises(ValueError, match=rf"shards/{shard.name}.*{message}"):
        load(path)
