"""GGUF files: converted once, found again, made anew when damaged."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from agentkv.config import EngineConfig
from agentkv.errors import ModelError, UnsupportedModelError
from agentkv.model import opening
from agentkv.model.canary import check_canary
from agentkv.model.loader import LoadedModel, open_model
from agentkv.model.runner import ModelRunner
from agentkv.model.weights_cache import MAX_MODELS, MAX_NOTES, WeightsCache
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.tiny_files import save_folder, save_gguf
from agentkv.testing.tiny_models import tiny_model

CPU = EngineConfig(device="cpu", dtype="float32")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_gguf(tiny_model("llama", num_hidden_layers=1), tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "cache")


def open_watched(path: Path, cache: WeightsCache) -> tuple[LoadedModel, set[str]]:
    """The model, and the stages that opening it went through."""
    stages: set[str] = set()
    loaded = open_model(
        path, config=CPU, cache=cache, progress=lambda stage, share: stages.add(stage)
    )
    return loaded, stages


def test_the_second_start_converts_nothing(path: Path, cache: WeightsCache) -> None:
    first, stages = open_watched(path, cache)
    assert stages == {"convert", "ready"}
    second, stages = open_watched(path, cache)
    assert stages == {"load", "ready"}
    assert second.identity == first.identity
    assert (second.eos_token_ids, second.name) == ((258,), "tiny")
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor)
    text = "a  1 <|im_end|>"
    assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert second.tokenizer.chat_template == first.tokenizer.chat_template


def test_dtypes_are_kept_apart(path: Path, cache: WeightsCache) -> None:
    open_watched(path, cache)
    config = EngineConfig(device="cpu", dtype="bfloat16")
    assert open_model(path, config=config, cache=cache).model.dtype is torch.bfloat16
    assert open_watched(path, cache)[0].model.dtype is torch.float32


def test_a_moved_file_is_known_by_its_content(
    path: Path, cache: WeightsCache, tmp_path: Path
) -> None:
    open_watched(path, cache)
    moved = tmp_path / "other.gguf"
    shutil.copyfile(path, moved)
    assert open_watched(moved, cache)[1] == {"load", "ready"}


def test_a_changed_file_is_converted_again(path: Path, cache: WeightsCache) -> None:
    first, _ = open_watched(path, cache)
    save_gguf(tiny_model("llama", num_hidden_layers=1, seed=1), path)
    os.utime(path, ns=(1, 1))
    second, stages = open_watched(path, cache)
    assert stages == {"convert", "ready"}
    assert second.identity != first.identity


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_damaged_entry_is_made_anew(
    name: str, content: bytes | None, path: Path, cache: WeightsCache
) -> None:
    first, _ = open_watched(path, cache)
    folder = cache.find(path, "float32")
    assert folder is not None
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    again, _ = open_watched(path, cache)
    assert again.tokenizer.encode("abc") == first.tokenizer.encode("abc")
    with torch.inference_mode():
        ids = torch.arange(5)[None]
        assert torch.equal(again.model(ids).logits, first.model(ids).logits)
    assert open_watched(path, cache)[1] == {"load", "ready"}


def test_a_damaged_digest_is_computed_again(path: Path, cache: WeightsCache) -> None:
    open_watched(path, cache)
    for note in (cache.root / "index").iterdir():
        note.write_text("../../elsewhere")
    assert open_watched(path, cache)[1] == {"load", "ready"}


def test_a_cache_that_cannot_be_written_warns_once(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = WeightsCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, logger="agentkv"):
        for _ in range(2):
            assert open_watched(path, cache)[1] == {"convert", "ready"}
    assert caplog.text.count("cannot be cached") == 1


def test_a_failed_conversion_leaves_nothing_behind(path: Path, cache: WeightsCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    assert cache.store(path, "float32", fail) is None
    assert cache.find(path, "float32") is None
    assert list((cache.root / "models").iterdir()) == []


def test_the_faster_of_two_writers_wins(path: Path, cache: WeightsCache) -> None:
    def write_first(folder: Path) -> None:
        (folder / "who").write_text("first")

    def write(folder: Path) -> None:
        (folder / "who").write_text("second")
        assert cache.store(path, "float32", write_first) is not None

    folder = cache.store(path, "float32", write)
    assert folder is not None
    assert (folder / "who").read_text() == "first"


def test_the_environment_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    assert WeightsCache().root == tmp_path
    monkeypatch.delenv("AGENTKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert WeightsCache().root == tmp_path / "agentkv"


def test_an_unknown_way_of_splitting_text_asks_for_the_tokenizer(
    tmp_path: Path, cache: WeightsCache
) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf", pre="unheard-of")
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"'unheard-of'.*pass tokenizer="):
            open_model(path, config=CPU, cache=cache)
        given = open_model(path, config=CPU, cache=cache, tokenizer=byte_tokenizer())
        assert given.tokenizer.encode("a") == [97]


def test_a_damaged_gguf_file_is_a_model_error(tmp_path: Path, cache: WeightsCache) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        open_model(path, config=CPU, cache=cache)


def test_the_models_used_last_are_kept(path: Path, cache: WeightsCache) -> None:
    for number in range(MAX_MODELS + 2):
        folder = cache.store(path, f"variant {number}", lambda folder: None)
        assert folder is not None
        os.utime(folder, ns=(number, number))
        # The first is used again each time, so it is never the one to go.
        first = cache.find(path, "variant 0")
        assert first is not None
    left = [number for number in range(MAX_MODELS + 2) if cache.find(path, f"variant {number}")]
    assert left == [0, *range(3, MAX_MODELS + 2)]


def test_notes_do_not_grow_without_bound(cache: WeightsCache) -> None:
    for number in range(MAX_NOTES + 20):
        cache.verify(f"model {number}", "1.0")
    assert len(list((cache.root / "verified").iterdir())) == MAX_NOTES
    assert cache.is_verified(f"model {MAX_NOTES + 19}", "1.0")
    assert not cache.is_verified(f"model {MAX_NOTES + 19}", "1.1")


def test_a_model_is_checked_against_itself_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    checked: list[str] = []

    def check(runner: ModelRunner, *rest: object) -> float:
        checked.append(runner.info.name)
        return check_canary(runner, *rest)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(opening, "check_canary", check)
    folder = save_folder(tiny_model("llama", num_hidden_layers=1), tmp_path / "first")
    other = save_folder(tiny_model("llama", num_hidden_layers=1, seed=1), tmp_path / "second")
    for source in (folder, folder, other, other):
        opening.open_pretrained(source, tokenizer=None, config=CPU).close()
    assert checked == ["first", "second"]
    model = tiny_model("llama", num_hidden_layers=1)
    for _ in range(2):
        # A model in memory may have changed meanwhile.
        opening.open_pretrained(model, tokenizer=byte_tokenizer(), config=CPU).close()
    assert len(checked) == 4
