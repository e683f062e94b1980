"""What agentkv is tested with, and what programs that use it can be tested with. No weights.

`witness`, `scripted` and `byte_tokenizer` stand in for a model; see docs/testing.md.
"""

from .byte_tokenizer import byte_tokenizer
from .scripted import Heard, ScriptedRunner, scripted_engine
from .witness import WitnessRunner, witness_reply, witness_score

__all__ = [
    "Heard",
    "ScriptedRunner",
    "WitnessRunner",
    "byte_tokenizer",
    "scripted_engine",
    "witness_reply",
    "witness_score",
]
