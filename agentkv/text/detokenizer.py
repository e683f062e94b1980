"""Sampled ids to text while they come, never half a character.

Most decoders give each token fixed bytes, whatever stands around it: for them a table and an
incremental UTF-8 decoder do. Other decoders are asked again with a window of the last ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from ..errors import RequestError
from .backend import backend_faults

__all__ = ["Detokenizer", "DetokenizerSource", "byte_alphabet"]


class Detokenizer(Protocol):
    """Text of one reply, made as its ids come."""

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is final now; it never changes later."""
        ...

    def flush(self) -> str:
        """The text of what was held back, as U+FFFD where a character stayed incomplete."""
        ...

    def copy(self) -> Detokenizer:
        """An independent detokenizer in the same state."""
        ...


class DetokenizerSource:
    """Makes detokenizers for one tokenizer; the ids in `skipped` give no text.

    `max_token_chars` is the length of the longest text of any other id.

    Building the table takes a few milliseconds for each 100,000 tokens.
    """

    def __init__(self, backend: Tokenizer, skipped: Collection[int]) -> None:
        self._backend = backend
        decoder: dict[str, Any] | None = (  # Any: the tokenizer's file
            json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        texts = (text for text, token_id in vocabulary.items() if token_id not in skipped)
        self.max_token_chars: int = max(map(len, texts), default=1)
        self._table = _byte_table(vocabulary, decoder, frozenset(skipped))
        self._strips = _strips_first_space(decoder)

    def detokenizer(self) -> Detokenizer:
        """A detokenizer at the beginning of a reply."""
        if self._table is None:
            return _WindowDetokenizer(self._backend)
        return _TableDetokenizer(self._table, strip_first_space=self._strips)


class _TableDetokenizer:
    """Fixed bytes for each id, decoded as UTF-8."""

    __slots__ = ("_decoder", "_strip_first_space", "_table")

    def __init__(self, table: Sequence[bytes], *, strip_first_space: bool) -> None:
        self._table = table
        self._strip_first_space = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        table = self._table
        size = len(table)
        text = self._decoder.decode(b"".join([table[i] for i in ids if i < size]))
        if text and self._strip_first_space:
            self._strip_first_space = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def copy(self) -> Detokenizer:
        twin = _TableDetokenizer(self._table, strip_first_space=self._strip_first_space)
        twin._decoder.setstate(self._decoder.getstate())
        return twin


class _WindowDetokenizer:
    """The text by which the decoded window grows when ids are appended to it.

    `_ids` is the window: the ids whose text was returned last, kept because decoders treat a text's
    start in their own way, then from `_read` on those that were held back.
    """

    __slots__ = ("_backend", "_ids", "_read")

    # A character has at most four bytes; more pending ids than this cannot all be incomplete.
    MAX_PENDING = 8

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._read = 0

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        whole = self._decode(self._ids)
        incomplete = whole.endswith("\ufffd") and len(self._ids) - self._read < self.MAX_PENDING
        return "" if incomplete else self._emit(whole)

    def flush(self) -> str:
        return self._emit(self._decode(self._ids))

    def copy(self) -> Detokenizer:
        twin = _WindowDetokenizer(self._backend)
        twin._ids, twin._read = list(self._ids), self._read
        return twin

    def _emit(self, whole: str) -> str:
        text = whole[len(self._decode(self._ids[: self._read])) :]
        if text:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        with backend_faults(lambda error: RequestError("the tokenizer cannot decode these ids")):
            return str(self._backend.decode(ids, skip_special_tokens=True))


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2)."""
    alphabet = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return alphabet


def _byte_table(
    vocabulary: dict[str, int],
    decoder: dict[str, Any] | None,  # Any: the tokenizer's file
    skipped: frozenset[int],
) -> list[bytes] | None:
    """The bytes of each id, or None where they depend on what stands around."""
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        to_bytes = _byte_level
    elif _is_sentence_piece(decoder):
        to_bytes = _sentence_piece
    else:
        return None
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token_id in vocabulary.items():
        if token_id not in skipped:
            table[token_id] = to_bytes(text)
    return table


_FROM_ALPHABET = {ord(character): byte for byte, character in byte_alphabet().items()}
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level(text: str) -> bytes:
    if all(ord(character) in _FROM_ALPHABET for character in text):
        return text.translate(_FROM_ALPHABET).encode("latin-1")
    return text.encode()


def _sentence_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace("\u2581", " ").encode()


def _is_sentence_piece(decoder: dict[str, Any]) -> bool:  # Any: the tokenizer's file
    """Whether this is the usual chain: space for U+2581, byte tokens, joined, first space cut."""
    steps: list[dict[str, Any]] = (  # Any: the tokenizer's file
        decoder["decoders"] if decoder["type"] == "Sequence" else []
    )
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return False
    replaces = steps[0]["pattern"] == {"String": "\u2581"} and steps[0]["content"] == " "
    strip = steps[3] if len(steps) > 3 else {"content": " ", "start": 1, "stop": 0}
    return replaces and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)


def _strips_first_space(decoder: dict[str, Any] | None) -> bool:  # Any: the tokenizer's file
    return decoder is not None and any(
        step["type"] == "Strip" for step in decoder.get("decoders", ())
    )
