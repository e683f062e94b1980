"""Scenarios: what programs do with sessions, each beside a neighbour at work.

However a scenario is disturbed, when it is over no block is lost, the neighbour has not changed,
and the sessions go on as if what did not return had never been.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio

from ...config import EngineConfig
from ...errors import EngineClosedError, SessionError, StepError
from ...session import Session, Status
from ..byte_tokenizer import byte_tokenizer
from ..deterministic import SteppedEngine, current_clock
from ..faults import FaultPlan, PlannedFault
from ..sweep import Driver
from ..witness import WitnessRunner, witness_reply, witness_score
from .held import Held

__all__ = ["SCENARIOS", "Scenario", "World", "play"]

LIMIT_S = 1e6
TOKENIZER = byte_tokenizer()
# Its last block is partly filled, so that forks copy it.
SYSTEM = [at % 251 for at in range(39)]


@dataclass
class World:
    """An engine with a neighbour at work, and the sessions that a scenario uses."""

    engine: SteppedEngine
    driver: Driver
    clock: Callable[[], float]
    held: list[Held] = field(default_factory=list)

    async def open(self) -> Held:
        """A warm session that is the scenario's to disturb."""
        one = Held(self.engine.session(messages=SYSTEM), pending=list(SYSTEM))
        await one.warm()
        self.held.append(one)
        return one

    async def disturbed(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        """Run these at once, each disturbed where the driver says."""
        async with anyio.create_task_group() as group:
            for coroutine in coroutines:
                group.start_soon(self._run, coroutine)

    async def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await self.driver.run(coroutine)
        except (PlannedFault, StepError, TimeoutError, SessionError, EngineClosedError):
            pass


Play = Callable[[World], Awaitable[None]]


class Scenario(NamedTuple):
    """A part that is played; `closes` says that the engine may be closed when it is over."""

    play: Play
    num_blocks: int = 256
    batch_tokens: int = 80
    closes: bool = False


# The scenarios.


async def generate(world: World) -> None:
    """A turn."""
    await world.disturbed((await world.open()).generate([1, 2, 3], 6))


async def talk(world: World) -> None:
    """Two turns of text with a stop string."""
    session = world.engine.session(system="Be brief.")
    done: list[str] = []

    async def turns() -> None:
        for prompt in ("one", "two"):
            reply = await session.generate(prompt, max_tokens=4, stop="never")
            done.extend((prompt, reply.text))

    await world.disturbed(turns())
    assert [message.content for message in session.messages] == ["Be brief.", *done]
    await _talk_on(world, session)


async def warm(world: World) -> None:
    """A session is warmed, then used."""
    one = Held(world.engine.session(messages=[*SYSTEM, 5]), pending=[*SYSTEM, 5])
    world.held.append(one)

    async def use() -> None:
        await one.warm()
        await one.generate([4], 2)

    await world.disturbed(use())


async def read(world: World) -> None:
    """A stream is read to its end."""
    await world.disturbed((await world.open()).stream([1, 2], 6))


async def leave(world: World) -> None:
    """A stream is left early."""
    await world.disturbed((await world.open()).stream([1, 2], 9, reads=2, ends="leave"))


async def stop(world: World) -> None:
    """A stream is stopped."""
    await world.disturbed((await world.open()).stream([1, 2], 30, reads=2, ends="stop"))


async def result(world: World) -> None:
    """A stream's result is awaited."""
    await world.disturbed((await world.open()).stream([1, 2], 5, reads=1, ends="result"))


async def samples(world: World) -> None:
    """Several samples of one prompt."""

    async def sample() -> None:
        done = await world.engine.generate(SYSTEM, n=3, max_tokens=4, temperature=1.0, seed=2)
        for at, each in enumerate(done.samples):
            assert list(each.token_ids) == witness_reply(SYSTEM, 4, key=(2, at))

    await world.disturbed(sample())


async def score(world: World) -> None:
    """Two texts are scored."""
    one = await world.open()

    async def scores() -> None:
        values = await one.session.score(["ab", "cde"])
        for text, value in zip(("ab", "cde"), values, strict=True):
            assert abs(value - witness_score(one.ids, text.encode())) < 1e-9

    await world.disturbed(scores())


async def fork(world: World) -> None:
    """A session is forked while it runs, and the fork runs too."""
    one = await world.open()

    async def branch_off() -> None:
        other = one.fork()
        world.held.append(other)
        await other.generate([8], 4)

    await world.disturbed(one.generate([1, 2, 3], 6), branch_off())


async def branches(world: World) -> None:
    """Branches answer at once, and one is adopted."""
    one = await world.open()

    async def choose() -> None:
        async with one.session.branches(3) as forks:
            own = [one.adopt(each) for each in forks]
            for at, each in enumerate(own):
                await each.generate([at], 3)
            one.take(own[1])

    await world.disturbed(choose())


async def roll_back(world: World) -> None:
    """A turn is taken back."""
    one = await world.open()

    async def regret() -> None:
        before = list(one.ids)
        async with one.session.checkpoint() as mark:
            await one.generate([6], 4)
            one.session.rollback(mark)
            one.ids = before
            await one.generate([7], 3)

    await world.disturbed(regret())


async def queue(world: World) -> None:
    """Calls queue for one session."""
    one = await world.open()
    await world.disturbed(*(one.generate([at], 3) for at in range(4)))


async def close_session(world: World) -> None:
    """A session is closed while it answers and others wait for it."""
    one = await world.open()
    world.held.remove(one)

    async def close() -> None:
        await anyio.sleep(0.02)
        await one.session.aclose()

    await world.disturbed(one.generate([1], 30), one.generate([2], 30), close())
    await one.session.aclose()


async def close_engine(world: World) -> None:
    """The engine is closed while it works."""
    one = await world.open()

    async def close() -> None:
        await anyio.sleep(0.02)
        await world.engine.aclose()

    await world.disturbed(one.generate([1], 30), close(), close())


async def squeeze(world: World) -> None:
    """Turns that do not all fit push each other out."""
    one = await world.open()
    forks = [one, *(one.fork() for _ in range(2))]
    world.held += forks[1:]
    await world.disturbed(*(each.generate([at], 13) for at, each in enumerate(forks)))
    is_calm = not world.driver.has_acted and not world.engine.plan.happened
    assert world.engine.stats().preemptions > 0 or not is_calm


async def long_text(world: World) -> None:
    """A text so long that it is encoded off the loop."""
    session = world.engine.session(namespace="long")

    async def ask() -> None:
        await session.generate("x" * 8100, max_tokens=2)

    await world.disturbed(ask())
    await _talk_on(world, session)


async def _talk_on(world: World, session: Session) -> None:
    """The next turn of a session with text is what its ids say."""
    world.engine.plan.calm()
    reply = await session.generate("and then?", max_tokens=4)
    ids = session.token_ids
    assert list(reply.token_ids) == list(ids[-4:]) == witness_reply(ids[:-4], 4)
    await session.aclose()


async def long_score(world: World) -> None:
    """Texts so long that they are encoded off the loop are scored."""
    one = await world.open()

    async def scores() -> None:
        (value,) = await one.session.score(["z" * 8001])
        assert abs(value - witness_score(one.ids, b"z" * 8001)) < 1e-6

    await world.disturbed(scores())


async def long_replies(world: World) -> None:
    """Replies that take so long to make text of that it is made off the loop."""
    session = world.engine.session(namespace="long")
    stops = [f"never said {at}" for at in range(64)]

    async def ask() -> None:
        await session.generate("x", max_tokens=32, stop=stops)
        async with session.stream("y", max_tokens=32, stop=stops) as stream:
            await stream.result()

    await world.disturbed(ask())
    await _talk_on(world, session)


async def wait_in_line(world: World) -> None:
    """A warming, a score and a stream wait for a turn of their session."""
    one = await world.open()

    async def first() -> None:
        with suppress(StepError, PlannedFault):
            await one.generate([1], 12)

    async def score() -> None:
        await one.session.score(["a"])

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        # By now the first call has the session, at the same moment of the loop's clock.
        await anyio.sleep(0.001)
        await world.disturbed(one.warm(), score(), one.stream([2], 3))


async def open_engine(world: World) -> None:
    """An engine is opened and used once."""
    runner = WitnessRunner(tokenizer=TOKENIZER)
    other = SteppedEngine(runner, world.engine.rng)
    other.on_tick = world.driver.tick

    async def use() -> None:
        async with other:
            await other.generate([1, 2], max_tokens=2)

    await world.disturbed(use())
    # Its thread ends when it has applied what was posted.
    await anyio.sleep(1)
    assert runner.is_closed


async def tree(world: World) -> None:
    """The picture of the sessions is drawn while they work."""
    one = await world.open()

    async def draw() -> None:
        for _ in range(3):
            await world.engine.tree()

    await world.disturbed(one.generate([1], 6), draw())


SCENARIOS: dict[str, Scenario] = {
    part.__name__: Scenario(part)
    for part in (
        *(generate, talk, warm, read, leave, stop, result, samples, score, fork, branches),
        *(roll_back, queue, close_session, tree, wait_in_line, open_engine),
    )
} | {
    "close_engine": Scenario(close_engine, closes=True),
    "squeeze": Scenario(squeeze, num_blocks=20),
    "long_text": Scenario(long_text, num_blocks=2100, batch_tokens=9000),
    "long_replies": Scenario(long_replies),
    "long_score": Scenario(long_score, num_blocks=2100, batch_tokens=9000),
}


async def play(
    scenario: Scenario,
    driver: Driver,
    plan: FaultPlan,
    rng: random.Random,
    *,
    prepare: Callable[[World], None] | None = None,
    may_fail: bool = False,
) -> None:
    """Play a scenario under a plan and a driver, then verify that everything is as it must be.

    `prepare` sees the world before; `may_fail` says that the faults explain failing calls.
    """
    runner = WitnessRunner(
        num_blocks=scenario.num_blocks,
        block_size=4,
        tokenizer=TOKENIZER,
        keep_batches=False,
    )
    config = EngineConfig(debug=True, max_num_seqs=16, max_batch_tokens=scenario.batch_tokens)
    engine = SteppedEngine(runner, rng, plan, config=config)
    engine.on_tick = driver.tick
    world = World(engine, driver, current_clock())
    if prepare is not None:
        prepare(world)
    failures = (StepError, PlannedFault) if may_fail else ()
    with anyio.fail_after(LIMIT_S):
        async with engine:
            neighbour = Held(engine.session(messages=SYSTEM), pending=list(SYSTEM))
            async with anyio.create_task_group() as group:
                group.start_soon(_go_on, neighbour, scenario, failures)
                with suppress(*failures):
                    await scenario.play(world)
            plan.calm()
            for one in world.held:
                one.verify()
            if not scenario.closes:
                await _settle(engine, [neighbour, *world.held])
    assert not engine.stats().used_blocks, "a closed engine holds blocks"


async def _go_on(
    neighbour: Held, scenario: Scenario, failures: tuple[type[Exception], ...]
) -> None:
    with suppress(*failures, *((EngineClosedError,) if scenario.closes else ())):
        await neighbour.generate([3, 3], 20)
    neighbour.verify()


async def _settle(engine: SteppedEngine, held: list[Held]) -> None:
    """Each session's next turn is right, and once they are closed nothing is left."""
    for one in held:
        assert one.session.status is Status.IDLE, f"{one.session} is not idle"
        await one.generate([9], 3)
        one.verify()
        await one.session.aclose()
    # Twice: the loop may hold what was dropped last until this task has given way.
    for _ in range(2):
        await engine.tree()
    stats = engine.stats()
    assert stats.running == stats.waiting == 0, "requests are left"
    assert stats.used_blocks == stats.logical_tokens == 0, "blocks are held by nobody"
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks, "blocks are lost"
