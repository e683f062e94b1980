"""Who runs in the next step and how far: decodes first, then prefill within the token budget.

Decides with integers alone. The memory says what fits; the core runs what is decided.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable

from ..errors import OutOfBlocksError
from ..kv.block_table import BlockTable
from ..kv.memory import KVMemory
from .content import next_of_running, next_of_waiting
from .plan import Plan, Span
from .snapshots import Snapshots
from .working import Sequence

# After so many preemptions a sequence starts again only when nothing can push it out any more.
MAX_PREEMPTIONS = 4
# So many sequences may start before an earlier one that waits for memory; then they wait too.
MAX_OVERTAKES = 32
# No prefill chunk is cut below this, in tokens.
MIN_CHUNK = 64
# One block in so many stays available for those that run when another sequence starts.
WATERMARK = 100


class Scheduler:
    """Waiting and running sequences, both in the order of their rank.

    Rank is priority, then arrival; a protected sequence comes before all. A running sequence may
    take the memory of those behind it that have no part in the step yet, never of a protected
    one. Protected sequences run together only if all of them fit at their longest, so the first
    in rank always runs, and everybody's preemptions are bounded.
    """

    def __init__(
        self, memory: KVMemory, snapshots: Snapshots, *, batch_tokens: int, max_num_seqs: int
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions: int = 0
        # Counts what may change the shared blocks of rows, but for rows that come and go.
        self.tree_changes: int = 0
        self.num_prompt_tokens: int = 0
        self.num_cached_tokens: int = 0
        self._memory = memory
        self._snapshots = snapshots
        self._batch_tokens = batch_tokens
        self._max_num_seqs = max_num_seqs
        # Blocks that running sequences still lack for the ids they have.
        self._num_owed = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority that came before."""
        insort(self.waiting, sequence, key=_rank)
        self._snapshots.touch(sequence.request.snapshot)

    def remove(self, sequence: Sequence) -> BlockTable | None:
        """Forget a sequence; its table, if it had one, is the caller's."""
        table = sequence.table
        if table is None:
            self.waiting.remove(sequence)
            return None
        self.running.remove(sequence)
        sequence.table = None
        self._note_owed(sequence)
        self._snapshots.unuse(sequence.request.snapshot)
        return table

    def schedule(self) -> Plan:
        """Choose the spans of the next step and allocate what they write."""
        decodes = sum(sequence.is_decoding for sequence in self.running)
        plan = Plan(self._batch_tokens - decodes)
        try:
            self._fill(plan)
        except BaseException:
            self._memory.pool.release([copy.src for copy in plan.copies])
            raise
        return plan

    def check(self) -> None:
        """Verify the books of the queues."""
        assert all(sequence.table is None for sequence in self.waiting), "a waiting one holds KV"
        assert all(sequence.table is not None for sequence in self.running), "one runs without"
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"
        owed = sum(sequence.num_owed for sequence in self.running + self.waiting)
        assert self._num_owed == owed, f"{self._num_owed} blocks are owed, and {owed} by sequences"
        assert len(self.running) <= self._max_num_seqs, "too many sequences run"
        most = max((s.num_preemptions for s in self.running + self.waiting), default=0)
        assert most <= MAX_PREEMPTIONS, f"a sequence is preempted for ever: {most} times"
        self._snapshots.check(Counter(s.request.snapshot for s in self.running))

    # The plan.

    def _fill(self, plan: Plan) -> None:
        order = self.running + self.waiting
        if self.waiting:
            order.sort(key=_rank)
        for sequence in order:
            if sequence in plan.preempted or sequence in plan.scheduled:
                continue
            if sequence.table is None:
                self._consider(plan, sequence)
            elif sequence.is_decoding:
                self._decode(plan, sequence)
            else:
                self._prefill(plan, sequence)
        self._top_up(plan)

    # Running sequences.

    def _decode(self, plan: Plan, sequence: Sequence) -> None:
        if self._run(plan, sequence, sequence.target) or sequence.is_protected:
            return
        # Unless it has given up its shared tail, and computes that again.
        if sequence.is_decoding:
            self._preempt(plan, sequence)

    def _prefill(self, plan: Plan, sequence: Sequence) -> None:
        """Run a chunk, unless another sequence of this step computes the very block it needs."""
        if plan.left <= 0:
            return
        self._catch_up(sequence)
        remaining = sequence.target - sequence.num_computed
        if remaining <= 0:
            plan.ready.append(sequence)
            return
        key = next_of_running(self._memory, sequence)
        if key in plan.computing:
            return
        # One that takes more than a whole step leaves half of it to those behind.
        half = max(min(MIN_CHUNK, plan.left), plan.left // 2)
        count = remaining if remaining <= plan.left else half
        if self._run(plan, sequence, sequence.num_computed + count):
            plan.left -= count
            if key is not None:
                plan.computing.add(key)

    def _top_up(self, plan: Plan) -> None:
        """Give what nobody behind has used back to the chunks that were cut, in order."""
        for span in plan.spans if plan.left > 0 else ():
            sequence = span.sequence
            more = min(plan.left, sequence.target - span.end)
            assert sequence.table is not None, "a sequence in a step has a table"
            needed = self._memory.blocks_for(span.end + more) - len(sequence.table.block_ids)
            # Nobody has to yield for it.
            if more and needed <= self._memory.num_available:
                if self._allocate(plan, sequence, span.end + more):
                    span.end += more
                    plan.left -= more

    def _run(self, plan: Plan, sequence: Sequence, end: int) -> bool:
        if not self._allocate(plan, sequence, end):
            return False
        plan.scheduled.add(sequence)
        plan.spans.append(Span(sequence, sequence.num_computed, end))
        return True

    def _catch_up(self, sequence: Sequence) -> None:
        """Take over blocks that others have published since the sequence started."""
        before = sequence.num_computed
        self._match(sequence)
        if sequence.num_computed > before:
            self.num_cached_tokens += sequence.note_reused(sequence.num_computed)
            self.tree_changes += 1
            self._note_owed(sequence)

    def _match(self, sequence: Sequence) -> None:
        table, request = sequence.table, sequence.request
        assert table is not None, "only a sequence with a table can match"
        limit = sequence.reuse_limit // self._memory.block_size
        sequence.hint = self._memory.match(
            table, request.namespace, sequence.block_tokens, limit, sequence.hint
        )

    # Waiting sequences.

    def _consider(self, plan: Plan, sequence: Sequence) -> None:
        """Start a waiting sequence and run its first chunk, if there is room for it."""
        if plan.left <= 0 or any(s.num_overtaken >= MAX_OVERTAKES for s in plan.blocked):
            return
        if len(self.running) >= self._max_num_seqs and plan.blocked:
            return
        key = next_of_waiting(self._memory, sequence)
        if key in plan.computing:
            return
        if not self._start(plan, sequence):
            plan.blocked.append(sequence)
            self._run_leader(plan, key)
            return
        for earlier in plan.blocked:
            earlier.num_overtaken += 1
        self._prefill(plan, sequence)

    def _start(self, plan: Plan, sequence: Sequence) -> bool:
        """Give a waiting sequence the KV of its ids that exists, and let it run if it fits."""
        if len(self.running) >= self._max_num_seqs:
            return False
        base, keep = sequence.request.snapshot.table, sequence.request.keep
        table = BlockTable()
        if base is not None:
            length = min(base.num_tokens, keep, sequence.reuse_limit)
            table = self._memory.fork(base, length)
        sequence.table = table
        has_room = False
        try:
            self._match(sequence)
            has_room = self._has_room(plan, sequence)
        finally:
            if not has_room:
                sequence.table = None
                self._memory.release(table)
        if not has_room:
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_rank)
        self._snapshots.use(sequence.request.snapshot)
        self._note_started(sequence)
        return True

    def _run_leader(self, plan: Plan, key: Hashable | None) -> None:
        """Run, ahead of its turn, who computes what a blocked sequence of higher rank needs."""
        for sequence in list(self.running):
            if key is None or sequence in plan.scheduled or sequence.is_decoding:
                continue
            if next_of_running(self._memory, sequence) == key:
                self._prefill(plan, sequence)
                return

    # Room.

    def _allocate(self, plan: Plan, sequence: Sequence, end: int) -> bool:
        """Get the blocks that a sequence writes up to `end`, at the cost of whoever must yield."""
        assert sequence.table is not None, "only a sequence with a table grows"
        while True:
            try:
                copy = self._memory.extend(sequence.table, end)
            except OutOfBlocksError:
                if not self._make_room(plan, sequence):
                    self._give_up_tail(sequence)
                    return False
                continue
            break
        if copy is not None:
            plan.copies.append(copy)
            self.tree_changes += 1
        if sequence.num_owed:
            self._note_owed(sequence)
        return True

    def _make_room(self, plan: Plan, sequence: Sequence) -> bool:
        """Take an idle snapshot's KV, else a later sequence's, else a busy snapshot's tail."""
        if self._snapshots.reclaim_idle():
            return True
        for victim in reversed(self.running):
            if victim.rank > sequence.rank and self._can_yield(plan, victim):
                self._preempt(plan, victim)
                return True
        return self._snapshots.reclaim_busy()

    def _give_up_tail(self, sequence: Sequence) -> None:
        """Drop a partial block that must be copied when nothing is left to copy it to."""
        table, size = sequence.table, self._memory.block_size
        assert table is not None, "only a sequence with a table grows"
        if table.num_tokens % size and not self._memory.is_writable(table):
            self._memory.truncate(table, table.num_tokens // size * size)
            self.tree_changes += 1
            self._note_owed(sequence)

    def _has_room(self, plan: Plan, sequence: Sequence) -> bool:
        """Whether a sequence with a table may start; makes room at the cost of lower priorities."""
        memory, table = self._memory, sequence.table
        assert table is not None, "the room depends on what is reused"
        if not self._fits_protected(sequence):
            return False
        if not self.running:
            return True
        needed = memory.blocks_for(max(1, sequence.target)) - len(table.block_ids)
        needed += table.num_tokens % memory.block_size != 0
        if not sequence.is_protected:
            needed += self._num_owed + max(1, memory.pool.num_blocks // WATERMARK)
        if memory.num_available >= needed:
            return True
        victims = [s for s in self.running if self._can_yield(plan, s) and _outranks(sequence, s)]
        if not self._could_obtain(needed, sequence, victims):
            return False
        while memory.num_available < needed:
            if self._snapshots.reclaim_idle():
                continue
            if not victims:
                return False
            self._preempt(plan, victims.pop())
        return True

    def _could_obtain(self, needed: int, sequence: Sequence, victims: list[Sequence]) -> bool:
        """Whether so many blocks are held neither by `sequence` nor by running ones that stay."""
        held: set[int] = set()
        for other in (sequence, *(s for s in self.running if s not in victims)):
            if other.table is not None:
                held.update(other.table.block_ids)
        pool = self._memory.pool
        return pool.num_blocks - pool.num_quarantined - len(held) >= needed

    def _fits_protected(self, sequence: Sequence) -> bool:
        """Whether all protected sequences fit into the pool, each at its longest."""
        if not sequence.is_protected:
            return True
        together = [s.limit for s in self.running if s.is_protected] + [sequence.limit]
        return sum(map(self._memory.blocks_for, together)) <= self._memory.pool.num_blocks

    def _can_yield(self, plan: Plan, sequence: Sequence) -> bool:
        return not sequence.is_protected and sequence not in plan.scheduled

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        """Take a running sequence's KV and let it wait; what it computed will be recomputed."""
        table = self.remove(sequence)
        assert table is not None, "only a running sequence is preempted"
        self._memory.release(table)
        # A score is summed again from its first id.
        sequence.score = 0.0
        plan.preempted.add(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            sequence.is_protected = True
            sequence.rank = (False, *sequence.rank[1:])
        insort(self.waiting, sequence, key=_rank)

    def _note_started(self, sequence: Sequence) -> None:
        self._note_owed(sequence)
        self.tree_changes += 1
        self.num_cached_tokens += sequence.note_reused(sequence.num_computed)
        sequence.num_overtaken = 0
        if not sequence.has_started:
            sequence.has_started = True
            self.num_prompt_tokens += sequence.num_input

    def _note_owed(self, sequence: Sequence) -> None:
        table, owed = sequence.table, 0
        if table is not None:
            owed = max(0, self._memory.blocks_for(sequence.target) - len(table.block_ids))
        self._num_owed += owed - sequence.num_owed
        sequence.num_owed = owed


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.rank


def _outranks(sequence: Sequence, other: Sequence) -> bool:
    """Whether `sequence` may push `other` out in order to start, rather than wait for it."""
    return sequence.is_protected or sequence.request.priority > other.request.priority
