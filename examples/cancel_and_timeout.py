"""A turn that is cancelled or runs out of time leaves its session as it was."""

from __future__ import annotations

import anyio

from agentkv import Engine


async def main(engine: Engine) -> None:
    """Cancel one turn, time another out, then go on as if neither had been."""
    async with engine.session(system="You are patient.") as session:
        await session
        before = session.token_ids
        with anyio.CancelScope() as scope:
            async with session.stream("Count to a thousand.", max_tokens=64) as stream:
                async for _ in stream:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
        try:
            await session.generate("Count to a thousand.", max_tokens=64, timeout=0.0)
        except TimeoutError:
            print("timed out")
        print("unchanged:", session.token_ids == before)
        print((await session.generate("Hello.", max_tokens=8)).text)


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
