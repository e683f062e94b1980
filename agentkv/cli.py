"""The `agentkv` command: `agentkv demo` shows what sharing does on a real model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

import anyio
from rich.console import Console

from .demo import run_demo
from .errors import AgentKVError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="agentkv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"agentkv {version('agentkv')}")
    commands = parser.add_subparsers(required=True)
    demo = commands.add_parser("demo", help="agents over one system prompt, side by side")
    demo.add_argument("--agents", type=int, default=8, metavar="N", help="how many (8)")
    demo.add_argument(
        "--model",
        default=None,
        help="a directory, .gguf file or hub id; without it, SmolLM2-135M-Instruct",
    )
    demo.add_argument("--max-tokens", type=int, default=48, metavar="N", help="per reply (48)")
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.agents <= 256:
        parser.error("--agents must be from 1 to 256")
    if chosen.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")
    console = Console()
    try:
        anyio.run(run_demo, console, chosen.agents, chosen.model, chosen.max_tokens)
    except AgentKVError as error:
        Console(stderr=True).print(f"agentkv: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
