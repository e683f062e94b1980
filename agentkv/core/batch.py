"""What one step computes, in plain integers: the only language core and a runner share.

Core fills these records and a runner reads them. No tensors, no text.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..config import SamplingOptions

TokenArray = npt.NDArray[np.int32]


class BlockCopy(NamedTuple):
    """Copy the first `tokens` slots of block `src` to `dst`, in all layers, before any write."""

    src: int
    dst: int
    tokens: int


class Segment(NamedTuple):
    """A run of blocks that every row in `rows` reads, whole, at the same positions.

    `start` is the position of its first token, a multiple of the block size; every slot of
    `block_ids` is filled. `parent` indexes the segment list, None at a root. Only segments with two
    or more rows are listed; what a row does not find in the segments on its path is its own tail.
    """

    parent: int | None
    start: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token after a row's last one.

    `uniform` is the one random number of this token in [0, 1), `prompt_ids` and `output_ids` are
    what the penalties count (empty when no penalty is set), `banned_ids` may not be drawn (stop ids
    before min_tokens), and `mask` is a TokenConstraint's verdict: True for each id of the
    vocabulary that may be drawn.
    """

    options: SamplingOptions
    uniform: float
    prompt_ids: TokenArray = field(repr=False)
    output_ids: TokenArray = field(repr=False)
    banned_ids: tuple[int, ...] = ()
    mask: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: run `token_ids` at the positions from `start` on.

    `block_ids` covers every position up to the last of these. The row's KV is written to slot
    `block_ids[p // block_size] * block_size + p % block_size` of position p. `sample` is None when
    the step ends before the sequence's last known token. `targets` asks for log-probabilities:
    pairs (offset, token id), the natural-log probability of that id right after the row's token at
    that offset, from the unmodified logits.
    """

    seq_id: int
    token_ids: TokenArray = field(repr=False)
    start: int
    block_ids: SequenceABC[int]
    sample: SampleSpec | None = None
    targets: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    @property
    def end(self) -> int:
        """KV length after the step, in tokens."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: block copies, then one forward over all rows; a sequence is in at most one.

    `tree_version` is equal in two batches only if `segments` and the seq_ids of `rows`, in order,
    are equal too.
    """

    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...] = ()
    segments: tuple[Segment, ...] = ()
    tree_version: int = 0

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave: the drawn token, or `error` (a sentence) when this row alone failed.

    `logprob` and `top_logprobs` (pairs of id and natural-log probability, best first) are filled
    when asked for. They are those of the model's unmodified distribution at temperature 1.
    `target_logprobs` answers `Row.targets`.
    """

    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    target_logprobs: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of a model.

    `max_context` and `num_blocks` x `block_size` are in tokens; `bytes_per_block` counts K and V of
    all layers. `identity` names the weights, dtype and rope set-up. `default_options` come from the
    model's generation config.
    """

    name: str
    vocab_size: int
    max_context: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    eos_token_ids: tuple[int, ...] = ()
    identity: str = ""
    default_options: SamplingOptions = field(default_factory=SamplingOptions)
    is_cpu: bool = True

    def capacity(self, max_context: int | None) -> int:
        """Tokens that one request may have, input and output together, if the user also sets
        `max_context`: no more than the context or the whole pool.
        """
        limit = min(self.max_context, self.num_blocks * self.block_size)
        return limit if max_context is None else min(limit, max_context)
