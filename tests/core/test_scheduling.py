"""Who runs when: fairness, priorities, bounded preemption, sharing of work in flight."""

from __future__ import annotations

import random

import pytest

from agentkv.core.batch import Batch
from agentkv.testing.driver import CoreDriver, Turn


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(260), k=count)


def steps_until_first_id(driver: CoreDriver, turn: Turn) -> int:
    for step in range(1, 500):
        driver.step()
        if turn.request.output_ids:
            return step
    raise AssertionError("the turn never came to its first id")


def test_a_small_request_does_not_wait_for_a_big_one() -> None:
    driver = CoreDriver(num_blocks=1000)
    driver.submit(None, ids(1, 3000), count=1)
    small = driver.submit(None, ids(2, 8), count=1)
    assert steps_until_first_id(driver, small) == 1


def test_a_big_request_does_not_starve_behind_small_ones() -> None:
    driver = CoreDriver(num_blocks=100, max_num_seqs=4)
    running = [driver.submit(None, ids(at, 30), count=40) for at in range(3)]
    driver.step()
    big = driver.submit(None, ids(9, 300), count=2)
    for step in range(600):
        # Small ones arrive without end.
        running.append(driver.submit(None, ids(100 + step, 20), count=30))
        driver.step()
        if big.request.outcome is not None:
            break
    driver.verify(big)
    assert step < 400


def test_at_least_64_prefill_tokens_run_in_a_step_while_any_waits() -> None:
    driver = CoreDriver(num_blocks=600, max_num_seqs=16, max_batch_tokens=80)
    for at in range(15):
        driver.submit(None, ids(at, 5), count=60)
    for _ in range(4):
        driver.step()
    long = driver.submit(None, ids(50, 700), count=1)
    while not long.request.output_ids:
        driver.step()
        batch = driver.runner.batches[-1]
        prefill = batch.num_tokens - 15
        assert len(batch.rows) == 16
        assert prefill >= 64 or long.request.output_ids


def test_a_high_priority_takes_the_memory_of_a_low_one() -> None:
    driver = CoreDriver(num_blocks=30)
    low = driver.submit(None, ids(1, 40), count=60)
    for _ in range(10):
        driver.step()
    high = driver.submit(None, ids(2, 80), count=4, priority=1)
    driver.run()
    assert driver.core.stats().preemptions >= 1
    driver.verify(high)
    driver.verify(low)
    assert low.finished.usage.recomputed_tokens > 0


def test_a_leader_that_is_cancelled_needs_no_hand_over() -> None:
    driver = CoreDriver(num_blocks=300)
    turns = [driver.submit(None, [*ids(1, 500), at], count=2) for at in range(4)]
    for turn in turns[:3]:
        driver.step()
        driver.step()
        driver.core.cancel(turn.request)
    driver.run()
    driver.verify(turns[3])
    assert driver.core.stats().prefill_tokens == 501


def test_followers_wait_only_for_the_very_block_they_need() -> None:
    driver = CoreDriver(num_blocks=300)
    leader = driver.submit(None, ids(1, 40), count=1)
    follower = driver.submit(None, ids(1, 40), count=1)
    other = driver.submit(None, [*ids(1, 8), *ids(2, 20)], count=1)
    foreign = driver.submit(None, ids(1, 8), count=1, namespace="b")
    driver.step()
    rows = {row.seq_id for row in driver.runner.batches[0].rows}
    assert rows == {1, 4}
    driver.run()
    for turn in (leader, follower, other, foreign):
        driver.verify(turn)
    assert follower.finished.usage.cached_tokens == 36
    assert other.finished.usage.cached_tokens == 8
    assert foreign.finished.usage.cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [16, 20, 26, 40])
def test_preemptions_are_bounded_and_everybody_ends(num_blocks: int) -> None:
    driver = CoreDriver(num_blocks=num_blocks)
    turns = [driver.submit(None, ids(at, 9), count=50) for at in range(6)]
    seen: dict[int, int] = {}
    while driver.core.has_work:
        driver.step()
        for sequence in driver.core._scheduler.waiting:
            seen[sequence.seq_id] = max(seen.get(sequence.seq_id, 0), sequence.num_preemptions)
    for turn in turns:
        driver.verify(turn)
    assert max(seen.values(), default=0) <= 4
    assert driver.core.stats().steps < 900


def test_a_victim_may_be_any_sequence_at_any_token() -> None:
    for at in range(1, 40, 3):
        driver = CoreDriver(num_blocks=40)
        victims = [driver.submit(None, ids(1, 12), count=40, key=(n, 0)) for n in range(2)]
        for _ in range(at):
            driver.step()
        urgent = driver.submit(None, ids(3, 140), count=2, priority=9)
        driver.run()
        for turn in (*victims, urgent):
            driver.verify(turn)


def test_the_fork_tree_is_not_rebuilt_in_steady_state() -> None:
    driver = CoreDriver(num_blocks=200)
    warm = driver.submit(None, ids(1, 41), kind="warm")
    driver.run()
    turns = [driver.submit(warm.snapshot, [at, at], count=30) for at in range(8)]
    driver.run()
    for turn in turns:
        driver.verify(turn)
    steady: list[Batch] = [b for b in driver.runner.batches if b.num_tokens == 8]
    assert len({batch.tree_version for batch in steady}) == 1
    assert [segment.rows for segment in steady[0].segments] == [tuple(range(8))]
    assert len(steady[0].segments[0].block_ids) == 10


def test_forks_copy_a_partial_block_once_each() -> None:
    driver = CoreDriver()
    warm = driver.submit(None, ids(1, 7), kind="warm")
    driver.run()
    for at in range(3):
        driver.submit(warm.snapshot, [at], count=1)
    driver.run()
    assert driver.core.stats().block_copies == 3
    driver.core.release(warm.snapshot)


def test_a_turn_whose_snapshot_is_released_copies_nothing() -> None:
    driver = CoreDriver()
    warm = driver.submit(None, ids(1, 100), kind="warm")
    driver.run()
    turn = driver.submit(warm.snapshot, [3], count=2)
    driver.run()
    driver.verify(turn)
    copies = driver.core.stats().block_copies
    again = driver.submit(turn.snapshot, ids(2, 3), count=2)
    driver.core.release(turn.snapshot)
    driver.run()
    driver.verify(again)
    assert driver.core.stats().block_copies == copies


def test_a_prompt_that_waits_alone_gets_all_tokens_of_every_step() -> None:
    driver = CoreDriver(num_blocks=300, max_batch_tokens=80)
    turn = driver.submit(None, ids(1, 790), count=1)
    driver.run()
    driver.verify(turn)
    assert [batch.num_tokens for batch in driver.runner.batches] == [80] * 9 + [70]


def test_the_conversation_used_least_recently_loses_its_kv_first() -> None:
    driver = CoreDriver(num_blocks=12, max_num_seqs=1, prefix_cache=False)
    talks = [driver.submit(None, ids(at, 7), count=2) for at in range(3)]
    driver.run()
    # It is used again as soon as a turn waits for it.
    waiting = driver.submit(talks[0].snapshot, [5], count=1)
    urgent = driver.submit(None, ids(9, 28), count=1, priority=1)
    driver.step()
    assert [talk.snapshot.table is None for talk in talks] == [False, True, False]
    driver.run()
    for turn in (urgent, waiting):
        driver.verify(turn)


def test_what_is_computed_once_more_is_counted_and_nothing_else() -> None:
    driver = CoreDriver(num_blocks=64, prefix_cache=False)
    first = driver.submit(None, ids(1, 12), count=1)
    driver.run()
    assert first.snapshot.num_computed == 12
    # New ids stand where others were computed: they are computed for the first time.
    other = driver.submit(first.snapshot, ids(2, 9), keep=4, count=1)
    driver.run()
    assert (other.finished.usage.cached_tokens, other.finished.usage.recomputed_tokens) == (4, 0)
    driver.core.release(other.snapshot)
    while driver.core._snapshots.reclaim_idle():
        driver.check()
    again = driver.submit(first.snapshot, ids(3, 2), count=1)
    driver.run()
    assert (again.finished.usage.cached_tokens, again.finished.usage.recomputed_tokens) == (0, 12)
    assert driver.core.stats().recomputed_tokens == 12
