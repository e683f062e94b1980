"""Tiny random models of many families, built in memory.

Owns the shrunken configurations. The weights are random but the same for the same seed, and large
enough (`initializer_range=0.3`) that logits differ clearly between tokens. Building one leaves
torch's global random state as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

__all__ = ["REFUSED_FAMILIES", "SERVED_FAMILIES", "VOCAB_SIZE", "tiny_model"]

VOCAB_SIZE = 320

_BASE: Mapping[str, Any] = {  # Any: values of a transformers config
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# Family name -> (transformers model type, settings on top of _BASE).
_SERVED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "layer_types": _ALTERNATING}),
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_MLA,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.21, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 48,
            "n_positions": 256,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
}
_REFUSED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "falcon": ("falcon", {"new_decoder_architecture": False, "alibi": False}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 3, "expansion_ratio": 2}),
    "mamba": ("mamba", {"state_size": 4, "time_step_rank": 4}),
    "falcon_h1": (
        "falcon_h1",
        {
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 8192,
        },
    ),
    "phimoe": ("phimoe", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "diffllama": ("diffllama", {}),
    "doge": ("doge", {"keep_window_size": 4}),
    "t5": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}

SERVED_FAMILIES: tuple[str, ...] = tuple(_SERVED)
REFUSED_FAMILIES: tuple[str, ...] = tuple(_REFUSED)


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model of `family` on the CPU, in eval mode, with 320 token ids.

    `overrides` are settings of the family's transformers config. The default has no end-of-sequence
    token. One-dimensional parameters (biases, norms, sinks) are random too, so that none can be
    forgotten unnoticed.

    Raises:
        KeyError: `family` is in neither SERVED_FAMILIES nor REFUSED_FAMILIES.
    """
    model_type, settings = _SERVED[family] if family in _SERVED else _REFUSED[family]
    config = AutoConfig.for_model(model_type, **{**_BASE, **settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
        if config.is_encoder_decoder:
            model = T5ForConditionalGeneration(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    result: PreTrainedModel = model.eval()
    return result
