"""An engine's life: opening, closing, dying, its one event loop, its threads and its errors."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import anyio
import anyio.to_thread
import pytest

from agentkv import (
    AgentKVError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineDeadError,
    EngineNotOpenError,
    OutOfBlocksError,
    Session,
    StepError,
    Stream,
    WrongLoopError,
)
from agentkv.core.batch import Batch
from agentkv.core.core import Core
from agentkv.core.protocols import FatalRunnerError
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner
from tests.bench import Bench, from_thread, make

pytestmark = pytest.mark.anyio

SYSTEM = "You are one of many agents. " * 20


async def test_a_dead_engine_tells_every_waiter_why() -> None:
    engine, runner = make()
    errors: list[EngineDeadError] = []

    def explode(batch: Batch) -> None:
        raise FatalRunnerError("the device is gone")

    runner.before_step = explode

    async def call(session: Session) -> None:
        with pytest.raises(EngineDeadError) as caught:
            await session.generate("x", max_tokens=4)
        errors.append(caught.value)

    async with engine:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(call, engine.session(system=SYSTEM))
        with pytest.raises(EngineDeadError):
            engine.session(system="x")
    assert len({id(error) for error in errors}) == 5
    assert all(isinstance(error.cause, FatalRunnerError) for error in errors)


async def test_closing_ends_every_call_and_waits_no_longer_than_told() -> None:
    engine, runner = make(close_timeout_s=0.05)
    hung, release = threading.Event(), threading.Event()

    def hang(batch: Batch) -> None:
        hung.set()
        release.wait(20)

    runner.before_step = hang
    try:
        async with engine:
            async with anyio.create_task_group() as group:
                group.start_soon(refused, engine.session(system=SYSTEM))
                await anyio.to_thread.run_sync(hung.wait)
                await engine.aclose()
            assert engine.stats().quarantined_blocks > 0
            await engine.aclose()
    finally:
        release.set()


async def test_an_engine_that_runs_no_step_is_not_said_to_hang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_free = threading.Event()

    class SlowToFree(WitnessRunner):
        def close(self) -> None:
            may_free.wait(20)
            super().close()

    runner = SlowToFree(num_blocks=64, tokenizer=byte_tokenizer())
    engine = Engine(lambda _: runner, config=EngineConfig(debug=True, close_timeout_s=0.0))
    async with engine, anyio.create_task_group() as group:
        session = engine.session(system=SYSTEM)
        await session.generate("x", max_tokens=4)
        group.start_soon(engine.aclose)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        may_free.set()
    assert runner.is_closed
    assert not engine.stats().used_blocks
    assert not caplog.records


async def refused(session: Session) -> None:
    with pytest.raises(EngineClosedError):
        await session.generate("x", max_tokens=4)


async def test_an_engine_is_used_open_and_on_its_own_loop() -> None:
    engine, _ = make()
    with pytest.raises(EngineNotOpenError):
        engine.session()
    async with engine:
        session = engine.session(system="x")

        def use() -> None:
            with pytest.raises(WrongLoopError):
                session.fork()

        await anyio.to_thread.run_sync(use)
    with pytest.raises(EngineClosedError):
        session.fork()


async def test_callbacks_of_the_loop_are_on_the_loop(bench: Bench) -> None:
    session, done = bench.engine.session(system=SYSTEM), anyio.Event()
    forks: list[Session] = []
    streams: list[Stream] = []

    def callback() -> None:
        forks.append(session.fork())
        session.add("x")
        streams.append(session.stream(timeout=60, max_tokens=3))
        done.set()

    from_thread()(callback)
    await done.wait()
    assert forks[0].parent == session.id
    async with streams[0] as stream:
        assert len((await stream.result()).token_ids) == 3


async def test_a_stream_with_a_timeout_is_refused_off_the_loop(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    with pytest.raises(WrongLoopError):
        await anyio.to_thread.run_sync(lambda: session.stream("x", timeout=60))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_thread_goes_with_the_last_handle(backend: str) -> None:
    runner = WitnessRunner()

    async def opens() -> Session:
        engine = await Engine(lambda _: runner).__aenter__()
        session = await engine.session(messages=[1, 2, 3])
        del engine
        await session.generate([4], max_tokens=2)
        return session

    session = anyio.run(opens, backend=backend)
    assert not runner.is_closed
    del session
    gc.collect()  # trio's runner refers to itself
    for thread in threading.enumerate():
        if thread.name == "agentkv-step":
            thread.join(10)
    assert runner.is_closed


async def test_an_engine_opens_once_and_not_after_it_was_closed() -> None:
    gate = threading.Event()
    runner = WitnessRunner()

    def open_runner(config: EngineConfig) -> WitnessRunner:
        assert gate.wait(20)
        return runner

    engine = Engine(open_runner, config=EngineConfig(close_timeout_s=0.01))
    refused: list[str] = []

    async def opens() -> None:
        try:
            await engine.__aenter__()
        except EngineClosedError as error:
            refused.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(opens)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineClosedError, match="opening"):
            await engine.__aenter__()
        await engine.aclose()
    assert len(refused) == 1
    assert repr(engine) == "<Engine, closed>"
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "agentkv-step":
            thread.join(10)
    assert runner.is_closed


async def test_text_needs_no_thread_of_the_application() -> None:
    runner = WitnessRunner(num_blocks=4096, max_context=65_536, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner) as engine:
        endless = threading.Event()
        limiter = anyio.to_thread.current_default_thread_limiter()

        async def blocks() -> None:
            await anyio.to_thread.run_sync(endless.wait, 60)

        async with anyio.create_task_group() as group:
            for _ in range(int(limiter.total_tokens)):
                group.start_soon(blocks)
            await anyio.wait_all_tasks_blocked()
            try:
                with anyio.fail_after(20):
                    await engine.generate("long " * 4000, max_tokens=2)
            finally:
                endless.set()


@pytest.mark.parametrize(
    "error", [StepError("a", ValueError("b")), OutOfBlocksError(3, 2), ContextLengthError(9, 8)]
)
def test_errors_are_copied_whole(error: AgentKVError) -> None:
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again).keys() == vars(error).keys()
    if isinstance(error, StepError):
        assert error.__cause__ is error.cause


async def test_an_engine_that_debugs_ends_once_its_books_are_wrong(bench: Bench) -> None:
    def spoil(core: Core) -> None:
        core._memory.logical_tokens += 1

    session = bench.engine.session(system=SYSTEM)
    await session._host.worker.inspect(spoil)
    with pytest.raises(EngineDeadError) as caught:
        await session.generate("x", max_tokens=2)
    assert isinstance(caught.value.cause, AssertionError)


async def test_a_runner_is_closed_for_which_no_core_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr("agentkv.worker.Core", fail)
    engine, runner = make()
    with pytest.raises(MemoryError):
        await engine.__aenter__()
    assert runner.is_closed


async def test_handles_that_outlive_their_engine_ask_for_nothing() -> None:
    engine, _ = make()
    async with engine:
        sessions = [await engine.session(system=SYSTEM) for _ in range(3)]
        marks = [session.checkpoint() for session in sessions]
    for session, mark in zip(sessions, marks, strict=True):
        await session.aclose()
        await mark.aclose()
    assert engine._worker is not None
    assert engine._worker._commands.empty()
