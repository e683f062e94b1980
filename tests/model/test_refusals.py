"""Models that would be served wrongly, each refused by the check that must find it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel

from agentkv.errors import UnsupportedModelError
from agentkv.model.compatibility import (
    check_attention_interface,
    check_config,
    check_evaluation_mode,
    check_model,
    check_signature,
    check_source,
    check_stateless,
    context_limit,
    probe_layers,
)
from agentkv.testing.tiny_models import REFUSED_FAMILIES, tiny_model

Check = Callable[[PreTrainedModel], object]


@pytest.mark.parametrize(
    ("family", "check", "name"),
    [
        ("falcon", check_attention_interface, "interface"),
        ("bloom", check_signature, "signature"),
        ("bloom", check_attention_interface, "interface"),
        ("mpt", check_signature, "signature"),
        ("mpt", check_attention_interface, "interface"),
        ("mamba", check_config, "config"),
        ("mamba", check_signature, "signature"),
        ("mamba", check_stateless, "state"),
        ("mamba", probe_layers, "structure"),
        ("falcon_h1", check_config, "config"),
        ("falcon_h1", check_stateless, "state"),
        ("llama4", check_config, "config"),
        ("llama4", check_source, "source"),
        ("llama4", probe_layers, "mask"),
        ("phimoe", probe_layers, "mask"),
        ("diffllama", probe_layers, "structure"),
        ("doge", probe_layers, "structure"),
        ("t5", check_config, "config"),
    ],
)
def test_the_right_check_refuses(family: str, check: Check, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^\[{name}\] \w+ is not served: "):
        check(tiny_model(family))


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_all_checks_together_refuse(family: str) -> None:
    with pytest.raises(UnsupportedModelError):
        check_model(tiny_model(family))


def test_a_chunk_longer_than_any_test_is_seen_in_the_mask() -> None:
    model = tiny_model("llama4", attention_chunk_size=8192)
    with pytest.raises(UnsupportedModelError, match=r"^\[mask\]"):
        probe_layers(model)


def test_a_model_in_training_mode_is_refused() -> None:
    model = tiny_model("llama").train()
    with pytest.raises(UnsupportedModelError, match=r"^\[training\] .*model\.eval\(\)"):
        check_evaluation_mode(model)
    with pytest.raises(UnsupportedModelError, match=r"^\[training\]"):
        check_model(model)
    assert model.training


def test_one_module_in_training_mode_is_enough() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.train()
    with pytest.raises(UnsupportedModelError, match=r"^\[training\]"):
        check_evaluation_mode(model)


def test_attention_to_later_tokens_is_refused() -> None:
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        is_decoder=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError):
        check_model(model)


def test_an_unknown_keyword_to_attention_is_refused() -> None:
    def add(
        module: torch.nn.Module, args: tuple[object, ...], keywords: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return args, {**keywords, "block_indices": torch.zeros(1)}

    model = tiny_model("llama")
    model.model.layers[1].self_attn.register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"^\[structure\].*block_indices"):
        probe_layers(model)


def test_an_unknown_rope_type_is_refused() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1.0}
    with pytest.raises(UnsupportedModelError, match="spiral"):
        check_config(model)


def test_rope_types_are_found_per_layer_type() -> None:
    model = tiny_model("gemma3")
    model.config.rope_parameters["sliding_attention"]["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModelError, match="spiral"):
        check_config(model)


def test_a_rope_without_its_original_length_is_refused() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1.0}
    with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings"):
        context_limit(model)


def test_a_model_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no language model head"):
        check_config(tiny_model("llama").model)
