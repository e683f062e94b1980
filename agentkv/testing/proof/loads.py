"""Many sessions, many forks, many cancellations, on an engine with its thread: exact and complete.

Each function asserts that answers are right and no block is lost, and returns what was measured.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread

from ...config import EngineConfig
from ...core.batch import Batch
from ...core.protocols import FatalRunnerError
from ...engine import Engine
from ...errors import EngineClosedError, EngineDeadError, RequestError
from ...session import Session
from ..deterministic import SteppedEngine
from ..witness import WitnessRunner
from .held import Held

__all__ = [
    "beat_during_forward",
    "cancel_strangers",
    "close_in_each_state",
    "fork_deep",
    "fork_tree",
    "fork_wide",
    "notice_death",
    "share_prefix",
    "soak",
]

SYSTEM = [at * 7 % 251 for at in range(515)]


def _engine(num_blocks: int, **settings: object) -> Engine:
    runner = WitnessRunner(num_blocks=num_blocks, max_context=16384, keep_batches=False)
    config = EngineConfig(**{"max_num_seqs": 256, **settings})  # type: ignore[arg-type]  # by name
    return Engine(lambda _: runner, config=config)


async def share_prefix(num_sessions: int) -> dict[str, float]:
    """So many sessions on one prefix answer at once."""
    async with _engine(4096, max_waiting=num_sessions) as engine:
        held = [
            Held(engine.session(messages=SYSTEM), [], list(SYSTEM)) for _ in range(num_sessions)
        ]
        started = time.perf_counter()
        await _at_once([_turn(one, at) for at, one in enumerate(held)])
        seconds = time.perf_counter() - started
        for one in held:
            one.verify()
        # Full blocks of the prefix were computed once, by whoever came first.
        own = len(SYSTEM) % 16 + 2
        assert engine.stats().prefill_tokens <= len(SYSTEM) + own * num_sessions
        await close_all(engine, [one.session for one in held], random.Random(1))
        return {"sessions": num_sessions, "seconds": seconds}


def _turn(one: Held, at: int) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: one.generate([at % 251, at // 251], 4)


async def fork_wide(count: int) -> dict[str, float]:
    """So many forks of one session, some of which answer, close in any order."""
    async with _engine(4096) as engine:
        root = await _root(engine)
        started = time.perf_counter()
        forks = [root.fork() for _ in range(count)]
        seconds = time.perf_counter() - started
        await _at_once([_turn(one, at) for at, one in enumerate(forks[:: max(1, count // 200)])])
        return await _end(engine, root, forks, seconds)


async def fork_deep(depth: int) -> dict[str, float]:
    """Forks of forks to this depth, each with a turn of its own, close in any order."""
    async with _engine(4096) as engine:
        root = await _root(engine)
        forks = [root]
        seconds = 0.0
        for at in range(depth):
            started = time.perf_counter()
            forks.append(forks[-1].fork())
            seconds += time.perf_counter() - started
            await forks[-1].generate([at % 251], 1)
        return await _end(engine, root, forks[1:], seconds)


async def fork_tree(branches: int) -> dict[str, float]:
    """A tree: that many forks, each with a turn and as many forks; they close in any order."""
    async with _engine(4096) as engine:
        root = await _root(engine)
        forks = [root.fork() for _ in range(branches)]
        await _at_once([_turn(one, at) for at, one in enumerate(forks)])
        started = time.perf_counter()
        leaves = [one.fork() for one in forks for _ in range(branches)]
        seconds = time.perf_counter() - started
        await _at_once([_turn(one, at) for at, one in enumerate(leaves[::branches])])
        return await _end(engine, root, [*forks, *leaves], seconds)


async def _root(engine: Engine) -> Held:
    root = Held(engine.session(messages=SYSTEM), [], list(SYSTEM))
    await root.warm()
    return root


async def _end(engine: Engine, root: Held, forks: list[Held], seconds: float) -> dict[str, float]:
    for one in forks:
        one.verify()
    sessions = [root.session, *(one.session for one in forks)]
    await close_all(engine, sessions, random.Random(len(forks)))
    return {"forks": len(forks), "us_per_fork": seconds / len(forks) * 1e6}


async def close_all(engine: Engine, sessions: Sequence[Session], rng: random.Random) -> None:
    """Close these in any order: every block is free or cached then, and none is lost."""
    order = list(sessions)
    rng.shuffle(order)
    for session in order:
        await session.aclose()
    await engine.tree()
    stats = engine.stats()
    assert stats.used_blocks == stats.logical_tokens == stats.running == stats.waiting == 0
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


async def _at_once(calls: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(call)


async def cancel_strangers(rng: random.Random, *, strangers: int, survivors: int = 5) -> int:
    """Cancel strangers at any moment of a simulation; steps until their blocks were back.

    The survivors answer as they would alone.
    """
    runner = WitnessRunner(num_blocks=8192, block_size=4, keep_batches=False)
    config = EngineConfig(max_num_seqs=strangers + survivors, max_batch_tokens=8192)
    engine = SteppedEngine(runner, rng, config=config)
    async with engine:
        root = Held(engine.session(messages=SYSTEM[:40]), [], SYSTEM[:40])
        await root.warm()
        held = [root.fork() for _ in range(survivors)]
        doomed = [root.session.fork() for _ in range(strangers)]
        # 10 blocks are shared; each survivor has at most its partial one and six more.
        back = _Watch(engine, runner, 10 + (survivors + 1) * 7)
        async with anyio.create_task_group() as group:
            for at, one in enumerate(held):
                group.start_soon(one.generate, [at], 24)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as strange:
                    for at, session in enumerate(doomed):
                        strange.start_soon(_go_on, session, at)
                    await anyio.sleep(0.01 * rng.randint(1, 15))
                    scope.cancel()
            back.begin()
        for one in held:
            one.verify()
        await close_all(engine, [root.session, *doomed, *(one.session for one in held)], rng)
        assert back.steps is not None, "the blocks never came back"
        return back.steps


class _Watch:
    """Counts the steps until an engine holds no more than so many blocks."""

    def __init__(self, engine: SteppedEngine, runner: WitnessRunner, most: int) -> None:
        self.steps: int | None = None
        self._engine = engine
        self._runner = runner
        self._most = most

    def begin(self) -> None:
        """Count from here."""
        self._before = self._runner.num_steps
        self._engine.on_tick = self._look

    def _look(self) -> None:
        worker = self._engine._worker
        assert worker is not None
        assert worker._core is not None
        if self.steps is None and worker._core.stats().used_blocks <= self._most:
            self.steps = self._runner.num_steps - self._before


async def _go_on(session: Session, at: int) -> None:
    await session.generate([at % 251, at // 251], max_tokens=4000, temperature=0.0)


async def notice_death(num_waiters: int) -> dict[str, float]:
    """The device fails under so many waiters: seconds until each knew, and until a call did."""
    engine = _engine(4096, max_waiting=num_waiters)
    failed_at: list[float] = []
    noticed: list[float] = []
    errors: list[EngineDeadError] = []

    def fail(batch: Batch) -> None:
        if batch.rows[0].start > len(SYSTEM):
            failed_at.append(time.perf_counter())
            raise FatalRunnerError("the device is gone")

    async def wait(session: Session) -> None:
        try:
            await session.generate(max_tokens=50)
        except EngineDeadError as error:
            noticed.append(time.perf_counter())
            errors.append(error)

    async with engine:
        sessions = [engine.session(messages=SYSTEM) for _ in range(num_waiters)]
        _witness_of(engine).before_step = fail
        async with anyio.create_task_group() as group:
            for session in sessions:
                group.start_soon(wait, session)
        before = time.perf_counter()
        await wait(sessions[0])
        after = time.perf_counter()
    assert len(errors) == num_waiters + 1 == len({id(error) for error in errors})
    assert all(isinstance(error.cause, FatalRunnerError) for error in errors)
    waiters = max(noticed[:-1]) - failed_at[0]
    return {"waiters": num_waiters, "seconds": waiters, "next_call_seconds": after - before}


async def close_in_each_state(close_timeout_s: float) -> dict[str, float]:
    """Seconds that closing takes from each state of an engine."""
    took = {}
    for state in ("idle", "running", "full", "hung", "dead"):
        took[state] = await _close_from(state, close_timeout_s)
        assert took[state] <= close_timeout_s + 1, f"closing a {state} engine took {took[state]} s"
    return took


async def _close_from(state: str, close_timeout_s: float) -> float:
    num_calls = {"idle": 0, "full": 600}.get(state, 8)
    engine = _engine(4096, close_timeout_s=close_timeout_s)
    in_step, leave = threading.Event(), threading.Event()

    def act(batch: Batch) -> None:
        in_step.set()
        if state == "hung":
            leave.wait()
        if state == "dead":
            raise FatalRunnerError("the device is gone")

    async def call(session: Session) -> None:
        with suppress(EngineClosedError, EngineDeadError):
            await session.generate(max_tokens=2000)

    try:
        async with engine:
            _witness_of(engine).before_step = act
            async with anyio.create_task_group() as group:
                for _ in range(num_calls):
                    group.start_soon(call, engine.session(messages=SYSTEM))
                if num_calls:
                    await anyio.to_thread.run_sync(in_step.wait)
                started = time.perf_counter()
                await engine.aclose()
                took = time.perf_counter() - started
    finally:
        leave.set()
    return took


def _witness_of(engine: Engine) -> WitnessRunner:
    assert engine._worker is not None
    runner = engine._worker.runner
    assert isinstance(runner, WitnessRunner)
    return runner


async def beat_during_forward(forward_s: float) -> float:
    """The largest time between two beats of the loop, in seconds, while steps take so long."""
    async with _engine(256) as engine:
        _witness_of(engine).before_step = lambda batch: time.sleep(forward_s)
        gaps: list[float] = []

        async def beat() -> None:
            before = time.perf_counter()
            while True:
                await anyio.sleep(0.01)
                now = time.perf_counter()
                gaps.append(now - before)
                before = now

        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            await engine.generate([1, 2, 3], max_tokens=3)
            group.cancel_scope.cancel()
        return max(gaps)


async def soak(
    num_turns: int, report: Callable[[int], None] = lambda done: None
) -> dict[str, float]:
    """So many turns without a garbage collector; bytes and objects that a turn leaves behind.

    Turns are read whole, streamed, left early, timed out and made to fail in turn. The slopes are
    those of the second half, by least squares.
    """
    samples: list[tuple[int, int, int]] = []
    gc.collect()
    gc.disable()
    try:
        async with _engine(1024) as engine:
            root = await _root(engine)
            for done in range(num_turns):
                await _any_turn(root, done)
                if done % max(1, num_turns // 40) == 0:
                    samples.append((done, _resident_bytes(), len(gc.get_objects())))
                    report(done)
            root.verify()
            await close_all(engine, [root.session], random.Random(1))
    finally:
        gc.enable()
    late = samples[len(samples) // 2 :]
    return {
        "turns": num_turns,
        "bytes_per_turn": _slope([(at, size) for at, size, _ in late]),
        "objects_per_turn": _slope([(at, count) for at, _, count in late]),
    }


async def _any_turn(root: Held, at: int) -> None:
    async with root.session.fork() as fork:
        one = root.adopt(fork)
        kind = at % 8
        if kind == 0:
            await one.stream([at % 251], 3)
        elif kind == 1:
            await one.stream([at % 251], 9, reads=1, ends="leave")
        elif kind == 2:
            with suppress(TimeoutError):
                await one.generate([at % 251], 4, timeout=0)
        elif kind == 3:
            with suppress(RequestError):
                await fork.generate([-1])
        else:
            await one.generate([at % 251], 2)
        one.verify()


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _slope(points: list[tuple[int, int]]) -> float:
    line = statistics.linear_regression([at for at, _ in points], [value for _, value in points])
    return line.slope
