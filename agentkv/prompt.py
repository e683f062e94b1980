"""What a caller gives, checked before anything is computed: options, prompts and texts to score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np

from .config import MAX_LOGIT_BIAS, MAX_STOPS, GenerateOptions, SamplingOptions, short
from .errors import ContextLengthError, InvalidOptionError, QueueFullError, RequestError
from .messages import Message
from .text import conversation as text
from .text.conversation import Entry
from .turn import Host, handle_text

__all__ = [
    "Prompt",
    "check_scored",
    "encode_continuations",
    "is_list",
    "parse_options",
    "to_entries",
    "unknown_option",
]

# One call of the tokenizer takes as long as so many characters do.
CALL_CHARS = 100

Prompt = str | Message | Sequence[Message] | Sequence[int]


def parse_options(host: Host, options: GenerateOptions) -> SamplingOptions:
    """Check the options of one call against their ranges and the model's vocabulary.

    Raises:
        TypeError: an option is not known.
        InvalidOptionError: an option is out of range.
    """
    for name in options.keys() - set(SamplingOptions.__struct_fields__):
        raise TypeError(unknown_option(name, SamplingOptions.__struct_fields__))
    given: dict[str, Any] = dict(options)  # Any: as given
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = (stop,)
    for name, form in (
        ("stop", f"a string or a list of at most {MAX_STOPS} strings"),
        ("stop_token_ids", f"a list of at most {MAX_STOPS} token ids"),
    ):
        if name not in given:
            continue
        values: Any = given[name]  # Any: whatever was given
        if not is_list(values) or isinstance(values, str) or len(values) > MAX_STOPS:
            raise InvalidOptionError(f"{name}={short(values)} must be {form}")
        given[name] = tuple(values.tolist() if isinstance(values, np.ndarray) else values)
    bias = given.get("logit_bias")
    if isinstance(bias, Mapping) and len(bias) <= MAX_LOGIT_BIAS:
        # The step thread reads it while the caller may go on changing theirs.
        given["logit_bias"] = dict(bias)
    chosen = SamplingOptions(**given)
    for name, ids in (("stop_token_ids", chosen.stop_token_ids), ("logit_bias", chosen.logit_bias)):
        for token_id in ids:
            if token_id >= host.info.vocab_size:
                raise InvalidOptionError(
                    f"{name} has token id {token_id}; the vocabulary has the ids 0 to "
                    f"{host.info.vocab_size - 1}"
                )
    if chosen.stop and host.tokenizer is None:
        raise InvalidOptionError("stop strings need a tokenizer; use stop_token_ids")
    return chosen.with_defaults(host.info.default_options)


def unknown_option(name: str, known: Sequence[str]) -> str:
    """What to say of an option that there is not, with the one that was meant if it is near."""
    near = get_close_matches(name, known, n=1)
    return f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def to_entries(host: Host, prompt: Prompt | None, *, name: str = "the prompt") -> tuple[Entry, ...]:
    """A prompt as messages and spans of raw ids, checked as far as nothing need be rendered.

    An error calls it `name`.

    Raises:
        RequestError: the prompt is empty, mixes messages and ids, or holds something else.
        ContextLengthError: by its length alone it cannot fit.
    """
    if prompt is None:
        return ()
    if isinstance(prompt, Message):
        return checked_messages(host, (prompt,))
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError(f"{name} is empty")
        return checked_messages(host, (Message("user", prompt),))
    if not is_list(prompt):
        raise RequestError(
            f"{name} is text, messages such as Message('user', text), or token ids, not "
            f"{type(prompt).__name__}"
        )
    if len(prompt) == 0:
        raise RequestError(f"{name} is empty")
    if len(prompt) > host.limit:
        # Each message takes a token at least.
        raise ContextLengthError(len(prompt), host.limit)
    if isinstance(prompt[0], Message):
        if not all(isinstance(message, Message) for message in prompt):
            raise RequestError("a prompt holds messages or token ids, not both")
        return checked_messages(host, tuple(prompt))  # type: ignore[arg-type]  # checked above
    return (text.checked_ids(prompt, vocab_size=host.info.vocab_size, limit=host.limit),)


def checked_messages(host: Host, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, unless one is wrong or together they are too long for the context.

    Raises:
        RequestError: a role is not allowed, or a content is not text.
        ContextLengthError: by their length alone they cannot fit.
    """
    if host.tokenizer is not None:
        texts = (message.content for message in messages if isinstance(message.content, str))
        host.tokenizer.check_length(texts, host.limit)
    text.check_messages(messages)
    return messages


def is_list(prompt: object) -> bool:
    """Whether it has a length and an order; texts that are no `str` are left out."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray, memoryview))


def check_scored(host: Host, texts: Sequence[str]) -> None:
    """Check texts to score as far as they need not be encoded.

    Raises:
        RequestError: there is no text, or something else among them.
        CapacityError: a text does not fit, or there are too many.
    """
    tokenizer, most = host.tokenizer, host.config.max_waiting
    if not isinstance(texts, (list, tuple)):
        raise RequestError(f"score takes a list of texts, not {type(texts).__name__}")
    if not texts:
        raise RequestError("score takes at least one text; the list is empty")
    if len(texts) > most:
        raise QueueFullError(
            f"{len(texts)} texts would wait and max_waiting={most}; score fewer at once, or open "
            "the engine with a larger max_waiting"
        )
    if wrong := [type(text).__name__ for text in texts if not isinstance(text, str)]:
        raise RequestError(f"score takes texts, not {wrong[0]}")
    if tokenizer is None:
        raise RequestError("score needs a tokenizer")
    for one in texts:
        tokenizer.check_length([one], host.limit)


async def encode_continuations(host: Host, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each checked text as a reply would have them; off the loop when that is long.

    Raises:
        RequestError: a text has no tokens.
    """
    assert host.tokenizer is not None, "checked before"
    encode = partial(host.tokenizer.encode_continuations, list(texts))
    encoded = await handle_text(host, encode, sum(map(len, texts)) + CALL_CHARS * len(texts))
    if not all(encoded):
        raise RequestError("a text to score has no tokens")
    return encoded
