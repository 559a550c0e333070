"""Our tanh against torch's."""

import pytest
import torch

from policies.tanh import tanh


def test_values_and_gradients_are_torchs() -> None:
    x = torch.cat((torch.linspace(-12.0, 12.0, 1001), torch.tensor([0.0, -0.0, 1e-8, 1e-30, torch.inf, -torch.inf])))
    x = torch.stack((x, 0.1 * x), 1).t()[:, 3:].requires_grad_()  # neither contiguous nor from the beginning
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = tanh(x), x.tanh()
    assert torch.allclose(ours, theirs, rtol=3e-7, atol=0.0)
    got, expected = (torch.autograd.grad((weight * y).sum(), x)[0] for y in (ours, theirs))
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_argument_stays_as_it_was() -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    with torch.no_grad():
        y = tanh(x)
    assert torch.equal(x, before)
    assert y.grad_fn is None
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_kept(dtype: torch.dtype) -> None:
    x = torch.linspace(-3.0, 3.0, 7, dtype=dtype)
    assert torch.equal(tanh(x), x.tanh())
