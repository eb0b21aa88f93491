"""Rows of the table, made by hand, files of a real Delta table with them, and damage to files."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, Transaction, WriterProperties, write_deltalake

from postdate.keys import key_hash
from postdate.message import LOOPBACK, Message, encode_properties, first_key
from postdate.storage import record as records
from postdate.table.format import FAR_TRANSACTION, MESSAGE, ROWS_TRANSACTION, SCHEMA
from tests.support.core import T0, TOPIC


def signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


Row = dict[str, Any]


def keyed_row(due: int, arrival: int, *, unique: str = "", keys: str = "", topic: str = TOPIC, kind: int = 1) -> Row:
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
        commit_properties=CommitProperties(
            app_transactions=[Transaction(name, taken) for name in (FAR_TRANSACTION, ROWS_TRANSACTION)]
        ),
    )  # fmt: skip


def message_record(unique: str = "", key: str = "", topic: str = TOPIC) -> bytes:
    properties = {"UNIQ_KEY": unique, "KEYS": key}
    text = encode_properties({name: value for name, value in properties.items() if value})
    return records.encode(Message(topic, b"body", text), topic.encode(), 0, 1, LOOPBACK)


def cancel_record(key: str, by: str, due: int, topic: str = TOPIC) -> bytes:
    body = json.dumps({"topic": topic, "key": key, "by": by, "due": due}).encode()
    return records.encode(Message("system", body), b"system", 0, 1, LOOPBACK)


RECORD = message_record()


def row(due: int, arrival: int, **changed: Any) -> dict[str, Any]:
    changed = {"record": RECORD} | changed
    return {
        "due": due, "arrival": arrival, "kind": MESSAGE, "topic": TOPIC, "queue": 1, "level": 0, "tag_hash": 0,
        "unique_hash": 0, "key_hash": 0, "flags": 0, "key": None, "tag": None, "size": len(changed["record"]),
        **changed,
    }  # fmt: skip


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(sorted(rows, key=lambda each: (each["due"], each["arrival"])), SCHEMA)


def messages(count: int, due: int = 1_000, arrival: int = 0) -> pa.Table:
    return table_of(*(row(due + n, arrival + n) for n in range(count)))


def arrivals(found: pa.Table) -> list[int]:
    return sorted(found.column("arrival").to_pylist())


def damage_cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_flipped(path: Path) -> None:
    """A bit of a page, not of the footer."""
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 16
    path.write_bytes(data)


def damage_gone(path: Path) -> None:
    path.unlink()
