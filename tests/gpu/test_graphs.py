"""Attention recorded in a CUDA graph over buffers of fixed size, replayed for other trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from agentkv_kernels import launch
from agentkv_kernels.device_tiles import Capacity, DeviceTiles
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from torch import Tensor

pytest.importorskip("triton", reason="triton is missing, and with it the kernels")
from agentkv_kernels import tile_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
NUM_BLOCKS, NUM_ROWS = 2000, 24
CAPACITY = Capacity(
    tokens=NUM_ROWS, wide=60, narrow=400, prefill=0, rows=300, blocks=4000, merges=900, slots=900
)


def tree(num_rows: int, shared: int, own: int) -> Scenario:
    """num_rows decode rows over one prefix of `shared` blocks, `own` tokens each."""
    each = -(-own // 16)
    tables = [
        [*range(shared), *(shared + r * each + i for i in range(each))] for r in range(num_rows)
    ]
    segments = [TreeSegment(None, 0, tuple(range(shared)), tuple(range(num_rows)))]
    lengths = [16 * shared + own] * num_rows
    return Scenario(16, [1] * num_rows, lengths, tables, segments, shared + num_rows * each)


class Recorded:
    """Attention of 24 rows over a cache of random keys, recorded over the tree of `first`."""

    def __init__(self, record: Record, first: Scenario, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = NUM_BLOCKS + 2, 2, 16, 64
        self.keys, self.values = (
            torch.randn(shape, generator=generator).half().to(device) for _ in range(2)
        )
        self.query = torch.randn(NUM_ROWS, 6, 64, generator=generator).half().to(device)
        self.buffers = DeviceTiles(CAPACITY, device)
        self.plan = first.plan()
        self.load(self.plan)
        self.replay = record(self.run)

    def load(self, plan: StepPlan) -> None:
        self.plan = plan
        shape = tile_attention.tile_shape(self.query, self.keys, self.values, None)
        self.buffers.load(plan.tile_set(shape))

    def run(self) -> Tensor:
        return self.attend(self.query, self.plan)

    def attend(self, query: Tensor, plan: StepPlan) -> Tensor:
        return launch.paged_attention(query, self.keys, self.values, plan, scale=0.125)

    def check(self, scenario: Scenario, plan: StepPlan) -> None:
        """A replay over `plan` gives what launching over it gives, and zeros behind its rows."""
        self.load(plan)
        out = self.replay().clone()
        num_rows = plan.num_rows
        expected = self.attend(self.query[:num_rows], scenario.plan())
        assert expected.abs().max() > 0
        atol = 4e-3 * float(expected.float().std())
        torch.testing.assert_close(out[:num_rows], expected, atol=atol, rtol=4e-3)
        assert (out[num_rows:] == 0).all()


def test_recorded_short_and_replayed_long_over_other_trees_with_fewer_rows(
    device: torch.device, record: Record
) -> None:
    recorded = Recorded(record, tree(1, 0, 1), device)
    for scenario in (
        tree(24, 0, 1),
        tree(24, 60, 17),
        tree(3, 100, 5),
        tree(1, 0, 1000),
        random_tree(3, num_rows=20, depth=5, max_tail=300),
        random_tree(4, num_rows=9, depth=3),
        tree(24, 60, 17),
    ):
        recorded.check(scenario, scenario.plan())


def test_recorded_over_a_large_tree_and_replayed_over_a_small_one(
    device: torch.device, record: Record
) -> None:
    recorded = Recorded(record, tree(24, 60, 300), device)
    scenario = tree(1, 0, 1)
    recorded.check(scenario, scenario.plan())
    scenario = tree(24, 5, 3)
    recorded.check(scenario, scenario.plan())


def test_a_plan_that_moves_on_is_replayed_at_its_new_length(
    device: torch.device, record: Record
) -> None:
    scenario = tree(5, 12, 60)
    recorded = Recorded(record, scenario, device)
    plan = scenario.plan()
    for step in range(1, 5):
        lengths = [length + step for length in scenario.kv_lens]
        assert plan.advance(lengths, scenario.block_tables)
        recorded.check(dataclasses.replace(scenario, kv_lens=lengths), plan)


def test_a_replay_twice_gives_the_same_bits(device: torch.device, record: Record) -> None:
    recorded = Recorded(record, tree(1, 0, 1), device)
    recorded.load(random_tree(5, num_rows=20, depth=5, max_tail=300).plan())
    first = recorded.replay().clone()
    assert torch.equal(recorded.replay(), first)
