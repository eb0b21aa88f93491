"""Walks over the bytes of a log, batch by batch, and names what cannot be read. `postdate log` uses it too.

It reads only, so it may walk the log of a running broker.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from postdate.storage import batch as batches
from postdate.storage import segment
from postdate.storage.batch import Batch
from postdate.storage.disk import View
from postdate.storage.segment import Segments


class Hole(NamedTuple):
    """A part of a segment in which no batch can be read."""

    offset: int
    end: int
    problem: str
    is_blank: bool  # zeros up to the end of the segment, as after the end of the log


def walk(segments: Segments, start: int) -> Iterator[Batch | Hole]:
    """The batches (fillers too) from an offset at which one begins to the end of its segment, and the holes between.

    A hole is followed by the next whole batch that is found, if there is one: pages may be lost one by one. The end of
    the log is a hole too, up to the end of its segment.
    """
    base = start & -segments.segment_bytes
    view, end = segments.view(base), base + segments.segment_bytes
    assert view is not None, f"segment {base} does not exist"
    while start < end:
        found = batches.parse(view, start - base, start)
        if found.batch is None:
            following = _following(segments, view, base, start)
            is_blank = following == end and not segments.array(base)[start - base :].any()
            yield Hole(start, following, found.problem, is_blank)
            start = following
        else:
            yield found.batch
            start = found.batch.end


def _following(segments: Segments, view: View, base: int, offset: int) -> int:
    """Returns where the next whole batch after an offset of this segment begins; the segment's end if there is none."""
    low = offset - base + batches.ALIGNMENT
    data = segments.array(base)[low:]
    words = data[: len(data) // batches.ALIGNMENT * batches.ALIGNMENT].view(np.uint32)[:: batches.ALIGNMENT // 4]
    for index in np.flatnonzero(words == batches.MAGIC).tolist():
        position = low + index * batches.ALIGNMENT
        if batches.parse(view, position, base + position).batch is not None:
            return base + position
    return base + segments.segment_bytes


def place_of(segments: Segments, offset: int) -> str:
    """An offset of the log as a place that can be looked up."""
    base = offset & -segments.segment_bytes
    return f"{segment.path_of(base)}, offset {offset} (byte {offset - base} of the file)"
