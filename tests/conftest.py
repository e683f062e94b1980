"""What every test shares: the three event loops, and the check that no step thread outlives one."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.bench import Bench, make

LOOPS = (
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
)


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:  # Any: as anyio's plugin takes it
    """Each async test runs on asyncio, on uvloop and on trio."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder() -> Iterator[None]:
    """Converted weights and notes of the tests stay out of the user's cache."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTKV_CACHE", folder)
        yield


@pytest.fixture(autouse=True)
def no_step_thread_is_left() -> Iterator[None]:
    """A test that opens an engine also ends its thread."""
    yield
    for thread in threading.enumerate():
        if thread.name == "agentkv-step":
            thread.join(timeout=10)
            assert not thread.is_alive(), "a step thread is still running"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An open engine on a witness whose hooks the test sets."""
    engine, runner = make(max_waiting_per_session=64)
    async with engine:
        yield Bench(engine, runner)
