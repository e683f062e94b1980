"""One holder's ordered KV blocks.

A table names blocks; the pool counts its references. Knows nothing about tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one snapshot or sequence, holding one reference to each.

    `num_tokens` slots are filled, from the first on; only the last filled block may be partly so.
    The first `num_published` blocks are in the prefix cache, chained to each other. Between steps
    `block_ids` has exactly as many blocks as `num_tokens` needs.
    """

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_published: int = 0
