"""Which models would be served correctly, and how far; everything else is refused at load.

Many decoder families give wrong logits without any error when their attention is replaced, and no
single check finds them all. Each check here is a function of its own that raises
UnsupportedModelError with its name in brackets; `check_model` runs them all. The last check, a
numeric comparison on the real runner, is in canary.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .structure import LayerSpec, probe_layers

__all__ = [
    "LayerSpec",
    "check_attention_interface",
    "check_config",
    "check_evaluation_mode",
    "check_model",
    "check_signature",
    "check_source",
    "check_stateless",
    "context_limit",
    "probe_layers",
]

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
EXACT_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
CAPPED_ROPE_TYPES = frozenset({"longrope", "dynamic"})


def check_model(model: PreTrainedModel) -> list[LayerSpec]:
    """Run every check that needs no runner; the attention of each layer, in order.

    Raises:
        UnsupportedModelError: one of the checks refuses the model.
    """
    check_config(model)
    check_evaluation_mode(model)
    check_signature(model)
    check_stateless(model)
    check_attention_interface(model)
    check_source(model)
    return probe_layers(model)


def check_config(model: PreTrainedModel) -> None:
    """Refuse encoders, bidirectional models, unknown layer types and unknown rope types."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise _refusal("config", model, "it has an encoder")
    if getattr(text, "is_causal", True) is False:
        raise _refusal("config", model, "its attention is not causal")
    if model.get_output_embeddings() is None:
        raise _refusal("config", model, "it has no language model head")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYER_TYPES)
    if unknown:
        raise _refusal("config", model, f"it has layers of type {', '.join(unknown)}")
    for rope in _rope_parameters(text):
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in EXACT_ROPE_TYPES | CAPPED_ROPE_TYPES:
            raise _refusal("config", model, f"its rope type {rope_type!r} is unknown")
    context_limit(model)


def check_evaluation_mode(model: PreTrainedModel) -> None:
    """Refuse a model whose dropout may be active."""
    if any(module.training for module in model.modules()):
        raise _refusal("training", model, "it is in training mode; call model.eval() first")


def check_signature(model: PreTrainedModel) -> None:
    """Refuse a forward that takes no explicit positions or cannot limit the logits it computes."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            raise _refusal("signature", model, f"its forward takes no {name}")


def check_stateless(model: PreTrainedModel) -> None:
    """Refuse models that carry state of another kind than keys and values."""
    for module in model.modules():
        if getattr(type(module), "_is_stateful", False):
            raise _refusal("state", model, "it keeps recurrent state, which blocks cannot hold")


def check_attention_interface(model: PreTrainedModel) -> None:
    """Refuse models whose attention cannot be replaced."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            raise _refusal(
                "interface", model, f"{type(module).__name__} has attention code of its own"
            )


def check_source(model: PreTrainedModel) -> None:
    """Refuse attention whose code derives positions from row lengths or from the cache."""
    for cls in {type(module) for module in model.modules()}:
        for base in cls.__mro__:
            if "Attention" in base.__name__ and (found := _row_dependence(base)) is not None:
                raise _refusal("source", model, f"{base.__name__} calls {found}")


def context_limit(model: PreTrainedModel) -> int:
    """The longest context, in tokens, up to which the model's positions stay exact.

    Rope types that rescale with the length of the whole row are exact only below their original
    length, and are capped there.

    Raises:
        UnsupportedModelError: [config] no such length is known.
    """
    text = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    limits = [] if longest is None else [int(longest)]
    for rope in _rope_parameters(text):
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type in CAPPED_ROPE_TYPES:
            original = rope.get("original_max_position_embeddings")
            if original is None:
                original = getattr(text, "original_max_position_embeddings", None)
            if original is None and rope_type == "dynamic":
                original = longest
            if original is None:
                raise _refusal(
                    "config", model, f"{rope_type} rope without original_max_position_embeddings"
                )
            limits.append(int(original))
    if not limits or min(limits) < 2:
        raise _refusal("config", model, "its config states no usable context length")
    return min(limits)


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:  # Any: transformers configs
    """Each set of rope parameters; there may be one for each layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if not isinstance(parameters, Mapping):
            continue
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        yield from nested or [parameters]


@functools.cache
def _row_dependence(cls: type) -> str | None:
    """The first call in a class that depends on the row or the cache, None if there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None  # no source: the probes and the canary remain
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "get_seq_length":
            return "get_seq_length"
        if node.func.attr == "arange" and ".shape" in ast.unparse(node):
            return "arange over the row's length"
    return None


def _refusal(check: str, model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"[{check}] {type(model).__name__} is not served: {why}")
