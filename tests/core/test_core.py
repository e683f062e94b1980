"""The core on the witness model: sharing, eviction and preemption change no answer."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from agentkv.config import EngineConfig, SamplingOptions
from agentkv.core.batch import Batch
from agentkv.core.core import Core
from agentkv.core.sequence import Failed, Finished, Request, Snapshot, TokenIds
from agentkv.errors import StepError
from agentkv.testing.witness import WitnessRunner, witness_reply, witness_score

GREEDY = SamplingOptions(temperature=0.0)


def make_core(
    *, num_blocks: int = 64, block_size: int = 4, prefix_cache: bool = True, budget: int = 80
) -> tuple[Core, WitnessRunner]:
    runner = WitnessRunner(num_blocks=num_blocks, block_size=block_size)
    config = EngineConfig(
        max_num_seqs=16, max_batch_tokens=budget, prefix_cache=prefix_cache, debug=True
    )
    return Core(runner, config), runner


def request(snapshot: Snapshot, ids: list[int], count: int, **more: object) -> Request:
    return Request(snapshot, ids, max_new_tokens=count, options=GREEDY, **more)  # type: ignore[arg-type]  # test


def run(core: Core, *, steps: int = 2000) -> None:
    for _ in range(steps):
        if not core.has_work:
            return
        core.step()
        core.check()
    raise AssertionError("the core did not come to rest")


def finished(made: Request) -> Finished:
    assert isinstance(made.outcome, Finished), made.outcome
    return made.outcome


def ids_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(260), k=count)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 63, 200])
def test_a_reply_is_what_the_witness_says_of_the_prompt(length: int) -> None:
    core, _ = make_core()
    made = request(Snapshot(TokenIds.EMPTY), ids_of(length, length), 9)
    core.submit(made)
    run(core)
    assert made.output_ids == witness_reply(ids_of(length, length), 9)
    assert list(finished(made).snapshot.ids) == ids_of(length, length) + made.output_ids  # type: ignore[union-attr]


@pytest.mark.parametrize("length", range(4, 13))
def test_a_fork_at_any_offset_of_a_block_answers_as_a_fresh_session(length: int) -> None:
    core, _ = make_core()
    base = ids_of(1, length)
    first = request(Snapshot(TokenIds.EMPTY), base, 5)
    core.submit(first)
    run(core)
    parent = finished(first).snapshot
    assert parent is not None
    forks = [request(parent, [n, *ids_of(n, n)], 6) for n in range(1, 6)]
    for fork in forks:
        core.submit(fork)
    run(core)
    history = base + first.output_ids
    for n, fork in enumerate(forks, start=1):
        assert fork.output_ids == witness_reply([*history, n, *ids_of(n, n)], 6)
        usage = finished(fork).usage
        assert usage.prefill_tokens <= n + 2
        assert usage.cached_tokens >= len(history) - 1


def test_requests_with_one_prompt_compute_it_once() -> None:
    core, _ = make_core(num_blocks=200)
    prompt = ids_of(5, 160)
    made = [request(Snapshot(TokenIds.EMPTY), [*prompt, n], 4) for n in range(10)]
    for one in made:
        core.submit(one)
    run(core)
    for n, one in enumerate(made):
        assert one.output_ids == witness_reply([*prompt, n], 4)
    assert core.stats().prefill_tokens == 160 + 10


def test_a_namespace_shares_with_itself_alone() -> None:
    core, _ = make_core()
    prompt = ids_of(6, 33)
    for namespace, cached in ((None, 0), ("a", 0), ("a", 32), ("b", 0), (None, 32)):
        made = request(Snapshot(TokenIds.EMPTY, namespace), prompt, 2)
        core.submit(made)
        run(core)
        assert finished(made).usage.cached_tokens == cached


def test_a_constant_hash_changes_nothing() -> None:
    runner = WitnessRunner(num_blocks=64, block_size=4)

    def constant(key: tuple[Hashable, ...]) -> int:
        return 7

    core = Core(runner, EngineConfig(max_num_seqs=8, max_batch_tokens=80), hash_fn=constant)
    for seed in range(12):
        prompt = ids_of(seed % 4, 17 + seed % 3)
        made = request(Snapshot(TokenIds.EMPTY, str(seed % 2)), prompt, 3)
        core.submit(made)
        run(core)
        assert made.output_ids == witness_reply(prompt, 3)


def test_warming_computes_all_but_the_last_id() -> None:
    core, _ = make_core()
    warm = request(Snapshot(TokenIds.EMPTY), ids_of(8, 21), 0, kind="warm")
    core.submit(warm)
    run(core)
    base = finished(warm).snapshot
    assert base is not None
    assert base.table is not None
    assert base.table.num_tokens == 20
    turn = request(base, [1, 2], 3)
    core.submit(turn)
    run(core)
    assert finished(turn).usage.prefill_tokens == 3
    assert turn.output_ids == witness_reply([*ids_of(8, 21), 1, 2], 3)


@pytest.mark.parametrize(("num_blocks", "preempted"), [(8, True), (64, False)])
def test_tokens_of_prompts_and_of_replies_are_counted_apart(
    num_blocks: int, preempted: bool
) -> None:
    core, _ = make_core(num_blocks=num_blocks, block_size=2)
    made = [request(Snapshot(TokenIds.EMPTY), ids_of(n, 4), 11) for n in range(3)]
    scored = ids_of(9, 6)
    made.append(request(Snapshot(TokenIds.EMPTY), ids_of(8, 4), 0, kind="score", score_ids=scored))
    for one in made:
        core.submit(one)
    run(core)
    stats = core.stats()
    assert (stats.preemptions > 0) == preempted
    assert stats.prefill_tokens == sum(finished(one).usage.prefill_tokens for one in made) == 16
    # The last id of each has no KV yet.
    assert stats.decode_tokens == 3 * 10 + 5


def test_a_score_sums_the_log_probabilities_of_the_continuation() -> None:
    core, _ = make_core()
    for length in (1, 4, 9, 100):
        made = request(
            Snapshot(TokenIds.EMPTY), ids_of(9, length), 0, kind="score", score_ids=[5, 6, 7]
        )
        core.submit(made)
        run(core)
        assert finished(made).score == pytest.approx(witness_score(ids_of(9, length), [5, 6, 7]))
    assert core.stats().used_blocks == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_tiny_pool_answers_as_a_huge_one(prefix_cache: bool) -> None:
    core, _ = make_core(num_blocks=24, prefix_cache=prefix_cache)
    histories: list[tuple[list[int], Snapshot]] = [([], Snapshot(TokenIds.EMPTY))]
    rng = random.Random(3)
    for _ in range(60):
        batch = []
        for _ in range(4):
            history, snapshot = rng.choice(histories)
            new = rng.choices(range(260), k=rng.randint(1, 12))
            if len(history) + len(new) + 20 <= 96:
                made = request(snapshot, new, rng.randint(1, 20))
                core.submit(made)
                batch.append((history + new, made))
        run(core)
        for known, made in batch:
            assert made.output_ids == witness_reply(known, made.max_new_tokens or 0)
            snapshot_after = finished(made).snapshot
            assert snapshot_after is not None
            histories.append((known + made.output_ids, snapshot_after))
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.snapshot_reclaims > 0
    assert (stats.evictions > 0) == prefix_cache


def test_one_request_can_use_the_whole_pool() -> None:
    core, _ = make_core(num_blocks=8, block_size=4)
    made = request(Snapshot(TokenIds.EMPTY), ids_of(2, 11), 21)
    core.submit(made)
    run(core)
    assert made.output_ids == witness_reply(ids_of(2, 11), 21)
    base = finished(made).snapshot
    assert base is not None
    more = request(base, [], 1, keep=31)
    core.submit(more)
    run(core)
    assert more.output_ids == witness_reply((ids_of(2, 11) + made.output_ids)[:31], 1)


@pytest.mark.parametrize("after", range(12))
def test_a_cancelled_request_leaves_no_block_and_changes_no_neighbour(after: int) -> None:
    core, _ = make_core(budget=80)
    doomed = request(Snapshot(TokenIds.EMPTY), ids_of(1, 150), 8)
    other = request(Snapshot(TokenIds.EMPTY), [*ids_of(1, 150), 3], 8)
    core.submit(doomed)
    core.submit(other)
    for _ in range(after):
        core.step()
    core.cancel(doomed)
    core.cancel(doomed)
    core.check()
    run(core)
    assert other.output_ids == witness_reply([*ids_of(1, 150), 3], 8)
    core.release(finished(other).snapshot)  # type: ignore[arg-type]  # a generated one
    if isinstance(doomed.outcome, Finished) and doomed.outcome.snapshot is not None:
        core.release(doomed.outcome.snapshot)
    assert core.stats().used_blocks == 0


def test_a_failing_step_fails_its_rows_and_publishes_nothing() -> None:
    core, runner = make_core()
    prompt = ids_of(4, 40)

    def explode(batch: Batch) -> None:
        raise RuntimeError("boom")

    runner.after_step = explode
    made = request(Snapshot(TokenIds.EMPTY), prompt, 3)
    core.submit(made)
    core.step()
    runner.after_step = lambda batch: None
    assert isinstance(made.outcome, Failed)
    assert isinstance(made.outcome.error, StepError)
    core.check()
    again = request(Snapshot(TokenIds.EMPTY), prompt, 3)
    core.submit(again)
    run(core)
    assert again.output_ids == witness_reply(prompt, 3)
    assert finished(again).usage.cached_tokens == 0


def test_nan_logits_fail_their_row_alone() -> None:
    core, runner = make_core()
    bad = request(Snapshot(TokenIds.EMPTY), ids_of(1, 9), 5)
    good = request(Snapshot(TokenIds.EMPTY), ids_of(2, 9), 5)
    core.submit(bad)
    core.submit(good)
    runner.nan_rows = {1}
    run(core)
    assert isinstance(bad.outcome, Failed)
    assert good.output_ids == witness_reply(ids_of(2, 9), 5)


def test_a_stopped_request_keeps_what_was_sampled() -> None:
    core, _ = make_core()
    made = request(Snapshot(TokenIds.EMPTY), ids_of(3, 10), 50)
    core.submit(made)
    for _ in range(4):
        core.step()
    core.stop(made)
    core.step()
    end = finished(made)
    assert end.finish_reason == "stopped"
    assert end.snapshot is not None
    more = request(end.snapshot, [], 5)
    core.submit(more)
    run(core)
    assert made.output_ids + more.output_ids == witness_reply(
        ids_of(3, 10), len(made.output_ids) + 5
    )


def test_decodes_run_in_every_step_of_a_long_prefill() -> None:
    core, runner = make_core(num_blocks=400, budget=80)
    quick = request(Snapshot(TokenIds.EMPTY), ids_of(1, 5), 30)
    core.submit(quick)
    core.step()
    core.submit(request(Snapshot(TokenIds.EMPTY), ids_of(2, 900), 2))
    before = len(runner.batches)
    run(core)
    for batch in runner.batches[before : before + 10]:
        assert len(batch.rows) == 2
        assert batch.num_tokens >= 64


def test_a_higher_priority_is_served_first() -> None:
    core, _ = make_core(num_blocks=400, budget=80)
    low = request(Snapshot(TokenIds.EMPTY), ids_of(1, 300), 2)
    high = request(Snapshot(TokenIds.EMPTY), ids_of(2, 300), 2, priority=5)
    core.submit(low)
    core.submit(high)
    while high.outcome is None:
        core.step()
    assert low.outcome is None
