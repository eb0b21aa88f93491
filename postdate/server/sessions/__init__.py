"""What the server remembers of its clients while it runs."""

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.server.connection import Connection
from postdate.server.lines import Lines
from postdate.server.sessions.checkers import Checkers
from postdate.server.sessions.locks import Locks
from postdate.server.sessions.members import Members, Senders
from postdate.server.sessions.meter import Meter
from postdate.server.sessions.offsets import Offsets
from postdate.server.sessions.pullers import Pullers
from postdate.server.sessions.questions import Questions, Relays
from postdate.server.sessions.table import Table


class Sessions:
    """The sessions of one server, as the requests share them."""

    def __init__(self, broker: Broker, clock: Clock, lines: Lines) -> None:
        self.members = Members[Connection](broker, lines)
        self.senders = Senders[Connection](broker)
        self.checkers = Checkers()
        self.locks = Locks(broker.limits.lock_expiry_ms * 1_000_000, broker.limits.locks_max)
        self.offsets = Offsets(broker)
        self.pullers = Pullers[Connection](self.offsets)
        self.meter = Meter(broker, clock.elapsed_ns())
        self.questions = Questions()
        self.relays = Relays(broker, self.questions)
        self.table = Table(broker, clock, self.questions)
