"""Calls into the `tokenizers` package, whose code is Rust and whose files come from strangers.

A panic there reaches Python as a BaseException, which no handler for errors would catch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["backend_faults"]


@contextmanager
def backend_faults(make_error: Callable[[BaseException], Exception]) -> Iterator[None]:
    """In this block an exception of the backend, or a panic, raises what `make_error` makes."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise make_error(error) from error
        raise
