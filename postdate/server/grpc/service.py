"""The service: who calls, which method it is, and the way of its requests through the server."""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from google.protobuf.message import DecodeError

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.config import Limits, Settings
from postdate.errors import NoPermission, PostdateError
from postdate.server.asker import Asker
from postdate.server.dispatch import Dispatcher
from postdate.server.grpc.call import Call, Method
from postdate.server.grpc.client import GrpcClient, OnReply
from postdate.server.grpc.consuming import Consuming
from postdate.server.grpc.producing import Producing
from postdate.server.grpc.sessions import ClientSessions
from postdate.server.grpc.statuses import status_of_error
from postdate.server.grpc.transactions import TransactionEnds
from postdate.server.peer import Peer
from postdate.wire import messaging
from postdate.wire.bodies import CLIENT_ID_CHARACTERS_MAX
from postdate.wire.frame import Command
from postdate.wire.grpc import INVALID_ARGUMENT, UNAUTHENTICATED
from postdate.wire.messaging import MESSAGES, SERVICE_PATH, CallError, requests_of
from postdate.wire.signature import parse_authorization

LOST_MS_MAX = 10_000  # how long a client may be without a connection before it is gone: they come back within a second


class GrpcService:
    """Answers the calls of one server. Its methods are called on the loop's thread."""

    def __init__(self, dispatcher: Dispatcher, broker: Broker, clock: Clock) -> None:
        self._dispatcher, self._broker, self._clock = dispatcher, broker, clock
        self._clients: dict[tuple[str, str], GrpcClient] = {}  # by the name of the user and the client's id
        self._clients_of: dict[Peer, set[GrpcClient]] = {}
        self._collected: dict[tuple[GrpcClient, int], tuple[Asker, Command]] = {}  # by client and opaque
        self.consuming = Consuming(self, dispatcher, broker, clock)
        dispatcher.on_grown = self.consuming.note_grown
        self.sessions = ClientSessions(self, dispatcher, broker, clock)
        producing = Producing(self, dispatcher, broker, clock)
        handlers: dict[str, Callable[[Call, Any], None]] = {
            "QueryRoute": self.sessions.query_route,
            "QueryAssignment": self.sessions.query_assignment,
            "Heartbeat": self.sessions.take_heartbeat,
            "NotifyClientTermination": self.sessions.terminate,
            "SendMessage": producing.send,
            "RecallMessage": producing.recall,
            "EndTransaction": TransactionEnds(self, dispatcher).end,
            "ReceiveMessage": self.consuming.receive,
            "AckMessage": self.consuming.acknowledge,
            "ChangeInvisibleDuration": self.consuming.change_invisible,
            "ForwardMessageToDeadLetterQueue": self.consuming.forward,
        }
        self._methods = {
            SERVICE_PATH + name: Method(name, *requests_of(name), handle) for name, handle in handlers.items()
        }
        command = MESSAGES["TelemetryCommand"]
        self._methods[SERVICE_PATH + "Telemetry"] = Method(
            "Telemetry", command, command, self.sessions.take_telemetry, is_open_ended=True
        )

    # -- connections --------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self._broker.settings

    @property
    def limits(self) -> Limits:
        return self._broker.limits

    def welcome(self, connection: Peer) -> bool:
        return self._dispatcher.connections.add(connection)

    def farewell(self, connection: Peer) -> None:
        self._dispatcher.connections.remove(connection)
        for client in self._clients_of.pop(connection, ()):
            client.forget_peer(connection, self._clock.elapsed_ns())
            if not client.peers and not client.is_worth_waiting:
                self._forget(client)

    def complain(self, text: str, *details: object) -> None:
        self._dispatcher.complain(text, *details)

    def pause(self, connection: Peer) -> None:
        """A connection does not read: its clients are given nothing."""
        for client in self._clients_of.get(connection, ()):
            client.note_paused()

    def resume(self, connection: Peer) -> None:
        """A connection reads again: what came for its clients meanwhile waits no longer."""
        clients = self._clients_of.get(connection, ())
        for client in clients:
            client.note_paused()
        for group in {group for client in clients for group in client.subscriptions}:
            self._dispatcher.pops.look_again(group)
        self._dispatcher.pulse.nudge()

    # -- calls --------------------------------------------------------------------------------------------------

    def find_method(self, path: str) -> Method | None:
        return self._methods.get(path)

    def begin(self, connection: Peer, call: Call) -> None:
        """Finds out who calls; refuses the call of nobody."""
        headers = call.headers
        client_id = headers.get("x-mq-client-id", "")
        try:
            authorization = headers.get("authorization")
            credentials = authorization and parse_authorization(authorization, headers.get("x-mq-date-time", ""))
            call.asker = self._dispatcher.gate.prove(connection, credentials or None)
        except NoPermission as error:
            self.refuse(call, CallError(messaging.UNAUTHORIZED, str(error)), UNAUTHENTICATED)
            return
        if not client_id or len(client_id) > CLIENT_ID_CHARACTERS_MAX:
            problem = f"header x-mq-client-id has {len(client_id)} characters, expected 1 to {CLIENT_ID_CHARACTERS_MAX}"
            self.refuse(call, CallError(messaging.NO_CLIENT_ID, problem))
            return
        found = self._clients.get((call.asker.name, client_id))
        if found is None or connection not in found.peers:
            known = self._clients_of.setdefault(connection, set())
            if len(known) >= self.limits.connection_members_max:
                problem = f"connection_members_max: {len(known)} clients call on one connection"
                self.refuse(call, CallError(messaging.TOO_MANY_REQUESTS, problem))
                return
            if found is None:
                take_answer = self._dispatcher.sessions.questions.take_answer
                found = GrpcClient(self._dispatcher, call.asker.name, client_id, take_answer)
                self._clients[call.asker.name, client_id] = found
            found.note_peer(connection, self._dispatcher)
            known.add(found)
        found.language = headers.get("x-mq-language", "")[:32]
        call.client = found
        if call.method.is_open_ended:
            call.begin()

    def take(self, call: Call, message: bytes) -> None:
        """Handles a message of a call: the only one, or one of many."""
        call.client.called_at_ns = self._clock.elapsed_ns()
        try:
            request = call.method.request.FromString(message)
        except DecodeError as error:
            self.refuse(call, CallError(messaging.BAD_REQUEST, f"the message cannot be read: {error}"))
            return
        try:
            call.method.handle(call, request)
        except (PostdateError, OSError) as error:
            self.refuse(call, error)

    def refuse(self, call: Call, error: Exception, grpc_status: int = INVALID_ARGUMENT) -> None:
        """Answers a call with a status alone; an open-ended one ends with a status of gRPC."""
        if call.method.is_open_ended:
            call.end(grpc_status, str(error))
        elif call.method.name == "ReceiveMessage":
            call.send(status=status_of_error(error))
            call.end()
        else:
            call.answer(status=status_of_error(error))

    # -- requests of the older protocol ------------------------------------------------------------------------

    def ask(
        self, call: Call, code: int, fields: Mapping[str, Any], on_reply: OnReply, body: bytes = b""
    ) -> Command:  # fmt: skip
        """Asks the server for something in the name of a call. Requests that were collected together are handled
        together.
        """
        command = call.client.make_command(code, fields, on_reply, body)
        self._collected[call.client, command.opaque] = call.asker, command
        return command

    def withdraw(self, client: GrpcClient, command: Command) -> bool:
        """Asks no more for what was not handled yet; returns False where it was."""
        return self._collected.pop((client, command.opaque), None) is not None

    def handle_collected(self) -> None:
        """Handles what calls have asked for since the last time, and what the answers to that ask for."""
        while self._collected:
            collected, self._collected = self._collected, {}
            asked = [(client, asker, command) for (client, _), (asker, command) in collected.items()]
            for (client, asker), together in groupby(asked, key=lambda each: each[:2]):
                client.proven = asker
                self._dispatcher.handle_commands(client, [command for _, _, command in together])

    def note_reader(self, call: Call, group: str, topic: str, expression: Any) -> None:
        """A client receives: it is a member of its group."""
        self.sessions.note_reader(call, group, topic, expression)

    def release(self, client: GrpcClient) -> None:
        """A client has said goodbye: what it has in hand is for others."""
        self.consuming.release(client)

    # -- from time to time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Forgets clients that are gone, and gives those that are at work more time. Called every few seconds."""
        now_ns = self._clock.elapsed_ns()
        for client in list(self._clients.values()):
            if client.lost_at_ns is not None and now_ns - client.lost_at_ns >= LOST_MS_MAX * 1_000_000:
                self._forget(client)
        self.consuming.renew()
        self._dispatcher.pulse.nudge()

    def _forget(self, client: GrpcClient) -> None:
        del self._clients[client.user_name, client.client_id]
        self.consuming.release(client)
        self._dispatcher.forget(client)
