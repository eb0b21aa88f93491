"""Where records lie: in a segment of the log or in a staged chunk, by their offsets."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from postdate.bulk.broker_link import Link, StagedChunk
from postdate.storage import chunk as chunks
from postdate.storage import segment
from postdate.storage.chunk import CHUNK_BIT


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
        if len(in_chunks):
            bases[in_chunks] = self._chunk_bases(offset[in_chunks])
        for base in np.unique(bases[bases >= 0]).tolist():
            index = np.flatnonzero(bases == base)
            yield self._place(base), index[np.argsort(offset[index], kind="stable")]

    def _place(self, base: int) -> Place:
        path = segment.path_of(base) if base < CHUNK_BIT else chunks.path_of(self._chunk_of(base).name)
        return Place(path, base)

    def _chunk_bases(self, offset: np.ndarray) -> np.ndarray:
        """Where the chunks begin that hold these offsets; -1 where one is gone."""
        found = self._known_bases(offset)
        if (found < 0).any():
            self._chunks = self._link.chunks()
            found = self._known_bases(offset)
        return found

    def _known_bases(self, offset: np.ndarray) -> np.ndarray:
        if not self._chunks:
            return np.full(len(offset), -1, np.int64)
        base, size = (np.array([getattr(each, name) for each in self._chunks]) for name in ("base", "size"))
        index = np.searchsorted(base, offset, "right") - 1
        is_held = (index >= 0) & (offset < base[index] + size[index])
        return np.where(is_held, base[index], -1)

    def _chunk_of(self, base: int) -> StagedChunk:
        return self._chunks[bisect_right(self._chunks, base, key=lambda each: each.base) - 1]
