"""The service: which request goes to whom. One table, one loop over the frames of a read, one write of the answers."""

from collections.abc import Callable, Mapping
from typing import Any

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.config import Settings
from postdate.errors import PostdateError, ProtocolError
from postdate.server.address import Address
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.server.connections import Connections
from postdate.server.pulse import Pulse
from postdate.server.requests.assignments import Assignments
from postdate.server.requests.auto_creation import Birth
from postdate.server.requests.clients import Clients
from postdate.server.requests.find import Lookups
from postdate.server.requests.group import Consumers
from postdate.server.requests.jobs import Jobs
from postdate.server.requests.messages import Messages
from postdate.server.requests.pending import Pending
from postdate.server.requests.pipeline import Pipelines
from postdate.server.requests.pop import Pops
from postdate.server.requests.progress import Progress
from postdate.server.requests.pull import Pulls
from postdate.server.requests.route import Routes
from postdate.server.requests.send import Producers
from postdate.server.requests.status import Status
from postdate.server.requests.topic import Admin
from postdate.server.sessions.members import Members
from postdate.server.sessions.meter import Meter
from postdate.server.sessions.offsets import Offsets
from postdate.server.sessions.questions import Questions
from postdate.server.sessions.relays import Relays
from postdate.server.sessions.senders import Senders
from postdate.server.sessions.table import Table
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import HEADER_AT, Command, decode, header_end, reply
from postdate.wire.requests import END_TRANSACTION, REQUESTS, Request

Handler = Callable[[Connection, Command, Mapping[str, Any]], bytes | None]
# Sends and pulls have ways of their own: the sends of a read become one batch, and a pull reads its fields itself.
_SEND_CODES = frozenset(int(request) for request in Request if request.handler == "send.collect")
_PULL_CODES = frozenset(int(request) for request in Request if request.handler == "pull.pull")
_WRITE_BYTES = 1 << 20  # answers of one read are written when they have come to this


class _Answers:
    """The answers of one read, written together; before that only where they have become much."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames: list[bytes] = []
        self._size = 0

    def add(self, frame: bytes | None) -> bool:
        """Takes an answer in, if there is one; returns whether the client cannot take any more for now."""
        if frame is None:
            return False
        self._frames.append(frame)
        self._size += len(frame)
        if self._size < _WRITE_BYTES:
            return False
        self.write()
        return self._connection.is_paused

    def write(self) -> None:
        if self._frames:
            self._connection.write(self._frames[0] if len(self._frames) == 1 else b"".join(self._frames))
            self._frames, self._size = [], 0


class Service:
    """Everything that one broker answers. One for all listening sockets."""

    def __init__(self, broker: Broker, clock: Clock, address: Address) -> None:
        self._broker = broker
        self.address = address
        self._clock = clock
        self._turn_ns = broker.settings.turn_ms_max * 1_000_000
        self.connections = Connections(broker, clock)
        offsets = Offsets(broker)
        members, senders = Members[Connection](broker), Senders[Connection](broker)
        birth, tasks = Birth(broker, clock), Tasks(broker, "counts_max")
        self._meter = Meter(broker, clock.elapsed_ns())
        self.pulls = Pulls(broker, offsets, members, birth, self._meter)
        self._fold = broker.fold
        self.pulse = Pulse(broker, clock, self._wake)
        self.pops = Pops(broker, clock, self.pulse, self.pulls, birth, self._meter)
        self._assignments = Assignments(broker, clock, birth, members)
        self.questions = Questions()
        self._table_reader = Table(broker, self.questions)
        self._producers = Producers(broker, clock, self.pulse, birth, self._table_reader)
        self.consumers = Consumers(broker, clock, self.pulse, self.pulls, birth, members, senders, offsets)
        self.admin = Admin(broker, clock, offsets, birth, self._meter, tasks)
        self._pending = Pending(broker, clock, self._table_reader, tasks)
        self._routes = Routes(broker, birth)
        relays = Relays(broker, self.questions)
        self._clients = Clients(broker, clock, members, senders, offsets, relays, tasks)
        self._progress = Progress(
            broker, clock, self.pulse, self.pulls, self.pops, members, offsets, self._meter, tasks
        )
        self._messages = Messages(broker)
        self._pipelines = Pipelines(broker, clock, self.pulse, tasks)
        self._jobs = Jobs(broker, clock, tasks, self._pipelines.settled)
        self.status = Status(broker, clock, self._meter, self._counts, self._pipelines.last_reports)
        self._lookups = Lookups(broker)
        self._handlers = _find_handlers(
            {
                "send": self._producers, "consumers": self.consumers, "assignments": self._assignments,
                "pop": self.pops, "topic": self.admin, "route": self._routes, "find": self._lookups,
                "messages": self._messages, "clients": self._clients, "progress": self._progress,
                "pending": self._pending, "status": self.status, "pipeline": self._pipelines,
                "table": self._table_reader, "jobs": self._jobs,
            }
        )  # fmt: skip

    def _wake(self) -> None:
        """After a flush: whoever waits for messages is given what has come."""
        fold = self._fold
        if not (fold.grown or fold.pops.freed or fold.pops.spent):
            return
        grown = set(fold.grown)
        fold.grown.clear()
        self._meter.grew(grown)
        self.pulls.wake(grown)
        self.pops.wake(grown)

    @property
    def settings(self) -> Settings:
        """As they are at this moment."""
        return self._broker.settings

    def _counts(self) -> Mapping[str, int]:
        """What operators are told about the server itself."""
        return {"connections": len(self.connections), "held_pulls": self.pulls.held_count}

    # -- connections --------------------------------------------------------------------------------------------

    def welcome(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        return self.connections.add(connection)

    def farewell(self, connection: Connection) -> None:
        if self.connections.remove(connection):
            self.pulls.drop(connection)
            self.pops.drop(connection)
            self.consumers.drop(connection)
            self._table_reader.drop(connection)
            self.questions.drop(connection)

    def note_unfinished(self, size: int) -> None:
        self.connections.note_unfinished(size)

    def complain(self, text: str, *details: object) -> None:
        self.connections.complain(text, *details)

    # -- requests -----------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, frames: list[bytes]) -> int:
        """Handles the requests of a read, in order; returns how many. Fewer than all where the client does not read
        its answers, sent what cannot be read, or has had its turn: what waits for the disk here, as making a topic
        does, keeps everybody waiting.

        Each request is done with before the next is looked at: what is made for it is small and dies young, which is
        a quarter faster than doing all of a read step by step.
        """
        producers, answers = self._producers, _Answers(connection)
        now_ms = self._clock.now_ms()
        handled = turn_end_ns = 0
        try:
            for frame in frames:
                handled += 1
                if producers.collect_usual(connection, frame, now_ms):
                    continue
                command = self._decoded(frame)
                if command.code in _SEND_CODES:
                    producers.collect(connection, command, now_ms)
                    continue
                producers.write(connection, now_ms)
                if answers.add(self._answer(connection, command)):
                    break
                at_ns = self._clock.elapsed_ns()
                turn_end_ns = turn_end_ns or at_ns + self._turn_ns
                if at_ns > turn_end_ns:
                    break
        except ProtocolError as error:
            connection.fail(error)
        except RecursionError:
            connection.fail(ProtocolError(_NESTED))
        finally:
            # Even after a mistake of ours: what is left collected would be answered to the next connection.
            producers.write(connection, now_ms)
            self.pops.write()
            answers.write()
            self.pulse.nudge()
        return handled

    def _decoded(self, frame: bytes) -> Command:
        """Raises ProtocolError, also for a header that is so long that others would wait for us to read it."""
        header_bytes, limit = header_end(frame) - HEADER_AT, self._broker.settings.json_bytes_max
        if header_bytes > limit:
            raise ProtocolError(f"json_bytes_max: a header of {header_bytes} bytes, the limit is {limit}")
        return decode(frame)

    def _answer(self, connection: Connection, command: Command) -> bytes | None:
        """The answer to a request that is not a send; None where it comes later, or not at all."""
        if command.is_response:
            self.questions.answered(connection, command)  # or to a notice: clients answer some although they need not
            return None
        try:
            if command.code in _PULL_CODES:
                answer = self.pulls.pull(connection, command)
            else:
                answer = self._dispatch(connection, command)
        except (PostdateError, OSError) as error:
            answer = refusal(command, error)
        except RecursionError:  # a value that is a thousand lists deep cannot even be shown in a sentence
            answer = refusal(command, ProtocolError(_NESTED))
        return None if command.is_oneway else answer

    def _dispatch(self, connection: Connection, command: Command) -> bytes | None:
        handler = self._handlers.get(command.code)
        if handler is None:
            return reply(command, codes.REQUEST_CODE_NOT_SUPPORTED, remark=_unknown(command.code))
        if len(command.body) > self._broker.settings.json_bytes_max:  # no handler of the table takes anything but JSON
            size, limit = len(command.body), self._broker.settings.json_bytes_max
            raise ProtocolError(f"json_bytes_max: the body has {size} bytes, the limit is {limit}")
        return handler(connection, command, REQUESTS[command.code].read_fields(command.fields))


def _find_handlers(objects: Mapping[str, object]) -> dict[int, Handler]:
    """Returns the method that answers each request, by code, as the table of requests names it."""
    handlers: dict[int, Handler] = {}
    for request in Request:
        if request not in _SEND_CODES | _PULL_CODES:
            owner, _, method = request.handler.partition(".")
            handlers[int(request)] = getattr(objects[owner], method)
    return handlers


_NESTED = "what was sent is nested too deeply to be read"


def _unknown(code: int) -> str:
    if code == END_TRANSACTION:
        return "transactions are not supported"
    return f"request code {code} is not supported"
