"""What is done to logits before a token is drawn: penalties, biases, bans and constraints.

Owns the order of these adjustments. Knows nothing about temperature or drawing. Everything here is
a function of the ids in a SampleSpec, so a fork or a recomputed sequence needs no state restored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.batch import SampleSpec

Ids = npt.NDArray[np.int64]


def needs_adjustment(spec: SampleSpec) -> bool:
    """Whether `spec` asks for anything that `adjust` does."""
    options = spec.options
    return bool(
        spec.mask is not None
        or spec.banned_ids
        or options.logit_bias
        or options.presence_penalty
        or options.frequency_penalty
        or (options.repetition_penalty or 1.0) != 1.0
    )


def adjust(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Adjust float32 `logits` [num_rows, vocab_size] in place, one spec a row.

    Order: repetition penalty (over prompt and output, as transformers does it), presence and
    frequency penalties (over the output, as OpenAI documents them), biases, and last the bans of
    `banned_ids` and `mask`, which set -inf so that nothing can bring an id back.
    """
    _apply_repetition_penalty(logits, specs)
    _add(logits, [_count_penalties(spec) for spec in specs])
    _add(logits, [_biases(spec) for spec in specs])
    _ban(logits, specs)


def _apply_repetition_penalty(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Divide positive and multiply negative logits of ids already seen (CTRL, section 4.1)."""
    rows = [i for i, spec in enumerate(specs) if (spec.options.repetition_penalty or 1.0) != 1.0]
    if not rows:
        return
    seen = [np.concatenate((specs[i].prompt_ids, specs[i].output_ids)) for i in rows]
    row_index, ids = _flatten(rows, seen, logits)
    penalties = [float(specs[i].options.repetition_penalty or 1.0) for i in rows]
    penalty = torch.from_numpy(
        np.repeat(np.asarray(penalties, np.float32), [len(part) for part in seen])
    ).to(logits.device)
    scores = logits[row_index, ids]
    # An id that occurs twice is written twice with the same value.
    logits[row_index, ids] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _count_penalties(spec: SampleSpec) -> tuple[Ids, npt.NDArray[np.float32]] | None:
    presence, frequency = spec.options.presence_penalty, spec.options.frequency_penalty
    if not (presence or frequency) or len(spec.output_ids) == 0:
        return None
    ids, counts = np.unique(spec.output_ids, return_counts=True)
    return ids.astype(np.int64), -(presence + frequency * counts).astype(np.float32)


def _biases(spec: SampleSpec) -> tuple[Ids, npt.NDArray[np.float32]] | None:
    bias = spec.options.logit_bias
    if not bias:
        return None
    return np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), np.float32)


def _add(logits: Tensor, terms: Sequence[tuple[Ids, npt.NDArray[np.float32]] | None]) -> None:
    """Add each row's (distinct ids, values); None adds nothing."""
    present = [(i, term) for i, term in enumerate(terms) if term is not None]
    if not present:
        return
    row_index, ids = _flatten([i for i, _ in present], [term[0] for _, term in present], logits)
    values = torch.from_numpy(np.concatenate([term[1] for _, term in present]))
    logits[row_index, ids] += values.to(logits.device)


def _ban(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows = [i for i, spec in enumerate(specs) if spec.banned_ids]
    if rows:
        banned = [np.asarray(specs[i].banned_ids, np.int64) for i in rows]
        row_index, ids = _flatten(rows, banned, logits)
        logits[row_index, ids] = float("-inf")
    for i, spec in enumerate(specs):
        if spec.mask is not None:
            # The embedding may have more rows than the vocabulary; those are never allowed.
            allowed = np.zeros(logits.shape[1], np.bool_)
            allowed[: len(spec.mask)] = spec.mask
            logits[i].masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))


def _flatten(
    rows: Sequence[int], parts: Sequence[npt.NDArray[np.integer]], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Row and column indices of `parts`, one part of ids a row, on the device of `logits`."""
    row_index = np.repeat(np.asarray(rows, np.int64), [len(part) for part in parts])
    ids = np.concatenate(parts).astype(np.int64)
    device = logits.device
    return torch.from_numpy(row_index).to(device), torch.from_numpy(ids).to(device)
