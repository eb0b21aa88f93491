"""A new data folder for a table whose own is lost: the state that agrees with the table, written as a snapshot.

The log begins at a segment beyond everything that the table knows, so that what arrived before sorts before what comes.
The far queue has as many rows as the table has taken, all of them gone, and the topics have the queue numbers that the
table's rows name.
"""

from typing import NamedTuple

from postdate.arrival import NEVER
from postdate.contract import NamedQueues
from postdate.state import saved
from postdate.state.fold import Fold
from postdate.state.topics import GONE, Topic
from postdate.storage import segment, snapshot
from postdate.storage.disk import Disk
from postdate.storage.layout import BATCH_HEADER_BYTES, FAR
from postdate.storage.log import Log
from postdate.storage.segment import Segments

_MADE_AGAIN = (segment.FOLDER, snapshot.FOLDER, "far", "index", "once")


class Adopted(NamedTuple):
    """What the new broker must know of the table."""

    uri: str
    queues: NamedQueues
    far: int  # far rows that the table has taken
    rows_in: int  # rows that ever came into it
    rows_out: int  # and left it
    horizon_at_ms: int
    epoch: int
    next_job: int
    arrival_high: int  # nothing in the table arrived after it


def has_log(disk: Disk) -> bool:
    """Whether a broker has ever written something to the log of this folder."""
    bases = [int(name) for name in disk.list(segment.FOLDER) if name.isdecimal()]
    return any(any(disk.read(segment.path_of(base), 0, BATCH_HEADER_BYTES)) for base in bases)


def write(disk: Disk, fixed: dict[str, int], adopted: Adopted) -> int:
    """Writes log and snapshot of a folder whose log is empty, durable on return; returns where the log begins. May be
    repeated after a crash.
    """
    assert not has_log(disk), "the folder has a log of its own"
    for folder in _MADE_AGAIN:
        for name in disk.list(folder):
            disk.remove(f"{folder}/{name}")
    segments = Segments(disk, fixed["segment_bytes"])
    base = (adopted.arrival_high // segments.segment_bytes + 2) * segments.segment_bytes
    segments.begin_at(base)
    log = Log(disk, segments, segments.segment_bytes)
    fold = Fold(
        disk, log.read, segments.shift, fixed["queue_file_rows"], 1, far_block_rows=fixed["far_block_rows"]
    )  # fmt: skip
    fold.position = base
    _put_topics(fold, adopted.queues)
    fold.jobs.load(adopted.next_job, [])
    _put_far(fold, fixed, adopted)
    for step in saved.take(disk, fold, lambda: None):
        if step is not None:
            step()
    return base


def _put_topics(fold: Fold, queues: NamedQueues) -> None:
    places, target = [("", 0)] * queues.given, [GONE] * queues.given
    topics = [Topic(*each) for each in queues.topics]
    for topic in topics:
        count = max(topic.read_queue_count, topic.write_queue_count)
        for queue_id, number in enumerate(topic.numbers):
            places[number] = (topic.name, queue_id)
            target[number] = number if queue_id < count else topic.numbers[queue_id % topic.read_queue_count]
    for number, name, queue_id in queues.deleted:
        places[number] = (name, queue_id)
    fold.topics.load({"topics": [vars(topic) for topic in topics], "places": places, "target": target})
    fold.make_queues()


def _put_far(fold: Fold, fixed: dict[str, int], adopted: Adopted) -> None:
    far, length, block_rows = fold.far, adopted.far, fixed["far_block_rows"]
    rest = length % fixed["queue_file_rows"]
    if rest:  # the next row has its place in this file
        (path,) = far.rows.paths(length - 1, length)
        fold.disk.write(path, rest * FAR.itemsize - 1, b"\0")
        fold.disk.sync(path)
        fold.disk.sync_folder("far")
    nothing = [NEVER] * -(-length // block_rows)
    far.rows.resume(length)
    far.load(
        {
            "first": length, "taken": length, "horizon": adopted.horizon_at_ms, "epoch": adopted.epoch,
            "table": adopted.uri, "rows_in": adopted.rows_in, "rows_out": adopted.rows_out, "rescues": [],
            "lows": nothing, "wakes": nothing, "edge": NEVER, "cancels": [],
        }
    )  # fmt: skip
