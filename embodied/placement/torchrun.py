"""Processes that torchrun started: they train together on gloo (CPU) or nccl (CUDA), and end together.

Every process writes a heartbeat to a store once a second. A process that waits for process 0, which may evaluate for
hours, reads it there; and where a collective operation fails, the store shows which process is gone.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import TCPStore  # pyright: ignore[reportPrivateImportUsage] - it is public
from torch.distributed.tensor import DTensor

from embodied.algorithms.parts import iter_parts
from embodied.errors import UserError
from embodied.placement.averaging import average_gradients
from embodied.placement.local import Processes, Result, divides
from embodied.policy import TrainablePolicy
from embodied.runtime.console import only_errors
from embodied.runtime.interrupt import Stopped
from embodied.saving import sharding

log = logging.getLogger(__name__)
BEAT_S = 1.0
POLL_S = 0.05
SILENT_S = 5.0
"""Heartbeat timeout after a failed collective operation, s; a process that is silent for that long is gone."""
HUNG_S = 120.0
"""Heartbeat timeout of a process that others wait for, s; a library may hold Python's lock for a while."""


class Torchrun(Processes):
    """This process among those that torchrun started; a context manager for the duration of the run.

    Raises:
        UserError: if the others cannot be reached within `timeout_s`, or one has died.
    """

    def __init__(self, device: str, timeout_s: float, shard: bool | None = None) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        local = int(os.environ["LOCAL_RANK"])
        self.device = f"cuda:{local}" if device == "cuda" else device
        self.timeout_s = timeout_s
        self.shard = shard
        self.turns = 0

    def __enter__(self) -> Self:
        """Connect to the other processes."""
        limit = timedelta(seconds=self.timeout_s)
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.rank:
            only_errors()
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=limit)
            self.store, self._beaten = (_store(limit) for _ in range(2))  # two connections, since waiting blocks one
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"process {self.rank} of {self.size} cannot reach all others at {address} within {self.timeout_s:g} s"
                f" ({_first_line(error)}); torchrun starts as many on each node as --nproc-per-node says"
            ) from error
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._heart.start()
        log.info(f"placement=torchrun: {self.size} processes, {dist.get_backend()}, this one on {self.device}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Disconnect; processes that still wait for this one read that it has ended."""
        self._over.set()
        self._heart.join()
        with suppress(RuntimeError):
            self.store.set(f"ended/{self.rank}", "")
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` over all processes."""
        total = values.detach().clone()
        with self.named():
            dist.all_reduce(total)
        return total

    def mean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Mean of each of `metrics` over the processes that have it."""
        gathered: list[Any] = [None] * self.size
        with self.named():
            dist.all_gather_object(gathered, dict(metrics))
        names = dict.fromkeys(name for each in gathered for name in each)
        by_name = {name: [each[name] for each in gathered if name in each] for name in names}
        return {name: sum(values) / len(values) for name, values in by_name.items()}

    def lead(self, work: Callable[[], Result]) -> Result:
        """Run `work` in process 0 only and return its result in all processes.

        Raises:
            Stopped: if process 0 was asked to stop in the meantime.
            UserError: if it has failed.
        """
        self.turns += 1
        key = f"turn/{self.turns}"
        if self.rank:
            return self._await_result(key)
        try:
            result = work()
        except BaseException as error:
            self.store.set(key, json.dumps({"stopped": isinstance(error, Stopped)}))
            raise
        self.store.set(key, json.dumps({"result": result}))
        return result

    def gather(self, tree: Any) -> list[Any]:  # noqa: ANN401 - a tree
        """Return in process 0 the `tree` of each of the other processes."""
        trees: list[Any] | None = None if self.rank else [None] * self.size
        with self.named():
            dist.gather_object(tree, trees)
        return trees[1:] if trees else []

    def join(self, learner: object) -> None:
        """Give all networks of `learner` the weights of process 0, and average their gradients from now on."""
        with self.named(), torch.no_grad():
            for module in iter_parts(learner, (nn.Module,)):
                for tensor in (*module.parameters(), *module.buffers()):
                    if not isinstance(tensor, DTensor):
                        dist.broadcast(tensor, 0)
        for optimiser in iter_parts(learner, (torch.optim.Optimizer,)):
            sharding.divide_moments(optimiser)
            parameters = [each for group in optimiser.param_groups for each in group["params"]]
            average_gradients([each for each in parameters if not isinstance(each, DTensor)], self)

    def place(self, policy: TrainablePolicy) -> TrainablePolicy:
        """Divide the weights of `policy`, in place, if `shard` is set (None: on CUDA), and return it.

        Raises:
            UserError: for a policy that names no layers.
        """
        layered = bool(policy.blocks())
        if self.shard and not layered:
            raise UserError("placement.shard=true divides large policies by their layers; use placement.shard=false")
        if not (layered and divides(self.shard, self.device)):
            return policy
        return sharding.sharded(policy, init_device_mesh(self.device.partition(":")[0], (self.size,)))

    def whole(self, policy: TrainablePolicy) -> TrainablePolicy:
        """Policy in process 0 that acts as `policy` does, without the other processes."""
        return sharding.whole(policy, not self.rank) if sharding.is_sharded(policy) else policy

    def write_divided(self, tree: Any, folder: Path) -> tuple[Any, bool]:  # noqa: ANN401 - a tree
        """Write divided tensors of `tree` into `folder`; return the rest, and whether there were any."""
        rest, tensors = sharding.extract_divided(tree)
        if tensors:
            with self.named():
                sharding.write(folder, tensors)
        return rest, bool(tensors)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context of collective operations, whose errors name the process that is gone.

        Raises:
            UserError: on one line.
        """
        try:
            yield
        except RuntimeError as error:
            raise UserError(f"{self._gone() or self._late(error)}; {_AGAIN}") from error

    def _await_result(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """Wait for the result of process 0 under `key`, however long that takes."""
        last_beat = time.monotonic()
        beat = b""
        while True:
            with self._store_of_others():
                ended = self.store.check(["ended/0"])
                finished = self.store.check([key])
                if finished:
                    break
                if ended:
                    raise UserError(f"process 0 of {self.size} has ended before the others; its message tells why")
                before = beat
                beat = self.store.get("beat/0")
            # the beat's number changes while process 0 lives; clocks of different machines need not agree
            last_beat = last_beat if before == beat else time.monotonic()
            time.sleep(POLL_S)  # waiting in the store would log a warning every second
            if time.monotonic() - last_beat > HUNG_S:
                raise UserError(f"process 0 of {self.size} has given no sign of life for {HUNG_S:g} s; {_AGAIN}")
        message = json.loads(self.store.get(key))
        if "result" in message:
            return message["result"]
        if message["stopped"]:
            raise Stopped("Stopped with process 0.")
        raise UserError(f"process 0 of {self.size} has failed; its message tells why")

    @contextmanager
    def _store_of_others(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise UserError(f"process {self.rank} of {self.size} has lost all others: torchrun has ended") from error

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store has ended, and with it the run
            while True:
                self._beaten.set(f"beat/{self.rank}", str(count := count + 1))
                if self._over.wait(BEAT_S):
                    return

    def _gone(self) -> str:
        """Message on the processes that have died or ended; "" if all are alive."""
        first = self._beats()
        time.sleep(SILENT_S)
        second = self._beats()
        ended = [str(rank) for rank in range(self.size) if rank != self.rank and first[rank] == second[rank]]
        if len(ended) > 1:
            return f"processes {', '.join(ended)} of {self.size} have died"
        return f"process {ended[0]} of {self.size} has died" if ended else ""

    def _beats(self) -> dict[int, bytes]:
        try:
            return {rank: self.store.get(f"beat/{rank}") for rank in range(self.size)}
        except RuntimeError:  # the store's process has died, and with it process 0
            return {rank: b"0" if rank == 0 else str(time.monotonic()).encode() for rank in range(self.size)}

    def _late(self, error: Exception) -> str:
        return (
            f"process {self.rank} of {self.size}: a collective operation has failed, of at most"
            f" placement.timeout_s={self.timeout_s:g}, though all processes are alive ({_first_line(error)})"
        )


_AGAIN = "all end; go on from the last checkpoint with resume=DIR, started as before"


def _store(limit: timedelta) -> PrefixStore:
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    return PrefixStore(f"embodied/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
