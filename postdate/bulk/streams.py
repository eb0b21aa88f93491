"""A range of a queue as record batches: rows, then their records where they lie, then columns.

Bounded: a block of rows, one batch under way, and the maps that all streams share. Whoever stops reading stops this.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.cancels import with_cancels
from postdate.bulk.arrow import columns
from postdate.bulk.maps import Maps
from postdate.bulk.rows import QueueRows
from postdate.bulk.schema import OUT
from postdate.storage import segment
from postdate.storage.batch import CANCEL, JOB

BATCH_ROWS_MAX = 16_384
BATCH_BYTES_MAX = 8 * 1024 * 1024  # of records; one that is larger has a batch to itself


class DueRange(NamedTuple):
    """Far rows with low < due <= high."""

    low: int = -(1 << 63)
    high: int = (1 << 63) - 1


def far_batches(queue: QueueRows, maps: Maps, segment_bytes: int, wanted: DueRange) -> Iterator[pa.RecordBatch]:
    """The far rows whose records are in the log. Raises CorruptLog for a record that is not what its row says."""
    for block in queue.blocks():
        is_wanted = (block.rows["due"] > wanted.low) & (block.rows["due"] <= wanted.high)
        chosen = np.flatnonzero(is_wanted & (block.rows["kind"] != JOB))  # of jobs, whoever carries them out is told
        rows = block.rows if len(chosen) == len(block.rows) else block.rows[chosen]
        for piece in pieces(rows["size"]):
            batch = _far_batch(block.start + chosen[piece], rows[piece], maps, segment_bytes)
            if batch.num_rows:
                yield batch


def pieces(size: np.ndarray) -> Iterator[slice]:
    """Cuts records of these sizes into batches."""
    ends = np.cumsum(size, dtype=np.int64)
    start = 0
    while start < len(size):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + BATCH_BYTES_MAX, "right"))
        stop = max(min(stop, start + BATCH_ROWS_MAX), start + 1)
        yield slice(start, stop)
        start = stop


def _far_batch(numbers: np.ndarray, rows: np.ndarray, maps: Maps, segment_bytes: int) -> pa.RecordBatch:
    """Rows of one or more segments, which ascend as their arrivals do."""
    bases = rows["arrival"] // segment_bytes * segment_bytes
    edges = [0, *(np.flatnonzero(bases[1:] != bases[:-1]) + 1).tolist(), len(rows)]
    parts = [_of_segment(numbers[low:high], rows[low:high], int(bases[low]), maps) for low, high in pairwise(edges)]
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _of_segment(numbers: np.ndarray, rows: np.ndarray, base: int, maps: Maps) -> pa.RecordBatch:
    data = maps.get(segment.path_of(base))
    if data is None:
        return pa.RecordBatch.from_pylist([], OUT)
    found = columns(data, rows["arrival"] - base, rows["size"].astype(np.int64))
    found = with_cancels(found, rows["kind"] == CANCEL)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(numbers), plain(rows, "kind", np.int8), found.topic, plain(rows, "queue", np.int32),
            plain(rows, "level", np.int8), plain(rows, "due", np.int64), plain(rows, "arrival", np.int64),
            plain(rows, "tag_hash", np.int32), plain(rows, "unique_hash", np.int64),
            plain(rows, "key_hash", np.int64), found.key, found.tag, found.record,
        ],
        schema=OUT,
    )  # fmt: skip


def plain(rows: np.ndarray, name: str, kind: type) -> pa.Array:
    """A column by its bits: Arrow has no use for unsigned numbers here, and Spark none at all."""
    return pa.array(np.ascontiguousarray(rows[name]).view(kind))
