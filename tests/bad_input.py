"""Wrong arguments to every public call, the error that refuses each, and what that error names.

A table: data for a test and for a measurement, and nothing here is a test itself. `measure` says
what one refusal costs.
"""

from __future__ import annotations

import gc
import inspect
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import numpy as np

from agentkv import (
    ChatTemplateError,
    CheckpointError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineNotOpenError,
    InvalidOptionError,
    Message,
    NamespaceError,
    OutOfBlocksError,
    QueueFullError,
    RequestError,
    SamplingOptions,
    Session,
    SessionClosedError,
)
from agentkv.config import short
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner
from agentkv.text.tokenizer import ChatTokenizer

VOCAB_SIZE = 260
NUM_BLOCKS = 64
LIMIT = 16 * NUM_BLOCKS
NAN, INF = float("nan"), float("inf")
LONG_TEXT = "x" * 5_000_000
MANY_IDS = [1] * 1_000_000
MANY_TEXTS = ["x"] * 1_000_000
MANY_MESSAGES = [Message("user", "x")] * 1_000_000
HALF_PAIR = "a\ud800"


@dataclass(slots=True)
class Place:
    """An open engine on a witness, with sessions in the states that calls can meet."""

    engine: Engine
    runner: WitnessRunner
    session: Session
    closed: Session
    foreign: Session
    without_text: Session


class Case(NamedTuple):
    """A wrong call with `value`, the type of error that refuses it, and what that must name."""

    call: str
    argument: str
    use: Callable[[Place, Any], object]  # Any: wrong on purpose
    error: type[Exception]
    says: tuple[str, ...]
    value: Any = None  # Any: wrong on purpose

    @property
    def name(self) -> str:
        return f"{self.call}({self.argument})"


class Cost(NamedTuple):
    """What a refusal took: seconds, and the most bytes held at once beyond those before it."""

    seconds: float
    peak_bytes: int


@asynccontextmanager
async def open_place() -> AsyncIterator[Place]:
    """A `Place`, closed at the end."""
    runner = WitnessRunner(num_blocks=NUM_BLOCKS, tokenizer=byte_tokenizer())
    config = EngineConfig(max_waiting=64, debug=True)
    bare = Engine(lambda _: WitnessRunner(num_blocks=NUM_BLOCKS), config=config)
    async with bare, Engine(lambda _: runner, config=config) as engine:
        session = await engine.session(system="be brief")
        closed = engine.session()
        await closed.aclose()
        yield Place(
            engine=engine,
            runner=runner,
            session=session,
            closed=closed,
            foreign=engine.session(system="be brief", namespace="elsewhere"),
            without_text=bare.session(),
        )


async def provoke(case: Case, place: Place) -> object:
    """Make the wrong call."""
    result = case.use(place, case.value)
    return await result if inspect.isawaitable(result) else result


def measure(case: Case) -> Cost:
    """What refusing a case takes, the second time, on an engine of its own."""

    async def run() -> Cost:
        async with open_place() as place:
            seconds = [await _seconds(case, place) for _ in range(3)]
            gc.collect()
            tracemalloc.start()
            try:
                await _seconds(case, place)
                return Cost(sorted(seconds)[1], tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()

    return anyio.run(run)


async def _seconds(case: Case, place: Place) -> float:
    before = time.perf_counter()
    try:
        await provoke(case, place)
    except case.error:
        return time.perf_counter() - before
    raise AssertionError(f"{case.name} was not refused")


# Options of a call.

_INTEGERS: dict[str, tuple[str, list[object]]] = {
    "max_tokens": ("from 1 to 2147483647", [0, -1, 2**31, 10**5000, True, 1.0, "5", NAN, [1]]),
    "min_tokens": ("from 0 to 2147483647", [-1, 2**31, None, False, 0.0, "0"]),
    "top_k": ("from 0 to 2147483647", [-1, 2**31, 1.0, True, "5"]),
    "seed": (f"from 0 to {2**64 - 1}", [-1, 2**64, 1.5, True, "7"]),
    "top_logprobs": ("from 0 to 20", [-1, 21, VOCAB_SIZE, 10**9, None, True, 1.0]),
}
_NUMBERS: dict[str, tuple[str, list[object]]] = {
    "temperature": ("finite number from 0", [NAN, INF, -INF, -1, -1e-30, 10**400, True, "1"]),
    "top_p": ("finite number above 0 to 1", [0, -0.1, 1.0001, NAN, INF, True, "0.5"]),
    "min_p": ("finite number from 0 to 1", [-0.1, 1.0001, NAN, INF, False, "0"]),
    "presence_penalty": ("finite number from -2 to 2", [-2.1, 2.1, NAN, None, True]),
    "frequency_penalty": ("finite number from -2 to 2", [-2.1, 2.1, NAN, None, "0"]),
    "repetition_penalty": ("finite number above 0 to 100", [0, -1, 100.1, NAN, INF, True]),
}


def _any(values: tuple[Any, ...]) -> tuple[Any, ...]:  # Any: wrong on purpose
    """The same, without the types, which are wrong on purpose."""
    return values


def _named(value: object) -> str:
    """How an error names a value."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of"
    return "<" if isinstance(value, (list, dict)) else repr(value)


def _option_cases() -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    for name, (bounds, values) in (*_INTEGERS.items(), *_NUMBERS.items()):
        for value in values:
            yield {name: value}, (f"{name}={_named(value)}", bounds)
    for name in _any(("logprobs", "ignore_eos")):
        for value in _any((1, None, "yes")):
            yield {name: value}, (f"{name}={value!r}", "True or False")
    yield {"min_tokens": 5, "max_tokens": 2}, ("min_tokens=5", "max_tokens=2")
    for stops in _any((5, None, {"x"}, b"x")):
        yield {"stop": stops}, (f"stop={short(stops)} must be a", "of at most 64 strings")
    for stops in (("x",) * 65, MANY_TEXTS):
        yield {"stop": stops}, (f"of length {len(stops)}", "at most 64")
    yield {"stop": ("a", "")}, ("stop[1]", "1 to 1024 characters", "not 0")
    yield {"stop": ("x" * 1025,)}, ("stop[0]", "1 to 1024 characters", "not 1025")
    yield {"stop": (5,)}, ("stop[0]", "not int")
    for stops in _any((5, None, "12", MANY_IDS)):
        yield {"stop_token_ids": stops}, ("stop_token_ids=", "of at most 64 token ids")
    for token_id in _any((-1, 2**31, 2**63, True, 1.0, "5")):
        yield {"stop_token_ids": (token_id,)}, (f"stop_token_ids={token_id!r}", "from 0 to")
        yield {"logit_bias": {token_id: 1.0}}, (f"logit_bias token id={token_id!r}", "from 0 to")
    for bias in ([(1, 1.0)], None, 5, dict.fromkeys(range(5000), 1.0)):
        yield {"logit_bias": bias}, ("logit_bias=", "at most 4096 token ids")
    for value in _any((NAN, INF, -100.1, 100.1, None, "1")):
        yield {"logit_bias": {1: value}}, (f"logit_bias value={value!r}", "from -100 to 100")


def _options() -> Iterator[Case]:
    for options, says in _option_cases():
        yield _generate(InvalidOptionError, says, **options)
    for token_id in _any((VOCAB_SIZE, 2**31 - 1)):
        says = (str(token_id), f"0 to {VOCAB_SIZE - 1}")
        yield _generate(InvalidOptionError, says, stop_token_ids=(token_id,))
        yield _generate(InvalidOptionError, says, logit_bias={token_id: 1.0})
    for timeout in _any((NAN, -1, INF, True, "5", 1e10)):
        says = (f"timeout={timeout!r}", "from 0 to 1e+09")
        yield _generate(InvalidOptionError, says, timeout=timeout)
        yield Case(
            "Session.stream",
            f"timeout={timeout!r}",
            lambda place, timeout: place.session.stream("x", timeout=timeout),
            InvalidOptionError,
            says,
            timeout,
        )
    yield _generate(InvalidOptionError, ("a string or a list of at most 64 strings",), stop=3)
    yield _generate(InvalidOptionError, ("stop_token_ids=3 must be a list",), stop_token_ids=3)
    for name in _any(("tools", "n", "best_of", "max_new_tokens", "self")):
        yield _generate(TypeError, (name,), **{name: 1})
    for options, says in list(_option_cases())[::7]:
        yield Case(
            "Session.stream",
            _show(options),
            lambda place, options: place.session.stream("x", **options),
            InvalidOptionError,
            says,
            options,
        )
        yield Case(
            "Engine.generate",
            _show(options),
            lambda place, options: place.engine.generate("x", **options),
            InvalidOptionError,
            says,
            options,
        )
    for options, says in list(_option_cases())[::3]:
        # The struct itself is stricter than `generate`, which takes lists of stops too.
        yield Case(
            "SamplingOptions",
            _show(options),
            lambda place, options: SamplingOptions(**options),
            InvalidOptionError,
            says,
            options,
        )
    for value in _any(("x", ["x"])):
        says = ("stop=", "tuple")
        yield Case(
            "SamplingOptions",
            f"stop={value!r}",
            lambda place, value: SamplingOptions(stop=value),
            InvalidOptionError,
            says,
            value,
        )
    yield Case(
        "Session.generate",
        "stop without a tokenizer",
        lambda place, _: place.without_text.generate([1], stop="x"),
        InvalidOptionError,
        ("stop strings need a tokenizer",),
    )


def _generate(error: type[Exception], says: tuple[str, ...], **options: Any) -> Case:  # Any: wrong
    return Case(
        "Session.generate",
        _show(options),
        lambda place, _: place.session.generate("x", **options),
        error,
        says,
    )


def _show(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_label(value)}" for name, value in options.items())


def _label(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge integer"
    if isinstance(value, (list, tuple, dict, str)) and len(value) > 40:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)[:50]


# Prompts, messages and ids.

_NOT_A_PROMPT: list[object] = [b"x", bytearray(b"x"), 5, 1.5, True, {"role": "user"}, {1, 2}]
_NOT_A_PROMPT += [object(), np.array(5), np.array([[1, 2]]), range, memoryview(b"x"), np.int64(1)]
_BAD_IDS: list[object] = [-1, VOCAB_SIZE, 2**31, 2**63, 10**400]
_NOT_IDS: list[object] = [True, 1.0, "5", None, [1], np.float32(1), np.bool_(True)]
_TOO_LONG: list[tuple[str, object]] = [
    ("5 MB of text", LONG_TEXT),
    ("5 MB in a message", Message("user", LONG_TEXT)),
    ("1,000,000 ids", MANY_IDS),
    ("10^9 ids", range(10**9)),
    ("1,000,000 ids in an array", np.ones(1_000_000, np.int64)),
    ("1,000,000 messages", MANY_MESSAGES),
    ("one id more than fits", [1] * (LIMIT + 1)),
]


def _wrong_prompts() -> Iterator[tuple[str, object, type[Exception], tuple[str, ...]]]:
    for value in _NOT_A_PROMPT:
        kinds = (type(value).__name__, "messages such as Message('user', text)")
        yield repr(value)[:40], value, RequestError, kinds
    yield (
        "a generator",
        (n for n in [1, 2]),
        RequestError,
        ("generator", "messages such as Message('user', text)"),
    )
    yield "''", "", RequestError, ("empty",)
    yield "[]", [], RequestError, ("empty",)
    for token_id in _BAD_IDS:
        named = "an integer of" if token_id == 10**400 else str(token_id)
        says = (named, f"0 to {VOCAB_SIZE - 1}", "number 1")
        yield f"[1, {_label(token_id)}]", [1, token_id], InvalidOptionError, says
    for other in _NOT_IDS:
        kinds = ("integers", type(other).__name__)
        yield f"[1, {other!r}]", [1, other], InvalidOptionError, kinds
    yield "['']", [""], InvalidOptionError, ("integers", "str")
    yield "array of floats", np.array([1.0]), InvalidOptionError, ("integers", "float64")
    yield "array of 260", np.array([1, VOCAB_SIZE]), InvalidOptionError, ("260", "0 to 259")
    yield "ids, then a message", [1, Message("user", "x")], InvalidOptionError, ("Message",)
    mixed = [Message("user", "x"), 1]
    yield "a message, then an id", mixed, RequestError, ("messages or token ids, not both",)
    for role in _any(("robot", "", "User", "system\n", 5, None)):
        named = repr(role) if role in ("robot", "User") else f"<{type(role).__name__}>"
        message = Message(role, "x")
        yield f"role {role!r}", message, RequestError, ("one of assistant, developer", named)
    for content in _any((5, None, b"x", ["x"])):
        message = Message("user", content)
        yield f"content {content!r}", message, RequestError, ("text", type(content).__name__)
    yield "half a surrogate pair", HALF_PAIR, RequestError, ("surrogate",)
    yield "half a pair in a message", [Message("user", HALF_PAIR)], RequestError, ("surrogate",)
    for name, value in _TOO_LONG:
        yield name, value, ContextLengthError, ("the limit is 1024",)


def _prompts() -> Iterator[Case]:
    calls: dict[str, Callable[[Place, Any], object]] = {  # Any: wrong on purpose
        "Session.generate": lambda place, value: place.session.generate(value),
        "Session.stream": lambda place, value: place.session.stream(value),
        "Session.add": lambda place, value: place.session.add(value),
        "Engine.generate": lambda place, value: place.engine.generate(value),
        "Engine.session": lambda place, value: place.engine.session(system=value),
    }
    for at, (call, run) in enumerate(calls.items()):
        for index, (name, value, error, says) in enumerate(_wrong_prompts()):
            # All of them in one call, and in every other call every third.
            if at == 0 or index % 3 == at % 3:
                yield Case(
                    call,
                    name,
                    run,
                    error,
                    says,
                    value,
                )


def _prompts_in_place() -> Iterator[Case]:
    """Prompts that are wrong for what they meet."""
    yield Case(
        "Session.generate",
        "nothing to answer",
        lambda place, _: place.engine.session().generate(),
        RequestError,
        ("nothing to answer",),
    )
    yield Case(
        "Session.generate",
        "max_tokens beyond the pool",
        lambda place, _: place.session.generate("x", max_tokens=2000),
        ContextLengthError,
        ("limit is 1024",),
    )
    yield Case(
        "Session.generate",
        "min_tokens beyond the pool",
        lambda place, _: place.session.generate("x", min_tokens=2000),
        ContextLengthError,
        ("limit is 1024",),
    )
    yield Case(
        "Session.generate",
        "text after ids",
        lambda place, _: place.engine.session(messages=[1, 2]).generate("x"),
        ChatTemplateError,
        ("takes no text",),
    )
    yield Case(
        "Session.generate",
        "text without a tokenizer",
        lambda place, _: place.without_text.generate("x"),
        ChatTemplateError,
        ("no tokenizer",),
    )
    yield Case(
        "Session.add",
        "text without a tokenizer",
        lambda place, _: place.without_text.add("x"),
        ChatTemplateError,
        ("no tokenizer",),
    )
    yield Case(
        "Session.add", "None", lambda p, value: p.session.add(value), RequestError, ("not None",)
    )
    yield Case(
        "Session.add",
        "more than fits, in parts",
        lambda place, _: place.session.add(*["x" * 15_000] * 2),
        ContextLengthError,
        ("limit is 1024",),
    )
    for messages in (5, None, "text", Message("user", "x"), {"role": "user"}):
        yield Case(
            "Engine.session",
            f"messages={messages!r}"[:60],
            lambda place, messages: place.engine.session(messages=messages),
            RequestError,
            ("token ids", type(messages).__name__),
            messages,
        )
    yield Case(
        "Engine.session",
        "text and ids",
        lambda place, _: place.engine.session(system="x", messages=[1]),
        RequestError,
        ("not both",),
    )


# What is left of a session's calls.


def _sessions() -> Iterator[Case]:
    for n in _any((0, -1, 65537, 10**9, True, 2.0, "2", None)):
        yield Case(
            "Session.branches",
            f"{n!r}",
            lambda place, n: place.session.branches(n).__aenter__(),
            InvalidOptionError,
            (f"n={n!r}", "from 1 to 65536"),
            n,
        )
    for name in _any((5, b"x", ["x"], True)):
        says = (f"name={_named(name)}", "must be a string")
        yield Case(
            "Session.fork",
            f"name={name!r}",
            lambda place, name: place.session.fork(name=name),
            InvalidOptionError,
            says,
            name,
        )
        yield Case(
            "Engine.session",
            f"name={name!r}",
            lambda place, name: place.engine.session(name=name),
            InvalidOptionError,
            says,
            name,
        )
        yield Case(
            "Engine.session",
            f"namespace={name!r}",
            lambda place, name: place.engine.session(namespace=name),
            InvalidOptionError,
            (f"namespace={_named(name)}", "must be a string"),
            name,
        )
        yield Case(
            "Engine.generate",
            f"namespace={name!r}",
            lambda place, name: place.engine.generate("x", namespace=name),
            InvalidOptionError,
            (f"namespace={_named(name)}", "must be a string"),
            name,
        )
    for texts in _any((5, None, "text", {"x"}, [], b"x")):
        named = (
            "at least one text" if texts == [] else f"a list of texts, not {type(texts).__name__}"
        )
        yield Case(
            "Session.score",
            f"{texts!r}",
            lambda place, texts: place.session.score(texts),
            RequestError,
            (named,),
            texts,
        )
    for text in _any((5, None, b"x", ["x"])):
        yield Case(
            "Session.score",
            f"['x', {text!r}]",
            lambda place, text: place.session.score(["x", text]),
            RequestError,
            ("texts", type(text).__name__),
            text,
        )
    yield Case(
        "Session.score", "['']", lambda p, _: p.session.score([""]), RequestError, ("no token",)
    )
    yield Case(
        "Session.score",
        "half a surrogate pair",
        lambda place, _: place.session.score([HALF_PAIR]),
        RequestError,
        ("cannot encode",),
    )
    yield Case(
        "Session.score",
        "1,000,000 texts",
        lambda place, _: place.session.score(MANY_TEXTS),
        QueueFullError,
        ("1000000", "max_waiting=64"),
    )
    yield Case(
        "Session.score",
        "5 MB beside short texts",
        lambda place, _: place.session.score(["x"] * 63 + [LONG_TEXT]),
        ContextLengthError,
        ("limit is 1024",),
    )
    yield Case(
        "Session.score",
        "ids without a tokenizer",
        lambda place, _: place.without_text.score(["x"]),
        RequestError,
        ("needs a tokenizer",),
    )
    for other in _any((5, None, "s1")):
        yield Case(
            "Session.adopt",
            f"{other!r}",
            lambda place, other: place.session.adopt(other),
            RequestError,
            ("another session", repr(other)),
            other,
        )
        yield Case(
            "Session.rollback",
            f"{other!r}",
            lambda place, other: place.session.rollback(other),
            RequestError,
            ("a checkpoint", repr(other)),
            other,
        )
    yield from _sessions_in_place()


def _sessions_in_place() -> Iterator[Case]:
    """Arguments that are wrong for where they come from."""
    yield Case(
        "Session.adopt",
        "itself",
        lambda place, _: place.session.adopt(place.session),
        RequestError,
        ("another session of the same engine",),
    )
    yield Case(
        "Session.adopt",
        "another engine's",
        lambda place, _: place.session.adopt(place.without_text),
        RequestError,
        ("of the same engine",),
    )
    yield Case(
        "Session.adopt",
        "another namespace's",
        lambda place, _: place.session.adopt(place.foreign),
        NamespaceError,
        ("another namespace",),
    )
    yield Case(
        "Session.adopt",
        "a closed one",
        lambda place, _: place.session.adopt(place.closed),
        SessionClosedError,
        ("closed",),
    )
    yield Case(
        "Session.rollback",
        "another session's",
        lambda place, _: place.session.rollback(place.foreign.checkpoint()),
        CheckpointError,
        ("belongs to",),
    )
    yield Case(
        "Session.rollback",
        "a closed one",
        _roll_back_to_a_closed_checkpoint,
        CheckpointError,
        ("closed",),
    )
    uses: dict[str, Callable[[Session], object]] = {
        "Session.generate": lambda session: session.generate("x"),
        "Session.add": lambda session: session.add("x"),
        "Session.score": lambda session: session.score(["x"]),
        "Session.fork": lambda session: session.fork(),
        "Session.checkpoint": lambda session: session.checkpoint(),
        "Session.branches": lambda session: session.branches(2).__aenter__(),
        "Session.stream": lambda session: session.stream("x").__aenter__(),
        "Session.__await__": lambda session: session,
    }
    for call, use in uses.items():
        yield Case(
            call,
            "closed",
            lambda p, use: use(p.closed),
            SessionClosedError,
            (" closed",),
            use,
        )


async def _roll_back_to_a_closed_checkpoint(place: Place, _: object) -> None:
    checkpoint = place.session.checkpoint()
    await checkpoint.aclose()
    place.session.rollback(checkpoint)


# Engines.

_CONFIG_INTEGERS: dict[str, tuple[int, int]] = {
    "block_size": (1, 1024),
    "num_blocks": (1, 2**31 - 1),
    "kv_memory_bytes": (1, 2**63 - 1),
    "max_context": (2, 2**31 - 1),
    "max_batch_tokens": (1, 2**24),
    "max_num_seqs": (1, 65536),
    "max_waiting": (1, 2**31 - 1),
    "max_waiting_per_session": (1, 2**31 - 1),
    "seed": (0, 2**64 - 1),
}
_MAY_BE_NONE = {"num_blocks", "kv_memory_bytes", "max_context", "max_batch_tokens"}


def _config_cases() -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    for name, (low, high) in _CONFIG_INTEGERS.items():
        for value in _any((low - 1, high + 1, True, 2.0, "8")):
            yield {name: value}, (f"{name}={value!r}", f"from {low} to {high}")
        if name not in _MAY_BE_NONE:
            yield {name: None}, (f"{name}=None", f"from {low} to {high}")
    for value in _any((-1, NAN, INF, 86401, None, "5")):
        yield {"close_timeout_s": value}, (f"close_timeout_s={value!r}", "from 0 to 86400")
    for name in _any(("prefix_cache", "allow_remote_code", "share_attention", "debug")):
        yield {name: 1}, (f"{name}=1", "True or False")
    for value in _any(("float64", 5, None, ["float32"])):
        yield {"dtype": value}, ("dtype=", "auto, float32, bfloat16, float16")
    for value in _any((5, None)):
        yield {"device": value}, (f"device={value!r}", "a string")
    yield {"weights": "int8"}, ("weights='int8'", "'auto'")
    yield {"num_blocks": 8, "kv_memory_bytes": 8}, ("num_blocks or kv_memory_bytes",)
    yield {"max_batch_tokens": 100}, ("max_batch_tokens=100", "max_num_seqs + 64 = 320")


def _engines() -> Iterator[Case]:
    for index, (options, says) in enumerate(_config_cases()):
        yield Case(
            "EngineConfig",
            _show(options),
            lambda place, options: EngineConfig(**options),
            InvalidOptionError,
            says,
            options,
        )
        if not index % 5:
            yield Case(
                "Engine.from_pretrained",
                _show(options),
                lambda place, options: Engine.from_pretrained(**options),
                InvalidOptionError,
                says,
                options,
            )
    for name in _any(("blocks", "tools", "trust_remote_code")):
        yield Case(
            "EngineConfig",
            f"{name}=1",
            lambda _, options: EngineConfig(**options),
            TypeError,
            (name,),
            {name: 1},
        )
        yield Case(
            "Engine.from_pretrained",
            f"{name}=1",
            lambda _, options: Engine.from_pretrained(**options),
            TypeError,
            (name,),
            {name: 1},
        )
    yield from _engine_arguments()
    for n in _any((0, -1, 257, 10**9, True, 1.0, "2", None)):
        yield Case(
            "Engine.generate",
            f"n={n!r}",
            lambda place, n: place.engine.generate("x", n=n),
            InvalidOptionError,
            (f"n={n!r}", "from 1 to 256"),
            n,
        )
    yield Case(
        "Engine.generate",
        "n rows that do not fit together",
        lambda place, _: place.engine.generate("x", n=40, max_tokens=100),
        OutOfBlocksError,
        ("64 are available", "num_blocks or kv_memory_bytes"),
    )
    for priority in (-(2**31) - 1, 2**31, 1.0, True, "1", None):
        yield Case(
            "Engine.session",
            f"priority={priority!r}",
            lambda place, priority: place.engine.session(priority=priority),
            InvalidOptionError,
            (f"priority={priority!r}", "from -2147483648 to 2147483647"),
            priority,
        )
    yield Case(
        "Engine.session",
        "tools=[]",
        lambda place, options: place.engine.session(**options),
        TypeError,
        ("tools",),
        {"tools": []},
    )
    yield from _engines_in_place()


def _never(config: EngineConfig) -> WitnessRunner:
    raise AssertionError("an engine with a wrong argument is never opened")


def _engine_arguments() -> Iterator[Case]:
    for value in _any((5, None, "SmolLM2")):
        yield Case(
            "Engine",
            f"open_runner={value!r}",
            lambda place, value: Engine(value),
            InvalidOptionError,
            (f"open_runner={value!r}", "called"),
            value,
        )
    for value in _any((5, "SmolLM2", [1])):
        yield Case(
            "Engine",
            f"tokenizer={value!r}",
            lambda place, value: Engine(_never, tokenizer=value),
            InvalidOptionError,
            ("tokenizer=", "no ChatTokenizer"),
            value,
        )
    for value in _any((5, {}, "auto", False)):
        says = ("config=", "no EngineConfig")
        yield Case(
            "Engine",
            f"config={value!r}",
            lambda place, value: Engine(_never, config=value),
            InvalidOptionError,
            says,
            value,
        )
        yield Case(
            "Engine.from_pretrained",
            f"config={value!r}",
            lambda place, value: Engine.from_pretrained("x", config=value),
            InvalidOptionError,
            says,
            value,
        )
    for value in _any((5, b"x", ["x"])):
        yield Case(
            "Engine.from_pretrained",
            f"model={value!r}",
            lambda place, value: Engine.from_pretrained(value),
            InvalidOptionError,
            (f"model={_named(value)}", "path, hub id or loaded model"),
            value,
        )
    yield Case(
        "Engine.from_pretrained",
        "progress=5",
        lambda _, value: Engine.from_pretrained("x", progress=value),
        InvalidOptionError,
        ("progress=5", "called"),
        5,
    )
    for value in _any((5, None, "runner")):
        yield Case(
            "Engine.__aenter__",
            f"open_runner gives {value!r}",
            lambda place, value: Engine(lambda _: value).__aenter__(),
            InvalidOptionError,
            (repr(value), "no Runner"),
            value,
        )


def _engines_in_place() -> Iterator[Case]:
    uses: dict[str, Callable[[Engine], object]] = {
        "Engine.session": lambda engine: engine.session(),
        "Engine.generate": lambda engine: engine.generate("x"),
        "Engine.stats": lambda engine: engine.stats(),
        "Engine.tree": lambda engine: engine.tree(),
        "Engine.info": lambda engine: engine.info,
        "Engine.tokenizer": lambda engine: engine.tokenizer,
    }
    for call, use in uses.items():
        yield Case(
            call,
            "not open",
            lambda place, use: use(Engine(lambda _: WitnessRunner())),
            EngineNotOpenError,
            ("open the engine first",),
            use,
        )
    for call in ("Engine.session", "Engine.generate", "Engine.tree"):
        yield Case(
            call,
            "closed",
            lambda _, use: _use_closed(use),
            EngineClosedError,
            ("closed",),
            uses[call],
        )
    yield Case(
        "Engine.__aenter__",
        "opened again",
        lambda place, _: place.engine.__aenter__(),
        EngineClosedError,
        ("opened once",),
    )


async def _use_closed(use: Callable[[Engine], object]) -> object:
    engine = Engine(lambda _: WitnessRunner(num_blocks=4))
    async with engine:
        pass
    result = use(engine)
    return await result if inspect.isawaitable(result) else result


def _tokenizers() -> Iterator[Case]:
    for ids in _any(([-1], [2**32], ["5"], [1.0], [None], 5)):
        yield Case(
            "ChatTokenizer.decode",
            f"{ids!r}",
            lambda place, ids: _tokenizer(place).decode(ids),
            RequestError,
            ("from 0 to 4294967295",),
            ids,
        )
    for text in _any((5, None, b"x", ["x"])):
        for name in _any(("encode", "encode_markup", "encode_continuation")):
            yield Case(
                f"ChatTokenizer.{name}",
                f"{text!r}",
                lambda place, given: getattr(_tokenizer(place), given[0])(given[1]),
                RequestError,
                ("must be a string", type(text).__name__),
                (name, text),
            )
    yield Case(
        "ChatTokenizer",
        "a reserved template variable",
        lambda place, _: ChatTokenizer(
            _tokenizer(place).backend, chat_template="", template_variables={"messages": []}
        ),
        ChatTemplateError,
        ("reserved", "messages"),
    )


def _tokenizer(place: Place) -> ChatTokenizer:
    tokenizer = place.engine.tokenizer
    assert tokenizer is not None, "the place has a tokenizer"
    return tokenizer


CASES: tuple[Case, ...] = (
    *_options(),
    *_prompts(),
    *_prompts_in_place(),
    *_sessions(),
    *_engines(),
    *_tokenizers(),
)
