"""The tiny models that other tests stand on."""

from __future__ import annotations

import pytest
import torch

from agentkv.testing.tiny_models import REFUSED_FAMILIES, SERVED_FAMILIES, VOCAB_SIZE, tiny_model


@pytest.mark.parametrize("family", [*SERVED_FAMILIES, *REFUSED_FAMILIES])
def test_building_a_model_leaves_the_global_random_state_and_settings(family: str) -> None:
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    model = tiny_model(family)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is dtype
    assert not model.training
    assert model.get_input_embeddings().weight.shape[0] == VOCAB_SIZE


def test_the_seed_alone_decides_the_weights() -> None:
    first, same, other = (tiny_model("qwen2", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_logits_differ_clearly_between_tokens() -> None:
    with torch.inference_mode():
        logits = tiny_model("llama")(torch.arange(9)[None]).logits
    assert logits.std() > 1.0


def test_overrides_reach_the_config() -> None:
    assert tiny_model("llama", num_hidden_layers=2, eos_token_id=7).config.eos_token_id == 7


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(KeyError):
        tiny_model("no such family")
