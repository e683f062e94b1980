"""Every promise of docs/reliability.md at full size, as a table and as JSON.

    python benchmarks/proof.py [--only WORD] [--output FILE]
    python benchmarks/proof.py --seed N [--backend trio]      replays one storm

What is counted runs in two processes at once, what is timed alone after it. A failure is shown
with the seed that repeats it, and the command then ends with 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, get_args

from promises import MEMORY_SEEDS, STORMS, Part, Unit, parts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentkv.testing.deterministic import Backend
from agentkv.testing.proof.storm import run_storm

OUTPUT = Path(__file__).parent / "results" / "proof.json"


def attempt(unit: Unit) -> tuple[Any, str | None, float]:
    """Run a unit; its result or the text of its failure, and how long it took."""
    started = time.perf_counter()
    try:
        return unit(), None, time.perf_counter() - started
    except Exception:
        return None, traceback.format_exc(), time.perf_counter() - started


def run(chosen: list[Part], console: Console) -> None:
    """Run all units, two at a time where their time does not matter."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = {part.name: progress.add_task(part.name, total=len(part.units)) for part in chosen}
        counted = [part for part in chosen if not part.is_timed]
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            futures: dict[Future[Any], Part] = {
                pool.submit(attempt, unit): part for part in counted for unit in part.units
            }
            for future in as_completed(futures):
                futures[future].take(future.result())
                progress.advance(bars[futures[future].name])
        for part in chosen:
            for unit in part.units if part.is_timed else ():
                part.take(attempt(unit))
                progress.advance(bars[part.name])


def show(chosen: list[Part], console: Console, seconds: float, output: Path) -> bool:
    """Print the table and the failures, write the JSON; whether every promise is kept."""
    # Imports torch, which makes what is measured in this process slower.
    from machine import describe

    table = Table("", "promise", "measured", "promised", "time")
    rows = []
    for part in chosen:
        figure, is_kept = part.verdict()
        mark = "kept" if is_kept else "BROKEN"
        table.add_row(mark, part.name, figure, part.promise, f"{part.seconds:.0f} s")
        rows.append(
            {
                "name": part.name,
                "promise": part.promise,
                "figure": figure,
                "is_kept": is_kept,
                "seconds": round(part.seconds, 1),
                "runs": len(part.units),
                "errors": part.errors[:3],
            }
        )
    console.print(table)
    for part in chosen:
        for error in part.errors[:3]:
            console.print(f"{part.name}:\n{error}", markup=False)
    storms = {backend: f"0..{count - 1}" for backend, count in STORMS.items()}
    report = {
        **describe(),
        "seconds": round(seconds, 1),
        "storm_seeds": storms,
        "memory_seeds": f"0..{MEMORY_SEEDS - 1}",
        "promises": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"{len(chosen)} promises in {seconds / 60:.1f} minutes, written to {output}")
    return all(row["is_kept"] for row in rows)


def main() -> None:
    """Run what the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="promises whose name has this word")
    parser.add_argument("--seed", type=int, default=None, help="replay the storm of this seed")
    parser.add_argument("--backend", choices=get_args(Backend), default="asyncio")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    console = Console()
    if arguments.seed is not None:
        report = run_storm(arguments.seed, backend=arguments.backend)
        console.print("\n".join(report.trace), markup=False)
        console.print(f"{report.commits} turns, {report.steps} steps, faults {report.faults}")
        return
    chosen = [part for part in parts() if arguments.only in part.name]
    started = time.perf_counter()
    run(chosen, console)
    if not show(chosen, console, time.perf_counter() - started, arguments.output):
        sys.exit(1)


if __name__ == "__main__":
    main()
