"""A plan that is moved on reads what a new one would, whatever happens to the tree around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import TreeSegment, random_tree
from agentkv_kernels.sharing import Sharing
from agentkv_kernels.tiles import (
    BLK0,
    DIAGONAL,
    FLAGS,
    GROWS,
    KV_LEN,
    KV_OFF,
    NUM_ROWS,
    ROW0,
    SLIDES,
    TileSet,
    TileShape,
)
from torch import Tensor

SIZE = 4
SHARING = Sharing(min_tokens=8, fixed_bytes=0)
Key = tuple[int, int]  # block, slot in it


@dataclass(eq=False)
class Sequence:
    """A conversation: its blocks, its length, and how many tokens its next step runs."""

    table: list[int]
    length: int = 0
    query_len: int = 1
    is_running: bool = True


class Forest:
    """Sequences that fork, join, pause and end, and the steps that the running ones make."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sequences: list[Sequence] = []
        self.version = 0  # changes with the rows and with what they share
        self.num_advanced = 0
        self._holders: dict[int, int] = {}
        self._free = self.rng.permutation(2000).tolist()
        self._plan: tuple[int, StepPlan] | None = None

    def join(self) -> None:
        self._add(Sequence([], query_len=int(self.rng.integers(1, 60))))

    def fork(self, parent: Sequence) -> None:
        """A sibling with the same full blocks and a copy of the partial one."""
        full = parent.length // SIZE
        child = Sequence(parent.table[:full], parent.length)
        for block in child.table:
            self._holders[block] += 1
        if parent.length % SIZE:
            child.table.append(self._allocate())
        child.query_len = int(self.rng.integers(1, 4))
        self._add(child)

    def end(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        for block in sequence.table:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.insert(0, block)  # the next to be used
        self.version += 1

    def pause(self, sequence: Sequence) -> None:
        sequence.is_running = not sequence.is_running
        self.version += 1

    def step(self, shapes: list[TileShape]) -> None:
        """Run all rows; the plan in use must read what a new plan reads."""
        rows = [sequence for sequence in self.sequences if sequence.is_running]
        for row in rows:
            row.length += row.query_len
            while len(row.table) * SIZE < row.length:
                row.table.append(self._allocate())
        if not rows:
            return
        plan, fresh = self._moved(rows), _build(rows)
        np.testing.assert_array_equal(plan.slot_mapping, fresh.slot_mapping)
        np.testing.assert_array_equal(plan.positions, fresh.positions)
        for shape in shapes:
            used, rebuilt = (
                _keys_of_tokens(p.tile_set(shape), p.num_tokens, shape.window)
                for p in (plan, fresh)
            )
            assert used == rebuilt
        for row in rows:
            self.version += row.query_len != 1
            row.query_len = 1

    def _moved(self, rows: list[Sequence]) -> StepPlan:
        lengths, tables = [row.length for row in rows], [row.table for row in rows]
        if self._plan is not None and self._plan[0] == self.version:
            plan = self._plan[1]
            if plan.advance(lengths, tables):
                self.num_advanced += 1
                return plan
        plan = _build(rows)
        plan.check_writes()
        self._plan = self.version, plan
        return plan

    def _add(self, sequence: Sequence) -> None:
        self.sequences.insert(int(self.rng.integers(0, len(self.sequences) + 1)), sequence)
        self.version += 1

    def _allocate(self) -> int:
        block: int = self._free.pop(0)
        self._holders[block] = 1
        return block


def _build(rows: list[Sequence]) -> StepPlan:
    return StepPlan.build(
        query_lens=[row.query_len for row in rows],
        kv_lens=[row.length for row in rows],
        block_tables=[list(row.table) for row in rows],
        segments=_segments(rows),
        block_size=SIZE,
        sharing=SHARING,
    )


def _segments(rows: list[Sequence]) -> list[TreeSegment]:
    """The blocks that the same rows share, run by run."""
    found: list[TreeSegment] = []

    def visit(members: list[int], begin: int, parent: int | None) -> None:
        groups: dict[int, list[int]] = {}
        for index in members:
            if (rows[index].length - rows[index].query_len) // SIZE > begin:
                groups.setdefault(rows[index].table[begin], []).append(index)
        for group in groups.values():
            if len(group) > 1:
                limit = min((rows[i].length - rows[i].query_len) // SIZE for i in group)
                end = begin + 1
                while end < limit and len({rows[i].table[end] for i in group}) == 1:
                    end += 1
                ids = tuple(rows[group[0]].table[begin:end])
                found.append(TreeSegment(parent, begin * SIZE, ids, tuple(group)))
                visit(group, end, len(found) - 1)

    visit(list(range(len(rows))), 0, None)
    return found


def _keys_of_tokens(tiles: TileSet, num_tokens: int, window: int | None) -> list[list[Key]]:
    """Every key that each query token reads, sorted."""
    seen: list[list[Key]] = [[] for _ in range(num_tokens)]
    num_plain = len(tiles.wide) + len(tiles.narrow)
    for place, tile in enumerate(np.concatenate([tiles.wide, tiles.narrow, tiles.prefill])):
        first = int(tile[KV_OFF]) + tiles.delta * bool(tile[FLAGS] & SLIDES)
        end = int(tile[KV_OFF] + tile[KV_LEN]) + tiles.delta * bool(tile[FLAGS] & GROWS)
        keys = [(int(tiles.blk[tile[BLK0] + p // SIZE]), p % SIZE) for p in range(first, end)]
        for row in range(int(tile[NUM_ROWS])):
            visible = keys
            if place >= num_plain:
                high = int(tile[DIAGONAL]) + row + 1
                visible = keys[0 if window is None else max(0, high - window) : max(0, high)]
            seen[int(tiles.rows[tile[ROW0] + row])] += visible
    return [sorted(keys) for keys in seen]


def _random_operation(forest: Forest, shapes: list[TileShape]) -> None:
    choice = forest.rng.random()
    some = forest.sequences[int(forest.rng.integers(0, len(forest.sequences)))]
    if choice < 0.75:
        forest.step(shapes)
    elif choice < 0.85 and len(forest.sequences) < 12:
        forest.fork(some)
    elif choice < 0.9 and len(forest.sequences) < 12:
        forest.join()
    elif choice < 0.95 and len(forest.sequences) > 1:
        forest.end(some)
    else:
        forest.pause(some)


@pytest.mark.parametrize("seed", range(3))
def test_moving_on_equals_building_again_over_random_operations(seed: int) -> None:
    narrow = TileShape(group=2, num_kv_heads=1, head_dim=64, itemsize=4, min_chunk=16, workers=8)
    shapes = [narrow, TileShape(group=1, num_kv_heads=2, head_dim=64, itemsize=4, window=30)]
    forest = Forest(seed)
    forest.join()
    for _ in range(500):
        _random_operation(forest, shapes)
    assert forest.num_advanced > 100


@pytest.mark.parametrize("window", [None, 7, 60, 150])
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_follows_a_plan_that_is_moved_on(window: int | None, block_size: int) -> None:
    scenario = random_tree(
        5, num_rows=6, depth=2, block_size=block_size, max_segment_blocks=320 // block_size
    )
    tables, lengths = scenario.block_tables, scenario.kv_lens
    num_blocks = scenario.num_blocks + 6 * 120 // block_size + 6
    free = iter(range(scenario.num_blocks, num_blocks))
    caches = [
        launch.allocate_cache(num_blocks, 2, block_size, 8, torch.float32, "cpu").normal_()
        for _ in range(2)
    ]
    plan = scenario.plan()
    for _ in range(120):
        query = torch.randn(6, 6, 8)
        for cache in caches:
            cache[num_blocks] = 0.0
            _poison(cache, tables, lengths)
        out, expected = (
            path(query, caches[0], caches[1], plan, scale=0.3, window=window)
            for path in (launch.paged_attention, reference.paged_attention)
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        lengths = [length + 1 for length in lengths]
        for row, length in enumerate(lengths):
            if length > len(tables[row]) * block_size:
                tables[row] = [*tables[row], next(free)]
        for cache in caches:
            _write(cache, tables, lengths)
        assert plan.advance(lengths, tables)


def _poison(cache: Tensor, tables: list[list[int]], lengths: list[int]) -> None:
    """Fill the slots behind each row's last token with NaN."""
    size = cache.shape[2]
    for table, length in zip(tables, lengths, strict=True):
        if length % size:
            cache[table[length // size], :, length % size :] = torch.nan


def _write(cache: Tensor, tables: list[list[int]], lengths: list[int]) -> None:
    """Fill the slot of each row's last token."""
    size = cache.shape[2]
    for table, length in zip(tables, lengths, strict=True):
        slot = cache[table[(length - 1) // size], :, (length - 1) % size]
        slot.copy_(torch.randn(slot.shape))
