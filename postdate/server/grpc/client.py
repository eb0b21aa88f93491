"""A client of the gRPC port, as the objects that answer requests know it: as one connection.

RocketMQ 5 asks for what the older protocol asks for, in other words. So a call becomes a request of the older protocol,
goes the way of all requests (gate, audit, limits, members, pops and pulls of one group), and its answer comes back to
`write`. What a client is (a member of groups, a producer) belongs to its id, not to a connection: it may have several
connections, and may lose one and come back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from postdate.broker.leasing import LeaseHandle
from postdate.message import INT32_MAX
from postdate.server.connection import Connection, Handler
from postdate.server.peer import Peer
from postdate.wire import codes
from postdate.wire.bodies import Subscription
from postdate.wire.frame import Command, Frames, decode

_ATTEMPTS_MAX = 64  # receives of a client that it may repeat: it has one at a time for each queue that it reads
OnReply = Callable[[Command], None]
LeaseName = tuple[str, str, int, int]  # group, topic, queue id, offset


class RenewedLease(NamedTuple):
    """A message that a client has until it says otherwise."""

    popped_at_ms: int  # its handle's
    until_ms: int  # when the lease ends unless it is renewed
    renewed_until_ms: int  # from then on it is not renewed any more
    stream: Any  # the connection that has brought it to the client
    read_count: int  # how often that had been read before: if never since, the client may not have got the message


class GrpcClient(Connection):
    """One client, by its id."""

    takes_questions = False

    def __init__(
        self, handler: Handler, user_name: str, client_id: str,
        take_question_answer: Callable[["GrpcClient", Command], None],
    ) -> None:  # fmt: skip
        super().__init__(handler)
        self.user_name, self.client_id = user_name, client_id
        self.language, self.version = "", 0
        self.subscriptions: dict[str, dict[str, Subscription]] = {}  # by group and topic
        self.published: tuple[str, ...] = ()  # topics that it sends to
        self.telemetry: Any = None  # the call by which it takes commands of ours, the newest
        self.leases: dict[LeaseName, RenewedLease] = {}  # that are renewed while it is there
        self.attempts: dict[str, Sequence[LeaseHandle]] = {}  # by the ids of its last receives: what it was sent
        self.peers: set[Peer] = set()  # the connections on which it has called, and that are open
        self.called_at_ns = 0  # when it has last asked for something
        self.lost_at_ns: int | None = None  # since when there is none
        self.beaten_at_ns: dict[str, int] = {}  # by group: when it was last noted as a member
        self._on_reply: dict[int, OnReply] = {}  # by opaque
        self._opaque = 0
        self._take_question_answer = take_question_answer

    def note_peer(self, peer: Peer, handler: Handler) -> None:
        """A call has come on this connection."""
        self.lost_at_ns = None
        if peer not in self.peers:
            self.peers.add(peer)
            self.certificate_name = peer.certificate_name
            self.host, self.address = peer.host, ""
            self._note_address(handler.address, peer.local_address)
            self.note_paused()

    def forget_peer(self, peer: Peer, now_ns: int) -> None:
        """One of its connections has ended."""
        self.peers.discard(peer)
        self.note_paused()
        if not self.peers:
            self.lost_at_ns = now_ns

    @property
    def is_worth_waiting(self) -> bool:
        """Whether something would be lost with it if it comes back. Others are forgotten with their last connection, so
        that nobody can fill the memory with clients.
        """
        return bool(self.subscriptions or self.leases or self.published)

    def note_paused(self) -> None:
        """A client is given nothing while one of its connections does not read: what it gets may be for that one."""
        self.is_paused = any(peer.is_paused for peer in self.peers)

    def make_command(
        self, code: int, fields: Mapping[str, Any], on_reply: OnReply, body: bytes = b"", flag: int = 0
    ) -> Command:
        """Returns a request of the older protocol; `on_reply` gets its answer."""
        self._opaque = self._opaque % INT32_MAX + 1
        self._on_reply[self._opaque] = on_reply
        return Command(code, dict(fields), body, self._opaque, flag, language=self.language, version=self.version)

    def note_attempt(self, attempt_id: str, handles: Sequence[LeaseHandle]) -> None:
        """It was sent messages. Should it ask again under this id, it has not got them."""
        self.attempts[attempt_id] = handles
        if len(self.attempts) > _ATTEMPTS_MAX:
            del self.attempts[next(iter(self.attempts))]

    def forget_group(self, group: str) -> None:
        self.subscriptions.pop(group, None)
        self.beaten_at_ns.pop(group, None)

    def forget_command(self, command: Command) -> None:
        """Nobody waits for the answer any more."""
        self._on_reply.pop(command.opaque, None)

    def write(self, data: bytes) -> None:
        if self._watched:
            self._look_for_answers(data)
        for frame in Frames(len(data)).feed(data):
            answer = decode(frame)
            if answer.is_response:
                on_reply = self._on_reply.pop(answer.opaque, None)
                if on_reply is not None:
                    on_reply(answer)
            elif not answer.is_oneway:  # a question of an operator, which has no counterpart in this protocol
                remark = "the client speaks gRPC, which has no such question"
                flag = codes.FLAG_RESPONSE
                refused = Command(codes.REQUEST_CODE_NOT_SUPPORTED, {}, b"", answer.opaque, flag, remark)
                self._take_question_answer(self, refused)

    def notify(self, notice: bytes) -> None:
        """Does nothing: these clients ask for their queues, nobody tells them."""

    def expect(self, count: int) -> None:
        self.in_flight += count  # how many there may be is the connection's to say, by its streams

    def count_answered(self, count: int) -> None:
        self.in_flight -= count

    @property
    def buffered_bytes(self) -> int:
        return 0  # they are counted where they are: at its connections
