"""The contract of sessions, on the witness model and on every event loop."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest

from agentkv import (
    CheckpointError,
    Completion,
    ContextLengthError,
    Engine,
    EngineClosedError,
    Message,
    NamespaceError,
    QueueFullError,
    Session,
    SessionBusyError,
    SessionClosedError,
    Status,
    StepError,
)
from agentkv.core.batch import Batch
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.scripted import scripted_engine
from agentkv.testing.witness import WitnessRunner, witness_reply, witness_score
from tests.bench import Bench, Gate, expected, from_thread, make

pytestmark = pytest.mark.anyio

SYSTEM = "You are one of many agents. " * 20


async def test_a_reply_is_the_witness_of_the_whole_conversation(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    for turn in range(4):
        reply = await session.generate(f"turn {turn}", max_tokens=5)
        assert list(reply.token_ids) == expected(session, 5)
    assert [message.role for message in session.messages] == ["system", *["user", "assistant"] * 4]


async def test_warming_leaves_a_turn_its_own_tokens(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    warmed = len(session.token_ids)
    reply = await session.generate("hello", max_tokens=3)
    assert reply.usage.cached_tokens == warmed - 1
    assert reply.usage.prefill_tokens == reply.usage.input_tokens - warmed + 1


async def test_a_fork_answers_as_a_fresh_session(bench: Bench) -> None:
    parent = bench.engine.session(system=SYSTEM)
    await parent.generate("one", max_tokens=7)
    fork = parent.fork()
    ids = parent.token_ids
    forked = await fork.generate("two", max_tokens=9)
    fresh = bench.engine.session(messages=fork.token_ids[:-9], namespace="other")
    assert (await fresh.generate(max_tokens=9)).token_ids == forked.token_ids
    assert parent.token_ids == ids


async def test_many_agents_prefill_one_prompt_once(bench: Bench) -> None:
    system = "x" * 2000
    agents = [bench.engine.session(system=system) for _ in range(32)]
    async with anyio.create_task_group() as group:
        for index, agent in enumerate(agents):
            group.start_soon(agent_turn, agent, f"job {index}")
    stats = bench.engine.stats()
    shared = len("<im>system\n" + system)
    own = sum(len(agent.token_ids) - shared for agent in agents)
    assert stats.prefill_tokens <= shared + own
    assert stats.used_blocks <= shared // 16 + 1 + sum(
        (len(agent.token_ids) - shared) // 16 + 2 for agent in agents
    )


async def agent_turn(agent: Session, prompt: str) -> None:
    await agent.generate(prompt, max_tokens=4)


async def test_a_cancelled_turn_never_happened(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids, messages = session.token_ids, session.messages
    with anyio.CancelScope() as scope:

        def cancel(batch: Batch) -> None:
            loop_cancel(scope.cancel)

        loop_cancel = from_thread()
        bench.runner.after_step = cancel
        await session.generate("never", max_tokens=4000)
    bench.runner.after_step = lambda batch: None
    assert scope.cancelled_caught
    assert (session.token_ids, session.messages) == (ids, messages)
    await bench.settle()
    assert bench.engine.stats().running == 0
    reply = await session.generate("after", max_tokens=4)
    assert list(reply.token_ids) == expected(session, 4)


async def test_a_timeout_leaves_the_session_as_it_was(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids = session.token_ids
    with pytest.raises(TimeoutError, match="no whole reply within timeout=0 s"):
        await session.generate("x", max_tokens=10, timeout=0)
    assert session.token_ids == ids
    assert session.status is Status.IDLE


async def test_calls_on_one_session_run_in_the_order_they_first_ran(bench: Bench) -> None:
    session = bench.engine.session(system="s")
    started: list[int] = []
    scopes = [anyio.CancelScope() for _ in range(50)]

    async def call(index: int) -> None:
        started.append(index)
        with scopes[index]:
            await session.generate(f"{index}", max_tokens=2)

    async with anyio.create_task_group() as group:
        for index in range(50):
            group.start_soon(call, index)
        await anyio.lowlevel.checkpoint()
        for index in (started[20], started[30], started[49]) if len(started) == 50 else (7, 8, 9):
            scopes[index].cancel()
    kept = [index for index in started if not scopes[index].cancel_called]
    said = [message.content for message in session.messages if message.role == "user"]
    assert said == [str(index) for index in kept]
    serial = bench.engine.session(system="s", namespace="serial")
    for index in kept:
        await serial.generate(f"{index}", max_tokens=2)
    assert serial.token_ids == session.token_ids


async def test_a_stream_read_to_its_end_commits(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    ids: list[int] = []
    text = ""
    async with session.stream("go", max_tokens=40) as stream:
        assert session.status is Status.STREAMING
        with pytest.raises(SessionBusyError):
            await session.generate("no")
        async for delta in stream:
            ids += delta.token_ids
            text += delta.text
        assert (await stream.result()).text == text
    assert ids == expected(session, 40)
    assert session.messages[-1] == Message("assistant", text)


async def test_a_stream_left_early_is_discarded(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids = session.token_ids
    async with session.stream("go", max_tokens=40) as stream:
        async for _ in stream:
            break
    assert session.token_ids == ids
    assert session.status is Status.IDLE
    await session.generate("next", max_tokens=3)


async def test_a_stopped_stream_keeps_what_was_sampled(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    async with session.stream("go", max_tokens=5000) as stream:
        async for _ in stream:
            break
        done = await stream.stop()
    assert done.finish_reason == "stopped"
    count = len(done.token_ids)
    assert list(done.token_ids) == expected(session, count)
    more = await session.generate(max_tokens=5)
    assert list(more.token_ids) == expected(session, 5)
    assert session.messages[-1].role == "assistant"


async def test_a_dropped_stream_lets_the_next_call_run(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids = session.token_ids
    stream = session.stream("go", max_tokens=50)
    await stream.__aenter__()
    del stream
    gc.collect()
    await bench.settle()
    assert session.status is Status.IDLE
    assert session.token_ids == ids
    await session.generate("next", max_tokens=2)


async def test_dropping_every_session_frees_every_block(bench: Bench) -> None:
    sessions = [bench.engine.session(system=SYSTEM + str(n)) for n in range(5)]
    for session in sessions:
        await session.generate("x", max_tokens=3)
    forks = [session.fork() for session in sessions]
    del sessions, session
    gc.collect()
    await bench.settle()
    assert bench.engine.stats().used_blocks > 0
    del forks
    gc.collect()
    await bench.settle()
    assert bench.engine.stats().used_blocks == 0


async def test_a_dropped_session_gives_its_blocks_back_though_nobody_calls(bench: Bench) -> None:
    dropped = await bench.engine.session(system=SYSTEM * 10)
    session = bench.engine.session(messages=[1, 2, 3])
    gate = Gate(bench.runner, after_steps=2)
    async with session.stream(max_tokens=1500) as stream:
        await anext(stream)
        held = bench.engine.stats().used_blocks
        del dropped
        gc.collect()
        gate.open()
        # Long before this reply ends, which never takes as many blocks as are given back.
        while bench.engine.stats().used_blocks > held - 200:
            await anext(stream)


async def test_what_a_turn_has_replaced_is_held_no_longer(bench: Bench) -> None:
    session = bench.engine.session(messages=[1, 2, 3])
    for at in range(5):
        await session.generate([at] * 13, max_tokens=4)
        await bench.settle()
        assert bench.engine.stats().used_blocks == -(-(len(session.token_ids) - 1) // 16)


async def test_what_is_said_after_a_rollback_is_drawn_anew(bench: Bench) -> None:
    session = await bench.engine.session(messages=[1, 2, 3])
    said = []
    async with session.checkpoint() as mark:
        for _ in range(3):
            said.append((await session.generate([4], max_tokens=12, temperature=1.0)).token_ids)
            session.rollback(mark)
    assert len(set(said)) == 3


async def test_rollback_and_adopt_move_the_conversation(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    async with session.checkpoint() as mark:
        ids = session.token_ids
        await session.generate("x", max_tokens=3)
        session.rollback(mark)
        assert session.token_ids == ids
        other = session.fork()
        with pytest.raises(CheckpointError):
            other.rollback(mark)
    with pytest.raises(CheckpointError):
        session.rollback(mark)
    async with session.branches(3) as branches:
        await branches[1].generate("y", max_tokens=3)
        wanted = branches[1].token_ids
        session.adopt(branches[1])
    assert session.token_ids == wanted
    assert all(branch.status is Status.CLOSED for branch in branches)
    with pytest.raises(NamespaceError):
        session.adopt(bench.engine.session(system="a", namespace="b"))


async def test_forks_after_adopting_draw_as_no_earlier_fork_did(bench: Bench) -> None:
    session = await bench.engine.session(messages=[1, 2, 3])
    branch = session.fork()
    forks = [branch.fork(), branch.fork()]
    session.adopt(branch)
    forks += [session.fork(), session.fork()]
    said = [(await f.generate([4], max_tokens=12, temperature=1.0)).token_ids for f in forks]
    assert len(set(said)) == 4


async def test_siblings_draw_differently_and_a_seed_repeats(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    forks = [session.fork() for _ in range(4)]
    hot = [(await fork.generate("x", max_tokens=8, temperature=1.0)).token_ids for fork in forks]
    assert len(set(hot)) == 4
    seeded = [session.fork() for _ in range(2)]
    same = {
        (await fork.generate("x", max_tokens=8, temperature=1.0, seed=5)).token_ids
        for fork in seeded
    }
    assert len(same) == 1


async def test_sessions_draw_differently_and_an_engine_of_the_same_seed_repeats_them() -> None:
    said: list[list[tuple[int, ...]]] = []
    for seed in (1, 1, 2):
        engine, _ = make(seed=seed)
        async with engine:
            sessions = [engine.session(messages=[1]) for _ in range(3)]
            replies = [await each.generate(max_tokens=12, temperature=1.0) for each in sessions]
            said.append([reply.token_ids for reply in replies])
    assert said[0] == said[1]
    assert len({*said[0], *said[2]}) == 6


async def test_samples_share_the_prompt_and_the_first_is_n_of_one(bench: Bench) -> None:
    many = await bench.engine.generate("question " * 20, n=4, max_tokens=6, temperature=1.0, seed=3)
    one = await bench.engine.generate("question " * 20, max_tokens=6, temperature=1.0, seed=3)
    assert len({sample.token_ids for sample in many.samples}) == 4
    assert many.token_ids == many.samples[0].token_ids == one.token_ids


async def test_scores_are_log_probabilities_and_change_nothing(bench: Bench) -> None:
    session = await bench.engine.session(messages=[1, 2, 3, 4])
    usage = session.usage
    scores = await session.score(["ab", "c"])
    assert scores == [
        pytest.approx(witness_score([1, 2, 3, 4], list(b"ab"))),
        pytest.approx(witness_score([1, 2, 3, 4], list(b"c"))),
    ]
    assert (session.token_ids, session.messages, session.usage) == ((1, 2, 3, 4), (), usage)


async def test_a_failed_step_fails_its_call_alone(bench: Bench) -> None:
    session = await bench.engine.session(system=SYSTEM)
    ids = session.token_ids

    def explode(batch: Batch) -> None:
        bench.runner.before_step = lambda batch: None
        raise RuntimeError("boom")

    bench.runner.before_step = explode
    with pytest.raises(StepError) as caught:
        await session.generate("x", max_tokens=4)
    assert isinstance(caught.value.cause, RuntimeError)
    assert session.token_ids == ids
    await session.generate("y", max_tokens=4)


async def test_a_reply_that_was_whole_when_its_session_closed_is_not_kept(bench: Bench) -> None:
    session, engine = bench.engine.session(messages=[1, 2, 3]), bench.engine
    async with session.branches(1) as branches:
        stream = branches[0].stream(max_tokens=3)
        await stream.__aenter__()
        await engine.generate([5], max_tokens=20)
    with pytest.raises(SessionClosedError):
        await stream.result()
    assert (branches[0].token_ids, branches[0].messages) == ((), ())
    async with session.stream(max_tokens=3) as stream:
        await engine.generate([5], max_tokens=20)
        await session.aclose()
        with pytest.raises(SessionClosedError):
            await anext(stream)
    assert (session.token_ids, session.messages) == ((), ())
    await bench.settle()
    assert engine.stats().used_blocks == 0
    late = engine.session(messages=[1, 2, 3])
    async with late.stream(max_tokens=3) as stream:
        await engine.generate([5], max_tokens=20)
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await stream.result()
    assert (late.token_ids, late.messages) == ((), ())


@pytest.mark.parametrize("use", ["warm", "score", "generate"])
async def test_a_session_closed_while_its_text_is_handled_says_so(use: str) -> None:
    runner = WitnessRunner(num_blocks=4096, max_context=65_536, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner) as engine:
        session = engine.session(messages=[Message("user", "long " * 4000)])
        refused: list[str] = []

        async def call() -> None:
            try:
                if use == "warm":
                    await session
                elif use == "score":
                    await session.score(["text"])
                else:
                    await session.generate()
            except SessionClosedError:
                refused.append(use)

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            while session.status is Status.IDLE:
                await anyio.lowlevel.checkpoint()
            await session.aclose()
        assert refused == [use]
        assert not runner.batches


async def test_scoring_takes_its_turn_like_any_call() -> None:
    runner = WitnessRunner(num_blocks=4096, max_context=65_536, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner) as engine:
        session = await engine.session(messages=[1, 2, 3])
        order: list[str] = []

        async def score() -> None:
            await session.score(["long " * 4000])
            order.append("score")

        async def generate() -> None:
            await session.generate([4], max_tokens=2)
            order.append("generate")

        async with anyio.create_task_group() as group:
            group.start_soon(score)
            while session.status is Status.IDLE:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(SessionBusyError, match="await it first, or use a fork"):
                session.add("meanwhile")
            group.start_soon(generate)
        assert order == ["score", "generate"]


async def test_a_closed_session_says_so(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    await session.aclose()
    await session.aclose()
    for use in (session.fork, session.checkpoint, lambda: session.add("x")):
        with pytest.raises(SessionClosedError):
            use()
    with pytest.raises(SessionClosedError):
        await session.generate("x")


async def test_what_can_never_fit_is_refused_at_once() -> None:
    engine, runner = make(num_blocks=8)
    async with engine:
        session = engine.session(messages=[1] * 127)
        assert (await session.generate()).finish_reason == "length"
        for ids, count in (([1] * 128, None), ([1] * 100, 29), ([1] * 10_000, 1)):
            steps = len(runner.batches)
            with pytest.raises(ContextLengthError):
                await engine.session(messages=ids).generate(max_tokens=count)
            assert len(runner.batches) == steps


async def test_more_ids_than_fit_are_refused_before_they_are_read(bench: Bench) -> None:
    ids = ["not read"] * 1_000_000
    session = bench.engine.session(system=SYSTEM)
    with pytest.raises(ContextLengthError):
        await session.generate(ids)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ContextLengthError):
        bench.engine.session(messages=ids)  # type: ignore[arg-type]  # wrong on purpose
    assert not bench.runner.batches


async def test_a_full_queue_refuses() -> None:
    engine, _ = make(max_waiting_per_session=2)
    async with engine:
        session = engine.session(system=SYSTEM)
        refusals: list[QueueFullError] = []

        async def call() -> None:
            try:
                await session.generate("x", max_tokens=20)
            except QueueFullError as error:
                refusals.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(call)
        assert len(refusals) == 3


async def test_usage_adds_up(bench: Bench) -> None:
    session = bench.engine.session(system=SYSTEM)
    replies: list[Completion] = []
    for _ in range(3):
        replies.append(await session.generate("x", max_tokens=4))
        usage = replies[-1].usage
        assert usage.input_tokens == len(session.token_ids) - 4
        assert usage.cached_tokens + usage.prefill_tokens == usage.input_tokens
    assert session.usage.output_tokens == 12
    assert session.usage.input_tokens == sum(reply.usage.input_tokens for reply in replies)


async def test_the_tree_shows_who_was_forked_from_whom(bench: Bench) -> None:
    root = await bench.engine.session(system=SYSTEM, name="root")
    child = root.fork(name="child")
    await child.generate("x", max_tokens=2)
    lines = (await bench.engine.tree()).splitlines()
    assert "root" in lines[1]
    assert "child" in lines[2]
    assert "shared" in lines[2]


async def test_the_tree_of_deep_forks_stays_narrow_and_a_name_is_one_line(bench: Bench) -> None:
    sessions = [bench.engine.session(messages=[1, 2], name="two\nlines\x1b[31m")]
    for _ in range(500):
        sessions.append(sessions[-1].fork())
    picture = await bench.engine.tree()
    assert "two\\nlines\\x1b[31m" in picture
    assert len(picture.splitlines()) == 502
    assert max(map(len, picture.splitlines())) < 200


async def test_one_shot_replies_keep_to_their_namespace(bench: Bench) -> None:
    ids = list(range(64))
    for namespace, cached in ((None, 0), (None, 48), ("other", 0), ("other", 48)):
        reply = await bench.engine.generate(ids, namespace=namespace, max_tokens=2)
        assert reply.usage.cached_tokens == cached


async def test_stop_ids_may_be_any_sequence(bench: Bench) -> None:
    first = witness_reply([1, 2, 3], 1)[0]
    for ids in (range(first, first + 1), np.array([first]), [first], (first,)):
        session = bench.engine.session(messages=[1, 2, 3])
        reply = await session.generate(stop_token_ids=ids, max_tokens=4)  # type: ignore[arg-type]  # NumPy's too
        assert (reply.finish_reason, reply.token_ids) == ("stop", (first,))


@pytest.mark.parametrize("cut", range(1, 6))
async def test_a_reply_cut_inside_a_character_goes_on_with_all_of_it(cut: int) -> None:
    said = "a\U0001f600b".encode()
    async with scripted_engine([list(said[:cut]), list(said[cut:])]) as engine:
        session = engine.session()
        first = await session.generate("x", max_tokens=cut)
        assert first.text == said[:cut].decode(errors="replace")
        second = await session.generate()
        assert session.messages[-1].content == said.decode()
        assert second.text in ("\U0001f600b", "b")


@pytest.mark.parametrize("cut", [2, 3, 4])
async def test_a_stop_string_may_begin_before_the_cut_of_its_character(cut: int) -> None:
    said = "a\U0001f600b".encode()
    async with scripted_engine([list(said[:cut]), list(said[cut:])]) as engine:
        session = engine.session()
        await session.generate("x", max_tokens=cut)
        second = await session.generate(stop="\U0001f600")
        assert (second.text, second.stop_reason) == ("", "\U0001f600")
        assert bytes(second.token_ids) == said[cut:5]
        assert session.messages[-1].content == "a"


async def test_options_are_those_of_the_moment_of_the_call(bench: Bench) -> None:
    bias = dict.fromkeys(range(130), -100.0)
    session = bench.engine.session(messages=[1])
    stream = session.stream(max_tokens=20, logit_bias=bias)
    bias.clear()
    async with stream:
        reply = await stream.result()
    assert min(reply.token_ids) >= 130
