"""An outbox in SQLite: send what a transaction has committed, and nothing else: python examples/outbox.py [ADDRESS]

A service that writes to its database and then sends has two ways to be wrong: it dies in between and the message is
missing, or the transaction is rolled back and the message is there. So it writes the message into a table of the same
transaction, the outbox. A relay sends what it finds there and then deletes it.

A relay that dies between the two sends a row again: at least once. The row's number travels as the message's key, and
the consumer stores each key once, in one transaction with its work. So every order is shipped once. `--crash` lets the
relay forget to delete, to show it.
"""

import argparse
import sqlite3

import postdate

TOPIC, GROUP = "shipments", "warehouse"

SCHEMA = """
create table if not exists orders (name text primary key);
create table if not exists outbox (number integer primary key autoincrement, topic text, body text, delay_seconds real);
create table if not exists shipped (key text primary key, name text);
"""


def open_database(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    return database


def place_order(database: sqlite3.Connection, name: str) -> None:
    """Writes the order and its message in one transaction: both are there, or neither is."""
    with database:
        database.execute("insert into orders values (?)", (name,))
        row = (TOPIC, name, 0.1)  # a customer may change his mind for a while: a tenth of a second here
        database.execute("insert into outbox (topic, body, delay_seconds) values (?, ?, ?)", row)


def relay(database: sqlite3.Connection, client: postdate.Client, *, crashes: bool = False) -> int:
    """Sends what is in the outbox, oldest first, and deletes what the broker has stored; returns how much it has sent.
    A service calls it after each commit, and every few seconds.
    """
    rows = database.execute("select number, topic, body, delay_seconds from outbox order by number").fetchall()
    for number, topic, body, delay_seconds in rows:
        client.send(topic, body, delay=delay_seconds, key=f"outbox-{number}")
        if not crashes:
            with database:
                database.execute("delete from outbox where number = ?", (number,))
    return len(rows)


def ship(database: sqlite3.Connection, message: postdate.ReceivedMessage) -> bool:
    """Does the work of a message once; returns False for a message whose work is done."""
    with database:
        row = (message.key, message.body.decode())
        return database.execute("insert or ignore into shipped values (?, ?)", row).rowcount == 1


def main() -> None:
    parser = argparse.ArgumentParser(description="An outbox in SQLite.")
    parser.add_argument("address", nargs="?", help="of the broker (default: POSTDATE_ADDR, else 127.0.0.1:9876)")
    parser.add_argument("--database", default=":memory:", help="a file (default: in memory)")
    parser.add_argument("--crash", action="store_true", help="the relay dies before it deletes what it has sent")
    arguments = parser.parse_args()
    database = open_database(arguments.database)
    with postdate.connect(arguments.address) as client:
        place_order(database, "order-1")
        place_order(database, "order-2")
        try:
            place_order(database, "order-1")
        except sqlite3.IntegrityError:
            print("order-1 is refused, and its message was never sent")
        if arguments.crash:
            print(f"the relay sends {relay(database, client, crashes=True)} messages and dies")
        print(f"the relay sends {relay(database, client)} messages")
        for message in client.consume(TOPIC, GROUP, idle="1s"):
            is_first = ship(database, message)
            print(f"{message.body.decode()} {'is shipped' if is_first else 'came again, and is shipped already'}")
    database.close()


if __name__ == "__main__":
    main()
