"""Whatever is cancelled, fails or times out never happened, and nobody else notices."""

from __future__ import annotations

import anyio
import pytest

from agentkv import AgentKVError, QueueFullError, Session, Status, StepError
from agentkv.core.batch import Batch
from tests.bench import Bench, Gate, expected, from_thread, make

pytestmark = pytest.mark.anyio

SYSTEM = "You are one of many agents. " * 20


async def idle_blocks(bench: Bench) -> int:
    await bench.settle()
    assert bench.engine.stats().running == bench.engine.stats().waiting == 0
    return bench.engine.stats().used_blocks


def cancel_after_a_step(bench: Bench, scope: anyio.CancelScope) -> None:
    """Cancel `scope` on this loop when the next step has run."""
    on_loop = from_thread()

    def cancel(batch: Batch) -> None:
        on_loop(scope.cancel)
        bench.runner.after_step = lambda batch: None

    bench.runner.after_step = cancel


async def test_a_cancelled_warming_changes_nothing(bench: Bench) -> None:
    session = bench.engine.session(messages=[n % 250 for n in range(3000)])
    with anyio.CancelScope() as scope:
        cancel_after_a_step(bench, scope)
        await session
    assert scope.cancelled_caught
    assert session.token_ids == ()
    assert session.usage.prefill_tokens == 0
    assert await idle_blocks(bench) == 0
    await session
    reply = await session.generate([7], max_tokens=4)
    assert reply.usage.prefill_tokens == 2
    assert list(reply.token_ids) == expected(session, 4)


async def test_a_warmed_session_computes_only_what_follows(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    warmed = len(session.token_ids)
    reply = await session.generate("hello", max_tokens=3)
    assert reply.usage.cached_tokens == warmed - 1
    assert bench.engine.stats().prefill_tokens == reply.usage.input_tokens


async def test_a_call_cancelled_while_it_waits_leaves_the_queue(bench: Bench) -> None:
    session, gate, scope = (
        bench.engine.session(system=SYSTEM),
        Gate(bench.runner),
        anyio.CancelScope(),
    )

    async def call(prompt: str) -> None:
        await session.generate(prompt, max_tokens=5)

    async def is_cancelled() -> None:
        with scope:
            await call("never")

    async with anyio.create_task_group() as group:
        group.start_soon(call, "first")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(is_cancelled)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(call, "second")
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert session.status is Status.RUNNING
        gate.open()
    assert [m.content for m in session.messages if m.role == "user"] == ["first", "second"]
    assert session.status is Status.IDLE


async def test_a_wait_for_the_session_counts_in_the_timeout(bench: Bench) -> None:
    session, gate = bench.engine.session(system=SYSTEM), Gate(bench.runner)

    async def call() -> None:
        await session.generate("first", max_tokens=5)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(TimeoutError):
            await session.generate("late", timeout=0.01)
        gate.open()
    assert [m.content for m in session.messages if m.role == "user"] == ["first"]


async def test_a_second_cancel_during_the_first_loses_nothing(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids, held = session.token_ids, await idle_blocks(bench)
    with anyio.CancelScope() as outer, anyio.CancelScope() as inner:
        on_loop = from_thread()

        def cancel(batch: Batch) -> None:
            on_loop(inner.cancel)
            on_loop(outer.cancel)
            bench.runner.after_step = lambda batch: None

        bench.runner.after_step = cancel
        await session.generate("never", max_tokens=4000)
    assert (session.token_ids, session.status) == (ids, Status.IDLE)
    assert await idle_blocks(bench) == held
    reply = await session.generate("after", max_tokens=4)
    assert list(reply.token_ids) == expected(session, 4)


async def test_more_requests_than_may_wait_are_refused() -> None:
    engine, runner = make(max_waiting=3, max_num_seqs=2)
    bench = Bench(engine, runner)
    refused: list[Session] = []

    async def call(session: Session) -> None:
        try:
            await session.generate("x", max_tokens=3)
        except QueueFullError:
            refused.append(session)

    async with engine:
        gate = Gate(bench.runner)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(call, engine.session(system=SYSTEM))
            await anyio.wait_all_tasks_blocked()
            assert len(refused) >= 3
            gate.open()
        for session in refused:
            assert session.messages[-1].role == "system"
            await session.generate("again", max_tokens=3)


async def test_logits_that_are_no_numbers_fail_their_row_alone(bench: Bench) -> None:
    sessions = [await bench.engine.session(system=SYSTEM) for _ in range(4)]
    held = [session.token_ids for session in sessions]
    outcomes: dict[int, str] = {}

    def spoil(batch: Batch) -> None:
        sampling = [row.seq_id for row in batch.rows if row.sample is not None]
        if len(sampling) > 1 and not bench.runner.nan_rows:
            bench.runner.nan_rows = {sampling[1]}

    async def call(index: int) -> None:
        try:
            await sessions[index].generate(f"{index}", max_tokens=6)
            outcomes[index] = "answered"
        except StepError:
            outcomes[index] = "failed"

    async with anyio.create_task_group() as group:
        gate = Gate(bench.runner)
        for index in range(4):
            group.start_soon(call, index)
        await anyio.wait_all_tasks_blocked()
        bench.runner.before_step = spoil
        gate.open()
    bench.runner.before_step = lambda batch: None
    bench.runner.nan_rows = set()
    assert sorted(outcomes.values()) == ["answered"] * 3 + ["failed"]
    for index, session in enumerate(sessions):
        if outcomes[index] == "failed":
            assert session.token_ids == held[index]
            await session.generate("again", max_tokens=6)
        assert session.token_ids[-6:] == tuple(expected(session, 6))


@pytest.mark.parametrize("which", ["the session", "its turn", "the engine"])
async def test_closing_during_a_turn_ends_it_with_a_named_error(bench: Bench, which: str) -> None:
    session = await bench.engine.session(system=SYSTEM)
    neighbour = bench.engine.session(system=SYSTEM)
    gate = Gate(bench.runner)
    errors: list[str] = []

    async def call() -> None:
        try:
            async with session.stream("x", max_tokens=50) as stream:
                if which == "its turn":
                    return
                await stream.result()
        except AgentKVError as error:
            errors.append(type(error).__name__)

    async def goes_on() -> None:
        if which != "the engine":
            await neighbour.generate("y", max_tokens=5)

    async with anyio.create_task_group() as group:
        group.start_soon(goes_on)
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        if which == "the session":
            await session.aclose()
        gate.open()
        if which == "the engine":
            await bench.engine.aclose()
    wanted = {"the session": ["SessionClosedError"], "the engine": ["EngineClosedError"]}
    assert errors == wanted.get(which, [])
    if which != "the engine":
        assert neighbour.token_ids[-5:] == tuple(expected(neighbour, 5))
