"""The host plan: what is read how often, and that moving on equals building again."""

from __future__ import annotations

import numpy as np
import pytest
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import TreeSegment, random_tree
from agentkv_kernels.sharing import DEFAULT_SHARING, Sharing
from agentkv_kernels.tiles import DIRECT, FLAGS, NUM_ROWS, TileSet, TileShape

SHAPE = TileShape(group=3, num_kv_heads=3, head_dim=64, itemsize=4, workers=8)


def _fan(
    num_rows: int,
    prefix_blocks: int,
    own: int,
    *,
    block_size: int = 16,
    sharing: Sharing | None = DEFAULT_SHARING,
) -> StepPlan:
    """num_rows decode rows over one prefix, `own` tokens each."""
    prefix = list(range(prefix_blocks))
    each = -(-own // block_size)
    tables = [
        prefix + [prefix_blocks + row * each + i for i in range(each)] for row in range(num_rows)
    ]
    segment = TreeSegment(None, 0, tuple(prefix), tuple(range(num_rows)))
    return StepPlan.build(
        query_lens=[1] * num_rows,
        kv_lens=[prefix_blocks * block_size + own] * num_rows,
        block_tables=tables,
        segments=[segment],
        block_size=block_size,
        sharing=sharing,
    )


def _keys_of_tokens(tiles: TileSet, num_tokens: int) -> list[list[tuple[int, int]]]:
    """Every (block id, offset) a decode token reads, sorted."""
    seen: list[list[tuple[int, int]]] = [[] for _ in range(num_tokens)]
    for tile in np.concatenate([tiles.wide, tiles.narrow]).tolist():
        row0, num_rows, blk0, offset, length, _, flags, _ = tile
        first = offset + (tiles.delta if flags & 2 else 0)
        end = offset + length + (tiles.delta if flags & 1 else 0)
        keys = [(int(tiles.blk[blk0 + p // 16]), p % 16) for p in range(first, end)]
        for token in tiles.rows[row0 : row0 + num_rows].tolist():
            seen[token] += keys
    return [sorted(keys) for keys in seen]


@pytest.mark.parametrize("num_rows", [2, 5, 6, 21, 22, 64])
def test_a_shared_segment_is_read_once_per_row_tile(num_rows: int) -> None:
    tiles = _fan(num_rows, 128, 7).tile_set(SHAPE)
    row_tiles = -(-num_rows // (SHAPE.wide_rows // SHAPE.group))
    assert tiles.keys_read == row_tiles * 128 * 16 + num_rows * 7


def test_without_sharing_every_row_reads_everything() -> None:
    tiles = _fan(8, 128, 7, sharing=None).tile_set(SHAPE)
    assert tiles.keys_read == 8 * (128 * 16 + 7)
    assert len(tiles.wide) == 0


@pytest.mark.parametrize("prefix_blocks", [0, 1, 3])
def test_a_segment_below_the_minimum_is_folded_into_the_tails(prefix_blocks: int) -> None:
    tiles = _fan(8, prefix_blocks, 5).tile_set(SHAPE)
    assert tiles.keys_read == 8 * (prefix_blocks * 16 + 5)
    assert (tiles.narrow[:, FLAGS] & DIRECT).all()


def test_a_short_segment_is_folded_into_its_long_child() -> None:
    plan = StepPlan.build(
        query_lens=[1, 1, 1],
        kv_lens=[16 * 41 + 1, 16 * 41 + 2, 17],
        block_tables=[[*range(41), 50], [*range(41), 51], [0, 52]],
        segments=[
            TreeSegment(None, 0, (0,), (0, 1, 2)),
            TreeSegment(0, 16, tuple(range(1, 41)), (0, 1)),
        ],
        block_size=16,
    )
    tiles = plan.tile_set(TileShape(group=1, num_kv_heads=4, head_dim=64, itemsize=4))
    assert tiles.keys_read == 16 * 41 + 1 + 2 + 17


def test_long_tails_are_cut_for_all_workers_and_merge_in_position_order() -> None:
    tiles = _fan(1, 0, 5000).tile_set(SHAPE)
    slots = tiles.m_slot[tiles.m_ptr[0] : tiles.m_ptr[1]]
    assert len(slots) > 4
    assert sorted(slots.tolist()) == list(range(len(slots)))
    assert tiles.keys_read == 5000


def test_more_than_128_partial_results_of_one_row() -> None:
    shape = TileShape(group=1, num_kv_heads=1, head_dim=8, itemsize=4, min_chunk=16, workers=4096)
    tiles = _fan(1, 0, 3000).tile_set(shape)
    assert tiles.m_ptr[1] > 128


@pytest.mark.parametrize("window", [None, 24, 300])
def test_moving_on_equals_building_again(window: int | None) -> None:
    shape = TileShape(
        group=1, num_kv_heads=1, head_dim=64, itemsize=4, window=window, min_chunk=64, workers=2
    )
    scenario = random_tree(3, num_rows=6, depth=2, max_segment_blocks=12)
    tables, lengths = scenario.block_tables, list(scenario.kv_lens)
    plan = scenario.plan()
    plan.tile_set(shape)
    next_block = 10_000
    for _ in range(500):
        lengths = [length + 1 for length in lengths]
        for row, length in enumerate(lengths):
            if -(-length // 16) > len(tables[row]):
                tables[row].append(next_block)
                next_block += 1
        assert plan.advance(lengths, tables)
        fresh = StepPlan.build(
            query_lens=[1] * 6,
            kv_lens=lengths,
            block_tables=tables,
            segments=scenario.segments,
            block_size=16,
        )
        np.testing.assert_array_equal(plan.slot_mapping, fresh.slot_mapping)
        np.testing.assert_array_equal(plan.positions, fresh.positions)
        moved = _keys_of_tokens(plan.tile_set(shape), 6)
        assert moved == _keys_of_tokens(fresh.tile_set(shape), 6)


def test_a_block_that_filled_may_be_replaced_when_the_next_one_opens() -> None:
    plan = _fan(2, 0, 16)
    plan.tile_set(SHAPE)
    assert plan.advance([17, 17], [[40, 2], [1, 3]])
    tiles = plan.tile_set(SHAPE)
    assert _keys_of_tokens(tiles, 2)[0] == sorted([(40, i) for i in range(16)] + [(2, 0)])
    assert plan.slot_mapping.tolist() == [2 * 16, 3 * 16]


def test_a_step_that_is_not_the_next_one_is_refused() -> None:
    plan = _fan(2, 4, 5)
    assert not plan.advance([70, 71], plan.block_tables)
    assert not plan.advance([70], plan.block_tables[:1])


def test_prefill_tokens_get_consecutive_slots() -> None:
    plan = StepPlan.build(
        query_lens=[5, 1], kv_lens=[6, 4], block_tables=[[7, 2], [9]], block_size=4
    )
    assert plan.slot_mapping.tolist() == [29, 30, 31, 8, 9, 39]
    assert plan.positions.tolist() == [1, 2, 3, 4, 5, 3]


def test_padding_rows_have_no_slot_and_no_tile() -> None:
    plan = StepPlan.build(
        query_lens=[1, 1, 1], kv_lens=[0, 3, 0], block_tables=[[], [4], []], block_size=4
    )
    assert plan.slot_mapping.tolist() == [-1, 18, -1]
    assert plan.tile_set(SHAPE).narrow[:, NUM_ROWS].tolist() == [1]


def test_only_padding_makes_an_empty_tile_set() -> None:
    plan = StepPlan.build(query_lens=[1], kv_lens=[0], block_tables=[[]], block_size=4)
    assert plan.tile_set(SHAPE).keys_read == 0


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([TreeSegment(None, 16, (1,), (0, 1))], "does not start"),
        ([TreeSegment(None, 0, (0, 1, 2, 3, 4), (0, 1))], "reaches into"),
    ],
)
def test_a_segment_that_contradicts_the_rows_is_refused(
    segments: list[TreeSegment], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StepPlan.build(
            query_lens=[1, 1],
            kv_lens=[70, 70],
            block_tables=[[0, 1, 2, 3, 4]] * 2,
            segments=segments,
            block_size=16,
        )


def test_a_block_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        StepPlan.build(query_lens=[1], kv_lens=[40], block_tables=[[0]], block_size=16)


@pytest.mark.parametrize(("min_tokens", "keys_read"), [(128, 128 + 6), (129, 2 * 131)])
def test_sharing_can_be_tuned(min_tokens: int, keys_read: int) -> None:
    plan = _fan(2, 8, 3, sharing=Sharing(min_tokens=min_tokens))
    assert plan.tile_set(SHAPE).keys_read == keys_read
