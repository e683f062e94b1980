"""Drives a core by hand on the witness model, and holds every answer against the oracle.

No event loop and no thread: each step, each check and each fault is the test's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import EngineConfig, SamplingOptions
from ..core.core import Core
from ..core.sequence import Failed, Finished, Request, RequestKind, Snapshot, TokenIds
from ..kv.block_pool import BlockPool
from ..kv.prefix_cache import HashFn
from .witness import WitnessRunner
from .witness_model import witness_reply, witness_score

__all__ = ["CoreDriver", "Turn"]


class Turn:
    """A submitted request and the plain list of ids that it starts from."""

    def __init__(self, request: Request, ids: list[int]) -> None:
        self.request: Request = request
        self.ids: list[int] = ids

    @property
    def finished(self) -> Finished:
        """How the turn ended well."""
        outcome = self.request.outcome
        assert isinstance(outcome, Finished), f"the turn has not finished: {outcome}"
        return outcome

    @property
    def error(self) -> BaseException:
        """How the turn ended badly."""
        assert isinstance(self.request.outcome, Failed), f"no failure: {self.request.outcome}"
        return self.request.outcome.error

    @property
    def snapshot(self) -> Snapshot:
        """The conversation after the turn."""
        assert self.finished.snapshot is not None, "a score has no snapshot"
        return self.finished.snapshot


class CoreDriver:
    """A core on a witness runner. Keywords it does not know are settings of EngineConfig.

    After each step every invariant is checked and every slot that holds nothing is poisoned.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 260,
        max_context: int = 8192,
        hash_fn: HashFn = hash,
        pool: BlockPool | None = None,
        **settings: Any,  # Any: the fields of EngineConfig differ in type
    ) -> None:
        settings = {"max_num_seqs": 16, "max_batch_tokens": 80, **settings}
        self.runner: WitnessRunner = WitnessRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            max_context=max_context,
        )
        config = EngineConfig(**settings)
        self.core: Core = Core(self.runner, config, hash_fn=hash_fn, pool=pool)

    @property
    def capacity(self) -> int:
        """The most ids that one request may have, input and output together."""
        return self.core._capacity

    def submit(
        self,
        base: Snapshot | None,
        new_ids: Sequence[int],
        *,
        count: int | None = 4,
        kind: RequestKind = "generate",
        options: SamplingOptions | None = None,
        namespace: str | None = None,
        **more: Any,  # Any: the rest of Request's keywords differ in type
    ) -> Turn:
        """Queue a turn on `base`, or on a new conversation; greedy unless `options` say else."""
        snapshot = Snapshot(TokenIds.EMPTY, namespace) if base is None else base
        request = Request(
            snapshot,
            new_ids,
            kind=kind,
            max_new_tokens=count,
            options=SamplingOptions(temperature=0.0) if options is None else options,
            **more,
        )
        turn = Turn(request, [*snapshot.ids.truncate(request.keep), *new_ids])
        self.core.submit(request)
        return turn

    def step(self) -> list[Request]:
        """One step, then the checks."""
        changed = self.core.step()
        self.check()
        return changed

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is no work."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def check(self) -> None:
        """Verify every invariant and poison every slot that holds nothing."""
        self.core.check()
        self.runner.poison_unfilled(self.core._memory.pool.filled_slots)

    def expected(self, turn: Turn) -> list[int]:
        """The reply that the oracle gives to a generating turn."""
        request = turn.request
        is_greedy = request.options.temperature == 0
        count = request.max_new_tokens
        return witness_reply(
            turn.ids,
            self.capacity - len(turn.ids) if count is None else count,
            vocab_size=self.runner.info.vocab_size,
            stop_token_ids=tuple(sorted(request.stop_token_ids)),
            key=None if is_greedy else request.key,
            options=request.options,
        )

    def verify(self, turn: Turn) -> None:
        """Hold the outcome of a turn that ended well against the oracle."""
        request, finished = turn.request, turn.finished
        reply = list[int]()
        if request.kind == "score":
            continuation = request.score_ids.tolist()
            assert finished.score is not None
            assert abs(finished.score - witness_score(turn.ids, continuation)) < 1e-9
            assert finished.snapshot is None
        else:
            if request.kind == "generate":
                reply = self.expected(turn)
                if finished.finish_reason == "stopped":
                    reply = reply[: len(request.output_ids)]
            assert list(turn.snapshot.ids) == turn.ids + reply
        assert request.output_ids == reply
        usage = finished.usage
        assert usage.input_tokens == len(turn.ids) == usage.cached_tokens + usage.prefill_tokens
        assert usage.output_tokens == len(reply)
        assert usage.cached_tokens >= 0

    def verify_idle(self, held: Sequence[Snapshot] = ()) -> None:
        """Release `held` and verify that nothing but cached blocks is left."""
        for snapshot in held:
            self.core.release(snapshot)
        stats = self.core.stats()
        assert not self.core.has_work
        assert stats.running == stats.waiting == stats.used_blocks == stats.logical_tokens == 0
        assert stats.physical_tokens == 0
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        self.core.check()
