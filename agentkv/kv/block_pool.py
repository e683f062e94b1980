"""Reference-counted KV blocks.

Owns which block is free, in use, idle (kept by the prefix cache and held by nobody) or quarantined,
and how many slots of each are filled. Knows nothing about tensors, tokens or sequences.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from ..errors import OutOfBlocksError


class BlockPool:
    """Blocks 0..num_blocks-1, each in exactly one of the four states.

    A holder owns one reference to each distinct block that it names. Misuse that only a bug of this
    package can cause fails an assertion and changes nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: list[int] = [0] * num_blocks
        self.is_retained: bytearray = bytearray(num_blocks)
        self.filled_slots: list[int] = [0] * num_blocks
        self.used_slots: int = 0
        self._free = deque(range(num_blocks))
        # In the order of their last release: the least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated at once."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that the prefix cache keeps and nobody holds."""
        return len(self._idle)

    @property
    def num_quarantined(self) -> int:
        """Blocks that a step which never returned may still write."""
        return len(self._quarantined)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_free - self.num_idle - self.num_quarantined

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference and no filled slot; all or none.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        block_ids = [self._free.popleft() for _ in range(count)]
        for block in block_ids:
            self.ref_counts[block] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of these blocks, which are in use or idle."""
        ref_counts, idle = self.ref_counts, self._idle
        for block in block_ids:
            if not ref_counts[block]:
                assert block in idle, f"block {block} is shared while free or quarantined"
                del idle[block]
                self.used_slots += self.filled_slots[block]
            ref_counts[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each of these blocks, the last first.

        A retained block without a holder goes idle, later blocks as less recently used than
        earlier ones; another becomes free.
        """
        ref_counts = self.ref_counts
        for block in reversed(block_ids):
            assert ref_counts[block] > 0, f"block {block} is released but nobody holds it"
            ref_counts[block] -= 1
            if not ref_counts[block]:
                self.used_slots -= self.filled_slots[block]
                if self.is_retained[block]:
                    self._idle[block] = None
                else:
                    self._make_free(block)

    def fill(self, block: int, slots: int) -> None:
        """Note that the first `slots` slots of a block in use are filled."""
        assert self.ref_counts[block] > 0, f"block {block} is filled but nobody holds it"
        self.used_slots += slots - self.filled_slots[block]
        self.filled_slots[block] = slots

    def retain(self, block: int) -> None:
        """Keep a block in use when its last holder goes: it is then idle, not free."""
        assert self.ref_counts[block] > 0, f"block {block} is retained but nobody holds it"
        self.is_retained[block] = 1

    def forget_idle(self) -> int:
        """Free the least recently used idle block and return it."""
        block, _ = self._idle.popitem(last=False)
        self.is_retained[block] = 0
        self._make_free(block)
        return block

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Withdraw free blocks for good."""
        wanted = set(block_ids)
        assert wanted <= set(self._free), "only free blocks can be quarantined"
        self._free = deque(block for block in self._free if block not in wanted)
        self._quarantined |= wanted

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Verify every state from scratch, given the blocks that each holder names."""
        free, idle = list(self._free), list(self._idle)
        counts = Counter[int]()
        for block_ids in holders:
            assert len(set(block_ids)) == len(block_ids), f"a holder repeats a block: {block_ids}"
            counts.update(block_ids)
        sets = [set(free), set(idle), self._quarantined, set(counts)]
        assert len(free) == len(sets[0]), "the free queue repeats a block"
        assert sum(map(len, sets)) == self.num_blocks, f"states overlap or leak: {sets}"
        assert set().union(*sets) == set(range(self.num_blocks)), f"states leak blocks: {sets}"
        for block, count in enumerate(self.ref_counts):
            assert count == counts[block], f"block {block}: {count} counted, {counts[block]} held"
            kept = bool(self.is_retained[block])
            assert kept or block not in sets[1], f"idle block {block} is not retained"
            assert not kept or block in sets[1] | sets[3], f"free block {block} is retained"
        filled = sum(self.filled_slots[block] for block in counts)
        assert self.used_slots == filled, f"{self.used_slots} slots are counted, {filled} filled"

    def idle_order(self) -> list[int]:
        """Idle blocks, the least recently used first."""
        return list(self._idle)

    def _make_free(self, block: int) -> None:
        self.filled_slots[block] = 0
        self._free.append(block)
