"""Tiny models as files: GGUF files and Hugging Face folders made from models in memory.

Owns the inverse of what the loader reads, so that loading can be tested without a download.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from .byte_tokenizer import byte_tokenizer

__all__ = ["save_folder", "save_gguf"]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def save_folder(model: PreTrainedModel, folder: Path, *, tokenizer: bool = True) -> Path:
    """Write `model` as a Hugging Face folder, with the byte tokenizer unless told otherwise."""
    model.save_pretrained(str(folder))
    if tokenizer:
        chat = byte_tokenizer()
        chat.backend.save(str(folder / "tokenizer.json"))
        settings = {
            "chat_template": chat.chat_template,
            "bos_token": "<|bos|>",
            "eos_token": {"content": "<|im_end|>", "special": True},
            "pad_token": "<|pad|>",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    pre: str = "gpt-2",
    kind_of: Callable[[str], GGMLQuantizationType] = lambda name: GGMLQuantizationType.F32,
    metadata: Mapping[str, int | float | str] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a Llama, Qwen2 or Qwen3 `model` as a GGUF file with the byte tokenizer.

    In it two spaces are one token more, with id 260.

    `kind_of` gives the type of each tensor by its GGUF name; `metadata` and `tensors` add entries
    and float32 tensors.
    """
    architecture = str(model.config.model_type)
    writer = GGUFWriter(str(path), architecture)
    _add_settings(writer, architecture, model.config)
    _add_tokenizer(writer, byte_tokenizer().backend, pre)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    _add_weights(writer, model, kind_of)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_weights(
    writer: GGUFWriter, model: PreTrainedModel, kind_of: Callable[[str], GGMLQuantizationType]
) -> None:
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    tied = set(model.all_tied_weights_keys)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        target = _gguf_name(name)
        part = target.split(".")[-2]
        if model.config.model_type == "llama" and part in heads:
            tensor = _interleave(tensor, heads[part])
        kind = kind_of(target) if tensor.dim() > 1 else GGMLQuantizationType.F32
        raw = quantize(np.ascontiguousarray(tensor.float().numpy()), kind)
        writer.add_tensor(target, raw, raw_dtype=kind)


def _add_settings(writer: GGUFWriter, architecture: str, config: Any) -> None:  # Any: untyped
    integers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        integers |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for key, value in integers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])


def _add_tokenizer(writer: GGUFWriter, backend: Tokenizer, pre: str) -> None:
    vocabulary = backend.get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "ĠĠ"]
    special = {token_id for token_id, _ in backend.get_added_tokens_decoder().items()}
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    kinds = [3 if token_id in special else 1 for token_id in range(len(tokens))]
    writer.add_array("tokenizer.ggml.token_type", kinds)
    # One merge, since an empty list cannot be written: two spaces are one token here.
    writer.add_array("tokenizer.ggml.merges", ["Ġ Ġ"])
    for name, token in (("bos", "<|bos|>"), ("eos", "<|im_end|>"), ("padding", "<|pad|>")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocabulary[token])
    writer.add_string("tokenizer.chat_template", byte_tokenizer().chat_template or "")


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _interleave(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's row order: the two halves of a head that rotate together alternate."""
    half = tensor.shape[0] // num_heads // 2
    split = tensor.reshape(num_heads, 2, half, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)
