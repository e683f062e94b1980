"""The numbers themselves: extreme and equal scores, soft-caps, sinks, merging, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from agentkv_kernels.tiles import TileShape
from torch import Tensor

Attention = Callable[..., Tensor]
PATHS = [reference.paged_attention, launch.paged_attention]
PREFIX = tuple(range(8))


def _fan(num_blocks: int = 8, own: int = 9) -> Scenario:
    """Three decode rows over one prefix."""
    tables = [[*PREFIX[:num_blocks], 8 + row] for row in range(3)]
    segments = [TreeSegment(None, 0, PREFIX[:num_blocks], (0, 1, 2))] if num_blocks else []
    return Scenario(16, [1] * 3, [num_blocks * 16 + own] * 3, tables, segments, 11)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("magnitude", [1e4, 1e6, 1e30])
def test_huge_scores_stay_finite(path: Attention, magnitude: float, softcap: float | None) -> None:
    scenario = random_tree(5, num_rows=4)
    k_cache, v_cache = scenario.caches(1, 8)
    query = torch.randn(4, 2, 8) * magnitude
    out = path(query, k_cache, v_cache, scenario.plan(), scale=1.0, softcap=softcap)
    expected = reference.paged_attention(
        query, k_cache, v_cache, scenario.plan(), scale=1.0, softcap=softcap, dtype=torch.float64
    )
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("score", [0.0, 30.0, -1e6, -1e30])
def test_equal_scores_average_the_values(path: Attention, score: float) -> None:
    scenario = _fan()
    k_cache, v_cache = scenario.caches(1, 4)
    k_cache.copy_(torch.where(k_cache.isnan(), k_cache, 1.0))
    query = torch.full((3, 2, 4), score / 4)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    for row, table in enumerate(scenario.block_tables):
        value = reference.gather_keys(v_cache, table, scenario.kv_lens[row])
        expected = value.double().mean(0).float().expand(2, 4)
        torch.testing.assert_close(out[row], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("position", [0, 70, 127, 128, 136])
@pytest.mark.parametrize("others", [-50.0, -1e6])
def test_one_dominant_key_is_all_that_is_seen(
    path: Attention, position: int, others: float
) -> None:
    scenario = _fan()
    k_cache, v_cache = scenario.caches(1, 4)
    k_cache.copy_(torch.where(k_cache.isnan(), k_cache, others / 4))
    query = torch.ones(3, 1, 4)
    for table in scenario.block_tables:
        k_cache[table[position // 16], :, position % 16] = 50.0
    out = path(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    for row, table in enumerate(scenario.block_tables):
        value = v_cache[table[position // 16], :, position % 16]
        torch.testing.assert_close(out[row], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_a_soft_cap_bends_scores_before_the_softmax(path: Attention) -> None:
    scenario = _fan()
    k_cache, v_cache = scenario.caches(2, 8)
    query = torch.randn(3, 4, 8) * 20
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.5, softcap=3.0)
    for row, table in enumerate(scenario.block_tables):
        key, value = (
            reference.gather_keys(cache, table, scenario.kv_lens[row]).repeat_interleave(2, 1)
            for cache in (k_cache, v_cache)
        )
        score = torch.tanh(torch.einsum("hd,mhd->hm", query[row], key) * 0.5 / 3.0) * 3.0
        expected = torch.einsum("hm,mhd->hd", score.softmax(1), value)
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [2, 3, 9])
def test_sinks_are_counted_once_however_many_segments(path: Attention, seed: int) -> None:
    scenario = random_tree(seed, num_rows=6, depth=4, max_segment_blocks=12)
    k_cache, v_cache = scenario.caches(2, 8)
    query, sinks = torch.randn(6, 4, 8), torch.randn(4)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.5, sinks=sinks)
    _check_sinks(out, query, sinks, scenario, (k_cache, v_cache))


@pytest.mark.parametrize("chunk", [16, 32, 1000])
@pytest.mark.parametrize("num_blocks", [0, 8])
def test_sinks_are_counted_once_however_many_chunks(chunk: int, num_blocks: int) -> None:
    scenario = _fan(num_blocks)
    shape = TileShape(
        group=2, num_kv_heads=2, head_dim=8, itemsize=4, workers=4096, narrow_rows=2, wide_rows=4,
        min_chunk=chunk, min_wide_chunk=chunk,
    )  # fmt: skip
    caches = scenario.caches(2, 8)
    query, sinks = torch.randn(3, 4, 8), torch.randn(4)
    tiles = scenario.plan().tile_set(shape)
    out = reference.tiled_attention(query, *caches, tiles, scale=0.5, sinks=sinks)
    _check_sinks(out, query, sinks, scenario, caches)


def _check_sinks(
    out: Tensor, query: Tensor, sinks: Tensor, scenario: Scenario, caches: tuple[Tensor, Tensor]
) -> None:
    """A sink takes its share of the softmax and gives nothing for it; scale 0.5."""
    for row, table in enumerate(scenario.block_tables):
        key, value = (
            reference.gather_keys(cache, table, scenario.kv_lens[row]).repeat_interleave(2, 1)
            for cache in caches
        )
        score = torch.einsum("hd,mhd->hm", query[row], key) * 0.5
        weight = torch.cat([score, sinks[:, None]], 1).softmax(1)[:, :-1]
        expected = torch.einsum("hm,mhd->hd", weight, value)
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)


def test_attention_over_no_keys_is_zero_with_lse_minus_infinity() -> None:
    query, nothing = torch.randn(3, 2, 4), torch.empty(0, 1, 4)
    out, lse = reference.attend(query, nothing, nothing, torch.ones(3, 0).bool(), scale=1.0)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_merging_one_state_gives_it_back() -> None:
    part, lse = torch.randn(1, 2, 4), torch.tensor([[-1e30, 3.0]])
    out, total = reference.merge_states(part, lse)
    torch.testing.assert_close(out, part[0])
    torch.testing.assert_close(total, lse[0])


def test_merging_empty_states_is_empty() -> None:
    out, total = reference.merge_states(torch.zeros(3, 2, 4), torch.full((3, 2), -math.inf))
    assert (out == 0).all()
    assert (total == -math.inf).all()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_state_among_others_changes_nothing_even_if_it_is_nan(place: int) -> None:
    parts, lses = torch.randn(2, 2, 4), torch.randn(2, 2)
    expected = reference.merge_states(parts, lses)
    nothing, never = torch.full((1, 2, 4), math.nan), torch.full((1, 2), -math.inf)
    result = reference.merge_states(
        torch.cat([parts[:place], nothing, parts[place:]]),
        torch.cat([lses[:place], never, lses[place:]]),
    )
    torch.testing.assert_close(result, expected)


def test_merging_in_any_order_equals_one_softmax() -> None:
    query, key = torch.randn(5, 2, 4), torch.randn(60, 1, 4)
    value, every = torch.randn(60, 1, 4), torch.ones(5, 60).bool()
    whole = reference.attend(query, key, value, every, scale=1.0)
    cuts = [slice(0, 1), slice(1, 33), slice(33, 60)]
    for order in ([0, 1, 2], [2, 0, 1]):
        states = [
            reference.attend(query, key[cuts[i]], value[cuts[i]], every[:, cuts[i]], scale=1.0)
            for i in order
        ]
        merged = reference.merge_states(
            torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states])
        )
        torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(16, 16), (16, 8), (8, 24)])
@pytest.mark.parametrize("window", [None, 20])
def test_half_precision_caches_accumulate_in_float32(
    path: Attention, dtype: torch.dtype, dims: tuple[int, int], window: int | None
) -> None:
    scenario = random_tree(8, num_rows=5, max_query=30, max_segment_blocks=20)
    k_cache, v_cache = scenario.caches(2, dims[0], value_dim=dims[1], dtype=dtype)
    query = torch.randn(sum(scenario.query_lens), 4, dims[0], dtype=dtype)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.25, window=window)
    exact = reference.paged_attention(
        query, k_cache, v_cache, scenario.plan(), scale=0.25, window=window, dtype=torch.float64
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out, exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("path", PATHS)
def test_queries_may_be_more_exact_than_the_caches(path: Attention) -> None:
    scenario = random_tree(8, num_rows=5, max_query=30, max_segment_blocks=20)
    k_cache, v_cache = scenario.caches(2, 16, dtype=torch.bfloat16)
    query = torch.randn(sum(scenario.query_lens), 4, 16)
    out, exact = (
        each(query, k_cache, v_cache, scenario.plan(), scale=0.25)
        for each in (path, reference.paged_attention)
    )
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_the_same_step_twice_gives_the_same_bits(path: Attention) -> None:
    scenario = random_tree(13, num_rows=7, max_query=3, depth=4)
    k_cache, v_cache = scenario.caches(2, 16)
    query = torch.randn(sum(scenario.query_lens), 6, 16)
    first, second = (path(query, k_cache, v_cache, scenario.plan(), scale=0.25) for _ in range(2))
    assert torch.equal(first, second)
