"""Tiles: the unit of work every attention kernel takes, CPU and GPU alike.

A tile says: these query tokens against this run of keys, result to these slots (kernels read it as
eight int32). This is the contract between the host plan, which makes tiles (cutting.py, tiling.py),
and the kernels, which compute them. Knows nothing about tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of a tile. Query tokens are rows[ROW0 : ROW0 + NUM_ROWS]. Key j of the tile lies in block
# blk[BLK0 + (KV_OFF + j) // block_size], slot (KV_OFF + j) % block_size. Row i's partial result
# goes to slot SLOT0 + i. A prefill tile has DIAGONAL in the last column: its row i sees key j iff
# DIAGONAL + i - window < j <= DIAGONAL + i; other tiles show all their keys to all their rows, and
# the last column is the cost that ordered them.
ROW0, NUM_ROWS, BLK0, KV_OFF, KV_LEN, SLOT0, FLAGS, COST = range(8)
DIAGONAL = COST

# `delta` steps after the tiles were made, a tile that GROWS ends `delta` keys later and a tile that
# SLIDES starts `delta` keys later. DIRECT: no other tile has these rows, the output is written
# instead of the slot.
GROWS, SLIDES, DIRECT = 1, 2, 4

# Steps that a tile set serves at most before it is made again; private tails keep room for them.
MAX_STEPS = 256


@dataclass(frozen=True, slots=True)
class TileShape:
    """What the tiles of one attention call depend on besides the plan.

    `group` is query heads per KV head, `window` the sliding window in tokens, `itemsize` the bytes
    of a KV element. Tiles of more than `narrow_rows` packed rows (tokens x group) are wide and hold
    at most `wide_rows`; `prefill_rows` bounds a prefill tile. Chunks are cut so that `workers`
    get about two each; a wide chunk has at least `min_wide_chunk` keys, since its partial results
    would otherwise cost more bytes than the keys it saves.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    window: int | None = None
    workers: int = 264
    narrow_rows: int = 16
    wide_rows: int = 64
    prefill_rows: int = 64
    min_chunk: int = 256
    min_wide_chunk: int = 2048
    max_chunk: int = 8192


@dataclass(slots=True)
class TileSet:
    """The tiles of one step for one TileShape, and how their partial results merge.

    Token t merges slots m_slot[m_ptr[t] : m_ptr[t + 1]], in position order: none means a zero
    output, a single -1 that a DIRECT tile writes it. `delta` is what GROWS and SLIDES add.
    """

    wide: IntArray
    narrow: IntArray
    prefill: IntArray
    rows: IntArray
    blk: IntArray
    m_ptr: IntArray
    m_slot: IntArray
    num_slots: int
    max_delta: int
    delta: int = 0
    scratch: dict[str, object] = field(default_factory=dict)  # what a kernel derives from the tiles

    @property
    def keys_read(self) -> int:
        """Key positions that all tiles together read, in one KV head."""
        tiles = np.concatenate([self.wide, self.narrow, self.prefill])
        grows, slides = (tiles[:, FLAGS] & GROWS) > 0, (tiles[:, FLAGS] & SLIDES) > 0
        lengths = tiles[:, KV_LEN].astype(np.int64) + self.delta * (grows * 1 - slides * 1)
        return int(np.maximum(lengths, 0).sum())


def ranges(starts: LongArray, lengths: LongArray) -> LongArray:
    """The concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shift: LongArray = np.repeat(starts - (ends - lengths), lengths)
    shift += np.arange(total, dtype=np.int64)
    return shift
