"""Every fault point fails at every pass, and KV is lost wherever it can be: no answer changes."""

from __future__ import annotations

import pytest

from agentkv.testing.faults import FaultPoint
from agentkv.testing.proof.losses import (
    evict_everywhere,
    fail_everywhere,
    preempt_everywhere,
    preemptions_under_demand,
)

# The other scenarios and points are in the full proof.
SCENARIOS = ["generate", "queue", "read", "samples", "branches", "score", "close_session"]
POINTS: list[FaultPoint] = [
    "copy",
    "forward.before",
    "forward.during",
    "forward.after",
    "logits.nan",
    "results.short",
    "results.token",
    "detokenize",
    "preempt",
    "evict",
]


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True])
def test_any_allocation_may_fail(for_ever: bool) -> None:
    found = [fail_everywhere(name, "allocate", for_ever=for_ever) for name in SCENARIOS]
    assert all(each.covered == each.discovered for each in found)
    assert sum(each.covered for each in found) >= 65


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_any_pass_of_a_point_may_fail(point: FaultPoint) -> None:
    found = fail_everywhere("branches", point)
    assert found.covered == found.discovered > 0


@pytest.mark.slow
def test_a_template_and_an_encoding_may_fail() -> None:
    for point in ("render", "encode"):
        found = fail_everywhere("talk", point)
        assert found.covered == found.discovered > 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_sequences", "stride"), [(1, 1), (4, 16)])
def test_a_sequence_may_be_preempted_before_any_token(num_sequences: int, stride: int) -> None:
    found = preempt_everywhere(num_sequences, stride=stride)
    assert found.covered == found.discovered == num_sequences * (64 // stride)


@pytest.mark.slow
def test_cached_blocks_may_be_evicted_at_any_step() -> None:
    found = evict_everywhere()
    assert found.covered == found.discovered > 100


@pytest.mark.parametrize("num_sequences", [4, 8, 16, 32])
def test_sequences_are_preempted_at_most_four_times(num_sequences: int) -> None:
    assert preemptions_under_demand(num_sequences, 1.3) <= 4
    assert preemptions_under_demand(num_sequences, 2.5) <= 4
