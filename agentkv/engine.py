"""The engine: one model and its KV memory inside the user's event loop.

Opens and closes the worker and makes sessions; what a session does is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Unpack
from weakref import finalize

import msgspec

from .config import EngineConfig, GenerateOptions, check_integer, check_string, short
from .errors import (
    EngineClosedError,
    EngineNotOpenError,
    InvalidOptionError,
    RequestError,
)
from .handle import Handle
from .messages import Completion, EngineStats, Message
from .prompt import Prompt, is_list, to_entries, unknown_option
from .session import Session
from .text import conversation as text
from .text.tokenizer import ChatTokenizer
from .tree import draw_tree
from .turn import Host, State, derive_key
from .worker import ModelInfo, Runner, Snapshot, TokenIds, Worker

__all__ = ["Engine"]

Progress = Callable[[str, float], None]


class _Life(Enum):
    NEW = "not open"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class Engine(Handle):
    """One model, its KV memory and its sessions. Open it with `async with`, in asyncio or trio.

    `open_runner` is called off the loop with the configuration and returns a Runner. `tokenizer`
    defaults to the runner's own `tokenizer`, if it has one; without any, prompts are token ids.

    Raises:
        InvalidOptionError: an argument is of the wrong type.
    """

    def __init__(
        self,
        open_runner: Callable[[EngineConfig], Runner],
        *,
        tokenizer: ChatTokenizer | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        if not callable(open_runner):
            raise InvalidOptionError(
                f"open_runner={short(open_runner)} cannot be called; a model is opened with "
                "Engine.from_pretrained"
            )
        if tokenizer is not None and not isinstance(tokenizer, ChatTokenizer):
            raise InvalidOptionError(f"tokenizer={short(tokenizer)} is no ChatTokenizer")
        _check_config(config)
        self._open_runner = open_runner
        self._tokenizer = tokenizer
        self._config = config or EngineConfig()
        self._life = _Life.NEW
        self._worker: Worker | None = None
        self._host: Host | None = None
        self._ordinal = 0

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | Any = None,  # Any: a PreTrainedModel; transformers is imported later
        *,
        tokenizer: Any = None,  # Any: a PreTrainedTokenizerFast or a ChatTokenizer
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,  # Any: fields of EngineConfig, which checks them
    ) -> Engine:
        """An engine on a model directory, a .gguf file, a hub id or a loaded PreTrainedModel.

        None takes what the environment variable AGENTKV_MODEL names, else the installed
        SmolLM2-135M-Instruct package, else that model's hub id. Nothing is read before the engine
        is opened. `overrides` are fields of EngineConfig. `progress` is called on the loading
        thread with what is done and the share that is finished, 0 to 1.

        Raises:
            TypeError: an override is not a field of EngineConfig.
            InvalidOptionError: a setting is out of range.
        """
        _check_config(config)
        known = EngineConfig.__struct_fields__
        for name in overrides.keys() - set(known):
            raise TypeError(unknown_option(name, known))
        settings = msgspec.structs.asdict(config or EngineConfig()) | overrides
        chosen = EngineConfig(**settings)
        is_loaded = hasattr(model, "parameters")
        if not (model is None or isinstance(model, (str, PathLike)) or is_loaded):
            raise InvalidOptionError(f"model={short(model)} is no path, hub id or loaded model")
        if is_loaded and tokenizer is None:
            raise InvalidOptionError("a loaded model needs its tokenizer: tokenizer=...")
        if progress is not None and not callable(progress):
            raise InvalidOptionError(f"progress={short(progress)} cannot be called")

        def open_runner(config: EngineConfig) -> Runner:
            from .model.sources import find_model

            source = model
            if not is_loaded:
                # Before torch is imported, which takes seconds.
                source = find_model(
                    model,
                    allow_remote_code=config.allow_remote_code,
                    progress=partial(progress, "find") if progress else lambda share: None,
                )
            from .model.opening import open_pretrained

            return open_pretrained(source, tokenizer=tokenizer, config=config, progress=progress)

        return cls(open_runner, config=chosen)

    async def __aenter__(self) -> Engine:
        if self._life is not _Life.NEW:
            raise EngineClosedError(f"an engine is opened once, and this one is {self._life.value}")
        self._life = _Life.OPENING
        self._worker = worker = self._make_worker()
        try:
            self._host = host = self._make_host(worker, await worker.open())
            # The host goes with the last handle, and an idle thread of a loop that is gone with it.
            finalize(host, worker.abandon).atexit = False
        except BaseException:
            self._life = _Life.CLOSED
            worker.abandon()
            raise
        self._life = _Life.OPEN
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse new work, end every call with EngineClosedError and free the memory. Idempotent.

        A step in progress is waited for at most `close_timeout_s`.

        Raises:
            WrongLoopError: another event loop runs the engine.
        """
        if self._worker is not None:
            self._worker.check_closing()
        self._life = _Life.CLOSED
        if self._worker is not None:
            await self._worker.close()

    @property
    def info(self) -> ModelInfo:
        """What the engine knows of its model, while open.

        Raises:
            EngineNotOpenError: the engine has not been opened.
        """
        return self._opened().info

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer of the model, while open.

        Raises:
            EngineNotOpenError: the engine has not been opened.
        """
        return self._opened().tokenizer

    def session(
        self,
        *,
        system: str | Sequence[int] | None = None,
        messages: Sequence[Message] | Sequence[int] = (),
        name: str | None = None,
        namespace: str | None = None,
        priority: int = 0,
    ) -> Session:
        """A new conversation. Computes nothing: the first call does, or `await session`.

        `system` is the system prompt, `messages` what has been said so far. Given as token ids,
        either makes a session without a chat template. KV is shared with every session of the same
        `namespace` that starts with the same tokens. A higher `priority` is served first.

        Raises:
            EngineNotOpenError: the engine has not been opened.
            RequestError: the messages are wrong.
            ContextLengthError: by their length alone they cannot fit.
        """
        host = self._opened()
        host.worker.check()
        check_integer("priority", priority, -(2**31), 2**31 - 1, optional=False)
        check_string("name", name)
        check_string("namespace", namespace)
        conversation = _start(host, system, messages)
        self._ordinal += 1
        key = derive_key(self._config.seed, "root", self._ordinal)
        state = State(conversation, Snapshot(TokenIds.EMPTY, namespace), key)
        return Session(host, state, parent=None, name=name, priority=priority)

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        system: str | None = None,
        namespace: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """A single reply without a session of its own; `n` replies share the prompt's KV.

        `system` and `namespace` are those of `session`. With `n` above 1, `Completion.samples` has
        them all; without `prefix_cache` each computes the prompt for itself. Raises as
        `Session.generate` does.
        """
        check_integer("n", n, 1, self._opened().config.max_num_seqs, optional=False)
        async with self.session(system=system, namespace=namespace) as session:
            return await session._generate(prompt, n, timeout, options)

    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        self._opened()
        assert self._worker is not None
        return self._worker.stats

    async def tree(self) -> str:
        """A picture of the open sessions: who was forked from whom, shared and own blocks."""
        host = self._opened()
        return await draw_tree(host)

    def __repr__(self) -> str:
        name = "" if self._host is None else f" {self._host.info.name}"
        return f"<Engine{name}, {self._life.value}>"

    def _make_worker(self) -> Worker:
        return Worker(self._open_runner, self._config)

    def _make_host(self, worker: Worker, runner: Runner) -> Host:
        tokenizer = self._tokenizer or getattr(runner, "tokenizer", None)
        info = runner.info
        return Host(worker, tokenizer, info, self._config, info.capacity(self._config.max_context))

    def _opened(self) -> Host:
        if self._life is _Life.CLOSED and self._host is None:
            raise EngineClosedError("the engine has been closed")
        if self._host is None:
            raise EngineNotOpenError("open the engine first: `async with engine:`")
        return self._host


def _check_config(config: EngineConfig | None) -> None:
    if config is not None and not isinstance(config, EngineConfig):
        raise InvalidOptionError(f"config={short(config)} is no EngineConfig")


def _start(
    host: Host, system: str | Sequence[int] | None, messages: Sequence[Message] | Sequence[int]
) -> text.Conversation:
    opening = list(to_entries(host, system, name="the system prompt"))
    if isinstance(system, str):
        opening = [Message("system", system)]
    if isinstance(messages, (str, Message)) or messages is None:
        kind = type(messages).__name__
        raise RequestError(f"messages is a list of messages or of token ids, not {kind}")
    if not (is_list(messages) and len(messages) == 0):
        opening += to_entries(host, messages)
    ids = [entry for entry in opening if not isinstance(entry, Message)]
    if ids and len(ids) < len(opening):
        raise RequestError("a session opens with messages or with token ids, not both")
    conversation = (
        text.start_from_ids([token for span in ids for token in span])
        if ids
        else text.start([entry for entry in opening if isinstance(entry, Message)])
    )
    text.check_size(host.tokenizer, conversation, host.limit)
    return conversation
