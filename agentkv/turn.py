"""One turn of a session: from checked options and entries to a request, from ids to a completion.

Owns no session state: what a turn leads to is handed back, and the session commits it or not.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import numpy as np

from .config import EngineConfig, SamplingOptions
from .errors import ContextLengthError, OutOfBlocksError
from .messages import Completion, Message
from .text import conversation as text
from .text.budget import HurriedError, abandonable, hurried
from .text.conversation import Conversation, Entry, TurnPlan
from .text.stopping import ReplyText, StopMatcher
from .text.tokenizer import ChatTokenizer
from .worker import Call, Finished, ModelInfo, Request, Snapshot, Worker

T = TypeVar("T")

# Rendering and encoding this much text takes well under a millisecond; more is done off the loop.
ON_LOOP_CHARS = 8_000
# To make text of a sampled id takes as long as so many characters, and so many more for each string
# that may stop the reply.
ID_CHARS, STOP_CHARS = 10, 4
# Text is handled by as many threads at most, none of them taken from those of the application,
# which may all be waiting for a session.
TEXT_THREADS = 4


@dataclass(slots=True, weakref_slot=True)
class Host:
    """What an engine hands to its sessions."""

    worker: Worker
    tokenizer: ChatTokenizer | None
    info: ModelInfo
    config: EngineConfig
    limit: int
    sessions: WeakValueDictionary[str, object] = field(default_factory=WeakValueDictionary)
    text_threads: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(TEXT_THREADS)
    )
    opened: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A session's committed state: the conversation's text, its ids with their KV, and its key."""

    conversation: Conversation
    snapshot: Snapshot
    key: int


class Turn:
    """A session's turn in progress: the lock it holds and the calls it made. Close it once."""

    __slots__ = ("_lock", "calls", "options", "plan")

    def __init__(self, lock: anyio.Semaphore, plan: TurnPlan, options: SamplingOptions) -> None:
        self._lock: anyio.Semaphore | None = lock
        self.plan: TurnPlan = plan
        self.options: SamplingOptions = options
        self.calls: list[Call] = []

    def close(self) -> None:
        """Give up what was not committed and let the next call of the session run. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            for call in self.calls:
                call.close()
            lock.release()


def derive_key(key: int, purpose: Literal["root", "fork", "rollback"], ordinal: int) -> int:
    """A 64-bit key that depends on all three, and on nothing else."""
    framed = f"agentkv:{purpose}:{key}:{ordinal}".encode()
    return int.from_bytes(hashlib.blake2b(framed, digest_size=8).digest(), "little")


async def plan_turn(
    host: Host, state: State, entries: tuple[Entry, ...], *, reply: bool
) -> TurnPlan:
    """The ids that a turn appends, computed off the loop where it may take long."""
    size = state.conversation.num_chars + sum(
        len(entry.content) if isinstance(entry, Message) else len(entry) for entry in entries
    )

    def run() -> TurnPlan:
        return text.plan(
            host.tokenizer,
            state.conversation,
            state.snapshot.ids,
            entries,
            limit=host.limit,
            reply=reply,
            vocab_size=host.info.vocab_size,
        )

    return await handle_text(host, run, size)


async def handle_text(host: Host, work: Callable[[], T], num_chars: int) -> T:
    """The result of `work`, which handles so much text; off the loop when that may take long."""
    if num_chars <= ON_LOOP_CHARS:
        # What turns out to take its time all the same is begun again off the loop.
        with suppress(HurriedError), hurried():
            return work()
    return await _off_loop(host, work)


async def _off_loop(host: Host, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in one of the engine's text threads."""
    # An error passes as a value, and out of the thread's reach: raised in the thread it would stay
    # in a cycle with the future that carries it, and keep the caller's session.
    outcome: list[tuple[T, None] | tuple[None, Exception]] = []

    gone = threading.Event()

    def run() -> None:
        try:
            with abandonable(gone):
                outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    try:
        await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=host.text_threads)
    finally:
        # A cancelled call leaves no thread behind that works for nobody.
        gone.set()
    value, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:
            error = None
    return value  # type: ignore[return-value]  # None only beside an error, or when T is None


def out_of_time(timeout: float | None) -> TimeoutError:
    """The error of a turn that was not whole after `timeout` seconds."""
    return TimeoutError(f"no whole reply within timeout={timeout} s; the turn is discarded")


def check_capacity(
    host: Host, plan: TurnPlan, max_tokens: int | None, *, min_tokens: int = 1, rows: int = 1
) -> int:
    """The number of tokens the reply may have at most.

    Raises:
        ContextLengthError: prompt and reply exceed the context or the whole pool.
        OutOfBlocksError: `rows` replies to one prompt do not fit together.
    """
    prompt = plan.keep + len(plan.new_ids)
    least = max_tokens or max(1, min_tokens)
    if prompt + least > host.limit:
        raise ContextLengthError(prompt + least, host.limit)
    size = host.info.block_size
    shared, rest = divmod(prompt, size)
    own = (host.info.num_blocks - shared) // rows
    room = min(host.limit - prompt, own * size - rest)
    if room < least:
        raise OutOfBlocksError(shared + rows * -(-(rest + least) // size), host.info.num_blocks)
    return max_tokens if max_tokens is not None else room


def build_request(
    host: Host,
    snapshot: Snapshot,
    turn: Turn,
    *,
    kind: Literal["generate", "warm", "score"],
    key: tuple[int, int] = (0, 0),
    max_new_tokens: int = 0,
    priority: int = 0,
    score_ids: Sequence[int] = (),
) -> Request:
    """The request that the step thread gets for a turn."""
    options = turn.options
    eos = () if options.ignore_eos else host.info.eos_token_ids
    stop = None
    if options.stop and host.tokenizer is not None and kind == "generate":
        stop = StopMatcher(
            host.tokenizer,
            options.stop,
            min_tokens=options.min_tokens,
            after=turn.plan.reply_context,
        )
    return Request(
        snapshot=snapshot,
        keep=turn.plan.keep,
        new_ids=turn.plan.new_ids,
        namespace=snapshot.namespace,
        kind=kind,
        options=options,
        key=key,
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset((*eos, *options.stop_token_ids)),
        stop=stop,
        constraint=None,
        priority=priority,
        score_ids=np.asarray(score_ids, dtype=np.int32),
    )


async def complete(host: Host, call: Call, finished: Finished, turn: Turn) -> Completion:
    """The finished reply of one call as users see it; its text is made off the loop when long."""
    options, tokenizer = turn.options, host.tokenizer
    ids = tuple(call.request.output_ids)
    visible = ""
    stop_reason: str | int | None = finished.stop_token
    if tokenizer is not None:

        def read() -> tuple[str, str | None]:
            reply = ReplyText(
                tokenizer,
                options.stop,
                min_tokens=options.min_tokens,
                after=turn.plan.reply_context,
            )
            kept = ids if finished.stop_token is None else ids[:-1]
            return reply.push(kept) + reply.finish(), reply.stop_string

        size = len(ids) * (ID_CHARS + STOP_CHARS * len(options.stop))
        visible, stop_string = await handle_text(host, read, size)
        stop_reason = stop_string if finished.stop_token is None else finished.stop_token
    assert finished.finish_reason is not None, "a generated reply has a reason to end"
    return Completion(
        text=visible,
        token_ids=ids,
        finish_reason=finished.finish_reason,
        stop_reason=stop_reason,
        usage=finished.usage,
        logprobs=tuple(call.request.logprobs) if options.logprobs else None,
    )
