"""The attention kernel, in Triton: one source for all kinds of tiles.

Narrow and wide tiles hold decode rows and shared runs, whose rows see every key; prefill tiles are
causal. A row that one tile serves alone is written at once, others leave partial results that
merge.py joins. Its launcher is tile_attention.py, which has checked the arguments.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Arguments of jitted functions have no Python types: they are pointers, scalars and constexprs.

from __future__ import annotations

import triton
import triton.language as tl

from .device_tiles import DELTA
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
)

_ROW0, _NUM_ROWS, _BLK0 = tl.constexpr(ROW0), tl.constexpr(NUM_ROWS), tl.constexpr(BLK0)
_KV_OFF, _KV_LEN, _SLOT0 = tl.constexpr(KV_OFF), tl.constexpr(KV_LEN), tl.constexpr(SLOT0)
_FLAGS, _DIAGONAL, _DELTA = tl.constexpr(FLAGS), tl.constexpr(DIAGONAL), tl.constexpr(DELTA)
_GROWS, _SLIDES, _DIRECT = tl.constexpr(GROWS), tl.constexpr(SLIDES), tl.constexpr(DIRECT)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _capped(b_s, scale, softcap):
    """Scores in base 2: softcap x tanh(score / softcap), times log2(e)."""
    # tanh(x) = 1 - 2 / (1 + e^2x), right at both infinities
    power = tl.exp2(b_s * (scale * 2.0 * _LOG2_E / softcap))
    return (softcap * _LOG2_E) * (1.0 - 2.0 / (1.0 + power))


@triton.jit
def _packed_rows(num_rows, i_head, i_part, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row of the tile and query head of each packed row of a program."""
    # num_rows >> 30 is 0, which the compiler does not know: else it would work the rows out once
    # and keep them through all loops, in registers that the accumulators need.
    o_m = (i_part * BLOCK_M).to(tl.int32) + tl.arange(0, BLOCK_M) + (num_rows >> 30)
    return o_m // GROUP, i_head * GROUP + o_m % GROUP


@triton.jit
def tile_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,  # float32 [slots, num_q_heads, VALUE_DIM]
    lse_ptr,  # float32 [slots, num_q_heads]
    sinks_ptr,  # [num_q_heads] or None
    tiles_ptr,
    rows_ptr,
    blk_ptr,
    counts_ptr,
    scale,
    softcap,  # or None
    window,  # or None
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ot,
    stride_oh,
    KIND: tl.constexpr,  # index of the number of tiles in counts
    IS_CAUSAL: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share a tile's rows, of BLOCK_M each
):
    num_tiles = tl.load(counts_ptr + KIND)
    delta = tl.load(counts_ptr + _DELTA)
    # Every id is 64 bits wide when it is multiplied by a stride.
    i_head = (tl.program_id(1) // PARTS).to(tl.int64)
    i_part = (tl.program_id(1) % PARTS).to(tl.int64)
    o_k = tl.arange(0, KEY_PAD)
    o_v = tl.arange(0, VALUE_PAD)
    is_k = o_k < KEY_DIM
    is_v = o_v < VALUE_DIM
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_ptr = tiles_ptr + tl.cast(i_tile, tl.int64) * 8
        kv_off = tl.load(tile_ptr + _KV_OFF)
        flags = tl.load(tile_ptr + _FLAGS)
        diagonal = tl.load(tile_ptr + _DIAGONAL)
        first = kv_off + tl.where((flags & _SLIDES) != 0, delta, 0)
        end = kv_off + tl.load(tile_ptr + _KV_LEN) + tl.where((flags & _GROWS) != 0, delta, 0)
        b_blk_ptr = blk_ptr + tl.load(tile_ptr + _BLK0)
        num_rows = tl.load(tile_ptr + _NUM_ROWS)
        o_row, o_head = _packed_rows(num_rows, i_head, i_part, GROUP, BLOCK_M)
        is_row = o_row < num_rows
        tile_rows_ptr = rows_ptr + tl.load(tile_ptr + _ROW0)
        b_token = tl.load(tile_rows_ptr + o_row, mask=is_row, other=0).to(tl.int64)
        q_at = b_token * stride_qt + o_head * stride_qh
        is_q = is_row[:, None] & is_k[None, :]
        b_q = tl.load(q_ptr + q_at[:, None] + o_k[None, :], mask=is_q, other=0.0)

        b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
        for start in range(first, end, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            is_key = o_n < end
            b_blk = tl.load(b_blk_ptr + o_n // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            b_slot = (o_n % BLOCK_SIZE).to(tl.int64)
            k_at = b_blk * stride_kb + b_slot * stride_ks + i_head * stride_kh
            v_at = b_blk * stride_vb + b_slot * stride_vs + i_head * stride_vh
            # Whatever lies behind the last key may be NaN, and 0 x NaN is NaN: V is masked too.
            is_kk = is_k[:, None] & is_key[None, :]
            b_k = tl.load(k_ptr + k_at[None, :] + o_k[:, None], mask=is_kk, other=0.0)
            is_vv = is_key[:, None] & is_v[None, :]
            b_v = tl.load(v_ptr + v_at[:, None] + o_v[None, :], mask=is_vv, other=0.0)
            b_s = tl.dot(b_q, b_k.to(b_q.dtype), input_precision="ieee")
            if softcap is not None:
                b_s = _capped(b_s, scale, softcap)
            else:
                b_s = b_s * (scale * _LOG2_E)
            is_seen = is_key[None, :]
            if IS_CAUSAL:
                distance = (diagonal + o_row)[:, None] - (o_n - kv_off)[None, :]
                is_seen = is_seen & (distance >= 0)
                if window is not None:
                    is_seen = is_seen & (distance < window)
            b_s = tl.where(is_seen, b_s, float("-inf"))
            b_top = tl.maximum(b_m, tl.max(b_s, 1))
            # A row that has seen no key yet: -inf less -inf would be NaN.
            b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
            b_p = tl.exp2(b_s - b_safe[:, None])
            b_old = tl.exp2(b_m - b_safe)
            b_l = b_l * b_old + tl.sum(b_p, 1)
            b_acc = b_acc * b_old[:, None]
            b_acc += tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision="ieee")
            b_m = b_top

        # Volatile, so that what follows is worked out here and not before the loop.
        num_rows = tl.load(tile_ptr + _NUM_ROWS, volatile=True)
        o_row, o_head = _packed_rows(num_rows, i_head, i_part, GROUP, BLOCK_M)
        is_row = o_row < num_rows
        has_keys = b_l > 0.0
        b_total = tl.where(has_keys, b_l, 1.0)
        b_out = b_acc / b_total[:, None]
        b_lse = b_m + tl.log2(b_total)  # -inf without keys
        is_out = is_row[:, None] & is_v[None, :]
        if (flags & _DIRECT) != 0:
            if sinks_ptr is not None:
                b_sink = tl.load(sinks_ptr + o_head, mask=is_row, other=0.0).to(tl.float32)
                # out x 2^lse / (2^lse + 2^sink); a row without keys stays zero
                b_out = b_out / (1.0 + tl.exp2(b_sink * _LOG2_E - b_lse))[:, None]
                b_out = tl.where(has_keys[:, None], b_out, 0.0)
            b_token = tl.load(tile_rows_ptr + o_row, mask=is_row, other=0).to(tl.int64)
            out_at = b_token * stride_ot + o_head * stride_oh
            p_out = out_ptr + out_at[:, None] + o_v[None, :]
            tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=is_out)
        else:
            b_slot_at = (tl.load(tile_ptr + _SLOT0) + o_row).to(tl.int64)
            lse_at = b_slot_at * (NUM_KV_HEADS * GROUP) + o_head
            tl.store(lse_ptr + lse_at, b_lse, mask=is_row)
            p_part = part_ptr + (lse_at * VALUE_DIM)[:, None] + o_v[None, :]
            tl.store(p_part, b_out, mask=is_out)
