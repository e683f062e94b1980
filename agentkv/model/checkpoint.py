"""Models in Hugging Face folders: config.json and safetensors files.

A folder is not trusted: no pickle is read, no code from it runs unless that is allowed, and what
its config asks for is compared with what its files hold before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..errors import ModelError, UntrustedModelError
from .assembly import assemble, build_empty, tensor_mismatch
from .tokenizer_files import read_json

__all__ = ["check_folder", "fingerprint", "open_checkpoint", "weight_files"]

_CODE_KEYS = ("auto_map", "custom_generate")
_KERNEL_KEYS = re.compile(r"_?(attn|experts)_implementation(_internal)?")


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


def check_folder(folder: Path, *, allow_remote_code: bool) -> bool:
    """Whether the folder brings code of its own, which is refused unless it is allowed.

    Raises:
        UntrustedModelError: it does, and it is not allowed.
        ModelError: it is no model folder, or has no weights that are read.
    """
    settings = read_json(folder / "config.json")
    if settings is None:
        others = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; to open {others[0]}, name that file" if others else ""
        raise ModelError(f"{folder} has no config.json, so it is not a model folder{hint}")
    named = next(_code_names(settings), None)
    if named is not None and not allow_remote_code:
        raise UntrustedModelError(
            f"{folder} wants to run code of its own ({named} in config.json); "
            "read that code, then pass allow_remote_code=True"
        )
    weight_files(folder)
    return named is not None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`.

    Raises:
        ModelError: there are none, one is missing, or the index names one outside the folder.
    """
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelError(f"{folder}/model.safetensors.index.json has no weight_map")
        names = sorted({str(name) for name in places.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelError(f"{folder}/model.safetensors.index.json names the file {name!r}")
            if not (folder / name).is_file():
                raise ModelError(f"{folder} lacks {name}; the download is not complete")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} holds pickled weights only, which can run code when they are read; "
            "convert them to safetensors"
        )
    raise ModelError(f"{folder} holds no weights (model.safetensors)")


def fingerprint(folder: Path) -> str:
    """A digest of the config and of the weight files' names, sizes and times of change."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        stat = path.stat()
        digest.update(f"\0{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _code_names(settings: object) -> Iterator[str]:
    """Names of entries, at any depth, that make transformers run or fetch code."""
    if isinstance(settings, list):
        for value in settings:
            yield from _code_names(value)
    if not isinstance(settings, Mapping):
        return
    for key, value in settings.items():
        # A slash in an implementation's name is a hub repository with a compiled kernel.
        fetched = _KERNEL_KEYS.fullmatch(str(key)) and "/" in str(value)
        if (key in _CODE_KEYS and value) or fetched:
            yield str(key)
        yield from _code_names(value)


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
