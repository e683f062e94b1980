"""The Python of the README and of docs/ runs as it stands, without weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentkv import Engine
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.testing.witness import WitnessRunner

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = [
    pytest.param(page, snippet, id=f"{page.name}-{at}")
    for page in sorted((README.parent / "docs").glob("*.md"))
    for at, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.anyio
async def test_readme_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    tokenizer = byte_tokenizer()
    runner = WitnessRunner(num_blocks=512, vocab_size=tokenizer.vocab_size, max_context=4096)
    names: dict[str, Any] = {"__name__": "readme"}  # Any: what a snippet defines
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)
    async with Engine(lambda config: runner, tokenizer=tokenizer) as engine:
        await names["main"](engine)
    assert capsys.readouterr().out


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_docs_python_runs(page: Path, snippet: str) -> None:
    exec(compile(snippet, str(page), "exec"), {"__name__": "docs"})
