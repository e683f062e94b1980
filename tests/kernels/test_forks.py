"""Trees of every shape, and the life of a block: forked, copied, appended to, freed, used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.scenario import Scenario, TreeSegment
from agentkv_kernels.tiles import TileShape
from torch import Tensor

Attention = Callable[..., Tensor]
PATHS = [reference.paged_attention, launch.paged_attention]
SIZE, HEADS, DIM = 64, 2, 16


class Memory:
    """A small cache, and sequences whose keys and values are also kept as plain tensors."""

    def __init__(self, num_blocks: int = 40) -> None:
        self.free = np.random.default_rng(7).permutation(num_blocks).tolist()
        self.generator = torch.Generator().manual_seed(3)
        self.caches = self._cache(num_blocks), self._cache(num_blocks)

    def _cache(self, num_blocks: int) -> Tensor:
        cache = launch.allocate_cache(num_blocks, HEADS, SIZE, DIM, torch.float32, "cpu")
        cache.fill_(torch.nan)[num_blocks] = 0.0
        return cache

    def new(self, num_tokens: int) -> Sequence:
        """A sequence of random tokens in blocks of its own."""
        sequence = Sequence([], [torch.empty(0, HEADS, DIM) for _ in range(2)])
        self.append(sequence, num_tokens)
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """Another holder of the parent's blocks; the last, where partial, is copied."""
        child = Sequence(list(parent.table), list(parent.truth))
        used = parent.length % SIZE
        if used:
            child.table[-1] = self.free.pop()
            launch.copy_blocks(self.caches, [(parent.table[-1], child.table[-1], used)])
        return child

    def append(self, sequence: Sequence, num_tokens: int) -> None:
        """Write the keys and values of new random tokens."""
        positions = range(sequence.length, sequence.length + num_tokens)
        missing = -(-positions.stop // SIZE) - len(sequence.table)
        sequence.table += [self.free.pop() for _ in range(missing)]
        slots = torch.tensor([sequence.table[p // SIZE] * SIZE + p % SIZE for p in positions])
        new = [torch.randn(num_tokens, HEADS, DIM, generator=self.generator) for _ in self.caches]
        launch.write_kv(new[0], new[1], *self.caches, slots.long())
        sequence.truth = [torch.cat([old, n]) for old, n in zip(sequence.truth, new, strict=True)]

    def release(self, block_ids: list[int]) -> None:
        """Hand blocks out again next, and poison them until then."""
        self.free += block_ids
        for cache in self.caches:
            cache[block_ids] = torch.nan


class Sequence:
    """A block table, and the keys and values that must be found through it."""

    def __init__(self, table: list[int], truth: list[Tensor]) -> None:
        self.table = table
        self.truth = truth

    @property
    def length(self) -> int:
        return len(self.truth[0])

    def dense(self, query: Tensor) -> Tensor:
        """The last query token's attention, from the plain keys and values alone."""
        score = torch.einsum(
            "hgd,mhd->hgm", query.view(HEADS, -1, DIM).double(), self.truth[0].double()
        )
        weight = torch.softmax(score * DIM**-0.5, -1)
        out = torch.einsum("hgm,mhd->hgd", weight, self.truth[1].double())
        return out.reshape(query.shape).float()


def _step(path: Attention, memory: Memory, rows: list[Sequence]) -> Tensor:
    """One decode step over the rows, which must give what each one's own keys and values do."""
    scenario = Scenario(
        SIZE, [1] * len(rows), [row.length for row in rows], [row.table for row in rows],
        _segments(rows), 40,
    )  # fmt: skip
    query = torch.randn(len(rows), HEADS * 3, DIM, generator=torch.Generator().manual_seed(5))
    plan = scenario.plan()
    plan.check_writes()
    out = path(query, *memory.caches, plan, scale=DIM**-0.5)
    expected = torch.stack([row.dense(q) for row, q in zip(rows, query, strict=True)])
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    return out


def _segments(rows: list[Sequence]) -> list[TreeSegment]:
    """The full blocks that all rows share, as one segment."""
    tables = [row.table[: (row.length - 1) // SIZE] for row in rows]
    count = 0
    while all(len(t) > count and t[count] == tables[0][count] for t in tables):
        count += 1
    if len(rows) < 2 or not count:
        return []
    return [TreeSegment(None, 0, tuple(tables[0][:count]), tuple(range(len(rows))))]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("length", [2 * SIZE, 2 * SIZE + 1, 2 * SIZE + SIZE // 2, 3 * SIZE - 1])
def test_a_fork_at_any_place_in_a_block_reads_what_its_parent_had(
    path: Attention, length: int
) -> None:
    memory = Memory()
    parent = memory.new(length)
    child = memory.fork(parent)
    memory.append(child, 5)
    memory.append(parent, 1)
    _step(path, memory, [parent, child])


@pytest.mark.parametrize("path", PATHS)
def test_a_parent_that_goes_on_leaves_its_child_bit_for_bit_unchanged(path: Attention) -> None:
    memory = Memory()
    parent = memory.new(2 * SIZE + 9)
    child = memory.fork(parent)
    memory.append(child, 3)
    memory.append(parent, 1)
    before = _step(path, memory, [parent, child])[1]
    memory.append(parent, 1)
    after = _step(path, memory, [parent, child])[1]
    assert torch.equal(before, after)


@pytest.mark.parametrize("path", PATHS)
def test_a_fork_of_a_fork_outlives_the_middle_whose_blocks_are_used_again(
    path: Attention,
) -> None:
    memory = Memory()
    root = memory.new(2 * SIZE)
    middle = memory.fork(root)
    memory.append(middle, SIZE + 7)
    leaf = memory.fork(middle)
    memory.append(leaf, 4)
    memory.append(root, 1)
    memory.append(middle, 1)
    _step(path, memory, [root, middle, leaf])
    freed = [block for block in middle.table if block not in root.table + leaf.table]
    memory.release(freed)
    stranger = memory.new(len(freed) * SIZE)
    assert set(freed) <= set(stranger.table)
    _step(path, memory, [root, leaf])
    _step(path, memory, [leaf, root, stranger])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [(1, 16), (5, 9), (15, 16), (16, 1)])
def test_rows_may_read_one_partial_block_at_different_lengths(
    path: Attention, lengths: tuple[int, int]
) -> None:
    kv_lens = [64 + length for length in lengths]
    segments = [TreeSegment(None, 0, (3, 0, 6, 2), (0, 1))]
    scenario = Scenario(16, [1, 1], kv_lens, [[3, 0, 6, 2, 5]] * 2, segments, 7)
    k_cache, v_cache = scenario.caches(2, 8)
    query = torch.randn(2, 6, 8)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.3)
    for row, length in enumerate(kv_lens):
        alone = Scenario(16, [1], [length], [[3, 0, 6, 2, 5]], [], 7)
        expected = reference.paged_attention(
            query[row : row + 1], k_cache, v_cache, alone.plan(), scale=0.3
        )
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-6, rtol=1e-5)


def _chain(depth: int, blocks: tuple[int, ...]) -> Scenario:
    """Rows that leave a chain of segments one by one; segment i has blocks[i % len] blocks."""
    segments, prefix, tables = [], list[int](), []
    counts = [blocks[level % len(blocks)] for level in range(depth)]
    for level, count in enumerate(counts):
        ids = tuple(range(len(prefix), len(prefix) + count))
        start, rows = len(prefix) * 16, tuple(range(level, depth + 1))
        segments.append(TreeSegment(level - 1 if level else None, start, ids, rows))
        prefix = [*prefix, *ids]
        tables.append([*prefix, sum(counts) + level])
    tables.append([*prefix, sum(counts) + depth])
    lengths = [(len(table) - 1) * 16 + 1 + row for row, table in enumerate(tables)]
    return Scenario(16, [1] * (depth + 1), lengths, tables, segments, sum(counts) + depth + 1)


def _check(path: Attention, scenario: Scenario, *, heads: tuple[int, int] = (3, 1)) -> None:
    k_cache, v_cache = scenario.caches(heads[1], 8)
    query = torch.randn(len(scenario.query_lens), heads[0], 8)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.3)
    flat = reference.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.3)
    torch.testing.assert_close(out, flat, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("blocks", [(9,), (9, 0, 5), (0, 9), (1, 6, 1)])
def test_trees_of_any_depth_with_empty_and_short_segments(
    path: Attention, depth: int, blocks: tuple[int, ...]
) -> None:
    _check(path, _chain(depth, blocks))


@pytest.mark.parametrize("path", PATHS[1:])
def test_segments_may_form_a_chain_without_branches(path: Attention) -> None:
    rows = (0, 1, 2)
    segments = [
        TreeSegment(None, 0, (0, 1, 2, 3, 4), rows),
        TreeSegment(0, 80, (5,), rows),
        TreeSegment(1, 96, tuple(range(6, 16)), rows),
    ]
    tables = [[*range(16), 20 + row] for row in rows]
    _check(path, Scenario(16, [1] * 3, [257, 260, 272], tables, segments, 24))


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("packed_rows", [15, 16, 17, 63, 64, 65, 130])
def test_any_number_of_rows_over_one_segment(path: Attention, packed_rows: int, group: int) -> None:
    num_rows = max(2, -(-packed_rows // group))
    prefix = tuple(range(9))
    tables = [[*prefix, 9 + row] for row in range(num_rows)]
    scenario = Scenario(
        16, [1] * num_rows, [9 * 16 + 1 + row % 16 for row in range(num_rows)], tables,
        [TreeSegment(None, 0, prefix, tuple(range(num_rows)))], 9 + num_rows,
    )  # fmt: skip
    _check(path, scenario, heads=(group, 1))


@pytest.mark.parametrize(("chunk", "num_partial"), [(16, 151), (48, 52), (64, 40), (10_000, 4)])
def test_a_segment_may_be_cut_into_chunks_or_be_shorter_than_one(
    chunk: int, num_partial: int
) -> None:
    scenario = _chain(3, (50,))
    shape = TileShape(
        group=3, num_kv_heads=2, head_dim=8, itemsize=4, workers=4096, narrow_rows=3, wide_rows=6,
        min_chunk=chunk, min_wide_chunk=chunk,
    )  # fmt: skip
    tiles = scenario.plan().tile_set(shape)
    assert np.diff(tiles.m_ptr).max() == num_partial
    k_cache, v_cache = scenario.caches(2, 8)
    query, sinks = torch.randn(4, 6, 8), torch.randn(6)
    out = reference.tiled_attention(query, k_cache, v_cache, tiles, scale=0.3, sinks=sinks)
    expected = reference.paged_attention(
        query, k_cache, v_cache, scenario.plan(), scale=0.3, sinks=sinks
    )
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
