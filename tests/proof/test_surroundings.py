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

FORKING = """
import os, sys, threading
import anyio
from agentkv import Engine, EngineConfig, WrongLoopError
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner, witness_reply

backend, ends = sys.argv[1:]
reached, forked = threading.Event(), threading.Event()

def in_a_step(batch):
    reached.set()
    assert forked.wait(20)

async def turn(session):
    reply = await session.generate("x", max_tokens=20)
    assert list(reply.token_ids) == witness_reply(session.token_ids[:-20], 20)

async def main():
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    # Whoever waits for a thread that is not there fails the test.
    config = EngineConfig(debug=True, close_timeout_s=3600)
    async with Engine(lambda _: runner, config=config) as engine:
        session, other = engine.session(system="s"), engine.session(system="t")
        mark = other.checkpoint()
        runner.before_step = in_a_step
        async with other.stream("y", max_tokens=9) as stream:
            await anyio.to_thread.run_sync(reached.wait)
            child = os.fork()
            if not child:
                await in_child(engine, session, mark, stream)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 3
            if ends == "exit":
                # With its loop the child has closed what wakes the parent's.
                os._exit(0)
            forked.set()
            await stream.result()
        other.rollback(mark)
        for each in (session, other, session.fork()):
            await turn(each)

async def in_child(engine, session, mark, stream):
    for name, call in {
        "session": lambda: engine.session(),
        "fork": lambda: session.fork(),
        "checkpoint": lambda: session.checkpoint(),
        "add": lambda: session.add("x"),
        "rollback": lambda: session.rollback(mark),
        "stream": lambda: session.stream("x", timeout=1),
        "generate": lambda: session.generate("x", timeout=1),
        "engine.generate": lambda: engine.generate("x", timeout=1),
        "score": lambda: session.score(["x"]),
        "tree": lambda: engine.tree(),
        "await": lambda: session,
        "next": lambda: anext(stream),
        "result": lambda: stream.result(),
        "stop": lambda: stream.stop(),
    }.items():
        try:
            await call()
        except WrongLoopError as error:
            assert "process" in str(error)
        else:
            sys.stderr.write(f"{name} is not refused")
            os._exit(1)
    if ends == "exit":
        sys.exit(3)
    await stream.__aexit__()
    await mark.aclose()
    await session.aclose()
    await engine.aclose()
    os._exit(3)  # as multiprocessing does

if backend == "uvloop":
    anyio.run(main, backend_options={"use_uvloop": True})
else:
    anyio.run(main, backend=backend)
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("ends", ["exit", "os._exit"])
def test_a_child_forked_in_the_middle_of_a_step_ends_alone(backend: str, ends: str) -> None:
    """What it inherited is refused and may be closed; with `os._exit` the parent goes on."""
    run = subprocess.run(
        [sys.executable, "-c", FORKING, backend, ends],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
