"""Property: over any fork tree, the interpreted Triton kernels compute what the reference does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from agentkv_kernels import reference
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from agentkv_kernels.tiles import TileShape

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be interpreted")
from agentkv_kernels import tile_attention

pytestmark = [
    pytest.mark.own_process(TRITON_INTERPRET="1"),
]
# Query heads, KV heads, key and value dim.
HEADS = [(1, 1, 8, 8), (3, 1, 16, 16), (4, 2, 8, 8), (6, 2, 16, 8), (12, 1, 8, 24), (5, 1, 8, 8)]


def _query(num_tokens: int, num_heads: int, dim: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("seed", range(40))
def test_shared_and_flat_equal_dense_on_a_random_tree(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        small = partial(TileShape, min_chunk=48, min_wide_chunk=64)
        monkeypatch.setattr(tile_attention, "TileShape", small)
    block_size = (1, 4, 16, 48)[seed % 4]
    scenario = random_tree(
        seed,
        num_rows=1 + seed % 6,
        depth=seed % 5,
        block_size=block_size,
        max_segment_blocks=max(2, 112 // block_size),
        max_tail=20,
        max_query=(1, 1, 3, 25)[seed // 4 % 4],
    )
    num_q_heads, num_kv_heads, key_dim, value_dim = HEADS[seed % len(HEADS)]
    k_cache, v_cache = scenario.caches(num_kv_heads, key_dim, value_dim=value_dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sum(scenario.query_lens), num_q_heads, key_dim, generator=generator)
    options: dict[str, Any] = {  # Any: each its own type
        "scale": 0.3,
        "window": (None, None, 5, 100, 37)[seed % 5],
        "softcap": (None, 2.0, None)[seed % 3],
        "sinks": torch.randn(num_q_heads, generator=generator) if seed % 2 else None,
    }
    shared, flat = scenario.plan(), scenario.plan(share=False)
    expected = reference.paged_attention(query, k_cache, v_cache, shared, **options)
    assert not expected.isnan().any()
    for plan in (shared, flat):
        out = tile_attention.paged_attention(query, k_cache, v_cache, plan, **options)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_the_random_trees_have_tiles_of_every_kind() -> None:
    """Otherwise the property would say little."""
    kinds = np.zeros(3, np.int64)
    for seed in range(40):
        scenario = random_tree(seed, num_rows=6, depth=4, max_query=(1, 25)[seed % 2])
        k_cache, v_cache = scenario.caches(1, 8)
        query = torch.zeros(sum(scenario.query_lens), 5, 8)
        tiles = scenario.plan().tile_set(tile_attention.tile_shape(query, k_cache, v_cache, None))
        kinds += np.array([len(tiles.wide), len(tiles.narrow), len(tiles.prefill)]) > 0
    assert (kinds > 5).all()


@pytest.mark.usefixtures("small_chunks")
def test_permuting_rows_permutes_outputs_exactly() -> None:
    scenario = random_tree(21, num_rows=7, depth=4, max_segment_blocks=4)
    k_cache, v_cache = scenario.caches(1, 16)
    query, order = _query(7, 3, 16), [3, 0, 6, 1, 5, 2, 4]
    out = tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.25)
    moved = tile_attention.paged_attention(
        query[order], k_cache, v_cache, scenario.permuted(order).plan(), scale=0.25
    )
    torch.testing.assert_close(moved, out[order], atol=0, rtol=0)


def test_a_parent_that_goes_on_leaves_its_child_bit_for_bit_unchanged() -> None:
    tables = [[0, 1, 2], [0, 1, 3]]
    segments = [TreeSegment(None, 0, (0, 1), (0, 1))]
    before = Scenario(32, [1, 1], [70, 75], tables, segments, 8)
    after = Scenario(32, [1, 1], [71, 75], tables, segments, 8)
    k_cache, v_cache = after.caches(1, 8)
    query = _query(2, 3, 8)
    first, second = (
        tile_attention.paged_attention(query, k_cache, v_cache, step.plan(), scale=1.0)
        for step in (before, after)
    )
    assert (first[0] != second[0]).any()
    torch.testing.assert_close(first[1], second[1], atol=0, rtol=0)
