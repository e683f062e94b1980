"""The witness's own checks: a batch that breaks a promise of the core fails, and says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentkv.config import SamplingOptions
from agentkv.core.batch import Batch, BlockCopy, Row, SampleSpec, Segment
from agentkv.testing.witness import WitnessRunner, check_batch, witness_reply

SIZE = 4
NO_IDS = np.empty(0, np.int32)
GREEDY = SampleSpec(SamplingOptions(temperature=0.0), 0.0, NO_IDS, NO_IDS)


def row(seq_id: int, start: int, ids: Sequence[int], block_ids: Sequence[int]) -> Row:
    return Row(seq_id, np.array(ids, np.int32), start, list(block_ids), sample=GREEDY)


# Two rows share blocks 0 and 1, and a third one block 0; each writes a block of its own.
ROWS = (
    row(1, 8, [5], [0, 1, 2]),
    row(2, 9, [6], [0, 1, 3]),
    row(3, 4, [7, 8], [0, 4]),
)
SHARED = (Segment(None, 0, (0,), (0, 1, 2)), Segment(0, 4, (1,), (0, 1)))
GOOD = Batch(ROWS, (BlockCopy(5, 3, 1),), SHARED)


def test_a_batch_that_keeps_its_promises_passes() -> None:
    check_batch(GOOD, SIZE)


def rows(*changed: Row) -> Batch:
    """The good batch with its last rows in another form."""
    return replace(GOOD, rows=(*ROWS[: 3 - len(changed)], *changed))


def copies(*changed: BlockCopy) -> Batch:
    return replace(GOOD, copies=changed)


def segments(*changed: Segment) -> Batch:
    return replace(GOOD, segments=changed)


BROKEN: dict[str, tuple[Batch, str]] = {
    "no row": (Batch(()), "a batch has rows"),
    "one sequence twice": (rows(replace(ROWS[2], seq_id=2)), "a sequence runs twice"),
    "no token": (rows(row(3, 4, [], [0, 4])), "a row runs no token"),
    "a table too short": (rows(row(3, 7, [1, 2], [0, 4])), "a row lacks blocks"),
    "a block twice in a table": (rows(row(3, 8, [1], [0, 4, 4])), "a row repeats a block"),
    "one block written twice": (rows(row(3, 4, [7], [0, 3])), "two rows write block 3"),
    "a block written and read": (rows(row(3, 8, [7], [0, 2, 4])), "2 is shared"),
    "a shared block written": (rows(row(3, 2, [7], [0, 4])), "0 is shared"),
    "two copies to one block": (
        copies(BlockCopy(5, 3, 1), BlockCopy(6, 3, 1)),
        "two copies go to one block",
    ),
    "a copy of what is written": (copies(BlockCopy(2, 3, 1)), "block 2 is copied and written"),
    "a copy to nobody": (copies(BlockCopy(5, 6, 1)), "block 6 is copied to for nobody"),
    "a copy of nothing": (copies(BlockCopy(5, 3, 0)), "a copy of 0 slots"),
    "a copy of a whole block": (copies(BlockCopy(5, 3, 4)), "a copy of 4 slots"),
    "a row in two segments of one parent": (
        segments(SHARED[0], SHARED[1], Segment(0, 4, (1,), (1, 2))),
        "a row forks",
    ),
    "a segment of one row": (segments(Segment(None, 0, (0,), (0,))), "a segment is shared"),
    "a row twice in a segment": (
        segments(Segment(None, 0, (0,), (0, 0))),
        "a segment repeats a row",
    ),
    "a segment of nothing": (segments(Segment(None, 0, (), (0, 1))), "a segment has blocks"),
    "a parent behind its child": (
        segments(Segment(1, 4, (1,), (0, 1)), SHARED[0]),
        "a segment precedes its parent",
    ),
    "a row the parent lacks": (
        segments(Segment(None, 0, (0,), (0, 1)), Segment(0, 4, (1,), (1, 2))),
        "a segment has rows its parent lacks",
    ),
    "a gap behind the parent": (
        segments(SHARED[0], Segment(0, 8, (1,), (0, 1))),
        "a segment does not continue its parent",
    ),
    "a block the rows lack": (
        segments(Segment(None, 0, (6,), (0, 1))),
        "a row does not hold its segment",
    ),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_batch_that_breaks_a_promise_is_found_out(promise: str) -> None:
    batch, message = BROKEN[promise]
    with pytest.raises(AssertionError, match=message):
        check_batch(batch, SIZE)


@pytest.fixture
def runner() -> WitnessRunner:
    """A witness that holds ids 1 to 8 in blocks 0 and 1."""
    opened = WitnessRunner(num_blocks=8, block_size=SIZE)
    opened.execute(Batch((row(1, 0, range(1, 9), [0, 1]),), tree_version=1))
    return opened


def test_a_slot_that_nobody_wrote_cannot_be_read(runner: WitnessRunner) -> None:
    with pytest.raises(AssertionError, match="reads a slot never written"):
        runner.execute(Batch((row(1, 6, [7], [0, 2]),)))


def test_a_slot_that_was_forgotten_cannot_be_read(runner: WitnessRunner) -> None:
    runner.poison_unfilled([4, 1, 0, 0, 0, 0, 0, 0])
    with pytest.raises(AssertionError, match="reads a slot never written"):
        runner.execute(Batch((row(1, 6, [7], [0, 1]),)))


def test_the_slots_of_other_positions_cannot_be_read(runner: WitnessRunner) -> None:
    with pytest.raises(AssertionError, match="reads others' slots"):
        runner.execute(Batch((row(1, 4, [5], [1, 2]),)))


def test_an_empty_slot_cannot_be_copied(runner: WitnessRunner) -> None:
    with pytest.raises(AssertionError, match="empty copy"):
        runner.execute(Batch((row(1, 7, [7], [0, 2]),), (BlockCopy(4, 2, 3),)))


def test_the_tokens_of_another_session_change_the_answer(runner: WitnessRunner) -> None:
    runner.execute(Batch((row(2, 0, [1, 2, 3, 5], [3]),)))
    (mixed,) = runner.execute(Batch((row(3, 4, [5, 6], [3, 4]),), tree_version=2))
    (own,) = runner.execute(Batch((row(4, 4, [5, 6], [0, 5]),), tree_version=3))
    assert own.token_id == witness_reply([1, 2, 3, 4, 5, 6], 1)[0]
    assert mixed.token_id != own.token_id


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (Batch((row(2, 6, [7], [0, 1]),), tree_version=1), "rows changed and the version did not"),
        (Batch((row(1, 6, [7], [0, 2]),), tree_version=1), "a table did more than grow"),
        (
            Batch(
                (row(1, 6, [7], [0, 1]), row(2, 4, [7], [0, 3])),
                segments=(Segment(None, 0, (0,), (0, 1)),),
                tree_version=1,
            ),
            "segments changed and the version did not",
        ),
    ],
    ids=["rows", "tables", "segments"],
)
def test_what_changes_without_a_new_tree_version_is_found_out(
    runner: WitnessRunner, later: Batch, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        runner.execute(later)


def test_a_closed_witness_executes_nothing(runner: WitnessRunner) -> None:
    runner.close()
    with pytest.raises(AssertionError, match="a closed runner"):
        runner.execute(Batch((row(1, 6, [7], [0, 1]),)))
