"""The small tables at the end of the log, and the rows that a broker will have when it has opened the folder."""

import numpy as np

from postdate.check.folder import Folder, dtype_of
from postdate.state.fold import Fold
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.rows import Rows


class Tables:
    """The files up to the newest snapshot's lengths, then what the second fold made."""

    def __init__(self, folder: Folder, fold: Fold | None) -> None:
        self._folder, self._fold = folder, fold
        newest = folder.newest
        # A fold that had to stop may know fewer queues than the snapshot.
        self.places = max(self._saved_places(), fold.topics.places if fold else [], key=len)
        self.chunk_end = max(newest.state["chunk_end"] if newest else CHUNK_BIT, fold.chunk_end if fold else 0)

    def _saved_places(self) -> list[tuple[str, int]]:
        newest = self._folder.newest
        return [(name, queue_id) for name, queue_id in newest.state["topics"]["places"]] if newest else []

    def chunks(self) -> list[tuple[int, str]]:
        """The staged chunks that are needed or still there, by base."""
        names = self._saved_chunks()
        if self._fold is not None:
            names |= {base: self._fold.chunks.name_of(base) for base in self._fold.chunks.bases()}
        return sorted(names.items())

    def _saved_chunks(self) -> dict[int, str]:
        newest = self._folder.newest
        if newest is None:
            return {}
        waiting = {base for base, _, _ in newest.state["runs"]}
        names = newest.chunk_names()
        return {base: name for base, name in names.items() if base in waiting or self._folder.has_chunk(name)}

    def rows(self, name: str) -> tuple[int, np.ndarray]:
        """The number of the first row and the rows. Raises CorruptQueue where a file misses some."""
        newest, folded = self._folder.newest, self._folded(name)
        stored = self._folder.rows(newest, name) if newest else None
        first, length = (stored.first, stored.length) if stored else (0, 0)
        rows = stored.read(first, length) if stored else np.empty(0, dtype_of(name))
        return first, np.concatenate([rows, folded.read(length, folded.length)]) if folded else rows

    def _folded(self, name: str) -> Rows | None:
        if self._fold is None or name == "far":
            return self._fold.far.rows if self._fold else None
        number, kind = name.split("/")[1:]
        queue = self._fold.queues[int(number)] if int(number) < len(self._fold.queues) else None
        return (queue.entries if kind == "entries" else queue.times) if queue else None
