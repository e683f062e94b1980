"""How programs end: a loop that is closed, an interrupt, an exit while a step hangs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from agentkv import Engine, Stream
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner

# What it may take a process to import agentkv and to end, on a busy machine.
PATIENCE_S = 60
OPENING = """
    import time, anyio
    from agentkv import Engine, EngineConfig
    from agentkv.testing.witness import WitnessRunner

    runner = WitnessRunner(num_blocks=64)
    engine = Engine(lambda _: runner, config=EngineConfig(close_timeout_s=0.2))
"""


def start(program: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(OPENING) + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_loop_that_is_closed_while_steps_run_ends_their_thread() -> None:
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    engine = Engine(lambda _: runner)
    stepping = threading.Event()
    runner.after_step = lambda batch: stepping.set()
    streams: list[Stream] = []

    async def leave() -> None:
        # Nobody closes this engine: its program has gone.
        await engine.__aenter__()
        session = engine.session(system="s")
        streams.append(session.stream("go", max_tokens=900))
        await streams[0].__aenter__()
        await asyncio.to_thread(stepping.wait)

    asyncio.run(leave())
    assert engine._worker is not None
    for thread in threading.enumerate():
        if thread.name == "agentkv-step":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert runner.is_closed
    # What the fixture of the suite looks for in a closed engine.
    engine._worker.refuse(RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupt_ends_a_program_that_generates(backend: str) -> None:
    process = start(f"""
    async def main():
        async with engine:
            async with engine.session(messages=[1, 2]).stream(max_tokens=1000) as stream:
                async for _ in stream:
                    runner.before_step = lambda batch: time.sleep(0.02)
                    print("reading", flush=True)

    anyio.run(main, backend={backend!r})
    """)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode not in (0, None)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert "never retrieved" not in said
    assert "destroyed" not in said


@pytest.mark.slow
def test_a_program_ends_while_a_step_hangs() -> None:
    process = start("""
    async def main():
        async with engine:
            runner.before_step = lambda batch: time.sleep(3600)
            with anyio.move_on_after(0.1):
                await engine.generate([1, 2], max_tokens=2)
        print("closed", flush=True)

    anyio.run(main)
    """)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (0, "closed\n")
    assert "its thread keeps KV blocks" in errors


@pytest.mark.slow
def test_a_program_that_gave_up_loading_ends_when_the_load_lets_it() -> None:
    process = start("""
    loading = []

    def open_runner(config):
        loading.append(True)
        time.sleep(0.15)
        print("loaded", flush=True)
        return runner

    async def main():
        with anyio.move_on_after(0.01):
            await Engine(open_runner, config=EngineConfig(close_timeout_s=30)).__aenter__()
        assert loading

    import atexit
    atexit.register(lambda: print("exit", runner.is_closed, flush=True))
    anyio.run(main)
    """)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert said.split("\n")[:2] == ["exit False", "loaded"]


@pytest.mark.slow
def test_a_program_ends_that_never_closed_its_engine() -> None:
    process = start("""
    async def main():
        await engine.__aenter__()
        await engine.generate([1, 2], max_tokens=2)
        print("done", flush=True)

    anyio.run(main)
    """)
    started = time.monotonic()
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said, errors) == (0, "done\n", "")
    assert time.monotonic() - started < PATIENCE_S


def test_a_thread_frees_what_its_engine_held_while_it_can_be_waited_for() -> None:
    # Later, the end of the interpreter kills it there, and native code aborts the process.
    process = start(f"""
    import threading

    freed, freeing = threading.Event(), []

    class Weights:
        def __del__(self):
            freeing.append(threading.current_thread().name)
            freed.set()

    runner.weights = Weights()

    async def open_engine():
        return await engine.__aenter__()

    anyio.run(open_engine)
    # The thread is the last to hold them.
    del engine, runner
    assert freed.wait({PATIENCE_S})
    assert freeing == ["agentkv-step"], freeing
    """)
    _, said = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, said
