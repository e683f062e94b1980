"""Recorded decode steps: which bucket, what is padded, and when a step is left to be run as it is.

The recorder here calls the function again over the fixed buffers, so that a replay computes what a
CUDA graph would, and its results are compared with steps that were not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from agentkv_kernels.device_tiles import NUM_NARROW, NUM_WIDE, DeviceTiles
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment, random_tree
from agentkv_kernels.tiles import TileShape
from torch import Tensor

from agentkv.model import graphs
from agentkv.model.graphs import CaptureError, DecodeGraphs

VOCAB_SIZE = 7
SHAPE = TileShape(group=4, num_kv_heads=2, head_dim=64, itemsize=2)
CPU = torch.device("cpu")


@dataclass
class Recorder:
    """A capture that calls the function again, into one result tensor for each recording."""

    captures: int = 0
    replays: int = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        out = run().clone()

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(run())

        return replay


@dataclass
class Model:
    """A forward that keeps what it was given; a token's logits are its id, position and slot."""

    inputs: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def __call__(self, plan: StepPlan, inputs: Tensor) -> Tensor:
        plan.tile_set(SHAPE)
        self.inputs.append(inputs.clone())
        self.addresses.append(inputs.data_ptr())
        return torch.nn.functional.pad(inputs.T.float(), (0, VOCAB_SIZE - 3), value=torch.nan)


def make(
    model: Model, capture: graphs.Capture, *, max_rows: int = 256, max_context: int = 512
) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        capture,
        max_rows=max_rows,
        max_context=max_context,
        num_blocks=4000,
        block_size=16,
        device=CPU,
    )


def fan(num_rows: int, shared: int, own: int) -> StepPlan:
    """num_rows decode rows over `shared` blocks, `own` tokens each."""
    each = -(-own // 16)
    tables = [
        [*range(shared), *(shared + r * each + i for i in range(each))] for r in range(num_rows)
    ]
    segments = [TreeSegment(None, 0, tuple(range(shared)), tuple(range(num_rows)))]
    lengths = [16 * shared + own] * num_rows
    scenario = Scenario(16, [1] * num_rows, lengths, tables, segments, shared + num_rows * each)
    return scenario.plan()


def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(count, dtype=np.int32) + 100


def expected(plan: StepPlan) -> Tensor:
    columns = ids(plan.num_tokens).astype(np.int64), plan.positions, plan.slot_mapping
    return torch.from_numpy(np.stack(columns, 1)).float()


def loaded(plan: StepPlan) -> DeviceTiles:
    buffers = plan.tile_set(SHAPE).scratch["device"]
    assert isinstance(buffers, DeviceTiles)
    return buffers


def run(decode: DecodeGraphs, plan: StepPlan) -> Tensor | None:
    return decode.run(plan, ids(plan.num_tokens))


def test_the_first_decode_step_runs_as_it_is() -> None:
    model, recorder = Model(), Recorder()
    plan = fan(3, 4, 5)
    logits = run(make(model, recorder), plan)
    assert logits is not None
    assert torch.equal(logits[:, :3], expected(plan))
    assert [tuple(inputs.shape) for inputs in model.inputs] == [(3, 3)]
    assert recorder == Recorder(0, 0)


@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 24), (33, 48), (97, 100), (100, 100)],
)
def test_a_step_runs_in_the_smallest_bucket_that_holds_it(num_rows: int, size: int) -> None:
    model, recorder = Model(), Recorder()
    decode = make(model, recorder, max_rows=100)
    run(decode, fan(2, 0, 5))
    plan = fan(num_rows, 4, 5)
    logits = run(decode, plan)
    assert logits is not None
    assert logits.shape == (num_rows, VOCAB_SIZE)
    assert torch.equal(logits[:, :3], expected(plan))
    assert model.inputs[-1].shape == (3, size)
    assert recorder == Recorder(1, 1)


def test_padding_is_a_row_that_reads_and_writes_nothing() -> None:
    model = Model()
    decode = make(model, Recorder())
    run(decode, fan(2, 0, 5))
    plan = fan(5, 4, 5)
    run(decode, plan)
    assert torch.equal(model.inputs[-1][:, 5:], torch.tensor([[0] * 3, [0] * 3, [-1] * 3]))
    buffers = loaded(plan)
    assert buffers.capacity.tokens == 8
    assert set(buffers.m_ptr[5:].tolist()) == {len(plan.tile_set(SHAPE).m_slot)}


@pytest.mark.parametrize("max_rows", [1, 3, 256, 5000])
def test_no_more_rows_are_recorded_than_ever_run(max_rows: int) -> None:
    decode = make(Model(), Recorder(), max_rows=max_rows)
    most = min(max_rows, graphs.BUCKETS[-1])
    run(decode, fan(1, 0, 5))
    assert run(decode, fan(most, 0, 5)) is not None
    assert run(decode, fan(most + 1, 0, 5)) is None


def test_what_was_recorded_short_serves_longer_rows_other_trees_and_fewer_rows() -> None:
    model, recorder = Model(), Recorder()
    decode = make(model, recorder)
    run(decode, fan(1, 0, 1))
    plans = [fan(8, 0, 1), fan(5, 20, 90), fan(8, 31, 9), random_tree(3, num_rows=6).plan()]
    for plan in plans:
        model.addresses.clear()
        logits = run(decode, plan)
        assert logits is not None
        assert torch.equal(logits[:, :3], expected(plan))
        assert set(model.addresses) == {decode._buckets[8].inputs.data_ptr()}
        tiles = plan.tile_set(SHAPE)
        counts = loaded(plan).counts
        assert counts[[NUM_WIDE, NUM_NARROW]].tolist() == [len(tiles.wide), len(tiles.narrow)]
    assert recorder == Recorder(1, 4)
    assert len({id(loaded(plan)) for plan in plans}) == 1


def test_a_plan_that_moves_on_is_loaded_again() -> None:
    model, recorder = Model(), Recorder()
    decode = make(model, recorder)
    plan = fan(3, 4, 1)
    tables = plan.block_tables
    for step in range(1, 16):
        assert plan.advance([65 + step] * 3, tables)
        logits = run(decode, plan)
        assert logits is not None
        assert torch.equal(logits[:, :3], expected(plan))
    assert recorder == Recorder(1, 14)
    assert loaded(plan).counts[3] == plan.tile_set(SHAPE).delta > 0


def test_steps_with_prefill_rows_are_left_alone() -> None:
    model, recorder = Model(), Recorder()
    decode = make(model, recorder)
    run(decode, fan(1, 0, 5))
    mixed = Scenario(16, [1, 2], [5, 9], [[1], [2]], [], 3).plan()
    assert run(decode, mixed) is None
    assert recorder == Recorder(0, 0)
    assert len(model.inputs) == 1


def deep(num_rows: int, depth: int) -> StepPlan:
    """Rows that all lie under `depth` shared runs, one inside the other."""
    segments = [
        TreeSegment(
            i - 1 if i else None, 64 * i, tuple(range(4 * i, 4 * i + 4)), (*range(num_rows),)
        )
        for i in range(depth)
    ]
    tables = [[*range(4 * depth), 4 * depth + row] for row in range(num_rows)]
    lengths = [64 * depth + 3] * num_rows
    return Scenario(16, [1] * num_rows, lengths, tables, segments, 4 * depth + num_rows).plan()


def test_a_tree_beyond_the_capacity_is_left_alone_and_the_next_one_is_not() -> None:
    model, recorder = Model(), Recorder()
    decode = make(model, recorder, max_context=4096)
    run(decode, fan(1, 0, 5))
    run(decode, fan(8, 4, 5))
    plan = deep(8, 50)
    before = [buffers.counts.clone() for buffers in decode._buckets[8].tiles.values()]
    assert run(decode, plan) is None
    after = [buffers.counts for buffers in decode._buckets[8].tiles.values()]
    assert torch.equal(torch.stack(before), torch.stack(after))
    assert "device" not in plan.tile_set(SHAPE).scratch
    assert len(model.inputs) == 3
    fitting = deep(8, 7)
    logits = run(decode, fitting)
    assert logits is not None
    assert torch.equal(logits[:, :3], expected(fitting))
    assert recorder == Recorder(1, 2)


def test_a_plan_that_outgrows_its_buckets_gets_tiles_of_its_own_size() -> None:
    decode = make(Model(), Recorder())
    plan = fan(3, 4, 1)
    run(decode, plan)
    run(decode, plan)
    assert loaded(plan).capacity.tokens == 4
    buffers = decode._buckets[4].tiles[SHAPE]
    buffers.capacity = buffers.capacity._replace(slots=0)
    assert run(decode, plan) is None
    assert "device" not in plan.tile_set(SHAPE).scratch


def test_a_model_that_cannot_be_recorded_runs_as_it_is_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = []

    def refuse(run: Callable[[], Tensor]) -> graphs.Replay:
        attempts.append(run)
        raise CaptureError("it waits for the device")

    decode = make(Model(), refuse)
    run(decode, fan(1, 0, 5))
    plan = fan(3, 4, 5)
    with caplog.at_level(logging.WARNING, "agentkv"):
        assert run(decode, plan) is None
    assert "it waits for the device" in caplog.text
    assert "device" not in plan.tile_set(SHAPE).scratch
    assert run(decode, fan(3, 4, 5)) is None
    assert len(attempts) == 1


# (query heads, KV heads, head dim) of common models, as a GPU of 132 multiprocessors cuts them.
HEADS = [
    (32, 8, 128),
    (16, 8, 128),
    (28, 4, 128),
    (14, 2, 64),
    (9, 3, 64),
    (32, 32, 128),
    (16, 1, 256),
]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_buckets_have_room_for_usual_trees(heads: tuple[int, int, int], window: int | None) -> None:
    shape = TileShape(
        group=heads[0] // heads[1], num_kv_heads=heads[1], head_dim=heads[2], itemsize=2,
        window=window,
    )  # fmt: skip
    decode = make(Model(), Recorder(), max_context=32768)
    trees = [
        random_tree(seed, num_rows=num_rows, depth=5, max_segment_blocks=60, max_tail=900).plan()
        for num_rows in (1, 4, 16, 64)
        for seed in range(4)
    ]
    trees += [fan(num_rows, 2000, 700) for num_rows in (1, 2, 4, 16, 64, 256)]
    for plan in trees:
        size = next(size for size in graphs.BUCKETS if size >= plan.num_rows)
        buffers = DeviceTiles(decode._capacity(size, shape), CPU)
        assert buffers.fits(plan.tile_set(shape)), plan.num_rows
