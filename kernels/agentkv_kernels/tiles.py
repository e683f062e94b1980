"""Tiles: the unit of work every attention kernel takes, CPU and GPU alike.

A tile says: these query tokens against this run of keys, result to these slots (kernels read it as
eight int32). Owns how shared runs and private tails are clipped by a window, cut into chunks and
row tiles, and in which order a token's partial results merge. Knows nothing about tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

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


class SharedRun(NamedTuple):
    """Blocks that several sequences read: positions [start, end), ids at `base` of the arena."""

    start: int
    end: int
    base: int
    rows: LongArray  # sequences, not query tokens, in the layout's order


@dataclass(slots=True)
class Layout:
    """Where each sequence's keys lie: its shared runs, then its own tail, one behind the other."""

    arena: IntArray
    runs: list[SharedRun]
    order: LongArray  # sequences, in an order that does not depend on the step's
    tail_start: LongArray  # position of the tail's first key, per sequence
    tail_base: LongArray  # index of its block in the arena
    block_shift: LongArray  # index in the arena of a block, less its index in the block table
    steps: int = 0  # decode steps since it was made


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


def is_worth_sharing(
    num_seqs: int, num_tokens: int, length: int, shape: TileShape, tuning: Sharing
) -> bool:
    """Whether `length` keys are better read once for all than once per sequence.

    Bytes saved, (num_seqs - 1) x length keys and values, against bytes written and read again to
    merge one more float32 partial result per token and query head.
    """
    if num_seqs < 2 or length < tuning.min_tokens:
        return False
    head_bytes = shape.num_kv_heads * shape.head_dim
    saved = (num_seqs - 1) * length * 2 * shape.itemsize * head_bytes
    return saved > num_tokens * shape.group * 8 * head_bytes + tuning.fixed_bytes


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tunables of sharing. Below `min_tokens` a launch and a merge cost more than the keys.

    `fixed_bytes` is what one more tile costs besides its bytes, as bytes at memory speed.
    """

    min_tokens: int = 64
    fixed_bytes: int = 16384


DEFAULT_SHARING = Sharing()


class _Parts(NamedTuple):
    """Tiles before chunking, a line each: the eight columns, then the first key's position."""

    shared: LongArray  # [n, 9]
    private: LongArray
    prefill: LongArray
    rows: IntArray
    max_delta: int


class _Rows(NamedTuple):
    """Columns per sequence; `first` is the position of its first query token, `token0` its index.

    `low` is the first position that any of its query tokens sees.
    """

    query_lens: LongArray
    first: LongArray
    kv_lens: LongArray
    token0: LongArray
    low: LongArray


def ranges(starts: LongArray, lengths: LongArray) -> LongArray:
    """The concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shift: LongArray = np.repeat(starts - (ends - lengths), lengths)
    shift += np.arange(total, dtype=np.int64)
    return shift


def make_tiles(
    layout: Layout,
    shape: TileShape,
    sharing: Sharing,
    *,
    query_lens: LongArray,
    kv_lens: LongArray,
    block_size: int,
) -> TileSet:
    """Tiles of a step in which sequence r runs its last query_lens[r] of kv_lens[r] positions."""
    first = kv_lens - query_lens
    low = np.zeros_like(kv_lens)
    if shape.window is not None:
        low = np.maximum(first - shape.window + 1, 0)
    token0 = np.cumsum(query_lens) - query_lens
    seqs = _Rows(query_lens, first, kv_lens, token0, low)
    parts = _cut_parts(layout, shape, sharing, seqs)
    wide_rows = max(1, shape.wide_rows // shape.group)
    shared = _split_rows(parts.shared, wide_rows)
    is_wide = shared[:, NUM_ROWS] * shape.group > shape.narrow_rows
    wide, wide_delta = _chunk(shared[is_wide], shape, shape.min_wide_chunk, block_size)
    narrow, narrow_delta = _chunk(
        np.concatenate([shared[~is_wide], parts.private]), shape, shape.min_chunk, block_size
    )
    prefill = _place(parts.prefill, block_size)
    tiles = np.concatenate([wide, narrow, prefill])
    m_ptr, m_slot, num_slots = _merge_lists(tiles, parts.rows, int(query_lens.sum()))
    columns = tiles[:, :8].astype(np.int32)
    num_wide, num_tiles = len(wide), len(wide) + len(narrow)
    return TileSet(
        wide=columns[:num_wide],
        narrow=columns[num_wide:num_tiles],
        prefill=columns[num_tiles:],
        rows=parts.rows,
        blk=layout.arena,
        m_ptr=m_ptr,
        m_slot=m_slot,
        num_slots=num_slots,
        max_delta=min(parts.max_delta, wide_delta, narrow_delta),
    )


def _cut_parts(layout: Layout, shape: TileShape, sharing: Sharing, seqs: _Rows) -> _Parts:
    """Clip shared runs and tails to what the window shows; what only some rows see is private."""
    num_tokens = int(seqs.query_lens.sum())
    rows: list[LongArray] = [np.arange(num_tokens, dtype=np.int64)]
    num_rows = num_tokens
    shared: list[LongArray] = []
    pieces: list[tuple[LongArray, LongArray, LongArray, LongArray, LongArray]] = []
    max_delta = MAX_STEPS
    for run in layout.runs:
        members, clip = run.rows, run.start
        if shape.window is not None:
            members = members[seqs.query_lens[members] == 1]
            edge = int(seqs.low[members].max(initial=0))
            clip = max(run.start, edge)
            if 0 < edge == run.start:
                # The next step is the first to cut the run, and gives its rows a part each.
                max_delta = 0
            if not is_worth_sharing(len(members), len(members), run.end - clip, shape, sharing):
                clip = run.end
            inside = seqs.low[run.rows]
            inside = inside[inside < run.end]
            max_delta = min(max_delta, int((run.end - inside).min(initial=MAX_STEPS)))
            # What lies before the clip is read by each row for itself.
            ends = np.where(seqs.query_lens[run.rows] == 1, min(clip, run.end), run.end)
            moves = (seqs.query_lens[run.rows] == 1) & (run.start < clip < run.end)
            pieces.append(
                (
                    run.rows,
                    np.full(len(run.rows), run.start),
                    ends,
                    np.full(len(run.rows), run.base),
                    moves * GROWS,
                )
            )
        if clip < run.end:
            tokens = ranges(seqs.token0[members], seqs.query_lens[members])
            slides = SLIDES if clip > run.start else 0
            shared.append(
                np.array(
                    [
                        num_rows,
                        len(tokens),
                        run.base,
                        clip - run.start,
                        run.end - clip,
                        0,
                        slides,
                        0,
                        clip,
                    ]
                )
            )
            rows.append(tokens)
            num_rows += len(tokens)
    everyone = layout.order[seqs.kv_lens[layout.order] > 0]
    pieces.append(
        (
            everyone,
            layout.tail_start[everyone],
            seqs.kv_lens[everyone],
            layout.tail_base[everyone],
            np.full(len(everyone), GROWS),
        )
    )
    if shape.window is not None:
        filling = seqs.kv_lens[seqs.kv_lens <= shape.window]
        max_delta = min(max_delta, int((shape.window - filling).min(initial=MAX_STEPS)))
    private, prefill = _private_parts(pieces, shape, seqs)
    return _Parts(
        np.array(shared, dtype=np.int64).reshape(-1, 9),
        private,
        prefill,
        np.concatenate(rows).astype(np.int32),
        max_delta,
    )


def _private_parts(
    pieces: list[tuple[LongArray, LongArray, LongArray, LongArray, LongArray]],
    shape: TileShape,
    seqs: _Rows,
) -> tuple[LongArray, LongArray]:
    """One line per decode row and piece of it, and the prefill tiles of the other rows."""
    row, start, end, base, grows = (np.concatenate(column) for column in zip(*pieces, strict=True))
    low = np.maximum(start, seqs.low[row])
    slides = np.where((seqs.low[row] >= start) & (seqs.low[row] > 0), SLIDES, 0)
    is_decode = seqs.query_lens[row] == 1
    keep = is_decode & (low < end)
    ones, zeros = np.ones_like(row), np.zeros_like(row)
    lines = np.stack(
        [seqs.token0[row], ones, base, low - start, end - low, zeros, grows | slides, zeros, low], 1
    )
    chunks = [
        _prefill_parts(int(row[i]), int(start[i]), int(end[i]), int(base[i]), shape, seqs)
        for i in np.flatnonzero(~is_decode)
    ]
    prefill = np.concatenate(chunks) if chunks else np.zeros((0, 9), np.int64)
    return lines[keep], prefill


def _prefill_parts(
    row: int, start: int, end: int, base: int, shape: TileShape, seqs: _Rows
) -> LongArray:
    """Row tiles of a prefill chunk against its own keys at positions [start, end)."""
    step = max(1, shape.prefill_rows // shape.group)
    offset = np.arange(0, seqs.query_lens[row], step, dtype=np.int64)
    count = np.minimum(step, seqs.query_lens[row] - offset)
    position = seqs.first[row] + offset
    low = np.full_like(offset, start)
    if shape.window is not None:
        low = np.maximum(start, position - shape.window + 1)
    high = np.minimum(end, position + count)
    token = seqs.token0[row] + offset
    zero = np.zeros_like(offset)
    lines = np.stack(
        [token, count, zero + base, low - start, high - low, zero, zero, position - low, low], 1
    )
    seen: LongArray = lines[low < high]
    return seen


def _split_rows(parts: LongArray, max_rows: int) -> LongArray:
    """Row tiles of at most max_rows tokens, those over the same keys side by side."""
    count = -(-parts[:, NUM_ROWS] // max_rows)
    tiles = np.repeat(parts, count, axis=0)
    index = ranges(np.zeros_like(count), count)
    tiles[:, ROW0] += index * max_rows
    tiles[:, NUM_ROWS] = np.minimum(max_rows, tiles[:, NUM_ROWS] - index * max_rows)
    return tiles


def _chunk(
    parts: LongArray, shape: TileShape, min_chunk: int, block_size: int
) -> tuple[LongArray, int]:
    """Cut long tiles so that the workers share them evenly; longest first.

    Also says for how many steps the cuts hold: until a growing chunk is half over its length or
    one that starts later each step is used up.
    """
    if not len(parts):
        return parts, MAX_STEPS
    length = parts[:, KV_LEN]
    even = int(length.sum()) * shape.num_kv_heads // (shape.workers * 2)
    limit = min(max(even, min_chunk), shape.max_chunk)
    count = np.maximum(-(-length // limit), 1)
    size = -(-length // count)
    size = -(-size // block_size) * block_size
    count = np.maximum(-(-length // size), 1)
    tiles = np.repeat(parts, count, axis=0)
    index = ranges(np.zeros_like(count), count)
    size, count = np.repeat(size, count), np.repeat(count, count)
    is_first, is_last = index == 0, index == count - 1
    tiles[:, KV_LEN] = np.minimum(size, tiles[:, KV_LEN] - index * size)
    tiles[:, KV_OFF] += index * size
    tiles[:, 8] += index * size
    flags = tiles[:, FLAGS]
    tiles[:, FLAGS] = (flags & SLIDES) * is_first | (flags & GROWS) * is_last
    used_up = tiles[(tiles[:, FLAGS] & (SLIDES | GROWS)) == SLIDES, KV_LEN]
    grown = limit + limit // 2 - tiles[(tiles[:, FLAGS] & (SLIDES | GROWS)) == GROWS, KV_LEN]
    max_delta = min(int(used_up.min(initial=MAX_STEPS)), int(grown.min(initial=MAX_STEPS)))
    tiles = _place(tiles, block_size)
    tiles[:, COST] = tiles[:, KV_LEN]
    return tiles[np.argsort(-tiles[:, KV_LEN], kind="stable")], max_delta


def _place(tiles: LongArray, block_size: int) -> LongArray:
    """Move whole blocks of the key offset into the block offset."""
    tiles = tiles.copy()
    tiles[:, BLK0] += tiles[:, KV_OFF] // block_size
    tiles[:, KV_OFF] %= block_size
    return tiles


def _merge_lists(
    tiles: LongArray, rows: IntArray, num_tokens: int
) -> tuple[IntArray, IntArray, int]:
    """Slots of each token in position order, and their number; marks the tiles that need none."""
    count = tiles[:, NUM_ROWS]
    token = rows[ranges(tiles[:, ROW0], count)]
    per_token = np.bincount(token, minlength=num_tokens)
    is_alone = per_token[rows[tiles[:, ROW0]]] == 1
    tiles[is_alone, FLAGS] |= DIRECT
    needed = np.where(is_alone, 0, count)
    tiles[:, SLOT0] = np.cumsum(needed) - needed
    slot = ranges(tiles[:, SLOT0], count)
    slot[np.repeat(is_alone, count)] = -1
    order = np.lexsort((np.repeat(tiles[:, 8], count), token))
    m_ptr = np.zeros(num_tokens + 1, np.int32)
    np.cumsum(per_token, out=m_ptr[1:])
    return m_ptr, slot[order].astype(np.int32), int(needed.sum())
