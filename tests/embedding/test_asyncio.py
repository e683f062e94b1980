"""The engine as users embed it in asyncio programs, under pytest-asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentkv import Engine, EngineConfig, Session
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner, witness_reply

SYSTEM = "You are one of many agents. " * 10


def make_engine() -> Engine:
    runner = WitnessRunner(num_blocks=1024, tokenizer=byte_tokenizer())
    return Engine(lambda _: runner, config=EngineConfig(debug=True))


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    async with make_engine() as opened:
        yield opened


def is_exact(session: Session, count: int) -> bool:
    ids = session.token_ids
    return witness_reply(ids[:-count], count) == list(ids[-count:])


@pytest.mark.asyncio
async def test_agents_are_gathered(engine: Engine) -> None:
    agents = [engine.session(system=SYSTEM) for _ in range(8)]
    await asyncio.gather(
        *(agent.generate(f"job {n}", max_tokens=6) for n, agent in enumerate(agents))
    )
    assert all(is_exact(agent, 6) for agent in agents)


@pytest.mark.asyncio
async def test_timeouts_of_asyncio_leave_the_session_as_it_was(engine: Engine) -> None:
    session = await engine.session(system=SYSTEM)
    ids = session.token_ids
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await session.generate("x", max_tokens=4000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.generate("x", max_tokens=4000), 0)
    assert session.token_ids == ids
    await session.generate("y", max_tokens=3)
    assert is_exact(session, 3)


@pytest.mark.asyncio
async def test_a_storm_of_cancels_changes_no_survivor(engine: Engine) -> None:
    survivors = [engine.session(system=SYSTEM) for _ in range(5)]
    strangers = [engine.session(system=SYSTEM) for _ in range(45)]
    doomed = [asyncio.create_task(s.generate("gone", max_tokens=2000)) for s in strangers]
    running = [asyncio.create_task(s.generate("stay", max_tokens=40)) for s in survivors]
    await asyncio.wait(running[:1])
    for task in doomed:
        task.cancel()
    await asyncio.gather(*running)
    outcomes = await asyncio.gather(*doomed, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert all(is_exact(survivor, 40) for survivor in survivors)
    await engine.tree()
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_plain_program_runs_it() -> None:
    async def program() -> tuple[int, ...]:
        async with make_engine() as engine:
            return (await engine.generate("hello", max_tokens=5)).token_ids

    assert len(asyncio.run(program())) == 5
