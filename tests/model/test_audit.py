"""What the interpreter's own audit sees while a model of a stranger is opened and served."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.testing.tiny_files import save_folder, save_gguf
from agentkv.testing.tiny_models import tiny_model

PROGRAM = """
import json, sys
import anyio
import torch, transformers
from agentkv import Engine

WATCHED = ("pickle.", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto",
           "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "urllib.")
seen, imports = set(), set()

def audit(event, arguments):
    if event.startswith(WATCHED):
        seen.add((event, str(arguments)[:200]))

async def main(path):
    engine = Engine.from_pretrained(path, device="cpu", block_size=4, num_blocks=64)
    async with engine:
        session = await engine.session(system="be brief")
        async with session.branches(2) as branches:
            for branch in branches:
                await branch.generate("hello <|im_end|>", max_tokens=3)
        await session.score(["x"])

sys.addaudithook(audit)
for path in sys.argv[1:]:
    anyio.run(main, path)
print("SEEN", json.dumps(sorted(seen)))
"""


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("unpickled",))


@pytest.mark.slow
def test_serving_a_model_unpickles_nothing_and_opens_no_connection(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    folder, file = save_folder(model, tmp_path), save_gguf(model, tmp_path / "m.gguf")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    command = [sys.executable, "-c", PROGRAM, str(folder), str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "unpickled" not in run.stdout
    assert json.loads(run.stdout.partition("SEEN ")[2]) == []
