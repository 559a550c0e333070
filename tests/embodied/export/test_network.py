"""Deployed networks: layers against PyTorch's, reduced contracts, names of elements."""

import torch
from torch import nn

from embodied.contract import Contract, TensorSpec
from embodied.export.network import GRU, Network, Normalise, TokenAttention, Tokens, ToRange, elements, readable


def test_the_gru_is_torchs():
    torch.manual_seed(0)
    ours, reference = GRU(5, 7), nn.GRUCell(5, 7)
    for mine, name in ((ours.input, "ih"), (ours.hidden, "hh")):
        mine.weight.data, mine.bias.data = getattr(reference, f"weight_{name}"), getattr(reference, f"bias_{name}")
    x, memory = torch.randn(9, 5), torch.randn(9, 7)
    torch.testing.assert_close(ours(x, memory), reference(x, memory))


def test_the_attention_is_torchs_with_one_head():
    torch.manual_seed(0)
    attention = TokenAttention([(0, 3)], [Tokens(3, 4, 2)], 8)
    reference = nn.MultiheadAttention(8, 1, batch_first=True)
    query, key, value = reference.in_proj_weight.double().chunk(3)
    query_bias, _, value_bias = reference.in_proj_bias.double().chunk(3)
    project = reference.out_proj.weight.double()
    attention.double()
    attention.query.weight.data, attention.query.bias.data = key.T @ query, key.T @ query_bias
    attention.output.weight.data = project @ value
    attention.output.bias.data = project @ value_bias + reference.out_proj.bias.double()
    x = torch.randn(6, 11, dtype=torch.float64)
    own = torch.tanh(attention.own(x[:, :3]))
    tokens = torch.cat((own.unsqueeze(1), torch.tanh(attention.encoders[0](x[:, 3:].view(6, 4, 2)))), 1)
    attended = reference.double()(own.unsqueeze(1), tokens, tokens)[0].squeeze(1)
    torch.testing.assert_close(attention(x), attention.norm(own + attended))


def test_empty_rows_weigh_nothing_and_the_order_of_rows_does_not_matter():
    torch.manual_seed(0)
    attention = TokenAttention([(8, 11)], [Tokens(0, 4, 2, present=1)], 8)
    rows = torch.randn(5, 4, 2)
    rows[..., 1] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    own = torch.randn(5, 3)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        return attention(torch.cat((rows.flatten(1), own), 1))

    before = attend(rows)
    other = rows.clone()
    other[:, [1, 3], 0] += 5.0
    assert torch.equal(attend(other), before)
    torch.testing.assert_close(attend(rows[:, [2, 3, 0, 1]]), before)
    other[:, 0, 0] += 5.0
    assert (attend(other) != before).any(1).all()
    rows[..., 1] = 0.0
    assert attend(rows).isfinite().all()  # no neighbours


def test_actions_are_in_the_limits_whatever_rounding_does():
    limits = ToRange((-0.1, 0.3, 5.0), (0.7, 0.9, 5.3))
    actions = limits(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [-9.0, 9.0, 9.0]]))
    low, high = torch.tensor([-0.1, 0.3, 5.0]), torch.tensor([0.7, 0.9, 5.3])
    torch.testing.assert_close(actions[:3], torch.stack((low, high, (low + high) / 2)))
    assert (actions >= low).all()
    assert (actions <= high).all()
    assert ToRange((-2.0, -1.0), (2.0, 1.0)).rounding == 0.0
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(ToRange((99.0,), (101.0,)).rounding, 100.0 * eps, rtol=1e-4, atol=0.0)


def test_a_network_keeps_what_it_reads_and_the_actions_that_are_executed():
    observation = {
        "picture": TensorSpec((4, 4, 3), dtype="uint8"),
        "x": TensorSpec((2,), names=("a", "b")),
        "secret": TensorSpec((5,), privileged=True),
        "y": TensorSpec((2, 3)),
    }
    contract = Contract(observation, TensorSpec((2,), low=(-1.0, 0.0), high=(1.0, 10.0)), 0.1, horizon=4, executed=2)
    kept = readable(contract)
    assert list(kept.observation) == ["x", "y"]
    assert (kept.horizon, kept.executed) == (2, 2)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh()]
    mean, std = torch.randn(8), torch.rand(8) + 0.5
    network = Network.of(contract, mean, std, layers)
    assert (network.inputs, network.outputs) == (8, 4)
    assert isinstance(network.layers[0], Normalise)
    x = torch.randn(5, 8)
    every = nn.Sequential(*layers)((x - mean) / std)  # [5, H * A]
    scaled = every[:, :4] * torch.tensor([1.0, 5.0, 1.0, 5.0]) + torch.tensor([0.0, 5.0, 0.0, 5.0])
    torch.testing.assert_close(network(x), scaled)
    layers[0].weight.data += 1.0
    torch.testing.assert_close(network(x), scaled)  # it is a copy


def test_elements_are_named_as_the_contract_names_them():
    assert elements("v", TensorSpec((2,), names=("x", "y"))) == ["v.x", "v.y"]
    assert elements("f", TensorSpec((2,))) == ["f[0]", "f[1]"]
    named = elements("n", TensorSpec((2, 2), names=("d", "v")))
    assert named == ["n[0].d", "n[0].v", "n[1].d", "n[1].v"]
