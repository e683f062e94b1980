"""Every example runs as it stands, on the witness model, and shows what it says."""

from __future__ import annotations

import gc
import importlib
import re
from pathlib import Path

import pytest

from agentkv import Engine
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner
from tests.bench import Gate

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each prints, replies aside.
SHOWN = {
    "quickstart": r"witness: 1 sessions hold (\d+) blocks, not \1\n",
    "fan_out": r"Oslo: .*computed 142 of 334 prompt tokens\n",
    "best_of_n": r".+\n",
    "debate": r"trains: .*cars: .*trains: .*cars: .*",
    "cancel_and_timeout": r"timed out\nunchanged: True\n.+\n",
}
ON_ASYNCIO = {"starlette_app": r"heard '.+' and left\n1 message: the turn never happened\n"}


def test_every_example_is_short_and_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SHOWN.keys() | ON_ASYNCIO.keys()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60


@pytest.mark.anyio
@pytest.mark.parametrize("name", SHOWN)
async def test_example_shows_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    await run(name)
    assert re.search(SHOWN[name], capsys.readouterr().out, re.DOTALL)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # uvicorn, its server, knows no other
@pytest.mark.parametrize("name", ON_ASYNCIO)
async def test_served_example_shows_what_it_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The reply cannot be whole before the client has left.
    await run(name, after_steps=30)
    assert re.search(ON_ASYNCIO[name], capsys.readouterr().out, re.DOTALL)


async def run(name: str, *, after_steps: int = 1_000_000) -> None:
    """Run an example; steps after so many wait for its end, and no session may be left then."""
    module = importlib.import_module(f"examples.{name}")
    tokenizer = byte_tokenizer()
    runner = WitnessRunner(num_blocks=512, vocab_size=tokenizer.vocab_size, max_context=4096)
    gate = Gate(runner, after_steps=after_steps)
    async with Engine(lambda config: runner, tokenizer=tokenizer) as engine:
        await module.main(engine)
        gate.open()
        gc.collect()
        assert "0 sessions" in await engine.tree()
