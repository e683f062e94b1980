"""Tiles in buffers of fixed size, as captured graphs use them, under interpreted kernels."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from functools import partial

import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from agentkv_kernels.tiles import TileSet
from torch import Tensor

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be interpreted")
from agentkv_kernels import tile_attention
from agentkv_kernels.device_tiles import Capacity, DeviceTiles, unload

pytestmark = [
    pytest.mark.own_process(TRITON_INTERPRET="1"),
]
CPU = torch.device("cpu")


def _query(num_tokens: int, num_heads: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(seed))


def _fan(num_rows: int, shared: int, own: int, *, block_size: int = 16) -> Scenario:
    """num_rows decode rows over one prefix of `shared` blocks, `own` tokens each."""
    each = -(-own // block_size)
    tables = [
        [*range(shared), *(shared + r * each + i for i in range(each))] for r in range(num_rows)
    ]
    segments = [TreeSegment(None, 0, tuple(range(shared)), tuple(range(num_rows)))]
    kv_lens = [shared * block_size + own] * num_rows
    return Scenario(block_size, [1] * num_rows, kv_lens, tables, segments, shared + num_rows * each)


def _tiles(plan: StepPlan) -> TileSet:
    """The one tile set that attention has used."""
    (tiles,) = plan._tile_sets.values()
    return tiles


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 30])
def test_an_advanced_plan_reads_what_a_new_one_does(window: int | None) -> None:
    scenario = _fan(4, 8, 13)
    for table in scenario.block_tables:
        table.append(scenario.num_blocks)
        scenario.num_blocks += 1
    after = dataclasses.replace(scenario, kv_lens=[length + 6 for length in scenario.kv_lens])
    k_cache, v_cache = after.caches(1, 8)
    query, plan = _query(4, 3, 8), scenario.plan()
    attend = partial(tile_attention.paged_attention, scale=0.3, window=window)
    attend(query, k_cache, v_cache, plan)
    first = _tiles(plan)
    for step in range(1, 7):
        lens = [length + step for length in scenario.kv_lens]
        assert plan.advance(lens, scenario.block_tables)
        out = attend(query, k_cache, v_cache, plan)
    assert _tiles(plan) is first
    assert first.delta == 6
    expected = reference.paged_attention(
        query, k_cache, v_cache, after.plan(), scale=0.3, window=window
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def _capacity() -> Capacity:
    return Capacity(
        tokens=9, wide=4, narrow=40, prefill=0, rows=60, blocks=700, merges=60, slots=60
    )


@pytest.mark.usefixtures("small_chunks")
def test_fixed_buffers_serve_any_tree_with_padding_behind_it() -> None:
    buffers = DeviceTiles(_capacity(), CPU)
    held = [buffers.wide, buffers.narrow, buffers.rows, buffers.blk, buffers.m_ptr, buffers.m_slot]
    addresses = [tensor.data_ptr() for tensor in held]
    for scenario in (_fan(8, 8, 3), _fan(1, 4, 6), _fan(3, 4, 20), _fan(9, 2, 1)):
        k_cache, v_cache = scenario.caches(1, 8)
        plan, query = scenario.plan(), _query(9, 3, 8)
        buffers.load(plan.tile_set(tile_attention.tile_shape(query, k_cache, v_cache, None)))
        num_rows = plan.num_tokens
        out = tile_attention.paged_attention(query, k_cache, v_cache, plan, scale=0.5)
        expected = reference.paged_attention(query[:num_rows], k_cache, v_cache, plan, scale=0.5)
        torch.testing.assert_close(out[:num_rows], expected, atol=1e-5, rtol=1e-5)
        assert (out[num_rows:] == 0).all()
    assert [tensor.data_ptr() for tensor in held] == addresses


def test_buffers_that_still_hold_a_tile_set_are_used_again_after_others_were() -> None:
    scenario = _fan(3, 4, 20)
    k_cache, v_cache = scenario.caches(1, 8)
    plan, query = scenario.plan(), _query(9, 3, 8)
    tiles = plan.tile_set(tile_attention.tile_shape(query, k_cache, v_cache, None))
    buffers = DeviceTiles(_capacity(), CPU)
    buffers.load(tiles)
    unload(tiles)
    attend = partial(tile_attention.paged_attention, scale=0.5)
    alone = attend(query[:3], k_cache, v_cache, plan)
    buffers.load(tiles)
    padded = attend(query, k_cache, v_cache, plan)
    torch.testing.assert_close(padded[:3], alone, atol=0, rtol=0)
    assert (padded[3:] == 0).all()


def test_buffers_go_with_their_plan_without_the_garbage_collector() -> None:
    scenario = _fan(3, 4, 20)
    k_cache, v_cache = scenario.caches(1, 8)
    plan, query = scenario.plan(), _query(3, 3, 8)
    tile_attention.paged_attention(query, k_cache, v_cache, plan, scale=0.5)
    buffers = weakref.ref(_tiles(plan).scratch["device"])
    gc.disable()
    try:
        assert buffers() is not None
        del plan
        assert buffers() is None
    finally:
        gc.enable()


def test_tiles_beyond_the_capacity_are_refused_not_truncated() -> None:
    query = _query(9, 3, 8)
    for field in ("tokens", "wide", "narrow", "rows", "blocks", "merges", "slots"):
        scenario = _fan(9, 16, 20)
        k_cache, v_cache = scenario.caches(1, 8)
        tiles = scenario.plan().tile_set(tile_attention.tile_shape(query, k_cache, v_cache, None))
        needed = Capacity.of(tiles)
        assert DeviceTiles(needed, CPU).fits(tiles)
        buffers = DeviceTiles(needed._replace(**{field: getattr(needed, field) - 1}), CPU)
        assert not buffers.fits(tiles)
        with pytest.raises(ValueError, match="exceeds"):
            buffers.load(tiles)


def test_the_interpreted_kernels_are_chosen_by_the_launcher_where_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "runs_triton", lambda device: True)
    scenario = random_tree(3, num_rows=4, depth=2)
    k_cache, v_cache = scenario.caches(1, 8)
    plan, query = scenario.plan(), _query(4, 3, 8)
    out = launch.paged_attention(query, k_cache, v_cache, plan, scale=0.3)
    assert isinstance(_tiles(plan).scratch["device"], DeviceTiles)
    expected = reference.paged_attention(query, k_cache, v_cache, plan, scale=0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
