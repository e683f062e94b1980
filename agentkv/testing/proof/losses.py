"""Every pass of every fault point fails in turn, and KV is lost at every place it can be lost."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ...core.plan import Plan
from ..deterministic import simulate
from ..driver import CoreDriver, Turn
from ..faults import FaultPlan, FaultPoint
from ..sweep import Driver
from .scenarios import SCENARIOS, play

__all__ = [
    "HARMLESS",
    "Coverage",
    "evict_everywhere",
    "fail_everywhere",
    "preempt_everywhere",
    "preemptions_under_demand",
]

# These cost time, and change no answer.
HARMLESS: tuple[FaultPoint, ...] = ("allocate", "preempt", "evict")


class Coverage(NamedTuple):
    """Places where something could go wrong, and those where it did."""

    discovered: int
    covered: int

    def __add__(self, other: object) -> Coverage:
        """Both together."""
        assert isinstance(other, Coverage), "coverage is added to coverage"
        return Coverage(self.discovered + other.discovered, self.covered + other.covered)


def fail_everywhere(name: str, point: FaultPoint, *, for_ever: bool = False) -> Coverage:
    """Play a scenario once for each pass of `point`, which fails, and all later ones `for_ever`."""
    calm = FaultPlan()
    simulate(partial(play, SCENARIOS[name], Driver(), calm), 0)
    covered = 0
    for at in range(1, calm.passed[point] + 1):
        plan = FaultPlan().fail(point, at=at, count=None if for_ever else 1)
        may_fail = for_ever or point not in HARMLESS
        run = partial(play, SCENARIOS[name], Driver(), plan, may_fail=may_fail)
        try:
            simulate(run, 0)
        except BaseException as error:
            error.add_note(f"{name}, pass {at} of {point} fails, for ever: {for_ever}")
            raise
        covered += bool(plan.happened)
    return Coverage(calm.passed[point], covered)


def preempt_everywhere(num_sequences: int, *, num_tokens: int = 64, stride: int = 1) -> Coverage:
    """Preempt each of some forks before each of its tokens: the ids are those of a calm run."""
    discovered = covered = 0
    for victim in range(num_sequences):
        for index in range(0, num_tokens, stride):
            driver = CoreDriver(num_blocks=200)
            turns = _forks(driver, num_sequences, num_tokens)
            while len(turns[victim].request.output_ids) < index:
                driver.step()
            discovered += 1
            covered += _preempt(driver, turns[victim])
            driver.run()
            for turn in turns:
                driver.verify(turn)
            driver.verify_idle([turn.snapshot for turn in turns])
    return Coverage(discovered, covered)


def evict_everywhere() -> Coverage:
    """At each step of some turns, evict each number of the cached blocks that there are then."""
    discovered = covered = 0
    at, count = 0, 1
    while True:
        driver = CoreDriver(num_blocks=60)
        turns = _cache_conversations(driver)
        for step in range(at):
            _arrive(driver, turns, step)
            driver.step()
        if at and not driver.core.has_work:
            return Coverage(discovered, covered)
        cache, num_cached = driver.core._memory.cache, driver.core._memory.pool.num_idle
        if count <= num_cached:
            discovered += 1
            covered += cache.evict(count) == count
            driver.check()
        for step in range(at, 99):
            _arrive(driver, turns, step)
            driver.step()
        for turn in turns:
            driver.verify(turn)
        driver.verify_idle([turn.snapshot for turn in turns])
        at, count = (at, count + 1) if count < num_cached else (at + 1, 1)


def preemptions_under_demand(num_sequences: int, demand: float, *, num_tokens: int = 64) -> int:
    """The most preemptions of one sequence when all together need `demand` pools."""
    size, prompt = 4, 16
    needed = num_sequences * -(-(prompt + num_tokens) // size)
    driver = CoreDriver(
        num_blocks=int(needed / demand),
        block_size=size,
        max_num_seqs=num_sequences,
        max_batch_tokens=num_sequences + 64,
    )
    turns = [
        driver.submit(None, [at + 1] * prompt, count=num_tokens) for at in range(num_sequences)
    ]
    sequences = list(driver.core._sequences.values())
    driver.run()
    for turn in turns:
        driver.verify(turn)
    driver.verify_idle([turn.snapshot for turn in turns])
    return max(sequence.num_preemptions for sequence in sequences)


def _forks(driver: CoreDriver, count: int, num_tokens: int) -> list[Turn]:
    """A warm conversation and turns of forks of it; the conversation itself is let go."""
    warm = driver.submit(None, list(range(39)), kind="warm")
    driver.run()
    turns = [driver.submit(warm.snapshot, [at], count=num_tokens) for at in range(count)]
    driver.step()
    driver.core.release(warm.snapshot)
    return turns


def _cache_conversations(driver: CoreDriver) -> list[Turn]:
    """Three conversations whose blocks are cached and held by nobody; no turn yet."""
    for first in range(3):
        warm = driver.submit(None, [first, *range(38)], count=5)
        driver.run()
        driver.core.release(warm.snapshot)
    return []


def _arrive(driver: CoreDriver, turns: list[Turn], step: int) -> None:
    """Every other step another turn comes, on one of the cached conversations."""
    if step % 2 == 0 and step < 8:
        ids = [step // 2, *range(38)][: 39 - step]
        turns.append(driver.submit(None, ids, count=7))


def _preempt(driver: CoreDriver, turn: Turn) -> bool:
    sequence = driver.core._sequences[turn.request]
    if sequence.table is None or sequence.is_protected:
        return False
    driver.core._scheduler._preempt(Plan(0), sequence)
    driver.check()
    return True
