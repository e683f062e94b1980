"""Two agents forked from one briefing talk to each other."""

from __future__ import annotations

import anyio

from agentkv import Engine


async def main(engine: Engine) -> None:
    """Brief once, fork twice, and let each answer what the other said."""
    async with engine.session(system="You debate in one sentence. Topic: trains or cars?") as brief:
        await brief
        async with brief.fork(name="trains") as left, brief.fork(name="cars") as right:
            said = "Open the debate. Each of you defends what your name says."
            for speaker in (left, right) * 2:
                reply = await speaker.generate(said, max_tokens=24)
                said = reply.text or "(silence)"
                print(f"{speaker.name}: {said}")


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
