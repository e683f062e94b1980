"""A tiny real model, in float32: what it says on reused KV is what it says cold.

Where rounding may decide, because the two best tokens are nearly equal, ids are not compared; how
often that was is returned.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import anyio
import torch

from ...engine import Engine
from ...messages import Completion
from ...session import Session
from ..byte_tokenizer import byte_tokenizer
from ..tiny_models import tiny_model

__all__ = ["Agreement", "choices", "compare_reuse", "share_real_prefix"]

# Logits closer than this may change places when they are summed in another order.
MIN_GAP = 1e-3
PREFIX = [at * 7 % 251 for at in range(120)]


class Agreement(NamedTuple):
    """Tokens compared, near ties left out, and the largest difference of log-probabilities."""

    compared: int
    excluded: int
    difference: float


async def share_real_prefix(num_sessions: int, *, num_tokens: int = 8) -> Agreement:
    """So many sessions on one prefix answer at once, each as the bare model does alone."""
    model = tiny_model("llama")
    compared = excluded = 0
    async with Engine.from_pretrained(model, tokenizer=byte_tokenizer(), num_blocks=1024) as engine:
        sessions = [engine.session(messages=[*PREFIX, at, at]) for at in range(num_sessions)]

        async def answer(session: Session) -> None:
            await session.generate(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

        async with anyio.create_task_group() as group:
            for session in sessions:
                group.start_soon(answer, session)
        stats = engine.stats()
        assert stats.prefill_tokens <= len(PREFIX) + (len(PREFIX) % 16 + 2) * num_sessions
        for session in sessions:
            said, is_clear = choices(model, session.token_ids, num_tokens)
            chosen = torch.tensor(session.token_ids[-num_tokens:])
            assert (said == chosen)[is_clear].all(), f"{session} is not what the model says"
            compared += num_tokens
            excluded += int((~is_clear).sum())
            await session.aclose()
        await engine.tree()
        assert engine.stats().used_blocks == 0
    return Agreement(compared, excluded, 0.0)


async def compare_reuse(num_prompts: int, *, num_tokens: int = 8) -> Agreement:
    """Each prompt cold and then on the KV that was cached: same ids, nearly the same logits."""
    rng = random.Random(0)
    model = tiny_model("llama")
    compared = excluded = 0
    difference = 0.0
    async with Engine.from_pretrained(model, tokenizer=byte_tokenizer(), num_blocks=1024) as engine:
        for index in range(num_prompts):
            ids = [rng.randrange(256) for _ in range(rng.randint(18, 120))]
            cold, hit = [await _ask(engine, ids, index, num_tokens) for _ in range(2)]
            assert cold.usage.cached_tokens == 0 < hit.usage.cached_tokens
            for said in (cold.token_ids, hit.token_ids):
                best, is_clear = choices(model, (*ids, *said), num_tokens)
                assert (best == torch.tensor(said))[is_clear].all(), f"prompt {index}"
                compared += num_tokens
                excluded += int((~is_clear).sum())
            # A near tie ends the comparison of what was said freely.
            clear = int(is_clear.long().cumprod(0).sum())
            assert cold.token_ids[:clear] == hit.token_ids[:clear], f"prompt {index}"
            difference = max(difference, _difference(cold, hit, clear))
    assert difference <= 1e-4, f"log-probabilities differ by {difference}"
    assert excluded <= 0.005 * compared, f"{excluded} near ties among {compared} ids"
    return Agreement(compared, excluded, difference)


async def _ask(engine: Engine, ids: list[int], index: int, num_tokens: int) -> Completion:
    async with engine.session(messages=ids, namespace=f"prompt {index}") as session:
        return await session.generate(
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=20,
        )


def _difference(cold: Completion, hit: Completion, count: int) -> float:
    """The largest difference between the log-probabilities of the best tokens of both."""
    assert cold.logprobs is not None
    assert hit.logprobs is not None
    pairs = zip(cold.logprobs[:count], hit.logprobs[:count], strict=True)
    found = [0.0]
    for one, other in pairs:
        known = dict(other.top)
        found += [abs(value - known[each]) for each, value in one.top if each in known]
    return max(found)


def choices(
    model: torch.nn.Module, ids: tuple[int, ...], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own choice of each of the last `count` ids, and whether rounding has no say."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -count - 1 : -1].float()
    two = logits.topk(2).values
    return logits.argmax(-1), two[:, 0] - two[:, 1] > MIN_GAP
