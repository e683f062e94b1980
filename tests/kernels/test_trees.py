"""Property: over any fork tree, shared, flat and dense attention are the same function."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, random_tree
from agentkv_kernels.sharing import Sharing
from agentkv_kernels.tiles import BLK0, KV_LEN, KV_OFF, TileSet, TileShape

HEADS = [(1, 1, 8, 8), (3, 1, 16, 16), (3, 3, 8, 8), (6, 2, 16, 8), (12, 1, 8, 24), (5, 1, 8, 8)]


def _random_case(seed: int) -> tuple[Scenario, torch.Tensor, torch.Tensor, torch.Tensor]:
    block_size = (1, 4, 16, 48)[seed % 4]
    scenario = random_tree(
        seed,
        num_rows=1 + seed % 7,
        depth=seed % 6,
        block_size=block_size,
        max_segment_blocks=max(2, 160 // block_size),
        max_query=(1, 1, 3, 70)[seed // 4 % 4],
    )
    num_q_heads, num_kv_heads, key_dim, value_dim = HEADS[seed % len(HEADS)]
    k_cache, v_cache = scenario.caches(num_kv_heads, key_dim, value_dim=value_dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sum(scenario.query_lens), num_q_heads, key_dim, generator=generator)
    return scenario, query, k_cache, v_cache


def _check_tree(seed: int) -> None:
    scenario, query, k_cache, v_cache = _random_case(seed)
    window = (None, None, 5, 100, 37)[seed % 5]
    softcap = (None, 2.0, None)[seed % 3]
    sinks = torch.randn(query.shape[1]) if seed % 2 else None
    plan = scenario.plan()
    shape = TileShape(
        group=query.shape[1] // k_cache.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=k_cache.shape[3],
        itemsize=2,
        window=window,
        workers=4,
        min_chunk=16,
        min_wide_chunk=64,
    )
    expected, shared, flat = (
        path(query, k_cache, v_cache, on, scale=0.3, window=window, softcap=softcap, sinks=sinks)
        for path, on in (
            (reference.paged_attention, plan),
            (launch.paged_attention, plan),
            (launch.paged_attention, scenario.plan(share=False)),
        )
    )
    tiles = plan.tile_set(shape)
    tiled = reference.tiled_attention(
        query, k_cache, v_cache, tiles, scale=0.3, window=window, softcap=softcap, sinks=sinks
    )
    assert not expected.isnan().any()
    for result in (tiled, shared, flat):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def _check_permutation(seed: int) -> None:
    scenario, query, k_cache, v_cache = _random_case(seed)
    starts = np.cumsum([0, *scenario.query_lens])
    order = np.random.default_rng(seed).permutation(len(scenario.query_lens)).tolist()
    tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in order])
    options: dict[str, Any] = {"scale": 0.3, "window": (None, None, 5, 100, 37)[seed % 5]}
    options["sinks"] = torch.randn(query.shape[1]) if seed % 2 else None
    out = launch.paged_attention(query, k_cache, v_cache, scenario.plan(), **options)
    moved = launch.paged_attention(
        query[tokens], k_cache, v_cache, scenario.permuted(order).plan(), **options
    )
    torch.testing.assert_close(moved, out[tokens], atol=0, rtol=0)


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_shared_equals_flat_equals_dense_on_random_trees(first: int) -> None:
    for seed in range(first, first + 10):
        _check_tree(seed)


def _reads_of_segments(scenario: Scenario, min_tokens: int, rows_per_tile: int) -> list[int]:
    """How often each segment's blocks are to be read; a short one is part of what follows it."""
    lengths: list[int] = []
    for parent, _, block_ids, _ in scenario.segments:
        before = 0 if parent is None or lengths[parent] >= min_tokens else lengths[parent]
        lengths.append(before + len(block_ids) * scenario.block_size)
    reads = [0] * len(lengths)
    for index in reversed(range(len(lengths))):
        rows = len(scenario.segments[index].rows)
        if lengths[index] >= min_tokens:
            reads[index] = -(-rows // rows_per_tile)
        else:
            children = [i for i, s in enumerate(scenario.segments) if s.parent == index]
            apart = rows - sum(len(scenario.segments[i].rows) for i in children)
            reads[index] = sum(reads[i] for i in children) + apart
    return reads


def _reads_of_blocks(tiles: TileSet, block_size: int) -> Counter[int]:
    """How many tiles read the first slot of each block."""
    found: Counter[int] = Counter()
    for tile in np.concatenate([tiles.wide, tiles.narrow]).tolist():
        first = -(-tile[KV_OFF] // block_size)
        end = -(-(tile[KV_OFF] + tile[KV_LEN]) // block_size)
        found.update(tiles.blk[tile[BLK0] + first : tile[BLK0] + end].tolist())
    return found


@pytest.mark.parametrize("min_tokens", [16, 64, 200])
@pytest.mark.parametrize("seed", range(40))
def test_each_long_segment_is_read_once_per_row_tile(seed: int, min_tokens: int) -> None:
    scenario = random_tree(
        seed, num_rows=2 + seed % 12, depth=1 + seed % 5, max_segment_blocks=12, max_tail=16
    )
    shape = TileShape(
        group=3, num_kv_heads=2, head_dim=8, itemsize=2, workers=4, narrow_rows=6, wide_rows=12,
        min_chunk=32, min_wide_chunk=64,
    )  # fmt: skip
    plan = StepPlan.build(
        query_lens=scenario.query_lens,
        kv_lens=scenario.kv_lens,
        block_tables=scenario.block_tables,
        segments=scenario.segments,
        block_size=scenario.block_size,
        sharing=Sharing(min_tokens=min_tokens, partial_bytes=0, fixed_bytes=0),
    )
    counted = _reads_of_blocks(plan.tile_set(shape), scenario.block_size)
    expected = _reads_of_segments(scenario, min_tokens, rows_per_tile=4)
    for segment, reads in zip(scenario.segments, expected, strict=True):
        assert [counted[block] for block in segment.block_ids] == [reads] * len(segment.block_ids)


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_permuting_rows_permutes_outputs_exactly(first: int) -> None:
    for seed in range(first, first + 10):
        _check_permutation(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(120, 1000, 80))
def test_permuting_rows_of_a_thousand_random_trees_permutes_outputs_exactly(first: int) -> None:
    for seed in range(first, first + 80):
        _check_permutation(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(120, 1000, 80))
def test_shared_equals_flat_equals_dense_on_a_thousand_random_trees(first: int) -> None:
    for seed in range(first, first + 80):
        _check_tree(seed)
