"""Runs a step on a Hugging Face model: all rows as one flattened row of tokens.

The model's own modules and its own ForCausalLM.forward do the work, with the attention of
attention.py. They are those of a twin: modules, config and buffers are copies, the parameters are
shared, so the caller's model is never changed. Knows nothing about sequences beyond one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.sharing import CPU_SHARING, DEFAULT_SHARING, Sharing
from torch import Tensor
from transformers import PreTrainedModel

from ..config import EngineConfig, SamplingOptions
from ..core.batch import Batch, ModelInfo, RowResult
from ..core.protocols import FatalRunnerError
from ..errors import EngineClosedError
from .attention import ATTENTION_NAME, StepContext, running
from .compatibility import LayerSpec
from .graphs import Capture, DecodeGraphs, pack_inputs
from .kv_cache import KVCache, bytes_per_block, choose_num_blocks
from .sampler import log_probabilities, sample
from .structure import share_parameters


class ModelRunner:
    """Executes batches on `model`, whose layers attend as `specs` says.

    `max_context` is in tokens. `tokenizer` is kept for the engine and not used. `sharing` is the
    rule by which attention reads a shared segment once, where `config` has it do so; None is the
    device's own. `capture` says how decode steps are recorded, None that each is launched anew.
    The KV memory is allocated here.

    Raises:
        ModelError: the KV memory cannot be had.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        specs: Sequence[LayerSpec],
        *,
        config: EngineConfig,
        max_context: int,
        tokenizer: Any = None,  # Any: a ChatTokenizer, which model must not import
        name: str = "",
        identity: str = "",
        eos_token_ids: Sequence[int] = (),
        default_options: SamplingOptions | None = None,
        sharing: Sharing | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._model = share_parameters(model, ATTENTION_NAME)
        self._device = model.device
        self._sharing = _sharing(config, sharing, model.device)
        self._plan: StepPlan | None = None
        self._tree_version = 0
        block_bytes = bytes_per_block(specs, config.block_size, model.dtype)
        num_blocks = choose_num_blocks(
            config, block_bytes=block_bytes, max_context=max_context, device=model.device
        )
        self._cache = KVCache(
            specs,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._info = ModelInfo(
            name=name,
            vocab_size=int(model.get_input_embeddings().weight.shape[0]),
            max_context=max_context,
            block_size=config.block_size,
            num_blocks=num_blocks,
            bytes_per_block=block_bytes,
            eos_token_ids=tuple(eos_token_ids),
            identity=identity,
            default_options=default_options or SamplingOptions(),
            is_cpu=model.device.type == "cpu",
        )
        self._graphs: DecodeGraphs | None = None
        if capture is not None:
            self._graphs = DecodeGraphs(
                self._run_all,
                capture,
                max_rows=config.max_num_seqs,
                max_context=max_context,
                num_blocks=num_blocks,
                block_size=config.block_size,
                device=model.device,
            )

    @property
    def info(self) -> ModelInfo:
        """What the engine must know of the model."""
        return self._info

    def execute(self, batch: Batch) -> list[RowResult]:
        """Run the copies, then all rows, and return one result a row, in order.

        Raises:
            FatalRunnerError: the device failed, and nothing on it can be trusted any more.
        """
        sampled = [r for r, row in enumerate(batch.rows) if row.sample is not None]
        starts = np.cumsum([0, *(len(row.token_ids) for row in batch.rows)])
        keep = [int(starts[r + 1]) - 1 for r in sampled]
        for start, row in zip(starts.tolist(), batch.rows, strict=False):
            keep += [start + offset for offset, _ in row.targets]
        with self._on_device():
            logits = self.compute_logits(batch, keep)
            results = [RowResult()] * len(batch.rows)
            specs = [row.sample for row in batch.rows if row.sample is not None]
            for r, result in zip(sampled, sample(logits[: len(sampled)], specs), strict=True):
                results[r] = result
            _add_targets(results, batch, logits[len(sampled) :])
        return results

    def compute_logits(self, batch: Batch, keep: Sequence[int]) -> Tensor:
        """Run the copies, then all rows; logits [len(keep), vocab_size] after the tokens `keep`.

        `keep` indexes the tokens of all rows, one row after the other.

        Raises:
            FatalRunnerError: the device failed, and nothing on it can be trusted any more.
        """
        if not self._cache.layers:
            raise EngineClosedError("the runner has been closed")
        with self._on_device():
            self._cache.copy(batch.copies)
            if not batch.rows:
                return torch.empty(0, self._info.vocab_size)
            return self._forward(batch, keep)

    def close(self) -> None:
        """Free the KV memory. Idempotent."""
        self._plan = None
        self._graphs = None
        self._cache.release()

    def _forward(self, batch: Batch, keep: Sequence[int]) -> Tensor:
        plan = self._plan_of(batch)
        token_ids = np.concatenate([row.token_ids for row in batch.rows])
        wanted = self._to_device(np.asarray(keep, np.int64))
        if self._graphs is not None:
            logits = self._graphs.run(plan, token_ids)
            if logits is not None:
                # A copy: the next step overwrites what it was taken from.
                return logits.index_select(0, wanted)
        inputs = self._to_device(pack_inputs(plan, token_ids, plan.num_tokens))
        return self._run(plan, inputs, wanted)

    def _run_all(self, plan: StepPlan, inputs: Tensor) -> Tensor:
        """Logits after every token of `inputs`."""
        return self._run(plan, inputs, torch.arange(inputs.shape[1], device=self._device))

    def _run(self, plan: StepPlan, inputs: Tensor, keep: Tensor) -> Tensor:
        """Logits after the tokens `keep` of `inputs`, int64 [3, T]: ids, positions and slots."""
        step = StepContext(plan, self._cache.layers, inputs[2])
        with running(step):
            output = self._model(
                input_ids=inputs[:1],
                position_ids=inputs[1:2],
                use_cache=False,
                # A tensor: given a number, Gemma 4 drops query rows in its shared layers.
                logits_to_keep=keep,
                return_dict=True,
            )
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Kernels are launched on the current GPU, which is a matter of each thread.

        What fails there may come to light later, whenever a result is waited for.
        """
        is_cuda = self._device.type == "cuda"
        current = torch.cuda.device(self._device) if is_cuda else nullcontext()
        try:
            # Buffers made in inference mode can be written in inference mode only.
            with current, torch.inference_mode():
                yield
        except torch.AcceleratorError as error:
            raise FatalRunnerError(f"the device failed: {error}") from error

    def _plan_of(self, batch: Batch) -> StepPlan:
        """The last step's plan moved on by one token a row where that is all that changed."""
        query_lens = [len(row.token_ids) for row in batch.rows]
        kv_lens = [row.end for row in batch.rows]
        block_tables = [row.block_ids for row in batch.rows]
        # Forgotten while it is worked on, so that a step that fails leaves no plan half moved.
        plan, self._plan = self._plan, None
        is_steady = batch.tree_version == self._tree_version and max(query_lens) == 1
        if plan is None or not is_steady or not plan.advance(kv_lens, block_tables):
            plan = StepPlan.build(
                query_lens=query_lens,
                kv_lens=kv_lens,
                block_tables=block_tables,
                segments=batch.segments,
                block_size=self._info.block_size,
                sharing=self._sharing,
            )
            plan.check_writes()
        self._plan, self._tree_version = plan, batch.tree_version
        return plan

    def _to_device(self, array: Any) -> Tensor:  # Any: a NumPy array of integers
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _sharing(config: EngineConfig, rule: Sharing | None, device: torch.device) -> Sharing | None:
    """By which rule attention shares; None: it does not."""
    if not config.share_attention:
        return None
    return rule or (CPU_SHARING if device.type == "cpu" else DEFAULT_SHARING)


def _add_targets(results: list[RowResult], batch: Batch, logits: Tensor) -> None:
    """Fill `target_logprobs` from `logits`, one row of it a target, in order."""
    values = log_probabilities(logits, [i for row in batch.rows for _, i in row.targets])
    start = 0
    for r, row in enumerate(batch.rows):
        found = tuple(values[start : start + len(row.targets)])
        start += len(row.targets)
        if any(math.isnan(value) for value in found):
            results[r] = RowResult(error="the model gave logits that are not finite")
        elif found and results[r].error is None:
            results[r] = dataclasses.replace(results[r], target_logprobs=found)
