"""A request while the step thread works on it: its ids, its block table, its figures."""

from __future__ import annotations

import numpy as np

from ..kv.block_table import BlockTable
from ..messages import Usage
from .batch import TokenArray
from .sequence import Request, TokenIds


class Sequence:
    """Owned by the step thread alone. `table` is None while the sequence waits.

    Its ids are `prompt`, a score's `score_ids` included, and then `request.output_ids`.
    """

    __slots__ = (
        "_block_size",
        "arrival",
        "cached_tokens",
        "has_started",
        "num_input",
        "num_preemptions",
        "prompt",
        "reach",
        "recomputed_tokens",
        "request",
        "score",
        "table",
    )

    def __init__(self, request: Request, arrival: int, block_size: int) -> None:
        self._block_size = block_size
        self.request: Request = request
        self.arrival: int = arrival
        base = request.snapshot.ids.truncate(request.keep).extend(request.new_ids)
        self.num_input: int = len(base)
        self.prompt: TokenIds = base.extend(request.score_ids)
        self.table: BlockTable | None = None
        self.has_started: bool = False
        self.cached_tokens: int = 0
        self.recomputed_tokens: int = 0
        self.num_preemptions: int = 0
        self.score: float = 0.0
        # The KV length once reached: what is computed below it again is recomputed.
        self.reach: int = min(request.snapshot.num_computed, request.keep)

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts what runs first before what runs later."""
        return (-self.request.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        """Ids known so far."""
        return len(self.prompt) + len(self.request.output_ids)

    @property
    def num_computed(self) -> int:
        """KV length, in tokens; 0 while the sequence waits."""
        return 0 if self.table is None else self.table.num_tokens

    @property
    def target(self) -> int:
        """The KV length at which there is something to sample, or nothing left to do."""
        return self.num_tokens - (self.request.kind != "generate")

    @property
    def reuse_limit(self) -> int:
        """How many tokens of KV may be taken over, so that what the request asks for is run."""
        return self.num_input - 1 if self.request.kind == "score" else self.num_tokens - 1

    @property
    def max_length(self) -> int:
        """The largest KV length that the sequence can need."""
        more = self.request.max_new_tokens
        if self.request.kind != "generate" or more is None:
            return self.num_tokens
        return max(self.num_tokens, self.num_input + more - 1)

    def ids(self, start: int, stop: int) -> TokenArray:
        """The ids of positions start..stop-1, int32."""
        known = len(self.prompt)
        if stop <= known:
            return self.prompt.slice(start, stop)
        tail = np.array(self.request.output_ids[max(0, start - known) : stop - known], np.int32)
        if start >= known:
            return tail
        joined: TokenArray = np.concatenate([self.prompt.slice(start, known), tail])
        return joined

    def block_tokens(self, index: int) -> bytes:
        """The ids of block `index`, all known, as the prefix cache compares them."""
        return self.ids(index * self._block_size, (index + 1) * self._block_size).tobytes()

    def usage(self) -> Usage:
        """The figures of the request so far."""
        cached = min(self.cached_tokens, self.num_input)
        return Usage(
            input_tokens=self.num_input,
            output_tokens=len(self.request.output_ids),
            cached_tokens=cached,
            prefill_tokens=self.num_input - cached,
            recomputed_tokens=self.recomputed_tokens,
        )
