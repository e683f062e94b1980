"""From what the user names to a runner that has been shown to serve it correctly.

Loads, checks, builds the runner, and compares its logits with the model's own on short texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..config import EngineConfig
from ..core.batch import Batch, Row, Segment
from ..errors import UnsupportedModelError
from .compatibility import check_model, context_limit
from .loader import LoadedModel, open_model
from .runner import ModelRunner

__all__ = ["check_canary", "open_pretrained"]

# Largest difference of logits, over their standard deviation, that rounding explains. Models that
# are served wrongly differ by 2 and more.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.25


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
        check_canary(loaded, runner)
    except BaseException:
        runner.close()
        raise
    return runner


def check_canary(loaded: LoadedModel, runner: ModelRunner) -> None:
    """Compare packed prefill and forked decode with the model's own attention.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    size, vocab = runner.info.block_size, runner.info.vocab_size
    rng = np.random.default_rng(0)
    most = min(runner.info.max_context, runner.info.num_blocks * size)
    stem = rng.integers(0, vocab, size=min(2 * size, most - 2), dtype=np.int32)
    tails = rng.integers(0, vocab, size=(2, 1), dtype=np.int32)
    needed = -(-(len(stem) + 1) // size) + 1
    if needed > runner.info.num_blocks or len(stem) < 1:
        return
    wanted = [_own_logits(loaded, np.concatenate([stem, tail])) for tail in tails]
    blocks = list(range(needed))
    prefill = Row(0, stem, 0, blocks)
    runner.compute_logits(Batch((prefill,)), [])
    full = len(stem) // size
    second = [*blocks[:full], needed - 1] if len(stem) % size == 0 else None
    rows = [Row(1, tails[0], len(stem), blocks[: -(-(len(stem) + 1) // size)])]
    if second is not None:
        rows.append(Row(2, tails[1], len(stem), second))
    shared = (Segment(None, 0, tuple(blocks[:full]), (0, 1)),) if second and full else ()
    batch = Batch(tuple(rows), segments=shared, tree_version=1)
    found = runner.compute_logits(batch, list(range(len(rows)))).float()
    half = loaded.model.dtype != torch.float32
    tolerance = HALF_TOLERANCE if half else FLOAT32_TOLERANCE
    for logits, right in zip(found, wanted, strict=False):
        error = float((logits - right).abs().max() / right.std())
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"{loaded.name}: its logits under paged attention are wrong "
                f"(canary: difference {error:.2g} of their spread, at most {tolerance:g})"
            )


def _own_logits(loaded: LoadedModel, ids: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
    tensor = torch.from_numpy(ids.astype(np.int64))[None].to(loaded.model.device)
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(input_ids=tensor, use_cache=False).logits[0, -1]
    return logits.float()
