"""A session: an agent's conversation, cheap to hold, to fork and to drop.

Owns the committed state of one conversation and the order of its calls. The KV belongs to the
engine; a session holds a lease on the snapshot that names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import Unpack
from weakref import ReferenceType, ref

import anyio
import msgspec

from .checkpoint import Checkpoint
from .config import (
    GenerateOptions,
    SamplingOptions,
    check_integer,
    check_number,
    check_string,
    short,
)
from .errors import (
    CheckpointError,
    NamespaceError,
    QueueFullError,
    RequestError,
    SessionBusyError,
    SessionClosedError,
)
from .handle import Handle
from .messages import Completion, Message, Usage
from .prompt import Prompt, check_scored, encode_continuations, parse_options, to_entries
from .stream import Stream
from .text import conversation as text
from .text.conversation import Entry
from .turn import (
    Host,
    State,
    Turn,
    build_request,
    check_capacity,
    complete,
    derive_key,
    out_of_time,
    plan_turn,
)
from .worker import Finished, Lease

__all__ = ["Session", "Status"]


class Status(Enum):
    """What a session is doing."""

    IDLE = "idle"
    RUNNING = "running"
    STREAMING = "streaming"
    CLOSED = "closed"


class Session(Handle):
    """A handle on one conversation. Calls on it run one at a time, in the order they first run.

    Made by `Engine.session` and `fork`. Awaiting it warms it: the messages so far are encoded and
    prefilled, so that the next call computes its own tokens alone. Dropping it closes it.
    """

    __slots__ = (
        "__weakref__",
        "_forks",
        "_host",
        "_is_closed",
        "_lease",
        "_lock",
        "_priority",
        "_state",
        "_stream",
        "_turn",
        "_usage",
        "_waiting",
        "id",
        "name",
        "parent",
    )

    def __init__(
        self, host: Host, state: State, *, parent: str | None, name: str | None, priority: int
    ) -> None:
        host.opened += 1
        self.id: str = f"s{host.opened}"
        self.name: str | None = name
        self.parent: str | None = parent
        self._host = host
        self._state = state
        self._lease = Lease(host.worker, state.snapshot)
        self._lock = anyio.Semaphore(1, max_value=1, fast_acquire=True)
        self._priority = priority
        self._usage = Usage()
        self._forks = 0
        self._turn: Turn | None = None
        self._stream: ReferenceType[Stream] | None = None
        self._waiting: set[anyio.CancelScope] = set()
        self._is_closed = False
        host.sessions[self.id] = self

    # What is committed.

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far, those added and not yet computed included."""
        return self._state.conversation.messages

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the committed conversation, sampled ones as they were sampled."""
        return tuple(self._state.snapshot.ids.to_array().tolist())

    @property
    def usage(self) -> Usage:
        """Tokens of all committed calls of this session."""
        return self._usage

    @property
    def status(self) -> Status:
        """What the session is doing."""
        if self._is_closed:
            return Status.CLOSED
        if self._open_stream() is not None:
            return Status.STREAMING
        return Status.IDLE if self._lock.value else Status.RUNNING

    # Turns.

    def __await__(self) -> Generator[object, None, Session]:
        return self._warm().__await__()

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Append `prompt` and the model's reply to the conversation.

        `prompt` is a user's text, messages, or token ids appended as they are. None continues a
        reply that was cut short, or answers what `add` appended. Cancellation, a timeout or an
        error leaves the session as it was before the call. The options, max_tokens, temperature,
        top_p, top_k, min_p, seed, stop and more, are those of SamplingOptions.

        Raises:
            TimeoutError: `timeout` seconds have passed since the call, waiting included.
            TypeError: an option is not known.
            RequestError: the prompt or an option is wrong.
            CapacityError: the prompt does not fit, or too many calls wait.
            SessionError: the session is closed, or a stream of it is open.
            EngineError: the engine is closed, or a step failed.
        """
        return await self._generate(prompt, 1, timeout, options)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """As `generate`, with the text while it is made: `async with session.stream(...) as s`.

        The turn is committed when the reader reaches the end or awaits `result()` or `stop()`;
        leaving the block earlier discards it.

        Raises:
            TypeError: an option is not known.
            RequestError: the prompt or an option is wrong.
            CapacityError: by its length alone the prompt cannot fit.
            WrongLoopError: there is a timeout, and this is not the engine's loop.
        """
        chosen = parse_options(self._host, options)
        entries = to_entries(self._host, prompt)
        check_number("timeout", timeout, 0.0, 1e9)
        self._host.worker.check_loop()

        async def begin(stream: Stream) -> Turn:
            turn = await self._begin(entries, chosen, reply=True)
            try:
                self._submit(turn, 1)
            except BaseException:
                self._end(turn)
                raise
            self._stream = ref(stream)
            # Nobody waits for a stream's end: its reader may wait for them.
            for scope in self._waiting:
                scope.cancel()
            return turn

        return Stream(self._host, begin, self._commit, self._end, timeout)

    def add(self, *messages: Prompt) -> None:
        """Append messages (text: a user's; a list: of messages or ids) and compute nothing.

        Raises:
            SessionBusyError: a call runs or waits.
            RequestError: a message is wrong.
            ContextLengthError: by their length alone the messages cannot fit.
        """
        self._check_idle()
        host = self._host
        if any(message is None for message in messages):
            raise RequestError("a message to add is text or a Message, not None")
        entries = [entry for message in messages for entry in to_entries(host, message)]
        conversation = text.extend(self._state.conversation, tuple(entries))
        text.check_size(host.tokenizer, conversation, host.limit)
        self._state = replace(self._state, conversation=conversation)

    async def score(self, texts: Sequence[str]) -> list[float]:
        """The sum of the natural-log probabilities of each text's tokens, as the next reply.

        Nothing is appended to the conversation.

        Raises:
            RequestError: there is no text, a text has no tokens, or nothing asks for a reply.
            CapacityError: a text does not fit, or there are too many.
        """
        check_scored(self._host, texts)
        turn = await self._begin((), SamplingOptions(), reply=True)
        try:
            encoded = await encode_continuations(self._host, texts)
            self._check_open()
            check_capacity(self._host, turn.plan, max(map(len, encoded)))
            requests = [
                build_request(
                    self._host,
                    self._state.snapshot,
                    turn,
                    kind="score",
                    priority=self._priority,
                    score_ids=ids,
                )
                for ids in encoded
            ]
            turn.calls = self._host.worker.submit(requests)
            scores = []
            for call in turn.calls:
                finished = await call.result()
                assert finished is not None
                assert finished.score is not None
                scores.append(finished.score)
            self._check_open()
            return scores
        finally:
            self._end(turn)

    # Branching.

    def fork(self, *, name: str | None = None) -> Session:
        """A session that goes on from the committed state; no KV and no ids are copied.

        Parent and fork are equals: either may close first, run at the same time, be forked again.

        Raises:
            SessionClosedError: the session is closed.
        """
        self._check_open()
        check_string("name", name)
        self._forks += 1
        state = replace(self._state, key=derive_key(self._state.key, "fork", self._forks))
        return Session(self._host, state, parent=self.id, name=name, priority=self._priority)

    @asynccontextmanager
    async def branches(self, n: int) -> AsyncIterator[list[Session]]:
        """`n` forks for `async with session.branches(n) as forks`.

        They are closed at the end of the block, unless adopted.

        Raises:
            InvalidOptionError: `n` is no integer from 1 to 65536.
            SessionClosedError: the session is closed.
        """
        check_integer("n", n, 1, 65536, optional=False)
        forks = [self.fork() for _ in range(n)]
        try:
            yield forks
        finally:
            for fork in forks:
                fork._close()

    def adopt(self, branch: Session) -> None:
        """Become `branch`: take its conversation and close it.

        Raises:
            SessionBusyError: either has a running or waiting call.
            SessionClosedError: either is closed.
            RequestError: it is this session itself, or another engine's.
            NamespaceError: they are in different namespaces.
        """
        self._check_idle()
        if not isinstance(branch, Session):
            raise RequestError(f"a session adopts another session, not {short(branch)}")
        branch._check_idle()
        if branch is self or branch._host is not self._host:
            raise RequestError("a session adopts another session of the same engine")
        if branch._state.snapshot.namespace != self._state.snapshot.namespace:
            raise NamespaceError("a session cannot adopt one from another namespace")
        self._install(branch._state, branch._usage)
        # With the branch's key comes the number of forks that have drawn from it.
        self._forks = branch._forks
        branch._close()

    def checkpoint(self) -> Checkpoint:
        """The committed state, to return to with `rollback`; it holds its KV until closed."""
        self._check_open()
        return Checkpoint(self._host, self.id, self._state)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Return to a checkpoint of this session; what is sampled next draws from a new key.

        Raises:
            SessionBusyError: a call runs or waits.
            CheckpointError: the checkpoint is closed, or another session's.
        """
        self._check_idle()
        if not isinstance(checkpoint, Checkpoint):
            raise RequestError(f"a session rolls back to a checkpoint, not {short(checkpoint)}")
        if checkpoint._owner != self.id or checkpoint._host is not self._host:
            raise CheckpointError(f"the checkpoint belongs to {checkpoint._owner}, not {self.id}")
        if checkpoint._state is None:
            raise CheckpointError("the checkpoint has been closed")
        self._forks += 1
        key = derive_key(self._state.key, "rollback", self._forks)
        self._install(replace(checkpoint._state, key=key), Usage())

    # Life.

    async def aclose(self) -> None:
        """Close: running and waiting calls end with SessionClosedError. Idempotent."""
        self._close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._host.worker.dropped.append(self._lease)

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        tokens = len(self._state.snapshot.ids)
        return f"<Session {self.id}{name}, {self.status.value}, {tokens} tokens>"

    def _close(self) -> None:
        if self._is_closed:
            return
        self._host.worker.check_closing()
        self._is_closed = True
        self._host.sessions.pop(self.id, None)
        if self._turn is not None:
            for call in self._turn.calls:
                call.fail(SessionClosedError(f"session {self.id} was closed during the call"))
        self._lease.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError(f"session {self.id} has been closed")
        self._host.worker.check()

    def _check_idle(self) -> None:
        self._check_open()
        if self._lock.value == 0:
            raise SessionBusyError(
                f"session {self.id} has a running or waiting call; await it first, or use a fork"
            )

    def _open_stream(self) -> Stream | None:
        stream = self._stream() if self._stream is not None else None
        return stream if stream is not None and stream.is_open else None

    async def _begin(
        self,
        entries: tuple[Entry, ...],
        options: SamplingOptions,
        *,
        reply: bool,
    ) -> Turn:
        """Wait for the session's other calls, then plan a turn on what they left."""
        self._check_open()
        if self._open_stream() is not None:
            raise SessionBusyError(
                f"a stream of session {self.id} is open; leave its block first, or use a fork"
            )
        most = self._host.config.max_waiting_per_session
        if self._lock.statistics().tasks_waiting >= most:
            raise QueueFullError(
                f"max_waiting_per_session={most} calls wait for session {self.id} already"
            )
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await self._lock.acquire()
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise SessionBusyError(f"a stream of session {self.id} was opened first")
        turn = None
        try:
            self._check_open()
            plan = await plan_turn(self._host, self._state, entries, reply=reply)
            turn = self._turn = Turn(self._lock, plan, options)
            return turn
        finally:
            if turn is None:
                self._lock.release()

    async def _generate(
        self, prompt: Prompt | None, n: int, timeout: float | None, options: GenerateOptions
    ) -> Completion:
        """`n` replies to one prompt, the first of which is committed."""
        chosen = parse_options(self._host, options)
        entries = to_entries(self._host, prompt)
        check_number("timeout", timeout, 0.0, 1e9)
        self._check_open()
        with anyio.move_on_after(timeout):
            turn = await self._begin(entries, chosen, reply=True)
            try:
                self._submit(turn, n)
                finished = [await call.result() for call in turn.calls]
                samples = tuple(
                    [
                        await complete(self._host, call, end, turn)
                        for call, end in zip(turn.calls, finished, strict=True)
                        if end is not None
                    ]
                )
                assert finished[0] is not None
                first = samples[0]
                self._commit(turn, finished[0], first)
                return first if n == 1 else msgspec.structs.replace(first, samples=samples)
            finally:
                self._end(turn)
        raise out_of_time(timeout)

    def _submit(self, turn: Turn, n: int) -> None:
        self._check_open()
        seed = turn.options.seed
        key = self._state.key if seed is None else seed
        options = turn.options
        limit = check_capacity(
            self._host, turn.plan, options.max_tokens, min_tokens=options.min_tokens, rows=n
        )
        turn.calls = self._host.worker.submit(
            [
                build_request(
                    self._host,
                    self._state.snapshot,
                    turn,
                    kind="generate",
                    key=(key, index),
                    max_new_tokens=limit,
                    priority=self._priority,
                )
                for index in range(n)
            ]
        )

    def _commit(self, turn: Turn, finished: Finished, completion: Completion) -> None:
        conversation = text.commit(turn.plan, completion.text, completion.finish_reason)
        assert finished.snapshot is not None
        self._install(State(conversation, finished.snapshot, self._state.key), finished.usage)

    def _install(self, state: State, usage: Usage) -> None:
        # The engine may have ended, or the session been closed, while the outcome was on its way.
        self._check_open()
        self._lease.move(state.snapshot)
        self._state = state
        self._usage += usage

    def _end(self, turn: Turn) -> None:
        self._turn = None
        turn.close()

    async def _warm(self) -> Session:
        turn = await self._begin((), SamplingOptions(), reply=False)
        try:
            if turn.plan.is_empty:
                return self
            self._check_open()
            check_capacity(self._host, turn.plan, None)
            request = build_request(
                self._host, self._state.snapshot, turn, kind="warm", priority=self._priority
            )
            turn.calls = self._host.worker.submit([request])
            finished = await turn.calls[0].result()
            assert finished is not None
            assert finished.snapshot is not None
            conversation = turn.plan.conversation
            self._install(State(conversation, finished.snapshot, self._state.key), finished.usage)
            return self
        finally:
            self._end(turn)
