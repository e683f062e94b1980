"""Paged attention over a plan's tiles, by the Triton kernels of tile_kernel.py and merge.py.

Checks the arguments, picks sizes from tuning.py and launches: narrow, wide and prefill tiles, then
the merge. Runs on a GPU, or on the CPU under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .device_tiles import NUM_NARROW, NUM_PREFILL, NUM_WIDE, DeviceTiles, on_device
from .merge import merge_slots
from .plan import StepPlan
from .tile_kernel import tile_attention_kernel
from .tiles import TileShape
from .tuning import TileConfig, Tuning, tuning_of


def tile_shape(query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> TileShape:
    """The tiles that `paged_attention` reads for these arguments."""
    tuning, num_programs = _tuning(query, k_cache, v_cache)
    return TileShape(
        group=query.shape[1] // k_cache.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        itemsize=k_cache.element_size(),
        window=window,
        workers=num_programs,
        narrow_rows=tuning.narrow.block_m,
        wide_rows=tuning.wide.block_m,
        prefill_rows=tuning.prefill.block_m,
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
    out: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, Hq, Dk] over the plan's tiles, [T, Hq, Dv], written to `out` if given.

    T may exceed the plan's tokens where the tiles were loaded into buffers with room for more: the
    rest is padding and comes out zero. That heads and sizes fit has been checked by launch.py.

    Raises:
        ValueError: tensors on several devices, a last dimension that is not contiguous, another
            number of query tokens than the buffers hold.
    """
    tensors = [query, k_cache, v_cache, *(t for t in (sinks, out) if t is not None)]
    if any(tensor.device != query.device for tensor in tensors):
        raise ValueError(f"tensors on several devices: {[str(t.device) for t in tensors]}")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or (out is not None and out.stride(2) != 1):
        raise ValueError("the last dimension of caches and output must be contiguous")
    tiles = on_device(plan.tile_set(tile_shape(query, k_cache, v_cache, window)), query.device)
    if len(query) != tiles.capacity.tokens:
        raise ValueError(f"the tiles are for {tiles.capacity.tokens} tokens, not {len(query)}")
    if out is None:
        out = query.new_empty(*query.shape[:2], v_cache.shape[3])
    # A product is taken in the wider type of its two sides.
    wider = torch.promote_types(query.dtype, k_cache.dtype)
    rows = query if query.stride(2) == 1 and query.dtype == wider else query.to(wider).contiguous()
    slots = out.new_empty(tiles.capacity.slots, *out.shape[1:], dtype=torch.float32)
    lses = slots.new_empty(slots.shape[:2])
    tuning, num_programs = _tuning(query, k_cache, v_cache)
    for kind, records, config in (
        (NUM_WIDE, tiles.wide, tuning.wide),
        (NUM_NARROW, tiles.narrow, _narrow(tuning, query.shape[1] // k_cache.shape[1])),
        (NUM_PREFILL, tiles.prefill, tuning.prefill),
    ):
        if len(records):
            grid = _grid(kind, len(records), num_programs, rows, k_cache, config)
            _launch(
                grid, kind, records, config, tiles, (rows, k_cache, v_cache, out, slots, lses),
                scale=scale, window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
    if tiles.needs_merge:
        merge_slots(slots, lses, tiles, out, sinks)
    return out


def _tuning(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tuning, int]:
    head_dim = max(k_cache.shape[3], v_cache.shape[3])
    wider = torch.promote_types(query.dtype, k_cache.dtype)
    return tuning_of(query.device, head_dim, wider)


def _narrow(tuning: Tuning, group: int) -> TileConfig:
    """One token's query heads fill a narrow tile, or need a wide one."""
    return tuning.narrow if group <= tuning.narrow.block_m else tuning.wide


def _parts(group: int, config: TileConfig) -> int:
    # A tile has as many packed rows as its variant, or those of one token where they are more.
    return -(-max(group, config.block_m) // config.block_m)


def _grid(
    kind: int,
    num_tiles: int,
    num_programs: int,
    query: Tensor,
    k_cache: Tensor,
    config: TileConfig,
) -> tuple[int, int]:
    """Programs that walk the tiles, times those of one tile."""
    num_kv_heads = k_cache.shape[1]
    num_lanes = num_kv_heads * _parts(query.shape[1] // num_kv_heads, config)
    if kind == NUM_PREFILL:
        return num_tiles, num_lanes
    # Tiles are sorted, longest first, so programs that take every n-th one are loaded evenly.
    return min(num_tiles, max(1, num_programs // num_lanes)), num_lanes


def _launch(
    grid: tuple[int, int],
    kind: int,
    records: Tensor,
    config: TileConfig,
    tiles: DeviceTiles,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Run one variant over all tiles of its kind; how many there are is read on the device."""
    query, k_cache, v_cache, out, _, _ = tensors
    num_kv_heads, block_size, key_dim = k_cache.shape[1:]
    value_dim, group = v_cache.shape[3], query.shape[1] // num_kv_heads
    tile_attention_kernel[grid](
        *tensors,
        sinks,
        records,
        tiles.rows,
        tiles.blk,
        tiles.counts,
        scale,
        softcap,
        window,
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        KIND=kind,
        IS_CAUSAL=kind == NUM_PREFILL,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=max(16, triton.next_power_of_2(key_dim)),
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PARTS=_parts(group, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
