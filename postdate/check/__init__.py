"""Checks a closed data folder: is everything that a broker would trust still true?

    FORMAT, segments     every batch's checksum, every record, every row against its record, what is zero
    snapshots            readable; the checksums of all blocks of rows that they hold
    a second fold        the log applied anew, compared with the snapshots and with the queue, time and far files
    queues               every entry against its record: size, tag, never before its due, order, never twice
    far queue, chunks    rows against their records; chunks against their sums and records
    table                a local one: files against the Delta log, rows against the far queue and the log

Nothing on disk is changed: the second fold works on an overlay, and only the folder's lock is taken. Damage is never
raised; it becomes a finding with its place, and the check goes on with what it can still look at. What a crash leaves
by right (a torn tail, rows that the next start makes again) is no damage: the check counts it.

It cannot find one thing: after retention has run, a lost first file of a queue looks like one that retention removed.

It takes 10 to 15 s for a million messages, nearly all of it to decode and apply them one by one, and 0.6 KB of RAM for
each message in the log. A row of the table takes as long, and 16 bytes.
"""

from postdate.arrival import NEVER
from postdate.check import folder as folders
from postdate.check.chunks import check_chunk
from postdate.check.far import check_far, check_selections, find_local_table
from postdate.check.folder import Folder, check_sums
from postdate.check.log import LogCheck
from postdate.check.queues import QueueCheck
from postdate.check.records import Index
from postdate.check.refold import Refold
from postdate.check.report import Report
from postdate.check.rows import Pointers, Tables
from postdate.check.walk import Hole, place_of, walk
from postdate.config import KIB, Limits, Settings
from postdate.errors import ForeignFolder, UsageError
from postdate.extras import require_extra
from postdate.storage.batch import MESSAGE
from postdate.storage.disk import Disk
from postdate.storage.folder import FORMAT_FILE, open_folder

__all__ = ["Hole", "Report", "check_folder", "place_of", "walk"]


def check_folder(disk: Disk) -> Report:
    """Checks a folder that no broker has open, and changes nothing in it but the file LOCK.

    Raises FolderInUse where a broker runs, ForeignFolder where the folder is not ours or from a newer version, OSError
    where the disk cannot be read, UsageError where the folder has a table and the extra that reads it is not installed.
    Damage is never raised.
    """
    if disk.size(FORMAT_FILE) < 0:
        raise ForeignFolder(
            f"there is no file {FORMAT_FILE}: this is not a Postdate folder, or nothing was written to it yet"
        )
    lock = disk.lock()
    try:
        fixed = open_folder(disk, Settings(), Limits())
        report = Report()
        problem = _fixed_problem(fixed)
        if problem:
            report.find(f"{FORMAT_FILE}: {problem}; nothing else can be checked")
        else:
            _check(folders.opened(disk, fixed, report))
        return report
    finally:
        lock.release()


def _fixed_problem(fixed: dict[str, int]) -> str:
    """Whether the values that are fixed for a folder's life are ones that a broker accepts."""
    try:
        # The bounds stand in one place. A batch must fit into its segment, which is not asked here: so the smallest.
        Settings(batch_bytes_max=4 * KIB, segment_bytes=fixed["segment_bytes"])
        Limits(queue_file_rows=fixed["queue_file_rows"], far_block_rows=fixed["far_block_rows"])
    except UsageError as error:
        return str(error)
    return ""


def _check(folder: Folder) -> None:
    """The whole check, part by part; each part leaves what the later ones need."""
    check_sums(folder)
    refold = Refold(folder)
    log = LogCheck(folder, refold)
    log.run()
    refold.finish(log.end)
    tables = Tables(folder, refold.fold)
    logged = log.collected.known_records()
    staged = [
        check_chunk(folder, base, name, refold.staged_at.get(base, NEVER), log.places) for base, name in tables.chunks()
    ]
    folder.report.count("messages in the log", int((logged["kind"] == MESSAGE).sum()))
    folder.report.count("system records in the log", int((logged["kind"] != MESSAGE).sum()))
    index = Index([logged, *[known for known in staged if known is not None]])
    for problem in log.places.problems(tables.places):
        folder.report.find(problem)
    pointers = Pointers(folder, tables, index, log)
    QueueCheck(folder, tables, pointers).run()
    check_far(folder, tables, pointers)
    check_selections(folder, refold)
    path = find_local_table(folder, refold)
    if path is not None:
        require_extra("table", f"the check of the table {path}")
        from postdate.check.table import check_table  # a folder without a table needs no pyarrow

        check_table(folder, path, tables, refold, index)
