"""Streams beside other work: readers that lag, stops that never leak, code inside a block."""

from __future__ import annotations

import anyio
import pytest

from agentkv import Message, Session, SessionBusyError, Status
from tests.bench import Bench, expected

pytestmark = pytest.mark.anyio

SYSTEM = "You are one of many agents. "


async def test_a_lagging_reader_gets_one_larger_delta(bench: Bench) -> None:
    lagging = bench.engine.session(system=SYSTEM)
    async with lagging.stream("slow", max_tokens=40) as stream:
        # Another turn, longer than this one, runs to its end while nobody reads.
        await bench.engine.session(system=SYSTEM).generate("quick", max_tokens=80)
        deltas = [delta async for delta in stream]
    assert len(deltas) == 1
    assert list(deltas[0].token_ids) == expected(lagging, 40)


async def test_a_stop_string_over_token_borders_never_leaks(bench: Bench) -> None:
    plain = await bench.engine.session(system=SYSTEM).generate("go", max_tokens=60)
    stop = plain.text[20:24]
    cut = plain.text[: plain.text.index(stop)]
    session = bench.engine.session(system=SYSTEM)
    text = ""
    ids: list[int] = []
    async with session.stream("go", max_tokens=60, stop=[stop]) as stream:
        async for delta in stream:
            text += delta.text
            ids += delta.token_ids
            assert cut.startswith(text)
        done = await stream.result()
    assert text == done.text == cut
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert ids == expected(session, len(ids))
    assert plain.token_ids[: len(ids)] == tuple(ids)
    assert session.messages[-1] == Message("assistant", cut)


async def test_code_in_a_block_that_awaits_a_session_it_is_in_is_refused(bench: Bench) -> None:
    outer, inner = (bench.engine.session(system=SYSTEM) for _ in range(2))

    async def awaits(session: Session) -> None:
        with pytest.raises(SessionBusyError):
            await session.generate("no")
        with pytest.raises(SessionBusyError):
            await session
        with pytest.raises(SessionBusyError):
            await session.score(["no"])
        with pytest.raises(SessionBusyError):
            await session.stream("no").__aenter__()
        with pytest.raises(SessionBusyError):
            session.add("no")
        with pytest.raises(SessionBusyError):
            session.adopt(session.fork())

    async with outer.stream("a", max_tokens=30), inner.stream("b", max_tokens=30) as stream:
        async with anyio.create_task_group() as group:
            group.start_soon(awaits, outer)
            group.start_soon(awaits, inner)
        await stream.result()
        # Its turn is committed, so the session is free although the block goes on.
        await inner.generate("c", max_tokens=2)
        assert outer.status is Status.STREAMING


async def test_a_session_with_an_open_stream_can_be_read_and_forked(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids = session.token_ids
    async with session.stream("a", max_tokens=30) as stream:
        await anext(stream)
        assert session.token_ids == ids
        assert [message.role for message in session.messages] == ["system"]
        async with session.checkpoint() as mark, session.fork() as fork:
            assert fork.token_ids == ids
            await fork.generate("b", max_tokens=3)
            await stream.result()
            session.rollback(mark)
    assert session.token_ids == ids


async def test_calls_that_waited_behind_a_stream_run_after_it(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    order: list[str] = []

    async def call(name: str) -> None:
        await session.generate(name, max_tokens=3)
        order.append(name)

    async def read() -> None:
        async with session.stream("stream", max_tokens=10) as stream:
            async for _ in stream:
                pass
            order.append("stream")

    async with anyio.create_task_group() as group:
        for start in (lambda: call("first"), read, lambda: call("last")):
            # Each has run to its place in the queue before the next one starts.
            group.start_soon(start)
            await anyio.wait_all_tasks_blocked()
    assert sorted(order) == ["first", "last", "stream"]
    assert [m.content for m in session.messages if m.role == "user"] == ["first", "stream", "last"]
    assert order == ["first", "stream", "last"]


async def test_a_stream_without_a_tokenizer_gives_ids(bench: Bench) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    async with session.stream(max_tokens=6) as stream:
        ids = [token async for delta in stream for token in delta.token_ids]
    assert ids == expected(session, 6)
