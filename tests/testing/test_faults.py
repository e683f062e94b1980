"""Every fault point does what its name says, once it is due and as often as it is told."""

from __future__ import annotations

import random
from typing import get_args

import anyio
import pytest

from agentkv import Engine, EngineConfig, EngineDeadError, StepError
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.deterministic import SteppedEngine, simulate
from agentkv.testing.faults import FaultPlan, FaultPoint
from agentkv.testing.faulty import FaultyEngine
from agentkv.testing.witness import WitnessRunner, witness_reply

pytestmark = pytest.mark.anyio

STEP_POINTS: tuple[FaultPoint, ...] = (
    "copy",
    "forward.before",
    "forward.during",
    "forward.after",
    "logits.nan",
    "results.short",
    "results.token",
)


def make(plan: FaultPlan, num_blocks: int = 64, **settings: object) -> FaultyEngine:
    runner = WitnessRunner(num_blocks=num_blocks, block_size=4, tokenizer=byte_tokenizer())
    config = EngineConfig(debug=True, **settings)  # type: ignore[arg-type]  # fields by name
    return FaultyEngine(runner, plan, config=config)


async def use(engine: Engine) -> None:
    """Pass every point in a calm engine."""
    async with engine:
        session = await engine.session(system="s" * 21)
        for fork in (session.fork(), session.fork()):
            await fork.generate("x" * 5, max_tokens=9, stop="never")
        for _ in range(2):
            await engine.generate("y" * 9, max_tokens=2)


async def test_a_calm_engine_passes_every_point() -> None:
    plan = FaultPlan()
    await use(make(plan))
    assert set(plan.passed) == set(get_args(FaultPoint))
    assert not plan.happened


@pytest.mark.parametrize("point", STEP_POINTS)
async def test_a_failing_step_fails_the_call_in_it(point: FaultPoint) -> None:
    plan = FaultPlan()
    async with make(plan) as engine:
        session = await engine.session(system="s" * 21)
        ids = session.token_ids
        plan.fail(point, at=plan.passed[point] + 1)
        with pytest.raises(StepError):
            await session.generate("x", max_tokens=4)
        assert session.token_ids == ids
        reply = await session.generate("x", max_tokens=4)
        assert list(reply.token_ids) == witness_reply(session.token_ids[:-4], 4)
    assert [name for name, _ in plan.happened] == [point]


@pytest.mark.parametrize("point", ["render", "encode", "detokenize"])
async def test_a_tokenizer_that_raises_fails_the_call(point: FaultPoint) -> None:
    plan = FaultPlan().fail(point, error=lambda: KeyError("on purpose"))
    async with make(plan) as engine:
        session = engine.session(system="s")
        with pytest.raises(KeyError):
            await session.generate("x", max_tokens=4)
        await session.generate("x", max_tokens=4)


@pytest.mark.parametrize("point", ["allocate", "preempt", "evict"])
async def test_a_loss_of_memory_changes_no_reply(point: FaultPoint) -> None:
    for at in range(1, 25):
        plan = FaultPlan().fail(point, at=at, count=1 if point == "allocate" else 3)
        async with make(plan) as engine:
            session = engine.session(system="s" * 21)
            for turn in range(2):
                reply = await session.generate(f"{turn}", max_tokens=5)
                assert list(reply.token_ids) == witness_reply(session.token_ids[:-5], 5)


async def test_a_host_without_memory_ends_the_engine_with_the_cause() -> None:
    plan = FaultPlan().fail("share")
    async with make(plan) as engine:
        session = await engine.session(system="s" * 21)
        with pytest.raises(EngineDeadError) as caught:
            await session.fork().generate("x", max_tokens=4)
        assert isinstance(caught.value.cause, MemoryError)


async def test_a_runner_that_does_not_open_says_why() -> None:
    plan = FaultPlan().fail("open", error=lambda: OSError("no such device"))
    with pytest.raises(OSError, match="no such device"):
        async with make(plan):
            pass


async def test_a_runner_that_does_not_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with make(FaultPlan().fail("close")) as engine:
        await engine.generate("x", max_tokens=2)
    assert "could not be freed" in caplog.text


async def test_a_step_that_hangs_goes_on_when_released() -> None:
    plan = FaultPlan().fail("forward.hangs")
    async with make(plan, close_timeout_s=0.05) as engine:
        with anyio.move_on_after(0.05):
            await engine.generate("x", max_tokens=2)
        assert plan.hung.is_set()
        await engine.aclose()
        assert engine.stats().quarantined_blocks
        plan.release()


def test_blocks_come_in_any_order_and_hashes_may_collide() -> None:
    async def program(rng: random.Random) -> list[int]:
        plan = FaultPlan(shuffle=rng.randrange(9), hash_values=1)
        runner = WitnessRunner(num_blocks=64, block_size=4, tokenizer=byte_tokenizer())
        await use(SteppedEngine(runner, rng, plan))
        return [block for batch in runner.batches for block in batch.rows[0].block_ids]

    orders = [simulate(program, seed) for seed in range(3)]
    assert len({tuple(order) for order in orders}) > 1
