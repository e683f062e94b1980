"""A program that uses an engine is interrupted anywhere: the engine ends, and the program too."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentkv.testing.proof.interrupts import interrupt_everywhere

SEED = 0
NUM_PARTS = 12
# Points in one part, on any Python; a count may only rise.
LEAST = 50
CLOSE_TIMEOUT_S = 2.0
# What a process may take to end beside closing its engine, on a busy machine.
PATIENCE_S = 60
PROGRAM = f"""
    import anyio, time
    from agentkv import Engine, EngineConfig
    from agentkv.testing.byte_tokenizer import byte_tokenizer
    from agentkv.testing.witness import WitnessRunner

    runner = WitnessRunner(num_blocks=256, tokenizer=byte_tokenizer(), keep_batches=False)
    runner.before_step = lambda batch: time.sleep(0.001)
    config = EngineConfig(close_timeout_s={CLOSE_TIMEOUT_S})

    async def talk(engine):
        while True:
            async with engine.session(system="s") as session:
                await session.generate("one", max_tokens=3)
                async with session.branches(2) as forks:
                    for each in forks:
                        await each.generate("two", max_tokens=2)
                    session.adopt(forks[0])
                async with session.stream("three", max_tokens=5) as stream:
                    async for _ in stream:
                        pass

    async def main():
        async with Engine(lambda _: runner, config=config) as engine:
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(talk, engine)
                print("talking", flush=True)

    try:
        anyio.run(main, backend=BACKEND)
    finally:
        print("closed", runner.is_closed, flush=True)
"""


@pytest.mark.slow
def test_a_program_may_be_interrupted_at_any_point() -> None:
    done = interrupt_everywhere(SEED, num_parts=NUM_PARTS)
    print(f"seed {SEED}: {done.covered} of {done.discovered} points, {done.ignored} ignored")  # noqa: T201
    assert done.covered == done.discovered >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_at_any_time_ends_the_program(backend: str, times: int) -> None:
    draw = random.Random(f"{SEED} {backend} {times}")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).replace("BACKEND", repr(backend))],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "talking\n"
    for _ in range(times):
        time.sleep(draw.uniform(0.0, 0.2))
        process.send_signal(signal.SIGINT)
    started = time.monotonic()
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - started < CLOSE_TIMEOUT_S + 1
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    # The second signal may come before the first has closed the engine, or after the end.
    assert times == 2 or said == "closed True\n"
