"""Tests on a CUDA device; skipped with a reason where there is none.

With AGENTKV_TEST_DEVICE=cpu and TRITON_INTERPRET=1 they are rehearsed: the same tests, fewer of
them, with interpreted kernels, and with functions that are called again in place of CUDA graphs.
Self-contained, so that a machine with torch, triton and pytest can run the tests of the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from agentkv_kernels import launch
from torch import Tensor

_DEVICE = torch.device(os.environ.get("AGENTKV_TEST_DEVICE", "cuda"))
_IS_REHEARSAL = _DEVICE.type == "cpu"

Replay = Callable[[], Tensor]


def pytest_configure(config: pytest.Config) -> None:
    # A machine with a GPU may run these tests without the project's own settings.
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "no_rehearsal: shows nothing without a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if not _IS_REHEARSAL and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if _IS_REHEARSAL and item.get_closest_marker("no_rehearsal") is not None:
            item.add_marker(pytest.mark.skip(reason="shows nothing without a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test, as tensors name it."""
    return _DEVICE if _IS_REHEARSAL else torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def num_trees() -> int:
    """How many random trees are worth their time."""
    return 2 if _IS_REHEARSAL else 40


@pytest.fixture(autouse=True)
def kernels_are_chosen(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What is tested is what launch.py picks for the device: the Triton kernels."""
    if _IS_REHEARSAL:
        monkeypatch.setattr(launch, "runs_triton", lambda device: True)
    assert launch.runs_triton(device), f"the Triton kernels do not run on {device}"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not filled holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=_DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def record() -> Callable[[Callable[[], Tensor]], Replay]:
    """Records a function into a CUDA graph; the replay returns the tensor that it fills."""
    return _call_again if _IS_REHEARSAL else _record


def _record(run: Callable[[], Tensor]) -> Replay:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def _call_again(run: Callable[[], Tensor]) -> Replay:
    out = run()
    return lambda: out.copy_(run())
