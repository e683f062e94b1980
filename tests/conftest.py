"""What every test shares: the three event loops, and the check that nothing outlives one."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvloop

from agentkv.kv.block_pool import BlockPool
from agentkv.kv.prefix_cache import PrefixCache
from tests.bench import Bench, make
from tests.leaks import nothing_is_left, without_tasks_left


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


@pytest.fixture(scope="session", autouse=True)
def first_loop() -> None:
    """The pipe that libuv makes once in a process is not a leak of the first test to use it."""
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """A test leaves no thread and no open file, and engines that are closed and hold no block."""
    with nothing_is_left():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """An async test leaves no task."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = without_tasks_left(item.obj)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An open engine on a witness whose hooks the test sets."""
    engine, runner = make(max_waiting_per_session=64)
    async with engine:
        yield Bench(engine, runner)
