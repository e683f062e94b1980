"""The ids of what follows the last reply of a conversation, computed anew for each turn.

Stored ids are the truth: sampled ids stay, and are encoded anew only where the template writes an
earlier reply differently now. Then everything after the reply before that one is the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

import numpy as np

from ..core.batch import TokenArray
from ..errors import ChatTemplateError
from ..messages import Message
from .rendering import Part, drop_prefix, take_prefix, text_of
from .tokenizer import ChatTokenizer

__all__ = ["Reply", "Span", "StoredIds", "Tail", "common_length"]

# What an unseen user message is rendered as, where a reply followed raw ids.
_STAND_IN = Message("user", ".")


class StoredIds(Protocol):
    """The ids of a snapshot."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> TokenArray:
        """The ids from `start` up to `stop`."""
        ...


class Span(NamedTuple):
    """Raw ids that stand after the first `after` messages."""

    after: int
    ids: tuple[int, ...]


class Reply(NamedTuple):
    """A reply whose sampled ids are kept.

    `message` is its index, `num_spans` how many raw spans came before it. `text` is what the
    template wrote between the reply before and this one; after raw ids nothing was written right
    before it (`is_unprompted`). Its ids end at `end`; None: at the end of the stored ids.
    """

    message: int
    num_spans: int
    text: str
    is_unprompted: bool
    end: int | None


class Said(Protocol):
    """What a tail needs of a conversation."""

    @property
    def messages(self) -> tuple[Message, ...]: ...
    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def replies(self) -> tuple[Reply, ...]: ...
    @property
    def num_answered(self) -> int: ...
    @property
    def num_answered_spans(self) -> int: ...
    @property
    def opened_at(self) -> datetime: ...


class Tail:
    """What comes after the last reply that stays.

    After `target`: its ids begin at `start`, `replies` are those that stay, and `text` is what the
    template writes in the tail.
    """

    def __init__(
        self, tokenizer: ChatTokenizer | None, said: Said, ids: StoredIds, limit: int
    ) -> None:
        self._tokenizer = tokenizer
        self._said = said
        self._ids = ids
        self._limit = limit
        self.replies: tuple[Reply, ...] = said.replies
        self.text: str = ""
        spans = said.spans[said.num_answered_spans :]
        self.ends_raw: bool = bool(spans) and spans[-1].after == len(said.messages)

    @property
    def start(self) -> int:
        """Where the ids of the tail begin."""
        end = self.replies[-1].end if self.replies else 0
        assert end is not None, "the last reply's end is resolved before planning"
        return end

    def target(self, *, reply: bool) -> TokenArray:
        """The ids that the tail should have.

        Raises:
            ChatTemplateError: the messages cannot be rendered.
            ContextLengthError: a text has more ids than the limit.
        """
        if self._said.num_answered == len(self._said.messages):
            return _concatenate([span.ids for span in self._spans()])
        part = self._settle(add_generation_prompt=reply and not self.ends_raw)
        self.text = text_of(part)
        items: list[Sequence[int]] = []
        position = 0
        num_written = self.replies[-1].message + 1 if self.replies else 0
        for span in self._spans():
            if span.after > num_written:
                cut = self._cut(part, span.after)
                items.append(self._encode(part, position, cut, follows=bool(items)))
                position, num_written = cut, span.after
            elif position == 0 and num_written > 0:
                # Raw ids right after a reply stand in place of what the template writes there.
                position = self._cut(part, num_written)
            items.append(span.ids)
        if self.ends_raw:
            return _concatenate(items)
        rest = self._encode(part, position, len(self.text), follows=bool(items))
        if not reply:
            rest = self._stable(rest, position, follows=bool(items))
        return _concatenate([*items, rest])

    def _spans(self) -> tuple[Span, ...]:
        return self._said.spans[self.replies[-1].num_spans if self.replies else 0 :]

    def _settle(self, *, add_generation_prompt: bool) -> Part:
        """Render; give up the replies from the first one that the template writes differently."""
        messages = self._said.messages
        while True:
            try:
                parts, full = self._render(messages, add_generation_prompt)
            except ChatTemplateError:
                if add_generation_prompt:
                    raise
                return self._common_part(messages)
            kept = _num_faithful(parts, full, self.replies, messages)
            if kept == len(self.replies):
                return parts[-1]
            self.replies = self.replies[:kept]

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[list[Part], str]:
        """The rendering cut at the replies, and the whole text with them."""
        assert self._tokenizer is not None, "messages are refused where there is no tokenizer"
        shown, indices = _with_stand_ins(messages, self.replies)
        now = self._said.opened_at
        parts = self._tokenizer.render_parts(
            shown, add_generation_prompt=add_generation_prompt, now=now, replies=indices
        )
        if not self.replies:
            return parts, text_of(parts[0])
        full = self._tokenizer.render(shown, add_generation_prompt=add_generation_prompt, now=now)
        return parts, full

    def _common_part(self, messages: Sequence[Message]) -> Part:
        """What two renderings with different next user messages share.

        For templates that reject the messages alone, such as a lone system message.
        """
        first, second = (
            self._render([*messages, Message("user", text)], False)[0][-1] for text in ("a", "b")
        )
        return take_prefix(first, _common_text_length(text_of(first), text_of(second)))

    def _cut(self, part: Part, num_messages: int) -> int:
        """How much of the part belongs to the first messages alone."""
        shown = self._said.messages[:num_messages]
        try:
            alone = self._render(shown, False)[0][-1]
        except ChatTemplateError:
            alone = self._common_part(shown)
        return _common_text_length(text_of(part), text_of(alone))

    def _encode(self, part: Part, start: int, end: int, *, follows: bool) -> list[int]:
        assert self._tokenizer is not None, "messages are refused where there is no tokenizer"
        piece = drop_prefix(take_prefix(part, end), start)
        if not follows and self.replies:
            last = int(self._ids.slice(self.start - 1, self.start)[0])
            text = text_of(piece)
            if self._tokenizer.starts_with_control(text, last):
                # The reply ended with its end-of-turn token: the ids have that one already.
                blank = len(text) - len(text.lstrip())
                return self._tokenizer.encode_part(drop_prefix(piece, blank), limit=self._limit)[1:]
        return self._tokenizer.encode_part(
            piece, anchored=follows or self.start > 0, limit=self._limit
        )

    def _stable(self, ids: list[int], position: int, *, follows: bool) -> list[int]:
        """The ids that stay the same whatever message comes next."""
        for role in ("user", "assistant"):
            try:
                part = self._render([*self._said.messages, Message(role, "a")], False)[0][-1]
            except ChatTemplateError:
                continue
            other = self._encode(part, position, len(text_of(part)), follows=follows)
            return ids[: common_length(np.array(ids), np.array(other))]
        return ids


def common_length(left: TokenArray, right: TokenArray) -> int:
    """How many ids two arrays begin with in common."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def _with_stand_ins(
    messages: Sequence[Message], replies: Sequence[Reply]
) -> tuple[list[Message], list[int]]:
    """The messages, with one before each reply to raw ids where templates expect a user's.

    Returns the indices of the replies among them too.
    """
    shown: list[Message] = []
    positions: list[int] = []
    by_message = {reply.message: reply for reply in replies}
    for index, message in enumerate(messages):
        if index in by_message:
            expects = not shown or shown[-1].role not in ("user", "tool")
            if by_message[index].is_unprompted and expects:
                shown.append(_STAND_IN)
            positions.append(len(shown))
        shown.append(message)
    return shown, positions


def _num_faithful(
    parts: Sequence[Part], full: str, replies: Sequence[Reply], messages: Sequence[Message]
) -> int:
    """How many replies, from the first on, the template still writes as their ids have them.

    `parts` is the rendering with the replies cut out, `full` the one with them; white space at a
    reply's edges may be trimmed.
    """
    position = 0
    for index, reply in enumerate(replies):
        if index + 1 >= len(parts):
            return index
        before, after = text_of(parts[index]), text_of(parts[index + 1])
        as_then = before == reply.text or (reply.is_unprompted and before.startswith(reply.text))
        if not as_then or not full.startswith(before, position):
            return index
        position += len(before)
        end = len(full) - len(after) if index + 1 == len(replies) else None
        length = _reply_length(full, position, messages[reply.message].content, after, end)
        if length is None:
            return index
        position += length
    return len(replies)


def _reply_length(
    full: str, position: int, content: str, after: str, end: int | None
) -> int | None:
    """The length of the reply as it stands in `full` at `position` before `after`, if it does."""
    for text in (content, content.rstrip(), content.lstrip(), content.strip()):
        stop = position + len(text)
        follows = full.startswith(after, stop) and end in (None, stop)
        if follows and full.startswith(text, position):
            return len(text)
    return None


def _concatenate(items: Sequence[Sequence[int]]) -> TokenArray:
    arrays = [np.asarray(item, dtype=np.int32) for item in items]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)


def _common_text_length(left: str, right: str) -> int:
    if left.startswith(right):
        return len(right)
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
