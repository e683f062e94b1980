"""The engine on the device: replies of forked sessions are those of transformers' generate.

Near ties, which rounding may decide either way, are counted and left out. Decode steps run through
CUDA graphs, of which no test needs to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv import Engine, EngineConfig, Session
from agentkv.core.batch import Batch, Row, Segment
from agentkv.model import cuda_graphs
from agentkv.model.canary import check_canary
from agentkv.model.compatibility import check_model, context_limit
from agentkv.model.cuda_graphs import choose_capture
from agentkv.model.graphs import CaptureError, Replay
from agentkv.model.runner import ModelRunner
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

MIN_GAP = 1e-3
MAX_CLOSE_CALLS = 0.02
FAMILIES: dict[str, dict[str, Any]] = {  # Any: values of a transformers config
    "llama": {},
    "mistral": {"sliding_window": 60},
    "gemma3": {"sliding_window": 40},
    "mixtral": {},
}


@pytest.fixture(autouse=True)
def graphs_are_rehearsed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, functions that are called again stand in for CUDA graphs."""

    def capture(run: Callable[[], Tensor]) -> Replay:
        out = run()
        return lambda: out.copy_(run())

    if device.type == "cpu":
        monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda device: capture)


async def converse(engine: Engine, num_forks: int, num_new: int) -> list[tuple[list[int], int]]:
    """A conversation, then forks of it that run together; ids of each, and how many are its own."""
    rng = np.random.default_rng(7)
    turns: list[tuple[list[int], int]] = []

    async def ask(session: Session, count: int) -> None:
        prompt = rng.integers(8, 250, count).tolist()
        reply = await session.generate(prompt, max_tokens=num_new, temperature=0, ignore_eos=True)
        turns.append((list(session.token_ids), len(reply.token_ids)))

    root = engine.session()
    await ask(root, 70)
    forks = [root.fork() for _ in range(num_forks)]
    await asyncio.gather(*(ask(fork, 1 + index) for index, fork in enumerate(forks)))
    again = [fork.fork() for fork in forks[:2]]
    await asyncio.gather(*(ask(fork, 3) for fork in (*again, *forks[1:])))
    return turns


async def run_engine(
    model: PreTrainedModel, num_forks: int, num_new: int
) -> list[tuple[list[int], int]]:
    config, specs = EngineConfig(num_blocks=200), check_model(model)
    # As from_pretrained does, which accepts no older transformers than the project is tested with.
    runner = ModelRunner(
        model, specs, config=config, max_context=context_limit(model),
        tokenizer=byte_tokenizer(), capture=choose_capture(model, specs),
    )  # fmt: skip
    check_canary(runner, model, specs)
    async with Engine(lambda _: runner, config=config) as engine:
        return await converse(engine, num_forks, num_new)


def certain(model: PreTrainedModel, ids: list[int], count: int) -> int:
    """How many of the last `count` ids precede the first near tie."""
    with torch.no_grad():
        row = torch.tensor([ids], device=model.device)
        best = model(row, use_cache=False).logits[0, -count - 1 : -1].topk(2).values
    is_close = best[:, 0] - best[:, 1] < MIN_GAP
    return int((~is_close).long().cumprod(0).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_are_those_of_generate(family: str, device: torch.device) -> None:
    is_cpu = device.type == "cpu"
    model = tiny_model(family, **FAMILIES[family]).to(device)
    turns = asyncio.run(run_engine(model, 2 if is_cpu else 6, 3 if is_cpu else 40))
    close_calls = total = 0
    for ids, count in turns:
        prompt = torch.tensor([ids[:-count]], device=device)
        said = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False
        )
        length = certain(model, ids, count)
        assert ids[-count:][:length] == said[0, -count:].tolist()[:length]
        close_calls, total = close_calls + (length < count), total + count
    assert close_calls <= MAX_CLOSE_CALLS * total


def step(lengths: list[int], shared: int, position: int) -> Batch:
    """One decode step of rows that share `shared` blocks of 16 tokens."""
    prefix = list(range(shared))
    rows = [
        Row(
            i,
            np.array([20 + i + position], np.int32),
            length,
            [*prefix, *range(40 + 20 * i, 60 + 20 * i)],
        )
        for i, length in enumerate(lengths)
    ]
    segments = (Segment(None, 0, tuple(prefix), tuple(range(len(rows)))),)
    return Batch(tuple(rows), (), segments if shared else (), len(rows))


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.no_rehearsal)]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_recorded_steps_have_the_logits_of_steps_that_were_not(
    family: str, dtype: str, device: torch.device
) -> None:
    model = tiny_model(family, **FAMILIES[family], head_dim=32, hidden_size=64)
    model = model.to(device=device, dtype=getattr(torch, dtype))
    config = EngineConfig(num_blocks=200)
    specs = check_model(model)
    capture = choose_capture(model, specs)
    assert capture is not None
    recorded, plain = (
        ModelRunner(model, specs, config=config, max_context=250, capture=chosen)
        for chosen in (capture, None)
    )
    content = [
        torch.randn(cache.shape).to(cache) for layer in plain._cache.layers for cache in layer
    ]
    for runner in (recorded, plain):
        caches = [cache for layer in runner._cache.layers for cache in layer]
        for cache, values in zip(caches, content, strict=True):
            cache.copy_(values)
    # Short first, then long, other trees, fewer rows.
    for shared, num_rows in ((0, 7), (0, 7), (6, 8), (6, 5), (0, 3)):
        for position in range(3):
            lengths = [16 * shared + 5 + 9 * i + position for i in range(num_rows)]
            batch = step(lengths, shared, position)
            logits, expected = (
                runner.compute_logits(batch, list(range(num_rows))).float()
                for runner in (recorded, plain)
            )
            error = (logits - expected).square().mean().sqrt() / expected.std()
            assert error <= (1e-4 if dtype == "float32" else 0.1)
    assert recorded._graphs is not None
    sizes = {size: bucket.replay for size, bucket in recorded._graphs._buckets.items()}
    assert sizes.keys() == {8, 4}
    assert None not in sizes.values()
    recorded.close()
    plain.close()


def test_a_model_with_experts_is_served_without_graphs(device: torch.device) -> None:
    model = tiny_model("mixtral").to(device)
    assert choose_capture(model, check_model(model)) is None


@pytest.mark.no_rehearsal
def test_what_a_graph_cannot_hold_is_refused_and_the_device_works_on(device: torch.device) -> None:
    capture = cuda_graphs.CudaCapture(device)
    values = torch.arange(5.0, device=device)
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError):
        capture(lambda: values * float(values.sum()))
    assert torch.cuda.current_stream() == stream
    replay = capture(lambda: values * 2)
    values.add_(1)
    assert replay().tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
