"""The rows in files against the lengths and checksums that the snapshots hold."""

from postdate.check.folder import Folder
from postdate.check.report import Report
from postdate.check.saved import Saved
from postdate.errors import CorruptQueue
from postdate.storage.rows import BLOCK_ROWS, Rows


def check_sums(folder: Folder) -> None:
    for saved in folder.saved:
        for name, sums in saved.sums().items():
            rows = folder.rows(saved, name)
            try:
                rows.check_files()
                _check_blocks(folder.report, saved, rows, sums)
            except CorruptQueue as error:
                folder.report.find(str(error))


def _check_blocks(report: Report, saved: Saved, rows: Rows, sums: list[int]) -> None:
    for block, expected in enumerate(sums):
        found = rows.block_sum(block, rows.length) if expected else 0
        if not found:
            continue  # retention has let go of rows in it, or there is no such block
        report.count("blocks of rows equal to their checksum", 1)
        if found != expected:
            start, stop = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows.length)
            first, *_, last = [*rows.paths(start, start + 1), *rows.paths(stop - 1, stop)]
            paths = first if first == last else f"{first} and {last}"
            report.find(f"{paths}: rows {start} to {stop - 1} are not as {saved.path} knew them (checksum)")
