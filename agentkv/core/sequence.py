"""What the loop and the step thread hand each other: token ids, snapshots, requests, outcomes.

Plain data. The loop builds a Request, the step thread fills it in and ends it with one outcome.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..config import SamplingOptions
from ..kv.block_table import BlockTable
from ..messages import FinishReason, TokenLogprob, Usage
from .batch import TokenArray
from .protocols import StopRule, TokenConstraint

RequestKind = Literal["generate", "warm", "score"]


class TokenIds:
    """An immutable list of token ids in shared int32 segments.

    `extend` and `truncate` share storage with the original. A segment is at least twice as long as
    the next one, so n ids are in O(log n) segments and extending copies an id O(log n) times.
    """

    __slots__ = ("_ends", "_segments")

    EMPTY: TokenIds

    def __init__(self, ids: Iterable[int] | TokenArray = ()) -> None:
        array = np.array(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int32)
        self._set([array] if len(array) else [])

    def _set(self, segments: list[TokenArray]) -> None:
        ends: list[int] = []
        for segment in segments:
            segment.flags.writeable = False
            ends.append((ends[-1] if ends else 0) + len(segment))
        self._segments = tuple(segments)
        self._ends = tuple(ends)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> int:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} of {len(self)} token ids")
        at = bisect_right(self._ends, position)
        return int(self._segments[at][position - self._begin(at)])

    def __iter__(self) -> Iterator[int]:
        for segment in self._segments:
            yield from segment.tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenIds):
            return NotImplemented
        if self is other:
            return True
        return len(self) == len(other) and bool(np.array_equal(self.to_array(), other.to_array()))

    def __hash__(self) -> int:
        return hash(self.to_array().tobytes())

    def __repr__(self) -> str:
        return f"TokenIds(<{len(self)} ids>)"

    def slice(self, start: int, stop: int) -> TokenArray:
        """Ids of positions start..stop-1, 0 <= start <= stop <= len; read-only."""
        assert 0 <= start <= stop <= len(self), f"slice {start}:{stop} of {len(self)} ids"
        parts: list[TokenArray] = []
        at = bisect_right(self._ends, start)
        while start < stop:
            begin, end = self._begin(at), min(self._ends[at], stop)
            parts.append(self._segments[at][start - begin : end - begin])
            start, at = end, at + 1
        if len(parts) == 1:
            return parts[0]
        joined = np.concatenate(parts) if parts else np.empty(0, np.int32)
        joined.flags.writeable = False
        return joined

    def extend(self, ids: Iterable[int] | TokenArray) -> TokenIds:
        """These ids followed by `ids`."""
        tail = np.array(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int32)
        if not len(tail):
            return self
        kept = list(self._segments)
        merged = [tail]
        size = len(tail)
        while kept and len(kept[-1]) < 2 * size:
            merged.append(kept.pop())
            size += len(merged[-1])
        kept.append(np.concatenate(merged[::-1]) if len(merged) > 1 else tail)
        return _from_segments(kept)

    def truncate(self, length: int) -> TokenIds:
        """The first `length` ids, 0 <= length <= len."""
        assert 0 <= length <= len(self), f"truncate {len(self)} ids to {length}"
        if length == len(self):
            return self
        at = bisect_right(self._ends, length)
        kept = list(self._segments[:at])
        rest = length - self._begin(at)
        if rest:
            kept.append(self._segments[at][:rest])
        return _from_segments(kept)

    def to_array(self) -> TokenArray:
        """All ids, int32 [len], read-only."""
        return self.slice(0, len(self))

    def _begin(self, at: int) -> int:
        return self._ends[at - 1] if at else 0


def _from_segments(segments: list[TokenArray]) -> TokenIds:
    ids = TokenIds.__new__(TokenIds)
    ids._set(segments)
    return ids


TokenIds.EMPTY = TokenIds()


class Snapshot:
    """A committed conversation: its ids, and while memory allows the KV of all but the last.

    Immutable to everybody but the step thread, which alone reads and writes `table` (None: not
    computed, or reclaimed) and `num_computed` (the KV length that was once computed).
    Compared and hashed by identity.
    """

    __slots__ = ("__weakref__", "ids", "namespace", "num_computed", "table")

    def __init__(self, ids: TokenIds, namespace: str | None = None) -> None:
        self.ids: TokenIds = ids
        self.namespace: str | None = namespace
        self.table: BlockTable | None = None
        self.num_computed: int = 0

    def __repr__(self) -> str:
        return f"Snapshot(<{len(self.ids)} ids>)"


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request that ended well.

    `snapshot` is the conversation with the reply, owned by the loop until it is released; None for
    a score. `finish_reason` is None for a request that generates nothing. `stop_token` is the
    sampled stop token, None when a StopRule or the length ended the reply. `score` is the sum of
    the natural-log probabilities of `Request.score_ids`.
    """

    snapshot: Snapshot | None
    finish_reason: FinishReason | None
    stop_token: int | None
    usage: Usage
    score: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """A request that ended badly; the snapshot it started from is unchanged."""

    error: BaseException


class Request:
    """One turn for the step thread: `snapshot.ids[:keep] + new_ids`, then what `kind` asks for.

    "generate" samples up to `max_new_tokens` ids (None: as many as fit), "warm" computes the KV of
    all ids but the last, "score" sums the log-probabilities of `score_ids` as the continuation.
    Token at absolute position i is drawn with the random number (key, i). `stop_token_ids` end the
    reply. A higher `priority` runs first.

    The step thread appends to `logprobs` (when asked for) and then to `output_ids`, and last of all
    sets `outcome`, once; the loop only reads them, and takes a failure out.
    Compared and hashed by identity.
    """

    __slots__ = (
        "__weakref__",
        "constraint",
        "keep",
        "key",
        "kind",
        "logprobs",
        "max_new_tokens",
        "namespace",
        "new_ids",
        "options",
        "outcome",
        "output_ids",
        "priority",
        "score_ids",
        "snapshot",
        "stop",
        "stop_token_ids",
    )

    def __init__(
        self,
        snapshot: Snapshot,
        new_ids: Iterable[int] | TokenArray,
        *,
        keep: int | None = None,
        kind: RequestKind = "generate",
        options: SamplingOptions | None = None,
        key: tuple[int, int] = (0, 0),
        max_new_tokens: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        stop: StopRule | None = None,
        constraint: TokenConstraint | None = None,
        priority: int = 0,
        score_ids: Iterable[int] | TokenArray = (),
        namespace: str | None = None,
    ) -> None:
        self.snapshot: Snapshot = snapshot
        self.keep: int = len(snapshot.ids) if keep is None else keep
        self.new_ids: TokenArray = _as_array(new_ids)
        self.namespace: str | None = snapshot.namespace if namespace is None else namespace
        self.kind: RequestKind = kind
        self.options: SamplingOptions = SamplingOptions() if options is None else options
        self.key: tuple[int, int] = key
        self.max_new_tokens: int | None = max_new_tokens
        self.stop_token_ids: frozenset[int] = stop_token_ids
        self.stop: StopRule | None = stop
        self.constraint: TokenConstraint | None = constraint
        self.priority: int = priority
        self.score_ids: TokenArray = _as_array(score_ids)
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.outcome: Finished | Failed | None = None

    def __repr__(self) -> str:
        new, out = len(self.new_ids), len(self.output_ids)
        return f"Request({self.kind}, keep={self.keep}, {new} new ids, {out} sampled)"


def _as_array(ids: Iterable[int] | TokenArray) -> TokenArray:
    return np.array(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int32)
