"""Batches of private tails on the CPU: decode tokens whose own keys are gathered together.

Owns which tails go together, and moves a batch on by one step without making it anew. Knows
nothing about heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .tiles import (
    BLK0,
    FLAGS,
    GROWS,
    KV_LEN,
    KV_OFF,
    ROW0,
    SLIDES,
    IntArray,
    LongArray,
    TileSet,
    ranges,
)

# Tails share a batch while the longest has at most this many times the blocks of the shortest.
_BATCH_RATIO = 1.5
# Steps after which a batch is made anew, so that it does not keep what its windows have left.
_MAX_STEPS = 32


def spans(tile: IntArray, delta: int) -> tuple[LongArray, LongArray]:
    """First key and end of tiles [..., 8], counted from their first block."""
    first = tile[..., KV_OFF].astype(np.int64) + delta * ((tile[..., FLAGS] & SLIDES) > 0)
    end = (tile[..., KV_OFF] + tile[..., KV_LEN]).astype(np.int64)
    end += delta * ((tile[..., FLAGS] & GROWS) > 0)
    return first, np.maximum(first, end)


class Tails:
    """Private keys of n decode tokens, padded to the same number of blocks, `most`.

    `rows` [n] are the tokens. `blocks` [n x most] has block ZERO where a tail has ended, `hidden`
    [n, most x block_size] is -inf where a token sees no key, and `unseen` indexes the hidden keys
    of blocks that also have seen ones, in all keys together.
    """

    def __init__(self, tiles: TileSet, chosen: LongArray, block_size: int, zero_block: int) -> None:
        self.rows: Tensor = torch.from_numpy(
            tiles.rows[tiles.narrow[chosen, ROW0]].astype(np.int64)
        )
        self._tiles = tiles
        self._chosen = chosen
        self._block_size = block_size
        self._zero_block = zero_block
        self._make()

    def advance(self) -> bool:
        """Follow the tiles to their next step; False if a tail has no keys left."""
        self._age += 1
        grows, slides = self._grows, self._slides
        end, first = self._end[grows], self._first[slides]
        if self._age > _MAX_STEPS or end.max(initial=0) >= self._hidden.shape[1]:
            self._make()
        else:
            self._hidden[grows, end] = 0.0
            self._hidden[slides, first] = -math.inf
            self._end[grows] += 1
            self._first[slides] += 1
            is_new = end % self._block_size == 0
            if is_new.any():
                self._open(grows[is_new], end[is_new] // self._block_size)
            self._find_unseen()
        return bool((self._first < self._end).all())

    def _make(self) -> None:
        tiles, size = self._tiles, self._block_size
        narrow = tiles.narrow[self._chosen]
        self._age = 0
        self._first, self._end = spans(narrow, tiles.delta)
        self._grows = np.flatnonzero(narrow[:, FLAGS] & GROWS)
        self._slides = np.flatnonzero(narrow[:, FLAGS] & SLIDES)
        self._skipped = self._first // size
        self._base = narrow[:, BLK0] + self._skipped
        self._first -= self._skipped * size
        self._end -= self._skipped * size
        count = -(-self._end // size)
        column = np.arange(int(count.max()))
        has_block = column < count[:, None]
        at = np.where(has_block, self._base[:, None] + column, 0)
        self._blocks = np.where(has_block, tiles.blk[at], self._zero_block).astype(np.int64)
        key = np.arange(len(column) * size)
        is_seen = (key >= self._first[:, None]) & (key < self._end[:, None])
        self._hidden: npt.NDArray[np.float32] = np.where(
            is_seen, np.float32(0.0), np.float32(-math.inf)
        )
        self.blocks: Tensor = torch.from_numpy(self._blocks).view(-1)
        self.hidden: Tensor = torch.from_numpy(self._hidden)
        self._find_unseen()

    def _open(self, tails: LongArray, index: LongArray) -> None:
        """Read the ids of the blocks that these tails open, and of the ones that have filled."""
        ids, at = self._tiles.blk, self._base[tails] + index
        self._blocks[tails, index] = ids[at]
        has_before = index > 0
        self._blocks[tails[has_before], index[has_before] - 1] = ids[at[has_before] - 1]

    def _find_unseen(self) -> None:
        start = np.arange(len(self._end)) * self._hidden.shape[1]
        behind = ranges(start + self._end, -self._end % self._block_size)
        self.unseen: Tensor = torch.from_numpy(np.concatenate([ranges(start, self._first), behind]))


def batch_tails(
    tiles: TileSet, block_size: int, *, zero_block: int, max_gathered: int
) -> Iterator[Tails]:
    """All narrow tiles, those of similar length together, at most `max_gathered` keys a batch."""
    first, end = spans(tiles.narrow, tiles.delta)
    count = -(-end // block_size)
    order = np.argsort(-count, kind="stable")
    order = order[first[order] < end[order]]
    while len(order):
        most = max(1, max_gathered // (int(count[order[0]]) * block_size))
        num_near = int((count[order] * _BATCH_RATIO + 1 >= count[order[0]]).sum())
        chosen, order = np.split(order, [min(most, num_near)])
        yield Tails(tiles, chosen, block_size, zero_block)
