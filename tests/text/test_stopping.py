"""Stop strings over token borders: found at once, and no part of them shown."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.text.stopping import ReplyText, StopMatcher, StopScanner, _Progress, cut
from agentkv.text.tokenizer import ChatTokenizer

BYTES = byte_tokenizer()
AB = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The same by trying every end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(AB, STOPS)
def test_the_first_complete_stop_string_cuts_the_text(text: str, stops: list[str]) -> None:
    assert cut(text, stops) == naive_cut(text, stops)


@given(AB, STOPS, st.lists(st.integers(1, 4), min_size=1))
@example("aab", ["ab", "aab"], [1])
@example("aab", ["aab", "ab"], [2])
def test_no_split_of_the_text_shows_more(text: str, stops: list[str], sizes: list[int]) -> None:
    scanner, shown, position = StopScanner(stops), "", 0
    visible, _ = naive_cut(text, stops)
    while position < len(text):
        size = sizes[position % len(sizes)]
        shown += scanner.push(text[position : position + size])
        position += size
        assert visible.startswith(shown)
    assert shown + scanner.finish() == visible


@given(AB, STOPS, st.integers(0, 5))
def test_matcher_and_visible_text_agree(text: str, stops: list[str], min_tokens: int) -> None:
    matcher = StopMatcher(BYTES, stops, min_tokens=min_tokens)
    reply = ReplyText(BYTES, stops, min_tokens=min_tokens)
    shown = ""
    for token_id in text.encode():
        shown += reply.push([token_id])
        if matcher.accept(token_id):
            break
    assert (reply.stop_string is None) == (matcher.stop_string is None)
    shown += reply.finish()
    if min_tokens <= 1:
        assert shown == naive_cut(text, stops)[0]
    assert reply.finish() == ""


def test_a_stop_string_over_three_tokens_ends_with_the_third() -> None:
    matcher = StopMatcher(BYTES, ["abc"])
    assert [matcher.accept(i) for i in b"xabc"] == [False, False, False, True]


def test_a_stop_string_inside_one_token_cuts_before_it(smollm2: ChatTokenizer) -> None:
    ids = smollm2.encode("Hello world")
    reply = ReplyText(smollm2, ["orl"])
    assert reply.push(ids) == "Hello w"
    assert reply.stop_string == "orl"


def test_a_stop_string_may_be_the_first_token() -> None:
    reply = ReplyText(BYTES, ["a"])
    assert reply.push(b"abc") + reply.finish() == ""


def test_a_stop_string_of_a_multi_byte_character() -> None:
    matcher = StopMatcher(BYTES, ["é"])
    assert [matcher.accept(i) for i in "xé".encode()] == [False, False, True]


def test_what_was_held_back_is_shown_at_the_end() -> None:
    reply = ReplyText(BYTES, ["END"])
    assert reply.push(b"the EN") == "the "
    assert reply.push(b"emy EN") == "ENemy "
    assert reply.finish() == "EN"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    matcher = StopMatcher(BYTES, ["a"], min_tokens=3)
    assert [matcher.accept(i) for i in b"aaa"] == [False, False, True]
    reply = ReplyText(BYTES, ["a"], min_tokens=3)
    assert reply.push(b"aaa") == "aa"


def test_a_character_that_the_end_broke_is_completed_by_the_continuation() -> None:
    first, second = "é".encode()
    reply = ReplyText(BYTES, after=[first])
    assert reply.push([second]) == "é"


@pytest.mark.parametrize("size", [1, 7, 1024])
def test_long_repetitive_stop_strings_take_linear_time(size: int) -> None:
    scanner = StopScanner(["a" * size + "b"])
    shown = "".join(scanner.push("a" * 100) for _ in range(100))
    assert len(shown) == 10_000 - size
    scanner.push("b")
    assert scanner.found == "a" * size + "b"


def test_a_character_with_which_no_string_begins_or_goes_on_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    advance = _Progress.advance

    def count(progress: _Progress, character: str) -> bool:
        asked.append(character)
        return advance(progress, character)

    monkeypatch.setattr(_Progress, "advance", count)
    scanner = StopScanner([f"x{at}" for at in range(64)])
    assert scanner.push("a" * 10_000) == "a" * 10_000
    assert asked == []
    assert scanner.push("xa") == "xa"
    assert asked == ["x"] * 64 + ["a"] * 64


@given(st.text("ab", max_size=20), st.text("ab", max_size=20), STOPS, st.integers(0, 9))
def test_ids_taken_at_once_show_what_they_show_one_by_one(
    first: str, second: str, stops: list[str], min_tokens: int
) -> None:
    together = ReplyText(BYTES, stops, min_tokens=min_tokens)
    shown = together.push(first.encode()) + together.push(second.encode()) + together.finish()
    single = ReplyText(BYTES, stops, min_tokens=min_tokens)
    apart = "".join([single.push([i]) for i in (first + second).encode()]) + single.finish()
    assert (shown, together.stop_string) == (apart, single.stop_string)
