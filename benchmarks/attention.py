"""Time one layer's decode attention on this machine's CPU: over a tree, flat, and gathered.

    python benchmarks/attention.py [--quick] [--dtype bfloat16|float32]

Every shape passes a correctness gate before it is timed. "tree" reads each shared segment once,
"flat" is the same code with sharing off, "flash" is torch's fused attention over KV copied row by
row. The three take turns, so that the machine's moods meet all of them; times are medians. The
floor is the larger of unique KV bytes over the copy speed and multiply-adds over the GEMM speed,
both measured here. The last lines say from which prefix on sharing is faster, and what the host's
plan of a step costs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from agentkv_kernels import launch, reference
from agentkv_kernels.cpu import tile_shape
from agentkv_kernels.cpu_work import step_work
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario
from agentkv_kernels.sharing import CPU_SHARING, Sharing
from machine import RESULTS, median_s, speeds, write_report
from torch import Tensor
from trees import BLOCK_SIZE, Shape, make_tree

SMALL = (9, 3, 64)  # SmolLM2-135M
HEADS = [SMALL, (14, 2, 64), (16, 8, 128), (28, 4, 128), (32, 8, 128), (16, 1, 256), (32, 32, 128)]
QUICK = [Shape(SMALL, 32, 2048, 64), Shape(SMALL, 32, 8192, 64)]
FULL = [
    *QUICK,
    *(Shape(heads, 16, 2048, 64) for heads in HEADS),
    *(Shape(SMALL, rows, 2048, 64) for rows in (1, 2, 4, 8, 64, 128, 256)),
    *(Shape(SMALL, 32, shared, 64) for shared in (128, 512, 32768)),
    *(Shape(SMALL, 32, 2048, own) for own in (1, 16, 256, 1024, 4096)),
    *(Shape(SMALL, 32, 2048, 64, depth) for depth in (2, 3, 4)),
    Shape(SMALL, 32, 2048, 64, 4, is_skewed=True),
]
# Prefixes in tokens among which the break-even is sought, and a rule that shares all of them.
PREFIXES = (16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
ALWAYS = Sharing(min_tokens=1, partial_bytes=0, fixed_bytes=0)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SECONDS_PER_SHAPE, SECONDS_PER_BREAK_EVEN = 2.0, 0.3
MIN_ROUNDS, MAX_ROUNDS, CALLS_PER_TURN = 2, 20, 3


def make_plan(scenario: Scenario, sharing: Sharing | None) -> StepPlan:
    """The plan of a scenario, by a rule of sharing or without any."""
    return StepPlan.build(
        query_lens=scenario.query_lens,
        kv_lens=scenario.kv_lens,
        block_tables=scenario.block_tables,
        segments=scenario.segments,
        block_size=BLOCK_SIZE,
        sharing=sharing,
    )


class Layer:
    """One layer's KV in memory, and the three ways to compute a step over it."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        num_q_heads, num_kv_heads, dim = shape.heads
        self.scenario: Scenario = make_tree(shape)
        k_cache, v_cache = self.scenario.caches(num_kv_heads, dim, dtype=dtype)
        self.caches: tuple[Tensor, Tensor] = (k_cache.nan_to_num_(0.0), v_cache.nan_to_num_(0.0))
        self.query: Tensor = torch.randn(shape.rows, num_q_heads, dim, dtype=dtype)
        self.scale: float = dim**-0.5

    def plan(self, sharing: Sharing | None) -> StepPlan:
        """The plan of the step, by a rule of sharing or without any."""
        return make_plan(self.scenario, sharing)

    def run(self, plan: StepPlan) -> Tensor:
        """Attention by the plan."""
        k_cache, v_cache = self.caches
        return launch.paged_attention(self.query, k_cache, v_cache, plan, scale=self.scale)

    def gather_and_flash(self) -> Tensor:
        """What an engine without paged kernels does: copy each row's KV, then one fused call."""
        lengths = torch.tensor(self.scenario.kv_lens)
        longest = max(len(table) for table in self.scenario.block_tables)
        zero_block = self.scenario.num_blocks
        tables = torch.tensor(
            [table + [zero_block] * (longest - len(table)) for table in self.scenario.block_tables]
        )
        num_rows, _, dim = self.query.shape
        key, value = (
            cache[tables].transpose(1, 2).reshape(num_rows, cache.shape[1], -1, dim)
            for cache in self.caches
        )
        hidden = None
        if int(lengths.min()) < key.shape[2]:
            is_hidden = torch.arange(key.shape[2]) >= lengths[:, None]
            hidden = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)[:, None, None]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # The query heads of a KV head become its query rows.
        packed = self.query.view(num_rows, key.shape[1], -1, dim)
        out: Tensor = flash(packed, key, value, attn_mask=hidden, scale=self.scale)[0]
        return out.reshape(self.query.shape)

    def check(self, tree: StepPlan, flat: StepPlan) -> None:
        """Verify that the three ways agree with one another, and some rows with the truth."""
        bound = TOLERANCE[self.query.dtype]
        out = self.run(tree)
        for other in (self.run(flat), self.gather_and_flash()):
            torch.testing.assert_close(out, other, atol=bound, rtol=bound)
        for row in {0, len(out) // 2, len(out) - 1}:
            alone = StepPlan.build(
                query_lens=[1],
                kv_lens=self.scenario.kv_lens[row : row + 1],
                block_tables=self.scenario.block_tables[row : row + 1],
                block_size=BLOCK_SIZE,
            )
            query, (k_cache, v_cache) = self.query[row : row + 1], self.caches
            truth = reference.paged_attention(query, k_cache, v_cache, alone, scale=self.scale)
            torch.testing.assert_close(out[row : row + 1], truth, atol=bound, rtol=bound)


def in_turns(ways: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median wall time of each way in milliseconds.

    A way's turn is a call that does not count, since the others have used the caches, and a few
    that do.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() < end):
        for name, way in ways.items():
            way()
            for _ in range(CALLS_PER_TURN):
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(each) * 1e3 for name, each in times.items()}


def measure(shape: Shape, dtype: torch.dtype, limits: Mapping[str, float]) -> dict[str, object]:
    """One line of the table. Raises AssertionError if the three results differ."""
    num_q_heads, num_kv_heads, dim = shape.heads
    layer = Layer(shape, dtype)
    tree, flat = layer.plan(CPU_SHARING), layer.plan(None)
    layer.check(tree, flat)
    tiles = tile_shape(layer.query, layer.caches[0], None)
    unique, read = (plan.tile_set(tiles).keys_read for plan in (tree, flat))
    key_bytes = 2 * num_kv_heads * dim * dtype.itemsize
    floor = max(
        unique * key_bytes / limits["copy_bytes_per_s"],
        read * num_q_heads * dim * 4 / limits["gemm_flop_per_s"],
    )
    times = in_turns(
        {
            "tree": lambda: layer.run(tree),
            "flat": lambda: layer.run(flat),
            "flash": layer.gather_and_flash,
        },
        SECONDS_PER_SHAPE,
    )
    return {
        "heads": shape.heads,
        "rows": shape.rows,
        "shared": shape.shared,
        "own": shape.own,
        "depth": shape.depth,
        "is_skewed": shape.is_skewed,
        **{f"{name}_ms": round(ms, 4) for name, ms in times.items()},
        "floor_ms": round(floor * 1e3, 4),
        "byte_ratio": round(read / unique, 2),
    }


def break_even(rows: int, dtype: torch.dtype) -> dict[str, int | None]:
    """The shortest prefix from which on sharing won at every length tried, and the rule's, in
    tokens.
    """
    shape = tile_shape(torch.empty(1, 9, 64), torch.empty(1, 3, BLOCK_SIZE, 64, dtype=dtype), None)
    count = np.array([rows])
    by_rule = int(CPU_SHARING.min_lengths(count, count, shape)[0])
    found: int | None = None
    for shared in reversed(PREFIXES):
        layer = Layer(Shape(SMALL, rows, shared, 64), dtype)
        ways = {
            name: functools.partial(layer.run, layer.plan(rule))
            for name, rule in (("tree", ALWAYS), ("flat", None))
        }
        times = in_turns(ways, SECONDS_PER_BREAK_EVEN)
        if times["tree"] >= times["flat"]:
            break
        found = shared
    return {"measured": found, "rule": by_rule}


def host_cost(num_sessions: int) -> dict[str, float]:
    """Microseconds to build a step's plan, to move it on, and to have the CPU's batches follow.

    The sessions are leaves of a tree of two levels, and open blocks at different steps.
    """
    scenario = make_tree(Shape(SMALL, num_sessions, 4096, 96, 2))
    scenario.kv_lens = [n - row % BLOCK_SIZE for row, n in enumerate(scenario.kv_lens)]
    shape = tile_shape(torch.empty(1, 9, 64), torch.empty(1, 3, BLOCK_SIZE, 64), None)
    zero_block = scenario.num_blocks + 16

    def rebuild() -> StepPlan:
        plan = make_plan(scenario, CPU_SHARING)
        plan.check_writes()
        plan.tile_set(shape)
        return plan

    plan, lengths = rebuild(), scenario.kv_lens
    more = range(scenario.num_blocks, zero_block)
    tables = [[*table, *more] for table in scenario.block_tables]
    steady, follow = [], []
    for _ in range(200):
        lengths = [length + 1 for length in lengths]
        start = time.perf_counter()
        assert plan.advance(lengths, tables)
        tiles = plan.tile_set(shape)
        moved = time.perf_counter()
        step_work(tiles, BLOCK_SIZE, None, zero_block=zero_block, max_gathered=1 << 16)
        steady.append(moved - start)
        follow.append(time.perf_counter() - moved)
    return {
        "rebuild_us": round(median_s(rebuild, 50) * 1e6, 1),
        "steady_us": round(statistics.median(steady) * 1e6, 1),
        "cpu_batches_us": round(statistics.median(follow) * 1e6, 1),
    }


def line(row: Mapping[str, object]) -> str:
    """One line of the table, as it is printed."""
    tree, flat, flash = (float(str(row[f"{name}_ms"])) for name in ("tree", "flat", "flash"))
    depth = f"{row['depth']}{' skewed' if row['is_skewed'] else ''}"
    return (
        f"{row['heads']!s:14} {row['rows']:4} {row['shared']:6} {row['own']:5} {depth:8} "
        f"{tree:8.2f} {flat:8.2f} {flash:8.2f} {row['floor_ms']:7.2f} "
        f"{flat / tree:6.1f}x {flash / tree:6.1f}x {row['byte_ratio']:6.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two shapes, no break-even")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args(arguments)
    dtype: torch.dtype = getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    limits = speeds()
    left, right = torch.randn(2, 1024, 1024, dtype=dtype)
    limits["gemm_flop_per_s"] = 2 * 1024**3 / median_s(lambda: left @ right, 15)
    print(
        f"{chosen.dtype}; copy {limits['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"GEMM {limits['gemm_flop_per_s'] / 1e9:.0f} GFLOP/s; milliseconds a layer"
    )
    print("heads          rows shared   own depth        tree     flat    flash   floor   "
          "flat/   flash/  bytes")  # fmt: skip
    lines = []
    for shape in QUICK if chosen.quick else FULL:
        lines.append(measure(shape, dtype, limits))
        print(line(lines[-1]), flush=True)
    even = {} if chosen.quick else {rows: break_even(rows, dtype) for rows in (2, 4, 8, 16, 64)}
    for rows, found in even.items():
        print(f"{rows} rows: sharing wins from {found['measured']} tokens on, rule {found['rule']}")
    host = host_cost(256)
    print(
        f"plan of 256 sessions: built in {host['rebuild_us']:.0f} us, moved on in "
        f"{host['steady_us']:.0f} us, the CPU's batches in {host['cpu_batches_us']:.0f} us"
    )
    write_report(
        chosen.out or RESULTS / f"attention-cpu-{chosen.dtype}.json",
        limits=limits,
        dtype=chosen.dtype,
        lines=lines,
        break_even_tokens=even,
        plan_of_256_sessions=host,
    )


if __name__ == "__main__":
    main()
