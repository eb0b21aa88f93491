"""The table of far messages on disk: its folders, its columns, its Delta log. Pipeline, executors, bulk and `check` all
use it.

    <table>/messages/     what waits: Delta, files of Parquet sorted by (due, arrival)
    <table>/history/      what each batch did: Delta
    <table>/checkpoint/   Spark's own

Two transaction versions in the Delta log tell how far the table has read the far queue, and how many rows it ever
appended for that. Executors import this module: it needs the standard library and pyarrow.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

MESSAGES, HISTORY, CHECKPOINT = "messages", "history", "checkpoint"
LOG = "_delta_log"
FAR_TRANSACTION, ROWS_TRANSACTION = "postdate-far", "postdate-rows"  # names of the transaction versions
ACTIONS = "postdate-actions"  # how many actions a commit has: without it, one cut between two lines would look whole

# -- columns ----------------------------------------------------------------------------------------------------

MESSAGE, CANCEL = 1, 2  # values of `kind`, as in the log
DROP = 3  # takes away the message of the same due and arrival: a job has cancelled or postponed it
MOVE = 14  # as in the log, too: takes away the message of the same due, and of the arrival in `unique_hash`

SCHEMA = pa.schema(
    [
        pa.field("due", pa.int64(), nullable=False),  # epoch ms
        pa.field("arrival", pa.int64(), nullable=False),  # place in the log; breaks ties of due
        pa.field("kind", pa.int8(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),  # queue number
        pa.field("level", pa.int8(), nullable=False),
        pa.field("tag_hash", pa.int32(), nullable=False),
        pa.field("unique_hash", pa.int64(), nullable=False),  # the bits of the log's unsigned one: Delta has none
        pa.field("key_hash", pa.int64(), nullable=False),
        pa.field("flags", pa.int32(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("size", pa.int32(), nullable=False),  # bytes of the record, so that counting does not read it
        pa.field("record", pa.binary(), nullable=False),
    ]
)
ORDER = [("due", "ascending"), ("arrival", "ascending")]
CHUNK_COLUMNS = ["due", "arrival", "queue", "tag_hash", "flags", "unique_hash", "key_hash", "record"]
CHUNK_SCHEMA = pa.schema([SCHEMA.field(name) for name in CHUNK_COLUMNS])
# What a job has selected, for the broker. `flags` is arrival.NEAR for a message that was found in the wheel.
SELECTED = pa.schema(
    [
        pa.field("due", pa.int64(), nullable=False),
        pa.field("arrival", pa.int64(), nullable=False),
        pa.field("unique_hash", pa.int64(), nullable=False),
        pa.field("key_hash", pa.int64(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("flags", pa.int32(), nullable=False),
    ]
)
# Columns with few different values. A dictionary of the others would not pay.
_DICTIONARY = ["topic", "tag", "queue", "kind", "level", "tag_hash", "flags"]
ROW_GROUP_ROWS = 8_192
# They tell which row groups a window touches and which hold cancels. Statistics of other columns would only take room.
STATISTICS = ["due", "arrival", "kind"]

WRITER_OPTIONS = {
    "use_dictionary": _DICTIONARY,
    "write_statistics": STATISTICS,
    "write_page_checksum": True,  # nothing else in the file reveals a bit that flipped on the disk
    "store_schema": False,
}
# The files of a batch are merged or promoted soon: lz4 takes half the time. Those that stay are worth zstd.
_FAST = {"compression": "lz4"}
_SMALL = {"compression": "zstd", "compression_level": 1}


def writer_options(name: str) -> dict[str, Any]:
    """Returns pyarrow's options for writing a file of this name."""
    return WRITER_OPTIONS | (_SMALL if name.startswith(("hour", "month")) else _FAST)


# -- the Delta log ----------------------------------------------------------------------------------------------

BATCH_TIERS = ("soon", "later")  # of the files that a batch writes, named by the far row where the batch begins


BESIDE = ("_import-", "_job-")  # begin the names of files of jobs that no batch has taken in yet


def batch_file_name(tier: str, far: int, name: str) -> str:
    return f"{tier}-{far:020d}-{name}.parquet"


def name_taken_in(path: str, far: int) -> str:
    """Returns the name that a file beside the table gets when a batch that begins at a far row takes it in. It depends
    on nothing else, so that a batch can be repeated and readers know both names.
    """
    tier = next((tier for tier in BATCH_TIERS if f"-{tier}-" in path), BATCH_TIERS[0])
    return batch_file_name(tier, far, uuid.uuid5(uuid.NAMESPACE_OID, path).hex[:12])


def is_untaken(path: str, taken: int) -> bool:
    """Whether a file is of a batch that begins at or after the far row up to which Spark has acknowledged."""
    tier, number, *_ = f"{path}-".split("-")
    return tier in BATCH_TIERS and number.isdigit() and int(number) >= taken


class File(NamedTuple):
    """A file of the table, as the Delta log describes it: size, rows, and the ranges of due and arrival."""

    path: str  # in the table's folder
    bytes: int
    rows: int
    due_low: int
    due_high: int
    arrival_low: int
    arrival_high: int

    @property
    def tier(self) -> str:
        return self.path.partition("-")[0]

    def is_untaken(self, taken: int) -> bool:
        return is_untaken(self.path, taken)

    def stats(self) -> str:
        """Returns the statistics as the Delta log holds them."""
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {"due": self.due_low, "arrival": self.arrival_low},
                "maxValues": {"due": self.due_high, "arrival": self.arrival_high},
                "nullCount": {},
            }
        )


_ADDED = ("path", "size_bytes", "num_records", "min.due", "max.due", "min.arrival", "max.arrival")


def list_files(delta: Any) -> list[File]:
    """Lists the files of a DeltaTable. A statistic that the Delta log lacks is None."""
    actions = delta.get_add_actions(flatten=True)
    if not actions.num_rows:
        return []
    nothing = [None] * actions.num_rows
    present = set(actions.column_names)
    columns = [actions.column(name).to_pylist() if name in present else nothing for name in _ADDED]
    return list(map(File, *columns))


def entry_path(version: int) -> str:
    """Returns the path of an entry of the Delta log."""
    return f"{LOG}/{version:020d}.json"


def parse_versions(names: Sequence[str]) -> list[int]:
    """Returns the versions whose entries are among the names of the Delta log's files, ascending."""
    return sorted(
        int(name[:20]) for name in names if len(name) == 25 and name.endswith(".json") and name[:20].isdigit()
    )


def count_sound(known: Sequence[int], read: Callable[[int], bytes]) -> int:
    """Returns how many of the ascending versions of the Delta log count. A power loss may cut or take the newest
    entries before they are synced. A commit is synced before anything relies on it, so only notes stand after the last
    one that counts.
    """
    count = len(known)
    for index in reversed(range(len(known))):
        kind = _entry_kind(read(known[index]))
        if kind == _TORN or (index and known[index] != known[index - 1] + 1):
            count = index
        elif kind == _COMMIT:
            break
    return count


_COMMIT, _NOTE, _TORN = "commit", "note", "torn"


def _entry_kind(text: bytes) -> str:
    """Returns what an entry of the Delta log is: a commit of ours, a note (files were removed), or torn."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        actions = [json.loads(line) for line in lines]
        info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
        expected = int(info.get(ACTIONS, -1))
    except (ValueError, TypeError, AttributeError, StopIteration):
        return _TORN
    if expected < 0:
        return _NOTE
    return _COMMIT if len(actions) - 1 == expected else _TORN
