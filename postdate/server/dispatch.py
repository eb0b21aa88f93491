"""Which object answers which request: one table, one loop over the frames of a read, one write of the answers."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from postdate.access.users import Users
from postdate.broker.broker import Broker
from postdate.broker.writing import Changes
from postdate.clock import Clock
from postdate.config import Settings
from postdate.errors import PostdateError, ProtocolError
from postdate.server.access import Gate
from postdate.server.address import Address
from postdate.server.answers import refusal
from postdate.server.audit import Audit
from postdate.server.connection import Connection
from postdate.server.connections import Connections
from postdate.server.lines import Lines
from postdate.server.pulse import Pulse
from postdate.server.requests.access import Accesses
from postdate.server.requests.dead_letters import DeadLetters
from postdate.server.requests.find import Lookups
from postdate.server.requests.group import Groups
from postdate.server.requests.jobs import Jobs
from postdate.server.requests.move import Moves
from postdate.server.requests.pending import Pending
from postdate.server.requests.pipeline import Pipelines
from postdate.server.requests.pop import Pops
from postdate.server.requests.pull import Pulls
from postdate.server.requests.recall import Recalls
from postdate.server.requests.route import Routes
from postdate.server.requests.send import Sends
from postdate.server.requests.status import Status
from postdate.server.requests.tools import Tools
from postdate.server.requests.topic import AutoCreation, Topics
from postdate.server.requests.transactions import Transactions
from postdate.server.requests.values import Values
from postdate.server.sessions import Sessions
from postdate.server.sessions.keys import Keys
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import HEADER_AT, Command, decode, header_end, reply
from postdate.wire.requests import REQUESTS, Request, decode_signed_send

Method = Callable[[Connection, Command, Mapping[str, Any]], bytes | None]
Amend = Callable[[Connection, int, Mapping[str, Any]], Mapping[str, Any]]
# Sends and pulls have paths of their own: the sends of a read become one batch, and a pull reads its fields itself.
_SEND_CODES = frozenset(int(request) for request in Request if request.handler == "send.collect")
_PULL_CODES = frozenset(int(request) for request in Request if request.handler == "pull.pull")
_WRITE_BYTES = 1 << 20  # answers of one read are written when they have grown to this
_ADMITTED = b""  # instead of a refusal
_NESTED = "the request is nested too deeply to be read"


class _Answers:
    """The answers of one read, written together; earlier only where they have grown large."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames: list[bytes] = []
        self._size = 0

    def add(self, frame: bytes | None) -> bool:
        """Adds an answer, if there is one; returns whether the client takes no more for now."""
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


class Dispatcher:
    """Hands every request to the object that answers it. One serves all listening sockets of a broker."""

    def __init__(
        self, broker: Broker, clock: Clock, address: Address, token: str = "", folder: Path | None = None
    ) -> None:
        """The folder holds the users and the audit log; without it there are none. Raises UsageError for users that
        cannot be read.
        """
        self._broker, self._clock = broker, clock
        self._turn_ns = broker.limits.turn_ms_max * 1_000_000
        self.address, self.limits = address, broker.limits
        self.on_grown: Callable[[Iterable[int]], None] | None = None  # is told which queues grew; the gRPC port listens
        self.amend: Amend | None = None  # changes the fields of a request before it is answered; postdate.testing does
        lines = Lines(broker.limits.complaints_max)
        self.audit = self.users = None
        if folder is not None:
            self.users = Users(folder, broker.limits.users_max, broker.limits.rules_max)
            self.audit = Audit(folder, clock, broker.limits, partial(lines.write_seldom, "audit"))
        self.gate = gate = Gate(broker, lines, self.users, token, self.audit)
        self._version = gate.version  # of the users, as the requests that wait were last looked at
        self.connections = Connections(broker, clock, lines)
        self.welcome, self.note_unfinished = self.connections.add, self.connections.note_unfinished
        self.complain = self.connections.complain
        self.sessions = sessions = Sessions(broker, clock, lines)
        self.pulse = pulse = Pulse(broker, clock, self._wake)
        creation, tasks = AutoCreation(broker, clock), Tasks(broker, "counts_max")
        keys = Keys(broker, sessions.table)
        self.pipelines = Pipelines(broker, clock, pulse, tasks, sessions.table, token, folder)
        settled = self.pipelines.settled
        recalls = Recalls(broker, clock, pulse, sessions.table, keys, settled)
        topics = Topics(broker, clock, sessions)
        self.routes = Routes(broker, creation)
        self.sends = Sends(broker, pulse, creation, recalls, lines)
        self.transactions = Transactions(broker, clock, pulse, sessions)
        self.pulls = Pulls(broker, clock, sessions, creation)
        self.pops = Pops(broker, clock, pulse, sessions, self.pulls, creation, lines)
        self.groups = Groups(broker, clock, pulse, sessions, creation, topics, self.pulls, self.pops)
        self.status = Status(
            broker, clock, address, pulse, sessions.meter,
            lambda: {"connections": len(self.connections), "held_pulls": self.pulls.held_count},
            self.pipelines, sessions.table.promotions, sessions.members.conflicts,
        )  # fmt: skip
        objects = {
            "recall": recalls,
            "pop": self.pops,
            "group": self.groups,
            "topic": topics,
            "route": self.routes,
            "values": Values(broker, clock),
            "find": Lookups(broker, keys),
            "move": Moves(broker, clock, keys, settled),
            "pending": Pending(broker, clock, sessions.table, tasks),
            "tools": Tools(broker, clock, pulse, sessions, self.pulls, self.pops, tasks),
            "status": self.status,
            "pipeline": self.pipelines,
            "transactions": self.transactions,
            "dead_letters": DeadLetters(broker, clock, pulse),
            "jobs": Jobs(broker, clock, tasks, settled),
            "table": sessions.table,
            "access": Accesses(gate, tasks, self.end_forbidden),
        }
        # By code the method that answers each request, as its row in wire/requests.py names it.
        self._methods: dict[int, Method] = {}
        for request in Request:
            if request not in _SEND_CODES | _PULL_CODES:
                owner, _, method = request.handler.partition(".")
                self._methods[int(request)] = getattr(objects[owner], method)

    def _wake(self, changes: Changes) -> None:
        """Gives what has become visible to the consumers that wait for it. The pulse calls it after a flush."""
        if changes.grown_queues:
            self.sessions.meter.grew(changes.grown_queues)
            self.pulls.wake(changes.grown_queues)
            if self.on_grown is not None:
                self.on_grown(changes.grown_queues)
        if changes.grown_queues or changes.ready_again or self._broker.view.has_spent_leases:
            self.pops.wake(changes)

    async def refresh_access(self) -> None:
        """Reads users that have changed, and ends what waits and is not allowed any more. Called once a second."""
        await self.gate.refresh()
        self.end_forbidden()
        if self.audit is not None:
            self.audit.tick()

    def end_forbidden(self) -> None:
        """Ends pulls and pops that wait for a user who is gone, or has lost the right."""
        if self._version != self.gate.version:
            self._version = self.gate.version
            self.pulls.end_forbidden()
            self.pops.end_forbidden()

    # -- connections --------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings at this moment: some change while the broker runs."""
        return self._broker.settings

    def farewell(self, connection: Connection) -> None:
        """Forgets a connection that has ended, and all that waits for its client."""
        if self.connections.remove(connection):
            self.forget(connection)

    def forget(self, connection: Connection) -> None:
        """Forgets all that a client waits for and has said about itself."""
        self.pulls.drop(connection)
        self.pops.drop(connection)
        self.groups.drop(connection)
        self.sessions.table.drop(connection)
        self.sessions.questions.drop(connection)

    # -- requests -----------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, frames: list[bytes]) -> int:
        """Handles the requests of a read, in order; returns how many it has handled.

        It stops early where the client does not read its answers or sent a frame that cannot be read, and where its
        turn is over: a request that waits for the disk here, as creating a topic does, keeps all others waiting.

        Each request is finished before the next is read: its objects are small and die young, which is a quarter
        faster than taking all requests of a read through one step after the other.
        """
        sends, gate, answers = self.sends, self.gate, _Answers(connection)
        collect = sends.collect_usual if gate.is_open else self._collect_signed
        now_ms, header_bytes_max = self._clock.now_ms(), self._broker.limits.json_bytes_max
        handled = turn_end_ns = 0
        try:
            for frame in frames:
                handled += 1
                if collect(connection, frame, now_ms):
                    continue
                header_bytes = header_end(frame) - HEADER_AT
                if header_bytes > header_bytes_max:  # reading it would keep all others waiting
                    raise ProtocolError(
                        f"json_bytes_max: a header of {header_bytes} bytes, the limit is {header_bytes_max}"
                    )
                command = decode(frame)
                denial = self._deny(connection, command) if gate.asks(command) else _ADMITTED
                if denial is _ADMITTED and command.code in _SEND_CODES:
                    sends.collect(connection, command, now_ms)
                    continue
                sends.write(connection, now_ms)
                if answers.add(self._answer(connection, command) if denial is _ADMITTED else denial):
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
            # Even after a mistake of ours: sends that stay collected would be answered to the next connection.
            sends.write(connection, now_ms)
            self.pops.write()
            answers.write()
            self.pulse.nudge()
        return handled

    def handle_commands(self, connection: Connection, commands: Iterable[Command]) -> None:
        """Handles requests that came in a form of their own, such as calls over gRPC, and were read together."""
        now_ms = self._clock.now_ms()
        try:
            for command in commands:
                denial = self._deny(connection, command) if self.gate.asks(command) else _ADMITTED
                if denial is _ADMITTED and command.code in _SEND_CODES:
                    self.sends.collect(connection, command, now_ms)
                    continue
                self.sends.write(connection, now_ms)
                answer = self._answer(connection, command) if denial is _ADMITTED else denial
                if answer is not None:
                    connection.write(answer)
        finally:
            self.sends.write(connection, now_ms)
            self.pops.write()
            self.pulse.nudge()

    def _collect_signed(self, connection: Connection, frame: bytes, now_ms: int) -> bool:
        """Takes in a send of a user, if it is like nearly all others; returns whether it was."""
        send = decode_signed_send(frame)
        if send is None or not self.gate.admits_send(connection, send):
            return False
        return self.sends.collect_usual(connection, frame, now_ms, (send.header, send.body))

    def _deny(self, connection: Connection, command: Command) -> bytes | None:
        """Returns the refusal of a request that is not admitted (None if nobody waits for it), else _ADMITTED."""
        try:
            self.gate.admit(connection, command)
        except PostdateError as error:
            return None if command.is_oneway else refusal(command, error)
        except RecursionError:
            return None if command.is_oneway else refusal(command, ProtocolError(_NESTED))
        return _ADMITTED

    def _answer(self, connection: Connection, command: Command) -> bytes | None:
        """Returns the answer to a request that is not a send; None where it comes later, or not at all."""
        if command.is_response:
            # To a question of ours or to a notice, which some clients answer although they need not.
            self.sessions.questions.take_answer(connection, command)
            return None
        try:
            if command.code in _PULL_CODES:
                answer = self.pulls.pull(connection, command)
            else:
                answer = self._call(connection, command)
        except (PostdateError, OSError) as error:
            answer = refusal(command, error)
        except RecursionError:  # a value that is a thousand lists deep cannot even be shown in a sentence
            answer = refusal(command, ProtocolError(_NESTED))
        return None if command.is_oneway else answer

    def _call(self, connection: Connection, command: Command) -> bytes | None:
        method = self._methods.get(command.code)
        if method is None:
            remark = f"request code {command.code} is not supported"
            return reply(command, codes.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        if len(command.body) > self._broker.limits.json_bytes_max:  # all bodies are JSON, sends apart
            size, limit = len(command.body), self._broker.limits.json_bytes_max
            raise ProtocolError(f"json_bytes_max: the body has {size} bytes, the limit is {limit}")
        asked = REQUESTS[command.code].read_fields(command.fields)
        return method(connection, command, asked if self.amend is None else self.amend(connection, command.code, asked))
