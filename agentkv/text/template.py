"""A model's chat template, rendered in a sandbox within a budget.

Templates come with model files, so they are foreign code: they run in jinja2's immutable sandbox,
and every loop turn, call, filter, printed value and growing operator is charged to the render's
`Budget`. Whatever goes wrong is a ChatTemplateError. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import ChatTemplateError
from ..messages import Message
from .budget import Budget, HurriedError, TemplateBudgetError, check_format, check_width
from .instrument import instrument, literals_of

__all__ = ["ChatTemplate"]

MAX_TEMPLATE_CHARS = 1_000_000
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})

_UNBOUNDED_FILTERS = (
    "batch center filesizeformat format pprint random slice striptags urlize wordwrap xmlattr"
).split()
_STR_METHODS = frozenset(
    (
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
        "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
        "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper"
    ).split()
)
_CONTAINER_METHODS = frozenset({"get", "items", "keys", "values", "copy", "index", "count"})

# What an error message quotes, where it has no quote in it, and how jinja2 names a kind of object.
_QUOTED = re.compile(r"'([^'\"]*)'")
_KIND = re.compile(r"(str|int|float|bool|list|dict|tuple|NoneType|None)( object)?|[\w.]+ object")

_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)
_now: ContextVar[datetime | None] = ContextVar("template_now", default=None)


class ChatTemplate:
    """A compiled chat template and the variables it is always rendered with.

    Raises:
        ChatTemplateError: the template does not compile, or a variable has a reserved name.
    """

    def __init__(self, source: str, variables: Mapping[str, object] | None = None) -> None:
        self._variables = dict(variables or {})
        if reserved := RESERVED & self._variables.keys():
            raise ChatTemplateError(f"template variables have reserved names: {sorted(reserved)}")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}"
            )
        self._source = source
        environment = _Environment()
        token = _budget.set(Budget(len(source)))  # jinja2 computes constant expressions right away
        try:
            tree = environment.parse(source)
            self.literals: tuple[str, ...] = tuple(literals_of(tree))
            self._template = environment.from_string(instrument(tree, environment))
        except Exception as error:  # a foreign template can fail in any way
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        finally:
            _budget.reset(token)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, now: datetime
    ) -> str:
        """The conversation as the model expects it, `now` being what `strftime_now` shows.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or exceeds its budget.
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        budget = Budget(sum(len(message.content) for message in messages) + 64 * len(plain))
        tokens = _budget.set(budget), _now.set(now)
        try:
            return "".join(
                self._template.generate(
                    **self._variables,
                    messages=plain,
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                )
            )
        except HurriedError:
            raise
        except TemplateBudgetError as error:
            raise ChatTemplateError(f"the chat template {error}") from error
        except Exception as error:  # a foreign template can fail in any way
            shown = self._harmless(error)
            raise ChatTemplateError(f"the chat template failed: {shown}") from None
        finally:
            _budget.reset(tokens[0])
            _now.reset(tokens[1])

    def _harmless(self, error: Exception) -> str:
        """What an error says, unless it may quote the messages, which errors never do."""
        kind, text = type(error).__name__, str(error)
        own = isinstance(error, (SecurityError, jinja2.UndefinedError)) and self._is_own(text)
        return f"{kind}: {text[:200]}" if own or text in self.literals else kind

    def _is_own(self, text: str) -> bool:
        """Whether all that jinja2 quotes are kinds of objects, or words of the template itself."""
        quoted = _QUOTED.findall(text)
        rest = _QUOTED.sub("", text)
        known = (word in self._source or _KIND.fullmatch(word) for word in quoted)
        return not {"'", '"'} & set(rest) and all(known)


class _Generation(Extension):
    """`{% generation %}`, which marks replies for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with every growing operation charged."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self.charge,
        )
        self.filters["tojson"] = _tojson
        for name in _UNBOUNDED_FILTERS:
            self.filters.pop(name, None)
        self.filters = {name: _charged(name, f) for name, f in self.filters.items()}
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_make_dict,
            namespace=_SafeNamespace,
        )
        self.globals.pop("lipsum", None)

    def charge(self, value: Any) -> Any:  # Any: a template's value
        budget = _budget.get()
        return value if budget is None else budget.charge(value)

    def turn(self, literal_chars: int) -> None:
        """One more turn of a loop body or a macro that holds so many literal characters."""
        budget = _budget.get()
        if budget is not None:
            budget.spend(1 + literal_chars)

    # `__self` and `__context` as in jinja2: a template may pass keywords called self and context.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.turn(0)
        if isinstance(__obj, BuiltinMethodType):
            args = _check_method(__obj, args)
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.charge(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # Any: t.
        budget = _budget.get()
        if budget is not None:
            budget.check_operands(operator, left, right)
        return self.charge(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # Any: a template's value
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped


class _SafeNamespace(Namespace):
    """jinja2's namespace without private names, which could reach the interpreter."""

    # A template may pass a keyword called self.
    def __init__(*args: Any, **kwargs: Any) -> None:  # Any: template values
        self, *given = args
        attributes = dict(*given, **kwargs)
        if any(str(name).startswith("_") for name in attributes):
            raise SecurityError("a namespace attribute may not be private")
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # Any: a template's value
        if name.startswith("_"):
            raise SecurityError("a namespace attribute may not be private")
        super().__setitem__(name, value)


def _check_method(method: BuiltinMethodType, args: tuple[Any, ...]) -> tuple[Any, ...]:  # Any: t.
    receiver, name = method.__self__, method.__name__
    if isinstance(receiver, str):
        allowed = name in _STR_METHODS
    else:
        allowed = isinstance(receiver, (dict, list, tuple)) and name in _CONTAINER_METHODS
    if not allowed:
        raise SecurityError(f"chat templates may not call {type(receiver).__name__}.{name}")
    budget = _budget.get()
    if budget is None:
        return args
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
        budget.check_join(str(receiver), args[0])
    elif name == "replace" and len(args) >= 2:
        budget.check_replace(str(receiver), args[0], args[1])
    return args


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:  # Any: jinja2's
    """The filter, with its input checked where the output can be much larger, and charged."""
    passes = 1 if hasattr(function, "jinja_pass_arg") else 0

    def charged(*args: Any, **kwargs: Any) -> Any:  # Any: template values
        budget = _budget.get()
        if budget is None:
            return function(*args, **kwargs)
        budget.spend(1)
        values: list[Any] = list(args)  # Any: template values
        if name == "join":
            values[passes] = list(values[passes])
            given = values[passes + 1] if len(values) > passes + 1 else kwargs.get("d", "")
            budget.check_join(given, values[passes])
        elif name == "replace":
            budget.check_replace(*values[passes : passes + 3])
        elif name in ("indent", "round", "tojson", "truncate", "sum", "int"):
            check_width(*values[passes + 1 :], *kwargs.values())
        return budget.charge(function(*values, **kwargs))

    for attribute, value in getattr(function, "__dict__", {}).items():
        setattr(charged, attribute, value)
    return charged


def _tojson(
    value: Any,  # Any: a template's value
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    now = _now.get()
    if now is None or len(form) > 256:
        raise SecurityError("strftime_now takes a format of at most 256 characters")
    return now.strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # Any: template values
    return dict(*args, **kwargs)
