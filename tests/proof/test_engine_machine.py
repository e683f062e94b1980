"""A machine that does anything to an engine's sessions, in any order, against plain lists."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from agentkv import (
    CapacityError,
    Checkpoint,
    EngineConfig,
    SessionBusyError,
    SessionClosedError,
    SessionError,
    Status,
    StepError,
)
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.deterministic import DeterministicLoop, SteppedEngine
from agentkv.testing.faults import FaultPlan, FaultPoint, PlannedFault
from agentkv.testing.proof.held import Ending, Held
from agentkv.testing.witness import WitnessRunner, witness_reply, witness_score

T = TypeVar("T")
TOKENIZER = byte_tokenizer()
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=9)
COUNTS = st.integers(1, 7)
STEP_POINTS: list[FaultPoint] = ["copy", "forward.during", "forward.after", "results.short"]
POINTS: list[FaultPoint] = [*STEP_POINTS, "allocate", "logits.nan", "preempt", "evict"]


def pick(data: st.DataObject, among: Sequence[T]) -> T:
    # Drawn by its index: what is drawn itself is kept for the report.
    return among[data.draw(st.integers(0, len(among) - 1))]


class Machine(RuleBasedStateMachine):
    """Sessions, calls under way and checkpoints; the loop runs only while a rule lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.calls: list[tuple[Held | None, asyncio.Task[None]]] = []
        self.marks: list[tuple[Held, Checkpoint, list[int], list[int]]] = []
        self.num_failing = 0

    @initialize(
        seed=st.integers(0, 999),
        num_blocks=st.sampled_from([12, 24, 100]),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        hash_values=st.sampled_from([None, 1]),
        prefix_cache=st.booleans(),
    )
    def open(
        self,
        seed: int,
        num_blocks: int,
        block_size: int,
        hash_values: int | None,
        prefix_cache: bool,
    ) -> None:
        runner = WitnessRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            tokenizer=TOKENIZER,
            keep_batches=False,
        )
        self.plan = FaultPlan(shuffle=seed, hash_values=hash_values)
        config = EngineConfig(
            debug=True, max_num_seqs=6, max_batch_tokens=70, prefix_cache=prefix_cache
        )
        self.engine = SteppedEngine(runner, random.Random(seed), self.plan, config=config)
        self.loop = asyncio.Runner(loop_factory=partial(DeterministicLoop, seed))
        self.do(self.engine.__aenter__())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:  # Any: whatever the work gives
        return self.loop.run(work)

    def start(self, one: Held | None, work: Callable[[], Awaitable[None]]) -> None:
        """Begin a call that may end in any way that a fault or a limit explains."""

        async def call() -> None:
            with suppress(StepError, PlannedFault, CapacityError, SessionError):
                await work()

        self.calls.append((one, self.loop.get_loop().create_task(call())))

    def is_busy(self, one: Held) -> bool:
        return any(other is one and not task.done() for other, task in self.calls)

    # Calls.

    @rule(ids=st.lists(st.integers(0, 3), max_size=20), namespace=st.sampled_from([None, "a"]))
    def open_session(self, ids: list[int], namespace: str | None) -> None:
        async def make() -> None:
            with suppress(CapacityError):
                session = self.engine.session(messages=[7, 7, 7, *ids], namespace=namespace)
                self.held.append(Held(session, pending=[7, 7, 7, *ids]))

        self.do(make())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ids=IDS, count=COUNTS, seed=st.sampled_from([None, 4]))
    def generate(self, data: st.DataObject, ids: list[int], count: int, seed: int | None) -> None:
        one = pick(data, self.held)
        self.start(one, partial(one.generate, ids, count, seed=seed))

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        ids=IDS,
        count=COUNTS,
        reads=st.integers(0, 3),
        ends=st.sampled_from(["read", "result", "stop", "leave"]),
    )
    def stream(
        self, data: st.DataObject, ids: list[int], count: int, reads: int, ends: Ending
    ) -> None:
        one = pick(data, self.held)
        self.start(one, partial(one.stream, ids, count, reads=reads, ends=ends))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def warm(self, data: st.DataObject) -> None:
        one = pick(data, self.held)
        self.start(one, one.warm)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        one = pick(data, self.held)

        async def scores() -> None:
            (value,) = await one.session.score(["ab"])
            assert abs(value - witness_score(one.known, b"ab")) < 1e-9

        self.start(one, scores)

    @rule(ids=IDS, n=st.integers(1, 3))
    def sample(self, ids: list[int], n: int) -> None:
        async def samples() -> None:
            done = await self.engine.generate(ids, n=n, max_tokens=4, temperature=1.0, seed=9)
            for at, each in enumerate(done.samples or (done,)):
                assert list(each.token_ids) == witness_reply(ids, 4, key=(9, at))

        self.start(None, samples)

    @rule(duration=st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.3]))
    def wait(self, duration: float) -> None:
        self.do(asyncio.sleep(duration))
        self.collect()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        _, task = pick(data, self.calls)
        task.cancel()

    # Handles.

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one = pick(data, self.held)

        async def fork() -> None:
            self.held.append(one.fork())

        self.do(fork())

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        one, other = pick(data, self.held), pick(data, self.held)

        async def adopt() -> None:
            idle = Status.IDLE
            if one is other or one.session.status is not idle or other.session.status is not idle:
                return
            with suppress(SessionError):
                one.take(other)
                self.held.remove(other)

        self.do(adopt())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        one = pick(data, self.held)

        async def mark() -> None:
            self.marks.append((one, one.session.checkpoint(), list(one.ids), list(one.pending)))

        self.do(mark())

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        one, checkpoint, ids, pending = pick(data, self.marks)

        async def roll_back() -> None:
            if one.session.status is Status.CLOSED:
                return
            try:
                one.session.rollback(checkpoint)
                one.ids, one.pending = list(ids), list(pending)
            except SessionBusyError:
                assert self.is_busy(one)

        self.do(roll_back())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        one = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.do(one.session.aclose())
        with pytest.raises(SessionClosedError):
            self.do(one.session.generate([1], max_tokens=1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        one = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.marks = [mark for mark in self.marks if mark[0] is not one]

    @rule(point=st.sampled_from(POINTS))
    def fail(self, point: FaultPoint) -> None:
        if point not in STEP_POINTS:
            self.plan.fail(point, at=self.plan.passed[point] + 1)
        elif self.num_failing == sum(name in STEP_POINTS for name, _ in self.plan.happened):
            # Two failing steps in a row would end the engine: one goes well between them.
            self.num_failing += 1
            self.plan.fail(point, at=self.plan.passed[point] + 2)

    # What always holds.

    def collect(self) -> None:
        for _, task in self.calls:
            if task.done() and not task.cancelled():
                task.result()
        self.calls = [(one, task) for one, task in self.calls if not task.done()]

    @invariant()
    def every_session_holds_what_was_committed(self) -> None:
        for one in self.held:
            one.verify()

    @invariant()
    def no_block_is_lost(self) -> None:
        if hasattr(self, "engine"):
            stats = self.engine.stats()
            kept = stats.free_blocks + stats.cached_blocks + stats.quarantined_blocks
            assert kept + stats.used_blocks == stats.num_blocks
            assert stats.physical_tokens <= stats.used_blocks * stats.block_size

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.plan.calm()
            self.do(self.end())
            self.loop.close()

    async def end(self) -> None:
        """Everything under way ends, each session's next turn is right, and nothing is left."""
        await asyncio.gather(*(task for _, task in self.calls), return_exceptions=True)
        self.collect()
        for one in self.held:
            one.verify()
            with suppress(CapacityError):
                await one.generate([1], 2)
            await one.session.aclose()
        for _, checkpoint, _, _ in self.marks:
            await checkpoint.aclose()
        self.held, self.marks = [], []
        for _ in range(2):
            await self.engine.tree()
        stats = self.engine.stats()
        assert stats.running == stats.waiting == stats.used_blocks == stats.logical_tokens == 0
        await self.engine.aclose()


@pytest.mark.slow
class TestMachine(Machine.TestCase):  # type: ignore[misc,valid-type]  # made at run time
    settings = settings(
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
