"""A checkpoint: a committed state of a session that is kept to return to."""

from __future__ import annotations

from contextlib import suppress

from .handle import Handle
from .turn import Host, State
from .worker import Lease

__all__ = ["Checkpoint"]


class Checkpoint(Handle):
    """A committed state of a session, kept so that `rollback` can return to it.

    It holds KV until it is closed or dropped; it is an async context manager that closes.
    """

    __slots__ = ("__weakref__", "_host", "_lease", "_owner", "_state")

    def __init__(self, host: Host, owner: str, state: State) -> None:
        self._host = host
        self._owner = owner
        self._state: State | None = state
        self._lease = Lease(host.worker, state.snapshot)

    async def aclose(self) -> None:
        """Let go of the state. Idempotent.

        Raises:
            WrongLoopError: another event loop runs the engine.
        """
        if self._state is not None:
            self._host.worker.check_closing()
        self._state = None
        self._lease.close()

    async def __aenter__(self) -> Checkpoint:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._host.worker.dropped.append(self._lease)

    def __repr__(self) -> str:
        state = "closed" if self._state is None else f"{len(self._state.snapshot.ids)} tokens"
        return f"<Checkpoint of {self._owner}, {state}>"
