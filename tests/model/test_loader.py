"""Opening models: folders, GGUF files, loaded models, and what goes wrong with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, dynamic_module_utils

from agentkv.config import EngineConfig
from agentkv.errors import ModelError, UnsupportedModelError, UntrustedModelError
from agentkv.model.loader import open_model
from agentkv.model.placement import choose_device, choose_dtype
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.tiny_files import save_folder
from agentkv.testing.tiny_models import SERVED_FAMILIES, tiny_model

CPU = EngineConfig(device="cpu", dtype="float32")
IDS = torch.arange(20)[None]
HUGE = b'{"model.norm.weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS).logits
    return result


def edit(path: Path, **changes: Any) -> None:  # Any: JSON
    """Change entries of a JSON file; None removes one."""
    entries = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model("llama", num_hidden_layers=2)
    (tmp_path / "tiny").mkdir()
    return save_folder(model, tmp_path / "tiny")


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma2", "gemma3", "gemma4", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3"],
)
def test_a_folder_gives_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    loaded = open_model(save_folder(model, tmp_path), config=CPU)
    assert torch.equal(logits_of(loaded.model), logits_of(model))
    assert not any(module.training for module in loaded.model.modules())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is dtype


def test_weights_come_in_the_dtype_asked_for(folder: Path) -> None:
    loaded = open_model(folder, config=EngineConfig(device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.config.dtype is torch.bfloat16
    assert loaded.model.model.rotary_emb.inv_freq.dtype is torch.float32


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_weights_are_those_that_transformers_loads(family: str, tmp_path: Path) -> None:
    save_folder(tiny_model(family), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    ours = open_model(tmp_path, config=EngineConfig(device="cpu", dtype="bfloat16")).model
    wanted = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    found = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype is tensor.dtype for name, tensor in wanted.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_several_files_make_one_model(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    save_folder(model, tmp_path)
    model.save_pretrained(str(tmp_path), max_shard_size="60KB")
    (tmp_path / "model.safetensors").unlink()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits_of(open_model(tmp_path, config=CPU).model), logits_of(model))


def test_the_tokenizer_beside_the_weights_is_used(folder: Path) -> None:
    tokenizer, plain = open_model(folder, config=CPU).tokenizer, byte_tokenizer()
    assert tokenizer.encode("a  1") == plain.encode("a  1")
    assert tokenizer.chat_template == plain.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|im_end|>")


def test_a_template_in_a_file_of_its_own_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own")
    assert open_model(folder, config=CPU).tokenizer.chat_template == "own"


def test_the_default_of_several_templates_is_taken(folder: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert open_model(folder, config=CPU).tokenizer.chat_template == "d"


def test_a_folder_without_a_tokenizer_says_what_to_pass(tmp_path: Path) -> None:
    save_folder(tiny_model("llama"), tmp_path, tokenizer=False)
    with pytest.raises(ModelError, match=r"no tokenizer\.json; pass tokenizer="):
        open_model(tmp_path, config=CPU)
    loaded = open_model(tmp_path, config=CPU, tokenizer=byte_tokenizer())
    assert loaded.tokenizer.encode("a") == [97]


def test_a_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a sound"):
        open_model(folder, config=CPU)


def test_a_panic_in_the_tokenizers_own_code_is_a_model_error(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    )
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a sound"):
        open_model(folder, config=CPU)


@pytest.mark.parametrize("ids", [5, True, 1.5, "258", {"a": 1}, [None, "x", 7.5, True]])
def test_end_tokens_that_are_no_ids_are_left_out(ids: object, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token_ids=ids)
    assert open_model(folder, config=CPU).eos_token_ids == (258,)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        open_model(folder, config=CPU)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights only"):
        open_model(folder, config=CPU)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json, so it is not a model folder$"):
        open_model(tmp_path, config=CPU)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"to open m\.gguf, name that file"):
        open_model(tmp_path, config=CPU)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "[" * 100000])
def test_a_config_that_is_no_json_object_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(folder, config=CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"hidden_size": 10**7, "intermediate_size": 10**7},
        {"vocab_size": 321},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"hidden_size": "many"},
        {"model_type": "no such type"},
        {"model_type": None, "architectures": None},
        {"rope_parameters": {"rope_type": "spiral"}},
    ],
    ids=str,
)
def test_a_config_that_the_weights_do_not_fit_is_refused(
    changes: dict[str, Any], folder: Path
) -> None:
    edit(folder / "config.json", **changes)
    state = torch.get_rng_state()
    with pytest.raises((ModelError, UnsupportedModelError)):
        open_model(folder, config=CPU)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was filled at random


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_missing_tensor_is_never_filled_at_random(family: str, tmp_path: Path) -> None:
    path = save_folder(tiny_model(family), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "1." in name)]
    save_file(tensors, path, metadata={"format": "pt"})
    state = torch.get_rng_state()
    with pytest.raises(ModelError):
        open_model(tmp_path, config=CPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_encoder_decoder_is_no_causal_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        open_model(save_folder(tiny_model("t5"), tmp_path), config=CPU)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_weights_cut_short_are_refused(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="damaged or was not downloaded whole"):
        open_model(folder, config=CPU)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        (2**40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        len(HUGE).to_bytes(8, "little") + HUGE + b"\0\0\0\0",
    ],
    ids=["endless header", "header of 2^40 bytes", "no object", "4 TiB in four bytes"],
)
def test_a_lying_header_is_refused(header: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelError):
        open_model(folder, config=CPU)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "model.bin", "absent.safetensors"]
)
def test_an_index_stays_inside_its_folder(name: str, folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json names|lacks"):
        open_model(folder, config=CPU)


# -- code in folders -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_does_not_run(place: str, folder: Path) -> None:
    marker = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    edit(
        folder / place,
        auto_map={
            "AutoConfig": "evil.Config",
            "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.Slow", "evil.Fast"],
        },
    )
    with pytest.raises(UntrustedModelError, match="allow_remote_code=True"):
        open_model(folder, config=CPU)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {"auto_map": {"AutoConfig": "evil.Config"}}},
        {"_attn_implementation": "someone/kernels"},
        {"attn_implementation": "someone/kernels:attention"},
        {"nested": [{"_attn_implementation_internal": "someone/kernels"}]},
    ],
    ids=str,
)
def test_hidden_ways_to_bring_code_are_seen(changes: dict[str, Any], folder: Path) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(UntrustedModelError, match="code of its own"):
        open_model(folder, config=CPU)


def test_code_runs_where_it_is_allowed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    pass\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    edit(folder / "config.json", auto_map=names)
    config = EngineConfig(device="cpu", dtype="float32", allow_remote_code=True)
    assert type(open_model(folder, config=config).model).__name__ == "OwnModel"


# -- loaded models ---------------------------------------------------------------------------------


def test_a_loaded_model_is_taken_as_it_is() -> None:
    model = tiny_model("llama")
    loaded = open_model(model, tokenizer=byte_tokenizer())
    assert loaded.model is model
    assert loaded.name == "LlamaForCausalLM"


def test_a_loaded_model_needs_its_tokenizer() -> None:
    with pytest.raises(ModelError, match="pass tokenizer="):
        open_model(tiny_model("llama"))


def test_a_loaded_model_in_training_mode_is_refused_and_stays_so() -> None:
    model = tiny_model("llama").train()
    with pytest.raises(UnsupportedModelError, match=r"^\[training\]"):
        open_model(model, tokenizer=byte_tokenizer())
    assert model.training


def test_a_loaded_model_is_not_converted() -> None:
    for config in (EngineConfig(dtype="bfloat16"), EngineConfig(dtype="float16")):
        with pytest.raises(ModelError, match=r"loaded model has torch\.float32"):
            open_model(tiny_model("llama"), tokenizer=byte_tokenizer(), config=config)


def test_a_loaded_model_without_values_is_refused() -> None:
    with pytest.raises(ModelError, match="meta device"):
        open_model(tiny_model("llama").to("meta"), tokenizer=byte_tokenizer())


def test_a_loaded_tokenizer_is_copied_and_stays_as_it_is() -> None:
    backend = byte_tokenizer(add_bos=True).backend
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        chat_template="{{ 1 }}",
    )
    before = fast.backend_tokenizer.to_str()
    tokenizer = open_model(tiny_model("llama"), tokenizer=fast).tokenizer
    tokenizer.encode("text with <|im_end|> in it")
    assert fast.backend_tokenizer.to_str() == before
    assert tokenizer.backend is not fast.backend_tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|im_end|>")
    assert tokenizer.chat_template == "{{ 1 }}"
    assert tokenizer.encode("a") == [256, 97]


@pytest.mark.parametrize("wrong", [object(), 7, "/no/such/folder"])
def test_what_is_no_tokenizer_is_refused(wrong: object) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        open_model(tiny_model("llama"), tokenizer=wrong)


def test_a_tokenizer_may_be_a_file_or_a_folder(folder: Path) -> None:
    for source in (folder, str(folder), folder / "tokenizer.json"):
        assert open_model(tiny_model("llama"), tokenizer=source).tokenizer.encode("a") == [97]


# -- what belongs to a model -----------------------------------------------------------------------


def test_sampling_defaults_come_from_the_generation_config(folder: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    options = open_model(folder, config=CPU).default_options
    assert (options.temperature, options.top_p, options.top_k) == (0.6, 0.9, 40)
    assert options.min_p is None


def test_a_config_that_rules_sampling_out_means_greedy(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert open_model(folder, config=CPU).default_options.temperature == 0.0


def test_nonsense_in_a_generation_config_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"temperature": "hot", "top_p": 7.0, "top_k": 5, "repetition_penalty": -1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    options = open_model(folder, config=CPU).default_options
    assert (options.temperature, options.top_p, options.top_k) == (None, None, 5)
    assert caplog.text.count("generation config is ignored in part") == 3


@pytest.mark.parametrize(
    ("written", "expected"), [(7, (7, 258)), ([7, 9], (7, 9, 258)), (None, (258,)), (True, (258,))]
)
def test_end_tokens_are_those_of_model_and_tokenizer(
    written: object, expected: tuple[int, ...], folder: Path
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    assert open_model(folder, config=CPU).eos_token_ids == expected


def test_end_tokens_beyond_the_vocabulary_are_left_out(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 10**6]}))
    assert open_model(folder, config=CPU).eos_token_ids == (7, 258)


def test_the_identity_names_weights_dtype_and_rope(folder: Path) -> None:
    first = open_model(folder, config=CPU).identity
    assert open_model(folder, config=CPU).identity == first
    other = EngineConfig(device="cpu", dtype="bfloat16")
    assert open_model(folder, config=other).identity != first
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert open_model(folder, config=CPU).identity != first


def test_progress_is_told_stage_by_stage(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    open_model(folder, config=CPU, progress=lambda stage, share: seen.append((stage, share)))
    assert [stage for stage, share in seen if share == 1.0] == ["load", "ready"]
    shares = [share for stage, share in seen if stage == "load"]
    assert shares == sorted(shares)
    assert all(0 < share <= 1 for _, share in seen)


def test_an_old_transformers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentkv.model.loader.transformers.__version__", "4.57.1")
    with pytest.raises(ModelError, match=r"transformers 4\.57\.1 is installed and 5\.24 or later"):
        open_model(folder, config=CPU)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "mps", ""])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(ModelError, match="device="):
        choose_device(EngineConfig(device=device))


def test_the_dtype_asked_for_is_chosen() -> None:
    assert choose_dtype(EngineConfig(device="cpu", dtype="float16")) is torch.float16
    assert choose_dtype(EngineConfig(device="cpu")) in (torch.float32, torch.bfloat16)
