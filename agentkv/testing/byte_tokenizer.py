"""A tokenizer whose tokens are bytes, with a chat template, for tests without a model's files."""

from __future__ import annotations

from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ..text.detokenizer import byte_alphabet
from ..text.tokenizer import ChatTokenizer

__all__ = ["byte_tokenizer"]

Variant = Literal["plain", "default_system", "strip_reasoning", "reject_lone_system"]

SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

_MESSAGE = "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_HEADS: dict[Variant, str] = {
    "plain": "",
    "default_system": (
        "{% if messages and messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}"
    ),
    "strip_reasoning": "",
    "reject_lone_system": (
        "{% if messages | length == 1 and messages[0].role == 'system' %}"
        "{{ raise_exception('a user message is needed') }}{% endif %}"
    ),
}
_STRIP = (
    "{% if m.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
)


def byte_tokenizer(variant: Variant = "plain", *, add_bos: bool = False) -> ChatTokenizer:
    """Ids 0..255 are bytes, 256..259 `<|bos|>`, `<|im_start|>`, `<|im_end|>` and `<|pad|>`.

    The template is ChatML without surprises; as variants it inserts a default system message,
    strips the reasoning of earlier replies (all before `</think>`), or rejects a system message
    that stands alone. `add_bos` puts `<|bos|>` before raw texts and renderings.
    """
    vocabulary = {character: byte for byte, character in byte_alphabet().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 256)]
        )
    return ChatTokenizer(
        backend,
        chat_template=_template(variant, add_bos),
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
    )


def _template(variant: Variant, add_bos: bool) -> str:
    strip = _STRIP if variant == "strip_reasoning" else ""
    return (
        ("{{ bos_token }}" if add_bos else "")
        + _HEADS[variant]
        + "{% for m in messages %}{% set content = m.content %}"
        + strip
        + _MESSAGE
        + "{% endfor %}"
        + _PROMPT
    )
