"""Whole programs over an engine, decided by one seed: the order of tasks, the clock, each step.

No thread runs: the step thread's work is done between the ticks of the loop, when the seed says,
and so is what anyio would give to worker threads.
On asyncio the loop is `DeterministicLoop`; on trio its own scheduler is seeded, its clock mocked.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread

from ..config import EngineConfig
from ..core.core import Core
from ..core.protocols import Runner
from ..text.tokenizer import ChatTokenizer
from ..worker import Worker
from .faults import FaultPlan
from .faulty import FaultyEngine, FaultyWorker

__all__ = ["Deadlock", "DeterministicLoop", "SteppedEngine", "current_clock", "simulate"]

T = TypeVar("T")
Backend = Literal["asyncio", "trio"]

# How long a loop on which nothing can happen waits, in real time, for a thread of somebody else.
PATIENCE_S = 5.0


# A step takes one of these times, on the loop's own clock: none, or the same as others' timers.
DELAYS_S = (0.0, 0.0, 0.01, 0.02)


class Deadlock(Exception):
    """Every task waits and nothing will ever wake one."""


class DeterministicLoop(asyncio.SelectorEventLoop):
    """An asyncio loop with a clock of its own, which runs what is ready in an order by `seed`.

    Where nothing is ready, the clock jumps to the next timer.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Seconds since the loop was made, as the program sees them."""
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]  # Any: asyncio's queue of handles
        if len(ready) > 1:
            handles = list(ready)
            self._random.shuffle(handles)
            ready.clear()
            ready.extend(handles)
        super()._run_once()  # type: ignore[misc]  # the heart of asyncio's loop, private


class _JumpingSelector(selectors.DefaultSelector):
    """Selects without waiting, and moves the clock by what it would have waited."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:  # Any: keys and masks
        if timeout is None:
            events = super().select(PATIENCE_S)
            if not events:
                raise Deadlock("every task waits and no timer is set")
            return events
        events = super().select(0)
        if not events and timeout > 0:
            self._jump(timeout)
        return events


class SteppedWorker(FaultyWorker):
    """A worker whose step thread is a chain of callbacks on the loop, as late as the seed says.

    Commands are applied in one callback and the step runs in a later one, so that what the loop
    does during a forward can come between.
    """

    def __init__(
        self,
        open_runner: Callable[[EngineConfig], Runner],
        config: EngineConfig,
        plan: FaultPlan,
        rng: random.Random,
    ) -> None:
        super().__init__(open_runner, config, plan)
        self._random = rng
        self._inbox = _Inbox(self._wake)
        self._commands = self._inbox  # type: ignore[assignment]  # what the worker uses of a queue
        self._stepped: Core | None = None
        self._is_awake = False
        self._is_over = False
        self._is_in_step = False
        self.on_tick: Callable[[], None] = _nothing

    def run_out(self) -> None:
        """Do what the thread does on its own when its loop is over; told to end, it ends."""
        while not self._is_over and (self._stepped is None or self._inbox.items):
            self._tick()

    def _start(self) -> None:
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake and not self._is_over:
            self._is_awake = True
            # Once the loop is over there is `run_out`.
            with suppress(RuntimeError):
                self._later(self._random.choice(DELAYS_S))

    def _later(self, delay: float) -> None:
        loop: Any = self._loop  # Any: as in the worker
        if not hasattr(loop, "run_sync_soon"):
            loop.call_later(delay, self._tick)
        elif delay:
            import trio

            trio.lowlevel.spawn_system_task(_call_after, delay, self._tick)
        else:
            loop.run_sync_soon(self._tick)

    def _tick(self) -> None:
        self._is_awake = False
        self.on_tick()
        if self._stepped is None:
            self._stepped = core = self._begin()
            self._is_over = core is None
        else:
            core = self._stepped
            self._is_over = not self._turn(core)
        if core is not None and (self._is_in_step or core.has_work or self._inbox.items):
            self._wake()

    def _apply(self, core: Core) -> bool:
        return True if self._is_in_step else super()._apply(core)

    def _step(self, core: Core) -> None:
        if self._is_in_step or not core.has_work:
            self._is_in_step = False
            super()._step(core)
        else:
            self._is_in_step = True


async def _call_after(delay: float, call: Callable[[], None]) -> None:
    import trio

    await trio.sleep(delay)
    call()


def _nothing() -> None:
    pass


class _Inbox:
    """A queue for one thread, which never waits and says when something has come."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.items: list[Any] = []  # Any: commands and the None that ends them
        self._wake = wake

    def put(self, item: Any) -> None:  # Any: as above
        self.items.append(item)
        self._wake()

    def get(self, block: bool = True) -> Any:  # Any: as above
        return self.get_nowait()

    def get_nowait(self) -> Any:  # Any: as above
        if not self.items:
            raise Empty
        return self.items.pop(0)


class SteppedEngine(FaultyEngine):
    """An engine without a thread: `rng` decides how much of the loop runs between its steps.

    `on_tick` is called on the loop each time before commands are applied or a step runs, and
    `on_worker` with the worker when the engine is opened.
    """

    def __init__(
        self,
        runner: Runner,
        rng: random.Random,
        plan: FaultPlan | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        super().__init__(runner, plan, tokenizer=tokenizer, config=config)
        self.on_tick: Callable[[], None] = _nothing
        self.on_worker: Callable[[SteppedWorker], object] = lambda worker: None
        self.rng: random.Random = rng

    def _make_worker(self) -> Worker:
        worker = SteppedWorker(self._open_runner, self._config, self.plan, self.rng)
        worker.on_tick = lambda: self.on_tick()
        self.on_worker(worker)
        return worker


def simulate(
    main: Callable[[random.Random], Awaitable[T]], seed: int, *, backend: Backend = "asyncio"
) -> T:
    """What `main` returns when it runs alone on a loop that `seed` decides.

    `main` gets the random numbers for everything else: hand them to its `SteppedEngine`s. The same
    seed and program give the same run.

    Raises:
        Deadlock: every task waits and nothing will ever wake one (on asyncio).
    """
    rng = random.Random(seed)
    with _without_threads(rng):
        if backend == "trio":
            return _run_on_trio(main, rng)
        factory = partial(DeterministicLoop, rng.randrange(2**32))
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_call(main, rng))


def current_clock() -> Callable[[], float]:
    """The clock of the running loop, to be read in callbacks too."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        import trio

        return trio.current_time


@contextmanager
def _without_threads(rng: random.Random) -> Iterator[None]:
    """Meanwhile what anyio would hand to a worker thread takes time on the loop instead."""

    async def run_sync(func: Callable[..., T], *args: Any, **kwargs: Any) -> T:  # Any: as anyio's
        await anyio.sleep(rng.choice(DELAYS_S))
        return func(*args)

    before = anyio.to_thread.run_sync
    anyio.to_thread.run_sync = run_sync  # type: ignore[assignment]  # put back below
    try:
        yield
    finally:
        anyio.to_thread.run_sync = before


async def _call(main: Callable[[random.Random], Awaitable[T]], rng: random.Random) -> T:
    return await main(rng)


def _run_on_trio(main: Callable[[random.Random], Awaitable[T]], rng: random.Random) -> T:
    import trio
    import trio.testing
    from trio._core import _run

    # As pytest-trio does: the batch is shuffled by a generator that can be seeded.
    flag: Any = "_ALLOW_DETERMINISTIC_SCHEDULING"  # Any: trio calls it final
    before, state = getattr(_run, flag), _run._r.getstate()
    setattr(_run, flag, True)
    _run._r.seed(rng.randrange(2**32))
    try:
        return trio.run(_call, main, rng, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        setattr(_run, flag, before)
        _run._r.setstate(state)
