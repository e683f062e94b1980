"""What the process around an engine does: it collects garbage, sets its clock and forks."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from agentkv import Session
from agentkv.core.batch import Batch
from tests.bench import Bench, expected

CHILD = """
import os, threading
import anyio
from agentkv import Engine, EngineConfig
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner, witness_reply

reached, forked = threading.Event(), threading.Event()

def in_a_step(batch):
    reached.set()
    assert forked.wait(20)

async def main():
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    runner.before_step = in_a_step
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        session = engine.session(system="s")
        async with anyio.create_task_group() as group:
            group.start_soon(fork)
            reply = await session.generate("x", max_tokens=20)
        ids = session.token_ids
        assert list(reply.token_ids) == witness_reply(ids[:-20], 20)

async def fork():
    await anyio.to_thread.run_sync(reached.wait)
    child = os.fork()
    if not child:
        os._exit(0)  # as multiprocessing does
    _, status = os.waitpid(child, 0)
    forked.set()
    assert status == 0, f"the child ended with {status}"

anyio.run(main)
"""


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day is another one at every look, years before or after."""
    draw, now = random.Random(5), time.time()
    monkeypatch.setattr(time, "time", lambda: now + draw.uniform(-1e9, 1e9))
    monkeypatch.setattr(time, "time_ns", lambda: int((now + draw.uniform(-1e9, 1e9)) * 1e9))


async def family_is_right(bench: Bench) -> None:
    """Two turns of a session, its forks and their forks, together."""
    root = bench.engine.session(system="s")
    await root.generate("x", max_tokens=5)
    forks = [root.fork() for _ in range(3)]
    family = [root, *forks, *(fork.fork() for fork in forks)]

    async def turn(session: Session, text: str) -> None:
        reply = await session.generate(text, max_tokens=9, timeout=30)
        assert list(reply.token_ids) == expected(session, 9)

    for _ in range(2):
        async with anyio.create_task_group() as group:
            for at, session in enumerate(family):
                group.start_soon(turn, session, f"{at}")


@pytest.mark.anyio
async def test_a_collection_on_the_step_thread_takes_nothing_in_use(bench: Bench) -> None:
    collections = 0

    def collect(batch: Batch) -> None:
        nonlocal collections
        collections += 1
        gc.collect(1)

    bench.runner.before_step = bench.runner.after_step = collect
    await family_is_right(bench)
    assert collections > 30


@pytest.mark.anyio
@pytest.mark.usefixtures("jumping_clock")
async def test_a_time_of_day_that_jumps_ends_no_turn(bench: Bench) -> None:
    await family_is_right(bench)


def test_a_child_forked_in_the_middle_of_a_step_ends_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
