"""What agentkv is tested with, and what programs that use it can be tested with. No weights.

`witness`, `scripted` and `byte_tokenizer` stand in for a model, `faults` and `faulty` make things
go wrong, `deterministic` decides a whole run by a seed; see docs/testing.md.
"""

from .byte_tokenizer import byte_tokenizer
from .deterministic import Deadlock, DeterministicLoop, SteppedEngine, simulate
from .faults import FaultPlan, FaultPoint, PlannedFault
from .faulty import FaultyEngine, FaultyRunner
from .scripted import Heard, ScriptedRunner, scripted_engine
from .witness import WitnessRunner, witness_reply, witness_score

__all__ = [
    "Deadlock",
    "DeterministicLoop",
    "FaultPlan",
    "FaultPoint",
    "FaultyEngine",
    "FaultyRunner",
    "Heard",
    "PlannedFault",
    "ScriptedRunner",
    "SteppedEngine",
    "WitnessRunner",
    "byte_tokenizer",
    "scripted_engine",
    "simulate",
    "witness_reply",
    "witness_score",
]
