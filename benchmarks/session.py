"""Fork of an 8,000-token session on the witness model: microseconds, KV bytes and id copies."""

from __future__ import annotations

import statistics
import time

import anyio
from machine import RESULTS, write_report

from agentkv import Engine
from agentkv.testing.witness import WitnessRunner

TOKENS = 8_000
FORKS = 1_000


async def main() -> None:
    """Check that a fork answers as its parent would, then time forks."""
    runner = WitnessRunner(num_blocks=2_048, block_size=16, vocab_size=256, max_context=16_384)
    async with Engine(lambda config: runner) as engine:
        ids = [index % 251 for index in range(TOKENS)]
        session = await engine.session(messages=ids)
        async with session.fork() as fork, session.fork() as twin:
            left = await fork.generate([7], max_tokens=8, temperature=0.0)
            right = await twin.generate([7], max_tokens=8, temperature=0.0)
        assert left.token_ids == right.token_ids, "forks of one session differ"
        before = await _used_blocks(engine)
        times = []
        forks = []
        for _ in range(FORKS):
            start = time.perf_counter()
            forks.append(session.fork())
            times.append(time.perf_counter() - start)
        assert all(fork._state.snapshot is session._state.snapshot for fork in forks)
        extra = await _used_blocks(engine) - before
        assert extra == 0, f"{FORKS} forks took {extra} blocks"
        write_report(
            RESULTS / "session.json",
            tokens=TOKENS,
            forks=FORKS,
            fork_us=statistics.median(times) * 1e6,
            kv_blocks=extra,
        )
        print(f"fork of {TOKENS:,} tokens: {statistics.median(times) * 1e6:.1f} us, median")
        print(f"{FORKS:,} forks took {extra} KV blocks and share the parent's ids")
        for fork in forks:
            await fork.aclose()


async def _used_blocks(engine: Engine) -> int:
    """Blocks in use, as of a step that was made just now: figures are taken after a step."""
    async with engine.session(messages=[1]) as other:
        await other.generate([2], max_tokens=2)
    return engine.stats().used_blocks


if __name__ == "__main__":
    anyio.run(main)
