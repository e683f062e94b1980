"""Partial results on the CPU: attention of some tokens over some keys, and merging them.

A partial result is an output and a log-sum-exp, in natural units here, since torch's fused kernel
gives them so. Tokens come first, then query heads of a KV head, then KV heads: [n, G, Hkv, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu_work import Merge

# Score elements of one slice where scores are written out: they stay in the cache between passes.
_SLICE_SCORES = 1 << 18

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Partial(NamedTuple):
    """The output [n, G, Hkv, Dv] and the log-sum-exp [n, G, Hkv], float32, of n tokens."""

    out: Tensor
    lse: Tensor


class Scores(NamedTuple):
    """How scores are made of products."""

    scale: float
    softcap: float | None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    *,
    hidden: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of [b, h, n, Dk] over [b, h, m, Dk] and [b, h, m, Dv], m > 0: output and LSE.

    `hidden` is added to the scores. With `is_causal`, n == m and token i sees keys up to i. Each
    token sees a key, and what is hidden is finite.
    """
    is_plain = scores.softcap is None and key.shape[3] == value.shape[3]
    if is_plain and query.dtype == key.dtype == value.dtype:
        out, lse = _flash(
            query, key, value, is_causal=is_causal, attn_mask=hidden, scale=scores.scale
        )
        return out, lse
    if is_causal:
        hidden = torch.full(query.shape[2:3] * 2, -torch.inf).triu_(1)
    step = max(1, _SLICE_SCORES // key.shape[2])
    slices = [slice(i, i + step) for i in range(0, query.shape[2], step)]
    key, value = key.float(), value.float()
    parts = [_attend_slice(query[:, :, s], key, value, scores, _rows(hidden, s)) for s in slices]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _rows(hidden: Tensor | None, rows: slice) -> Tensor | None:
    return hidden if hidden is None or hidden.shape[-2] == 1 else hidden[..., rows, :]


def _attend_slice(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    score = torch.matmul(query.float() * scores.scale, key.transpose(2, 3))
    if scores.softcap is not None:
        score = score.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if hidden is not None:
        score += hidden
    lse = score.logsumexp(-1)
    return torch.matmul(score.sub_(lse[..., None]).exp_(), value), lse


def merge(
    partials: Sequence[Partial], merges: Sequence[Merge], out: Tensor, sinks: Tensor | None
) -> None:
    """Weigh the partial results of each token by their log-sum-exp, into out [T, G, Hkv, Dv].

    Sinks [G, Hkv] are one more key each, without a value.
    """
    if not partials:
        return
    outs, lses = (torch.cat(column) for column in zip(*partials, strict=True))
    for tokens, numbers in merges:
        lse, merged = (
            column.index_select(0, numbers.flatten()).view(*numbers.shape, *column.shape[1:])
            for column in (lses, outs)
        )
        merged = merged[:, 0] if numbers.shape[1] == 1 else _weigh(merged, lse)
        if sinks is not None:
            merged = merged * torch.sigmoid(lse.logsumexp(1) - sinks)[..., None]
        out.index_copy_(0, tokens, merged.to(out.dtype))


def _weigh(outs: Tensor, lses: Tensor) -> Tensor:
    """Partial results [m, count, ...] of the same tokens as one."""
    return (outs * lses.softmax(1)[..., None]).sum(1)
