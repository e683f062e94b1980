"""Every await of every scenario, disturbed: cancelled, cancelled twice, timed out, made to fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from linecache import getline
from typing import NamedTuple

from ..deterministic import Backend, simulate
from ..faults import FaultPlan, PlannedFault
from ..sweep import ROOT, Driven, Driver, Site
from .scenarios import SCENARIOS, World, play

__all__ = ["DISTURBANCES", "Disturbance", "Sweep", "sweep"]


class Disturbance(NamedTuple):
    """What happens at a point, how often, on which loops it can, and whether calls may fail."""

    act: Callable[[World, Driven], BaseException | None]
    repeats: int = 0
    backends: tuple[Backend, ...] = ("asyncio", "trio")
    has_moments: bool = True
    may_fail: bool = False


def _cancel(world: World, driven: Driven) -> None:
    driven.scope.cancel()


def _time_out(world: World, driven: Driven) -> None:
    driven.scope.deadline = world.clock()


def _time_out_soon(world: World, driven: Driven) -> None:
    # As long as a step takes: it may end at the same moment.
    driven.scope.deadline = world.clock() + 0.01


def _cancel_task(world: World, driven: Driven) -> None:
    assert driven.task is not None, "only asyncio cancels tasks"
    driven.task.cancel()


def _raise(world: World, driven: Driven) -> BaseException | None:
    site = driven.sites[-1]
    if "_lock.acquire" not in getline(str(ROOT / site.file), site.line):
        return PlannedFault("at an await")
    # A task in a queue can be cancelled; nothing else can reach it there.
    driven.scope.cancel()
    return None


def _fail_step(world: World, driven: Driven) -> None:
    plan = world.engine.plan
    plan.fail("forward.before", at=plan.passed["forward.before"] + 1)


DISTURBANCES: dict[str, Disturbance] = {
    "cancel": Disturbance(_cancel),
    "double cancel": Disturbance(_cancel_task, 1, ("asyncio",)),
    "timeout": Disturbance(_time_out),
    "late timeout": Disturbance(_time_out_soon),
    "failing step": Disturbance(_fail_step, may_fail=True),
    "error": Disturbance(_raise, 0, ("asyncio",), has_moments=False),
}


class Sweep(NamedTuple):
    """Points of one scenario that were found and that were disturbed, and awaits among them."""

    discovered: int
    covered: int
    sites: frozenset[Site]


def sweep(name: str, disturbance: str, *, backend: Backend, seed: int = 0) -> Sweep:
    """Play a scenario once undisturbed, then once for each of its points with that disturbed.

    Raises:
        AssertionError: a promise was broken; a note says where.
    """
    chosen = DISTURBANCES[disturbance]
    calm = Driver(has_moments=chosen.has_moments)
    simulate(partial(play, SCENARIOS[name], calm, FaultPlan()), seed, backend=backend)
    covered = 0
    for at in range(1, calm.num_points + 1):
        driver = Driver(at, repeats=chosen.repeats, has_moments=chosen.has_moments)
        disturbed = partial(
            play,
            SCENARIOS[name],
            driver,
            FaultPlan(),
            prepare=partial(_set, driver, chosen),
            may_fail=chosen.may_fail,
        )
        try:
            simulate(disturbed, seed, backend=backend)
        except BaseException as error:
            error.add_note(f"{name}, {disturbance} at point {at} on {backend}, seed {seed}")
            raise
        covered += driver.has_acted
    return Sweep(calm.num_points, covered, frozenset(calm.sites))


def _set(driver: Driver, disturbance: Disturbance, world: World) -> None:
    driver.act = partial(disturbance.act, world)
