"""Faults of other engines in going on: deadlock, endless retries, starvation, lost wake-ups."""

from __future__ import annotations

import anyio
import pytest

from agentkv import ContextLengthError, OutOfBlocksError, Session
from agentkv.core.scheduler import MAX_PREEMPTIONS
from agentkv.testing.driver import CoreDriver
from tests.bench import Bench, Gate, expected, make

anyio_test = pytest.mark.anyio


@anyio_test
async def test_what_fits_the_model_but_not_the_pool_is_refused_and_blocks_nobody() -> None:
    """vllm#39734: such a request waited for ever, and everything behind it too."""
    engine, runner = make(num_blocks=2)
    async with engine:
        for ids, max_tokens in (([1] * 33, None), ([1] * 32, None), ([1] * 20, 13)):
            with pytest.raises(ContextLengthError) as caught:
                await engine.session(messages=ids).generate(max_tokens=max_tokens)
            assert caught.value.limit == 32
        assert runner.num_steps == 0
        small = engine.session(messages=[1] * 8)
        await small.generate(max_tokens=4)
        assert list(small.token_ids[-4:]) == expected(small, 4)


@anyio_test
async def test_samples_that_fit_together_only_by_sharing_their_prompt_run() -> None:
    """vllm#39734: admission must count a shared prefix once."""
    engine, _ = make(num_blocks=10)
    async with engine:
        prompt = [1] * 96
        many = await engine.generate(prompt, n=4, max_tokens=16, temperature=1.0)
        assert [len(sample.token_ids) for sample in many.samples] == [16] * 4
        with pytest.raises(OutOfBlocksError):
            await engine.generate(prompt, n=5, max_tokens=16)


@pytest.mark.parametrize("num_blocks", [13, 14, 16])
def test_half_of_the_memory_two_long_sequences_need_is_enough_for_both(num_blocks: int) -> None:
    """inference-sim#297, #963: one request met 173,622 failed allocations, evicted and requeued."""
    driver = CoreDriver(num_blocks=num_blocks)
    turns = [driver.submit(None, [at] * 4, count=44, key=(at, 0)) for at in range(2)]
    sequences = list(driver.core._sequences.values())
    highest, since = 0, 0
    while driver.core.has_work:
        driver.step()
        furthest = max(sequence.seen for sequence in sequences)
        since = 0 if furthest > highest else since + 1
        highest = max(highest, furthest)
        # The one that runs goes on; the other then recomputes and catches up.
        assert since <= 48
    for turn, sequence in zip(turns, sequences, strict=True):
        driver.verify(turn)
        assert sequence.num_preemptions <= MAX_PREEMPTIONS
    assert driver.core.stats().preemptions > 0
    assert driver.core.stats().steps <= 2 * 48 * (1 + MAX_PREEMPTIONS)
    driver.verify_idle([turn.snapshot for turn in turns])


@anyio_test
async def test_readers_in_reverse_order_get_their_own_tokens_and_an_end(bench: Bench) -> None:
    """hf#42943, #42942: one queue with put-back starved readers, and iterations had no end."""
    sessions = [bench.engine.session(messages=[at]) for at in range(50)]
    read: dict[int, list[int]] = {}

    async def consume(at: int) -> None:
        ids: list[int] = []
        async with sessions[at].stream(max_tokens=5, timeout=30) as stream:
            num_deltas = 0
            async for delta in stream:
                ids += delta.token_ids
                num_deltas += 1
        assert num_deltas <= 5
        read[at] = ids

    async with anyio.create_task_group() as group:
        for at in reversed(range(50)):
            group.start_soon(consume, at)
    for at, session in enumerate(sessions):
        assert read[at] == expected(session, 5)


@anyio_test
@pytest.mark.parametrize("cancelled", range(5))
@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_waiter_cancelled_as_its_turn_comes_wakes_the_next(
    bench: Bench, cancelled: int, cancel_first: bool
) -> None:
    """cpython#90155, #1031, anyio#1145: the one cancelled at the hand-over kept the wake-up."""
    session = await bench.engine.session(system="s")
    holder, *waiters = [anyio.CancelScope() for _ in range(6)]
    said: list[str] = []
    gate = Gate(bench.runner)

    async def call(scope: anyio.CancelScope, text: str) -> None:
        with scope:
            await session.generate(text, max_tokens=2)
            said.append(text)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(call, holder, "holder")
            await anyio.wait_all_tasks_blocked()
            for at, scope in enumerate(waiters):
                group.start_soon(call, scope, str(at))
            await anyio.wait_all_tasks_blocked()
            # In one tick the lock is given up and one of those that wait for it goes.
            first, second = holder, waiters[cancelled]
            for scope in (second, first) if cancel_first else (first, second):
                scope.cancel()
            gate.open()
    others = [str(at) for at in range(5) if at != cancelled]
    assert sorted(said) == others
    assert [m.content for m in session.messages if m.role == "user"] == said
    assert list(session.token_ids[-2:]) == expected(session, 2)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_full_pool_of_live_sessions_goes_on_without_endless_retries(block_size: int) -> None:
    """llama.cpp#4185, #6603, ollama#2048: a full cache was retried for ever, or ended the loop."""
    driver = CoreDriver(num_blocks=32 // block_size, block_size=block_size)
    first = [driver.submit(None, [at] * 6, count=2) for at in range(4)]
    driver.run()
    sessions = [turn.snapshot for turn in first]
    assert driver.core.stats().free_blocks == 32 // block_size - 4 * -(-7 // block_size)
    for _ in range(3):
        steps = driver.core.stats().steps
        turns = [driver.submit(base, [7], count=1) for base in sessions]
        driver.run()
        for turn, base in zip(turns, sessions, strict=True):
            driver.verify(turn)
            driver.core.release(base)
        # Each was tried a bounded number of times, though not all fit at once.
        assert driver.core.stats().steps - steps <= 4 * (1 + MAX_PREEMPTIONS)
        sessions = [turn.snapshot for turn in turns]
    after = driver.submit(None, [9] * 10, count=3)
    driver.run()
    driver.verify(after)
    driver.verify_idle([*sessions, after.snapshot])


@anyio_test
async def test_sessions_that_fill_the_pool_go_on_one_token_each() -> None:
    """llama.cpp#4185: the server stopped answering once live conversations filled its cache."""
    engine, _ = make(num_blocks=16)
    async with engine:
        sessions = [engine.session(messages=[at] * 60) for at in range(4)]
        for session in sessions:
            await session
        async with anyio.create_task_group() as group:
            for session in sessions:
                group.start_soon(one_more_token, session)
        fresh = engine.session(messages=[9] * 40)
        await one_more_token(fresh)


async def one_more_token(session: Session) -> None:
    """A turn of one token, which is the witness's."""
    with anyio.fail_after(20):
        await session.generate([5], max_tokens=1)
    assert list(session.token_ids[-1:]) == expected(session, 1)
