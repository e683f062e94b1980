"""What every test shares: the three event loops, and the check that no step thread outlives one."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agentkv.kv.block_pool import BlockPool
from agentkv.kv.prefix_cache import PrefixCache
from tests.bench import Bench, make


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--constant-hash` runs any test with a prefix cache in which all hashes collide."""
    parser.addoption("--constant-hash", action="store_true", help="let all hashes of KV collide")


@pytest.fixture(scope="session", autouse=True)
def hash_of_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The prefix cache's own hash, unless the command line wants a constant one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--constant-hash"):
            init = PrefixCache.__init__

            def colliding(cache: PrefixCache, pool: BlockPool, hash_fn: object = None) -> None:
                init(cache, pool, lambda key: 7)

            patch.setattr(PrefixCache, "__init__", colliding)
        yield


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
