"""What one step is going to do, as the scheduler decides it and the core carries it out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..kv.memory import Copy
from .working import Sequence


@dataclass(slots=True, eq=False)
class Span:
    """A sequence's part of a step: its KV grows from `start` to `end`."""

    sequence: Sequence
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """A step: what runs, what must be copied before, and who is done without running.

    The rest is the scheduler's note-book while it makes the plan: tokens `left` for prefill, the
    blocks that this step computes, who could not start for want of room, who was preempted.
    """

    left: int
    spans: list[Span] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    ready: list[Sequence] = field(default_factory=list)
    scheduled: set[Sequence] = field(default_factory=set)
    preempted: set[Sequence] = field(default_factory=set)
    blocked: list[Sequence] = field(default_factory=list)
    computing: set[Hashable] = field(default_factory=set)
