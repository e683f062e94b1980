"""Time one layer's decode attention, shared and unshared, on this machine's CPU.

    python benchmarks/attention.py [--quick]

Each shape passes a correctness gate first. "flat" is the same code with sharing off, "flash" is
torch's fused attention over KV gathered per row. The floor is the larger of unique KV bytes over
the copy speed and multiply-adds over the GEMM speed, both measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from agentkv_kernels import launch
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment
from torch import Tensor

BLOCK_SIZE = 16
# (query heads, KV heads, head dim), rows, shared tokens, own tokens
QUICK = [((9, 3, 64), 32, 2048, 64), ((9, 3, 64), 32, 8192, 64)]
FULL = [
    *QUICK,
    ((9, 3, 64), 1, 2048, 64),
    ((9, 3, 64), 8, 1024, 64),
    ((9, 3, 64), 64, 4096, 48),
    ((9, 3, 64), 32, 2048, 1024),
    ((14, 2, 64), 16, 2048, 64),
    ((32, 8, 128), 16, 2048, 64),
    ((16, 1, 256), 16, 2048, 64),
]


def median_ms(run: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of a call, after one call to warm up, in milliseconds."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e3


def fan(num_rows: int, shared: int, own: int) -> Scenario:
    """Decode rows over one prefix, each with `own` tokens behind it."""
    prefix = list(range(shared // BLOCK_SIZE))
    each = -(-own // BLOCK_SIZE)
    tables = [
        prefix + list(range(len(prefix) + row * each, len(prefix) + (row + 1) * each))
        for row in range(num_rows)
    ]
    segments = [TreeSegment(None, 0, tuple(prefix), tuple(range(num_rows)))]
    lengths = [shared + own] * num_rows
    num_blocks = len(prefix) + num_rows * each
    return Scenario(BLOCK_SIZE, [1] * num_rows, lengths, tables, segments, num_blocks)


def gather_and_flash(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, length: int, scale: float
) -> Tensor:
    """What an engine without paged kernels does: copy each row's KV, then one fused call."""
    num_rows, _, dim = query.shape
    key, value = (
        cache[tables].transpose(1, 2).reshape(num_rows, cache.shape[1], -1, dim)[:, :, :length]
        for cache in (k_cache, v_cache)
    )
    # The query heads of a KV head become its query rows.
    packed = query.view(num_rows, k_cache.shape[1], -1, dim)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(packed, key, value, scale=scale)[0]
    return out.reshape(query.shape)


def measure(
    heads: tuple[int, int, int], rows: int, shared: int, own: int, speeds: tuple[float, float]
) -> dict[str, object]:
    """One line of the table. Raises AssertionError if the three results differ."""
    num_q_heads, num_kv_heads, dim = heads
    scenario = fan(rows, shared, own)
    k_cache, v_cache = (c.nan_to_num(0.0) for c in scenario.caches(num_kv_heads, dim))
    query = torch.randn(rows, num_q_heads, dim)
    tables, scale = torch.tensor(scenario.block_tables), dim**-0.5

    def run(plan: StepPlan) -> Tensor:
        return launch.paged_attention(query, k_cache, v_cache, plan, scale=scale)

    def flash() -> Tensor:
        return gather_and_flash(query, k_cache, v_cache, tables, shared + own, scale)

    tree, flat = scenario.plan(), scenario.plan(share=False)
    for other in (run(flat), flash()):
        torch.testing.assert_close(run(tree), other, atol=1e-5, rtol=1e-5)
    unique, read = (shared + rows * own), rows * (shared + own)
    kv_bytes = 2 * num_kv_heads * dim * 4
    copy_speed, gemm_speed = speeds
    floor = max(unique * kv_bytes / copy_speed, read * num_q_heads * dim * 4 / gemm_speed)
    times = {"shared_ms": median_ms(lambda: run(tree), 15), "flat_ms": median_ms(lambda: run(flat))}
    times["flash_ms"] = median_ms(flash)
    return {
        "heads": heads, "rows": rows, "shared": shared, "own": own, **times,
        "byte_ratio": read / unique, "floor_ms": floor * 1e3,
    }  # fmt: skip


def break_even(rows: int, heads: tuple[int, int, int] = (9, 3, 64)) -> int | None:
    """The shortest measured prefix at which sharing is faster than not sharing, in tokens."""
    for shared in (64, 128, 256, 512, 1024, 2048):
        line = measure(heads, rows, shared, 64, (1.0, 1.0))
        if float(str(line["shared_ms"])) < float(str(line["flat_ms"])):
            return shared
    return None


def machine_speeds() -> tuple[float, float]:
    """Bytes per second of a large copy (read and written), FLOP per second of a float32 GEMM."""
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return copy, 2 * 1024**3 / median_ms(lambda: left @ right) * 1e3


def commit() -> str:
    """The commit that is measured, or "unknown" outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two shapes and no break-even")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention-cpu.json"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    speeds = machine_speeds()
    print(f"copy {speeds[0] / 1e9:.1f} GB/s, float32 GEMM {speeds[1] / 1e9:.0f} GFLOP/s, float32")
    print("heads          rows shared   own  shared ms  flat   flash  floor ms  bytes ratio")
    lines = []
    for shape in QUICK if options.quick else FULL:
        line = measure(*shape, speeds)
        lines.append(line)
        print(
            f"{shape[0]!s:14} {shape[1]:4} {shape[2]:6} {shape[3]:5} {line['shared_ms']:9.2f} "
            f"{line['flat_ms']:6.1f} {line['flash_ms']:6.1f} {line['floor_ms']:8.2f} "
            f"{line['byte_ratio']:10.1f}"
        )
    even = {} if options.quick else {rows: break_even(rows) for rows in (2, 4, 8, 16, 64)}
    if even:
        print(f"break-even prefix in tokens, by rows: {even}")
    result = {
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "commit": commit(), "dtype": "float32",
        "copy_bytes_per_s": speeds[0], "gemm_flop_per_s": speeds[1],
        "lines": lines, "break_even_tokens": even,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
