"""Every example runs as it stands, on the witness model."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import pytest

from agentkv import Engine
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
async def test_example_runs_and_leaves_no_session(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = byte_tokenizer()
    runner = WitnessRunner(num_blocks=512, vocab_size=tokenizer.vocab_size, max_context=4096)
    async with Engine(lambda config: runner, tokenizer=tokenizer) as engine:
        await module.main(engine)
        gc.collect()
        assert "0 sessions" in await engine.tree()
    assert capsys.readouterr().out.strip()
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
