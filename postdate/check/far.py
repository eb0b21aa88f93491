"""The far queue: every row against its record."""

import numpy as np

from postdate.check.folder import Folder, named
from postdate.check.pointers import Pointers, check_ascending
from postdate.check.tables import Tables
from postdate.errors import CorruptQueue
from postdate.storage.batch import MESSAGE

_FIELDS = (
    "due",
    "queue",
    "tag_hash",
    "unique_hash",
    "key_hash",
    "level",
)  # that a message's row shares with its record


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
    found, known = pointers.follow(place, rows["arrival"])
    same = (rows["kind"] == known["kind"]) & (rows["size"] == known["size"])
    same &= (rows["kind"] != MESSAGE) | np.all([rows[name] == known[name] for name in _FIELDS], axis=0)
    folder.report.find_each(
        found & ~same, lambda hit: f"{place(hit)}: {named(rows[hit])} does not fit the record at that arrival"
    )
