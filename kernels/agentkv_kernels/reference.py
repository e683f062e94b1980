"""The truth for every op: plain torch, float32 or float64, no care for speed.

LSE is base 2 everywhere, of scores in natural units times log2(e). An empty set of keys has output
zero and LSE -inf. `paged_attention` reads each row's own block table and knows no sharing;
`tiled_attention` walks the tiles of a plan and is what a kernel must compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .plan import StepPlan
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
    TileSet,
)

LOG2_E = math.log2(math.e)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of [n, Hq, Dk] over [m, Hkv, Dk] and [m, Hkv, Dv] where visible[n, m].

    Returns the output [n, Hq, Dv] and the LSE [n, Hq], in the dtype of the arguments.
    """
    group = query.shape[1] // key.shape[1]
    # Keys that no row may see can hold anything, NaN too.
    is_seen = visible.any(0)[:, None, None]
    key = torch.where(is_seen, key, 0.0).repeat_interleave(group, 1)
    value = torch.where(is_seen, value, 0.0).repeat_interleave(group, 1)
    score = torch.einsum("nhd,mhd->hnm", query, key) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = (score * LOG2_E).masked_fill(~visible, -math.inf)
    top = score.amax(-1, keepdim=True) if score.shape[-1] else score.new_zeros(*score.shape[:2], 1)
    weight = torch.exp2(score - torch.where(top == -math.inf, 0.0, top))
    total = weight.sum(-1, keepdim=True)
    out = torch.einsum("hnm,mhd->nhd", weight / torch.where(total == 0, 1.0, total), value)
    lse = (torch.log2(total) + torch.where(total == 0, 0.0, top)).squeeze(-1)
    return out, lse.transpose(0, 1)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial results [s, ..., Dv] and LSEs [s, ...] of disjoint key sets, in order."""
    out = torch.zeros_like(outs[0]) if len(outs) else outs.new_zeros(outs.shape[1:])
    lse = torch.full_like(out[..., 0], -math.inf)
    for part, part_lse in zip(outs, lses, strict=True):
        top = torch.maximum(lse, part_lse)
        safe = torch.where(top == -math.inf, 0.0, top)
        ours, theirs = torch.exp2(lse - safe), torch.exp2(part_lse - safe)
        total = ours + theirs
        divisor = torch.where(total == 0, 1.0, total)
        weights = (ours / divisor)[..., None], (theirs / divisor)[..., None]
        out = weights[0] * out + torch.where(weights[1] == 0, 0.0, weights[1] * part)
        lse = safe + torch.log2(total)
    return out, lse


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Let one more key without a value, of score sinks[Hq] in natural units, into the softmax."""
    if sinks is None:
        return out
    # out x 2^lse / (2^lse + 2^sink); at lse -inf the factor is 0
    factor = torch.sigmoid((lse - sinks.to(lse.dtype) * LOG2_E) / LOG2_E)
    return out * factor[..., None]


def gather_keys(cache: Tensor, block_ids: Sequence[int], length: int) -> Tensor:
    """The first `length` positions of a block list, [length, Hkv, D]."""
    index = torch.tensor(list(block_ids), dtype=torch.int64, device=cache.device)
    blocks = cache[index].transpose(1, 2)  # [n, block_size, Hkv, D]
    return blocks.reshape(-1, *blocks.shape[2:])[:length]


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
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Causal attention of every row over its own block table; query [T, Hq, Dk] to [T, Hq, Dv]."""
    out = query.new_zeros(*query.shape[:2], v_cache.shape[-1], dtype=dtype)
    for row in range(plan.num_rows):
        begin, end = int(plan.query_starts[row]), int(plan.query_starts[row + 1])
        length = int(plan.kv_lens[row])
        if length == 0:
            continue
        blocks = plan.block_tables[row][: -(-length // plan.block_size)]
        key, value = (gather_keys(c, blocks, length).to(dtype) for c in (k_cache, v_cache))
        position = torch.arange(length - (end - begin), length, device=query.device)
        visible = _band(position, length, window)
        part, lse = attend(
            query[begin:end].to(dtype), key, value, visible, scale=scale, softcap=softcap
        )
        out[begin:end] = apply_sinks(part, lse, sinks)
    return out.to(query.dtype)


def tiled_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: TileSet,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same, tile by tile: a partial result per slot, then one merge per token."""
    num_tokens, num_q_heads, _ = query.shape
    out = query.new_full((num_tokens, num_q_heads, v_cache.shape[-1]), math.nan, dtype=dtype)
    slots = out.new_full((tiles.num_slots, *out.shape[1:]), math.nan)
    lses = out.new_full((tiles.num_slots, num_q_heads), math.nan)
    num_plain = len(tiles.wide) + len(tiles.narrow)
    for place, tile in enumerate(np.concatenate([tiles.wide, tiles.narrow, tiles.prefill])):
        is_prefill = place >= num_plain
        rows = torch.from_numpy(tiles.rows[tile[ROW0] : tile[ROW0] + tile[NUM_ROWS]]).long()
        key, value, length = tile_keys(tile, tiles, k_cache, v_cache)
        position = torch.arange(len(rows)) + (int(tile[DIAGONAL]) if is_prefill else length)
        visible = _band(position, length, window if is_prefill else None)
        part, lse = attend(
            query[rows].to(dtype), key.to(dtype), value.to(dtype), visible.to(query.device),
            scale=scale, softcap=softcap,
        )  # fmt: skip
        if tile[FLAGS] & DIRECT:
            out[rows] = apply_sinks(part, lse, sinks)
        else:
            slots[tile[SLOT0] : tile[SLOT0] + len(rows)] = part
            lses[tile[SLOT0] : tile[SLOT0] + len(rows)] = lse
    for token in range(num_tokens):
        index = tiles.m_slot[tiles.m_ptr[token] : tiles.m_ptr[token + 1]]
        if len(index) and index[0] < 0:
            continue
        chosen = torch.from_numpy(index).long()
        out[token] = apply_sinks(*merge_states(slots[chosen], lses[chosen]), sinks)
    return out.to(query.dtype)


def tile_keys(
    tile: IntArray, tiles: TileSet, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor, int]:
    """The keys and values [n, Hkv, D] that a tile reads at its set's `delta`, and n."""
    block_size = k_cache.shape[2]
    first = int(tile[KV_OFF]) + (tiles.delta if tile[FLAGS] & SLIDES else 0)
    end = int(tile[KV_OFF] + tile[KV_LEN]) + (tiles.delta if tile[FLAGS] & GROWS else 0)
    end = max(first, end)
    blocks = tiles.blk[tile[BLK0] : tile[BLK0] - (-end // block_size)]
    key, value = (gather_keys(c, blocks.tolist(), end)[first:] for c in (k_cache, v_cache))
    return key, value, end - first


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to their slots; slot -1 is skipped."""
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_cache[block, :, offset] = key[token]
            v_cache[block, :, offset] = value[token]


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy the first `tokens` slots of block src to dst, for each (src, dst, tokens)."""
    for cache in caches:
        for src, dst, tokens in copies:
            cache[dst, :, :tokens] = cache[src, :, :tokens]


def _band(position: Tensor, length: int, window: int | None) -> Tensor:
    """visible[i, j]: key j is at most at position[i], and within its window."""
    key = torch.arange(length, device=position.device)
    visible = key[None, :] <= position[:, None]
    if window is not None:
        visible &= key[None, :] > position[:, None] - window
    return visible
