"""The host plan of one step: which query tokens read which blocks, shared ones once.

Built from the rows of a step and the segments of the fork tree, in integers. Steady decode steps
advance the plan instead of building it again. Layouts (layout.py) and tiles (tiling.py) are derived
per attention shape, on first use, and kept. Knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .layout import Layout, flatten_blocks, place_blocks
from .sharing import DEFAULT_SHARING, SegmentColumns, SegmentLike, Sharing
from .tiles import MAX_STEPS, LongArray, TileSet, TileShape, ranges
from .tiling import make_tiles


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
        self.block_size = block_size
        self.query_starts: LongArray = np.concatenate([[0], np.cumsum(query_lens)])
        self._sharing = sharing
        self._is_steady = bool((query_lens == 1).all() and (kv_lens > 0).all())
        self._layouts: dict[tuple[int, int, int], Layout] = {}
        self._tile_sets: dict[TileShape, TileSet] = {}
        first = self._first_positions()
        self._columns = SegmentColumns(segments, block_size)
        self._private_starts = self._columns.private_starts(first)
        self._private_ids: LongArray | None = None
        self.positions: LongArray = ranges(first, query_lens)
        self.slot_mapping: LongArray = self._slots()
        place = np.empty(self.num_rows, np.int64)
        self._order = self._stable_order()
        place[self._order] = np.arange(self.num_rows)
        self._place = place

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
        held = [
            self._private_blocks(),
            *(np.array(ids, np.int64) for ids in self._columns.block_ids),
        ]
        num_holders = np.bincount(np.concatenate(held))
        written = self.slot_mapping[self.slot_mapping >= 0] // self.block_size
        is_wrong = num_holders[written] > 1
        if is_wrong.any():
            block = int(written[is_wrong][0])
            rows = [row for row, table in enumerate(self.block_tables) if block in table]
            raise ValueError(f"block {block} is written by a row and also held by others: {rows}")

    @property
    def shapes(self) -> tuple[TileShape, ...]:
        """The attention shapes whose tiles were asked for, and still hold."""
        return tuple(self._tile_sets)

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
        self._private_ids = None
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
            layout.open_blocks(rows, index, ids[:, 0], ids[:, 1])

    def _first_positions(self) -> LongArray:
        """Position of each row's first query token, 0 for padding rows."""
        is_padding = self.kv_lens == 0
        first: LongArray = np.where(is_padding, 0, self.kv_lens - self.query_lens)
        if (first < 0).any():
            raise ValueError("a row runs more tokens than it has")
        if (self.query_lens < 1).any() or (self.query_lens[is_padding] != 1).any():
            raise ValueError("every row runs at least one token, a row without keys exactly one")
        return first

    def _private_blocks(self) -> LongArray:
        """Each row's block ids behind its last segment."""
        if self._private_ids is None:
            self._private_ids = self._blocks_from(self._private_starts)
        return self._private_ids

    def _blocks_from(self, starts: LongArray) -> LongArray:
        """Each row's block ids from position starts[row] on, one row behind the other."""
        begin, end = starts // self.block_size, -(-self.kv_lens // self.block_size)
        ids = flatten_blocks(self.block_tables, begin, end)
        if len(ids) != (end - begin).sum():
            raise ValueError("a block table is shorter than its row's KV length")
        return ids

    def _slots(self) -> LongArray:
        """Slot of each query token: block id x block_size + offset, -1 for padding rows."""
        size = self.block_size
        begin, end = self._private_starts // size, -(-self.kv_lens // size)
        shift = np.cumsum(end - begin) - end
        row = np.repeat(np.arange(self.num_rows), self.query_lens)
        is_padding = (self.kv_lens == 0)[row]
        index = np.where(is_padding, -1, shift[row] + self.positions // size)
        ids = np.append(self._private_blocks(), 0)[index]
        return np.where(is_padding, -1, ids * size + self.positions % size)

    def _stable_order(self) -> LongArray:
        """The rows in the order of what they write, whatever their order in the step.

        A sum over keys may round differently by a row's place among the rows it is computed with,
        so a row that keeps its place keeps its result to the last bit.
        """
        return np.argsort(self.slot_mapping[self.query_starts[1:] - 1], kind="stable")

    def _layout(self, shape: TileShape) -> Layout:
        key = _layout_key(shape)
        if key not in self._layouts:
            self._layouts[key] = self._make_layout(shape)
        return self._layouts[key]

    def _make_layout(self, shape: TileShape) -> Layout:
        runs, shared = self._columns.choose(self._sharing, shape, self.query_lens, self._place)
        tail_start = np.zeros(self.num_rows, np.int64)
        np.maximum.at(tail_start, runs.rows, np.repeat(runs.end, np.diff(runs.ptr)))
        begin, end = tail_start // self.block_size, -(-self.kv_lens // self.block_size)
        is_whole = bool((tail_start == self._private_starts).all())
        arena, tail_base = place_blocks(
            shared,
            self._private_blocks() if is_whole else self._blocks_from(tail_start),
            end - begin,
            has_room=self._is_steady,
            block_size=self.block_size,
        )
        order = self._order[self.kv_lens[self._order] > 0]
        return Layout(arena, runs, order, tail_start, tail_base, tail_base - begin)


def _is_next(new_lens: LongArray, kv_lens: LongArray) -> bool:
    return len(new_lens) == len(kv_lens) and bool((new_lens - kv_lens == 1).all())


def _layout_key(shape: TileShape) -> tuple[int, int, int]:
    return shape.group, shape.num_kv_heads * shape.head_dim, shape.itemsize
