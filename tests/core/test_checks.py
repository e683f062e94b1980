"""The core's own check: whatever is wrong in its queues and snapshots, it says what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentkv.core.core import Core
from agentkv.core.scheduler import MAX_PREEMPTIONS
from agentkv.core.sequence import Finished
from agentkv.core.working import Sequence
from agentkv.kv.block_table import BlockTable
from agentkv.testing.driver import CoreDriver


class Books:
    """A core with an idle snapshot, a busy one, two sequences that run, and two that wait."""

    def __init__(self) -> None:
        driver = CoreDriver(num_blocks=64, max_num_seqs=2)
        self.idle, self.busy = (driver.submit(None, [at] * 6, count=2) for at in range(2))
        driver.run()
        driver.submit(self.busy.snapshot, [3], count=30)
        for at in range(3):
            driver.submit(None, [7 + at] * 5, count=30)
        driver.step()
        self.core: Core = driver.core
        self.scheduler = driver.core._scheduler
        self.snapshots = driver.core._snapshots

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Sequence]:
        return self.scheduler.waiting


def test_books_that_are_right_pass() -> None:
    books = Books()
    assert (len(books.running), len(books.waiting)) == (2, 2)
    assert (len(books.snapshots._idle), len(books.snapshots._busy)) == (1, 2)
    books.core.check()


def forget_a_sequence(books: Books) -> None:
    del books.core._sequences[books.running[0].request]


def queue_a_sequence_nowhere(books: Books) -> None:
    books.waiting.pop()


def give_a_waiting_sequence_a_table(books: Books) -> None:
    books.waiting[0].table = BlockTable()


def run_a_sequence_without_a_table(books: Books) -> None:
    books.running.insert(0, books.waiting.pop(0))


def order_by_no_rank(books: Books) -> None:
    books.waiting.reverse()


def owe_a_block_too_many(books: Books) -> None:
    books.running[0].num_owed += 1


def run_too_many(books: Books) -> None:
    books.scheduler._max_num_seqs = 1


def preempt_for_ever(books: Books) -> None:
    books.waiting[0].num_preemptions = MAX_PREEMPTIONS + 1


def forget_what_is_busy(books: Books) -> None:
    del books.snapshots._busy[books.busy.snapshot]


def count_a_sequence_twice(books: Books) -> None:
    books.snapshots._busy[books.busy.snapshot] += 1


def forget_what_is_idle(books: Books) -> None:
    books.snapshots._idle.clear()


def take_a_busy_snapshot_for_idle(books: Books) -> None:
    books.snapshots._idle[books.busy.snapshot] = None


def lose_a_live_snapshot(books: Books) -> None:
    books.snapshots.live.discard(books.idle.snapshot)


def keep_kv_of_more_ids_than_there_are(books: Books) -> None:
    snapshot = books.idle.snapshot
    snapshot.ids = snapshot.ids.truncate(4)


def compute_more_ids_than_there_are(books: Books) -> None:
    books.running[0].request.output_ids.clear()


def end_a_request_that_still_runs(books: Books) -> None:
    sequence = books.running[0]
    sequence.request.outcome = Finished(None, None, None, sequence.usage())


WRONG: dict[Callable[[Books], None], str] = {
    forget_a_sequence: "a sequence is queued twice or not at all",
    queue_a_sequence_nowhere: "a sequence is queued twice or not at all",
    give_a_waiting_sequence_a_table: "a waiting one holds KV",
    run_a_sequence_without_a_table: "one runs without",
    order_by_no_rank: "a queue is out of order",
    owe_a_block_too_many: "blocks are owed",
    run_too_many: "too many sequences run",
    preempt_for_ever: "a sequence is preempted for ever",
    forget_what_is_busy: "busy snapshots are not those that sequences run from",
    count_a_sequence_twice: "busy snapshots are not those that sequences run from",
    forget_what_is_idle: "idle snapshots are miscounted",
    take_a_busy_snapshot_for_idle: "idle snapshots are miscounted",
    lose_a_live_snapshot: "states overlap or leak",
    keep_kv_of_more_ids_than_there_are: "KV beyond the ids",
    compute_more_ids_than_there_are: "KV beyond the ids",
    end_a_request_that_still_runs: "a request that has ended still runs",
}


@pytest.mark.parametrize("go_wrong", WRONG)
def test_books_that_are_wrong_are_found_out(go_wrong: Callable[[Books], None]) -> None:
    books = Books()
    go_wrong(books)
    with pytest.raises(AssertionError, match=WRONG[go_wrong]):
        books.core.check()
