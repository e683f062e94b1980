"""Which full block holds the KV of which tokens after which prefix, in which namespace.

Owns the index of published blocks; the pool owns who holds them. Knows tokens only as opaque,
comparable keys of one block each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from .block_pool import BlockPool

HashFn = Callable[[tuple[Hashable, ...]], int]
BlockTokens = Callable[[int], bytes]


class Entry:
    """One published block. A chain of parents ends at the first block of a conversation.

    `depth` counts the blocks of the chain. A live entry's parents are all live, since only entries
    without children are evicted.
    """

    __slots__ = ("block", "depth", "is_live", "key", "num_children", "parent", "serial")

    def __init__(
        self, key: tuple[Hashable, ...], serial: int, block: int, parent: Entry | None
    ) -> None:
        self.key: tuple[Hashable, ...] = key
        self.serial: int = serial
        self.block: int = block
        self.parent: Entry | None = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.num_children: int = 0
        self.is_live: bool = True


class PrefixCache:
    """Index of published blocks. A hit compares namespace, parent and tokens, never a hash alone.

    Every holder of a child block holds its parents too, and gives them up in order from the last.
    So the least recently used idle block never has a child, and evicting it orphans nothing.
    """

    def __init__(self, pool: BlockPool, hash_fn: HashFn = hash) -> None:
        self.num_evictions: int = 0
        self._pool = pool
        self._hash = hash_fn
        self._buckets: dict[int, list[Entry]] = {}
        self._by_block: dict[int, Entry] = {}
        self._next_serial = 1

    def __len__(self) -> int:
        return len(self._by_block)

    def entry_of(self, block: int) -> Entry:
        """The entry of a published block."""
        return self._by_block[block]

    def key_after(
        self, namespace: str | None, parent: Entry | None, tokens: bytes
    ) -> tuple[Hashable, ...]:
        """Identity of the block that holds `tokens` right after `parent`."""
        return (namespace, 0 if parent is None else parent.serial, tokens)

    def find(
        self, namespace: str | None, start: Entry | None, block_tokens: BlockTokens, limit: int
    ) -> Entry | None:
        """The deepest entry, at most `limit` blocks deep, whose chain holds these tokens.

        `block_tokens(i)` gives the tokens of block i. `start`, which may have been evicted or lie
        deeper, is an entry of the same conversation to begin at. Pins nothing: the answer holds
        until the next operation on the pool.
        """
        while start is not None and not (start.is_live and start.depth <= limit):
            start = start.parent
        entry = start
        depth = 0 if entry is None else entry.depth
        while depth < limit:
            child = self._lookup(self.key_after(namespace, entry, block_tokens(depth)))
            if child is None:
                break
            entry, depth = child, depth + 1
        return entry

    def pin(self, entry: Entry, depth: int) -> list[int]:
        """Share the blocks of `entry`'s chain after its first `depth` ones, and return them."""
        block_ids = []
        at: Entry | None = entry
        while at is not None and at.depth > depth:
            assert at.is_live, "an evicted entry is pinned"
            block_ids.append(at.block)
            at = at.parent
        block_ids.reverse()
        self._pool.share(block_ids)
        return block_ids

    def publish(
        self, namespace: str | None, parent: Entry | None, tokens: bytes, block: int
    ) -> Entry:
        """Enter a full block in use; if an equal entry exists already, return that one instead."""
        key = self.key_after(namespace, parent, tokens)
        known = self._lookup(key)
        if known is not None:
            return known
        entry = Entry(key, self._next_serial, block, parent)
        self._next_serial += 1
        self._pool.retain(block)
        self._buckets.setdefault(self._hash(key), []).append(entry)
        self._by_block[block] = entry
        if parent is not None:
            parent.num_children += 1
        return entry

    def evict(self, count: int) -> int:
        """Free up to `count` idle blocks, the least recently used first; how many it freed."""
        count = min(count, self._pool.num_idle)
        for _ in range(count):
            entry = self._by_block.pop(self._pool.forget_idle())
            assert not entry.num_children, f"block {entry.block} is evicted before its children"
            self._remove(entry)
        self.num_evictions += count
        return count

    def check(self) -> None:
        """Verify the index against the pool from scratch."""
        entries = [entry for bucket in self._buckets.values() for entry in bucket]
        assert len(entries) == len(self._by_block), "an entry is listed twice or not at all"
        assert len({entry.key for entry in entries}) == len(entries), "two entries are equal"
        for value, bucket in self._buckets.items():
            assert bucket, "a bucket is empty"
            is_own = all(self._hash(entry.key) == value for entry in bucket)
            assert is_own, "an entry is listed under another's hash"
        retained = {b for b in range(self._pool.num_blocks) if self._pool.is_retained[b]}
        assert retained == set(self._by_block), "retained blocks are not the published ones"
        idle_since = {block: at for at, block in enumerate(self._pool.idle_order())}
        children = dict.fromkeys(self._by_block, 0)
        for block, entry in self._by_block.items():
            assert entry.is_live, f"block {block} has an evicted entry"
            assert entry.block == block, f"block {block} is listed under {entry.block}"
            parent = entry.parent
            serial = 0 if parent is None else parent.serial
            assert entry.key[1] == serial, f"block {block} is not keyed by its parent"
            if parent is None:
                continue
            assert self._by_block.get(parent.block) is parent, f"block {block} is an orphan"
            assert entry.key[0] == parent.key[0], f"block {block} left its namespace"
            children[parent.block] += 1
            if parent.block in idle_since:
                assert block in idle_since, f"block {block} is in use and its parent is not"
                assert idle_since[block] < idle_since[parent.block], f"{block} outlives its parent"
        counted = {block: entry.num_children for block, entry in self._by_block.items()}
        assert counted == children, f"children are miscounted: {counted}, not {children}"

    def _lookup(self, key: tuple[Hashable, ...]) -> Entry | None:
        for entry in self._buckets.get(self._hash(key), ()):
            if entry.key == key:
                return entry
        return None

    def _remove(self, entry: Entry) -> None:
        value = self._hash(entry.key)
        bucket = self._buckets[value]
        bucket.remove(entry)
        if not bucket:
            del self._buckets[value]
        entry.is_live = False
        if entry.parent is not None:
            entry.parent.num_children -= 1
