"""Stop strings: where a reply's text ends, and what of it may be shown before that is known.

The step thread asks a `StopMatcher` after each id, the loop builds the visible text with a
`ReplyText`. Both read the same ids one by one, so they always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from .tokenizer import ChatTokenizer

__all__ = ["ReplyText", "StopMatcher", "StopScanner", "cut"]


class StopScanner:
    """Finds the first place where one of several strings is complete in a text that comes in parts.

    Where several end at the same character, the longest wins. So the result depends on the text
    alone, not on how it was split. A character costs more than a look-up only where a string
    begins or goes on with it.
    """

    __slots__ = ("_begun", "_by_first", "_held", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._by_first: dict[str, list[_Progress]] = {}
        for stop in dict.fromkeys(stops):
            self._by_first.setdefault(stop[0], []).append(_Progress(stop))
        # Those of which the end of the text is a beginning.
        self._begun: list[_Progress] = []
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next part; return what is certain to stand before any stop string.

        Where `may_stop` is False, stop strings that this part completes are ordinary text. Once a
        string was found nothing more is returned.
        """
        if self.found is not None:
            return ""
        if not self._by_first:
            return text
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            if not self._begun and character not in self._by_first:
                continue
            complete = self._advance(character)
            if complete and may_stop:
                self.found = max(complete, key=len)
                self._held = ""
                return pending[: index - len(self.found)]
        keep = max((stop.matched for stop in self._begun), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _advance(self, character: str) -> list[str]:
        """Let every string follow that can; those that the character completes."""
        fresh = [stop for stop in self._by_first.get(character, ()) if not stop.matched]
        going = self._begun + fresh
        complete = [stop.text for stop in going if stop.advance(character)]
        self._begun = [stop for stop in going if stop.matched]
        return complete

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


class StopMatcher:
    """The StopRule of one reply: complete once its text contains a stop string.

    Strings completed by one of the first `min_tokens` - 1 ids do not count.
    """

    __slots__ = ("_count", "_detokenizer", "_min_tokens", "_scanner")

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        after: Sequence[int] = (),
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.push(after)
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self._count = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._scanner.found

    def accept(self, token_id: int) -> bool:
        """Take the next sampled id; True when the reply ends with it."""
        self.advance((token_id,))
        return self._scanner.found is not None

    def advance(self, ids: Sequence[int]) -> str:
        """Take the next sampled ids and return the text that may be shown now."""
        # How many of them come too early to complete a stop string that counts.
        early = min(len(ids), max(0, self._min_tokens - 1 - self._count))
        self._count += len(ids)
        text = ""
        if early:
            text = self._scanner.push(self._detokenizer.push(ids[:early]), may_stop=False)
        return text + self._scanner.push(self._detokenizer.push(ids[early:]))

    def finish(self) -> str:
        """The text that was held back, at the end of a reply without a stop string."""
        if self._scanner.found is not None:
            return ""
        return self._scanner.finish() + self._detokenizer.flush()


class ReplyText:
    """The visible text of one reply: cut before a stop string, never a part of one shown early.

    `after` are the last ids of a reply that this one continues: they complete a character that the
    cut between the two broke, and give no text themselves.
    """

    __slots__ = ("_matcher",)

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        after: Sequence[int] = (),
    ) -> None:
        self._matcher = StopMatcher(tokenizer, stops, min_tokens=min_tokens, after=after)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._matcher.stop_string

    def push(self, ids: Iterable[int]) -> str:
        """Take the next sampled ids; return the text that is final and certain to be visible."""
        return self._matcher.advance(ids if isinstance(ids, (list, tuple)) else list(ids))

    def finish(self) -> str:
        """The rest of the visible text. Once the reply has ended; then empty."""
        return self._matcher.finish()


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that string; all of it where there is none."""
    scanner = StopScanner(stops)
    visible = scanner.push(text)
    return visible + scanner.finish(), scanner.found


class _Progress:
    """How much of one string the end of the text matches (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def advance(self, character: str) -> bool:
        """Take the next character; True when it completes the string."""
        text, borders, matched = self.text, self._borders, self.matched
        while matched and text[matched] != character:
            matched = borders[matched]
        if text[matched] == character:
            matched += 1
        is_complete = matched == len(text)
        self.matched = borders[matched] if is_complete else matched
        return is_complete


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """For each length n, the longest proper prefix of text[:n] that it also ends with."""
    borders = [0, 0]
    for index in range(1, len(text)):
        length = borders[index]
        while length and text[length] != text[index]:
            length = borders[length]
        borders.append(length + 1 if text[length] == text[index] else 0)
    return tuple(borders)
