"""Streaming text: never half a character, whatever the ids and however they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.text.detokenizer import DetokenizerSource, byte_alphabet
from agentkv.text.tokenizer import ChatTokenizer

BYTES = byte_tokenizer()


def sentence_piece() -> Tokenizer:
    texts = ["▁", "▁a", "b", "é", *(f"<0x{byte:02X}>" for byte in range(256)), "<s>"]
    backend = Tokenizer(
        models.BPE({text: i for i, text in enumerate(texts)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return backend


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_come_out_as_utf_8_with_replacements(data: list[int]) -> None:
    detokenizer = BYTES.detokenizer()
    parts = [detokenizer.push([byte]) for byte in data]
    assert "".join([*parts, detokenizer.flush()]) == bytes(data).decode(errors="replace")


@given(st.text(max_size=20), st.integers(1, 5))
def test_text_does_not_depend_on_how_the_ids_are_split(text: str, size: int) -> None:
    ids = BYTES.encode(text)
    detokenizer = BYTES.detokenizer()
    parts = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(parts) == text
    assert detokenizer.flush() == ""


def test_half_a_character_is_held_back() -> None:
    detokenizer = BYTES.detokenizer()
    first, *middle, last = "😀".encode()
    assert detokenizer.push([first, *middle]) == ""
    assert detokenizer.push([last]) == "😀"


def test_a_copy_goes_its_own_way() -> None:
    detokenizer = BYTES.detokenizer()
    detokenizer.push("é".encode()[:1])
    twin = detokenizer.copy()
    assert detokenizer.push("é".encode()[1:]) == "é"
    assert twin.flush() == "\ufffd"


def test_special_and_unknown_ids_give_no_text() -> None:
    assert BYTES.detokenizer().push([65, 258, 66, 9999, 67]) == "ABC"


def test_the_byte_alphabet_has_a_character_for_each_byte() -> None:
    assert len(set(byte_alphabet().values())) == len(byte_alphabet()) == 256


@given(st.lists(st.integers(0, 259), max_size=20))
def test_sentence_piece_text_is_that_of_the_backend_where_bytes_are_valid(ids: list[int]) -> None:
    backend = sentence_piece()
    detokenizer = DetokenizerSource(backend, {260}).detokenizer()
    text = "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush()
    whole = backend.decode(ids)
    assert "\ufffd" in whole or text == whole


@pytest.mark.parametrize("text", ["hello world", "a ##b", "[UNK]"])
def test_other_decoders_give_the_backends_text(text: str) -> None:
    words = {word: i for i, word in enumerate(["hello", "world", "a", "##b", "[UNK]"])}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    ids = [words[word] for word in text.split()]
    detokenizer = DetokenizerSource(backend, ()).detokenizer()
    twin = detokenizer.copy()
    assert detokenizer.push(ids) + detokenizer.flush() == backend.decode(ids)
    assert twin.push(ids[:1]) == backend.decode(ids[:1])


def test_other_decoders_hold_half_a_character_back_but_not_for_ever() -> None:
    backend = Tokenizer.from_str(BYTES.backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    detokenizer = DetokenizerSource(backend, ()).detokenizer()
    data = "😀".encode()
    assert [detokenizer.push([byte]) for byte in data] == ["", "", "", "😀"]
    assert detokenizer.push([0x80] * 20) != ""


@given(st.text(max_size=30))
def test_the_real_tokenizer_streams_what_it_encoded(smollm2: ChatTokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    detokenizer = smollm2.detokenizer()
    parts = [detokenizer.push([i]) for i in ids]
    assert "".join(parts) + detokenizer.flush() == smollm2.decode(ids)
