"""The second fold: the log applied anew, from as far back as it can be, and compared with what the broker left.

From the beginning where nothing is gone yet, since that proves most; else from the older snapshot. After a hole it
stands still: what follows cannot be applied without what is missing.
"""

from collections.abc import Iterator

import numpy as np

from postdate.check import state
from postdate.check.folder import Folder, dtype_of, named
from postdate.check.overlay import Overlay
from postdate.check.walk import place_of
from postdate.errors import CorruptData, PostdateError
from postdate.state import saved as recovery
from postdate.state.fold import Fold
from postdate.state.wheel import NEVER
from postdate.storage import segment
from postdate.storage.batch import KIND_FILLER, STAGE, Batch
from postdate.storage.log import Log
from postdate.storage.rows import Rows

_TAIL_ROWS = 8_192  # it writes to memory, in pieces worth a comparison
# What applying a batch can trip over when its bytes are whole but its content is not what a broker writes.
_APPLY_ERRORS = (PostdateError, AssertionError, LookupError, TypeError, ValueError)


class Refold:
    """Takes the log batch by batch, then `finish`. `fold` is None where there is nothing to begin from."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._report = folder.report
        self._overlay = Overlay(folder.disk)
        self._log = Log(self._overlay, folder.segments, 1)
        self.staged_at: dict[int, int] = {}  # by chunk base, of those staged while folding
        self.fold = self._started()
        self._next = self.fold.position if self.fold else NEVER
        self._loaded = {rows.folder: rows.length for rows in self._all_rows()}
        # The snapshot that it began from is no proof of itself.
        self._uncompared = {s.position: s for s in folder.saved if self._next == 0 or s.position > self._next}
        self.is_stopped = False  # at a hole of the log, or at a batch that cannot be applied
        self._compare_snapshot()

    # -- where to begin -----------------------------------------------------------------------------------------

    def _started(self) -> Fold | None:
        if not self._folder.is_shortened:
            return self._fresh()
        for saved in reversed(self._folder.saved):
            fold = self._fresh()
            try:
                recovery.load(fold, saved.sections)
            except CorruptData as error:
                self._report.find(f"{saved.path} cannot be loaded: {error}")
                continue
            return fold
        bases = self._folder.segments.bases
        if not bases or bases[0] == 0:
            return self._fresh()
        self._report.find(f"no snapshot can be used and the log begins at {bases[0]}: no broker can open this folder")
        return None

    def _fresh(self) -> Fold:
        fixed, shift = self._folder.fixed, self._folder.segments.shift
        rows, far_rows = fixed["queue_file_rows"], fixed["far_block_rows"]
        return Fold(self._overlay, self._log.read, shift, rows, _TAIL_ROWS, far_block_rows=far_rows)

    # -- batch by batch -----------------------------------------------------------------------------------------

    def near_until(self, batch: Batch) -> int:
        """Up to which due a message of this batch, which is applied next, comes into the wheel at once; -1 = not known.

        Not known is also what comes while the clock is behind an instant that it has shown before: nothing fires then.
        """
        fold = self.fold
        follows = not self.is_stopped and batch.offset == self._next
        if fold is None or not follows or batch.at_ms < fold.fired_at_ms:
            return -1
        return batch.at_ms + fold.lead_ms

    def stop(self) -> None:
        """The log has a hole here."""
        self.is_stopped = True

    def apply(self, batch: Batch) -> None:
        """Takes the next batch or filler; those before the beginning are passed over."""
        if self.fold is None or self.is_stopped or batch.offset < self._next:
            return
        if batch.offset > self._next:
            place = place_of(self._folder.segments, self._next)
            self._report.find(f"{place}: the segment is missing, and the log from there on is needed")
            self.stop()
            return
        if batch.kind != KIND_FILLER:
            self._apply(self.fold, batch)
        self._next = batch.end

    def _apply(self, fold: Fold, batch: Batch) -> None:
        stepped_back = batch.at_ms < fold.fired_at_ms
        try:
            fold.apply(batch)
        except _APPLY_ERRORS as error:
            place = place_of(self._folder.segments, batch.offset)
            self._report.find(f"{place}: the batch cannot be applied: {error!r}")
            self.stop()
            return
        self._report.count("batches applied anew", 1)
        if batch.row_count and batch.rows[0] == STAGE:
            for base in fold.chunks.bases():
                self.staged_at.setdefault(base, NEVER if stepped_back else batch.at_ms)
        self._compare_snapshot()

    # -- against the snapshots ----------------------------------------------------------------------------------

    def _compare_snapshot(self) -> None:
        saved = self._uncompared.pop(self.fold.position, None) if self.fold else None
        if saved is None or self.fold is None:
            return
        sentences = [f"{saved.path}: {sentence}" for sentence in state.differences(self._folder, saved, self.fold)]
        self._report.find_each(np.ones(len(sentences), np.bool_), sentences.__getitem__)
        slots = state.slots_of(self.fold)
        self._report.count("waiting messages equal to the log", sum(map(len, slots.values())))
        for sentence in state.slot_differences(saved, slots):
            self._report.find(f"{saved.path}: {sentence}")
        self._report.count("snapshots equal to the log", 1)

    # -- against the files --------------------------------------------------------------------------------------

    def finish(self, log_end: int) -> None:
        """After the last batch."""
        for position, saved in self._uncompared.items():
            if self.fold is not None and not self.is_stopped:
                self._report.find(f"{saved.path}: no batch ends at {position}, the log ends at {log_end}")
        newest = self._folder.newest
        lengths = newest.lengths if newest else {}
        for rows in self._all_rows():
            self._compare_rows(rows, lengths.get(rows.folder, 0))
        self._check_held()

    def _all_rows(self) -> Iterator[Rows]:
        if self.fold is not None:
            yield from self.fold.all_rows()

    def _compare_rows(self, rows: Rows, needed: int) -> None:
        """Rows before `needed` are what the next start trusts; those behind it makes again, whatever is there."""
        step, size = self._folder.file_rows(rows.folder), dtype_of(rows.folder).itemsize
        start = max(self._loaded.get(rows.folder, 0), rows.first)
        while start < rows.length:
            stop = min((start // step + 1) * step, rows.length)
            path, position = self._folder.file_of(rows.folder, start)
            there = max(self._folder.disk.size(path), 0) // size + start // step * step
            if there > start:
                data = self._folder.disk.read(path, position, (min(stop, there) - start) * size)
                self._compare_piece(rows, path, start, data, needed)
            self._report.count("rows that the next start makes again", stop - max(min(stop, there), start))
            start = stop

    def _compare_piece(self, rows: Rows, path: str, start: int, data: bytes, needed: int) -> None:
        """One file's rows from `start` on. Missing rows are told by the look at the files' sizes."""
        found = np.frombuffer(data, dtype_of(rows.folder))
        expected = rows.read(start, start + len(found))
        differs = found != expected if found.tobytes() != expected.tobytes() else np.zeros(len(found), np.bool_)
        trusted = np.arange(start, start + len(found)) < needed
        self._report.count("rows equal to the log", int((~differs).sum()))
        self._report.count("rows that the next start makes again", int((differs & ~trusted).sum()))
        self._report.find_each(
            differs & trusted,
            lambda hit: (
                f"{path}, row {start + hit} (byte {self._folder.file_of(rows.folder, start + hit)[1]} of the file): "
                f"{named(found[hit])}, the log gives {named(expected[hit])}"
            ),
        )

    def _check_held(self) -> None:
        held = self.fold.holds.held if self.fold is not None and not self.is_stopped else {}
        segments = self._folder.segments
        for number, count in held.items():
            if number << segments.shift not in segments.bases:
                path = segment.path_of(number << segments.shift)
                self._report.find(f"{path} is missing, and {count} records in it are still needed")
