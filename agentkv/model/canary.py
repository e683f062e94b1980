"""The numeric check: does the runner compute what the model computes alone?

Runs a few made-up sequences through the real runner, packed in one row, then token by token, then
forked, and compares log-probabilities with plain forwards of the model. It finds what no look at
the structure shows, such as a recurrent layer beside each attention. It says nothing about lengths
beyond its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ..core.batch import Batch, BlockCopy, Row, Segment, TokenArray
from ..core.protocols import Runner
from ..errors import UnsupportedModelError
from .structure import LayerSpec, share_parameters

__all__ = ["check_canary"]

LENGTHS = (23, 5, 11)  # the first is forked
MAX_LENGTH = 600
NUM_TARGETS = 4
FLOAT32_TOLERANCE = 0.01
ROUNDED_TOLERANCE = 0.15
# No batch of the core has a negative version, so no plan of ours is taken for one of its own.
PACKED, STAGED, FORKED = -1, -2, -3

_Floats = npt.NDArray[np.float64]


def check_canary(runner: Runner, model: PreTrainedModel, specs: Sequence[LayerSpec] = ()) -> float:
    """The error found, in standard deviations of the model's own log-probabilities.

    Overwrites KV blocks of the runner, so call it before anything else does. Windows in `specs`
    that are short enough make the sequences longer than they are.

    Raises:
        UnsupportedModelError: [canary] the runner and the model disagree, or a step fails.
    """
    vocab_size = runner.info.vocab_size
    sequences = _sequences(runner, specs)
    targets = _targets(vocab_size)
    found, wanted = [], []
    # A twin: rope types that follow the row's length change the model's buffers.
    reference = functools.partial(_reference, share_parameters(model), targets)
    known: dict[bytes, _Floats] = {}
    for batch, histories in _batches(runner, sequences, targets):
        results = runner.execute(batch)
        for row, result, history in zip(batch.rows, results, histories, strict=True):
            if result.error is not None:
                raise _refusal(model, result.error)
            got = np.asarray(result.target_logprobs).reshape(-1, NUM_TARGETS)
            found.append(got)
            key = history.tobytes()
            if key not in known:
                known[key] = reference(history)
            wanted.append(known[key][row.start : row.end])
    error = _error(np.concatenate(found), np.concatenate(wanted), model)
    tolerance = FLOAT32_TOLERANCE if model.dtype == torch.float32 else ROUNDED_TOLERANCE
    if not error <= tolerance:
        raise _refusal(
            model,
            f"its log-probabilities differ by {error:.3g} standard deviations from those of the "
            f"model alone, and {tolerance:g} is allowed; it keeps state that blocks do not hold",
        )
    return error


def _batches(
    runner: Runner, sequences: list[TokenArray], targets: tuple[int, ...]
) -> list[tuple[Batch, list[TokenArray]]]:
    """Three steps, and for each row of a step the whole sequence that it is a part of."""
    size, next_block = runner.info.block_size, 0
    tables: list[list[int]] = []
    for ids in sequences:
        count = -(-len(ids) // size)
        tables.append(list(range(next_block, next_block + count)))
        next_block += count
    packed = [
        _row(index, ids, 0, len(ids) - 2, tables[index], targets)
        for index, ids in enumerate(sequences)
    ]
    staged = [
        _row(index, ids, len(ids) - 2, len(ids) - 1, tables[index], targets)
        for index, ids in enumerate(sequences)
    ]
    first, table = sequences[0], tables[0]
    last = len(first) - 1
    num_full, inside = divmod(last, size)
    branch = first.copy()
    branch[last] = (branch[last] + 1) % runner.info.vocab_size
    forked = [
        _row(0, first, last, last + 1, table, targets),
        _row(len(sequences), branch, last, last + 1, [*table[:num_full], next_block], targets),
        *(
            _row(index, ids, len(ids) - 1, len(ids), tables[index], targets)
            for index, ids in enumerate(sequences)
            if index > 0
        ),
    ]
    copies = (BlockCopy(table[num_full], next_block, inside),) if inside else ()
    shared = (Segment(None, 0, tuple(table[:num_full]), (0, 1)),) if num_full else ()
    return [
        (Batch(tuple(packed), tree_version=PACKED), sequences),
        (Batch(tuple(staged), tree_version=STAGED), sequences),
        (Batch(tuple(forked), copies, shared, FORKED), [first, branch, *sequences[1:]]),
    ]


def _row(
    seq_id: int,
    ids: TokenArray,
    start: int,
    end: int,
    table: list[int],
    targets: tuple[int, ...],
) -> Row:
    asked = tuple((offset, token_id) for offset in range(end - start) for token_id in targets)
    return Row(seq_id=seq_id, token_ids=ids[start:end], start=start, block_ids=table, targets=asked)


def _sequences(runner: Runner, specs: Sequence[LayerSpec]) -> list[TokenArray]:
    """Made-up sequences that fit the pool with one block to spare, at least three tokens each."""
    info = runner.info
    windows = [spec.window for spec in specs if spec.window is not None]
    longest = max([LENGTHS[0], *(w + 7 for w in windows if w + 7 <= MAX_LENGTH)])
    free = info.num_blocks - 1
    sequences: list[TokenArray] = []
    for wanted in (longest, *LENGTHS[1:]):
        length = min(wanted, info.max_context, free * info.block_size)
        if length < 3:
            break
        free -= -(-length // info.block_size)
        # A walk through the vocabulary in steps that do not repeat soon.
        ids = (np.arange(length, dtype=np.int64) * 7919 + 31 * len(sequences) + 3) % info.vocab_size
        sequences.append(ids.astype(np.int32))
    if not sequences:
        raise UnsupportedModelError(
            f"[canary] {info.num_blocks} blocks of {info.block_size} tokens are too few to check a "
            "model; give more KV memory"
        )
    return sequences


def _targets(vocab_size: int) -> tuple[int, ...]:
    return tuple((2 * i + 1) * vocab_size // (2 * NUM_TARGETS) for i in range(NUM_TARGETS))


def _reference(model: PreTrainedModel, targets: tuple[int, ...], ids: TokenArray) -> _Floats:
    """Log-probabilities [len(ids), NUM_TARGETS] by the model's own attention."""
    row = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=row, use_cache=False).logits[0].float()
        chosen = logits.log_softmax(-1)[:, list(targets)]
    return np.asarray(chosen.cpu().numpy(), dtype=np.float64)


def _error(found: _Floats, wanted: _Floats, model: PreTrainedModel) -> float:
    """The worst difference in float32, else the root mean square, over the spread of `wanted`."""
    difference = np.abs(found - wanted)
    if not np.isfinite(difference).all():
        return math.inf
    worst = difference.max() if model.dtype == torch.float32 else math.sqrt((difference**2).mean())
    return float(worst) / max(float(wanted.std()), 1e-6)


def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"[canary] {type(model).__name__} is not served: {why}")
