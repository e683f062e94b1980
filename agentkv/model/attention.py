"""Our attention as transformers sees it: one function under the name "agentkv".

transformers calls it in every layer of a model whose config names it. It writes the layer's new K
and V into their slots and reads all of a row's KV back through the step's plan. What belongs to the
step reaches it through a context variable, since some models drop keywords they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agentkv_kernels import launch
from agentkv_kernels.plan import StepPlan
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "agentkv"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What attention needs of the running step; `slots` [num_tokens] int64, on the device."""

    plan: StepPlan
    layers: Sequence[tuple[Tensor, Tensor]]
    slots: Tensor


_step: ContextVar[StepContext | None] = ContextVar("agentkv_step", default=None)


@contextmanager
def running(step: StepContext) -> Iterator[None]:
    """Let the model's attention, in this thread, be that of `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,  # Any: what a family passes; compatibility.py lists what is understood
) -> tuple[Tensor, None]:
    """Attention of query [1, Hq, T, Dk] over the step's rows, [1, T, Hq, Dv].

    `key` [1, Hkv, T, Dk] and `value` [1, Hkv, T, Dv] are the step's own tokens.
    """
    step = _step.get()
    if step is None:
        raise RuntimeError("agentkv's attention runs inside an engine's step only")
    layer_idx: Any = module.layer_idx  # Any: an int in every family
    keys, values = step.layers[layer_idx]
    launch.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, step.slots)
    scale = options.get("scaling")
    out = launch.paged_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        step.plan,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return out[None], None


# No mask function goes with it: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, attend)
