"""pi0 on a robot: chunks that continue running ones, in evaluation with a delay, and from a server over a socket."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import msgpack
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from websockets.sync.client import connect

from embodied.contract import TensorSpec
from embodied.evaluation.evaluation import evaluate
from embodied.execution.chunking import InpaintingPolicy, Running
from embodied.execution.delay import delayed
from embodied.policy import Decision
from policies.vla.pi0 import Pi0Config
from real_robot.serving.policy_client import PolicyClient
from real_robot.serving.policy_server import PolicyServer
from tests.embodied.reach import Reach
from tests.policies.test_flow import kept_ways, taught_two_ways
from tests.policies.vla import test_pi0, test_pi05
from tests.policies.vla.test_pi0 import SEEING, policy, seen

TOKEN = "sixteen-letters-" * 2


def running(actions: torch.Tensor, frozen: int, overlap: int) -> Running:
    count = len(actions)
    return Running(actions, torch.full((count,), frozen), torch.full((count,), overlap))


def test_a_chunk_continues_the_running_one() -> None:
    made, observation = policy(), seen(8)
    alone = made.act(observation, deterministic=True).actions
    known = torch.tensor([0.3, -0.4, 1.0]).expand_as(alone).contiguous()
    unguided = made.inpaint(observation, running(known, 0, 0), deterministic=True).actions
    torch.testing.assert_close(unguided, alone)
    decision = made.inpaint(observation, running(known, 1, 3), deterministic=True)
    assert torch.equal(decision.actions[:, :1], known[:, :1])
    assert decision.log_prob.isnan().all()
    apart = (decision.actions - known).abs().mean((0, 2)) / (alone - known).abs().mean((0, 2))
    assert apart[1] < 0.5
    assert apart[1] < apart[2] < apart[3]
    again = made.inpaint(observation[:5], running(known[:5], 1, 3), deterministic=True).actions
    torch.testing.assert_close(again, decision.actions[:5], atol=1e-5, rtol=0.0)
    assert not decision.actions.requires_grad
    assert all(weight.grad is None for weight in made.parameters())


@pytest.mark.parametrize("module", [test_pi0, test_pi05])
def test_each_action_may_have_its_own_time(module: ModuleType) -> None:
    made, observation = module.policy(), seen(3)
    state, prefix, x = made._state(observation), made._prefix(observation), torch.randn(3, 4, 32)
    time = torch.tensor([0.2, 0.6, 1.0])
    whole, hidden = made._velocity(state, prefix, x, time)
    times = time.unsqueeze(1).expand(3, 4).clone()
    each = made._velocity(state, prefix, x, times)
    torch.testing.assert_close(each[0], whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(each[1], hidden, atol=1e-5, rtol=1e-5)
    times[1, 0] = 0.0
    moved = made._velocity(state, prefix, x, times)[0]
    assert (moved[1, 0] != whole[1, 0]).any()
    torch.testing.assert_close(moved[[0, 2]], whole[[0, 2]], atol=1e-5, rtol=1e-5)


def test_trained_with_given_actions_it_goes_on_with_them_without_guidance() -> None:
    made = policy(trained_delay=2, guidance=0.0)
    taught_two_ways(made, seen, 120, 3e-3)
    for frozen in (1, 2):
        assert kept_ways(made, seen, frozen) > 0.9


def test_guidance_pulls_elements_of_actions_and_not_their_padding() -> None:
    made, observation = policy(denoising_steps=1), seen(2)
    known = torch.tensor([0.3, -0.4, 1.0]).expand(2, 4, 3).contiguous()
    now = running(known, 1, 3)
    found = made.inpaint(observation, now, deterministic=True).actions
    state, prefix = made._state(observation), made._prefix(observation)
    x = made._noise(observation, True, None).requires_grad_()
    velocity = made._velocity(state, prefix, x, torch.ones(2))[0]
    error = (known - made.action_mean) / made.action_std - (x - velocity)[..., :3]
    weighted = (error.detach() * now.soft_mask().unsqueeze(-1) * (x - velocity)[..., :3]).sum()
    (pull,) = torch.autograd.grad(weighted, x)
    expected = made.to_robot((x - velocity + 5.0 * pull).detach())  # at the first step guidance is at its bound
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], atol=1e-4, rtol=1e-4)
    assert torch.equal(found[:, :1], known[:, :1])


class Watched(Reach):
    """Reach with a picture of nothing."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, horizon=4)
        front = {"front": TensorSpec((16, 24, 3), "uint8", camera="front")}
        self.contract = replace(self.contract, observation=self.contract.observation | front)

    def _observation(self) -> TensorDict:
        black = torch.zeros(self.num_envs, 16, 24, 3, dtype=torch.uint8)
        return super()._observation().set("front", black)


def test_evaluation_with_a_delay_continues_the_running_chunks() -> None:
    env = Watched(4)
    made = Pi0Config(hidden=16, denoising_steps=2).build(env.contract)
    made.fit(env.reset(), torch.rand(4, 4, 1) - 0.5)
    slow, continued, inpaint = delayed(made, 0.1, "inpaint", executed=2, device="cpu"), [], made.inpaint

    def watched(observation: TensorDict, now: Running, **options: object) -> Decision:
        decision, runs = inpaint(observation, now, **options), now.frozen == 1
        assert torch.equal(decision.actions[runs, 0], now.actions[runs, 0])
        continued.append(int(runs.sum()))
        return decision

    made.inpaint = watched
    evaluate(env, slow, starts_per_task=2)
    assert continued[0] == 0  # an episode begins with its first chunk
    assert sum(continued) > 4


def encoded(value: object) -> object:
    """Arrays as openpi's client sends them."""
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    raise TypeError(type(value))


def test_the_server_takes_pictures_and_a_prompt_as_openpi_sends_them() -> None:
    made, observation = policy(), seen(1)
    expected = made.act(observation, deterministic=True).actions[0].numpy()
    arrays = {key: observation[key][0].numpy() for key in ("front", "wrist", "fingers")}
    with PolicyServer(made, TOKEN, port=0) as server:
        uri, header = f"ws://127.0.0.1:{server.port}", {"Authorization": f"Api-Key {TOKEN}"}
        with connect(uri, additional_headers=header, compression=None, max_size=None, proxy=None) as socket:
            assert isinstance(msgpack.unpackb(socket.recv(), strict_map_key=False), dict)
            replies = []
            for prompt in ("pick the milk", "open"):
                socket.send(msgpack.packb(arrays | {"prompt": prompt}, default=encoded))
                actions = msgpack.unpackb(socket.recv(), strict_map_key=False)["actions"]
                replies.append(np.frombuffer(actions[b"data"], actions[b"dtype"]).reshape(actions[b"shape"]))
            np.testing.assert_array_equal(replies[0], expected)
            assert np.abs(replies[1] - expected).max() > 1e-4  # the words are read
            socket.send(msgpack.packb(arrays, default=encoded))
            assert "instruction: expected an array of uint8 (16,), got NoneType" in socket.recv()
        client = PolicyClient(uri, TOKEN, deadline_s=10.0)
        assert isinstance(client, InpaintingPolicy)
        assert client.contract == SEEING
        now = running(torch.full((1, 4, 3), 0.25), 1, 3)
        seen_by_robot = observation.exclude("depth", "cube")
        found = client.inpaint(seen_by_robot, now, deterministic=True).actions
        assert torch.equal(found, made.inpaint(seen_by_robot, now, deterministic=True).actions)
        client.close()
