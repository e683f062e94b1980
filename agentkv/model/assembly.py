"""Putting a transformers model together from tensors that are already in memory.

Builds the modules without storage and assigns the tensors, so nothing is initialised and thrown
away, and no process-wide torch setting or random state is touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..errors import ModelError, UnsupportedModelError

__all__ = ["MAX_LAYERS", "assemble", "build_empty", "tensor_mismatch"]

MAX_LAYERS = 4096


def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` with all parameters on the meta device, where they take no memory.

    Raises:
        UnsupportedModelError: no causal language model class belongs to the config.
        ModelError: the config contradicts itself.
    """
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 <= layers <= MAX_LAYERS:
        raise ModelError(f"the config states {layers!r} layers; at most {MAX_LAYERS} are accepted")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"[config] {type(config).__name__} is not served: transformers has no causal language "
            "model for it"
        )
    try:
        with torch.device("meta"):
            model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    except (ValueError, TypeError, RuntimeError, KeyError, ZeroDivisionError) as error:
        raise ModelError(f"the config does not describe a sound model: {error}") from error
    return model.eval().requires_grad_(False)


def tensor_mismatch(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What the tensors of a checkpoint lack or have too much for `model`; None if they fit."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys)
    for name, shape in wanted.items():
        if name not in shapes and name not in tied:
            return f"tensor {name} is missing"
        if name in shapes and shapes[name] != shape:
            return f"tensor {name} has shape {shapes[name]} and the config asks for {shape}"
    unknown = sorted(set(shapes) - set(wanted))
    return f"tensor {unknown[0]} belongs to no module" if unknown else None


def assemble(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, device: torch.device
) -> PreTrainedModel:
    """Give the empty `model` its tensors, which must fit, and recreate its computed buffers.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape.
    """
    mismatch = tensor_mismatch(model, {name: tuple(t.shape) for name, t in tensors.items()})
    if mismatch is not None:
        raise ModelError(f"the weights do not fit the config: {mismatch}")
    model.load_state_dict(dict(tensors), strict=False, assign=True)
    model.tie_weights()
    _create_buffers(model)
    remaining = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_meta
    ]
    if remaining:
        raise ModelError(f"the weights do not fit the config: {remaining[0]} has no values")
    placed: PreTrainedModel = model.to(device=device)
    return placed.eval().requires_grad_(False)


def _create_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds, as transformers does for its own loading."""
    stored = set(model.state_dict())
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True  # read by transformers.initialization
    prefixes = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        prefix = prefixes[id(module)]
        computed = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and (f"{prefix}.{name}" if prefix else name) not in stored
        ]
        for name in computed:
            setattr(module, name, torch.empty_like(getattr(module, name), device="cpu"))
        if computed:
            with torch.no_grad():
                _owner(model, prefix)._init_weights(module)
        for name in computed:
            buffer = getattr(module, name)
            if buffer.dim() == 0 and buffer.is_floating_point():
                # Scales, which transformers makes in the model's dtype; rope's tables are not.
                setattr(module, name, buffer.to(model.get_input_embeddings().weight.dtype))


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost transformers model around the module at `path`; it knows how to fill it."""
    owner, module = model, model
    for part in path.split("."):
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
