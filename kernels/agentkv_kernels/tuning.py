"""How attention tiles are cut for each GPU: the one table of sizes, and why.

A tile has `block_m` packed rows (query tokens x query heads per KV head) and reads `block_n` keys
at a time. The sizes are those that published paged attention kernels start from (vLLM's and
SGLang's Triton backends, FlashAttention 2's tiles), made smaller where the compiler would spill
registers. Nothing here has been tuned on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One variant of the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The variants for one GPU and head size. A wide tile has at least the rows of a narrow one."""

    narrow: TileConfig
    wide: TileConfig
    prefill: TileConfig


_Sizes = tuple[int, int, int, int]


def _tuning(narrow: _Sizes, wide: _Sizes, prefill: _Sizes | None = None) -> Tuning:
    return Tuning(TileConfig(*narrow), TileConfig(*wide), TileConfig(*(prefill or wide)))


# By GPU and largest head dim, for 16-bit elements. Narrow tiles are bound by memory: few rows, deep
# pipeline. sm_80 has 164 KB of shared memory a multiprocessor against sm_90's 228 KB, hence a stage
# less. On sm_90 tiles of 128 rows spill. sm_100 wants 8 warps for a wide tile. CDNA 3 has 64 KB
# and waves of 64 threads: half the keys.
TUNINGS = {
    ("sm_80", 128): _tuning((16, 64, 4, 2), (64, 64, 4, 2)),
    ("sm_80", 256): _tuning((16, 32, 4, 2), (64, 32, 8, 2)),
    ("sm_80", 512): _tuning((16, 16, 8, 2), (32, 16, 8, 2)),
    ("sm_90", 128): _tuning((16, 64, 4, 3), (64, 64, 4, 3)),
    ("sm_90", 256): _tuning((16, 32, 4, 3), (64, 32, 8, 3)),
    ("sm_90", 512): _tuning((16, 16, 8, 2), (32, 16, 8, 3)),
    ("sm_100", 128): _tuning((16, 64, 4, 3), (64, 64, 8, 3)),
    ("sm_100", 256): _tuning((16, 32, 4, 3), (64, 32, 8, 3)),
    ("sm_100", 512): _tuning((16, 16, 8, 2), (32, 16, 8, 3)),
    ("gfx942", 128): _tuning((16, 32, 4, 2), (64, 32, 4, 1), (64, 16, 4, 1)),
    ("gfx942", 256): _tuning((16, 16, 4, 2), (64, 16, 4, 1)),
    ("gfx942", 512): _tuning((16, 16, 4, 1), (16, 16, 4, 1)),
}
# float32 products are exact, without tensor cores: more than 16 rows would only spill.
FLOAT32_TUNINGS = {
    128: _tuning((16, 32, 4, 2), (16, 32, 4, 2)),
    256: _tuning((16, 16, 8, 2), (16, 16, 8, 2)),
    512: _tuning((16, 16, 8, 1), (16, 16, 8, 1)),
}
# Tensors in ordinary memory: Triton's interpreter, where every operation costs the same.
_INTERPRETED = _tuning((16, 32, 4, 1), (64, 32, 4, 1))
MAX_HEAD_DIM = 512
# Programs for each multiprocessor. It holds two of most variants at a time; where it holds one, the
# second runs after it, over as many tiles.
_PROGRAMS_PER_UNIT = 2


def architecture(device: torch.device) -> str | None:
    """The entry of the table for a GPU; None where the kernels do not run."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return "gfx942" if name.startswith(("gfx94", "gfx95")) else None
    major, _ = torch.cuda.get_device_capability(device)
    # The small siblings (8.6, 8.9, 12.0) have 99 KB of shared memory, enough for sm_80's tiles.
    return {8: "sm_80", 9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_80"}.get(major)


def tuning_for(name: str, head_dim: int, dtype: torch.dtype) -> Tuning:
    """The variants for a GPU's entry, a head dim (the larger of key and value), a product's type.

    ValueError beyond the largest head dim of the table.
    """
    for size in (128, 256, MAX_HEAD_DIM):
        if head_dim <= size:
            return FLOAT32_TUNINGS[size] if dtype == torch.float32 else TUNINGS[name, size]
    raise ValueError(f"a head has at most {MAX_HEAD_DIM} dimensions, not {head_dim}")


@cache
def tuning_of(device: torch.device, head_dim: int, dtype: torch.dtype) -> tuple[Tuning, int]:
    """The tuning for tensors on `device`, and how many programs it runs at a time."""
    if device.type == "cpu":
        return _INTERPRETED, 4
    name = architecture(device)
    if name is None:
        raise ValueError(f"no kernels for {device}")
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return tuning_for(name, head_dim, dtype), units * _PROGRAMS_PER_UNIT
