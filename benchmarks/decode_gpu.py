"""Time whole decode steps on a CUDA device, launched one by one and replayed from a graph.

    python benchmarks/decode_gpu.py [--out FILE]

The model is a Llama of about a billion random weights. Rows share a prefix of 2048 tokens. Wall
times of a step without sampling, from the batch to logits that have arrived. --rehearse walks
through it with a tiny model, interpreted kernels and no graph, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from agentkv_kernels import launch
from machine import RESULTS, write_report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agentkv.config import EngineConfig
from agentkv.core.batch import Batch, Row, Segment
from agentkv.model import cuda_graphs
from agentkv.model.compatibility import check_model
from agentkv.model.cuda_graphs import choose_capture
from agentkv.model.runner import ModelRunner

BLOCK_SIZE = 16
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def make_model(device: torch.device) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device."""
    is_tiny = device.type == "cpu"
    heads = 4 if is_tiny else 32
    config = LlamaConfig(
        vocab_size=320 if is_tiny else 32000, num_attention_heads=heads,
        num_key_value_heads=heads // 4, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=None, **(TINY if is_tiny else LARGE),
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if is_tiny else torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def batch_at(num_rows: int, shared: int, step: int) -> Batch:
    """Decode step `step` of rows with own blocks behind a prefix of `shared` blocks."""
    prefix = tuple(range(shared))
    rows = tuple(
        Row(i, np.array([3 + i], np.int32), BLOCK_SIZE * shared + step, table_of(i, prefix))
        for i in range(num_rows)
    )
    segments = (Segment(None, 0, prefix, tuple(range(num_rows))),) if num_rows > 1 else ()
    return Batch(rows, (), segments, num_rows)


def table_of(row: int, prefix: tuple[int, ...]) -> list[int]:
    """Four blocks of its own behind the prefix."""
    first = len(prefix) + 4 * row
    return [*prefix, *range(first, first + 4)]


def step_seconds(runner: ModelRunner, num_rows: int, shared: int, num_steps: int) -> float:
    """Median wall time of a decode step, after three that warm up."""
    times = []
    for step in range(3 + num_steps):
        batch = batch_at(num_rows, shared, step)
        start = time.perf_counter()
        logits = runner.compute_logits(batch, list(range(num_rows)))
        if not bool(logits.isfinite().all()):
            raise AssertionError("logits that are not finite")
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def call_again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stands in for a CUDA graph."""
    run()
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the JSON; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "decode-gpu.json")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, interpreted")
    options = parser.parse_args(arguments)
    if options.rehearse:
        launch.runs_triton = lambda device: True  # type: ignore[assignment]  # a stand-in
        cuda_graphs.CudaCapture = lambda device: call_again  # type: ignore[assignment,misc,return-value]  # as a test would
    elif not torch.cuda.is_available():
        sys.stderr.write("no CUDA device was found\n")
        return 3
    device = torch.device("cpu" if options.rehearse else "cuda")
    rows, shared, num_steps = ((2,), 2, 1) if options.rehearse else ((1, 8, 32, 128), 128, 40)
    model = make_model(device)
    specs = check_model(model)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=shared + 4 * max(rows))
    lines = []
    print("rows  launched ms  replayed ms  ratio")
    for num_rows in rows:
        seconds = []
        for capture in (None, choose_capture(model, specs)):
            runner = ModelRunner(model, specs, config=config, max_context=8192, capture=capture)
            seconds.append(step_seconds(runner, num_rows, shared, num_steps))
            runner.close()
        launched, replayed = seconds
        lines.append({"rows": num_rows, "launched_s": launched, "replayed_s": replayed})
        print(
            f"{num_rows:4} {launched * 1e3:12.2f} {replayed * 1e3:12.2f} {launched / replayed:6.1f}"
        )
    write_report(
        options.out,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shared_tokens=BLOCK_SIZE * shared,
        lines=lines,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
