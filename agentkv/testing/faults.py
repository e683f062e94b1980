"""Faults by name: what may go wrong inside an engine, when it does, and how often it could have.

A `FaultPlan` decides; what passes its points and obeys it is in `faulty`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["FaultPlan", "FaultPoint", "PlannedFault"]

FaultPoint = Literal[
    # Raise where the engine calls out. "share" stands for host memory that runs out.
    "open",
    "allocate",
    "share",
    "copy",
    "forward.before",
    "forward.during",
    "forward.after",
    "render",
    "encode",
    "detokenize",
    "close",
    # Answer wrongly, or not before `release`.
    "forward.hangs",
    "logits.nan",
    "results.short",
    "results.token",
    # Never wrong, only costly: take the KV of a running sequence, or of a cached block.
    "preempt",
    "evict",
]


class PlannedFault(RuntimeError):
    """What a point raises unless the plan says otherwise."""


@dataclass(slots=True)
class _Fault:
    at: int
    count: float
    make_error: Callable[[], BaseException]


class FaultPlan:
    """What goes wrong, and when.

    Without any `fail` nothing does, and `passed` counts how often each point was passed: the k for
    which a sweep has something to do. `happened` lists the faults in their order, each with the
    number of the pass. `shuffle` names a seed for the order in which free blocks are handed out;
    `hash_values` folds the prefix cache's hash to so many values; `poisons` forgets, after each
    step, what slots hold that nobody filled (on a witness).
    """

    def __init__(
        self, *, shuffle: int | None = None, hash_values: int | None = None, poisons: bool = True
    ) -> None:
        self.passed: Counter[FaultPoint] = Counter()
        self.happened: list[tuple[FaultPoint, int]] = []
        self.shuffle: int | None = shuffle
        self.hash_values: int | None = hash_values
        self.poisons: bool = poisons
        self.hung: threading.Event = threading.Event()
        self._released = threading.Event()
        self._is_calm = False
        self._faults: dict[FaultPoint, list[_Fault]] = {}

    def fail(
        self,
        point: FaultPoint,
        *,
        at: int = 1,
        count: int | None = 1,
        error: Callable[[], BaseException] | None = None,
    ) -> FaultPlan:
        """From the `at`-th pass of a point on, let `count` of them fail (None: all); the plan.

        `error` makes what is raised, where the point raises.
        """
        assert point in get_args(FaultPoint), f"there is no fault point {point!r}"
        times = float("inf") if count is None else count
        make_error = error or (lambda: PlannedFault(f"{point} fails on purpose"))
        self._faults.setdefault(point, []).append(_Fault(at, times, make_error))
        return self

    def calm(self) -> None:
        """From now on nothing fails, and no pass is counted."""
        self._is_calm = True

    def is_due(self, point: FaultPoint) -> bool:
        """Count a pass of `point`; whether it fails."""
        return self._due(point) is not None

    def pass_point(self, point: FaultPoint) -> None:
        """Count a pass of `point`, and raise if it fails."""
        fault = self._due(point)
        if fault is not None:
            raise fault.make_error()

    def hang(self) -> None:
        """Wait for `release`."""
        self.hung.set()
        self._released.wait()

    def release(self) -> None:
        """Let whatever hangs go on, now and from now on."""
        self._released.set()

    def hash_fn(self, key: tuple[Hashable, ...]) -> int:
        """The prefix cache's hash under this plan."""
        return hash(key) if self.hash_values is None else hash(key) % self.hash_values

    def _due(self, point: FaultPoint) -> _Fault | None:
        if self._is_calm:
            return None
        self.passed[point] += 1
        number = self.passed[point]
        for fault in self._faults.get(point, ()):
            if fault.at <= number < fault.at + fault.count:
                self.happened.append((point, number))
                return fault
        return None
