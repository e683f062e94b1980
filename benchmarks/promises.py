"""The promises of agentkv, each with what shows it: units of work, and a judge of their results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import anyio

from agentkv.testing.deterministic import Backend, simulate
from agentkv.testing.faults import FaultPoint
from agentkv.testing.proof import interrupts, loads, losses, memories
from agentkv.testing.proof.awaits import DISTURBANCES, sweep
from agentkv.testing.proof.scenarios import SCENARIOS
from agentkv.testing.proof.storm import run_storms

__all__ = ["MEMORY_SEEDS", "STORMS", "Part", "Unit", "parts"]

ROOT = Path(__file__).parents[1]
STORMS: dict[Backend, int] = {"asyncio": 2000, "trio": 1000}
CHUNK = 50
MEMORY_OPERATIONS = 17_000
MEMORY_SEEDS = 3
INTERRUPT_PARTS = 10
# These are not for a scenario: they end the engine, and have tests of their own.
FATAL: set[FaultPoint] = {"open", "close", "share", "forward.hangs"}

Unit = Callable[[], Any]


@dataclass
class Part:
    """A promise: the units of work that show it, and how their results make a figure.

    `judge` returns the figure as text and whether it is what `promise` says.
    """

    name: str
    promise: str
    units: Sequence[Unit]
    judge: Callable[[list[Any]], tuple[str, bool]]
    is_timed: bool = False
    results: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, outcome: tuple[Any, str | None, float]) -> None:
        """Note what became of a unit."""
        result, error, seconds = outcome
        self.seconds += seconds
        if error is None:
            self.results.append(result)
        else:
            self.errors.append(error)

    def verdict(self) -> tuple[str, bool]:
        """The figure, and whether the promise is kept."""
        if self.errors:
            return f"{len(self.errors)} of {len(self.units)} runs failed", False
        return self.judge(self.results)


def parts() -> list[Part]:
    """All promises, those that take longest first."""
    return [*counted_parts(), *timed_parts()]


def counted_parts() -> list[Part]:
    """Promises that a busy machine does not change."""
    return [
        Part(
            "soak, no garbage collector",
            "100,000 turns, no growth",
            [partial(anyio.run, loads.soak, 100_000)],
            judge_soak,
        ),
        Part(
            "await points and moments",
            "every one of >= 12 scenarios, in every way",
            [
                partial(sweep, name, disturbance, backend=backend)
                for name in SCENARIOS
                for disturbance, chosen in DISTURBANCES.items()
                for backend in chosen.backends
            ],
            judge_coverage,
        ),
        Part(
            "fault points",
            "every pass of each, in every scenario",
            [
                partial(losses.fail_everywhere, name, point)
                for name in SCENARIOS
                for point in get_args(FaultPoint)
                if point not in FATAL
            ],
            judge_coverage,
        ),
        Part(
            "allocations failing for ever",
            "every k, in every scenario",
            [
                partial(losses.fail_everywhere, name, "allocate", for_ever=True)
                for name in SCENARIOS
            ],
            judge_coverage,
        ),
        Part(
            "interrupts",
            "every point of a program",
            [
                partial(interrupts.interrupt_everywhere, part=part, num_parts=INTERRUPT_PARTS)
                for part in range(INTERRUPT_PARTS)
            ],
            judge_coverage,
        ),
        Part(
            "simulation seeds",
            ">= 2,000",
            [
                partial(run_storms, range(first, first + CHUNK), backend=backend)
                for backend, count in STORMS.items()
                for first in range(0, count, CHUNK)
            ],
            judge_storms,
        ),
        Part(
            "pool operations",
            "1,000,000 over >= 50 seeds",
            [
                partial(memories.drive_memory, seed, num_blocks, block_size, MEMORY_OPERATIONS)
                for seed in range(MEMORY_SEEDS)
                for num_blocks in (1, 2, 3, 8, 1024)
                for block_size in (1, 2, 4, 16)
            ],
            judge_memories,
        ),
        Part(
            "preemption at every token",
            "64 tokens, alone and with forks",
            [
                partial(losses.preempt_everywhere, 1),
                partial(losses.preempt_everywhere, 4),
            ],
            judge_coverage,
        ),
        Part(
            "eviction at every step",
            "every number of cached blocks",
            [losses.evict_everywhere],
            judge_coverage,
        ),
        Part(
            "preemptions of one sequence",
            "<= 4 at 1.3x demand",
            [
                partial(losses.preemptions_under_demand, count, demand)
                for count in (4, 8, 16, 32, 64)
                for demand in (1.3, 2.0, 3.0)
            ],
            lambda found: (f"at most {max(found)}, up to 3x demand", max(found) <= 4),
        ),
        Part(
            "cancel storm",
            "45 to 500 strangers, blocks back in <= 1 step",
            [
                partial(simulate, partial(loads.cancel_strangers, strangers=count), seed)
                for count in (45, 150, 500)
                for seed in range(10)
            ],
            lambda found: (f"{len(found)} storms, at most {max(found)} step", max(found) <= 1),
        ),
        Part(
            "sessions on one prefix, witness",
            "1,000",
            [partial(anyio.run, loads.share_prefix, 1000)],
            lambda found: (f"{found[0]['sessions']:,} at once, all exact", True),
        ),
        Part(
            "sessions on one prefix, real model",
            "64",
            [partial(on_real_model, "share_real_prefix", 64)],
            judge_sharing,
        ),
        Part(
            "forks",
            "10,000 wide; 1,000 deep; 100x100",
            [
                partial(anyio.run, loads.fork_wide, 10_000),
                partial(anyio.run, loads.fork_deep, 1000),
                partial(anyio.run, loads.fork_tree, 100),
            ],
            lambda found: (f"{[each['forks'] for each in found]}, no block lost", True),
        ),
        Part(
            "reuse, real model",
            "200 prompts, |difference| <= 1e-4",
            [partial(on_real_model, "compare_reuse", 200)],
            judge_reuse,
        ),
        Part(
            "isolation",
            "100,000 look-ups, no foreign block",
            [
                partial(memories.look_across_namespaces, 100_000, num_hashes=number)
                for number in (None, 1, 2)
            ],
            lambda found: (f"{len(found)} x 100,000, {sum(found):,} blocks, none foreign", True),
        ),
    ]


def timed_parts() -> list[Part]:
    """Promises about time, which run alone."""
    return [
        Part(
            "bad input",
            ">= 150 cases, each < 10 ms and < 1 MB",
            [partial(refuse_bad_input, at) for at in range(0, num_bad_inputs(), CHUNK)],
            judge_refusals,
            is_timed=True,
        ),
        Part(
            "dead engine",
            "every waiter within 1 s, the next call at once",
            [partial(anyio.run, loads.notice_death, 500)] * 5,
            judge_death,
            is_timed=True,
        ),
        Part(
            "exit",
            "<= close_timeout_s + 1 s from any state",
            [partial(anyio.run, loads.close_in_each_state, 1.0)],
            lambda found: (
                ", ".join(f"{state} {seconds:.2f} s" for state, seconds in found[0].items()),
                max(found[0].values()) <= 2.0,
            ),
            is_timed=True,
        ),
        Part(
            "heartbeat in a 500 ms forward",
            "gaps <= 50 ms",
            [partial(anyio.run, loads.beat_during_forward, 0.5)] * 3,
            lambda found: (f"{middle(found) * 1e3:.1f} ms, median of 3", middle(found) <= 0.05),
            is_timed=True,
        ),
        Part(
            "heartbeat on the default model",
            "gaps <= 50 ms, 400 ms while loading",
            [heartbeat],
            lambda found: (found[0], True),
            is_timed=True,
        ),
    ]


def judge_coverage(found: list[Any]) -> tuple[str, bool]:
    """Points found and disturbed; all of them must have been."""
    discovered, covered = sum(each.discovered for each in found), sum(e.covered for e in found)
    return f"{covered:,} of {discovered:,} covered", covered == discovered > 0


def judge_soak(found: list[Any]) -> tuple[str, bool]:
    """What a turn leaves behind."""
    turns, size, objects = found[0].values()
    figure = f"{turns:,} turns, {size:.2f} bytes and {objects:.4f} objects a turn"
    return figure, abs(size) < 16 and abs(objects) < 0.01


def judge_memories(found: list[Any]) -> tuple[str, bool]:
    """Operations, and how many of them ran out of blocks."""
    count = len(found) * MEMORY_OPERATIONS
    return f"{count:,} in {len(found)} runs, {sum(found):,} of them refused", count >= 1_000_000


def judge_sharing(found: list[Any]) -> tuple[str, bool]:
    """Ids that are the bare model's."""
    compared, excluded, _ = found[0]
    figure = f"64 at once, {compared} ids as the model's, {excluded} near ties"
    return figure, excluded <= 0.005 * compared


def judge_reuse(found: list[Any]) -> tuple[str, bool]:
    """Ids that are the same on cached KV, and how far log-probabilities are apart."""
    compared, excluded, difference = found[0]
    figure = f"{compared} ids as the model's, {difference:.1e}, {excluded} near ties left out"
    return figure, difference <= 1e-4 and excluded <= 0.005 * compared


def judge_storms(found: list[Any]) -> tuple[str, bool]:
    """What the storms did together."""
    storms = sum(each.storms for each in found)
    figure = (
        f"{storms:,} seeds: {sum(e.commits for e in found):,} turns, "
        f"{sum(e.steps for e in found):,} steps, {sum(e.faults for e in found):,} faults, "
        f"{sum(e.preemptions for e in found):,} preemptions"
    )
    return figure, storms >= 2000


def judge_death(found: list[Any]) -> tuple[str, bool]:
    """How long the last waiter waited, and a call that came after."""
    last = middle([each["seconds"] for each in found])
    following = middle([each["next_call_seconds"] for each in found])
    figure = f"500 waiters within {last * 1e3:.0f} ms, the next call {following * 1e6:.0f} us"
    return figure, last <= 1.0 and following <= 0.01


def judge_refusals(found: list[Any]) -> tuple[str, bool]:
    """The slowest and the largest refusal."""
    cases = [cost for chunk in found for cost in chunk]
    seconds, size = max(cost[0] for cost in cases), max(cost[1] for cost in cases)
    figure = f"{len(cases)} cases, at most {seconds * 1e3:.2f} ms and {size / 1e6:.3f} MB"
    return figure, len(cases) >= 150 and seconds < 0.010 and size < 1e6


def on_real_model(name: str, count: int) -> Any:  # Any: what the function gives
    """Run a function of `proof.models`; only processes that do so import torch."""
    from agentkv.testing.proof import models

    return anyio.run(getattr(models, name), count)


def refuse_bad_input(first: int) -> list[tuple[float, int]]:
    """Seconds and bytes that refusing some cases of the tests' table takes, from one on."""
    from tests.bad_input import CASES, measure

    costs = [measure(case) for case in CASES[first : first + CHUNK]]
    return [(cost.seconds, cost.peak_bytes) for cost in costs]


def num_bad_inputs() -> int:
    """How many cases the table has."""
    sys.path.insert(0, str(ROOT))
    from tests.bad_input import CASES

    return len(CASES)


def heartbeat() -> str:
    """What benchmarks/heartbeat.py prints, on one line; it fails where a bound is passed."""
    command = [sys.executable, str(Path(__file__).parent / "heartbeat.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [" ".join(line.split(",")[0].split()) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines} {done.stderr[:2000]}"
    return ", ".join(lines)


def middle(values: Sequence[float]) -> float:
    """The median."""
    return sorted(values)[len(values) // 2]
