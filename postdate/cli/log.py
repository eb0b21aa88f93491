"""`postdate log`: prints the log, batch by batch, as text or JSON."""

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from postdate.check import Hole, place_of, walk
from postdate.cli.command import OK, print_json
from postdate.cli.folder import add_folder, open_disk
from postdate.cli.render import body as show_body
from postdate.cli.render import count, instant, span
from postdate.cli.values import whole_number
from postdate.config import Limits, Settings
from postdate.errors import CorruptLog
from postdate.message import PROPERTY_KEYS, PROPERTY_PRODUCER_GROUP, PROPERTY_TAGS, PROPERTY_UNIQ_KEY
from postdate.storage import record as records
from postdate.storage.batch import COMMIT, HALF, KIND_FILLER, KIND_NAMES, PRODUCED, Batch
from postdate.storage.folder import open_folder
from postdate.storage.layout import ROW_STRUCT
from postdate.storage.segment import Segments

HELP = """\
Prints the log, batch by batch. It only reads, so the broker may be running.

examples:
  postdate log ./postdate-data                                  everything
  postdate log ./postdate-data --topic orders --limit 10        the first ten messages of a topic
  postdate log ./postdate-data --kind cancel                    who cancelled what
  postdate log ./postdate-data --from 65536 --to 131072         a range of offsets
  postdate log ./postdate-data --json --body | jq .due_at_ms    one JSON object a record

exit codes: 0 printed, 2 wrong usage or the folder cannot be read, 130 interrupted
"""


class _Entry(NamedTuple):
    """A record with what its row and its batch say."""

    batch: Batch
    record: records.Record
    offset: int
    kind: int
    level: int
    due_at_ms: int

    def as_json(self, *, body: bool) -> dict[str, Any]:
        record, properties = self.record, _properties(self.record)
        shown = {
            "offset": self.offset, "batch": self.batch.offset, "at_ms": self.batch.at_ms, "kind": _kind_name(self.kind),
            "topic": record.topic, "queue_id": record.queue_id, "unique_key": properties.get(PROPERTY_UNIQ_KEY),
            "keys": properties.get(PROPERTY_KEYS), "tag": properties.get(PROPERTY_TAGS),
            "due_at_ms": self.due_at_ms or None, "level": self.level or None, "size": record.size,
            "properties": properties,
        }  # fmt: skip
        if self.kind == HALF:
            shown |= {"due_at_ms": None, "ask_at_ms": self.due_at_ms}
        if self.kind == COMMIT:
            shown["half"] = record.prepared_offset
        if self.kind not in PRODUCED:
            return shown | {"content": json.loads(record.body)}
        return shown | {"body_base64": base64.b64encode(record.body).decode()} if body else shown


def _kind_name(kind: int) -> str:
    return KIND_NAMES.get(kind, f"kind {kind}")


def add(command: argparse.ArgumentParser) -> None:
    add_folder(command, _log)
    command.add_argument("--from", dest="start", metavar="OFFSET", type=whole_number, default=0, help="first offset")
    command.add_argument(
        "--to", dest="stop", metavar="OFFSET", type=whole_number, help="print records before this offset"
    )
    command.add_argument("--topic", metavar="T", help="only messages of this topic")
    kinds = list(KIND_NAMES.values())
    command.add_argument("--kind", metavar="K", choices=kinds, help=f"only records of this kind: {', '.join(kinds)}")
    command.add_argument("--limit", metavar="N", type=whole_number, help="print at most this many records")
    command.add_argument("--body", action="store_true", help="print whole bodies (base64 with --json)")


def _log(arguments: argparse.Namespace) -> int:
    disk = open_disk(arguments)
    segments = Segments(disk, open_folder(disk, Settings(), Limits())["segment_bytes"])
    left = arguments.limit
    for item in _items(segments, arguments.start, arguments.stop):
        if left == 0:
            break
        if isinstance(item, Hole):
            # On stderr, so that stdout has records alone. Only `check` can tell damage from a torn tail.
            hole = f"{place_of(segments, item.offset)}: {item.problem} ({item.end - item.offset} bytes)"
            print(hole, file=sys.stderr)
            continue
        entries = [entry for entry in _entries(segments, item) if _is_wanted(entry, arguments)][:left]
        if entries or (not item.row_count and not arguments.kind and not arguments.topic):
            _print_batch(item, entries, arguments)
        left = left if left is None else left - len(entries)
    return OK


def _items(segments: Segments, start: int, stop: int | None) -> Iterator[Batch | Hole]:
    """Batches and holes of a range, without fillers and without the zeros after the end."""
    for base in segments.bases:
        if base + segments.segment_bytes <= start or (stop is not None and base >= stop):
            continue
        for item in walk(segments, base):
            wanted = item.end > start and (stop is None or item.offset < stop)
            if wanted and (not item.is_blank if isinstance(item, Hole) else item.kind != KIND_FILLER):
                yield item


def _entries(segments: Segments, batch: Batch) -> Iterator[_Entry]:
    base = batch.offset & -segments.segment_bytes
    view = segments.view(base)
    assert view is not None
    for kind, level, _, _, due_at_ms, _, _, _, size, position, _ in ROW_STRUCT.iter_unpack(batch.rows):
        offset = batch.offset + position
        try:
            record = records.decode(view[offset - base : offset - base + size])
        except CorruptLog as error:
            print(f"{place_of(segments, offset)}: {error}", file=sys.stderr)
            continue
        yield _Entry(batch, record, offset, kind, level, due_at_ms)


def _is_wanted(entry: _Entry, arguments: argparse.Namespace) -> bool:
    return (
        entry.offset >= arguments.start
        and (arguments.stop is None or entry.offset < arguments.stop)
        and (arguments.topic is None or (entry.kind in PRODUCED and entry.record.topic == arguments.topic))
        and (arguments.kind is None or _kind_name(entry.kind) == arguments.kind)
    )


def _print_batch(batch: Batch, entries: list[_Entry], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for entry in entries:
            print_json(entry.as_json(body=arguments.body))
        return
    what = count(batch.row_count, "record") if batch.row_count else "fires what is due"
    print(f"batch {batch.offset}  at {instant(batch.at_ms)}  {batch.length} bytes  {what}")
    for entry in entries:
        print(f"  {_line(entry, whole=arguments.body)}")


def _line(entry: _Entry, *, whole: bool) -> str:
    """One record: only what it has is named."""
    record = entry.record
    if entry.kind not in PRODUCED:
        return f"{entry.offset}  {_kind_name(entry.kind)}  {record.size} bytes  {record.body.decode(errors='replace')}"
    properties = _properties(record)
    named = {"unique": PROPERTY_UNIQ_KEY, "keys": PROPERTY_KEYS, "tag": PROPERTY_TAGS}
    what = "half" if entry.kind == HALF else "message"
    parts = [str(entry.offset), what, f"{record.topic}/{record.queue_id}"]
    parts += [f"{word} {properties[name]}" for word, name in named.items() if name in properties]
    if entry.kind == COMMIT:
        parts.append(f"commits {record.prepared_offset}")
    if entry.kind == HALF:
        parts.append(f"of {properties.get(PROPERTY_PRODUCER_GROUP)}, to be asked {instant(entry.due_at_ms)}")
    elif entry.due_at_ms:
        parts.append(f"due {instant(entry.due_at_ms)}, {span(entry.due_at_ms - entry.batch.at_ms)} after storing")
    return "  ".join([*parts, f"{record.size} bytes", show_body(record.body, whole=whole)])


def _properties(record: records.Record) -> dict[str, str]:
    """As `decode_properties`, for looking: bytes that are no text are shown as such, not refused."""
    pairs = (entry.partition("\x01") for entry in record.properties.decode(errors="replace").split("\x02"))
    return {name: value for name, _, value in pairs if name and value}
