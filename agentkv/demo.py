"""The demo: agents with different jobs over one system prompt, then a fork into branches.

Runs on the public API alone and prints figures of this very run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import anyio
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .config import GenerateOptions
from .engine import Engine
from .messages import Completion
from .session import Session

MAX_SHOWN_CHARS = 300
BRANCHES = 4
MIN_SYSTEM_TOKENS = 1000

JOBS = (
    ("planner", "List the three steps you would take first to repair a slow web page."),
    ("critic", "Name the biggest risk of shipping software on a Friday."),
    ("teacher", "Explain to a child why the sky is blue."),
    ("translator", "Translate into French: the train leaves at noon."),
    ("poet", "Write two lines about a lighthouse."),
    ("engineer", "What does a database index do?"),
    ("chef", "Suggest a quick dinner with eggs and rice."),
    ("historian", "Why did people build city walls?"),
)

_RULES = (
    "Answer in plain English and in at most three sentences.",
    "Say first what you would do, then why.",
    "If a question is unclear, choose the most common reading and say which you chose.",
    "Use short words, give one concrete example, and never repeat the question.",
    "Numbers get units, dates get a year, and names are spelled in full the first time.",
    "Other members of the team read your answer, so leave out greetings and apologies.",
)


@dataclass
class _Agent:
    name: str
    question: str
    session: Session
    text: str = ""
    tokens: int = 0


@dataclass
class _Figures:
    fork_us: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)


async def run_demo(console: Console, agents: int, model: str | None, max_tokens: int) -> None:
    """Run the whole demo and print it on `console`."""
    figures = _Figures()
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as bar:
        task = bar.add_task("loading the model", total=1.0)

        def show(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        engine = await Engine.from_pretrained(model, progress=show).__aenter__()
    try:
        console.print(
            f"{engine.info.name}: {engine.info.num_blocks} KV blocks of "
            f"{engine.info.block_size} tokens, {engine.info.bytes_per_block:,} bytes each"
        )
        team = await _answer_side_by_side(console, engine, agents, max_tokens, figures)
        best = await _best_branch(console, team[0], figures, max_tokens)
        # The picture waits until the closed branches are released, and the figures follow it.
        tree = await engine.tree()
        console.print(_table(engine, team, figures))
        console.print(tree, markup=False, highlight=False)
        console.print(f"adopted: {best.text.strip()!r}", markup=False)
    finally:
        await engine.aclose()


def system_prompt(engine: Engine) -> str:
    """House rules of at least 1,000 tokens, as a team of agents would share them."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "the demo needs a model with a tokenizer"
    lines = ["You are a member of a small team. These are the rules of the house."]
    while len(tokenizer.encode("\n".join(lines))) < MIN_SYSTEM_TOKENS:
        number = len(lines)
        lines.append(f"Rule {number}. {_RULES[number % len(_RULES)]}")
    return "\n".join(lines)


async def _answer_side_by_side(
    console: Console, engine: Engine, count: int, max_tokens: int, figures: _Figures
) -> list[_Agent]:
    system = system_prompt(engine)
    team = []
    for index in range(count):
        job, question = JOBS[index % len(JOBS)]
        name = job if count <= len(JOBS) else f"{job} {index + 1}"
        team.append(_Agent(name, question, engine.session(system=system, name=name)))
    start = time.perf_counter()
    with Live(_texts(team), console=console, refresh_per_second=8) as live:

        async def answer(agent: _Agent) -> None:
            options = GenerateOptions(max_tokens=max_tokens, temperature=0.7)
            async with agent.session.stream(agent.question, **options) as stream:
                async for delta in stream:
                    if not agent.tokens:
                        figures.first_token_s.append(time.perf_counter() - start)
                    agent.text += delta.text
                    agent.tokens += len(delta.token_ids)
                    live.update(_texts(team))

        async with anyio.create_task_group() as group:
            for agent in team:
                group.start_soon(answer, agent)
    figures.seconds = time.perf_counter() - start
    figures.tokens = sum(agent.tokens for agent in team)
    return team


async def _best_branch(
    console: Console, agent: _Agent, figures: _Figures, max_tokens: int
) -> Completion:
    """Fork the agent, let the branches answer, adopt the one the model itself finds likeliest."""
    question = "Now give your best advice in one sentence."
    times = []
    for _ in range(BRANCHES):
        start = time.perf_counter()
        fork = agent.session.fork()
        times.append(time.perf_counter() - start)
        await fork.aclose()
    figures.fork_us = statistics.median(times) * 1e6
    replies: dict[int, Completion] = {}

    async def answer(index: int, branch: Session) -> None:
        replies[index] = await branch.generate(
            question, max_tokens=max_tokens, temperature=0.8, logprobs=True
        )

    console.print(f"{agent.name} forks into {BRANCHES} branches: {question}", markup=False)
    async with agent.session.branches(BRANCHES) as branches:
        async with anyio.create_task_group() as group:
            for index, branch in enumerate(branches):
                group.start_soon(answer, index, branch)
        best = max(replies, key=lambda index: _mean_logprob(replies[index]))
        agent.session.adopt(branches[best])
    for index, reply in sorted(replies.items()):
        mark = "adopted" if index == best else "closed "
        mean = _mean_logprob(reply)
        console.print(
            f"branch {index + 1} {mark} mean logprob {mean:6.3f}: {reply.text.strip()[:90]}",
            markup=False,
            highlight=False,
        )
    return replies[best]


def _mean_logprob(reply: Completion) -> float:
    assert reply.logprobs, "asked for with logprobs=True"
    return statistics.fmean(entry.logprob for entry in reply.logprobs)


def _texts(team: list[_Agent]) -> Table:
    table = Table.grid(padding=(0, 1))
    for agent in team[:16]:
        text = " ".join(agent.text.split())
        if len(text) > MAX_SHOWN_CHARS:
            text = "… " + text[-MAX_SHOWN_CHARS:].partition(" ")[2]
        table.add_row(Text(agent.name, style="bold"), Text(text, overflow="fold"))
    return table


def _table(engine: Engine, team: list[_Agent], figures: _Figures) -> Table:
    stats, info = engine.stats(), engine.info
    size = info.block_size
    lengths = [max(0, len(agent.session.token_ids) - 1) for agent in team]
    alone = sum(-(-length // size) for length in lengths)
    table = Table("what sharing did", "with", "without")
    table.columns[1].justify = table.columns[2].justify = "right"
    mb = info.bytes_per_block / 2**20
    table.add_row("KV blocks held", f"{stats.used_blocks:,}", f"{alone:,}")
    table.add_row("KV memory, MiB", f"{stats.used_blocks * mb:,.1f}", f"{alone * mb:,.1f}")
    table.add_row("prompt tokens computed", f"{stats.prefill_tokens:,}", f"{stats.prompt_tokens:,}")
    table.add_row("utilisation of the blocks held", f"{stats.utilisation:.1%}", "")
    table.add_row("logical / physical tokens", f"{stats.sharing:.1f}x", "1.0x")
    table.add_row("time of a fork, median", f"{figures.fork_us:.0f} us", "")
    table.add_row("first token, slowest agent", f"{max(figures.first_token_s):.2f} s", "")
    table.add_row("tokens per second, all agents", f"{figures.tokens / figures.seconds:.1f}", "")
    return table
