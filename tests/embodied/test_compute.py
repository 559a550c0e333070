"""A device that is not here is one clear line before anything starts."""

import pytest
import torch

from embodied.compute import prepare
from embodied.extras import needs_extra


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_pytorch_gets_the_threads_that_are_asked_for():
    prepare("cpu", threads=2)
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="threads of at least 1, got 0"):
        prepare("cpu", threads=0)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "gpu", "cuda:-1"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError, match="expected cpu, cuda or cuda:NUMBER"):
        prepare(device)


def test_cuda_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="device=cuda, but this PyTorch is built without CUDA"):
        prepare("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    prepare("cuda:0")
    with pytest.raises(ValueError, match="device=cuda:1, but there are 1 CUDA devices"):
        prepare("cuda:1")


def test_a_missing_package_names_its_extra():
    with (
        pytest.raises(ValueError, match=r"^nowhere is not installed: pip install 'embodied-rl\[libero\]'$"),
        needs_extra("libero"),
    ):
        import nowhere  # noqa: F401
