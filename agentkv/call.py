"""What the loop holds of the step thread's work: a call that runs, and a hold on what it left.

A `Call` follows one request; a `Lease` is one handle's hold on a snapshot. Both are of the loop
alone, and ask the worker for what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol

import anyio

from .core.core import Core
from .core.sequence import Finished, Request, Snapshot

__all__ = ["Call", "Closable", "Lease", "Owner"]


class Owner(Protocol):
    """The worker, as its calls and leases see it; asked on the loop."""

    def post(self, command: Callable[[Core], object]) -> None:
        """Run `command` on the step thread, before its next step."""
        ...

    def hold(self, snapshot: Snapshot) -> None:
        """Count one more lease of the snapshot."""
        ...

    def drop(self, snapshot: Snapshot) -> None:
        """Count one less, and release the snapshot with the last."""
        ...

    def close_call(self, call: Call) -> None:
        """Cancel what the call still runs, release what it has ended with."""
        ...


class Closable(Protocol):
    """What a dropped handle leaves behind: closed on the loop."""

    def close(self) -> None:
        """Let go. Idempotent."""
        ...


class Lease:
    """One handle's hold on a snapshot; the snapshot is released when its last lease goes."""

    __slots__ = ("_snapshot", "_worker")

    def __init__(self, worker: Owner, snapshot: Snapshot) -> None:
        self._worker = worker
        self._snapshot: Snapshot | None = snapshot
        worker.hold(snapshot)

    def move(self, snapshot: Snapshot) -> None:
        """Hold `snapshot` instead."""
        assert self._snapshot is not None, "a closed lease cannot move"
        self._worker.hold(snapshot)
        self._snapshot, previous = snapshot, self._snapshot
        self._worker.drop(previous)

    def close(self) -> None:
        """Let go. Idempotent."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            self._worker.drop(snapshot)


class Call:
    """One submitted request as its callers see it: a cursor over what the step thread appends.

    Each who waits for a call that fails gets an error object of its own.
    """

    __slots__ = ("_ended", "_grown", "_worker", "error", "finished", "is_closed", "request")

    def __init__(self, worker: Owner, request: Request) -> None:
        self._worker = worker
        self._grown: anyio.Event | None = None
        self._ended: anyio.Event | None = None
        self.request: Request = request
        self.finished: Finished | None = None
        self.error: BaseException | None = None
        self.is_closed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the request has ended, well or badly, or was given up."""
        return self.finished is not None or self.error is not None or self.is_closed

    async def progress(self, seen: int) -> int:
        """Wait for more than `seen` sampled ids, or for the end; the number there are now.

        Raises:
            AgentKVError: what made the request fail.
        """
        while len(self.request.output_ids) <= seen and not self.is_done:
            if self._grown is None:
                self._grown = anyio.Event()
            await self._grown.wait()
        self._raise_error()
        return len(self.request.output_ids)

    async def result(self) -> Finished | None:
        """Wait for the end; None when the call was closed before.

        Raises:
            AgentKVError: what made the request fail.
        """
        while not self.is_done:
            if self._ended is None:
                self._ended = anyio.Event()
            await self._ended.wait()
        self._raise_error()
        return self.finished

    def fail(self, error: Exception) -> None:
        """End a call with `error` whose outcome nobody has taken, and cancel what it runs."""
        if not self.is_closed and self.error is None:
            self.error = error
            self.close()

    def stop(self) -> None:
        """Ask the step thread to end the reply now and keep what was sampled."""
        request = self.request
        self._worker.post(lambda core: core.stop(request))

    def close(self) -> None:
        """Cancel what still runs, release what has ended. Idempotent; take `finished` first."""
        if not self.is_closed:
            self.is_closed = True
            self._worker.close_call(self)
            self._notify()

    def _raise_error(self) -> None:
        # The error itself is never raised: a traceback would lead from here to the caller's
        # session, and a dropped session would wait for the garbage collector.
        if self.error is not None:
            raise copy(self.error)

    def _notify(self) -> None:
        grown, self._grown = self._grown, None
        if grown is not None:
            grown.set()
        if self._ended is not None and self.is_done:
            self._ended.set()
