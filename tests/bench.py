"""An open engine on the witness model, as the tests of sessions share it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio

from agentkv import Engine, EngineConfig, Session
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner, witness_reply

__all__ = ["Bench", "Gate", "expected", "from_thread", "make"]


class Bench:
    """An open engine on a witness whose hooks the test sets."""

    def __init__(self, engine: Engine, runner: WitnessRunner) -> None:
        self.engine = engine
        self.runner = runner

    async def settle(self) -> None:
        """Wait until everything posted before has been applied."""
        await self.engine.tree()
        await self.engine.tree()


class Gate:
    """Lets `after_steps` more steps of a runner run, and holds the next until it is opened."""

    def __init__(self, runner: WitnessRunner, *, after_steps: int = 0) -> None:
        self._open = threading.Event()
        self._left = after_steps
        runner.before_step = lambda batch: self._wait()

    def open(self) -> None:
        """Let every step run."""
        self._open.set()

    def _wait(self) -> None:
        self._left -= 1
        assert self._left >= 0 or self._open.wait(20), "nobody opened the gate"


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
