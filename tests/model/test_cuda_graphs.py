"""The order in which a function is recorded into a CUDA graph, on a fake of torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agentkv.model.cuda_graphs import CudaCapture
from agentkv.model.graphs import CaptureError

DEVICE = torch.device("cuda", 3)


class FakeCuda:
    """Writes down what is asked of torch.cuda; a recording fails at its end if `error` is set."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.error: str | None = None
        self.current = "caller's"

    def stream_named(self, name: str) -> Any:  # Any: quacks like a torch.cuda.Stream
        fake = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                fake.events.append(f"{name} waits for {other}")

            def __str__(self) -> str:
                return name

        return Stream()

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, str(stream)
        yield
        self.current = before

    @contextmanager
    def record(
        self, graph: Any, *, pool: object, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert pool == (0, 7)
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, str(stream)
        self.events.append("begin")
        try:
            yield
        finally:
            self.events.append("end")
            if self.error is not None:
                # As in torch, the stream then stays the current one.
                raise torch.AcceleratorError(self.error)
            self.current = before

    def run(self) -> torch.Tensor:
        self.events.append(f"run on {self.current}")
        return torch.zeros(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Graph:
        def replay(self) -> None:
            fake.events.append("replay")

    def set_stream(stream: Any) -> None:
        fake.current = str(stream)

    def end_allocation(index: int, pool: object) -> None:
        fake.events.append(f"close pool {pool} of {index}")

    for name, value in {
        "Stream": lambda device: fake.stream_named("own"),
        "current_stream": lambda device: fake.stream_named("caller's"),
        "stream": fake.use,
        "set_stream": set_stream,
        "synchronize": lambda device: fake.events.append(f"synchronize {device}"),
        "graph": fake.record,
        "graph_pool_handle": lambda: (0, 7),
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    return fake


def test_a_function_is_warmed_up_on_the_stream_that_records_it(cuda: FakeCuda) -> None:
    replay = CudaCapture(DEVICE)(cuda.run)
    assert cuda.events == [
        "own waits for caller's",
        "run on own",
        "run on own",
        "caller's waits for own",
        "synchronize cuda:3",
        "begin",
        "run on own",
        "end",
    ]
    assert cuda.current == "caller's"
    assert replay() is replay()
    assert cuda.events[8:] == ["replay", "replay"]


def test_a_recording_that_fails_leaves_stream_and_memory_as_they_were(cuda: FakeCuda) -> None:
    cuda.error = "operation not permitted when stream is capturing"
    with pytest.raises(CaptureError, match="not permitted"):
        CudaCapture(DEVICE)(cuda.run)
    assert cuda.current == "caller's"
    assert cuda.events[-1] == "close pool (0, 7) of 3"


def test_a_function_that_fails_before_it_is_recorded_is_no_matter_of_graphs(
    cuda: FakeCuda,
) -> None:
    def fail() -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access")

    with pytest.raises(torch.AcceleratorError):
        CudaCapture(DEVICE)(fail)
    assert "begin" not in cuda.events
