"""Missing devices, cores or memory give a one-line error, before anything starts if possible."""

import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import warp

from embodied.errors import OutOfMemoryError, UserError
from embodied.extras import needs_extra
from embodied.training.compute import enough_memory, free_memory, prepare


@pytest.fixture(autouse=True)
def threads():
    before, memory = torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_DATA)
    yield
    torch.set_num_threads(before)
    resource.setrlimit(resource.RLIMIT_DATA, memory)


def test_pytorch_gets_the_threads_that_are_asked_for():
    prepare("cpu", threads=2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_threads_that_no_machine_has_are_refused(threads, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    with pytest.raises(UserError, match=rf"expected threads from 1 to 64 \(cores here: 3\), got {threads}"):
        prepare("cpu", threads=threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(100))
    with pytest.raises(UserError, match=r"threads from 1 to 800 \(cores here: 100\)"):
        prepare("cpu", threads=threads)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: torch.empty(10**14), "out of memory, 400000000000000 bytes were asked for$"),
        (lambda: np.empty(2**50), "out of memory, 8.00 PiB were asked for$"),
        (lambda: bytearray(2**60), "out of memory$"),
        (lambda: warp.empty((2**22, 2**22), dtype=float, device="cpu"), "out of memory, 70368744177664 bytes"),
    ],
)
def test_too_much_memory_is_one_line(ask, message):
    with pytest.raises(UserError, match=message), enough_memory():
        ask()


def test_a_library_that_does_not_fit_any_more_is_a_lack_of_memory():
    """What Linux says then, as it is in glibc's messages: importing under a limit fails at another place each time."""
    with pytest.raises(OutOfMemoryError, match=r"out of memory$"), enough_memory():
        raise ImportError("/lib/_path.so: failed to map segment from shared object")
    forbidden = "/lib/_path.so: failed to map segment from shared object: Operation not permitted"
    with pytest.raises(ImportError, match="Operation not permitted"), enough_memory():
        raise ImportError(forbidden)


def test_other_errors_are_not_about_memory():
    with pytest.raises(RuntimeError, match="shape"), enough_memory():
        raise RuntimeError("a shape")


def test_the_kernel_promises_no_more_memory_than_there_is():
    code = (
        "import torch; from embodied.training.compute import *; prepare('cpu', 1)\n"
        "with enough_memory(): kept = [torch.empty(2**28) for _ in range(10**5)]  # of 1 GiB, never touched"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert run.returncode == 1
    assert "OutOfMemoryError: out of memory, 1073741824 bytes were asked for" in run.stderr


def test_no_more_memory_is_granted_than_is_free_now():
    """What other processes use is not there, and the limit of a container is that of the process."""
    prepare("cpu", 1)
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) << 10
    own = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    assert limit < machine + own
    assert limit == pytest.approx(available + own, rel=0.1)


@pytest.mark.parametrize("nested", ["", "slice/job"])
def test_a_container_that_has_used_its_memory_has_none_left(tmp_path, monkeypatch, nested):
    group = tmp_path / nested
    group.mkdir(parents=True, exist_ok=True)
    for name, text in (("max", "3000"), ("current", "2500"), ("stat", "anon 9\ninactive_file 200\n")):
        (group / f"memory.{name}").write_text(text)
    monkeypatch.setattr("embodied.training.compute.GROUPS", (tmp_path, tmp_path / "none"))
    read = Path.read_text
    membership = f"0::/{nested}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, **how: membership if path.name == "cgroup" else read(path, **how)
    )
    assert free_memory() == 700


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such setting")
def test_memory_that_was_freed_is_used_again():
    code = (
        "import resource, torch; from embodied.training.compute import *; prepare('cpu', 1)\n"
        "def pages(times):\n"
        "    for _ in range(times): kept = [torch.ones(2**20) for _ in range(8)]; del kept\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "before = pages(2); print(pages(20) - before)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert int(run.stdout) < 4096  # 20 times 8 times 1,024 pages of 4 kB otherwise


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "gpu", "cuda:-1"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError, match="expected cpu, cuda or cuda:NUMBER"):
        prepare(device)


def test_cuda_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="device=cuda, but this PyTorch has no CUDA"):
        prepare("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    prepare("cuda:0")
    with pytest.raises(ValueError, match="device=cuda:1, but CUDA devices found: 1;"):
        prepare("cuda:1")


def test_a_missing_package_names_its_extra():
    with (
        pytest.raises(ValueError, match=r"^nowhere is not installed: pip install 'embodied-rl\[libero\]'$"),
        needs_extra("libero"),
    ):
        import nowhere  # noqa: F401
