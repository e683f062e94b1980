"""One step in the runner: rows and copies in, results out, whatever the runner does.

Knows which batch is in execution, and hands it to exactly one: the step that returns, or whoever
gives the step up for lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import StepError
from ..kv.memory import Copy
from .batch import Batch, BlockCopy, Row, RowResult
from .protocols import Runner
from .rows import ForkTree


class Outcome(NamedTuple):
    """What became of a step: its results, one a row, or the error that took their place."""

    results: list[RowResult]
    error: BaseException | None


class Execution:
    """The runner's side of a step."""

    def __init__(self, runner: Runner) -> None:
        self.num_steps: int = 0
        self.num_copies: int = 0
        self._runner = runner
        self._tree = ForkTree(runner.info.block_size)
        # Popping is atomic: the step and `abandon` cannot both have the batch.
        self._in_step: list[Batch] = []

    def run(self, rows: Sequence[Row], copies: Sequence[Copy], tree_changes: int) -> Outcome | None:
        """Have the runner execute the rows; None if the step was abandoned meanwhile.

        `tree_changes` differs from the last step's where shared blocks may have changed.
        """
        self._tree.update(rows, tree_changes)
        batch = Batch(
            rows=tuple(rows),
            copies=tuple(BlockCopy(*copy) for copy in copies),
            segments=self._tree.segments,
            tree_version=self._tree.version,
        )
        self.num_steps += 1
        self.num_copies += len(copies)
        self._in_step.append(batch)
        outcome = self._execute(batch)
        try:
            self._in_step.pop()
        except IndexError:
            return None
        return outcome

    def abandon(self) -> Batch | None:
        """Take the batch of a step that does not return; None when no step is in execution."""
        try:
            return self._in_step.pop()
        except IndexError:
            return None

    def _execute(self, batch: Batch) -> Outcome:
        try:
            results = self._runner.execute(batch)
            if len(results) != len(batch.rows):
                raise StepError(f"{len(batch.rows)} rows gave {len(results)} results")
        except BaseException as error:
            return Outcome([], error)
        return Outcome(results, None)
