"""The log's files: segments of one fixed size, named by the offset of their first byte.

A segment is zeroed and synced before it is used, so that an append changes no file size and a sync writes data only.
Two zeroed segments are kept ahead, by a helper thread in a running broker. The last of them is a reserve: sends may
not open it, fires, cancels, stages and offsets may. A disk filled by sends therefore refuses sends first.
"""

import errno
import threading
from collections import deque
from contextlib import suppress

import numpy as np

from postdate.errors import CorruptLog, DiskFull, LogFailed, PostdateError
from postdate.faultpoint import reach
from postdate.storage.disk import Disk, File, View

FOLDER = "log"
SPARE_COUNT = 2
VIEWS_MAX = 128  # segments mapped at once: 8 GB of log at the default size, and as many file descriptors
_ZEROS = bytes(1 << 20)
_NEW = ".new"


class Segment:
    """One open segment: its file for writing, its map for reading."""

    __slots__ = ("base", "file", "view")

    def __init__(self, disk: Disk, base: int) -> None:
        self.base = base
        self.view: View = disk.map(path_of(base))
        self.file: File = disk.open(path_of(base))

    def close(self) -> None:
        self.file.close()


def path_of(base: int) -> str:
    return f"{FOLDER}/{base:020d}"


class Segments:
    """The segments that exist and the zeroed ones that wait after them.

    Everything but `prepare` is called by the one thread that appends.
    """

    def __init__(self, disk: Disk, segment_bytes: int) -> None:
        self._disk, self.segment_bytes = disk, segment_bytes
        self.shift = segment_bytes.bit_length() - 1
        # Those with data, or that may have data, ascending.
        self.bases = [int(name) for name in disk.list(FOLDER) if name.isdecimal()]
        self.views: dict[int, View] = {}  # by number (base >> shift), opened when first read
        self._spares: deque[int] = deque()
        self._preparing = threading.Lock()

    def remove_unfinished(self) -> None:
        """Removes preparations that a crash cut short. For a broker that opens its folder; readers leave them alone."""
        for name in self._disk.list(FOLDER):
            if name.endswith(_NEW):
                self._disk.remove(f"{FOLDER}/{name}")

    def view(self, base: int) -> View | None:
        """The segment's bytes; None where it is gone or never was."""
        number = base >> self.shift
        view = self.views.get(number)
        if view is None and base in self.bases:
            view = self._disk.map(path_of(base))
            self._keep_view(number, view)
        return view

    def _keep_view(self, number: int, view: View) -> None:
        """Keeps a map, and lets the oldest go: each holds a file descriptor, so their number is bounded."""
        while len(self.views) >= VIEWS_MAX:
            del self.views[next(iter(self.views))]
        self.views[number] = view

    def array(self, base: int) -> np.ndarray:
        """The segment's bytes for one look over all of them."""
        return self._disk.array(path_of(base))

    def keep_as_spares(self, bases: list[int]) -> None:
        """Uses these last segments, which hold nothing, before new ones are made."""
        for base in bases:
            self.bases.remove(base)
            self.views.pop(base >> self.shift, None)
            self._spares.append(base)

    def open_next(self, *, urgent: bool) -> Segment:
        """Opens the next segment for appending. Raises DiskFull when no zeroed one may be used and none can be made."""
        needed = 1 if urgent else SPARE_COUNT
        while len(self._spares) < needed:
            self.prepare()
        base = self._spares[0]
        try:
            segment = Segment(self._disk, base)
        except OSError as error:
            raise full_or(error, f"segment {path_of(base)} cannot be opened") from error
        # In this order: a preparation on the other thread looks for the last base among both.
        self.bases.append(base)
        self._spares.popleft()
        self._keep_view(base >> self.shift, segment.view)
        return segment

    def keep_reserve(self) -> None:
        """Makes sure that a zeroed segment is left. Raises DiskFull where none is and none can be made."""
        if not self._spares:
            self.prepare()

    def check_sizes(self) -> None:
        """Raises CorruptLog for a segment that has not the size that all of them have."""
        for base in self.bases:
            size = self._disk.size(path_of(base))
            if size != self.segment_bytes:
                raise CorruptLog(
                    f"segment {path_of(base)} has {size} bytes, expected {self.segment_bytes}: restore it from a copy"
                )

    def open_last(self) -> Segment:
        """Opens the segment that was being appended to."""
        segment = Segment(self._disk, self.bases[-1])
        self._keep_view(segment.base >> self.shift, segment.view)
        return segment

    @property
    def spare_count(self) -> int:
        return len(self._spares)

    def prepare(self) -> None:
        """Zeroes one more segment, if one is missing. Raises DiskFull; what it wrote is removed then.

        May run on a helper thread; two calls do not run at once.
        """
        with self._preparing:
            if len(self._spares) >= SPARE_COUNT:
                return
            # One look at each: the appending thread may take the last spare in between, after it became the last base.
            spares, bases = list(self._spares), list(self.bases)
            base = max([-self.segment_bytes, *spares[-1:], *bases[-1:]]) + self.segment_bytes
            self._zero(base)
            self._spares.append(base)

    def begin_at(self, base: int) -> None:
        """Zeroes the first segment of a log that does not begin at 0. Raises DiskFull."""
        assert not self.bases, f"the log has segments already, the first at {self.bases[0]}"
        self._zero(base)

    def _zero(self, base: int) -> None:
        path = path_of(base) + _NEW
        try:
            reach("segment.zero")
            for position in range(0, self.segment_bytes, len(_ZEROS)):
                self._disk.write(path, position, memoryview(_ZEROS)[: self.segment_bytes - position])
            self._disk.sync(path)
            reach("segment.zeroed")
            self._disk.rename(path, path_of(base))
            self._disk.sync_folder(FOLDER)
        except OSError as error:
            with suppress(OSError):  # what cannot be removed now is removed by the next start
                self._disk.remove(path)
            raise full_or(error, f"no room for another log segment of {self.segment_bytes} bytes") from error
        reach("segment.ready")

    def remove(self, base: int) -> None:
        """Removes a segment that retention lets go."""
        reach("segment.remove")
        self._disk.remove(path_of(base))
        self.bases.remove(base)
        self.views.pop(base >> self.shift, None)


def full_or(error: OSError, sentence: str) -> PostdateError:
    """DiskFull where the disk is full (or its quota is), else LogFailed. Nothing is lost: it can be tried again."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else LogFailed
    return kind(f"{sentence}: {error.strerror or error}")


class SegmentKeeper:
    """The helper thread that zeroes segments ahead of use. It does not report a full disk, and tries again each
    second.
    """

    _RETRY_S = 1.0

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="segment-keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Called after each roll: a spare was used."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            missing = self._segments.spare_count < SPARE_COUNT
            if missing:
                # The append that needs the segment tries for itself and reports; here it is only tried again.
                with suppress(DiskFull, LogFailed):
                    self._segments.prepare()
                    continue
            self._wake.wait(self._RETRY_S if missing else None)
            self._wake.clear()
