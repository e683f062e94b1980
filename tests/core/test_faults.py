"""Faults at every point: nothing leaks, nobody else's answer changes, and somebody always runs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from agentkv.config import SamplingOptions
from agentkv.core.batch import Batch, RowResult
from agentkv.core.plan import Plan
from agentkv.core.protocols import FatalRunnerError
from agentkv.core.sequence import Finished, Request, Snapshot, TokenIds
from agentkv.errors import (
    ContextLengthError,
    NamespaceError,
    RequestError,
    StepError,
)
from agentkv.testing.driver import CoreDriver, Turn
from agentkv.testing.faults import FaultPlan
from agentkv.testing.faulty import FaultyPool

PROMPT = [3 * at % 251 for at in range(39)]


def scenario(driver: CoreDriver) -> list[Turn]:
    """A warm conversation, three forks of it in different states, a stranger."""
    warm = driver.submit(None, PROMPT, kind="warm")
    driver.run()
    base = warm.request.outcome
    if not isinstance(base, Finished) or base.snapshot is None:
        return [warm]
    turns = [driver.submit(base.snapshot, [5] * at, count=9) for at in range(3)]
    turns.append(driver.submit(None, PROMPT[:9], count=5))
    turns.append(driver.submit(base.snapshot, [7], kind="score", score_ids=[1, 2, 3]))
    driver.run()
    return [warm, *turns]


def settle(driver: CoreDriver, turns: list[Turn]) -> int:
    """Verify what finished, release everything; how many turns failed."""
    failed = 0
    held: list[Snapshot] = []
    for turn in turns:
        if isinstance(turn.request.outcome, Finished):
            driver.verify(turn)
            if turn.finished.snapshot is not None:
                held.append(turn.finished.snapshot)
        else:
            assert isinstance(turn.error, StepError)
            failed += 1
    driver.verify_idle(held)
    return failed


def test_the_kth_allocation_may_fail_once_for_every_k() -> None:
    for k in range(1, 60):
        plan = FaultPlan().fail("allocate", at=k)
        driver = CoreDriver(num_blocks=24, pool=FaultyPool(24, plan))
        assert settle(driver, scenario(driver)) == 0
        if not plan.happened:
            break
    assert k > 12


def test_the_kth_allocation_may_fail_for_ever_for_every_k() -> None:
    for k in range(1, 60):
        plan = FaultPlan().fail("allocate", at=k, count=None)
        driver = CoreDriver(num_blocks=24, pool=FaultyPool(24, plan))
        failed = settle(driver, scenario(driver))
        if not plan.happened:
            assert not failed
            break
    assert k > 12


def test_host_memory_may_run_out_at_any_share() -> None:
    for k in range(1, 60):
        plan = FaultPlan().fail("share", at=k)
        driver = CoreDriver(num_blocks=24, pool=FaultyPool(24, plan))
        try:
            settle(driver, scenario(driver))
        except MemoryError:
            driver.core.close()
            driver.core.check()
            assert driver.core.stats().used_blocks == 0
            assert driver.runner.is_closed
        else:
            break
    assert not plan.happened
    assert k > 5


@pytest.mark.parametrize("point", ["before_step", "after_copy", "after_write", "after_step"])
def test_any_step_may_fail_at_any_point(point: str) -> None:
    for k in range(1, 40):
        driver = CoreDriver(num_blocks=40)
        calls = [0]

        def explode(batch: Batch, calls: list[int] = calls, k: int = k) -> None:
            calls[0] += 1
            if calls[0] == k:
                raise RuntimeError("on purpose")

        setattr(driver.runner, point, explode)
        settle(driver, scenario(driver))
        if calls[0] < k:
            break
    assert k > 1


def test_a_turn_may_be_cancelled_after_any_step() -> None:
    for after in range(14):
        driver = CoreDriver(num_blocks=40)
        doomed = driver.submit(None, PROMPT, count=9)
        other = driver.submit(None, [*PROMPT, 1], count=9, priority=-1)
        for _ in range(after):
            driver.step()
        was_done = doomed.request.outcome
        driver.core.cancel(doomed.request)
        driver.check()
        driver.run()
        assert doomed.request.outcome is was_done
        driver.verify(other)
        held = [other.snapshot, *([doomed.snapshot] if was_done else [])]
        driver.verify_idle(held)


def test_a_second_failing_step_in_a_row_ends_the_engine() -> None:
    driver = CoreDriver()

    def explode(batch: Batch) -> None:
        raise RuntimeError("on purpose")

    driver.runner.before_step = explode
    turns = [driver.submit(None, [at], count=3) for at in range(2)]
    driver.step()
    assert turns[0].error is not turns[1].error
    again = driver.submit(None, [1])
    with pytest.raises(StepError, match="two steps in a row"):
        driver.core.step()
    assert isinstance(again.error, StepError)
    driver.check()
    assert driver.core.stats().used_blocks == 0


def test_failing_steps_that_do_not_follow_each_other_end_nothing() -> None:
    driver = CoreDriver()

    def explode(batch: Batch) -> None:
        raise RuntimeError("on purpose")

    for _ in range(3):
        driver.runner.before_step = explode
        bad = driver.submit(None, [1])
        driver.step()
        assert isinstance(bad.error, StepError)
        driver.runner.before_step = lambda batch: None
        good = driver.submit(None, [2], count=2)
        driver.run()
        driver.verify(good)
        driver.core.release(good.snapshot)
    driver.verify_idle()


@pytest.mark.parametrize("error", [FatalRunnerError("the device is lost"), KeyboardInterrupt()])
def test_what_cannot_be_contained_leaves_the_step(error: BaseException) -> None:
    driver = CoreDriver()

    def explode(batch: Batch) -> None:
        raise error

    driver.runner.before_step = explode
    turn = driver.submit(None, [1, 2])
    with pytest.raises(type(error)):
        driver.core.step()
    assert isinstance(turn.error, StepError)
    assert turn.error.cause is error


def test_results_that_do_not_fit_the_rows_fail_them() -> None:
    driver = CoreDriver()
    honest = driver.runner.execute
    driver.runner.execute = lambda batch: honest(batch)[1:]  # type: ignore[method-assign]  # a liar
    wrong_count = driver.submit(None, [1])
    driver.step()
    driver.runner.execute = lambda batch: [RowResult(token_id=260)]  # type: ignore[method-assign]
    wrong_token = driver.submit(None, [1])
    driver.step()
    assert "1 rows gave 0 results" in str(getattr(wrong_count.error, "cause", ""))
    assert "no token of the vocabulary" in str(wrong_token.error)
    driver.verify_idle()


LIES: list[tuple[RowResult, str]] = [
    (RowResult(), "2 targets gave 0 log-probabilities"),
    (RowResult(target_logprobs=(-1.0,)), "2 targets gave 1 log-probabilities"),
    (RowResult(target_logprobs=(-1.0,) * 3), "2 targets gave 3 log-probabilities"),
    (RowResult(target_logprobs=(-1.0, float("nan"))), "that are not numbers"),
]


@pytest.mark.parametrize(("lie", "message"), LIES, ids=["none", "one", "three", "no number"])
def test_scores_that_cannot_be_summed_fail_their_row(lie: RowResult, message: str) -> None:
    driver = CoreDriver()
    driver.runner.execute = lambda batch: [lie]  # type: ignore[method-assign]  # a liar
    turn = driver.submit(None, [1, 2, 3], kind="score", score_ids=[4, 5])
    driver.step()
    assert message in str(turn.error)
    driver.verify_idle()


def test_a_chunk_that_failed_is_not_published_though_nothing_was_drawn_from_it() -> None:
    driver = CoreDriver(max_num_seqs=1, max_batch_tokens=65)
    prompt = [at % 7 for at in range(140)]
    driver.runner.nan_rows = {1}
    doomed = driver.submit(None, prompt)
    driver.step()
    assert "not finite" in str(doomed.error)
    again = driver.submit(None, prompt)
    driver.run()
    driver.verify(again)
    assert again.finished.usage.cached_tokens == 0
    driver.verify_idle([again.snapshot])


class Broken:
    """A stop rule and constraint that raises where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        if self.where == "mask":
            raise RuntimeError("on purpose")
        return np.ones(260, dtype=np.bool_)

    def accept(self, token_id: int) -> bool:
        raise RuntimeError("on purpose")

    def copy(self) -> Broken:
        return Broken(self.where)


@pytest.mark.parametrize("where", ["mask", "accept", "stop"])
def test_a_failing_rule_fails_its_own_request(where: str) -> None:
    driver = CoreDriver()
    rule = Broken(where)
    rules: dict[str, Any] = {"stop" if where == "stop" else "constraint": rule}
    bad = driver.submit(None, PROMPT, **rules)
    good = driver.submit(None, PROMPT, count=6)
    driver.run()
    assert isinstance(bad.error, StepError)
    assert isinstance(bad.error.cause, RuntimeError)
    driver.verify(good)
    driver.verify_idle([good.snapshot])


def test_a_step_that_hangs_can_be_given_up() -> None:
    driver = CoreDriver()
    entered, leave = threading.Event(), threading.Event()

    def hang(batch: Batch) -> None:
        entered.set()
        leave.wait(10)

    driver.runner.before_step = hang
    turn = driver.submit(None, PROMPT)
    thread = threading.Thread(target=driver.core.step)
    thread.start()
    assert entered.wait(10)
    named = driver.core.quarantine()
    assert len(named) == 10
    assert driver.core.stats().quarantined_blocks == 10
    driver.core.check()
    leave.set()
    thread.join(10)
    assert turn.request.outcome is None
    assert driver.core.stats().used_blocks == 0
    driver.core.check()
    assert driver.core.quarantine() == ()


def test_a_given_up_step_that_returns_leaves_the_books_to_who_gave_it_up() -> None:
    driver = CoreDriver()
    turn = driver.submit(None, PROMPT)

    def give_up(batch: Batch) -> None:
        # As if `quarantine`, on its thread, had got no further than this.
        driver.core._execution.abandon()

    driver.runner.before_step = give_up
    assert driver.core.step() == []
    before = driver.core.stats()
    driver.core.close()
    assert driver.runner.is_closed
    assert driver.core.stats() == before
    assert turn.request.outcome is None


def test_a_block_that_a_hanging_step_may_still_copy_is_withdrawn_too() -> None:
    driver = CoreDriver()
    warm = driver.submit(None, PROMPT[:7], kind="warm")
    driver.run()
    entered, leave, copied = threading.Event(), threading.Event(), set[int]()

    def hang(batch: Batch) -> None:
        copied.update(copy.src for copy in batch.copies)
        entered.set()
        leave.wait(10)

    driver.runner.before_step = hang
    for at in range(2):
        driver.submit(warm.snapshot, [at])
    thread = threading.Thread(target=driver.core.step)
    thread.start()
    assert entered.wait(10)
    named = driver.core.quarantine()
    leave.set()
    thread.join(10)
    assert len(copied) == 1
    assert copied < set(named)
    driver.core.check()


def test_what_can_never_be_served_is_refused_at_submit() -> None:
    driver = CoreDriver(num_blocks=8)
    for count, size in ((None, 32), (1, 32), (20, 13)):
        with pytest.raises(ContextLengthError):
            driver.submit(None, [1] * size, count=count)
    for ids in ([], [-1], [260]):
        with pytest.raises(RequestError):
            driver.submit(None, ids)
    for scored in ([-1], [2, 260]):
        with pytest.raises(RequestError):
            driver.submit(None, [1], kind="score", score_ids=scored)
    small = driver.submit(None, [1] * 12, count=20)
    with pytest.raises(NamespaceError):
        driver.core.submit(Request(Snapshot(TokenIds([1]), "a"), [2], namespace="b"))
    driver.run()
    driver.verify(small)


def test_a_lone_turn_takes_back_what_its_long_conversation_holds() -> None:
    driver = CoreDriver(num_blocks=8, block_size=2, prefix_cache=False)
    first = driver.submit(None, [1, 0] * 6, count=2)
    driver.run()
    turn = driver.submit(first.snapshot, [1] * 10, keep=1, count=5)
    driver.run()
    driver.verify(turn)


def test_a_turn_in_a_full_pool_gives_up_a_tail_it_cannot_copy() -> None:
    driver = CoreDriver(num_blocks=8, block_size=2)
    first = driver.submit(None, list(range(9)), count=1)
    driver.run()
    turn = driver.submit(first.snapshot, [1] * 10, keep=5, count=1)
    driver.core.release(first.snapshot)
    driver.run()
    driver.verify(turn)


def test_preempted_scores_and_samples_equal_those_of_a_huge_pool() -> None:
    for num_blocks in (14, 400):
        driver = CoreDriver(num_blocks=num_blocks, max_num_seqs=8)
        options = SamplingOptions(temperature=1.0, presence_penalty=0.5)
        turns = [
            driver.submit(None, [at] * 11, count=24, options=options, key=(at, 1))
            for at in range(5)
        ]
        turns.append(driver.submit(None, [9] * 5, kind="score", score_ids=[4] * 30))
        driver.run()
        for turn in turns:
            driver.verify(turn)
        assert (driver.core.stats().preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_score_that_was_preempted_half_way_is_summed_once(steps: int) -> None:
    driver = CoreDriver(num_blocks=100, max_num_seqs=1, max_batch_tokens=65)
    turn = driver.submit(None, [1, 2, 3], kind="score", score_ids=[at % 9 for at in range(200)])
    for _ in range(steps):
        driver.step()
    driver.core._scheduler._preempt(Plan(0), driver.core._sequences[turn.request])
    driver.check()
    driver.run()
    driver.verify(turn)
    driver.verify_idle()
