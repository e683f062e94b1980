"""Prompts, replies and ids show in no log, no repr and no error, unless the user prints them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

import agentkv
from agentkv import Engine, EngineConfig, InvalidOptionError, Message, SamplingOptions
from agentkv.core.batch import Batch
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.faults import FaultPlan, FaultPoint
from agentkv.testing.faulty import FaultyEngine
from agentkv.testing.witness import WitnessRunner
from agentkv.text.tokenizer import ChatTokenizer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"debug": True})], ids=["debug"]),
]

# Neither is part of any name, path or number that an error may well contain.
SECRET = "Xyzzy-Plugh-Secret"
IDS = [81, 82, 83, 84, 85, 86, 87]
SHOWN_IDS = ("81, 82", "81 82", "[81", "(81")


def assert_silent(said: str) -> None:
    """The text has no part of what is secret."""
    for word in ("Xyzzy", "Plugh", "Secret", *SHOWN_IDS):
        assert word not in said, f"{word} is in {said[:400]}"


REFUSED: dict[str, Callable[[Any], Awaitable[object]]] = {  # Any: a session, used wrongly
    "too long": lambda s: s.generate(SECRET * 5000),
    "too long in tokens": lambda s: s.generate(SECRET * 60),
    "max_tokens": lambda s: s.generate(SECRET, max_tokens=5000),
    "option": lambda s: s.generate(SECRET, temperature=-1),
    "role and content exchanged": lambda s: s.generate(Message(SECRET, "user")),
    "short role": lambda s: s.generate(Message("Xyzzy Plugh", "user")),
    "content": lambda s: s.generate(Message("user", SECRET.encode())),  # type: ignore[arg-type]
    "bytes": lambda s: s.generate(SECRET.encode()),
    "a list of texts": lambda s: s.generate([SECRET, SECRET]),
    "dicts": lambda s: s.generate({"content": SECRET}),
    "surrogates": lambda s: s.generate(SECRET + "\ud800"),
    "ids and a wrong one": lambda s: s.generate([*IDS, 10**6]),
    "ids and a text": lambda s: s.generate([*IDS, SECRET]),
    "score of one text": lambda s: s.score(SECRET),
    "score of bytes": lambda s: s.score([SECRET.encode()]),
    "score with surrogates": lambda s: s.score([SECRET + "\ud800"]),
    "timeout": lambda s: s.generate(SECRET, timeout=0),
    "stop": lambda s: s.generate(SECRET, stop=(SECRET * 100,)),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_no_refusal_quotes_what_it_refuses(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        session = engine.session(system=SECRET)
        with pytest.raises((agentkv.AgentKVError, TimeoutError)) as caught:
            await REFUSED[case](session)
    error: BaseException | None = caught.value
    while error is not None:
        assert_silent(f"{error} {error!r} {getattr(error, '__notes__', '')}")
        error = error.__cause__ or error.__context__
    assert_silent(caplog.text)


POINTS: list[FaultPoint] = ["render", "encode", "detokenize", "forward.before", "forward.after"]
POINTS += ["logits.nan", "results.short", "results.token", "copy", "share"]


@pytest.mark.parametrize("point", POINTS)
async def test_no_failure_quotes_a_conversation(
    point: FaultPoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    plan = FaultPlan()
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    async with FaultyEngine(runner, plan, config=EngineConfig(debug=True)) as engine:
        session = await engine.session(system=SECRET)
        plan.fail(point, at=plan.passed[point] + 1, count=None)
        fork = session.fork()
        for each in (session, fork):
            try:
                await each.generate(SECRET, max_tokens=3)
            except Exception as error:
                assert_silent(f"{error} {error!r} {getattr(error, 'cause', '')!r}")
    assert_silent(caplog.text)


async def test_no_template_error_quotes_a_message() -> None:
    for template in (
        "{{ raise_exception(messages[0].content) }}",
        "{{ messages[0].content.nothing.there }}",
        "{{ messages[0][messages[0].content].x }}",
        "{{ messages[0].content | round }}",
        "{{ messages[0]['a\\'' ~ messages[0].content ~ '\\''].x }}",
        "{{ messages[0].content + 1 }}",
        "{{ namespace(**{'_' ~ messages[0].content: 1}) }}",
    ):
        tokenizer = ChatTokenizer(byte_tokenizer().backend, chat_template=template)
        runner = WitnessRunner(num_blocks=64, tokenizer=tokenizer)
        async with Engine(lambda _, runner=runner: runner) as engine:  # type: ignore[misc]
            with pytest.raises(agentkv.ChatTemplateError) as caught:
                await engine.generate(SECRET)
            assert_silent(f"{caught.value} {caught.value!r} {caught.value.__cause__!r}")


async def test_no_handle_and_no_part_of_one_shows_a_conversation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        session = engine.session(system=SECRET)
        await session.generate([*IDS], max_tokens=2)
        shown: list[object] = [engine, session, engine.stats(), engine.info, await engine.tree()]
        async with session.checkpoint() as mark, session.stream(SECRET, max_tokens=9) as stream:
            await anext(stream)
            shown += [mark, stream, session.fork(), session.usage, session.status]
            shown += [session._state, session._state.snapshot, session._state.conversation]
            turn = stream._turn
            assert turn is not None
            shown += [turn, turn.plan, turn.options, *turn.calls, *(c.request for c in turn.calls)]
            await stream.result()
            shown += [call.finished for call in turn.calls]
        shown += [batch for batch in runner.batches if isinstance(batch, Batch)]
        shown += [row for batch in runner.batches for row in batch.rows]
        shown += [row.sample for batch in runner.batches for row in batch.rows]
        for value in shown:
            assert_silent(f"{value} {value!r}")
    assert_silent(caplog.text)


async def test_a_reply_that_nobody_awaits_is_not_quoted_by_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner) as engine:
        session = engine.session(system=SECRET)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.generate, SECRET)
                await anyio.lowlevel.checkpoint()
                scope.cancel()
        del session
        gc.collect()
    assert_silent(caplog.text)


@pytest.mark.parametrize("value", ["secret " * 9, b"secret " * 9, ["secret"] * 9], ids=type)
async def test_a_long_value_in_the_wrong_place_is_not_quoted(value: object) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        SamplingOptions(temperature=value)  # type: ignore[arg-type]  # wrong on purpose
    assert "secret" not in str(caught.value)
