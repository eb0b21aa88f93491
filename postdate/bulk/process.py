"""The process of bulk: starts the Flight server, the link to the broker and the promoter, and ends them.

It ends on SIGTERM or SIGINT, and when the process that started it is gone. It lives without a broker: meanwhile it
refuses every call, and it connects again when the broker is back.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from postdate.access.token import TOKEN_FILE, read_token
from postdate.bulk.broker_link import Link
from postdate.bulk.flight import STREAMS_MAX, BulkServer
from postdate.bulk.promoting import Promoter
from postdate.bulk.streams import BATCH_BOUNDS, BatchBounds
from postdate.client.connection import Address, Answer, Answered
from postdate.config import Limits
from postdate.contract import CANCEL
from postdate.counts import Counts, Seconds
from postdate.errors import ProtocolError, UsageError
from postdate.process import keep_files_private, keep_freed_memory, let_others_go_first
from postdate.storage.disk import Disk, RealDisk
from postdate.storage.selection import rows_of
from postdate.table.find import KeyFound, KeyQuestion, Question, TableMessage, TableReader, UnfollowedJob
from postdate.wire.frame import Command
from postdate.wire.requests import ClientRequest

NICENESS = 5  # the broker fires on the same cores
_QUESTION_THREADS = 2
_FOUND_DEFAULT, _FOUND_MAX = 64, Limits.key_messages_max  # messages of a key that one question gets
_FOUND_BYTES_MAX, _FOUND_ROW_BYTES = 4_000_000, 80  # of an answer; where one message waits, as JSON
_PARENT_PAUSE_S = 0.5
_SOCKET_BYTES_MAX = 107  # Linux
_END_S = 1.0  # for calls that run


class Bulk:
    """The Flight server and its link to the broker, in this process. `port` 0 takes a free one."""

    def __init__(
        self, folder: Path, broker: Address, host: str, port: int, disk: Disk | None = None,
        bounds: BatchBounds = BATCH_BOUNDS, streams_max: int = STREAMS_MAX, token: str = "",
        certificate: tuple[bytes, bytes] | None = None, socket: Path | None = None,
    ) -> None:  # fmt: skip
        """With a certificate and its key it speaks TLS; with a socket it listens there, and on no port. The token is
        that of the folder: it signs requests, and callers need permits that are signed with it. Raises ForeignFolder,
        and UsageError where the port cannot be had.
        """
        self._table = TableReader()
        self._disk = disk or RealDisk(folder)
        self._questions = ThreadPoolExecutor(_QUESTION_THREADS, "table")
        answers: dict[int, Answer] = {
            ClientRequest.FIND_IN_TABLE: self._find, ClientRequest.COUNT_TABLE: self._count,
            ClientRequest.FIND_KEY_IN_TABLE: self._find_key,
        }  # fmt: skip
        self._link = Link(broker, answers, token)
        try:
            self.server = BulkServer(
                host, port, self._disk, folder, self._link, bounds, streams_max, token, certificate, socket
            )
        except pa.ArrowException as error:  # all that Flight says of a port that is taken
            self._close_link()
            raise UsageError(f"port {port} of {host} cannot be listened on: is it in use?") from error
        except BaseException:
            self._close_link()
            raise
        self.promoter = Promoter(self._link, self._table, self.server.uploads)
        self.address = Address(host, self.server.port)
        self.place = f"unix:{socket}" if socket else f"tls:{self.address}" if certificate else str(self.address)
        self._link.attach(self.place)

    async def _find(self, command: Command) -> Answered:
        """Answers the broker's question about the table. Raises TableUnreadable."""
        question = _question(command)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._questions, self._table.find, _table(command), question, _identity(command)
        )
        return Answered(orjson.dumps(found))

    async def _find_key(self, command: Command) -> Answered:
        """Answers which messages of the table have a key. Raises TableUnreadable."""
        question = _key_question(command)
        loop = asyncio.get_running_loop()
        try:
            jobs = _jobs(orjson.loads(command.body))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the jobs that the table has not followed cannot be read: {error!r}") from error
        found = await loop.run_in_executor(self._questions, self._find_in_all, command, question, jobs)
        return _pack_found(found)

    def _find_in_all(self, command: Command, question: KeyQuestion, jobs: Sequence[tuple[int, int]]) -> KeyFound:
        unfollowed = [self._unfollowed(*job) for job in jobs]
        return self._table.find_key(_table(command), question, _identity(command), unfollowed)

    async def _count(self, command: Command) -> Answered:
        """Answers how much waits in the table. Raises TableUnreadable."""
        loop = asyncio.get_running_loop()
        try:
            wish: dict[str, Any] = orjson.loads(command.body)
            found = await loop.run_in_executor(self._questions, self._count_all, command, wish)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"what is to be counted in the table cannot be read: {error!r}") from error
        return Answered(found.packed() if isinstance(found, Seconds) else orjson.dumps(found.plain()))

    def _count_all(self, command: Command, wish: dict[str, Any]) -> Counts | Seconds:
        jobs = [self._unfollowed(*job) for job in _jobs(wish)]
        return self._table.count(_table(command), wish, _identity(command), jobs)

    def _unfollowed(self, number: int, far: int) -> UnfollowedJob:
        """Reads what a job has changed. Where it came too late, it has changed nothing, and what it would bring does
        not wait either.
        """
        order = self._link.order(number)
        dues, arrivals = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for part in order.parts:
            rows, late = rows_of(self._disk, part.name), np.array(part.late, np.int64)
            dues += [np.delete(rows["due"], late), rows["due"][late] + order.by_ms]
            arrivals += [np.delete(rows["arrival"], late), part.own + late]
        columns = {"due": np.concatenate(dues), "arrival": np.concatenate(arrivals)}
        brought_until_ms = -1 if order.brought_until_ms is None else order.brought_until_ms
        files = () if order.op == CANCEL else order.files
        return UnfollowedJob(far, files, brought_until_ms, pa.table(columns))

    def close(self) -> None:
        """Ends bulk. Calls that run get a second; then their connections break."""
        self.promoter.close()
        ending = threading.Thread(target=self.server.shutdown, name="bulk-ending", daemon=True)
        ending.start()
        ending.join(_END_S)
        self._close_link()

    def _close_link(self) -> None:
        self._link.close()
        self._questions.shutdown(wait=False, cancel_futures=True)


def _table(command: Command) -> str:
    """Where the table is, as the broker says with each question."""
    return str(command.fields.get("table", ""))


def _identity(command: Command) -> str:
    """Whose table it must be; empty from a broker of an earlier version."""
    return str(command.fields.get("identity", ""))


def _jobs(wish: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Number and far row of each job that the table has not followed. Raises TypeError, ValueError."""
    return [(int(number), int(far)) for number, far in wish.get("jobs", ())]


def _queues(command: Command) -> tuple[int, ...]:
    return tuple(int(number) for number in str(command.fields["queues"]).split(",") if number)


def _key_question(command: Command) -> KeyQuestion:
    fields = command.fields
    try:
        by, limit = str(fields["by"]), int(fields.get("limit", _FOUND_DEFAULT))
        if by not in ("any", "unique", "key") or limit < 1:
            raise ValueError(f"by is {by!r}, limit {limit}")
        due, arrival = map(int, str(fields.get("after", "-1,-1")).split(","))
        topic, key = str(fields["topic"]), str(fields["key"])
        return KeyQuestion(topic, key, by, _queues(command), min(limit, _FOUND_MAX), (due, arrival))
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"a question about the table lacks something: {error}") from error


def _pack_found(found: KeyFound) -> Answered:
    """Packs messages into an answer, as many as it has room for, and one in any case: where each is, its size and
    whether it is cancelled as JSON, a line feed, then the records. `rest` says that another question gets those that it
    has no room for.
    """
    kept: list[TableMessage] = []
    size = 0
    for message in found.messages:
        size += len(message.record) + _FOUND_ROW_BYTES
        if kept and size > _FOUND_BYTES_MAX:
            break
        kept.append(message)
    rows = [(each.due, each.arrival, each.queue, len(each.record), int(each.is_cancelled)) for each in kept]
    body = b"".join([orjson.dumps(rows), b"\n", *(each.record for each in kept)])
    has_rest = len(kept) < len(found.messages)
    return Answered(body, {"cut": str(found.is_cut).lower(), "rest": str(has_rest).lower()})


def _question(command: Command) -> Question:
    fields = command.fields
    try:
        by = str(fields["by"])
        if by not in ("unique", "key"):
            raise ValueError(f"by is {by!r}")
        return Question(
            str(fields["topic"]), str(fields["key"]), by,
            int(fields["keyHash"]), int(fields["due"]), int(fields["before"]),
            _queues(command),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"a question about the table lacks something: {error}") from error


def run(
    folder: Path, broker: Address, host: str, port: int, ready: Callable[[str], None], parent_pid: int = 0,
    certificate: tuple[bytes, bytes] | None = None, socket: Path | None = None,
) -> None:  # fmt: skip
    """Serves until a signal ends it; called in the main thread of a process of its own. Raises what Bulk raises.

    `parent_pid` names the parent where it matters: one that is gone before we look would leave us another.
    """
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    parent = parent_pid or os.getppid()
    keep_files_private()
    let_others_go_first(NICENESS)
    keep_freed_memory()
    token = folder / TOKEN_FILE
    if socket is not None:
        if len(os.fsencode(socket)) > _SOCKET_BYTES_MAX:
            raise UsageError(f"the path of the socket {socket} is longer than {_SOCKET_BYTES_MAX} bytes")
        socket.unlink(missing_ok=True)  # of a bulk that was killed; two never run, as the broker starts one
    bulk = Bulk(
        folder, broker, host, port, token=read_token(token) if token.exists() else "", certificate=certificate,
        socket=socket,
    )  # fmt: skip
    bulk.promoter.start()
    ready(bulk.place)
    while not ending.wait(_PARENT_PAUSE_S) and os.getppid() == parent:
        pass
    bulk.close()
