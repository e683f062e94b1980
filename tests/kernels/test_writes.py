"""Writing KV: each key to its slot, no block written that another row holds, copies as told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import TreeSegment
from agentkv_kernels.sharing import DEFAULT_SHARING, Sharing
from torch import Tensor

PREFIX = TreeSegment(None, 0, (0, 1), (0, 1))


def _plan(
    tables: Sequence[Sequence[int]],
    kv_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    segments: Sequence[TreeSegment] = (),
    sharing: Sharing | None = DEFAULT_SHARING,
) -> StepPlan:
    return StepPlan.build(
        query_lens=query_lens or [1] * len(tables),
        kv_lens=kv_lens,
        block_tables=tables,
        segments=segments,
        block_size=4,
        sharing=sharing,
    )


@pytest.mark.parametrize(
    ("tables", "kv_lens", "query_lens"),
    [
        ([[0, 1, 2], [0, 1, 3], []], [9, 12, 0], [1, 4, 1]),
        ([[5, 2], [5, 3]], [5, 5], [1, 1]),
        ([[7]], [4], [4]),
    ],
)
@pytest.mark.parametrize("sharing", [DEFAULT_SHARING, None])
def test_rows_may_write_blocks_of_their_own(
    tables: list[list[int]], kv_lens: list[int], query_lens: list[int], sharing: Sharing | None
) -> None:
    segments = [PREFIX] if len(tables) == 3 else []
    _plan(tables, kv_lens, query_lens, segments, sharing).check_writes()


@pytest.mark.parametrize(
    ("tables", "kv_lens", "query_lens"),
    [
        pytest.param([[0, 1, 2], [0, 1, 2]], [9, 9], [1, 1], id="one slot twice"),
        pytest.param([[0, 1, 2], [0, 1, 2]], [9, 10], [1, 1], id="two slots of one block"),
        pytest.param([[0, 1, 2], [0, 1, 2, 3]], [9, 13], [1, 1], id="another reads it"),
        pytest.param([[0, 1, 1], [0, 1, 3]], [9, 9], [1, 1], id="the row itself reads it"),
        pytest.param([[0, 1, 2, 4], [0, 1, 2, 3]], [14, 13], [3, 5], id="in a prefill chunk"),
    ],
)
@pytest.mark.parametrize("sharing", [DEFAULT_SHARING, None])
def test_a_block_that_others_hold_may_not_be_written(
    tables: list[list[int]], kv_lens: list[int], query_lens: list[int], sharing: Sharing | None
) -> None:
    plan = _plan(tables, kv_lens, query_lens, [PREFIX], sharing)
    with pytest.raises(ValueError, match="written by a row and also held by others"):
        plan.check_writes()


def test_a_block_that_lies_in_a_segment_may_not_be_written() -> None:
    with pytest.raises(ValueError, match="reaches into the tokens of this step"):
        _plan([[0, 1], [0, 1, 3]], [8, 9], segments=[PREFIX])
    with pytest.raises(ValueError, match="written by a row and also held by others"):
        _plan([[0, 1], [0, 1, 3]], [8, 9], segments=[PREFIX], sharing=None).check_writes()


@pytest.mark.parametrize("write_kv", [launch.write_kv, reference.write_kv])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_go_to_their_slots_and_slot_minus_one_is_skipped(
    write_kv: Callable[..., None], dtype: torch.dtype
) -> None:
    k_cache = launch.allocate_cache(3, 2, 4, 8, dtype, "cpu")
    v_cache = launch.allocate_cache(3, 2, 4, 5, dtype, "cpu")
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 5)
    write_kv(key, value, k_cache, v_cache, torch.tensor([9, -1, 3]))
    assert (k_cache[2, :, 1] == key[0].to(dtype)).all()
    assert (v_cache[0, :, 3] == value[2].to(dtype)).all()
    for cache in (k_cache, v_cache):
        usable = cache[:4].clone()  # ZERO too, but not TRASH
        usable[2, :, 1], usable[0, :, 3] = 0, 0
        assert (usable == 0).all()


def _filled_caches() -> list[Tensor]:
    """Keys and values of two layers, of unlike sizes."""
    return [
        launch.allocate_cache(4, 2, 4, dim, torch.float32, "cpu").normal_() for dim in (3, 5, 8, 1)
    ]


@pytest.mark.parametrize("copy_blocks", [launch.copy_blocks, reference.copy_blocks])
def test_copies_move_only_the_used_slots_in_every_layer(copy_blocks: Callable[..., None]) -> None:
    caches = _filled_caches()
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, [(0, 1, 3), (0, 2, 4)])
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[1, :, :3], expected[2] = old[0, :, :3], old[0]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("copy_blocks", [launch.copy_blocks, reference.copy_blocks])
def test_no_copies_change_nothing(copy_blocks: Callable[..., None]) -> None:
    caches = _filled_caches()
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, [])
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize(
    "copies", [[(0, 1, 4), (1, 2, 4)], [(1, 2, 4), (0, 1, 4)], [(0, 2, 4), (1, 2, 4)], [(1, 1, 2)]]
)
def test_copies_whose_order_would_matter_are_refused(copies: list[tuple[int, int, int]]) -> None:
    caches = _filled_caches()
    before = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match="copied"):
        launch.copy_blocks(caches, copies)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))
