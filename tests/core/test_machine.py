"""A machine that does anything to a core, in any order, against plain lists that share nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from agentkv.config import SamplingOptions
from agentkv.core.batch import Batch
from agentkv.core.sequence import Failed, Finished, RequestKind, Snapshot
from agentkv.errors import ContextLengthError, RequestError, StepError
from agentkv.testing.driver import CoreDriver, Turn

TOKENS = st.integers(0, 3)
NEW_IDS = st.lists(TOKENS, max_size=14)


class Machine(RuleBasedStateMachine):
    """Turns on live snapshots, in a pool so small that everything happens."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []
        self.live: list[Snapshot] = []

    @initialize(
        num_blocks=st.sampled_from([2, 3, 8, 13]),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        prefix_cache=st.booleans(),
        hash_value=st.sampled_from([None, 1]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
    )
    def open(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        hash_value: int | None,
        max_num_seqs: int,
    ) -> None:
        def constant(key: Any) -> int:  # Any: a tuple of hashable parts
            return 1

        self.driver = CoreDriver(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=4,
            prefix_cache=prefix_cache,
            hash_fn=hash if hash_value is None else constant,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_num_seqs + 64,
        )

    @rule(data=st.data(), new_ids=NEW_IDS, count=st.integers(1, 9), priority=st.integers(0, 2))
    def submit(self, data: st.DataObject, new_ids: list[int], count: int, priority: int) -> None:
        base = data.draw(st.sampled_from([None, *self.live]))
        kept = 0 if base is None else len(base.ids)
        keep = data.draw(st.one_of(st.just(kept), st.integers(0, kept)))
        kinds: list[RequestKind] = ["generate", "generate", "generate", "warm", "score"]
        kind = data.draw(st.sampled_from(kinds))
        namespace = data.draw(st.sampled_from([None, "a"])) if base is None else base.namespace
        stops = data.draw(st.sampled_from([frozenset[int](), frozenset({0})]))
        options = SamplingOptions(
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            min_tokens=data.draw(st.integers(0, 3)),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([None, 1.5])),
        )
        try:
            turn = self.driver.submit(
                base,
                new_ids,
                keep=keep,
                kind=kind,
                count=count,
                priority=priority,
                options=options,
                namespace=namespace,
                stop_token_ids=stops,
                key=(3, count),
                score_ids=new_ids if kind == "score" else (),
            )
        except ContextLengthError:
            assert keep + 2 * len(new_ids) + count > self.driver.capacity
        except RequestError:
            assert not keep + len(new_ids)
        else:
            self.turns.append(turn)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()
            self.collect()

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        turn = self.turns.pop(data.draw(st.integers(0, len(self.turns) - 1)))
        self.driver.core.cancel(turn.request)
        self.driver.core.cancel(turn.request)
        self.driver.check()
        assert turn.request.outcome is None

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        turn = self.turns[data.draw(st.integers(0, len(self.turns) - 1))]
        if turn.request.kind == "generate":
            self.driver.core.stop(turn.request)
            assert turn.finished.finish_reason == "stopped"
            self.collect()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        snapshot = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.driver.core.release(snapshot)
        self.driver.core.release(snapshot)
        self.driver.check()

    @rule(when=st.sampled_from(["before_step", "after_copy", "after_write", "after_step"]))
    def step_that_fails(self, when: str) -> None:
        runner = self.driver.runner

        def explode(batch: Batch) -> None:
            raise RuntimeError("on purpose")

        setattr(runner, when, explode)
        self.driver.step()
        setattr(runner, when, lambda batch: None)
        self.collect(may_fail=True)
        # Two failing steps in a row would end the engine.
        self.driver.core._has_failed = False

    @precondition(lambda self: self.turns)
    @rule()
    def step_with_nan(self) -> None:
        self.driver.runner.nan_rows = set(range(0, 1000, 2))
        self.driver.step()
        self.driver.runner.nan_rows = set()
        self.collect(may_fail=True)

    def collect(self, *, may_fail: bool = False) -> None:
        for turn in list(self.turns):
            outcome = turn.request.outcome
            if isinstance(outcome, Finished):
                self.driver.verify(turn)
                if outcome.snapshot is not None:
                    self.live.append(outcome.snapshot)
            elif isinstance(outcome, Failed):
                assert may_fail, outcome.error
                assert isinstance(outcome.error, StepError)
            else:
                reply = turn.request.output_ids
                if reply:
                    assert reply == self.driver.expected(turn)[: len(reply)]
                continue
            self.turns.remove(turn)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.collect()
            assert not self.turns
            self.driver.verify_idle(self.live)


@pytest.mark.slow
class TestMachine(Machine.TestCase):  # type: ignore[misc,valid-type]  # made at run time
    settings = settings(
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
