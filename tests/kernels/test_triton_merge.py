"""Merging of partial results by the interpreted kernel, against the reference."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from agentkv_kernels import reference
from agentkv_kernels.tiles import TileSet
from torch import Tensor

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be interpreted")
from agentkv_kernels import merge
from agentkv_kernels.device_tiles import on_device

pytestmark = [
    pytest.mark.own_process(TRITON_INTERPRET="1"),
]
CPU = torch.device("cpu")


def _query(num_tokens: int, num_heads: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(seed))


def _merged(
    lists: list[list[int]], parts: Tensor, lses: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Partial results [n, Hq, Dv] merged as the lists of slots say, -1 where nothing is written."""
    empty = np.zeros((0, 8), np.int32)
    slots = np.array([slot for slots in lists for slot in slots], np.int32)
    ends = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    none = np.zeros(0, np.int32)
    tiles = on_device(TileSet(empty, empty, empty, none, none, ends, slots, len(parts), 1), CPU)
    out = torch.full((len(lists), *parts.shape[1:]), -1.0)
    merge.merge_slots(parts, lses, tiles, out, sinks)
    return out


def test_merging_joins_any_number_of_slots_in_their_order() -> None:
    parts, lses = _query(200, 2, 5), _query(200, 2, 1, seed=1)[..., 0] * 9
    order = np.random.default_rng(0).permutation(200).tolist()
    lists = [order[a:b] for a, b in pairwise([0, 1, 3, 19, 35, 70, 200])]
    out = _merged(lists, parts, lses)
    for got, slots in zip(out, lists, strict=True):
        expected, _ = reference.merge_states(parts[slots], lses[slots])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_merging_empty_states_is_empty_and_one_among_finite_changes_nothing() -> None:
    parts, lses = _query(4, 2, 5), _query(4, 2, 1, seed=1)[..., 0]
    parts[[0, 2]], lses[[0, 2]] = 0.0, -torch.inf
    sinks = torch.tensor([1.0, -3.0])
    for extra in (None, sinks):
        out = _merged([[0], [0, 2], [0, 1, 2], [1], [], [-1]], parts, lses, extra)
        assert (out[[0, 1, 4]] == 0).all()
        torch.testing.assert_close(out[2], out[3], atol=0, rtol=0)
        assert (out[5] == -1.0).all()
    share = torch.sigmoid(lses[1] / reference.LOG2_E - sinks)
    torch.testing.assert_close(out[3], parts[1] * share[:, None])


@pytest.mark.parametrize("base", [1e4, -1e6])
def test_merging_is_exact_for_extreme_sums(base: float) -> None:
    parts, lses = _query(3, 2, 5), torch.tensor([[0.0, 0.0], [3.0, -200.0], [1.0, 0.0]]) + base
    expected, _ = reference.merge_states(parts.double(), lses.double())
    torch.testing.assert_close(_merged([[0, 1, 2]], parts, lses)[0], expected.float())
