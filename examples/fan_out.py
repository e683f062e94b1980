"""Many agents over one system prompt: it is computed and stored once."""

from __future__ import annotations

import anyio

from agentkv import Engine

CITIES = ("Oslo", "Lima", "Cairo", "Hanoi")


async def main(engine: Engine) -> None:
    """Answer one question per agent, all at once."""

    async def answer(city: str) -> None:
        async with engine.session(system="You know one fact about every city.", name=city) as agent:
            reply = await agent.generate(f"Tell me about {city}.", max_tokens=24)
            print(f"{city}: {reply.text}")

    async with anyio.create_task_group() as group:
        for city in CITIES:
            group.start_soon(answer, city)
    stats = engine.stats()
    print(f"computed {stats.prefill_tokens} of {stats.prompt_tokens} prompt tokens")


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
