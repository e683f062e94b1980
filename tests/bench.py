"""An open engine on the witness model, as the tests of sessions share it."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from agentkv import Engine, EngineConfig, Session
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner, witness_reply

__all__ = ["Bench", "expected", "from_thread", "make"]


class Bench:
    """An open engine on a witness whose hooks the test sets."""

    def __init__(self, engine: Engine, runner: WitnessRunner) -> None:
        self.engine = engine
        self.runner = runner

    async def settle(self) -> None:
        """Wait until everything posted before has been applied."""
        await self.engine.tree()
        await self.engine.tree()


def make(num_blocks: int = 512, **config: object) -> tuple[Engine, WitnessRunner]:
    runner = WitnessRunner(num_blocks=num_blocks, tokenizer=byte_tokenizer())
    settings = EngineConfig(debug=True, **config)  # type: ignore[arg-type]  # fields by name
    return Engine(lambda _: runner, config=settings), runner


def expected(session: Session, count: int) -> list[int]:
    """What the witness adds to the session's ids."""
    ids = session.token_ids
    return witness_reply(ids[:-count], count)


def from_thread() -> Callable[[Callable[[], None]], None]:
    """A function that runs another on this loop, from any thread."""
    token = anyio.lowlevel.current_token().native_token
    if hasattr(token, "run_sync_soon"):
        return token.run_sync_soon  # type: ignore[no-any-return]  # a TrioToken
    return token.call_soon_threadsafe  # type: ignore[attr-defined,no-any-return]  # an event loop
