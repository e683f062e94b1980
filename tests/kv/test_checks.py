"""The checks of pool, cache and tables: whatever is wrong in the books, they say what it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from agentkv.kv.block_pool import BlockPool
from agentkv.kv.block_table import BlockTable
from agentkv.kv.memory import KVMemory
from agentkv.kv.prefix_cache import Entry

LOST = 11


def first_byte(key: tuple[Hashable, ...]) -> int:
    """A hash of a block's tokens alone, so that what else is wrong with a key stays unnoticed."""
    tokens = key[2]
    assert isinstance(tokens, bytes)
    return tokens[0]


class Books:
    """Blocks of 2 in every state: a chain that two tables share, one in use, one idle, one lost."""

    def __init__(self) -> None:
        self.memory = KVMemory(BlockPool(12), 2, hash_fn=first_byte)
        self.pool = self.memory.pool
        self.buckets = self.memory.cache._buckets
        self.tables = [self.chain("a", 5), self.chain("b", 5)]
        self.tables.append(self.memory.fork(self.tables[0], 4))
        self.memory.release(self.chain("c", 4))
        self.pool.quarantine([LOST])

    def chain(self, namespace: str, length: int) -> BlockTable:
        """A table with published blocks."""
        table = BlockTable()
        self.memory.extend(table, length)
        self.memory.commit(table, length, namespace, lambda at: bytes([at]))
        return table

    def check(self) -> None:
        self.memory.check(self.tables)

    @property
    def free(self) -> int:
        return self.pool._free[0]

    @property
    def idle(self) -> list[int]:
        """The idle chain, from its first block on."""
        return self.pool.idle_order()[::-1]

    @property
    def used(self) -> list[int]:
        """The blocks of the chain that two tables share, the last one of the first table."""
        return self.tables[0].block_ids

    @property
    def entries(self) -> list[Entry]:
        """The entries of that chain."""
        return [self.memory.cache.entry_of(block) for block in self.used[:2]]


def test_books_that_are_right_pass() -> None:
    books = Books()
    pool = books.pool
    assert (pool.num_free, pool.num_idle, pool.num_quarantined, pool.num_used) == (3, 2, 1, 6)
    books.check()


# The pool.


def free_a_block_twice(books: Books) -> None:
    books.pool._free.append(books.free)


def forget_a_free_block(books: Books) -> None:
    books.pool._free.popleft()


def free_an_idle_block(books: Books) -> None:
    books.pool._free.append(books.idle[0])


def free_a_block_in_use(books: Books) -> None:
    books.pool._free.append(books.used[0])


def free_a_lost_block(books: Books) -> None:
    books.pool._free.append(LOST)


def free_one_block_in_place_of_another(books: Books) -> None:
    books.pool._free[0] = 99


def count_a_reference_too_many(books: Books) -> None:
    books.pool.ref_counts[books.used[0]] += 1


def count_a_reference_too_few(books: Books) -> None:
    books.pool.ref_counts[books.used[0]] -= 1


def count_a_reference_to_a_free_block(books: Books) -> None:
    books.pool.ref_counts[books.free] += 1


def name_a_block_without_a_reference(books: Books) -> None:
    books.tables.append(BlockTable(books.used[:1], 2, 1))


def lose_a_table_that_has_references(books: Books) -> None:
    books.memory.logical_tokens -= books.tables.pop().num_tokens


def name_a_block_twice(books: Books) -> None:
    books.used[1] = books.used[0]


def retain_no_idle_block(books: Books) -> None:
    books.pool.is_retained[books.idle[0]] = 0


def retain_a_free_block(books: Books) -> None:
    books.pool.is_retained[books.free] = 1


def fill_a_slot_too_many(books: Books) -> None:
    books.pool.used_slots += 1


# The cache.


def list_an_entry_twice(books: Books) -> None:
    next(iter(books.buckets.values())).append(books.entries[0])


def list_no_entry_of_a_block(books: Books) -> None:
    books.buckets.popitem()


def list_an_entry_under_another_hash(books: Books) -> None:
    books.buckets[99] = books.buckets.popitem()[1]


def keep_a_bucket_of_no_entry(books: Books) -> None:
    books.buckets[99] = []


def make_two_entries_equal(books: Books) -> None:
    books.entries[1].key = books.entries[0].key


def retain_a_block_that_is_not_published(books: Books) -> None:
    books.pool.retain(books.used[2])


def publish_a_block_that_is_not_retained(books: Books) -> None:
    books.pool.is_retained[books.used[1]] = 0


def keep_an_evicted_entry(books: Books) -> None:
    books.entries[0].is_live = False


def give_an_entry_another_block(books: Books) -> None:
    books.entries[0].block = books.free


def give_an_entry_another_parent(books: Books) -> None:
    books.entries[1].parent = None


def orphan_an_entry(books: Books) -> None:
    parent = books.entries[0]
    books.entries[1].parent = Entry(parent.key, parent.serial, parent.block, parent.parent)


def move_an_entry_to_another_namespace(books: Books) -> None:
    books.entries[1].key = ("z", *books.entries[1].key[1:])


def use_a_block_without_its_parent(books: Books) -> None:
    child = books.idle[1]
    books.pool.share([child])
    books.memory.logical_tokens += 2
    books.tables.append(BlockTable([child], 2, 1))


def evict_a_parent_before_its_child(books: Books) -> None:
    books.pool._idle.move_to_end(books.idle[1])


def miscount_children(books: Books) -> None:
    books.entries[0].num_children += 1


# Tables.


def miscount_the_tokens_of_all_tables(books: Books) -> None:
    books.memory.logical_tokens -= 1


def cut_a_table_and_keep_its_blocks(books: Books) -> None:
    books.tables[0].num_tokens -= 1
    books.memory.logical_tokens -= 1


def leave_a_full_block_unpublished(books: Books) -> None:
    books.tables[0].num_published -= 1


def exchange_equal_blocks_of_two_chains(books: Books) -> None:
    first, second = books.tables[1].block_ids, books.tables[2].block_ids
    first[0], second[0] = second[0], first[0]


def claim_a_slot_that_nobody_filled(books: Books) -> None:
    table = books.tables[0]
    table.num_tokens += 1
    books.memory.logical_tokens += 1
    table.num_published += 1
    books.memory.cache.publish("a", books.entries[1], b"\2", table.block_ids[2])


WRONG: dict[Callable[[Books], None], str] = {
    free_a_block_twice: "the free queue repeats a block",
    forget_a_free_block: "states overlap or leak",
    free_an_idle_block: "states overlap or leak",
    free_a_block_in_use: "states overlap or leak",
    free_a_lost_block: "states overlap or leak",
    free_one_block_in_place_of_another: "states leak blocks",
    count_a_reference_too_many: "block 0: 3 counted, 2 held",
    count_a_reference_too_few: "block 0: 1 counted, 2 held",
    count_a_reference_to_a_free_block: "1 counted, 0 held",
    name_a_block_without_a_reference: "block 0: 2 counted, 3 held",
    lose_a_table_that_has_references: "block 0: 2 counted, 1 held",
    name_a_block_twice: "a holder repeats a block",
    retain_no_idle_block: "idle block . is not retained",
    retain_a_free_block: "free block . is retained",
    fill_a_slot_too_many: "slots are counted",
    list_an_entry_twice: "an entry is listed twice or not at all",
    list_no_entry_of_a_block: "an entry is listed twice or not at all",
    list_an_entry_under_another_hash: "an entry is listed under another's hash",
    keep_a_bucket_of_no_entry: "a bucket is empty",
    make_two_entries_equal: "two entries are equal",
    retain_a_block_that_is_not_published: "retained blocks are not the published ones",
    publish_a_block_that_is_not_retained: "retained blocks are not the published ones",
    keep_an_evicted_entry: "block 0 has an evicted entry",
    give_an_entry_another_block: "block 0 is listed under",
    give_an_entry_another_parent: "block 1 is not keyed by its parent",
    orphan_an_entry: "block 1 is an orphan",
    move_an_entry_to_another_namespace: "block 1 left its namespace",
    use_a_block_without_its_parent: "is in use and its parent is not",
    evict_a_parent_before_its_child: "outlives its parent",
    miscount_children: "children are miscounted",
    miscount_the_tokens_of_all_tables: "tokens are counted",
    cut_a_table_and_keep_its_blocks: "length: ",
    leave_a_full_block_unpublished: "unpublished: ",
    exchange_equal_blocks_of_two_chains: "is not its chain's next",
    claim_a_slot_that_nobody_filled: "block 2 is not filled",
}


@pytest.mark.parametrize("go_wrong", WRONG)
def test_books_that_are_wrong_are_found_out(go_wrong: Callable[[Books], None]) -> None:
    books = Books()
    go_wrong(books)
    with pytest.raises(AssertionError, match=WRONG[go_wrong]):
        books.check()
