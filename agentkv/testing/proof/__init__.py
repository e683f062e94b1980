"""What shows that the engine keeps its promises: each module runs one kind of proof.

`python -m agentkv.testing.proof` runs them at full size; the tests run a short form of each.
"""
