"""What one rendering of a chat template may spend: processor time and size.

The template's environment calls in here; nothing here knows jinja2's nodes or the messages.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

__all__ = [
    "Budget",
    "HurriedError",
    "TemplateBudgetError",
    "abandonable",
    "check_format",
    "check_unhurried",
    "check_width",
    "hurried",
]

MAX_SECONDS = 2.0
MAX_INT_BITS = 4096
MAX_WIDTH = 1000
# A template may handle its input dozens of times over; the constant is for what it adds itself.
SIZE_PER_INPUT = 64
BASE_SIZE = 4_000_000
CHECK_EVERY = 256
# One operation is a loop turn, a call, a filter, or 256 characters: a microsecond or two. So this
# much is a few milliseconds, and the same on every machine.
HURRIED_OPERATIONS = 4000

_is_hurried: ContextVar[bool] = ContextVar("is_hurried", default=False)
_gone: ContextVar[Event | None] = ContextVar("gone", default=None)

_VIEWS = (KeysView, ValuesView, ItemsView)
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS)


class TemplateBudgetError(Exception):
    """The template did too much; the message continues "the chat template"."""


class HurriedError(Exception):
    """It takes longer than it may right here; nothing else is wrong with it."""


@contextmanager
def hurried() -> Iterator[None]:
    """In this block what takes more than a few milliseconds raises HurriedError."""
    token = _is_hurried.set(True)
    try:
        yield
    finally:
        _is_hurried.reset(token)


@contextmanager
def abandonable(gone: Event) -> Iterator[None]:
    """In this block renderings end once `gone` is set, because nobody waits for them any more."""
    token = _gone.set(gone)
    try:
        yield
    finally:
        _gone.reset(token)


class Budget:
    """Processor seconds of this thread, and characters and elements made, of one rendering."""

    def __init__(self, input_size: int) -> None:
        self._limit = BASE_SIZE + SIZE_PER_INPUT * input_size
        self._spent = 0
        self._unchecked = 0
        self._gone = _gone.get()
        self._left = HURRIED_OPERATIONS if _is_hurried.get() else None
        self._deadline = time.thread_time() + MAX_SECONDS
        # Containers are immutable in the sandbox; holding them keeps their ids from being reused.
        self._weights: dict[int, tuple[object, int]] = {}

    def spend(self, size: int) -> None:
        """Charge `size` units and, often enough, look at the clock."""
        self._spent += size
        if self._spent > self._limit:
            raise TemplateBudgetError(f"makes more than {self._limit} characters")
        operations = 1 + (size >> 8)
        if self._left is not None:
            self._left -= operations
            if self._left < 0:
                raise HurriedError
        self._unchecked += operations
        if self._unchecked >= CHECK_EVERY:
            self._unchecked = 0
            if self._gone is not None and self._gone.is_set():
                raise TemplateBudgetError("is no longer waited for")
            if time.thread_time() > self._deadline:
                raise TemplateBudgetError(f"takes more than {MAX_SECONDS:g} seconds")

    def charge(self, value: Any) -> Any:  # Any: a template's value
        """Charge a value that was made, and return it; an iterator is charged as it is read."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, _CONTAINERS):
            self.spend(len(value))
            self._check_size(self._weight(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise TemplateBudgetError("makes too large an integer")
        elif isinstance(value, Iterator):
            return self._charged_iterator(value)
        return value

    def check_operands(self, operator: str, left: Any, right: Any) -> None:  # Any: template values
        """Refuse an operator whose result would be too large, before it is made."""
        if operator == "%" and isinstance(left, str):
            check_format(left)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                self._check_bits(left.bit_length() * max(0, right))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, int):
                    self._check_bits(value.bit_length() + count.bit_length())
                elif isinstance(count, int):
                    self.spend(self._weight(value) * max(0, count))

    def check_join(self, separator: str, items: Sequence[object]) -> None:
        """Refuse a join whose result would be too large."""
        self._check_size(self._weight(items) + len(separator) * len(items))

    def check_replace(self, text: str, old: str, new: str) -> None:
        """Refuse a replacement whose result could be too large."""
        self._check_size(len(text) + (len(text) // max(1, len(old)) + 1) * len(new))

    def _charged_iterator(self, values: Iterator[Any]) -> Iterator[Any]:  # Any: template values
        for value in values:
            self.spend(1)
            yield self.charge(value)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise TemplateBudgetError(f"makes a value of more than {self._limit} characters")

    def _check_bits(self, bits: int) -> None:
        if bits > MAX_INT_BITS:
            raise TemplateBudgetError("makes too large an integer")

    def _weight(self, value: Any) -> int:  # Any: a template's value
        """Characters and elements in a value, shared parts counted each time they appear.

        So a list that holds the same list twice, thirty levels deep, weighs what printing it would
        cost. Known parts are looked up, so that weighing costs no more than building did.
        """
        if isinstance(value, str):
            return 1 + len(value)
        if isinstance(value, (Namespace, Iterator)):
            raise SecurityError(f"a {type(value).__name__} may not be kept in a list or printed")
        is_view = isinstance(value, _VIEWS)
        if not isinstance(value, _CONTAINERS):
            return 1
        if (known := self._weights.get(id(value))) is not None:
            return known[1]
        self.spend(1)
        weight = 1 + sum(self._weight(item) for item in value)
        if isinstance(value, dict):
            weight += sum(self._weight(item) for item in value.values())
        self._check_size(weight)
        if not is_view:
            self._weights[id(value)] = (value, weight)
        return weight


def check_unhurried() -> None:
    """Raise HurriedError in a `hurried` block: what comes next takes its time."""
    if _is_hurried.get():
        raise HurriedError


def check_format(text: str) -> None:
    """Refuse format strings with wide fields, or with a field width taken from an argument."""
    if re.search(r"\d{3,}|\*|\{[^{}]*\{", text):
        raise SecurityError("a format string has a field that is too wide")


def check_width(*values: object) -> None:
    """Refuse a width, precision or count above what templates use."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise SecurityError(f"{value} is too wide")
