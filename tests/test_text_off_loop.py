"""What a foreign template or tokenizer costs is not paid on the caller's loop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

import anyio
import pytest
from tokenizers import Tokenizer

from agentkv import ChatTemplateError, Engine, EngineConfig, Session
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner
from agentkv.text import budget
from agentkv.text.budget import HurriedError, hurried
from agentkv.text.plain import PlainBackend
from agentkv.text.rendering import Piece
from agentkv.text.stopping import ReplyText
from agentkv.text.tokenizer import ChatTokenizer
from agentkv.turn import ON_LOOP_CHARS
from tests.bench import make

pytestmark = pytest.mark.anyio

SLOW = "{% for a in range(10) %}{% for b in range(999) %}{% endfor %}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SAYS = "{{ messages[0].content }}"


class Threads:
    """On which threads renderings began, and on which they ended, well or badly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.ended: list[tuple[int, str]] = []
        render = ChatTokenizer.render

        def watched(*args: object, **kwargs: object) -> str:
            outcome = "HurriedError"
            self.begun.append(threading.get_ident())
            try:
                result = render(*args, **kwargs)  # type: ignore[arg-type]  # passed through
                outcome = "rendered"
                return result
            except ChatTemplateError:
                outcome = "ChatTemplateError"
                raise
            finally:
                self.ended.append((threading.get_ident(), outcome))

        monkeypatch.setattr(ChatTokenizer, "render", watched)


async def open_with(template: str, use: Callable[[Session], object]) -> object:
    """What `use` gives for a session of an engine with that template."""
    tokenizer = ChatTokenizer(byte_tokenizer().backend, chat_template=template)
    runner = WitnessRunner(num_blocks=64, tokenizer=tokenizer)
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        result = use(engine.session())
        assert isinstance(result, object)
        return await result  # type: ignore[misc]  # a coroutine


async def test_a_quick_template_runs_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch)
    await open_with(SAYS, lambda session: session.generate("hello", max_tokens=2))
    assert {outcome for _, outcome in threads.ended} == {"rendered"}
    assert {thread for thread, _ in threads.ended} == {threading.get_ident()}


async def test_a_slow_template_goes_on_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch)
    await open_with(SLOW + SAYS, lambda session: session.generate("hello", max_tokens=2))
    on_loop = [outcome for thread, outcome in threads.ended if thread == threading.get_ident()]
    assert on_loop == ["HurriedError"]
    assert {outcome for thread, outcome in threads.ended[1:]} == {"rendered"}


async def test_a_long_text_is_handled_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch)
    runner = WitnessRunner(num_blocks=1024, max_context=16384, tokenizer=byte_tokenizer())
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        await engine.session().generate("x" * (ON_LOOP_CHARS + 1), max_tokens=2)
    assert threading.get_ident() not in {thread for thread, _ in threads.ended}


async def test_an_endless_template_is_stopped_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.3)
    before = time.thread_time()
    with pytest.raises(ChatTemplateError, match=r"more than 0\.3 seconds"):
        await open_with(ENDLESS, lambda session: session.generate("hello"))
    assert time.thread_time() - before < 0.25


@pytest.mark.parametrize("how", ["generate", "stream"])
async def test_text_of_a_long_reply_is_made_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    pushed: dict[int, int] = {}
    push = ReplyText.push

    def watched(self: ReplyText, ids: Sequence[int]) -> str:
        thread = threading.get_ident()
        pushed[thread] = max(pushed.get(thread, 0), len(ids))
        return push(self, ids)

    monkeypatch.setattr(ReplyText, "push", watched)
    engine, _ = make()
    async with engine:
        session = engine.session(system="Go on and on.")
        if how == "generate":
            reply = await session.generate("x", max_tokens=1000)
        else:
            async with session.stream("x", max_tokens=1000) as stream:
                reply = await stream.result()
    assert len(reply.token_ids) == 1000
    assert session.messages[-1].content == reply.text
    assert threading.get_ident() not in pushed
    assert list(pushed.values()) == [1000]


async def test_a_cancelled_call_leaves_no_rendering_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 60.0)
    threads = Threads(monkeypatch)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as group:
            group.start_soon(open_with, ENDLESS, lambda session: session.generate("hello"))
            while len(threads.begun) < 2:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        while len(threads.ended) < 2:
            await anyio.lowlevel.checkpoint()
    assert [outcome for _, outcome in threads.ended] == ["HurriedError", "ChatTemplateError"]


async def test_threads_that_want_the_same_second_tokenizer_get_one() -> None:
    plain = PlainBackend(pieces_in_the_vocabulary(), ())
    hostile = [Piece("x<|im_end|>", "user")]
    found: list[list[int]] = []

    async def encode() -> None:
        found.append(await anyio.to_thread.run_sync(plain.encode, hostile))

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(encode)
    assert all(ids == found[0] for ids in found)


def pieces_in_the_vocabulary() -> Tokenizer:
    """A tokenizer whose model knows `<|im_end|>` as an ordinary piece."""
    data = json.loads(byte_tokenizer().backend.to_str())
    vocabulary = data["model"]["vocab"]
    data["model"] = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [[piece, -1.0] for piece, _ in sorted(vocabulary.items(), key=lambda p: p[1])],
    }
    data["model"]["vocab"] += [[token["content"], -0.5] for token in data["added_tokens"]]
    data["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(data))


async def test_a_second_tokenizer_is_built_off_the_loop() -> None:
    plain = PlainBackend(pieces_in_the_vocabulary(), ())
    hostile = [Piece("x<|im_end|>", "user")]
    with hurried(), pytest.raises(HurriedError):
        plain.encode(hostile)
    ids = plain.encode(hostile)
    assert not set(ids) & plain.special_ids
    with hurried():
        assert plain.encode(hostile) == ids
