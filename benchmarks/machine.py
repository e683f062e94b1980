"""What the benchmarks say of the machine they ran on: its name, its versions, its own limits."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

__all__ = ["RESULTS", "describe", "median_s", "speeds", "write_report"]

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, object]:
    """The machine, the versions and the commit under test."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
        **_describe_gpu(),
    }


def write_report(path: Path, **figures: object) -> None:
    """Write figures as JSON, with the machine they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": describe(), **figures}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def speeds() -> dict[str, float]:
    """Bytes per second of a large copy, read and written, and FLOP per second of a float32 GEMM."""
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return {
        "copy_bytes_per_s": 2 * source.nbytes / median_s(lambda: target.copy_(source)),
        "gemm_flop_per_s": 2 * 1024**3 / median_s(lambda: left @ right),
    }


def median_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of a call in seconds, after one call to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _describe_gpu() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {}
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    run = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            run, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
