"""The host plan of one step: which query tokens read which blocks, shared ones once.

Built from the rows of a step and the segments of the fork tree, in integers. Steady decode steps
advance the plan instead of building it again. Tiles (tiles.py) are derived per attention shape, on
first use, and kept. Knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from .tiles import (
    DEFAULT_SHARING,
    MAX_STEPS,
    IntArray,
    Layout,
    LongArray,
    SharedRun,
    Sharing,
    TileSet,
    TileShape,
    is_worth_sharing,
    make_tiles,
    ranges,
)


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


class StepPlan:
    """What one step's attention reads. Build it once a step, for all layers.

    `query_lens`, `kv_lens`, `query_starts` (one longer) are int64 per row; a row's query tokens are
    contiguous in [0, num_tokens) and are its last positions. `slot_mapping` and `positions` are
    int64 per token; a padding row (kv_len 0, one token) has slot -1 and position 0. The arrays
    are read-only for others, and `slot_mapping` and `positions` are new ones after `advance`.
    """

    def __init__(
        self,
        query_lens: LongArray,
        kv_lens: LongArray,
        block_tables: Sequence[Sequence[int]],
        segments: Sequence[SegmentLike],
        block_size: int,
        sharing: Sharing,
    ) -> None:
        self.query_lens: LongArray = query_lens
        self.kv_lens: LongArray = kv_lens
        self.block_tables: Sequence[Sequence[int]] = block_tables
        self.segments = segments
        self.block_size = block_size
        self.query_starts: LongArray = np.concatenate([[0], np.cumsum(query_lens)])
        self._sharing = sharing
        self._is_steady = bool((query_lens == 1).all() and (kv_lens > 0).all())
        self._layouts: dict[tuple[int, int, int], Layout] = {}
        self._tile_sets: dict[TileShape, TileSet] = {}
        first = kv_lens - query_lens
        self.positions: LongArray = np.maximum(ranges(first, query_lens), 0)
        self.slot_mapping: LongArray = self._slots(first)

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        segments: Sequence[SegmentLike] = (),
        block_size: int,
        sharing: Sharing | None = DEFAULT_SHARING,
    ) -> StepPlan:
        """The plan of a step whose row r runs the last query_lens[r] of its kv_lens[r] positions.

        `block_tables` are kept, not copied, until the next step. `sharing` says which segments are
        read once; with None every row reads all its keys for itself. ValueError for rows or
        segments that contradict one another.
        """
        return cls(
            np.asarray(query_lens, dtype=np.int64),
            np.asarray(kv_lens, dtype=np.int64),
            block_tables,
            () if sharing is None else segments,
            block_size,
            sharing or DEFAULT_SHARING,
        )

    @property
    def num_rows(self) -> int:
        """Sequences of the step."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return int(self.query_starts[-1])

    def check_writes(self) -> None:
        """Verify that the blocks that the rows write are theirs alone.

        `advance` does not do it again: a block that it opens must be new. ValueError for a block
        that two rows write, or that one writes and another reads.
        """
        begin = np.maximum(self.kv_lens - self.query_lens, 0) // self.block_size
        written = self._blocks(begin)
        private = np.zeros_like(self.kv_lens)
        shared: list[int] = []
        for segment in self.segments:
            shared += segment.block_ids
            private[list(segment.rows)] = segment.start // self.block_size + len(segment.block_ids)
        tails = self._blocks(np.minimum(private, begin))
        holders = np.bincount(np.concatenate([tails, np.array(shared, np.int64)]))
        is_wrong = holders[written] > 1
        if is_wrong.any():
            block = int(written[is_wrong][0])
            rows = [row for row, table in enumerate(self.block_tables) if block in table]
            raise ValueError(f"block {block} is written by a row and also held by others: {rows}")

    def tile_set(self, shape: TileShape) -> TileSet:
        """The tiles for one attention shape, made on first use and kept while they hold."""
        tiles = self._tile_sets.get(shape)
        if tiles is None:
            tiles = make_tiles(
                self._layout(shape),
                shape,
                self._sharing,
                query_lens=self.query_lens,
                kv_lens=self.kv_lens,
                block_size=self.block_size,
            )
            self._tile_sets[shape] = tiles
        return tiles

    def advance(self, kv_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> bool:
        """Move to the next decode step of the same rows and segments; False: build a new plan.

        Every row must run one token, one position after the last. When a position opens a block,
        the row's last two block ids are read again, so a table may change in its last two blocks,
        and before that only together with the segments.
        """
        new_lens = np.asarray(kv_lens, dtype=np.int64)
        if not self._is_steady or not _is_next(new_lens, self.kv_lens):
            return False
        self.kv_lens, self.block_tables = new_lens, block_tables
        self.positions = new_lens - 1
        self.slot_mapping = self.slot_mapping + 1
        opened = np.flatnonzero(self.positions % self.block_size == 0)
        if len(opened):
            self._open_blocks(opened)
        for shape, tiles in list(self._tile_sets.items()):
            tiles.delta += 1
            if tiles.delta > tiles.max_delta:
                del self._tile_sets[shape]
        for key, layout in list(self._layouts.items()):
            layout.steps += 1
            if layout.steps > MAX_STEPS:
                self._drop_layout(key)
        return True

    def _drop_layout(self, key: tuple[int, int, int]) -> None:
        del self._layouts[key]
        for shape in [shape for shape in self._tile_sets if _layout_key(shape) == key]:
            del self._tile_sets[shape]

    def _open_blocks(self, rows: LongArray) -> None:
        index = self.positions[rows] // self.block_size
        pairs = zip(rows.tolist(), index.tolist(), strict=True)
        ids = np.array([(self.block_tables[r][i], self.block_tables[r][i - 1]) for r, i in pairs])
        self.slot_mapping[rows] = ids[:, 0] * self.block_size
        for layout in self._layouts.values():
            at = layout.block_shift[rows] + index
            # The block before is another's when the tail begins with the one that opens.
            is_own = at > layout.tail_base[rows]
            layout.arena[at] = ids[:, 0]
            layout.arena[at[is_own] - 1] = ids[is_own, 1]

    def _slots(self, first: LongArray) -> LongArray:
        """Slot of each query token: block id x block_size + offset, -1 for padding rows."""
        size = self.block_size
        begin, end = first // size, -(-self.kv_lens // size)
        is_padding = self.kv_lens == 0
        begin[is_padding] = 0
        ids = self._blocks(begin)
        count = end - begin
        if len(ids) != count.sum() or (first < 0)[~is_padding].any():
            raise ValueError("a block table is shorter than its row's KV length, or negative work")
        if (self.query_lens[is_padding] != 1).any() or (self.query_lens < 1).any():
            raise ValueError("every row runs at least one token, a row without keys exactly one")
        base = np.cumsum(count) - count - begin
        row = np.repeat(np.arange(self.num_rows), self.query_lens)
        padding = is_padding[row]
        if padding.any():
            ids = np.append(ids, 0)
        block = np.where(padding, len(ids) - 1, base[row] + self.positions // size)
        return np.where(padding, -1, ids[block] * size + self.positions % size)

    def _blocks(self, begin: LongArray) -> LongArray:
        """The ids of each row's blocks from begin[row] on, one row behind the other."""
        end = -(-self.kv_lens // self.block_size)
        spans = zip(self.block_tables, begin.tolist(), end.tolist(), strict=True)
        return np.fromiter(chain.from_iterable(t[a:b] for t, a, b in spans), dtype=np.int64)

    def _layout(self, shape: TileShape) -> Layout:
        key = _layout_key(shape)
        if key not in self._layouts:
            runs, runs_ids, tail_start = self._share(shape)
            self._layouts[key] = self._place(runs, runs_ids, tail_start)
        return self._layouts[key]

    def _share(self, shape: TileShape) -> tuple[list[SharedRun], list[list[int]], LongArray]:
        """Decide which segments are read once; one that is not is folded into its children."""
        runs: list[SharedRun] = []
        ids: list[list[int]] = []
        base = 0
        tail_start = np.zeros(self.num_rows, np.int64)
        first = self.kv_lens - self.query_lens
        pending: dict[int, list[int]] = {}
        ends: dict[int, int] = {}
        rank = self._rank()
        for index in sorted(range(len(self.segments)), key=self._segment_key):
            segment = self.segments[index]
            parent = segment.parent
            if segment.start != (0 if parent is None else ends.get(parent)):
                raise ValueError(f"segment {index} does not start where its parent ends")
            blocks = [*(() if parent is None else pending.get(parent, ())), *segment.block_ids]
            rows = np.array(segment.rows, dtype=np.int64)
            end = segment.start + len(segment.block_ids) * self.block_size
            ends[index] = end
            if (end > first[rows]).any():
                raise ValueError(f"segment {index} reaches into the tokens of this step")
            length = len(blocks) * self.block_size
            num_tokens = int(self.query_lens[rows].sum())
            if is_worth_sharing(len(rows), num_tokens, length, shape, self._sharing):
                runs.append(SharedRun(end - length, end, base, rows[np.argsort(rank[rows])]))
                ids.append(blocks)
                base += len(blocks)
                tail_start[rows] = end
            else:
                pending[index] = blocks
        return runs, ids, tail_start

    def _place(
        self, runs: list[SharedRun], run_ids: list[list[int]], tail_start: LongArray
    ) -> Layout:
        """Write all block ids into one arena; tails of a steady plan get room to grow."""
        begin, end = tail_start // self.block_size, -(-self.kv_lens // self.block_size)
        spare = MAX_STEPS // self.block_size + 2 if self._is_steady else 0
        tails = self._blocks(begin)
        shared = np.fromiter(chain.from_iterable(run_ids), dtype=np.int32)
        count = end - begin
        tail_base = len(shared) + np.cumsum(count + spare) - (count + spare)
        arena: IntArray = np.zeros(len(shared) + int((count + spare).sum()), np.int32)
        arena[: len(shared)] = shared
        arena[ranges(tail_base, count)] = tails
        order = np.argsort(self._rank(), kind="stable")
        return Layout(arena, runs, order, tail_start, tail_base, tail_base - begin)

    def _segment_key(self, index: int) -> tuple[int, int, int]:
        """Sorts parents before children, and the rest by their blocks, not by the rows' order."""
        segment = self.segments[index]
        ids = segment.block_ids
        return segment.start, len(ids), ids[0] if len(ids) else index

    def _rank(self) -> LongArray:
        """Orders the rows by what they write, whatever their order in the step.

        A sum over keys may round differently by a row's place among the rows it is computed with,
        so a row that keeps its place keeps its result to the last bit.
        """
        rank: LongArray = self.slot_mapping[self.query_starts[1:] - 1]
        return rank


def _is_next(new_lens: LongArray, kv_lens: LongArray) -> bool:
    return len(new_lens) == len(kv_lens) and bool((new_lens - kv_lens == 1).all())


def _layout_key(shape: TileShape) -> tuple[int, int, int]:
    return shape.group, shape.num_kv_heads * shape.head_dim, shape.itemsize
