"""Foreign bytes into the parsers of text: stop matching, detokenizing, template deltas.

Each against a plain oracle, on inputs that Hypothesis makes up, the same ones in every run. What
once failed stands beside it as an example.
"""

from __future__ import annotations

import functools
import re

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from agentkv.core.batch import TokenArray
from agentkv.errors import ChatTemplateError
from agentkv.messages import Message
from agentkv.testing.byte_tokenizer import SPECIAL_TOKENS, byte_tokenizer
from agentkv.text import conversation as text
from agentkv.text.detokenizer import DetokenizerSource
from agentkv.text.stopping import ReplyText, StopMatcher
from agentkv.text.tokenizer import ChatTokenizer

FUZZ = settings(derandomize=True, deadline=None, max_examples=200)
BYTES = byte_tokenizer()
IDS = st.lists(st.one_of(st.integers(0, 259), st.sampled_from(list("é😀ab".encode()))), max_size=40)
# Few letters, of one to four bytes, so that stops overlap themselves and one another.
LETTERS = st.sampled_from(["a", "b", "é", "日", "😀", "\ufffd", "\n"])
STOPS = st.lists(st.lists(LETTERS, min_size=1, max_size=4).map("".join), max_size=4)


def plain_text(ids: list[int]) -> list[str]:
    """The text after each of the ids, in whole characters, beginning with that after none."""
    shown = []
    for end in range(len(ids) + 1):
        data = bytes(i for i in ids[:end] if i < 256)
        held = next((n for n in (3, 2, 1) if n <= len(data) and _may_be_completed(data[-n:])), 0)
        shown.append(data[: len(data) - held].decode(errors="replace"))
    return shown


def _may_be_completed(tail: bytes) -> bool:
    """Whether these bytes begin one character and lack some of it."""
    for more in (b"\x80", b"\xa0", b"\x80\x80", b"\xa0\x80", b"\x80\x80\x80", b"\x90\x80\x80"):
        try:
            if len((tail + more).decode()) == 1:
                return True
        except UnicodeDecodeError:
            continue
    return False


@FUZZ
@given(IDS)
@example([0xE0, 0x80, 0x80])
@example([0xF4, 0x90, 0x80, 0x80])
@example([0xED, 0xA0, 0x80])
@example([0xF0, 0x9F, 257, 0x98, 0x80])
def test_streamed_text_is_that_of_the_bytes_at_every_moment(ids: list[int]) -> None:
    detokenizer = BYTES.detokenizer()
    shown = ""
    for token_id, expected in zip(ids, plain_text(ids)[1:], strict=True):
        shown += detokenizer.push([token_id])
        assert expected.startswith(shown)
        # Bytes that can no longer become a character may be held until the next one, not longer.
        assert len(expected) - len(shown) <= 3
    shown += detokenizer.flush()
    assert shown == bytes(i for i in ids if i < 256).decode(errors="replace")


@FUZZ
@given(IDS, st.integers(0, 40))
def test_a_copied_detokenizer_goes_on_alike(ids: list[int], at: int) -> None:
    detokenizer = BYTES.detokenizer()
    detokenizer.push(ids[:at])
    twin = detokenizer.copy()
    assert [detokenizer.push([i]) for i in ids[at:]] == [twin.push([i]) for i in ids[at:]]
    assert detokenizer.flush() == twin.flush()


@functools.cache
def word_pieces() -> tuple[Tokenizer, int]:
    words = ["[UNK]", "a", "b", "##a", "##é", "日", "##本", ".", ",", "don", "'", "t"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return backend, len(words)


@FUZZ
@given(st.lists(st.integers(0, 11), max_size=25))
def test_other_decoders_give_what_the_backend_gives_for_all_ids(ids: list[int]) -> None:
    backend, _ = word_pieces()
    detokenizer = DetokenizerSource(backend, ()).detokenizer()
    shown = "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush()
    whole = backend.decode(ids)
    # Cleaning up looks at neighbours; what has been shown is not taken back for it.
    assert shown.replace(" ", "") == whole.replace(" ", "")


def first_stop(ids: list[int], stops: list[str], min_tokens: int) -> tuple[int, str, str] | None:
    """After how many ids which stop is complete, and the text before it, by trying everything."""
    detokenizer = BYTES.detokenizer()
    shown = [""]
    for token_id in ids:
        shown.append(shown[-1] + detokenizer.push([token_id]))
    for count in range(1, len(ids) + 1):
        before, now = shown[count - 1], shown[count]
        for end in range(len(before) + 1, len(now) + 1):
            found = [stop for stop in stops if now[:end].endswith(stop)]
            if found and count >= max(1, min_tokens):
                longest = max(found, key=len)
                return count, now[: end - len(longest)], longest
    return None


@FUZZ
@given(IDS, STOPS, st.integers(0, 6))
@example(list(b"ab"), ["ab", "b"], 0)
@example([0xC3, 0x28], ["\ufffd"], 0)
@example(list("日本".encode()), ["日"], 4)
def test_stops_are_found_where_trying_everything_finds_them(
    ids: list[int], stops: list[str], min_tokens: int
) -> None:
    matcher = StopMatcher(BYTES, stops, min_tokens=min_tokens)
    reply = ReplyText(BYTES, stops, min_tokens=min_tokens)
    expected, shown, count = first_stop(ids, stops, min_tokens), "", 0
    for token_id in ids:
        count += 1
        shown += reply.push([token_id])
        if expected is not None:
            assert expected[1].startswith(shown)
        if matcher.accept(token_id):
            break
    if expected is None:
        assert matcher.stop_string is None
        assert shown + reply.finish() == bytes(i for i in ids if i < 256).decode(errors="replace")
    else:
        assert (count, shown + reply.finish(), reply.stop_string) == expected
        assert matcher.stop_string == expected[2]


# Template deltas.


class Ids:
    """Stored ids as a plain list."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> TokenArray:
        return np.array(self.ids[start:stop], dtype=np.int32)


HEADS = ("", "{{ bos_token }}", "{% if messages[0].role != 'system' %}S{% endif %}")
CONTENTS = ("m.content", "m.content | trim", "m.content.strip() ~ '!'", "m.content[:4]")
TAILS = ("\n", "<|im_end|>\n", "", " ")
TEMPLATES = [
    head
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ "
    + content
    + " }}"
    + tail
    + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for head in HEADS
    for content in CONTENTS
    for tail in TAILS
]
FRAGMENTS = st.sampled_from([*SPECIAL_TOKENS, "<|im_", "end|>", "a", " ", "\n", "é", "\ue000", "!"])
TEXTS = st.lists(FRAGMENTS, max_size=6).map("".join)
MESSAGES = st.builds(Message, st.sampled_from(["user", "system", "assistant", "tool"]), TEXTS)
CONTROL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
TURNS = st.lists(
    st.tuples(st.lists(MESSAGES, min_size=1, max_size=2), TEXTS, st.booleans()),
    min_size=1,
    max_size=3,
)


@functools.cache
def with_template(source: str) -> ChatTokenizer:
    return ChatTokenizer(BYTES.backend, chat_template=source, bos_token="<|bos|>")


@settings(FUZZ, max_examples=200)
@given(st.sampled_from(TEMPLATES), TURNS)
def test_a_turn_keeps_stored_ids_or_encodes_anew_and_users_write_no_control_token(
    source: str, turns: list[tuple[list[Message], str, bool]]
) -> None:
    tokenizer = with_template(source)
    conversation, ids = text.start(), list[int]()
    for entries, said, is_stopped in turns:
        plan = text.plan(
            tokenizer, conversation, Ids(ids), entries, limit=10**6, reply=True, vocab_size=260
        )
        ids = [*ids[: plan.keep], *plan.new_ids.tolist()]
        (shown,) = tokenizer.render_parts(
            plan.conversation.messages, add_generation_prompt=True, now=conversation.opened_at
        )
        written = "\0".join(piece.text for piece in shown if piece.writer == "template")
        # Users' texts are full of them, and none becomes an id.
        assert sum(i >= 256 for i in plan.new_ids.tolist()) <= len(CONTROL.findall(written))
        sampled = tokenizer.encode_continuation(said) + ([258] if is_stopped else [])
        ids += sampled
        conversation = text.commit(plan, said, "stop" if is_stopped else "length")
    assert conversation.messages[-1].role == "assistant"


@settings(FUZZ, max_examples=200)
@given(st.sampled_from(TEMPLATES), st.lists(MESSAGES, min_size=1, max_size=4))
@example("{{ messages[0].content[:4] }}", [Message("user", "<|bos|>")])
@example("{{ messages[0].content[2:9] }}|", [Message("user", "a<|bos|><|im_end|>")])
@example("{% if messages[0].content[0] == '<' %}!{% endif %}x", [Message("user", "<|bos|>")])
@example("{{ messages[0].content | length }}", [Message("user", "<|bos|>")])
def test_a_first_turn_has_the_ids_of_its_whole_rendering(
    source: str, messages: list[Message]
) -> None:
    tokenizer = with_template(source)
    plan = text.plan(
        tokenizer, text.start(), Ids([]), messages, limit=10**6, reply=True, vocab_size=260
    )
    rendered = tokenizer.render(messages, add_generation_prompt=True)
    assert plan.keep == 0
    assert tokenizer.decode(plan.new_ids.tolist(), skip_special=False) == rendered
    assert plan.new_ids.tolist() == tokenizer.encode_chat(messages)


SOURCES = st.text(alphabet="{}%|[]()'\"._-+*~# abmxif01\n", max_size=60)


@settings(FUZZ, max_examples=300)
@given(SOURCES)
@example("{{ messages[0] }}{#")
@example("{% for m in messages %}")
@example("{{ ''|attr('__class__') }}")
def test_any_template_renders_or_is_refused(source: str) -> None:
    try:
        tokenizer = ChatTokenizer(BYTES.backend, chat_template=source)
        rendered = tokenizer.render([Message("user", "x")], add_generation_prompt=True)
    except ChatTemplateError:
        return
    assert isinstance(rendered, str)
