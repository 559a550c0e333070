"""N environments, divided among child processes and joined into one Environment.

The parent chooses initial states, counts steps and checks values, as `embodied.environments.engine` does everywhere;
children run the simulator. The results therefore do not depend on the number of processes. Letters in shape comments:
N environments, K executed actions of a chunk, A action dimension, M of the environments.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.environments.engine import EpisodeEngine, Outcome, RestorableEngine, Unnumbered
from embodied.errors import UserError
from embodied.saving.tree import load_tree, save_tree
from embodied.seeding import derive
from sims.remote.children import START_S, Child, Died, Pool
from sims.remote.memory import Layout, allocate, arrays, from_json, joined

log = logging.getLogger(__name__)
GIVE_UP = 3
"""Number of deaths in a row, without a step in between, after which a process is given up."""
METRIC = "metric."
FAILURE = "failure."
SIGNAL = "signal."
EVENT = "event."
"""Prefixes of the names of a transition's dictionaries in the shared memory."""
ENDLESS = 1 << 62
"""Step limit if the children's environments have none."""
Message = dict[str, Any]


class RemoteEnvironment(EpisodeEngine):
    """Environments that run in `children`, of which `messages` are the descriptions; see `remote`.

    If a child dies or hangs, its running episodes end like diverged ones, without a reward in their last chunk and with
    the event "lost", and another child replaces it. An exception of the simulator ends the run, as in one process.

    Raises:
        UserError: if a child dies `GIVE_UP` times in a row without a step in between.
    """

    def __init__(
        self,
        orders: list[Message],
        children: list[Child],
        messages: list[Message],
        *,
        pool: Pool,
        seed: int,
        timeout_s: float,
    ) -> None:
        first = messages[0]
        counts = [each["num_envs"] for each in messages]
        super().__init__(
            Contract.from_dict(first["contract"]),
            sum(counts),
            first["step_limit"] or ENDLESS,
            task_names=tuple(first["task_names"]),
            instructions=tuple(first["instructions"]),
            num_starts=first["num_starts"],
            seed=seed,
        )
        self.group = first["group"]
        self.task_index = torch.tensor([index for each in messages for index in each["task_index"]])
        self.timeout_s = timeout_s
        self._orders = orders
        self._pool = pool
        self._children = children
        ends = list(itertools.accumulate(counts))
        self._rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self._deaths = [0] * len(children)  # in a row
        self._mapped_memories: list[set[str]] = [set() for _ in children]  # memories that each child has mapped
        self._files: dict[str, tuple[BinaryIO, Layout]] = {}
        self._memory: dict[str, dict[str, Tensor]] = {}
        action = self.contract.action
        n = self.num_envs
        chunk = (n, self.contract.executed, *action.shape)
        self._allocate(
            "commands", {"actions": (action.dtype, chunk), "starts": ("int64", (n,)), "mask": ("bool", (n,))}
        )
        self._memory["commands"]["starts"].fill_(-1)  # starts of the present episodes, which a new process begins again
        # Ghosts are episodes that a new process has begun again, but that are lost here.
        self._ghost, self.lost = torch.zeros(2, n, dtype=torch.bool)
        self._observation = TensorDict({}, [n])
        self._named = False
        self._place: Message | None = None
        self._has_success = True  # until the first step
        if first["switchable"]:
            self.switch = self._switch

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """Reset as `EpisodeEngine`, and record whether the starts were given."""
        self._named = starts is not None
        return super().reset(mask, starts)

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Send a reset to the children of environments `ids`."""
        commands = self._memory["commands"]
        commands["mask"].fill_(False)[ids] = True
        commands["starts"][ids] = starts
        # not lost if their process dies now: a new one begins them
        self._ghost[ids] = True
        self.lost[ids] = False
        first = "observation" not in self._memory  # all children have to report the layout of their observations
        children = range(len(self._children)) if first else self._having(commands["mask"])
        self._ask({"do": "reset", "named": self._named}, children)
        self._ghost[ids] = False
        self._look(ids)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Send a step to the children with running episodes."""
        self._memory["commands"]["actions"].copy_(actions.detach())
        for child in self._ask({"do": "step"}, self._having((remaining_steps > 0) & ~self._ghost)):
            self._deaths[child] = 0
        ran = (remaining_steps > 0) & ~self._ghost
        lost_now = (remaining_steps > 0) & self._ghost
        self.lost = self.lost | lost_now
        transition = self._memory.get("transition") or self._nothing(actions)
        self._look(ran.nonzero().squeeze(1))
        if bool(ran.any()):
            self._has_success = bool(transition["has_success"][ran].all())
        in_chunk = torch.arange(actions.shape[1]) < remaining_steps.unsqueeze(1)
        signals = {name: each.masked_fill(~ran.unsqueeze(1), 0) for name, each in _named(transition, SIGNAL).items()}
        events = {name: happened & ~lost_now for name, happened in _named(transition, EVENT).items()}
        diverged = events.pop("diverged", torch.zeros_like(lost_now))
        return Outcome(
            transition["reward"].masked_fill(~ran.unsqueeze(1), 0.0),
            transition["executed"] & ran.unsqueeze(1) | in_chunk & lost_now.unsqueeze(1),
            transition["terminated"] & ran,
            transition["success"] & ran,
            transition["truncated"] & ran,
            diverged & ran | lost_now,
            _named(transition, METRIC),
            has_success=self._has_success,
            failures=_named(transition, FAILURE),
            signals=signals,
            events=events | {"lost": self.lost.clone()},
        )

    def observe(self) -> TensorDict:
        """Observations of the children; for lost episodes, the last ones before."""
        return self._observation.clone()

    def close(self) -> None:
        """Return the children to the pool."""
        for child in self._children:
            child.tell({"do": "close"})
        for child in self._children:
            try:
                child.hear(self.timeout_s)
                self._pool.give(child)
            except Died:
                child.end()
        for file, _ in self._files.values():
            file.close()
        self._children = []
        self._files = {}

    def _switch(self, distribution: str, split: str) -> None:
        """Switch the distribution and split of all children; see `SwitchableEnvironment.switch`."""
        self._place = {"do": "switch", "distribution": distribution, "split": split}
        self._ask(self._place, range(len(self._children)))

    def _report(self, diverged: Tensor, overflow: Tensor | None) -> None:
        super()._report(diverged & ~self.lost, overflow)

    def _having(self, mask: Tensor) -> list[int]:
        """Children of the environments in `mask` [N]."""
        return [child for child, rows in enumerate(self._rows) if bool(mask[rows].any())]

    def _look(self, ids: Tensor) -> None:
        """Copy the observations of environments `ids` [M] and of all that are not ghosts."""
        shared = self._memory["observation"]
        copies = {name: part.clone() for name, part in shared.items()}
        unchanged = self._ghost.clone().index_fill(0, ids, False)
        if bool(unchanged.any()) and len(self._observation.keys()):
            for name, part in copies.items():
                part[unchanged] = self._observation[name][unchanged]
        self._observation = TensorDict(copies, [self.num_envs])

    def _nothing(self, actions: Tensor) -> dict[str, Tensor]:
        """Empty transition, for the case that all children died in the first step."""
        flags = torch.zeros(self.num_envs, dtype=torch.bool)
        reward = torch.zeros(actions.shape[:2])
        return {"reward": reward, "executed": reward > 0.0, "terminated": flags, "success": flags, "truncated": flags}

    def _tell(self, child: int, message: Message) -> None:
        """Send `message`, after the memory that `child` has not mapped yet."""
        process = self._children[child]
        rows = self._rows[child]
        for name, (file, layout) in self._files.items():
            if name not in self._mapped_memories[child]:
                mapping = {"do": "map", "name": name, "layout": layout, "rows": [rows.start, rows.stop]}
                process.tell(mapping, file.fileno())
                self._mapped_memories[child].add(name)
        process.tell(message)

    def _ask(self, message: Message, children: Iterable[int], own: Mapping[int, Message] | None = None) -> list[int]:
        """Send `message`, with the entries in `own`, to `children`; returns the ones that answered.

        All others are replaced with new ones.
        """
        recipients = list(children)
        for child in recipients:
            self._tell(child, {**message, **(own or {}).get(child, {})})
        replies, dead = self._hear(recipients)
        _, died = self._hear(self._fit(replies))
        for child, error in (dead | died).items():
            self._renew(child, error)
        return [child for child in replies if child not in died]

    def _hear(self, children: list[int]) -> tuple[dict[int, Message], dict[int, Died]]:
        """Replies of `children`, and the errors of the ones that died."""
        replies: dict[int, Message] = {}
        dead: dict[int, Died] = {}
        first_error: Exception | None = None
        for child in children:
            try:
                replies[child] = self._children[child].hear(self.timeout_s)
            except Died as error:
                dead[child] = error
            except (UserError, RuntimeError) as error:  # raised once all have answered
                first_error = first_error or error
        if first_error:
            raise first_error
        return replies, dead

    def _fit(self, replies: Mapping[int, Message]) -> list[int]:
        """Allocate the memory that `replies` request; returns the children that now write into it."""
        for name in ("observation", "transition"):
            layouts = [from_json(reply[name]) for reply in replies.values() if name in reply]
            if layouts and name not in self._files:
                self._allocate(name, joined(layouts, self.num_envs))
        waiting = [child for child, reply in replies.items() if {"observation", "transition"} & reply.keys()]
        for child in waiting:
            self._tell(child, {"do": "ready"})
        return waiting

    def _allocate(self, name: str, layout: Layout) -> None:
        self._files[name] = file, _ = allocate(layout), layout
        self._memory[name] = {key: torch.from_numpy(array) for key, array in arrays(file.fileno(), layout).items()}

    def _renew(self, child: int, error: Died) -> None:
        """Replace `child` with a new process; its running episodes are lost."""
        rows = self._rows[child]
        has_episode = self._memory["commands"]["starts"][rows] >= 0
        running = int((has_episode & ~self.done[rows] & ~self._ghost[rows]).sum())
        self._ghost[rows] |= has_episode
        log.warning(f"a process of the simulator {error}; {running} episodes are lost, another process takes its place")
        while True:
            self._deaths[child] += 1
            if self._deaths[child] >= GIVE_UP:
                raise UserError(
                    f"a process of the simulator died {GIVE_UP} times in a row without a step; the last one {error}"
                )
            self._children[child].end()
            self._children[child], self._mapped_memories[child] = self._pool.take(), set()
            try:
                return self._rebuild(child)
            except Died as again:
                error = again

    def _rebuild(self, child: int) -> None:
        """Set up a new process: make its environments, and begin again every episode that has begun."""
        process = self._children[child]
        rows = self._rows[child]
        commands = self._memory["commands"]
        order = self._orders[child]
        process.ask(order | {"seed": _seed(order["seed"], self._deaths[child])}, START_S)
        if self._place:
            process.ask(self._place, self.timeout_s)
        commands["mask"][rows] = commands["starts"][rows] >= 0
        self._tell(child, {"do": "reset", "named": True})
        if self._fit({child: process.hear(self.timeout_s)}):
            process.hear(self.timeout_s)


class RestorableRemote(RemoteEnvironment, RestorableEngine):
    """A RemoteEnvironment of children whose state can be saved and restored."""

    def save(self) -> dict[str, Any]:
        """States of the children, and the flags and last observations of lost episodes."""
        with tempfile.TemporaryDirectory() as folder:
            paths = self._files_in(folder)
            self._surely({"do": "save"}, paths)
            children = {str(child): load_tree(paths[child]["path"]) for child in paths}
        return {
            "children": children,
            "ghost": self._ghost.clone(),
            "lost": self.lost.clone(),
            "seen": self._observation,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of each child; the number of children has to be the same."""
        self._memory["commands"]["starts"].copy_(self.start)
        self._ghost, self.lost = state["ghost"].clone(), state["lost"].clone()
        with tempfile.TemporaryDirectory() as folder:
            paths = self._files_in(folder)
            for child, tree in state["children"].items():
                save_tree(paths[int(child)]["path"], tree)
            self._surely({"do": "load"}, paths)
        self._observation = state["seen"].clone()

    def _files_in(self, folder: str) -> dict[int, Message]:
        return {child: {"path": str(Path(folder) / f"{child}.safetensors")} for child in range(len(self._children))}

    def _surely(self, message: Message, own: dict[int, Message]) -> None:
        """Send `message` to all children, and again to the new processes of children that died."""
        pending = set(own)
        while pending:
            pending -= set(self._ask(message, sorted(pending), own))


def remote(
    order: Message, num_envs: int, *, group: int, seed: int, processes: int, pool: Pool, timeout_s: float
) -> RemoteEnvironment | Unnumbered:
    """An Environment of at least `num_envs`, divided among child processes, with the capabilities of theirs.

    Args:
        order: message that makes a child's environments: task, options, distribution and split.
        num_envs: N; rounded up to whole worlds if environments share them.
        group: number of consecutive environments that have to be in one process.
        seed: selects the initial states of a reset without starts.
        processes: largest number of processes; there are at most as many as worlds.
        pool: source of the children, to which they return.
        timeout_s: time without an answer after which a child counts as dead.

    Raises:
        UserError: if a child cannot make its environments, with its message.
    """
    worlds = -(-num_envs // group)
    count = min(processes, worlds)
    bounds = [group * (worlds * child // count) for child in range(count + 1)]
    parts = [
        {"first": low, "num_envs": high - low, "seed": _seed(seed, child)}
        for child, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    orders = [{"do": "make", **order, **part} for part in parts]
    children = [pool.take() for _ in orders]
    for child, each in zip(children, orders, strict=True):
        child.tell(each)
    try:
        descriptions = [child.hear(START_S) for child in children]
    except Died as error:
        raise UserError(f"a process of the simulator {error}") from None
    names = descriptions[0]["task_names"]
    present = {index for each in descriptions for index in each["task_index"]}
    if len(present) < min(len(names), sum(each["num_envs"] for each in descriptions)):
        missing = ", ".join(name for index, name in enumerate(names) if index not in present)
        raise UserError(f"no process runs {missing}: only an EpisodeEngine deals tasks over processes; use fewer")
    kind = RestorableRemote if descriptions[0]["restorable"] else RemoteEnvironment
    env = kind(orders, children, descriptions, pool=pool, seed=seed, timeout_s=timeout_s)
    return env if descriptions[0]["numbered"] else Unnumbered(env)


def _named(tensors: Mapping[str, Tensor], beginning: str) -> dict[str, Tensor]:
    """Copies of the entries of `tensors` whose names have the prefix `beginning`, by the rest of the name."""
    return {name.removeprefix(beginning): tensors[name].clone() for name in tensors if name.startswith(beginning)}


def _seed(seed: int, number: int) -> int:
    return derive(seed, "process", number) & 0x7FFFFFFF
