"""What core needs of others: a runner that executes batches, a stop rule, a token constraint."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .batch import Batch, ModelInfo, RowResult


class FatalRunnerError(Exception):
    """The device can no longer be trusted; the engine ends with this as the cause."""


@runtime_checkable
class Runner(Protocol):
    """Executes batches on KV memory that it owns. Called from the step thread alone."""

    @property
    def info(self) -> ModelInfo:
        """What the engine must know of the model; constant while open."""
        ...

    def execute(self, batch: Batch) -> list[RowResult]:
        """Run the copies, then all rows, and return one result a row, in order.

        An exception means that no row has a result; what was written stays unpublished.
        """
        ...

    def close(self) -> None:
        """Free the KV memory. Idempotent; no call follows."""
        ...


class StopRule(Protocol):
    """Decides, id by id, whether the text of a reply is complete. Stateful, one per generation."""

    def accept(self, token_id: int) -> bool:
        """Take the next sampled id; True when the reply ends with it."""
        ...


class TokenConstraint(Protocol):
    """Says which ids may come next, and follows those that did. Stateful, one per generation."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """True for each id of the vocabulary that may be drawn next."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the id that was drawn."""
        ...

    def copy(self) -> TokenConstraint:
        """An independent constraint in the same state."""
        ...
