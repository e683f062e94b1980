"""Turns a plan into the batch that a runner executes: rows, segments, what to sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC

import numpy as np

from ..kv.fork_tree import shared_runs
from .batch import Row, SampleSpec, Segment, TokenArray
from .plan import Span
from .randomness import uniforms
from .working import Sequence

_NO_IDS: TokenArray = np.empty(0, dtype=np.int32)


class ForkTree:
    """The segments that the rows of the last step shared, rebuilt only when they may differ."""

    def __init__(self, block_size: int) -> None:
        self.version: int = 0
        self.segments: tuple[Segment, ...] = ()
        self._block_size = block_size
        self._signature: object = None

    def update(self, rows: SequenceABC[Row], changes: int) -> None:
        """Follow the rows of a step; `changes` differs where their shared blocks may differ.

        While `version` stays, the rows are the same and their tables have only grown.
        """
        signature = (changes, [row.seq_id for row in rows])
        if signature == self._signature:
            return
        self._signature = signature
        self.version += 1
        self.segments = ()
        if len(rows) > 1:
            size = self._block_size
            # Only blocks that lie before a row's first query, so that no mask cuts them.
            limits = [row.start // size for row in rows]
            self.segments = tuple(
                Segment(run.parent, run.start * size, run.block_ids, run.rows)
                for run in shared_runs([row.block_ids for row in rows], limits)
            )


def make_rows(spans: SequenceABC[Span]) -> Iterator[Row | Exception]:
    """The row of each span, or the exception that its token constraint raised."""
    numbers = _uniforms(spans)
    for span, number in zip(spans, numbers, strict=True):
        try:
            yield _row(span, number)
        except Exception as error:
            yield error


def is_sampled(span: Span) -> bool:
    """Whether the span ends at the sequence's last id, so that the next one is drawn."""
    sequence = span.sequence
    return sequence.request.kind == "generate" and span.end == sequence.num_tokens


def _uniforms(spans: SequenceABC[Span]) -> list[float]:
    """One number a span; greedy ones, and those that draw nothing, get 0."""
    drawn = [
        at
        for at, span in enumerate(spans)
        if span.sequence.request.options.temperature != 0 and is_sampled(span)
    ]
    numbers = [0.0] * len(spans)
    if drawn:
        keys = [spans[at].sequence.request.key for at in drawn]
        values = uniforms(keys, [spans[at].end for at in drawn]).tolist()
        for at, value in zip(drawn, values, strict=True):
            numbers[at] = value
    return numbers


def _row(span: Span, uniform: float) -> Row:
    sequence = span.sequence
    assert sequence.table is not None, "a sequence in a step has a table"
    return Row(
        seq_id=sequence.seq_id,
        token_ids=sequence.ids(span.start, span.end),
        start=span.start,
        block_ids=sequence.table.block_ids,
        sample=_sample_spec(sequence, uniform) if is_sampled(span) else None,
        targets=tuple(_targets(span)) if sequence.request.kind == "score" else (),
    )


def _sample_spec(sequence: Sequence, uniform: float) -> SampleSpec:
    request = sequence.request
    options = request.options
    repeats = options.repetition_penalty not in (None, 1.0)
    counts = repeats or bool(options.presence_penalty or options.frequency_penalty)
    is_early = len(request.output_ids) < options.min_tokens
    return SampleSpec(
        options=options,
        uniform=uniform,
        prompt_ids=sequence.ids(0, sequence.num_input) if repeats else _NO_IDS,
        output_ids=sequence.ids(sequence.num_input, sequence.num_tokens) if counts else _NO_IDS,
        banned_ids=tuple(sorted(request.stop_token_ids)) if is_early else (),
        mask=None if request.constraint is None else request.constraint.mask(),
    )


def _targets(span: Span) -> Iterable[tuple[int, int]]:
    """Each score id that follows an id of the span, with the offset of that id in the span."""
    sequence = span.sequence
    first = max(span.start, sequence.num_input - 1)
    following = sequence.ids(first + 1, span.end + 1).tolist() if span.end > first else []
    return ((first + at - span.start, token_id) for at, token_id in enumerate(following))
