"""Short forms of the load figures: the same functions as in the full proof, with less to do."""

from __future__ import annotations

import gc
from functools import partial

import anyio
import pytest

from agentkv.testing.deterministic import simulate
from agentkv.testing.proof.loads import (
    cancel_strangers,
    close_in_each_state,
    fork_deep,
    fork_tree,
    fork_wide,
    notice_death,
    share_prefix,
    soak,
)
from agentkv.testing.proof.memories import drive_memory, look_across_namespaces
from agentkv.testing.proof.models import compare_reuse, share_real_prefix


@pytest.mark.slow
def test_many_sessions_answer_at_once_on_one_prefix() -> None:
    assert anyio.run(share_prefix, 200)["sessions"] == 200


@pytest.mark.slow
def test_a_real_model_answers_many_sessions_on_one_prefix_as_each_alone() -> None:
    done = anyio.run(share_real_prefix, 16)
    assert done.compared == 128
    assert done.excluded <= 1


@pytest.mark.slow
def test_a_real_model_says_the_same_on_cached_kv() -> None:
    done = anyio.run(compare_reuse, 12)
    assert done.compared > 48
    assert done.difference <= 1e-4


@pytest.mark.slow
def test_forks_wide_and_deep_close_in_any_order() -> None:
    assert anyio.run(fork_wide, 1000)["forks"] == 1000
    assert anyio.run(fork_deep, 200)["forks"] == 200
    assert anyio.run(fork_tree, 20)["forks"] == 420


@pytest.mark.parametrize("strangers", [45, 150])
def test_cancelled_strangers_are_gone_within_a_step(strangers: int) -> None:
    for seed in range(3):
        assert simulate(partial(cancel_strangers, strangers=strangers), seed) <= 1


def test_every_waiter_is_told_of_a_dead_device() -> None:
    done = anyio.run(notice_death, 60)
    assert max(done["seconds"], done["next_call_seconds"]) < 20


def test_an_engine_closes_from_every_state() -> None:
    assert set(anyio.run(close_in_each_state, 0.1)) == {"idle", "running", "full", "hung", "dead"}


@pytest.mark.slow
def test_turns_leave_no_object_behind() -> None:
    done = anyio.run(soak, 800)
    assert abs(done["objects_per_turn"]) < 0.1
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_memory_of_many_blocks_stands_many_operations(block_size: int) -> None:
    assert drive_memory(1, 1024, block_size, 1500, check_every=300) == 0
    assert drive_memory(1, 8, block_size, 3000, check_every=300) > 0


@pytest.mark.parametrize("num_hashes", [None, 1])
def test_no_look_up_finds_a_block_of_another_namespace(num_hashes: int | None) -> None:
    assert look_across_namespaces(4000, num_hashes=num_hashes) > 1000
