"""Store of experience: decisions of all episodes in a ring, for learners that learn from more than the last rollout.

Letters: T decisions of N environments in a rollout, K executed actions of a decision, A action size, R observations of
episodes, B sampled rows, H actions of a chunk, L decisions of a sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.decisions import LOST, NONE, following_decisions, observation_after, of_episodes, of_rollout
from embodied.data.episodes import SUCCEEDED, UNKNOWN, Episodes
from embodied.errors import UserError
from embodied.rollout.memory import STARTED
from embodied.rollout.rollout import Rollout

LINKS = "following", "final", "env", "episode", "cut", "known", "starts"
"""Columns that are not of a decision itself."""


class _Links(NamedTuple):
    """Links of stored decisions, each [size]: rows, which are the decision's own where there is no other."""

    following: Tensor  # the next decision of the same environment
    next: Tensor  # the next decision of the same episode
    executed: Tensor  # number of executed actions


class EpisodeStore:
    """Ring of the last `capacity` decisions, each with its episode, whatever its outcome; observations are stored once.

    An episode may span several rollouts; its decisions can be drawn before it ends. The last decision of an episode may
    execute fewer than K actions, and so may one after which a person hands a robot back. A row is the place of a
    decision in the ring, in order of arrival: by time, then by environment. Returns of `transitions` are bootstrapped
    at the end of each rollout, before decisions of which the policy was not the author, and before decisions with
    unknown consequences.

    The decisions are stored on `device`, if None on that of the first addition.
    """

    def __init__(self, capacity: int, device: torch.device | str | None = None) -> None:
        self.capacity = capacity
        self.device = device
        self.written = 0
        """Number of decisions added so far, which is the number of the next one."""
        self.completed = 0
        """Number of episodes that ended so far."""
        self._rows = TensorDict({}, [0])  # [size], size <= capacity: grows while the ring fills
        self._finals = TensorDict({}, [0])  # [F] observations that no stored decision follows
        self._free = torch.zeros(0, dtype=torch.bool)  # [F] finals that no row uses
        # [N] of each environment: number of its last decision, whether its episode runs, and the episode's steps so far
        self._streams = TensorDict({}, [0])
        self._rewards_missing = False
        self._complete_rows: Tensor | None = None  # rows with known consequences; None: all
        self._cached_links: _Links | None = None
        self._cached_intervened: Tensor | None = None  # rows of `intervened`
        self._returns = TensorDict({}, [0])  # [capacity] returns of `transitions`, by row
        self._returns_of: tuple[int, float, int] = (0, 0.0, 0)  # their steps, discount, and the number after the last

    def __len__(self) -> int:
        """Number of stored decisions with known consequences."""
        return min(self.written, self.capacity) if self._complete_rows is None else len(self._complete_rows)

    def max_rows(self, decisions: int) -> int:
        """Largest number of rows that take memory once `decisions` were added; memory grows by doubling."""
        return min(self.capacity, 2 * decisions)

    @torch.no_grad()
    def add(self, rollout: Rollout, **values: Tensor) -> None:
        """Append the decisions of `rollout`, with further `values` [T, N, ...] of them by name.

        Episodes that do not continue where they were are stored as truncated, with an unknown outcome.

        Raises:
            UserError: for other columns than those stored.
        """
        acted = rollout.executed.any(-1)  # a frozen environment decides nothing
        if not bool(acted.any()):
            return
        rollout = _ended_by_faults(rollout, acted)
        chosen = acted.flatten().nonzero().squeeze(1)
        position = torch.full_like(acted, NONE, dtype=torch.int64)
        position.view(-1)[chosen] = torch.arange(len(chosen), device=chosen.device)
        following, first = following_decisions(position)
        continues = self._continues(rollout)
        columns = of_rollout(rollout, continues) | {"following": following}
        assert not columns.keys() & values.keys()
        rows = TensorDict(cast(Any, columns | values), acted.shape).flatten(0, 1)
        last = acted & rollout.done  # no decision of the same episode follows in this rollout
        last[-1] = acted[-1]
        ends = last.flatten().nonzero().squeeze(1)
        after = observation_after(rollout, ends)
        slots = self._append(rows if len(chosen) == len(rows) else rows[chosen], position.view(-1)[ends], after)
        # [N] rows of the first and the last decision of each environment
        begin, end = (_at(slots, each.to(slots.device)) for each in (first, position.amax(0)))
        self._link(begin, continues.to(slots.device))
        steps = rollout.episode_steps
        streams = {
            "last": torch.where(end >= 0, self._number(end), NONE),
            "running": (acted & ~rollout.done)[-1].to(slots.device),
            "steps": torch.zeros_like(end) if steps is None else steps[-1].to(end),
        }
        self._streams = TensorDict(cast(Any, streams), [len(end)])
        self._complete()

    def add_episodes(self, episodes: Episodes, executed: int | None = None) -> None:
        """Append all `episodes`; a decision of `executed` actions begins at every observation.

        It is as long as those of the store if None, of one action in an empty one. Pictures are stored decoded.

        Raises:
            UserError: if an episode has no observation where the next decision begins, and for other columns than those
                stored.
        """
        if executed is None:
            executed = int(self._rows["reward"].shape[1]) if self.written else 1
        rows = torch.arange(max(0, len(episodes) - self.capacity), len(episodes))
        decisions, ends, after = of_episodes(episodes, rows, executed)
        decisions["episode"] += self.completed
        self._rewards_missing |= bool(decisions["reward"].isnan().any())
        self._append(decisions, ends, after)
        self.completed += len(episodes.ends)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Rows of `count` decisions with known consequences, drawn uniformly with replacement."""
        indices = torch.randint(len(self), (count,), generator=generator).to(self.device)
        return indices if self._complete_rows is None else self._complete_rows[indices]

    def intervened(self) -> Tensor:
        """Rows of decisions with known consequences in which a person acted."""
        if self._cached_intervened is None:
            by_person = self._column("human").any(-1) & self._column("known") if self.written else torch.zeros(0)
            self._cached_intervened = by_person.nonzero().squeeze(1)
        return self._cached_intervened

    def passed(self) -> Tensor:
        """Rows of decisions with known consequences in which nobody acted but the policy; some have to be stored."""
        return (self._column("known") & ~self._column("human").any(-1)).nonzero().squeeze(1)

    def succeeded(self) -> Tensor:
        """Rows of successful episodes, in the order in which these ended: by rollout, environment, then time."""
        rows = self._in_order(self._column("success") == SUCCEEDED)
        return rows[self._rows["episode"][rows].argsort(stable=True)]

    def decisions(self, rows: Tensor, *names: str) -> TensorDict:
        """Decisions `rows` [*B] as they were made: all columns, or those with `names`.

        Signals and events that not all additions have are left out.
        """
        columns = self._rows.select(*names) if names else self._rows.exclude(*LINKS)
        return _picked(columns, rows.flatten()).view(rows.shape)

    def chunks(self, rows: Tensor, horizon: int) -> TensorDict:
        """Executed actions from the decisions `rows` on, with the keys of `Episodes.chunks`.

        Chunks that extend beyond their episode, or what is stored of it, or beyond ceil(H / K) decisions where some are
        short, repeat the last action; `valid` is False there.
        """
        walk, reached = self._walk(rows, -(-horizon // self._rows["reward"].shape[1]), across=False)
        # [B, W] numbers of actions up to and including each decision of the walk; the last is that of all
        length = (self._links().executed[walk] * reached).t()
        until = length.cumsum(1)
        count = until[:, -1:]
        step = torch.arange(horizon, device=rows.device)
        index = torch.minimum(step, count - 1)
        place = torch.searchsorted(until, index, right=True)
        decision = walk.t().gather(1, place)
        action = index - (until - length).gather(1, place)
        return TensorDict(
            {
                "observation": _picked(self._rows["observation"], rows),
                "actions": self._rows["actions"][decision, action],
                "valid": step < count,
                "human": self._rows["human"][decision, action],
                "task_index": self._rows["task_index"].index_select(0, rows),
            },
            batch_size=[len(rows)],
        )

    def transitions(self, rows: Tensor, steps: int, discount: float) -> TensorDict:
        """Transitions over `steps` decisions from `rows`, with returns that are discounted by control step.

        They are shorter where the class bootstraps. Returns {observation, actions [B, K, A], reward [B], carry [B],
        next_observation}: `carry` is the factor of the following value, zero after a termination.

        Raises:
            UserError: for a row with an unknown reward or next observation.
        """
        self._extend_returns(steps, discount)
        total, carry, last = (self._returns[name].index_select(0, rows) for name in ("total", "carry", "last"))
        if (self._rewards_missing or self._complete_rows is not None) and bool(total.isnan().any()):
            raise UserError("expected decisions with known rewards and next observations; record rewards of episodes")
        final = self._rows["final"].index_select(0, last)
        # a missing observation after a termination is replaced by the one before: nothing depends on it
        following = self._links().next.index_select(0, last)
        after = _picked(self._rows["observation"], following)
        ended = (final >= 0).nonzero().squeeze(1)
        if len(self._finals):
            after = after.select(*self._finals.keys())
            for key, part in self._finals.items(include_nested=True, leaves_only=True):
                after[key][ended] = cast(Tensor, part).index_select(0, final[ended])
        return TensorDict(
            {
                "observation": _picked(self._rows["observation"], rows),
                "actions": self._rows["actions"].index_select(0, rows),
                "reward": total,
                "carry": carry,
                "next_observation": after,
            },
            batch_size=[len(rows)],
        )

    def sequences(self, rows: Tensor, length: int) -> TensorDict:
        """Successive decisions of an environment, `length` from each of `rows`, [L, B], for policies with memory.

        They go on with the environment's next episode. Returns the columns of `decisions`, observation `STARTED`, and
        "valid", which is False after the environment's last decision.
        """
        walk, reached = self._walk(rows, length, across=True)
        sequences = self.decisions(walk)
        sequences["observation", STARTED] = self._rows["starts"][walk]
        return sequences.set("valid", reached)

    def state_dict(self) -> dict[str, Any]:
        """Stored decisions and everything else needed to continue."""
        return {
            "capacity": self.capacity,
            "written": self.written,
            "completed": self.completed,
            "decisions": self._rows[: min(self.written, self.capacity)],
            "finals": self._finals,
            "free": self._free,
            "streams": self._streams,
            "rewards_missing": self._rewards_missing,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            UserError: for a state of an earlier release or of another capacity.
        """
        if "decisions" not in state:
            raise UserError(
                "this checkpoint's replay is of an earlier release: go on from its weights with start_from="
            )
        if state["capacity"] != self.capacity:
            raise UserError(f"expected a replay with capacity {self.capacity}, got one with {state['capacity']}")
        self.written = state["written"]
        self.completed = state["completed"]
        self._rows, self._finals, self._free, self._streams = (
            state[name].clone() for name in ("decisions", "finals", "free", "streams")
        )
        if self.written:
            self.device = self._rows["reward"].device  # after a restart it may differ from the device of new rollouts
        self._rewards_missing = state["rewards_missing"]
        self._returns_of = (0, 0.0, 0)
        self._refresh()

    def _continues(self, rollout: Rollout) -> Tensor:
        """Environments whose stored episode goes on in `rollout`, [N] bool."""
        if len(self._streams) != rollout.done.shape[1]:
            return torch.zeros_like(rollout.done[0])
        running = self._streams["running"]
        steps = self._streams["steps"]
        if rollout.episode_steps is None:
            return running
        before = rollout.episode_steps[0] - rollout.executed[0].sum(-1)
        # a fault may have ended it before the first action of this rollout
        ended = rollout.done[0] & ~rollout.executed[0].any(-1)
        return running & (before.to(steps.device) == steps) & ~ended.to(steps.device)

    def _append(self, rows: TensorDict, ends: Tensor, after: TensorDict | None) -> Tensor:
        """Write `rows` [M], of which `ends` are followed by the observations `after`, unknown if None.

        Column "following" is an index into `rows`. Returns the rows of the ring, [M], `NONE` where there is no room.
        """
        count = len(rows)
        self.device = self.device or rows["reward"].device
        self._free = self._free.to(self.device)
        skipped = max(0, count - self.capacity)
        rows = cast(TensorDict, rows[skipped:]).to(self.device)
        ends = ends.to(self.device) - skipped
        after = after if after is None else after.to(self.device)
        numbers = self.written + torch.arange(len(rows), device=self.device)
        slots = numbers % self.capacity
        final = torch.full_like(slots, NONE)
        self._release(slots[numbers >= self.capacity])
        is_stored = ends >= 0
        if after is None:
            final[ends[is_stored]] = LOST
        else:
            final[ends[is_stored]] = self._store_finals(cast(TensorDict, after[is_stored]))
        rows = rows.copy().update({"following": _at(slots, rows["following"] - skipped), "final": final})
        self._write(rows, slots)
        self.written += len(rows)
        self._refresh()
        return torch.cat((slots.new_full((skipped,), NONE), slots))

    def _write(self, rows: TensorDict, slots: Tensor) -> None:
        if not self.written:
            self._rows = _enlarged(cast(TensorDict, rows[:0]), min(self.capacity, len(rows)))
        for name in ("signals", "events"):  # a value that is unknown somewhere is stored nowhere
            shared = [key for key in self._rows[name].keys() if key in rows[name].keys()]  # noqa: SIM118
            self._rows[name], rows[name] = (each[name].select(*shared) for each in (self._rows, rows))
        _check_same(self._rows, rows)
        needed = min(self.capacity, self.written + len(rows))
        if needed > len(self._rows):
            self._rows = _enlarged(self._rows, self.max_rows(needed))
        self._rows[slots] = rows

    def _store_finals(self, observation: TensorDict) -> Tensor:
        """Store `observation` [E] and return its places among the final observations."""
        if not len(self._finals):
            self._finals = cast(TensorDict, observation[:0])
        _check_same(self._finals, observation)
        missing = len(observation) - int(self._free.sum())
        if missing > 0:
            size = max(2 * len(self._finals), len(self._finals) + missing)
            self._free = torch.cat((self._free, self._free.new_ones(size - len(self._finals))))
            self._finals = _enlarged(self._finals, size)
        places = self._free.nonzero().squeeze(1)[: len(observation)]
        self._finals[places] = observation
        self._free[places] = False
        return places

    def _release(self, slots: Tensor) -> None:
        """Free the final observations of rows `slots`."""
        final = self._rows["final"][slots] if len(slots) else slots
        self._free[final[final >= 0]] = True

    def _link(self, first: Tensor, continues: Tensor) -> None:
        """Let the last decisions before the newest rollout be followed by its first, rows [N]; note those abandoned."""
        if not len(self._streams):
            return
        stored = (self._streams["last"] >= max(0, self.written - self.capacity)).nonzero().squeeze(1)
        last = self._streams["last"][stored] % self.capacity
        if len(self._streams) == len(first):
            self._rows["following"][last] = first[stored]
            continued = continues[stored]
        else:
            continued = torch.zeros_like(stored, dtype=torch.bool)
        self._release(last[continued])
        self._rows["final"][last[continued]] = NONE
        self._rows["truncated"][last[self._streams["running"][stored] & ~continued]] = True

    def _complete(self) -> None:
        """Number the episodes that have ended, and write their outcome to all of their decisions."""
        running = self._in_order(self._column("episode") == NONE)
        rows = running[self._rows["env"][running].argsort(stable=True)]  # by environment, then by time
        ended = self._rows["terminated"][rows] | self._rows["truncated"][rows]
        # ascending; changes after each ending and environment
        part = ended.cumsum(0) - ended.long() + self._rows["env"][rows]
        size = int(part[-1]) + 1 if len(part) else 0
        complete = torch.zeros(size, dtype=torch.bool, device=part.device).index_fill(0, part[ended], True)
        outcome = torch.full((size,), UNKNOWN, dtype=torch.int8, device=part.device)
        outcome[part[ended]] = self._rows["success"][rows[ended]]
        number = self.completed + complete.cumsum(0) - 1
        whole = complete[part]
        self._rows["episode"][rows[whole]] = number[part[whole]]
        self._rows["success"][rows[whole]] = outcome[part[whole]]
        self.completed += int(complete.sum())

    def _walk(self, rows: Tensor, count: int, *, across: bool) -> tuple[Tensor, Tensor]:
        """Rows of `count` successive decisions from `rows` on, [count, B], within an episode or `across` several.

        The second tensor is False where there are no more; the last row is repeated there.
        """
        links = self._links().following if across else self._links().next
        walk = [rows]
        for _ in range(count - 1):
            walk.append(links.index_select(0, walk[-1]))
        steps = torch.stack(walk)
        reached = torch.ones_like(steps, dtype=torch.bool)
        reached[1:] = steps[1:] != steps[:-1]
        return steps, reached

    def _extend_returns(self, steps: int, discount: float) -> None:
        """Compute the returns of all decisions that were added since they were computed last."""
        if self._returns_of[:2] != (steps, discount):
            count = torch.zeros(self.capacity, device=self.device)
            self._returns = TensorDict(
                {"total": count, "carry": count.clone(), "last": count.long()}, batch_size=[self.capacity]
            )
            self._returns_of = (steps, discount, 0)
        begin = max(self._returns_of[2], self.written - self.capacity)
        if begin < self.written:
            rows = torch.arange(begin, self.written, device=self.device) % self.capacity
            self._returns[rows] = self._discounted(rows, steps, discount)
            self._returns_of = (steps, discount, self.written)

    def _discounted(self, rows: Tensor, steps: int, discount: float) -> TensorDict:
        """Returns over up to `steps` decisions (Sutton and Barto, Reinforcement Learning, chapter 7) from `rows`, [B].

        Returns {total, carry, last}: the discounted reward, NaN if it is unknown, the factor of the value that follows,
        and the row after which that value is taken.
        """
        columns = self._rows.select("reward", "executed", "cut", "following", "terminated", "known")
        stored = columns[: min(self.written, self.capacity)]
        # sum_i discount^i r_i of each decision, and discount^k after its k steps
        powers = discount ** torch.arange(stored["reward"].shape[1], dtype=stored["reward"].dtype, device=rows.device)

        def earned(at: Tensor) -> Tensor:
            return (stored["reward"][at] * powers).sum(-1)

        def decay(at: Tensor) -> Tensor:
            return discount ** stored["executed"][at].sum(-1).to(powers.dtype)

        # Each pass adds one reward: R <- R + carry r_{last+1}, carry <- carry gamma^k, until a decision is cut.
        total = earned(rows)
        carry = decay(rows)
        last = rows
        for _ in range(steps - 1):
            continues = ~stored["cut"][last]
            following = torch.where(continues, stored["following"][last], last)
            total = torch.where(continues, total + carry * earned(following), total)
            carry = torch.where(continues, carry * decay(following), carry)
            last = following
        total = total.masked_fill(~stored["known"][rows], torch.nan)
        carry = carry * ~stored["terminated"][last]
        return TensorDict({"total": total, "carry": carry, "last": last}, [len(rows)])

    def _links(self) -> _Links:
        """Links of the stored decisions, computed once after every addition."""
        if self._cached_links is None:
            following, final, executed = (self._column(name) for name in ("following", "final", "executed"))
            own = torch.arange(len(following), device=following.device)
            following = torch.where(following >= 0, following, own)
            self._cached_links = _Links(following, torch.where(final == NONE, following, own), executed.sum(-1))
        return self._cached_links

    def _refresh(self) -> None:
        """Compute which decisions have known consequences, and forget the links."""
        self._cached_links = None
        self._cached_intervened = None
        is_complete = self._column("known") if self.written else torch.ones(0, dtype=torch.bool)
        self._complete_rows = None if bool(is_complete.all()) else is_complete.nonzero().squeeze(1)

    def _column(self, name: str) -> Tensor:
        return self._rows[name][: min(self.written, self.capacity)]

    def _in_order(self, mask: Tensor) -> Tensor:
        """Rows where `mask` is True, in order of arrival."""
        rows = mask.nonzero().squeeze(1)
        oldest = self.written % self.capacity
        return torch.cat((rows[rows >= oldest], rows[rows < oldest]))

    def _number(self, rows: Tensor) -> Tensor:
        """Numbers of the decisions at `rows`."""
        return self.written - 1 - (self.written - 1 - rows) % self.capacity


def _ended_by_faults(rollout: Rollout, acted: Tensor) -> Rollout:
    """Copy of `rollout` in which decisions are truncated if a fault ended the episode before the next action."""
    before_fault = acted[:-1] & ~rollout.done[:-1] & rollout.done[1:] & ~acted[1:]
    if not bool(before_fault.any()):
        return rollout
    truncated = rollout.truncated.clone()
    truncated[:-1] |= before_fault
    return replace(rollout, truncated=truncated)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values` at `index`, `NONE` where that is negative."""
    return torch.where(index >= 0, values[index.clamp_min(0)], NONE)


def _picked(part: TensorDict, rows: Tensor) -> TensorDict:
    # Several times as fast as part[rows].
    return cast(TensorDict, part.apply(lambda each: each.index_select(0, rows), batch_size=[len(rows)]))


def _check_same(stored: TensorDict, added: TensorDict) -> None:
    """Check that both have the same columns: TensorDict would fill missing ones with zeros, and repeat shorter ones.

    Raises:
        UserError: with the columns that differ.
    """
    expected, got = (
        {
            f"{'.'.join(key) if isinstance(key, tuple) else key} {list(part.shape[1:])}"
            for key, part in each.items(include_nested=True, leaves_only=True)
        }
        for each in (stored, added)
    )
    if expected != got:
        lacks, more = (", ".join(sorted(names)) or "nothing more" for names in (expected - got, got - expected))
        raise UserError(f"expected {lacks} as in the store, got {more}")


def _enlarged(rows: TensorDict, size: int) -> TensorDict:
    """Copy of `rows` with room for `size`."""
    larger = cast(TensorDict, rows.apply(lambda part: part.new_zeros(size, *part.shape[1:]), batch_size=[size]))
    larger[: len(rows)] = rows
    return larger
