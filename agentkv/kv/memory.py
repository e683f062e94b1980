"""Block tables over one pool and one prefix cache: fork, match, extend, commit, release.

Every operation is all or nothing. Knows tokens only as opaque keys of one block each, and no
sequences: a table is whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .block_pool import BlockPool
from .block_table import BlockTable
from .prefix_cache import BlockTokens, Entry, HashFn, PrefixCache


class Copy(NamedTuple):
    """The first `tokens` slots of `src` must be copied to `dst` before anything is written.

    Owns a reference to `src`, which the taker releases once the copy is made.
    """

    src: int
    dst: int
    tokens: int


class KVMemory:
    """All KV blocks of an engine.

    `logical_tokens` sums the lengths of all tables, `physical_tokens` counts the filled slots of
    blocks in use once. `has_cache` False publishes nothing, so that only forks share blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        has_cache: bool = True,
        hash_fn: HashFn = hash,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.has_cache = has_cache
        self.cache: PrefixCache = PrefixCache(pool, hash_fn)
        self.logical_tokens: int = 0

    @property
    def physical_tokens(self) -> int:
        """Tokens in blocks in use, shared ones once."""
        return self.pool.used_slots

    @property
    def num_available(self) -> int:
        """Blocks that `extend` can get without anybody losing what they hold."""
        return self.pool.num_free + self.pool.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A new table that shares the blocks of the first `num_tokens` tokens of `table`."""
        assert 0 <= num_tokens <= table.num_tokens, f"fork {num_tokens} of {table.num_tokens}"
        block_ids = table.block_ids[: self.blocks_for(num_tokens)]
        self.pool.share(block_ids)
        self.logical_tokens += num_tokens
        published = min(table.num_published, num_tokens // self.block_size)
        return BlockTable(block_ids, num_tokens, published)

    def last_entry(self, table: BlockTable, num_tokens: int) -> Entry | None:
        """The entry of the last full block among the first `num_tokens` tokens, if published."""
        full = min(table.num_published, num_tokens // self.block_size)
        return self.cache.entry_of(table.block_ids[full - 1]) if full else None

    def match(
        self,
        table: BlockTable,
        namespace: str | None,
        block_tokens: BlockTokens,
        limit: int,
        hint: Entry | None = None,
    ) -> Entry | None:
        """Continue `table` with cached blocks, up to `limit` blocks in all; the last one's entry.

        Finding and pinning are one move. A partial last block is dropped when the cache has it in
        full. `hint` is an entry that an earlier look-up for the same tokens returned.
        """
        full = table.num_tokens // self.block_size
        if not self.has_cache or table.num_published < full:
            return None
        start = self.last_entry(table, table.num_tokens)
        if hint is not None and hint.is_live and hint.depth > full:
            start = hint
        entry = self.cache.find(namespace, start, block_tokens, limit)
        if entry is None or entry.depth <= full:
            return entry
        pinned = self.cache.pin(entry, full)
        self.pool.release(table.block_ids[full:])
        table.block_ids[full:] = pinned
        self._set_length(table, entry.depth * self.block_size)
        table.num_published = entry.depth
        return entry

    def extend(self, table: BlockTable, end: int) -> Copy | None:
        """Give `table` blocks up to `end` tokens, those from its length on to be written by it.

        A partial block that anybody else holds, or that is published, is replaced by a new one
        and must be copied. Evicts idle blocks when too few are free.

        Raises:
            OutOfBlocksError: too few blocks are free or idle; nothing has changed.
        """
        pool, block_ids = self.pool, table.block_ids
        at = table.num_tokens // self.block_size
        must_copy = not self.is_writable(table)
        count = max(0, self.blocks_for(end) - len(block_ids)) + must_copy
        if not count:
            return None
        if pool.num_free < count <= self.num_available:
            self.cache.evict(count - pool.num_free)
        fresh = pool.allocate(count)
        if not must_copy:
            block_ids.extend(fresh)
            return None
        src, block_ids[at] = block_ids[at], fresh[0]
        block_ids.extend(fresh[1:])
        return Copy(src, fresh[0], table.num_tokens % self.block_size)

    def is_writable(self, table: BlockTable) -> bool:
        """Whether the slot after the last token may be written without a copy."""
        at = table.num_tokens // self.block_size
        if at >= len(table.block_ids):
            return True
        block = table.block_ids[at]
        return self.pool.ref_counts[block] == 1 and not self.pool.is_retained[block]

    def commit(
        self, table: BlockTable, end: int, namespace: str | None, block_tokens: BlockTokens
    ) -> bool:
        """The slots up to `end` are written: publish the full blocks.

        Where an equal block was published before, the table switches to it and gives up its own.
        Returns whether that happened.
        """
        size, pool = self.block_size, self.pool
        for at in range(table.num_tokens // size, self.blocks_for(end)):
            pool.fill(table.block_ids[at], min(size, end - at * size))
        self._set_length(table, end)
        if not self.has_cache or end // size <= table.num_published:
            return False
        return self._publish(table, namespace, block_tokens)

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Give up what lies behind the first `num_tokens` tokens."""
        kept = self.blocks_for(num_tokens)
        self.pool.release(table.block_ids[kept:])
        del table.block_ids[kept:]
        self._set_length(table, num_tokens)
        table.num_published = min(table.num_published, num_tokens // self.block_size)

    def release(self, table: BlockTable) -> None:
        """Give up all blocks; the table is empty after it."""
        self.truncate(table, 0)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Withdraw these blocks, which no table holds, for good; the cache is emptied first."""
        self.cache.evict(self.pool.num_idle)
        self.pool.quarantine(block_ids)

    def check(self, tables: Iterable[BlockTable], pinned: Iterable[int] = ()) -> None:
        """Verify every invariant from scratch, given all tables and the copies' sources."""
        tables = list(tables)
        self.pool.check([*(table.block_ids for table in tables), *([src] for src in pinned)])
        self.cache.check()
        logical = sum(table.num_tokens for table in tables)
        assert self.logical_tokens == logical, f"{self.logical_tokens} tokens are counted: {tables}"
        for table in tables:
            full = table.num_tokens // self.block_size
            assert len(table.block_ids) == self.blocks_for(table.num_tokens), f"length: {table}"
            assert table.num_published == (full if self.has_cache else 0), f"unpublished: {table}"
            parent = None
            for block in table.block_ids[: table.num_published]:
                entry = self.cache.entry_of(block)
                assert entry.parent is parent, f"block {block} of a table is not its chain's next"
                parent = entry
            for at, block in enumerate(table.block_ids):
                needed = min(self.block_size, table.num_tokens - at * self.block_size)
                is_filled = needed <= self.pool.filled_slots[block]
                assert is_filled, f"block {block} is not filled to slot {needed} of {table}"

    def _set_length(self, table: BlockTable, num_tokens: int) -> None:
        self.logical_tokens += num_tokens - table.num_tokens
        table.num_tokens = num_tokens

    def _publish(self, table: BlockTable, namespace: str | None, block_tokens: BlockTokens) -> bool:
        switched = False
        parent = self.last_entry(table, table.num_tokens)
        for at in range(table.num_published, table.num_tokens // self.block_size):
            block = table.block_ids[at]
            parent = self.cache.publish(namespace, parent, block_tokens(at), block)
            if parent.block != block:
                self.pool.share([parent.block])
                table.block_ids[at] = parent.block
                self.pool.release([block])
                switched = True
            table.num_published = at + 1
        return switched
