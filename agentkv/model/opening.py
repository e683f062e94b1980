"""From what the user names to a runner that has been shown to serve it correctly.

Loads, checks, builds the runner, and compares its logits with the model's own on short texts, once
for the same weights, code and versions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentkv_kernels
import torch
import transformers
from transformers import PreTrainedModel

from ..config import EngineConfig
from .canary import check_canary
from .compatibility import check_model, context_limit
from .cuda_graphs import choose_capture
from .loader import open_model
from .runner import ModelRunner
from .weights_cache import WeightsCache

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
        capture=choose_capture(loaded.model, specs),
    )
    cache, key = WeightsCache(), (loaded.identity, str(runner.info.block_size), *_code())
    # A model in memory is known by nothing that outlives it.
    is_kept = not isinstance(source, PreTrainedModel)
    try:
        if not (is_kept and cache.is_verified(*key)):
            check_canary(runner, loaded.model, specs)
            if is_kept:
                cache.verify(*key)
    except BaseException:
        runner.close()
        raise
    return runner


def _code() -> list[str]:
    """What computes the logits besides the weights: versions, device, and this package's files."""
    folders = (Path(__file__).parent, Path(agentkv_kernels.__file__).parent)
    files = [entry for folder in folders for entry in os.scandir(folder) if entry.is_file()]
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return [torch.__version__, transformers.__version__, gpu, str(stats)]
