"""Try several replies on branches of one session and keep the likeliest."""

from __future__ import annotations

import statistics

import anyio

from agentkv import Completion, Engine, Session


async def main(engine: Engine) -> None:
    """Adopt the branch whose reply has the best mean log-probability."""
    replies: dict[str, Completion] = {}

    async def answer(branch: Session) -> None:
        replies[branch.id] = await branch.generate(
            "A name for a cat?", max_tokens=16, temperature=0.9, logprobs=True
        )

    def quality(branch: Session) -> float:
        return statistics.fmean(entry.logprob for entry in replies[branch.id].logprobs or ())

    async with engine.session(system="Be inventive.") as session:
        async with session.branches(4) as branches:
            async with anyio.create_task_group() as group:
                for branch in branches:
                    group.start_soon(answer, branch)
            session.adopt(max(branches, key=quality))
        print(session.messages[-1].content)


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
