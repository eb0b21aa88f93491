"""PostgreSQL: a table with an index on the due time, read with SKIP LOCKED."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.system import CANCELLED, UNKNOWN, Received, body
from benchmarks.peers.systems.inbox import POLL_S, Inbox, now_ms, pause_s
from benchmarks.peers.systems.served import Served
from benchmarks.peers.systems.server import HOST, Server, free_port, library_version, program, said_version

BATCH_COUNT = 1_000
USER = "postgres"
SERVER_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
}
TABLE = (
    "create table if not exists message (id bigint primary key, due_ms bigint not null, body bytea not null)",
    "create index if not exists message_due on message (due_ms)",
)
# The table changes faster than its statistics: the planner is told what they would tell it.
PLAN = "set enable_seqscan = off; set enable_bitmapscan = off; set plan_cache_mode = force_generic_plan"
SEND = "copy message (id, due_ms, body) from stdin (format binary)"
TAKE = """
delete from message where ctid = any (array(
    select ctid from message where due_ms <= %s order by due_ms limit %s for update skip locked
)) returning body
"""
NEXT_DUE = "select min(due_ms) from message"
CANCEL = "delete from message where id = any (%s) returning id"


class PostgreSQL(Served[Any]):
    name = "PostgreSQL, a table"
    slug = "postgresql"
    settings = (
        f"Sends by COPY, a transaction for each {BATCH_COUNT:,}; the consumer deletes and returns up to "
        f"{BATCH_COUNT:,} due rows with SKIP LOCKED (a consumer that dies then has lost them), cancels by one delete "
        f"for {BATCH_COUNT:,}; where none is due, it asks again at the next due time, after "
        f"{POLL_S * 1e3:.0f} ms at the latest; shared_buffers 1 GB, max_wal_size 4 GB."
    )
    durable = "synced before the answer (synchronous_commit on)"
    volatile = "in its memory, written and synced within 0.6 s (synchronous_commit off)"
    ended_by = signal.SIGINT  # which does not wait for other connections

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._next_id = time.time_ns()  # no other life of the folder uses it

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {
            "postgres": said_version([_program("postgres"), "--version"]),
            "psycopg": library_version("psycopg"),
            "psycopg-binary": library_version("psycopg-binary"),
        }

    def start(self) -> None:
        import psycopg

        self.stop()
        port, data = free_port(), self.folder / "data"
        if not data.exists():
            self._make(data)
        settings = SERVER_SETTINGS | {"port": str(port), "synchronous_commit": "on" if self.is_durable else "off"}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        self._server = Server([*_as_user(), _program("postgres"), "-D", data, *flags], self.folder)
        self._server.await_answer(lambda: self._connect(port), (psycopg.OperationalError,))

    def _make(self, data: Path) -> None:
        data.mkdir(parents=True)
        if os.getuid() == 0:
            shutil.chown(data, USER)
        command = [*_as_user(), _program("initdb"), "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)

    def _connect(self, port: int) -> None:
        import psycopg

        self._client = psycopg.connect(host=HOST, port=port, user=USER, dbname=USER, autocommit=True)
        for command in (*TABLE, PLAN):
            self._connected.execute(command)

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        first_id, self._next_id = self._next_id, self._next_id + len(dues_ms)
        with self._connected.cursor() as cursor:
            for start in range(0, len(dues_ms), BATCH_COUNT):
                with cursor.copy(SEND) as copy:
                    copy.set_types(["int8", "int8", "bytea"])
                    for number, due_ms in enumerate(dues_ms[start : start + BATCH_COUNT], start):
                        copy.write_row((first_id + number, due_ms, body(first_index + number)))
        return [str(first_id + number) for number in range(len(dues_ms))]

    def receive(self, count: int, limit_s: float) -> Received:
        inbox = Inbox(count, limit_s)
        with self._connected.cursor(binary=True) as cursor:
            while inbox.is_open:
                limits = (int(now_ms()), min(BATCH_COUNT, inbox.missing))
                found = cursor.execute(TAKE, limits, prepare=True).fetchall()
                if found:
                    inbox.take([row[0] for row in found])
                else:
                    time.sleep(pause_s(cursor.execute(NEXT_DUE, prepare=True).fetchone()[0]))
        return inbox.received

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(handles), BATCH_COUNT):
            ids = [int(each) for each in handles[start : start + BATCH_COUNT]]
            gone = {row[0] for row in self._connected.execute(CANCEL, (ids,))}
            answers += [CANCELLED if each in gone else UNKNOWN for each in ids]
        return answers


def _as_user() -> list[str | Path]:
    """It refuses to run as root. What it may do beyond its user: enter its folder, where one above is closed to it."""
    if os.getuid() != 0:
        return []
    return [
        program("setpriv", "Debian's util-linux"), f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
        "--inh-caps=+dac_override", "--ambient-caps=+dac_override",
    ]  # fmt: skip


def _program(name: str) -> Path:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return program(name, "Debian's postgresql", *folders)


SYSTEM = PostgreSQL
