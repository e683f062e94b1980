"""The engine's synchronous heart: requests in, one step at a time, outcomes out.

Owns the life of every request on the step thread. Thinks in token ids; knows no text, no tensors
and no event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..config import EngineConfig
from ..errors import ContextLengthError, NamespaceError, OutOfBlocksError, RequestError, StepError
from ..kv.block_pool import BlockPool
from ..kv.memory import KVMemory
from ..kv.prefix_cache import HashFn
from ..messages import EngineStats, FinishReason, TokenLogprob
from .batch import Row, RowResult
from .execution import Execution, Outcome
from .plan import Plan, Span
from .protocols import FatalRunnerError, Runner
from .rows import make_rows
from .scheduler import Scheduler
from .sequence import Failed, Finished, Request, Snapshot
from .snapshots import Snapshots
from .working import Sequence


class Core:
    """Sequences, snapshots and KV blocks of one runner. Used from one thread.

    `hash_fn` names blocks in the prefix cache; any function is correct, a good one is fast. `pool`
    is for tests that make allocations fail.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        hash_fn: HashFn = hash,
        pool: BlockPool | None = None,
    ) -> None:
        info = runner.info
        self._runner = runner
        self._info = info
        self._memory = KVMemory(
            BlockPool(info.num_blocks) if pool is None else pool,
            info.block_size,
            has_cache=config.prefix_cache,
            hash_fn=hash_fn,
        )
        self._snapshots = Snapshots(self._memory)
        self._scheduler = Scheduler(
            self._memory,
            self._snapshots,
            batch_tokens=config.batch_tokens(on_cpu=info.is_cpu),
            max_num_seqs=config.max_num_seqs,
        )
        self._execution = Execution(runner)
        self._capacity = info.capacity(config.max_context)
        self._sequences: dict[Request, Sequence] = {}
        self._changed: list[Request] = []
        self._num_submitted = 0
        self._num_barren = 0
        self._has_failed = False
        self._counts = dict.fromkeys(("prefill", "decode", "recomputed"), 0)
        # A step returned after `quarantine`, whose thread may still be dropping everything: from
        # then on the step's thread may only `close`.
        self.is_given_up: bool = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._sequences or self._changed)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: there is nothing to compute from, or an id is outside the vocabulary.
            NamespaceError: its snapshot belongs to another namespace.
            ContextLengthError: it is longer than the context or the whole pool.
        """
        assert request not in self._sequences, "a request is submitted once"
        assert request.outcome is None, "a request is submitted once"
        self._check(request)
        self._num_submitted += 1
        size = self._info.block_size
        sequence = Sequence(request, self._num_submitted, size, self._capacity)
        needed = sequence.limit
        if request.kind == "generate" and request.max_new_tokens is None:
            needed = len(sequence.prompt) + 1
        if needed > self._capacity:
            raise ContextLengthError(needed, self._capacity)
        self._sequences[request] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request: Request) -> None:
        """Drop a request. Its blocks are free or cached at once; unknown ones are ignored."""
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            self._drop(sequence)

    def stop(self, request: Request) -> None:
        """End a request now and keep what was sampled; unknown ones are ignored."""
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._finish(sequence, "stopped")

    def release(self, snapshot: Snapshot) -> None:
        """Give up a snapshot. Idempotent."""
        self._snapshots.release(snapshot)

    def step(self) -> list[Request]:
        """Run one step; the requests that have new ids or an outcome.

        Raises:
            StepError: a second step in a row has failed; each row's request has its own.
            BaseException: FatalRunnerError, and what is not an Exception, as the runner raised it.
        """
        if self._sequences:
            plan = self._scheduler.schedule()
            for sequence in plan.ready:
                self._finish(sequence, None)
            if plan.spans:
                self._num_barren = 0
                self._execute(plan)
            elif not plan.ready:
                self._give_up_head()
        changed, self._changed = self._changed, []
        return changed

    def describe(self, snapshots: Iterable[Snapshot]) -> list[tuple[tuple[int, ...], int]]:
        """The blocks that each snapshot holds now, and its KV length in tokens."""
        tables = (snapshot.table for snapshot in snapshots)
        return [((), 0) if t is None else (tuple(t.block_ids), t.num_tokens) for t in tables]

    def stats(self) -> EngineStats:
        """The figures after the last step."""
        memory, pool, scheduler = self._memory, self._memory.pool, self._scheduler
        return EngineStats(
            num_blocks=pool.num_blocks,
            block_size=self._info.block_size,
            bytes_per_block=self._info.bytes_per_block,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_idle,
            used_blocks=pool.num_used,
            quarantined_blocks=pool.num_quarantined,
            logical_tokens=memory.logical_tokens,
            physical_tokens=memory.physical_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self._execution.num_steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            prefill_tokens=self._counts["prefill"],
            decode_tokens=self._counts["decode"],
            recomputed_tokens=self._counts["recomputed"],
            preemptions=scheduler.num_preemptions,
            evictions=memory.cache.num_evictions,
            snapshot_reclaims=self._snapshots.num_reclaims,
            block_copies=self._execution.num_copies,
        )

    def check(self) -> None:
        """Verify every invariant between steps from scratch.

        Raises:
            AssertionError: one does not hold; the message names blocks and holders.
        """
        queued = {*self._scheduler.running, *self._scheduler.waiting}
        assert queued == set(self._sequences.values()), "a sequence is queued twice or not at all"
        tables = [sequence.table for sequence in self._scheduler.running]
        tables += [snapshot.table for snapshot in self._snapshots.live]
        self._memory.check(table for table in tables if table is not None)
        self._scheduler.check()
        for sequence in queued:
            assert sequence.num_computed <= max(0, sequence.num_tokens - 1), "KV beyond the ids"
            assert sequence.request.outcome is None, "a request that has ended still runs"

    def quarantine(self) -> tuple[int, ...]:
        """Withdraw for good the blocks of a step that does not return, and drop everything else.

        The only call that may come from another thread, while `step` hangs in the runner; the
        step, should it return after all, then changes nothing. Returns the blocks; none if the
        step has returned in the meantime.
        """
        batch = self._execution.abandon()
        if batch is None:
            return ()
        named = {block for row in batch.rows for block in row.block_ids}
        named.update(copy.src for copy in batch.copies)
        self._memory.pool.release([copy.src for copy in batch.copies])
        self._drop_everything()
        self._memory.quarantine(named)
        return tuple(sorted(named))

    def close(self) -> None:
        """Drop everything and close the runner. Idempotent."""
        try:
            if not self.is_given_up:
                self._drop_everything()
        finally:
            self._runner.close()

    # One step.

    def _execute(self, plan: Plan) -> None:
        """Run the plan's rows and commit what they gave; a broken constraint fails its row."""
        made = list(zip(plan.spans, make_rows(plan.spans), strict=True))
        rows = [row for _, row in made if isinstance(row, Row)]
        outcome: Outcome | None = Outcome([], None)
        if rows:
            outcome = self._execution.run(rows, plan.copies, self._scheduler.tree_changes)
        if outcome is None:
            # Quarantined meanwhile: the books are the other thread's.
            self.is_given_up = True
            return
        self._memory.pool.release([copy.src for copy in plan.copies])
        if outcome.error is not None:
            self._fail_step(plan, outcome.error)
            return
        self._has_failed = False
        results = iter(outcome.results)
        for span, row in made:
            if isinstance(row, Row):
                self._commit(span, row, next(results))
            else:
                self._fail(span.sequence, StepError("the token constraint failed", row))

    def _fail_step(self, plan: Plan, cause: BaseException) -> None:
        for span in plan.spans:
            self._fail(span.sequence, StepError(f"the step failed: {type(cause).__name__}", cause))
        if isinstance(cause, FatalRunnerError) or not isinstance(cause, Exception):
            raise cause
        if self._has_failed:
            raise StepError("two steps in a row have failed", cause) from cause
        self._has_failed = True

    def _give_up_head(self) -> None:
        """Nothing could run. One more step may find room; after that, the first one fails."""
        self._num_barren += 1
        if self._num_barren > 1:
            self._num_barren = 0
            head = min(self._sequences.values(), key=lambda sequence: sequence.rank)
            needed = self._memory.blocks_for(max(1, head.target))
            available = self._memory.num_available + self._memory.blocks_for(head.num_computed)
            message = f"nothing can run: the first request of {len(self._sequences)}"
            cause = OutOfBlocksError(needed, available)
            self._fail(head, StepError(f"{message} does not get its KV blocks: {cause}", cause))

    def _commit(self, span: Span, row: Row, result: RowResult) -> None:
        sequence, request = span.sequence, span.sequence.request
        assert sequence.table is not None, "a sequence in a step has a table"
        fault = _fault_of(row, result, self._info.vocab_size)
        if fault is not None:
            self._fail(sequence, StepError(fault))
            return
        self._count(span)
        if self._memory.commit(sequence.table, span.end, request.namespace, sequence.block_tokens):
            self._scheduler.tree_changes += 1
        sequence.score += sum(result.target_logprobs)
        if row.sample is not None and result.token_id is not None:
            self._accept(sequence, result.token_id, result)
        elif request.kind != "generate" and span.end == sequence.target:
            self._finish(sequence, None)

    def _count(self, span: Span) -> None:
        again = span.sequence.note_computed(span.start, span.end)
        first = span.start + again
        # A span may reach from the input into what follows it.
        inputs = max(0, min(span.end, span.sequence.num_input) - first)
        self._counts["recomputed"] += again
        self._counts["prefill"] += inputs
        self._counts["decode"] += span.end - first - inputs

    def _accept(self, sequence: Sequence, token_id: int, result: RowResult) -> None:
        request = sequence.request
        try:
            if request.constraint is not None:
                request.constraint.accept(token_id)
            is_complete = request.stop is not None and request.stop.accept(token_id)
        except Exception as error:
            self._fail(sequence, StepError("the stop rule or the constraint failed", error))
            return
        if request.options.logprobs and result.logprob is not None:
            request.logprobs.append(TokenLogprob(token_id, result.logprob, result.top_logprobs))
        request.output_ids.append(token_id)
        if token_id in request.stop_token_ids:
            self._finish(sequence, "stop", stop_token=token_id)
        elif is_complete:
            self._finish(sequence, "stop")
        elif sequence.num_tokens >= sequence.limit:
            self._finish(sequence, "length")
        else:
            self._changed.append(request)

    # Ends.

    def _finish(
        self, sequence: Sequence, reason: FinishReason | None, *, stop_token: int | None = None
    ) -> None:
        request = sequence.request
        del self._sequences[request]
        table = self._scheduler.remove(sequence)
        snapshot = score = None
        if request.kind == "score":
            score = sequence.score
            if table is not None:
                self._memory.release(table)
        else:
            snapshot = Snapshot(sequence.prompt.extend(request.output_ids), request.namespace)
            snapshot.table = table
            snapshot.num_computed = sequence.reach
            self._snapshots.add(snapshot)
        request.outcome = Finished(snapshot, reason, stop_token, sequence.usage(), score)
        self._changed.append(request)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        del self._sequences[sequence.request]
        self._drop(sequence)
        sequence.request.outcome = Failed(error)
        self._changed.append(sequence.request)

    def _drop(self, sequence: Sequence) -> None:
        table = self._scheduler.remove(sequence)
        if table is not None:
            self._memory.release(table)

    def _drop_everything(self) -> None:
        for request in list(self._sequences):
            self.cancel(request)
        for snapshot in list(self._snapshots.live):
            self.release(snapshot)

    def _check(self, request: Request) -> None:
        snapshot, new_ids = request.snapshot, request.new_ids
        assert 0 <= request.keep <= len(snapshot.ids), "more ids are kept than there are"
        if request.keep and request.namespace != snapshot.namespace:
            raise NamespaceError("a turn cannot start from another namespace's conversation")
        if request.kind != "warm" and not request.keep and not len(new_ids):
            raise RequestError("an empty prompt has nothing to answer")
        vocab_size = self._info.vocab_size
        for ids in (new_ids, request.score_ids):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise RequestError(f"a token id is outside the vocabulary, 0 to {vocab_size - 1}")


def _fault_of(row: Row, result: RowResult, vocab_size: int) -> str | None:
    """Why a row's result cannot be used, if it cannot."""
    if result.error is not None:
        return result.error
    if row.sample is not None:
        token_id = result.token_id
        if token_id is None or not 0 <= token_id < vocab_size:
            return f"the runner drew no token of the vocabulary: {token_id}"
    if len(result.target_logprobs) != len(row.targets):
        return f"{len(row.targets)} targets gave {len(result.target_logprobs)} log-probabilities"
    if any(math.isnan(logprob) for logprob in result.target_logprobs):
        return "the model gave log-probabilities that are not numbers"
    return None
