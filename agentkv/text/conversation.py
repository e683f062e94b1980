"""A conversation as text, and the ids that a turn appends to it.

A `Conversation` is immutable: messages, spans of raw ids, and what each reply followed. `plan` says
how many of the stored ids stay and which are appended; `commit` makes the conversation after the
reply. Owns no ids and no KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np

from ..config import short
from ..core.batch import TokenArray
from ..errors import ChatTemplateError, ContextLengthError, InvalidOptionError, RequestError
from ..messages import FinishReason, Message
from .tail import Reply, Span, StoredIds, Tail, common_length
from .tokenizer import ChatTokenizer, check_messages

__all__ = [
    "Conversation",
    "Entry",
    "StoredIds",
    "TurnPlan",
    "check_messages",
    "check_size",
    "checked_ids",
    "commit",
    "extend",
    "plan",
    "start",
    "start_from_ids",
]

Entry = Message | tuple[int, ...]

# Enough last ids of a reply to hold every byte of a character that its end broke.
CONTEXT_IDS = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said so far, added but unanswered messages included.

    `is_open` says that the last reply ended by length or was stopped, and may be continued.
    """

    messages: tuple[Message, ...] = field(default=(), repr=False)
    spans: tuple[Span, ...] = field(default=(), repr=False)
    replies: tuple[Reply, ...] = field(default=(), repr=False)
    num_answered: int = 0
    num_answered_spans: int = 0
    is_open: bool = False
    is_from_ids: bool = False
    # Dates in a template show the opening day, so that the rendering of old messages never changes.
    opened_at: datetime = field(default_factory=datetime.now, compare=False)

    @property
    def has_unanswered(self) -> bool:
        """Whether messages or ids were added since the last reply."""
        return self.num_answered < len(self.messages) or self.num_answered_spans < len(self.spans)

    @property
    def num_chars(self) -> int:
        """Characters of all messages, and raw ids that are not answered yet."""
        raw = sum(len(span.ids) for span in self.new_spans)
        return raw + sum(len(message.content) for message in self.messages)

    @property
    def new_spans(self) -> tuple[Span, ...]:
        """Spans of raw ids since the last reply."""
        return self.spans[self.num_answered_spans :]


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Keep the first `keep` stored ids and append `new_ids`; then `conversation` describes them.

    `prompt_text` is what the template wrote before the reply that comes next, unless raw ids came
    last (`is_unprompted`). Where the turn continues a reply, `reply_context` are the last ids of
    it, for `ReplyText(after=...)`, and its text so far ends with `broken` in place of a character
    that its end cut.
    """

    keep: int
    new_ids: TokenArray = field(repr=False)
    conversation: Conversation
    is_empty: bool = False
    is_continuation: bool = False
    is_unprompted: bool = False
    prompt_text: str = field(default="", repr=False)
    reply_context: tuple[int, ...] = field(default=(), repr=False)
    broken: str = field(default="", repr=False)


def start(messages: Sequence[Message] = ()) -> Conversation:
    """A conversation that opens with these messages.

    Raises:
        RequestError: a role is not allowed, or a content is not text.
    """
    return extend(Conversation(), tuple(messages))


def start_from_ids(ids: Sequence[int]) -> Conversation:
    """A conversation that opens with raw ids, to which no template applies."""
    return replace(extend(Conversation(), (tuple(ids),)), is_from_ids=True)


def extend(conversation: Conversation, entries: Sequence[Entry]) -> Conversation:
    """The conversation with messages and raw ids added, nothing rendered or encoded.

    Raises:
        RequestError: a role is not allowed, or a content is not text.
        ChatTemplateError: a message follows on raw ids that opened the conversation.
    """
    messages, spans = list(conversation.messages), list(conversation.spans)
    for entry in entries:
        if not isinstance(entry, Message):
            if entry:
                spans.append(Span(len(messages), entry))
            continue
        if conversation.is_from_ids:
            raise ChatTemplateError("a session that opened with token ids takes no text, only ids")
        check_messages((entry,))
        messages.append(entry)
    return replace(conversation, messages=tuple(messages), spans=tuple(spans))


def checked_ids(
    ids: Iterable[object], *, vocab_size: int = 2**31, limit: int = 2**31
) -> tuple[int, ...]:
    """Token ids that a caller gave, as plain integers; NumPy's integers are accepted.

    Raises:
        ContextLengthError: there are more than `limit`.
        InvalidOptionError: one is no integer from 0 to `vocab_size` - 1.
    """
    given = ids if isinstance(ids, (list, tuple, np.ndarray)) else list(ids)
    if len(given) > limit:
        raise ContextLengthError(len(given), limit)
    values = list(given)
    for kind in set(map(type, values)):
        if kind is bool or not issubclass(kind, (int, np.integer)):
            raise InvalidOptionError(
                f"a list holds Message objects, such as Message('user', text), or token ids, which "
                f"are integers; not {kind.__name__}"
            )
    checked = tuple(map(int, values))
    if checked and not (min(checked) >= 0 and max(checked) < vocab_size):
        at = next(at for at, value in enumerate(checked) if not 0 <= value < vocab_size)
        raise InvalidOptionError(
            f"token ids must be from 0 to {vocab_size - 1}, and number {at} is {short(checked[at])}"
        )
    return checked


def plan(
    tokenizer: ChatTokenizer | None,
    conversation: Conversation,
    ids: StoredIds,
    entries: Sequence[Entry] = (),
    *,
    limit: int,
    reply: bool,
    vocab_size: int = 2**31,
) -> TurnPlan:
    """What a turn appends to the stored `ids` for the conversation with `entries` added.

    With `reply` the model is to answer, so the generation prompt comes last; without, the turn only
    warms: it ends where any next message would leave the ids as they are.

    Raises:
        RequestError: there is nothing to answer, or a message is not valid.
        ChatTemplateError: the messages cannot be rendered, or the conversation has no template.
        ContextLengthError: the texts or ids cannot fit in `limit` tokens.
        InvalidOptionError: a raw id is not in the vocabulary.
    """
    conversation = _resolve(extend(conversation, entries), len(ids))
    if not conversation.has_unanswered:
        return _plan_nothing_new(tokenizer, conversation, ids, reply)
    check_size(tokenizer, conversation, limit)
    for span in conversation.new_spans:
        checked_ids(span.ids, vocab_size=vocab_size)
    tail = Tail(tokenizer, conversation, ids, limit)
    target = tail.target(reply=reply)
    if reply and tail.start + len(target) == 0:
        raise RequestError("the prompt is empty: it renders to no tokens at all")
    stored = ids.slice(tail.start, len(ids))
    common = common_length(target, stored)
    return TurnPlan(
        keep=tail.start + common,
        new_ids=target[common:],
        conversation=replace(conversation, replies=tail.replies),
        is_empty=not reply and common == len(target) == len(stored),
        is_unprompted=tail.ends_raw,
        prompt_text=tail.text,
    )


def commit(plan: TurnPlan, text: str, finish_reason: FinishReason) -> Conversation:
    """The conversation after the reply `text`, whose sampled ids now end the stored ones."""
    before = plan.conversation
    messages, replies = before.messages, before.replies
    if plan.is_continuation:
        text = messages[-1].content.removesuffix(plan.broken) + text
        messages = messages[:-1]
        replies = (*replies[:-1], replies[-1]._replace(end=None))
    else:
        new = Reply(
            len(messages), len(before.spans), plan.prompt_text, plan.is_unprompted, end=None
        )
        replies = (*replies, new)
    messages = (*messages, Message("assistant", text))
    return replace(
        before,
        messages=messages,
        replies=replies,
        num_answered=len(messages),
        num_answered_spans=len(before.spans),
        is_open=finish_reason != "stop",
    )


def _resolve(conversation: Conversation, num_ids: int) -> Conversation:
    """Fix where the last reply ends, now that the number of stored ids is known."""
    replies = conversation.replies
    if not replies or replies[-1].end is not None:
        return conversation
    return replace(conversation, replies=(*replies[:-1], replies[-1]._replace(end=num_ids)))


def _plan_nothing_new(
    tokenizer: ChatTokenizer | None, conversation: Conversation, ids: StoredIds, reply: bool
) -> TurnPlan:
    nothing: TokenArray = np.empty(0, dtype=np.int32)
    if not reply:
        return TurnPlan(len(ids), nothing, conversation, is_empty=True)
    if not conversation.is_open:
        raise RequestError("there is nothing to answer: give a prompt or add a message")
    context = tuple(ids.slice(max(0, len(ids) - CONTEXT_IDS), len(ids)).tolist())
    broken = ""
    if tokenizer is not None:
        detokenizer = tokenizer.detokenizer()
        detokenizer.push(context)
        broken = detokenizer.flush()
    return TurnPlan(
        len(ids),
        nothing,
        conversation,
        is_continuation=True,
        reply_context=context,
        broken=broken,
    )


def check_size(tokenizer: ChatTokenizer | None, conversation: Conversation, limit: int) -> None:
    """Refuse what is not answered yet where it can never be, by its length and kind alone.

    Raises:
        ContextLengthError: it cannot fit in `limit` tokens.
        ChatTemplateError: there are messages and no tokenizer.
    """
    spans = conversation.new_spans
    num_raw = sum(len(span.ids) for span in spans)
    if num_raw > limit:
        raise ContextLengthError(num_raw, limit)
    messages = conversation.messages[conversation.num_answered :]
    if messages and tokenizer is None:
        raise ChatTemplateError("this engine has no tokenizer; pass token ids instead")
    if tokenizer is not None:
        tokenizer.check_length((message.content for message in messages), limit - num_raw)
