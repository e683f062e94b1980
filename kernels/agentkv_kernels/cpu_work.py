"""What the CPU reads for the tiles of a step, as indices that are the same for all layers.

Shared runs, prefill chunks and batches of private tails each give partial results; the partial
results are numbered in the order in which they are made, and merged by number. Knows nothing about
heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu_tails import Tails, batch_tails, spans
from .tiles import (
    BLK0,
    DIAGONAL,
    FLAGS,
    NUM_ROWS,
    ROW0,
    SLIDES,
    IntArray,
    LongArray,
    TileSet,
)

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


class Merge(NamedTuple):
    """Tokens with equally many partial results, and the numbers of these."""

    tokens: Tensor  # [m]
    partials: Tensor  # [m, count]


class StepWork:
    """All there is to do for the tiles of a step.

    The partial results are numbered along `runs`, `chunks` and `tails`; `is_complete` if every
    query token has one. A batch of tails holds at most `max_gathered` keys, or one tail.
    """

    def __init__(
        self,
        tiles: TileSet,
        block_size: int,
        window: int | None,
        *,
        zero_block: int,
        max_gathered: int,
    ) -> None:
        self._tiles = tiles
        self._block_size = block_size
        self._window = window
        self._zero_block = zero_block
        self._max_gathered = max_gathered
        self._delta = tiles.delta
        self.runs: list[Run] = []
        self._make()

    def follow(self) -> None:
        """Move to the step that the tiles are at."""
        steps = self._tiles.delta - self._delta
        if steps == 0:
            return
        num_runs = len(self.runs)
        # The keys of other runs stay the same.
        if (self._tiles.wide[:, FLAGS] & SLIDES).any():
            self.runs = self._make_runs()
        is_same = steps == 1 and len(self.runs) == num_runs
        if not is_same or not all(tails.advance() for tails in self.tails):
            self._make()
        self._delta = self._tiles.delta

    def _make_runs(self) -> list[Run]:
        runs = (_run(tile, self._tiles, self._block_size) for tile in self._tiles.wide)
        return [run for run in runs if run is not None]

    def _make(self) -> None:
        tiles, size = self._tiles, self._block_size
        self.runs = self._make_runs()
        self.chunks: list[Chunk] = [
            _chunk(tile, tiles, size, self._window) for tile in tiles.prefill
        ]
        self.tails: list[Tails] = list(
            batch_tails(tiles, size, zero_block=self._zero_block, max_gathered=self._max_gathered)
        )
        tokens = np.concatenate([np.zeros(0, np.int64), *self._tokens()])
        num_tokens = len(tiles.m_ptr) - 1
        self.merges: list[Merge] = _merges(tokens, num_tokens)
        self.is_complete: bool = sum(len(m.tokens) for m in self.merges) == num_tokens

    def _tokens(self) -> Iterator[LongArray]:
        """The tokens of each partial result, as they are numbered."""
        for run in self.runs:
            yield run.rows.numpy()
        for chunk in self.chunks:
            for band in chunk.bands:
                yield np.arange(chunk.rows.start + band.begin, chunk.rows.start + band.end)
        for tails in self.tails:
            yield tails.rows.numpy()


def step_work(
    tiles: TileSet, block_size: int, window: int | None, *, zero_block: int, max_gathered: int
) -> StepWork:
    """The work of the tiles, made on first use, moved on with them, and kept in the tile set."""
    work = tiles.scratch.get("cpu")
    if isinstance(work, StepWork):
        work.follow()
        return work
    work = StepWork(tiles, block_size, window, zero_block=zero_block, max_gathered=max_gathered)
    tiles.scratch["cpu"] = work
    return work


def _keys(tile: IntArray, tiles: TileSet, block_size: int) -> Keys:
    first, end = (int(x) for x in spans(tile, tiles.delta))
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


def _window_bands(num_rows: int, diagonal: int, length: int, window: int) -> Iterator[Band]:
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
