"""Who may import whom inside the project, read from the sources; and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentkv

ROOT = Path(agentkv.__file__).parent
SHELL = {"worker", "text", "messages", "config", "errors", "handle"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "handle": set(),
    "messages": {"errors"},
    "config": {"errors"},
    "kv": {"errors"},
    "core": {"kv", "config", "errors", "messages"},
    "text": {"core.protocols", "core.batch", "messages", "config", "errors"},
    "model": {
        "core.batch",
        "core.protocols",
        "text.backend",
        "text.tokenizer",
        "config",
        "errors",
    },
    "call": {"core"},
    "worker": {"call", "core", "config", "errors", "messages"},
    "turn": SHELL,
    "prompt": SHELL | {"turn"},
    "checkpoint": SHELL | {"turn"},
    "stream": SHELL | {"turn"},
    "session": SHELL | {"checkpoint", "prompt", "stream", "turn"},
    "tree": SHELL | {"session", "turn"},
    "engine": SHELL | {"prompt", "session", "stream", "turn", "tree", "model"},
}
# These serve everybody outside the layers.
FREE = {"cli", "demo", "testing", "__init__", "py"}


def layer_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, in functions too, without the package's name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("agentkv."), f"{path}: import relatively"
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [alias.name for alias in node.names]
            module = [*base, *(node.module.split(".") if node.module else [])]
            yield from (
                [".".join([*module, name]) for name in names]
                if len(module) <= 1 and not node.module
                else [".".join(module)]
            )


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_a_module_imports_only_the_layers_below_it(path: Path) -> None:
    layer = layer_of(path)
    if layer in FREE:
        return
    for module in imported(path):
        parts = module.split(".")
        names = {parts[0], ".".join(parts[:2])}
        assert parts[0] == layer or names & ALLOWED[layer], f"{path.name} imports {module}"


def test_kernels_know_nothing_of_the_engine() -> None:
    import agentkv_kernels

    for path in Path(agentkv_kernels.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "agentkv" for name in names), path.name


@pytest.mark.parametrize("module", ["agentkv", "agentkv.testing.witness", "agentkv.text.tokenizer"])
def test_importing_the_sdk_imports_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("model", "said"), [("./absent", "exists"), ("absent.gguf", "no model"), (".", "no config")]
)
def test_a_model_that_is_not_there_is_refused_without_torch(
    model: str, said: str, tmp_path: Path
) -> None:
    code = f"""
import sys, anyio, agentkv

async def main():
    try:
        await agentkv.Engine.from_pretrained({model!r}).__aenter__()
    except agentkv.ModelError as error:
        return {said!r} in str(error)

sys.exit(not anyio.run(main) or "torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0
