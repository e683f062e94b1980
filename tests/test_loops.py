"""One loop owns an engine: others are refused by name, and an engine whose loop is over closes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import pytest

from agentkv import Checkpoint, Engine, Session, Stream, WrongLoopError
from tests.bench import Bench, expected, make


class Handles(NamedTuple):
    """One handle of each kind, in use on the loop that owns them."""

    engine: Engine
    session: Session
    other: Session
    checkpoint: Checkpoint
    stream: Stream


USES: dict[str, Callable[[Handles], Awaitable[Any]]] = {  # Any: their results, never reached
    "Engine.aclose": lambda handles: handles.engine.aclose(),
    "Engine.tree": lambda handles: handles.engine.tree(),
    "Engine.generate": lambda handles: handles.engine.generate("x"),
    "Session.generate": lambda handles: handles.other.generate("x"),
    "Session.score": lambda handles: handles.other.score(["x"]),
    "Session.__await__": lambda handles: handles.other,
    "Session.aclose": lambda handles: handles.other.aclose(),
    "Session.__aexit__": lambda handles: handles.other.__aexit__(None, None, None),
    "Session.stream": lambda handles: handles.other.stream("x").__aenter__(),
    "Session.branches": lambda handles: handles.other.branches(2).__aenter__(),
    "Checkpoint.aclose": lambda handles: handles.checkpoint.aclose(),
    "Stream.__anext__": lambda handles: anext(handles.stream),
    "Stream.result": lambda handles: handles.stream.result(),
    "Stream.stop": lambda handles: handles.stream.stop(),
    "Stream.__aexit__": lambda handles: handles.stream.__aexit__(None, None, None),
}


@asynccontextmanager
async def handles_of(bench: Bench) -> AsyncIterator[Handles]:
    session = bench.engine.session(system="s")
    async with session.stream("x", max_tokens=40) as stream:
        other = bench.engine.session(system="t")
        yield Handles(bench.engine, session, other, other.checkpoint(), stream)
        await stream.result()


async def refused(use: Callable[[Handles], Awaitable[Any]], handles: Handles) -> None:
    """The use is refused at once, on whatever loop this runs."""
    with anyio.fail_after(10), pytest.raises(WrongLoopError, match=r"belongs.*from_thread"):
        await use(handles)


@pytest.mark.anyio
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_every_use_from_another_loop_is_refused_and_changes_nothing(
    bench: Bench, backend: str
) -> None:
    async with handles_of(bench) as handles:
        for use in USES.values():
            run = partial(anyio.run, refused, use, handles, backend=backend)
            await anyio.to_thread.run_sync(run)
        await handles.other.generate("y", max_tokens=3)
        assert list(handles.other.token_ids[-3:]) == expected(handles.other, 3)
    assert list(handles.session.token_ids[-40:]) == expected(handles.session, 40)


@pytest.mark.parametrize("first", ["asyncio", "trio"])
@pytest.mark.parametrize("second", ["asyncio", "trio"])
def test_what_a_loop_that_is_over_has_left_can_be_closed_from_another(
    first: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = make(close_timeout_s=20)

    async def leave() -> tuple[Session, Checkpoint]:
        await engine.__aenter__()
        session = engine.session(system="s")
        await session.generate("x", max_tokens=2)
        return session, session.checkpoint()

    async def close(session: Session, checkpoint: Checkpoint) -> None:
        with anyio.fail_after(10):
            with pytest.raises(WrongLoopError):
                await session.generate("y")
            await checkpoint.aclose()
            await session.aclose()
            await engine.aclose()
            await engine.aclose()

    session, checkpoint = anyio.run(leave, backend=first)
    anyio.run(close, session, checkpoint, backend=second)
    assert runner.is_closed
    assert caplog.text == ""
