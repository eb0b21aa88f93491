"""Rows of the table, made by hand, and files of a real Delta table with them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, Transaction, WriterProperties, write_deltalake

from postdate.keys import key_hash
from postdate.message import LOOPBACK, Message, encode_properties, first_key
from postdate.storage import record as records
from postdate.table.format import FAR, ROWS, SCHEMA
from tests.support.helpers import T0, TOPIC


def signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


Row = dict[str, Any]


def row(due: int, arrival: int, *, unique: str = "", keys: str = "", topic: str = TOPIC, kind: int = 1) -> Row:
    named = {name: value for name, value in (("UNIQ_KEY", unique), ("KEYS", keys)) if value}
    message = Message(topic, b"body", encode_properties(named))
    return {
        "due": due, "arrival": arrival, "kind": kind, "topic": topic, "queue": 1, "level": 0, "tag_hash": 0,
        "unique_hash": signed(key_hash(unique)), "key_hash": signed(key_hash(first_key(keys))), "flags": 0,
        "key": keys or None, "tag": None, "size": 100,
        "record": records.encode(message, topic.encode(), arrival, T0, LOOPBACK),
    }  # fmt: skip


def append(folder: Path, *rows: Row, taken: int = 0) -> None:
    """A file of the table, sorted, in row groups of 8 rows; the table says how many far rows it has taken."""
    ordered = sorted(rows, key=lambda each: (each["due"], each["arrival"]))
    write_deltalake(
        folder / "messages", pa.Table.from_pylist(ordered, SCHEMA), mode="append",
        writer_properties=WriterProperties(max_row_group_size=8),
        commit_properties=CommitProperties(app_transactions=[Transaction(FAR, taken), Transaction(ROWS, taken)]),
    )  # fmt: skip
