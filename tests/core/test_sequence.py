from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.sequence import Request, Snapshot, TokenIds
from agentkv.core.working import Sequence

ids_lists = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(st.lists(st.one_of(ids_lists, st.floats(0, 1)), max_size=12))
def test_extend_and_truncate_equal_the_same_on_a_list(changes: list[list[int] | float]) -> None:
    ids, expected = TokenIds.EMPTY, list[int]()
    for change in changes:
        if isinstance(change, list):
            ids, expected = ids.extend(change), expected + change
        else:
            length = int(change * len(expected))
            ids, expected = ids.truncate(length), expected[:length]
        assert list(ids) == ids.to_array().tolist() == expected
        assert [ids[i] for i in range(-len(ids), len(ids))] == expected * 2
    middle = len(expected) // 2
    assert ids.slice(middle, len(ids)).tolist() == expected[middle:]
    assert ids == TokenIds(expected)
    assert hash(ids) == hash(TokenIds(expected))


def test_extend_shares_the_storage_of_long_ids() -> None:
    long = TokenIds(range(8000))
    extended = long.extend([1, 2, 3])
    assert np.shares_memory(long.to_array(), extended.slice(0, 8000))


def test_segments_stay_few_over_many_turns() -> None:
    ids = TokenIds.EMPTY
    for turn in range(2000):
        ids = ids.extend([turn] * (1 + turn % 7))
    assert len(ids._segments) <= 15


def test_ids_cannot_be_changed_through_an_array() -> None:
    source = np.array([1, 2, 3], dtype=np.int32)
    ids = TokenIds(source)
    source[0] = 9
    assert list(ids) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        ids.slice(0, 2)[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        ids.to_array()[0] = 5


def test_ids_out_of_range_raise() -> None:
    with pytest.raises(IndexError, match="index 3 of 3"):
        TokenIds([1, 2, 3])[3]
    with pytest.raises(OverflowError):
        TokenIds([2**31])


def test_a_request_keeps_the_whole_snapshot_by_default() -> None:
    snapshot = Snapshot(TokenIds([1, 2, 3]), "space")
    request = Request(snapshot, [4])
    assert request.keep == 3
    assert request.namespace == "space"
    assert request.outcome is None
    assert "4" not in repr(Snapshot(TokenIds([4, 4]), None))


def test_what_is_reused_again_is_spared_once() -> None:
    request = Request(Snapshot(TokenIds(range(20))), [])
    sequence = Sequence(request, 1, block_size=4, capacity=100)
    assert [sequence.note_reused(length) for length in (8, 8, 12)] == [8, 0, 4]
    assert sequence.usage().cached_tokens == 12
