"""The numeric comparison of the runner with the model alone."""

from __future__ import annotations

import pytest
import torch

from agentkv.config import EngineConfig
from agentkv.core.batch import Batch, RowResult
from agentkv.errors import UnsupportedModelError
from agentkv.model.canary import check_canary
from agentkv.model.compatibility import probe_layers
from agentkv.model.runner import ModelRunner
from agentkv.testing.tiny_models import SERVED_FAMILIES, tiny_model


def make_runner(
    family: str, *, num_blocks: int = 24, block_size: int = 4, max_context: int = 256
) -> ModelRunner:
    model = tiny_model(family)
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size)
    return ModelRunner(model, probe_layers(model), config=config, max_context=max_context)


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_served_families_pass(family: str) -> None:
    model = tiny_model(family)
    assert check_canary(make_runner(family), model, probe_layers(model)) < 1e-4


def test_recurrent_state_beside_attention_is_found_by_the_canary_alone() -> None:
    model = tiny_model("falcon_h1")
    specs = probe_layers(model)  # the structure looks perfect
    with pytest.raises(UnsupportedModelError, match=r"^\[canary\] .*standard deviations"):
        check_canary(make_runner("falcon_h1"), model, specs)


def test_sequences_are_longer_than_the_window() -> None:
    model = tiny_model("mistral", sliding_window=40)
    specs = probe_layers(model)
    config = EngineConfig(num_blocks=40, block_size=4)
    runner = ModelRunner(model, specs, config=config, max_context=256)
    longest = 0
    execute = runner.execute

    def watch(batch: Batch) -> list[RowResult]:
        nonlocal longest
        longest = max(longest, *(row.end for row in batch.rows))
        return execute(batch)

    runner.execute = watch  # type: ignore[method-assign]  # to look on
    check_canary(runner, model, specs)
    assert longest == 47


@pytest.mark.parametrize(("num_blocks", "block_size"), [(2, 4), (2, 16), (8, 1), (3, 5), (64, 8)])
def test_the_check_fits_small_pools(num_blocks: int, block_size: int) -> None:
    runner = make_runner("llama", num_blocks=num_blocks, block_size=block_size)
    assert check_canary(runner, tiny_model("llama")) < 1e-4


def test_a_short_context_is_not_exceeded() -> None:
    assert check_canary(make_runner("llama", max_context=3), tiny_model("llama")) < 1e-4


def test_a_pool_too_small_to_check_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="too few"):
        check_canary(make_runner("llama", num_blocks=1), tiny_model("llama"))


def test_other_weights_are_noticed() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^\[canary\]"):
        check_canary(make_runner("llama"), tiny_model("llama", seed=1))


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    config = EngineConfig(num_blocks=24, block_size=4)
    runner = ModelRunner(model, probe_layers(model), config=config, max_context=256)
    with pytest.raises(UnsupportedModelError, match="finite"):
        check_canary(runner, model)


def test_a_model_in_bfloat16_passes_within_its_rounding() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    config = EngineConfig(num_blocks=24, block_size=4)
    runner = ModelRunner(model, probe_layers(model), config=config, max_context=256)
    assert check_canary(runner, model) < 0.1
