"""What a turn appends to a conversation's ids: the difference of two renderings.

Ids are the truth. Sampled ids are never encoded again, unless the template itself rewrites an
earlier message; then everything from there on is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from ..core.batch import TokenArray
from ..errors import ChatTemplateError, InvalidOptionError, RequestError
from ..messages import FinishReason, Message
from .rendering import Part, drop_prefix, text_of
from .tokenizer import ChatTokenizer, check_messages

__all__ = [
    "Conversation",
    "Entry",
    "TurnPlan",
    "checked_ids",
    "commit",
    "extend",
    "plan",
    "start",
    "start_from_ids",
]

Entry = Message | tuple[int, ...]


class StoredIds(Protocol):
    """The ids of a committed conversation."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> TokenArray:
        """Ids of positions start..stop-1."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """The text of a conversation beside its ids.

    `committed` messages have ids, `pending` entries have none yet. `borders` are pairs (messages,
    ids) at which a reply ended. `is_open` says that the last reply was cut short, `is_pure` that
    all ids come from rendering, so that they may be encoded again.
    """

    committed: tuple[Message, ...] = ()
    pending: tuple[Entry, ...] = ()
    borders: tuple[tuple[int, int], ...] = ()
    is_open: bool = False
    is_pure: bool = True
    is_raw: bool = False
    started: datetime | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, pending ones included."""
        return (*self.committed, *_messages(self.pending))

    @property
    def num_chars(self) -> int:
        """Characters, and pending raw ids, that a rendering must handle."""
        pending = sum(_size(entry) for entry in self.pending)
        return pending + sum(len(message.content) for message in self.committed)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Keep the first `keep` stored ids and append `new_ids`; `conversation` is the text then."""

    keep: int
    new_ids: TokenArray
    conversation: Conversation
    is_continuation: bool = False
    is_empty: bool = False


def start(messages: Sequence[Message]) -> Conversation:
    """A conversation that opens with messages."""
    check_messages(messages)
    return Conversation(pending=tuple(messages))


def start_from_ids(ids: Sequence[int]) -> Conversation:
    """A conversation without a chat template, that opens with token ids."""
    return Conversation(pending=(tuple(ids),), is_raw=True, is_pure=False)


def extend(conversation: Conversation, entries: tuple[Entry, ...]) -> Conversation:
    """The conversation with more pending entries.

    Raises:
        RequestError: a message has an unknown role.
        ChatTemplateError: a message follows on token ids that have no template.
    """
    _check_entries(conversation, entries)
    return replace(conversation, pending=(*conversation.pending, *entries))


def checked_ids(ids: Iterable[object]) -> tuple[int, ...]:
    """Token ids as plain ints.

    Raises:
        InvalidOptionError: one is not an integer, or is outside 0 .. 2**31 - 1.
    """
    values: list[Any] = list(ids)  # Any: what a user calls token ids
    for value in values:
        is_integer = type(value) is int or isinstance(value, np.integer)
        if not is_integer or not 0 <= int(value) < 2**31:
            raise InvalidOptionError(
                f"a token id must be an integer from 0 to {2**31 - 1}, not {value!r:.40}"
            )
    return tuple(int(value) for value in values)


def plan(
    tokenizer: ChatTokenizer | None,
    conversation: Conversation,
    ids: StoredIds,
    entries: tuple[Entry, ...],
    *,
    limit: int,
    reply: bool,
    vocab_size: int,
) -> TurnPlan:
    """What the entries, and those pending, append to the stored ids.

    With `reply` the model is asked to answer; without, only what stays the same whatever follows
    is encoded.

    Raises:
        RequestError: there is nothing to answer and no reply to continue.
        ChatTemplateError: the template refuses the messages, or there is none.
        ContextLengthError: the text cannot fit in `limit` tokens.
        InvalidOptionError: a token id is outside the vocabulary.
    """
    _check_entries(conversation, entries)
    fresh = (*conversation.pending, *entries)
    _check_vocabulary(fresh, vocab_size)
    conversation = replace(conversation, pending=(), started=conversation.started or datetime.now())
    if not fresh:
        return _plan_without_entries(tokenizer, conversation, ids, reply)
    if _messages(fresh) and tokenizer is None:
        raise ChatTemplateError("text needs a tokenizer, and this engine has none")
    if tokenizer is not None:
        tokenizer.check_length([message.content for message in _messages(fresh)], limit)
    keep, new = len(ids), []
    groups = [(kind, list(group)) for kind, group in groupby(fresh, lambda e: type(e) is Message)]
    for at, (is_text, group) in enumerate(groups):
        if not is_text:
            new += [token for span in group for token in span]  # type: ignore[union-attr]  # spans
            conversation = replace(conversation, is_pure=False)
            continue
        assert tokenizer is not None, "checked above"
        messages = tuple(entry for entry in group if isinstance(entry, Message))
        asks = reply and at == len(groups) - 1
        delta = _Delta(tokenizer, conversation, ids, len(ids) + len(new), asks, limit)
        kept, more = delta.append(messages)
        if kept < keep:
            keep, new = kept, []
        new += more
        conversation = replace(
            conversation,
            committed=(*conversation.committed, *messages),
            borders=tuple(border for border in delta.borders if border[1] <= keep),
        )
    conversation = replace(conversation, is_open=False)
    return TurnPlan(keep, np.asarray(new, dtype=np.int32), conversation)


def commit(turn: TurnPlan, text: str, finish_reason: FinishReason | None) -> Conversation:
    """The conversation after the reply to a planned turn."""
    done = turn.conversation
    messages = done.committed
    if turn.is_continuation and messages and messages[-1].role == "assistant":
        text = messages[-1].content + text
        messages = messages[:-1]
    return replace(
        done,
        committed=(*messages, Message("assistant", text)),
        is_open=finish_reason in ("length", "stopped"),
        is_pure=False,
    )


def _plan_without_entries(
    tokenizer: ChatTokenizer | None, conversation: Conversation, ids: StoredIds, reply: bool
) -> TurnPlan:
    nothing = np.empty(0, dtype=np.int32)
    if not reply:
        return TurnPlan(len(ids), nothing, conversation, is_empty=True)
    if conversation.is_open:
        return TurnPlan(len(ids), nothing, conversation, is_continuation=True)
    messages = conversation.committed
    answered = bool(messages) and messages[-1].role == "assistant"
    if answered or not len(ids):
        raise RequestError("there is nothing to answer: give a prompt, or add a message first")
    if conversation.is_raw or tokenizer is None or not messages:
        return TurnPlan(len(ids), nothing, conversation)
    keep, new = _Delta(tokenizer, conversation, ids, len(ids), True, len(ids) + 2**20).append(())
    return TurnPlan(keep, np.asarray(new, dtype=np.int32), conversation)


class _Delta:
    """Messages appended to a conversation whose rendering, and ids, are known."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        conversation: Conversation,
        ids: StoredIds,
        num_ids: int,
        reply: bool,
        limit: int,
    ) -> None:
        assert conversation.started is not None, "set before anything is rendered"
        self._tokenizer = tokenizer
        self._conversation = conversation
        self._ids = ids
        self._num_ids = num_ids
        self._reply = reply
        self._limit = limit
        self._now = conversation.started
        here = (len(conversation.committed), num_ids)
        ends_reply = bool(conversation.committed) and (
            conversation.committed[-1].role == "assistant"
        )
        self.borders = (*conversation.borders, here) if ends_reply else conversation.borders
        self._here = here

    def append(self, messages: tuple[Message, ...]) -> tuple[int, list[int]]:
        """How many stored ids to keep, and the ids to append to them."""
        everything = (*self._conversation.committed, *messages)
        if self._conversation.is_pure:
            return self._encode_again(everything)
        whole = self._render(everything, reply=self._reply)
        text = text_of(whole)
        for num_messages, num_ids in dict.fromkeys((self._here, *reversed(self.borders))):
            before = everything[:num_messages]
            known = text_of(self._render(before)) if before else ""
            if text.startswith(known):
                rest = self._closing(before, num_ids) + drop_prefix(whole, len(known))
                return num_ids, self._tokenizer.encode_part(
                    rest, anchored=num_ids > 0, limit=self._limit
                )
        return 0, self._tokenizer.encode_part(whole, limit=self._limit)

    def _encode_again(self, everything: tuple[Message, ...]) -> tuple[int, list[int]]:
        ids = self._encode_prompt(everything)
        stored = self._ids.slice(0, min(len(self._ids), len(ids)))
        differing = np.flatnonzero(stored != np.asarray(ids[: len(stored)], dtype=np.int32))
        keep = int(differing[0]) if len(differing) else len(stored)
        return keep, ids[keep:]

    def _encode_prompt(self, everything: tuple[Message, ...]) -> list[int]:
        try:
            whole = self._render(everything, reply=self._reply)
        except ChatTemplateError:
            if self._reply:
                raise
            # The template wants a user's message: take what two different ones have in common.
            first, second = (
                self._tokenizer.encode_part(self._render((*everything, Message("user", text))))
                for text in ("a", "b")
            )
            same = 0
            while same < min(len(first), len(second)) and first[same] == second[same]:
                same += 1
            return first[:same]
        return self._tokenizer.encode_part(whole, limit=self._limit)

    def _render(self, messages: tuple[Message, ...], *, reply: bool = False) -> Part:
        (part,) = self._tokenizer.render_parts(messages, add_generation_prompt=reply, now=self._now)
        return part

    def _closing(self, before: tuple[Message, ...], num_ids: int) -> Part:
        """What the template writes after the last reply and its stored ids do not have."""
        if not before or before[-1].role != "assistant":
            return []
        parts = self._tokenizer.render_parts(
            before, add_generation_prompt=False, now=self._now, replies=(len(before) - 1,)
        )
        if len(parts) != 2:
            return []
        closing, text = parts[1], text_of(parts[1])
        last = (
            int(self._ids.slice(num_ids - 1, num_ids)[0]) if 0 < num_ids <= len(self._ids) else -1
        )
        if self._tokenizer.starts_with_control(text, last):
            token = self._tokenizer.backend.id_to_token(last)
            return drop_prefix(closing, text.index(token) + len(token))
        return closing


def _check_entries(conversation: Conversation, entries: tuple[Entry, ...]) -> None:
    messages = _messages(entries)
    check_messages(messages)
    if messages and conversation.is_raw:
        raise ChatTemplateError(
            "the conversation opened with token ids, so it has no chat template for text"
        )


def _check_vocabulary(entries: tuple[Entry, ...], vocab_size: int) -> None:
    for entry in entries:
        if not isinstance(entry, Message) and entry and max(entry) >= vocab_size:
            raise InvalidOptionError(
                f"token id {max(entry)} is outside the vocabulary of {vocab_size}"
            )


def _messages(entries: tuple[Entry, ...]) -> tuple[Message, ...]:
    return tuple(entry for entry in entries if isinstance(entry, Message))


def _size(entry: Entry) -> int:
    return len(entry.content) if isinstance(entry, Message) else len(entry)
