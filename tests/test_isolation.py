"""Namespaces: no path on which a prefix is found leads from one into another."""

from __future__ import annotations

import random

import anyio
import pytest

from agentkv import NamespaceError, Session
from agentkv.core.plan import Plan
from agentkv.core.sequence import Finished, Request
from agentkv.kv.block_pool import BlockPool
from agentkv.kv.block_table import BlockTable
from agentkv.kv.memory import KVMemory
from agentkv.testing.driver import CoreDriver
from tests.bench import Bench, Gate, expected

PROMPT = [7 * at % 250 for at in range(100)]
OTHERS = (None, "", "None", "b", "a\0", "A", " a")


async def cached(session: Session) -> int:
    """How much of a turn's input was reused; its reply is the witness's."""
    reply = await session.generate([1], max_tokens=2)
    assert list(session.token_ids[-2:]) == expected(session, 2)
    return reply.usage.cached_tokens


@pytest.mark.anyio
@pytest.mark.parametrize("other", OTHERS, ids=repr)
async def test_the_prefix_cache_shares_within_a_namespace_alone(
    bench: Bench, other: str | None
) -> None:
    """sglang#37160, llm-d-router#1389, vllm#44250: the key of isolation was dropped in one tier."""
    assert await cached(bench.engine.session(messages=PROMPT, namespace="a")) == 0
    assert await cached(bench.engine.session(messages=PROMPT, namespace="a")) == 96
    assert await cached(bench.engine.session(messages=PROMPT, namespace=other)) == 0


@pytest.mark.anyio
async def test_forks_checkpoints_and_branches_stay_in_their_namespace(bench: Bench) -> None:
    session = await bench.engine.session(messages=PROMPT, namespace="a")
    async with session.checkpoint() as mark, session.branches(2) as branches:
        fork = session.fork()
        # Each publishes a block of its own, of the same tokens as the stranger's.
        for each in (session, fork, *branches):
            await each.generate([9] * 32, max_tokens=1)
        session.rollback(mark)
        await session.generate([8] * 32, max_tokens=1)
        for tail in ([9] * 32, [8] * 32):
            stranger = bench.engine.session(messages=[*PROMPT, *tail], namespace=f"b{tail[0]}")
            assert await cached(stranger) == 0
            await stranger.aclose()
            friend = bench.engine.session(messages=[*PROMPT, *tail], namespace="a")
            assert await cached(friend) >= 128


@pytest.mark.anyio
async def test_one_shot_calls_share_with_the_namespace_they_name(bench: Bench) -> None:
    session = await bench.engine.session(messages=PROMPT, namespace="a")
    await session.score(["x" * 40])
    many = await bench.engine.generate(PROMPT, n=2, max_tokens=2)
    assert many.usage.cached_tokens == 0
    for namespace, shared in (("a", 96), ("b", 0), (None, 96)):
        one = await bench.engine.generate(PROMPT, max_tokens=2, namespace=namespace)
        assert one.usage.cached_tokens == shared


@pytest.mark.anyio
async def test_no_session_adopts_or_rolls_back_into_another_namespace(bench: Bench) -> None:
    ours = await bench.engine.session(messages=PROMPT, namespace="a")
    theirs = await bench.engine.session(messages=PROMPT, namespace="b")
    ids = ours.token_ids
    with pytest.raises(NamespaceError):
        ours.adopt(theirs)
    with pytest.raises(NamespaceError):
        theirs.adopt(ours.fork())
    assert (ours.token_ids, await cached(theirs)) == (ids, 99)


@pytest.mark.anyio
@pytest.mark.parametrize(("namespaces", "shared"), [(("a", "a"), 96), (("a", "b"), 0)])
async def test_work_in_flight_is_shared_within_a_namespace_alone(
    bench: Bench, namespaces: tuple[str, str], shared: int
) -> None:
    before = bench.engine.stats().prefill_tokens
    sessions = [bench.engine.session(messages=PROMPT, namespace=name) for name in namespaces]
    gate = Gate(bench.runner)
    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(cached, session)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    computed = bench.engine.stats().prefill_tokens - before
    assert computed == 2 * (len(PROMPT) + 1) - shared


def test_a_preempted_sequence_goes_on_from_its_own_namespace_alone() -> None:
    driver = CoreDriver(num_blocks=64)
    theirs = driver.submit(None, PROMPT[:40], count=3, namespace="b")
    driver.run()
    ours = driver.submit(None, PROMPT[:40], count=9, namespace="a")
    for _ in range(3):
        driver.step()
    sequence = driver.core._sequences[ours.request]
    driver.core._scheduler._preempt(Plan(0), sequence)
    # All that was cached of ours goes; theirs is held.
    driver.core._memory.cache.evict(64)
    driver.run()
    driver.verify(ours)
    assert ours.finished.usage.cached_tokens == 0
    assert ours.finished.usage.recomputed_tokens >= 40
    driver.verify_idle([theirs.snapshot, ours.snapshot])


def test_a_turn_on_another_namespaces_snapshot_is_refused_by_the_core_too() -> None:
    driver = CoreDriver()
    base = driver.submit(None, PROMPT[:9], count=1, namespace="a")
    driver.run()
    with pytest.raises(NamespaceError):
        driver.core.submit(Request(base.snapshot, [1], namespace="b"))
    # Nothing of the snapshot is kept, so there is nothing to refuse, and nothing to be found.
    fresh = Request(base.snapshot, PROMPT[:9], keep=0, max_new_tokens=1, namespace="b")
    driver.core.submit(fresh)
    driver.run()
    assert isinstance(fresh.outcome, Finished)
    assert fresh.outcome.usage.cached_tokens == 0


@pytest.mark.parametrize("num_hashes", [None, 1, 2])
def test_no_look_up_of_many_crosses_a_namespace(num_hashes: int | None) -> None:
    rng = random.Random(1)
    memory = KVMemory(
        BlockPool(48), 2, hash_fn=hash if num_hashes is None else lambda k: hash(k) % num_hashes
    )
    owner: dict[int, str] = {}
    hits = 0
    for _ in range(8_000):
        namespace = rng.choice("abcd")
        words = [bytes(rng.choices(b"xy", k=2)) for _ in range(3)]
        table = BlockTable()
        memory.match(table, namespace, words.__getitem__, 3)
        assert all(owner[block] == namespace for block in table.block_ids)
        hits += len(table.block_ids)
        memory.extend(table, 6)
        memory.commit(table, 6, namespace, words.__getitem__)
        owner.update(dict.fromkeys(table.block_ids, namespace))
        memory.release(table)
    assert hits > 500
    memory.check([])
