"""Every await and every moment of every scenario, disturbed in every way."""

from __future__ import annotations

from functools import cache
from linecache import getline

import pytest

from agentkv.testing.deterministic import Backend
from agentkv.testing.proof.awaits import DISTURBANCES, Sweep, sweep
from agentkv.testing.proof.scenarios import SCENARIOS
from agentkv.testing.sweep import ROOT, Site, await_sites

# Points of each scenario on asyncio. A count may only rise.
LEAST = {
    "generate": 13,
    "talk": 20,
    "warm": 8,
    "read": 18,
    "leave": 10,
    "stop": 14,
    "result": 13,
    "samples": 13,
    "score": 3,
    "fork": 23,
    "branches": 25,
    "roll_back": 18,
    "queue": 79,
    "close_session": 5,
    "tree": 22,
    "wait_in_line": 94,
    "open_engine": 11,
    "close_engine": 10,
    "squeeze": 115,
    "long_text": 6,
    "long_replies": 132,
    "long_score": 7,
}
# Awaits that give way to nobody: what they await does not wait itself.
NEVER_WAIT = {
    "await self.aclose()",
    "await self._finalize()",
    "async with self.session(system=system, namespace=namespace) as session:",
}
# An await on a loop that comes after the scenario's own; tests/test_loops.py goes there.
ON_ANOTHER_LOOP = {"return await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)"}
# The rest of the disturbances is in the full proof.
SHORT: list[tuple[Backend, str]] = [
    ("asyncio", "cancel"),
    ("asyncio", "error"),
    ("trio", "timeout"),
]


@cache
def swept(name: str, disturbance: str, backend: Backend) -> Sweep:
    return sweep(name, disturbance, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("backend", "disturbance"), SHORT)
def test_every_point_of_a_scenario_may_be_disturbed(
    name: str, backend: Backend, disturbance: str
) -> None:
    done = swept(name, disturbance, backend)
    print(f"{name}: {done.covered} of {done.discovered} points, {disturbance} on {backend}")  # noqa: T201
    assert done.covered == done.discovered > 0


@pytest.mark.slow
def test_the_number_of_points_does_not_fall() -> None:
    assert set(LEAST) == set(SCENARIOS)
    for name, least in LEAST.items():
        assert swept(name, "cancel", "asyncio").discovered >= least, name


@pytest.mark.slow
def test_every_await_of_the_package_is_a_point_somewhere() -> None:
    sites: set[Site] = set()
    for backend, disturbance in SHORT:
        for name in SCENARIOS:
            sites |= swept(name, disturbance, backend).sites
    missed = {getline(str(ROOT / site.file), site.line).strip() for site in await_sites() - sites}
    assert missed <= NEVER_WAIT | ON_ANOTHER_LOOP


def test_the_disturbances_are_those_that_the_proof_names() -> None:
    assert {"cancel", "double cancel", "timeout", "error", "failing step"} <= set(DISTURBANCES)
