"""A fork answers as a fresh session would, and what is shared is computed and stored once."""

from __future__ import annotations

import random
import sys

import anyio
import pytest
import torch

from agentkv import Completion, Engine, EngineConfig, Session
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.proof.models import choices
from agentkv.testing.tiny_models import tiny_model
from agentkv.testing.witness import WitnessRunner, witness_reply

pytestmark = pytest.mark.anyio

NUM_HISTORIES = 200
BLOCK_SIZE = 16


class History:
    """A random family of sessions: turns alone and together, forks of forks, closes.

    The first fork is taken when the conversation has `offset` tokens more than whole blocks.
    """

    def __init__(self, engine: Engine, seed: int, vocab_size: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        self.namespace = f"history {seed}"
        self.offset = seed % BLOCK_SIZE
        self.live: list[Session] = []
        self.turns: list[tuple[tuple[int, ...], int]] = []

    async def run(self) -> None:
        """The whole history; `turns` then has what each session held after each turn."""
        root = self.engine.session(
            messages=self.ids(BLOCK_SIZE * self.random.randint(0, 3) + self.offset + 1),
            namespace=self.namespace,
        )
        await root.generate(max_tokens=BLOCK_SIZE - 1, temperature=0, ignore_eos=True)
        assert len(root.token_ids) % BLOCK_SIZE == self.offset
        self.live = [root]
        self.fork(root)
        for _ in range(self.random.randint(2, 5)):
            await self.random.choice((self.together, self.while_one_runs, self.one_closes))()
        for session in self.live:
            await session.aclose()

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(count)]

    def fork(self, session: Session) -> Session:
        self.live.append(session.fork())
        assert self.live[-1].token_ids == session.token_ids
        return self.live[-1]

    async def together(self) -> None:
        """Every session forks or not, and then all take a turn at once."""
        for session in list(self.live):
            if len(self.live) < 6 and self.random.random() < 0.5:
                self.fork(session)
        before = self.engine.stats().prefill_tokens
        replies: list[Completion] = []
        async with anyio.create_task_group() as group:
            for session in self.live:
                group.start_soon(self.turn, session, replies)
        computed = sum(reply.usage.prefill_tokens for reply in replies)
        assert self.engine.stats().prefill_tokens - before == computed

    async def while_one_runs(self) -> None:
        """A session forks, and its fork takes a turn, while it runs itself."""
        session = self.random.choice(self.live)
        held, keeps = session.token_ids, self.random.random() < 0.5
        async with session.stream(
            self.ids(3), max_tokens=12, temperature=0, ignore_eos=True
        ) as stream:
            await anext(stream)
            fork = self.fork(session)
            assert fork.token_ids == held
            await self.turn(fork, [])
            if keeps:
                done = await stream.result()
                self.turns.append((session.token_ids, len(done.token_ids)))
        assert (session.token_ids == held) is not keeps

    async def one_closes(self) -> None:
        if len(self.live) > 1:
            await self.live.pop(self.random.randrange(len(self.live))).aclose()

    async def turn(self, session: Session, replies: list[Completion]) -> None:
        """One turn, which computes only what it appends.

        The last stored id has no KV yet, unless another session filled that very block since.
        """
        stored, new = len(session.token_ids), self.ids(self.random.randint(1, 5))
        most = self.random.randint(1, 8)
        reply = await session.generate(new, max_tokens=most, temperature=0, ignore_eos=True)
        assert reply.usage.prefill_tokens in (len(new), len(new) + 1)
        assert reply.usage.cached_tokens + reply.usage.prefill_tokens == stored + len(new)
        replies.append(reply)
        self.turns.append((session.token_ids, len(reply.token_ids)))


async def fresh_replies(engine: Engine, history: History) -> list[tuple[int, ...]]:
    """What a session that shares nothing says to the ids before each turn's reply."""
    replies: dict[int, tuple[int, ...]] = {}

    async def ask(index: int, ids: tuple[int, ...], count: int) -> None:
        async with engine.session(messages=ids[:-count], namespace=f"fresh {index}") as fresh:
            replies[index] = (
                await fresh.generate(max_tokens=count, temperature=0, ignore_eos=True)
            ).token_ids

    async with anyio.create_task_group() as group:
        for index, (ids, count) in enumerate(history.turns):
            group.start_soon(ask, index, ids, count)
    return [replies[index] for index in range(len(history.turns))]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_forks_answer_as_fresh_sessions_in_200_random_histories() -> None:
    offsets, turns = set(), 0
    runner = WitnessRunner(num_blocks=2048, block_size=BLOCK_SIZE, keep_batches=False)
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        for seed in range(NUM_HISTORIES):
            history = History(engine, seed, 260)
            await history.run()
            for ids, count in history.turns:
                assert witness_reply(ids[:-count], count) == list(ids[-count:]), f"seed {seed}"
            fresh = await fresh_replies(engine, history)
            assert fresh == [ids[-count:] for ids, count in history.turns], f"seed {seed}"
            offsets.add(history.offset)
            turns += len(history.turns)
        await engine.tree()
        assert engine.stats().used_blocks == 0
    assert offsets == set(range(BLOCK_SIZE))
    assert turns > 5 * NUM_HISTORIES


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_forks_of_a_real_model_answer_as_fresh_sessions_in_200_histories() -> None:
    model = tiny_model("llama")
    engine = Engine.from_pretrained(model, tokenizer=byte_tokenizer(), num_blocks=1024)
    compared = excluded = 0
    async with engine:
        for seed in range(NUM_HISTORIES):
            history = History(engine, seed, 256)
            await history.run()
            fresh = await fresh_replies(engine, history)
            for (ids, count), said in zip(history.turns, fresh, strict=True):
                best, is_clear = choices(model, ids, count)
                assert (best == torch.tensor(ids[-count:]))[is_clear].all(), f"seed {seed}"
                num_free = int(is_clear.long().cumprod(0).sum())
                assert said[:num_free] == ids[-count:][:num_free], f"seed {seed}"
                compared, excluded = compared + count, excluded + int((~is_clear).sum())
    sys.stdout.write(f"{compared:,} tokens compared, {excluded} near ties excluded\n")
    assert excluded <= 0.005 * compared


@pytest.mark.parametrize("own_tokens", [1, 15, 16, 17, 40])
async def test_32_agents_hold_and_compute_a_system_prompt_of_2048_tokens_once(
    own_tokens: int,
) -> None:
    num_agents, num_shared, num_new = 32, 2048, 8
    runner = WitnessRunner(num_blocks=1024, block_size=BLOCK_SIZE)
    system = [index * 7 % 260 for index in range(num_shared)]
    async with Engine(lambda _: runner, config=EngineConfig(debug=True)) as engine:
        agents = [engine.session(system=system) for _ in range(num_agents)]

        async def ask(index: int) -> None:
            job = [index, *range(own_tokens - 1)]
            await agents[index].generate(job, max_tokens=num_new)

        async with anyio.create_task_group() as group:
            for index in range(num_agents):
                group.start_soon(ask, index)
        stats = engine.stats()
        assert stats.prefill_tokens == num_shared + num_agents * own_tokens
        own_blocks = -(-(own_tokens + num_new - 1) // BLOCK_SIZE)
        assert stats.used_blocks == num_shared // BLOCK_SIZE + num_agents * own_blocks
        for agent in agents:
            ids = agent.token_ids
            assert witness_reply(ids[:-num_new], num_new) == list(ids[-num_new:])
