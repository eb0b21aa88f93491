"""Whether a table belongs to this broker and its log: asked when a pipeline registers, before anything relies on it.

The identity tells another broker's table. The marks tell a log that is older than the table, as in a folder restored
from a backup: the table names a batch that it has seen, by place and checksum, and the log must have it. Where
retention has let that place go, the log is the newer one.
"""

from postdate.contract import TableMarks
from postdate.errors import ForeignTable
from postdate.state.far import Far
from postdate.storage.log import Log

_WAYS_OUT = (
    "restore the data folder that belongs to it, name another table with --table, or take it over into a new data "
    "folder with: postdate table adopt"
)


def refuse_foreign(uri: str, marks: TableMarks, identity: str, far: Far, log: Log) -> None:
    """Raises ForeignTable, with what was found and what to do."""
    if marks.identity and marks.identity != identity:
        raise ForeignTable(
            f"the table {uri} belongs to another broker: its identity is {marks.identity}, ours is {identity}; "
            + _WAYS_OUT
        )
    found = log.mark_at(marks.position) if marks.position >= 0 else None
    if found is not None and found != marks.mark:
        what = f"ends at {log.end}" if marks.position >= log.end else "has another batch there"
        raise ForeignTable(
            f"the table {uri} knows more than the log: it has seen the batch at {marks.position}, the log {what}; "
            f"was the data folder restored from an older copy? {_WAYS_OUT}"
        )
    if marks.far and not far.epoch:
        raise ForeignTable(
            f"the table {uri} belongs to another broker: it has taken {marks.far} far rows, and no pipeline of this "
            f"broker has ever taken one; {_WAYS_OUT}"
        )
    if marks.far > far.length:
        raise ForeignTable(
            f"the table {uri} knows more than the log: it has taken {marks.far} far rows, the log has {far.length}; "
            f"was the data folder restored from an older copy, or is it another broker's table? {_WAYS_OUT}"
        )
