"""Streams beside other work: readers that lag, stops that never leak, code inside a block."""

from __future__ import annotations

import anyio
import pytest

from agentkv import (
    AgentKVError,
    ContextLengthError,
    Message,
    Session,
    SessionBusyError,
    Status,
    StepError,
    Stream,
)
from agentkv.core.batch import Batch
from tests.bench import Bench, Gate, expected

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


async def test_a_whole_reply_is_discarded_if_its_block_is_left_before_it_was_read(
    bench: Bench,
) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids, used = session.token_ids, bench.engine.stats().used_blocks
    async with session.stream("x", max_tokens=4):
        await bench.engine.generate("longer", max_tokens=40)
        assert bench.engine.stats().running == 0
    assert (session.token_ids, len(session.messages)) == (ids, 1)
    await bench.settle()
    assert bench.engine.stats().used_blocks == used


async def test_a_stream_that_is_refused_lets_the_next_call_run(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    for _ in range(2):
        with pytest.raises(ContextLengthError):
            await session.stream("x", max_tokens=10**6).__aenter__()
        assert session.status is Status.IDLE
    with anyio.fail_after(20):
        await session.generate("x", max_tokens=2)


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
        with pytest.raises(SessionBusyError, match="leave its block first, or use a fork"):
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


async def test_nobody_waits_for_the_end_of_a_stream(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    order: list[str] = []

    async def call(name: str) -> None:
        try:
            await session.generate(name, max_tokens=3)
            order.append(name)
        except SessionBusyError:
            order.append(f"{name} is refused")

    async def read() -> None:
        async with session.stream("stream", max_tokens=10) as stream:
            # It came before the stream was open, and its wait could be what the reader waits for.
            await is_refused.wait()
            await stream.result()
            order.append("stream")

    async def call_last() -> None:
        await call("last")
        is_refused.set()

    gate, is_refused = Gate(bench.runner), anyio.Event()
    async with anyio.create_task_group() as group:
        for start in (lambda: call("first"), read, call_last):
            # Each has run to its place in the queue before the next one starts.
            group.start_soon(start)
            await anyio.wait_all_tasks_blocked()
        gate.open()
    assert order == ["first", "last is refused", "stream"]
    assert [m.content for m in session.messages if m.role == "user"] == ["first", "stream"]
    await call("next")


async def test_a_stream_without_a_tokenizer_gives_ids(bench: Bench) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    async with session.stream(max_tokens=6) as stream:
        ids = [token async for delta in stream for token in delta.token_ids]
    assert ids == expected(session, 6)


@pytest.mark.parametrize("ends_by", ["stop", "result"])
async def test_a_reader_ends_when_another_task_ends_the_stream(bench: Bench, ends_by: str) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    read: list[int] = []

    async def reads(stream: Stream) -> None:
        async for delta in stream:
            read.extend(delta.token_ids)

    gate = Gate(bench.runner, after_steps=5)
    async with session.stream(max_tokens=60) as stream:
        async with anyio.create_task_group() as group:
            group.start_soon(reads, stream)
            group.start_soon(reads, stream)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(getattr(stream, ends_by))
            gate.open()
        done = await stream.result()
    assert session.token_ids[3:] == done.token_ids
    assert list(done.token_ids[: len(read)]) == read
    assert session.status is Status.IDLE


@pytest.mark.parametrize("fails_by", [StepError, TimeoutError])
async def test_a_stream_that_failed_is_over_before_its_block_is(
    bench: Bench, fails_by: type[Exception]
) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids, gate = session.token_ids, Gate(bench.runner)
    timeout = 0.05 if fails_by is TimeoutError else None
    async with session.stream("x", max_tokens=4, timeout=timeout) as stream:
        if fails_by is StepError:
            bench.runner.after_step = explode
            gate.open()
        with pytest.raises(fails_by):
            await stream.result()
        bench.runner.after_step = lambda batch: None
        gate.open()
        assert (stream.is_open, session.status, session.token_ids) == (False, Status.IDLE, ids)
        with anyio.fail_after(20):
            await session.generate("y", max_tokens=2)
    assert list(session.token_ids[-2:]) == expected(session, 2)


def explode(batch: Batch) -> None:
    raise RuntimeError("on purpose")


async def test_every_reader_of_a_failed_stream_is_told(bench: Bench) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    errors: list[Exception] = []

    async def waits(stream: Stream) -> None:
        try:
            await stream.result()
        except AgentKVError as error:
            errors.append(error)

    def explode(batch: Batch) -> None:
        raise RuntimeError("boom")

    gate = Gate(bench.runner, after_steps=5)
    async with session.stream(max_tokens=60) as stream, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(waits, stream)
        await anyio.wait_all_tasks_blocked()
        bench.runner.before_step = explode
        gate.open()
    assert [type(error) for error in errors] == [StepError] * 3
    assert len({id(error) for error in errors}) == 3
    assert session.token_ids == ()


async def test_a_cancelled_read_takes_nothing_away(bench: Bench) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    gate = Gate(bench.runner, after_steps=5)
    read: list[int] = []
    async with session.stream(max_tokens=30) as stream:
        while len(read) < 5:
            read += (await anext(stream)).token_ids
        with anyio.move_on_after(0.001) as scope:
            await anext(stream)
        assert scope.cancelled_caught
        gate.open()
        async for delta in stream:
            read += delta.token_ids
    assert read == expected(session, 30)


async def test_a_late_reader_is_out_of_time_even_if_the_reply_is_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    clock = anyio.current_time
    for is_read in (True, False):
        async with session.stream(max_tokens=5, timeout=60) as stream:
            await bench.engine.generate([5], max_tokens=20)
            with monkeypatch.context() as patch:
                patch.setattr(anyio, "current_time", lambda: clock() + 61)
                with pytest.raises(TimeoutError, match="timeout=60 s"):
                    await (anext(stream) if is_read else stream.result())
        assert session.token_ids == ()
    late = session.stream(max_tokens=5, timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(anyio, "current_time", lambda: clock() + 61)
        with pytest.raises(TimeoutError):
            await late.__aenter__()
    assert session.status is Status.IDLE


async def test_a_stop_token_has_no_text_however_late_the_loop_is_told(bench: Bench) -> None:
    plain = await bench.engine.session(system=SYSTEM).generate("go", max_tokens=30)
    stop_id = next(token for token in plain.token_ids[10:] if 33 <= token < 127)
    session, text = bench.engine.session(system=SYSTEM), ""
    async with session.stream("go", max_tokens=30, stop_token_ids=[stop_id]) as stream:
        async for delta in stream:
            text += delta.text
            # The step thread goes ahead of the loop, which learns of the end only afterwards.
            while (
                stream._turn is not None and stop_id not in stream._turn.calls[0].request.output_ids
            ):
                pass
        done = await stream.result()
    assert done.stop_reason == stop_id
    assert done.token_ids[-1] == stop_id
    assert text == done.text
    assert not text.endswith(chr(stop_id))
