"""Faults of other engines in text: doubled BOS tokens, stop strings that leak or are missed."""

from __future__ import annotations

import pytest

from agentkv import Engine, EngineConfig, InvalidOptionError, Message, Session
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.scripted import scripted_engine
from agentkv.testing.witness import WitnessRunner

BOS = 256


NO_BOS = {BOS: -100.0}
MESSAGES = [Message("system", "be brief"), Message("user", "hello")]


@pytest.mark.anyio
@pytest.mark.parametrize("add_bos", [True, False])
async def test_a_conversation_of_messages_has_one_bos_whatever_follows(add_bos: bool) -> None:
    """sglang#888, lcp#1439, vllm#27515, tgi#1594: the template's BOS and the tokenizer's own."""
    runner = WitnessRunner(num_blocks=512, tokenizer=byte_tokenizer(add_bos=add_bos))
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        for messages in ([], MESSAGES[:1], MESSAGES):
            session = await engine.session(messages=messages)
            await session.generate("a turn", max_tokens=2, logit_bias=NO_BOS)
            check_bos(session, add_bos)
            session.add("a message", Message("assistant", "an answer"))
            await session
            fork = session.fork()
            await fork.generate([1, 2, 3], max_tokens=2, logit_bias=NO_BOS)
            await fork.generate("after raw ids", max_tokens=2, logit_bias=NO_BOS)
            for each in (session, fork):
                check_bos(each, add_bos)


@pytest.mark.anyio
@pytest.mark.parametrize("add_bos", [True, False])
async def test_a_conversation_of_ids_has_the_bos_its_ids_begin_with(add_bos: bool) -> None:
    """lcp#1439, tgi#1594: rendered or raw text was encoded with a second BOS before it."""
    tokenizer = byte_tokenizer(add_bos=add_bos)
    rendered = tokenizer.render(MESSAGES, add_generation_prompt=True)
    openings = [tokenizer.encode_markup(rendered), tokenizer.encode("raw text")]
    openings += [tokenizer.encode_chat(MESSAGES), tokenizer.encode_markup("raw text")]
    runner = WitnessRunner(num_blocks=512, tokenizer=tokenizer)
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        for ids in openings:
            session = engine.session(messages=ids)
            await session.generate(max_tokens=2, logit_bias=NO_BOS)
            more = tokenizer.encode_continuation("and on")
            await session.fork().generate(more, max_tokens=2, logit_bias=NO_BOS)
            await session.generate(more, max_tokens=2, logit_bias=NO_BOS)
            check_bos(session, add_bos)


def check_bos(session: Session, add_bos: bool) -> None:
    """One BOS, at the front, if there is to be any."""
    assert session.token_ids.count(BOS) == add_bos
    assert (session.token_ids[0] == BOS) == add_bos


STOPS: list[tuple[str, tuple[str, ...], str, str | None]] = [
    # What is said, the stop strings, what may be seen, which of them ended it.
    ("one two three", ("two",), "one ", "two"),
    ("abcabcabd", ("abcabd",), "abc", "abcabd"),
    ("aaaab", ("aab", "ab"), "aa", "aab"),
    ("xyz", ("x",), "", "x"),
    ("xyz", ("z", "yz"), "x", "yz"),
    ("caf\u00e9 noir", ("\u00e9",), "caf", "\u00e9"),
    ("a\U0001f600b", ("\U0001f600b",), "a", "\U0001f600b"),
    ("the END is near", ("ENDS", "EN D"), "the END is near", None),
    ("EN", ("END",), "EN", None),
    ("\u00e9", ("\u00c3",), "\u00e9", None),
    ("user prompt", ("only in the prompt",), "user prompt", None),
]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("said", "stops", "seen", "reason"), STOPS, ids=lambda value: repr(value))
async def test_a_stop_string_is_found_over_token_borders_and_no_part_of_it_is_seen(
    said: str, stops: tuple[str, ...], seen: str, reason: str | None
) -> None:
    """vllm#11089, #57052, mlc-llm#2070: stops split over tokens were missed, or leaked in part."""
    async with scripted_engine([said, said]) as engine:
        session = engine.session(system="only in the prompt")
        reply = await session.fork().generate("only in the prompt", stop=stops)
        shown = ""
        async with session.stream("only in the prompt", stop=stops) as stream:
            async for delta in stream:
                shown += delta.text
                assert seen.startswith(shown)
            streamed = await stream.result()
        assert shown == seen == reply.text == streamed.text == session.messages[-1].content
        assert reply.stop_reason == streamed.stop_reason == (reason or 258)
        # Nothing was computed past the stop, and its ids stay.
        end = len((seen + reason).encode()) if reason else len(said.encode()) + 1
        assert len(reply.token_ids) == len(streamed.token_ids) == end


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_empty_stop_string_is_refused_and_a_cut_reply_goes_on_as_it_was_said() -> None:
    """vllm#11089: an empty stop string ended every reply, or none."""
    async with scripted_engine(["one two", "three"]) as engine:
        session = engine.session()
        for stops in ("", ("a", ""), ("",)):
            with pytest.raises(InvalidOptionError, match="1 to 1024 characters"):
                await session.generate("x", stop=stops)
        first = await session.generate("x", stop=" tw")
        assert (first.text, bytes(first.token_ids)) == ("one", b"one tw")
        second = await session.generate("y")
        assert second.text == "three"
        # The next turn was rendered after the ids that were really sampled.
        assert b"one tw" in bytes(id_ for id_ in session.token_ids if id_ < 256)
