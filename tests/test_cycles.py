"""Whatever becomes of a call, nothing is left for the garbage collector: a dropped session goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from agentkv import (
    AgentKVError,
    Engine,
    EngineConfig,
    InvalidOptionError,
    Session,
    SessionClosedError,
)
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.faults import FaultPlan, FaultPoint
from agentkv.testing.faulty import FaultyEngine
from agentkv.testing.witness import WitnessRunner

pytestmark = pytest.mark.anyio

Use = Callable[[Session], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def succeeds(session: Session) -> None:
    await session.generate("x", max_tokens=3)


async def is_streamed(session: Session) -> None:
    async with session.stream("x", max_tokens=3) as stream:
        async for _ in stream:
            pass


async def is_left_early(session: Session) -> None:
    async with session.stream("x", max_tokens=50) as stream:
        async for _ in stream:
            break


async def is_refused(session: Session) -> None:
    with pytest.raises(InvalidOptionError):
        await session.generate("x", top_p=7)


async def times_out(session: Session) -> None:
    with pytest.raises(TimeoutError):
        await session.generate("x", max_tokens=3, timeout=0)


async def is_cancelled(session: Session) -> None:
    with anyio.move_on_after(0):
        await session.generate("x", max_tokens=3)


async def fails(session: Session) -> None:
    with pytest.raises((AgentKVError, RuntimeError)):
        await session.generate("x", max_tokens=3, stop="never")


async def fails_as_a_stream(session: Session) -> None:
    with pytest.raises((AgentKVError, RuntimeError)):
        await is_streamed(session)


async def is_closed_meanwhile(session: Session) -> None:
    async def call() -> None:
        with pytest.raises(SessionClosedError):
            await session.generate("x", max_tokens=3000)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await session.aclose()


@pytest.mark.parametrize(
    ("use", "point"),
    [
        *((use, None) for use in (succeeds, is_streamed, is_left_early, is_refused, times_out)),
        *((use, None) for use in (is_cancelled, is_closed_meanwhile)),
        *((use, p) for use in (fails, fails_as_a_stream) for p in ("forward.before", "render")),
        (fails, "detokenize"),
        (fails, "logits.nan"),
    ],
)
async def test_a_dropped_session_goes_at_once(use: Use, point: FaultPoint | None) -> None:
    plan = FaultPlan() if point is None else FaultPlan().fail(point)
    runner = WitnessRunner(tokenizer=byte_tokenizer())
    async with FaultyEngine(runner, plan, config=EngineConfig(debug=True)) as engine:
        session = engine.session(system="s" * 40)
        await use(session)
        # The loop holds a cancellation until the task gives way, the step thread a failure until
        # its step is over.
        await engine.tree()
        gone = weakref.ref(session)
        del session
        assert gone() is None
        await engine.tree()
        await engine.tree()
        assert engine.stats().used_blocks == 0


async def test_a_call_that_the_engine_ended_keeps_no_session() -> None:
    runner = WitnessRunner(tokenizer=byte_tokenizer())
    gone: list[weakref.ref[Session]] = []

    async def call(engine: Engine) -> None:
        session = engine.session(system="s")
        gone.append(weakref.ref(session))
        with pytest.raises(AgentKVError):
            await session.generate("x", max_tokens=3000)

    async with Engine(lambda _: runner) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(call, engine)
            await anyio.wait_all_tasks_blocked()
            await engine.aclose()
    assert gone[0]() is None
