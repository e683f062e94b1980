"""What every handle has in common: there is one of it, and whoever drops it closes it."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Handle"]


class Handle:
    """Base of what users hold. A copy would close the original when it is dropped."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a handle, such as this {type(self).__name__}, is neither copied nor pickled"
        )
