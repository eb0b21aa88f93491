"""Rows that jobs have selected: their sums and order, where they are still needed."""

from postdate.check.folder import Folder
from postdate.check.refold import Refold
from postdate.errors import CorruptSelection
from postdate.state.jobs import RUNNING, Part
from postdate.storage import selection


def check_selections(folder: Folder, refold: Refold) -> None:
    """Passes over those that retention has let go: of jobs that the table has followed."""
    for job in refold.fold.jobs.all() if refold.fold is not None else []:
        for part in job.parts:
            if job.state == RUNNING or selection.is_there(folder.disk, part.name):
                _check_part(folder, part)


def _check_part(folder: Folder, part: Part) -> None:
    try:
        rows = selection.verify(folder.disk, part.name)
    except CorruptSelection as error:
        folder.report.find(str(error))
        return
    folder.report.count("selections", 1)
    if len(rows) != part.rows:
        folder.report.find(f"{selection.path_of(part.name)}: {len(rows)} rows, the log says {part.rows}")
