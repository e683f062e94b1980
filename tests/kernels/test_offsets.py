"""Blocks wherever they lie: unordered, repeated, unused ones poisoned, offsets beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.scenario import Scenario, TreeSegment
from torch import Tensor

Attention = Callable[..., Tensor]
PATHS = [reference.paged_attention, launch.paged_attention]
# With these a block holds 2**14 elements, so that block FAR lies more than 2**31 elements away.
BLOCK_SIZE, DIM = 64, 256
FAR = 2**31 // (BLOCK_SIZE * DIM) + 3


def _lazy_zeros(num_elements: int) -> Tensor:
    """More than 4 GiB of float16, of which only the pages that are written become memory."""
    try:
        return torch.from_numpy(np.zeros(num_elements, np.float16))
    except MemoryError:
        pytest.skip("this system does not hand out memory before it is used")


@pytest.fixture
def far_cache() -> Tensor:
    """A cache of one head and FAR blocks, ZERO and TRASH behind them."""
    elements = (FAR + 2) * BLOCK_SIZE * DIM
    return _lazy_zeros(elements).view(1, FAR + 2, BLOCK_SIZE, DIM).transpose(0, 1)


def _pair(first: int, second: int, query_len: int) -> Scenario:
    """Two rows that share blocks `first` and 5, with two more each that end at `second`."""
    tables = [[first, 5, second - 1, second], [first, 5, second - 3, second - 2]]
    lengths = [3 * BLOCK_SIZE + 9, 3 * BLOCK_SIZE + 20]
    segments = [TreeSegment(None, 0, (first, 5), (0, 1))]
    return Scenario(BLOCK_SIZE, [query_len] * 2, lengths, tables, segments, max(first, second) + 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_len", [1, 70])
def test_blocks_beyond_32_bits_are_read(far_cache: Tensor, path: Attention, query_len: int) -> None:
    """vllm#47671, sglang#20389, tokenspeed#530, ATOM#702: block id times stride overflowed."""
    near, far = _pair(6, 4, query_len), _pair(FAR - 1, FAR - 2, query_len)
    near_cache, _ = near.caches(1, DIM, dtype=torch.float16)
    for near_table, far_table in zip(near.block_tables, far.block_tables, strict=True):
        far_cache[far_table] = near_cache[near_table]
    query = torch.randn(2 * query_len, 2, DIM, dtype=torch.float16)
    out, expected = (
        path(query, cache, cache, scenario.plan(), scale=DIM**-0.5)
        for cache, scenario in ((far_cache, far), (near_cache, near))
    )
    assert expected.abs().max() > 0
    # Blocks that are neighbours elsewhere may be read in another way, in another order of sums.
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("write_kv", [launch.write_kv, reference.write_kv])
def test_slots_beyond_32_bits_are_written(far_cache: Tensor, write_kv: Callable[..., None]) -> None:
    key = torch.randn(2, 1, DIM, dtype=torch.float16)
    slots = torch.tensor([(FAR - 1) * BLOCK_SIZE + 7, 9])
    write_kv(key, key, far_cache, far_cache, slots)
    assert torch.equal(far_cache[FAR - 1, :, 7], key[0])
    assert torch.equal(far_cache[0, :, 9], key[1])


@pytest.mark.parametrize("copy_blocks", [launch.copy_blocks, reference.copy_blocks])
def test_blocks_beyond_32_bits_are_copied(
    far_cache: Tensor, copy_blocks: Callable[..., None]
) -> None:
    far_cache[FAR - 1] = torch.randn(1, BLOCK_SIZE, DIM)
    copy_blocks([far_cache], [(FAR - 1, FAR - 2, 5), (FAR - 1, 0, BLOCK_SIZE)])
    assert torch.equal(far_cache[FAR - 2, :, :5], far_cache[FAR - 1, :, :5])
    assert torch.equal(far_cache[0], far_cache[FAR - 1])
    assert (far_cache[FAR - 2, :, 5:] == 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_rows_more_than_32_bits_apart_are_read(path: Attention) -> None:
    scenario = _pair(6, 4, 1)
    cache, _ = scenario.caches(1, DIM, dtype=torch.float16)
    packed = torch.randn(2, 2, DIM, dtype=torch.float16)
    distance = 2**31 + 4096
    query = _lazy_zeros(distance + 2 * DIM).as_strided((2, 2, DIM), (distance, DIM, 1))
    query.copy_(packed)
    out, expected = (
        path(q, cache, cache, scenario.plan(), scale=DIM**-0.5) for q in (query, packed)
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_unused_blocks_may_hold_anything(path: Attention, query_len: int) -> None:
    scenario = Scenario(
        4, [query_len] * 2, [11, 9], [[7, 1, 3], [7, 1, 5]],
        [TreeSegment(None, 0, (7, 1), (0, 1))] if query_len == 1 else [], 8,
    )  # fmt: skip
    k_cache, v_cache = scenario.caches(2, 8)
    query = torch.randn(2 * query_len, 4, 8)
    expected = path(query, k_cache, v_cache, scenario.plan(), scale=0.3)
    for cache in (k_cache, v_cache):
        assert cache[0].isnan().all()
        assert cache[9].isnan().all()  # TRASH
        cache[[0, 2, 4, 6, 9]] = torch.inf
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.3)
    assert out.isfinite().all()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("path", PATHS)
def test_a_block_may_occur_more_than_once(path: Attention) -> None:
    tables = [[6, 2, 6, 0], [6, 2, 6, 2, 1]]
    segments = [TreeSegment(None, 0, (6, 2, 6), (0, 1))]
    scenario = Scenario(16, [1, 1], [50, 65], tables, segments, 7)
    k_cache, v_cache = scenario.caches(1, 8)
    apart = Scenario(16, [1, 1], [50, 65], [[0, 1, 2, 3], [4, 5, 6, 7, 8]], [], 9)
    blocks = [block for table in tables for block in table]
    query = torch.randn(2, 3, 8)
    out = path(query, k_cache, v_cache, scenario.plan(), scale=0.3)
    expected = reference.paged_attention(
        query, k_cache[blocks], v_cache[blocks], apart.plan(), scale=0.3
    )
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
