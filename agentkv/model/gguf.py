"""Reading GGUF files: metadata, tensor table, and tensors as floating-point arrays.

Knows the container format and nothing about models. A file is not trusted: every count and size in
it is compared with the bytes that are there before anything is allocated for it.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ..errors import ModelError

__all__ = ["GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_KEY_BYTES = 65535
MAX_ALIGNMENT = 2**20
STRING, ARRAY = 8, 9
BLOCKS_AT_ONCE = 4096
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_WIDTHS = {code: struct.calcsize("<" + letter) for code, letter in _SCALARS.items()}
_TABLE_ENTRY_BYTES = 8 + 4 + 4 + 8
_METADATA_ENTRY_BYTES = 8 + 4 + 1


class GGUFTensor(NamedTuple):
    """Where one tensor lies in the file: `offset` and `num_bytes` from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file that has been checked and mapped; close it, or use it as a context manager.

    Raises:
        ModelError: the file cannot be read, is no GGUF file, or its sizes contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
        try:
            cursor = _Cursor(self._map)
            metadata, num_tensors = _read_metadata(cursor)
            self.metadata: dict[str, Any] = metadata
            self.tensors: dict[str, GGUFTensor] = _read_table(cursor, num_tensors, self.metadata)
        except (_DamagedError, struct.error, UnicodeDecodeError) as error:
            self._map.close()
            raise ModelError(f"{path} is not a sound GGUF file: {error}") from error

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        self._map.close()

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A copy of the tensor `name`, dequantised to float32.

        Raises:
            KeyError: there is no such tensor.
            ModelError: its values are not finite.
        """
        tensor = self.tensors[name]
        raw = self._map[tensor.offset : tensor.offset + tensor.num_bytes]
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        if tensor.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            width = np.float32 if tensor.kind == GGMLQuantizationType.F32 else np.float16
            values = np.frombuffer(raw, dtype=width).astype(np.float32).reshape(tensor.shape)
        else:
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes)
            values = _dequantize(blocks, block, tensor.kind).reshape(tensor.shape)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name} holds values that are not finite")
        return np.ascontiguousarray(values)


def _dequantize(
    blocks: npt.NDArray[np.uint8], block: int, kind: GGMLQuantizationType
) -> npt.NDArray[np.float32]:
    """[num_blocks, bytes] to [num_blocks, block], in runs of blocks that stay in the CPU cache.

    `gguf.quants.dequantize` gives the same values 16 rows at a time, which takes six times as long.
    """
    if kind.name.startswith("IQ"):
        return np.asarray(dequantize(blocks, kind), dtype=np.float32)
    values = np.empty((len(blocks), block), dtype=np.float32)
    convert = getattr(quants, kind.name).dequantize_blocks
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        values[part] = convert(blocks[part])
    return values


class _DamagedError(Exception):
    """The bytes are not what the format promises."""


class _Cursor:
    """Reads forward through the file and never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0
        self.size = len(data)

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.left:
            raise _DamagedError(
                f"{num_bytes} bytes are needed at offset {self.position} and {self.left} are left"
            )
        start = self.position
        self.position += num_bytes
        return self._data[start : self.position]

    def number(self, letters: str) -> tuple[Any, ...]:  # Any: what struct gives
        return struct.unpack("<" + letters, self.take(struct.calcsize("<" + letters)))

    def string(self) -> str:
        (length,) = self.number("Q")
        return self.take(length).decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings in a tight loop; a vocabulary has a hundred thousand."""
        unpack, data, position, end = (
            struct.Struct("<Q").unpack_from,
            self._data,
            self.position,
            self.size,
        )
        found = []
        for _ in range(count):
            if position + 8 > end:
                raise _DamagedError("a list of strings runs past the end of the file")
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise _DamagedError("a string runs past the end of the file")
            found.append(data[start:position].decode("utf-8"))
        self.position = position
        return found


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:  # Any: metadata values
    """The metadata and the number of tensors."""
    if cursor.left < 24 or cursor.take(4) != MAGIC:
        raise _DamagedError("it does not begin as a GGUF file does")
    version, num_tensors, num_keys = cursor.number("IQQ")
    if version not in VERSIONS:
        raise _DamagedError(f"its version is {version}; versions 2 and 3 are read")
    if num_keys * _METADATA_ENTRY_BYTES > cursor.left:
        raise _DamagedError(f"it announces {num_keys} metadata entries, more than fit in it")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        (length,) = cursor.number("Q")
        if length > MAX_KEY_BYTES:
            raise _DamagedError(f"a metadata key has {length} bytes")
        key = cursor.take(length).decode("utf-8")
        if key in metadata:
            raise _DamagedError(f"the metadata key {key!r} occurs twice")
        (kind,) = cursor.number("I")
        metadata[key] = _read_value(cursor, kind)
    if num_tensors * _TABLE_ENTRY_BYTES > cursor.left:
        raise _DamagedError(f"it announces {num_tensors} tensors, more than fit in it")
    return metadata, num_tensors


def _read_value(cursor: _Cursor, kind: int) -> Any:  # Any: metadata values
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])[0]
    if kind == STRING:
        return cursor.string()
    if kind != ARRAY:
        raise _DamagedError(f"a metadata value has the unknown type {kind}")
    element, count = cursor.number("IQ")
    if element != STRING and element not in _SCALARS:
        raise _DamagedError(f"a metadata list has elements of type {element}")
    if count * (8 if element == STRING else _WIDTHS[element]) > cursor.left:
        raise _DamagedError(
            f"a metadata list announces {count} elements, more than fit in the file"
        )
    if element == STRING:
        return cursor.strings(count)
    return list(cursor.number(f"{count}{_SCALARS[element]}"))


def _read_table(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]
) -> dict[str, GGUFTensor]:  # Any: metadata values
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if (
        type(alignment) is not int
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise _DamagedError(f"its alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise _DamagedError(f"rows of tensor {name!r} are no multiple of {block} elements")
        num_bytes = math.prod(shape) // block * block_bytes
        if offset % alignment or data_start + offset + num_bytes > cursor.size:
            raise _DamagedError(
                f"tensor {name!r} would end at byte {data_start + offset + num_bytes} of "
                f"{cursor.size}; the file is damaged or was not downloaded whole"
            )
        if name in tensors:
            raise _DamagedError(f"tensor {name!r} occurs twice")
        tensors[name] = GGUFTensor(name, shape, kind, data_start + offset, num_bytes)
    # Tensors that share bytes would let a small file unfold into any amount of memory.
    if sum(tensor.num_bytes for tensor in tensors.values()) > cursor.size:
        raise _DamagedError("its tensors overlap")
    return tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    (num_dimensions,) = cursor.number("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {name[:80]!r} has {num_dimensions} dimensions")
    dimensions = cursor.number(f"{num_dimensions}Q")
    code, offset = cursor.number("IQ")
    if not all(0 < size < 2**40 for size in dimensions):
        raise _DamagedError(f"tensor {name[:80]!r} has the shape {dimensions}")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise _DamagedError(f"tensor {name[:80]!r} has the unknown type {code}") from None
    # The file lists the fastest-moving dimension first.
    return name, tuple(reversed(dimensions)), kind, offset
