"""The process of bulk: starts the Flight server, the link to the broker and the promoter, and ends them.

It ends on SIGTERM or SIGINT, and when the process that started it is gone. It lives without a broker: meanwhile it
refuses every call, and it connects again when the broker is back.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from postdate.bulk.broker_link import Link
from postdate.bulk.flight import STREAMS_MAX, BulkServer
from postdate.bulk.promoting import Promoter
from postdate.bulk.streams import BATCH_BOUNDS, BatchBounds
from postdate.client.connection import Address
from postdate.contract import CANCEL
from postdate.counts import Counts, Seconds
from postdate.errors import ProtocolError, UsageError
from postdate.process import keep_freed_memory, let_others_go_first
from postdate.storage.disk import Disk, RealDisk
from postdate.storage.selection import rows_of
from postdate.table.find import Question, TableReader, UnfollowedJob
from postdate.wire.frame import Command
from postdate.wire.requests import ClientRequest

NICENESS = 5  # the broker fires on the same cores
_QUESTION_THREADS = 2
_PARENT_PAUSE_S = 0.5
_END_S = 1.0  # for calls that run


class Bulk:
    """The Flight server and its link to the broker, in this process. `port` 0 takes a free one."""

    def __init__(
        self, folder: Path, broker: Address, host: str, port: int, disk: Disk | None = None,
        bounds: BatchBounds = BATCH_BOUNDS, streams_max: int = STREAMS_MAX,
    ) -> None:  # fmt: skip
        """Raises ForeignFolder, and UsageError where the port cannot be had."""
        self._table = TableReader()
        self._disk = disk or RealDisk(folder)
        self._questions = ThreadPoolExecutor(_QUESTION_THREADS, "table")
        self._link = Link(broker, {ClientRequest.FIND_IN_TABLE: self._find, ClientRequest.COUNT_TABLE: self._count})
        try:
            self.server = BulkServer(host, port, self._disk, folder, self._link, bounds, streams_max)
        except pa.ArrowException as error:  # all that Flight says of a port that is taken
            self._close_link()
            raise UsageError(f"port {port} of {host} cannot be listened on: is it in use?") from error
        except BaseException:
            self._close_link()
            raise
        self.promoter = Promoter(self._link, self._table, self.server.uploads)
        self.address = Address(host, self.server.port)
        self._link.attach(self.address)

    async def _find(self, command: Command) -> bytes:
        """Answers the broker's question about the table. Raises TableUnreadable."""
        question = _question(command)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._questions, self._table.find, _table(command), question, _identity(command)
        )
        return orjson.dumps(found)

    async def _count(self, command: Command) -> bytes:
        """Answers how much waits in the table. Raises TableUnreadable."""
        loop = asyncio.get_running_loop()
        try:
            wish: dict[str, Any] = orjson.loads(command.body)
            found = await loop.run_in_executor(self._questions, self._count_all, command, wish)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"what is to be counted in the table cannot be read: {error!r}") from error
        return found.packed() if isinstance(found, Seconds) else orjson.dumps(found.plain())

    def _count_all(self, command: Command, wish: dict[str, Any]) -> Counts | Seconds:
        jobs = [self._unfollowed(int(number), int(far)) for number, far in wish.get("jobs", ())]
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


def _question(command: Command) -> Question:
    fields = command.fields
    try:
        by = str(fields["by"])
        if by not in ("unique", "key"):
            raise ValueError(f"by is {by!r}")
        return Question(
            str(fields["topic"]), str(fields["key"]), by,
            int(fields["keyHash"]), int(fields["due"]), int(fields["before"]),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"a question about the table lacks something: {error}") from error


def run(
    folder: Path, broker: Address, host: str, port: int, ready: Callable[[Address], None], parent_pid: int = 0
) -> None:
    """Serves until a signal ends it; called in the main thread of a process of its own. Raises what Bulk raises.

    `parent_pid` names the parent where it matters: one that is gone before we look would leave us another.
    """
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    parent = parent_pid or os.getppid()
    let_others_go_first(NICENESS)
    keep_freed_memory()
    bulk = Bulk(folder, broker, host, port)
    bulk.promoter.start()
    ready(bulk.address)
    while not ending.wait(_PARENT_PAUSE_S) and os.getppid() == parent:
        pass
    bulk.close()
