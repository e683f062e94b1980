"""The runner alone: what it returns, what it survives, and what it leaves untouched."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from agentkv_kernels.plan import StepPlan
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.config import EngineConfig, SamplingOptions
from agentkv.core.batch import Batch, BlockCopy, Row, RowResult, SampleSpec
from agentkv.core.protocols import FatalRunnerError, Runner
from agentkv.errors import EngineClosedError, ModelError
from agentkv.model.attention import ATTENTION_NAME, attend
from agentkv.model.compatibility import check_model, context_limit
from agentkv.model.runner import ModelRunner
from agentkv.testing.tiny_models import VOCAB_SIZE, tiny_model

BLOCK_SIZE = 4
NO_IDS = np.empty(0, np.int32)
POISON = 7


def spec(**options: Any) -> SampleSpec:  # Any: options of several types
    return SampleSpec(SamplingOptions(**{"temperature": 0, **options}), 0.5, NO_IDS, NO_IDS)


def make_runner(model: PreTrainedModel, **settings: Any) -> ModelRunner:  # Any: config fields
    settings = {"block_size": BLOCK_SIZE, "num_blocks": 24, **settings}
    return ModelRunner(
        model,
        check_model(model),
        config=EngineConfig(**settings),
        max_context=context_limit(model),
    )


def row(ids: Sequence[int], blocks: Sequence[int], start: int = 0, **fields: Any) -> Row:
    fields = {"sample": spec(), **fields}
    return Row(blocks[0], np.asarray(ids, np.int32), start, blocks, **fields)


def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def run(runner: ModelRunner, *rows: Row, version: int = 0) -> list[RowResult]:
    return runner.execute(Batch(rows, tree_version=version))


def ids_of(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(8, VOCAB_SIZE, count).tolist()
    return ids


def test_is_a_runner() -> None:
    assert isinstance(make_runner(tiny_model("llama")), Runner)


@pytest.mark.parametrize("family", ["llama", "gemma4", "deepseek_v3", "gpt2"])
def test_logits_are_those_of_the_model(family: str) -> None:
    model = tiny_model(family)
    long, short = ids_of(19), ids_of(3, 1)
    batch = Batch((row(long, [4, 9, 2, 7, 1]), row(short, [0])))
    logits = make_runner(model).compute_logits(batch, list(range(22)))
    expected = torch.cat([logits_of(model, long), logits_of(model, short)])
    assert (logits - expected).abs().max() <= 1e-4 * expected.std()


def test_rows_that_want_nothing_get_nothing() -> None:
    runner = make_runner(tiny_model("llama"))
    assert run(runner, row(ids_of(5), [1, 2], sample=None)) == [RowResult()]


def test_a_batch_without_rows_only_copies() -> None:
    model = tiny_model("llama")
    runner = make_runner(model)
    ids = ids_of(6)
    run(runner, row(ids[:5], [1, 2], sample=None))
    assert runner.execute(Batch((), (BlockCopy(2, 9, 1), BlockCopy(1, 8, 4)))) == []
    (result,) = run(runner, row(ids[5:], [8, 9], start=5), version=1)
    assert result.token_id == int(logits_of(model, ids)[-1].argmax())


def test_targets_are_log_probabilities_of_the_unmodified_logits() -> None:
    model = tiny_model("qwen2")
    ids, biased = ids_of(6), spec(logit_bias={3: 50.0})
    targets = ((0, ids[1]), (3, 17), (5, 4))
    first, second = run(
        make_runner(model),
        row(ids, [3, 5], sample=biased, targets=targets),
        row(ids, [6, 1], sample=None, targets=targets[1:]),
    )
    expected = logits_of(model, ids).log_softmax(-1)
    wanted = [expected[offset, token_id].item() for offset, token_id in targets]
    assert first.token_id == 3
    assert first.target_logprobs == pytest.approx(wanted, abs=1e-4)
    assert second.token_id is None
    assert second.target_logprobs == pytest.approx(wanted[1:], abs=1e-4)


def poisoned_model() -> PreTrainedModel:
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return model


def test_a_row_without_finite_logits_fails_alone() -> None:
    model = poisoned_model()
    ids = ids_of(6)
    healthy = row(ids, [3, 5])
    sick = [
        row([*ids[:3], POISON], [1]),
        row([*ids[:3], POISON], [2], sample=None, targets=((3, 1),)),
    ]
    first, *failed, last = run(make_runner(model), healthy, *sick, row(ids, [6, 7]))
    assert first.token_id == last.token_id == int(logits_of(model, ids)[-1].argmax())
    assert all("not finite" in (result.error or "") for result in failed)


def test_blocks_that_held_nan_serve_the_next_row() -> None:
    model = poisoned_model()
    runner = make_runner(model)
    ids = ids_of(6)
    run(runner, row([POISON] * 8, [3, 5]))
    (result,) = run(runner, row(ids, [5, 3]), version=1)
    assert result.token_id == int(logits_of(model, ids)[-1].argmax())


def test_a_step_that_raises_leaves_the_runner_usable() -> None:
    model = tiny_model("llama")
    runner = make_runner(model)
    ids = ids_of(6)
    run(runner, row(ids[:4], [3]))
    with pytest.raises(IndexError):
        run(runner, row([VOCAB_SIZE], [3, 5], start=4))
    (result,) = run(runner, row(ids[4:5], [3, 5], start=4))
    assert result.token_id == int(logits_of(model, ids[:5])[-1].argmax())


def test_a_broken_device_is_fatal() -> None:
    model = tiny_model("llama")

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access")

    runner = make_runner(model)
    runner._model.register_forward_pre_hook(fail)
    with pytest.raises(FatalRunnerError, match="illegal memory access") as caught:
        run(runner, row([1], [0]))
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)


def test_a_failed_device_is_fatal_too_where_it_comes_to_light_while_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access")

    runner = make_runner(tiny_model("llama"))
    monkeypatch.setattr("agentkv.model.runner.sample", fail)
    with pytest.raises(FatalRunnerError, match="illegal memory access"):
        run(runner, row([1], [0]))


def test_a_plan_is_not_advanced_over_a_step_that_was_left_out() -> None:
    model = tiny_model("llama")
    runner = make_runner(model)
    ids = ids_of(9)
    run(runner, row(ids[:4], [3, 5, 1]))
    run(runner, row(ids[4:5], [3, 5, 1], start=4))
    run(runner, row(ids[5:8], [3, 5, 1], start=5))
    (result,) = run(runner, row(ids[8:], [3, 5, 1], start=8))
    assert result.token_id == int(logits_of(model, ids)[-1].argmax())


def test_a_block_that_another_row_holds_is_never_written() -> None:
    runner = make_runner(tiny_model("llama"))
    ids = ids_of(6)
    run(runner, row(ids, [3, 5], sample=None))
    before = [cache.clone() for layer in runner._cache.layers for cache in layer]
    with pytest.raises(ValueError, match="block 5 is written by a row and also held by others"):
        run(runner, row([1], [3, 5], start=6), row([2], [3, 5], start=7), version=1)
    after = [cache for layer in runner._cache.layers for cache in layer]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_writes_are_checked_once_for_all_steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[StepPlan] = []
    monkeypatch.setattr(StepPlan, "check_writes", lambda plan: checked.append(plan))
    runner = make_runner(tiny_model("llama"))
    ids = ids_of(8)
    for start in range(8):
        run(runner, row(ids[start : start + 1], [3, 5], start=start))
    assert len(checked) == 1


def test_bfloat16_is_close_to_float32() -> None:
    model = tiny_model("llama").bfloat16()
    ids = ids_of(9)
    logits = make_runner(model).compute_logits(Batch((row(ids, [3, 5, 1]),)), [8])
    expected = logits_of(copy.deepcopy(model).float(), ids)
    assert logits.dtype == torch.bfloat16
    assert (logits[0].float() - expected[-1]).abs().max() < 0.2 * expected.std()


def test_the_callers_model_is_left_as_it_was() -> None:
    model = tiny_model("gemma3")
    ids = ids_of(20)
    implementation, before = model.config._attn_implementation, logits_of(model, ids)
    settings, modules = model.config.to_dict(), list(model.modules())
    runner = make_runner(model)
    run(runner, row(ids, [4, 9, 2, 7, 1]))
    assert torch.equal(logits_of(model, ids), before)
    assert model.config._attn_implementation == implementation != ATTENTION_NAME
    assert model.config.to_dict() == settings
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    runner.close()
    assert torch.equal(logits_of(model, ids), before)


def test_the_weights_are_shared_with_the_callers_model() -> None:
    model = tiny_model("gpt2")
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {p.data_ptr() for p in make_runner(model)._model.parameters()} <= shared


def test_the_callers_model_may_run_at_the_same_time() -> None:
    model = tiny_model("mistral")
    ids = ids_of(20)
    expected = logits_of(model, ids)
    results: list[bool] = []

    def use_model() -> None:
        results.extend(torch.equal(logits_of(model, ids), expected) for _ in range(30))

    runner = make_runner(model)
    thread = threading.Thread(target=use_model)
    thread.start()
    tokens = {run(runner, row(ids, [4, 9, 2, 7, 1]))[0].token_id for _ in range(30)}
    thread.join()
    assert tokens == {int(expected[-1].argmax())}
    assert results == [True] * 30


def test_two_runners_of_one_model_do_not_meet() -> None:
    model = tiny_model("llama")
    first, second = make_runner(model), make_runner(model)
    ids, other = ids_of(6), ids_of(6, 1)
    run(first, row(ids[:5], [1, 2]))
    run(second, row(other[:5], [1, 2]))
    (result,) = run(first, row(ids[5:], [1, 2], start=5))
    assert result.token_id == int(logits_of(model, ids)[-1].argmax())


def test_nothing_global_changes() -> None:
    runner = make_runner(tiny_model("llama"))
    before = (torch.get_rng_state().tolist(), torch.get_num_threads(), torch.is_grad_enabled())
    run(runner, row(ids_of(3), [1], sample=spec(temperature=1.0)))
    after = (torch.get_rng_state().tolist(), torch.get_num_threads(), torch.is_grad_enabled())
    assert before == after
    assert not torch.is_inference_mode_enabled()


def test_attention_outside_a_step_says_so() -> None:
    empty = torch.empty(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match="inside an engine's step"):
        attend(torch.nn.Module(), empty, empty, empty)


def test_closing_twice_is_fine_and_running_afterwards_is_not() -> None:
    runner = make_runner(tiny_model("llama"))
    runner.close()
    runner.close()
    with pytest.raises(EngineClosedError):
        run(runner, row([1], [0]))


def test_memory_is_sized_from_the_layers_that_were_seen() -> None:
    # Two layers of 2 heads x 16, two of 2 x 32 (Gemma 4), K and V, float32.
    info = make_runner(tiny_model("gemma4"), num_blocks=5).info
    assert info.bytes_per_block == 2 * (2 * 2 * 16 + 2 * 2 * 32) * BLOCK_SIZE * 4
    assert info.num_blocks == 5


def test_memory_in_bytes_is_turned_into_blocks() -> None:
    model = tiny_model("llama")
    block_bytes = make_runner(model).info.bytes_per_block
    runner = make_runner(model, num_blocks=None, kv_memory_bytes=3 * block_bytes + 1)
    assert runner.info.num_blocks == 3
    with pytest.raises(ModelError, match=f"one block of this model takes {block_bytes} bytes"):
        make_runner(model, num_blocks=None, kv_memory_bytes=block_bytes - 1)


def test_default_memory_holds_a_context_and_no_more_than_can_be_used() -> None:
    runner = make_runner(tiny_model("llama"), num_blocks=None, max_num_seqs=3)
    assert runner.info.max_context == 256
    assert runner.info.num_blocks == 3 * 256 // BLOCK_SIZE


def test_memory_that_cannot_be_had_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="could not be allocated"):
        make_runner(tiny_model("llama"), num_blocks=2**31 - 1)
