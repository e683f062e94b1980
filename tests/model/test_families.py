"""Every served family: chunked, packed, staged and forked steps against transformers' generate.

A small driver stands in for the core: it keeps block tables, forks them, copies on write and finds
the shared segments, so that these tests need nothing but the runner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from agentkv_kernels.sharing import Sharing
from transformers import PreTrainedModel

from agentkv.config import EngineConfig, SamplingOptions
from agentkv.core.batch import Batch, BlockCopy, Row, SampleSpec, Segment
from agentkv.model.compatibility import check_model, context_limit
from agentkv.model.runner import ModelRunner
from agentkv.testing.tiny_models import SERVED_FAMILIES, VOCAB_SIZE, tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 96
MIN_GAP = 1e-3
NO_IDS = np.empty(0, np.int32)
GREEDY = SampleSpec(SamplingOptions(temperature=0), 0.0, NO_IDS, NO_IDS)


def make_runner(model: PreTrainedModel, *, share: bool = True) -> ModelRunner:
    """A runner that reads every shared block once, however few they are, or none."""
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, share_attention=share)
    return ModelRunner(
        model,
        check_model(model),
        config=config,
        max_context=context_limit(model),
        sharing=Sharing(min_tokens=1, fixed_bytes=0),
    )


@dataclass(eq=False)
class Branch:
    """A sequence: its ids, how many have KV, and its blocks."""

    seq_id: int
    ids: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)


class Driver:
    """Runs steps on branches as the core would, blocks shared between forks included."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_copies = 0
        self._ref_counts: Counter[int] = Counter()
        self._next_block = NUM_BLOCKS  # downwards, so that tables are not in ascending order
        self._branches = 0
        self._version = 0
        self._tree: object = None

    def open(self, ids: list[int]) -> Branch:
        self._branches += 1
        return Branch(self._branches, list(ids))

    def fork(self, parent: Branch, ids: list[int]) -> Branch:
        branch = self.open(parent.ids + ids)
        branch.computed, branch.table = parent.computed, list(parent.table)
        self._ref_counts.update(branch.table)
        return branch

    def step(self, *work: tuple[Branch, int]) -> None:
        """Run that many tokens of each branch; one whose ids are all run samples the next."""
        copies: list[BlockCopy] = []
        for branch, count in work:
            self._make_room(branch, branch.computed + count, copies)
        rows = []
        for branch, count in work:
            start, end = branch.computed, branch.computed + count
            rows.append(
                Row(
                    branch.seq_id,
                    np.asarray(branch.ids[start:end], np.int32),
                    start,
                    branch.table,
                    GREEDY if end == len(branch.ids) else None,
                )
            )
        segments = find_segments([branch.table for branch, _ in work], [row.start for row in rows])
        tree = (segments, [row.seq_id for row in rows])
        if tree != self._tree:
            self._tree, self._version = tree, self._version + 1
        batch = Batch(tuple(rows), tuple(copies), tuple(segments), self._version)
        results = self.runner.execute(batch)
        for (branch, count), result in zip(work, results, strict=True):
            assert result.error is None
            branch.computed += count
            if branch.computed == len(branch.ids):
                assert result.token_id is not None
                branch.ids.append(result.token_id)

    def decode(self, branches: list[Branch], count: int) -> None:
        for _ in range(count):
            self.step(*((branch, 1) for branch in branches))

    def _make_room(self, branch: Branch, end: int, copies: list[BlockCopy]) -> None:
        used = branch.computed % BLOCK_SIZE
        if used and self._ref_counts[branch.table[-1]] > 1:
            source = branch.table[-1]
            branch.table[-1] = self._allocate()
            self._ref_counts[source] -= 1
            copies.append(BlockCopy(source, branch.table[-1], used))
            self.num_copies += 1
        while len(branch.table) * BLOCK_SIZE < end:
            branch.table.append(self._allocate())

    def _allocate(self) -> int:
        self._next_block -= 1
        self._ref_counts[self._next_block] = 1
        return self._next_block


def find_segments(tables: list[list[int]], starts: list[int]) -> list[Segment]:
    """The runs of full blocks, wholly before their rows' first positions, that rows share."""
    segments: list[Segment] = []

    def visit(rows: list[int], begin: int, parent: int | None) -> None:
        rows = [row for row in rows if starts[row] // BLOCK_SIZE > begin]
        for block in dict.fromkeys(tables[row][begin] for row in rows):
            group = [row for row in rows if tables[row][begin] == block]
            if len(group) < 2:
                continue
            limit = min(starts[row] // BLOCK_SIZE for row in group)
            end = begin
            while end < limit and len({tables[row][end] for row in group}) == 1:
                end += 1
            run = tuple(tables[group[0]][begin:end])
            segments.append(Segment(parent, begin * BLOCK_SIZE, run, tuple(group)))
            visit(group, end, len(segments) - 1)

    visit(list(range(len(tables))), 0, None)
    return segments


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()
    return ids


def generate(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """transformers' greedy continuation, up to the first choice too close to call."""
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_ids: list[int] = output.sequences[0, len(ids) :].tolist()
    best = torch.cat(output.logits).topk(2).values
    for i, gap in enumerate((best[:, 0] - best[:, 1]).tolist()):
        if gap < MIN_GAP:
            return new_ids[:i]
    return new_ids


def count_close_calls(model: PreTrainedModel, branch: Branch, prompt: list[int]) -> int:
    """Compare with generate, from anew after each choice too close to call; how many those are."""
    assert branch.ids[: len(prompt)] == prompt
    position, close_calls = len(prompt), 0
    while position < len(branch.ids):
        expected = generate(model, branch.ids[:position], len(branch.ids) - position)
        assert branch.ids[position : position + len(expected)] == expected
        position += len(expected)
        close_calls += position < len(branch.ids)
        position += 1
    return close_calls


def run_history(runner: ModelRunner) -> list[tuple[Branch, list[int]]]:
    """A prefill in chunks, three forks beside a new prompt, and forks of a fork, all decoded."""
    driver = Driver(runner)
    root, stranger = driver.open(random_ids(35, 1)), driver.open(random_ids(9, 2))
    driver.step((root, 16))
    driver.step((root, 13), (stranger, 4))
    driver.step((root, 5))
    forks = [driver.fork(root, random_ids(count, 10 + count)) for count in (0, 1, 4)]
    prompts = [list(branch.ids) for branch in (stranger, *forks)]
    driver.step(*((fork, len(fork.ids) - fork.computed) for fork in forks), (stranger, 5))
    driver.decode([stranger, *forks], 4)
    children = [driver.fork(forks[2], random_ids(count, 20 + count)) for count in (1, 2)]
    prompts += [list(child.ids) for child in children]
    driver.step(*((child, len(child.ids) - child.computed) for child in children), (forks[2], 1))
    everyone = [stranger, *forks, *children]
    driver.decode(everyone, 6)
    assert driver.num_copies >= 4
    return list(zip(everyone, prompts, strict=True))


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_greedy_ids_are_those_of_generate(family: str) -> None:
    model = tiny_model(family)
    history = run_history(make_runner(model))
    assert sum(count_close_calls(model, branch, prompt) for branch, prompt in history) <= 2
    apart = run_history(make_runner(model, share=False))
    assert [branch.ids for branch, _ in apart] == [branch.ids for branch, _ in history]
