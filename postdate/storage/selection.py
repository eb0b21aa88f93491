"""A selection: a file of the rows that a job has found, which the broker reads when it decides.

    0       4      8       16     24
    +-------+------+-------+------+
    | magic | ver. | count | sum  |
    +-------+------+-------+------+
    | count rows of 40 bytes (SELECTED), ascending by (due, arrival)
    +-------------- - -

Little-endian; the sum is xxh3 of the rows. A file is whole when it has its name.
"""

import re

import numpy as np
from xxhash import xxh3_64_intdigest

from postdate.errors import CorruptSelection
from postdate.faultpoint import reach
from postdate.storage.disk import Disk
from postdate.storage.layout import SELECTED, SELECTION_HEAD

FOLDER = "selections"
NEW = ".new"  # ends the name of one that is being written
MAGIC = 0x31534450  # "PDS1"
VERSION = 1
_OPEN_MAX = 16
_NAME = re.compile(r"[0-9]{8}-[A-Za-z0-9-]{1,80}")


def path_of(name: str) -> str:
    return f"{FOLDER}/{name}"


def is_name(name: str) -> bool:
    """Whether a name is eight digits of the job, -, then a-z A-Z 0-9 -."""
    return _NAME.fullmatch(name) is not None


def job_of(name: str) -> int:
    """The number of the job that a selection belongs to."""
    return int(name.partition("-")[0])


def write(disk: Disk, name: str, rows: np.ndarray) -> None:
    """Writes rows, durable on return."""
    body = rows.tobytes()
    path = path_of(name)
    reach("selection.write")
    disk.write(path + NEW, 0, SELECTION_HEAD.pack(MAGIC, VERSION, len(rows), xxh3_64_intdigest(body)), body)
    disk.sync(path + NEW)
    reach("selection.synced")
    disk.rename(path + NEW, path)
    disk.sync_folder(FOLDER)
    reach("selection.written")


def remove_unfinished(disk: Disk) -> None:
    """Removes unfinished files of writers that died. The one process that writes selections calls it before it does."""
    for name in disk.list(FOLDER):
        if name.endswith(NEW):
            disk.remove(path_of(name))


def is_there(disk: Disk, name: str) -> bool:
    return disk.size(path_of(name)) >= SELECTION_HEAD.size


def rows_of(disk: Disk, name: str) -> np.ndarray:
    """The rows, in place. Raises CorruptSelection where the file is missing or cut."""
    if not is_there(disk, name):
        raise CorruptSelection(f"{path_of(name)} is missing or cut short")
    data = disk.array(path_of(name))
    magic, version, count, _ = SELECTION_HEAD.unpack_from(data[: SELECTION_HEAD.size].tobytes())
    if magic != MAGIC or version != VERSION or len(data) != SELECTION_HEAD.size + count * SELECTED.itemsize:
        raise CorruptSelection(f"{path_of(name)}: {len(data)} bytes, its header does not fit them")
    rows: np.ndarray = data[SELECTION_HEAD.size :].view(SELECTED)
    return rows


def verify(disk: Disk, name: str) -> np.ndarray:
    """Reads and checks every byte; returns the rows. Raises CorruptSelection."""
    rows = rows_of(disk, name)
    *_, wanted = SELECTION_HEAD.unpack_from(disk.read(path_of(name), 0, SELECTION_HEAD.size))
    if xxh3_64_intdigest(rows.tobytes()) != wanted:
        raise CorruptSelection(f"{path_of(name)}: the checksum does not match")
    if not is_sorted(rows):
        raise CorruptSelection(f"{path_of(name)}: the rows are not in (due, arrival) order")
    return rows


def is_sorted(rows: np.ndarray) -> bool:
    due, arrival = rows["due"], rows["arrival"]
    return bool(((due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (arrival[1:] > arrival[:-1]))).all())


class Selections:
    """The selections of a folder. It keeps the last ones open."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[str, np.ndarray] = {}

    def rows(self, name: str) -> np.ndarray:
        """Raises CorruptSelection."""
        found = self._open.get(name)
        if found is None:
            while len(self._open) >= _OPEN_MAX:
                del self._open[next(iter(self._open))]
            found = self._open[name] = rows_of(self._disk, name)
        return found

    def rows_left(self, name: str) -> np.ndarray:
        """The rows; empty where retention has removed the file."""
        return self.rows(name) if name in self._open or is_there(self._disk, name) else np.empty(0, SELECTED)

    def verify(self, name: str) -> np.ndarray:
        """Reads every byte. Raises CorruptSelection."""
        return verify(self._disk, name)

    def names(self) -> list[str]:
        return [name for name in self._disk.list(FOLDER) if not name.endswith(NEW)]

    def remove(self, name: str) -> None:
        """For retention: the caller has made sure that nothing needs it."""
        self._open.pop(name, None)
        reach("selection.remove")
        self._disk.remove(path_of(name))
