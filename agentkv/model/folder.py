"""What a Hugging Face folder holds, judged by names and config.json, without reading weights.

Imports no torch, so that a folder that cannot be served is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import ModelError, UntrustedModelError
from .tokenizer_files import read_json

__all__ = ["check_folder", "weight_files"]

_CODE_KEYS = ("auto_map", "custom_generate")
_KERNEL_KEYS = re.compile(r"_?(attn|experts)_implementation(_internal)?")


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
