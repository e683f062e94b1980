"""Plain settings of an engine and of one call, checked before anything is allocated."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

import msgspec

from .errors import InvalidOptionError

__all__ = ["DType", "EngineConfig", "GenerateOptions", "SamplingOptions"]

DType = Literal["auto", "float32", "bfloat16", "float16"]

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 4096


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine.

    `device` is "auto", "cpu", "cuda" or another of torch's; `dtype` "auto" is bfloat16 where the
    device computes in it, else float32. `max_context` shortens the model's context, in tokens;
    `max_num_seqs` bounds the sequences of one step. `seed` decides the random numbers of sessions
    whose calls have none. `prefix_cache` shares KV among all that begin alike, and keeps that of
    ended conversations for others; without it only forks share. `share_attention` reads KV that
    sessions share once for all of them. `close_timeout_s` is how long closing waits for a step in
    progress. `allow_remote_code` lets a model folder run code of its own.

    `num_blocks` or `kv_memory_bytes` sizes the KV memory, in blocks of `block_size` tokens (None:
    as much as is sensible on the device). `max_batch_tokens` is the token budget of one step (None:
    512 on a CPU, else 8192); `max_waiting` bounds the calls that wait to be admitted,
    `max_waiting_per_session` those behind one session's lock. `debug` verifies the block pool
    whenever the engine goes idle.

    Raises:
        InvalidOptionError: a value is outside its range, or two contradict each other.
    """

    device: str = "auto"
    dtype: DType = "auto"
    weights: Literal["auto"] = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_context: int | None = None
    max_batch_tokens: int | None = None
    max_num_seqs: int = 256
    prefix_cache: bool = True
    max_waiting: int = 1024
    max_waiting_per_session: int = 16
    close_timeout_s: float = 5.0
    seed: int = 0
    allow_remote_code: bool = False
    share_attention: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in get_args(DType):
            raise InvalidOptionError(
                f"dtype={short(self.dtype)} is not one of {', '.join(get_args(DType))}"
            )
        if not isinstance(self.weights, str) or self.weights != "auto":
            raise InvalidOptionError(f"weights={short(self.weights)} is not 'auto'")
        check_string("device", self.device, optional=False)
        check_integer("block_size", self.block_size, 1, 1024, optional=False)
        check_integer("num_blocks", self.num_blocks, 1, 2**31 - 1)
        check_integer("kv_memory_bytes", self.kv_memory_bytes, 1, 2**63 - 1)
        check_integer("max_context", self.max_context, 2, 2**31 - 1)
        check_integer("max_num_seqs", self.max_num_seqs, 1, 65536, optional=False)
        check_integer("max_batch_tokens", self.max_batch_tokens, 1, 2**24)
        check_integer("max_waiting", self.max_waiting, 1, 2**31 - 1, optional=False)
        check_integer(
            "max_waiting_per_session", self.max_waiting_per_session, 1, 2**31 - 1, optional=False
        )
        check_integer("seed", self.seed, 0, MAX_SEED, optional=False)
        check_number("close_timeout_s", self.close_timeout_s, 0.0, 86400.0, optional=False)
        for name in ("prefix_cache", "allow_remote_code", "share_attention", "debug"):
            check_flag(name, getattr(self, name))
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise InvalidOptionError("give num_blocks or kv_memory_bytes, not both")
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_num_seqs + 64:
            raise InvalidOptionError(
                f"max_batch_tokens={self.max_batch_tokens} must be at least max_num_seqs + 64 = "
                f"{self.max_num_seqs + 64}, for all running replies and some prefill"
            )

    def batch_tokens(self, *, on_cpu: bool) -> int:
        """Token budget of one step on the device that was chosen."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return max(512 if on_cpu else 8192, self.max_num_seqs + 64)


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one call; None takes the generation config's value, else the neutral one.

    `max_tokens` None is all that the context and the KV memory leave room for. Before `min_tokens`
    no stop counts, and `ignore_eos` lets the model's own end-of-sequence tokens pass. `min_p` drops
    tokens less likely than that share of the likeliest. `presence_penalty` and `frequency_penalty`
    lower the logits of tokens already sampled, once or per occurrence; `repetition_penalty` divides
    those of all tokens so far.
    `temperature` 0 is greedy. `seed` alone decides the random numbers of the call when it is given.
    `top_logprobs` asks for that many alternatives with each token's log-probability. `logit_bias`
    maps token ids to values added to their logits. `stop` strings end a reply and are cut from its
    text; `stop_token_ids` end it too.

    Raises:
        InvalidOptionError: a value is outside its range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1, optional=False)
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, 0, 2**31 - 1)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("seed", self.seed, 0, MAX_SEED)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, optional=False)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, optional=False)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        check_integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, optional=False)
        check_flag("logprobs", self.logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidOptionError(
                f"top_logprobs={self.top_logprobs} needs logprobs=True; it is False"
            )
        check_flag("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidOptionError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}"
            )
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        for name, values, kind in (
            ("stop", self.stop, "strings"),
            ("stop_token_ids", self.stop_token_ids, "token ids"),
        ):
            if not isinstance(values, tuple) or len(values) > MAX_STOPS:
                raise InvalidOptionError(
                    f"{name}={short(values)} must be a tuple of at most {MAX_STOPS} {kind}"
                )
        for at, text in enumerate(self.stop):
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                given = len(text) if isinstance(text, str) else type(text).__name__
                raise InvalidOptionError(
                    f"stop[{at}] must be a string of 1 to {MAX_STOP_CHARS} characters, not {given}"
                )
        for token_id in self.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0, 2**31 - 1, optional=False)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidOptionError(
                f"logit_bias={short(self.logit_bias)} must map at most {MAX_LOGIT_BIAS} token ids "
                "to numbers"
            )
        for token_id, bias in self.logit_bias.items():
            check_integer("logit_bias token id", token_id, 0, 2**31 - 1, optional=False)
            check_number("logit_bias value", bias, -100.0, 100.0, optional=False)

    def with_defaults(self, defaults: SamplingOptions) -> SamplingOptions:
        """These options with what is None taken from `defaults`."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        missing = {name: getattr(defaults, name) for name in names if getattr(self, name) is None}
        return msgspec.structs.replace(self, **missing) if missing else self


class GenerateOptions(TypedDict, total=False):
    """The keyword options of `generate` and `stream`, with the meanings of SamplingOptions.

    `stop` may also be one string, and `stop_token_ids` any sequence of ids.
    """

    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    logprobs: bool
    top_logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


def check_integer(
    name: str, value: Any, low: int, high: int, *, optional: bool = True
) -> None:  # Any: user input
    """Raise InvalidOptionError unless `value` is an int in low..high, or None when optional."""
    if value is None and optional:
        return
    if type(value) is not int or not low <= value <= high:
        raise InvalidOptionError(f"{name}={short(value)} must be an integer from {low} to {high}")


def check_number(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, optional: bool = True
) -> None:  # Any: user input
    """Raise InvalidOptionError unless `value` is finite and in low..high, or None when optional."""
    if value is None and optional:
        return
    # NaN fails both comparisons, infinity and integers beyond all floats fail the second.
    valid = type(value) in (int, float) and low <= value <= min(high, sys.float_info.max)
    if not valid or (open_low and value == low):
        bound = "above" if open_low else "from"
        raise InvalidOptionError(
            f"{name}={short(value)} must be a finite number {bound} {low:g} to {high:g}"
        )


def check_flag(name: str, value: Any) -> None:  # Any: user input
    """Raise InvalidOptionError unless `value` is True or False."""
    if type(value) is not bool:
        raise InvalidOptionError(f"{name}={short(value)} must be True or False")


def check_string(name: str, value: Any, *, optional: bool = True) -> None:  # Any: user input
    """Raise InvalidOptionError unless `value` is a string, or None when optional."""
    if not isinstance(value, str) and not (value is None and optional):
        raise InvalidOptionError(f"{name}={short(value)} must be a string")


def short(value: object) -> str:
    """A value for an error message, cut so that a huge one can neither flood nor delay it."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, bytes)) and len(value) <= 40:
        return repr(value)
    kind = type(value).__name__
    if isinstance(value, (str, bytes, list, tuple, dict, set)):
        return f"<{kind} of length {len(value)}>"
    return f"<{kind}>"
