"""Recording decode steps as CUDA graphs, and which models allow it.

A graph fixes every launch, so nothing in a forward may depend on values that only the device knows:
no shape, no branch, no copy to the host. One forward is watched for that before any is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from agentkv_kernels import launch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel

from .graphs import Capture, CaptureError, Replay
from .structure import LayerSpec, share_parameters

__all__ = ["CudaCapture", "choose_capture", "data_dependence"]

_WATCHED_NAME = "agentkv_watched"
_WATCHED_TOKENS = 4
_WARM_UPS = 2
_BY_VALUE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})

_logger = logging.getLogger("agentkv")


def choose_capture(model: PreTrainedModel, specs: Sequence[LayerSpec]) -> Capture | None:
    """How to record the model's decode steps; None where its device or the model rules it out."""
    if not all(launch.serves(model.device, spec.key_dim, spec.value_dim) for spec in specs):
        return None
    reason = data_dependence(model)
    if reason is not None:
        _logger.info("decode steps are launched one by one: %s", reason)
        return None
    return CudaCapture(model.device)


def data_dependence(model: PreTrainedModel) -> str | None:
    """What in the model's forward depends on the data besides its values; None: nothing found."""
    for name, module in model.named_modules():
        # Which rows an expert gets is data, however its implementation hides it.
        if "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower():
            return f"{type(module).__name__} chooses its experts by token"
    watch = _Watch()  # type: ignore[no-untyped-call]  # torch's
    twin = share_parameters(model, _WATCHED_NAME)
    ids = torch.arange(_WATCHED_TOKENS, device=model.device)
    # In inference mode it would see compound operations whole, and not what is in them.
    with torch.no_grad(), watch:
        twin(input_ids=ids[None], position_ids=ids[None], use_cache=False, logits_to_keep=ids)
    return watch.found


class CudaCapture:
    """Records functions into CUDA graphs of one device that share their memory.

    Sharing is safe while no two graphs run at a time and each result is used before the next
    replay of any.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """Record `run`, which must do the same work from the same buffers each time.

        Raises:
            CaptureError: `run` does what a graph cannot hold.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Compiles kernels and lets libraries allocate, neither of which a recording may do.
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the program may use the device as they like meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                out = run()
        except RuntimeError as error:
            self._abandon(current)
            raise CaptureError(str(error)) from error

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _abandon(self, current: torch.cuda.Stream) -> None:
        """Undo what torch.cuda.graph leaves behind when a recording cannot be ended."""
        torch.cuda.set_stream(current)
        # Else memory that any of the process's streams shares is not reused any more. It may have
        # been done, which is an error then.
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the first operation whose result's shape, or the program's way, depends on values."""

    found: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,  # Any: an operator overload, which torch does not type
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None and _reads_values(func, args, result):
            self.found = f"{func} needs values that only the device knows"
        return result


def _reads_values(func: Any, args: tuple[Any, ...], result: Any) -> bool:  # Any: as above
    if func._schema.name in _INDEXING:
        # Integers are data like any other; a mask decides how much there is of it.
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if _BY_VALUE & set(func.tags):
        return True
    devices = {t.device for t in (*args, result) if isinstance(t, Tensor) and t.dim() > 0}
    return len(devices) > 1


def _no_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **_: Any,  # Any: what a family passes
) -> tuple[Tensor, None]:
    """What attention over no keys gives; our own has been made to be recorded."""
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_WATCHED_NAME, _no_attention)
