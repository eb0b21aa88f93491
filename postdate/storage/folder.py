"""The file FORMAT of a data folder: which format it has, and the settings that are fixed for its life.

{"format": 1, "segment_bytes": 67108864, "queue_file_rows": 1048576, "far_block_rows": 65536}
"""

import json

from postdate.config import Limits, Settings
from postdate.errors import ForeignFolder
from postdate.storage.disk import Disk

FORMAT = 1
FORMAT_FILE = "FORMAT"
FIXED_SETTINGS = ("segment_bytes", "queue_file_rows", "far_block_rows")


def open_folder(disk: Disk, settings: Settings, limits: Limits) -> dict[str, int]:
    """Reads, or writes into an empty folder, what is fixed for a folder's life. Raises ForeignFolder."""
    refuse_foreign(disk)
    if disk.size(FORMAT_FILE) >= 0:
        return read_format(disk)
    sizes = (settings.segment_bytes, limits.queue_file_rows, limits.far_block_rows)
    fixed = {"format": FORMAT} | dict(zip(FIXED_SETTINGS, sizes, strict=True))
    disk.write(FORMAT_FILE + ".new", 0, json.dumps(fixed).encode())
    disk.sync(FORMAT_FILE + ".new")
    disk.rename(FORMAT_FILE + ".new", FORMAT_FILE)
    disk.sync_folder("")
    return fixed


def refuse_foreign(disk: Disk) -> None:
    """Raises ForeignFolder for a folder that holds something, but nothing of ours. Changes nothing, not even a lock."""
    names = [name for name in disk.list("") if name not in ("LOCK", FORMAT_FILE + ".new")]
    if names and FORMAT_FILE not in names:
        raise ForeignFolder(
            f"the folder holds {names[0]!r} but no file {FORMAT_FILE}: it is not a Postdate folder; "
            "give the broker an empty one"
        )


def read_format(disk: Disk) -> dict[str, int]:
    """What the file says. Raises ForeignFolder."""
    text = disk.read(FORMAT_FILE, 0, 4_096)
    try:
        fixed = json.loads(text)
        found = {name: int(fixed[name]) for name in ("format", *FIXED_SETTINGS)}
    except (ValueError, KeyError, TypeError) as error:
        raise ForeignFolder(f"the file {FORMAT_FILE} is not readable ({error}): restore it from a copy") from error
    if found["format"] > FORMAT:
        raise ForeignFolder(
            f"the folder has format {found['format']}, this program knows up to {FORMAT}: "
            "it was written by a newer Postdate, use that"
        )
    return found
