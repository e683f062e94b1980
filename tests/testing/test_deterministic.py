"""One seed is one run, time jumps, and a program in which nothing can happen is told so."""

from __future__ import annotations

import asyncio
import random
import time

import anyio
import pytest

from agentkv.testing import deterministic
from agentkv.testing.deterministic import Backend, Deadlock, simulate

BACKENDS: list[Backend] = ["asyncio", "trio"]


async def race(rng: random.Random) -> list[int]:
    order: list[int] = []

    async def run(index: int) -> None:
        await anyio.lowlevel.checkpoint()
        order.append(index)

    async with anyio.create_task_group() as group:
        for index in range(12):
            group.start_soon(run, index)
    return order


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides_the_order_of_tasks(backend: Backend) -> None:
    orders = [simulate(race, seed, backend=backend) for seed in range(8)]
    assert orders == [simulate(race, seed, backend=backend) for seed in range(8)]
    assert len(set(map(tuple, orders))) > 1
    assert all(sorted(order) == list(range(12)) for order in orders)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_clock_jumps_to_the_next_timer(backend: Backend) -> None:
    async def sleep(rng: random.Random) -> float:
        before = anyio.current_time()
        await anyio.sleep(3600)
        return anyio.current_time() - before

    started = time.monotonic()
    assert simulate(sleep, 1, backend=backend) == pytest.approx(3600)
    assert time.monotonic() - started < 60


def test_a_program_that_can_never_go_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "PATIENCE_S", 0.05)

    async def wait(rng: random.Random) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        simulate(wait, 1)
