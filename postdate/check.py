"""The check of a closed data folder: is everything that a broker would trust still true?

    FORMAT, segments     every batch's checksum, every record, every row against its record, what is zero
    snapshots            readable; the checksums of all blocks of rows that they hold
    a second fold        the log applied anew, compared with the snapshots and with the queue, time and far files
    queues               every entry against its record: size, tag, never before its due, order, never twice
    far queue, chunks    rows against their records; chunks against their sums and records

Nothing on disk is changed: the second fold works on an overlay, and only the folder's lock is taken. Damage is never
raised; it becomes a finding with its place, and the check goes on with what it can still look at. What a crash leaves
by right (a torn tail, rows that the next start makes again) is no damage: it is counted.

The price: 10 to 15 s for a million messages, nearly all of it to decode and apply them one by one, and 0.6 KB of RAM
for each message in the log.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from postdate import recovery
from postdate.config import KIB, Settings
from postdate.errors import (
    CorruptChunk,
    CorruptData,
    CorruptLog,
    CorruptQueue,
    CorruptSnapshot,
    ForeignFolder,
    IllegalMessage,
    PostdateError,
    UsageError,
)  # fmt: skip
from postdate.far import FAR
from postdate.fold import Fold
from postdate.intake import SYSTEM_TOPIC_PREFIX
from postdate.log import batch as batches
from postdate.log import chunk as chunks
from postdate.log import record as records
from postdate.log import segment, snapshot
from postdate.log.batch import KIND_FILLER, KIND_NAMES, MESSAGE, ROW, ROW_STRUCT, STAGE, Batch
from postdate.log.chunk import CHUNK_BIT, FLAG_OWN_ARRIVAL, Chunk
from postdate.log.disk import Data, Disk, File, LockedFolder, View
from postdate.log.folder import FORMAT_FILE, open_folder
from postdate.log.log import Log
from postdate.log.queue import ENTRY, TIME
from postdate.log.rows import BLOCK_ROWS, Rows
from postdate.log.segment import Segments
from postdate.message import (
    DEFAULT_LEVELS_TEXT,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    DelayLevels,
    decode_properties,
    due,
    first_key,
    key_hash,
    tag_hash,
)  # fmt: skip
from postdate.topics import SCHEDULE_TOPIC
from postdate.wheel import NEVER, SINGLE

_SHOWN_MAX = 3  # findings of one kind and place that are told one by one; the rest is counted
_TEXT_MAX = 120  # characters of a value in a finding
_TAIL_ROWS = 8_192  # of the second fold: it writes to memory, in pieces worth a comparison
_LEVELS = DelayLevels.parse(DEFAULT_LEVELS_TEXT)
# What applying a batch can trip over when its bytes are whole but its content is not what a broker writes.
_APPLY_ERRORS = (PostdateError, AssertionError, LookupError, TypeError, ValueError)


@dataclass
class Report:
    """What a check found and what it looked at. `numbers` are in people's words, in the order of the work."""

    findings: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    def find(self, finding: str) -> None:
        """Two parts of the check may stumble over the same damage: it is told once."""
        if finding not in self.findings:
            self.findings.append(finding)

    def find_each(self, mask: np.ndarray, sentence: Callable[[int], str]) -> None:
        """A finding for each place where the mask is set; of many, the first ones and how many more."""
        hits = np.flatnonzero(mask)
        for hit in hits[:_SHOWN_MAX].tolist():
            self.find(sentence(hit))
        if len(hits) > _SHOWN_MAX:
            self.find(f"{sentence(int(hits[_SHOWN_MAX]))}; and so are {len(hits) - _SHOWN_MAX - 1} more behind it")

    def count(self, what: str, count: int) -> None:
        self.numbers[what] = self.numbers.get(what, 0) + count


def check_folder(disk: Disk) -> Report:
    """Checks a folder that no broker has open, and changes nothing in it but the file LOCK.

    Raises FolderInUse where a broker runs, ForeignFolder where the folder is not ours or from a newer version, OSError
    where the disk cannot be read. Damage is never raised.
    """
    if disk.size(FORMAT_FILE) < 0:
        raise ForeignFolder(
            f"there is no file {FORMAT_FILE}: this is not a Postdate folder, or nothing was written to it yet"
        )
    lock = disk.lock()
    try:
        fixed = open_folder(disk, Settings())
        report = Report()
        problem = _fixed_problem(fixed)
        if problem:
            report.find(f"{FORMAT_FILE}: {problem}; nothing else can be checked")
        else:
            _check(_Folder(disk, fixed, Segments(disk, fixed["segment_bytes"]), report))
        return report
    finally:
        lock.release()


def _fixed_problem(fixed: dict[str, int]) -> str:
    """Whether the values that are fixed for a folder's life are ones that a broker accepts."""
    values: dict[str, Any] = {name: value for name, value in fixed.items() if name != "format"}
    try:
        # The bounds stand in one place. A batch must fit into its segment, which is not asked here: so the smallest.
        Settings(batch_bytes_max=4 * KIB, **values)
    except UsageError as error:
        return str(error)
    return ""


# -- the log's bytes --------------------------------------------------------------------------------------------


class Hole(NamedTuple):
    """A part of a segment in which no batch can be read."""

    offset: int
    end: int
    problem: str
    is_blank: bool  # zeros up to the end of the segment, as behind the end of the log


def walk(segments: Segments, start: int) -> Iterator[Batch | Hole]:
    """The batches (fillers too) from an offset at which one begins to the end of its segment, and the holes between.

    A hole is followed by the next whole batch that is found, if there is one: pages may be lost one by one. The end of
    the log is a hole too, up to the end of its segment. Reads only, so it may walk a running broker's log.
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
    """Where the next whole batch behind an offset of this segment begins; the segment's end where there is none."""
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


# -- a record against its row -----------------------------------------------------------------------------------


class _Places:
    """Which topic and queue id the records of each queue number name: compared with the topics once those are known."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, str, int], str] = {}

    def note(self, number: int, topic: str, queue_id: int, place: Callable[[], str]) -> None:
        if (number, topic, queue_id) not in self._first:
            self._first[number, topic, queue_id] = place()

    def problems(self, places: list[tuple[str, int]]) -> Iterator[str]:
        for (number, topic, queue_id), place in self._first.items():
            expected = places[number] if 0 <= number < len(places) else None
            if expected is None:
                yield f"{place}: the record is for queue number {number}, there are {len(places)}"
            elif expected != (topic, queue_id):
                yield (
                    f"{place}: the record is for queue {queue_id} of {topic!r}, "
                    f"its row for number {number}, which is queue {expected[1]} of {expected[0]!r}"
                )


def _keys_problem(properties: dict[str, str], unique_hash: int, first_hash: int, tagged: int) -> str:
    """A message's properties against the hashes that its row holds."""
    if key_hash(properties.get(PROPERTY_UNIQ_KEY, "")) != unique_hash:
        return "the row's hash is not that of the unique key"
    if key_hash(first_key(properties.get(PROPERTY_KEYS, ""))) != first_hash:
        return "the row's hash is not that of the first key"
    if tag_hash(properties.get(PROPERTY_TAGS, "")) != tagged:
        return f"the row's tag hash is {tagged}, not that of the tag"
    return ""


def _message_problem(record: records.Record, row: tuple[int, ...], at_ms: int) -> str:
    _, level, _, _, due_at_ms, unique_hash, first_hash, tagged, *_ = row
    try:
        properties = decode_properties(record.properties)
        # What a level meant is a setting and stands nowhere; all other delays say their due themselves.
        expected = due(properties, at_ms, _LEVELS, NEVER) if not level else (due_at_ms, 0)
    except IllegalMessage as error:
        return str(error)
    if expected != (due_at_ms, 0):
        return f"the row says due {due_at_ms} and level {level}, the properties {expected[0]} and {expected[1]}"
    return _keys_problem(properties, unique_hash, first_hash, tagged)


def _system_problem(record: records.Record, row: tuple[int, ...]) -> str:
    if row[0] not in KIND_NAMES:
        return f"the row says kind {row[0]}, which this program does not know"
    if record.topic != SYSTEM_TOPIC_PREFIX + KIND_NAMES[row[0]]:
        return f"the row says {KIND_NAMES[row[0]]}, the record is of topic {record.topic!r}"
    if row[1:8] != (0, 0, -1, 0, 0, 0, 0):
        return f"the row of a {KIND_NAMES[row[0]]} holds {row[1:8]} where nothing belongs"
    try:
        json.loads(record.body)
    except ValueError as error:
        return f"the body of a {KIND_NAMES[row[0]]} is no JSON: {error}"
    return ""


# -- the second fold's disk -------------------------------------------------------------------------------------


class _Overlay:
    """A disk for the second fold: what it writes is kept in memory, and only where it differs from what is there."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._own: dict[str, bytearray] = {}

    def map(self, path: str) -> View:
        return self._disk.map(path)

    def array(self, path: str) -> np.ndarray:
        return self._disk.array(path)

    def list(self, folder: str) -> list[str]:
        return self._disk.list(folder)

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

    def reach(self, point: str) -> None:
        """No fault point: nothing is written here that could be lost."""

    def open(self, path: str) -> File:
        raise _changes(path)

    def truncate(self, path: str, size: int) -> None:
        raise _changes(path, size)

    def sync(self, path: str) -> None:
        raise _changes(path)

    def rename(self, source: str, target: str) -> None:
        raise _changes(source, target)

    def remove(self, path: str) -> None:
        raise _changes(path)

    def sync_folder(self, folder: str) -> None:
        raise _changes(folder)

    def lock(self) -> LockedFolder:
        raise _changes("LOCK")


def _changes(*what: object) -> AssertionError:
    return AssertionError(f"applying a batch only writes rows, it does not touch {what}")


# -- snapshots --------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A snapshot that can be read."""

    position: int
    sections: list[snapshot.Section]
    state: dict[str, Any]

    @property
    def path(self) -> str:
        return snapshot.path_of(self.position)

    def lengths(self) -> dict[str, int]:
        """How many rows each folder of rows must have."""
        lengths = {"far": self.state["far"]["length"]}
        for number, (length, times_length, _) in enumerate(self.state["queues"]):
            lengths[_entries_folder(number)], lengths[_times_folder(number)] = length, times_length
        return lengths

    def firsts(self) -> dict[str, int]:
        """Which rows retention has let go, by folder: those before this one."""
        firsts = {"far": self.state["far"]["first"]}
        for number, (_, _, first) in enumerate(self.state["queues"]):
            firsts[_entries_folder(number)] = first
        return firsts

    def chunk_names(self) -> dict[int, str]:
        return dict(self.state["chunks"])


def _saved(disk: Disk, position: int) -> Saved:
    sections = snapshot.read(disk, position)
    state: dict[str, Any] = {}
    for section in sections:
        if section.kind == snapshot.STATE:
            state |= section.json()
    return Saved(position, sections, state)


def _entries_folder(number: int) -> str:
    return f"queues/{number}/entries"


def _times_folder(number: int) -> str:
    return f"queues/{number}/times"


def _dtype_of(folder: str) -> np.dtype:
    if folder == "far":
        return FAR
    return ENTRY if folder.endswith("entries") else TIME


def _moved(saved: Saved, firsts: dict[str, int]) -> list[snapshot.Section]:
    """The sections of an older snapshot, as if it knew which rows retention has let go since."""
    queues = [
        [length, times_length, firsts.get(_entries_folder(number), first)]
        for number, (length, times_length, first) in enumerate(saved.state["queues"])
    ]
    far = saved.state["far"] | {"first": firsts["far"]}
    moved = [section for section in saved.sections if section.kind != snapshot.SUMS]
    moved.append(snapshot.Section(snapshot.STATE, json.dumps({"queues": queues, "far": far}).encode()))
    return moved + [_without_gone(section, firsts) for section in saved.sections if section.kind == snapshot.SUMS]


def _without_gone(section: snapshot.Section, firsts: dict[str, int]) -> snapshot.Section:
    """Sums of a folder without the last one, where rows of its block are gone: then it cannot be compared any more."""
    folder, sums = recovery.read_sums(section)
    if not sums or firsts.get(folder, 0) <= (len(sums) - 1) * BLOCK_ROWS:
        return section
    return snapshot.Section(snapshot.SUMS, section.data[:-8] + bytes(8))


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    """A state in a form that is equal for two folds of one log: without what a run's settings and retention decide."""
    state = {name: value for name, value in state.items() if name != "seconds"}
    state["far"] = {name: value for name, value in state["far"].items() if name not in recovery.LOCAL_FAR_STATE}
    state["queues"] = [[length, times_length] for length, times_length, _ in state["queues"]]
    for name in ("held", "seen", "chunks", "chunk_seen"):
        state[name] = dict(state[name])
    state["tombstones"] = sorted(state["tombstones"])
    state["groups"] = state["groups"] | {"offsets": sorted(state["groups"]["offsets"])}
    return state


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
        yield f"{name} is {_shown(kept)}, the log gives {_shown(folded)}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


_SLOT_HEAD = np.dtype([("due", "<i8"), ("count", "<i8")])


def _slots(pieces: Iterable[bytes]) -> dict[int, np.ndarray]:
    """The singles of a wheel's pieces (Wheel.freeze), by due, in arrival order."""
    slots: dict[int, bytes] = {}
    for piece in pieces:
        heads = np.frombuffer(piece, _SLOT_HEAD, int.from_bytes(piece[:8], "little"), 8)
        at = 8 + heads.nbytes
        for due_at_ms, count in heads.tolist():
            slots[due_at_ms] = slots.get(due_at_ms, b"") + piece[at : at + count * SINGLE.itemsize]
            at += count * SINGLE.itemsize
    return {due_at_ms: np.sort(np.frombuffer(slot, SINGLE), order="offset") for due_at_ms, slot in slots.items()}


# -- what is known of the records -------------------------------------------------------------------------------

# One row per record that a queue entry may point at, ascending by offset.
_KNOWN = np.dtype(
    [
        ("offset", "<i8"),
        ("due", "<i8"),  # 0 = at once
        ("arrival", "<i8"),
        ("came_at", "<i8"),  # when it came into the wheel; NEVER where that is not known
        ("identity", "<i8"),  # equal for two copies of one message
        ("size", "<i8"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("kind", "u1"),
        ("level", "u1"),
    ]
)


class _Collected:
    """The rows of all batches of the log, with what their batch says, put together once at the end."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._batches: list[tuple[int, int, int, int]] = []  # row count, offset, at_ms, latest due that came at once

    def add(self, batch: Batch, near_until: int) -> None:
        if batch.row_count:
            self._rows += batch.rows
            self._batches.append((batch.row_count, batch.offset, batch.at_ms, near_until))

    def known(self) -> np.ndarray:
        rows = np.frombuffer(self._rows, ROW)
        counts, offsets, at_ms, near_until = np.array(self._batches, np.int64).reshape(-1, 4).T
        known = np.empty(len(rows), _KNOWN)
        known["offset"] = np.repeat(offsets, counts) + rows["position"]
        known["arrival"] = known["identity"] = known["offset"]
        near = rows["due"] <= np.repeat(near_until, counts)
        known["came_at"] = np.where(near, np.repeat(at_ms, counts), NEVER)
        for name in ("due", "size", "queue", "tag_hash", "unique_hash", "key_hash", "kind", "level"):
            known[name] = rows[name]
        return known


def _known_of_chunk(base: int, index: np.ndarray, came_at: int) -> np.ndarray:
    known = np.zeros(len(index), _KNOWN)
    known["offset"] = index["position"] + base
    own = index["flags"] & FLAG_OWN_ARRIVAL != 0
    known["identity"] = np.where(own, known["offset"], index["arrival"])
    known["came_at"], known["kind"] = came_at, MESSAGE
    for name in ("due", "arrival", "size", "queue", "tag_hash"):
        known[name] = index[name]
    return known


class _Index:
    """Finds what is known of a record by its offset."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        known = np.concatenate(parts)
        self.known = known[np.argsort(known["offset"], kind="stable")]
        self._offsets = np.ascontiguousarray(self.known["offset"])

    def find(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(found, rows): whether there is a record at each offset, and what is known of it (anything where none is)."""
        if not len(self.known):
            return np.zeros(len(offsets), np.bool_), np.zeros(len(offsets), _KNOWN)
        places = np.minimum(np.searchsorted(self._offsets, offsets), len(self._offsets) - 1)
        return self._offsets[places] == offsets, self.known[places]


def _overtaken(rank: np.ndarray, low: np.ndarray) -> np.ndarray:
    """For each place b: whether some a with low[b] <= a < b has a larger rank.

    A maximum over ranges: windows of 1, 2, 4, ... places; a range is answered at the width where two windows cover it.
    """
    places = np.arange(len(rank))
    lengths = places - low
    found = np.zeros(len(rank), np.bool_)
    windows, width = rank, 1
    while width <= len(rank):
        chosen = places[(lengths >= width) & (lengths < 2 * width)]
        if len(chosen):
            largest = np.maximum(windows[low[chosen]], windows[chosen - width])
            found[chosen] = largest > rank[chosen]
        windows = np.maximum(windows[:-width], windows[width:])
        width *= 2
    return found


def _ranks(due_at_ms: np.ndarray, arrival: np.ndarray) -> np.ndarray:
    """The place of each in (due, arrival) order."""
    ranks = np.empty(len(due_at_ms), np.int64)
    ranks[np.lexsort((arrival, due_at_ms))] = np.arange(len(due_at_ms))
    return ranks


# -- the check --------------------------------------------------------------------------------------------------


class _Folder(NamedTuple):
    """What every part of the check works on."""

    disk: Disk
    fixed: dict[str, int]
    segments: Segments
    report: Report

    def rows(self, folder: str, length: int, first: int = 0) -> Rows:
        """The first `length` rows of a folder, read from its files."""
        rows = Rows(self.disk, folder, _dtype_of(folder), self.fixed["queue_file_rows"], 1, length)
        rows.first = first
        return rows


def _check(folder: _Folder) -> None:
    """The whole check, part by part; each part leaves what the later ones need."""
    saved = _readable_snapshots(folder)
    _check_sums(folder, saved)
    _drop_misshapen(folder)
    second = _SecondFold(folder, saved)
    log = _LogCheck(folder, second)
    log.run()
    second.finish(log.end)
    tables = _Tables(folder, saved, second.fold)
    staged = [_check_chunk(folder, base, name, second, log.places) for base, name in tables.chunks()]
    for problem in log.places.problems(tables.places):
        folder.report.find(problem)
    logged = log.collected.known()
    folder.report.count("messages in the log", int((logged["kind"] == MESSAGE).sum()))
    folder.report.count("system records in the log", int((logged["kind"] != MESSAGE).sum()))
    index = _Index([logged, *[known for known in staged if known is not None]])
    _QueueCheck(folder, tables, index, log).run()


def _readable_snapshots(folder: _Folder) -> list[Saved]:
    """Those that can be read, newest first."""
    saved = []
    for position in snapshot.positions(folder.disk):
        try:
            saved.append(_saved(folder.disk, position))
        except CorruptSnapshot as error:
            folder.report.find(str(error))
    folder.report.count("snapshots read", len(saved))
    return saved


def _check_sums(folder: _Folder, saved: list[Saved]) -> None:
    """The files against the lengths and the checksums that the snapshots hold."""
    if not saved:
        return
    firsts = saved[0].firsts()
    for each in saved:
        lengths = each.lengths()
        for section in each.sections:
            if section.kind == snapshot.SUMS:
                name, sums = recovery.read_sums(section)
                rows = folder.rows(name, lengths[name], firsts.get(name, 0))
                try:
                    rows.check_files()
                    _check_blocks(folder.report, each, rows, sums)
                except CorruptQueue as error:
                    folder.report.find(str(error))


def _check_blocks(report: Report, saved: Saved, rows: Rows, sums: list[int]) -> None:
    for block, expected in enumerate(sums):
        found = rows.block_sum(block, rows.length) if expected else 0
        if not found:
            continue  # retention has let go of rows in it, or there is no such block
        report.count("blocks of rows equal to their checksum", 1)
        if found != expected:
            start = block * BLOCK_ROWS
            stop = min(start + BLOCK_ROWS, rows.length)
            paths = " and ".join(rows.paths(start, stop)[:: max(len(rows.paths(start, stop)) - 1, 1)])
            report.find(f"{paths}: rows {start} to {stop - 1} are not as {saved.path} knew them (checksum)")


def _drop_misshapen(folder: _Folder) -> None:
    """Tells which segments have not their size, and passes over those that hold nothing: they cannot be mapped."""
    segments, expected = folder.segments, folder.fixed["segment_bytes"]
    for base in list(segments.bases):
        size = folder.disk.size(segment.path_of(base))
        if size != expected:
            folder.report.find(f"{segment.path_of(base)} has {size} bytes, a segment has {expected}")
        if base % expected:
            folder.report.find(f"{segment.path_of(base)}: no segment begins at {base}")
        if size == 0 or base % expected:
            segments.bases.remove(base)


class _SecondFold:
    """The log applied anew, from as far back as it can be, and compared with what the broker left.

    From the beginning where nothing is gone yet, since that proves most; else from the older snapshot. `fold` is None
    where neither can be used. After a hole it stands still: what follows cannot be applied without what is missing.
    """

    def __init__(self, folder: _Folder, saved: list[Saved]) -> None:
        self._folder = folder
        self._report = folder.report
        self._overlay = _Overlay(folder.disk)
        self._log = Log(self._overlay, folder.segments, 1)
        self._saved = saved
        self.staged_at: dict[int, int] = {}  # by chunk base, of those staged while folding
        self.fold = self._started()
        self._next = self.fold.position if self.fold else NEVER
        self._loaded = {rows.folder: rows.length for rows in self._all_rows()}
        # The snapshot that it began from is no proof of itself.
        self._uncompared = {each.position: each for each in saved if self._next == 0 or each.position > self._next}
        self._stopped = False
        self._compare_snapshot()

    # -- where to begin -----------------------------------------------------------------------------------------

    def _started(self) -> Fold | None:
        if self._nothing_is_gone():
            return self._fresh()
        for saved in reversed(self._saved):
            fold = self._fresh()
            try:
                recovery.load(fold, _moved(saved, self._saved[0].firsts()))
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
        fixed, segments = self._folder.fixed, self._folder.segments
        return Fold(
            self._overlay,
            self._log.read,
            segments.shift,
            fixed["queue_file_rows"],
            _TAIL_ROWS,
            far_block_rows=fixed["far_block_rows"],
        )

    def _nothing_is_gone(self) -> bool:
        """Whether retention has not taken a segment or a chunk yet."""
        segments = self._folder.segments
        if segments.bases != list(range(0, len(segments.bases) << segments.shift, segments.segment_bytes)):
            return False
        if not self._saved:
            return True
        base = CHUNK_BIT
        for own_base, name in self._saved[0].chunk_names().items():
            size = self._folder.disk.size(chunks.path_of(name))
            if own_base != base or size < 0:
                return False
            base += (size + 7) & -8
        return base == int(self._saved[0].state["chunk_end"])

    # -- batch by batch -----------------------------------------------------------------------------------------

    def near_until(self, batch: Batch) -> int:
        """Up to which due a message of this batch, which is applied next, comes into the wheel at once; -1 = not known.

        Not known is also what comes while the clock is behind an instant that it has shown before: nothing fires then.
        """
        fold = self.fold
        if fold is None or not self._follows(batch) or batch.at_ms < fold.fired_at_ms:
            return -1
        return batch.at_ms + fold.lead_ms

    def _follows(self, batch: Batch) -> bool:
        return not self._stopped and batch.offset == self._next

    def stop(self) -> None:
        """The log has a hole here."""
        self._stopped = True

    def apply(self, batch: Batch) -> None:
        """Takes the next batch or filler; those before the beginning are passed over."""
        if self.fold is None or self._stopped or batch.offset < self._next:
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
        self._compare_state(saved, self.fold)
        self._compare_slots(saved, self.fold)
        self._report.count("snapshots equal to the log", 1)

    def _compare_state(self, saved: Saved, fold: Fold) -> None:
        kept, folded = _comparable(saved.state), _comparable(json.loads(recovery.state_json(fold)) | {"seconds": []})
        for name in ("chunks", "chunk_seen"):  # retention may have taken some since
            common = kept[name].keys() & folded[name].keys()
            for state in (kept, folded):
                state[name] = {base: state[name][base] for base in sorted(common)}
        differences = [f"{saved.path}: {difference}" for difference in _differences("", kept, folded)]
        self._report.find_each(np.ones(len(differences), np.bool_), differences.__getitem__)

    def _compare_slots(self, saved: Saved, fold: Fold) -> None:
        kept = _slots(section.data for section in saved.sections if section.kind == snapshot.SLOTS)
        folded = _slots(fold.wheel.freeze().pieces())
        fold.wheel.thaw()
        none = np.empty(0, SINGLE)
        self._report.count("waiting messages equal to the log", sum(map(len, folded.values())))
        for due_at_ms in sorted(kept.keys() | folded.keys()):
            own, other = kept.get(due_at_ms, none), folded.get(due_at_ms, none)
            if own.tobytes() != other.tobytes():
                self._report.find(
                    f"{saved.path}: the slot due at {due_at_ms} has {len(own)} entries that are not the {len(other)} "
                    "which the log gives"
                )

    # -- against the files --------------------------------------------------------------------------------------

    def finish(self, log_end: int) -> None:
        """After the last batch."""
        for position, saved in self._uncompared.items():
            if self.fold is not None and not self._stopped:
                self._report.find(f"{saved.path}: no batch ends at {position}, the log ends at {log_end}")
        lengths = self._saved[0].lengths() if self._saved else {}
        for rows in self._all_rows():
            self._compare_rows(rows, lengths.get(rows.folder, 0))
        self._check_held()

    def _all_rows(self) -> Iterator[Rows]:
        if self.fold is not None:
            for queue in self.fold.queues:
                yield from queue.rows()
            yield self.fold.far.rows

    def _compare_rows(self, rows: Rows, needed: int) -> None:
        """Rows before `needed` are what the next start trusts; those behind it makes again, whatever is there."""
        step = self._folder.fixed["queue_file_rows"]
        start = max(self._loaded.get(rows.folder, 0), rows.first)
        while start < rows.length:
            stop = min((start // step + 1) * step, rows.length)
            (path,) = rows.paths(start, start + 1)
            size = _dtype_of(rows.folder).itemsize
            there = max(self._folder.disk.size(path), 0) // size + start // step * step
            if there > start:
                data = self._folder.disk.read(path, start % step * size, (min(stop, there) - start) * size)
                self._compare_piece(rows, path, start, data, needed)
            self._report.count("rows that the next start makes again", stop - max(min(stop, there), start))
            start = stop

    def _compare_piece(self, rows: Rows, path: str, start: int, data: bytes, needed: int) -> None:
        """One file's rows from `start` on. Missing rows are told by the look at the files' sizes."""
        found = np.frombuffer(data, _dtype_of(rows.folder))
        expected = rows.read(start, start + len(found))
        differs = found != expected if found.tobytes() != expected.tobytes() else np.zeros(len(found), np.bool_)
        trusted = np.arange(start, start + len(found)) < needed
        self._report.count("rows equal to the log", int((~differs).sum()))
        self._report.count("rows that the next start makes again", int((differs & ~trusted).sum()))
        step, size = self._folder.fixed["queue_file_rows"], found.itemsize
        self._report.find_each(
            differs & trusted,
            lambda hit: (
                f"{path}, row {start + hit} (byte {(start + hit) % step * size} of the file): "
                f"{_named(found[hit])}, the log gives {_named(expected[hit])}"
            ),
        )

    def _check_held(self) -> None:
        held = self.fold.held if self.fold is not None and not self._stopped else {}
        segments = self._folder.segments
        for number, count in held.items():
            if number << segments.shift not in segments.bases:
                path = segment.path_of(number << segments.shift)
                self._report.find(f"{path} is missing, and {count} records in it are still needed")


def _named(row: np.void) -> str:
    names = row.dtype.names or ()
    return ", ".join(f"{name} {value}" for name, value in zip(names, row.item(), strict=True) if name != "reserved")


class _LogCheck:
    """Walks all segments: every batch, every record, every byte behind the end."""

    def __init__(self, folder: _Folder, second: _SecondFold) -> None:
        self._folder, self._report, self._segments = folder, folder.report, folder.segments
        self._second = second
        self._known_durable = max(snapshot.positions(folder.disk), default=0)
        self._looked_ahead = False
        self.collected = _Collected()
        self.places = _Places()
        self.holes: list[Hole] = []
        self.end = 0

    def run(self) -> None:
        for index, base in enumerate(self._segments.bases):
            self._report.count("segments", 1)
            for item in walk(self._segments, base):
                if isinstance(item, Hole) and self._is_end(item, index):
                    self._count_tail(item.offset, index)
                    return
                self._take(item)
                self.end = item.end

    def _take(self, item: Batch | Hole) -> None:
        if isinstance(item, Hole):
            self._report.find(
                f"{place_of(self._segments, item.offset)}: {item.problem}, though everything before "
                f"{self._known_durable} was on disk; {item.end - item.offset} bytes are lost"
            )
            self.holes.append(item)
            self._second.stop()
            return
        self._known_durable = max(self._known_durable, item.durable)
        self._check_batch(item)
        self.collected.add(item, self._second.near_until(item))
        self._second.apply(item)

    def _is_end(self, hole: Hole, index: int) -> bool:
        """Whether the log ends here by right: nothing at or behind this place is known to have been on disk."""
        if not self._looked_ahead:
            self._looked_ahead = True
            self._known_durable = max([self._known_durable, *self._durables_behind(hole, index)])
        return hole.offset >= self._known_durable

    def _durables_behind(self, hole: Hole, index: int) -> Iterator[int]:
        starts = [hole.end] if hole.end & (self._segments.segment_bytes - 1) else []
        for start in (*starts, *self._segments.bases[index + 1 :]):
            yield from (item.durable for item in walk(self._segments, start) if isinstance(item, Batch))

    def _count_tail(self, end: int, index: int) -> None:
        """What a crash left behind the end; the next start zeroes it."""
        self.end, torn = end, 0
        for base in self._segments.bases[index:]:
            used = np.flatnonzero(self._segments.array(base)[max(end - base, 0) :])
            torn += int(used[-1]) + 1 if len(used) else 0
        self._report.count("bytes of torn tail", torn)

    # -- one batch ----------------------------------------------------------------------------------------------

    def _check_batch(self, batch: Batch) -> None:
        base = batch.offset & -self._segments.segment_bytes
        view = self._segments.view(base)
        assert view is not None
        position = batch.offset - base
        expected = batches.records_position(batch.row_count)
        for row in ROW_STRUCT.iter_unpack(batch.rows):
            at = position + row[9]
            problem = self._record_problem(view[at : at + row[8]], row, batch)
            if row[9] != expected:
                problem = f"the row says position {row[9]} in its batch, expected {expected}"
            if problem:
                self._report.find(f"{place_of(self._segments, batch.offset + row[9])}: {problem}")
            expected = row[9] + row[8]
        if any(view[position + expected : position + batch.length]):
            self._report.find(f"{place_of(self._segments, batch.offset + expected)}: bytes that must be zero are not")
        self._report.count("fillers" if batch.kind == KIND_FILLER else "batches", 1)

    def _record_problem(self, data: bytes, row: tuple[int, ...], batch: Batch) -> str:
        try:
            record = records.decode(data)
        except CorruptLog as error:
            return str(error)
        if (record.offset, record.stored_at_ms) != (batch.offset + row[9], batch.at_ms):
            return f"the record says offset {record.offset}, stored at {record.stored_at_ms}; its batch {batch.at_ms}"
        if row[0] != MESSAGE:
            return _system_problem(record, row)
        self.places.note(row[3], record.topic, record.queue_id, partial(place_of, self._segments, record.offset))
        return _message_problem(record, row, batch.at_ms)


# -- chunks, queues and the far queue ---------------------------------------------------------------------------


def _check_chunk(folder: _Folder, base: int, name: str, second: _SecondFold, places: _Places) -> np.ndarray | None:
    """Verifies a staged chunk and gives what is known of its records; None where it cannot be read."""
    try:
        chunk = Chunk(folder.disk, name)
        chunk.verify()
    except CorruptChunk as error:
        folder.report.find(str(error))
        return None
    folder.report.count("chunks", 1)
    folder.report.count("messages in chunks", len(chunk.index))
    for row in chunk.index.tolist():
        problem = _chunk_record_problem(chunk, row, places)
        if problem:
            folder.report.find(f"{chunks.path_of(name)}, byte {row[2]}: {problem}")
    return _known_of_chunk(base, chunk.index, second.staged_at.get(base, NEVER))


def _chunk_record_problem(chunk: Chunk, row: tuple[int, ...], places: _Places) -> str:
    _, _, position, size, number, tagged, _, unique_hash, first_hash = row
    try:
        record = records.decode(chunk.read(position, size))
        properties = decode_properties(record.properties)
    except (CorruptLog, IllegalMessage) as error:
        return str(error)
    places.note(number, record.topic, record.queue_id, lambda: f"{chunks.path_of(chunk.name)}, byte {position}")
    return _keys_problem(properties, unique_hash, first_hash, tagged)


class _Tables:
    """The small tables at the end of the log, and the rows that a broker will have when it has opened the folder.

    Those are the files up to the newest snapshot's lengths, then what the second fold made.
    """

    def __init__(self, folder: _Folder, saved: list[Saved], fold: Fold | None) -> None:
        self._folder, self._fold = folder, fold
        self._newest = saved[0] if saved else None
        self._lengths = self._newest.lengths() if self._newest else {}
        self._firsts = self._newest.firsts() if self._newest else {}
        # A fold that had to stop may know fewer queues than the snapshot.
        self.places = max(self._saved_places(), fold.topics.places if fold else [], key=len)
        self.chunk_end = max(
            self._newest.state["chunk_end"] if self._newest else CHUNK_BIT, fold.chunk_end if fold else 0
        )

    def _saved_places(self) -> list[tuple[str, int]]:
        places = self._newest.state["topics"]["places"] if self._newest else []
        return [(name, queue_id) for name, queue_id in places]

    def chunks(self) -> list[tuple[int, str]]:
        """The staged chunks that are needed or still there, by base."""
        names = self._newest.chunk_names() if self._newest else {}
        waiting = {base for base, _, _ in self._newest.state["runs"]} if self._newest else set()
        names = {base: name for base, name in names.items() if base in waiting or self._is_there(name)}
        if self._fold is not None:
            names |= {base: self._fold.chunks.name_of(base) for base in self._fold.chunks.bases()}
        return sorted(names.items())

    def _is_there(self, name: str) -> bool:
        return self._folder.disk.size(chunks.path_of(name)) >= 0

    def rows(self, name: str) -> tuple[int, np.ndarray]:
        """The number of the first row and the rows. Raises CorruptQueue where a file misses some."""
        length, first = self._lengths.get(name, 0), self._firsts.get(name, 0)
        parts = [self._folder.rows(name, length).read(first, length)]
        folded = self._folded(name)
        if folded is not None and folded.length > length:
            parts.append(folded.read(length, folded.length))
        return first, np.concatenate(parts)

    def _folded(self, name: str) -> Rows | None:
        if self._fold is None or name == "far":
            return self._fold.far.rows if self._fold else None
        number, kind = name.split("/")[1:]
        queue = self._fold.queues[int(number)] if int(number) < len(self._fold.queues) else None
        return (queue.entries if kind == "entries" else queue.times) if queue else None


class _QueueCheck:
    """Every entry of every queue, and every far row, against the records."""

    def __init__(self, folder: _Folder, tables: _Tables, index: _Index, log: _LogCheck) -> None:
        self._folder, self._report, self._tables, self._index = folder, folder.report, tables, index
        self._log_end, self._holes = log.end, log.holes
        self._numbers = np.array([base >> folder.segments.shift for base in folder.segments.bases], np.int64)
        names = [name for name, _ in tables.places]
        self._topic_of = np.unique(names, return_inverse=True)[1] if names else np.empty(0, np.int64)
        self._identities: list[np.ndarray] = []
        self._owners: list[np.ndarray] = []  # (queue number, queue offset) of each identity

    def run(self) -> None:
        for number in range(len(self._tables.places)):
            try:
                self._check_queue(number)
            except CorruptQueue as error:
                self._report.find(str(error))
        self._check_once()
        try:
            self._check_far()
        except CorruptQueue as error:
            self._report.find(str(error))

    # -- one queue ----------------------------------------------------------------------------------------------

    def _check_queue(self, number: int) -> None:
        first, entries = self._tables.rows(_entries_folder(number))
        _, times = self._tables.rows(_times_folder(number))
        self._report.count("queues", 1)
        self._report.count("queue entries", len(entries))
        found, known = self._index.find(entries["offset"])
        self._check_there(partial(self._place_behind, number, first), entries["offset"], found)
        if self._tables.places[number][0] == SCHEDULE_TOPIC:
            self._check_level_entries(number, first, entries, found, known)
            return
        self._check_entries(number, first, entries, found, known)
        visible = self._visible(number, times, first, len(entries))
        if visible is not None:
            self._check_due(number, first, found, known, visible)
        self._identities.append(np.where(found, known["identity"], entries["offset"]))
        self._owners.append(np.stack([np.full(len(entries), number), np.arange(first, first + len(entries))], axis=1))

    def place(self, number: int, row: int) -> str:
        """An entry as a place: the queue in people's words, then the file."""
        name, queue_id = self._tables.places[number]
        rows = self._folder.rows(_entries_folder(number), 0)
        (path,) = rows.paths(row, row + 1)
        position = row % self._folder.fixed["queue_file_rows"] * ENTRY.itemsize
        return f"{name}, queue {queue_id}, entry {row} ({path}, byte {position})"

    def _place_behind(self, number: int, first: int, hit: int) -> str:
        return self.place(number, first + hit)

    def _check_there(self, place: Callable[[int], str], offset: np.ndarray, found: np.ndarray) -> None:
        """Whether a record begins where one must; what retention let go of is counted."""
        needed = self._must_be_there(offset)
        self._report.count("rows whose record is gone", int((~found & ~needed).sum()))
        self._report.find_each(
            ~found & needed, lambda hit: f"{place(hit)}: it points at {offset[hit]}, where no record begins"
        )

    def _must_be_there(self, offset: np.ndarray) -> np.ndarray:
        there = np.isin(offset >> self._folder.segments.shift, self._numbers)
        for hole in self._holes:
            there &= (offset < hole.offset) | (offset >= hole.end)
        for base, name in self._tables.chunks():
            size = self._folder.disk.size(chunks.path_of(name))
            there |= (offset >= base) & (offset < base + size)
        never = (offset < 0) | ((offset >= self._log_end) & (offset < CHUNK_BIT)) | (offset >= self._tables.chunk_end)
        result: np.ndarray = there | never
        return result

    def _check_entries(
        self, number: int, first: int, entries: np.ndarray, found: np.ndarray, known: np.ndarray
    ) -> None:
        place = partial(self._place_behind, number, first)
        self._report.find_each(
            found & ((known["size"] != entries["size"]) | (known["kind"] != MESSAGE)),
            lambda hit: (
                f"{place(hit)}: it says {entries['size'][hit]} bytes, at {known['offset'][hit]} is a "
                f"{KIND_NAMES.get(int(known['kind'][hit]))} of {known['size'][hit]}"
            ),
        )
        self._report.find_each(
            found & (known["tag_hash"] != entries["tag"]),
            lambda hit: f"{place(hit)}: its tag hash is {entries['tag'][hit]}, the record's {known['tag_hash'][hit]}",
        )
        # A queue that is gone hands its messages to another one of its topic, never to another topic.
        fits = (known["queue"] >= 0) & (known["queue"] < len(self._topic_of))
        fits[fits] = self._topic_of[known["queue"][fits]] == self._topic_of[number]
        self._report.find_each(
            found & ~fits, lambda hit: f"{place(hit)}: the record at {known['offset'][hit]} is of another topic"
        )

    def _check_level_entries(
        self, number: int, first: int, entries: np.ndarray, found: np.ndarray, known: np.ndarray
    ) -> None:
        """SCHEDULE_TOPIC_XXXX indexes every level message when it comes, with its due in the tag."""
        place = partial(self._place_behind, number, first)
        level = self._tables.places[number][1] + 1
        same = (known["size"] == entries["size"]) & (known["due"] == entries["tag"]) & (known["level"] == level)
        self._report.find_each(
            found & ~same,
            lambda hit: f"{place(hit)}: it does not fit the message at {known['offset'][hit]} (size, due or level)",
        )
        self._check_ascending(place, entries["offset"], "offset")

    def _check_ascending(self, place: Callable[[int], str], column: np.ndarray, name: str) -> bool:
        falls = np.concatenate([[False], column[1:] <= column[:-1]])
        self._report.find_each(
            falls, lambda hit: f"{place(hit)}: {name} {column[hit]} is not behind {column[hit - 1]}, the one before it"
        )
        return not falls.any()

    def _visible(self, number: int, times: np.ndarray, first: int, count: int) -> np.ndarray | None:
        """When each entry became visible; None where the times do not tell."""
        self._report.count("rows of times", len(times))

        def place(hit: int) -> str:
            return f"{_times_folder(number)}, row {hit}"

        ascends = self._check_ascending(place, times["at_ms"], "instant")
        ascends &= self._check_ascending(place, times["offset"], "offset")
        covers = not first + count or (len(times) > 0 and times["offset"][0] == 0)
        if not covers or (len(times) and times["offset"][-1] >= first + count):
            self._report.find(
                f"{_times_folder(number)}: the times do not cover the {first + count} entries of the queue"
            )
            return None
        if not ascends:
            return None
        instants: np.ndarray = times["at_ms"][
            np.searchsorted(times["offset"], np.arange(first, first + count), "right") - 1
        ]
        return instants

    def _check_due(self, number: int, first: int, found: np.ndarray, known: np.ndarray, visible: np.ndarray) -> None:
        """Never before its due; in (due, arrival) order unless it came too late for that."""
        self._report.find_each(
            found & (visible < known["due"]),
            lambda hit: (
                f"{self.place(number, first + hit)}: it became visible at {visible[hit]}, "
                f"before its due {known['due'][hit]}"
            ),
        )
        timed = np.flatnonzero(found & (known["due"] > 0))
        due_at_ms, arrival, came_at = (known[name][timed] for name in ("due", "arrival", "came_at"))
        self._report.count("timed entries in order", len(timed))
        # Instants ascend, so those that were not visible yet when b came are the ones from `low` on.
        low = np.minimum(np.searchsorted(visible[timed], came_at, "right"), np.arange(len(timed)))
        self._report.find_each(
            _overtaken(_ranks(due_at_ms, arrival), low),
            lambda hit: (
                f"{self.place(number, first + int(timed[hit]))}: it is due at {due_at_ms[hit]}, came at {came_at[hit]} "
                "and stands behind a message that is due later"
            ),
        )

    # -- all queues together, and the far queue -----------------------------------------------------------------

    def _check_once(self) -> None:
        """No message stands twice in the queues."""
        if not self._identities:
            return
        identity, owners = np.concatenate(self._identities), np.concatenate(self._owners)
        order = np.argsort(identity, kind="stable")
        again = np.flatnonzero(identity[order][1:] == identity[order][:-1])
        self._report.find_each(
            np.ones(len(again), np.bool_),
            lambda hit: (
                f"{self.place(*owners[order[again[hit] + 1]].tolist())}: the message of arrival "
                f"{identity[order[again[hit]]]} stands at {self.place(*owners[order[again[hit]]].tolist())} too"
            ),
        )

    def _check_far(self) -> None:
        first, rows = self._tables.rows("far")
        self._report.count("far rows", len(rows))
        step = self._folder.fixed["queue_file_rows"]

        def place(hit: int) -> str:
            (path,) = self._folder.rows("far", 0).paths(first + hit, first + hit + 1)
            return f"far row {first + hit} ({path}, byte {(first + hit) % step * FAR.itemsize})"

        self._check_ascending(place, rows["arrival"], "arrival")
        found, known = self._index.find(rows["arrival"])
        self._check_there(place, rows["arrival"], found)
        same = (rows["kind"] == known["kind"]) & (rows["size"] == known["size"])
        fields = ("due", "queue", "tag_hash", "unique_hash", "key_hash", "level")
        same &= (rows["kind"] != MESSAGE) | np.all([rows[name] == known[name] for name in fields], axis=0)
        self._report.find_each(
            found & ~same, lambda hit: f"{place(hit)}: {_named(rows[hit])} does not fit the record at that arrival"
        )
