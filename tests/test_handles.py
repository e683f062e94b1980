"""Handles: there is one of each, which no copy can close behind its owner's back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from tests.bench import Bench, expected

pytestmark = pytest.mark.anyio

COPIES: dict[str, Callable[[object], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("way", COPIES)
async def test_a_handle_is_not_copied_and_goes_on(bench: Bench, way: str) -> None:
    session = await bench.engine.session(system="One of a kind.")
    checkpoint = session.checkpoint()
    async with session.stream("x", max_tokens=9) as stream:
        for handle in (bench.engine, session, checkpoint, stream):
            with pytest.raises(TypeError, match=f"this {type(handle).__name__}, is neither copied"):
                COPIES[way](handle)
        deltas = [delta async for delta in stream]
    assert [token for delta in deltas for token in delta.token_ids] == expected(session, 9)
    session.rollback(checkpoint)
    await session.generate("y", max_tokens=9)
    assert list(session.token_ids[-9:]) == expected(session, 9)
