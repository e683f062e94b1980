"""Joins the partial results of each query token, in Triton.

Partial results are normalised outputs and base 2 log-sum-exps of disjoint key sets (the formula is
reference.merge_states'). A token's slots are merged in the order of its list; sinks enter here,
once, for every token that has a list.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Arguments of jitted functions have no Python types: they are pointers, scalars and constexprs.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_tiles import DeviceTiles
from .reference import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _merge_kernel(
    part_ptr,  # float32 [slots, num_q_heads, VALUE_DIM]
    lse_ptr,  # float32 [slots, num_q_heads]
    sinks_ptr,  # [num_q_heads] or None
    m_ptr_ptr,
    m_slot_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    NUM_Q_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    begin = tl.load(m_ptr_ptr + i_token)
    end = tl.load(m_ptr_ptr + i_token + 1)
    o_v = tl.arange(0, VALUE_PAD)
    is_v = o_v < VALUE_DIM
    # A list of a single -1: a tile has written the output itself.
    slot = tl.load(m_slot_ptr + begin, mask=begin < end, other=0)
    num_written = tl.where(slot >= 0, VALUE_DIM, 0)
    b_m = tl.full([1], float("-inf"), tl.float32)
    b_l = tl.zeros([1], tl.float32)
    b_acc = tl.zeros([VALUE_PAD], tl.float32)
    for start in range(begin, end, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        b_slot = tl.load(m_slot_ptr + o_s, mask=o_s < end, other=-1)
        has_slot = b_slot >= 0
        at = b_slot.to(tl.int64) * NUM_Q_HEADS + i_head
        b_lse = tl.load(lse_ptr + at, mask=has_slot, other=float("-inf"))
        is_part = has_slot[:, None] & is_v[None, :]
        p_part = part_ptr + (at * VALUE_DIM)[:, None] + o_v[None, :]
        b_part = tl.load(p_part, mask=is_part, other=0.0)
        b_top = tl.maximum(b_m, tl.max(b_lse, 0))
        # All empty so far: -inf less -inf would be NaN.
        b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_weight = tl.exp2(b_lse - b_safe)
        b_old = tl.exp2(b_m - b_safe)
        b_l = b_l * b_old + tl.sum(b_weight, 0)
        b_acc = b_acc * b_old + tl.sum(b_weight[:, None] * b_part, 0)
        b_m = b_top
    has_keys = b_l > 0.0
    b_total = tl.where(has_keys, b_l, 1.0)
    b_out = b_acc / b_total
    if sinks_ptr is not None:
        b_sink = tl.load(sinks_ptr + i_head).to(tl.float32) * _LOG2_E
        # out x 2^lse / (2^lse + 2^sink); without keys the lse is -inf, and the output stays zero
        b_out = b_out / (1.0 + tl.exp2(b_sink - (b_m + tl.log2(b_total))))
        b_out = tl.where(has_keys, b_out, 0.0)
    p_out = out_ptr + i_token * stride_ot + i_head * stride_oh + o_v
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=o_v < num_written)


def merge_slots(
    slots: Tensor, lses: Tensor, tiles: DeviceTiles, out: Tensor, sinks: Tensor | None
) -> None:
    """Write out [T, Hq, Dv] of every token that no tile has written itself; zeros without keys.

    `slots` [n, Hq, Dv] and `lses` [n, Hq] are float32 and contiguous, and written for every slot
    in a list.
    """
    num_tokens, num_q_heads, value_dim = out.shape
    if not all(part.dtype == torch.float32 and part.is_contiguous() for part in (slots, lses)):
        raise ValueError("partial results must be contiguous float32")
    _merge_kernel[num_tokens, num_q_heads](
        slots,
        lses,
        sinks,
        tiles.m_ptr,
        tiles.m_slot,
        out,
        out.stride(0),
        out.stride(1),
        NUM_Q_HEADS=num_q_heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_S=16,
        num_warps=4,
        enable_fp_fusion=True,
    )
