"""Tables over one pool and one cache, driven at random, against plain lists that share nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import NamedTuple

from ...errors import OutOfBlocksError
from ...kv.block_pool import BlockPool
from ...kv.block_table import BlockTable
from ...kv.fork_tree import shared_runs
from ...kv.memory import KVMemory

__all__ = ["MemoryMachine", "check_runs", "drive_memory", "look_across_namespaces"]

MAX_TABLES = 64


def drive_memory(
    seed: int, num_blocks: int, block_size: int, num_operations: int, *, check_every: int = 1000
) -> int:
    """So many random operations on one memory; how many of them ran out of blocks.

    After each, the totals and the table that it touched are checked, and every so often all that
    there is. At the end all tables are given up in any order, and every block must be back.
    """
    machine = MemoryMachine(random.Random(seed), num_blocks, block_size)
    for count in range(num_operations):
        machine.act()
        machine.check_totals()
        if count % check_every == 0:
            machine.check()
    machine.end()
    return machine.num_refusals


def look_across_namespaces(num_look_ups: int, *, num_hashes: int | None = None) -> int:
    """So many look-ups of prefixes that other namespaces have cached; blocks found, all its own.

    `num_hashes` folds the hash of a block to so many values.
    """
    rng = random.Random(1)
    hash_fn = hash if num_hashes is None else lambda key: hash(key) % num_hashes
    memory = KVMemory(BlockPool(48), 2, hash_fn=hash_fn)
    owner: dict[int, str] = {}
    found = 0
    for _ in range(num_look_ups):
        namespace = rng.choice("abcd")
        words = [bytes(rng.choices(b"xy", k=2)) for _ in range(3)]
        table = BlockTable()
        memory.match(table, namespace, words.__getitem__, 3)
        assert all(owner[block] == namespace for block in table.block_ids), "a foreign block"
        found += len(table.block_ids)
        memory.extend(table, 6)
        memory.commit(table, 6, namespace, words.__getitem__)
        owner.update(dict.fromkeys(table.block_ids, namespace))
        memory.release(table)
    memory.check([])
    return found


class Held(NamedTuple):
    """A table, its namespace, and the ids that it must read back."""

    table: BlockTable
    namespace: str | None
    ids: list[int]


class MemoryMachine:
    """A memory, what is in its slots, and all tables with the ids they must hold."""

    def __init__(self, rng: random.Random, num_blocks: int, block_size: int) -> None:
        self.num_refusals: int = 0
        self._rng = rng
        self._size = block_size
        # All in one bucket is slow to search where there are many.
        hash_fn = rng.choice([hash, _constant]) if num_blocks <= 64 else hash
        self.memory: KVMemory = KVMemory(
            BlockPool(num_blocks), block_size, has_cache=rng.random() < 0.8, hash_fn=hash_fn
        )
        self.held: list[Held] = []
        self._slots: dict[tuple[int, int], int] = {}

    def act(self) -> None:
        """Do anything to any table, which is the last of `held` afterwards unless it is gone."""
        kind = self._rng.choice(["start", "fork", "grow", "grow", "truncate", "release"])
        if len(self.held) >= MAX_TABLES:
            kind = "release"
        if kind == "start" or not self.held:
            self._start()
            return
        at = self._rng.randrange(len(self.held))
        if kind == "fork":
            self._fork(self.held[at])
            return
        table, namespace, ids = self.held.pop(at)
        if kind == "grow":
            ids = self._grow(table, namespace, ids)
        else:
            count = self._rng.randint(0, len(ids)) if kind == "truncate" else 0
            self.memory.truncate(table, count)
            ids = ids[:count]
        if kind != "release":
            self.held.append(Held(table, namespace, ids))

    def check_totals(self) -> None:
        """Verify the sums, and that the last table reads back its ids."""
        memory, pool = self.memory, self.memory.pool
        assert memory.logical_tokens == sum(len(one.ids) for one in self.held)
        assert pool.num_free + pool.num_idle + pool.num_used == pool.num_blocks
        assert pool.used_slots <= pool.num_used * self._size
        assert len(memory.cache) <= pool.num_blocks
        if self.held:
            self._read_back(self.held[-1])

    def check(self) -> None:
        """Verify every invariant, every table, and the runs that tables share, from scratch."""
        self.memory.check(one.table for one in self.held)
        for one in self.held:
            self._read_back(one)
        tables = [one.table.block_ids for one in self.held]
        limits = [len(one.ids) // self._size for one in self.held]
        if sum(limits) < 2000:
            check_runs(tables, limits)

    def end(self) -> None:
        """Give up all tables in any order; every block must be back."""
        self._rng.shuffle(self.held)
        while self.held:
            self.memory.release(self.held.pop().table)
        self.check()
        assert self.memory.num_available == self.memory.pool.num_blocks
        assert self.memory.logical_tokens == self.memory.physical_tokens == 0

    def _start(self) -> None:
        namespace = self._rng.choice([None, "a"])
        ids = self._rng.choices(range(2), k=self._rng.randint(1, 4 * self._size))
        table = BlockTable()
        limit = self._rng.randint(0, len(ids) // self._size)
        entry = self.memory.match(table, namespace, self._tokens_of(ids), limit)
        assert (0 if entry is None else entry.depth) <= limit
        self.held.append(Held(table, namespace, ids[: table.num_tokens]))

    def _fork(self, one: Held) -> None:
        """A fork, which half of the time goes again at once."""
        count = self._rng.randint(0, len(one.ids))
        table = self.memory.fork(one.table, count)
        if self._rng.random() < 0.5:
            self.memory.release(table)
        else:
            self.held.append(Held(table, one.namespace, one.ids[:count]))

    def _grow(self, table: BlockTable, namespace: str | None, ids: list[int]) -> list[int]:
        longer = ids + self._rng.choices(range(2), k=self._rng.randint(1, 2 * self._size))
        before = (list(table.block_ids), table.num_tokens, self.memory.num_available)
        try:
            copy = self.memory.extend(table, len(longer))
        except OutOfBlocksError:
            after = (list(table.block_ids), table.num_tokens, self.memory.num_available)
            assert after == before, "a refusal has changed something"
            self.num_refusals += 1
            return ids
        if copy is not None:
            for slot in range(copy.tokens):
                self._slots[copy.dst, slot] = self._slots[copy.src, slot]
            self.memory.pool.release([copy.src])
        for at in range(len(ids), len(longer)):
            block = table.block_ids[at // self._size]
            assert self.memory.pool.ref_counts[block] == 1, "a shared block is written"
            self._slots[block, at % self._size] = longer[at]
        self.memory.commit(table, len(longer), namespace, self._tokens_of(longer))
        return longer

    def _tokens_of(self, ids: list[int]) -> Callable[[int], bytes]:
        return lambda index: bytes(ids[index * self._size : (index + 1) * self._size])

    def _read_back(self, one: Held) -> None:
        blocks, size = one.table.block_ids, self._size
        assert one.table.num_tokens == len(one.ids)
        read = [self._slots[blocks[at // size], at % size] for at in range(len(one.ids))]
        assert read == one.ids, "a table reads back what is not its own"


def check_runs(tables: list[list[int]], limits: list[int]) -> None:
    """Verify the shared runs of tables against those that comparing every prefix finds."""
    found: dict[tuple[int, ...], set[int]] = {}
    paths: list[tuple[int, ...]] = []
    for run in shared_runs(tables, limits):
        path = () if run.parent is None else paths[run.parent]
        assert run.start == len(path)
        paths.append((*path, *run.block_ids))
        for end in range(run.start + 1, run.start + len(run.block_ids) + 1):
            assert paths[-1][:end] not in found, "two runs hold one prefix"
            found[paths[-1][:end]] = set(run.rows)
    assert found == _naive_groups(tables, limits)


def _constant(key: tuple[Hashable, ...]) -> int:
    return 1


def _naive_groups(tables: list[list[int]], limits: list[int]) -> dict[tuple[int, ...], set[int]]:
    """For each block position and set of equal prefixes, the rows that share it."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for row, (table, limit) in enumerate(zip(tables, limits, strict=True)):
        for end in range(1, limit + 1):
            groups.setdefault(tuple(table[:end]), set()).add(row)
    return {prefix: rows for prefix, rows in groups.items() if len(rows) > 1}
