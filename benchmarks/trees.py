"""The trees of sessions that attention is measured on: decode rows over shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentkv_kernels.scenario import Scenario, TreeSegment

__all__ = ["BLOCK_SIZE", "Shape", "make_tree"]

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Heads of one layer, and a tree of sessions.

    `heads` is query heads, KV heads and their size. Every row has `shared` tokens on its path and
    `own` behind them. The path is cut into `depth` segments of equal length: all rows read the
    first, halves of them the second, quarters the third. With `is_skewed`, the first three
    quarters of the rows read the second, the first half the third, and the others end before.
    """

    heads: tuple[int, int, int]
    rows: int
    shared: int
    own: int
    depth: int = 1
    is_skewed: bool = False


def make_tree(shape: Shape) -> Scenario:
    """One decode step of the shape's rows, prefixes in blocks that are neighbours."""
    tables: list[list[int]] = [[] for _ in range(shape.rows)]
    segments: list[TreeSegment] = []
    parents: list[int | None] = [None] * shape.rows
    num_blocks = 0
    count = shape.shared // BLOCK_SIZE // shape.depth
    for level in range(shape.depth):
        for rows in _groups(shape, level):
            blocks = list(range(num_blocks, num_blocks + count))
            num_blocks += count
            start = len(tables[rows[0]]) * BLOCK_SIZE
            if len(rows) > 1:
                parent = parents[rows[0]]
                segments.append(TreeSegment(parent, start, tuple(blocks), tuple(rows)))
            for row in rows:
                tables[row] += blocks
                parents[row] = len(segments) - 1 if len(rows) > 1 else None
    lengths = [len(table) * BLOCK_SIZE + shape.own for table in tables]
    for table in tables:
        each = -(-shape.own // BLOCK_SIZE)
        table += range(num_blocks, num_blocks + each)
        num_blocks += each
    return Scenario(BLOCK_SIZE, [1] * shape.rows, lengths, tables, segments, num_blocks)


def _groups(shape: Shape, level: int) -> Sequence[Sequence[int]]:
    """The rows of each segment of a level; a group of one row shares nothing."""
    if shape.is_skewed:
        return [range(max(1, shape.rows * (4 - level) // 4))]
    size = max(1, shape.rows >> level)
    return [range(start, start + size) for start in range(0, shape.rows, size)]
