"""Weights of strangers: nothing is unpickled, and lies about sizes cost no memory."""

from __future__ import annotations

import ast
import json
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import agentkv_kernels
import numpy as np
import pytest
import torch

import agentkv
from agentkv.config import EngineConfig
from agentkv.errors import ModelError
from agentkv.model.gguf import GGUFFile
from agentkv.model.loader import open_model
from agentkv.testing.tiny_files import save_folder, save_gguf
from agentkv.testing.tiny_models import tiny_model

CPU = EngineConfig(device="cpu", dtype="float32")
PICKLES = ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.pkl", "model.ckpt")
SOURCES = [Path(package.__file__ or "").parent for package in (agentkv, agentkv_kernels)]


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_explode, ())


def _explode() -> NoReturn:
    raise AssertionError("something was unpickled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tiny_model("llama", num_hidden_layers=1), tmp_path)


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever unpickles fails."""
    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: _explode())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: _explode())
    monkeypatch.setattr(torch.serialization, "load", lambda *args, **kwargs: _explode())


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("name", PICKLES)
def test_a_folder_with_nothing_but_pickles_is_refused(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match=r"holds (pickled weights only|no weights)"):
        open_model(folder, config=CPU)


@pytest.mark.usefixtures("no_pickle")
def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    for name in (*PICKLES, "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert open_model(folder, config=CPU).model is not None


@pytest.mark.parametrize("path", sorted(p for s in SOURCES for p in s.rglob("*.py")), ids=str)
def test_no_source_unpickles_or_evaluates(path: Path) -> None:
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = {"eval", "exec", "compile", "__import__"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert modules.isdisjoint(alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in modules
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in calls | {"torch.load", "np.load", "numpy.load", "yaml.load"}
            names = {keyword.arg for keyword in node.keywords}
            assert not names & {"allow_pickle", "weights_only"}


@contextmanager
def little_memory() -> Iterator[None]:
    """The process may not grow by more than 64 MiB at any moment in the block."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("the system does not tell a process its peak")
    before = _kilobytes("VmHWM")
    yield
    assert _kilobytes("VmHWM") - before < 64 * 1024


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def header(**tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES: dict[str, bytes] = {
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header of 4 GiB": struct.pack("<Q", 2**32) + b"{}" * 100,
    "4 TiB in four bytes": header(w=tensor([2**40], 0, 4)) + bytes(4),
    "4 TiB by its offsets": header(w=tensor([2**40], 0, 2**42)) + bytes(4),
    "a shape that overflows": header(w=tensor([2**40, 2**40], 0, 4)) + bytes(4),
    "a negative size": header(w=tensor([-1], 0, 4)) + bytes(4),
    "an end before the start": header(w=tensor([1], 4, 0)) + bytes(8),
    "an offset beyond the end": header(w=tensor([1], 2**50, 2**50 + 4)) + bytes(4),
    "a hole before the data": header(w=tensor([1], 1000, 1004)) + bytes(1004),
    "many that share bytes": header(**{f"w{at}": tensor([2**18], 0, 2**20) for at in range(200)})
    + bytes(2**20),
    "an unknown type": header(w=tensor([1], 0, 4, "F999")) + bytes(4),
    "no shape": header(w={"dtype": "F32", "data_offsets": [0, 4]}) + bytes(4),
    "deep nesting": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "20,000 empty tensors": header(**{f"w{at}": tensor([0], 0, 0) for at in range(20_000)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_safetensors_that_lie_about_sizes_are_refused_in_little_memory(
    lie: str, folder: Path
) -> None:
    (folder / "model.safetensors").write_bytes(LIES[lie])
    with little_memory(), pytest.raises(ModelError):
        open_model(folder, config=CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**6},
        {"hidden_size": 2**20, "intermediate_size": 2**22},
        {"vocab_size": 2**31},
        {"head_dim": 2**24},
        {"num_attention_heads": 2**24},
        {"num_key_value_heads": 2**20, "num_attention_heads": 2**20},
    ],
    ids=str,
)
def test_a_config_that_lies_about_sizes_is_refused_in_little_memory(
    changes: dict[str, int], folder: Path
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with little_memory(), pytest.raises(ModelError):
        open_model(folder, config=CPU)


@pytest.mark.parametrize("seed", range(60))
def test_a_gguf_file_with_random_damage_is_refused_or_read_in_little_memory(
    seed: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    path = save_gguf(tiny_model("llama", num_hidden_layers=1), tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    for at in rng.integers(0, 6000, rng.integers(1, 6)).tolist():
        width = int(rng.choice([1, 4, 8]))
        data[at : at + width] = rng.bytes(width) if rng.random() < 0.5 else b"\xff" * width
    path.write_bytes(data)
    with little_memory():
        try:
            with GGUFFile(path) as file:
                for name in file.tensors:
                    file.read(name)
        except ModelError:
            return
