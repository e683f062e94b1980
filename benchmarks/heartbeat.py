"""How long the caller's event loop ever waits for the engine.

    python benchmarks/heartbeat.py [--model PATH]

A task beats every 10 ms on the loop that uses the engine. Shown is the largest time between two
beats, the median of three runs: on an idle loop, while a process loads the model (its imports
included), while 20 kB of text are prefilled, while 5 MB are refused, and while 32 sessions decode.
Each run is a process of its own. Replies are checked to be whole before a figure counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import anyio
from machine import RESULTS, write_report

from agentkv import ContextLengthError, Engine, Session

BEAT_S = 0.010
RUNS = 3
NUM_ROWS = 32
# Largest gap allowed, in milliseconds.
BOUNDS = {"idle": None, "loading": 400, "prefill": 50, "refusal": 50, "decode": 50}
PROSE = "The council met at nine and heard {} reports on the harbour, none of them good news. "


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[float]]:
    """Beat inside the block; the times of the beats."""
    beats = [time.perf_counter()]

    async def beat() -> None:
        while True:
            await anyio.sleep(BEAT_S)
            beats.append(time.perf_counter())

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        try:
            yield beats
        finally:
            beats.append(time.perf_counter())
            group.cancel_scope.cancel()


async def largest_gap_ms(work: Callable[[], Awaitable[object]]) -> float:
    """The largest time between two beats while `work` is awaited, in milliseconds."""
    async with heartbeat() as beats:
        await work()
    return max(after - before for before, after in pairwise(beats)) * 1e3


async def measure(model: str | None) -> dict[str, float]:
    """One run of every case, in milliseconds."""
    engine = Engine.from_pretrained(model)
    gaps = {"idle": await largest_gap_ms(lambda: anyio.sleep(1.0))}
    gaps["loading"] = await largest_gap_ms(engine.__aenter__)
    try:
        gaps["prefill"] = await largest_gap_ms(lambda: prefill(engine))
        gaps["refusal"] = await largest_gap_ms(lambda: refuse(engine))
        gaps["decode"] = await largest_gap_ms(lambda: decode(engine))
    finally:
        await engine.aclose()
    return gaps


async def prefill(engine: Engine) -> None:
    """One turn over about 4,000 tokens."""
    text = "".join(PROSE.format(number) for number in range(230))
    reply = await engine.generate(text, max_tokens=2)
    assert len(text) >= 19_000, len(text)
    assert reply.usage.prefill_tokens >= 3_900, reply.usage


async def refuse(engine: Engine) -> None:
    """A prompt that can never fit, which is turned down before it is encoded."""
    text = PROSE * (5_000_000 // len(PROSE))
    steps = engine.stats().steps
    try:
        await engine.generate(text)
    except ContextLengthError:
        assert engine.stats().steps == steps
        return
    raise AssertionError("5 MB of text were not refused")


async def decode(engine: Engine) -> None:
    """Many sessions, one reply each, in one batch."""
    sessions = [engine.session(system="You are brief.") for _ in range(NUM_ROWS)]

    async def ask(session: Session, number: int) -> None:
        prompt = f"Count from {number}."
        reply = await session.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        assert len(reply.token_ids) == 24

    async with anyio.create_task_group() as group:
        for number, session in enumerate(sessions):
            group.start_soon(ask, session, number)


def main() -> None:
    """Run three processes, print the medians, and fail where a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--once", action="store_true", help="one run in this process, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "heartbeat.json")
    chosen = parser.parse_args()
    if chosen.once:
        print(json.dumps(anyio.run(measure, chosen.model)))
        return
    command = [sys.executable, __file__, "--once"]
    command += ["--model", chosen.model] if chosen.model else []
    runs = []
    for _ in range(RUNS):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout))
    is_late, figures = False, {}
    for case, bound in BOUNDS.items():
        gaps = sorted(run[case] for run in runs)
        middle = figures[case] = statistics.median(gaps)
        is_late |= bound is not None and middle > bound
        allowed = "" if bound is None else f"   at most {bound}"
        print(f"{case:8} {middle:7.1f} ms, runs {gaps[0]:.1f} to {gaps[-1]:.1f}{allowed}")
    write_report(chosen.out, largest_gap_ms=figures, bounds_ms=BOUNDS, runs=runs)
    if is_late:
        sys.exit("the loop waited for too long")


if __name__ == "__main__":
    main()
