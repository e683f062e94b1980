"""Which block a sequence needs next, by content, so that no two compute it in one step.

Pure look-ups in the prefix cache: nothing is pinned and nothing is stored but a hint.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..kv.memory import KVMemory
from ..kv.prefix_cache import Entry
from .working import Sequence


def next_of_running(memory: KVMemory, sequence: Sequence) -> Hashable | None:
    """The content of the block that a running sequence computes next.

    None where waiting for another sequence to compute it would spare nothing.
    """
    table = sequence.table
    assert table is not None, "a running sequence has a table"
    return _content_after(memory, sequence, memory.last_entry(table, table.num_tokens))


def next_of_waiting(memory: KVMemory, sequence: Sequence) -> Hashable | None:
    """The content of the block that a waiting sequence would compute first if it started now."""
    if not memory.has_cache:
        return None
    request, limit = sequence.request, sequence.reuse_limit
    base = request.snapshot.table
    start = sequence.hint
    while start is not None and not start.is_live:
        start = start.parent
    if base is not None:
        known = memory.last_entry(base, min(base.num_tokens, request.keep, limit))
        if known is not None and (start is None or start.depth < known.depth):
            start = known
    sequence.hint = memory.cache.find(
        request.namespace, start, sequence.block_tokens, limit // memory.block_size
    )
    return _content_after(memory, sequence, sequence.hint)


def _content_after(memory: KVMemory, sequence: Sequence, entry: Entry | None) -> Hashable | None:
    index = 0 if entry is None else entry.depth
    if not memory.has_cache or (index + 1) * memory.block_size > sequence.reuse_limit:
        return None
    tokens = sequence.block_tokens(index)
    return memory.cache.key_after(sequence.request.namespace, entry, tokens)
