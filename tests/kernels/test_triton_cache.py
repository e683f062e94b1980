"""Writes to the cache by the interpreted kernels, and offsets beyond 32 bits."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.plan import StepPlan
from torch import Tensor

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be interpreted")
from agentkv_kernels import cache_ops, tile_attention

pytestmark = [
    pytest.mark.own_process(TRITON_INTERPRET="1"),
]
# A block and its stride, each of which fits 32 bits: in these, their product would be negative.
FAR_BLOCK, STRIDE = 8, 2**28 + 64
FAR = FAR_BLOCK * STRIDE
# Not in Python's mmap before 3.12: pages count only when they are touched.
MAP_NORESERVE = 0x4000


class FarCache:
    """Blocks 0 and FAR_BLOCK [16, 8] of a float16 cache, and zeros where that would wrap to."""

    def __init__(self, memory: mmap.mmap, shift: int) -> None:
        near, far = (
            torch.frombuffer(memory, dtype=torch.float16, count=128, offset=2 * (at + shift))
            for at in (FAR, 2 * FAR)
        )
        self.blocks = near.view(16, 8), far.view(16, 8)
        # FAR_BLOCK lies beyond the end of this tensor, where the block's stride says.
        self.tensor = near.as_strided((1, 1, 16, 8), (STRIDE, 128, 8, 1))


@pytest.fixture
def far_caches() -> tuple[FarCache, FarCache]:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * (2 * FAR + 4096), flags=flags)
    return FarCache(memory, 0), FarCache(memory, 2048)


def _caches(dims: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [launch.allocate_cache(6, 3, 4, dim, dtype, "cpu").normal_() for dim in dims]


@pytest.mark.parametrize("dims", [(8, 8), (8, 5), (80, 24)])
def test_keys_are_written_to_their_slots_and_slot_minus_one_is_skipped(
    dims: tuple[int, int],
) -> None:
    caches = _caches(dims)
    expected = [cache.clone() for cache in caches]
    key, value = torch.randn(3, 19, dims[0]).transpose(0, 1), torch.randn(19, 3, dims[1])
    slots = torch.full((19,), -1)
    slots[[0, 2, 3, 9, 17, 18]] = torch.tensor([3, 4, 20, 23, 0, 7])
    cache_ops.write_kv(key, value, caches[0], caches[1], slots)
    reference.write_kv(key, value, expected[0], expected[1], slots)
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 24])
def test_any_number_of_tokens_is_written(num_tokens: int) -> None:
    caches = _caches((8, 8))
    key, value = torch.randn(2, num_tokens, 3, 8)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(24)[:num_tokens])
    cache_ops.write_kv(key, value, caches[0], caches[1], slots)
    blocks, offsets = slots // 4, slots % 4
    torch.testing.assert_close(caches[0][blocks, :, offsets], key, atol=0, rtol=0)
    torch.testing.assert_close(caches[1][blocks, :, offsets], value, atol=0, rtol=0)


def test_keys_are_rounded_to_the_dtype_of_the_cache() -> None:
    caches = _caches((8, 8), torch.float16)
    key, value = torch.randn(2, 1, 3, 8)
    cache_ops.write_kv(key, value, caches[0], caches[1], torch.tensor([5]))
    torch.testing.assert_close(caches[0][1, :, 1], key[0].half(), atol=0, rtol=0)


def test_slots_that_the_kernel_cannot_read_are_refused() -> None:
    k_cache, v_cache = _caches((8, 8))
    key = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="int64 slots"):
        cache_ops.write_kv(key, key, k_cache, v_cache, torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous"):
        cache_ops.write_kv(key, key, k_cache[..., ::2], v_cache, torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_move_only_the_used_slots_in_every_cache(dtype: torch.dtype) -> None:
    caches = [
        launch.allocate_cache(6, heads, 4, dim, dtype, "cpu").normal_()
        for heads, dim in ((2, 8), (3, 5), (1, 300))
    ]
    expected = [cache.clone() for cache in caches]
    copies = [(0, 1, 3), (0, 2, 4), (4, 3, 1), (4, 5, 0)]
    cache_ops.copy_blocks(caches, copies)
    cache_ops.copy_blocks(caches, [])
    reference.copy_blocks(expected, copies)
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, wanted, atol=0, rtol=0)


def test_caches_that_one_launch_cannot_copy_are_refused() -> None:
    (cache,) = _caches((8,))
    with pytest.raises(ValueError, match="element sizes"):
        cache_ops.copy_blocks([cache, cache.half()], [(0, 1, 2)])
    with pytest.raises(ValueError, match="several devices"):
        cache_ops.copy_blocks([cache, cache.to("meta")], [(0, 1, 2)])
    with pytest.raises(ValueError, match="contiguous"):
        cache_ops.copy_blocks([cache[..., ::2]], [(0, 1, 2)])


def test_attention_reads_blocks_beyond_32_bits(far_caches: tuple[FarCache, FarCache]) -> None:
    keys, values = far_caches
    for cache in far_caches:
        cache.blocks[1].normal_()
    query = torch.randn(1, 3, 8).half()
    plan = StepPlan.build(query_lens=[1], kv_lens=[16], block_tables=[[FAR_BLOCK]], block_size=16)
    out = tile_attention.paged_attention(query, keys.tensor, values.tensor, plan, scale=0.5)
    expected, _ = reference.attend(
        query.float(),
        keys.blocks[1][:, None].float(),
        values.blocks[1][:, None].float(),
        torch.ones(1, 16, dtype=torch.bool),
        scale=0.5,
    )
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=1e-3)


def test_keys_are_written_to_blocks_beyond_32_bits(
    far_caches: tuple[FarCache, FarCache],
) -> None:
    key, value = torch.randn(2, 1, 1, 8)
    keys, values = far_caches
    cache_ops.write_kv(key, value, keys.tensor, values.tensor, torch.tensor([FAR_BLOCK * 16 + 3]))
    assert torch.equal(keys.blocks[1][3], key[0, 0].half())
    assert torch.equal(values.blocks[1][3], value[0, 0].half())


def test_blocks_beyond_32_bits_are_copied(far_caches: tuple[FarCache, FarCache]) -> None:
    for cache in far_caches:
        cache.blocks[0].normal_()
    cache_ops.copy_blocks([cache.tensor for cache in far_caches], [(0, FAR_BLOCK, 5)])
    for cache in far_caches:
        near, far = cache.blocks
        assert torch.equal(far[:5], near[:5])
        assert (far[5:] == 0).all()
