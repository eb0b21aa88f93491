"""The command line: words in, text and an exit code out.

This file parses arguments and prints; what it prints comes from the modules above it. A mistake of the user or of the
disk is one sentence on stderr, never a traceback. Times are shown in UTC, as ISO 8601 with milliseconds.
"""

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from postdate import __version__
from postdate.check import Hole, check_folder, place_of, walk
from postdate.config import Settings
from postdate.errors import CorruptLog, ForeignFolder, PostdateError
from postdate.log import record as records
from postdate.log.batch import KIND_FILLER, KIND_NAMES, MESSAGE, ROW_STRUCT, Batch
from postdate.log.disk import RealDisk
from postdate.log.folder import FORMAT_FILE, open_folder
from postdate.log.segment import Segments
from postdate.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY

OK, FINDINGS, USAGE = 0, 1, 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PREVIEW_CHARACTERS = 60
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))

_HELP = """\
examples:
  postdate check ./postdate-data
  postdate log ./postdate-data --kind message --limit 20

exit codes: 0 done, 1 the check found damage, 2 wrong usage or the folder cannot be read, 130 interrupted
"""

_CHECK_HELP = """\
Reads everything in a data folder that no broker has open, changes nothing, and says what is damaged and where.

examples:
  postdate check ./postdate-data             what was verified, or each finding with its place
  postdate check ./postdate-data --json      the same for a program

exit codes: 0 all is well, 1 damage was found, 2 wrong usage or the folder cannot be read (a broker runs on it, or it is
not a Postdate folder), 130 interrupted
"""

_LOG_HELP = """\
Prints the log, batch by batch. It only reads, so the broker may be running.

examples:
  postdate log ./postdate-data                                  everything
  postdate log ./postdate-data --topic orders --limit 10        the first ten messages of a topic
  postdate log ./postdate-data --kind cancel                    who cancelled what
  postdate log ./postdate-data --from 65536 --to 131072         a range of offsets
  postdate log ./postdate-data --json --body | jq .due_at_ms    one JSON object a record

exit codes: 0 printed, 2 wrong usage or the folder cannot be read, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong usage ends in SystemExit(2), as argparse does it."""
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python must not try to flush the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PostdateError, OSError) as error:
        print(f"postdate: {error}", file=sys.stderr)
        return USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="postdate",
        description="A message broker for messages that must arrive later.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"postdate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(commands)
    _add_log(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str
) -> argparse.ArgumentParser:
    """A command that works on a data folder."""
    description, _, epilog = text.partition("\n\n")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="the data folder")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
    return command


def _folder(arguments: argparse.Namespace) -> RealDisk:
    """The data folder; opening one that is not there must not make it."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise ForeignFolder(f"{folder} is not a folder")
    disk = RealDisk(folder)
    if disk.size(FORMAT_FILE) < 0:
        raise ForeignFolder(f"there is no file {FORMAT_FILE} in {folder}: it is not a Postdate folder")
    return disk


# -- check ------------------------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    _add_command(commands, "check", _check, "verify a closed data folder", _CHECK_HELP)


def _check(arguments: argparse.Namespace) -> int:
    report = check_folder(_folder(arguments))
    if arguments.json:
        print(json.dumps({"ok": report.ok, "findings": report.findings, "numbers": report.numbers}))
    elif report.ok:
        _print_numbers(report.numbers)
        print("ok")
    else:
        for finding in report.findings:
            print(finding)
        print(f"{len(report.findings)} {'finding' if len(report.findings) == 1 else 'findings'}")
    return OK if report.ok else FINDINGS


def _print_numbers(numbers: dict[str, int]) -> None:
    width = max(len(f"{number:,}") for number in numbers.values())
    for what, number in numbers.items():
        print(f"{number:>{width},}  {what}")


# -- log --------------------------------------------------------------------------------------------------------


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
        if self.kind != MESSAGE:
            return shown | {"content": json.loads(record.body)}
        return shown | {"body_base64": base64.b64encode(record.body).decode()} if body else shown


def _kind_name(kind: int) -> str:
    return KIND_NAMES.get(kind, f"kind {kind}")


def _add_log(commands: Any) -> None:
    command = _add_command(commands, "log", _log, "print the log", _LOG_HELP)
    command.add_argument("--from", dest="start", metavar="OFFSET", type=_offset, default=0, help="first offset")
    command.add_argument("--to", dest="stop", metavar="OFFSET", type=_offset, help="print records before this offset")
    command.add_argument("--topic", metavar="T", help="only messages of this topic")
    kinds = list(KIND_NAMES.values())
    command.add_argument("--kind", metavar="K", choices=kinds, help=f"only records of this kind: {', '.join(kinds)}")
    command.add_argument("--limit", metavar="N", type=_offset, help="print at most so many records")
    command.add_argument("--body", action="store_true", help="print whole bodies (base64 with --json)")


def _offset(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _log(arguments: argparse.Namespace) -> int:
    disk = _folder(arguments)
    segments = Segments(disk, open_folder(disk, Settings())["segment_bytes"])
    left = arguments.limit
    for item in _items(segments, arguments.start, arguments.stop):
        if left == 0:
            break
        if isinstance(item, Hole):
            _print_hole(segments, item)
            continue
        entries = [entry for entry in _entries(segments, item) if _is_wanted(entry, arguments)][:left]
        if entries or (not item.row_count and not arguments.kind and not arguments.topic):
            _print_batch(item, entries, arguments)
        left = left if left is None else left - len(entries)
    return OK


def _items(segments: Segments, start: int, stop: int | None) -> Iterator[Batch | Hole]:
    """Batches and holes of a range, without fillers and without the zeros behind the end."""
    for base in segments.bases:
        if base + segments.segment_bytes <= start or (stop is not None and base >= stop):
            continue
        for item in walk(segments, base):
            wanted = item.end > start and (stop is None or item.offset < stop)
            if wanted and (not item.is_blank if isinstance(item, Hole) else item.kind != KIND_FILLER):
                yield item


def _print_hole(segments: Segments, hole: Hole) -> None:
    """On stderr, so that stdout has records alone. Whether it is damage or a torn tail, only `check` can tell."""
    print(f"{place_of(segments, hole.offset)}: {hole.problem} ({hole.end - hole.offset} bytes)", file=sys.stderr)


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
        and (arguments.topic is None or (entry.kind == MESSAGE and entry.record.topic == arguments.topic))
        and (arguments.kind is None or _kind_name(entry.kind) == arguments.kind)
    )


def _print_batch(batch: Batch, entries: list[_Entry], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for entry in entries:
            print(json.dumps(entry.as_json(body=arguments.body), ensure_ascii=False))
        return
    what = f"{batch.row_count} record{'' if batch.row_count == 1 else 's'}" if batch.row_count else "fires what is due"
    print(f"batch {batch.offset}  at {_instant(batch.at_ms)}  {batch.length} bytes  {what}")
    for entry in entries:
        print(f"  {_line(entry, whole=arguments.body)}")


def _line(entry: _Entry, *, whole: bool) -> str:
    """One record: only what it has is named."""
    record = entry.record
    if entry.kind != MESSAGE:
        return f"{entry.offset}  {_kind_name(entry.kind)}  {record.size} bytes  {record.body.decode(errors='replace')}"
    properties = _properties(record)
    named = {"unique": PROPERTY_UNIQ_KEY, "keys": PROPERTY_KEYS, "tag": PROPERTY_TAGS}
    parts = [str(entry.offset), "message", f"{record.topic}/{record.queue_id}"]
    parts += [f"{word} {properties[name]}" for word, name in named.items() if name in properties]
    if entry.due_at_ms:
        parts.append(f"due {_instant(entry.due_at_ms)}, {_span(entry.due_at_ms - entry.batch.at_ms)} after storing")
    return "  ".join([*parts, f"{record.size} bytes", _body(record.body, whole=whole)])


def _properties(record: records.Record) -> dict[str, str]:
    """As `decode_properties`, for looking: bytes that are no text are shown as such, not refused."""
    pairs = (entry.partition("\x01") for entry in record.properties.decode(errors="replace").split("\x02"))
    return {name: value for name, _, value in pairs if name and value}


def _body(body: bytes, *, whole: bool) -> str:
    """A body in one line: as text where it is text, else as Python writes bytes."""
    try:
        text = json.dumps(body.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        text = repr(body)
    return text if whole or len(text) <= _PREVIEW_CHARACTERS else f"{text[:_PREVIEW_CHARACTERS]}..."


def _instant(at_ms: int) -> str:
    """ISO 8601 in UTC and the epoch milliseconds, which is what an error or another command names."""
    try:
        moment = _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return f"{at_ms} ms"  # beyond the year 9999
    return f"{moment.strftime('%Y-%m-%dT%H:%M:%S')}.{at_ms % 1_000:03d}Z ({at_ms})"


def _span(span_ms: int) -> str:
    """A span in its two largest units: 1 h 30 min."""
    parts = []
    for name, unit_ms in _UNITS:
        count, span_ms = divmod(span_ms, unit_ms)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) or "0 ms"
