"""Attention on the CPU, tile by tile of the plan, with torch ops."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .plan import StepPlan
from .reference import LOG2_E, tile_keys
from .tiles import DIAGONAL, DIRECT, FLAGS, NUM_ROWS, ROW0, SLOT0, IntArray, TileSet, TileShape


def tile_shape(query: Tensor, k_cache: Tensor, window: int | None) -> TileShape:
    """Tiles for this machine: a shared run is one tile, however many rows and keys it has."""
    return TileShape(
        group=query.shape[1] // k_cache.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        itemsize=k_cache.element_size(),
        window=window,
        workers=torch.get_num_threads(),
        narrow_rows=0,
        wide_rows=1 << 30,
        prefill_rows=256,
        min_wide_chunk=1 << 30,
        max_chunk=1 << 30,
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
    out = query.new_zeros(*query.shape[:2], v_cache.shape[-1])
    slots = out.new_empty((tiles.num_slots, *out.shape[1:]), dtype=torch.float32)
    lses = slots.new_empty(slots.shape[:2])
    for tile in np.concatenate([tiles.wide, tiles.narrow, tiles.prefill]):
        is_prefill = len(tiles.prefill) > 0 and tile[SLOT0] >= tiles.prefill[0, SLOT0]
        rows = torch.from_numpy(tiles.rows[tile[ROW0] : tile[ROW0] + tile[NUM_ROWS]]).long()
        mask = None
        key, value, length = tile_keys(tile, tiles, k_cache, v_cache)
        if is_prefill:
            mask = _hidden(tile, length, window)
        part, lse = _attend(query[rows], key, value, mask, scale=scale, softcap=softcap)
        if tile[FLAGS] & DIRECT:
            out[rows] = _with_sinks(part, lse, sinks).to(out.dtype)
        else:
            slots[tile[SLOT0] : tile[SLOT0] + len(rows)] = part
            lses[tile[SLOT0] : tile[SLOT0] + len(rows)] = lse
    _merge(tiles, slots, lses, out, sinks)
    return out


def _hidden(tile: IntArray, length: int, window: int | None) -> Tensor:
    position = torch.arange(int(tile[NUM_ROWS]))[:, None] + int(tile[DIAGONAL])
    key = torch.arange(length)[None, :]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return hidden


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """[n, Hq, Dk] over [m, Hkv, D]: output [n, Hq, Dv] and LSE [n, Hq], float32."""
    num_rows, num_q_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if key.shape[0] == 0:
        out = torch.zeros(num_rows, num_q_heads, value.shape[2])
        return out, torch.full((num_rows, num_q_heads), -math.inf)
    packed = query.float().reshape(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    group = packed.shape[2]
    packed = packed.reshape(num_kv_heads, num_rows * group, head_dim) * (scale * LOG2_E)
    score = packed @ key.float().permute(1, 2, 0)
    if softcap is not None:
        score = torch.tanh_(score.div_(softcap * LOG2_E)).mul_(softcap * LOG2_E)
    if hidden is not None:
        score.masked_fill_(hidden.repeat_interleave(group, 0), -math.inf)
    top = score.amax(-1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    weight = torch.exp2_(score.sub_(top))
    total = weight.sum(-1, keepdim=True)
    out = (weight @ value.float().transpose(0, 1)) / total.clamp_min(1e-38)
    lse = (torch.log2(total) + top).reshape(num_kv_heads, num_rows, group)
    out = out.reshape(num_kv_heads, num_rows, group, -1).transpose(0, 1)
    return out.reshape(num_rows, num_q_heads, -1), lse.transpose(0, 1).reshape(num_rows, -1)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return out
    return out * torch.sigmoid(lse / LOG2_E - sinks.float())[..., None]


def _merge(tiles: TileSet, slots: Tensor, lses: Tensor, out: Tensor, sinks: Tensor | None) -> None:
    """Scale every slot to its token's largest LSE, add, divide; direct tokens are left alone."""
    slot = torch.from_numpy(tiles.m_slot).long()
    count = torch.from_numpy(np.diff(tiles.m_ptr)).long()
    token = torch.repeat_interleave(torch.arange(len(count)), count)
    token, slot = token[slot >= 0], slot[slot >= 0]
    if not len(slot):
        return
    merged = torch.unique(token)
    lse = lses[slot]
    top = torch.full((len(count), lse.shape[1]), -math.inf)
    top.scatter_reduce_(0, token[:, None].expand_as(lse), lse, "amax")
    top.masked_fill_(top == -math.inf, 0.0)
    weight = torch.exp2(lse - top[token])
    total = torch.zeros_like(top).index_add_(0, token, weight)
    sum_ = torch.zeros(len(count), *slots.shape[1:])
    sum_.index_add_(0, token, slots[slot] * weight[..., None])
    result = sum_ / total.clamp_min(1e-38)[..., None]
    result = _with_sinks(result, torch.log2(total) + top, sinks)
    out[merged] = result[merged].to(out.dtype)
