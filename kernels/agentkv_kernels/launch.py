"""The entry points of the kernels: checks the arguments and picks the implementation.

On the CPU cpu.py, on a GPU the Triton kernels where they run, else the reference. Importable and
correct where triton is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import cpu, reference, tuning
from .plan import StepPlan

__all__ = ["allocate_cache", "copy_blocks", "paged_attention", "runs_triton", "write_kv"]


def allocate_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """A zeroed cache [num_blocks + 2, num_kv_heads, block_size, head_dim], keys or values.

    Block num_blocks is ZERO (read by padding, never written), num_blocks + 1 is TRASH (written by
    padding, never read). On the CPU the memory order is head, block, slot, so that neighbouring
    blocks of one head are one matrix; elsewhere block, head, slot.
    """
    if torch.device(device).type == "cpu":
        shape = num_kv_heads, num_blocks + 2, block_size, head_dim
        return _lazy_zeros(shape, dtype).transpose(0, 1)
    shape = num_blocks + 2, num_kv_heads, block_size, head_dim
    return torch.zeros(shape, dtype=dtype, device=device)


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
    """Causal attention of query [T, Hq, Dk] over the plan's rows, [T, Hq, Dv].

    The keys of this step's tokens must be in the cache already. A key at position p is visible at
    position q iff q - window < p <= q. `softcap` and `sinks` [Hq] are in natural units, as the
    model has them. Padding rows give zeros. Where the plan's tiles were loaded into buffers with
    room for more query tokens (device_tiles.py), T is theirs. ValueError for shapes that do not fit
    together.
    """
    _check_attention(query, k_cache, v_cache, plan, sinks)
    if window is not None and window < 1:
        raise ValueError(f"a window has at least one position, not {window}")
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if serves(query.device, query.shape[2], v_cache.shape[3]):
        from . import tile_attention

        return tile_attention.paged_attention(query, k_cache, v_cache, plan, **options)  # type: ignore[arg-type]  # one dict for all paths
    if len(query) != plan.num_tokens:
        raise ValueError(f"the plan is for {plan.num_tokens} query tokens, not {len(query)}")
    if query.device.type == "cpu":
        return cpu.paged_attention(query, k_cache, v_cache, plan, **options)  # type: ignore[arg-type]  # one dict for all paths
    return reference.paged_attention(query, k_cache, v_cache, plan, **options)  # type: ignore[arg-type]  # one dict for all paths


def serves(device: torch.device, key_dim: int, value_dim: int) -> bool:
    """Whether attention on `device` over heads of these sizes runs in the Triton kernels."""
    return runs_triton(device) and max(key_dim, value_dim) <= tuning.MAX_HEAD_DIM


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: npt.NDArray[np.int64] | Tensor,
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to slots block x block_size + offset.

    A slot of -1 is skipped. No slot may occur twice, and none may lie in a block that others hold.
    """
    slots = torch.as_tensor(slot_mapping)
    if len(slots) != len(key) or len(slots) != len(value):
        raise ValueError(f"{len(slots)} slots for {len(key)} keys and {len(value)} values")
    slots = slots.to(k_cache.device)
    if runs_triton(k_cache.device):
        from . import cache_ops

        cache_ops.write_kv(key, value, k_cache, v_cache, slots)
        return
    num_blocks, _, block_size, _ = k_cache.shape
    slots = torch.where(slots < 0, (num_blocks - 1) * block_size, slots)
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = key.to(k_cache.dtype)
    v_cache[block, :, offset] = value.to(v_cache.dtype)


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy the first `tokens` slots of block src to dst in every cache, for each copy.

    ValueError if a block is written twice or is both read and written: their order would matter.
    """
    if not copies:
        return
    targets = {dst for _, dst, _ in copies}
    if len(targets) != len(copies) or any(src in targets for src, _, _ in copies):
        raise ValueError("a block is copied to twice, or is copied from and to")
    if caches and runs_triton(caches[0].device):
        from . import cache_ops

        cache_ops.copy_blocks(caches, copies)
        return
    reference.copy_blocks(caches, copies)


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on `device`: a GPU they are made for, and triton is there."""
    return tuning.architecture(device) is not None and find_spec("triton") is not None


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system hands out when it is first touched.

    torch.zeros writes all of it at once, seconds for the gigabytes that a cache may have.
    """
    alignment = 64
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def _check_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: StepPlan, sinks: Tensor | None
) -> None:
    _, num_q_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[1]
    if head_dim != k_cache.shape[3] or num_q_heads % num_kv_heads:
        raise ValueError(f"queries {tuple(query.shape)} do not fit keys {tuple(k_cache.shape)}")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[2] != plan.block_size:
        raise ValueError(
            f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} do not fit blocks of "
            f"{plan.block_size} tokens"
        )
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"{num_q_heads} sinks are needed, one per query head")
