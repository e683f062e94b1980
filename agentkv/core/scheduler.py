"""Who runs in the next step and how far: decodes first, then prefill within the token budget.

Decides with integers alone. The memory says what fits; the core runs what is decided.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..errors import OutOfBlocksError
from ..kv.block_table import BlockTable
from ..kv.memory import Copy, KVMemory
from .sequence import Snapshot
from .working import Sequence

# After so many preemptions a sequence starts again only when nothing can push it out any more.
MAX_PREEMPTIONS = 3
# No prefill chunk is cut below this while others wait too, in tokens.
MIN_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's part of a step: its KV grows from `start` to `end`."""

    sequence: Sequence
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """A step. `ready` sequences need none; the `starved` one can never get its blocks."""

    spans: list[Span] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    ready: list[Sequence] = field(default_factory=list)
    starved: tuple[Sequence, OutOfBlocksError] | None = None

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence runs in this step."""
        return any(span.sequence is sequence for span in self.spans)


class Scheduler:
    """Waiting and running sequences, and the snapshots whose memory they may need."""

    def __init__(self, memory: KVMemory, *, batch_tokens: int, max_num_seqs: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.snapshots: set[Snapshot] = set()
        self.num_preemptions: int = 0
        self.num_reclaims: int = 0
        # Counts what may change which blocks rows share, but for rows that come and go.
        self.tree_changes: int = 0
        self._memory = memory
        self._batch_tokens = batch_tokens
        self._max_num_seqs = max_num_seqs
        self._clock = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority that came before."""
        insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def remove(self, sequence: Sequence) -> BlockTable | None:
        """Forget a sequence; its table, if it had one, is the caller's."""
        table, sequence.table = sequence.table, None
        (self.waiting if table is None else self.running).remove(sequence)
        return table

    def touch(self, snapshot: Snapshot) -> None:
        """Note that a snapshot has just been used."""
        self._clock += 1
        snapshot.last_used = self._clock

    def release(self, snapshot: Snapshot) -> None:
        """Give up a snapshot's KV. Idempotent."""
        self.snapshots.discard(snapshot)
        table, snapshot.table = snapshot.table, None
        if table is not None:
            self._memory.release(table)

    def schedule(self) -> Plan:
        """Choose the spans of the next step and allocate what they write."""
        plan = Plan()
        chosen: set[Sequence] = set()
        self.running.sort(key=lambda sequence: sequence.rank)
        for sequence in list(self.running):
            if sequence.table is not None and _is_decode(sequence):
                if not self._grow(plan, chosen, sequence, sequence.target):
                    if plan.starved is not None:
                        return plan
                    self._preempt(sequence)
        self._schedule_prefills(plan, chosen)
        return plan

    def _schedule_prefills(self, plan: Plan, chosen: set[Sequence]) -> None:
        budget = self._batch_tokens - len(plan.spans)
        computing: set[Hashable] = set()
        candidates = [sequence for sequence in self.running if sequence not in chosen]
        candidates = sorted(candidates + self.waiting, key=lambda sequence: sequence.rank)
        is_blocked = False
        for at, sequence in enumerate(candidates):
            if budget <= 0 or plan.starved is not None:
                break
            if sequence.table is None and is_blocked:
                continue
            if sequence.table is None:
                self._start(sequence)
                if self._awaits(sequence, computing):
                    self._put_back(sequence)
                    continue
                if not self._admit(sequence):
                    self._put_back(sequence)
                    is_blocked = True
                    continue
            elif sequence not in self.running:
                continue
            else:
                self._catch_up(sequence)
                if self._awaits(sequence, computing):
                    continue
            start = sequence.num_computed
            if start >= sequence.target:
                plan.ready.append(sequence)
                continue
            most = budget if at == len(candidates) - 1 else max(MIN_CHUNK, budget // 2)
            end = min(sequence.target, start + min(most, budget))
            computing.update(self._content_keys(sequence, end))
            if self._grow(plan, chosen, sequence, end):
                budget -= end - start

    # Starting.

    def _start(self, sequence: Sequence) -> None:
        """Give a waiting sequence a table with all the KV of its ids that exists, pinned."""
        request, limit = sequence.request, sequence.reuse_limit
        base = request.snapshot.table
        if base is None:
            table = BlockTable()
        else:
            table = self._memory.fork(base, min(base.num_tokens, request.keep, limit))
        sequence.table = table
        self._match(sequence)

    def _match(self, sequence: Sequence) -> None:
        assert sequence.table is not None, "only a sequence with a table can match"
        limit = sequence.reuse_limit // self._memory.block_size
        namespace = sequence.request.namespace
        self._memory.match(sequence.table, namespace, sequence.block_tokens, limit)

    def _put_back(self, sequence: Sequence) -> None:
        table, sequence.table = sequence.table, None
        assert table is not None, "only a started sequence is put back"
        self._memory.release(table)

    def _admit(self, sequence: Sequence) -> bool:
        """Let a started sequence run if there is room for it; reclaims idle snapshots for it."""
        if len(self.running) >= self._max_num_seqs:
            return False
        if self.running:
            needed = self._needed(sequence, sequence.target) + len(self.running)
            if any(s.num_preemptions >= MAX_PREEMPTIONS for s in (*self.running, sequence)):
                needed = sum(self._needed(s, s.max_length) for s in (*self.running, sequence))
            while self._memory.num_available < needed:
                if not self._reclaim(spare=sequence.request.snapshot):
                    return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda queued: queued.rank)
        self.touch(sequence.request.snapshot)
        if not sequence.has_started:
            sequence.has_started = True
            sequence.cached_tokens = sequence.num_computed
        again = min(sequence.reach, sequence.reuse_limit) - sequence.num_computed
        sequence.recomputed_tokens += max(0, again)
        self.tree_changes += 1
        return True

    def _needed(self, sequence: Sequence, length: int) -> int:
        """Blocks to allocate at most until the KV has that length, a copy included."""
        assert sequence.table is not None, "only a sequence with a table grows"
        return self._memory.blocks_for(length) - len(sequence.table.block_ids) + 1

    def _catch_up(self, sequence: Sequence) -> None:
        """Take over blocks that others have published since the sequence started."""
        before = sequence.num_computed
        if before % self._memory.block_size == 0:
            self._match(sequence)
        if sequence.num_computed > before:
            sequence.cached_tokens += sequence.num_computed - before
            self.tree_changes += 1

    # In-flight deduplication: content is named by (namespace, parent entry, tokens).

    def _awaits(self, sequence: Sequence, computing: set[Hashable]) -> bool:
        """Whether the next block the sequence needs is being computed in this very step."""
        if not computing:
            return False
        index = sequence.num_computed // self._memory.block_size
        keys = self._content_keys(sequence, (index + 1) * self._memory.block_size)
        return bool(keys) and keys[0] in computing

    def _content_keys(self, sequence: Sequence, end: int) -> list[Hashable]:
        """Names of the blocks, all of whose ids are known, from the first unfinished up to `end`.

        The parent of the first is a published entry; each later one is named by its parent's name.
        """
        table, size = sequence.table, self._memory.block_size
        assert table is not None, "only a started sequence computes blocks"
        first = table.num_tokens // size
        if not self._memory.has_cache or table.num_published < first:
            return []
        entry = self._memory.last_entry(table, table.num_tokens)
        parent: Hashable = 0 if entry is None else entry.serial
        keys: list[Hashable] = []
        for index in range(first, min(self._memory.blocks_for(end), sequence.num_tokens // size)):
            parent = (sequence.request.namespace, parent, sequence.block_tokens(index))
            keys.append(parent)
            parent = hash(parent)
        return keys

    # Room.

    def _grow(self, plan: Plan, chosen: set[Sequence], sequence: Sequence, end: int) -> bool:
        """Put a span into the plan, making room for what it writes; False if there is none."""
        table = sequence.table
        assert table is not None, "only a sequence with a table grows"
        start = table.num_tokens
        while True:
            try:
                copy = self._memory.extend(table, end)
            except OutOfBlocksError as error:
                if self._make_room(chosen, sequence):
                    continue
                if not chosen:
                    plan.starved = (sequence, error)
                return False
            break
        if copy is not None:
            plan.copies.append(copy)
            self.tree_changes += 1
        chosen.add(sequence)
        plan.spans.append(Span(sequence, start, end))
        return True

    def _make_room(self, chosen: set[Sequence], sequence: Sequence) -> bool:
        """Free some block: an idle snapshot's, then a later sequence's, then what is left."""
        if self._reclaim():
            return True
        for victim in reversed(self.running):
            if victim is sequence or victim.rank < sequence.rank:
                break
            if victim not in chosen:
                self._preempt(victim)
                return True
        if chosen:
            return False
        return self._take_over(sequence) or self._reclaim(is_desperate=True)

    def _reclaim(self, *, spare: Snapshot | None = None, is_desperate: bool = False) -> bool:
        """Take the KV of the snapshot used least recently; of one that runs only in despair."""
        busy = set() if is_desperate else {s.request.snapshot for s in self.running}
        idle = [s for s in self.snapshots if s.table is not None and s not in busy]
        idle = [s for s in idle if s is not spare]
        if not idle:
            return False
        victim = min(idle, key=lambda snapshot: snapshot.last_used)
        table, victim.table = victim.table, None
        assert table is not None, "chosen above for having one"
        self._memory.release(table)
        self.num_reclaims += 1
        return True

    def _take_over(self, sequence: Sequence) -> bool:
        """Own the partial last block, if the sequence's snapshot is its only other holder."""
        table, base = sequence.table, sequence.request.snapshot.table
        size = self._memory.block_size
        if table is None or base is None or not table.num_tokens % size:
            return False
        at = table.num_tokens // size
        if at != len(base.block_ids) - 1 or base.block_ids[at] != table.block_ids[at]:
            return False
        self._memory.truncate(base, at * size)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.reach = max(sequence.reach, sequence.num_computed)
        table = self.remove(sequence)
        assert table is not None, "only a running sequence is preempted"
        self._memory.release(table)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)


def _is_decode(sequence: Sequence) -> bool:
    has_sampled = bool(sequence.request.output_ids)
    return has_sampled and sequence.target - sequence.num_computed == 1
