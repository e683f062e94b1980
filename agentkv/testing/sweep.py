"""Stops a coroutine at each of its awaits in turn: what an await-point sweep is made of.

Counts the suspensions that happen inside this package, and does something at the i-th.
"""

from __future__ import annotations

import ast
import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

import anyio

__all__ = ["Driven", "Driver", "Site", "await_sites", "suspended_at"]

ROOT = Path(__file__).parents[1]
# What users call. No folder of the package has an await, but for this one, which tests with them.
MODULES = {path.name for path in ROOT.glob("*.py")} - {"cli.py", "demo.py"}


class Site(NamedTuple):
    """A place in the package's source that waits."""

    file: str
    line: int


Act = Callable[["Driven"], BaseException | None]


class Driver:
    """Drives coroutines and counts their points: suspensions inside the package, and moments.

    A moment is a call of `tick`, counted once for each coroutine that is under way. At the point
    `at`, counted from 1, `act` is called with the scope around that coroutine; what it returns is
    raised there, if a suspension was the point. The same is done at the coroutine's next `repeats`
    suspensions. Without `has_moments` only suspensions are points.
    """

    def __init__(
        self,
        at: int | None = None,
        act: Act | None = None,
        *,
        repeats: int = 0,
        has_moments: bool = True,
    ) -> None:
        self.sites: set[Site] = set()
        self.num_suspensions: int = 0
        self.num_moments: int = 0
        self.act: Act | None = act
        self.has_acted: bool = False
        self._at = at
        self._repeats = repeats
        self._has_moments = has_moments
        self._under_way: list[Driven] = []

    @property
    def num_points(self) -> int:
        """Points so far."""
        return self.num_suspensions + self.num_moments

    async def run(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine to its end; False if it was cancelled by `act`."""
        with anyio.CancelScope() as scope:
            driven = Driven(self, coroutine, scope)
            self._under_way.append(driven)
            try:
                await driven
            finally:
                self._under_way.remove(driven)
        return not scope.cancelled_caught

    def tick(self) -> None:
        """A moment has come for everything under way."""
        for driven in list(self._under_way) if self._has_moments else ():
            self.num_moments += 1
            self._pass(driven)

    def _suspend(self, driven: Driven, sites: list[Site]) -> BaseException | None:
        if not sites:
            return None
        self.sites.update(sites)
        self.num_suspensions += 1
        return self._pass(driven)

    def _pass(self, driven: Driven) -> BaseException | None:
        """Act on a point that was just counted, if it is the one, or one of those after it."""
        if self.num_points == self._at:
            driven.left = self._repeats + 1
        if not driven.left or self.act is None:
            return None
        driven.left -= 1
        self.has_acted = True
        return self.act(driven)


class Driven(Awaitable[None]):
    """Awaits a coroutine on behalf of its task, one suspension at a time.

    `sites` is where it is suspended, the innermost last; `task` runs it, on asyncio.
    """

    def __init__(
        self, driver: Driver, coroutine: Coroutine[Any, Any, None], scope: anyio.CancelScope
    ) -> None:
        self.scope: anyio.CancelScope = scope
        self.sites: list[Site] = []
        self.left: int = 0
        self.task: asyncio.Task[Any] | None = None
        self._driver = driver
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, None]:
        value: Any = None
        error: BaseException | None = None
        with suppress(RuntimeError):
            self.task = asyncio.current_task()
        while True:
            try:
                if error is None:
                    waits_for = self._coroutine.send(value)
                else:
                    waits_for = self._coroutine.throw(error)
            except StopIteration:
                return
            self.sites = suspended_at(self._coroutine)
            value, error = None, self._driver._suspend(self, self.sites)
            if error is not None:
                # A future of asyncio that is not waited for after all.
                if hasattr(waits_for, "_asyncio_future_blocking"):
                    waits_for._asyncio_future_blocking = False
                continue
            try:
                value = yield waits_for
            except BaseException as thrown:
                error = thrown


def suspended_at(coroutine: object) -> list[Site]:
    """The places in the package through which a suspended coroutine waits, the innermost last."""
    sites: list[Site] = []
    awaited: Any = coroutine
    while awaited is not None:
        frame, awaited = _frame_of(awaited)
        if frame is not None and (site := _site_of(frame)) is not None:
            sites.append(site)
    return sites


def await_sites() -> set[Site]:
    """Every place in the package's source that has an await, so that it may be suspended there."""
    sites: set[Site] = set()
    for name in MODULES:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.AsyncFunctionDef):
                waits = (ast.Await, ast.AsyncWith, ast.AsyncFor)
                lines = {node.lineno for node in ast.walk(function) if isinstance(node, waits)}
                sites |= {Site(name, line) for line in lines}
    return sites


def _site_of(frame: FrameType) -> Site | None:
    path = Path(frame.f_code.co_filename)
    if path.parent != ROOT or path.name not in MODULES:
        return None
    return Site(path.name, frame.f_lineno)


def _frame_of(awaited: Any) -> tuple[FrameType | None, Any]:
    """The frame of something that is awaited, and what it awaits in turn."""
    for prefix, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(awaited, f"{prefix}_frame"):
            return getattr(awaited, f"{prefix}_frame"), getattr(awaited, inner)
    # A wrapper written in C, such as that of an `__await__`, says what it wraps only here.
    kinds = (CoroutineType, GeneratorType, AsyncGeneratorType)
    wrapped = [each for each in gc.get_referents(awaited) if isinstance(each, kinds)]
    return None, wrapped[0] if wrapped else None
