"""A session is an actor: it remembers, it streams, and it forks without copying its KV."""

from __future__ import annotations

import anyio

from agentkv import Engine


async def main(engine: Engine) -> None:
    """Ask, fork, and stream from the fork."""
    async with engine.session(system="You are a brief assistant.") as session:
        reply = await session.generate("Name a sea.", max_tokens=24)
        print(reply.text)
        async with session.fork(name="again") as fork, fork.stream("Another?", max_tokens=24) as s:
            async for delta in s:
                print(delta.text, end="", flush=True)
        print()
        print(await engine.tree())


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
