"""Tables over one pool and one cache, driven at random, against plain lists that share nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import pytest

from agentkv.errors import OutOfBlocksError
from agentkv.kv.block_pool import BlockPool
from agentkv.kv.block_table import BlockTable
from agentkv.kv.fork_tree import Run, shared_runs
from agentkv.kv.memory import KVMemory


def constant(key: tuple[Hashable, ...]) -> int:
    return 1


class Model:
    """The memory, what is in its slots, and for each table the ids it must read back."""

    def __init__(self, rng: random.Random, num_blocks: int, block_size: int) -> None:
        self.rng = rng
        self.size = block_size
        hash_fn = rng.choice([hash, constant])
        self.memory = KVMemory(
            BlockPool(num_blocks), block_size, has_cache=rng.random() < 0.8, hash_fn=hash_fn
        )
        self.slots: dict[tuple[int, int], int] = {}
        self.tables: list[tuple[BlockTable, str | None, list[int]]] = []

    def act(self) -> None:
        kind = self.rng.choice(["start", "fork", "grow", "grow", "truncate", "release"])
        if kind == "start" or not self.tables:
            self.start()
        elif kind == "fork":
            table, namespace, ids = self.rng.choice(self.tables)
            count = self.rng.randint(0, len(ids))
            self.tables.append((self.memory.fork(table, count), namespace, ids[:count]))
            self.give_up_shared(self.tables[-1])
        else:
            at = self.rng.randrange(len(self.tables))
            table, namespace, ids = self.tables.pop(at)
            if kind == "grow":
                ids = self.grow(table, namespace, ids)
            else:
                count = self.rng.randint(0, len(ids)) if kind == "truncate" else 0
                self.memory.truncate(table, count)
                ids = ids[:count]
            if kind != "release":
                self.tables.append((table, namespace, ids))

    def start(self) -> None:
        namespace = self.rng.choice([None, "a"])
        ids = self.rng.choices(range(2), k=self.rng.randint(1, 4 * self.size))
        table = BlockTable()
        limit = self.rng.randint(0, len(ids) // self.size)
        entry = self.memory.match(table, namespace, self.tokens_of(ids), limit)
        assert (0 if entry is None else entry.depth) <= limit
        self.tables.append((table, namespace, ids[: table.num_tokens]))

    def grow(self, table: BlockTable, namespace: str | None, ids: list[int]) -> list[int]:
        longer = ids + self.rng.choices(range(2), k=self.rng.randint(1, 2 * self.size))
        before = (list(table.block_ids), table.num_tokens, self.memory.num_available)
        try:
            copy = self.memory.extend(table, len(longer))
        except OutOfBlocksError:
            after = (list(table.block_ids), table.num_tokens, self.memory.num_available)
            assert after == before
            return ids
        if copy is not None:
            for slot in range(copy.tokens):
                self.slots[copy.dst, slot] = self.slots[copy.src, slot]
            self.memory.pool.release([copy.src])
        for at in range(len(ids), len(longer)):
            block = table.block_ids[at // self.size]
            assert self.memory.pool.ref_counts[block] == 1
            self.slots[block, at % self.size] = longer[at]
        self.memory.commit(table, len(longer), namespace, self.tokens_of(longer))
        return longer

    def give_up_shared(self, forked: tuple[BlockTable, str | None, list[int]]) -> None:
        """Half of the forks go at once, in any order with their parents."""
        if self.rng.random() < 0.5:
            self.tables.remove(forked)
            self.memory.release(forked[0])

    def tokens_of(self, ids: list[int]) -> Callable[[int], bytes]:
        return lambda index: bytes(ids[index * self.size : (index + 1) * self.size])

    def check(self) -> None:
        self.memory.check(table for table, _, _ in self.tables)
        for table, _, ids in self.tables:
            assert table.num_tokens == len(ids)
            read = [
                self.slots[table.block_ids[at // self.size], at % self.size]
                for at in range(len(ids))
            ]
            assert read == ids


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_table_reads_back_its_own_ids(num_blocks: int, block_size: int) -> None:
    for seed in range(6):
        model = Model(random.Random(seed), num_blocks, block_size)
        for _ in range(80):
            model.act()
            model.check()
        model.rng.shuffle(model.tables)
        for table, _, _ in model.tables:
            model.memory.release(table)
        model.tables = []
        model.check()
        assert model.memory.num_available == num_blocks
        assert model.memory.logical_tokens == model.memory.physical_tokens == 0


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="shared while free"):
        pool.share(blocks)
    pool.check([])


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    pool.check([held])


def test_a_quarantined_block_is_never_issued_again() -> None:
    memory = KVMemory(BlockPool(4), 2)
    memory.quarantine([1, 3])
    assert sorted(memory.pool.allocate(2)) == [0, 2]
    with pytest.raises(OutOfBlocksError):
        memory.pool.allocate(1)
    memory.pool.check([[0, 2]])


def test_the_index_does_not_grow_with_the_prefixes_ever_seen() -> None:
    memory = KVMemory(BlockPool(8), 1)
    for value in range(3000):
        table = BlockTable()
        memory.extend(table, 4)
        words = [b"%d %d" % (value, at) for at in range(4)]
        memory.commit(table, 4, None, words.__getitem__)
        memory.release(table)
    assert len(memory.cache) <= 8
    assert memory.cache.num_evictions > 2900 * 4
    memory.check([])


def naive_groups(tables: list[list[int]], limits: list[int]) -> dict[tuple[int, ...], set[int]]:
    """For each block position and set of equal prefixes, the rows that share it."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for row, (table, limit) in enumerate(zip(tables, limits, strict=True)):
        for end in range(1, limit + 1):
            groups.setdefault(tuple(table[:end]), set()).add(row)
    return {prefix: rows for prefix, rows in groups.items() if len(rows) > 1}


def test_shared_runs_are_those_that_comparing_every_prefix_finds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        tables = [[rng.randint(0, 1)] for _ in range(rng.randint(0, 7))]
        for table in tables:
            # A block id names its place too, as in a real pool.
            for depth in range(rng.randint(0, 6)):
                table.append(10 * (depth + 1) + table[-1] % 10 * 2 + rng.randint(0, 1))
        limits = [rng.randint(0, len(table)) for table in tables]
        found: dict[tuple[int, ...], set[int]] = {}
        paths: list[tuple[int, ...]] = []
        for run in shared_runs(tables, limits):
            path = () if run.parent is None else paths[run.parent]
            assert run.start == len(path)
            paths.append((*path, *run.block_ids))
            for end in range(run.start + 1, run.start + len(run.block_ids) + 1):
                assert paths[-1][:end] not in found
                found[paths[-1][:end]] = set(run.rows)
        assert found == naive_groups(tables, limits)


def test_a_chain_of_a_thousand_forks_needs_no_recursion() -> None:
    tables = [list(range(depth + 1)) for depth in range(1000)]
    runs = shared_runs(tables, [len(table) for table in tables])
    assert runs[0] == Run(None, 0, (0,), tuple(range(1000)))
    assert len(runs) == 999
