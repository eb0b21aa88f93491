"""Texts that lie scattered in a file, as columns of Arrow. Nothing here loops over them; one trick makes them:

data      ....[record 0]..[record 1].......[record 2]
offsets       s0       e0 s1       e1      s2       e2        an Arrow array: record, gap, record, gap, record
take 0, 2, 4, ...                                             one copy in C++ per record, no gap
"""

import numpy as np
import pyarrow as pa


class Bytes:
    """A file's bytes, as numpy and as Arrow see them; no copy."""

    def __init__(self, data: np.ndarray) -> None:
        self.array = data
        self.buffer = pa.py_buffer(data)

    def __len__(self) -> int:
        return len(self.array)


def gather(data: Bytes, start: np.ndarray, stop: np.ndarray) -> pa.Array:
    """The bytes from each start to its stop, as an array of binary. Places ascend and do not overlap."""
    offsets = np.empty(2 * len(start), np.int64)
    offsets[0::2], offsets[1::2] = start, stop
    if not len(start):
        return pa.array([], pa.binary())
    alternating = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data.buffer])
    return alternating.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int64))).cast(pa.binary())


def as_text(column: pa.Array) -> pa.Array:
    """Binary as text; what is no UTF-8 is null."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in column.to_pylist()], pa.string())


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def big_endian(data: Bytes, at: np.ndarray, size: int) -> np.ndarray:
    found: np.ndarray = numbers_at(data.array, f">u{size}")[at].astype(np.int64)
    return found


def numbers_at(data: np.ndarray, kind: str) -> np.ndarray:
    """The number that begins at each byte; no copy."""
    size = np.dtype(kind).itemsize
    return np.ndarray(max(len(data) - size + 1, 0), kind, data, strides=(1,))
