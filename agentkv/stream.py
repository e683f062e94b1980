"""A reply while it is made: a cursor over the sampled ids, with text that is final.

Owns no queue: a reader that lags gets one larger delta, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType

import anyio

from .errors import RequestError
from .messages import Completion, Delta
from .text.stopping import ReplyText
from .turn import Host, Turn
from .worker import Finished

__all__ = ["Stream"]


class Stream:
    """An async context manager and iterator of `Delta`s, made by `Session.stream`.

    The turn is committed when the iteration reaches its end, or by `result()` or `stop()`. Leaving
    the block before discards it.
    """

    __slots__ = (
        "__weakref__",
        "_begin",
        "_commit",
        "_completion",
        "_deadline",
        "_end",
        "_host",
        "_is_closed",
        "_seen",
        "_text",
        "_timeout",
        "_turn",
    )

    def __init__(
        self,
        host: Host,
        begin: Callable[[Stream], Awaitable[Turn]],
        commit: Callable[[Turn, Finished], Completion],
        end: Callable[[Turn], None],
        timeout: float | None,
    ) -> None:
        self._host = host
        self._begin = begin
        self._commit = commit
        self._end = end
        self._timeout = timeout
        self._deadline: float | None = None
        self._turn: Turn | None = None
        self._text: ReplyText | None = None
        self._seen = 0
        self._completion: Completion | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the block has been entered, and the turn is neither committed nor discarded."""
        return self._turn is not None

    async def __aenter__(self) -> Stream:
        if self._is_closed or self._turn is not None:
            raise RequestError("a stream is entered once")
        if self._timeout is not None:
            self._deadline = anyio.current_time() + self._timeout
        with self._time_limit():
            self._turn = await self._begin(self)
        with self._discarding():
            self._text = self._new_text(self._turn)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._host.worker.check_closing()
        self._close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        """The next delta: never empty, never a part of a character or of a stop string.

        Raises:
            TimeoutError: the stream's time is up; the turn is discarded.
            AgentKVError: what made the turn fail; it is discarded.
        """
        if self._turn is None:
            self._raise_misuse()
            raise StopAsyncIteration
        self._host.worker.check_loop()
        call = self._turn.calls[0]
        start = self._seen
        text = ""
        while not text:
            with self._discarding(), self._time_limit():
                count = await call.progress(self._seen)
            new = call.request.output_ids[self._seen : count]
            self._seen = count
            text += self._push(new)
            if call.is_done and count == len(call.request.output_ids):
                text += self._finish()
                break
            if self._text is None and new:
                break
        if text or self._seen > start:
            return Delta(text, tuple(call.request.output_ids[start : self._seen]))
        await self._finalize()
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Wait for the end of the reply and commit the turn.

        Raises:
            TimeoutError: the stream's time is up; the turn is discarded.
            AgentKVError: what made the turn fail; it is discarded.
        """
        if self._completion is None:
            await self._finalize()
        assert self._completion is not None
        return self._completion

    async def stop(self) -> Completion:
        """End the reply now, keep what was sampled and commit the turn."""
        if self._turn is not None:
            self._host.worker.check_loop()
            self._turn.calls[0].stop()
        return await self.result()

    def __del__(self) -> None:
        with suppress(AttributeError):
            if self._turn is not None:
                self._host.worker.dropped.append(self._turn)

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed" if self._is_closed else "not entered"
        return f"<Stream {state}, {self._seen} tokens read>"

    def _new_text(self, turn: Turn) -> ReplyText | None:
        if self._host.tokenizer is None:
            return None
        options, after = turn.options, turn.plan.reply_context
        return ReplyText(
            self._host.tokenizer, options.stop, min_tokens=options.min_tokens, after=after
        )

    def _push(self, ids: list[int]) -> str:
        if self._text is None or self._turn is None:
            return ""
        finished = self._turn.calls[0].finished
        ends = finished is not None and finished.stop_token is not None
        total = len(self._turn.calls[0].request.output_ids)
        if ends and self._seen == total:
            ids = ids[:-1]
        return self._text.push(ids)

    def _finish(self) -> str:
        return "" if self._text is None else self._text.finish()

    async def _finalize(self) -> None:
        if self._turn is None:
            self._raise_misuse()
            return
        self._host.worker.check_loop()
        turn = self._turn
        with self._discarding(), self._time_limit():
            finished = await turn.calls[0].result()
            self._completion = self._commit(turn, finished)
        self._close()

    def _raise_misuse(self) -> None:
        if not self._is_closed:
            raise RequestError("use the stream inside `async with`")
        if self._completion is None:
            raise RequestError("the stream was closed before its end; its turn is discarded")

    def _discarding(self) -> AbstractContextManager[None]:
        return _CloseOnError(self)

    def _time_limit(self) -> AbstractContextManager[object]:
        left = None if self._deadline is None else self._deadline - anyio.current_time()
        return anyio.fail_after(None if left is None else max(0.0, left))

    def _close(self) -> None:
        self._is_closed = True
        turn, self._turn = self._turn, None
        if turn is not None:
            self._end(turn)


class _CloseOnError:
    """Discard a stream's turn when the block inside raises."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._stream._close()
