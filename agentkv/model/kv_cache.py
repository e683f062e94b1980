"""The tensors that hold K and V of every block, one pair a layer.

Sized from the shapes each layer showed in the probe, since heads and head sizes may differ by layer
and K may be wider than V. Knows nothing about which block holds what.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from agentkv_kernels import launch
from torch import Tensor

from ..config import EngineConfig
from ..core.batch import BlockCopy
from ..errors import ModelError
from .compatibility import LayerSpec

_CPU_SHARE, _CPU_MOST_BYTES = 0.25, 2 << 30
_UNKNOWN_BYTES = 16 << 30
_GPU_SHARE = 0.8  # of the memory that is free once the weights are loaded; the rest runs the model


class KVCache:
    """K and V of all layers: `layers[i]` is (keys, values) of layer i, each indexed by block first.

    Two blocks beyond `num_blocks` belong to the kernels.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

        def allocate(num_heads: int, head_dim: int) -> Tensor:
            return launch.allocate_cache(num_blocks, num_heads, block_size, head_dim, dtype, device)

        size = num_blocks * bytes_per_block(specs, block_size, dtype)
        try:
            _check_fits(size, device)
            self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
                (allocate(s.num_kv_heads, s.key_dim), allocate(s.num_kv_heads, s.value_dim))
                for s in specs
            )
        except (RuntimeError, MemoryError) as error:  # RuntimeError: torch's out-of-memory errors
            raise ModelError(
                f"{num_blocks} KV blocks take {size} bytes, which could not be allocated; "
                "lower num_blocks or kv_memory_bytes"
            ) from error

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the named slots between blocks, in all layers."""
        launch.copy_blocks([cache for layer in self.layers for cache in layer], copies)

    def release(self) -> None:
        """Give the memory back. Idempotent; nothing else may be called afterwards."""
        self.layers = ()


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one block, all layers together."""
    elements = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in specs)
    return elements * block_size * dtype.itemsize


def choose_num_blocks(
    config: EngineConfig, *, block_bytes: int, max_context: int, device: torch.device
) -> int:
    """How many blocks to allocate: as configured, else what memory allows and use can fill.

    Raises:
        ModelError: `kv_memory_bytes` holds no block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_memory_bytes is not None:
        if config.kv_memory_bytes < block_bytes:
            raise ModelError(
                f"kv_memory_bytes={config.kv_memory_bytes} holds no block; "
                f"one block of this model takes {block_bytes} bytes"
            )
        return config.kv_memory_bytes // block_bytes
    blocks_per_sequence = -(-max_context // config.block_size)
    most_useful = config.max_num_seqs * blocks_per_sequence
    return max(1, min(available_bytes(device) // block_bytes, most_useful))


def available_bytes(device: torch.device) -> int:
    """Memory that KV may take by default on `device`."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _GPU_SHARE)
    free_bytes = min(_free_of_machine(), _free_of_container())
    return min(int(free_bytes * _CPU_SHARE), _CPU_MOST_BYTES)


def _check_fits(size: int, device: torch.device) -> None:
    # Where the system overcommits, the allocation would succeed and its use would kill the process.
    if device.type == "cpu" and size > _free_of_machine():
        raise MemoryError(f"the machine has less free memory than {size} bytes")


def _free_of_machine() -> int:
    """Free bytes, counting caches that the system would give up; plenty where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _UNKNOWN_BYTES
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else _UNKNOWN_BYTES


def _free_of_container() -> int:
    """Bytes left under the memory limit of a container (cgroup v2); plenty without a limit."""
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return max(0, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # ValueError: the limit is "max"
        return _UNKNOWN_BYTES
