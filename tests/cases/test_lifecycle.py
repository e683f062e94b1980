"""Faults of other engines in the life of a request: cancelled, aborted, late, doubled."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import anyio
import pytest

from agentkv import Message, Session, Status
from agentkv.core.sequence import Finished, Request, Snapshot, TokenIds
from agentkv.testing.driver import CoreDriver
from tests.bench import Bench, Gate, expected

LEAVINGS = ("break", "cancel", "drop")


@pytest.mark.anyio
@pytest.mark.parametrize("leaving", LEAVINGS)
async def test_a_reader_that_goes_between_two_tokens_gives_its_blocks_back_in_a_step(
    bench: Bench, leaving: str
) -> None:
    """vllm#1020, #19225: only ordinary exceptions were handled; readers that left leaked."""
    session = await bench.engine.session(system="be brief")
    ids, used = session.token_ids, bench.engine.stats().used_blocks
    gate = Gate(bench.runner, after_steps=3)
    await leave(session, leaving, gate)
    steps = bench.runner.num_steps
    gate.open()
    await bench.settle()
    assert bench.runner.num_steps <= steps + 1
    assert bench.engine.stats().used_blocks == used
    assert (session.token_ids, session.status) == (ids, Status.IDLE)
    await session.generate("again", max_tokens=3)
    assert list(session.token_ids[-3:]) == expected(session, 3)


async def leave(session: Session, leaving: str, gate: Gate) -> None:
    """Read one delta of a long reply and then go, in one of the ways there are."""
    if leaving == "cancel":
        with anyio.CancelScope() as scope:
            async with session.stream("go", max_tokens=200) as stream:
                await anext(stream)
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        return
    stream = session.stream("go", max_tokens=200)
    await stream.__aenter__()
    async for _ in stream:
        break
    if leaving != "drop":
        await stream.__aexit__(None, None, None)


@pytest.mark.parametrize("steps", range(4))
def test_a_request_cancelled_as_it_is_promoted_is_never_run(steps: int) -> None:
    """kekzl/imp#1633: promotion overwrote CANCELLED, and a whole reply was made for nobody."""
    driver = CoreDriver(max_num_seqs=1)
    ahead = driver.submit(None, [1, 2, 3], count=3)
    doomed = driver.submit(None, [4, 5, 6], count=50)
    for _ in range(steps):
        driver.step()
    driver.core.cancel(doomed.request)
    driver.check()
    driver.run()
    driver.verify(ahead)
    assert doomed.request.outcome is None
    assert doomed.request.output_ids == []
    assert {row.seq_id for batch in driver.runner.batches for row in batch.rows} == {1}
    driver.verify_idle([ahead.snapshot])


def test_an_end_is_never_overwritten() -> None:
    """kekzl/imp#1633: terminal states must absorb."""
    driver = CoreDriver()
    turn = driver.submit(None, [1, 2, 3], count=2)
    driver.run()
    outcome, ids = turn.request.outcome, list(turn.request.output_ids)
    driver.core.stop(turn.request)
    driver.core.cancel(turn.request)
    driver.run()
    assert turn.request.outcome is outcome
    assert turn.request.output_ids == ids
    driver.verify_idle([turn.snapshot])


@pytest.mark.anyio
async def test_a_call_cancelled_in_the_tick_in_which_it_was_made_runs_no_step(bench: Bench) -> None:
    """kekzl/imp#1633: cancelled between submission and its first step."""
    session = bench.engine.session(system="s")
    gate = Gate(bench.runner)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await session.generate("never", max_tokens=50)
    gate.open()
    await bench.settle()
    assert bench.runner.num_steps <= 1
    assert bench.engine.stats().used_blocks == 0
    assert (session.token_ids, session.messages) == ((), (Message("system", "s"),))


@pytest.mark.anyio
@pytest.mark.parametrize("after_steps", [0, 1, 5, 7])
async def test_a_cancel_that_the_step_thread_learns_late_leaves_no_output_and_no_orphan(
    bench: Bench, after_steps: int
) -> None:
    """sglang#36333, #36418, #37833: client state went first, then the abort was for nobody."""
    session = await bench.engine.session(system="be brief")
    ids, used = session.token_ids, bench.engine.stats().used_blocks
    gate = Gate(bench.runner, after_steps=after_steps)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(never_returns, session)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    # The step that runs now was begun for the call and ends after it.
    assert (session.token_ids, session.status) == (ids, Status.IDLE)
    gate.open()
    await bench.settle()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, used)
    assert session.token_ids == ids
    assert session._host.worker._calls == {}


async def never_returns(session: Session) -> None:
    await session.generate("x", max_tokens=8)
    raise AssertionError("a cancelled call returned")


class Interrupted:
    """Runs a coroutine on asyncio and throws a cancellation in at the await that `when` chooses.

    The clean-up that follows may await nothing: there a second cancellation would find it.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, object], when: Callable[[int], bool]) -> None:
        self.was_thrown = False
        self._coroutine = coroutine
        self._when = when

    def __await__(self) -> Generator[Any, Any, object]:
        waits = self._coroutine.__await__()
        for number in itertools.count():
            try:
                wanted = waits.send(None)
            except StopIteration as end:
                return end.value
            if self._when(number):
                self.was_thrown = True
                with pytest.raises(asyncio.CancelledError):
                    waits.throw(asyncio.CancelledError())
                return None
            yield wanted
        raise AssertionError("numbers do not end")


USES = ("generate", "warm", "score", "stream", "branches")


async def use(session: Session, name: str) -> None:
    """One turn of a kind, from its first await to its last."""
    if name == "generate":
        await session.generate("x", max_tokens=3)
    elif name == "warm":
        session.add("y")
        await session
    elif name == "score":
        await session.score(["a", "bc"])
    elif name == "stream":
        async with session.stream("x", max_tokens=3) as stream:
            async for _ in stream:
                await asyncio.sleep(0)
    else:
        async with session.branches(2) as branches:
            for branch in branches:
                await branch.generate("x", max_tokens=2)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", USES)
async def test_clean_up_awaits_nothing_so_that_no_second_cancel_can_stop_it(
    bench: Bench, name: str
) -> None:
    """ai-dynamo/dynamo#8768, #8624: the abort was itself cancelled where it awaited."""
    session = await bench.engine.session(system="s")
    ids, used = session.token_ids, bench.engine.stats().used_blocks
    for at in range(200):
        fork = session.fork()
        interrupted = Interrupted(use(fork, name), at.__eq__)
        await interrupted
        if not interrupted.was_thrown:
            break
        assert fork.token_ids[: len(ids)] == ids
        assert fork.status is Status.IDLE
        await fork.aclose()
        await bench.settle()
        assert bench.engine.stats().used_blocks == used
    assert 1 <= at < 199


def test_aborts_of_unknown_and_ended_requests_and_late_results_are_ignored() -> None:
    """vllm#18485, LMCache#3688, #4185: an abort before allocation, or for a removed id, killed."""
    driver = CoreDriver()
    unknown = Request(Snapshot(TokenIds.EMPTY), [1], max_new_tokens=1)
    ended = driver.submit(None, [1, 2], count=2)
    driver.run()
    early = driver.submit(None, [3, 4], count=2)
    for request in (unknown, ended.request, early.request):
        for _ in range(2):
            driver.core.cancel(request)
            driver.core.stop(request)
            driver.check()
    assert early.request.outcome is None
    driver.core.release(Snapshot(TokenIds.EMPTY))
    after = driver.submit(None, [5, 6], count=3)
    driver.run()
    driver.verify(after)
    assert isinstance(ended.request.outcome, Finished)
    driver.verify_idle([ended.snapshot, after.snapshot])


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_result_for_a_call_that_is_gone_is_released(bench: Bench) -> None:
    """LMCache#3688, #4185: a completion that came late named an id that had been removed."""
    session = await bench.engine.session(system="be brief")
    used, worker = bench.engine.stats().used_blocks, session._host.worker
    published = threading.Event()
    publish = worker._publish

    def tell(*deliveries: Callable[[], object]) -> None:
        publish(*deliveries)
        published.set()

    worker._publish = tell  # type: ignore[method-assign]  # to see when the thread has ended a step

    def is_over_but_not_delivered(number: int) -> bool:
        # The loop stands still here, so that nothing is delivered before the cancellation.
        return bool(worker._calls) and published.wait(20)

    published.clear()
    interrupted = Interrupted(session.generate("x", max_tokens=1), is_over_but_not_delivered)
    await interrupted
    assert interrupted.was_thrown
    await bench.settle()
    assert bench.engine.stats().used_blocks == used
    await session.generate("still here", max_tokens=2)
    assert list(session.token_ids[-2:]) == expected(session, 2)
