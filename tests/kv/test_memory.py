"""Tables over one pool and one cache, driven at random, against plain lists that share nothing."""

from __future__ import annotations

import random

import pytest

from agentkv.errors import OutOfBlocksError
from agentkv.kv.block_pool import BlockPool
from agentkv.kv.block_table import BlockTable
from agentkv.kv.fork_tree import Run, shared_runs
from agentkv.kv.memory import KVMemory
from agentkv.testing.proof.memories import check_runs, drive_memory


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_table_reads_back_its_own_ids(num_blocks: int, block_size: int) -> None:
    for seed in range(6):
        drive_memory(seed, num_blocks, block_size, 80, check_every=1)


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


def test_a_search_may_begin_at_an_entry_that_was_evicted() -> None:
    memory = KVMemory(BlockPool(4), 1)
    words = [b"0", b"1", b"2", b"3"]
    table = BlockTable()
    memory.extend(table, 4)
    memory.commit(table, 4, None, words.__getitem__)
    entries = [memory.cache.entry_of(block) for block in table.block_ids]
    memory.release(table)
    memory.cache.evict(2)
    for start in (None, *entries):
        assert memory.cache.find(None, start, words.__getitem__, 4) is entries[1]


def test_shared_runs_are_those_that_comparing_every_prefix_finds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        tables = [[rng.randint(0, 1)] for _ in range(rng.randint(0, 7))]
        for table in tables:
            # A block id names its place too, as in a real pool.
            for depth in range(rng.randint(0, 6)):
                table.append(10 * (depth + 1) + table[-1] % 10 * 2 + rng.randint(0, 1))
        limits = [rng.randint(0, len(table)) for table in tables]
        check_runs(tables, limits)


def test_a_chain_of_a_thousand_forks_needs_no_recursion() -> None:
    tables = [list(range(depth + 1)) for depth in range(1000)]
    runs = shared_runs(tables, [len(table) for table in tables])
    assert runs[0] == Run(None, 0, (0,), tuple(range(1000)))
    assert len(runs) == 999
