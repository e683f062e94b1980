"""Time one layer's decode attention on a CUDA device, and decode steps with and without graphs.

    python benchmarks/attention_gpu.py [--seconds 90] [--out FILE]

Launches are recorded in a CUDA graph and the graph is timed, over as many copies of the cache as it
takes to read cold memory. Each shape passes a correctness gate first. "flat" is the same kernel
with sharing off; "of read" is the speed at which unique KV is read, against a kernel on the same
device that only reads. Shapes for which no time is left are named, not guessed. Without a device
--rehearse walks through all of it with interpreted kernels, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from agentkv_kernels import launch, reference, tile_attention
from agentkv_kernels.device_tiles import Capacity, DeviceTiles
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.scenario import Scenario, TreeSegment
from agentkv_kernels.sharing import Sharing
from machine import RESULTS, write_report
from torch import Tensor

BLOCK_SIZE = 16
# More than any GPU's second-level cache: what is read this long after is read from memory.
COLD_BYTES = 256 << 20
# From so many KV bytes a layer on, this share of the reading speed is to be reached.
TARGETS = ((256 << 20, 0.8), (32 << 20, 0.6))


class Shape(NamedTuple):
    """Query heads, KV heads, head dim; decode rows over a shared prefix, and own tokens each.

    The prefix is a chain of `depth` segments, and half the rows leave it at the end of each.
    """

    heads: tuple[int, int, int]
    rows: int
    shared: int
    own: int
    depth: int = 1


LLAMA, QWEN = (32, 8, 128), (28, 4, 128)
SHAPES = [
    Shape(LLAMA, 32, 2048, 64),
    Shape(LLAMA, 64, 8192, 256),
    Shape(LLAMA, 64, 0, 1024),
    Shape(LLAMA, 16, 32768, 4096),
    Shape(LLAMA, 256, 2048, 128),
    Shape(LLAMA, 1, 0, 32768),
    Shape(LLAMA, 64, 8192, 256, 4),
    Shape(LLAMA, 8, 1024, 1),
    Shape((9, 3, 64), 32, 2048, 64),
    Shape(QWEN, 64, 8192, 256),
    Shape((16, 1, 256), 64, 8192, 256),
    Shape((32, 32, 128), 16, 8192, 256),
    Shape((16, 8, 128), 64, 4096, 128),
    Shape((14, 2, 64), 64, 4096, 128),
]
BREAK_EVEN_ROWS, BREAK_EVEN_TOKENS = (2, 4, 8, 16, 64), (64, 128, 256, 512, 1024, 2048)
REHEARSED = [Shape((4, 2, 16), 4, 64, 16, 2), Shape((4, 2, 16), 2, 0, 20)]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _read_kernel(x_ptr, out_ptr, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # jitted
    total = tl.zeros([BLOCK], tl.int32)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_words, stride):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < num_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


class Bench:
    """How calls are timed on one device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._end = time.monotonic() + seconds

    @property
    def is_rehearsal(self) -> bool:
        """Whether kernels are interpreted."""
        return self.device.type == "cpu"

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self._end

    def seconds_each(self, calls: Sequence[Callable[[], object]]) -> float:
        """Time of one of `calls` when they run one after the other, the median of several runs."""

        def run() -> None:
            for call in calls:
                call()

        run()
        if self.is_rehearsal:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / len(calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(9):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return float(statistics.median(times)) / len(calls)


def read_speed(bench: Bench) -> float:
    """Bytes per second of a kernel that only reads, the best of a few grids."""
    num_words = (1 << 14) if bench.is_rehearsal else (1 << 28)
    source = torch.ones(num_words, dtype=torch.int32, device=bench.device)
    best = 0.0
    for num_programs in (2,) if bench.is_rehearsal else (264, 528, 1056, 2112):
        sums = torch.empty(num_programs, dtype=torch.int32, device=bench.device)

        def read(count: int = num_programs, sums: Tensor = sums) -> None:
            _read_kernel[(count,)](source, sums, num_words, BLOCK=4096, num_warps=8)

        seconds = bench.seconds_each([read])
        if int(sums.sum()) != num_words:
            raise AssertionError("the reading kernel has left something out")
        best = max(best, source.nbytes / seconds)
    return best


def tree(shape: Shape) -> Scenario:
    """Decode rows on a chain of segments, each with own tokens and room for a block more."""
    level = shape.shared // BLOCK_SIZE // shape.depth
    prefix = list(range(level * shape.depth))
    members = [shape.rows >> depth for depth in range(shape.depth)]
    each = -(-shape.own // BLOCK_SIZE) + 1
    tables, lengths, segments = [], [], []
    for row in range(shape.rows):
        shared = level * sum(row < count for count in members)
        first = len(prefix) + row * each
        tables.append([*prefix[:shared], *range(first, first + each)])
        lengths.append(shared * BLOCK_SIZE + shape.own)
    for depth, count in enumerate(members):
        blocks = tuple(prefix[depth * level : (depth + 1) * level])
        if count > 1 and blocks:
            parent = depth - 1 if depth else None
            start = depth * level * BLOCK_SIZE
            segments.append(TreeSegment(parent, start, blocks, tuple(range(count))))
    num_blocks = len(prefix) + shape.rows * each
    return Scenario(BLOCK_SIZE, [1] * shape.rows, lengths, tables, segments, num_blocks)


class Layers:
    """Random caches of one shape, enough of them that each is cold when its turn comes again."""

    def __init__(self, shape: Shape, bench: Bench) -> None:
        self.shape, self.bench = shape, bench
        num_q_heads, num_kv_heads, dim = shape.heads
        self.dtype = torch.float32 if bench.is_rehearsal else torch.bfloat16
        self.scenario = tree(shape)
        tokens = shape.shared + shape.rows * shape.own
        self.kv_bytes = 2 * tokens * num_kv_heads * dim * self.dtype.itemsize
        num_layers = 1 if bench.is_rehearsal else 1 + COLD_BYTES // self.kv_bytes
        size = self.scenario.num_blocks + 2, num_kv_heads, BLOCK_SIZE, dim
        self.caches = [
            tuple(torch.randn(size, dtype=self.dtype, device=bench.device) for _ in range(2))
            for _ in range(min(num_layers, 64))
        ]
        self.query = torch.randn(
            shape.rows, num_q_heads, dim, dtype=self.dtype, device=bench.device
        )

    def plan(self, *, share: bool, rows: int | None = None) -> StepPlan:
        """The plan of the step, or of its first rows."""
        count = slice(rows)
        return StepPlan.build(
            query_lens=self.scenario.query_lens[count],
            kv_lens=self.scenario.kv_lens[count],
            block_tables=self.scenario.block_tables[count],
            segments=self.scenario.segments if share else (),
            block_size=BLOCK_SIZE,
            sharing=Sharing(min_tokens=BLOCK_SIZE, fixed_bytes=0),
        )

    def attend(self, plan: StepPlan, layer: int = 0) -> Tensor:
        """Attention of all rows over one of the caches."""
        keys, values = self.caches[layer]
        return launch.paged_attention(
            self.query, keys, values, plan, scale=self.shape.heads[2] ** -0.5
        )

    def check(self) -> None:
        """Shared equals flat, and the first rows equal the reference."""
        tree, flat = (self.attend(self.plan(share=share)).float() for share in (True, False))
        # The mean of many values is small: the error is measured by its spread.
        atol = 3e-2 * float(flat.std())
        torch.testing.assert_close(tree, flat, atol=atol, rtol=3e-2)
        keys, values = self.caches[0]
        plan = self.plan(share=False, rows=4)
        expected = reference.paged_attention(
            self.query[: plan.num_rows].float(), keys, values, plan,
            scale=self.shape.heads[2] ** -0.5,
        )  # fmt: skip
        torch.testing.assert_close(tree[: plan.num_rows], expected, atol=atol, rtol=3e-2)

    def seconds(self, *, share: bool) -> float:
        """Time of attention in one layer, its keys and values cold."""
        plan = self.plan(share=share)
        repeats = 1 if self.bench.is_rehearsal else max(1, 8 // len(self.caches))
        calls = [lambda i=i: self.attend(plan, i) for i in range(len(self.caches))] * repeats
        return self.bench.seconds_each(calls)

    def host_seconds(self) -> float:
        """Time on the host of a steady decode step: moving the plan on, and loading its tiles."""
        plan = self.plan(share=True)
        k_cache, v_cache = self.caches[0]
        shape = tile_attention.tile_shape(self.query, k_cache, v_cache, None)
        buffers = DeviceTiles(Capacity.of(plan.tile_set(shape)), self.bench.device)
        times = []
        for step in range(1, BLOCK_SIZE):
            lengths = [length + step for length in self.scenario.kv_lens]
            start = time.perf_counter()
            if not plan.advance(lengths, self.scenario.block_tables):
                break
            tiles = plan.tile_set(shape)
            if not buffers.fits(tiles):
                break
            buffers.load(tiles)
            times.append(time.perf_counter() - start)
        return statistics.median(times) if times else float("nan")


def measure(shape: Shape, bench: Bench, bytes_per_s: float) -> dict[str, object]:
    """One line of the table. AssertionError if results differ."""
    layers = Layers(shape, bench)
    layers.check()
    shared, flat = layers.seconds(share=True), layers.seconds(share=False)
    unique = shape.shared + shape.rows * shape.own
    fraction = layers.kv_bytes / shared / bytes_per_s
    target = next((share for size, share in TARGETS if layers.kv_bytes >= size), None)
    return {
        **shape._asdict(),
        "kv_bytes": layers.kv_bytes,
        "num_layers": len(layers.caches),
        "shared_us": shared * 1e6,
        "flat_us": flat * 1e6,
        "floor_us": layers.kv_bytes / bytes_per_s * 1e6,
        "byte_ratio": sum(layers.scenario.kv_lens) / unique,
        "fraction_of_read": fraction,
        "target": target,
        "is_met": None if target is None else fraction >= target,
        "host_us": layers.host_seconds() * 1e6,
    }


def break_even(rows: int, bench: Bench) -> int | None:
    """The shortest measured prefix that is read faster shared than not, in tokens."""
    for shared in BREAK_EVEN_TOKENS[: 1 if bench.is_rehearsal else None]:
        layers = Layers(Shape((4, 2, 16) if bench.is_rehearsal else LLAMA, rows, shared, 64), bench)
        if layers.seconds(share=True) < layers.seconds(share=False):
            return shared
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the JSON; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no shape begins")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention-gpu.json")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, interpreted")
    options = parser.parse_args(arguments)
    if options.rehearse:
        launch.runs_triton = lambda device: True  # type: ignore[assignment]  # a stand-in
    elif not torch.cuda.is_available():
        sys.stderr.write("no CUDA device was found\n")
        return 3
    bench = Bench(torch.device("cpu" if options.rehearse else "cuda"), options.seconds)
    torch.manual_seed(0)
    speed = read_speed(bench)
    name = "interpreted" if bench.is_rehearsal else torch.cuda.get_device_name()
    print(f"{name}: a kernel that only reads moves {speed / 1e9:.0f} GB/s")
    print(
        "heads           rows shared   own  KV MB  shared us   flat us  floor us of read  host us"
    )
    shapes = REHEARSED if bench.is_rehearsal else SHAPES
    lines = []
    for shape in shapes:
        if bench.is_over:
            break
        line = measure(shape, bench, speed)
        lines.append(line)
        print(
            f"{shape.heads!s:15} {shape.rows:4} {shape.shared:6} {shape.own:5} {shape.depth:5} "
            f"{int(str(line['kv_bytes'])) / 1e6:6.1f} {line['shared_us']:10.1f} "
            f"{line['flat_us']:9.1f} {line['floor_us']:9.1f} {line['fraction_of_read']:6.0%} "
            f"{line['host_us']:9.1f}" + ("  below its target" if line["is_met"] is False else "")
        )
    left_out = [shape._asdict() for shape in shapes[len(lines) :]]
    even = {rows: break_even(rows, bench) for rows in BREAK_EVEN_ROWS if not bench.is_over}
    print(f"break-even prefix in tokens, by rows: {even}")
    if left_out or len(even) < len(BREAK_EVEN_ROWS):
        print(f"no time was left for {len(left_out)} shapes")
    write_report(
        options.out,
        dtype="float32" if bench.is_rehearsal else "bfloat16",
        read_bytes_per_s=speed,
        lines=lines,
        left_out=left_out,
        break_even_tokens=even,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
