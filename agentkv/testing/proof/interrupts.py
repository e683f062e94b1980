"""A program that is interrupted wherever Python lets a signal in on the loop's side of agentkv.

An interrupt is a KeyboardInterrupt at the start or the end of a function, or after a call into C:
there the interpreter looks for signals. What the step thread executes cannot be interrupted, for
signals go to the main thread. The program runs on trio, which hands an interrupt to whatever task
runs; asyncio cancels its main task instead.
"""

from __future__ import annotations

import dis
import gc
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import anyio

from ...config import EngineConfig
from ...session import Session
from ..byte_tokenizer import byte_tokenizer
from ..deterministic import SteppedEngine, SteppedWorker, simulate
from ..sweep import ROOT
from ..witness import WitnessRunner, witness_reply

__all__ = ["Interrupts", "interrupt_everywhere"]

TOKENIZER = byte_tokenizer()
TICK = SteppedWorker._tick.__code__

# Where a function is, in its code, and what happens there.
Point = tuple[CodeType, int, str]


class Interrupts(NamedTuple):
    """Points that were found, those that were interrupted, and those where Python ignored it.

    It does so in a finalizer, and the program goes on.
    """

    discovered: int
    covered: int
    ignored: int


class Interrupter:
    """Counts the points that the package passes, and interrupts the one that is counted `at`-th.

    `first` has each point and its count at its first time.
    """

    def __init__(self, at: int | None) -> None:
        self.count: int = 0
        self.first: dict[Point, int] = {}
        self._at = at
        self._is_in_step = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile points on this thread are counted."""
        before = sys.getprofile()
        sys.setprofile(self._pass)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _pass(self, frame: FrameType, event: str, arg: object) -> None:
        from trio.lowlevel import currently_ki_protected

        code = frame.f_code
        if code is TICK:
            self._is_in_step = event != "return"
        elif self._is_in_step or not _is_of_loop(code) or not _is_point(frame, event):
            return
        elif not currently_ki_protected():
            self.count += 1
            self.first.setdefault((code, frame.f_lasti, event), self.count)
            if self.count == self._at:
                raise KeyboardInterrupt


@cache
def _is_of_loop(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "testing")


def _is_point(frame: FrameType, event: str) -> bool:
    """Whether a call into C has ended, or a Python function begins or ends; not at an await."""
    if event == "c_return":
        return True
    at = max(frame.f_lasti, 0)
    if event == "return":
        return dis.opname[frame.f_code.co_code[at]].startswith("RETURN")
    return event == "call" and at <= _start(frame.f_code)


@cache
def _start(code: CodeType) -> int:
    """The offset where a function begins: before it are its cells and the making of a coroutine."""
    found = (each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
    return next(found, 0)


def interrupt_everywhere(seed: int = 0, *, part: int = 0, num_parts: int = 1) -> Interrupts:
    """Run the program once calmly, then once for each of its points, interrupted there.

    With `num_parts` only one part of the points is tried; `seed` shuffles them first.

    Raises:
        AssertionError: a promise was broken; a note says where.
    """
    # Twice: the first run fills caches.
    for _ in range(2):
        calm, outcome = _run(None, seed)
        assert outcome == "calm", f"an interrupt that nobody sent: {outcome}"
    points = list(calm.first.items())
    random.Random(seed).shuffle(points)
    chosen = points[part::num_parts]
    covered = ignored = 0
    for point, at in chosen:
        try:
            found, outcome = _run(at, seed)
            assert found.first[point] == at, "another point was interrupted"
            assert outcome != "calm", "the interrupt is lost"
        except BaseException as error:
            code, offset, event = point
            where = f"{code.co_qualname}, {event} at {offset}"
            error.add_note(f"interrupt {at} in {where}; seed {seed}")
            raise
        covered += 1
        ignored += outcome == "ignored"
    return Interrupts(len(chosen), covered, ignored)


def _run(at: int | None, seed: int) -> tuple[Interrupter, str]:
    """Run the program and see that its engine ends and that another works."""
    interrupter = Interrupter(at)
    ignored: list[type[BaseException]] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: ignored.append(unraisable.exc_type)
    workers: list[SteppedWorker] = []
    runner = WitnessRunner(num_blocks=64, block_size=4, tokenizer=TOKENIZER, keep_batches=False)
    program = partial(_program, runner, interrupter, workers)
    outcome = "calm"
    try:
        with warnings.catch_warnings():
            # Of coroutines that were not begun.
            warnings.simplefilter("ignore", RuntimeWarning)
            simulate(program, seed, backend="trio")
    except KeyboardInterrupt:
        outcome = "interrupted"
    except BaseExceptionGroup as group:
        _, others = group.split(KeyboardInterrupt)
        if others is not None:
            raise
        outcome = "interrupted"
    finally:
        sys.unraisablehook = before
    assert set(ignored) <= {KeyboardInterrupt}, f"a finalizer fails: {ignored}"
    if ignored:
        outcome = "ignored"
    for worker in workers:
        _verify_end(worker)
    simulate(_use_another, seed, backend="trio")
    return interrupter, outcome


def _verify_end(worker: SteppedWorker) -> None:
    if not worker._is_over:
        # Nobody closed the engine; it ends with its last handle, which an error held until now.
        worker.on_tick = _nothing
        gc.collect()
        worker.run_out()
    assert worker.runner is None or worker._thread_ended.is_set(), "the thread does not end"
    stats = worker.stats
    assert not stats.used_blocks, f"a closed engine holds {stats.used_blocks} blocks"
    assert not stats.quarantined_blocks, "closing did not wait for a step"
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks, "blocks are lost"


def _nothing() -> None:
    pass


# The programs.


async def _program(
    runner: WitnessRunner,
    interrupter: Interrupter,
    workers: list[SteppedWorker],
    rng: random.Random,
) -> None:
    """Two tasks use every kind of call."""
    config = EngineConfig(debug=True, max_num_seqs=8)
    engine = SteppedEngine(runner, rng, config=config)
    engine.on_worker = workers.append
    with interrupter.watching():
        async with engine, anyio.create_task_group() as group:
            group.start_soon(_talk, engine)
            async with engine.session(messages=[1, 2, 3]) as session:
                await session
                await session.generate([4], max_tokens=3)
                async with session.branches(2) as forks:
                    for each in forks:
                        await _turn(each)
                    session.adopt(forks[0])
                async with session.checkpoint() as mark:
                    await _turn(session.fork())
                    session.rollback(mark)
                await engine.tree()


async def _talk(engine: SteppedEngine) -> None:
    session = engine.session(system="Be brief.")
    session.add("Hello")
    async with session.stream("one", max_tokens=4, stop="never") as stream:
        async for _ in stream:
            pass
    async with session.stream("two", max_tokens=30) as stream:
        await anext(stream)
        await stream.stop()
    await session.score(["ab", "c"])
    await engine.generate([5], n=2, max_tokens=2, timeout=100)
    await session.aclose()


async def _turn(session: Session) -> None:
    await session.generate([7], max_tokens=2, temperature=0.0)
    ids = session.token_ids
    assert list(ids[-2:]) == witness_reply(ids[:-2], 2), "a reply is wrong"


async def _use_another(rng: random.Random) -> None:
    runner = WitnessRunner(num_blocks=16, block_size=4, tokenizer=TOKENIZER, keep_batches=False)
    async with SteppedEngine(runner, rng, config=EngineConfig(debug=True)) as engine:
        await _turn(engine.session(messages=[1, 2]))
