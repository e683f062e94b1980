"""From parts to tiles: row tiles, chunks for all workers, slots, and the lists by which they merge.

The places of the cuts and the order of the merge are decided here alone. Knows nothing about
tensors.
"""

from __future__ import annotations

import numpy as np

from .cutting import POSITION, Rows, cut_parts
from .layout import Layout
from .sharing import Sharing
from .tiles import (
    BLK0,
    COST,
    DIRECT,
    FLAGS,
    GROWS,
    KV_LEN,
    KV_OFF,
    MAX_STEPS,
    NUM_ROWS,
    ROW0,
    SLIDES,
    SLOT0,
    IntArray,
    LongArray,
    TileSet,
    TileShape,
    ranges,
)


def make_tiles(
    layout: Layout,
    shape: TileShape,
    rule: Sharing,
    *,
    query_lens: LongArray,
    kv_lens: LongArray,
    block_size: int,
) -> TileSet:
    """Tiles of a step in which sequence r runs its last query_lens[r] of kv_lens[r] positions."""
    rows = Rows.of(query_lens, kv_lens, shape.window)
    parts = cut_parts(layout, shape, rule, rows)
    shared = _split_rows(parts.shared, max(1, shape.wide_rows // shape.group))
    is_wide = shared[:, NUM_ROWS] * shape.group > shape.narrow_rows
    wide, wide_delta = _chunk(shared[is_wide], shape, shape.min_wide_chunk, block_size)
    narrow, narrow_delta = _chunk(
        np.concatenate([shared[~is_wide], parts.private]), shape, shape.min_chunk, block_size
    )
    tiles = np.concatenate([wide, narrow, parts.prefill])
    # Whole blocks of the key offset belong to the block offset.
    tiles[:, BLK0] += tiles[:, KV_OFF] // block_size
    tiles[:, KV_OFF] %= block_size
    m_ptr, m_slot, num_slots = _merge_lists(tiles, parts.tokens, int(query_lens.sum()))
    columns = tiles[:, :POSITION].astype(np.int32)
    num_wide, num_plain = len(wide), len(wide) + len(narrow)
    return TileSet(
        wide=columns[:num_wide],
        narrow=columns[num_wide:num_plain],
        prefill=columns[num_plain:],
        rows=parts.tokens.astype(np.int32),
        blk=layout.arena,
        m_ptr=m_ptr,
        m_slot=m_slot,
        num_slots=num_slots,
        max_delta=min(parts.max_delta, wide_delta, narrow_delta),
    )


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
    """Cut long parts so that the workers share them evenly; longest first.

    Also says for how many steps the cuts hold: until a growing chunk is half over its length or
    one that starts later each step is used up.
    """
    if not len(parts):
        return parts, MAX_STEPS
    even = int(parts[:, KV_LEN].sum()) * shape.num_kv_heads // (shape.workers * 2)
    limit = min(max(even, min_chunk), shape.max_chunk)
    tiles = parts
    if parts[:, KV_LEN].max() > limit:
        tiles = _cut_evenly(parts, limit, block_size)
    length, moves = tiles[:, KV_LEN], tiles[:, FLAGS] & (SLIDES | GROWS)
    used_up = int(length[moves == SLIDES].min(initial=MAX_STEPS))
    grown = limit + limit // 2 - int(length[moves == GROWS].max(initial=0))
    tiles[:, COST] = length
    return tiles[np.argsort(-length, kind="stable")], min(used_up, grown, MAX_STEPS)


def _cut_evenly(parts: LongArray, limit: int, block_size: int) -> LongArray:
    """Chunks of whole blocks, about `limit` keys at most, equal within a part but for the last."""
    length = parts[:, KV_LEN]
    count = -(-length // limit)
    size = -(-length // count)
    size = -(-size // block_size) * block_size
    count = -(-length // size)
    tiles = np.repeat(parts, count, axis=0)
    index = ranges(np.zeros_like(count), count)
    offset = index * np.repeat(size, count)
    tiles[:, KV_LEN] = np.minimum(np.repeat(size, count), tiles[:, KV_LEN] - offset)
    tiles[:, KV_OFF] += offset
    tiles[:, POSITION] += offset
    is_first, is_last = index == 0, index == np.repeat(count, count) - 1
    flags = tiles[:, FLAGS]
    tiles[:, FLAGS] = (flags & SLIDES) * is_first | (flags & GROWS) * is_last
    return tiles


def _merge_lists(
    tiles: LongArray, tokens: LongArray, num_tokens: int
) -> tuple[IntArray, IntArray, int]:
    """Slots of each token in position order, and their number; marks the tiles that need none."""
    count = tiles[:, NUM_ROWS]
    token = tokens[ranges(tiles[:, ROW0], count)]
    per_token = np.bincount(token, minlength=num_tokens)
    is_alone = per_token[tokens[tiles[:, ROW0]]] == 1
    tiles[is_alone, FLAGS] |= DIRECT
    needed = np.where(is_alone, 0, count)
    tiles[:, SLOT0] = np.cumsum(needed) - needed
    slot = ranges(tiles[:, SLOT0], count)
    slot[np.repeat(is_alone, count)] = -1
    order = np.lexsort((np.repeat(tiles[:, POSITION], count), token))
    m_ptr = np.zeros(num_tokens + 1, np.int32)
    np.cumsum(per_token, out=m_ptr[1:])
    return m_ptr, slot[order].astype(np.int32), int(needed.sum())
