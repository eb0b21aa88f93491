"""Adopts a table whose data folder is lost: makes a new folder that agrees with it, and makes the table that folder's.

    survey     reads the table: queues, marks, what would be delivered
    prepare    the new folder gets an identity, a log that begins beyond everything the table knows, and a snapshot
    stamp      the table gets the identity of the new folder
    finish     the file FORMAT, without which no broker opens the folder

Each step may be repeated, and a broker opens the folder only after the last: an adoption that was killed is run again.
"""

from postdate.access.token import TOKEN_FILE
from postdate.config import Limits, Settings
from postdate.errors import Refused
from postdate.faultpoint import reach
from postdate.state import adopted
from postdate.storage.disk import Disk
from postdate.storage.folder import (
    FORMAT_FILE,
    IDENTITY_FILE,
    fixed_of,
    open_identity,
    read_format,
    read_identity,
    write_format,
)
from postdate.table.delta import Table
from postdate.table.format import MESSAGES
from postdate.table.survey import Survey, survey

_OURS = (
    "LOCK", TOKEN_FILE, FORMAT_FILE, IDENTITY_FILE, "log", "snapshots", "far", "index", "once", "queues", "chunks",
    "selections", "table", "tls.crt", "tls.key", "broker.sock",
)  # fmt: skip


def look_at(disk: Disk, root: str, settings: Settings) -> Survey:
    """Says what an adoption would do. What was promoted in the last two leads is delivered again. Raises Refused,
    CorruptTable.
    """
    refuse_used(disk)
    begun = read_identity(disk) if disk.size(FORMAT_FILE) < 0 else ""  # of an adoption that was cut short
    return survey(root, 2 * settings.lead_ms, begun)


def adopt(disk: Disk, root: str, settings: Settings, limits: Limits) -> Survey:
    """Adopts a table into a new or empty folder, durable on return. Raises Refused, FolderInUse, CorruptTable."""
    found = look_at(disk, root, settings)
    lock = disk.lock()
    try:
        refuse_used(disk)  # a broker may have run until now
        fixed = fixed_of(settings, limits)
        if disk.size(FORMAT_FILE) >= 0:  # an empty folder that a broker has made
            fixed = read_format(disk)
            for name in (IDENTITY_FILE, FORMAT_FILE):
                if disk.size(name) >= 0:
                    disk.remove(name)
                disk.sync_folder("")
        identity = open_identity(disk)
        reach("adopt.begun")
        adopted.write(
            disk, fixed,
            adopted.Adopted(
                root, found.queues, found.far, found.rows, found.rows - found.waiting_rows,
                found.seen.horizon, found.seen.epoch, found.next_job, found.arrival_high,
            ),
        )  # fmt: skip
        reach("adopt.prepared")
        Table(f"{root.rstrip('/')}/{MESSAGES}").stamp(identity, found.seen)
        reach("adopt.stamped")
        write_format(disk, fixed)
    finally:
        lock.release()
    return found


def refuse_used(disk: Disk) -> None:
    """Raises Refused for a folder that is in use, or holds something of its own."""
    strangers = [name for name in disk.list("") if name.removesuffix(".new") not in _OURS]
    if strangers:
        raise Refused(f"the folder holds {strangers[0]!r}: a table is adopted into a new or empty folder")
    if adopted.has_log(disk):
        raise Refused(
            "the folder has a log of its own, and far rows of both could not be told apart: a table is adopted into a "
            "new or empty folder; name one with --data, and keep this one until you have sent again what only it has"
        )
