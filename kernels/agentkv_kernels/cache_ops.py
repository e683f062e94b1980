"""Writes to the KV cache, in Triton: a step's new keys and values, and copy-on-write copies.

Knows neither who holds a block nor what its tokens are.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Arguments of jitted functions have no Python types: they are pointers, scalars and constexprs.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTEGERS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


# The number of tokens differs from step to step, and is no reason to compile again.
@triton.jit(do_not_specialize=["num_tokens"])
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,  # int64 [num_tokens]
    num_tokens,
    stride_kt,
    stride_kth,
    stride_vt,
    stride_vth,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    i_head = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_k = tl.arange(0, KEY_PAD)
    o_v = tl.arange(0, VALUE_PAD)
    b_slot = tl.load(slots_ptr + o_t, mask=o_t < num_tokens, other=-1)
    is_token = b_slot >= 0
    b_blk = b_slot // BLOCK_SIZE
    b_off = b_slot % BLOCK_SIZE
    is_k = is_token[:, None] & (o_k < KEY_DIM)[None, :]
    is_v = is_token[:, None] & (o_v < VALUE_DIM)[None, :]
    from_k = o_t * stride_kt + i_head * stride_kth
    from_v = o_t * stride_vt + i_head * stride_vth
    to_k = b_blk * stride_kb + i_head * stride_kh + b_off * stride_ks
    to_v = b_blk * stride_vb + i_head * stride_vh + b_off * stride_vs
    b_k = tl.load(key_ptr + from_k[:, None] + o_k[None, :], mask=is_k, other=0.0)
    b_v = tl.load(value_ptr + from_v[:, None] + o_v[None, :], mask=is_v, other=0.0)
    tl.store(k_ptr + to_k[:, None] + o_k[None, :], b_k.to(k_ptr.dtype.element_ty), mask=is_k)
    tl.store(v_ptr + to_v[:, None] + o_v[None, :], b_v.to(v_ptr.dtype.element_ty), mask=is_v)


@triton.jit
def _copy_blocks_kernel(
    caches_ptr,  # int64 [num_caches, 6]: address, three strides in elements, num_heads, dim
    copies_ptr,  # int32 [num_copies, 3]: src, dst, tokens
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cache_ptr = caches_ptr + tl.program_id(1).to(tl.int64) * 6
    copy_ptr = copies_ptr + tl.program_id(0).to(tl.int64) * 3
    base_ptr = tl.load(cache_ptr).to(tl.pointer_type(ELEMENT))
    stride_b = tl.load(cache_ptr + 1)
    stride_h = tl.load(cache_ptr + 2)
    stride_s = tl.load(cache_ptr + 3)
    num_heads = tl.load(cache_ptr + 4)
    dim = tl.load(cache_ptr + 5)
    src = tl.load(copy_ptr).to(tl.int64) * stride_b
    dst = tl.load(copy_ptr + 1).to(tl.int64) * stride_b
    size = tl.load(copy_ptr + 2).to(tl.int64) * dim
    i_head = tl.program_id(2).to(tl.int64)
    if i_head < num_heads:
        for start in range(0, size, BLOCK):
            o_e = start + tl.arange(0, BLOCK)
            at = i_head * stride_h + (o_e // dim) * stride_s + o_e % dim
            b_e = tl.load(base_ptr + src + at, mask=o_e < size)
            tl.store(base_ptr + dst + at, b_e, mask=o_e < size)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to `slots`, int64 on the caches' device.

    A slot of -1 is skipped. Tensors of one device, the caches' last dimension contiguous.
    """
    tensors = key, value, k_cache, v_cache, slots
    if any(tensor.device != k_cache.device for tensor in tensors) or slots.dtype != torch.int64:
        raise ValueError(f"one device and int64 slots are needed, not {slots.dtype} and "
                         f"{[str(tensor.device) for tensor in tensors]}")  # fmt: skip
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or slots.stride(0) != 1:
        raise ValueError("the last dimension of caches and slots must be contiguous")
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    num_tokens, num_kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    block_t = min(16, triton.next_power_of_2(num_tokens))
    _write_kv_kernel[triton.cdiv(num_tokens, block_t), num_kv_heads](
        key,
        value,
        k_cache,
        v_cache,
        slots,
        num_tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[2],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=triton.next_power_of_2(key_dim),
        VALUE_PAD=triton.next_power_of_2(value_dim),
        BLOCK_T=block_t,
        num_warps=4,
        enable_fp_fusion=True,
    )


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy the first `tokens` slots of block src to dst in all caches at once, for each copy.

    No block may be written twice, or read and written. ValueError for caches of several devices or
    element sizes, or whose last dimension is not contiguous.
    """
    if not copies or not caches:
        return
    device, itemsize = caches[0].device, caches[0].element_size()
    if any(cache.device != device or cache.element_size() != itemsize for cache in caches):
        raise ValueError("caches on several devices, or of several element sizes")
    if any(cache.stride(3) != 1 for cache in caches):
        raise ValueError("the last dimension of caches must be contiguous")
    records = tuple((c.data_ptr(), *c.stride()[:3], c.shape[1], c.shape[3]) for c in caches)
    moves = torch.tensor(list(copies), dtype=torch.int32).to(device, non_blocking=True)
    num_heads = max(cache.shape[1] for cache in caches)
    _copy_blocks_kernel[len(moves), len(records), num_heads](
        _records_on(device, records),
        moves,
        ELEMENT=_INTEGERS[itemsize],
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=True,
    )


# The same few caches are copied in step after step. A record says all that it was made from.
@lru_cache(maxsize=8)
def _records_on(device: torch.device, records: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor(records, dtype=torch.int64).to(device)
