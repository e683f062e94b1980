"""What the checks find out about models that are served."""

from __future__ import annotations

import copy

import pytest
import torch

from agentkv.model.compatibility import LayerSpec, check_model, context_limit
from agentkv.model.structure import share_parameters
from agentkv.testing.tiny_models import SERVED_FAMILIES, tiny_model


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_served_families_pass_every_check(family: str) -> None:
    model = tiny_model(family)
    specs = check_model(model)
    assert [spec.layer_idx for spec in specs] == list(range(model.config.num_hidden_layers))
    assert context_limit(model) == 256


@pytest.mark.parametrize("family", ["llama", "gemma4", "gpt_oss"])
def test_checking_leaves_the_model_and_torch_as_they_were(family: str) -> None:
    model = tiny_model(family)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        before = model(ids).logits
    attention, config = model.config._attn_implementation, model.config.to_json_string()
    parameters, state = dict(model.named_parameters()), torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    check_model(model)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == attention
    assert model.config.to_json_string() == config
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_plain_layer_is_described_whole() -> None:
    assert check_model(tiny_model("llama"))[1] == LayerSpec(
        layer_idx=1,
        num_q_heads=4,
        num_kv_heads=2,
        key_dim=8,
        value_dim=8,
        window=None,
        scale=8**-0.5,
        softcap=None,
        has_sinks=False,
    )


def test_windows_softcaps_and_scales_are_seen_per_layer() -> None:
    specs = check_model(tiny_model("gemma2"))
    assert [spec.window for spec in specs] == [8, None, 8]
    assert {(spec.softcap, spec.scale) for spec in specs} == {(50.0, 24**-0.5)}


def test_head_sizes_may_differ_between_layers_and_between_key_and_value() -> None:
    assert [spec.key_dim for spec in check_model(tiny_model("gemma4"))] == [16, 32, 16, 32]
    assert {(s.key_dim, s.value_dim) for s in check_model(tiny_model("deepseek_v3"))} == {(24, 16)}


def test_sinks_are_seen() -> None:
    assert all(spec.has_sinks for spec in check_model(tiny_model("gpt_oss")))


def test_rope_that_follows_the_row_length_caps_the_context() -> None:
    factors = [1.0] * 4
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("llama", rope_parameters=longrope)
    assert context_limit(model) == 64
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert context_limit(tiny_model("llama", rope_parameters=dynamic)) == 256


def test_yarn_does_not_cap_the_context() -> None:
    assert context_limit(tiny_model("llama_yarn")) == 256


def test_a_twin_shares_parameters_and_nothing_else() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    twin = share_parameters(model, "eager")
    originals = dict(model.named_parameters())
    assert all(originals[name] is parameter for name, parameter in twin.named_parameters())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert twin.config is not model.config
    assert twin.config is twin.model.layers[0].self_attn.config
    assert (twin.config._attn_implementation, model.config._attn_implementation) == (
        "eager",
        "sdpa",
    )
    ours, theirs = twin.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq
    assert ours is not theirs
    assert torch.equal(ours, theirs)


def test_hooks_survive_in_the_twin() -> None:
    model, seen = tiny_model("llama"), []
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(id(module)))
    twin = share_parameters(model)
    with torch.inference_mode():
        twin(torch.arange(3)[None])
    assert seen == [id(twin.model.norm)]
    assert copy.copy(seen) != [id(model.model.norm)]
