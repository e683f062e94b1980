"""Faults of other engines that show only with a model: kernels, positions, samplers, hygiene."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import anyio
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentkv import Engine, Session, UnsupportedModelError
from agentkv.config import EngineConfig, SamplingOptions
from agentkv.core.batch import Batch, Row, SampleSpec
from agentkv.core.core import Core
from agentkv.core.sequence import Finished, Request, Snapshot, TokenIds
from agentkv.model.compatibility import check_model, context_limit
from agentkv.model.runner import ModelRunner
from agentkv.model.sampler import sample
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.tiny_models import VOCAB_SIZE, tiny_model

GREEDY = SamplingOptions(temperature=0.0, logprobs=True)
NO_IDS = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


def make_runner(model: PreTrainedModel, num_blocks: int = 128) -> ModelRunner:
    config = EngineConfig(block_size=4, num_blocks=num_blocks)
    return ModelRunner(model, check_model(model), config=config, max_context=context_limit(model))


@pytest.fixture
def runner(llama: PreTrainedModel) -> Iterator[ModelRunner]:
    opened = make_runner(llama)
    yield opened
    opened.close()


def last_logits(runner: ModelRunner, ids: Sequence[int], start: int, blocks: range) -> torch.Tensor:
    """Logits after the last id, with the KV of the first `start` ids in the blocks already."""
    spec = SampleSpec(GREEDY, 0.0, NO_IDS, NO_IDS)
    row = Row(blocks[0], np.array(ids[start:], np.int32), start, blocks, sample=spec)
    logits: torch.Tensor = runner.compute_logits(Batch((row,)), [len(ids) - start - 1])[0]
    return logits


def test_logits_after_200_prompts_are_those_of_a_cold_run(runner: ModelRunner) -> None:
    """vllm#5543, #40896: differences between hit and cold beyond what rounding explains."""
    rng = random.Random(7)
    close = 0
    for _ in range(200):
        ids = rng.choices(range(8, VOCAB_SIZE), k=rng.randint(6, 60))
        split = 4 * rng.randint(1, (len(ids) - 1) // 4)
        cold = last_logits(runner, ids, 0, range(0, 16))
        last_logits(runner, ids[:split], 0, range(16, 32))
        hit = last_logits(runner, ids, split, range(16, 32))
        assert (hit - cold).abs().max() <= 1e-4
        best = cold.topk(2).values
        if best[0] - best[1] <= 1e-3:
            close += 1
        else:
            assert hit.argmax() == cold.argmax()
    assert close <= 1


def test_nan_in_every_slot_that_holds_nothing_changes_no_reply(llama: PreTrainedModel) -> None:
    """vllm#936, #641, flash-attention#2374, #1745, shark-ai#665: masked lanes times NaN are NaN."""
    clean, poisoned = (replies_of(llama, is_poisoned) for is_poisoned in (False, True))
    assert clean == poisoned


def replies_of(model: PreTrainedModel, is_poisoned: bool) -> list[list[int]]:
    """Forks and strangers in a small pool, with NaN in what nobody has filled, or without."""
    runner = make_runner(model, num_blocks=18)
    core = Core(runner, EngineConfig(block_size=4, max_num_seqs=8, max_batch_tokens=72))
    warm = Request(Snapshot(TokenIds.EMPTY), list(range(10, 19)), kind="warm")
    (base,) = run(core, is_poisoned, warm)
    replies = []
    for turn in range(3):
        requests = [
            Request(base, [20 + turn + at], max_new_tokens=9, options=GREEDY) for at in range(3)
        ]
        stranger = [30 + turn] * 11
        requests.append(
            Request(Snapshot(TokenIds.EMPTY), stranger, max_new_tokens=9, options=GREEDY)
        )
        for snapshot in run(core, is_poisoned, *requests):
            core.release(snapshot)
        replies += [request.output_ids for request in requests]
    assert core.stats().preemptions + core.stats().evictions > 0
    core.close()
    return replies


def run(core: Core, is_poisoned: bool, *requests: Request) -> list[Snapshot]:
    """The snapshots that requests end with."""
    for request in requests:
        core.submit(request)
    while core.has_work:
        if is_poisoned:
            poison(core)
        core.step()
        core.check()
    outcomes = [request.outcome for request in requests]
    assert all(isinstance(outcome, Finished) for outcome in outcomes), outcomes
    return [o.snapshot for o in outcomes if isinstance(o, Finished) and o.snapshot is not None]


def poison(core: Core) -> None:
    """NaN in each slot that no block in use has filled, the blocks of the kernels left out."""
    assert isinstance(core._runner, ModelRunner)
    for layer in core._runner._cache.layers:
        for cache in layer:
            for block, slots in enumerate(core._memory.pool.filled_slots):
                cache[block, :, slots:] = torch.nan


def test_a_long_sequence_leaves_no_trace_in_the_positions_of_later_ones() -> None:
    """hf#25306, #27227: a long sequence rescaled dynamic RoPE for all short ones after it."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=dynamic)
    core = Core(make_runner(model), EngineConfig(block_size=4, prefix_cache=False))

    def ask(*lengths: int) -> list[Request]:
        requests = [
            Request(Snapshot(TokenIds.EMPTY), [9] * n, max_new_tokens=4, options=GREEDY)
            for n in lengths
        ]
        for snapshot in run(core, False, *requests):
            core.release(snapshot)
        return requests

    long = context_limit(model) - 4
    first, _, third, *together = [
        one for lengths in ((8,), (long,), (8,), (8, long, 8)) for one in ask(*lengths)
    ]
    for other in (third, together[0], together[2]):
        assert other.output_ids == first.output_ids
        assert [p.logprob for p in other.logprobs] == pytest.approx(
            [p.logprob for p in first.logprobs], abs=1e-4
        )
    core.close()


def test_positions_that_are_not_known_to_be_served_right_are_refused_at_load() -> None:
    """hf#25306: some RoPE types depend on what else ran."""
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="spiral"):
        check_model(model)


def forward(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(9, 30)[None]).logits
    return logits


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_users_model_works_as_before_while_and_after_an_engine_runs_it() -> None:
    """hf#45943, #48735, #48294: a started engine rewired the user's model and left it so."""
    model = tiny_model("llama")
    before, settings = forward(model), model.config.to_dict()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    engine = Engine.from_pretrained(
        model, tokenizer=byte_tokenizer(), block_size=4, num_blocks=128, device="cpu"
    )
    async with engine:
        session = engine.session(system="hello")
        async with session.stream("go", max_tokens=12, temperature=0) as stream:
            await anext(stream)
            assert torch.equal(forward(model), before)
            await stream.result()
        assert torch.equal(forward(model), before)
    assert torch.equal(forward(model), before)
    assert model.config.to_dict() == settings
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_replies_of_consecutive_batches_go_to_those_who_asked(llama: PreTrainedModel) -> None:
    """hf#48294: request ids ran on between calls, so that results came in the wrong order."""
    engine = Engine.from_pretrained(
        llama, tokenizer=byte_tokenizer(), block_size=4, num_blocks=128, device="cpu"
    )
    async with engine:
        alone = [await reply(engine.session(namespace="alone"), at) for at in range(6)]
        for _ in range(2):
            found: dict[int, tuple[int, ...]] = {}

            async def ask(at: int, found: dict[int, tuple[int, ...]] = found) -> None:
                found[at] = await reply(engine.session(), at)

            async with anyio.create_task_group() as group:
                for at in range(6):
                    group.start_soon(ask, at)
            assert [found[at] for at in range(6)] == alone


async def reply(session: Session, at: int) -> tuple[int, ...]:
    completion = await session.generate([40 + at] * 5, max_tokens=5, temperature=0)
    return completion.token_ids


def test_the_prefix_that_forks_share_neither_grows_nor_changes_in_a_real_model() -> None:
    """MemTensor/MemOS#2301, physical-ai-studio#239: a cache that was only read grew every time."""
    model = tiny_model("llama")
    runner = ModelRunner(
        model,
        check_model(model),
        config=EngineConfig(block_size=4, num_blocks=64),
        max_context=context_limit(model),
    )
    core = Core(runner, EngineConfig(block_size=4, max_num_seqs=16, max_batch_tokens=80))
    prompt = [8 + 3 * at % 200 for at in range(18)]
    base = finish(core, Request(Snapshot(TokenIds.EMPTY), prompt, kind="warm"))
    assert base.table is not None
    block_ids = list(base.table.block_ids)

    def content() -> list[torch.Tensor]:
        filled = [cache[block_ids].transpose(1, 2).flatten(0, 1) for cache in caches_of(runner)]
        return [cache[:17].clone() for cache in filled]

    before = content()
    replies = []
    for _ in range(5):
        greedy = SamplingOptions(temperature=0.0)
        request = Request(base, [9, 10], max_new_tokens=6, options=greedy)
        core.release(finish(core, request))
        replies.append(request.output_ids)
        assert (base.table.block_ids, base.table.num_tokens) == (block_ids, 17)
        assert all(map(torch.equal, content(), before))
    assert len(set(map(tuple, replies))) == 1
    core.close()


def finish(core: Core, request: Request) -> Snapshot:
    """The snapshot that a request ends with."""
    core.submit(request)
    while core.has_work:
        core.step()
        core.check()
    assert isinstance(request.outcome, Finished)
    assert request.outcome.snapshot is not None
    return request.outcome.snapshot


def caches_of(runner: ModelRunner) -> list[torch.Tensor]:
    """K and V of all layers, each [num_blocks, num_heads, block_size, head_dim]."""
    return [cache for layer in runner._cache.layers for cache in layer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [2, 5, 8, 20, 37, 38, 44])
def test_a_tiny_temperature_tends_to_greedy(dtype: torch.dtype, exponent: int) -> None:
    """vllm#890, #2937, aici#19: logits divided by a tiny temperature were infinite or NaN."""
    logits = torch.tensor([[-3e4, 1.0, 6e4, 5e4, -math.inf], [-1.0, -2.0, -3.0, -4.0, -5.0]])
    options = SamplingOptions(temperature=10.0**-exponent, logprobs=True, top_p=0.9, min_p=0.01)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        spec = SampleSpec(options, uniform, np.empty(0, np.int32), np.empty(0, np.int32))
        results = sample(logits.to(dtype), [spec, spec])
        assert [result.error for result in results] == [None, None]
        assert [result.token_id for result in results] == [2, 0]
        assert all(r.logprob is not None and math.isfinite(r.logprob) for r in results)
