"""What a model's generation config says: end tokens and defaults for sampling."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..config import SamplingOptions
from ..errors import InvalidOptionError

__all__ = ["end_token_ids", "sampling_defaults"]

_logger = logging.getLogger("agentkv")


def end_token_ids(value: object) -> tuple[int, ...]:
    """One id, several or none, as transformers writes them."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(item for item in values if type(item) is int and item >= 0)


def sampling_defaults(settings: Mapping[str, Any]) -> SamplingOptions:  # Any: JSON
    """What a generation config says about sampling; greedy where it says `do_sample: false`.

    A value that makes no sense is left out, with a warning: it must not keep a model from opening.
    """
    chosen: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = settings.get(name)
        if value is None:
            continue
        try:
            SamplingOptions(**{name: value})
        except InvalidOptionError as error:
            _logger.warning("the generation config is ignored in part: %s", error)
        else:
            chosen[name] = value
    if settings.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingOptions(**chosen)
