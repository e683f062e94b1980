"""Edge cases of the Triton attention kernels, interpreted on the CPU, against the reference.

Every tensor that is allocated without being filled holds NaN, and so does every slot of the cache
that nobody may read.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from agentkv_kernels import reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from agentkv_kernels.tiles import TileSet
from torch import Tensor

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be interpreted")
from agentkv_kernels import tile_attention

pytestmark = [
    pytest.mark.own_process(TRITON_INTERPRET="1"),
]
BLOCK_N = 32  # of the tuning for interpreted kernels


def _query(num_tokens: int, num_heads: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(seed))


def _row(length: int, *, query_len: int = 1, block_size: int = 16) -> Scenario:
    """One row of `length` keys in blocks that lie anywhere, the highest id among them."""
    count = -(-length // block_size)
    table = [count + 2, *np.random.default_rng(length).permutation(count + 2).tolist()][:count]
    return Scenario(block_size, [query_len], [length], [table], [], count + 3)


def _fan(num_rows: int, shared: int, own: int, *, block_size: int = 16) -> Scenario:
    """num_rows decode rows over one prefix of `shared` blocks, `own` tokens each."""
    each = -(-own // block_size)
    tables = [
        [*range(shared), *(shared + r * each + i for i in range(each))] for r in range(num_rows)
    ]
    segments = [TreeSegment(None, 0, tuple(range(shared)), tuple(range(num_rows)))]
    kv_lens = [shared * block_size + own] * num_rows
    return Scenario(block_size, [1] * num_rows, kv_lens, tables, segments, shared + num_rows * each)


def _check(
    scenario: Scenario,
    *,
    heads: tuple[int, int] = (3, 1),
    dims: tuple[int, int] = (8, 8),
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> StepPlan:
    """Attention over the scenario's plan is the reference's over its block tables."""
    k_cache, v_cache = scenario.caches(heads[1], dims[0], value_dim=dims[1])
    query = _query(sum(scenario.query_lens), heads[0], dims[0])
    options = {"scale": dims[0] ** -0.5, "window": window, "softcap": softcap, "sinks": sinks}
    plan = scenario.plan()
    out = tile_attention.paged_attention(query, k_cache, v_cache, plan, **options)
    expected = reference.paged_attention(query, k_cache, v_cache, plan, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    return plan


def _tiles(plan: StepPlan) -> TileSet:
    """The one tile set that attention has used."""
    (tiles,) = plan._tile_sets.values()
    return tiles


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_any_context_length_and_block_size(block_size: int) -> None:
    edges = {1, block_size - 1, block_size, block_size + 1, BLOCK_N - 1, BLOCK_N, BLOCK_N + 1}
    for length in edges - {0}:
        _check(_row(length, block_size=block_size))


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16, 17, 32, 70])
def test_any_head_grouping(group: int) -> None:
    _check(_row(37), heads=(group * 2, 2))


@pytest.mark.parametrize("num_kv_heads", [1, 3, 10])
def test_any_number_of_kv_heads(num_kv_heads: int) -> None:
    _check(_row(37), heads=(num_kv_heads * 3, num_kv_heads))


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim(dim: int) -> None:
    _check(_row(37), dims=(dim, dim))


@pytest.mark.parametrize("dims", [(24, 8), (8, 24), (192, 128)])
def test_keys_and_values_may_differ_in_size(dims: tuple[int, int]) -> None:
    _check(_row(37), dims=dims)


@pytest.mark.parametrize("num_rows", [16, 17, 63, 64, 65])
def test_shared_tiles_hold_any_number_of_rows(num_rows: int) -> None:
    plan = _check(_fan(num_rows, 8, 1), heads=(1, 1))
    assert len(_tiles(plan).wide) == (num_rows > 16)
    assert len(_tiles(plan).narrow) == num_rows + (num_rows in (16, 65))


@pytest.mark.parametrize("group", [5, 7])
def test_rows_that_do_not_fill_a_tile_with_their_heads(group: int) -> None:
    _check(_fan(14, 8, 3), heads=(group, 1))


@pytest.mark.parametrize("query_len", [1, 2, 20, 21, 22, 43, 70])
def test_prefill_chunks_are_causal(query_len: int) -> None:
    _check(_row(70, query_len=query_len))


@pytest.mark.parametrize("window", [1, 3, 15, 16, 17, 36, 37, 38, 500])
@pytest.mark.parametrize("query_len", [1, 9, 37])
def test_windows_are_exact_to_the_position(window: int, query_len: int) -> None:
    _check(_row(37, query_len=query_len), window=window)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [7, 50, 129, 140])
def test_windows_over_shared_segments_and_chunks(window: int) -> None:
    _check(_fan(4, 8, 9), window=window)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -torch.inf])])
def test_rows_without_keys_are_exactly_zero(sinks: Tensor | None) -> None:
    scenario = Scenario(4, [1, 1, 1], [0, 3, 0], [[], [1], []], [], 4)
    k_cache, v_cache = scenario.caches(1, 8)
    with np.errstate(invalid="ignore"):  # no keys and a sink that never counts: -inf less -inf
        out = tile_attention.paged_attention(
            _query(3, 2, 8), k_cache, v_cache, scenario.plan(), scale=1.0, sinks=sinks
        )
    assert (out[[0, 2]] == 0).all()
    assert out[1].abs().sum() > 0


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("query_len", [1, 20])
def test_slots_behind_the_last_token_do_not_matter(poison: float, query_len: int) -> None:
    scenario = random_tree(11, num_rows=3, depth=2, max_tail=20, max_query=query_len)
    k_cache, v_cache = scenario.caches(1, 8)
    query = _query(sum(scenario.query_lens), 3, 8)
    outs = [
        tile_attention.paged_attention(
            query,
            k_cache.nan_to_num(filling),
            v_cache.nan_to_num(filling),
            scenario.plan(),
            scale=1.0,
        )
        for filling in (0.0, poison)
    ]
    assert not outs[0].isnan().any()
    torch.testing.assert_close(outs[1], outs[0], atol=0, rtol=0)


@pytest.mark.parametrize(
    "values",
    [torch.full((40,), 3.0), torch.linspace(-1e4, 1e4, 40), torch.full((40,), -2e6)],
    ids=["equal", "one dominant, 1e4", "below -1e6"],
)
def test_extreme_scores_stay_exact(values: Tensor) -> None:
    scenario = _row(40)
    k_cache, v_cache = scenario.caches(1, 8)
    slots = torch.arange(40)
    blocks = torch.tensor(scenario.block_tables[0])[slots // 16]
    k_cache[blocks, 0, slots % 16] = torch.nn.functional.pad(values[:, None], (0, 7))
    query = torch.zeros(1, 2, 8)
    query[..., 0] = 1.0
    out = tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    expected = reference.paged_attention(
        query, k_cache, v_cache, scenario.plan(), scale=1.0, dtype=torch.float64
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("magnitude", [1.0, 1e5])
def test_softcap_holds_for_large_scores(magnitude: float) -> None:
    scenario = _row(40, query_len=3)
    k_cache, v_cache = scenario.caches(1, 8)
    query = _query(3, 2, 8) * magnitude
    with np.errstate(over="ignore"):  # e^2x is infinite where tanh is 1
        out = tile_attention.paged_attention(
            query, k_cache, v_cache, scenario.plan(), scale=1.0, softcap=30.0
        )
    expected = reference.paged_attention(
        query, k_cache, v_cache, scenario.plan(), scale=1.0, softcap=30.0
    )
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("length", [9, 32, 150])
def test_sinks_are_counted_once_with_one_two_and_many_chunks(length: int) -> None:
    sinks = torch.tensor([0.5, -2.0, 8.0])
    plan = _check(_row(length), sinks=sinks)
    assert len(_tiles(plan).narrow) == {9: 1, 32: 2, 150: 5}[length]
    _check(_row(length, query_len=9), sinks=sinks)


@pytest.mark.usefixtures("small_chunks")
def test_a_row_in_many_tiles_of_one_shared_segment() -> None:
    plan = _check(_fan(3, 10, 21), heads=(6, 2))
    tiles = _tiles(plan)
    assert np.diff(tiles.m_ptr).min() > 3


def test_queries_and_outputs_are_used_where_they_lie() -> None:
    scenario = random_tree(4, num_rows=5, depth=2, max_query=3)
    k_cache, v_cache = scenario.caches(2, 8)
    num_tokens = sum(scenario.query_lens)
    query = _query(4, num_tokens, 8).transpose(0, 1)
    memory = torch.full((4, num_tokens, 12), 7.0)
    out = memory.transpose(0, 1)[..., 2:10]
    written = tile_attention.paged_attention(
        query, k_cache, v_cache, scenario.plan(), scale=1.0, out=out
    )
    expected = reference.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    assert written is out
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert (memory[..., :2] == 7.0).all()
    assert (memory[..., 10:] == 7.0).all()


def test_a_query_whose_last_dimension_is_strided_is_read_right() -> None:
    scenario = _row(20)
    k_cache, v_cache = scenario.caches(1, 8)
    query = _query(8, 3, 1).permute(2, 1, 0)
    out = tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    expected = reference.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=1.0)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_keys_are_widened_after_they_are_read() -> None:
    scenario = random_tree(8, num_rows=4, depth=2, max_query=3)
    k_cache, v_cache = scenario.caches(1, 16, dtype=torch.bfloat16)
    query = _query(sum(scenario.query_lens), 2, 16)
    out = tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.25)
    expected = reference.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.25)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_narrow_query_over_float32_keys_keeps_its_dtype() -> None:
    scenario = _row(20)
    k_cache, v_cache = scenario.caches(1, 16)
    query = _query(1, 2, 16).half()
    out = tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.25)
    expected = reference.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.25)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


def test_arguments_that_kernels_cannot_read_are_refused() -> None:
    scenario = _row(20)
    k_cache, v_cache = scenario.caches(1, 8)
    query, plan = _query(1, 3, 8), scenario.plan()
    attend = partial(tile_attention.paged_attention, scale=1.0)
    strided = torch.zeros(*k_cache.shape[:3], 16)[..., ::2]
    with pytest.raises(ValueError, match="contiguous"):
        attend(query, strided, v_cache, plan)
    with pytest.raises(ValueError, match="contiguous"):
        attend(query, k_cache, v_cache, plan, out=torch.zeros(1, 3, 16)[..., ::2])
    with pytest.raises(ValueError, match="several devices"):
        attend(query, k_cache, v_cache, plan, sinks=torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="not 2"):
        attend(_query(2, 3, 8), k_cache, v_cache, plan)
