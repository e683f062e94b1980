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
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..config import EngineConfig, SamplingOptions
from ..errors import InvalidOptionError, ModelError
from ..text.tokenizer import ChatTokenizer
from .assembly import assemble, build_empty, tensor_mismatch
from .checkpoint import fingerprint, open_checkpoint
from .compatibility import check_evaluation_mode
from .gguf import GGUFFile
from .gguf_model import read_config, read_tensors, tensor_shapes
from .gguf_tokenizer import read_tokenizer
from .sources import find_source, name_of
from .tokenizer_files import TokenizerFiles, load_tokenizer, read_json
from .weights_cache import WeightsCache

__all__ = ["LoadedModel", "choose_device", "choose_dtype", "open_model"]

MIN_TRANSFORMERS = (5, 24)  # older ones run code from model folders though that is switched off
Progress = Callable[[str, float], None]
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
    parts = None
    if tokenizer is not None and not isinstance(tokenizer, ChatTokenizer):
        parts = load_tokenizer(tokenizer, allow_remote_code=config.allow_remote_code)
    if isinstance(source, PreTrainedModel):
        opened = _open_loaded(source, parts, config, given=tokenizer)
    else:
        path = find_source(source, progress=partial(report, "find"))
        device, dtype = choose_device(config), choose_dtype(config)
        if path.is_dir():
            opened = _open_folder(path, parts, config, device, dtype, report, given=tokenizer)
        else:
            opened = _open_gguf(
                path, parts, device, dtype, report, cache or WeightsCache(), given=tokenizer
            )
    report("ready", 1.0)
    return opened


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `config` names; "auto" is the first CUDA device, else the CPU.

    Raises:
        ModelError: there is no such device.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device={name!r} names no device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device={name!r} is not served; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype that `config` names; "auto" is bfloat16 where the device has it natively."""
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    if choose_device(config).type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def _open_loaded(
    model: PreTrainedModel, parts: TokenizerFiles | None, config: EngineConfig, *, given: object
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
    return _finish(model, parts, name, uuid4().hex, settings, given=given)


def _open_folder(
    path: Path,
    parts: TokenizerFiles | None,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    report: Progress,
    *,
    given: object,
) -> LoadedModel:
    allowed = config.allow_remote_code
    if given is None:
        parts = load_tokenizer(path, allow_remote_code=allowed)
    model = open_checkpoint(
        path,
        dtype=dtype,
        device=device,
        allow_remote_code=allowed,
        progress=partial(report, "load"),
    )
    settings = read_json(path / "generation_config.json") or {}
    if settings:
        model.generation_config = GenerationConfig.from_dict(settings)
    return _finish(model, parts, name_of(path), fingerprint(path), settings, given=given)


def _open_gguf(
    path: Path,
    parts: TokenizerFiles | None,
    device: torch.device,
    dtype: torch.dtype,
    report: Progress,
    cache: WeightsCache,
    *,
    given: object,
) -> LoadedModel:
    """A GGUF file, from the cache of converted weights where it was opened before."""
    variant = str(dtype).removeprefix("torch.")
    folder = cache.find(path, variant)
    model = None
    if folder is not None:
        try:
            model = open_checkpoint(
                folder, dtype=dtype, device=device, progress=partial(report, "load")
            )
            if given is None and (folder / "tokenizer.json").is_file():
                parts = load_tokenizer(folder)
        except ModelError as error:
            _logger.warning("converted weights are damaged and are made anew: %s", error)
            cache.discard(folder)
            model = None
    if model is None or (given is None and parts is None):
        with GGUFFile(path) as file:
            if given is None:
                parts = read_tokenizer(file)
            if model is None:
                model = _convert(file, parts, path, device, dtype, variant, report, cache)
    return _finish(model, parts, name_of(path), cache.digest(path), {}, given=given)


def _convert(
    file: GGUFFile,
    parts: TokenizerFiles | None,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    variant: str,
    report: Progress,
    cache: WeightsCache,
) -> PreTrainedModel:
    """Dequantise a GGUF file's tensors, keep them for the next start, and make a model of them."""
    config = read_config(file)
    model = build_empty(config)
    mismatch = tensor_mismatch(model, tensor_shapes(file))
    if mismatch is not None:
        raise ModelError(f"{path}: the tensors do not fit the metadata: {mismatch}")
    tensors = read_tensors(file, config, dtype, partial(report, "convert"))
    config.dtype = dtype
    cache.store(path, variant, partial(_save, config, tensors, parts))
    return assemble(model, tensors, device=device)


def _save(
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    parts: TokenizerFiles | None,
    folder: Path,
) -> None:
    from safetensors.torch import save_file

    config.save_pretrained(str(folder))
    if parts is not None:
        parts.save(folder)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _finish(
    model: PreTrainedModel,
    parts: TokenizerFiles | None,
    name: str,
    weights: str,
    generation: Mapping[str, Any],
    *,
    given: object,
) -> LoadedModel:
    eos_ids = _ids(generation.get("eos_token_id", getattr(model.config, "eos_token_id", None)))
    if isinstance(given, ChatTokenizer):
        tokenizer = given
    elif parts is not None:
        tokenizer = parts.chat_tokenizer(eos_ids)
    else:
        raise ModelError(f"{name} comes without a tokenizer; pass tokenizer=")
    text = model.config.get_text_config(decoder=True)
    rope = json.dumps(getattr(text, "rope_parameters", None), sort_keys=True, default=str)
    mark = hashlib.sha256(f"{weights}\0{model.dtype}\0{rope}".encode()).hexdigest()
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    eos_ids = tuple(dict.fromkeys((*eos_ids, *tokenizer.eos_token_ids)))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        identity=f"{name}:{str(model.dtype).removeprefix('torch.')}:{mark[:32]}",
        eos_token_ids=tuple(token_id for token_id in eos_ids if token_id < vocab_size),
        default_options=_sampling_defaults(generation),
    )


def _ids(value: object) -> tuple[int, ...]:
    """One id, several or none, as transformers writes them."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(item for item in values if type(item) is int and item >= 0)


def _sampling_defaults(settings: Mapping[str, Any]) -> SamplingOptions:  # Any: JSON
    """What a generation config says about sampling; greedy where it says `do_sample: false`.

    A value that makes no sense is left out, with a warning: it must not keep a model from opening.
    """
    chosen: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = settings.get(name)
        if value is None:
            continue
        try:
            SamplingOptions(**{name: value})
        except InvalidOptionError as error:
            _logger.warning("the generation config is ignored in part: %s", error)
        else:
            chosen[name] = value
    if settings.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingOptions(**chosen)


def _check_transformers(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_TRANSFORMERS:
        raise ModelError(
            f"transformers {version} is installed and {MIN_TRANSFORMERS[0]}.{MIN_TRANSFORMERS[1]} "
            "or later is needed: older ones may run code from a model folder"
        )
