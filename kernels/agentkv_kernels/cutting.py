"""What each query token reads, as parts: keys of one run of blocks, for tokens that see them all.

Clips shared runs and private tails to what a sliding window shows, and cuts prefill chunks into row
tiles that see only the keys they need. Knows nothing about how parts become work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layout import Layout
from .sharing import Sharing
from .tiles import (
    BLK0,
    DIAGONAL,
    FLAGS,
    GROWS,
    KV_LEN,
    KV_OFF,
    MAX_STEPS,
    NUM_ROWS,
    ROW0,
    SLIDES,
    BoolArray,
    LongArray,
    TileShape,
    ranges,
)

# A part has the columns of a tile, and the position of its first key, by which results merge.
POSITION, NUM_COLUMNS = 8, 9


class Rows(NamedTuple):
    """Columns per sequence; `first` is the position of its first query token, `token0` its index.

    `low` is the first position that any of its query tokens sees.
    """

    query_lens: LongArray
    kv_lens: LongArray
    first: LongArray
    token0: LongArray
    low: LongArray

    @classmethod
    def of(cls, query_lens: LongArray, kv_lens: LongArray, window: int | None) -> Rows:
        """The columns of a step in which row r runs its last query_lens[r] positions."""
        first = kv_lens - query_lens
        low = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
        return cls(query_lens, kv_lens, first, np.cumsum(query_lens) - query_lens, low)


class Parts(NamedTuple):
    """All that the tokens read; `tokens` is what ROW0 indexes, all tokens of the step first.

    The parts hold for `max_delta` steps more.
    """

    shared: LongArray  # [n, NUM_COLUMNS]
    private: LongArray
    prefill: LongArray
    tokens: LongArray
    max_delta: int


class _Pieces(NamedTuple):
    """Keys from `start` to `end` that a sequence reads for itself, in columns."""

    row: LongArray
    start: LongArray
    end: LongArray
    base: LongArray
    grows: LongArray


def cut_parts(layout: Layout, shape: TileShape, rule: Sharing, rows: Rows) -> Parts:
    """The parts of one step."""
    tails = layout.order
    pieces = _Pieces(
        tails,
        layout.tail_start[tails],
        rows.kv_lens[tails],
        layout.tail_base[tails],
        np.full(len(tails), GROWS),
    )
    if shape.window is None:
        every = np.ones(len(layout.runs.rows), bool)
        shared, members = _shared_parts(layout, rows, layout.runs.start, every)
        max_delta = MAX_STEPS
    else:
        clip, max_delta = _clip_runs(layout, shape, rule, rows)
        is_decode = rows.query_lens[layout.runs.rows] == 1
        shared, members = _shared_parts(layout, rows, clip, is_decode)
        clipped = _clipped_pieces(layout, rows, clip)
        pieces = _Pieces(*(np.concatenate(pair) for pair in zip(clipped, pieces, strict=True)))
        filling = shape.window - rows.kv_lens[rows.kv_lens <= shape.window]
        max_delta = min(max_delta, int(filling.min(initial=MAX_STEPS)))
    tokens = np.arange(int(rows.query_lens.sum()), dtype=np.int64)
    return Parts(
        shared,
        _private_parts(pieces, rows),
        _prefill_parts(pieces, shape, rows),
        np.concatenate([tokens, members]),
        max_delta,
    )


def _clip_runs(
    layout: Layout, shape: TileShape, rule: Sharing, rows: Rows
) -> tuple[LongArray, int]:
    """Where each run begins to lie in the window of all its decode rows, its end if never.

    What lies before is read by each row for itself, and all of it by prefill rows. Also says for
    how many steps that holds.
    """
    runs = layout.runs
    if not len(runs.start):
        return runs.start, MAX_STEPS
    is_decode = rows.query_lens[runs.rows] == 1
    low = rows.low[runs.rows]
    edge = np.maximum.reduceat(np.where(is_decode, low, 0), runs.ptr[:-1])
    num_seqs = np.add.reduceat(is_decode.astype(np.int64), runs.ptr[:-1])
    clip = np.maximum(runs.start, edge)
    is_shared = runs.end - clip >= rule.min_lengths(num_seqs, num_seqs, shape)
    if (is_shared & (edge == runs.start) & (edge > 0)).any():
        # The next step is the first to cut the run, and gives its rows a part each.
        max_delta = 0
    else:
        left = np.repeat(runs.end, np.diff(runs.ptr)) - low
        max_delta = int(left[left > 0].min(initial=MAX_STEPS))
    return np.where(is_shared, clip, runs.end), max_delta


def _shared_parts(
    layout: Layout, rows: Rows, clip: LongArray, is_member: BoolArray
) -> tuple[LongArray, LongArray]:
    """A line for each run that is shared from `clip` on, and their tokens one behind the other."""
    runs = layout.runs
    keep = clip < runs.end
    chosen = is_member & np.repeat(keep, np.diff(runs.ptr))
    members = runs.rows[chosen]
    tokens = ranges(rows.token0[members], rows.query_lens[members])
    ends = np.concatenate([[0], np.cumsum(np.where(chosen, rows.query_lens[runs.rows], 0))])
    first, num_tokens = ends[runs.ptr[:-1]], np.diff(ends[runs.ptr])
    lines = np.zeros((len(keep), NUM_COLUMNS), np.int64)
    lines[:, ROW0] = int(rows.query_lens.sum()) + first
    lines[:, NUM_ROWS] = num_tokens
    lines[:, BLK0] = runs.base
    lines[:, KV_OFF] = clip - runs.start
    lines[:, KV_LEN] = runs.end - clip
    lines[:, FLAGS] = np.where(clip > runs.start, SLIDES, 0)
    lines[:, POSITION] = clip
    return lines[keep & (num_tokens > 0)], tokens


def _clipped_pieces(layout: Layout, rows: Rows, clip: LongArray) -> _Pieces:
    """What each row reads for itself of the runs: all before `clip`, and prefill rows the rest."""
    runs = layout.runs
    of = np.repeat(np.arange(len(clip)), np.diff(runs.ptr))
    is_decode = rows.query_lens[runs.rows] == 1
    start, end, clip = runs.start[of], runs.end[of], clip[of]
    moves = is_decode & (start < clip) & (clip < end)
    return _Pieces(runs.rows, start, np.where(is_decode, clip, end), runs.base[of], moves * GROWS)


def _private_parts(pieces: _Pieces, rows: Rows) -> LongArray:
    """A line for each piece of a decode row that its window shows."""
    row, start, end, base, grows = pieces
    edge = rows.low[row]
    low = np.maximum(start, edge)
    lines = np.zeros((len(row), NUM_COLUMNS), np.int64)
    lines[:, ROW0] = rows.token0[row]
    lines[:, NUM_ROWS] = 1
    lines[:, BLK0] = base
    lines[:, KV_OFF] = low - start
    lines[:, KV_LEN] = end - low
    lines[:, FLAGS] = grows | np.where((edge >= start) & (edge > 0), SLIDES, 0)
    lines[:, POSITION] = low
    seen: LongArray = lines[(rows.query_lens[row] == 1) & (low < end)]
    return seen


def _prefill_parts(pieces: _Pieces, shape: TileShape, rows: Rows) -> LongArray:
    """Row tiles of all prefill chunks, against each piece of their keys."""
    is_prefill = rows.query_lens[pieces.row] > 1
    columns = [column[is_prefill].tolist() for column in pieces[:4]]
    chunks = [
        _prefill_part(row, start, end, base, shape, rows)
        for row, start, end, base in zip(*columns, strict=True)
    ]
    return np.concatenate(chunks) if chunks else np.zeros((0, NUM_COLUMNS), np.int64)


def _prefill_part(
    row: int, start: int, end: int, base: int, shape: TileShape, rows: Rows
) -> LongArray:
    """Row tiles of a prefill chunk against its own keys at positions [start, end)."""
    step = max(1, shape.prefill_rows // shape.group)
    offset = np.arange(0, rows.query_lens[row], step, dtype=np.int64)
    count = np.minimum(step, rows.query_lens[row] - offset)
    position = rows.first[row] + offset
    low = np.full_like(offset, start)
    if shape.window is not None:
        low = np.maximum(start, position - shape.window + 1)
    high = np.minimum(end, position + count)
    lines = np.zeros((len(offset), NUM_COLUMNS), np.int64)
    lines[:, ROW0] = rows.token0[row] + offset
    lines[:, NUM_ROWS] = count
    lines[:, BLK0] = base
    lines[:, KV_OFF] = low - start
    lines[:, KV_LEN] = high - low
    lines[:, DIAGONAL] = position - low
    lines[:, POSITION] = low
    seen: LongArray = lines[low < high]
    return seen
