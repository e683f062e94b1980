"""An engine in which goes wrong what a plan says: its runner, pool, tokenizer, core and worker.

The only code that reaches into the engine's private parts to break them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..config import EngineConfig
from ..core.batch import Batch, ModelInfo, Row, RowResult
from ..core.core import Core
from ..core.plan import Plan
from ..core.protocols import Runner
from ..core.sequence import Request
from ..engine import Engine
from ..errors import OutOfBlocksError
from ..kv.block_pool import BlockPool
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import ChatTokenizer
from ..worker import Worker
from .faults import FaultPlan
from .witness import WitnessRunner

__all__ = ["FaultyEngine", "FaultyPool", "FaultyRunner", "FaultyWorker", "faulty"]


class FaultyPool(BlockPool):
    """A pool whose allocations fail as planned, with OutOfBlocksError, and come in any order."""

    def __init__(self, num_blocks: int, plan: FaultPlan) -> None:
        super().__init__(num_blocks)
        self._plan = plan
        self._random = None if plan.shuffle is None else random.Random(plan.shuffle)

    def allocate(self, count: int) -> list[int]:
        """As the pool's own."""
        if self._plan.is_due("allocate"):
            raise OutOfBlocksError(count, 0)
        if self._random is not None and count <= len(self._free):
            self._free.rotate(self._random.randrange(len(self._free) or 1))
        return super().allocate(count)

    def share(self, block_ids: Sequence[int]) -> None:
        """As the pool's own."""
        if self._plan.is_due("share"):
            raise MemoryError("share fails on purpose")
        super().share(block_ids)


class FaultyRunner:
    """A Runner whose steps fail as planned, around any other."""

    def __init__(self, runner: Runner, plan: FaultPlan) -> None:
        self.runner: Runner = runner
        self.tokenizer: object = getattr(runner, "tokenizer", None)
        self._plan = plan
        self._num_partial = 0

    @property
    def info(self) -> ModelInfo:
        """The other runner's."""
        return self.runner.info

    def execute(self, batch: Batch) -> list[RowResult]:
        """As the other runner, unless a fault is due before, in the middle or after."""
        plan = self._plan
        plan.pass_point("forward.before")
        if plan.is_due("forward.hangs"):
            plan.hang()
        self._fail_half_way(batch)
        results = self.runner.execute(batch)
        plan.pass_point("forward.after")
        if plan.is_due("logits.nan"):
            error = "the model gave logits that are not finite"
            results = [RowResult(error=error), *results[1:]]
        if plan.is_due("results.token"):
            results = [*results[:-1], replace(results[-1], token_id=self.info.vocab_size)]
        return results[:-1] if plan.is_due("results.short") else results

    def close(self) -> None:
        """Close the other runner, then fail if that is due."""
        self.runner.close()
        self._plan.pass_point("close")

    def _fail_half_way(self, batch: Batch) -> None:
        """Raise with only the first copy made, or only half of the rows written, if that is due."""
        if batch.copies:
            try:
                self._plan.pass_point("copy")
            except BaseException:
                self._execute_part(batch, [batch.rows[0]])
                raise
        try:
            self._plan.pass_point("forward.during")
        except BaseException:
            self._execute_part(batch, batch.rows[: -(-len(batch.rows) // 2)])
            raise

    def _execute_part(self, batch: Batch, rows: Sequence[Row]) -> None:
        held = {block_id for row in rows for block_id in row.block_ids}
        copies = tuple(copy for copy in batch.copies if copy.dst in held)
        # Its segments are not those of the version, so the version is one of its own.
        self._num_partial += 1
        self.runner.execute(Batch(tuple(rows), copies, (), -self._num_partial))


def faulty(tokenizer: ChatTokenizer, plan: FaultPlan) -> ChatTokenizer:
    """A tokenizer that does as `tokenizer` does, unless a fault is due.

    Detokenizing fails on the loop, where text is made, and on the step thread, where stop strings
    are looked for.
    """
    wrapped = _FaultyTokenizer.__new__(_FaultyTokenizer)
    vars(wrapped).update(vars(tokenizer))
    wrapped._plan = plan
    return wrapped


class _FaultyTokenizer(ChatTokenizer):
    _plan: FaultPlan

    def render_parts(self, *args: Any, **kwargs: Any) -> Any:  # Any: as the method it wraps
        self._plan.pass_point("render")
        return super().render_parts(*args, **kwargs)

    def encode_part(self, *args: Any, **kwargs: Any) -> Any:  # Any: as the method it wraps
        self._plan.pass_point("encode")
        return super().encode_part(*args, **kwargs)

    def encode_continuation(self, *args: Any, **kwargs: Any) -> list[int]:  # Any: as above
        self._plan.pass_point("encode")
        return super().encode_continuation(*args, **kwargs)

    def detokenizer(self) -> Detokenizer:
        return _FaultyDetokenizer(super().detokenizer(), self._plan)


class _FaultyDetokenizer:
    def __init__(self, inner: Detokenizer, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def push(self, ids: Iterable[int]) -> str:
        self._plan.pass_point("detokenize")
        return self._inner.push(ids)

    def flush(self) -> str:
        return self._inner.flush()

    def copy(self) -> Detokenizer:
        return _FaultyDetokenizer(self._inner.copy(), self._plan)


class FaultyCore(Core):
    """A core that loses KV as planned before a step, and whose empty slots are forgotten after."""

    def __init__(self, runner: Runner, config: EngineConfig, plan: FaultPlan) -> None:
        pool = FaultyPool(runner.info.num_blocks, plan)
        super().__init__(runner, config, hash_fn=plan.hash_fn, pool=pool)
        self._plan = plan

    def step(self) -> list[Request]:
        """As the core's own."""
        if self._scheduler.running and self._plan.is_due("preempt"):
            self._preempt_last()
        if self._memory.pool.num_idle and self._plan.is_due("evict"):
            self._memory.cache.evict(1)
        changed = super().step()
        if self._plan.poisons:
            self._poison()
        return changed

    def _preempt_last(self) -> None:
        for sequence in reversed(self._scheduler.running):
            if not sequence.is_protected:
                self._scheduler._preempt(Plan(0), sequence)
                return

    def _poison(self) -> None:
        runner = self._runner
        while isinstance(runner, FaultyRunner):
            runner = runner.runner
        if isinstance(runner, WitnessRunner):
            runner.poison_unfilled(self._memory.pool.filled_slots)


class FaultyWorker(Worker):
    """A worker whose core follows a plan."""

    def __init__(
        self, open_runner: Callable[[EngineConfig], Runner], config: EngineConfig, plan: FaultPlan
    ) -> None:
        super().__init__(open_runner, config)
        self._plan = plan

    def _make_core(self, runner: Runner) -> Core:
        return FaultyCore(runner, self.config, self._plan)


class FaultyEngine(Engine):
    """An engine on `runner` in which goes wrong what `plan` says.

    The runner's tokenizer, or the one that is given, fails as planned too.
    """

    def __init__(
        self,
        runner: Runner,
        plan: FaultPlan | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.plan: FaultPlan = FaultPlan() if plan is None else plan
        words = tokenizer or getattr(runner, "tokenizer", None)
        if isinstance(words, ChatTokenizer):
            words = faulty(words, self.plan)
        # A partial: the worker keeps it, and must not keep the engine.
        open_runner = partial(_open_faulty, runner, self.plan)
        super().__init__(open_runner, tokenizer=words, config=config)

    def _make_worker(self) -> Worker:
        return FaultyWorker(self._open_runner, self._config, self.plan)


def _open_faulty(runner: Runner, plan: FaultPlan, config: EngineConfig) -> Runner:
    plan.pass_point("open")
    return FaultyRunner(runner, plan)
