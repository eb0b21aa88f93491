"""Saved state: what a snapshot of the fold holds, how it is taken while the broker goes on, and how it is loaded.

Taking one is a generator: each step does a fraction of a millisecond of work, so that no fire waits for it. The
singles of the wheel are kept as they are by `Wheel.freeze`; everything else is small and copied at the first step.
Steps that block (syncs) are handed to the caller as functions, to be run on another thread.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from postdate.errors import CorruptQueue, CorruptSnapshot
from postdate.faultpoint import reach
from postdate.state.fold import Fold
from postdate.state.index import Index
from postdate.state.once import NO_IDS
from postdate.state.transactions import NO_TRANSACTIONS
from postdate.state.wheel import Run
from postdate.storage import chunk as chunks
from postdate.storage import snapshot
from postdate.storage.disk import Disk
from postdate.storage.queue import Queue
from postdate.storage.rows import BLOCK_ROWS, Rows

Step = Callable[[], object] | None
ITEMS_PER_SECTION = 500  # about 0.5 ms
BYTES_PER_SECTION = 1 << 15
# What stands in a snapshot to save time, and depends on when looks were taken or on what retention let go.
LOCAL_FAR_STATE = ("lows", "wakes", "edge", "first", "cancels")


class Kept(NamedTuple):
    """What retention must know of a snapshot that is kept: a replay from it needs everything that waited then."""

    position: int
    waiting_chunks: frozenset[int]  # bases; also of those with popped messages
    taken: int
    chunk_end: int  # chunks staged later are not in it
    lengths: dict[str, int]  # of the rows, by folder
    once_first: int  # the first row of an id that was not over
    open_jobs: frozenset[int]  # numbers of those that were not over: a replay may decide them, or follow them
    jobs_next: int
    selections: dict[str, int]  # by name, of those that were decided: the largest arrival that is a place in the log

    def may_decide(self, job: int) -> bool:
        """Whether a replay from here comes by what a job decides, or by stages that depend on it."""
        return job in self.open_jobs or job >= self.jobs_next


def kept_of(fold: Fold) -> Kept:
    """What retention must know of a snapshot of the fold as it is now."""
    bases = frozenset(run.base for run in fold.wheel.runs) | fold.references.held_chunks()
    lengths = {rows.folder: rows.length for rows in fold.all_rows()}
    open_jobs = frozenset(job.number for job in fold.jobs.all() if not job.is_over)
    selections = {part.name: part.arrival_high for job in fold.jobs.all() for part in job.parts}
    return Kept(
        fold.position, bases, fold.far.taken, fold.chunk_end, lengths, fold.once.first, open_jobs,
        fold.jobs.next_number, selections,
    )  # fmt: skip


def take(disk: Disk, fold: Fold, flush_log: Callable[[], object]) -> Iterator[Step]:
    """Takes a snapshot. Yields None after each bounded step, or a blocking function to be run before the next one.

    Raises OSError or LogFailed; then there is no new snapshot, and nothing else has changed.
    """
    frozen = fold.wheel.freeze()
    try:
        state = _state(fold)
        lengths = [(rows, rows.length) for rows in fold.all_rows()]
        yield None
        writer = snapshot.Writer(disk, state["position"])
        try:
            for section in _sections(state):
                writer.write_json(section)
                yield None
            for piece in frozen.pieces():
                writer.write(snapshot.SLOTS, piece)
                yield None
            for rows, length in lengths:
                yield from _write_rows(writer, rows, length)
            yield flush_log
            yield lambda: _sync_rows(disk, lengths)
            yield writer.finish
        except (Exception, GeneratorExit):
            writer.discard()
            raise
        for rows, length in lengths:
            rows.synced = length
        yield lambda: snapshot.remove_old(disk)
    finally:
        fold.wheel.thaw()


def _state(fold: Fold) -> dict[str, Any]:
    """Everything small, copied in one step."""
    leases = fold.leases.state()
    return {
        "position": fold.position,
        "last_offset": fold.last_offset,
        "at_ms": fold.at_ms,
        "fired_at_ms": fold.fired_at_ms,
        "lead_ms": fold.lead_ms,
        "topics": fold.topics.state(),
        "groups": fold.groups.state(),
        "values": fold.values.state(),
        "leases": leases["leases"],
        "ready": leases["ready"],
        "spent": leases["spent"],
        "queues": [[queue.length, queue.times.length, queue.entries.first] for queue in fold.queues],
        "near": list(fold.near),
        "untaken": list(fold.untaken),
        "far": fold.far.state(),
        "index": fold.index.state(),
        "index_tail": fold.index.tail(),
        "once": fold.once.state(),
        "tombstones": fold.cancels.state(),
        "held": list(fold.references.held.items()),
        "seen": list(fold.references.seen.items()),
        "touched": list(fold.references.touched.items()),
        "seconds": fold.quotas.state(),
        "chunk_end": fold.chunk_end,
        "chunk_seen": list(fold.references.chunk_seen.items()),
        "chunk_held": list(fold.references.chunk_held.items()),
        "chunks": [[base, fold.chunks.name_of(base)] for base in fold.chunks.bases()],
        "runs": [[run.base, run.position, _packed(run.dead)] for run in fold.wheel.runs],
        "rescued": fold.rescued_count,
        "jobs": fold.jobs.state(),
        "jobs_next": fold.jobs.next_number,
        "moved": fold.moves.count,
        **fold.transactions.state(),
    }


def _sections(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One section per part; a long list, or bytes, in slices, because a section is written in one step."""
    for name, value in state.items():
        if isinstance(value, bytes):
            for start in range(0, max(len(value), 1), BYTES_PER_SECTION):
                yield {name: value[start : start + BYTES_PER_SECTION].hex()}
        elif isinstance(value, list) and len(value) > ITEMS_PER_SECTION:
            for start in range(0, len(value), ITEMS_PER_SECTION):
                yield {name: value[start : start + ITEMS_PER_SECTION]}
        else:
            yield {name: value}


def _packed(dead: np.ndarray | None) -> str:
    return "" if dead is None else zlib.compress(dead.tobytes(), 1).hex()


def _unpacked(text: str) -> np.ndarray | None:
    return np.frombuffer(zlib.decompress(bytes.fromhex(text)), np.uint8).copy() if text else None


def _write_rows(writer: snapshot.Writer, rows: Rows, length: int) -> Iterator[None]:
    """Writes the rows to their files and their checksums to the snapshot."""
    rows.spill()
    if rows.write_error is not None:
        raise rows.write_error
    if rows.unsure:
        rows.write_again()
    yield None
    yield from rows.sum_blocks(length)
    full = length // BLOCK_ROWS
    sums = [*rows.sums[:full], rows.block_sum(full, length) if length % BLOCK_ROWS else 0]
    name = rows.folder.encode()
    writer.write(snapshot.SUMS, len(name).to_bytes(2, "little") + name + np.array(sums, "<u8").tobytes())
    yield None


def read_sums(section: snapshot.Section) -> tuple[str, list[int]]:
    size = int.from_bytes(section.data[:2], "little")
    return section.data[2 : 2 + size].decode(), np.frombuffer(section.data, "<u8", offset=2 + size).tolist()


def _sync_rows(disk: Disk, lengths: list[tuple[Rows, int]]) -> None:
    folders = set()
    for rows, length in lengths:
        if length > rows.synced:
            try:
                for path in rows.paths(rows.synced, length):
                    disk.sync(path)
            except OSError:
                rows.unsure = True
                raise
            folders.add(rows.folder)
    for folder in sorted(folders):
        disk.sync_folder(folder)
    reach("snapshot.rows_synced")


# -- loading ----------------------------------------------------------------------------------------------------


def load(fold: Fold, sections: list[snapshot.Section]) -> None:
    """Fills a fresh fold. Raises CorruptQueue or CorruptChunk where a file that the snapshot speaks of is not as it
    was.
    """
    state = read_state(sections)
    _load_tables(fold, state)
    fold.queues = [
        Queue(fold.disk, number, fold.file_rows, fold.tail_rows, length, times_length)
        for number, (length, times_length, _) in enumerate(state["queues"])
    ]
    for queue, (_, _, first) in zip(fold.queues, state["queues"], strict=True):
        queue.entries.first = first
    fold.far.rows.resume(state["far"]["length"])
    fold.far.load(state["far"])
    fold.index = Index(fold.disk, fold.file_rows, state["index"]["length"])
    fold.index.load(state["index"], bytes.fromhex(state["index_tail"]))
    fold.once.load(state.get("once", NO_IDS))  # a snapshot of an earlier version knows nothing of ids
    fold.cancels.load(state["tombstones"], fold.fired_at_ms)
    _load_chunks(fold, state)
    sums = dict(read_sums(section) for section in sections if section.kind == snapshot.SUMS)
    for rows in fold.all_rows():
        rows.find_first()
        _check_rows(rows, sums.get(rows.folder, [0]))
    fold.once.index()
    fold.far.forget(fold.far.rows.first)
    for section in sections:
        if section.kind == snapshot.SLOTS:
            fold.wheel.load(section.data)


def read_state(sections: list[snapshot.Section]) -> dict[str, Any]:
    """The parts of the state, with slices joined. Raises CorruptSnapshot."""
    state: dict[str, Any] = {}
    for section in sections:
        if section.kind == snapshot.STATE:
            for name, value in section.json().items():
                state[name] = state[name] + value if name in state else value
    if "index" not in state:
        raise CorruptSnapshot("a snapshot without the part 'index', as written before there was one")
    return state


def _load_tables(fold: Fold, state: dict[str, Any]) -> None:
    fold.position, fold.at_ms, fold.fired_at_ms = state["position"], state["at_ms"], state["fired_at_ms"]
    fold.last_offset = state.get("last_offset", -1)  # a snapshot of an earlier version does not know it
    fold.lead_ms, fold.chunk_end, fold.rescued_count = state["lead_ms"], state["chunk_end"], state["rescued"]
    fold.topics.load(state["topics"])
    fold.groups.load(state["groups"])
    fold.values.load(state.get("values", []))  # a snapshot of an earlier version has none
    # A snapshot of an earlier version knows nothing of leases.
    fold.leases.load(state.get("leases", []), state.get("ready", []), state.get("spent", []))
    fold.jobs.load(state.get("jobs_next", 0), state.get("jobs", []))
    fold.moves.count = state.get("moved", 0)
    known = NO_TRANSACTIONS | state
    fold.transactions.load(known["halves"], known["halves_opened"], known["halves_ended"])
    fold.near[:], fold.untaken[:] = state["near"], state["untaken"]  # in place: cancels and jobs share them
    references = fold.references
    references.held, references.seen, references.touched = (dict(state[name]) for name in ("held", "seen", "touched"))
    references.chunk_seen, references.chunk_held = dict(state["chunk_seen"]), dict(state.get("chunk_held", []))
    fold.quotas.load(state["seconds"])


def _load_chunks(fold: Fold, state: dict[str, Any]) -> None:
    runs = {base: (position, dead) for base, position, dead in state["runs"]}
    for base, name in state["chunks"]:
        if base not in runs and fold.disk.size(chunks.path_of(name)) < 0:
            continue  # all of it was fired when the snapshot was taken, and retention has removed it since
        chunk = fold.chunks.open(name)
        fold.chunks.add(base, chunk)
        if base in runs:
            position, dead = runs[base]
            fold.wheel.stage(Run(base, chunk.index, position, _unpacked(dead)))


def _check_rows(rows: Rows, sums: list[int]) -> None:
    """Checks that no file is missing and that the block in which the snapshot ends is as it was. `check` looks at all
    blocks.
    """
    full = rows.length // BLOCK_ROWS
    rows.sums = sums[:full]
    # A sum of 0 says that rows of the block were gone already; some may have gone since.
    comparable = sums[-1] != 0 and full * BLOCK_ROWS >= rows.first
    if comparable and rows.block_sum(full, rows.length) != sums[-1]:
        raise CorruptQueue(f"{rows.folder}: block {full} is not as the snapshot knew it")
    rows.check_files()


def cut_rows(fold: Fold) -> None:
    """Removes the rows from the files that the replay will make again."""
    for rows in fold.all_rows():
        rows.cut()


def state_json(fold: Fold) -> str:
    """The whole small state as text, for comparing two folds."""
    state = _state(fold)
    state["far"] = {name: value for name, value in state["far"].items() if name not in LOCAL_FAR_STATE}
    return json.dumps(state, sort_keys=True, default=bytes.hex)
