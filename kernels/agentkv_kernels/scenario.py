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
        """The plan of the step."""
        return StepPlan.build(
            query_lens=self.query_lens,
            kv_lens=self.kv_lens,
            block_tables=self.block_tables,
            segments=self.segments,
            block_size=self.block_size,
            share=share,
        )

    def permuted(self, order: list[int]) -> Scenario:
        """The same step with its rows in another order."""
        place = {row: index for index, row in enumerate(order)}
        return Scenario(
            self.block_size,
            [self.query_lens[row] for row in order],
            [self.kv_lens[row] for row in order],
            [self.block_tables[row] for row in order],
            [s._replace(rows=tuple(sorted(place[row] for row in s.rows))) for s in self.segments],
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

    Two rows may end in the same partial block at different lengths.
    """
    rng = np.random.default_rng(seed)
    total = num_rows * (depth * max_segment_blocks + -(-(max_tail + max_query) // block_size) + 1)
    free = rng.permutation(total).tolist()
    scenario = Scenario(block_size, num_blocks=total)

    def grow(rows: list[int], parent: int | None, prefix: list[int], level: int) -> None:
        if len(rows) > 1 and level < depth and rng.random() < 0.9:
            blocks = [free.pop() for _ in range(int(rng.integers(0, max_segment_blocks + 1)))]
            start = len(prefix) * block_size
            segment = TreeSegment(parent, start, tuple(blocks), tuple(rows))
            scenario.segments.append(segment)
            index = len(scenario.segments) - 1
            cut = int(rng.integers(0, len(rows) + 1))
            for part in (rows[:cut], rows[cut:]):
                if part:
                    grow(part, index, prefix + blocks, level + 1)
            return
        shared: int | None = None
        for row in rows:
            query, tail = int(rng.integers(1, max_query + 1)), int(rng.integers(0, max_tail))
            count = -(-(query + tail) // block_size)
            table = prefix + [free.pop() for _ in range(count)]
            if shared is not None and count == 1 and rng.random() < 0.5:
                free.append(table[-1])
                table[-1] = shared
            shared = table[-1] if count == 1 else None
            scenario.query_lens[row] = query
            scenario.kv_lens[row] = len(prefix) * block_size + tail + query
            scenario.block_tables[row] = table

    scenario.query_lens, scenario.kv_lens = [0] * num_rows, [0] * num_rows
    scenario.block_tables = [[] for _ in range(num_rows)]
    grow(list(range(num_rows)), None, [], 0)
    return scenario
