"""The witness's tests of blocks, core and sessions once more, where all hashes collide."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.testing.driver import CoreDriver

TESTS = Path(__file__).parent
# All that touch blocks, core or sessions, but the loads of `make proof` and the models' own.
SUITES = (
    "core",
    "kv",
    "cases",
    "embedding",
    "proof/test_surroundings.py",
    "test_bad_input.py",
    "test_cancellation.py",
    "test_constant_hash.py",
    "test_cycles.py",
    "test_engine.py",
    "test_isolation.py",
    "test_loops.py",
    "test_session.py",
    "test_sharing.py",
    "test_streams.py",
)
# One event loop is enough for what hashes decide. The machine draws its own hashes.
LEFT_OUT = ("uvloop", "trio", "all_of_them", "index_of_prefixes", "TestMachine")


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_all_of_them_pass_with_a_constant_hash() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--constant-hash"]
    chosen = " and ".join(f"not {name}" for name in LEFT_OUT)
    command += ["-k", chosen, *(str(TESTS / name) for name in SUITES)]
    run = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 600


def test_the_switch_reaches_every_core(request: pytest.FixtureRequest) -> None:
    cache = CoreDriver().core._memory.cache
    hashes = {cache._hash((name, 0, b"")) for name in "abcdefgh"}
    assert (len(hashes) == 1) == request.config.getoption("--constant-hash")
