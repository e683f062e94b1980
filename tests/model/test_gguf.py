"""Reading GGUF files, sound ones and those that lie."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from agentkv.errors import ModelError, UnsupportedModelError
from agentkv.model.assembly import assemble, build_empty
from agentkv.model.gguf import GGUFFile
from agentkv.model.gguf_model import read_config, read_tensors, tensor_shapes
from agentkv.testing.tiny_files import save_gguf
from agentkv.testing.tiny_models import tiny_model

CPU = torch.device("cpu")
Edit = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", num_hidden_layers=1)
    return save_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def load(path: Path) -> PreTrainedModel:
    with GGUFFile(path) as file:
        config = read_config(file)
        tensors = read_tensors(file, config, torch.float32, lambda share: None)
    return assemble(build_empty(config), tensors, device=CPU)


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)]
)
def test_a_model_comes_back_from_its_file_exactly(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    loaded = load(save_gguf(model, tmp_path / "m.gguf"))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_block_types_give_the_values_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    code = GGMLQuantizationType[kind]
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    with GGUFFile(save_gguf(model, tmp_path / "m.gguf", kind_of=lambda name: code)) as file:
        found = file.read("blk.0.ffn_up.weight")
        assert file.tensors["blk.0.ffn_up.weight"].kind is code
    original = model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    assert np.array_equal(found, dequantize(quantize(original, code), code))


def test_no_config_value_gains_digits_from_float32(path: Path) -> None:
    with GGUFFile(path) as file:
        config = read_config(file)
    assert config.rms_norm_eps == 1e-6
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_llama3_rope_is_recognised_by_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=rope, head_dim=64)
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / model.model.rotary_emb.inv_freq
    path = save_gguf(model, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    loaded = load(path)
    assert loaded.config.rope_parameters == rope
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    model, factors = tiny_model("llama"), torch.linspace(1, 3, 4)
    path = save_gguf(model, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with GGUFFile(path) as file, pytest.raises(UnsupportedModelError, match="frequency factors"):
        read_config(file)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 8, 23, 24, 25, 100, 1000, 5000])
def test_a_file_cut_short_is_refused(length: int, path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        GGUFFile(cut)


def test_the_last_byte_is_missed(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-1])
    with GGUFFile(path):
        pass
    with pytest.raises(ModelError, match="not downloaded whole"):
        GGUFFile(cut)


def at(offset: int, layout: str, value: int) -> Edit:
    return lambda data: (
        data[:offset] + struct.pack(layout, value) + data[offset + struct.calcsize(layout) :]
    )


def after(text: bytes, skip: int, layout: str, value: int) -> Edit:
    def edit(data: bytes) -> bytes:
        return at(data.index(text) + len(text) + skip, layout, value)(data)

    return edit


LIES: dict[str, Edit] = {
    "magic": at(0, "<I", 0x46554748),
    "version 1": at(4, "<I", 1),
    "big endian version": at(4, "<I", 3 << 24),
    "2^62 tensors": at(8, "<Q", 2**62),
    "2^62 entries": at(16, "<Q", 2**62),
    "key of 2^63 bytes": at(24, "<Q", 2**63),
    "key of 70,000 bytes": at(24, "<Q", 70000),
    "unknown value type": after(b"general.architecture", 0, "<I", 77),
    "string of 2^60 bytes": after(b"general.architecture", 4, "<Q", 2**60),
    "list of 2^61 strings": after(b"tokenizer.ggml.tokens", 8, "<Q", 2**61),
    "list of lists": after(b"tokenizer.ggml.tokens", 4, "<I", 9),
    "list of 2^61 numbers": after(b"tokenizer.ggml.token_type", 8, "<Q", 2**61),
    "no dimensions": after(b"output_norm.weight", 0, "<I", 0),
    "2^31 dimensions": after(b"output_norm.weight", 0, "<I", 2**31),
    "dimension of zero": after(b"output_norm.weight", 4, "<Q", 0),
    "dimension of 2^39": after(b"output_norm.weight", 4, "<Q", 2**39),
    "dimension of 2^63": after(b"output_norm.weight", 4, "<Q", 2**63),
    "unknown tensor type": after(b"output_norm.weight", 12, "<I", 999),
    "rows that are no whole blocks": after(b"blk.0.ffn_down.weight", 20, "<I", 12),
    "offset beyond the end": after(b"output_norm.weight", 16, "<Q", 2**40),
    "offset that is not aligned": after(b"output_norm.weight", 16, "<Q", 1),
    "text that is no UTF-8": after(b"general.architecture", 12, "<H", 0xFFFF),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_file_is_refused_in_little_memory(lie: str, path: Path, tmp_path: Path) -> None:
    lying = tmp_path / "lying.gguf"
    lying.write_bytes(LIES[lie](path.read_bytes()))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"lying\.gguf is not a sound GGUF file"):
            GGUFFile(lying)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_tensors_that_share_bytes_are_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    with GGUFFile(path) as file:
        names = [name.encode() for name in file.tensors]
        first = min(tensor.offset for tensor in file.tensors.values())
        largest = max(tensor.num_bytes for tensor in file.tensors.values())
    for name in names:
        start = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        (dimensions,) = struct.unpack_from("<I", data, start)
        data = at(start + 4 + 8 * dimensions + 4, "<Q", 0)(data)
    (tmp_path / "m.gguf").write_bytes(data[: first + largest])
    with pytest.raises(ModelError, match="overlap"):
        GGUFFile(tmp_path / "m.gguf")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_anywhere_in_the_header_is_an_error_or_harmless(
    data: st.DataObject, path: Path, tmp_path: Path
) -> None:
    content = bytearray(path.read_bytes())
    header = content.index(b"ffn_down.weight") + 100
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        with GGUFFile(damaged) as file:
            tensor_shapes(file)
            build_empty(read_config(file))
    except ModelError:
        pass


def test_a_file_that_is_a_folder_or_missing_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "nothing.gguf"):
        with pytest.raises(ModelError, match="cannot be read"):
            GGUFFile(wrong)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] = torch.inf
    with (
        GGUFFile(save_gguf(model, tmp_path / "m.gguf")) as file,
        pytest.raises(ModelError, match="not finite"),
    ):
        file.read("token_embd.weight")


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 4}, "part of each head"),
    ],
)
def test_what_would_change_answers_and_is_not_read_is_refused(
    metadata: dict[str, int | str], why: str, tmp_path: Path
) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    file = GGUFFile(save_gguf(model, tmp_path / "m.gguf", metadata=metadata))
    with file, pytest.raises(UnsupportedModelError, match=why):
        read_config(file)


def test_an_unknown_architecture_is_refused(path: Path, tmp_path: Path) -> None:
    # The string's length stays the same, and so does the rest of the file.
    data = path.read_bytes().replace(b"llama", b"mamba")
    (tmp_path / "m.gguf").write_bytes(data)
    with (
        GGUFFile(tmp_path / "m.gguf") as file,
        pytest.raises(UnsupportedModelError, match="'mamba'"),
    ):
        read_config(file)


def test_linear_rope_scaling_is_carried_over(tmp_path: Path) -> None:
    metadata: dict[str, str | float] = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
    }
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope)
    loaded = load(save_gguf(model, tmp_path / "m.gguf", metadata=metadata))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
