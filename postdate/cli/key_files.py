"""`--keys FILE` of `cancel` and `postpone`: each key of a file is asked for by a request of its own, many in flight.

The file is read here, with the rights of whoever types the command: neither broker nor pipeline sees more of it than
its keys. A key is asked for once, however often the file has it. What became of each goes to --output, which also says
where an interrupted command goes on.
"""

import argparse
import asyncio
import csv
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from postdate.cli.command import INTERRUPTED, NEGATIVE, OK, print_json
from postdate.cli.render import Working, body, count, moment, print_table
from postdate.client import AsyncClient, CancelledMessage, FoundMessage, MovedMessage, connect_async
from postdate.client.errors import Disconnected, TimedOut, Unavailable, Unreachable
from postdate.errors import PostdateError, TopicNotFound, UsageError
from postdate.extras import require_extra

IN_FLIGHT = 64  # keys that are asked for at the same time
_IN_FLIGHT_DRY = 32  # lookups: the broker has a lower limit of them
_SAMPLES = 10
_SAMPLE = ("due", "id", "tag", "key", "body")
_COLUMNS = ("key", "outcome", "id", "due", "reason")
_FAILED, _LOST, _UNKNOWN, _WAITING = "failed", "answer lost", "unknown", "waiting"
_MARK_BYTES = 16  # of a key that was asked for: a million of them take some 100 MB
_SHOWN_EVERY = 200  # keys
_OF_ALL_KEYS = (Unreachable, Unavailable, TopicNotFound)

Changed = list[CancelledMessage] | list[MovedMessage]
Change = Callable[[AsyncClient, str], Awaitable[Changed]]  # the call for one key
Answer = tuple[str, str, str, int | None, str]  # a row of --output


class Order(NamedTuple):
    """What the command does: its name, the outcome that counts as done, and the call for one key. A call that must not
    be made twice moves by a span: where its answer is lost, nobody knows whether it was carried out.
    """

    name: str
    done: str
    change: Change
    is_repeatable: bool = True


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", metavar="FILE", help="all keys of a file: a key in each line, .csv or .parquet")
    parser.add_argument("--column", metavar="NAME", help="the column of --keys with the keys (default: the only one)")
    parser.add_argument(
        "--output", metavar="FILE", help="with --keys: write what became of each key, and go on where FILE ends"
    )


def refuse_flags(arguments: argparse.Namespace) -> None:
    """Raises UsageError for flags of --keys where there is none."""
    if arguments.column or arguments.output:
        raise UsageError("--column and --output are for --keys")


def run(arguments: argparse.Namespace, order: Order) -> int:
    """Carries out an order for each key of the file. Raises UsageError, and what ends a connection."""
    if arguments.handle or arguments.key or arguments.where is not None or not arguments.topic:
        raise UsageError("--keys goes with --topic, and without a handle, --key and --where")
    if arguments.id or arguments.no_wait:
        raise UsageError("--id and --no-wait are for --where")
    if arguments.dry_run and arguments.output:
        raise UsageError("--dry-run changes nothing: there is nothing to write to --output")
    tally = _Tally(order)
    work = _try(arguments, tally) if arguments.dry_run else _change(arguments, tally)
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        tally.print(is_json=arguments.json)
        return INTERRUPTED
    except (Unreachable, Unavailable):
        tally.print(is_json=arguments.json)
        raise
    tally.print(is_json=arguments.json, is_dry=arguments.dry_run)
    return OK if arguments.dry_run or tally.outcomes[order.done] else NEGATIVE


class _Tally:
    """What has been asked, and what was answered."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.keys = 0
        self.outcomes: Counter[str] = Counter()  # of messages, and of keys without any
        self.samples: list[FoundMessage] = []
        self.reason = ""  # why the first key failed

    def add(self, answers: Iterable[Answer]) -> None:
        self.keys += 1
        for _, outcome, _, _, reason in answers:
            self.outcomes[outcome] += 1
            self.reason = self.reason or reason

    def print(self, *, is_json: bool, is_dry: bool = False) -> None:
        names = (_WAITING, _UNKNOWN) if is_dry else (self.order.done, "delivered", _UNKNOWN, _FAILED, _LOST)
        figures = {name: self.outcomes[name] for name in names}
        if is_json:
            sample = [_shown(each) for each in self.samples]
            print_json({"keys": self.keys, **figures} | ({"sample": sample} if is_dry else {}))
            return
        if is_dry:
            waiting, keys = count(self.outcomes[_WAITING], "message"), count(self.keys, "key")
            print(f"{waiting} of {keys} would be {self.order.done}, {self.outcomes[_UNKNOWN]:,} unknown")
            if self.samples:
                print()
                print_table(_SAMPLE, [list(_shown(each).values()) for each in self.samples])
            return
        told = ", ".join(
            f"{number:,} {name}" for name, number in figures.items() if number or name not in (_FAILED, _LOST)
        )
        print(f"{count(self.keys, 'key')}: {told}")
        if self.reason:
            print(f"the first that failed: {self.reason}", file=sys.stderr)


def _shown(message: FoundMessage) -> dict[str, Any]:
    due = "" if message.due_at_ms is None else moment(message.due_at_ms)
    return dict(
        zip(_SAMPLE, (due, message.id, message.tag, message.keys, body(message.body, whole=False)), strict=True)
    )


# -- asking -----------------------------------------------------------------------------------------------------


async def _change(arguments: argparse.Namespace, tally: _Tally) -> None:
    with ExitStack() as closing:
        keys, known = closing.enter_context(_keys_of(arguments.keys, arguments.column)), set[bytes]()
        write: Callable[[Answer], Any] | None = None
        if arguments.output:
            known = _marks_in(arguments.output)
            # By lines: what is asked once must stand there, however this process ends.
            output = closing.enter_context(open(arguments.output, "a", 1, encoding="utf-8", newline=""))
            write = csv.writer(output).writerow
            if not output.tell():
                csv.writer(output).writerow(_COLUMNS)

        async def ask(client: AsyncClient, key: str) -> None:
            answers = await _answers(tally.order, client, key)
            tally.add(answers)
            for answer in answers if write else ():
                assert write is not None
                write(answer)

        await _for_each(arguments, _fresh(keys, known), ask, tally, IN_FLIGHT)


async def _try(arguments: argparse.Namespace, tally: _Tally) -> None:
    async def ask(client: AsyncClient, key: str) -> None:
        found = await client.find(arguments.topic, key)
        waiting = [message for message in found if message.state == _WAITING]
        tally.add((key, _WAITING, message.id, message.due_at_ms, "") for message in waiting)
        if not found:
            tally.outcomes[_UNKNOWN] += 1
        tally.samples += waiting[: max(_SAMPLES - len(tally.samples), 0)]

    with _keys_of(arguments.keys, arguments.column) as keys:
        await _for_each(arguments, _fresh(keys, set()), ask, tally, _IN_FLIGHT_DRY)


async def _for_each(
    arguments: argparse.Namespace, keys: Iterator[str], ask: Callable[[AsyncClient, str], Awaitable[None]],
    tally: _Tally, in_flight: int,
) -> None:  # fmt: skip
    """Asks for each key. Interrupted, or where an error ends it, it waits for the answers that are under way."""
    ending = asyncio.Event()
    name = "looking up" if arguments.dry_run else tally.order.name
    with Working() as working:
        async with connect_async(arguments.addr, timeout=arguments.timeout / 1_000) as client:

            async def work() -> None:
                try:
                    while not ending.is_set() and (key := next(keys, None)) is not None:
                        await ask(client, key)
                        if not tally.keys % _SHOWN_EVERY:
                            working.show(f"{name}: keys", tally.keys)
                except (UnicodeDecodeError, csv.Error) as error:
                    raise UsageError(f"{arguments.keys} cannot be read: {error}") from error
                finally:
                    ending.set()

            workers = [asyncio.create_task(work()) for _ in range(in_flight)]
            try:
                await asyncio.shield(asyncio.wait(workers))
            finally:
                ending.set()
                done, _ = await asyncio.wait(workers)
            errors = [error for worker in done if (error := worker.exception()) is not None]
            if errors:
                raise errors[0]


async def _answers(order: Order, client: AsyncClient, key: str) -> list[Answer]:
    """What became of the messages of a key. Raises what every other key would meet, too."""
    try:
        messages = await order.change(client, key)
    except PostdateError as error:
        is_lost = not order.is_repeatable and isinstance(error, Disconnected | TimedOut)
        if isinstance(error, _OF_ALL_KEYS) and not is_lost:
            raise
        return [(key, _LOST if is_lost else _FAILED, "", None, " ".join(str(error).split()))]
    if not messages:
        return [(key, _UNKNOWN, "", None, "")]
    return [(key, message.outcome.value, message.id, message.due_at_ms, "") for message in messages]


# -- files ------------------------------------------------------------------------------------------------------


def _mark(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=_MARK_BYTES).digest()


def _fresh(keys: Iterable[str], known: set[bytes]) -> Iterator[str]:
    """The keys that were not asked for yet."""
    for key in keys:
        mark = _mark(key)
        if key and mark not in known:
            known.add(mark)
            yield key


def _marks_in(path: str) -> set[bytes]:
    """The keys whose answers an earlier run has written. Raises UsageError for another file."""
    if not Path(path).exists():
        return set()
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, None)
        if header not in (None, list(_COLUMNS)):
            raise UsageError(f"{path} is no output of this command: its first line is not {','.join(_COLUMNS)}")
        return {_mark(row[0]) for row in rows if row and row[1:2] != [_FAILED]}


@contextmanager
def _keys_of(path: str, column: str | None) -> Iterator[Iterator[str]]:
    """The keys of a file. Raises UsageError for a file or a column that is not there."""
    kind = Path(path).suffix.lower()
    if kind != ".parquet" and kind != ".csv" and column:
        raise UsageError(f"--column is for .csv and .parquet; {path} has a key in each line")
    if path == "-":
        yield (line.rstrip("\r\n") for line in sys.stdin)
    elif kind == ".parquet":
        require_extra("table", "--keys of Parquet")
        from postdate.table import text_column

        yield text_column.read(path, lambda names: _column_of(path, names, column))
    else:
        with open(path, encoding="utf-8-sig", newline="" if kind == ".csv" else None) as file:
            yield _csv_keys(file, path, column) if kind == ".csv" else (line.rstrip("\n") for line in file)


def _csv_keys(file: TextIO, path: str, column: str | None) -> Iterator[str]:
    rows = csv.DictReader(file, strict=True)
    name = _column_of(path, list(rows.fieldnames or ()), column)
    return (row[name] or "" for row in rows)


def _column_of(path: str, names: Sequence[str], column: str | None) -> str:
    if column is None and len(names) == 1:
        return names[0]
    if column is None or column not in names:
        wanted = "name one with --column" if column is None else f"there is no column {column}"
        raise UsageError(f"{path}: {wanted}; it has {', '.join(names) or 'none'}")
    return column
