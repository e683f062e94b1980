"""Faults of other engines in what a block is: recycled, shared, copied, forked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentkv import Session, SessionClosedError, Status
from agentkv.core.batch import Batch
from agentkv.errors import StepError
from agentkv.testing.driver import CoreDriver
from tests.bench import Bench, expected, make

X, Y, P = [1] * 9, [2] * 13, [7, 8, 9] * 4
HOOKS = ("before_step", "after_write", "after_step")


def test_a_recycled_block_is_no_longer_found_under_its_old_prefix() -> None:
    """nano#163, vllm#4764: a recycled block stayed listed under what it had held before."""
    driver = CoreDriver(num_blocks=4)
    for prompt, cached in ((X, 0), (X, 8), (Y, 0), (X, 0)):
        turn = driver.submit(None, prompt, count=2)
        driver.run()
        driver.verify(turn)
        assert turn.finished.usage.cached_tokens == cached
        driver.core.release(turn.snapshot)
        driver.check()
    driver.verify_idle()


@pytest.mark.parametrize("hit_first", [True, False])
def test_a_cached_block_cannot_be_taken_between_its_finding_and_its_use(hit_first: bool) -> None:
    """vllm#37076, #37164: in one pass a block was found for one request and given to another."""
    driver = CoreDriver(num_blocks=6)
    first = driver.submit(None, P, count=1)
    driver.run()
    driver.core.release(first.snapshot)
    assert driver.core.stats().free_blocks + driver.core.stats().cached_blocks == 6
    rival = driver.submit(None, [5] * 11, count=4) if not hit_first else None
    hit = driver.submit(None, [*P, 3], count=4)
    rival = rival or driver.submit(None, [5] * 11, count=4)
    driver.run()
    driver.verify(hit)
    driver.verify(rival)
    driver.verify_idle([hit.snapshot, rival.snapshot])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("step", range(3))
def test_a_failed_step_leaves_nothing_to_be_found(hook: str, step: int) -> None:
    """vllm#50283, part C: a block whose forward had failed could still be matched."""
    driver = CoreDriver(num_blocks=60, max_num_seqs=1, max_batch_tokens=65)
    prompt = [at % 7 for at in range(140)]
    doomed = driver.submit(None, prompt, count=4)
    for _ in range(step):
        driver.step()
    computed = driver.core.stats().physical_tokens

    def fail(batch: Batch) -> None:
        raise RuntimeError("on purpose")

    setattr(driver.runner, hook, fail)
    driver.step()
    setattr(driver.runner, hook, lambda batch: None)
    assert isinstance(doomed.error, StepError)
    again = driver.submit(None, prompt, count=4)
    driver.run()
    driver.verify(again)
    # What the steps before had computed is there, and nothing of the one that failed.
    assert again.finished.usage.cached_tokens == computed // 4 * 4
    driver.verify_idle([again.snapshot])


def test_diverging_forks_copy_their_partial_block_once_and_no_stale_copy_happens_later() -> None:
    """xLLM-AI/xllm#1984: beams shared a partly filled block, and a copy list outlived a reset."""
    driver = CoreDriver()
    parent = driver.submit(None, [1, 2, 3, 4, 5], count=2)
    driver.run()
    assert parent.snapshot.table is not None
    assert parent.snapshot.table.num_tokens == 6
    children = [driver.submit(parent.snapshot, [at], count=3) for at in (8, 9)]
    own = driver.submit(parent.snapshot, [], count=3)
    driver.run()
    for turn in (*children, own):
        driver.verify(turn)
    copied = sum(len(batch.copies) for batch in driver.runner.batches)
    assert copied == 3
    for child in children:
        driver.core.release(child.snapshot)
    # The same handles again, from an earlier state, whose last block nobody shares in part.
    back = driver.submit(parent.snapshot, [8], keep=4, count=3)
    driver.run()
    driver.verify(back)
    assert sum(len(batch.copies) for batch in driver.runner.batches) == copied
    driver.verify_idle([parent.snapshot, own.snapshot, back.snapshot])


STATES: dict[str, Callable[[Session], object]] = {
    "empty": lambda session: None,
    "with a message": lambda session: session.add("hello"),
    "with one id": lambda session: session.add([256]),
}


@pytest.mark.anyio
@pytest.mark.parametrize("state", STATES)
async def test_a_session_can_be_forked_before_anything_was_computed(
    bench: Bench, state: str
) -> None:
    """sglang#2755: forking a program's state before its first token crashed the backend."""
    session = bench.engine.session()
    STATES[state](session)
    fork = session.fork()
    assert (fork.token_ids, fork.messages) == (session.token_ids, session.messages)
    for each in (fork, session):
        await each.generate("go on", max_tokens=3)
        assert list(each.token_ids[-3:]) == expected(each, 3)
    assert fork.token_ids == session.token_ids


@pytest.mark.anyio
async def test_forks_of_finished_cancelled_and_closed_sessions_are_defined(bench: Bench) -> None:
    """sglang#2755: forks in odd states took the backend down."""
    session = bench.engine.session(system="s")
    await session.generate("one", max_tokens=3)
    with pytest.raises(TimeoutError):
        await session.generate("two", max_tokens=400, timeout=0)
    fork = session.fork()
    assert fork.token_ids == session.token_ids
    async with session.branches(1) as (only,):
        await only.generate("three", max_tokens=3)
        assert list(only.token_ids[-3:]) == expected(only, 3)
    async with session.stream("four", max_tokens=30) as stream:
        running = session.fork()
        assert running.token_ids == session.token_ids
        await stream.stop()
    await session.aclose()
    with pytest.raises(SessionClosedError):
        session.fork()
    for each in (fork, running):
        await each.generate("five", max_tokens=3)
        assert list(each.token_ids[-3:]) == expected(each, 3)
        assert each.status is Status.IDLE


@pytest.mark.anyio
async def test_a_rolled_back_session_writes_into_no_block_of_its_children() -> None:
    """xLLM-AI/xllm#1984: a handle was reset and used again while copies were still listed."""
    engine, runner = make(num_blocks=64)
    async with engine:
        session = await engine.session(messages=[1, 2, 3, 4, 5])
        async with session.checkpoint() as mark:
            await session.generate([6], max_tokens=4)
            child = session.fork()
            session.rollback(mark)
            await session.generate([7], max_tokens=4)
            await child.generate([8], max_tokens=4)
        for each in (session, child):
            assert list(each.token_ids[-4:]) == expected(each, 4)
        targets = [copy.dst for batch in runner.batches for copy in batch.copies]
        assert len(targets) == len(set(targets))
