"""A tile set in device memory, where kernels read it.

Owns buffers of fixed capacity, so that launches captured in a CUDA graph serve any tree that fits:
grids are fixed, and how many tiles there are is data. Uploads only what changed since the last
step. Knows nothing about attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tiles import IntArray, TileSet

# Where a device's counts are, in its int32[4]: tiles of each kind, then the set's delta.
NUM_WIDE, NUM_NARROW, NUM_PREFILL, DELTA = range(4)
# Under which names a tile set's scratch has its buffers, and the mark they know it by.
_SCRATCH, _HELD = "device", "held"


class Capacity(NamedTuple):
    """How much fits: query tokens, tiles of each kind, and entries of each list."""

    tokens: int
    wide: int
    narrow: int
    prefill: int
    rows: int
    blocks: int
    merges: int
    slots: int

    @classmethod
    def of(cls, tiles: TileSet) -> Capacity:
        """What a tile set needs."""
        return cls(
            tokens=len(tiles.m_ptr) - 1,
            wide=len(tiles.wide),
            narrow=len(tiles.narrow),
            prefill=len(tiles.prefill),
            rows=len(tiles.rows),
            blocks=len(tiles.blk),
            merges=len(tiles.m_slot),
            slots=tiles.num_slots,
        )


class DeviceTiles:
    """Buffers on `device` that hold one tile set at a time.

    `wide`, `narrow`, `prefill` are int32 [n, 8] as in tiles.py, `rows`, `blk`, `m_ptr`, `m_slot`
    int32 lists, `counts` int32[4]. Query tokens beyond those of the tile set are padding: they
    merge no slot, so their output is zero. The buffers stay where they are for their whole life.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        def allocate(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.capacity = capacity
        self.wide = allocate(capacity.wide, 8)
        self.narrow = allocate(capacity.narrow, 8)
        self.prefill = allocate(capacity.prefill, 8)
        self.rows = allocate(capacity.rows)
        self.blk = allocate(capacity.blocks)
        self.m_ptr = allocate(capacity.tokens + 1)
        self.m_slot = allocate(capacity.merges)
        self.counts = allocate(4)
        # The merge also zeroes padding, so buffers that serve many tile sets always run it.
        self.needs_merge = True
        # What marks the tile set they hold. Not the tile set itself, which refers to its buffers:
        # device memory would wait for the garbage collector.
        self._held: object = None
        self._delta = -1
        self._arena: IntArray = np.zeros(0, np.int32)

    def fits(self, tiles: TileSet) -> bool:
        """Whether nothing of `tiles` exceeds the capacity. If not, launch without these buffers."""
        needs = zip(Capacity.of(tiles), self.capacity, strict=True)
        return all(need <= capacity for need, capacity in needs)

    def load(self, tiles: TileSet) -> None:
        """Make the buffers hold `tiles` at its present delta, and attention over it use them.

        Must be called again after each step that moved the tile set on. ValueError if it does not
        fit: a truncated tile set would give wrong results.
        """
        if not self.fits(tiles):
            raise ValueError(f"{Capacity.of(tiles)} exceeds {self.capacity}")
        tiles.scratch[_SCRATCH] = self
        if self._held is None or tiles.scratch.get(_HELD) is not self._held:
            self._upload(tiles)
            self._held = tiles.scratch[_HELD] = object()
        elif self._delta == tiles.delta:
            return
        elif not np.array_equal(tiles.blk, self._arena):
            self._upload_arena(tiles)
        kinds = tiles.wide, tiles.narrow, tiles.prefill
        _copy(self.counts, np.array([*map(len, kinds), tiles.delta], np.int32))
        self._delta = tiles.delta

    def _upload(self, tiles: TileSet) -> None:
        _copy(self.wide, tiles.wide)
        _copy(self.narrow, tiles.narrow)
        # Longest first: a prefill tile reads the more keys the later its tokens are.
        _copy(self.prefill, tiles.prefill[::-1])
        _copy(self.rows, tiles.rows)
        _copy(self.m_slot, tiles.m_slot)
        padding = self.capacity.tokens + 1 - len(tiles.m_ptr)
        _copy(self.m_ptr, np.concatenate([tiles.m_ptr, np.repeat(tiles.m_ptr[-1:], padding)]))
        self._upload_arena(tiles)

    def _upload_arena(self, tiles: TileSet) -> None:
        _copy(self.blk, tiles.blk)
        self._arena = tiles.blk.copy()


def on_device(tiles: TileSet, device: torch.device) -> DeviceTiles:
    """The buffers that hold `tiles`, as last loaded; of just its size where there are none yet."""
    found = tiles.scratch.get(_SCRATCH)
    if not isinstance(found, DeviceTiles):
        found = DeviceTiles(Capacity.of(tiles), device)
        found.needs_merge = tiles.num_slots > 0 or len(tiles.m_slot) < found.capacity.tokens
    found.load(tiles)
    return found


def unload(tiles: TileSet) -> None:
    """Let attention over `tiles` use buffers of just its size again."""
    tiles.scratch.pop(_SCRATCH, None)


def _copy(buffer: Tensor, content: IntArray) -> None:
    # From pageable memory: the driver has read it when the call returns, so it may change at once.
    if len(content):
        buffer[: len(content)].copy_(torch.from_numpy(content.copy()), non_blocking=True)
