"""Warp together with torch on CUDA: operations of both run in the order in which a program calls them.

Warp launches on a stream of its own. That stream and torch's default stream wait for each other, but a rollout that is
collected during an update has another stream of torch, which needs events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import warp

_LAUNCHING = threading.RLock()
"""Lock of the thread that launches or captures: all threads share warp's stream, and a capture would include the
launches of others."""


def warp_device(device: torch.device | str) -> warp.Device:
    """Warp's device of torch's `device`; "cuda" without a number is the current one."""
    warp.init()
    return warp.device_from_torch(str(device))  # warp needs a string for devices without a number


@contextmanager
def in_order(device: warp.Device) -> Iterator[None]:
    """Context in which warp launches on `device`, after torch's earlier operations and before its later ones.

    Operations of torch within it are not ordered with those of warp.
    """
    if not device.is_cuda:
        with warp.ScopedDevice(device):
            yield
        return
    current = torch.cuda.current_stream(warp.device_to_torch(device))
    with _LAUNCHING, warp.ScopedDevice(device):
        if not current.cuda_stream:  # torch's default stream and warp's wait for each other anyway
            yield
            return
        other = warp.stream_from_torch(current)
        device.stream.wait_stream(other)
        yield
        other.wait_stream(device.stream)


def captured(device: warp.Device, launch: Callable[[], object]) -> warp.Graph:
    """Graph of everything that `launch` launches on `device`, called within `in_order`.

    It is captured on a stream of torch, which does not wait for the default one: threads may use that one meanwhile.
    """
    stream = warp.stream_from_torch(torch.cuda.Stream(warp.device_to_torch(device)))
    with warp.ScopedStream(stream), warp.ScopedCapture(device, stream) as capture:
        launch()
    return capture.graph
