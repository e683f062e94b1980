"""Stateless random numbers: one uniform for each (key, position), by Philox4x32-10.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3. A key is a
pair of 64-bit ints: the first is Philox's key, the second half of its counter, so that every
(key, position) has its own block of the generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Key = tuple[int, int]
Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def uniform(key: Key, position: int) -> float:
    """The random number of one token, in [0, 1), a multiple of 2**-24 and so exact in float32."""
    return float(uniforms([key], [position])[0])


def uniforms(keys: Sequence[Key], positions: Sequence[int]) -> npt.NDArray[np.float32]:
    """The random number of each (key, position): float32 [num], in [0, 1)."""
    words = np.array(keys, dtype=np.uint64).reshape(-1, 2)
    counters = np.array(positions, dtype=np.uint64)
    block = philox(_split(counters) + _split(words[:, 1]), _split(words[:, 0]))
    return ((block[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)).astype(np.float32)


def philox(counter: tuple[Words, ...], key: tuple[Words, ...]) -> tuple[Words, ...]:
    """Philox4x32-10 on arrays: four counter words and two key words, each below 2**32."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = x0 * np.uint64(_MULTIPLIERS[0])
        product1 = x2 * np.uint64(_MULTIPLIERS[1])
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ x3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
        k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
    return x0, x1, x2, x3


def _split(values: Words) -> tuple[Words, Words]:
    return values & _LOW, values >> _SHIFT
