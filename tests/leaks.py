"""What a test must not leave behind: tasks, threads, open files, and blocks of its engines."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio.lowlevel
import pytest

from agentkv.worker import Worker

__all__ = ["nothing_is_left", "without_tasks_left"]

# Threads that a loop, or tqdm in transformers, keeps for the next who needs one.
SHARED_THREADS = ("AnyIO worker thread", "Trio thread", "asyncio_", "tqdm_monitor")


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Fail if what runs inside leaves a thread, an open file, or an engine that holds blocks."""
    threads, files = set(threading.enumerate()), _open_files()
    with pytest.MonkeyPatch.context() as patch:
        workers = _recorded(patch)
        yield
    left = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in left:
        if not thread.name.startswith(SHARED_THREADS):
            thread.join(timeout=10)
            assert not thread.is_alive(), f"a thread is left: {thread.name}"
    for worker in workers:
        _verify_ended(worker)
    more = {file for file in _open_files() - files if "/dev/" not in file[1]}
    assert not more, f"files are left open: {more}"


def without_tasks_left(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """`test`, which fails if it leaves a task of its loop."""

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:  # Any: whatever the test takes
        before = _tasks()
        await test(*args, **kwargs)
        # Tasks that are done already leave the loop at its next turns.
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        left = _tasks() - before
        assert not left, f"tasks are left: {left}"

    return checked


def _tasks() -> set[Any]:  # Any: the tasks of either kind of loop
    try:
        return set(asyncio.all_tasks())
    except RuntimeError:
        import trio

        found: set[Any] = set()
        waiting = [trio.lowlevel.current_root_task()]
        while waiting:
            task = waiting.pop()
            if task is not None and task not in found:
                found.add(task)
                waiting += [
                    each for nursery in task.child_nurseries for each in nursery.child_tasks
                ]
        return found


def _recorded(patch: pytest.MonkeyPatch) -> list[Worker]:
    workers: list[Worker] = []
    begin = Worker.__init__

    def recording(self: Worker, *args: Any, **kwargs: Any) -> None:  # Any: as the original takes
        begin(self, *args, **kwargs)
        workers.append(self)

    patch.setattr(Worker, "__init__", recording)
    return workers


def _verify_ended(worker: Worker) -> None:
    assert worker._refusal is not None or worker._open_error is not None, "an engine is left open"
    stats = worker.stats
    kept = stats.free_blocks + stats.cached_blocks + stats.quarantined_blocks
    assert not stats.used_blocks, f"a closed engine holds {stats.used_blocks} blocks"
    assert kept == stats.num_blocks, "a closed engine has lost blocks"


def _open_files() -> set[tuple[str, str]]:
    """Number and target of each file descriptor of this process, where the system tells."""
    folder, found = "/proc/self/fd", set()
    for number in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            found.add((number, os.readlink(f"{folder}/{number}")))
        except OSError:
            # The descriptor of the listing itself.
            continue
    return found
