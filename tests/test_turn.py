"""What a turn is made of, without an engine."""

from __future__ import annotations

from agentkv.turn import derive_key


def test_derived_keys_differ_and_repeat() -> None:
    keys = {derive_key(1, "fork", ordinal) for ordinal in range(1000)}
    assert len(keys) == 1000
    assert derive_key(1, "fork", 7) == derive_key(1, "fork", 7)
    assert derive_key(1, "fork", 7) != derive_key(2, "fork", 7)
    assert derive_key(1, "fork", 7) != derive_key(1, "rollback", 7)
    assert derive_key(1, "fork", 23) != derive_key(12, "fork", 3)
