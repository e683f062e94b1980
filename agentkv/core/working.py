"""A request while the step thread works on it: its ids, its block table, its figures."""

from __future__ import annotations

import numpy as np

from ..kv.block_table import BlockTable
from ..kv.prefix_cache import Entry
from ..messages import Usage
from .batch import TokenArray
from .sequence import Request, TokenIds


class Sequence:
    """Owned by the step thread alone. `table` is None while the sequence waits.

    Its ids are `prompt`, a score's `score_ids` included, and then `request.output_ids`. `limit` is
    the most ids it can ever have. The scheduler owns `rank`, by which sequences are served, and
    `is_protected`, which keeps it from being preempted once more.
    """

    __slots__ = (
        "_block_size",
        "cached_tokens",
        "has_started",
        "hint",
        "is_protected",
        "limit",
        "num_input",
        "num_overtaken",
        "num_owed",
        "num_preemptions",
        "prompt",
        "rank",
        "reach",
        "recomputed_tokens",
        "request",
        "score",
        "seen",
        "seq_id",
        "table",
    )

    def __init__(self, request: Request, seq_id: int, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self.request: Request = request
        self.seq_id: int = seq_id
        base = request.snapshot.ids.truncate(request.keep).extend(request.new_ids)
        self.num_input: int = len(base)
        self.prompt: TokenIds = base.extend(request.score_ids)
        more = 0
        if request.kind == "generate":
            most = request.max_new_tokens
            more = capacity - len(self.prompt) if most is None else most
        self.limit: int = len(self.prompt) + more
        self.table: BlockTable | None = None
        self.rank: tuple[bool, int, int] = (True, -request.priority, seq_id)
        self.is_protected: bool = False
        self.num_preemptions: int = 0
        self.num_overtaken: int = 0
        self.num_owed: int = 0
        # The deepest cached block found last for these ids; it may have been evicted since.
        self.hint: Entry | None = None
        self.has_started: bool = False
        self.cached_tokens: int = 0
        self.recomputed_tokens: int = 0
        self.score: float = 0.0
        # Positions below `seen` were reused or computed by this request, those below `reach` were
        # computed before, be it by an earlier turn: to compute them again is recomputing.
        self.seen: int = 0
        self.reach: int = min(request.snapshot.num_computed, request.keep)

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
    def is_decoding(self) -> bool:
        """Whether a single id stands between the sequence, which runs, and its next one."""
        table = self.table
        return (
            table is not None
            and self.request.kind == "generate"
            and len(self.prompt) + len(self.request.output_ids) - table.num_tokens == 1
        )

    @property
    def reuse_limit(self) -> int:
        """How many tokens of KV may be taken over, so that what the request asks for is run."""
        known = self.num_input if self.request.kind == "score" else self.num_tokens
        return max(0, known - 1)

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

    def note_reused(self, length: int) -> int:
        """KV of the first `length` tokens is there; how many input tokens that spares."""
        spared = max(0, min(length, self.num_input) - self.seen)
        self.cached_tokens += spared
        self.seen = max(self.seen, length)
        return spared

    def note_computed(self, start: int, end: int) -> int:
        """Positions start..end-1 were computed; how many of them not for the first time."""
        again = max(0, min(end, self.reach) - start)
        self.recomputed_tokens += again
        self.seen = max(self.seen, end)
        self.reach = max(self.reach, end)
        return again

    def usage(self) -> Usage:
        """The figures of the request so far."""
        return Usage(
            input_tokens=self.num_input,
            output_tokens=len(self.request.output_ids),
            cached_tokens=self.cached_tokens,
            prefill_tokens=self.num_input - self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
        )
