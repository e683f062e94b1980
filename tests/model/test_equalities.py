"""What the engine promises of a model's replies, with shared blocks read once and without.

Core and runner together on tiny models: forked sessions answer as fresh ones, a tiny pool as a huge
one, and all of them as the model's own attention does. Rounding may decide between two logits that
are nearly equal: those choices are counted, and replies compared up to the first of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agentkv_kernels.plan import StepPlan
from agentkv_kernels.sharing import Sharing
from agentkv_kernels.tiles import TileSet, TileShape
from transformers import PreTrainedModel

from agentkv.config import EngineConfig, SamplingOptions
from agentkv.core.core import Core
from agentkv.core.sequence import Finished, Request, Snapshot, TokenIds
from agentkv.model.compatibility import check_model, context_limit
from agentkv.model.runner import ModelRunner
from agentkv.testing.tiny_models import VOCAB_SIZE, tiny_model

BLOCK_SIZE = 8
MIN_GAP = 1e-3
MAX_CLOSE_CALLS = 0.005
# Windows that end inside what the forks share, and move on while they decode.
FAMILIES: dict[str, dict[str, Any]] = {  # Any: values of a transformers config
    "llama": {},
    "mistral": {"sliding_window": 120},
    "gemma3": {"sliding_window": 100},
}
Turn = tuple[list[int], list[int]]  # prompt, reply


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, **FAMILIES[request.param])


@pytest.fixture
def shared_tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tiles of several rows each attention call had."""
    found: list[int] = []
    tile_set = StepPlan.tile_set

    def count(plan: StepPlan, shape: TileShape) -> TileSet:
        tiles = tile_set(plan, shape)
        found.append(len(tiles.wide))
        return tiles

    monkeypatch.setattr(StepPlan, "tile_set", count)
    return found


def make_core(model: PreTrainedModel, *, share: bool, num_blocks: int = 400) -> Core:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=16,
        max_batch_tokens=80,
        share_attention=share,
    )
    runner = ModelRunner(
        model,
        check_model(model),
        config=config,
        max_context=context_limit(model),
        # Tiny heads save few bytes, so that the default would leave most segments unshared.
        sharing=Sharing(min_tokens=BLOCK_SIZE, fixed_bytes=0),
    )
    return Core(runner, config)


def submit(core: Core, base: Snapshot | None, ids: list[int], count: int) -> Request:
    snapshot = Snapshot(TokenIds.EMPTY) if base is None else base
    greedy = SamplingOptions(temperature=0.0)
    request = Request(snapshot, ids, max_new_tokens=count, options=greedy)
    core.submit(request)
    return request


def run(core: Core) -> None:
    while core.has_work:
        core.step()
        core.check()


def after(request: Request) -> Snapshot:
    assert isinstance(request.outcome, Finished), request.outcome
    assert request.outcome.snapshot is not None
    return request.outcome.snapshot


def ids_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def certain(model: PreTrainedModel, turn: Turn) -> int:
    """How many ids of a reply precede the first close call; all but close calls are verified."""
    prompt, reply = turn
    with torch.no_grad():
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    is_close = best[:, 0] - best[:, 1] < MIN_GAP
    is_best = logits.argmax(1) == torch.tensor(reply)
    assert (is_best | is_close).all(), f"{reply} is not greedy after {prompt}"
    return int(torch.cat([is_close, torch.tensor([True])]).int().argmax())


def check_replies(model: PreTrainedModel, *runs: Sequence[Turn]) -> None:
    """All replies are greedy, and those of one prompt are equal in all runs."""
    close_calls = total = 0
    for turns in zip(*runs, strict=True):
        length = min(certain(model, turn) for turn in turns)
        assert all(prompt == turns[0][0] for prompt, _ in turns)
        assert all(reply[:length] == turns[0][1][:length] for _, reply in turns)
        close_calls += length < len(turns[0][1])
        total += len(turns[0][1])
    assert close_calls <= MAX_CLOSE_CALLS * total


def forked_turns(model: PreTrainedModel, *, share: bool) -> list[Turn]:
    """Forks of one conversation at every offset of a block, and forks of the longest."""
    core = make_core(model, share=share)
    prompt = ids_of(129, 1)
    first = submit(core, None, prompt, 3)
    run(core)
    turns = [(prompt, first.output_ids)]
    for history in (prompt + first.output_ids, None):
        known = turns[-1][0] + turns[-1][1] if history is None else history
        base = after(first)
        asked = [ids_of(count, 10 + count) for count in range(1, BLOCK_SIZE + 2)]
        requests = [submit(core, base, ids, 9) for ids in asked]
        run(core)
        turns += [(known + i, r.output_ids) for i, r in zip(asked, requests, strict=True)]
        first = requests[-1]
    return turns


@pytest.mark.parametrize("share", [True, False])
def test_a_forked_session_answers_as_a_fresh_one(
    model: PreTrainedModel, shared_tiles: list[int], share: bool
) -> None:
    forked = forked_turns(model, share=share)
    assert (sum(shared_tiles) > 20) == share
    fresh = []
    for prompt, reply in forked:
        core = make_core(model, share=share)
        request = submit(core, None, prompt, len(reply))
        run(core)
        fresh.append((prompt, request.output_ids))
    check_replies(model, forked, fresh)


def test_sharing_changes_no_reply(model: PreTrainedModel) -> None:
    check_replies(model, forked_turns(model, share=True), forked_turns(model, share=False))


def crowded_turns(core: Core) -> list[Turn]:
    """Rounds of turns on any earlier conversation, more than a tiny pool can hold at once."""
    rng = random.Random(3)
    prompt = ids_of(90, 2)
    first = submit(core, None, prompt, 2)
    run(core)
    histories = [([], Snapshot(TokenIds.EMPTY)), (prompt + first.output_ids, after(first))]
    turns: list[Turn] = [(prompt, first.output_ids)]
    for _ in range(8):
        chosen = rng.choices([known for known in histories if len(known[0]) < 180], k=5)
        asked = [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 20)) for _ in chosen]
        requests = [
            submit(core, base, ids, 12) for (_, base), ids in zip(chosen, asked, strict=True)
        ]
        run(core)
        for (history, _), ids, request in zip(chosen, asked, requests, strict=True):
            turns.append((history + ids, request.output_ids))
            histories.append((history + ids + request.output_ids, after(request)))
    return turns


@pytest.mark.parametrize("share", [True, False])
def test_a_tiny_pool_answers_as_a_huge_one(
    model: PreTrainedModel, shared_tiles: list[int], share: bool
) -> None:
    tiny, huge = (make_core(model, share=share, num_blocks=count) for count in (32, 2000))
    turns = crowded_turns(tiny)
    assert (sum(shared_tiles) > 20) == share
    stats = tiny.stats()
    assert min(stats.preemptions, stats.evictions, stats.snapshot_reclaims) > 0
    check_replies(model, turns, crowded_turns(huge))
    stats = huge.stats()
    assert max(stats.preemptions, stats.evictions, stats.snapshot_reclaims) == 0
