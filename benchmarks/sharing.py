"""What sharing saves on a real model: agents over one system prompt, shared and each on its own.

    python benchmarks/sharing.py [--model PATH] [--quick]

The same engine serves the same turns twice: in one namespace, where the agents share the system
prompt's KV blocks, and each in a namespace of its own, where nothing is shared. transformers'
own `generate`, one agent after the other, is the baseline outside. All answer greedily in float32,
and no figure is printed before the three have been compared.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import torch
from machine import RESULTS, speeds, write_report

from agentkv import Engine, EngineConfig, EngineStats, Session
from agentkv.model.loader import open_model

RULE = "Rule {}. Answer the member who asked, keep numbers exact, and name what you do not know. "
JOBS = ("plan a garden", "pack for a hike", "fix a bicycle", "bake bread", "tune a piano",
        "paint a fence", "read a map", "train a dog")  # fmt: skip
# Below this gap of the two best logits, rounding may choose.
MIN_GAP = 1e-3


@dataclass(frozen=True)
class Shape:
    """So many agents over a system prompt of so many tokens, and tokens in each reply."""

    agents: int
    system_tokens: int
    new_tokens: int


@dataclass
class Outcome:
    """What each agent's conversation holds after its turn, how long all took, and the figures."""

    token_ids: list[tuple[int, ...]]
    seconds: float
    stats: EngineStats | None = None


def system_prompt(engine: Engine, count: int) -> str:
    """House rules whose session opens with at least `count` tokens, and few more."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "the benchmark needs a model with a tokenizer"
    text, number = "", 0
    while len(tokenizer.encode(text)) < count:
        number += 1
        text += RULE.format(number)
    return text


async def run_engine(shape: Shape, model: str | None, *, shares: bool) -> Outcome:
    """One turn of every agent at once, on an engine of its own."""
    async with Engine.from_pretrained(model, dtype="float32") as engine:
        system = system_prompt(engine, shape.system_tokens)
        agents = [
            engine.session(system=system, namespace=None if shares else f"agent {index}")
            for index in range(shape.agents)
        ]

        async def ask(agent: Session, job: str) -> None:
            await agent.generate(
                f"How do I {job}?", max_tokens=shape.new_tokens, temperature=0, ignore_eos=True
            )

        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for index, agent in enumerate(agents):
                group.start_soon(ask, agent, JOBS[index % len(JOBS)])
        seconds = time.perf_counter() - start
        await engine.tree()
        return Outcome([agent.token_ids for agent in agents], seconds, engine.stats())


def run_transformers(shape: Shape, model: torch.nn.Module, ids: list[tuple[int, ...]]) -> Outcome:
    """The same prompts through transformers' generate, one after the other."""
    said, start = [], time.perf_counter()
    for each in ids:
        prompt = torch.tensor([each[: -shape.new_tokens]])
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]  # a PreTrainedModel
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=shape.new_tokens,
                max_new_tokens=shape.new_tokens,
                eos_token_id=None,
            )
        said.append(tuple(out[0].tolist()))
    return Outcome(said, time.perf_counter() - start)


def compare(model: torch.nn.Module, shape: Shape, outcomes: list[Outcome]) -> int:
    """Raise unless all say the same; how many replies could be compared to a near tie only."""
    cut = 0
    for replies in zip(*(outcome.token_ids for outcome in outcomes), strict=True):
        if len(set(replies)) == 1:
            continue
        first = replies[0]
        with torch.inference_mode():
            logits = model(torch.tensor([first]), use_cache=False).logits[0]
        best = logits[-shape.new_tokens - 1 : -1].float().topk(2).values
        ties = (best[:, 0] - best[:, 1] <= MIN_GAP).nonzero()
        same = len(first) - shape.new_tokens + (int(ties[0]) if len(ties) else shape.new_tokens)
        assert all(reply[:same] == first[:same] for reply in replies), "the replies differ"
        cut += 1
    return cut


def line(shape: Shape, what: str, outcome: Outcome) -> dict[str, object]:
    """One row of the table."""
    row: dict[str, object] = {
        "agents": shape.agents,
        "system_tokens": shape.system_tokens,
        "new_tokens": shape.new_tokens,
        "what": what,
        "seconds": round(outcome.seconds, 2),
        "tokens_per_s": round(shape.agents * shape.new_tokens / outcome.seconds, 1),
    }
    if outcome.stats is not None:
        stats = outcome.stats
        row["prompt_tokens_computed"] = stats.prefill_tokens
        row["kv_blocks"] = stats.used_blocks
        row["kv_mib"] = round(stats.used_blocks * stats.bytes_per_block / 2**20, 1)
    return row


def main() -> None:
    """Compare, then print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--quick", action="store_true", help="one small shape")
    parser.add_argument("--out", type=Path, default=RESULTS / "sharing.json")
    chosen = parser.parse_args()
    compared = Shape(4, 256, 8) if chosen.quick else Shape(8, 1024, 32)
    rows = []
    model = open_model(chosen.model, config=EngineConfig(dtype="float32")).model
    shared = anyio.run(lambda: run_engine(compared, chosen.model, shares=True))
    apart = anyio.run(lambda: run_engine(compared, chosen.model, shares=False))
    alone = run_transformers(compared, model, shared.token_ids)
    cut = compare(model, compared, [shared, apart, alone])
    print(f"{compared.agents} replies agree, {cut} of them up to a near tie")
    rows.append(line(compared, "agentkv", shared))
    rows.append(line(compared, "agentkv, nothing shared", apart))
    rows.append(line(compared, "transformers generate, in turn", alone))
    if not chosen.quick:
        many = Shape(32, 2048, 32)
        outcome = anyio.run(lambda: run_engine(many, chosen.model, shares=True))
        rows.append(line(many, "agentkv", outcome))
    limits = speeds()
    print(
        f"this machine: copy {limits['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"float32 GEMM {limits['gemm_flop_per_s'] / 1e9:.0f} GFLOP/s"
    )
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    write_report(chosen.out, limits=limits, rows=rows)


if __name__ == "__main__":
    main()
