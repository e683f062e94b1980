"""Attention on the CPU over a plan's tiles, with torch ops.

A shared run is one packed product for all rows under it: keys are read in place when the run's
blocks are neighbours in the cache, else gathered once. Private tails of decode rows are gathered in
batches of similar length. Prefill chunks run in row slices that see only the keys they need. What
the tiles of one step have in common for all layers is worked out once and kept in the tile set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .plan import StepPlan
from .reference import LOG2_E
from .tiles import (
    BLK0,
    DIAGONAL,
    DIRECT,
    FLAGS,
    GROWS,
    KV_LEN,
    KV_OFF,
    NUM_ROWS,
    ROW0,
    SLIDES,
    SLOT0,
    IntArray,
    LongArray,
    TileSet,
    TileShape,
)

# Score elements of one prefill slice per KV head: they stay in the cache between the passes.
_SLICE_SCORES = 1 << 18
# Tails share a batch while the longest has at most this many times the blocks of the shortest.
_BATCH_RATIO = 1.5
_UNLIMITED = 1 << 30


class _Run(NamedTuple):
    """One tile's keys [first, first + length) within `blocks`, for query tokens `rows`."""

    rows: Tensor
    blocks: Tensor | slice
    first: int
    length: int
    slot: int
    is_direct: bool
    diagonal: int | None  # None: every row sees every key


class _Tails(NamedTuple):
    """Private tails of n decode tokens, padded to the same number of blocks."""

    rows: Tensor  # [n]
    blocks: Tensor  # [n x max_blocks], block ZERO where a tail has ended
    hidden: Tensor  # [n, max_blocks x block_size]
    edges: Tensor  # [e, 2]: tail, key position of a hidden key in a block that also has seen keys
    slots: Tensor  # [n], -1: write the output
    num_direct: int  # the first tails are direct


class _Merge(NamedTuple):
    """Tokens with more than one partial result: their slots, padded with one that is empty."""

    tokens: Tensor  # [m]
    slots: Tensor  # [m, most]


class _StepWork(NamedTuple):
    runs: list[_Run]
    tails: list[_Tails]
    merge: _Merge
    num_slots: int


def tile_shape(query: Tensor, k_cache: Tensor, window: int | None) -> TileShape:
    """Tiles for the CPU: a shared run and a prefill chunk are one tile each, however large."""
    return TileShape(
        group=query.shape[1] // k_cache.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        itemsize=k_cache.element_size(),
        window=window,
        workers=1,
        narrow_rows=0,
        wide_rows=_UNLIMITED,
        prefill_rows=_UNLIMITED,
        min_chunk=_UNLIMITED,
        min_wide_chunk=_UNLIMITED,
        max_chunk=_UNLIMITED,
    )


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: StepPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, Hq, Dk] over the plan's tiles, [T, Hq, Dv]."""
    tiles = plan.tile_set(tile_shape(query, k_cache, window))
    zero_block = k_cache.shape[0] - 2
    work = _step_work(tiles, plan.block_size, zero_block)
    num_kv_heads = k_cache.shape[1]
    # [Hkv, T, G, Dk]; scores come out in base 2
    packed = query.reshape(len(query), num_kv_heads, -1, query.shape[2]).transpose(0, 1)
    packed = packed.float() * (scale * LOG2_E)
    keys, values = k_cache.transpose(0, 1), v_cache.transpose(0, 1)
    out = torch.zeros(num_kv_heads, len(query), packed.shape[2], v_cache.shape[3])
    slots = out.new_zeros(num_kv_heads, work.num_slots + 1, *out.shape[2:])
    lses = out.new_full(slots.shape[:3], -math.inf)
    sink = None if sinks is None else sinks.float().reshape(num_kv_heads, -1)
    for run in work.runs:
        rows = packed.index_select(1, run.rows)
        if run.diagonal is None:
            part, lse = _shared(rows, keys, values, run, softcap)
        else:
            part, lse = _prefill(rows, keys, values, run, window, softcap)
        if run.is_direct:
            out.index_copy_(1, run.rows, _with_sinks(part, lse, sink))
        else:
            slots[:, run.slot : run.slot + len(run.rows)] = part
            lses[:, run.slot : run.slot + len(run.rows)] = lse
    for tails in work.tails:
        part, lse = _private(packed.index_select(1, tails.rows), keys, values, tails, softcap)
        cut = tails.num_direct
        if cut:
            done = _with_sinks(part[:, :cut], lse[:, :cut], sink)
            out.index_copy_(1, tails.rows[:cut], done)
        slots.index_copy_(1, tails.slots[cut:], part[:, cut:])
        lses.index_copy_(1, tails.slots[cut:], lse[:, cut:])
    _merge(work.merge, slots, lses, out, sink)
    return out.transpose(0, 1).reshape(len(query), query.shape[1], -1).to(query.dtype)


def _step_work(tiles: TileSet, block_size: int, zero_block: int) -> _StepWork:
    """What the tiles say at their present delta, as indices; the same for all layers."""
    cached = tiles.scratch.get("cpu")
    if isinstance(cached, tuple) and cached[0] == tiles.delta:
        work: _StepWork = cached[1]
        return work
    runs = [_run(tile, tiles, block_size, is_prefill=False) for tile in tiles.wide]
    runs += [_run(tile, tiles, block_size, is_prefill=True) for tile in tiles.prefill]
    work = _StepWork(
        runs,
        _batch_tails(tiles, block_size, zero_block),
        _merge_table(tiles),
        tiles.num_slots,
    )
    tiles.scratch["cpu"] = tiles.delta, work
    return work


def _spans(tile: IntArray, delta: int) -> tuple[LongArray, LongArray]:
    """First key and end of tiles [n, 8], counted from their first block."""
    first = tile[..., KV_OFF].astype(np.int64) + delta * ((tile[..., FLAGS] & SLIDES) > 0)
    end = (tile[..., KV_OFF] + tile[..., KV_LEN]).astype(np.int64)
    end += delta * ((tile[..., FLAGS] & GROWS) > 0)
    return first, np.maximum(first, end)


def _run(tile: IntArray, tiles: TileSet, block_size: int, *, is_prefill: bool) -> _Run:
    first, end = (int(x) for x in _spans(tile, tiles.delta))
    skipped = first // block_size
    blocks = tiles.blk[tile[BLK0] + skipped : tile[BLK0] - (-end // block_size)].astype(np.int64)
    rows = tiles.rows[tile[ROW0] : tile[ROW0] + tile[NUM_ROWS]].astype(np.int64)
    where: Tensor | slice = torch.from_numpy(blocks)
    if len(blocks) and (np.diff(blocks) == 1).all():
        where = slice(int(blocks[0]), int(blocks[-1]) + 1)
    return _Run(
        torch.from_numpy(rows),
        where,
        first - skipped * block_size,
        end - first,
        int(tile[SLOT0]),
        bool(tile[FLAGS] & DIRECT),
        int(tile[DIAGONAL]) if is_prefill else None,
    )


def _batch_tails(tiles: TileSet, block_size: int, zero_block: int) -> list[_Tails]:
    first, end = _spans(tiles.narrow, tiles.delta)
    count = -(-end // block_size)
    order = np.argsort(-count, kind="stable")
    batches: list[_Tails] = []
    while len(order):
        is_near = count[order] * _BATCH_RATIO + 1 >= count[order[0]]
        chosen, order = order[is_near], order[~is_near]
        is_direct = (tiles.narrow[chosen, FLAGS] & DIRECT) > 0
        chosen = np.concatenate([chosen[is_direct], chosen[~is_direct]])
        column = np.arange(max(int(count[chosen[0]]), int(count[chosen].max())))
        at = tiles.narrow[chosen, BLK0][:, None] + column
        has = column < count[chosen][:, None]
        blocks = np.where(has, tiles.blk[np.where(has, at, 0)], zero_block).astype(np.int64)
        key = np.arange(len(column) * block_size)
        hidden = (key < first[chosen][:, None]) | (key >= end[chosen][:, None])
        edges = np.argwhere(hidden & np.repeat(has, block_size, axis=1))
        batches.append(
            _Tails(
                torch.from_numpy(tiles.rows[tiles.narrow[chosen, ROW0]].astype(np.int64)),
                torch.from_numpy(blocks.reshape(-1)),
                torch.from_numpy(hidden),
                torch.from_numpy(edges),
                torch.from_numpy(tiles.narrow[chosen, SLOT0].astype(np.int64)),
                int(is_direct.sum()),
            )
        )
    return batches


def _merge_table(tiles: TileSet) -> _Merge:
    count = np.diff(tiles.m_ptr)
    start = tiles.m_ptr[:-1]
    has_slots = count > 0
    has_slots[has_slots] = tiles.m_slot[start[has_slots]] >= 0
    tokens = np.flatnonzero(has_slots)
    # Slots are numbered along the tiles, so this order too is the same in every order of the rows.
    tokens = tokens[np.argsort(tiles.m_slot[start[tokens]])]
    column = np.arange(int(count[tokens].max(initial=0)))
    has = column < count[tokens][:, None]
    at = np.where(has, start[tokens][:, None] + column, 0)
    slots = np.where(has, tiles.m_slot[at] if len(tokens) else 0, tiles.num_slots)
    return _Merge(torch.from_numpy(tokens), torch.from_numpy(slots.astype(np.int64)))


def _take(cache: Tensor, blocks: Tensor | slice, first: int, length: int) -> Tensor:
    """Keys or values [Hkv, length, D] of [Hkv, num_blocks, block_size, D]; a view if it can be."""
    found = cache[:, blocks] if isinstance(blocks, slice) else cache.index_select(1, blocks)
    return found.flatten(1, 2)[:, first : first + length].float()


def _softmax(score: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Base 2 scores [b, n, m], changed in place, over values [b, m, Dv]: output and LSE."""
    top = score.amax(-1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    weight = torch.exp2_(score.sub_(top))
    total = weight.sum(-1, keepdim=True)
    out = torch.bmm(weight, values).div_(total.clamp_min(1e-38))
    return out, torch.log2(total).add_(top).squeeze(-1)


def _cap(score: Tensor, softcap: float | None) -> Tensor:
    if softcap is None:
        return score
    return score.div_(softcap * LOG2_E).tanh_().mul_(softcap * LOG2_E)


def _shared(
    query: Tensor, keys: Tensor, values: Tensor, run: _Run, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """query [Hkv, n, G, Dk] over one run that all rows see whole."""
    num_heads, num_rows, group, dim = query.shape
    if run.length == 0:
        part = query.new_zeros(num_heads, num_rows, group, values.shape[3])
        return part, query.new_full(part.shape[:3], -math.inf)
    key, value = (_take(c, run.blocks, run.first, run.length) for c in (keys, values))
    query = query.reshape(num_heads, num_rows * group, dim)
    step = max(group, _SLICE_SCORES * 2 // run.length)
    parts = [
        _softmax(_cap(torch.bmm(q, key.transpose(1, 2)), softcap), value)
        for q in (query[:, i : i + step] for i in range(0, query.shape[1], step))
    ]
    part = torch.cat([p for p, _ in parts], 1) if len(parts) > 1 else parts[0][0]
    lse = torch.cat([s for _, s in parts], 1) if len(parts) > 1 else parts[0][1]
    return part.view(num_heads, num_rows, group, -1), lse.view(num_heads, num_rows, group)


def _prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    run: _Run,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """query [Hkv, n, G, Dk] over one run; row i sees keys up to its diagonal, in its window."""
    assert run.diagonal is not None
    num_heads, num_rows, group, dim = query.shape
    key, value = (_take(c, run.blocks, run.first, run.length) for c in (keys, values))
    part = query.new_zeros(num_heads, num_rows, group, values.shape[3])
    lse = query.new_full(part.shape[:3], -math.inf)
    step = max(16, _SLICE_SCORES // (run.length * group))
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        position = torch.arange(begin, end)[:, None] + run.diagonal
        high = min(run.length, run.diagonal + end)
        low = 0 if window is None else max(0, run.diagonal + begin - window + 1)
        if low >= high:
            continue
        seen = torch.arange(low, high)[None, :]
        hidden = seen > position
        if window is not None:
            hidden |= seen <= position - window
        rows = query[:, begin:end].reshape(num_heads, -1, dim)
        score = _cap(torch.bmm(rows, key[:, low:high].transpose(1, 2)), softcap)
        score.masked_fill_(hidden.repeat_interleave(group, 0), -math.inf)
        out, sums = _softmax(score, value[:, low:high])
        part[:, begin:end] = out.view(num_heads, end - begin, group, -1)
        lse[:, begin:end] = sums.view(num_heads, end - begin, group)
    return part, lse


def _private(
    query: Tensor, keys: Tensor, values: Tensor, tails: _Tails, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """query [Hkv, n, G, Dk], each row over its own tail."""
    num_heads, num_rows, group, dim = query.shape
    length = tails.hidden.shape[1]
    key, value = (
        c.index_select(1, tails.blocks).float().view(num_heads, num_rows, length, -1)
        for c in (keys, values)
    )
    # A slot nobody has written may hold NaN, and 0 x NaN is NaN.
    value[:, tails.edges[:, 0], tails.edges[:, 1]] = 0.0
    rows = query.reshape(num_heads * num_rows, group, dim)
    score = torch.bmm(rows, key.view(num_heads * num_rows, length, dim).transpose(1, 2))
    score = _cap(score, softcap).view(num_heads, num_rows, group, length)
    score.masked_fill_(tails.hidden[None, :, None, :], -math.inf)
    part, lse = _softmax(
        score.view(-1, group, length), value.view(num_heads * num_rows, length, -1)
    )
    return part.view(num_heads, num_rows, group, -1), lse.view(num_heads, num_rows, group)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Sinks [Hkv, G] are one more key each, without a value."""
    if sinks is None:
        return out
    return out * torch.sigmoid(lse / LOG2_E - sinks[:, None])[..., None]


def _merge(merge: _Merge, slots: Tensor, lses: Tensor, out: Tensor, sinks: Tensor | None) -> None:
    """Weigh the partial results of each token by their LSE and write its output."""
    if not len(merge.tokens):
        return
    flat = merge.slots.flatten()
    shape = *merge.slots.shape, out.shape[2]
    lse = lses.index_select(1, flat).view(-1, *shape)  # [Hkv, m, most, G]
    top = lse.amax(2, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    weight = torch.exp2(lse - top)
    total = weight.sum(2)
    part = slots.index_select(1, flat).view(-1, *shape, out.shape[3])
    merged = (part * weight[..., None]).sum(2).div_(total.clamp_min(1e-38)[..., None])
    merged = _with_sinks(merged, torch.log2(total) + top.squeeze(2), sinks)
    out.index_copy_(1, merge.tokens, merged)
