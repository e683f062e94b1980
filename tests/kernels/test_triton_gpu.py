"""The Triton kernels on a real GPU, where there is one: dtypes, alignment, graphs, big pools."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from torch import Tensor

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot run")
from agentkv_kernels import tile_attention
from agentkv_kernels.device_tiles import Capacity, DeviceTiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.own_process(TRITON_INTERPRET="0"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [
    (32, 8, 128),
    (16, 8, 128),
    (28, 4, 128),
    (14, 2, 64),
    (9, 3, 64),
    (32, 32, 128),
    (16, 1, 256),
    (70, 1, 80),
    (8, 2, 512),
]
# Elements between two places that 32 bits cannot tell apart from others.
FAR = 2**31 + 4096


def _query(num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, num_heads, dim, generator=generator).to(DEVICE, dtype)


def _fan(num_rows: int, shared: int, own: int) -> Scenario:
    """num_rows decode rows over one prefix of `shared` blocks of 16, `own` tokens each."""
    each = -(-own // 16)
    prefix = tuple(range(shared))
    tables = [[*prefix, *(shared + r * each + i for i in range(each))] for r in range(num_rows)]
    segments = [TreeSegment(None, 0, prefix, tuple(range(num_rows)))]
    kv_lens = [shared * 16 + own] * num_rows
    return Scenario(16, [1] * num_rows, kv_lens, tables, segments, shared + num_rows * each)


def _check(
    scenario: Scenario,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    **options: Any,  # Any: those of paged_attention
) -> None:
    k_cache, v_cache = scenario.caches(
        heads[1], dims[0], value_dim=dims[1], dtype=dtype, device=DEVICE
    )
    query = _query(sum(scenario.query_lens), heads[0], dims[0], dtype)
    out = torch.full((*query.shape[:2], dims[1]), torch.nan, dtype=dtype, device=DEVICE)
    plan, options = scenario.plan(), {"scale": dims[0] ** -0.5, **options}
    tile_attention.paged_attention(query, k_cache, v_cache, plan, out=out, **options)
    expected = reference.paged_attention(query, k_cache, v_cache, plan, **options)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_random_trees_are_attended_as_the_reference_does(seed: int, dtype: torch.dtype) -> None:
    scenario = random_tree(
        seed,
        num_rows=1 + seed * 2,
        depth=seed % 5,
        block_size=(1, 4, 16, 48)[seed % 4],
        max_segment_blocks=max(2, 400 // (1, 4, 16, 48)[seed % 4]),
        max_query=(1, 1, 3, 70)[seed // 4],
    )
    _check(
        scenario,
        ((3, 1), (4, 2), (6, 2), (12, 1))[seed % 4],
        ((64, 64), (128, 64), (80, 80))[seed % 3],
        dtype,
        window=(None, None, 5, 100, 37)[seed % 5],
        softcap=(None, 2.0)[seed % 2],
        sinks=torch.randn((3, 4, 6, 12)[seed % 4], device=DEVICE) if seed % 3 else None,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_real_models_are_attended_right(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_q_heads, num_kv_heads, dim = shape
    _check(_fan(40, 160, 21), (num_q_heads, num_kv_heads), (dim, dim), dtype)
    prefill = Scenario(16, [100], [333], [[*range(21)]], [], 22)
    _check(prefill, (num_q_heads, num_kv_heads), (dim, dim), dtype)


def test_the_launcher_chooses_these_kernels() -> None:
    scenario = _fan(2, 8, 3)
    k_cache, v_cache = scenario.caches(1, 64, device=DEVICE)
    plan = scenario.plan()
    launch.paged_attention(_query(2, 3, 64, torch.float32), k_cache, v_cache, plan, scale=0.1)
    (shape,) = plan.shapes
    assert launch.runs_triton(k_cache.device)
    assert isinstance(plan.tile_set(shape).scratch["device"], DeviceTiles)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tensors_that_begin_at_odd_addresses_are_read_right(dtype: torch.dtype) -> None:
    scenario = _fan(5, 8, 9)
    caches = scenario.caches(1, 64, dtype=dtype, device=DEVICE)
    tensors = [_query(5, 3, 64, dtype), *caches]
    moved = []
    for tensor in tensors:
        memory = torch.full((tensor.numel() + 1,), torch.nan, dtype=dtype, device=DEVICE)
        moved.append(memory[1:].view(tensor.shape).copy_(tensor))
    attend = partial(tile_attention.paged_attention, plan=scenario.plan(), scale=0.1)
    torch.testing.assert_close(attend(*moved), attend(*tensors), atol=0, rtol=0)


def test_the_same_input_gives_the_same_bits() -> None:
    scenario = _fan(33, 64, 40)
    k_cache, v_cache = scenario.caches(2, 128, dtype=torch.bfloat16, device=DEVICE)
    query = _query(33, 8, 128, torch.bfloat16)
    outs = [
        tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.1)
        for _ in range(3)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_a_graph_captured_short_serves_other_trees_and_fewer_rows() -> None:
    capacity = Capacity(
        tokens=40, wide=99, narrow=900, prefill=0, rows=400, blocks=9000, merges=5000, slots=5000
    )
    buffers = DeviceTiles(capacity, torch.device(DEVICE))
    scenarios = [_fan(3, 4, 5), _fan(40, 200, 90), _fan(1, 2000, 7), _fan(17, 1, 1)]
    largest = max(scenario.num_blocks for scenario in scenarios)
    query, out = _query(40, 8, 64, torch.bfloat16), _query(40, 8, 64, torch.bfloat16)
    k_cache, v_cache = (
        launch.allocate_cache(largest, 2, 16, 64, torch.bfloat16, DEVICE) for _ in range(2)
    )

    def load(scenario: Scenario) -> StepPlan:
        contents = scenario.caches(2, 64, dtype=torch.bfloat16, device=DEVICE)
        for cache, content in zip((k_cache, v_cache), contents, strict=True):
            cache[: len(content)].copy_(content)
        plan = scenario.plan()
        buffers.load(plan.tile_set(tile_attention.tile_shape(query, k_cache, v_cache, None)))
        return plan

    plan = load(scenarios[0])
    attend = partial(tile_attention.paged_attention, query, k_cache, v_cache, scale=0.1, out=out)
    attend(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(plan)
    for scenario in scenarios:
        plan = load(scenario)
        out.fill_(torch.nan)
        graph.replay()
        rows = plan.num_tokens
        expected = reference.paged_attention(query[:rows], k_cache, v_cache, plan, scale=0.1)
        torch.testing.assert_close(out[:rows], expected, atol=3e-2, rtol=3e-2)
        assert (out[rows:] == 0).all()


def _needs(gibibytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory, {free >> 30} are there")


def test_blocks_of_a_pool_above_4_gib_are_written_copied_and_read() -> None:
    _needs(14)
    num_blocks = FAR // (8 * 16 * 128) + 2
    caches = [
        launch.allocate_cache(num_blocks, 8, 16, 128, torch.bfloat16, DEVICE) for _ in range(2)
    ]
    last, copy = num_blocks - 1, num_blocks - 2
    key, value, query = (_query(20, heads, 128, torch.bfloat16) for heads in (8, 8, 32))
    slots = torch.arange(20) + torch.where(torch.arange(20) < 16, last * 16, 16 * 3 - 16)
    launch.write_kv(key, value, caches[0], caches[1], slots)
    launch.copy_blocks(caches, [(last, copy, 16), (last, 1, 16), (3, 4, 4)])
    outs = [
        tile_attention.paged_attention(
            query[:1],
            caches[0],
            caches[1],
            StepPlan.build(query_lens=[1], kv_lens=[20], block_tables=[table], block_size=16),
            scale=0.1,
        )
        for table in ([last, 3], [copy, 3], [1, 4])
    ]
    expected, _ = reference.attend(
        query[:1].float(),
        key.float(),
        value.float(),
        torch.ones(1, 20, dtype=torch.bool, device=DEVICE),
        scale=0.1,
    )
    for out in outs:
        torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)


def test_query_and_output_rows_beyond_32_bits_are_reached() -> None:
    _needs(12)
    scenario = _fan(2, 8, 9)
    k_cache, v_cache = scenario.caches(1, 64, dtype=torch.bfloat16, device=DEVICE)
    memory = [torch.empty(FAR + 4096, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    query, out = (m.as_strided((2, 3, 64), (FAR, 64, 1)) for m in memory)
    query.copy_(_query(2, 3, 64, torch.bfloat16))
    tile_attention.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.1, out=out)
    expected = reference.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=0.1)
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_are_written_and_blocks_copied_in_all_layers(dtype: torch.dtype) -> None:
    sizes = [(2, 64), (2, 64), (3, 80), (3, 24)]
    caches = [launch.allocate_cache(9, heads, 16, dim, dtype, DEVICE) for heads, dim in sizes]
    expected = [cache.clone() for cache in caches]
    slots = torch.randperm(9 * 16)[:50]
    slots[[3, 17]] = -1
    for layer in (0, 2):
        key, value = (_query(50, *sizes[layer + i], dtype) for i in (0, 1))
        launch.write_kv(key, value, caches[layer], caches[layer + 1], slots)
        reference.write_kv(key, value, expected[layer], expected[layer + 1], slots)
    copies = [(0, 7, 16), (0, 8, 3), (2, 6, 1)]
    launch.copy_blocks(caches, copies)
    reference.copy_blocks(expected, copies)
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache[:9], wanted[:9], atol=0, rtol=0)
