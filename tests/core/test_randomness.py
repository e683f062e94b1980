from __future__ import annotations

import numpy as np

from agentkv.core.randomness import philox, uniform, uniforms


def words(*values: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def test_philox_gives_the_published_known_answers() -> None:
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for counter, key, expected in cases:
        assert tuple(int(x[0]) for x in philox(words(*counter), words(*key))) == expected


def test_a_number_depends_on_key_and_position_alone() -> None:
    keys = [(7, 0), (7, 1), (2**64 - 1, 2**64 - 1)]
    together = uniforms(keys, [5, 5, 2**40])
    alone = [uniform(key, position) for key, position in zip(keys, [5, 5, 2**40], strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_numbers_are_uniform_float32_below_one() -> None:
    values = uniforms([(3, 4)] * 20000, range(20000))
    assert values.dtype == np.float32
    assert 0.0 <= values.min()
    assert values.max() < 1.0
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert abs(counts - 2000).max() < 200
