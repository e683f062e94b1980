"""The snapshots that handles still point at, and whose KV may be taken when memory runs out."""

from __future__ import annotations

from collections import Counter, OrderedDict

from ..kv.memory import KVMemory
from .sequence import Snapshot


class Snapshots:
    """Live snapshots. One is busy while a sequence that started from it runs, else idle."""

    def __init__(self, memory: KVMemory) -> None:
        self.live: set[Snapshot] = set()
        self.num_reclaims: int = 0
        self._memory = memory
        # Those with KV that nothing runs from, the least recently used first.
        self._idle: OrderedDict[Snapshot, None] = OrderedDict()
        self._busy: Counter[Snapshot] = Counter()

    def add(self, snapshot: Snapshot) -> None:
        """Keep a new snapshot until it is released."""
        self.live.add(snapshot)
        self._settle(snapshot)

    def release(self, snapshot: Snapshot) -> None:
        """Give up a snapshot and its KV. Idempotent."""
        self.live.discard(snapshot)
        self._drop_table(snapshot)

    def touch(self, snapshot: Snapshot) -> None:
        """Note that a snapshot has just been used."""
        if snapshot in self._idle:
            self._idle.move_to_end(snapshot)

    def use(self, snapshot: Snapshot) -> None:
        """A sequence that started from it begins to run."""
        self._busy[snapshot] += 1
        self._idle.pop(snapshot, None)

    def unuse(self, snapshot: Snapshot) -> None:
        """A sequence that started from it runs no more."""
        self._busy[snapshot] -= 1
        if not self._busy[snapshot]:
            del self._busy[snapshot]
            self._settle(snapshot)

    def reclaim_idle(self) -> bool:
        """Take the KV of the idle snapshot used least recently; False if none has any."""
        if not self._idle:
            return False
        self._drop_table(next(iter(self._idle)))
        self.num_reclaims += 1
        return True

    def reclaim_busy(self) -> bool:
        """Take KV of a busy snapshot, a partial last block first; False if none has any.

        Whoever runs from it holds or has copied what it needs. A turn that is discarded computes
        again what was taken.
        """
        held = [snapshot for snapshot in self._busy if snapshot.table is not None]
        size = self._memory.block_size
        for snapshot in held:
            table = snapshot.table
            if table is not None and table.num_tokens % size:
                self._memory.truncate(table, table.num_tokens // size * size)
                return True
        if held:
            self._drop_table(held[0])
            self.num_reclaims += 1
        return bool(held)

    def check(self, running: Counter[Snapshot]) -> None:
        """Verify the books, given how many running sequences started from each snapshot."""
        assert self._busy == running, "busy snapshots are not those that sequences run from"
        held = {snapshot for snapshot in self.live if snapshot.table is not None}
        assert set(self._idle) == held - set(self._busy), "idle snapshots are miscounted"
        for snapshot in held:
            assert snapshot.table is not None, "chosen above for having one"
            assert snapshot.table.num_tokens <= max(0, len(snapshot.ids) - 1), "KV beyond the ids"

    def _settle(self, snapshot: Snapshot) -> None:
        if snapshot in self.live and snapshot.table is not None and not self._busy[snapshot]:
            self._idle[snapshot] = None

    def _drop_table(self, snapshot: Snapshot) -> None:
        self._idle.pop(snapshot, None)
        table, snapshot.table = snapshot.table, None
        if table is not None:
            self._memory.release(table)
