"""The scripted model: it says what it is told, so that agents can be tested without weights.

Owns the script and which turn says what. Everything else is the real engine on the witness's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..config import EngineConfig
from ..core.batch import Row, RowResult
from ..engine import Engine
from ..text.tokenizer import ChatTokenizer
from .byte_tokenizer import byte_tokenizer
from .witness import Reading, WitnessRunner

__all__ = ["Heard", "Reply", "Script", "ScriptedRunner", "scripted_engine"]

START, END = "<|im_start|>", "<|im_end|>"

Reply = str | Sequence[int] | Exception


class Heard(NamedTuple):
    """What a turn answers: all ids, their text with its markers, and the last message alone."""

    ids: tuple[int, ...]
    text: str
    message: str


Script = Iterable[Reply] | Callable[[Heard], Reply]


NUM_BLOCKS = 2048


class ScriptedRunner(WitnessRunner):
    """A Runner that gives each turn the next reply of a list, or the one that a function chooses.

    A reply is text, token ids, or an exception, which fails that turn alone with a StepError. The
    end-of-turn token is said after it. Turns take replies in the order in which they begin to
    answer, samples of one call one by one; a turn without a reply left fails. A function is called
    on the step thread, once a turn.

    `heard` has what every turn started from, in the same order. `logprob(ids, token_id)` is the
    log-probability of an id after others, for `score` and `logprobs`.
    """

    def __init__(
        self,
        script: Script,
        *,
        logprob: Callable[[Sequence[int], int], float] | None = None,
        num_blocks: int = NUM_BLOCKS,
        block_size: int = 16,
        max_context: int = 32768,
    ) -> None:
        if isinstance(script, (str, Exception)):
            raise TypeError("a script is a list of replies, or a function that chooses one")
        words = byte_tokenizer()
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=words.vocab_size,
            max_context=max_context,
            eos_token_ids=words.eos_token_ids,
            tokenizer=words,
            keep_batches=False,
        )
        self.heard: list[Heard] = []
        self._words: ChatTokenizer = words
        self._choose = script if callable(script) else _in_order(iter(script))
        self._logprob = logprob or _likely
        # For each turn that is being answered: the length of what it heard, and all it will say.
        self._said: dict[int, tuple[int, list[int]]] = {}

    def _draw(self, row: Row, reading: Reading) -> RowResult:
        ids = reading.tokens.tolist()
        targets = tuple(
            self._logprob(ids[: row.start + offset + 1], token_id)
            for offset, token_id in row.targets
        )
        if row.sample is None:
            return RowResult(target_logprobs=targets)
        try:
            token_id = self._next(row.seq_id, ids)
        except Exception as error:
            return RowResult(error=f"the script failed this turn: {error!r}")
        if row.sample.mask is not None and not row.sample.mask[token_id]:
            return RowResult(error=f"the script says token {token_id}, which is not allowed here")
        likelihood = self._logprob(ids, token_id)
        top = ((token_id, likelihood),) if row.sample.options.top_logprobs else ()
        return RowResult(token_id, likelihood, top, targets)

    def _next(self, seq_id: int, ids: list[int]) -> int:
        if seq_id not in self._said:
            heard = self._listen(ids)
            self.heard.append(heard)
            self._said[seq_id] = (len(ids), self._encode(self._choose(heard)))
        start, reply = self._said[seq_id]
        at = len(ids) - start
        if at < len(reply):
            return reply[at]
        return self.info.eos_token_ids[0]

    def _encode(self, reply: Reply) -> list[int]:
        if isinstance(reply, Exception):
            raise reply
        return self._words.encode_continuation(reply) if isinstance(reply, str) else list(reply)

    def _listen(self, ids: list[int]) -> Heard:
        text = self._words.decode(ids, skip_special=False)
        # Ids, not the text, tell a marker from a user's text that looks like one.
        opened, closed = map(self._words.control_id, (START, END))
        end = max((at for at, token_id in enumerate(ids) if token_id == closed), default=len(ids))
        begin = max((at for at in range(end) if ids[at] == opened), default=None)
        message = self._words.decode(ids if begin is None else ids[begin + 1 : end])
        if begin is not None:
            # A message's first line is its role.
            message = message.partition("\n")[2]
        return Heard(tuple(ids), text, message)


def scripted_engine(script: Script, **settings: Any) -> Engine:  # Any: fields of EngineConfig
    """An engine on a scripted model, to be opened with `async with`.

    `settings` are fields of EngineConfig; `num_blocks`, `block_size` and `max_context` size the
    model's memory. For what the model heard, make a ScriptedRunner first.
    """
    config = EngineConfig(**settings)
    num_blocks = NUM_BLOCKS if config.num_blocks is None else config.num_blocks
    runner = ScriptedRunner(script, num_blocks=num_blocks, block_size=config.block_size)
    return Engine(lambda config: runner, config=config)


def _in_order(replies: Iterator[Reply]) -> Callable[[Heard], Reply]:
    num_given = 0

    def choose(heard: Heard) -> Reply:
        nonlocal num_given
        for reply in replies:
            num_given += 1
            return reply
        raise LookupError(f"the script has no reply left after {num_given}")

    return choose


def _likely(ids: Sequence[int], token_id: int) -> float:
    return -1.0
