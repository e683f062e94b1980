"""Writes to the cache on the device, and memory beyond 32 bits of offset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.scenario import Scenario, TreeSegment
from torch import Tensor

pytestmark = pytest.mark.gpu

# With these a block holds 2**14 elements, so that block FAR lies more than 2**31 elements away.
BLOCK_SIZE, DIM = 64, 256
FAR = 2**31 // (BLOCK_SIZE * DIM) + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_writes_are_those_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    key, value = torch.randn(19, 3, 80).to(dtype), torch.randn(19, 3, 48).to(dtype)
    slots = torch.full((19,), -1)
    slots[[0, 2, 3, 9, 17, 18]] = torch.tensor([3, 4, 20, 95, 0, 7])
    found = [launch.allocate_cache(6, 3, 16, dim, dtype, device) for dim in (80, 48)]
    wanted = [cache.cpu() for cache in found]
    launch.write_kv(key.to(device), value.to(device), found[0], found[1], slots.to(device))
    reference.write_kv(key, value, wanted[0], wanted[1], slots)
    for cache, expected in zip(found, wanted, strict=True):
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_copies_are_those_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    caches = [launch.allocate_cache(9, 3, 16, dim, dtype, device).normal_() for dim in (64, 80, 8)]
    wanted = [cache.cpu() for cache in caches]
    copies = [(1, 4, 3), (1, 5, 16), (2, 6, 1), (3, 8, 0)]
    launch.copy_blocks(caches, copies)
    reference.copy_blocks(wanted, copies)
    for cache, expected in zip(caches, wanted, strict=True):
        assert torch.equal(cache.cpu(), expected)


@pytest.fixture
def far_cache(device: torch.device) -> Iterator[Tensor]:
    """More than 4 GiB: one head, FAR blocks of float16, ZERO and TRASH behind them."""
    needed = (FAR + 2) * BLOCK_SIZE * DIM * 2
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed + (1 << 30):
        pytest.skip(f"the device has {free >> 20} MiB free, and {needed >> 20} MiB are needed")
    yield launch.allocate_cache(FAR, 1, BLOCK_SIZE, DIM, torch.float16, device)
    torch.cuda.empty_cache()


def pair(first: int, second: int, query_len: int) -> Scenario:
    """Two rows that share blocks `first` and 5, with two more each that end at `second`."""
    tables = [[first, 5, second - 1, second], [first, 5, second - 3, second - 2]]
    lengths = [3 * BLOCK_SIZE + 9, 3 * BLOCK_SIZE + 20]
    segments = [TreeSegment(None, 0, (first, 5), (0, 1))]
    return Scenario(BLOCK_SIZE, [query_len] * 2, lengths, tables, segments, max(first, second) + 1)


@pytest.mark.no_rehearsal
@pytest.mark.parametrize("query_len", [1, 70])
def test_blocks_beyond_32_bits_are_read(
    device: torch.device, far_cache: Tensor, query_len: int
) -> None:
    near, far = pair(6, 4, query_len), pair(FAR - 1, FAR - 2, query_len)
    near_cache = near.caches(1, DIM, dtype=torch.float16)[0].contiguous().to(device)
    for near_table, far_table in zip(near.block_tables, far.block_tables, strict=True):
        far_cache[far_table] = near_cache[near_table]
    query = torch.randn(2 * query_len, 2, DIM, dtype=torch.float16, device=device)
    out, expected = (
        launch.paged_attention(query, cache, cache, scenario.plan(), scale=DIM**-0.5)
        for cache, scenario in ((far_cache, far), (near_cache, near))
    )
    assert expected.abs().max() > 0
    assert torch.equal(out, expected)


@pytest.mark.no_rehearsal
def test_slots_beyond_32_bits_are_written(device: torch.device, far_cache: Tensor) -> None:
    key = torch.randn(2, 1, DIM, dtype=torch.float16, device=device)
    slots = torch.tensor([(FAR - 1) * BLOCK_SIZE + 7, 9], device=device)
    launch.write_kv(key, key, far_cache, far_cache, slots)
    assert torch.equal(far_cache[FAR - 1, :, 7], key[0])
    assert torch.equal(far_cache[0, :, 9], key[1])
    assert int(far_cache.count_nonzero()) == int(key.count_nonzero())


@pytest.mark.no_rehearsal
def test_blocks_beyond_32_bits_are_copied(far_cache: Tensor) -> None:
    far_cache[FAR - 1].normal_()
    launch.copy_blocks([far_cache], [(FAR - 1, FAR - 2, 5), (FAR - 1, 0, BLOCK_SIZE)])
    assert torch.equal(far_cache[FAR - 2, :, :5], far_cache[FAR - 1, :, :5])
    assert torch.equal(far_cache[0], far_cache[FAR - 1])
    assert (far_cache[FAR - 2, :, 5:] == 0).all()


@pytest.mark.no_rehearsal
def test_rows_more_than_32_bits_apart_are_read(device: torch.device, far_cache: Tensor) -> None:
    scenario = pair(6, 4, 1)
    cache = scenario.caches(1, DIM, dtype=torch.float16)[0].contiguous().to(device)
    packed = torch.randn(2, 2, DIM, dtype=torch.float16, device=device)
    # The cache lends its memory.
    distance = 2**31 + 4096
    query = far_cache.view(-1).as_strided((2, 2, DIM), (distance, DIM, 1)).copy_(packed)
    out, expected = (
        launch.paged_attention(q, cache, cache, scenario.plan(), scale=DIM**-0.5)
        for q in (query, packed)
    )
    assert torch.equal(out, expected)
