"""Where records lie: in a segment of the log or in a staged chunk, by their offsets."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from postdate.bulk.link import Link, StagedChunk
from postdate.log import chunk as chunks
from postdate.log import segment
from postdate.log.chunk import CHUNK_BIT


class Place(NamedTuple):
    """A file, and the offset of its first byte."""

    path: str
    base: int


class Places:
    """Of one stream: the list of chunks is asked for again where it does not hold an offset."""

    def __init__(self, segment_bytes: int, link: Link) -> None:
        self._segment_bytes = segment_bytes
        self._link = link
        self._chunks: list[StagedChunk] = []

    def of(self, offset: np.ndarray) -> Iterator[tuple[Place, np.ndarray]]:
        """The files that hold the records, and which of the offsets lead to each, by place in it."""
        bases = offset // self._segment_bytes * self._segment_bytes
        in_chunks = np.flatnonzero(offset >= CHUNK_BIT)
        bases[in_chunks] = [self._chunk_base(each) for each in offset[in_chunks].tolist()]
        for base in np.unique(bases[bases >= 0]).tolist():
            index = np.flatnonzero(bases == base)
            yield self._place(base), index[np.argsort(offset[index], kind="stable")]

    def _place(self, base: int) -> Place:
        path = segment.path_of(base) if base < CHUNK_BIT else chunks.path_of(self._chunk_of(base).name)
        return Place(path, base)

    def _chunk_base(self, offset: int) -> int:
        """Where the chunk begins that holds an offset; -1 where it is gone."""
        if not self._holds(offset):
            self._chunks = self._link.chunks()
        return self._chunk_of(offset).base if self._holds(offset) else -1

    def _holds(self, offset: int) -> bool:
        if not self._chunks or offset < self._chunks[0].base:
            return False
        found = self._chunk_of(offset)
        return offset < found.base + found.size

    def _chunk_of(self, offset: int) -> StagedChunk:
        return self._chunks[bisect_right(self._chunks, offset, key=lambda each: each.base) - 1]
