"""Where the event loop and the step thread meet, and nowhere else.

The loop posts commands; the step thread applies them between steps, runs steps and wakes the loop
once a step. Only `Worker._run` and the private functions it calls run on the step thread;
`agentkv.testing` runs them between the ticks of the loop instead.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import anyio
import anyio.lowlevel
import anyio.to_thread

from .call import Call, Closable, Lease
from .config import EngineConfig, short
from .core.batch import ModelInfo
from .core.core import Core
from .core.protocols import Runner
from .core.sequence import Failed, Finished, Request, Snapshot, TokenIds
from .errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidOptionError,
    QueueFullError,
    WrongLoopError,
)
from .messages import EngineStats

__all__ = [
    "Call",
    "Finished",
    "Lease",
    "ModelInfo",
    "Request",
    "Runner",
    "Snapshot",
    "TokenIds",
    "Worker",
]

_logger = logging.getLogger("agentkv")

T = TypeVar("T")

# How long an engine without a step in progress may take to free its memory.
FREEING_S = 0.5

# Threads that run, or end just now, and their workers. Held weakly: a thread that ends may be the
# last to hold its worker, and must free it before it is gone from here.
_step_threads: WeakKeyDictionary[threading.Thread, ReferenceType[Worker]] = WeakKeyDictionary()


class Worker:
    """The step thread and the loop's side of it. Made on the loop that owns the engine.

    `open_runner` is called on the step thread, which is a daemon: a step that never returns
    cannot hold the process.
    """

    def __init__(self, open_runner: Callable[[EngineConfig], Runner], config: EngineConfig) -> None:
        self.config = config
        self.stats: EngineStats = EngineStats()
        self.runner: Runner | None = None
        self.dropped: deque[Closable] = deque()
        self._open_runner = open_runner
        self._commands: SimpleQueue[Callable[[Core], object] | None] = SimpleQueue()
        self._outbox: deque[Callable[[], object]] = deque()
        self._calls: dict[Request, Call] = {}
        self._holders: dict[Snapshot, int] = {}
        self._inspections: set[anyio.Event] = set()
        self._refusal: Callable[[], Exception] | None = None
        self._open_error: BaseException | None = None
        self._core: Core | None = None
        self._opened = anyio.Event()
        self._ended = anyio.Event()
        self._thread_ended = threading.Event()
        # A step that did not return in time; nobody waits for its thread any more.
        self._is_given_up = False
        self._loop = anyio.lowlevel.current_token().native_token
        self._pid = os.getpid()

    # Life.

    async def open(self) -> Runner:
        """Start the thread and wait for its runner; a failure to open is raised here."""
        try:
            self._start()
            await self._opened.wait()
        except BaseException:
            self.refuse(lambda: EngineClosedError("the engine was closed while it opened"))
            self._commands.put(None)
            raise
        if self._refusal is not None:
            raise self._refusal()
        if self._open_error is not None:
            raise self._open_error
        assert self.runner is not None
        return self.runner

    def refuse(self, make_error: Callable[[], Exception]) -> None:
        """From now on every waiting and every later call gets an error of its own."""
        if self._refusal is None:
            self._refusal = make_error
        for call in list(self._calls.values()):
            self._finish(call, error=self._refusal())
        for done in self._inspections:
            done.set()
        self._opened.set()

    async def close(self) -> None:
        """Stop the thread, waiting for its step at most `close_timeout_s`. Idempotent."""
        if self._is_inherited():
            return
        self.refuse(_closed)
        self._commands.put(None)
        for seconds in (self.config.close_timeout_s, FREEING_S):
            if await self._ends_within(seconds) or self._is_given_up:
                return
            # Where no step runs, or it has just returned, the thread has but to free the memory.
            if self._quarantine():
                break
        self._is_given_up = True

    async def _ends_within(self, seconds: float) -> bool:
        """Wait for the thread's work to end; whether it has."""
        if self._is_on_own_loop():
            with anyio.move_on_after(seconds, shield=True):
                await self._ended.wait()
            return self._ended.is_set()
        # Its loop is over, so the thread ends without anybody there to tell.
        wait = partial(self._thread_ended.wait, seconds)
        return await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)

    def abandon(self) -> None:
        """Let the thread end: no handle is left that could ask for anything. On any thread."""
        self._refusal = self._refusal or _closed
        self._commands.put(None)

    def _quarantine(self) -> bool:
        """Give up the load or the step that does not return; False if neither is in progress."""
        if self._core is None:
            _logger.warning("the engine was closed while its model loads; the thread ends after it")
            return True
        block_ids = self._core.quarantine()
        if not block_ids:
            return False
        self.stats = self._core.stats()
        _logger.warning(
            "a step did not return within close_timeout_s=%g; its thread keeps KV blocks %s",
            self.config.close_timeout_s,
            list(block_ids),
        )
        return True

    # What the loop asks for.

    def check(self) -> None:
        """Raise unless this is the engine's loop, in its process, and the engine takes work."""
        self.check_loop()
        if self._refusal is not None:
            raise self._refusal()
        self._reap()

    def check_loop(self) -> None:
        """Raise unless this runs on the engine's loop, in a task or in a callback."""
        if self._is_inherited():
            raise WrongLoopError(
                "an engine belongs to the process that opened it; a fork opens its own"
            )
        if not self._is_on_own_loop():
            raise WrongLoopError(
                "an engine belongs to the event loop that opened it; from another thread, use "
                "anyio.from_thread.run or asyncio.run_coroutine_threadsafe"
            )

    def now(self) -> float:
        """What the clock of the engine's loop shows, in a task or in a callback of it."""
        self.check_loop()
        loop: Any = self._loop  # Any: as in `_publish`
        clock = sys.modules["trio"].current_time if hasattr(loop, "run_sync_soon") else loop.time
        return float(clock())

    def check_closing(self) -> None:
        """Raise unless handles may be let go: on the engine's loop, once it is over, in a fork."""
        if not self._is_inherited() and not self._is_loop_over():
            self.check_loop()

    def _is_inherited(self) -> bool:
        # The child of a fork has copies of the handles, and neither the thread nor its memory.
        return os.getpid() != self._pid

    def _is_on_own_loop(self) -> bool:
        return _running_loop(self._loop) is self._loop

    def _is_loop_over(self) -> bool:
        # trio does not say; a token that takes a callback has its loop, and dropped handles are due
        # there anyway.
        loop: Any = self._loop  # Any: as in `_publish`
        if not hasattr(loop, "run_sync_soon"):
            return bool(loop.is_closed())
        try:
            loop.run_sync_soon(self._reap)
        except RuntimeError:
            return True
        return False

    def submit(self, requests: list[Request]) -> list[Call]:
        """Hand requests to the step thread, all or none.

        Raises:
            QueueFullError: more than `max_waiting` requests would wait to be admitted.
        """
        self.check()
        # Those that a step could run at once are not said to wait: it has not begun yet.
        waiting = len(self._calls) + len(requests) - self.config.max_num_seqs
        if waiting > self.config.max_waiting:
            raise QueueFullError(
                f"{waiting} requests would wait and max_waiting={self.config.max_waiting}; ask "
                "again when some have ended, or open the engine with a larger max_waiting"
            )
        calls = [Call(self, request) for request in requests]
        for call in calls:
            self._calls[call.request] = call
            self.post(partial(self._submit_to, request=call.request))
        return calls

    async def inspect(self, look: Callable[[Core], T]) -> T:
        """Run `look` on the step thread between two steps, after everything posted before."""
        self.check()
        answers: list[tuple[T | None, Exception | None]] = []
        done = anyio.Event()

        def run(core: Core) -> None:
            try:
                answers.append((look(core), None))
            except Exception as error:
                answers.append((None, error))
            # What was posted before has been applied, and whoever awaits this looks next.
            self.stats = core.stats()
            self._publish(done.set)

        self._inspections.add(done)
        try:
            self.post(run)
            await done.wait()
        finally:
            self._inspections.discard(done)
        if not answers:
            self.check()
        value, error = answers.pop()
        if error is not None:
            try:
                raise error
            finally:
                error = None
        return value  # type: ignore[return-value]  # None only beside an error, or when T is None

    def post(self, command: Callable[[Core], object]) -> None:
        """Run `command` on the step thread, before its next step; nothing once work is refused."""
        if self._refusal is None:
            self._commands.put(command)

    def _reap(self) -> None:
        # Handles that were dropped without being closed; appended by __del__, on any thread.
        while self.dropped:
            self.dropped.popleft().close()

    def hold(self, snapshot: Snapshot) -> None:
        """Count one more lease of the snapshot."""
        self._holders[snapshot] = self._holders.get(snapshot, 0) + 1

    def drop(self, snapshot: Snapshot) -> None:
        """Count one less, and release the snapshot with the last."""
        self._holders[snapshot] -= 1
        if not self._holders[snapshot]:
            del self._holders[snapshot]
            self.post(lambda core: core.release(snapshot))

    def close_call(self, call: Call) -> None:
        """Cancel what the call still runs, release what it has ended with."""
        if self._calls.pop(call.request, None) is not None:
            request = call.request
            self.post(lambda core: core.cancel(request))
        finished, call.finished = call.finished, None
        if finished is not None and finished.snapshot is not None:
            self._release_unheld(finished.snapshot)

    def _release_unheld(self, snapshot: Snapshot) -> None:
        if snapshot not in self._holders:
            self.post(lambda core: core.release(snapshot))

    def _finish(
        self, call: Call, *, finished: Finished | None = None, error: BaseException | None = None
    ) -> None:
        del self._calls[call.request]
        call.finished, call.error = finished, error
        call._notify()

    # What the step thread has for the loop.

    def _drain(self) -> None:
        while self._outbox:
            self._outbox.popleft()()
        self._reap()

    def _deliver(self, changed: list[tuple[Request, Finished | Failed | None]]) -> None:
        # The outcome as it was when the step ended: by now a later step may have set it, and it
        # must be taken once.
        for request, outcome in changed:
            if isinstance(outcome, Failed):
                request.outcome = None
            call = self._calls.get(request)
            if isinstance(outcome, Finished) and call is None:
                # Cancelled on the loop after it had ended on the step thread.
                if outcome.snapshot is not None:
                    self._release_unheld(outcome.snapshot)
            elif call is None:
                continue
            elif isinstance(outcome, Finished):
                self._finish(call, finished=outcome)
            elif isinstance(outcome, Failed):
                self._finish(call, error=outcome.error)
            else:
                call._notify()

    def _die(self, cause: BaseException) -> None:
        self.refuse(lambda: EngineDeadError(f"the step thread ended: {cause!r}", cause))

    # The step thread.

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="agentkv-step", daemon=True)
        _step_threads[thread] = ref(self)
        thread.start()

    def _run(self) -> None:
        core = self._begin()
        while core is not None and self._turn(core):
            pass

    def _begin(self) -> Core | None:
        try:
            core = self._open_core()
        except BaseException as error:
            self._open_error = error
            self._publish(self._opened.set, self._ended.set)
            self._thread_ended.set()
            return None
        self._publish(self._opened.set)
        return core

    def _turn(self, core: Core) -> bool:
        """Apply what was posted and run a step; False once the thread's work has ended."""
        try:
            if not core.is_given_up and self._apply(core):
                self._step(core)
                return True
        except BaseException as error:
            self._publish(partial(self._die, error))
        self._close_core(core)
        self._publish(self._ended.set)
        self._thread_ended.set()
        return False

    def _open_core(self) -> Core:
        runner = self._open_runner(self.config)
        if not isinstance(runner, Runner):
            raise InvalidOptionError(f"open_runner gave {short(runner)}, which is no Runner")
        self.runner = runner
        try:
            core = self._make_core(self.runner)
        except BaseException:
            self.runner.close()
            raise
        self.stats = core.stats()
        self._core = core
        return core

    def _make_core(self, runner: Runner) -> Core:
        return Core(runner, self.config)

    def _step(self, core: Core) -> None:
        changed = core.step() if core.has_work else []
        if core.is_given_up:
            return
        self.stats = core.stats()
        if changed:
            # No variable holds these: a failure's traceback keeps this frame.
            self._publish(partial(self._deliver, [(each, each.outcome) for each in changed]))
        if self.config.debug and not core.has_work:
            core.check()

    def _apply(self, core: Core) -> bool:
        """Apply every posted command, waiting for one when there is no work; False to end."""
        try:
            command = self._commands.get(block=not core.has_work)
            while command is not None:
                command(core)
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _submit_to(self, core: Core, request: Request) -> None:
        try:
            core.submit(request)
        except Exception as error:
            request.outcome = Failed(error)
            self._publish(partial(self._deliver, [(request, request.outcome)]))

    def _close_core(self, core: Core) -> None:
        try:
            core.close()
        except Exception:
            _logger.exception("the engine's KV memory could not be freed")
        if not core.is_given_up:
            self.stats = core.stats()

    def _publish(self, *deliveries: Callable[[], object]) -> None:
        self._outbox.extend(deliveries)
        loop: Any = self._loop  # Any: an asyncio loop or a TrioToken, neither of which is imported
        try:
            if hasattr(loop, "run_sync_soon"):
                loop.run_sync_soon(self._drain, idempotent=True)
            else:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            # The loop is gone and nobody waits any more: end the thread.
            self._commands.put(None)


@atexit.register
def _end_step_threads() -> None:
    # The interpreter kills a daemon thread where it stands; in native code, in the middle of a load
    # say, that aborts the process. So they are let go before, unless a step is known to hang.
    for thread, find in list(_step_threads.items()):
        worker = find()
        if worker is None:
            # It frees what the engine held, and then it has ended.
            thread.join(EngineConfig().close_timeout_s)
        elif not worker._is_given_up:
            worker.abandon()
            thread.join(worker.config.close_timeout_s)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine has been closed")


def _running_loop(kind: object) -> object:
    """The loop that runs on this thread, if it is of the same library as `kind`."""
    try:
        if hasattr(kind, "run_sync_soon"):
            return sys.modules["trio"].lowlevel.current_trio_token()
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
