"""What attention each layer of a model asks for, found by watching one short forward.

Owns the structural probe and the mask probe. The forward runs on a twin that shares the model's
parameters, so the model itself is never touched.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..errors import UnsupportedModelError

__all__ = ["LayerSpec", "probe_layers", "share_parameters"]

PROBE_TOKENS = 12
PROBE_NAME = "agentkv_probe"
MAX_PROBED_POSITION = 2**20

# Keywords whose meaning is known. The second group says nothing about which keys are attended to.
_MEANT = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"})
_IGNORED = frozenset({"position_ids", "use_cache", "output_router_logits", "output_attentions"})


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer, as the layer itself asked for it.

    `key_dim` and `value_dim` are per head and may differ. With a `window` w the key at position p
    is visible from position q iff q - w < p <= q; None means every p <= q. Scores are multiplied by
    `scale`, then squashed to `softcap * tanh(score / softcap)` unless that is None. `has_sinks`:
    one extra score a query head takes part in the softmax and is dropped after it.
    """

    layer_idx: int
    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    scale: float
    softcap: float | None
    has_sinks: bool


def share_parameters(model: PreTrainedModel, attention: str | None = None) -> PreTrainedModel:
    """A copy of `model` with its own modules, buffers and config, and the same parameters.

    `attention` names the registered attention function that the copy is to use.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}  # Any: what deepcopy asks for
    twin: PreTrainedModel = copy.deepcopy(model, memo)
    if attention is not None:
        for config in _configs(twin):
            config._attn_implementation = attention
    return twin


def probe_layers(model: PreTrainedModel) -> list[LayerSpec]:
    """One LayerSpec a layer, in order.

    Raises:
        UnsupportedModelError: [structure] a layer does not call the registered attention exactly
            once with known arguments, or [mask] it wants a mask other than causal with a window.
    """
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    calls = _record(share_parameters(model, PROBE_NAME), model)
    counts = [0] * num_layers
    for call in calls:
        if not 0 <= call.layer_idx < num_layers:
            raise _refusal("structure", model, f"attention ran with layer_idx {call.layer_idx}")
        counts[call.layer_idx] += 1
    wrong = [index for index, count in enumerate(counts) if count != 1]
    if wrong:
        raise _refusal(
            "structure",
            model,
            f"layer {wrong[0]} called the shared attention function {counts[wrong[0]]} times in "
            f"one forward and must call it once ({len(wrong)} of {num_layers} layers differ); it "
            "keeps state of another kind, or has attention code of its own",
        )
    max_position = _max_position(model)
    specs = [_spec_of(call, model) for call in sorted(calls, key=lambda call: call.layer_idx)]
    for call, spec in zip(sorted(calls, key=lambda call: call.layer_idx), specs, strict=True):
        _check_mask(call, spec, max_position, model)
    return specs


@dataclass(slots=True)
class _Call:
    """One call of the attention function during the probe."""

    layer_idx: int
    is_causal: object
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask: object
    keywords: dict[str, Any]  # Any: whatever the model passes


@dataclass(slots=True)
class _WantedMask:
    """Stands in for a mask tensor and carries the predicate the model built its mask from."""

    predicate: Callable[..., Any]  # Any: transformers' mask predicates are untyped
    shape: tuple[int, ...] = (1, 1, 1, 1)
    ndim: int = 4
    dtype: torch.dtype = field(default=torch.bool)


_calls: ContextVar[list[_Call]] = ContextVar("agentkv_probe_calls")


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **keywords: Any,  # Any: whatever the model passes
) -> tuple[torch.Tensor, None]:
    """Record the call; the values computed are of no interest."""
    _calls.get().append(
        _Call(
            int(getattr(module, "layer_idx", -1)),
            getattr(module, "is_causal", None),
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            attention_mask,
            keywords,
        )
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return query.new_zeros(shape), None


def _probe_mask(
    mask_function: Callable[..., Any], **_: Any
) -> _WantedMask:  # Any: transformers' own
    return _WantedMask(mask_function)


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)


def _record(twin: PreTrainedModel, model: PreTrainedModel) -> list[_Call]:
    device = twin.get_input_embeddings().weight.device
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % int(
        twin.get_input_embeddings().weight.shape[0]
    )
    calls: list[_Call] = []
    token = _calls.set(calls)
    try:
        with torch.inference_mode():
            twin(
                input_ids=ids,
                position_ids=torch.arange(PROBE_TOKENS, device=device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([PROBE_TOKENS - 1], device=device),
            )
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, KeyError) as error:
        raise _refusal(
            "structure",
            model,
            f"a {PROBE_TOKENS}-token probe failed: {type(error).__name__}: {error}",
        ) from error
    finally:
        _calls.reset(token)
    return calls


def _spec_of(call: _Call, model: PreTrainedModel) -> LayerSpec:
    where = f"layer {call.layer_idx}"
    for shape in (call.query_shape, call.key_shape, call.value_shape):
        if len(shape) != 4 or shape[0] != 1 or shape[2] != PROBE_TOKENS:
            raise _refusal("structure", model, f"{where} attends to a tensor of shape {shape}")
    _, num_q_heads, _, key_dim = call.query_shape
    _, num_kv_heads, _, value_dim = call.value_shape
    if (
        call.key_shape[1] != num_kv_heads
        or call.key_shape[3] != key_dim
        or num_q_heads % num_kv_heads
    ):
        raise _refusal(
            "structure",
            model,
            f"{where} has query, key and value of shapes "
            f"{call.query_shape}, {call.key_shape} and {call.value_shape}",
        )
    _check_keywords(call, model)
    window, scale = call.keywords.get("sliding_window"), call.keywords.get("scaling")
    softcap = call.keywords.get("softcap")
    return LayerSpec(
        layer_idx=call.layer_idx,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window=None if window is None else int(window),
        scale=key_dim**-0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        has_sinks=call.keywords.get("s_aux") is not None,
    )


def _check_keywords(call: _Call, model: PreTrainedModel) -> None:
    for name, value in call.keywords.items():
        known = name in _MEANT or name in _IGNORED
        if (
            (not known and value is not None)
            or (name == "dropout" and value)
            or (name == "is_causal" and value is False)
            or (name == "output_attentions" and value)
        ):
            shown = f"={value!r}" if isinstance(value, (bool, int, float, str)) else ""
            raise _refusal(
                "structure",
                model,
                f"layer {call.layer_idx} passes {name}{shown} to attention, which is not served",
            )


def _check_mask(call: _Call, spec: LayerSpec, max_position: int, model: PreTrainedModel) -> None:
    """Compare the predicate behind the mask with causal and window, far positions included."""
    where = f"layer {call.layer_idx}"
    if call.mask is None:
        if call.is_causal is False:
            raise _refusal("mask", model, f"{where} attends to later tokens too")
        return
    if not isinstance(call.mask, _WantedMask):
        raise _refusal("mask", model, f"{where} builds a mask of its own")
    positions = _probe_positions(spec.window, max_position)
    points = torch.tensor(positions)
    query, key = points[None, None, :, None], points[None, None, None, :]
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
    expected = key <= query
    if spec.window is not None:
        expected = expected & (key > query - spec.window)
    try:
        wanted = call.mask.predicate(zero, zero, query, key)
    except (IndexError, TypeError, RuntimeError) as error:
        # A predicate that looks positions up in a tensor knows only those of this forward.
        raise _refusal("mask", model, f"{where} has a mask that depends on the input") from error
    if not torch.equal(torch.as_tensor(wanted).expand(expected.shape), expected):
        window = "no window" if spec.window is None else f"a window of {spec.window}"
        raise _refusal(
            "mask",
            model,
            f"{where} wants a mask that differs from causal attention with {window}",
        )


def _probe_positions(window: int | None, max_position: int) -> Sequence[int]:
    """Positions around powers of two, the window and the end of the context, ascending."""
    points = {0, max_position - 1}
    for power in itertools.takewhile(lambda p: p < max_position, (2**k for k in range(64))):
        points |= {power - 1, power, power + 1, 3 * power}
    if window is not None:
        points |= {window - 1, window, window + 1, 2 * window}
    return sorted(point for point in points if 0 <= point < max_position)


def _max_position(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or MAX_PROBED_POSITION
    return min(max(int(limit), 2**17), MAX_PROBED_POSITION)


def _configs(model: PreTrainedModel) -> list[Any]:  # Any: transformers configs are untyped here
    """The model's config and those nested in it, each once."""
    found = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in list(found):
        found += [getattr(config, name) for name in getattr(config, "sub_configs", {})]
    return list({id(config): config for config in found if config is not None}.values())


def _refusal(check: str, model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"[{check}] {type(model).__name__} is not served: {why}")
