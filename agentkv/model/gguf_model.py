"""Models in GGUF files as transformers knows them: config and tensors.

Owns the names and layouts of the architectures that are read. What a file says that is not
understood is an error, because ignoring it would give a model that answers wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from ..errors import ModelError, UnsupportedModelError
from .gguf import GGUFFile

__all__ = ["ARCHITECTURES", "read_config", "read_tensors", "tensor_shapes"]

# GGUF architecture -> transformers model type.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_NAMES = (
    (r"token_embd\.(\w+)", r"model.embed_tokens.\1"),
    (r"output_norm\.(\w+)", r"model.norm.\1"),
    (r"output\.(\w+)", r"lm_head.\1"),
    (r"blk\.(\d+)\.attn_norm\.(\w+)", r"model.layers.\1.input_layernorm.\2"),
    (r"blk\.(\d+)\.ffn_norm\.(\w+)", r"model.layers.\1.post_attention_layernorm.\2"),
    (r"blk\.(\d+)\.attn_(q|k|v)\.(\w+)", r"model.layers.\1.self_attn.\2_proj.\3"),
    (r"blk\.(\d+)\.attn_output\.(\w+)", r"model.layers.\1.self_attn.o_proj.\2"),
    (r"blk\.(\d+)\.attn_(q|k)_norm\.(\w+)", r"model.layers.\1.self_attn.\2_norm.\3"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)\.(\w+)", r"model.layers.\1.mlp.\2_proj.\3"),
)
ROPE_FACTORS = "rope_freqs.weight"
# (factor, low, high, original context) of the released models with this kind of rope.
_LLAMA3_ROPES = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def read_config(file: GGUFFile) -> PreTrainedConfig:
    """The transformers config that the file's metadata describes.

    Raises:
        UnsupportedModelError: the architecture, or something in it, is not read.
        ModelError: a needed entry is missing or makes no sense.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"[gguf] {file.path} holds a model of architecture {architecture!r}; "
            f"{', '.join(ARCHITECTURES)} are read from GGUF files. "
            "Use the model's safetensors files"
        )
    entry = _Entries(file, architecture)
    heads = entry.integer("attention.head_count")
    hidden = entry.integer("embedding_length")
    head_dim = entry.integer("attention.key_length", hidden // heads)
    _refuse_unread(file, entry, head_dim)
    settings: dict[str, Any] = {  # Any: values of a transformers config
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": entry.integer("feed_forward_length"),
        "num_hidden_layers": entry.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entry.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": entry.integer("context_length"),
        "rms_norm_eps": entry.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, entry, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    try:
        return AutoConfig.for_model(ARCHITECTURES[architecture], **settings)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ModelError(f"{file.path} describes no sound model: {error}") from error


def tensor_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, under the name it has in the transformers model."""
    names = {name: _model_name(file, name) for name in file.tensors if name != ROPE_FACTORS}
    return {target: file.tensors[name].shape for name, target in names.items()}


def read_tensors(
    file: GGUFFile,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    progress: Callable[[float], None],
) -> dict[str, torch.Tensor]:
    """Every tensor of the model, dequantised, in `dtype`; `progress` is told the share done."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    interleaved = file.metadata["general.architecture"] == "llama"
    tensors: dict[str, torch.Tensor] = {}
    for done, name in enumerate(file.tensors, 1):
        if name == ROPE_FACTORS:
            continue
        tensor = torch.from_numpy(file.read(name))
        match = re.fullmatch(r"blk\.\d+\.attn_(q|k)\.(?:weight|bias)", name)
        if match and interleaved:
            tensor = _split_halves(tensor, heads[match[1]])
        tensors[_model_name(file, name)] = tensor.to(dtype)
        progress(done / len(file.tensors))
    return tensors


def _split_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order, in which the two halves that rotate together are interleaved."""
    rows = tensor.shape[0] // num_heads // 2
    return (
        tensor.reshape(num_heads, rows, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def _model_name(file: GGUFFile, name: str) -> str:
    for pattern, replacement in _NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement)
    raise UnsupportedModelError(
        f"[gguf] {file.path} holds tensor {name[:80]!r}, which is not understood; "
        "use the model's safetensors files"
    )


def _refuse_unread(file: GGUFFile, entry: _Entries, head_dim: int) -> None:
    """Refuse what changes a model's answers and is not carried over."""
    if entry.integer("rope.dimension_count", head_dim) != head_dim:
        raise entry.unread("rotary embedding of part of each head")
    if entry.integer("attention.value_length", head_dim) != head_dim:
        raise entry.unread("values of another size than keys")
    for key in ("expert_count", "attention.sliding_window"):
        if entry.integer(key, 0):
            raise entry.unread(key)


def _rope(file: GGUFFile, entry: _Entries, head_dim: int) -> dict[str, Any]:  # Any: config values
    theta = entry.number("rope.freq_base", 10000.0)
    kind = entry.get("rope.scaling.type")
    if ROPE_FACTORS in file.tensors:
        factors = file.read(ROPE_FACTORS)
        for factor, low, high, original in _LLAMA3_ROPES:
            expected = _llama3_factors(theta, head_dim, factor, low, high, original)
            if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-5):
                return {
                    "rope_type": "llama3",
                    "rope_theta": theta,
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
        raise entry.unread("rope frequency factors")
    if kind == "linear":
        factor = entry.number("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind not in (None, "none"):
        raise entry.unread(f"rope scaling of type {kind!r}")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What each inverse frequency is divided by, as Llama 3.1 defines it. Shape [head_dim / 2]."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


class _Entries:
    """The metadata of one architecture, checked as it is read."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def get(self, key: str) -> Any:  # Any: metadata values
        return self._file.metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not (0 < value < 2**31 or value == default):
            raise ModelError(
                f"{self._file.path}: {self._architecture}.{key} is {value!r}, "
                "which is no usable number"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0.0 < value < 1e12:
            raise ModelError(
                f"{self._file.path}: {self._architecture}.{key} is {value!r}, "
                "which is no usable number"
            )
        # Stored as float32: the shortest decimal that rounds to it is what the authors wrote.
        return float(str(np.float32(value)))

    def unread(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"[gguf] {self._file.path} uses {what}, which is not read from GGUF files; "
            "use the model's safetensors files"
        )


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelError(f"{file.path} holds no tensor {name}")
    return file.tensors[name].shape
