"""Critics: ensembles against single networks, both heads by hand, random subsets, moving averages."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from embodied.algorithms.critics import Activation, CriticConfig, Critics, approach, frozen_weights
from embodied.errors import UserError
from embodied.networks import products
from embodied.networks.value_head import CriticHead

CATEGORICAL = {"head": CriticHead.HL_GAUSS, "bins": 5, "value_low": -1.0, "value_high": 1.5}


def make(inputs: int = 4, seed: int = 0, **options) -> Critics:
    torch.manual_seed(seed)
    return Critics(inputs, CriticConfig(**{"hidden": [6, 5], "ensemble": 3} | options))


def member(critics: Critics, index: int) -> nn.Sequential:
    """Network `index` of `critics` as an ordinary one."""
    layers, config = [], critics.config
    for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
        linear = nn.Linear(*weight.shape[1:])
        linear.weight.data, linear.bias.data = weight[index].T, bias[index, 0]
        layers.append(linear)
        if layer < len(config.hidden):
            if config.layer_norm:
                norm = nn.LayerNorm(config.hidden[layer])
                norm.weight.data, norm.bias.data = critics.scales[layer][index, 0], critics.shifts[layer][index, 0]
                layers.append(norm)
            layers.append(nn.Tanh() if config.activation is Activation.TANH else nn.ReLU())
    return nn.Sequential(*layers)


def moved(critics: Critics) -> Critics:
    """`critics` with other weights than the initial ones: scales differ from 1, shifts from 0."""
    for parameter in critics.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return critics


def phi(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("head", [{}, CATEGORICAL], ids=["scalar", "hl_gauss"])
def test_an_ensemble_equals_networks_computed_one_by_one(activation: Activation, layer_norm: bool, head: dict) -> None:
    critics = moved(make(activation=activation, layer_norm=layer_norm, **head))
    inputs, target = torch.randn(7, 4), torch.rand(7)
    outputs = torch.stack([member(critics, index)(inputs) for index in range(3)])
    torch.testing.assert_close(critics(inputs), outputs)
    assert critics.values(inputs).shape == (3, 7)
    critics.loss(inputs, target).backward()
    for index in range(3):  # the gradient of one network does not depend on the others
        alone = member(critics, index)
        single = make(ensemble=1, activation=activation, layer_norm=layer_norm, **head)
        for own, every in zip(single.parameters(), critics.parameters(), strict=True):
            own.data = every.data[index : index + 1].clone()
        single.loss(inputs, target).backward()
        torch.testing.assert_close(single(inputs)[0], alone(inputs))
        for own, every in zip(single.parameters(), critics.parameters(), strict=True):
            torch.testing.assert_close(own.grad, every.grad[index : index + 1])


def test_initial_weights_are_drawn_layer_by_layer_before_the_biases() -> None:
    critics = make(hidden=[64, 32], ensemble=2)
    torch.manual_seed(0)
    shapes = [(4, 64), (64, 32), (32, 1)]
    weights = [torch.empty(2, *shape).uniform_(-(shape[0] ** -0.5), shape[0] ** -0.5) for shape in shapes]
    biases = [torch.empty(2, 1, shape[1]).uniform_(-(shape[0] ** -0.5), shape[0] ** -0.5) for shape in shapes]
    for parameter, expected in zip(critics.parameters(), [*weights, *biases], strict=True):
        assert torch.equal(parameter, expected)


def test_scalar_values_and_losses_by_hand() -> None:
    critics = make(inputs=2, hidden=[1], ensemble=2)
    for parameter, numbers in zip(
        critics.parameters(),
        ([[[1.0], [2.0]], [[-1.0], [1.0]]], [[[3.0]], [[-2.0]]], [[[0.5]], [[1.0]]], [[[-1.0]], [[0.25]]]),
        strict=True,
    ):
        parameter.data = torch.tensor(numbers)
    inputs = torch.tensor([[1.0, 1.0], [0.0, -1.0]])
    # first network: 3 relu(x + 2 y + 0.5) - 1; second: -2 relu(-x + y + 1) + 0.25
    expected = torch.tensor([[9.5, -1.0], [-1.75, 0.25]])
    assert torch.equal(critics.values(inputs), expected)
    # (81 + 4) / 2 + (2.25^2 + 0.75^2) / 2
    assert critics.loss(inputs, torch.tensor([0.5, 1.0])).item() == 42.5 + 2.8125
    # of each network its own target, and a weight of each row
    own = torch.tensor([[8.5, -1.0], [-1.75, 1.25]])
    assert critics.loss(inputs, own, torch.tensor([2.0, 0.5])).item() == 1.0 + 0.25


def test_a_state_value_follows_an_expectile_by_its_weights() -> None:
    critics = make(inputs=1, hidden=[], ensemble=1)
    returns, share = torch.tensor([0.0, 1.0, 2.0, 7.0]), 0.9
    optimiser = torch.optim.SGD(critics.parameters(), 0.2)
    for _ in range(2000):
        inputs = torch.zeros(4, 1)
        # IQL: L2^tau(y - V) = |tau - 1(y < V)| (y - V)^2
        weight = (share - (returns < critics.values(inputs).detach()).float()).abs()
        optimiser.zero_grad()
        critics.loss(inputs, returns, weight).backward()
        optimiser.step()
    # 0.1 (v + v - 1 + v - 2) = 0.9 (7 - v)
    assert critics.values(torch.zeros(1, 1)).item() == pytest.approx(6.6 / 1.2, abs=1e-4)


def test_histograms_are_those_of_a_normal_distribution_within_the_range() -> None:
    head = CriticConfig(**CATEGORICAL, smoothing=0.8)
    sigma = 0.8 * 0.5
    edges = [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    for y in (-1.0, -0.3, 0.25, 1.4):
        mass = [phi((b - y) / sigma) - phi((a - y) / sigma) for a, b in pairwise(edges)]
        expected = torch.tensor(mass) / sum(mass)
        torch.testing.assert_close(head.histogram(torch.tensor(y)), expected)
    assert torch.equal(head.histogram(torch.tensor([-4.0, 9.0])), head.histogram(torch.tensor([-1.0, 1.5])))
    assert head.outside(torch.tensor([-4.0, -1.0, 1.2, 1.6])).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_distributions_are_projected_onto_two_neighbours() -> None:
    head = CriticConfig(head=CriticHead.C51, bins=5, value_low=-1.0, value_high=1.0)
    atoms, shares = torch.tensor([[-3.0, -0.6, 0.1, 1.0, 7.0]]), torch.tensor([[0.1, 0.2, 0.3, 0.3, 0.1]])
    # atoms -1, -0.5, 0, 0.5, 1: -0.6 is 0.2 widths from -0.5, 0.1 is 0.2 widths from 0, the ends take what is outside
    expected = torch.tensor([[0.1 + 0.2 * 0.2, 0.2 * 0.8, 0.3 * 0.8, 0.3 * 0.2, 0.3 + 0.1]])
    torch.testing.assert_close(head.projected(atoms, shares), expected)
    torch.testing.assert_close(
        head.histogram(torch.tensor([0.1, 4.0])), torch.eye(5)[[2, 4]].lerp(torch.eye(5)[[3, 4]], 0.2)
    )
    assert head.values(expected.log()).item() == pytest.approx(-0.14 - 0.08 + 0.03 + 0.4)
    assert head.projected(torch.tensor([[torch.nan]]), torch.ones(1, 1)).isnan().any()
    outputs = torch.randn(2, 1, 5)
    cross_entropy = [nn.functional.cross_entropy(each, expected) for each in outputs]
    torch.testing.assert_close(head.errors(outputs, expected.unsqueeze(0)).squeeze(-1), torch.stack(cross_entropy))


def test_the_categorical_loss_is_a_cross_entropy_and_the_value_an_expectation() -> None:
    critics = moved(make(**CATEGORICAL))
    inputs, target = torch.randn(7, 4), torch.linspace(-2.0, 2.0, 7)
    logits = critics(inputs).detach()
    probabilities = critics.config.histogram(target)
    total = 0.0
    for network in range(3):
        total += nn.functional.cross_entropy(logits[network], probabilities).item()
        for row in range(7):
            share = logits[network, row].exp() / logits[network, row].exp().sum()
            centres = (-0.75, -0.25, 0.25, 0.75, 1.25)
            value = sum(float(each) * centre for each, centre in zip(share, centres, strict=True))
            assert critics.values(inputs)[network, row].item() == pytest.approx(value, abs=1e-6)
    assert critics.loss(inputs, target).item() == pytest.approx(total, rel=1e-6)
    weight = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    row = sum(nn.functional.cross_entropy(each[2], probabilities[2]) for each in logits)
    assert critics.loss(inputs, target, weight).item() == pytest.approx(float(row) * 3.0 / 7.0, rel=1e-6)


def test_a_categorical_critic_learns_the_mean_of_its_targets() -> None:
    critics = make(inputs=1, **CATEGORICAL | {"bins": 51})
    inputs, target = torch.tensor([[-1.0], [1.0]]).repeat(2, 1), torch.tensor([-0.5, 1.0, -0.5, 0.0])
    optimiser = torch.optim.Adam(critics.parameters(), 1e-2)
    for _ in range(600):
        optimiser.zero_grad()
        critics.loss(inputs, target).backward()
        optimiser.step()
    expected = torch.tensor([-0.5, 0.5]).expand(3, 2)
    torch.testing.assert_close(critics.values(inputs[:2]).detach(), expected, atol=0.01, rtol=0.0)


def minima(critics: Critics, inputs: Tensor, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([critics.minimum(inputs, generator) for _ in range(count)])


def test_minima_are_taken_over_random_subsets() -> None:
    critics, inputs = make(ensemble=4, subset=2), torch.randn(5, 4)
    values = critics.values(inputs)
    pairs = [values[[i, j]].amin(0) for i in range(4) for j in range(i)]
    results = minima(critics, inputs, 200)
    counts = [int((results == pair).all(-1).sum()) for pair in pairs]  # one subset for the whole batch
    assert all(any(torch.equal(result, pair) for pair in pairs) for result in results)
    assert min(counts) > 10
    assert (minima(make(ensemble=4, subset=1), inputs, 50).unsqueeze(1) == values).all(-1).any(-1).all()


@pytest.mark.parametrize("subset", [None, 4])
def test_a_minimum_over_all_draws_nothing(subset: int | None) -> None:
    critics, inputs = make(ensemble=4, subset=subset), torch.randn(5, 4)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert torch.equal(critics.minimum(inputs, generator), critics.values(inputs).min(0).values)
    assert torch.equal(generator.get_state(), before)


def test_outputs_of_the_lowest_network_are_those_of_each_row() -> None:
    critics, inputs = moved(make(**CATEGORICAL)), torch.randn(50, 4)
    network = critics.values(inputs).argmin(0)
    assert len(network.unique()) == 3
    expected = torch.stack([critics(inputs)[number, row] for row, number in enumerate(network.tolist())])
    assert torch.equal(critics.lowest(inputs, torch.Generator()), expected)


def test_targets_approach_their_sources() -> None:
    sources = make(layer_norm=True, **CATEGORICAL)
    targets = moved(copy.deepcopy(sources))
    before = [parameter.clone() for parameter in targets.parameters()]
    kept = [parameter.clone() for parameter in sources.parameters()]
    approach(targets.parameters(), sources.parameters(), 0.25)
    for target, old, source, same in zip(targets.parameters(), before, sources.parameters(), kept, strict=True):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source)
        assert torch.equal(source, same)


def test_a_checkpoint_has_weights_and_biases_only() -> None:
    names = {f"{name}.{layer}" for name in ("weights", "biases") for layer in range(3)}
    assert make().state_dict().keys() == make(**CATEGORICAL).state_dict().keys() == names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subset": 3}, "subset <= ensemble"),
        ({"ensemble": 0}, "ensemble=0"),
        ({"head": CriticHead.HL_GAUSS}, "value_low < value_high"),
        ({"head": CriticHead.HL_GAUSS, "value_low": 1.0, "value_high": 1.0}, "value_low < value_high"),
        ({"value_low": -1.0}, "head=hl_gauss"),
        ({"value_high": 1.0}, "head=hl_gauss"),
        ({"bins": 1}, "bins=1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        CriticConfig(**options)


@pytest.mark.skipif(not products.HAS_ONEDNN, reason="torch without oneDNN")
def test_wide_layers_equal_narrow_ones_in_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    critics = moved(make(inputs=5, hidden=[128, 128], ensemble=2))
    layers = nn.Sequential(products.Dense(128, 130), nn.Tanh(), products.Dense(130, 5))
    inputs = torch.randn(256, 128, requires_grad=True)
    target = torch.rand(256)

    def results() -> list[Tensor]:
        critics.zero_grad()
        layers.zero_grad()
        inputs.grad = None
        loss = critics.loss(layers(inputs), target)
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in (*critics.parameters(), *layers.parameters(), inputs))]

    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)
    assert _names(critics.loss(layers(inputs), target).grad_fn).count("_ProductBackward") == 2
    fast = results()
    traced = torch.jit.trace(layers, inputs.detach())  # as an export to ONNX
    assert "Python" not in str(traced.inlined_graph)
    assert "linear_pointwise" not in str(traced.inlined_graph)
    monkeypatch.setattr(products, "PREFERS_ONEDNN", False)
    monkeypatch.setattr(products, "WIDE", 1 << 20)
    assert "_ProductBackward" not in _names(critics.loss(layers(inputs), target).grad_fn)
    torch.testing.assert_close(fast, results())


def _names(node: object) -> list[str]:
    """Names of the functions in the graph of `node`, each once."""
    nodes, stack = {}, [node]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes[node] = type(node).__name__
            stack += [each for each, _ in node.next_functions]
    return list(nodes.values())


def test_values_of_frozen_weights_have_gradients_of_inputs_alone() -> None:
    critics = make(layer_norm=True)
    inputs = torch.randn(7, 4, requires_grad=True)
    with frozen_weights(critics):
        values = critics.values(inputs)
    values.sum().backward()
    gradient = inputs.grad.clone()
    assert all(each.grad is None for each in critics.parameters())
    critics.values(inputs).sum().backward()
    assert torch.equal(inputs.grad, 2.0 * gradient)
    assert all(each.grad is not None for each in critics.parameters())
