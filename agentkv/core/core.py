"""The engine's synchronous heart: requests in, one step at a time, outcomes out.

Owns the life of every request on the step thread. Thinks in token ids; knows no text, no tensors
and no event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..config import EngineConfig
from ..errors import StepError
from ..kv.block_pool import BlockPool
from ..kv.fork_tree import shared_runs
from ..kv.memory import KVMemory
from ..kv.prefix_cache import HashFn
from ..messages import EngineStats, FinishReason, TokenLogprob
from .batch import Batch, BlockCopy, Row, RowResult, SampleSpec, Segment
from .protocols import FatalRunnerError, Runner
from .randomness import uniforms
from .scheduler import Plan, Scheduler, Span
from .sequence import Failed, Finished, Request, Snapshot
from .working import Sequence


class Core:
    """Sequences, snapshots and KV blocks of one runner. Used from one thread.

    `hash_fn` names blocks in the prefix cache; any function is correct, a good one is fast.
    """

    def __init__(self, runner: Runner, config: EngineConfig, *, hash_fn: HashFn = hash) -> None:
        info = runner.info
        self._runner = runner
        self._info = info
        self._shares_attention = config.share_attention
        self._memory = KVMemory(
            BlockPool(info.num_blocks),
            info.block_size,
            has_cache=config.prefix_cache,
            hash_fn=hash_fn,
        )
        self._scheduler = Scheduler(
            self._memory,
            batch_tokens=config.batch_tokens(on_cpu=info.is_cpu),
            max_num_seqs=config.max_num_seqs,
        )
        self._sequences: dict[Request, Sequence] = {}
        self._changed: list[Request] = []
        self._arrivals = 0
        self._has_failed = False
        self._tree: tuple[object, int, tuple[Segment, ...]] = (None, 0, ())
        self._counts = dict.fromkeys(
            ("steps", "prompt", "cached", "prefill", "decode", "recomputed", "copies"), 0
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._sequences or self._changed)

    def submit(self, request: Request) -> None:
        """Queue a request, whose prompt must have at least one id and fit the whole pool."""
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, self._info.block_size)
        assert sequence.num_input >= 1, "a request has at least one input id"
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
        self._scheduler.release(snapshot)

    def step(self) -> list[Request]:
        """Run one step; the requests that have new ids or an outcome.

        Raises:
            FatalRunnerError: the device cannot be trusted any more.
            StepError: a second step in a row has failed.
        """
        plan = self._scheduler.schedule() if self._sequences else Plan()
        for sequence in plan.ready:
            self._finish(sequence, None)
        if plan.starved is not None:
            self._fail(plan.starved[0], plan.starved[1])
        if plan.spans:
            self._execute(plan)
        elif self._sequences and not self._changed:
            head = next(iter(self._sequences.values()))
            self._fail(head, StepError("nothing can run, although a request waits"))
        changed, self._changed = self._changed, []
        return changed

    def stats(self) -> EngineStats:
        """The figures after the last step."""
        pool, counts, scheduler = self._memory.pool, self._counts, self._scheduler
        return EngineStats(
            num_blocks=pool.num_blocks,
            block_size=self._info.block_size,
            bytes_per_block=self._info.bytes_per_block,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_idle,
            used_blocks=pool.num_used,
            quarantined_blocks=pool.num_quarantined,
            logical_tokens=self._memory.logical_tokens,
            physical_tokens=self._memory.physical_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=counts["steps"],
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            prefill_tokens=counts["prefill"],
            decode_tokens=counts["decode"],
            recomputed_tokens=counts["recomputed"],
            preemptions=scheduler.num_preemptions,
            evictions=self._memory.cache.num_evictions,
            snapshot_reclaims=scheduler.num_reclaims,
            block_copies=counts["copies"],
        )

    def check(self) -> None:
        """Verify every invariant of the KV memory from scratch."""
        tables = [s.table for s in self._sequences.values() if s.table is not None]
        tables += [s.table for s in self._scheduler.snapshots if s.table is not None]
        self._memory.check(tables)

    def close(self) -> None:
        """Drop everything and close the runner. Idempotent."""
        for request in list(self._sequences):
            self.cancel(request)
        for snapshot in list(self._scheduler.snapshots):
            self.release(snapshot)
        self._runner.close()

    # One step.

    def _execute(self, plan: Plan) -> None:
        batch = self._batch(plan)
        self._counts["steps"] += 1
        self._counts["copies"] += len(plan.copies)
        try:
            results = self._runner.execute(batch)
            if len(results) != len(batch.rows):
                raise StepError(f"{len(batch.rows)} rows gave {len(results)} results")
        except FatalRunnerError:
            raise
        except Exception as error:
            self._fail_step(plan, error)
            return
        finally:
            for copy in plan.copies:
                self._memory.pool.release([copy.src])
        self._has_failed = False
        for span, result in zip(plan.spans, results, strict=True):
            self._commit(span, result)

    def _fail_step(self, plan: Plan, cause: Exception) -> None:
        for span in plan.spans:
            self._fail(span.sequence, StepError(f"the step failed: {type(cause).__name__}", cause))
        if self._has_failed:
            raise StepError("two steps in a row have failed", cause) from cause
        self._has_failed = True

    def _batch(self, plan: Plan) -> Batch:
        spans = plan.spans
        drawn = [_is_drawn(span) for span in spans]
        keys = [s.sequence.request.key for s, draws in zip(spans, drawn, strict=True) if draws]
        positions = [s.end for s, draws in zip(spans, drawn, strict=True) if draws]
        numbers = iter(uniforms(keys, positions).tolist() if keys else ())
        rows = tuple(
            _row(span, next(numbers) if draws else 0.0)
            for span, draws in zip(spans, drawn, strict=True)
        )
        version, segments = self._segments(rows)
        copies = tuple(BlockCopy(*copy) for copy in plan.copies)
        return Batch(rows=rows, copies=copies, segments=segments, tree_version=version)

    def _segments(self, rows: tuple[Row, ...]) -> tuple[int, tuple[Segment, ...]]:
        if not self._shares_attention or len(rows) < 2:
            signature: object = (tuple(row.seq_id for row in rows), None)
        else:
            signature = (tuple(row.seq_id for row in rows), self._scheduler.tree_changes)
        known, version, segments = self._tree
        if signature == known:
            return version, segments
        size = self._info.block_size
        segments = ()
        if self._shares_attention and len(rows) > 1:
            runs = shared_runs([row.block_ids for row in rows], [row.start // size for row in rows])
            segments = tuple(
                Segment(run.parent, run.start * size, run.block_ids, run.rows) for run in runs
            )
        self._tree = (signature, version + 1, segments)
        return version + 1, segments

    def _commit(self, span: Span, result: RowResult) -> None:
        sequence, request = span.sequence, span.sequence.request
        if result.error is not None:
            self._fail(sequence, StepError(result.error))
            return
        self._count(span)
        assert sequence.table is not None, "a sequence in a step has a table"
        if self._memory.commit(sequence.table, span.end, request.namespace, sequence.block_tokens):
            self._scheduler.tree_changes += 1
        sequence.reach = max(sequence.reach, span.end)
        sequence.score += sum(result.target_logprobs)
        if request.kind != "generate":
            if span.end == sequence.target:
                self._finish(sequence, None)
        elif result.token_id is not None:
            self._accept(sequence, result)

    def _count(self, span: Span) -> None:
        is_decode = span.start >= span.sequence.num_input
        self._counts["decode" if is_decode else "prefill"] += span.end - span.start

    def _accept(self, sequence: Sequence, result: RowResult) -> None:
        request, token_id = sequence.request, result.token_id
        assert token_id is not None, "only a drawn token is accepted"
        if request.options.logprobs and result.logprob is not None:
            request.logprobs.append(TokenLogprob(token_id, result.logprob, result.top_logprobs))
        request.output_ids.append(token_id)
        is_stopped = request.stop is not None and request.stop.accept(token_id)
        if request.constraint is not None:
            request.constraint.accept(token_id)
        if token_id in request.stop_token_ids:
            self._finish(sequence, "stop", stop_token=token_id)
        elif is_stopped:
            self._finish(sequence, "stop")
        elif len(request.output_ids) == request.max_new_tokens:
            self._finish(sequence, "length")
        else:
            self._changed.append(request)

    # Ends.

    def _finish(
        self, sequence: Sequence, reason: FinishReason | None, *, stop_token: int | None = None
    ) -> None:
        request = sequence.request
        del self._sequences[request]
        snapshot = None
        table = self._scheduler.remove(sequence)
        if request.kind == "score":
            if table is not None:
                self._memory.release(table)
        else:
            ids = sequence.prompt.extend(request.output_ids)
            snapshot = Snapshot(ids, request.namespace)
            snapshot.table = table
            snapshot.num_computed = sequence.reach
            self._scheduler.snapshots.add(snapshot)
            self._scheduler.touch(snapshot)
        usage = sequence.usage()
        self._counts["prompt"] += usage.input_tokens
        self._counts["cached"] += usage.cached_tokens
        self._counts["recomputed"] += usage.recomputed_tokens
        score = sequence.score if request.kind == "score" else None
        request.outcome = Finished(snapshot, reason, stop_token, usage, score)
        self._changed.append(request)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        del self._sequences[sequence.request]
        self._drop(sequence)
        sequence.request.outcome = Failed(error)
        self._changed.append(sequence.request)

    def _drop(self, sequence: Sequence) -> None:
        table = self._scheduler.remove(sequence)
        if table is not None:
            # A failed or unplanned step may have left blocks beyond the length.
            self._memory.release(table)


def _is_drawn(span: Span) -> bool:
    request = span.sequence.request
    is_greedy = request.options.temperature == 0
    return request.kind == "generate" and span.end == span.sequence.num_tokens and not is_greedy


def _row(span: Span, uniform: float) -> Row:
    sequence, request = span.sequence, span.sequence.request
    assert sequence.table is not None, "a sequence in a step has a table"
    sample = None
    if request.kind == "generate" and span.end == sequence.num_tokens:
        sample = _sample_spec(sequence, uniform)
    return Row(
        seq_id=sequence.arrival,
        token_ids=sequence.ids(span.start, span.end),
        start=span.start,
        block_ids=sequence.table.block_ids,
        sample=sample,
        targets=tuple(_targets(span)) if request.kind == "score" else (),
    )


def _sample_spec(sequence: Sequence, uniform: float) -> SampleSpec:
    request = sequence.request
    options = request.options
    is_early = len(request.output_ids) < options.min_tokens
    repeats = options.repetition_penalty not in (None, 1.0)
    counts = bool(options.presence_penalty or options.frequency_penalty)
    length = sequence.num_tokens
    return SampleSpec(
        options=options,
        uniform=uniform,
        prompt_ids=sequence.ids(0, sequence.num_input if repeats else 0),
        output_ids=sequence.ids(sequence.num_input if repeats or counts else length, length),
        banned_ids=tuple(sorted(request.stop_token_ids)) if is_early else (),
        mask=None if request.constraint is None else request.constraint.mask(),
    )


def _targets(span: Span) -> Iterable[tuple[int, int]]:
    """Each score id that follows an id of the span, with the offset of that id in the span."""
    sequence = span.sequence
    first = max(span.start, sequence.num_input - 1)
    following = sequence.ids(first + 1, span.end + 1).tolist() if span.end > first else []
    return ((first + at - span.start, token_id) for at, token_id in enumerate(following))
