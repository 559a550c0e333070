"""Published checkpoints as starting points of a run: what their files show of their authors' evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartingPoint:
    """Published `weights`, a folder or a name on the hub, and the evaluation of their authors.

    `policy` is the name of ours that reads them, `program` of the one that wrote them. They learned from data of the
    `benchmark`, as `evidence` shows, if their files name one. Chunks have `horizon` actions, of which `executed` are
    executed, and are predicted from pictures of the first `cameras` of the benchmark. `data_sets` are those with
    statistics, by the name that policy.unnorm_key takes.
    """

    weights: str
    policy: str
    program: str
    horizon: int
    executed: int
    cameras: int
    data_sets: tuple[str, ...] = ()
    benchmark: str | None = None
    evidence: str = ""
