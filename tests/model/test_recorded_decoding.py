"""Decode steps on tiny models through recorded buckets: the same logits as without recording.

Nothing is recorded on a CPU: a replay calls the function again over the fixed buffers, padding and
all. Attention on the CPU takes no padding, so here it is cut off before and put back after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from agentkv_kernels import launch
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.sharing import Sharing
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.config import EngineConfig, SamplingOptions
from agentkv.core.batch import Batch, Row
from agentkv.core.core import Core
from agentkv.core.sequence import Finished, Request, Snapshot, TokenIds
from agentkv.model import cuda_graphs, graphs
from agentkv.model.canary import check_canary
from agentkv.model.compatibility import check_model, context_limit
from agentkv.model.cuda_graphs import choose_capture, data_dependence
from agentkv.model.runner import ModelRunner
from agentkv.model.structure import share_parameters
from agentkv.testing.tiny_models import VOCAB_SIZE, tiny_model

BLOCK_SIZE = 8
FAMILIES: dict[str, dict[str, Any]] = {  # Any: values of a transformers config
    "llama": {},
    "gemma3": {"sliding_window": 30},
    "gpt2": {},
    "gemma4": {},
}


@pytest.fixture(autouse=True)
def attention_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the kernels of a GPU, query tokens behind the plan's own come out zero."""
    attention = launch.paged_attention

    def padded(
        query: Tensor, keys: Tensor, values: Tensor, plan: StepPlan, **options: Any
    ) -> Tensor:
        out = attention(query[: plan.num_tokens], keys, values, plan, **options)
        return torch.cat([out, out.new_zeros(len(query) - len(out), *out.shape[1:])])

    monkeypatch.setattr(launch, "paged_attention", padded)


class Recorder:
    """A capture that calls the function again, into one result tensor for each recording."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = run().clone()
        self.sizes.append(len(out))

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(run())

        return replay


class ComparedRunner(ModelRunner):
    """Runs each step on a second runner too, which records nothing, and compares the logits."""

    plain: ModelRunner

    def compute_logits(self, batch: Batch, keep: Sequence[int]) -> Tensor:
        logits, plain = super().compute_logits(batch, keep), self.plain.compute_logits(batch, keep)
        assert (logits - plain).abs().max() <= 1e-4 * plain.std()
        return logits


def make_core(model: PreTrainedModel, recorder: graphs.Capture) -> Core:
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=300, max_num_seqs=12, max_batch_tokens=100
    )
    settings: dict[str, Any] = {  # Any: arguments of several types
        "config": config,
        "max_context": context_limit(model),
        # Tiny heads save few bytes, so that the default would leave most segments unshared.
        "sharing": Sharing(min_tokens=BLOCK_SIZE, fixed_bytes=0),
    }
    specs = check_model(model)
    runner = ComparedRunner(model, specs, **settings, capture=recorder)
    runner.plain = ModelRunner(model, specs, **settings)
    return Core(runner, config)


def submit(core: Core, base: Snapshot | None, ids: list[int], count: int) -> Request:
    snapshot = Snapshot(TokenIds.EMPTY) if base is None else base
    greedy = SamplingOptions(temperature=0.0)
    request = Request(snapshot, ids, max_new_tokens=count, options=greedy)
    core.submit(request)
    return request


def finish(core: Core) -> None:
    while core.has_work:
        core.step()
        core.check()


def after(request: Request) -> Snapshot:
    assert isinstance(request.outcome, Finished), request.outcome
    assert request.outcome.snapshot is not None
    return request.outcome.snapshot


def ids_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_that_come_and_go_have_the_logits_of_steps_run_as_they_are(family: str) -> None:
    recorder = Recorder()
    core = make_core(tiny_model(family, **FAMILIES[family]), recorder)
    first = submit(core, None, ids_of(50, 1), 3)
    finish(core)
    for generation in range(2):
        forks = [submit(core, after(first), ids_of(n, n), 6 * n) for n in range(1, 7)]
        finish(core)
        first = forks[generation]
    # Six rows at first, and one less every six steps.
    assert set(recorder.sizes) == {1, 2, 4, 8}
    assert len(recorder.sizes) == 4
    assert recorder.replays > 60


def test_what_was_recorded_at_a_few_tokens_serves_a_long_row() -> None:
    recorder = Recorder()
    core = make_core(tiny_model("llama"), recorder)
    request = submit(core, None, ids_of(3, 1), 200)
    finish(core)
    assert len(request.output_ids) == 200
    assert recorder.sizes == [1]
    assert recorder.replays == 198  # all but the prompt's step and the first decode step


def test_a_tree_beyond_the_capacity_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_PARTS_PER_ROW", 1)
    recorder = Recorder()
    core = make_core(tiny_model("llama"), recorder)
    bases = [submit(core, None, ids_of(20, 1), 2)]
    finish(core)
    for depth in range(7):
        bases.append(submit(core, after(bases[-1]), ids_of(14, depth), 2))
        finish(core)
    before = recorder.replays
    deep = [submit(core, after(base), ids_of(2, 9), 10) for base in bases[1:]]
    finish(core)
    assert all(len(request.output_ids) == 10 for request in deep)
    assert recorder.replays == before
    short = submit(core, None, ids_of(3, 4), 5)
    finish(core)
    assert len(short.output_ids) == 5
    assert recorder.replays > before


def decode_row(seq_id: int, start: int, block: int) -> Row:
    return Row(seq_id, np.array([9 + seq_id], np.int32), start, [block])


def test_padding_writes_to_no_block() -> None:
    model = tiny_model("llama")
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=6)
    recorder = Recorder()
    runner = ModelRunner(model, check_model(model), config=config, max_context=64, capture=recorder)
    for cache in (cache for layer in runner._cache.layers for cache in layer):
        cache.copy_(torch.arange(cache.numel(), dtype=cache.dtype).view(cache.shape))
    held = [cache.clone() for layer in runner._cache.layers for cache in layer]
    for start in (2, 3):
        rows = tuple(decode_row(i, start, block) for i, block in enumerate((4, 1, 3)))
        runner.compute_logits(Batch(rows), [0, 1, 2])
    assert recorder.sizes == [4]
    for cache, before in zip((c for la in runner._cache.layers for c in la), held, strict=True):
        changed = (cache != before).flatten(2).any(-1).any(-1)
        # The last block is TRASH.
        assert changed.nonzero().flatten().tolist() in ([1, 3, 4], [1, 3, 4, 7])


def test_logits_of_a_step_outlive_the_next() -> None:
    model = tiny_model("llama")
    runner = ModelRunner(
        model, check_model(model), config=EngineConfig(block_size=BLOCK_SIZE, num_blocks=6),
        max_context=64, capture=Recorder(),
    )  # fmt: skip
    runner.compute_logits(Batch((decode_row(0, 2, 4),)), [0])
    first = runner.compute_logits(Batch((decode_row(0, 3, 4),)), [0])
    kept = first.clone()
    runner.compute_logits(Batch((decode_row(0, 4, 4),)), [0])
    assert torch.equal(first, kept)


def test_the_canary_runs_through_a_recorded_step() -> None:
    model, recorder = tiny_model("gemma3", **FAMILIES["gemma3"]), Recorder()
    specs = check_model(model)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=40)
    runner = ModelRunner(model, specs, config=config, max_context=200, capture=recorder)
    assert check_canary(runner, model, specs) < 0.01
    assert recorder.replays == 1


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels run, a recorder instead of CUDA graphs."""
    monkeypatch.setattr(launch, "runs_triton", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda device: Recorder())


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize(
    ("family", "is_recorded"),
    [("llama", True), ("gemma3", True), ("gemma4", True), ("stablelm", True), ("mixtral", False),
     ("qwen3_moe", False), ("gpt_oss", False), ("deepseek_v3", False)],
)  # fmt: skip
def test_models_with_experts_are_not_recorded(family: str, is_recorded: bool) -> None:
    model = tiny_model(family)
    capture = choose_capture(model, check_model(model))
    assert isinstance(capture, Recorder) == is_recorded


@pytest.mark.usefixtures("cpu_as_gpu")
def test_heads_too_large_for_the_kernels_are_not_recorded() -> None:
    model = tiny_model("qwen3", head_dim=1024)
    assert choose_capture(model, check_model(model)) is None


def test_nothing_is_recorded_on_a_cpu() -> None:
    model = tiny_model("llama")
    assert choose_capture(model, check_model(model)) is None


def test_rope_that_branches_on_the_positions_is_found() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "scalar" in str(data_dependence(tiny_model("llama", rope_parameters=rope)))


def test_experts_that_loop_over_their_rows_are_found_by_that_too() -> None:
    model = tiny_model("mixtral")
    model.set_experts_implementation("eager")
    twin = share_parameters(model, cuda_graphs._WATCHED_NAME)
    watch, ids = cuda_graphs._Watch(), torch.arange(4)  # type: ignore[no-untyped-call]  # torch's
    with torch.no_grad(), watch:
        twin(input_ids=ids[None], position_ids=ids[None], use_cache=False)
    assert watch.found is not None


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        (lambda x: x[:, x[0, :, 0] > 9].sum() + x, True),
        (lambda x: x.masked_fill(x > 9, 0.0), False),
        (lambda x: x[:, torch.arange(x.shape[1])], False),
        (lambda x: x.index_put((x > 9,), torch.tensor(0.0)), True),
        (lambda x: x * len(x.nonzero()), True),
        (lambda x: x * float(x.sum().item()), True),
        (lambda x: x if x.sum() > 0 else -x, True),
        (lambda x: x[torch.where(x > 9)[0]], True),
    ],
    ids=["mask", "fill", "indices", "put by mask", "nonzero", "item", "branch", "where"],
)
def test_only_work_that_depends_on_values_is_found(
    change: Callable[[Tensor], Tensor], is_found: bool
) -> None:
    model = tiny_model("llama")
    norm = model.get_decoder().norm
    forward = norm.forward
    norm.forward = lambda x: change(forward(x))
    assert (data_dependence(model) is not None) == is_found
