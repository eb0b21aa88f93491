"""The shop's database: orders and what was done for them.

An order is placed, and then either paid or closed. The database decides which, whatever messages say: a payment and a
timeout of the same instant both ask, and one of them is told that it came too late.
"""

import sqlite3
from pathlib import Path

SCHEMA = """
create table if not exists orders (id text primary key, state text not null);
create table if not exists work (id text not null, kind text not null, worker integer not null);
"""


class Store:
    """Orders in a file that several processes share. Each call is one transaction."""

    def __init__(self, path: str | Path) -> None:
        self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.executescript(SCHEMA)

    def close(self) -> None:
        self._connection.close()

    def place(self, order: str) -> None:
        self._connection.execute("insert into orders values (?, 'placed')", (order,))

    def state(self, order: str) -> str | None:
        found = self._connection.execute("select state from orders where id = ?", (order,)).fetchone()
        return None if found is None else str(found[0])

    def end(self, order: str, state: str) -> bool:
        """Makes a placed order paid or closed; returns whether it was still placed."""
        sentence = "update orders set state = ? where id = ? and state = 'placed'"
        return self._connection.execute(sentence, (state, order)).rowcount == 1

    def note_work(self, order: str, kind: str, worker: int) -> None:
        """Notes that a worker has finished something for an order: only to show that nothing is done twice."""
        self._connection.execute("insert into work values (?, ?, ?)", (order, kind, worker))

    def states(self) -> dict[str, str]:
        return dict(self._connection.execute("select id, state from orders"))

    def work(self) -> list[tuple[str, str]]:
        """Returns what was finished: orders, and what was done for each."""
        return list(self._connection.execute("select id, kind from work"))
