"""One seed, one storm: agents that do anything to their sessions while the engine misbehaves.

Every session is held against a plain list of ids that shares nothing, with the witness as oracle.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import anyio

from ...config import EngineConfig
from ...errors import CapacityError, EngineClosedError, EngineDeadError, StepError
from ...session import Status
from ..byte_tokenizer import byte_tokenizer
from ..deterministic import Backend, SteppedEngine, simulate
from ..faults import FaultPlan, FaultPoint, PlannedFault
from ..witness import WitnessRunner, witness_reply, witness_score
from .held import Ending, Held

__all__ = ["Report", "Tally", "run_storm", "run_storms"]

# No storm lasts longer, in seconds of its own clock, unless something hangs.
LIMIT_S = 1e6
TOKENIZER = byte_tokenizer()
HARMLESS: tuple[FaultPoint, ...] = ("preempt", "evict", "allocate")
HARMFUL: tuple[FaultPoint, ...] = (
    "copy",
    "forward.before",
    "forward.during",
    "forward.after",
    "render",
    "encode",
    "detokenize",
    "logits.nan",
    "results.short",
    "results.token",
)


class Report(NamedTuple):
    """What a storm did: its operations in their order, and figures of the engine at its end."""

    trace: tuple[str, ...]
    commits: int
    steps: int
    preemptions: int
    faults: tuple[tuple[FaultPoint, int], ...]


class Tally(NamedTuple):
    """What many storms did together."""

    storms: int
    commits: int
    steps: int
    preemptions: int
    faults: int


def run_storms(seeds: Iterable[int], *, backend: Backend = "asyncio") -> Tally:
    """Run the storm of each seed."""
    reports = [run_storm(seed, backend=backend) for seed in seeds]
    return Tally(
        storms=len(reports),
        commits=sum(report.commits for report in reports),
        steps=sum(report.steps for report in reports),
        preemptions=sum(report.preemptions for report in reports),
        faults=sum(len(report.faults) for report in reports),
    )


def run_storm(seed: int, *, backend: Backend = "asyncio") -> Report:
    """Run the storm of a seed.

    Raises:
        AssertionError: a promise was broken; the message names the seed.
    """
    try:
        return simulate(_storm, seed, backend=backend)
    except BaseException as error:
        error.add_note(f"storm of seed {seed} on {backend}")
        raise


async def _storm(rng: random.Random) -> Report:
    plan = FaultPlan(
        shuffle=rng.choice((None, rng.randrange(99))), hash_values=rng.choice((None, 1, 2))
    )
    for point in rng.sample(HARMLESS, rng.randrange(3)):
        plan.fail(point, at=rng.randint(1, 30), count=rng.randint(1, 5))
    for point in rng.sample(HARMFUL, rng.choice((0, 1, 2, 4))):
        plan.fail(point, at=rng.randint(1, 25))
    runner = WitnessRunner(
        num_blocks=rng.choice((24, 40, 400)),
        block_size=rng.choice((1, 3, 4, 16)),
        tokenizer=TOKENIZER,
        keep_batches=False,
    )
    max_num_seqs = rng.choice((2, 5, 32))
    config = EngineConfig(
        debug=True,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_num_seqs + 64,
        prefix_cache=rng.random() < 0.8,
        share_attention=rng.random() < 0.8,
    )
    engine = SteppedEngine(runner, rng, plan, config=config)
    agents = [_Agent(engine, rng) for _ in range(rng.randint(1, 5))]
    closes_early = rng.random() < 0.2
    with anyio.fail_after(LIMIT_S):
        async with engine:
            async with anyio.create_task_group() as group:
                for agent in agents:
                    group.start_soon(agent.run, rng.randint(3, 12))
                if closes_early:
                    group.start_soon(_close_after, engine, 0.01 * rng.randrange(30))
            for agent in agents:
                agent.verify()
            plan.calm()
            if not closes_early and not any(agent.is_refused for agent in agents):
                # A second failing step in a row, for nobody who waits, may have ended the engine.
                with suppress(EngineDeadError):
                    await _settle(engine, agents, rng)
            stats = engine.stats()
        assert not engine.stats().used_blocks, "a closed engine holds blocks"
    return Report(
        trace=tuple(line for agent in agents for line in agent.trace),
        commits=sum(agent.num_commits for agent in agents),
        steps=stats.steps,
        preemptions=stats.preemptions,
        faults=tuple(plan.happened),
    )


async def _close_after(engine: SteppedEngine, delay: float) -> None:
    await anyio.sleep(delay)
    await engine.aclose()


async def _settle(engine: SteppedEngine, agents: list[_Agent], rng: random.Random) -> None:
    """Close every session in any order; nothing but cached blocks may be left."""
    held = [one for agent in agents for one in agent.held]
    rng.shuffle(held)
    for one in held:
        await one.session.aclose()
    for agent in agents:
        agent.held.clear()
    # Twice: the loop may hold what was dropped last until this task has given way.
    for _ in range(2):
        await engine.tree()
    stats = engine.stats()
    assert stats.running == stats.waiting == 0, "requests are left"
    assert stats.used_blocks == stats.logical_tokens == 0, "blocks are held by nobody"
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks, "blocks are lost"


class _Agent:
    """Does anything to its sessions, one thing at a time or several at once."""

    def __init__(self, engine: SteppedEngine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.held: list[Held] = []
        self.trace: list[str] = []
        self.num_commits = 0
        self.is_refused = False

    async def run(self, num_operations: int) -> None:
        operations: list[Callable[[], Awaitable[None]]] = [
            *(self.generate, self.generate, self.stream, self.queue, self.fork, self.roll_back),
            *(self.branch, self.score, self.sample, self.warm, self.passing, self.close, self.open),
        ]
        for _ in range(num_operations):
            operation = self.rng.choice(operations) if self.held else self.open
            try:
                await operation()
            except* (EngineClosedError, EngineDeadError):
                self.is_refused = True
            self.trace.append(f"{operation.__name__} {anyio.current_time():.3f} {self.num_commits}")
            self.verify()
            if self.is_refused:
                return

    def verify(self) -> None:
        for one in self.held:
            one.verify()

    # What an agent does.

    async def open(self) -> None:
        opening = self.rng.choice(([], list(range(40)), [7] * 13)) + self.ids(1, 20)
        namespace = self.rng.choice((None, None, "a"))
        try:
            session = self.engine.session(
                messages=opening, namespace=namespace, priority=self.rng.randrange(2)
            )
        except CapacityError:
            return
        self.held.append(Held(session, pending=opening))

    async def passing(self) -> None:
        """A turn on a fork that closes with its block."""
        one = self.pick()
        async with one.session.fork() as fork:
            await self.turn(one.adopt(fork))

    async def generate(self) -> None:
        await self.turn(self.pick())

    async def turn(self, one: Held) -> None:
        """A turn that may succeed, fail, time out or be cancelled."""
        new_ids, count, seed = self.ids(1, 12), self.rng.randint(1, 9), self.rng.choice((None, 5))
        with self.may_end_early():
            await one.generate(new_ids, count, seed=seed, timeout=self.patience())
            self.num_commits += 1

    async def stream(self) -> None:
        """A turn read as it comes, and read on, stopped, awaited or left at any point."""
        endings: list[Ending] = ["read", "result", "stop", "leave"]
        new_ids, reads, ends = self.ids(1, 12), self.rng.randrange(5), self.rng.choice(endings)
        with self.may_end_early():
            await self.pick().stream(new_ids, 9, reads=reads, ends=ends)
            self.num_commits += 1

    async def queue(self) -> None:
        """Several calls on one session at once: they run one at a time."""
        one = self.pick()
        async with anyio.create_task_group() as group:
            for _ in range(self.rng.randint(2, 4)):
                group.start_soon(self.turn, one)

    async def fork(self) -> None:
        self.held.append(self.pick().fork())

    async def roll_back(self) -> None:
        one = self.pick()
        ids, pending = one.ids, one.pending
        async with one.session.checkpoint() as mark:
            await self.turn(one)
            one.session.rollback(mark)
            one.ids, one.pending = ids, pending

    async def branch(self) -> None:
        one = self.pick()
        async with one.session.branches(self.rng.randint(1, 4)) as branches:
            own = [one.adopt(branch) for branch in branches]
            async with anyio.create_task_group() as group:
                for branch in own:
                    group.start_soon(self.turn, branch)
            for branch in own:
                branch.verify()
            one.take(self.rng.choice(own))

    async def score(self) -> None:
        one = self.pick()
        texts = ["ab", "c" * self.rng.choice((1, 30, 150))]
        with self.may_end_early():
            scores = await one.session.score(texts)
            for text, score in zip(texts, scores, strict=True):
                assert abs(score - witness_score(one.known, text.encode())) < 1e-9

    async def sample(self) -> None:
        most = min(4, self.engine._config.max_num_seqs)
        count, ids = self.rng.randint(1, most), self.ids(1, 40)
        with self.may_end_early():
            done = await self.engine.generate(ids, n=count, max_tokens=5, temperature=1.0, seed=3)
            for index, sample in enumerate(done.samples or (done,)):
                assert list(sample.token_ids) == witness_reply(ids, 5, key=(3, index))

    async def warm(self) -> None:
        one = self.pick()
        with self.may_end_early():
            await one.warm()

    async def close(self) -> None:
        one = self.held.pop(self.rng.randrange(len(self.held)))
        if self.rng.random() < 0.7:
            await one.session.aclose()
            assert one.session.status is Status.CLOSED

    # Choices.

    @contextmanager
    def may_end_early(self, patience: float | None = None) -> Iterator[None]:
        """What is inside may be cancelled, and may fail in a way that a fault or limit explains."""
        limit = patience if patience is not None else self.patience()
        try:
            with anyio.move_on_after(limit if limit is not None else LIMIT_S):
                yield
        except (StepError, PlannedFault) as error:
            if {point for point, _ in self.engine.plan.happened} <= {"preempt", "evict"}:
                raise AssertionError("no fault explains this") from error
        except (CapacityError, TimeoutError):
            pass

    def pick(self) -> Held:
        return self.rng.choice(self.held)

    def ids(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(4) for _ in range(self.rng.randint(low, high))]

    def patience(self) -> float | None:
        return self.rng.choice((None, None, None, 0.0, 0.01, 0.05, 0.2))
