"""The tokenizer that a GGUF file describes, as `tokenizers` and Hugging Face files know it.

A wrong way of splitting text gives wrong ids without any error, so a file whose way is not known
is refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..errors import ModelError, UnsupportedModelError
from .gguf import GGUFFile
from .tokenizer_files import TokenizerFiles

__all__ = ["read_tokenizer"]

CONTROL, USER_DEFINED = 3, 4
_SPECIAL_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Values of `tokenizer.ggml.pre`, by the way their text is split before merging.
_PLAIN = frozenset({"gpt-2", "phi-2", "olmo", "jais", "mpt"})
_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_LLAMA3_NAMES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"})
_QWEN2_NAMES = frozenset({"qwen2", "deepseek-r1-qwen"})


def read_tokenizer(file: GGUFFile) -> TokenizerFiles:
    """The tokenizer in `file` with its chat template and special tokens.

    Raises:
        UnsupportedModelError: its kind, or its way of splitting text, is not known.
        ModelError: its parts contradict each other.
    """
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise _unknown(file, f"a tokenizer of kind {kind!r}")
    tokens = _list(file, "tokens", str)
    try:
        backend = _byte_level(file, tokens, pre)
        _add_tokens(backend, tokens, _list(file, "token_type", int))
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for parts that do not fit
        raise ModelError(f"{file.path} has a tokenizer that is damaged: {error}") from error
    if backend.get_vocab_size() != len(tokens):
        raise ModelError(f"{file.path} has a tokenizer in which tokens occur twice")
    special = {
        name: token
        for name, key in _SPECIAL_KEYS.items()
        if (token := _token(file, tokens, key)) is not None
    }
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES)
    bos = special.get("bos_token")
    if adds_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    ids = {file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")}
    return TokenizerFiles(
        backend=backend,
        chat_template=_template(file),
        special=special,
        eos_token_ids=tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < len(tokens))),
    )


def _byte_level(file: GGUFFile, tokens: list[str], pre: object) -> Tokenizer:
    """A byte-level BPE tokenizer that splits text as `pre` says."""
    merges = [tuple(merge.split(" ")) for merge in _list(file, "merges", str)]
    if any(len(pair) != 2 for pair in merges):
        raise ModelError(f"{file.path} has a tokenizer with a merge that is no pair")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as that token, whatever the merges say.
    model = models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_NAMES)
    backend = Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    if pre in _PLAIN:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in _LLAMA3_NAMES | _QWEN2_NAMES:
        pattern = _LLAMA3 if pre in _LLAMA3_NAMES else _QWEN2
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre in _QWEN2_NAMES:
            backend.normalizer = normalizers.NFC()
    else:
        raise _unknown(file, f"the pre-tokenizer {pre!r}")
    return backend


def _add_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Mark the tokens that text never spells out: control tokens, and those users defined."""
    if len(kinds) != len(tokens):
        raise ValueError(f"{len(kinds)} token types for {len(tokens)} tokens")
    marked = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, k in marked if k == CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, k in marked if k == USER_DEFINED]
    )


def _template(file: GGUFFile) -> str | None:
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{file.path} has a chat template that is no text")
    return template


def _token(file: GGUFFile, tokens: list[str], key: str) -> str | None:
    token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ModelError(f"{file.path} names token {token_id!r} of {len(tokens)} as {key}")
    return tokens[token_id]


def _list(file: GGUFFile, key: str, kind: type) -> list[Any]:  # Any: elements of type `kind`
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelError(f"{file.path} has a tokenizer without a sound list of {key}")
    return values


def _unknown(file: GGUFFile, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"[gguf] {file.path} has {what}, which is not known here; pass tokenizer= with the folder "
        "or tokenizer.json of the original model"
    )
