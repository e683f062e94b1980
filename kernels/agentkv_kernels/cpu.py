"""Attention on the CPU over a plan's tiles, with torch ops.

A shared run is one call of torch's fused kernel for all rows under it: its keys are read in place
where the run's blocks are neighbours in the cache, else gathered once. Private tails of decode rows
are gathered in batches of similar length. A prefill chunk is one call over what precedes it and a
causal one over itself, or bands of rows where a window hides keys. What that kernel cannot do, a
soft-cap, is done by products in float32 (partials.py).

Tried on a machine of two AVX-512 cores, as ratios of interleaved runs in bfloat16, and left out:
products with the scores written out (two to three times this module's time; 1.0 to 1.4 times in
float32), and a numba kernel for the tails, a task per token and KV head, without gathering (0.8 to
0.95 of the time for 32 rows over 2,048 shared and 64 own tokens, half with 1,024 own tokens). The
latter brings a second pool of threads beside torch's, seconds of compilation, and 200 MB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_tails import Tails
from .cpu_work import Chunk, Keys, Run, step_work
from .partials import Partial, Scores, attend, merge
from .plan import StepPlan
from .tiles import TileShape

# Keys that are gathered at once, and values as much again: memory that is taken and given back.
_GATHERED_BYTES = 8 << 20
_UNLIMITED = 1 << 30


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
    shape = tile_shape(query, k_cache, window)
    tiles = plan.tile_set(shape)
    key_bytes = shape.num_kv_heads * shape.head_dim * shape.itemsize
    work = step_work(
        tiles,
        plan.block_size,
        window,
        zero_block=k_cache.shape[0] - 2,
        max_gathered=_GATHERED_BYTES // key_bytes,
    )
    num_kv_heads, scores = k_cache.shape[1], Scores(scale, softcap)
    size = len(query), num_kv_heads, shape.group, query.shape[2]
    rows = query.reshape(size).transpose(1, 2)  # [T, G, Hkv, Dk]
    keys, values = k_cache.transpose(0, 1), v_cache.transpose(0, 1)
    partials = [_read_run(run, rows, keys, values, scores) for run in work.runs]
    for chunk in work.chunks:
        partials += _read_chunk(chunk, rows, keys, values, scores)
    partials += [_read_tails(tails, rows, keys, values, scores) for tails in work.tails]
    new = torch.empty if work.is_complete else torch.zeros
    out = new(*rows.shape[:3], v_cache.shape[3], dtype=query.dtype)
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, -1).t()
    merge(partials, work.merges, out, sinks)
    return out.transpose(1, 2).flatten(1, 2)


def _take(cache: Tensor, keys: Keys) -> Tensor:
    """Keys or values [1, Hkv, length, D] of [Hkv, num_blocks, block_size, D]; a view if it can."""
    where = keys.blocks
    found = cache[:, where] if isinstance(where, slice) else cache.index_select(1, where)
    return found.flatten(1, 2)[None, :, keys.first : keys.first + keys.length]


def _read_run(run: Run, rows: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Partial:
    """All tokens of a run, and their heads, as rows of one product."""
    query = rows.index_select(0, run.rows)
    num_rows, group, num_kv_heads, _ = query.shape
    key, value = (_take(cache, run.keys) for cache in (keys, values))
    out, lse = attend(query.flatten(0, 1).transpose(0, 1)[None], key, value, scores)
    size = num_rows, group, num_kv_heads
    return Partial(out[0].transpose(0, 1).reshape(*size, -1), lse[0].t().reshape(size))


def _read_chunk(
    chunk: Chunk, rows: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> list[Partial]:
    """Each band's tokens; the heads of a KV head lie in the batch, since masks are by token."""
    query = rows[chunk.rows].permute(1, 2, 0, 3)  # [G, Hkv, n, Dk]
    key, value = (_take(cache, chunk.keys) for cache in (keys, values))
    partials = []
    for band in chunk.bands:
        out, lse = attend(
            query[:, :, band.begin : band.end],
            key[:, :, band.low : band.high],
            value[:, :, band.low : band.high],
            scores,
            hidden=None if band.hidden is None else band.hidden[None, None],
            is_causal=band.is_causal,
        )
        partials.append(Partial(out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)))
    return partials


def _read_tails(
    tails: Tails, rows: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Partial:
    """Each token of a batch over its own keys, gathered."""
    query = rows.index_select(0, tails.rows).transpose(1, 2)  # [n, Hkv, G, Dk]
    num_rows = len(query)
    key, value = (_gather(cache, tails, num_rows) for cache in (keys, values))
    out, lse = attend(query, key, value, scores, hidden=tails.hidden[:, None, None])
    return Partial(out.transpose(1, 2), lse.transpose(1, 2))


def _gather(cache: Tensor, tails: Tails, num_rows: int) -> Tensor:
    """Keys or values [n, Hkv, most, D] of a batch's blocks, one tail behind the other."""
    found = cache.index_select(1, tails.blocks).flatten(1, 2)
    # A slot that nobody has written may hold NaN, which no weight of zero removes.
    found.index_fill_(1, tails.unseen, 0.0)
    return found.view(len(found), num_rows, -1, found.shape[2]).transpose(0, 1)
