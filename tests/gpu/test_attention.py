"""Attention on the device against the reference in float64, over trees and odd shapes.

Every tensor that is allocated without being filled holds NaN, and so does every slot of the cache
that nobody may read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# In standard deviations of the result, since that of many keys is small. Weights are rounded to 16
# bits before they meet the values, and so is the result.
TOLERANCES = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter adds and multiplies bfloat16 wrongly.
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.no_rehearsal),
]


def query_of(num_tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, heads, dim, generator=generator).to(dtype)


def fan(num_rows: int, shared: int, own: int, *, block_size: int = 16) -> Scenario:
    """num_rows decode rows over one prefix of `shared` blocks, `own` tokens each."""
    each = -(-own // block_size)
    tables = [
        [*range(shared), *(shared + r * each + i for i in range(each))] for r in range(num_rows)
    ]
    segments = [TreeSegment(None, 0, tuple(range(shared)), tuple(range(num_rows)))]
    kv_lens = [shared * block_size + own] * num_rows
    return Scenario(block_size, [1] * num_rows, kv_lens, tables, segments, shared + num_rows * each)


def caches_of(scenario: Scenario, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values of two heads of 64 dimensions."""
    keys, values = scenario.caches(2, 64, dtype=torch.float16)
    return keys.contiguous().to(device), values.contiguous().to(device)


def attend(query: Tensor, keys: Tensor, values: Tensor, scenario: Scenario) -> Tensor:
    return launch.paged_attention(query, keys, values, scenario.plan(), scale=0.125)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype = torch.float16) -> None:
    tolerance = TOLERANCES[dtype]
    atol = tolerance * float(expected.float().std())
    torch.testing.assert_close(out, expected, atol=atol, rtol=tolerance)


def check(
    scenario: Scenario,
    device: torch.device,
    *,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention on the device is the reference's over the same keys, on the CPU."""
    keys, values = scenario.caches(heads[1], dims[0], value_dim=dims[1], dtype=dtype)
    query = query_of(sum(scenario.query_lens), heads[0], dims[0], dtype)
    expected = reference.paged_attention(
        query.double(), keys, values, scenario.plan(), scale=dims[0] ** -0.5, window=window,
        softcap=softcap, sinks=sinks, dtype=torch.float64,
    )  # fmt: skip
    out = launch.paged_attention(
        query.to(device), keys.contiguous().to(device), values.contiguous().to(device),
        scenario.plan(), scale=dims[0] ** -0.5, window=window, softcap=softcap,
        sinks=None if sinks is None else sinks.to(device),
    )  # fmt: skip
    assert_close(out.cpu().double(), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_query", [1, 90])
def test_random_trees(
    device: torch.device, num_trees: int, dtype: torch.dtype, max_query: int
) -> None:
    for seed in range(num_trees):
        scenario = random_tree(
            seed, num_rows=3 + seed % 20, depth=1 + seed % 5, max_query=max_query, max_tail=300
        )
        check(scenario, device, dtype=dtype)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((32, 8), (128, 128)),
        ((28, 4), (128, 128)),
        ((32, 32), (128, 128)),
        ((17, 1), (80, 80)),
        ((16, 1), (256, 256)),
        ((4, 4), (192, 128)),
        ((70, 1), (96, 96)),
    ],
    ids=str,
)
def test_any_heads(device: torch.device, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(random_tree(5, num_rows=6, depth=3, max_query=3), device, heads=heads, dims=dims)


@pytest.mark.no_rehearsal
@pytest.mark.parametrize("shared", [128, 300])
def test_long_shared_prefixes_in_many_chunks(device: torch.device, shared: int) -> None:
    check(fan(40, shared, 50), device, heads=(32, 8), dims=(128, 128))


@pytest.mark.parametrize("block_size", [1, 48])
def test_any_block_size(device: torch.device, block_size: int) -> None:
    check(random_tree(7, num_rows=5, block_size=block_size, max_query=20), device)


@pytest.mark.parametrize("window", [1, 17, 100])
def test_windows(device: torch.device, window: int) -> None:
    check(random_tree(8, num_rows=5, depth=2, max_query=40), device, window=window)


def test_softcap_and_sinks_at_once(device: torch.device) -> None:
    sinks = torch.tensor([0.3, -1.0, 4.0, 0.0, -50.0, 1.0])
    scenario = random_tree(9, num_rows=5, depth=2, max_query=20)
    check(scenario, device, softcap=3.0, sinks=sinks, window=60)


def test_rows_without_keys_are_exactly_zero(device: torch.device) -> None:
    scenario = Scenario(16, [1, 1, 1], [0, 20, 0], [[], [1, 2], []], [], 4)
    keys, values = caches_of(scenario, device)
    query = query_of(3, 6, 64, torch.float16).to(device)
    out = attend(query, keys, values, scenario)
    assert (out[[0, 2]] == 0).all()
    assert out[1].abs().sum() > 0


@pytest.mark.parametrize("poison", [math.nan, 6e4])
def test_slots_behind_the_last_token_do_not_matter(device: torch.device, poison: float) -> None:
    scenario = random_tree(11, num_rows=6, depth=2, max_query=9)
    query = query_of(sum(scenario.query_lens), 6, 64, torch.float16).to(device)
    keys, values = caches_of(scenario, device)
    outs = [
        attend(query, keys.nan_to_num(filling), values.nan_to_num(filling), scenario)
        for filling in (0.0, poison)
    ]
    assert not outs[0].isnan().any()
    assert torch.equal(outs[0], outs[1])


def test_the_same_input_gives_the_same_bits(device: torch.device) -> None:
    scenario = random_tree(12, num_rows=12, depth=4, max_query=5)
    keys, values = caches_of(scenario, device)
    query = query_of(sum(scenario.query_lens), 6, 64, torch.float16).to(device)
    outs = [attend(query, keys, values, scenario) for _ in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_permuting_rows_permutes_outputs_exactly(device: torch.device) -> None:
    scenario = random_tree(13, num_rows=7, depth=4, max_segment_blocks=4)
    keys, values = caches_of(scenario, device)
    query, order = query_of(7, 6, 64, torch.float16).to(device), [3, 0, 6, 1, 5, 2, 4]
    out = attend(query, keys, values, scenario)
    other = attend(query[order], keys, values, scenario.permuted(order))
    assert torch.equal(other, out[order])


def misaligned(tensor: Tensor) -> Tensor:
    """A copy that starts one element after an aligned address."""
    buffer = tensor.new_empty(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def padded(tensor: Tensor) -> Tensor:
    """A copy whose rows lie further apart than they are long."""
    wider = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
    view = wider[..., : tensor.shape[-1]]
    return view.copy_(tensor)


@pytest.mark.parametrize("place", [misaligned, padded])
def test_tensors_that_are_misaligned_or_not_contiguous(
    device: torch.device, place: Callable[[Tensor], Tensor]
) -> None:
    scenario = random_tree(14, num_rows=5, depth=2, max_query=20)
    keys, values = caches_of(scenario, device)
    query = query_of(sum(scenario.query_lens), 6, 64, torch.float16).to(device)
    expected = attend(query, keys, values, scenario)
    out = attend(place(query), place(keys), place(values), scenario)
    assert_close(out, expected)


def test_output_may_lie_anywhere(device: torch.device) -> None:
    from agentkv_kernels import tile_attention

    scenario = random_tree(15, num_rows=5, depth=2)
    keys, values = caches_of(scenario, device)
    query = query_of(5, 6, 64, torch.float16).to(device)
    expected = attend(query, keys, values, scenario)
    out = query.new_full((5, 6, 67), torch.nan)[..., 1:65]
    tile_attention.paged_attention(query, keys, values, scenario.plan(), scale=0.125, out=out)
    assert_close(out, expected)
