"""From what the user names to a runner that has been shown to serve it correctly.

Loads, checks, builds the runner, and compares its logits with the model's own on short texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import EngineConfig
from .canary import check_canary
from .compatibility import check_model, context_limit
from .loader import open_model
from .runner import ModelRunner

__all__ = ["open_pretrained"]


def open_pretrained(
    source: Any,  # Any: a path, a hub id or a PreTrainedModel
    *,
    tokenizer: Any,  # Any: as open_model takes it
    config: EngineConfig,
    progress: Callable[[str, float], None] | None = None,
) -> ModelRunner:
    """A runner on `source`, with its tokenizer.

    Raises:
        ModelError: the model cannot be found, loaded or trusted, or would not be served correctly.
    """
    loaded = open_model(source, tokenizer=tokenizer, config=config, progress=progress)
    specs = check_model(loaded.model)
    limit = context_limit(loaded.model)
    runner = ModelRunner(
        loaded.model,
        specs,
        config=config,
        max_context=min(limit, config.max_context or limit),
        tokenizer=loaded.tokenizer,
        name=loaded.name,
        identity=loaded.identity,
        eos_token_ids=loaded.eos_token_ids,
        default_options=loaded.default_options,
    )
    try:
        check_canary(runner, loaded.model, specs)
    except BaseException:
        runner.close()
        raise
    return runner
