"""Devices of torch as warp's, beside torch: only what a machine without a GPU can show."""

import pytest
import torch
import warp

from sims import warp_order


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), torch.device("cuda", 1), "cpu"])
def test_warp_gets_the_name_of_a_device_since_it_takes_no_cuda_without_a_number(device, monkeypatch):
    asked = []
    monkeypatch.setattr(warp, "device_from_torch", asked.append)
    warp_order.warp_device(device)
    assert asked == [str(device)]


def test_launches_on_the_cpu_are_within_warps_device():
    with warp_order.in_order(warp_order.warp_device("cpu")):
        assert warp.get_device().alias == "cpu"
