"""Encoding in which only the template's own control tokens become control ids.

The backend would turn the text of a control token into its id wherever it stands. So each result is
checked: its control ids must be those that the template wrote, in order. Only where they are not is
the text encoded once more by a second tokenizer, whose control tokens have secret names: one that
shares the model, or, for models that know control tokens as pieces of text, a renamed copy.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from ..errors import ChatTemplateError, ContextLengthError, RequestError
from .backend import backend_faults
from .budget import check_unhurried
from .rendering import Piece

__all__ = ["PlainBackend"]


class PlainBackend:
    """A backend, and twins with renamed control tokens, which are built when first needed.

    Control tokens are the special ones, and those others whose text the template contains
    (`literals`): their ids may only come from the template. Text of the second kind in an
    assistant's message still becomes their ids, because models write them themselves.
    """

    def __init__(self, backend: Tokenizer, literals: Sequence[str]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in added.items() if token.special
        )
        written = "\0".join(literals)
        self.control: dict[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.strip() and token.content in written)
        }
        self.control_text: dict[int, str] = {
            token_id: text for text, token_id in self.control.items()
        }
        soft = [text for text, token_id in self.control.items() if token_id not in self.special_ids]
        self._all = _pattern(self.control)
        self._soft = _pattern(soft)
        self._control_ids = np.array(sorted(self.control_text), dtype=np.int64)
        # A name for each control token that no text can hold, because it is secret.
        secret = secrets.token_hex(8)
        self._names: dict[str, str] = {
            text: f"\U000f0000{secret}{at}\U000f0001" for at, text in enumerate(self.control)
        }
        # Several threads may want the same twin first; one builds it.
        self._building = Lock()
        self._anchor = next(
            (t.content for t in added.values() if t.special and not (t.rstrip or t.normalized)),
            None,
        )

    def encode(
        self,
        pieces: Sequence[Piece],
        *,
        add_special_tokens: bool = False,
        anchored: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Ids of the pieces, joined, whose control ids are those of the template's pieces.

        `anchored`: encode as text that follows other ids, not as the start of a text.

        Raises:
            ContextLengthError: there are more than `limit`.
            ChatTemplateError: text of a message would become a control id.
        """
        if anchored and self._anchor is not None:
            pieces = [Piece(self._anchor, "template"), *pieces]
        text = "".join(piece.text for piece in pieces)
        expected = [self.control[token] for _, token in self._tokens(pieces) if token is not None]
        ids = _encode(self._backend, text, add_special_tokens, limit)
        for renaming in ("tokens", "pieces"):
            if self._control_in(ids, add_special_tokens) == expected:
                break
            if renaming == "pieces" and "_twin_of_pieces" not in vars(self):
                # Building it takes a second for 100,000 pieces.
                check_unhurried()
            with self._building:
                twin = self._twin_of_tokens if renaming == "tokens" else self._twin_of_pieces
            ids = self._encode_renamed(twin, pieces, add_special_tokens, limit)
        if self._control_in(ids, add_special_tokens) != expected:
            raise ChatTemplateError(
                "the tokenizer makes control tokens of ordinary text in this conversation"
            )
        return ids[1:] if anchored and self._anchor is not None else ids

    def _control_in(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        array = np.array(ids, dtype=np.int64)
        found: list[int] = array[np.isin(array, self._control_ids)].tolist()
        if add_special_tokens:
            before, after = self._added_around
            if found[: len(before)] == before:
                found = found[len(before) :]
            if after and found[-len(after) :] == after:
                found = found[: -len(after)]
        return found

    def _tokens(self, pieces: Sequence[Piece]) -> list[tuple[str, str | None]]:
        """The text before each control token that counts as one, and that token; then the rest."""
        found: list[tuple[str, str | None]] = []
        text = ""
        for piece in pieces:
            pattern = {"template": self._all, "assistant": self._soft, "user": None}[piece.writer]
            position = 0
            for match in pattern.finditer(piece.text) if pattern is not None else ():
                found.append((text + piece.text[position : match.start()], match[0]))
                text, position = "", match.end()
            text += piece.text[position:]
        return [*found, (text, None)]

    def _encode_renamed(
        self,
        twin: _Twin,
        pieces: Sequence[Piece],
        add_special_tokens: bool,
        limit: int | None,
    ) -> list[int]:
        text = "".join(
            before + (self._names[token] if token is not None else "")
            for before, token in self._tokens(pieces)
        )
        ids = [twin.back.get(i, i) for i in _encode(twin.backend, text, False, limit)]
        if not add_special_tokens:
            return ids
        before, after = self._added_around
        return before + ids + after

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer itself adds before and after a raw text."""
        bare = _encode(self._backend, "a", False, None)
        full = _encode(self._backend, "a", True, None)
        start = next(
            (i for i in range(len(full)) if full[i : i + len(bare)] == bare), len(full) - len(bare)
        )
        return full[:start], full[start + len(bare) :]

    @cached_property
    def _twin_of_tokens(self) -> _Twin:
        """A tokenizer around the same model, with the control tokens renamed; quick to build."""
        twin = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            twin.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            twin.pre_tokenizer = self._backend.pre_tokenizer
        added = self._backend.get_added_tokens_decoder()
        names = {text: self._names.get(text, text) for text in (t.content for t in added.values())}
        twin.add_tokens(
            [
                AddedToken(
                    names[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and token.content not in self.control,
                    single_word=token.single_word and token.content not in self.control,
                )
                for token in added.values()
            ]
        )
        vocabulary = twin.get_added_tokens_decoder()
        ids = {token.content: token_id for token_id, token in vocabulary.items()}
        back = {ids[names[t.content]]: i for i, t in added.items() if names[t.content] in ids}
        return _Twin(twin, back)

    @cached_property
    def _twin_of_pieces(self) -> _Twin:
        """A copy in which the model's own pieces are renamed too.

        For models that hold control tokens as ordinary pieces of their vocabulary.
        """
        data: dict[str, Any] = msgspec.json.decode(  # Any: the tokenizer's file
            self._backend.to_str()
        )
        _rename(data, self._names)
        twin = Tokenizer.from_buffer(msgspec.json.encode(data))
        ids = {text: twin.token_to_id(name) for text, name in self._names.items()}
        return _Twin(twin, {i: self.control[text] for text, i in ids.items() if i is not None})


class _Twin(NamedTuple):
    """A tokenizer with renamed control tokens, and the true ids of those that it numbers anew."""

    backend: Tokenizer
    back: dict[int, int]


def _rename(data: dict[str, Any], names: dict[str, str]) -> None:  # Any: the tokenizer's file
    """Rename control tokens in a tokenizer's file, among the added tokens and in the vocabulary."""
    data["post_processor"] = None
    for token in data["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], normalized=False, single_word=False)
    vocabulary = data["model"].get("vocab")
    if isinstance(vocabulary, list):  # Unigram: pairs of text and score
        for entry in vocabulary:
            entry[0] = names.get(entry[0], entry[0])
    elif isinstance(vocabulary, dict):
        merged = _merge_results(data["model"].get("merges", ()))
        kept = {data["model"].get("unk_token"), *merged}
        for text, name in names.items():
            if text in vocabulary and text not in kept:
                vocabulary[name] = vocabulary.pop(text)


def _merge_results(merges: Sequence[str | Sequence[str]]) -> set[str]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
    return {text for left, right in pairs for text in (left, right, left + right)}


def _encode(
    backend: Tokenizer, text: str, add_special_tokens: bool, limit: int | None
) -> list[int]:
    # encode_batch_fast lets other threads run; encode would hold the interpreter all the time.
    with backend_faults(lambda error: RequestError("the tokenizer cannot encode this text")):
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    if limit is not None and len(encoding) > limit:
        raise ContextLengthError(len(encoding), limit)
    ids: list[int] = encoding.ids
    return ids


def _pattern(texts: Sequence[str] | dict[str, int]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
