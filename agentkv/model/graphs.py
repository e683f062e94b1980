"""Decode steps at a few fixed sizes, each recorded once and replayed.

A step of n rows runs as the smallest bucket of n rows or more: its ids, positions, slots and tiles
are written into buffers that stay where they are, and what was recorded over them runs again. The
rows behind the step's own are padding: they read no key and write to no block. A step that does not
fit is left to the caller, never cut short. How to record is a parameter (cuda_graphs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from agentkv_kernels.device_tiles import Capacity, DeviceTiles, unload
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.tiles import MAX_STEPS, TileShape
from torch import Tensor

__all__ = ["Capture", "CaptureError", "DecodeGraphs", "pack_inputs"]

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
Forward = Callable[[StepPlan, Tensor], Tensor]

# A step costs a GPU nearly the same up to a few hundred rows, so buckets may lie far apart.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Room for this many parts of a row's path, on average: shared runs, and its own tail.
_PARTS_PER_ROW = 8

_logger = logging.getLogger("agentkv")


class CaptureError(Exception):
    """A step could not be recorded; the device is none the worse for it."""


@dataclass(slots=True)
class _Bucket:
    """Buffers of one size, and what was recorded over them; `plan` is what they now hold."""

    inputs: Tensor  # int64 [3, size]: token ids, positions, slots
    tiles: dict[TileShape, DeviceTiles]
    plan: StepPlan | None = None
    replay: Replay | None = None


class DecodeGraphs:
    """Runs decode steps through what `capture` makes of `forward`.

    `forward` takes a plan and inputs as pack_inputs makes them, on `device`, and returns the logits
    after each token. `capture` takes a function over fixed buffers and returns one that computes
    the same again from what they hold then, into a tensor of its own. Buckets are recorded when
    they are first needed, for at most `max_rows` rows of at most `max_context` tokens.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        max_rows: int,
        max_context: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._capture: Capture | None = capture
        self._sizes = [*(size for size in BUCKETS if size < max_rows), min(max_rows, BUCKETS[-1])]
        self._max_context = max_context
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._device = device
        self._shapes: tuple[TileShape, ...] = ()
        self._buckets: dict[int, _Bucket] = {}

    def run(self, plan: StepPlan, token_ids: npt.NDArray[np.integer]) -> Tensor | None:
        """Logits [num_rows, vocab_size] of the step, overwritten by the next one.

        None: it is no decode step, or exceeds what the buffers hold, and is yet to be run.
        """
        num_rows = plan.num_rows
        if self._capture is None or plan.num_tokens != num_rows or num_rows > self._sizes[-1]:
            return None
        if not self._shapes:
            return self._learn(plan, token_ids)
        bucket = self._bucket(next(size for size in self._sizes if size >= num_rows))
        if not self._load(bucket, plan, token_ids):
            self._unload(plan)
            return None
        if bucket.replay is None:
            try:
                bucket.replay = self._capture(partial(self._run_bucket, bucket))
            except CaptureError as error:
                _logger.warning("decode steps are not recorded any more: %s", error)
                self._capture = None
                self._buckets.clear()
                self._unload(plan)
                return None
            assert set(plan.shapes) <= set(self._shapes), "a layer reads tiles it never read before"
        return bucket.replay()[:num_rows]

    def _learn(self, plan: StepPlan, token_ids: npt.NDArray[np.integer]) -> Tensor:
        """Run the step as it is, which shows what tiles the model's layers read."""
        inputs = torch.from_numpy(pack_inputs(plan, token_ids, plan.num_rows)).to(self._device)
        logits = self._forward(plan, inputs)
        self._shapes = plan.shapes
        return logits

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._buckets:
            tiles = {s: DeviceTiles(self._capacity(size, s), self._device) for s in self._shapes}
            inputs = torch.zeros(3, size, dtype=torch.int64, device=self._device)
            self._buckets[size] = _Bucket(inputs, tiles)
        return self._buckets[size]

    def _load(self, bucket: _Bucket, plan: StepPlan, token_ids: npt.NDArray[np.integer]) -> bool:
        """Make the bucket's buffers hold the step; False, and nothing done, if it does not fit."""
        tiles = [(buffers, plan.tile_set(shape)) for shape, buffers in bucket.tiles.items()]
        if not all(buffers.fits(tile_set) for buffers, tile_set in tiles):
            return False
        for buffers, tile_set in tiles:
            buffers.load(tile_set)
        packed = pack_inputs(plan, token_ids, bucket.inputs.shape[1])
        bucket.inputs.copy_(torch.from_numpy(packed), non_blocking=True)
        bucket.plan = plan
        return True

    def _unload(self, plan: StepPlan) -> None:
        """Steps that are run as they are need tiles of just their size."""
        for shape in self._shapes:
            unload(plan.tile_set(shape))

    def _run_bucket(self, bucket: _Bucket) -> Tensor:
        assert bucket.plan is not None
        return self._forward(bucket.plan, bucket.inputs)

    def _capacity(self, size: int, shape: TileShape) -> Capacity:
        """Room for `size` rows over any usual tree."""
        parts = size * (_PARTS_PER_ROW + self._max_context // shape.max_chunk)
        # Chunks of parts that are cut to keep all workers busy: tiles.py aims at two a worker.
        chunks = -(-2 * shape.workers // shape.num_kv_heads)
        slots = parts + chunks * min(max(1, shape.wide_rows // shape.group), size)
        spare = MAX_STEPS // self._block_size + 2
        blocks = size * -(-self._max_context // self._block_size)
        return Capacity(
            tokens=size,
            wide=parts + chunks,
            narrow=parts + chunks,
            prefill=0,
            rows=2 * _PARTS_PER_ROW * size,
            blocks=min(blocks, 4 * self._num_blocks) + size * spare,
            merges=slots + size,
            slots=slots,
        )


def pack_inputs(
    plan: StepPlan, token_ids: npt.NDArray[np.integer], size: int
) -> npt.NDArray[np.int64]:
    """Token ids, positions and slots of the plan's tokens and `size` less them of padding."""
    packed = np.zeros((3, size), np.int64)
    packed[2] = -1  # a slot that is not written
    packed[0, : plan.num_tokens] = token_ids
    packed[1, : plan.num_tokens] = plan.positions
    packed[2, : plan.num_tokens] = plan.slot_mapping
    return packed
