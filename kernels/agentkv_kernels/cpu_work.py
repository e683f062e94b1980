"""What the CPU reads for the tiles of a step, as indices that are the same for all layers.

Shared runs, prefill chunks and batches of private tails each give partial results; the partial
results are numbered in the order in which they are made, and merged by number. Worked out once a
step and kept in the tile set. Knows nothing about heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tiles import (
    BLK0,
    DIAGONAL,
    FLAGS,
    GROWS,
    KV_LEN,
    KV_OFF,
    NUM_ROWS,
    ROW0,
    SLIDES,
    IntArray,
    LongArray,
    TileSet,
)

# Tails share a batch while the longest has at most this many times the blocks of the shortest.
_BATCH_RATIO = 1.5
# Rows of a windowed prefill chunk that are computed together: more read keys beyond their windows.
_BAND_ROWS = 64


class Keys(NamedTuple):
    """Keys [first, first + length) of `blocks`, a slice where they are neighbours in the cache."""

    blocks: Tensor | slice
    first: int
    length: int


class Run(NamedTuple):
    """Keys that all the query tokens `rows` see."""

    rows: Tensor
    keys: Keys


class Band(NamedTuple):
    """Query tokens [begin, end) of a chunk against keys [low, high) of it.

    Token i sees key j unless `hidden` [end - begin, high - low] is -inf there, all of them if it is
    None. If `is_causal` the tokens are the keys, and token i sees those up to itself.
    """

    begin: int
    end: int
    low: int
    high: int
    hidden: Tensor | None
    is_causal: bool


class Chunk(NamedTuple):
    """The query tokens of one sequence's prefill, which follow one another, and their keys."""

    rows: slice
    keys: Keys
    bands: list[Band]


class Tails(NamedTuple):
    """Private keys of n decode tokens, padded to the same number of blocks."""

    rows: Tensor  # [n]
    blocks: Tensor  # [n x max_blocks], block ZERO where a tail has ended
    hidden: Tensor | None  # [n, max_blocks x block_size], -inf where a token sees no key
    unseen: Tensor  # hidden keys in blocks that also have seen keys, indexing all keys together


class Merge(NamedTuple):
    """Tokens with equally many partial results, and the numbers of these."""

    tokens: Tensor  # [m]
    partials: Tensor  # [m, count]


class StepWork(NamedTuple):
    """All there is to do. The partial results are numbered along `runs`, `chunks`, `tails`."""

    runs: list[Run]
    chunks: list[Chunk]
    tails: list[Tails]
    merges: list[Merge]
    is_complete: bool  # every query token has a partial result


def step_work(tiles: TileSet, block_size: int, zero_block: int, window: int | None) -> StepWork:
    """The work of the tiles at their present delta."""
    cached = tiles.scratch.get("cpu")
    if isinstance(cached, tuple) and cached[0] == tiles.delta:
        work: StepWork = cached[1]
        return work
    runs = [run for run in (_run(tile, tiles, block_size) for tile in tiles.wide) if run]
    chunks = [_chunk(tile, tiles, block_size, window) for tile in tiles.prefill]
    tails = list(_batch_tails(tiles, block_size, zero_block))
    tokens = [run.rows.numpy() for run in runs]
    tokens += [
        np.arange(chunk.rows.start + band.begin, chunk.rows.start + band.end)
        for chunk in chunks
        for band in chunk.bands
    ]
    tokens += [batch.rows.numpy() for batch in tails]
    num_tokens = len(tiles.m_ptr) - 1
    merges = _merges(np.concatenate(tokens) if tokens else np.zeros(0, np.int64), num_tokens)
    num_done = sum(len(merge.tokens) for merge in merges)
    work = StepWork(runs, chunks, tails, merges, num_done == num_tokens)
    tiles.scratch["cpu"] = tiles.delta, work
    return work


def _spans(tile: IntArray, delta: int) -> tuple[LongArray, LongArray]:
    """First key and end of tiles [n, 8], counted from their first block."""
    first = tile[..., KV_OFF].astype(np.int64) + delta * ((tile[..., FLAGS] & SLIDES) > 0)
    end = (tile[..., KV_OFF] + tile[..., KV_LEN]).astype(np.int64)
    end += delta * ((tile[..., FLAGS] & GROWS) > 0)
    return first, np.maximum(first, end)


def _keys(tile: IntArray, tiles: TileSet, block_size: int) -> Keys:
    first, end = (int(x) for x in _spans(tile, tiles.delta))
    skipped = first // block_size
    blocks = tiles.blk[tile[BLK0] + skipped : tile[BLK0] - (-end // block_size)].astype(np.int64)
    where: Tensor | slice = torch.from_numpy(blocks)
    if len(blocks) and (np.diff(blocks) == 1).all():
        where = slice(int(blocks[0]), int(blocks[-1]) + 1)
    return Keys(where, first - skipped * block_size, end - first)


def _run(tile: IntArray, tiles: TileSet, block_size: int) -> Run | None:
    """None for a run that a window has left behind: torch's kernel ends the process over no key."""
    keys = _keys(tile, tiles, block_size)
    if keys.length == 0:
        return None
    rows = tiles.rows[tile[ROW0] : tile[ROW0] + tile[NUM_ROWS]].astype(np.int64)
    return Run(torch.from_numpy(rows), keys)


def _chunk(tile: IntArray, tiles: TileSet, block_size: int, window: int | None) -> Chunk:
    keys = _keys(tile, tiles, block_size)
    num_rows, diagonal = int(tile[NUM_ROWS]), int(tile[DIAGONAL])
    first_row = int(tiles.rows[tile[ROW0]])
    if window is None or window >= diagonal + num_rows:
        bands = _causal_bands(num_rows, diagonal, keys.length)
    else:
        bands = list(_window_bands(num_rows, diagonal, keys.length, window))
    return Chunk(slice(first_row, first_row + num_rows), keys, bands)


def _causal_bands(num_rows: int, diagonal: int, length: int) -> list[Band]:
    """What precedes the chunk, for all its tokens, and the chunk itself."""
    before = min(diagonal, length)
    bands = [Band(0, num_rows, 0, before, None, False)] if before else []
    if length > before:
        assert length - before == num_rows, "a chunk's last keys are its own tokens"
        bands.append(Band(0, num_rows, before, length, None, True))
    return bands


def _window_bands(num_rows: int, diagonal: int, length: int, window: int) -> Iterable[Band]:
    for begin in range(0, num_rows, _BAND_ROWS):
        end = min(begin + _BAND_ROWS, num_rows)
        low, high = max(0, diagonal + begin - window + 1), min(length, diagonal + end)
        # A band of a run's keys may lose its last tokens to the window; they have none to see.
        end = min(end, high - 1 + window - diagonal)
        if low >= high or end <= begin:
            continue
        position = torch.arange(begin, end)[:, None] + diagonal
        key = torch.arange(low, high)
        is_hidden = (key > position) | (key <= position - window)
        hidden = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -math.inf)
        yield Band(begin, end, low, high, hidden, False)


def _batch_tails(tiles: TileSet, block_size: int, zero_block: int) -> Iterable[Tails]:
    first, end = _spans(tiles.narrow, tiles.delta)
    is_seen = end > first
    count = -(-end // block_size)
    order = np.argsort(-count, kind="stable")
    order = order[is_seen[order]]
    while len(order):
        is_near = count[order] * _BATCH_RATIO + 1 >= count[order[0]]
        chosen, order = order[is_near], order[~is_near]
        yield _tails(tiles, chosen, first[chosen], end[chosen], block_size, zero_block)


def _tails(
    tiles: TileSet,
    chosen: LongArray,
    first: LongArray,
    end: LongArray,
    block_size: int,
    zero_block: int,
) -> Tails:
    """One batch; keys are counted from each tail's first block."""
    count = -(-end // block_size)
    column = np.arange(int(count[0]))
    has_block = column < count[:, None]
    at = np.where(has_block, tiles.narrow[chosen, BLK0][:, None] + column, 0)
    blocks = np.where(has_block, tiles.blk[at], zero_block).astype(np.int64)
    key = np.arange(len(column) * block_size)
    is_hidden = (key < first[:, None]) | (key >= end[:, None])
    unseen = np.flatnonzero(is_hidden & np.repeat(has_block, block_size, axis=1))
    hidden = None
    if is_hidden.any():
        hidden = torch.from_numpy(np.where(is_hidden, np.float32(-math.inf), np.float32(0.0)))
    return Tails(
        torch.from_numpy(tiles.rows[tiles.narrow[chosen, ROW0]].astype(np.int64)),
        torch.from_numpy(blocks.reshape(-1)),
        hidden,
        torch.from_numpy(unseen),
    )


def _merges(tokens: LongArray, num_tokens: int) -> list[Merge]:
    """For each number of partial results: the tokens that have so many, in the order of tiles."""
    partials = np.argsort(tokens, kind="stable")
    counts = np.bincount(tokens, minlength=num_tokens)
    starts = np.cumsum(counts) - counts
    merges = []
    for count in np.unique(counts[counts > 0]).tolist():
        chosen = np.flatnonzero(counts == count)
        numbers = partials[starts[chosen][:, None] + np.arange(count)]
        # Not the order of the step: what is rounded together must not depend on it.
        order = np.argsort(numbers[:, 0])
        merges.append(Merge(torch.from_numpy(chosen[order]), torch.from_numpy(numbers[order])))
    return merges
