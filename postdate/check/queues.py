"""Checks the queues: every entry against its record, its time and its neighbours; no message twice."""

from typing import NamedTuple

import numpy as np

from postdate.check.folder import Folder, entries_folder, times_folder
from postdate.check.rows import Pointers, Tables, check_ascending
from postdate.errors import CorruptQueue
from postdate.state.topics import SCHEDULE_TOPIC
from postdate.storage.batch import KIND_NAMES, MESSAGES


class _Entries(NamedTuple):
    """The entries of one queue, and what is known of the record of each."""

    folder: Folder
    topic: str
    queue_id: int
    number: int
    first: int  # entries before this one are gone
    rows: np.ndarray
    found: np.ndarray
    known: np.ndarray

    def place(self, hit: int) -> str:
        return _place(self.folder, self.topic, self.queue_id, self.number, self.first + hit)

    @property
    def offsets(self) -> np.ndarray:
        """The queue offset of each."""
        return np.arange(self.first, self.first + len(self.rows))


def _place(folder: Folder, topic: str, queue_id: int, number: int, row: int) -> str:
    """An entry as a place: the queue in people's words, then the file."""
    path, position = folder.file_of(entries_folder(number), row)
    return f"{topic}, queue {queue_id}, entry {row} ({path}, byte {position})"


class QueueCheck:
    def __init__(self, folder: Folder, tables: Tables, pointers: Pointers) -> None:
        self._folder, self._report, self._tables, self._pointers = folder, folder.report, tables, pointers
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

    # -- one queue ----------------------------------------------------------------------------------------------

    def _check_queue(self, number: int) -> None:
        first, rows = self._tables.rows(entries_folder(number))
        times_first, times = self._tables.rows(times_folder(number))
        self._report.count("queues", 1)
        self._report.count("queue entries", len(rows))
        topic, queue_id = self._tables.places[number]
        found, known = self._pointers.follow(
            lambda hit: _place(self._folder, topic, queue_id, number, first + hit), rows["offset"]
        )
        entries = _Entries(self._folder, topic, queue_id, number, first, rows, found, known)
        if topic == SCHEDULE_TOPIC:
            self._check_level_entries(entries)
            return
        self._check_entries(entries)
        visible = self._visible(entries, times_first, times)
        if visible is not None:
            self._report.find_each(
                found & (visible < known["due"]),
                lambda hit: (
                    f"{entries.place(hit)}: it became visible at {visible[hit]}, before its due {known['due'][hit]}"
                ),
            )
            self._check_order(entries, visible)
        self._identities.append(np.where(found, known["identity"], rows["offset"]))
        self._owners.append(np.stack([np.full(len(rows), number), entries.offsets], axis=1))

    def _check_entries(self, entries: _Entries) -> None:
        rows, found, known = entries.rows, entries.found, entries.known
        self._report.find_each(
            found & ((known["size"] != rows["size"]) | ~np.isin(known["kind"], MESSAGES)),
            lambda hit: (
                f"{entries.place(hit)}: it says {rows['size'][hit]} bytes, at {known['offset'][hit]} is a "
                f"{KIND_NAMES.get(int(known['kind'][hit]))} of {known['size'][hit]}"
            ),
        )
        self._report.find_each(
            found & (known["tag_hash"] != rows["tag"]),
            lambda hit: (
                f"{entries.place(hit)}: its tag hash is {rows['tag'][hit]}, the record's {known['tag_hash'][hit]}"
            ),
        )
        # A queue that is gone hands its messages to another one of its topic, never to another topic.
        queue = known["queue"]
        fits: np.ndarray = (queue >= 0) & (queue < len(self._topic_of))
        fits[fits] = self._topic_of[queue[fits]] == self._topic_of[entries.number]
        self._report.find_each(
            found & ~fits,
            lambda hit: f"{entries.place(hit)}: the record at {known['offset'][hit]} is of another topic",
        )

    def _check_level_entries(self, entries: _Entries) -> None:
        """SCHEDULE_TOPIC_XXXX indexes every level message when it comes, with its due in the tag."""
        rows, known = entries.rows, entries.known
        same = (known["size"] == rows["size"]) & (known["due"] == rows["tag"])
        same &= known["level"] == entries.queue_id + 1
        self._report.find_each(
            entries.found & ~same,
            lambda hit: (
                f"{entries.place(hit)}: it does not fit the message at {known['offset'][hit]} (size, due or level)"
            ),
        )
        check_ascending(self._report, entries.place, rows["offset"], "offset")

    # -- its times ----------------------------------------------------------------------------------------------

    def _visible(self, entries: _Entries, times_first: int, times: np.ndarray) -> np.ndarray | None:
        """When each entry became visible; None where the times do not tell."""
        name = times_folder(entries.number)
        self._report.count("rows of times", len(times))

        def place(hit: int) -> str:
            return f"{name}, row {times_first + hit}"

        ascends = check_ascending(self._report, place, times["at_ms"], "instant")
        ascends &= check_ascending(self._report, place, times["offset"], "offset")
        length = entries.first + len(entries.rows)
        index = np.searchsorted(times["offset"], entries.offsets, "right") - 1
        # Retention lets times go too, file by file: entries without a record may be left without their time.
        uncovered = (index < 0) & (entries.found | (times_first == 0))
        if uncovered.any() or (len(times) and times["offset"][-1] >= length):
            self._report.find(f"{name}: the times do not cover the {length} entries of the queue")
            return None
        if not ascends or not len(times):
            return None
        instants: np.ndarray = times["at_ms"][np.maximum(index, 0)]
        return instants

    def _check_order(self, entries: _Entries, visible: np.ndarray) -> None:
        """In (due, arrival) order, unless it came too late for that."""
        timed = np.flatnonzero(entries.found & (entries.known["due"] > 0))
        due_at_ms, arrival, came_at = (entries.known[name][timed] for name in ("due", "arrival", "came_at"))
        self._report.count("timed entries in order", len(timed))
        # Instants ascend, so those that were not visible yet when b came are the ones from `low` on.
        low = np.minimum(np.searchsorted(visible[timed], came_at, "right"), np.arange(len(timed)))
        self._report.find_each(
            overtaken(ranks(due_at_ms, arrival), low),
            lambda hit: (
                f"{entries.place(int(timed[hit]))}: it is due at {due_at_ms[hit]}, came at {came_at[hit]} "
                "and stands behind a message that is due later"
            ),
        )

    # -- all queues together ------------------------------------------------------------------------------------

    def _check_once(self) -> None:
        """No message stands twice in the queues."""
        if not self._identities:
            return
        identity, owners = np.concatenate(self._identities), np.concatenate(self._owners)
        order = np.argsort(identity, kind="stable")
        again = np.flatnonzero(identity[order][1:] == identity[order][:-1])

        def place(index: int) -> str:
            number, row = owners[order[index]].tolist()
            topic, queue_id = self._tables.places[number]
            return _place(self._folder, topic, queue_id, number, row)

        self._report.find_each(
            np.ones(len(again), np.bool_),
            lambda hit: (
                f"{place(again[hit] + 1)}: the message of arrival {identity[order[again[hit]]]} "
                f"stands at {place(again[hit])} too"
            ),
        )


def overtaken(rank: np.ndarray, low: np.ndarray) -> np.ndarray:
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


def ranks(due_at_ms: np.ndarray, arrival: np.ndarray) -> np.ndarray:
    """The place of each in (due, arrival) order."""
    ranks = np.empty(len(due_at_ms), np.int64)
    ranks[np.lexsort((arrival, due_at_ms))] = np.arange(len(due_at_ms))
    return ranks
