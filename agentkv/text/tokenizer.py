"""Text to token ids and back, for one model.

Wraps a `tokenizers.Tokenizer` and the model's chat template. Keeps what users wrote apart from what
the template wrote, so that the text of a control token in a message stays text. Never changes the
backend it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from tokenizers import Tokenizer

from ..errors import ChatTemplateError, ContextLengthError, RequestError
from ..messages import Message
from .backend import backend_faults
from .detokenizer import Detokenizer, DetokenizerSource
from .plain import PlainBackend
from .rendering import Part, Piece, render_parts
from .template import ChatTemplate

__all__ = ["ROLES", "ChatTokenizer"]

_SLICE = 1 << 14
ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


class ChatTokenizer:
    """Encodes, renders and decodes for one model; safe to use from several threads.

    `backend` is only read (a private copy is made where it truncates or pads). The special tokens
    named here are what the template sees as `bos_token` and so on; `template_variables` are passed
    to every rendering too.

    Raises:
        ChatTemplateError: the template does not compile, or a variable has a reserved name.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        eos_token_ids: Sequence[int] = (),
        template_variables: Mapping[str, object] | None = None,
    ) -> None:
        self._backend = _unpadded(backend)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids) or self._ids_of(eos_token)
        names = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "pad_token": pad_token,
            "unk_token": unk_token,
        }
        variables = {name: token for name, token in names.items() if token is not None}
        self._template = (
            ChatTemplate(chat_template, {**variables, **(template_variables or {})})
            if chat_template is not None
            else None
        )
        self.vocab_size: int = int(backend.get_vocab_size(with_added_tokens=True))
        self._plain = PlainBackend(self._backend, self._template.literals if self._template else ())
        self._detokenizers = DetokenizerSource(self._backend, self._plain.special_ids)

    @property
    def backend(self) -> Tokenizer:
        """The wrapped tokenizer, to be read only."""
        return self._backend

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return self._plain.special_ids

    # -- raw text ----------------------------------------------------------------------------------

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Ids of raw text, with a BOS where the tokenizer adds one; control-token text stays text.

        Raises:
            ContextLengthError: the text cannot fit in `limit` tokens.
            RequestError: the text is not valid Unicode.
        """
        _check_text(text)
        self.check_length([text], limit)
        return self._plain.encode([Piece(text, "user")], add_special_tokens=True, limit=limit)

    def encode_markup(self, text: str, *, limit: int | None = None) -> list[int]:
        """Ids of raw text in which control-token text means the control tokens.

        A BOS is added where the tokenizer adds one and the text does not begin with it.
        """
        _check_text(text)
        starts = self.bos_token is not None and text.startswith(self.bos_token)
        pieces = [Piece(text, "template")]
        return self._plain.encode(pieces, add_special_tokens=not starts, limit=limit)

    def encode_continuation(self, text: str, *, limit: int | None = None) -> list[int]:
        """Ids of raw text that continues other ids: no BOS, control-token text stays text."""
        _check_text(text)
        self.check_length([text], limit)
        return self._plain.encode([Piece(text, "user")], anchored=True, limit=limit)

    def encode_continuations(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of several texts, each as `encode_continuation` gives them."""
        return [self.encode_continuation(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of whole ids; incomplete characters at the end come out as U+FFFD.

        Raises:
            RequestError: an id is no integer from 0 to 2**32 - 1.
        """
        message = f"token ids must be integers from 0 to {2**32 - 1}"
        with backend_faults(lambda error: RequestError(message)):
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def detokenizer(self) -> Detokenizer:
        """A detokenizer at the beginning of a reply."""
        return self._detokenizers.detokenizer()

    # -- conversations -----------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered at all."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        now: datetime | None = None,
    ) -> str:
        """The conversation as the template writes it; `now` is what a date in it shows.

        Raises:
            ChatTemplateError: there is no template, or it refuses, fails or exceeds its budget.
            RequestError: a role is unknown, or a text is not valid Unicode.
        """
        if self._template is None:
            raise ChatTemplateError("this tokenizer has no chat template; pass token ids instead")
        check_messages(messages)
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, now=now or datetime.now()
        )

    def render_parts(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        now: datetime,
        replies: Sequence[int] = (),
    ) -> list[Part]:
        """The rendering, cut where the messages at the indices `replies` stand.

        Each part lists its pieces with who wrote them. There is one part more than there are
        replies found in order; fewer parts mean that the template dropped or moved one.
        """
        return render_parts(
            lambda changed: self.render(
                changed, add_generation_prompt=add_generation_prompt, now=now
            ),
            messages,
            replies,
            self._plain.control,
        )

    def encode_part(
        self, part: Part, *, anchored: bool = False, limit: int | None = None
    ) -> list[int]:
        """Ids of a rendered part, without any BOS that the template did not write.

        `anchored` says that other ids come before it.

        Raises:
            ContextLengthError: there are more ids than `limit`.
        """
        return self._plain.encode(part, anchored=anchored, limit=limit)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        limit: int | None = None,
        now: datetime | None = None,
    ) -> list[int]:
        """Ids of a whole conversation: as transformers encodes it, but control-token text in a
        message stays text.

        Raises:
            ChatTemplateError, RequestError: as `render`.
            ContextLengthError: the texts cannot fit in `limit` tokens.
        """
        self.check_length([message.content for message in messages], limit)
        (part,) = self.render_parts(
            messages, add_generation_prompt=add_generation_prompt, now=now or datetime.now()
        )
        return self.encode_part(part, limit=limit)

    # -- limits ------------------------------------------------------------------------------------

    @property
    def max_token_chars(self) -> int:
        """No token but a special one stands for more characters than this."""
        # A normalizer may compose up to four characters into one.
        widest = 4 if self._backend.normalizer is not None else 1
        return widest * self._detokenizers.max_token_chars

    def check_length(self, texts: Iterable[str], limit: int | None) -> None:
        """Refuse texts that by their length alone cannot fit in `limit` tokens; looks at no text.

        Raises:
            ContextLengthError: they cannot; its `tokens` is the least number they take.
        """
        if limit is None:
            return
        chars = sum(map(len, texts))
        if chars > limit * self.max_token_chars:
            raise ContextLengthError(-(-chars // self.max_token_chars), limit)

    def control_id(self, text: str) -> int | None:
        """The id of the control token with this text, if there is one."""
        return self._plain.control.get(text)

    def starts_with_control(self, text: str, token_id: int) -> bool:
        """Whether the text, white space aside, begins with the text of that control token."""
        token = self._plain.control_text.get(token_id)
        return token is not None and text.lstrip().startswith(token)

    def _ids_of(self, token: str | None) -> tuple[int, ...]:
        token_id = self._backend.token_to_id(token) if token is not None else None
        return () if token_id is None else (token_id,)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError for a role that is not allowed or a text that is not valid Unicode."""
    for message in messages:
        if not isinstance(message.role, str) or message.role not in ROLES:
            raise RequestError(
                f"a message's role must be one of {', '.join(sorted(ROLES))}, not "
                f"{_short_role(message.role)}"
            )
        if not isinstance(message.content, str):
            kind = type(message.content).__name__
            raise RequestError(f"a message's content must be text, not {kind}")
        if not _is_unicode(message.content):
            raise RequestError("a message's content has half of a surrogate pair")


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a text must be a string, not {type(text).__name__}")


def _short_role(role: object) -> str:
    """A role for an error message, unless it may be a text that was put in its place."""
    is_word = isinstance(role, str) and len(role) <= 16 and role.isidentifier()
    return repr(role) if is_word else f"<{type(role).__name__}>"


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded; looked at in slices, so that no copy of it is made."""
    if text.isascii():
        return True
    try:
        for start in range(0, len(text), _SLICE):
            text[start : start + _SLICE].encode()
    except UnicodeEncodeError:
        return False
    return True


def _unpadded(backend: Tokenizer) -> Tokenizer:
    """The backend, or a copy of it that neither truncates, pads nor splits control tokens."""
    if backend.truncation is None and backend.padding is None and not backend.encode_special_tokens:
        return backend
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
