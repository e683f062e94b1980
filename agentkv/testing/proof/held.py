"""A session next to what it must hold: a plain list of ids that shares nothing.

Every turn that returns is added to the list as the witness says it; any other leaves it as it was.
"""

from __future__ import annotations

from typing import Literal

from ...session import Session, Status
from ..witness import witness_reply

__all__ = ["Ending", "Held"]

Ending = Literal["read", "result", "stop", "leave"]


class Held:
    """A session, its committed ids, and those added to it that no turn has computed yet."""

    def __init__(
        self, session: Session, ids: list[int] | None = None, pending: list[int] | None = None
    ) -> None:
        self.session: Session = session
        self.ids: list[int] = ids or []
        self.pending: list[int] = pending or []

    @property
    def known(self) -> list[int]:
        """The ids that the next turn starts from."""
        return self.ids + self.pending

    def adopt(self, session: Session) -> Held:
        """Another session in the same state."""
        return Held(session, list(self.ids), list(self.pending))

    def fork(self) -> Held:
        """A fork of the session."""
        return self.adopt(self.session.fork())

    def take(self, other: Held) -> None:
        """Adopt the session of `other`."""
        self.session.adopt(other.session)
        assert other.session.status is Status.CLOSED, "an adopted session stays open"
        self.ids, self.pending = other.ids, other.pending

    def commit(self, new_ids: list[int]) -> None:
        """The session must have `new_ids` now, after all that it knew."""
        self.ids, self.pending = self.known + new_ids, []

    async def warm(self) -> None:
        """Warm the session."""
        await self.session
        self.commit([])

    async def generate(
        self,
        new_ids: list[int],
        count: int,
        *,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """A turn of `count` ids, greedy unless a seed is given."""
        await self.session.generate(
            new_ids,
            max_tokens=count,
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            timeout=timeout,
        )
        # Those before it in the queue have returned by now.
        key = None if seed is None else (seed, 0)
        self.commit(new_ids + witness_reply(self.known + new_ids, count, key=key))

    async def stream(
        self, new_ids: list[int], count: int, *, reads: int = 0, ends: Ending = "read"
    ) -> None:
        """A turn of which `reads` deltas are read, or all, before it ends in this way."""
        async with self.session.stream(new_ids, max_tokens=count, temperature=0.0) as stream:
            async for _ in stream:
                reads -= 1
                if reads <= 0 and ends != "read":
                    break
            if ends == "leave" and reads <= 0:
                return
            done = await (stream.stop() if ends == "stop" else stream.result())
            self.commit(new_ids + witness_reply(self.known + new_ids, len(done.token_ids)))

    def verify(self) -> None:
        """The session holds what it must."""
        ids = list(self.session.token_ids)
        assert ids == self.ids, f"{self.session} has {ids} and must have {self.ids}"
