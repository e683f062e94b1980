"""Who wrote which part of a rendered conversation: the template, a user, or the assistant.

Renders a second time with private characters around each message's text, so that the rendering can
be taken apart, and cuts it where given replies stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from ..errors import ChatTemplateError
from ..messages import Message

__all__ = ["Part", "Piece", "Writer", "render_parts", "text_of"]

Writer = Literal["template", "user", "assistant"]
Render = Callable[[Sequence[Message]], str]


class Piece(NamedTuple):
    """A stretch of rendered text by one writer."""

    text: str
    writer: Writer


Part = list[Piece]


class _Marks(NamedTuple):
    """Three characters that occur in no message."""

    user: str
    assistant: str
    end: str
    reply: str


def render_parts(
    render: Render, messages: Sequence[Message], replies: Sequence[int], control: Collection[str]
) -> list[Part]:
    """The rendering in pieces, cut where the messages `replies` stand.

    `control` are the control tokens' texts. Where a template looks at a text's edges, so that marks
    around whole texts change what it writes, only control-token text inside them is marked. Where
    it counts or compares characters, so that even this changes what it writes, control-token text
    is filled with a mark instead: first and last character and length stay.

    Raises:
        ChatTemplateError: control-token text in a message changes what the template writes.
    """
    marks = _choose_marks(messages)
    bare = list(messages)
    for index in replies:
        bare[index] = Message(bare[index].role, marks.reply)
    plain = render(bare)
    held = set(replies)
    marked = [m if i in held else _mark_whole(m, marks) for i, m in enumerate(bare)]
    pieces = _take_apart(render(marked), marks)
    if pieces is None or text_of(pieces) != plain:
        pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
        marked = [
            m if i in held or not control else _mark_control(m, marks, pattern)
            for i, m in enumerate(bare)
        ]
        pieces = _take_apart_loosely(render(marked), marks)
        if text_of(pieces) != plain:
            filled = [
                m if i in held else _fill_control(m, marks, pattern) for i, m in enumerate(bare)
            ]
            pieces = _align(plain, render(filled), marks, control)
    return _cut(pieces, marks.reply)


def text_of(part: Sequence[Piece]) -> str:
    """The text of a part."""
    return "".join(piece.text for piece in part)


def drop_prefix(part: Sequence[Piece], length: int) -> Part:
    """The part without its first `length` characters."""
    rest: Part = []
    for piece in part:
        if length < len(piece.text):
            rest.append(Piece(piece.text[length:], piece.writer))
        length = max(0, length - len(piece.text))
    return rest


def take_prefix(part: Sequence[Piece], length: int) -> Part:
    """The first `length` characters of the part."""
    taken: Part = []
    for piece in part:
        if length > 0:
            taken.append(Piece(piece.text[:length], piece.writer))
        length -= len(piece.text)
    return taken


def _choose_marks(messages: Sequence[Message]) -> _Marks:
    free: list[str] = []
    # Unicode's private areas: chained, since a list of them would be built for every turn.
    areas = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
    for code in chain.from_iterable(areas):
        if not any(chr(code) in message.content for message in messages):
            free.append(chr(code))
            if len(free) == len(_Marks._fields):
                return _Marks(*free)
    raise ChatTemplateError("the messages use every private character of Unicode")


def _mark_whole(message: Message, marks: _Marks) -> Message:
    """Mark the text but the white space at its edges, which templates trim."""
    core = message.content.strip()
    if not core:
        return message
    start = message.content.index(core)
    opening = marks.assistant if message.role == "assistant" else marks.user
    before, after = message.content[:start], message.content[start + len(core) :]
    return Message(message.role, f"{before}{opening}{core}{marks.end}{after}")


def _mark_control(message: Message, marks: _Marks, pattern: re.Pattern[str]) -> Message:
    opening = marks.assistant if message.role == "assistant" else marks.user
    content = pattern.sub(lambda match: f"{opening}{match[0]}{marks.end}", message.content)
    return Message(message.role, content)


def _fill_control(message: Message, marks: _Marks, pattern: re.Pattern[str]) -> Message:
    mark = marks.assistant if message.role == "assistant" else marks.user

    def fill(match: re.Match[str]) -> str:
        token = match[0]
        return (
            token[0] + mark * (len(token) - 2) + token[-1] if len(token) > 2 else mark * len(token)
        )

    return Message(message.role, pattern.sub(fill, message.content))


def _align(plain: str, filled: str, marks: _Marks, control: Collection[str]) -> Part:
    """The pieces of `plain`, where marks in `filled`, which is equal otherwise, say who wrote."""
    pieces: Part = []
    is_equal = len(plain) == len(filled)
    position = compared = 0
    for match in re.finditer(f"{marks.user}+|{marks.assistant}+", filled):
        start, end = match.span()
        is_equal = is_equal and plain[compared:start] == filled[compared:start]
        compared = end
        if plain[start - 1 : end + 1] in control:
            start, end = start - 1, end + 1
        writer: Writer = "user" if match[0][0] == marks.user else "assistant"
        pieces += [Piece(plain[position:start], "template"), Piece(plain[start:end], writer)]
        position = end
    if not is_equal or plain[compared:] != filled[compared:]:
        raise ChatTemplateError("control-token text in a message changes what the template writes")
    pieces.append(Piece(plain[position:], "template"))
    return [piece for piece in pieces if piece.text]


def _take_apart(text: str, marks: _Marks) -> Part | None:
    """The pieces between well-paired marks, else None."""
    pieces: Part = []
    writer: Writer = "template"
    for chunk in re.split(f"([{marks.user}{marks.assistant}{marks.end}])", text):
        if chunk == marks.end:
            if writer == "template":
                return None
            writer = "template"
        elif chunk in (marks.user, marks.assistant):
            if writer != "template":
                return None
            writer = "user" if chunk == marks.user else "assistant"
        elif chunk:
            pieces.append(Piece(chunk, writer))
    return pieces if writer == "template" else None


def _take_apart_loosely(text: str, marks: _Marks) -> Part:
    """The pieces between marks, without lone marks, at which the text is cut all the same."""
    pieces: Part = []
    opened = (
        f"([{marks.user}{marks.assistant}][^{marks.user}{marks.assistant}{marks.end}]*{marks.end})"
    )
    for chunk in re.split(opened, text):
        if chunk[:1] in (marks.user, marks.assistant) and chunk[-1:] == marks.end:
            writer: Writer = "user" if chunk[0] == marks.user else "assistant"
            pieces.append(Piece(chunk[1:-1], writer))
        else:
            lone = re.split(f"[{marks.user}{marks.assistant}{marks.end}]", chunk)
            pieces.extend(Piece(piece, "template") for piece in lone if piece)
    return pieces


def _cut(pieces: Part, mark: str) -> list[Part]:
    parts: list[Part] = [[]]
    for piece in pieces:
        first, *others = piece.text.split(mark)
        if first:
            parts[-1].append(Piece(first, piece.writer))
        parts.extend([Piece(other, piece.writer)] if other else [] for other in others)
    return parts
