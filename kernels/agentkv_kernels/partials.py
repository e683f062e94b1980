"""Partial results on the CPU: attention of some tokens over some keys, and merging them.

A partial result is an output and a log-sum-exp, in natural units here, since torch's fused kernel
gives them so. Tokens come first, then query heads of a KV head, then KV heads: [n, G, Hkv, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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

    A batch of 1 in keys and values serves every query of the batch. `hidden` is added to the
    scores. With `is_causal`, n == m and token i sees keys up to i. Each token sees a key, and what
    is hidden is finite.
    """
    # In float32 zeros that make up for a difference in size cost more than they save.
    is_padded = key.shape[3] != value.shape[3] and key.dtype != torch.float32
    is_alike = query.dtype == key.dtype and (key.shape[3] == value.shape[3] or is_padded)
    if scores.softcap is None and is_alike:
        return _fused(query, key, value, scores.scale, hidden, is_causal=is_causal)
    if is_causal:
        hidden = torch.full(query.shape[2:3] * 2, -torch.inf).triu_(1)[None, None]
    return _written_out(query, key, value, scores, hidden)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    hidden: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """By torch's kernel, which takes keys and values of one size: zeros make up the difference."""
    key_dim, value_dim = key.shape[3], value.shape[3]
    if key_dim < value_dim:
        query, key = (pad(each, (0, value_dim - key_dim)) for each in (query, key))
    elif value_dim < key_dim:
        value = pad(value, (0, key_dim - value_dim))
    key, value = (each.expand(len(query), -1, -1, -1) for each in (key, value))
    out, lse = _flash(query, key, value, is_causal=is_causal, attn_mask=hidden, scale=scale)
    return out[..., :value_dim], lse


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """By products in float32, in slices of tokens: a matrix for each KV head and batch of keys."""
    batch, num_heads, num_rows, _ = query.shape
    # Head first, as keys lie in memory; queries that share keys become rows of one product.
    size = num_heads * len(key), batch // len(key)
    rows = query.transpose(0, 1).reshape(*size, num_rows, -1).float() * scores.scale
    key, value = (each.transpose(0, 1).flatten(0, 1).float() for each in (key, value))
    step = max(1, _SLICE_SCORES // (key.shape[1] * size[1]))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        score = torch.bmm(rows[:, :, begin:end].flatten(1, 2), key.transpose(1, 2))
        if scores.softcap is not None:
            score.div_(scores.softcap).tanh_().mul_(scores.softcap)
        if hidden is not None:
            cut = hidden if hidden.shape[2] == 1 else hidden[:, :, begin:end]
            score.view(num_heads, -1, size[1], end - begin, key.shape[1]).add_(cut)
        out, lse = _softmax(score, value)
        outs.append(out.view(num_heads, batch, end - begin, -1).transpose(0, 1))
        lses.append(lse.view(num_heads, batch, end - begin).transpose(0, 1))
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _softmax(score: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [x, r, m], changed in place, over values [x, m, Dv]: output and LSE."""
    top = score.amax(-1, keepdim=True)
    weight = score.sub_(top).exp_()
    total = weight.sum(-1, keepdim=True)
    out = torch.bmm(weight, value).div_(total)
    return out, total.log_().add_(top).squeeze(-1)


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
