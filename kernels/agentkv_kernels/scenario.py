"""Random fork trees over a paged cache, to test and to measure the kernels with.

Slots that nobody may read hold NaN, block ids are shuffled, lengths are odd.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .launch import allocate_cache
from .plan import StepPlan
from .sharing import DEFAULT_SHARING


class TreeSegment(NamedTuple):
    """A run of blocks shared by `rows`, as a plan takes it."""

    parent: int | None
    start: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass
class Scenario:
    """The rows of one step and the tree over them."""

    block_size: int
    query_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    segments: list[TreeSegment] = field(default_factory=list)
    num_blocks: int = 0

    def plan(self, *, share: bool = True) -> StepPlan:
        """The plan of the step, by the default rule of sharing or without any."""
        return StepPlan.build(
            query_lens=self.query_lens,
            kv_lens=self.kv_lens,
            block_tables=self.block_tables,
            segments=self.segments,
            block_size=self.block_size,
            sharing=DEFAULT_SHARING if share else None,
        )

    def permuted(self, order: list[int]) -> Scenario:
        """The same step with its rows in another order, and its segments as they then come."""
        place = {row: index for index, row in enumerate(order)}
        rows = [tuple(sorted(place[row] for row in s.rows)) for s in self.segments]
        listed = sorted(range(len(rows)), key=lambda i: (rows[i][0], i))
        index_of = {old: new for new, old in enumerate(listed)} | {None: None}
        return Scenario(
            self.block_size,
            [self.query_lens[row] for row in order],
            [self.kv_lens[row] for row in order],
            [self.block_tables[row] for row in order],
            [
                self.segments[i]._replace(parent=index_of[self.segments[i].parent], rows=rows[i])
                for i in listed
            ],
            self.num_blocks,
        )

    def caches(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Random keys and values in the slots of the tables, NaN in all others but block ZERO."""
        generator = torch.Generator().manual_seed(seed)
        is_written = torch.zeros(self.num_blocks + 2, self.block_size, dtype=torch.bool)
        for table, length in zip(self.block_tables, self.kv_lens, strict=True):
            position = torch.arange(length)
            blocks = torch.tensor(table, dtype=torch.int64)[position // self.block_size]
            is_written[blocks, position % self.block_size] = True
        is_written[self.num_blocks] = True
        caches = []
        for dim in (head_dim, value_dim or head_dim):
            shape = self.num_blocks + 2, num_kv_heads, self.block_size, dim
            content = torch.randn(shape, generator=generator)
            content[self.num_blocks] = 0.0
            content = content.masked_fill(~is_written[:, None, :, None], torch.nan)
            cache = allocate_cache(
                self.num_blocks, num_kv_heads, self.block_size, dim, dtype, device
            )
            caches.append(cache.copy_(content))
        return caches[0], caches[1]


def random_tree(
    seed: int,
    *,
    num_rows: int = 5,
    depth: int = 3,
    block_size: int = 16,
    max_segment_blocks: int = 8,
    max_tail: int = 40,
    max_query: int = 1,
) -> Scenario:
    """A tree of at most `depth` segments a path; rows hang anywhere, and run 1 to max_query tokens.

    Two rows may end in the same partial block, always at different lengths.
    """
    total = num_rows * (depth * max_segment_blocks + -(-(max_tail + max_query) // block_size) + 1)
    scenario = Scenario(
        block_size, [1] * num_rows, [0] * num_rows, [[] for _ in range(num_rows)], [], total
    )
    grower = _Grower(
        scenario,
        np.random.default_rng(seed),
        depth,
        max_segment_blocks=max_segment_blocks,
        max_tail=max_tail,
        max_query=max_query,
    )
    grower.grow(list(range(num_rows)), None, [], 0)
    return scenario


class _Grower:
    """Fills a scenario with segments and tails at random."""

    def __init__(
        self,
        scenario: Scenario,
        rng: np.random.Generator,
        depth: int,
        *,
        max_segment_blocks: int,
        max_tail: int,
        max_query: int,
    ) -> None:
        self._scenario = scenario
        self._rng = rng
        self._depth = depth
        self._max_segment_blocks = max_segment_blocks
        self._max_tail = max_tail
        self._max_query = max_query
        self._free: list[int] = rng.permutation(scenario.num_blocks).tolist()

    def grow(self, rows: list[int], parent: int | None, prefix: list[int], level: int) -> None:
        """Give `rows`, which share `prefix`, more to share, or a tail each."""
        if len(rows) < 2 or level == self._depth or self._rng.random() >= 0.9:
            self._end(rows, prefix)
            return
        blocks = self._allocate(int(self._rng.integers(0, self._max_segment_blocks + 1)))
        start = len(prefix) * self._scenario.block_size
        index = len(self._scenario.segments)
        self._scenario.segments.append(TreeSegment(parent, start, tuple(blocks), tuple(rows)))
        cut = int(self._rng.integers(0, len(rows) + 1))
        for part in (rows[:cut], rows[cut:]):
            if part:
                self.grow(part, index, prefix + blocks, level + 1)

    def _end(self, rows: list[int], prefix: list[int]) -> None:
        size, begin = self._scenario.block_size, len(prefix) * self._scenario.block_size
        # The row before, where it ends in its first block, at a length of its own.
        before: int | None = None
        for row in rows:
            query = int(self._rng.integers(1, self._max_query + 1))
            length = begin + int(self._rng.integers(0, self._max_tail)) + query
            table = prefix + self._allocate(-(-(length - begin) // size))
            is_short = length - begin <= size
            if before is not None and is_short and self._rng.random() < 0.5:
                if self._scenario.kv_lens[before] != length:
                    self._free.append(table.pop())
                    table.append(self._scenario.block_tables[before][-1])
                before = None
            else:
                before = row if is_short else None
            self._scenario.query_lens[row] = query
            self._scenario.kv_lens[row] = length
            self._scenario.block_tables[row] = table

    def _allocate(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]
