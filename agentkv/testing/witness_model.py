"""What the witness says: a digest of every token, position and history that it reads.

Pure functions of what was read, shared by the runner, which reads through block tables, and by the
oracle, which has the plain list of ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ..config import SamplingOptions
from ..core.batch import SampleSpec, TokenArray
from ..core.randomness import uniform

__all__ = [
    "chains",
    "choose",
    "digests",
    "logprob",
    "top_logprobs",
    "witness_reply",
    "witness_score",
]

Digests = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

_STRIDE = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def chains(tokens: Integers, positions: Integers) -> Digests:
    """What each slot remembers of all slots before it and itself: uint64 [len]."""
    mixed = _mix(tokens.astype(np.uint64) * np.uint64(_STRIDE) + _mix(positions.astype(np.uint64)))
    return np.cumsum(mixed, dtype=np.uint64)


def digests(tokens: Integers, positions: Integers, written: Digests) -> Digests:
    """Of each prefix, its tokens and positions and what was remembered: uint64 [len]."""
    mixed = tokens.astype(np.uint64) * np.uint64(_STRIDE) + _mix(positions.astype(np.uint64))
    return np.cumsum(_mix(mixed ^ _mix(written)), dtype=np.uint64)


def choose(digest: int, spec: SampleSpec, vocab_size: int) -> int:
    """The token drawn after a prefix: the first one allowed from where the digest points."""
    for counted in (spec.prompt_ids, spec.output_ids):
        if len(counted):
            digest ^= int(chains(counted.astype(np.int64), np.arange(len(counted)))[-1])
    if spec.options.temperature != 0:
        digest ^= int(spec.uniform * 2**24)
    start = _mix_one(digest) % vocab_size
    bias = spec.options.logit_bias
    forced = {token_id for token_id, value in bias.items() if value >= 100}
    for offset in range(vocab_size):
        token_id = (start + offset) % vocab_size
        is_masked = spec.mask is not None and not spec.mask[token_id]
        is_banned = is_masked or token_id in spec.banned_ids or bias.get(token_id, 0.0) <= -100
        if not is_banned and (not forced or token_id in forced):
            return token_id
    raise AssertionError("every token is banned")


def logprob(digest: int, token_id: int) -> float:
    """The log-probability of a token after a prefix, from -10 to 0; not normalised."""
    return -0.001 * (1 + _mix_one(digest ^ (token_id << 17)) % 9999)


def top_logprobs(digest: int, count: int, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The `count` tokens with the highest log-probabilities, best first."""
    pairs = [(token_id, logprob(digest, token_id)) for token_id in range(vocab_size)]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:count])


def witness_reply(
    ids: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int = 260,
    stop_token_ids: Sequence[int] = (),
    key: tuple[int, int] | None = None,
    options: SamplingOptions | None = None,
) -> list[int]:
    """What the witness says after `ids`, computed without any engine.

    `key` is that of the random numbers, None for a greedy reply. Of `options`, its min_tokens,
    logit_bias and penalties count.
    """
    chosen = SamplingOptions() if options is None else options
    chosen = msgspec.structs.replace(chosen, temperature=0.0 if key is None else 1.0)
    known, first = [int(token_id) for token_id in ids], len(ids)
    chain, digest = _last_of(known)
    while len(known) < first + max_tokens:
        spec = _spec(known, first, chosen, tuple(stop_token_ids), key)
        token_id = choose(digest, spec, vocab_size)
        mixed = (token_id * _STRIDE + _mix_one(len(known))) & _MASK
        chain = (chain + _mix_one(mixed)) & _MASK
        digest = (digest + _mix_one(mixed ^ _mix_one(chain))) & _MASK
        known.append(token_id)
        if token_id in stop_token_ids:
            break
    return known[first:]


def witness_score(ids: Sequence[int], continuation: Sequence[int]) -> float:
    """The log-probability that the witness gives to `continuation` after `ids`."""
    known = _digests_of([*ids, *continuation])
    pairs = enumerate(continuation, start=len(ids))
    return sum(logprob(int(known[position - 1]), token_id) for position, token_id in pairs)


def _digests_of(ids: Sequence[int]) -> Digests:
    tokens, positions = np.array(ids, dtype=np.int64), np.arange(len(ids))
    return digests(tokens, positions, chains(tokens, positions))


def _last_of(ids: list[int]) -> tuple[int, int]:
    tokens, positions = np.array(ids, dtype=np.int64), np.arange(len(ids))
    known = chains(tokens, positions)
    return int(known[-1]), int(digests(tokens, positions, known)[-1])


def _spec(
    known: list[int],
    first: int,
    options: SamplingOptions,
    stop_token_ids: tuple[int, ...],
    key: tuple[int, int] | None,
) -> SampleSpec:
    repeats = options.repetition_penalty not in (None, 1.0)
    counts = repeats or bool(options.presence_penalty or options.frequency_penalty)
    is_early = len(known) - first < options.min_tokens
    return SampleSpec(
        options=options,
        uniform=0.0 if key is None else uniform(key, len(known)),
        prompt_ids=_array(known[:first] if repeats else []),
        output_ids=_array(known[first:] if counts else []),
        banned_ids=stop_token_ids if is_early else (),
    )


def _array(ids: list[int]) -> TokenArray:
    return np.array(ids, dtype=np.int32)


def _mix(values: Digests) -> Digests:
    """SplitMix64's finalizer (G. Steele et al., OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_one(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
