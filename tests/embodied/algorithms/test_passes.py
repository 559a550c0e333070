"""Values of tensors on the meta device, and bytes of passes there."""

import torch

from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.passes import LONG, META, MetaValues, Passes, meta_observation, on_meta
from embodied.rollout.memory import STARTED
from policies.recurrent import RecurrentConfig
from tests.embodied.reach import Reach


def test_values_on_the_meta_device_are_those_of_whole_shapes() -> None:
    numbers = torch.empty(3, 4, device=META)
    with MetaValues():
        assert bool((numbers > 0.0).all()) is True
        assert int(numbers.long().sum()) == LONG
        assert float(numbers.sum()) == 0.0
        assert numbers[:, : int(numbers.long().max())].shape == (3, 4)
        assert torch.equal(numbers.cpu(), torch.zeros(3, 4))
        assert numbers.to("cpu", torch.int64).dtype == torch.int64
        assert numbers.long().tolist() == [[0] * 4] * 3
        assert numbers.nonzero().shape == (0, 2)
        assert torch.equal(numbers, numbers + 1.0)
        assert numbers.to(META, torch.float64).device == META


def test_values_of_other_tensors_stay() -> None:
    numbers = torch.tensor([[0.0, 2.0]])
    with MetaValues():
        assert numbers.nonzero().tolist() == [[0, 1]]
        assert float(numbers.sum()) == 2.0
        assert not bool((numbers > 0.0).all())
        assert not torch.equal(numbers, numbers + 1.0)
        assert torch.equal(numbers.to(torch.int64), torch.tensor([[0, 2]]))


def test_passes_of_a_policy_with_memory_store_what_they_store_of_real_sequences() -> None:
    env, length, count = Reach(3), 5, 3
    config = RecurrentConfig(hidden=[8], encoder=4, memory=6)
    policy = config.build(env.contract)
    policy.fit(env.reset(), torch.rand(3, *env.contract.action.shape))
    observation = torch.stack([env.reset() for _ in range(length)])
    observation["memory"] = policy.initial_memory(count).detach().expand(length, -1, -1)
    observation[STARTED] = torch.zeros(length, count, dtype=torch.bool)
    actions = torch.rand(length, count, env.contract.horizon, *env.contract.action.shape)
    with MetaValues():
        passes = Passes(
            on_meta(lambda: RecurrentConfig(hidden=[8], encoder=4, memory=6).build(env.contract)), 3, length
        )
        assert passes.has_memory
        assert meta_observation(env.contract, length, count).shape == (length, count)
        stored = passes.loss(length, count)
    assert stored == saved_bytes(lambda: policy.loss(observation, actions, actions[..., 0] > 0.0))
