"""A reply while it is made: a cursor over the sampled ids, with text that is final.

Owns no queue: a reader that lags gets one larger delta, and nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType

import anyio

from .errors import RequestError
from .handle import Handle
from .messages import Completion, Delta
from .text.stopping import ReplyText
from .turn import Host, Turn, complete, out_of_time
from .worker import Call, Finished

__all__ = ["Stream"]


class Stream(Handle):
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
        "_unsent",
    )

    def __init__(
        self,
        host: Host,
        begin: Callable[[Stream], Awaitable[Turn]],
        commit: Callable[[Turn, Finished, Completion], None],
        end: Callable[[Turn], None],
        timeout: float | None,
    ) -> None:
        self._host = host
        self._begin = begin
        self._commit = commit
        self._end = end
        self._timeout = timeout
        self._deadline = None if timeout is None else host.worker.now() + timeout
        self._turn: Turn | None = None
        self._text: ReplyText | None = None
        # Sampled ids up to here are read, the last of them not yet in a delta with text.
        self._seen = 0
        self._unsent: list[int] = []
        self._completion: Completion | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the block has been entered, and the turn is neither committed nor discarded."""
        return self._turn is not None

    async def __aenter__(self) -> Stream:
        if self._is_closed or self._turn is not None:
            raise RequestError("a stream is entered once")
        self._host.worker.check_loop()
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

        A read that is cancelled takes nothing away: the next one goes on where it was.

        Raises:
            TimeoutError: the stream's time is up; the turn is discarded.
            AgentKVError: what made the turn fail; it is discarded.
        """
        self._host.worker.check_loop()
        text = ""
        while not text and self._turn is not None:
            call = self._turn.calls[0]
            with self._discarding(), self._time_limit():
                count = await call.progress(self._seen)
            text = self._read(call, count)
            if call.is_done and self._seen == len(call.request.output_ids):
                text += self._finish()
                break
            if self._text is None and self._unsent:
                break
        if self._turn is not None and (text or self._unsent):
            ids, self._unsent = tuple(self._unsent), []
            return Delta(text, ids)
        await self._finalize()
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Wait for the end of the reply and commit the turn.

        Raises:
            TimeoutError: the stream's time is up; the turn is discarded.
            AgentKVError: what made the turn fail; it is discarded.
        """
        self._host.worker.check_loop()
        if self._completion is None:
            await self._finalize()
        assert self._completion is not None
        return self._completion

    async def stop(self) -> Completion:
        """End the reply now, keep what was sampled and commit the turn."""
        self._host.worker.check_loop()
        if self._turn is not None:
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

    def _read(self, call: Call, count: int) -> str:
        """The text that is final with the first `count` sampled ids."""
        new = call.request.output_ids[self._seen : count]
        self._seen += len(new)
        self._unsent += new
        if self._text is None:
            return ""
        # It ends the reply, whether the loop has been told so yet or not.
        if new and new[-1] in call.request.stop_token_ids:
            new = new[:-1]
        return self._text.push(new)

    def _finish(self) -> str:
        return "" if self._text is None else self._text.finish()

    async def _finalize(self) -> None:
        turn = self._turn
        if turn is not None:
            with self._discarding(), self._time_limit():
                finished = await turn.calls[0].result()
                completion = None
                if finished is not None:
                    completion = await complete(self._host, turn.calls[0], finished, turn)
                # Another task may have committed or discarded the turn meanwhile.
                if self._turn is turn:
                    assert finished is not None, "an open turn's call has an outcome"
                    assert completion is not None, "what has an outcome is completed"
                    self._commit(turn, finished, completion)
                    self._completion = completion
            self._close()
        if self._completion is None:
            self._raise_misuse()

    def _raise_misuse(self) -> None:
        if not self._is_closed:
            raise RequestError("use the stream inside `async with`")
        raise RequestError("the stream was closed before its end; its turn is discarded")

    def _discarding(self) -> AbstractContextManager[None]:
        return _CloseOnError(self)

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        left = math.inf if self._deadline is None else self._deadline - anyio.current_time()
        if left <= 0:
            # Also for a reader that comes too late for a reply that is whole by now.
            raise out_of_time(self._timeout)
        with anyio.move_on_after(None if left == math.inf else left) as scope:
            yield
        if scope.cancelled_caught:
            raise out_of_time(self._timeout)

    def _close(self) -> None:
        self._is_closed = True
        turn, self._turn = self._turn, None
        if turn is not None:
            self._end(turn)


class _CloseOnError:
    """Discard a stream's turn when the block inside fails; cancellation alone is no failure."""

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
        if isinstance(exc, Exception):
            self._stream._close()
