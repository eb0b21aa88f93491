"""Checks the far queue, every row against its record, and the selections of jobs that are still needed."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from postdate.check.folder import Folder, named
from postdate.check.refold import Refold
from postdate.check.rows import Pointers, Tables, check_ascending
from postdate.errors import CorruptQueue, CorruptSelection
from postdate.state.jobs import RUNNING
from postdate.storage import selection
from postdate.storage.batch import MESSAGE, MESSAGES, MOVE
from postdate.storage.disk import RealDisk

_FIELDS = (
    "due",
    "queue",
    "tag_hash",
    "unique_hash",
    "key_hash",
    "level",
)  # that a message's row shares with its record

_DEFAULT_TABLE = "table"  # its name in the data folder


def check_far(folder: Folder, tables: Tables, pointers: Pointers) -> None:
    try:
        first, rows = tables.rows("far")
    except CorruptQueue as error:
        folder.report.find(str(error))
        return
    folder.report.count("far rows", len(rows))

    def place(hit: int) -> str:
        path, position = folder.file_of("far", first + hit)
        return f"far row {first + hit} ({path}, byte {position})"

    check_ascending(folder.report, place, rows["arrival"], "arrival")
    is_message, is_move = rows["kind"] == MESSAGE, rows["kind"] == MOVE
    found, known = pointers.follow(place, rows["arrival"] - is_move)  # its row comes after that of its message
    same = (rows["kind"] == known["kind"]) | (is_message & np.isin(known["kind"], MESSAGES))
    same &= rows["size"] == known["size"]
    same &= ~is_message | np.all([rows[name] == known[name] for name in _FIELDS], axis=0)
    folder.report.find_each(
        found & ~same, lambda hit: f"{place(hit)}: {named(rows[hit])} does not fit the record at that arrival"
    )


def check_selections(folder: Folder, refold: Refold) -> None:
    """Checks the selections of jobs, except those that retention removed after the table had followed the job."""
    for job in refold.fold.jobs.all() if refold.fold is not None else []:
        for part in job.parts:
            if job.state != RUNNING and not selection.is_there(folder.disk, part.name):
                continue
            try:
                rows = selection.verify(folder.disk, part.name)
            except CorruptSelection as error:
                folder.report.find(str(error))
                continue
            folder.report.count("selections", 1)
            if len(rows) != part.rows:
                folder.report.find(f"{selection.path_of(part.name)}: {len(rows)} rows, the log says {part.rows}")


def find_local_table(folder: Folder, refold: Refold) -> Path | None:
    """Returns where the pipeline that registered last keeps its table; None if that is not on this machine, or if no
    pipeline has named one. A copied data folder holds a copy of its own table: that one is meant.
    """
    address = ""
    if refold.fold is not None and refold.fold.far.table:
        address = refold.fold.far.table
    elif folder.newest:
        address = str(folder.newest.state["far"].get("table", ""))
    parts = urlsplit(address)
    is_url = "://" in address
    if not address or not isinstance(folder.disk, RealDisk) or (is_url and parts.scheme != "file"):
        return None
    path = Path(unquote(parts.path) if is_url else address)
    own = folder.disk.root / _DEFAULT_TABLE
    return own if path.name == _DEFAULT_TABLE and own.is_dir() else path
