"""The witness model: what it says next is a digest of exactly what it reads back from its KV.

A wrong share, a stale block, a missed copy or a foreign session changes the answer, always and on
every machine. Runs without weights and without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..config import SamplingOptions
from ..core.batch import Batch, ModelInfo, Row, RowResult, SampleSpec, TokenArray
from ..core.randomness import uniform

__all__ = ["WitnessRunner", "witness_reply", "witness_score"]

Digests = npt.NDArray[np.uint64]
Hook = Callable[[Batch], None]

UNWRITTEN = -1


class WitnessRunner:
    """A Runner whose KV slots hold the token and the position that were written to them.

    `before_step` and `after_step` are called with each batch around its execution, to raise, to
    wait or to look; `nan_rows` names sequences (`Row.seq_id`) whose logits are to be NaN. Every
    read is checked: a slot that was never written, or holds another position, fails the step.
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
    ) -> None:
        self.tokenizer = tokenizer
        self.before_step: Hook = _nothing
        self.after_step: Hook = _nothing
        self.nan_rows: set[int] = set()
        self.batches: list[Batch] = []
        self.is_closed: bool = False
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
        self._tokens = np.full(num_blocks * block_size, UNWRITTEN, dtype=np.int64)
        self._positions = np.full(num_blocks * block_size, UNWRITTEN, dtype=np.int64)

    @property
    def info(self) -> ModelInfo:
        """What the engine must know of the model."""
        return self._info

    def execute(self, batch: Batch) -> list[RowResult]:
        """Copy, write, read back, and answer each row with what was read."""
        assert not self.is_closed, "a closed runner executes nothing"
        self.batches.append(batch)
        self.before_step(batch)
        _check_writes(batch, self._info.block_size)
        self._check_segments(batch)
        size = self._info.block_size
        for src, dst, tokens in batch.copies:
            source, target = src * size, dst * size
            self._tokens[target : target + size] = UNWRITTEN
            self._tokens[target : target + tokens] = self._tokens[source : source + tokens]
            self._positions[target : target + tokens] = self._positions[source : source + tokens]
        for row in batch.rows:
            written = self._slots(row, row.start, row.end)
            self._tokens[written] = row.token_ids
            self._positions[written] = np.arange(row.start, row.end)
        results = [self._answer(row) for row in batch.rows]
        self.after_step(batch)
        return results

    def close(self) -> None:
        """Nothing more is executed."""
        self.is_closed = True

    def poison(self, block_id: int) -> None:
        """Forget what a block holds, so that reading it fails."""
        size = self._info.block_size
        self._tokens[block_id * size : (block_id + 1) * size] = UNWRITTEN

    def _slots(self, row: Row, start: int, stop: int) -> npt.NDArray[np.int64]:
        size = self._info.block_size
        positions = np.arange(start, stop)
        blocks = np.asarray(row.block_ids, dtype=np.int64)
        slots: npt.NDArray[np.int64] = blocks[positions // size] * size + positions % size
        return slots

    def _answer(self, row: Row) -> RowResult:
        slots = self._slots(row, 0, row.end)
        tokens, positions = self._tokens[slots], self._positions[slots]
        assert (tokens != UNWRITTEN).all(), f"sequence {row.seq_id} reads a slot never written"
        assert (positions == np.arange(row.end)).all(), f"sequence {row.seq_id} reads others' slots"
        if row.seq_id in self.nan_rows:
            return RowResult(error="the model gave logits that are not finite")
        digests = _digests(tokens)
        targets = tuple(
            _logprob(int(digests[row.start + offset]), token_id) for offset, token_id in row.targets
        )
        if row.sample is None:
            return RowResult(target_logprobs=targets)
        digest = int(digests[-1])
        token_id = _choose(digest, row.sample, self._info.vocab_size)
        return RowResult(
            token_id=token_id, logprob=_logprob(digest, token_id), target_logprobs=targets
        )

    def _check_segments(self, batch: Batch) -> None:
        size = self._info.block_size
        for segment in batch.segments:
            assert len(segment.rows) > 1, "a segment is shared"
            first = segment.start // size
            for index in segment.rows:
                row = batch.rows[index]
                held = tuple(row.block_ids[first : first + len(segment.block_ids)])
                assert held == segment.block_ids, "a row does not hold its segment"
                end = segment.start + len(segment.block_ids) * size
                assert end <= row.start, "a segment holds a row's own queries"


def witness_reply(
    ids: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int = 260,
    stop_token_ids: Sequence[int] = (),
    key: tuple[int, int] | None = None,
) -> list[int]:
    """What the witness says after `ids`, computed without any engine.

    `key` is that of the random numbers, None for a greedy reply.
    """
    known, reply = list(ids), list[int]()
    options = SamplingOptions(temperature=0.0 if key is None else 1.0)
    empty: TokenArray = np.empty(0, dtype=np.int32)
    while len(reply) < max_tokens:
        number = 0.0 if key is None else uniform(key, len(known))
        spec = SampleSpec(options, number, empty, empty)
        token_id = _choose(int(_digests(np.array(known, dtype=np.int64))[-1]), spec, vocab_size)
        known.append(token_id)
        reply.append(token_id)
        if token_id in stop_token_ids:
            break
    return reply


def witness_score(ids: Sequence[int], continuation: Sequence[int]) -> float:
    """The log-probability that the witness gives to `continuation` after `ids`."""
    whole = np.array([*ids, *continuation], dtype=np.int64)
    digests = _digests(whole)
    first = len(ids)
    pairs = enumerate(continuation, start=first)
    return sum(_logprob(int(digests[position - 1]), token_id) for position, token_id in pairs)


def _nothing(batch: Batch) -> None:
    pass


def _check_writes(batch: Batch, size: int) -> None:
    """No block is written by two rows, or written by one and read by another."""
    writers: dict[int, int] = {}
    for row in batch.rows:
        for block_id in row.block_ids[row.start // size : -(-row.end // size)]:
            assert block_id not in writers, f"two rows write block {block_id}"
            writers[block_id] = row.seq_id
    for row in batch.rows:
        for block_id in row.block_ids:
            assert writers.get(block_id, row.seq_id) == row.seq_id, f"{block_id} is shared"


def _digests(tokens: npt.NDArray[np.int64]) -> Digests:
    """Of each prefix: a sum of mixed (token, position) pairs, uint64 [len]."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    mixed = _mix(tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _mix(positions))
    return np.cumsum(mixed, dtype=np.uint64)


def _mix(values: Digests) -> Digests:
    """SplitMix64's finalizer (G. Steele et al., OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _choose(digest: int, spec: SampleSpec, vocab_size: int) -> int:
    if spec.options.temperature != 0:
        digest ^= int(spec.uniform * 2**24)
    start = int(_mix(np.array([digest], dtype=np.uint64))[0]) % vocab_size
    for offset in range(vocab_size):
        token_id = (start + offset) % vocab_size
        allowed = spec.mask is None or bool(spec.mask[token_id])
        if allowed and token_id not in spec.banned_ids:
            return token_id
    raise AssertionError("every token is banned")


def _logprob(digest: int, token_id: int) -> float:
    mixed = _mix(np.array([digest ^ (token_id << 17)], dtype=np.uint64))
    return -0.001 * (1 + int(mixed[0]) % 9999)
