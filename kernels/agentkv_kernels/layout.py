"""Where the keys of each sequence lie: shared runs, then a tail of its own, in one arena of blocks.

Owns the arena, and the room that tails have in it to grow. Knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .sharing import SharedRuns
from .tiles import MAX_STEPS, IntArray, LongArray, ranges


@dataclass(slots=True)
class Layout:
    """The keys of all sequences, for the attention shapes that share the same segments."""

    arena: IntArray
    runs: SharedRuns
    order: LongArray  # sequences with keys, in an order that does not depend on the step's
    tail_start: LongArray  # position of the tail's first key, per sequence
    tail_base: LongArray  # index of its block in the arena
    block_shift: LongArray  # index in the arena of a block, less its index in the block table
    steps: int = 0  # decode steps since it was made

    def open_blocks(
        self, rows: LongArray, index: LongArray, opened: LongArray, filled: LongArray
    ) -> None:
        """Note block index[i] of row rows[i], which opens, and the one before it, which filled."""
        at = self.block_shift[rows] + index
        # The block before is another's when the tail begins with the one that opens.
        is_own = at > self.tail_base[rows]
        self.arena[at] = opened
        self.arena[at[is_own] - 1] = filled[is_own]


def flatten_blocks(tables: Sequence[Sequence[int]], begin: LongArray, end: LongArray) -> LongArray:
    """Blocks begin[i] to end[i] of each table, one table behind the other."""
    spans = zip(tables, begin.tolist(), end.tolist(), strict=True)
    return np.fromiter(chain.from_iterable(t[a:b] for t, a, b in spans), np.int64)


def place_blocks(
    shared: Sequence[int], tails: LongArray, counts: LongArray, *, has_room: bool, block_size: int
) -> tuple[IntArray, LongArray]:
    """The arena of shared blocks and tails of `counts` blocks, and where each tail begins.

    With room, each tail can grow by MAX_STEPS tokens.
    """
    room = counts + (MAX_STEPS // block_size + 2 if has_room else 0)
    ends = np.cumsum(room) + len(shared)
    arena: IntArray = np.zeros(int(ends[-1]) if len(ends) else len(shared), np.int32)
    arena[: len(shared)] = shared
    arena[ranges(ends - room, counts)] = tails
    return arena, ends - room
