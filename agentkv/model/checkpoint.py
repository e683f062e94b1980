"""Models in Hugging Face folders: config.json and safetensors files.

A folder is not trusted: no pickle is read, no code from it runs unless that is allowed, and what
its config asks for is compared with what its files hold before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..errors import ModelError
from .assembly import assemble, build_empty, tensor_mismatch
from .folder import check_folder, weight_files

__all__ = ["fingerprint", "open_checkpoint"]


def open_checkpoint(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    allow_remote_code: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> PreTrainedModel:
    """The causal language model in `folder`, in eval mode; `progress` is told the share loaded.

    Raises:
        UntrustedModelError: the folder wants to run code of its own.
        UnsupportedModelError: transformers has no causal language model for it.
        ModelError: files are missing, damaged, or contradict the config.
    """
    brings_code = check_folder(folder, allow_remote_code=allow_remote_code)
    files = weight_files(folder)
    shapes = _shapes(files)
    if brings_code:
        return _through_transformers(folder, None, dtype, device)
    config = _read_config(folder)
    model = build_empty(config)
    _check_size(folder, model, shapes)
    if _is_direct(config, model) and tensor_mismatch(model, shapes) is None:
        tensors = dict(_read_tensors(files, dtype, device, len(shapes), progress))
        config.dtype = dtype
        return assemble(model, tensors, device=device)
    return _through_transformers(folder, config, dtype, device)


def fingerprint(folder: Path) -> str:
    """A digest of the config and of the weight files' names, sizes and times of change."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        stat = path.stat()
        digest.update(f"\0{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # validators of the config classes raise types of their own
        raise ModelError(f"{folder}/config.json describes no known model: {error}") from error
    return config


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, from the files' headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as opened:
                for name in opened.keys():  # it is no mapping
                    if name in shapes:
                        raise ModelError(f"{path} holds tensor {name}, as another file does")
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or was not downloaded whole: {error}") from error
    return shapes


def _check_size(
    folder: Path, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a config that asks for more than the files hold, which would be filled at random."""
    if getattr(model.config, "quantization_config", None) is not None:
        return  # packed: the numbers of elements do not compare
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(shape) for shape in shapes.values())
    if wanted > held:
        mismatch = tensor_mismatch(model, shapes)
        raise ModelError(
            f"{folder}: the config asks for {wanted} parameters and the files hold {held}"
            + (f" ({mismatch})" if mismatch else "")
        )


def _is_direct(config: PreTrainedConfig, model: PreTrainedModel) -> bool:
    """Whether transformers would load the tensors as they are, under their own names.

    Loading them directly then gives the same, without the process-wide settings (default dtype,
    patched functions) that transformers changes while it builds a model.
    """
    return (
        not get_model_conversion_mapping(model, add_legacy=False)
        and getattr(config, "quantization_config", None) is None
        and not model._keep_in_fp32_modules
        and not model._keep_in_fp32_modules_strict
    )


def _read_tensors(
    files: list[Path],
    dtype: torch.dtype,
    device: torch.device,
    total: int,
    progress: Callable[[float], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    for path in files:
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as opened:
                for name in opened.keys():  # it is no mapping
                    tensor = opened.get_tensor(name)
                    if not tensor.is_floating_point():
                        raise ModelError(f"{path}: tensor {name} holds {tensor.dtype}, not floats")
                    yield name, tensor.to(dtype)
                    done += 1
                    progress(done / total)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged: {error}") from error


def _through_transformers(
    folder: Path, config: PreTrainedConfig | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load as transformers does, for what needs its conversions; nothing may be filled at random.

    `config` None lets transformers run the folder's own code, which the caller has allowed.
    """
    loader = AutoModelForCausalLM if config is None else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    options: dict[str, Any] = (  # Any: keywords of from_pretrained
        {"trust_remote_code": True} if config is None else {"config": config}
    )
    try:
        model, report = loader.from_pretrained(
            str(folder),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # what a conversion, quantizer or foreign code raises
        raise ModelError(f"the model in {folder} cannot be loaded: {error}") from error
    missing = sorted(set(report["missing_keys"]) - set(model.all_tied_weights_keys))
    if missing or report["mismatched_keys"]:
        wrong = missing or sorted(str(key) for key in report["mismatched_keys"])
        raise ModelError(f"{folder}: the weights do not fit the config: {wrong[0]}")
    placed: PreTrainedModel = model.to(device=device)
    return placed.eval().requires_grad_(False)
