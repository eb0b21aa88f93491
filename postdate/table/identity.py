"""Whose table it is: a property of the Delta table names the broker, another its topics and queues, and four
transaction versions the last place of that broker's log which the table has seen.

Rows name queues by their numbers, which mean something at that broker alone. Everybody who reads or writes the table
compares the identities first.
"""

from typing import NamedTuple

from deltalake import DeltaTable

from postdate.contract import NamedQueues, State, TableMarks, load
from postdate.errors import ForeignTable
from postdate.table.format import FAR_TRANSACTION, MESSAGES

PROPERTY, QUEUES = "postdate.identity", "postdate.queues"
POSITION, MARK, HORIZON, EPOCH = "postdate-position", "postdate-mark", "postdate-horizon", "postdate-epoch"


class Seen(NamedTuple):
    """What a table has seen of the log of its broker."""

    position: int  # where a batch begins
    mark: int  # the checksum of that batch, without its highest bit
    horizon: int
    epoch: int

    @property
    def transactions(self) -> dict[str, int]:
        return dict(zip((POSITION, MARK, HORIZON, EPOCH), self, strict=True))


def read_identity(delta: DeltaTable) -> str:
    """Returns the identity of the broker to which a table belongs; empty for a table of an earlier version."""
    return str(delta.metadata().configuration.get(PROPERTY, ""))


def read_queues(delta: DeltaTable) -> NamedQueues | None:
    """Returns what the queue numbers in a table mean; None for a table of an earlier version."""
    text = delta.metadata().configuration.get(QUEUES)
    return NamedQueues.read(load(text.encode(), "the queues of the table")) if text else None


def read_seen(delta: DeltaTable) -> Seen | None:
    """Returns what a table has seen of the log; None for a table of an earlier version."""
    found = [delta.transaction_version(name) for name in (POSITION, MARK, HORIZON, EPOCH)]
    known = [value for value in found if value is not None]
    return Seen(*known) if len(known) == len(found) else None


def read_marks(delta: DeltaTable) -> TableMarks:
    """Returns what a pipeline tells its broker about its table."""
    far, seen = delta.transaction_version(FAR_TRANSACTION) or 0, read_seen(delta)
    marks = TableMarks(read_identity(delta), far)
    return marks if seen is None else marks._replace(position=seen.position, mark=seen.mark)


def seen_in(state: State) -> Seen | None:
    """Returns what a table has seen that follows this state; None where the broker does not know its last batch."""
    if state.position is None or state.mark is None:
        return None
    return Seen(state.position, state.mark, state.horizon, state.epoch)


def refuse_foreign(delta: DeltaTable, uri: str, identity: str) -> None:
    """Raises ForeignTable where a table belongs to another broker than the one of this identity. A table or a broker of
    an earlier version has none.
    """
    found = read_identity(delta)
    if found and identity and found != identity:
        raise ForeignTable(
            f"the table {uri} belongs to another broker: its identity is {found}, the broker's is {identity}; restore "
            "the data folder that belongs to it, give the pipeline another table with --table, or take it over into a "
            "new data folder with: postdate table adopt"
        )


def open_table(root: str, identity: str) -> DeltaTable:
    """Opens the messages of a table, for readers. Raises ForeignTable, and what deltalake raises."""
    delta = DeltaTable(f"{root.rstrip('/')}/{MESSAGES}")
    refuse_foreign(delta, root, identity)
    return delta
