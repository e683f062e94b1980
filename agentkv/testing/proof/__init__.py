"""What shows that the engine keeps its promises: each module runs one kind of proof.

benchmarks/proof.py runs them at full size; the tests run a short form of each.
"""
