"""Which segments of the fork tree are read once, for all the rows under them.

Owns the rule that weighs the bytes a shared read saves against those that its extra partial results
cost, and the segments of a step as columns. Knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from .tiles import LongArray, TileShape, ranges

_NEVER = 1 << 62


class SegmentLike(Protocol):
    """A run of full blocks that every row in `rows` reads, whole, at the same positions.

    Its first token is at position `start`; `parent` indexes the segment list, None at position 0,
    and ends where this one starts. It ends at or before every sharer's first query position.
    """

    @property
    def parent(self) -> int | None: ...
    @property
    def start(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...
    @property
    def rows(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tunables of sharing. Below `min_tokens` a launch and a merge cost more than the keys.

    Costs are in bytes at memory speed: `partial_bytes` for each element of a partial result,
    which is written and read again, and `fixed_bytes` for one more tile, whatever its size.
    """

    min_tokens: int = 64
    partial_bytes: int = 8
    fixed_bytes: int = 16384

    def min_lengths(
        self, num_seqs: LongArray, num_tokens: LongArray, shape: TileShape
    ) -> LongArray:
        """The fewest keys that are better read once for all than once per sequence.

        Bytes saved, (num_seqs - 1) x length keys and values, against what one more tile and one
        more partial result per token and query head cost.
        """
        head_elements = shape.num_kv_heads * shape.head_dim
        per_token = shape.group * head_elements * self.partial_bytes
        cost = num_tokens * per_token + self.fixed_bytes
        saved_per_key = np.maximum((num_seqs - 1) * (2 * shape.itemsize * head_elements), 1)
        fewest = np.maximum(cost // saved_per_key + 1, self.min_tokens)
        return np.where(num_seqs < 2, _NEVER, fewest)


DEFAULT_SHARING = Sharing()
# On the CPU a tile is a dozen small operations, and a partial result several passes. Fitted to the
# break-evens that benchmarks/attention.py finds, for 2 to 64 rows of small and large heads.
CPU_SHARING = Sharing(min_tokens=32, partial_bytes=48, fixed_bytes=400_000)


class SharedRuns(NamedTuple):
    """Blocks that several sequences read, in columns, parents before children.

    Run i is positions start[i] to end[i] of the sequences rows[ptr[i] : ptr[i + 1]], and its block
    ids lie at base[i] of the arena.
    """

    start: LongArray
    end: LongArray
    base: LongArray
    ptr: LongArray
    rows: LongArray


class SegmentColumns:
    """The segments of a step. ValueError if one does not start where its parent ends."""

    def __init__(self, segments: Sequence[SegmentLike], block_size: int) -> None:
        self.block_ids: list[Sequence[int]] = [segment.block_ids for segment in segments]
        self._block_size = block_size
        self._parents = [-1 if s.parent is None else s.parent for s in segments]
        self._start = np.array([segment.start for segment in segments], np.int64)
        num_blocks = np.array([len(ids) for ids in self.block_ids], np.int64)
        self._end: LongArray = self._start + num_blocks * block_size
        members = [segment.rows for segment in segments]
        self._count = np.array([len(rows) for rows in members], np.int64)
        self._rows = np.fromiter(chain.from_iterable(members), np.int64)
        expected = np.append(self._end, 0)[np.array(self._parents, np.int64)]
        if (self._start != expected).any():
            index = int(np.argmax(self._start != expected))
            raise ValueError(f"segment {index} does not start where its parent ends")

    def private_starts(self, first: LongArray) -> LongArray:
        """Position behind each row's last segment; `first` is that of its first query token.

        ValueError if a segment reaches into the tokens of the step.
        """
        starts = np.zeros(len(first), np.int64)
        ends = np.repeat(self._end, self._count)
        if (ends > first[self._rows]).any():
            index = np.repeat(np.arange(len(self._count)), self._count)[ends > first[self._rows]]
            raise ValueError(f"segment {index[0]} reaches into the tokens of this step")
        np.maximum.at(starts, self._rows, ends)
        return starts

    def choose(
        self, rule: Sharing, shape: TileShape, query_lens: LongArray, place: LongArray
    ) -> tuple[SharedRuns, list[int]]:
        """The runs worth reading once, and their block ids one behind the other.

        A segment that is not is folded into its children, or into the rows' own tails. A run's rows
        come in the order of `place`.
        """
        tokens = np.concatenate([[0], np.cumsum(query_lens[self._rows])])
        ptr = np.concatenate([[0], np.cumsum(self._count)])
        fewest = rule.min_lengths(self._count, np.diff(tokens[ptr]), shape).tolist()
        chosen: list[int] = []
        bases, ids = [0], list[int]()
        pending: dict[int, list[int]] = {}
        for index in sorted(range(len(self._count)), key=self._key):
            blocks = [*pending.get(self._parents[index], ()), *self.block_ids[index]]
            if len(blocks) * self._block_size < fewest[index]:
                pending[index] = blocks
            else:
                chosen.append(index)
                ids += blocks
                bases.append(len(ids))
        end, count, base = self._end[chosen], self._count[chosen], np.array(bases, np.int64)
        rows = self._rows[ranges(ptr[chosen], count)]
        run = np.repeat(np.arange(len(chosen)), count)
        return SharedRuns(
            end - np.diff(base) * self._block_size,
            end,
            base[:-1],
            np.concatenate([[0], np.cumsum(count)]),
            rows[np.argsort(run * len(place) + place[rows])],
        ), ids

    def _key(self, index: int) -> tuple[int, int, int]:
        """Sorts parents before children, and the rest by their blocks, not by the rows' order."""
        ids = self.block_ids[index]
        return int(self._start[index]), len(ids), ids[0] if len(ids) else index
