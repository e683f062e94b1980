"""Agents do anything while the engine misbehaves, decided by seeds: every promise holds."""

from __future__ import annotations

import pytest

from agentkv.testing.deterministic import Backend
from agentkv.testing.proof.storm import run_storm


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "seeds"), [("asyncio", 150), ("trio", 50)])
def test_no_storm_breaks_a_promise(backend: Backend, seeds: int) -> None:
    reports = [run_storm(seed, backend=backend) for seed in range(seeds)]
    assert sum(report.commits for report in reports) > 3 * seeds
    assert sum(report.preemptions for report in reports) > seeds // 4
    points = {point for report in reports for point, _ in report.faults}
    assert len(points) > 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_seed_repeats_its_storm(backend: Backend) -> None:
    assert run_storm(11, backend=backend) == run_storm(11, backend=backend)
