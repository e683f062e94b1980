"""Opening a model and its tokenizer, wherever they come from.

Owns the order of things: find, check, convert once, load. Leaves a model that is passed in as it
is, and asks compatibility.py nothing; the runner does.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import EngineConfig, SamplingOptions
from ..errors import ModelError
from ..text.tokenizer import ChatTokenizer
from .assembly import assemble, build_empty, tensor_mismatch
from .checkpoint import fingerprint, open_checkpoint
from .compatibility import check_evaluation_mode
from .folder import check_folder
from .generation import end_token_ids, sampling_defaults
from .gguf import GGUFFile
from .gguf_model import read_config, read_tensors, tensor_shapes
from .gguf_tokenizer import read_tokenizer
from .placement import choose_device, choose_dtype
from .sources import find_source, name_of
from .tokenizer_files import TokenizerFiles, load_tokenizer, read_json
from .weights_cache import WeightsCache

__all__ = ["LoadedModel", "open_model"]

MIN_TRANSFORMERS = (5, 24)  # older ones run code from model folders though that is switched off
Progress = Callable[[str, float], None]
_Tokenizer = ChatTokenizer | TokenizerFiles
_logger = logging.getLogger("agentkv")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode and what belongs to it.

    `identity` names the weights, dtype and rope set-up; two models that differ in one of them have
    different ones. `default_options` holds what the generation config says about sampling.
    """

    model: PreTrainedModel
    tokenizer: ChatTokenizer
    name: str
    identity: str
    eos_token_ids: tuple[int, ...] = ()
    default_options: SamplingOptions = field(default_factory=SamplingOptions)


def open_model(
    source: str | Path | PreTrainedModel | None = None,
    *,
    tokenizer: object = None,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    cache: WeightsCache | None = None,
) -> LoadedModel:
    """Open a folder, a GGUF file, a hub repository, a loaded model, or (None) the default model.

    `tokenizer` is a folder, a tokenizer.json or a loaded fast tokenizer; it is needed with a loaded
    model and wins over what lies beside the weights elsewhere. `progress` is told a stage ("find",
    "convert", "load", "ready") and the share of it that is done, on the calling thread.

    Raises:
        ModelError: something is missing or damaged; the message says what to do.
        UnsupportedModelError: the model is of a kind that would not be served correctly.
        UntrustedModelError: the folder wants to run code of its own.
    """
    _check_transformers(transformers.__version__)
    config = config or EngineConfig()
    report = progress or (lambda stage, share: None)
    given: _Tokenizer | None = None
    if isinstance(tokenizer, ChatTokenizer):
        given = tokenizer
    elif tokenizer is not None:
        given = load_tokenizer(tokenizer, allow_remote_code=config.allow_remote_code)
    if isinstance(source, PreTrainedModel):
        opened = _open_loaded(source, given, config)
    else:
        path = find_source(source, progress=partial(report, "find"))
        device, dtype = choose_device(config), choose_dtype(config)
        if path.is_dir():
            opened = _open_folder(path, given, config, device, dtype, report)
        else:
            opened = _open_gguf(path, given, device, dtype, report, cache or WeightsCache())
    report("ready", 1.0)
    return opened


def _open_loaded(
    model: PreTrainedModel, given: _Tokenizer | None, config: EngineConfig
) -> LoadedModel:
    """A model that the user has loaded: its dtype and device are as they are."""
    if given is None:
        raise ModelError("a loaded model needs its tokenizer: pass tokenizer=")
    check_evaluation_mode(model)
    parameters = list(model.parameters())
    if any(parameter.is_meta for parameter in parameters):
        raise ModelError("the model has parameters without values (on the meta device)")
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ModelError(f"the model is spread over {len(devices)} devices; put it on one")
    if config.dtype != "auto" and model.dtype != getattr(torch, config.dtype):
        raise ModelError(
            f"dtype={config.dtype!r} was asked for and the loaded model has {model.dtype}; "
            f"convert it first, or leave dtype='auto'"
        )
    if config.device != "auto" and {choose_device(config).type} != {d.type for d in devices}:
        raise ModelError(
            f"device={config.device!r} was asked for and the loaded model is on {devices.pop()}; "
            "move it first, or leave device='auto'"
        )
    settings = model.generation_config.to_diff_dict() if model.generation_config else {}
    name = model.config._name_or_path or type(model).__name__
    return _finish(model, given, name, uuid4().hex, settings)


def _open_folder(
    path: Path,
    given: _Tokenizer | None,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    report: Progress,
) -> LoadedModel:
    allowed = config.allow_remote_code
    check_folder(path, allow_remote_code=allowed)
    tokenizer = given or load_tokenizer(path, allow_remote_code=allowed)
    model = open_checkpoint(
        path,
        dtype=dtype,
        device=device,
        allow_remote_code=allowed,
        progress=partial(report, "load"),
    )
    settings = read_json(path / "generation_config.json") or {}
    return _finish(model, tokenizer, name_of(path), fingerprint(path), settings)


def _open_gguf(
    path: Path,
    given: _Tokenizer | None,
    device: torch.device,
    dtype: torch.dtype,
    report: Progress,
    cache: WeightsCache,
) -> LoadedModel:
    """A GGUF file, from the cache of converted weights where it was opened before."""
    folder = cache.find(path, _variant(dtype))
    model, tokenizer = None, given
    if folder is not None:
        try:
            model = open_checkpoint(
                folder, dtype=dtype, device=device, progress=partial(report, "load")
            )
            if given is None and (folder / "tokenizer.json").is_file():
                tokenizer = load_tokenizer(folder)
        except ModelError as error:
            _logger.warning("converted weights are damaged and are made anew: %s", error)
            cache.discard(folder)
            model = None
    if model is None or tokenizer is None:
        with GGUFFile(path) as file:
            tokenizer = tokenizer or read_tokenizer(file)
            if model is None:
                own = tokenizer if given is None else None
                model = _convert(file, own, device, dtype, report, cache)
    return _finish(model, tokenizer, name_of(path), cache.digest(path), {})


def _convert(
    file: GGUFFile,
    tokenizer: _Tokenizer | None,
    device: torch.device,
    dtype: torch.dtype,
    report: Progress,
    cache: WeightsCache,
) -> PreTrainedModel:
    """Dequantise a GGUF file's tensors, keep them for the next start, and make a model of them."""
    config = read_config(file)
    model = build_empty(config)
    mismatch = tensor_mismatch(model, tensor_shapes(file))
    if mismatch is not None:
        raise ModelError(f"{file.path}: the tensors do not fit the metadata: {mismatch}")
    tensors = read_tensors(file, config, dtype, partial(report, "convert"))
    config.dtype = dtype
    cache.store(file.path, _variant(dtype), partial(_save, config, tensors, tokenizer))
    return assemble(model, tensors, device=device)


def _save(
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    tokenizer: _Tokenizer | None,
    folder: Path,
) -> None:
    from safetensors.torch import save_file

    config.save_pretrained(str(folder))
    if isinstance(tokenizer, TokenizerFiles):
        tokenizer.save(folder)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _finish(
    model: PreTrainedModel,
    tokenizer: _Tokenizer,
    name: str,
    weights: str,
    generation: Mapping[str, Any],
) -> LoadedModel:
    """Put together what belongs to a loaded model; `weights` stands for its weights."""
    stated = generation.get("eos_token_id", getattr(model.config, "eos_token_id", None))
    eos_ids = end_token_ids(stated)
    if isinstance(tokenizer, TokenizerFiles):
        tokenizer = tokenizer.chat_tokenizer(eos_ids)
    text = model.config.get_text_config(decoder=True)
    rope = json.dumps(getattr(text, "rope_parameters", None), sort_keys=True, default=str)
    mark = hashlib.sha256(f"{weights}\0{model.dtype}\0{rope}".encode()).hexdigest()
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    eos_ids = tuple(dict.fromkeys((*eos_ids, *tokenizer.eos_token_ids)))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        identity=f"{name}:{_variant(model.dtype)}:{mark[:32]}",
        eos_token_ids=tuple(token_id for token_id in eos_ids if token_id < vocab_size),
        default_options=sampling_defaults(generation),
    )


def _variant(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_transformers(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_TRANSFORMERS:
        raise ModelError(
            f"transformers {version} is installed and {MIN_TRANSFORMERS[0]}.{MIN_TRANSFORMERS[1]} "
            "or later is needed: older ones may run code from a model folder"
        )
