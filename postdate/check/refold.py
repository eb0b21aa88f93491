"""Applies the log anew and compares the result with the snapshots and row files that the broker left.

It starts at the beginning of the log if nothing is gone yet, since that proves most, otherwise at the older snapshot.
After a hole it stands still: what follows cannot be applied without what is missing.

The comparison with a snapshot leaves out what two folds of one log need not share: what the settings of a run decide
(counts per second), what snapshots of earlier versions lack (the place of the last batch), what lookups or retention
move (saved.LOCAL_FAR_STATE, where rows begin), and what retention makes a broker forget.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import numpy as np

from postdate.arrival import NEVER
from postdate.check.folder import Folder, Saved, dtype_of, named
from postdate.check.walk import place_of
from postdate.errors import CorruptData, PostdateError
from postdate.state import saved as recovery
from postdate.state.cancels import Tombstone
from postdate.state.fold import Fold
from postdate.state.once import NO_IDS
from postdate.state.transactions import NO_TRANSACTIONS
from postdate.storage import segment
from postdate.storage.batch import KIND_FILLER, STAGE, Batch
from postdate.storage.disk import Data, Disk
from postdate.storage.layout import SINGLE, SLOT_HEAD
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

        It is also unknown while the clock is earlier than an instant it has shown before: nothing fires then.
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
        sentences = [f"{saved.path}: {sentence}" for sentence in differences(self._folder, saved, self.fold)]
        self._report.find_each(np.ones(len(sentences), np.bool_), sentences.__getitem__)
        slots = slots_of(self.fold)
        self._report.count("waiting messages equal to the log", sum(map(len, slots.values())))
        kept, none = _slots(saved.slots()), np.empty(0, SINGLE)
        for due_at_ms in sorted(kept.keys() | slots.keys()):
            own, other = kept.get(due_at_ms, none), slots.get(due_at_ms, none)
            if own.tobytes() != other.tobytes():
                self._report.find(
                    f"{saved.path}: the slot due at {due_at_ms} has {len(own)} entries that are not the {len(other)} "
                    "which the log gives"
                )
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
        held = self.fold.references.held if self.fold is not None and not self.is_stopped else {}
        segments = self._folder.segments
        for number, count in held.items():
            if number << segments.shift not in segments.bases:
                path = segment.path_of(number << segments.shift)
                self._report.find(f"{path} is missing, and {count} records in it are still needed")

    def _all_rows(self) -> Iterator[Rows]:
        if self.fold is not None:
            yield from self.fold.all_rows()

    def _compare_rows(self, rows: Rows, needed: int) -> None:
        """Compares rows with the file's. The next start trusts those before `needed` and makes the others again."""
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
        """Compares one file's rows from `start` on. Another check, of the files' sizes, reports missing rows."""
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


class Overlay:
    """A disk for the second fold. It keeps writes in memory, and only those that differ from the folder's bytes."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._own: dict[str, bytearray] = {}
        self.map, self.array, self.list, self.space = disk.map, disk.array, disk.list, disk.space

    def size(self, path: str) -> int:
        return len(self._own[path]) if path in self._own else self._disk.size(path)

    def read(self, path: str, position: int, size: int) -> bytes:
        if path in self._own:
            return bytes(self._own[path][position : position + size])
        return self._disk.read(path, position, size)

    def write(self, path: str, position: int, *parts: Data) -> None:
        data = b"".join(parts)
        if path not in self._own:
            there = max(self._disk.size(path), 0)
            if there >= position + len(data) and self._disk.read(path, position, len(data)) == data:
                return
            self._own[path] = bytearray(self._disk.read(path, 0, position) if there else b"")
        self._own[path][position : position + len(data)] = data

    def _refuse(self, *what: object, **_: object) -> NoReturn:
        raise AssertionError(f"applying a batch only writes rows, it does not touch {what or 'LOCK'}")

    open = truncate = sync = rename = remove = sync_folder = lock = _refuse


_TEXT_MAX = 120  # characters of a value in a finding


def differences(folder: Folder, saved: Saved, fold: Fold) -> list[str]:
    """One sentence for each place where the small state differs."""
    kept, folded = _comparable(saved.state), _comparable(json.loads(recovery.state_json(fold)))
    numbers = {base >> folder.segments.shift for base in folder.segments.bases}
    names = folded["chunks"] | kept["chunks"]
    bases = {base for base, name in names.items() if folder.has_chunk(name)}
    _leave_out_gone(kept, folded, "seen", numbers)
    _leave_out_gone(kept, folded, "touched", numbers)
    _leave_out_gone(kept, folded, "chunks", bases)
    _leave_out_gone(kept, folded, "chunk_seen", bases)
    return list(_differences("", kept, folded))


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    state = NO_TRANSACTIONS | {name: value for name, value in state.items() if name not in ("seconds", "last_offset")}
    state["far"] = {name: value for name, value in state["far"].items() if name not in recovery.LOCAL_FAR_STATE}
    state["index"] = state["index"]["length"]
    state["once"] = {name: value for name, value in state.get("once", NO_IDS).items() if name != "gone"}
    state["queues"] = [[length, times_length] for length, times_length, _ in state["queues"]]
    for name in ("held", "seen", "touched", "chunks", "chunk_seen"):
        state[name] = dict(state[name])
    state["tombstones"] = sorted(list(Tombstone(*entry)) for entry in state["tombstones"])  # earlier ones are shorter
    state["moved"] = state.get("moved", 0)
    state["groups"] = state["groups"] | {"offsets": sorted(state["groups"]["offsets"])}
    return state


def _leave_out_gone(kept: dict[str, Any], folded: dict[str, Any], name: str, present: set[int]) -> None:
    """Returns the entries of a table, by segment or chunk, whose file exists.

    The broker forgets what retention removes. After a crash a removed file may be there again, still forgotten.
    """
    kept[name] = {key: value for key, value in kept[name].items() if key in present}
    folded[name] = {key: value for key, value in folded[name].items() if key in kept[name]}


def _differences(name: str, kept: Any, folded: Any) -> Iterator[str]:
    """Where two states differ, as deep as their shapes are the same."""
    if kept == folded:
        return
    if isinstance(kept, dict) and isinstance(folded, dict):
        for key in sorted(kept.keys() | folded.keys()):
            yield from _differences(f"{name} {key}".strip(), kept.get(key), folded.get(key))
    elif isinstance(kept, list) and isinstance(folded, list) and len(kept) == len(folded):
        for index, (own, other) in enumerate(zip(kept, folded, strict=True)):
            yield from _differences(f"{name} [{index}]", own, other)
    else:
        yield f"{name} is {_shorten(kept)}, the log gives {_shorten(folded)}"


def _shorten(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


def slots_of(fold: Fold) -> dict[int, np.ndarray]:
    """The singles in a fold's wheel, by due."""
    try:
        return _slots(fold.wheel.freeze().pieces())
    finally:
        fold.wheel.thaw()


def _slots(pieces: Iterable[bytes]) -> dict[int, np.ndarray]:
    """The singles of a wheel's pieces (Wheel.freeze), by due, in arrival order."""
    slots: dict[int, bytes] = {}
    for piece in pieces:
        heads = np.frombuffer(piece, SLOT_HEAD, int.from_bytes(piece[:8], "little"), 8)
        at = 8 + heads.nbytes
        for due_at_ms, count in heads.tolist():
            slots[due_at_ms] = slots.get(due_at_ms, b"") + piece[at : at + count * SINGLE.itemsize]
            at += count * SINGLE.itemsize
    return {due_at_ms: np.sort(np.frombuffer(slot, SINGLE), order="offset") for due_at_ms, slot in slots.items()}
