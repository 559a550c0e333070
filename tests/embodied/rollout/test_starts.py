"""Retried initial states: assigning all at once equals assigning one after the other."""

from collections import deque

import pytest
import torch
from torch import Tensor

from embodied import seeding
from embodied.rollout.starts import RECENT, RetryStarts


class OneByOne:
    """The reference, environment by environment."""

    def __init__(self, task_index: list[int], retry: float, attempts: int, generator: torch.Generator) -> None:
        self.task_index, self.retry, self.attempts = task_index, retry, attempts
        self.fresh = [int(torch.randint(1 << 40, (), generator=generator))] * (max(task_index) + 1)
        self.generator = seeding.child(generator)
        self.failed: list[deque[tuple[int, int]]] = [deque() for _ in self.fresh]
        self.running: list[tuple[int, int] | None] = [None] * len(task_index)
        self.firsts: deque[bool] = deque(maxlen=RECENT)
        self.ended = [False] * len(task_index)

    def __call__(self, finished: Tensor, success: Tensor) -> list[int]:
        starts, draws = [0] * len(self.task_index), torch.rand(len(self.task_index), generator=self.generator)
        for env in finished.nonzero().flatten().tolist():
            queue, before = self.failed[self.task_index[env]], self.running[env]
            self.ended[env] = before is not None
            if before and before[1] == 0:
                self.firsts.append(bool(success[env]))
            if before and not success[env] and before[1] + 1 < self.attempts:
                queue.append((before[0], before[1] + 1))
            if queue and draws[env] < self.retry:
                now = queue.popleft()
            else:
                now = self.fresh[self.task_index[env]], 0
                self.fresh[self.task_index[env]] += 1
            self.running[env], starts[env] = now, now[0]
        return starts

    def metrics(self) -> dict[str, float]:
        return {"first_attempts_success": sum(self.firsts) / len(self.firsts)} if all(self.ended) else {}


@pytest.mark.parametrize("trial", range(40))
def test_dealt_all_at_once_they_are_those_dealt_one_after_the_other(trial: int) -> None:
    random = torch.Generator().manual_seed(trial)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    tasks, envs = draw(1, 6), draw(1, 30)
    index = torch.randint(tasks, (envs,), generator=random)
    retry, attempts = float(torch.rand((), generator=random)) ** 0.5, draw(1, 5)
    busy, good = torch.rand(2, generator=random).tolist()

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(100 + trial)

    reference = OneByOne(index.tolist(), retry, attempts, generator())
    starts = RetryStarts(index, retry=retry, attempts=attempts, generator=generator())
    for step in range(60):
        finished = torch.rand(envs, generator=random) < busy
        if step == 0 and trial % 2:
            finished = torch.ones_like(finished)  # as collection begins
        success = torch.rand(envs, generator=random) < good
        assert starts(finished, success).tolist() == reference(finished, success)
        assert starts.fresh.tolist() == reference.fresh
        assert [queue.tolist() for queue in starts.failed] == [[list(each) for each in q] for q in reference.failed]
        assert starts.firsts.tolist() == list(reference.firsts)
        assert starts.metrics() == pytest.approx(reference.metrics())
        if step == 30:
            copied = RetryStarts(index, retry=retry, attempts=attempts, generator=generator())
            copied.load_state_dict(starts.state_dict())
            starts = copied


def test_a_saved_state_is_not_changed_by_what_follows() -> None:
    starts = RetryStarts(torch.tensor([0, 0]), retry=0.5, attempts=3, generator=torch.Generator())
    everyone = torch.ones(2, dtype=torch.bool)
    starts(everyone, ~everyone)
    saved = starts.state_dict()
    kept = {name: saved[name].clone() for name in ("fresh", "running", "firsts", "ended")}
    queues = [queue.clone() for queue in saved["failed"]]
    for _ in range(3):
        starts(everyone, ~everyone)
    assert all(torch.equal(saved[name], value) for name, value in kept.items())
    assert all(torch.equal(*pair) for pair in zip(saved["failed"], queues, strict=True))


def test_what_is_abandoned_was_no_attempt_and_retries_are_dealt_again() -> None:
    starts = RetryStarts(torch.tensor([0, 0, 0, 1]), retry=1.0, attempts=3, generator=torch.Generator())
    everyone = torch.ones(4, dtype=torch.bool)
    starts.abandon()  # before anything began
    begun = starts(everyone, ~everyone)
    again = starts(torch.tensor([True, False, False, True]), torch.tensor([False, False, False, True]))
    assert again[0] == begun[0]  # at once, for the second time
    assert starts.firsts.tolist() == [False, True]
    starts.abandon()
    dealt = starts(everyone, ~everyone)
    assert starts.firsts.tolist() == [False, True]  # no environment ended an episode
    assert dealt[0] == begun[0]
    assert starts.running[0].tolist() == [int(begun[0]), 1]  # still the second attempt
    assert (starts.running[1:, 1] == 0).all()
    assert not len(starts.failed[0])
    assert starts.metrics() == {}  # until every environment has ended an episode since
    starts(everyone, everyone)
    assert starts.firsts.tolist() == [False, True, True, True, True]
    assert starts.metrics() == {"first_attempts_success": 0.8}
