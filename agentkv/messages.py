"""Plain data that users hold: messages in, completions and figures out."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "Completion",
    "Delta",
    "EngineStats",
    "FinishReason",
    "Message",
    "TokenLogprob",
    "Usage",
]

FinishReason = Literal["stop", "length", "stopped"]


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one call, or of a session's calls together.

    `input_tokens` counts every id before the first sampled one, history included; `cached_tokens`
    those whose KV was reused, `prefill_tokens` the rest; `recomputed_tokens` those computed once
    more after preemption or eviction.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            recomputed_tokens=self.recomputed_tokens + other.recomputed_tokens,
        )


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token's natural-log probability at temperature 1, and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """What a stream has new: text that is final, and the ids sampled since the last delta."""

    text: str
    token_ids: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished reply.

    `text` is cut before a stop string; `token_ids` keeps every sampled id, those that completed the
    stop included. `stop_reason` is the stop string or the stop token's id where one ended the
    reply. `logprobs` has one entry a sampled token when asked for. `samples` holds all replies of a
    call with `n`, this one first, each with the usage of its own.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    usage: Usage = Usage()
    logprobs: tuple[TokenLogprob, ...] | None = None
    samples: tuple[Completion, ...] = ()

    def __str__(self) -> str:
        return self.text


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine after its last step.

    Blocks: `num_blocks` = free + cached (kept for reuse, held by nobody) + in use + quarantined.
    `logical_tokens` sums the KV lengths of all snapshots and sequences, `physical_tokens` counts
    shared ones once. `utilisation` is physical tokens / (blocks in use x block_size). The rest
    counts since the engine opened: of the tokens computed, `prefill_tokens` are those of inputs,
    `decode_tokens` those behind them, and `recomputed_tokens` those computed before.
    """

    num_blocks: int = 0
    block_size: int = 0
    bytes_per_block: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    quarantined_blocks: int = 0
    logical_tokens: int = 0
    physical_tokens: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    snapshot_reclaims: int = 0
    block_copies: int = 0

    @property
    def utilisation(self) -> float:
        """Share of the slots in use that hold a token, 0 when no block is in use."""
        slots = self.used_blocks * self.block_size
        return self.physical_tokens / slots if slots else 0.0

    @property
    def sharing(self) -> float:
        """Logical tokens per physical token, 1 when nothing is shared or held."""
        return self.logical_tokens / self.physical_tokens if self.physical_tokens else 1.0
