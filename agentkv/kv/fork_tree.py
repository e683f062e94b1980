"""Which runs of blocks several rows of a step read together.

A pure function of the rows' block ids. Knows nothing about pools, tokens or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Blocks `start`, `start + 1`, ... of every row in `rows`; `parent` is the run before it."""

    parent: int | None
    start: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


def shared_runs(tables: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Run]:
    """All maximal runs that two or more rows share, each after its parent.

    Row i may share the first `limits[i]` of its blocks `tables[i]`. Two rows share a run only if
    their blocks are equal from the first one on, so a run's rows are among its parent's.
    """
    runs: list[Run] = []
    pending: list[tuple[int | None, int, Sequence[int]]] = [(None, 0, range(len(tables)))]
    while pending:
        parent, start, rows = pending.pop()
        groups: dict[int, list[int]] = {}
        for row in rows:
            if limits[row] > start:
                groups.setdefault(tables[row][start], []).append(row)
        for group in groups.values():
            if len(group) > 1:
                end = _common_end(tables, group, start, min(limits[row] for row in group))
                pending.append((len(runs), end, group))
                runs.append(Run(parent, start, tuple(tables[group[0]][start:end]), tuple(group)))
    return runs


def _common_end(tables: Sequence[Sequence[int]], rows: Sequence[int], start: int, end: int) -> int:
    """The largest end up to which the rows' blocks from `start` on are equal."""
    first = tables[rows[0]]
    shared = first[start:end]
    for row in rows[1:]:
        table = tables[row]
        if table[start:end] == shared:
            continue
        low, high = start, end
        # Blocks start..low are equal, blocks start..high are not.
        while high - low > 1:
            middle = (low + high) // 2
            if table[low:middle] == first[low:middle]:
                low = middle
            else:
                high = middle
        end = low
        shared = first[start:end]
    return end
