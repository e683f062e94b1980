"""Tokenizers as they come: Hugging Face folders, loaded tokenizer objects, or parts of a GGUF file.

Turns each into the plain parts that agentkv.text builds a ChatTokenizer from, without importing
transformers where a tokenizer.json is there, and without changing an object it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import ModelError, UntrustedModelError
from ..text.backend import backend_faults
from ..text.tokenizer import ChatTokenizer

__all__ = ["TokenizerFiles", "load_tokenizer", "read_json"]

MAX_JSON_BYTES = 256 * 2**20
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """What defines a tokenizer, before a ChatTokenizer is made of it.

    `special` maps `bos_token`, `eos_token`, `pad_token` and `unk_token`, where there is one, to its
    text.
    """

    backend: Tokenizer
    chat_template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    def chat_tokenizer(self, eos_token_ids: tuple[int, ...] = ()) -> ChatTokenizer:
        """The tokenizer for conversations; `eos_token_ids` come on top of the tokenizer's own."""
        own = self.eos_token_ids
        if not own and "eos_token" in self.special:
            token_id = self.backend.token_to_id(self.special["eos_token"])
            own = () if token_id is None else (token_id,)
        return ChatTokenizer(
            self.backend,
            chat_template=self.chat_template,
            bos_token=self.special.get("bos_token"),
            eos_token=self.special.get("eos_token"),
            pad_token=self.special.get("pad_token"),
            unk_token=self.special.get("unk_token"),
            eos_token_ids=tuple(dict.fromkeys((*eos_token_ids, *own))),
        )

    def save(self, folder: Path) -> None:
        """Write the files that `read_folder` reads."""
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {**self.special, "eos_token_ids": self.eos_token_ids}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        text = json.dumps(settings)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(source: object, *, allow_remote_code: bool = False) -> TokenizerFiles:
    """Parts of the tokenizer `source`: a folder, a tokenizer.json, or a loaded fast tokenizer.

    Raises:
        ModelError: there is no such file, it is damaged, or the object is no fast tokenizer.
        UntrustedModelError: the folder wants to run its own code.
    """
    if isinstance(source, TokenizerFiles):
        return source
    if isinstance(source, Tokenizer):
        return TokenizerFiles(_copy(source))
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            return _read_folder(path, allow_remote_code=allow_remote_code)
        if path.is_file():
            return TokenizerFiles(_backend_from(path))
        raise ModelError(f"there is no tokenizer folder or tokenizer.json at {path}")
    backend = getattr(source, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(
            f"tokenizer= must be a folder, a tokenizer.json or a fast tokenizer, and is "
            f"{type(source).__name__}"
        )
    template = _pick_template(getattr(source, "chat_template", None))
    special = {name: getattr(source, name, None) for name in _SPECIAL_NAMES}
    return TokenizerFiles(_copy(backend), template, _texts_of(special))


def _read_folder(folder: Path, *, allow_remote_code: bool) -> TokenizerFiles:
    settings = read_json(folder / "tokenizer_config.json") or {}
    if "auto_map" in settings and not allow_remote_code:
        raise UntrustedModelError(
            f"{folder} has a tokenizer with code of its own (auto_map); "
            "read that code, then pass allow_remote_code=True"
        )
    if not (folder / "tokenizer.json").is_file():
        return _through_transformers(folder, allow_remote_code=allow_remote_code)
    named = read_json(folder / "special_tokens_map.json") or {}
    special = {name: settings.get(name) or named.get(name) for name in _SPECIAL_NAMES}
    ids = settings.get("eos_token_ids")
    ids = ids if isinstance(ids, list) else ()
    return TokenizerFiles(
        _backend_from(folder / "tokenizer.json"),
        _folder_template(folder, settings),
        _texts_of(special),
        tuple(token_id for token_id in ids if type(token_id) is int),
    )


def _through_transformers(folder: Path, *, allow_remote_code: bool) -> TokenizerFiles:
    """Let transformers convert the older formats (tokenizer.model, vocab.json)."""
    if not any(
        (folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "merges.txt")
    ):
        raise ModelError(f"{folder} has no tokenizer.json; pass tokenizer=")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=allow_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return load_tokenizer(loaded)


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template of a folder: a file of its own wins over the one in the settings."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    return _pick_template(settings.get("chat_template"))


def _pick_template(template: object) -> str | None:
    """The default among several named templates."""
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template if isinstance(t, Mapping)}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _backend_from(path: Path) -> Tokenizer:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size} bytes, too many for a tokenizer")
    with backend_faults(lambda e: ModelError(f"{path} is not a sound tokenizer.json: {e}")):
        return Tokenizer.from_file(str(path))


def _copy(backend: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(backend.to_str())


def _texts_of(tokens: Mapping[str, object]) -> dict[str, str]:
    """Text of each token, be it given as text, as an AddedToken or as what that saves as."""
    texts = {}
    for name, token in tokens.items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if content is not None:
            texts[name] = str(content)
    return texts


def read_json(path: Path) -> dict[str, Any] | None:  # Any: JSON
    """The object in a JSON file, None if there is no such file.

    Raises:
        ModelError: the file is no JSON object, or far too large for one.
    """
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} holds no JSON object")
    return loaded
