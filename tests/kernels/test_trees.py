"""Property: over any fork tree, shared, flat and dense attention are the same function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.scenario import Scenario, random_tree
from agentkv_kernels.tiles import TileShape

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


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_result_comes_from_memory_that_was_not_written(first: int) -> None:
    for seed in range(first, first + 10):
        _check_tree(seed)


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
