"""Faults of other engines on bad or odd input: counts, ids, empty texts, names, limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from agentkv import (
    ContextLengthError,
    Engine,
    EngineConfig,
    InvalidOptionError,
    Message,
    QueueFullError,
    RequestError,
    SamplingOptions,
    Session,
)
from agentkv.prompt import Prompt
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.driver import CoreDriver
from agentkv.testing.scripted import scripted_engine
from agentkv.testing.witness import WitnessRunner, witness_reply
from agentkv.text.tokenizer import ChatTokenizer
from tests.bad_input import Case, Place, measure
from tests.bench import Bench, expected

HUGE = 10**9
COUNTS: dict[str, tuple[Callable[[Place], object], type[Exception]]] = {
    "n": (lambda place: place.engine.generate("x", n=HUGE), InvalidOptionError),
    "branches": (lambda place: place.session.branches(HUGE).__aenter__(), InvalidOptionError),
    "texts": (lambda place: place.session.score(["x"] * 1000), QueueFullError),
    "ids": (lambda place: place.session.generate(range(HUGE)), ContextLengthError),
    "messages": (lambda place: place.engine.session(messages=range(HUGE)), ContextLengthError),
    "top_logprobs": (
        lambda place: place.session.generate("x", top_logprobs=HUGE),
        InvalidOptionError,
    ),
}


@pytest.mark.parametrize("count", COUNTS)
def test_a_huge_count_is_refused_before_anything_is_made_of_it(count: str) -> None:
    """CVE-2026-34756, CVE-2024-8939, vllm#47845: n or a prompt list was expanded on the loop."""
    use, error = COUNTS[count]
    cost = measure(Case(count, "10^9", lambda place, _: use(place), error, ()))
    assert cost.seconds < 20 * 0.010
    assert cost.peak_bytes < 1_000_000


@pytest.mark.anyio
@pytest.mark.parametrize("token_id", [0, 259, np.int64(259), np.uint8(7), np.int16(0)], ids=repr)
async def test_the_first_and_the_last_id_of_the_vocabulary_are_taken(
    bench: Bench, token_id: int
) -> None:
    """vllm#16529, #6866, #9634, #51795: ids past the end crashed, negative ones wrapped round."""
    session = bench.engine.session(messages=[token_id])
    bias = {int(token_id): -100.0}
    reply = await session.generate(
        [token_id], max_tokens=6, logit_bias=bias, stop_token_ids=[int(token_id)]
    )
    assert session.token_ids[:2] == (int(token_id),) * 2
    assert int(token_id) not in reply.token_ids


@pytest.mark.anyio
async def test_a_tokenizer_larger_than_the_model_is_refused_where_it_shows() -> None:
    """vllm#16529: a tokenizer with more ids than the embedding has rows read out of bounds."""
    runner = WitnessRunner(num_blocks=64, vocab_size=256, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        session = engine.session()
        with pytest.raises(RequestError, match="0 to 255"):
            await session.generate("the template's own markers have the ids 257 and 258")
        assert runner.num_steps == 0
        assert session.token_ids == ()
        ids = engine.session(messages=[1, 2, 255])
        await ids.generate(max_tokens=3)
        assert list(ids.token_ids[3:]) == witness_reply([1, 2, 255], 3, vocab_size=256)


@pytest.mark.anyio
async def test_a_model_larger_than_its_tokenizer_gives_ids_that_have_no_text() -> None:
    """vllm#51795: an embedding padded beyond the tokenizer's ids."""
    runner = WitnessRunner(num_blocks=64, vocab_size=4000, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        reply = await engine.generate("x", max_tokens=30)
        assert max(reply.token_ids) >= 260
        assert len(reply.text.encode()) < 30


TEMPLATES = {"nothing": "", "white space": " ", "what is said": "{{ messages[0].content }}"}


@pytest.mark.anyio
@pytest.mark.parametrize("add_bos", [True, False])
async def test_empty_prompts_have_one_outcome_with_a_bos_and_without(add_bos: bool) -> None:
    """vllm#7283, #7746, CVE-2024-8768: an empty prompt killed the server if no BOS was added."""
    runner = WitnessRunner(num_blocks=64, tokenizer=byte_tokenizer(add_bos=add_bos))
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        empty: list[Any] = ["", [], [""]]  # Any: wrong on purpose
        for prompt in empty:
            with pytest.raises(RequestError):
                await engine.session().generate(prompt)
        blank: list[Prompt] = [" ", "\n\t", Message("user", ""), [Message("user", " ")]]
        for prompt in blank:
            session = engine.session()
            await session.generate(prompt, max_tokens=3)
            assert list(session.token_ids[-3:]) == expected(session, 3)


@pytest.mark.anyio
@pytest.mark.parametrize("source", TEMPLATES)
async def test_a_template_that_renders_to_nothing_is_refused_or_has_tokens(source: str) -> None:
    """vllm#7283: what was rendered had no tokens at all."""
    tokenizer = ChatTokenizer(byte_tokenizer().backend, chat_template=TEMPLATES[source])
    runner = WitnessRunner(num_blocks=64, tokenizer=tokenizer)
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        session = engine.session()
        if source == "nothing":
            with pytest.raises(RequestError, match="no tokens"):
                await session.generate("x")
            assert runner.num_steps == 0
        else:
            await session.generate("x", max_tokens=2)
            assert list(session.token_ids[-2:]) == expected(session, 2)


@pytest.mark.anyio
async def test_names_are_labels_and_ids_are_never_used_twice(bench: Bench) -> None:
    """vllm#15041: two live requests with one id crashed the engine."""
    sessions = [bench.engine.session(name="twin", messages=[at]) for at in range(6)]
    sessions += [sessions[0].fork(name="twin"), sessions[1].fork(name="twin")]
    await sessions[2].aclose()
    with pytest.raises(TimeoutError):
        await sessions[3].generate(timeout=0)
    sessions.append(bench.engine.session(name="twin", messages=[9]))
    assert len({session.id for session in sessions}) == len(sessions)
    async with anyio.create_task_group() as group:
        for session in (*sessions[:2], *sessions[3:]):
            group.start_soon(exact_turn, session)


async def exact_turn(session: Session) -> None:
    """A turn whose reply is the witness's."""
    await session.generate([8], max_tokens=2)
    assert list(session.token_ids[-2:]) == expected(session, 2)


@pytest.mark.anyio
@pytest.mark.parametrize("count", [0, 1, 20])
async def test_log_probabilities_are_as_many_as_were_asked_for(bench: Bench, count: int) -> None:
    """local-inference-lab/vllm#266: a count of -1 or of the vocabulary made a full table."""
    session = bench.engine.session(messages=[1])
    reply = await session.generate(max_tokens=4, logprobs=True, top_logprobs=count)
    assert reply.logprobs is not None
    assert [len(one.top) for one in reply.logprobs] == [count] * 4
    for wrong in (-1, 21, 260, HUGE):
        with pytest.raises(InvalidOptionError):
            await session.generate([1], logprobs=True, top_logprobs=wrong)


SAID = "abcdef"
EOS = 258


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6, 7])
@pytest.mark.parametrize("max_tokens", [1, 3, 6, 7, 9])
async def test_every_combination_of_limits_and_stop_strings_has_its_documented_end(
    min_tokens: int, max_tokens: int
) -> None:
    """vllm#4365, #21987: contradictory limits crashed or were ignored."""
    stops: list[tuple[str, ...]] = [(), ("a",), ("c",), ("ef", "f"), ("abcdefg",)]
    async with scripted_engine([SAID] * len(stops) * 2) as engine:
        for stop in stops:
            for ignore_eos in (False, True):
                session = engine.session(messages=[1])
                limits = partial(
                    session.generate,
                    max_tokens=max_tokens,
                    min_tokens=min_tokens,
                    stop=stop,
                    ignore_eos=ignore_eos,
                )
                if min_tokens > max_tokens:
                    with pytest.raises(InvalidOptionError, match="exceeds max_tokens"):
                        await limits()
                    assert session.token_ids == (1,) or session.token_ids == ()
                    continue
                reply = await limits()
                found = (len(reply.token_ids), reply.finish_reason, reply.stop_reason)
                assert found == documented_end(min_tokens, max_tokens, stop, ignore_eos)


def documented_end(
    min_tokens: int, max_tokens: int, stops: tuple[str, ...], ignore_eos: bool
) -> tuple[int, str, str | int | None]:
    """How many ids a reply has and why it ends, by plain search in what will be said."""
    for count in range(1, max_tokens + 1):
        if count > len(SAID) and not ignore_eos:
            return count, "stop", EOS
        complete = [stop for stop in stops if SAID[:count].endswith(stop) and count <= len(SAID)]
        if complete and count >= min_tokens:
            return count, "stop", max(complete, key=len)
    return max_tokens, "length", None


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 12, None])
@pytest.mark.parametrize("stop_token_ids", [(), (0,), (1, 2)], ids=str)
def test_stop_ids_end_a_reply_from_its_min_tokens_on(
    min_tokens: int, max_tokens: int | None, stop_token_ids: tuple[int, ...]
) -> None:
    """vllm#4365: with min_tokens, stop ids were drawn all the same, or the reply never ended."""
    driver = CoreDriver(num_blocks=12, vocab_size=5)
    limits = {"min_tokens": min_tokens, "max_tokens": max_tokens}
    if max_tokens is not None and min_tokens > max_tokens:
        with pytest.raises(InvalidOptionError):
            SamplingOptions(**limits)  # type: ignore[arg-type]  # by name
        return
    for at in range(5):
        turn = driver.submit(
            None,
            [at],
            count=max_tokens,
            options=SamplingOptions(temperature=0.0, **limits),  # type: ignore[arg-type]  # by name
            stop_token_ids=frozenset(stop_token_ids),
        )
        driver.run()
        driver.verify(turn)
        ids = turn.request.output_ids
        assert not set(stop_token_ids) & set(ids[: min(min_tokens, len(ids)) - 1])
        is_stopped = turn.finished.stop_token is not None
        assert is_stopped == (ids[-1] in stop_token_ids and len(ids) >= min_tokens)
        assert turn.finished.finish_reason == ("stop" if is_stopped else "length")
        driver.core.release(turn.snapshot)
    driver.verify_idle()
