"""A model's decode steps over buffers of fixed size, with interpreted kernels: a GPU's path.

All that is missing here is the CUDA graph, which would launch the same kernels over the same
buffers. The truth is the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from agentkv_kernels import launch
from torch import Tensor

from agentkv.config import EngineConfig
from agentkv.core.batch import Batch, BlockCopy, Row, Segment
from agentkv.model.compatibility import check_model
from agentkv.model.runner import ModelRunner
from agentkv.testing.tiny_models import tiny_model

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be interpreted")

pytestmark = [pytest.mark.own_process(TRITON_INTERPRET="1"), pytest.mark.slow]
BLOCK_SIZE = 16


@dataclass
class Recorder:
    """A capture that calls the function again; `sizes` are those of its recordings."""

    sizes: list[int] = field(default_factory=list)
    replays: int = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.sizes.append(len(run()))

        def replay() -> Tensor:
            self.replays += 1
            return run()

        return replay


def row(seq_id: int, ids: list[int], start: int, table: list[int]) -> Row:
    return Row(seq_id, np.array(ids[start:], np.int32), start, table)


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), ("mistral", {"sliding_window": 90})]
)
def test_forks_decode_in_padded_buckets_as_the_model_alone_does(
    family: str, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, num_hidden_layers=2, **settings)
    monkeypatch.setattr(launch, "runs_triton", lambda device: True)
    recorder = Recorder()
    runner = ModelRunner(
        model, check_model(model), config=EngineConfig(block_size=BLOCK_SIZE, num_blocks=40),
        max_context=250, capture=recorder,
    )  # fmt: skip
    # 84 tokens: five whole blocks, which the forks share, and one of which each has a copy.
    prompt = np.random.default_rng(1).integers(8, 300, 84).tolist()
    shared, copies = [3, 9, 1, 7, 5], [BlockCopy(2, 12, 4), BlockCopy(2, 13, 4)]
    tables = [[*shared, 2, 20], [*shared, 12, 21], [*shared, 13, 22]]
    runner.compute_logits(Batch((row(0, prompt, 0, tables[0]),)), [83])
    histories = [[*prompt, 30 + fork] for fork in range(3)]
    for step in range(9):
        # One of them ends after five steps.
        rows = range(3 if step < 5 else 2)
        batch = Batch(
            tuple(row(i, histories[i], 84 + step, tables[i]) for i in rows),
            tuple(copies) if step == 0 else (),
            (Segment(None, 0, tuple(shared), tuple(rows)),),
            tree_version=1 + (step >= 5),
        )
        logits = runner.compute_logits(batch, list(rows))
        with torch.no_grad():
            expected = torch.cat([model(torch.tensor([histories[i]])).logits[0, -1:] for i in rows])
        assert (logits - expected).abs().max() <= 1e-4 * expected.std()
        for i in rows:
            histories[i].append(int(expected[i].argmax()))
    assert recorder.sizes == [4, 2]
    assert recorder.replays == 8
