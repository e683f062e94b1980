"""Faults of other engines that gave a wrong answer: preemption, cache hits, kernels, positions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agentkv.config import SamplingOptions
from agentkv.core.plan import Plan
from agentkv.testing.driver import CoreDriver, Turn

HOT = SamplingOptions(temperature=1.0)
GREEDY = SamplingOptions(temperature=0.0, logprobs=True)
NO_IDS = np.empty(0, np.int32)


def preempt(driver: CoreDriver, turn: Turn) -> None:
    """Make a running turn wait and recompute, whether or not memory is short."""
    sequence = driver.core._sequences[turn.request]
    assert sequence.table is not None, "only a running sequence is preempted"
    driver.core._scheduler._preempt(Plan(0), sequence)
    driver.check()


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("at", range(1, 10))
def test_any_sample_of_a_group_may_be_the_victim_at_any_token(victim: int, at: int) -> None:
    """vllm#8844: an assertion failed when a group of samples was preempted and recomputed."""
    driver = CoreDriver(num_blocks=24)
    parent = driver.submit(None, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], kind="warm")
    driver.run()
    group = [
        driver.submit(parent.snapshot, [3], count=12, options=HOT, key=(5, index))
        for index in range(3)
    ]
    for _ in range(at):
        driver.step()
    preempt(driver, group[victim])
    driver.step()
    tables = [driver.core._sequences[turn.request].table for turn in group]
    first = {table.block_ids[0] for table in tables if table is not None}
    # The prompt is shared again.
    assert len(first) == 1
    driver.run()
    for turn in group:
        driver.verify(turn)
    driver.verify_idle([parent.snapshot, *(turn.snapshot for turn in group)])


@pytest.mark.parametrize("evicted", range(7))
def test_a_preempted_sequence_goes_on_from_whatever_is_still_cached(evicted: int) -> None:
    """nano#211: after a preemption more was found than a stale count said: an index error."""
    driver = CoreDriver(num_blocks=40)
    turn = driver.submit(None, list(range(20)), count=12)
    for _ in range(6):
        driver.step()
    preempt(driver, turn)
    cached = driver.core.stats().cached_blocks
    assert cached == 6
    driver.core._memory.cache.evict(evicted)
    driver.check()
    driver.run()
    driver.verify(turn)
    # 20 prompt tokens and 5 of the 6 sampled ones had been computed.
    assert turn.finished.usage.recomputed_tokens == 25 - 4 * (cached - evicted)
    driver.verify_idle([turn.snapshot])


def test_200_prompts_answer_from_the_cache_as_they_do_cold() -> None:
    """vllm#5543, #7845, #54490, #40896, tenstorrent/vllm#415: cached and cold answers differed."""
    rng = random.Random(5)
    driver = CoreDriver(num_blocks=64)
    stem: list[int] = []
    for _ in range(200):
        cut = rng.randint(0, len(stem))
        stem = [*stem[:cut], *rng.choices(range(4), k=rng.randint(1, 30))][:100]
        turn = driver.submit(None, stem, count=5)
        driver.run()
        driver.verify(turn)
        driver.core.release(turn.snapshot)
    assert driver.core.stats().cached_tokens > 2000
    driver.verify_idle()
