"""The witness model: what it says next is a digest of exactly what it reads back from its KV.

A wrong share, a stale block, a missed copy or a foreign session changes the answer, always and on
every machine. Runs without weights and without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..config import SamplingOptions
from ..core.batch import Batch, ModelInfo, Row, RowResult
from .witness_model import (
    Digests,
    Integers,
    chains,
    choose,
    digests,
    logprob,
    top_logprobs,
    witness_reply,
    witness_score,
)

__all__ = ["WitnessRunner", "witness_reply", "witness_score"]

Hook = Callable[[Batch], None]

UNWRITTEN = -1


class Reading(NamedTuple):
    """What a row read back from the slots of its positions, from the first to its last."""

    tokens: Integers
    positions: Integers
    chains: Digests


class WitnessRunner:
    """A Runner whose KV slots hold the token, the position and a digest of what preceded them.

    `before_step` and `after_step` are called with each batch around its execution, `after_copy`
    after each block copy and `after_write` after each row's KV is written: to raise, to wait or to
    look. `nan_rows` names sequences (`Row.seq_id`) whose logits are to be NaN. `batches` records
    all steps. Every read and write is checked, as is the batch's promise about segments: a fault
    of the caller fails the step with an AssertionError.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        vocab_size: int = 260,
        max_context: int = 8192,
        eos_token_ids: Sequence[int] = (),
        tokenizer: object = None,
        keep_batches: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.before_step: Hook = _nothing
        self.after_step: Hook = _nothing
        self.after_copy: Hook = _nothing
        self.after_write: Hook = _nothing
        self.nan_rows: set[int] = set()
        self.batches: list[Batch] = []
        self.num_steps: int = 0
        self.is_closed: bool = False
        self._keeps_batches = keep_batches
        self._last: Batch | None = None
        self._info = ModelInfo(
            name="witness",
            vocab_size=vocab_size,
            max_context=max_context,
            block_size=block_size,
            num_blocks=num_blocks,
            bytes_per_block=block_size * 16,
            eos_token_ids=tuple(eos_token_ids),
            identity="witness",
            default_options=SamplingOptions(temperature=0.0),
        )
        self._tokens: Integers = np.full(num_blocks * block_size, UNWRITTEN, dtype=np.int64)
        self._positions: Integers = self._tokens.copy()
        self._chains: Digests = np.zeros(num_blocks * block_size, dtype=np.uint64)

    @property
    def info(self) -> ModelInfo:
        """What the engine must know of the model."""
        return self._info

    def execute(self, batch: Batch) -> list[RowResult]:
        """Copy, write, read back, and answer each row with what was read."""
        assert not self.is_closed, "a closed runner executes nothing"
        self.num_steps += 1
        self.before_step(batch)
        check_batch(batch, self._info.block_size)
        self._follow(batch)
        for src, dst, tokens in batch.copies:
            self._copy(src, dst, tokens)
            self.after_copy(batch)
        for row in batch.rows:
            self._write(row)
            self.after_write(batch)
        results = [self._answer(row) for row in batch.rows]
        self.after_step(batch)
        return results

    def close(self) -> None:
        """Nothing more is executed."""
        self.is_closed = True

    def poison(self, block_id: int, first_slot: int = 0) -> None:
        """Forget what a block holds from `first_slot` on, so that reading it fails."""
        size = self._info.block_size
        self._tokens[block_id * size + first_slot : (block_id + 1) * size] = UNWRITTEN

    def poison_unfilled(self, filled_slots: Sequence[int]) -> None:
        """Forget, in each block, what lies behind its first `filled_slots` slots."""
        size = self._info.block_size
        filled = np.asarray(filled_slots)[:, np.newaxis]
        self._tokens.reshape(-1, size)[np.arange(size) >= filled] = UNWRITTEN

    def _follow(self, batch: Batch) -> None:
        """Record a batch, and hold its tree version against the last one's."""
        # The tables in a batch are the live ones.
        rows = tuple(replace(row, block_ids=tuple(row.block_ids)) for row in batch.rows)
        last, self._last = self._last, replace(batch, rows=rows)
        if self._keeps_batches:
            self.batches.append(self._last)
        if last is not None and last.tree_version == batch.tree_version:
            assert last.segments == batch.segments, "segments changed and the version did not"
            for before, now in zip(last.rows, rows, strict=True):
                assert before.seq_id == now.seq_id, "rows changed and the version did not"
                known = tuple(before.block_ids)
                assert tuple(now.block_ids[: len(known)]) == known, "a table did more than grow"

    def _copy(self, src: int, dst: int, tokens: int) -> None:
        size = self._info.block_size
        self.poison(dst)
        for array in (self._tokens, self._positions, self._chains):
            array[dst * size : dst * size + tokens] = array[src * size : src * size + tokens]
        assert (self._tokens[dst * size : dst * size + tokens] != UNWRITTEN).all(), "empty copy"

    def _slots(self, row: Row) -> Integers:
        size = self._info.block_size
        positions = np.arange(row.end)
        blocks = np.asarray(row.block_ids, dtype=np.int64)
        slots: Integers = blocks[positions // size] * size + positions % size
        return slots

    def _write(self, row: Row) -> None:
        slots = self._slots(row)
        own = slots[row.start :]
        self._tokens[own] = row.token_ids
        self._positions[own] = np.arange(row.start, row.end)
        self._chains[own] = chains(self._tokens[slots], self._positions[slots])[row.start :]

    def _answer(self, row: Row) -> RowResult:
        slots = self._slots(row)
        tokens, positions = self._tokens[slots], self._positions[slots]
        assert (tokens != UNWRITTEN).all(), f"sequence {row.seq_id} reads a slot never written"
        assert (positions == np.arange(row.end)).all(), f"sequence {row.seq_id} reads others' slots"
        if row.seq_id in self.nan_rows:
            return RowResult(error="the model gave logits that are not finite")
        return self._draw(row, Reading(tokens, positions, self._chains[slots]))

    def _draw(self, row: Row, reading: Reading) -> RowResult:
        """The answer to a row that read `reading`, which has been checked."""
        known = digests(*reading)
        targets = tuple(
            logprob(int(known[row.start + offset]), token_id) for offset, token_id in row.targets
        )
        if row.sample is None:
            return RowResult(target_logprobs=targets)
        digest, vocab_size = int(known[-1]), self._info.vocab_size
        token_id = choose(digest, row.sample, vocab_size)
        count = row.sample.options.top_logprobs
        return RowResult(
            token_id=token_id,
            logprob=logprob(digest, token_id),
            top_logprobs=top_logprobs(digest, count, vocab_size) if count else (),
            target_logprobs=targets,
        )


def check_batch(batch: Batch, block_size: int) -> None:
    """Verify what a batch promises a runner, given its block size.

    Raises:
        AssertionError: a row lacks blocks, two rows write one block, a row writes what another
            reads, a copy goes astray, or a segment is not what its rows share.
    """
    assert batch.rows, "a batch has rows"
    assert len({row.seq_id for row in batch.rows}) == len(batch.rows), "a sequence runs twice"
    writers: dict[int, int] = {}
    for row in batch.rows:
        assert len(row.token_ids), "a row runs no token"
        assert len(row.block_ids) >= -(-row.end // block_size), "a row lacks blocks"
        assert len(set(row.block_ids)) == len(row.block_ids), "a row repeats a block"
        for block_id in row.block_ids[row.start // block_size : -(-row.end // block_size)]:
            assert block_id not in writers, f"two rows write block {block_id}"
            writers[block_id] = row.seq_id
    for row in batch.rows:
        for block_id in row.block_ids:
            assert writers.get(block_id, row.seq_id) == row.seq_id, f"{block_id} is shared"
    targets = [copy.dst for copy in batch.copies]
    assert len(set(targets)) == len(targets), "two copies go to one block"
    for copy in batch.copies:
        assert copy.src not in writers, f"block {copy.src} is copied and written"
        assert copy.src not in targets, f"block {copy.src} is copied from and to"
        assert copy.dst in writers, f"block {copy.dst} is copied to for nobody"
        assert 0 < copy.tokens < block_size, f"a copy of {copy.tokens} slots"
    _check_segments(batch, block_size)


def _check_segments(batch: Batch, block_size: int) -> None:
    placed: set[tuple[int | None, int]] = set()
    for at, segment in enumerate(batch.segments):
        assert placed.isdisjoint((segment.parent, index) for index in segment.rows), "a row forks"
        placed.update((segment.parent, index) for index in segment.rows)
        assert len(segment.rows) > 1, "a segment is shared"
        assert len(set(segment.rows)) == len(segment.rows), "a segment repeats a row"
        assert segment.block_ids, "a segment has blocks"
        begin = 0
        if segment.parent is not None:
            assert segment.parent < at, "a segment precedes its parent"
            parent = batch.segments[segment.parent]
            assert set(segment.rows) <= set(parent.rows), "a segment has rows its parent lacks"
            begin = parent.start + len(parent.block_ids) * block_size
        assert segment.start == begin, "a segment does not continue its parent"
        first, end = begin // block_size, begin + len(segment.block_ids) * block_size
        for index in segment.rows:
            row = batch.rows[index]
            held = tuple(row.block_ids[first : first + len(segment.block_ids)])
            assert held == segment.block_ids, "a row does not hold its segment"
            assert end <= row.start, "a segment holds a row's own queries"


def _nothing(batch: Batch) -> None:
    pass
