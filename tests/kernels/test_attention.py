"""Edge cases of paged attention, each on the reference and on the CPU path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, partials, reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from torch import Tensor

Attention = Callable[..., Tensor]
PATHS = [reference.paged_attention, launch.paged_attention]


def _dense(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """torch's own attention of the last rows [n, Hq, D] of a sequence over [m, Hkv, D]."""
    n, m = len(query), len(key)
    position = torch.arange(m - n, m)[:, None]
    visible = torch.arange(m)[None] <= position
    if window is not None:
        visible &= torch.arange(m)[None] > position - window
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None].double(),
        key.transpose(0, 1)[None].double(),
        value.transpose(0, 1)[None].double(),
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).float()


def _check_one(
    path: Attention,
    length: int,
    *,
    query_len: int = 1,
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    dim: int = 16,
    window: int | None = None,
) -> None:
    count = -(-length // block_size)
    table = np.random.default_rng(length).permutation(count + 3)[:count].tolist()
    scenario = Scenario(block_size, [query_len], [length], [table], [], count + 3)
    k_cache, v_cache = scenario.caches(heads[1], dim)
    query = torch.randn(query_len, heads[0], dim, generator=torch.Generator().manual_seed(length))
    # The scale of every model: with a larger one, rounding of the scores grows with dim.
    scale = dim**-0.5
    out = path(query, k_cache, v_cache, scenario.plan(), scale=scale, window=window)
    key, value = (reference.gather_keys(c, table, length) for c in (k_cache, v_cache))
    expected = _dense(query, key, value, scale=scale, window=window)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 48, 160])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_any_context_length_and_block_size(path: Attention, length: int, block_size: int) -> None:
    _check_one(path, length, block_size=block_size)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16, 17, 32])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 10])
def test_any_head_grouping(path: Attention, group: int, num_kv_heads: int) -> None:
    _check_one(path, 37, heads=(group * num_kv_heads, num_kv_heads), dim=8)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim(path: Attention, dim: int) -> None:
    _check_one(path, 37, dim=dim)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [1, 3, 15, 16, 17, 36, 37, 38, 500])
@pytest.mark.parametrize("query_len", [1, 9, 37])
def test_windows_are_exact_to_the_position(path: Attention, window: int, query_len: int) -> None:
    _check_one(path, 37, query_len=query_len, window=window)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the keys that reach torch's fused kernel, which ends the process over none.

    It gives a token that sees no key a log-sum-exp of 0, so no such token may reach it either.
    """
    lengths: list[int] = []
    flash = partials._flash

    def check(
        query: Tensor, key: Tensor, *rest: Tensor, attn_mask: Tensor | None, **more: Any
    ) -> Any:
        assert key.shape[2] > 0
        assert attn_mask is None or (attn_mask == 0).any(-1).all()
        lengths.append(key.shape[2])
        return flash(query, key, *rest, attn_mask=attn_mask, **more)

    monkeypatch.setattr(partials, "_flash", check)
    return lengths


@pytest.mark.parametrize("window", [5, 40, 90, 130])
def test_a_window_slides_off_a_shared_segment_step_by_step(
    fused_calls: list[int], window: int
) -> None:
    prefix = tuple(range(8))
    tables = [[*prefix, *range(8 + 9 * row, 17 + 9 * row)] for row in range(3)]
    segments = [TreeSegment(None, 0, prefix, (0, 1, 2))]
    lengths = [129, 133, 140]
    full = Scenario(16, [1] * 3, [n + 130 for n in lengths], tables, segments, 35)
    k_cache, v_cache = (cache.nan_to_num(0.0) for cache in full.caches(1, 8))
    plan = Scenario(16, [1] * 3, lengths, tables, segments, 35).plan()
    query = torch.randn(3, 2, 8)
    for step in range(130):
        assert step == 0 or plan.advance([n + step for n in lengths], tables)
        out, expected = (
            path(query, k_cache, v_cache, plan, scale=0.3, window=window) for path in PATHS
        )
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert len(fused_calls) >= 130


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 30, 1], [200, 1, 70]])
@pytest.mark.parametrize("window", [None, 3, 50])
def test_empty_segments_and_rows_without_keys_never_reach_the_fused_kernel(
    fused_calls: list[int], query_lens: list[int], window: int | None
) -> None:
    segments = [TreeSegment(None, 0, (), (0, 1, 2)), TreeSegment(0, 0, (4, 5, 6, 7), (0, 2))]
    tables = [[4, 5, 6, 7, *range(8, 30)], [*range(30, 40)], [4, 5, 6, 7, *range(40, 60)], []]
    lengths = [64 + query_lens[0], query_lens[1], 64 + query_lens[2], 0]
    scenario = Scenario(16, [*query_lens, 1], lengths, tables, segments, 60)
    k_cache, v_cache = scenario.caches(1, 8)
    query = torch.randn(sum(query_lens) + 1, 2, 8)
    out, expected = (
        path(query, k_cache, v_cache, scenario.plan(), scale=0.3, window=window) for path in PATHS
    )
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert fused_calls


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_len", [1, 2, 63, 64, 65, 700, 1000])
def test_prefill_chunks_are_causal(path: Attention, query_len: int) -> None:
    _check_one(path, 1000, query_len=query_len)


@pytest.mark.parametrize("path", PATHS)
def test_rows_without_keys_are_exactly_zero(path: Attention) -> None:
    scenario = Scenario(4, [1, 1, 1], [0, 3, 0], [[], [1], []], [], 4)
    k_cache, v_cache = scenario.caches(1, 8)
    out = path(torch.randn(3, 2, 8), k_cache, v_cache, scenario.plan(), scale=1.0)
    assert (out[0] == 0).all()
    assert (out[2] == 0).all()
    assert out[1].abs().sum() > 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_slots_behind_the_last_token_do_not_matter(path: Attention, poison: float) -> None:
    scenario = random_tree(11, num_rows=6, max_query=3)
    k_cache, v_cache = scenario.caches(1, 8)
    query = torch.randn(sum(scenario.query_lens), 3, 8)
    clean = path(
        query, k_cache.nan_to_num(0.0), v_cache.nan_to_num(0.0), scenario.plan(), scale=1.0
    )
    for cache in (k_cache, v_cache):
        cache.nan_to_num_(poison)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    torch.testing.assert_close(out, clean, atol=0, rtol=0)


def test_strided_queries_are_read_where_they_lie() -> None:
    scenario = random_tree(4, num_rows=5)
    k_cache, v_cache = scenario.caches(2, 8)
    query = torch.randn(4, 5, 8).transpose(0, 1)
    out = launch.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    expected = launch.paged_attention(
        query.contiguous(), k_cache, v_cache, scenario.plan(), scale=1.0
    )
    torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_arguments_that_do_not_fit_are_refused() -> None:
    plan = StepPlan.build(query_lens=[1], kv_lens=[3], block_tables=[[0]], block_size=4)
    k_cache = launch.allocate_cache(2, 2, 4, 8, torch.float32, "cpu")
    for shape in ((2, 4, 8), (1, 3, 8), (1, 4, 7)):
        with pytest.raises(ValueError, match="quer"):
            launch.paged_attention(torch.zeros(shape), k_cache, k_cache, plan, scale=1.0)
    query = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="window"):
        launch.paged_attention(query, k_cache, k_cache, plan, scale=1.0, window=0)
    with pytest.raises(ValueError, match="sinks"):
        launch.paged_attention(query, k_cache, k_cache, plan, scale=1.0, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="blocks of"):
        launch.paged_attention(query, k_cache, k_cache[:, :, :2], plan, scale=1.0)
