"""Receiving: pops of the older protocol, with long polling, renewed leases, and messages as RocketMQ 5 has them.

A receive pops from its topic, and from the retry topic of its group, where members that speak the older protocol put
what has failed. The first to bring something answers it; what nobody reads any more goes back, as if never given.

A push consumer does not say for how long it needs a message. Its leases are short and renewed while it is there: a
broker that crashes gives them again soon, and the client's handle stays good all the time. A message that went to a
connection of which nothing has come since is not renewed: it may have gone nowhere.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from postdate.broker.broker import Broker
from postdate.broker.leasing import LeaseHandle
from postdate.broker.writing import Ticket
from postdate.client.received import decompress
from postdate.clock import Clock
from postdate.errors import DiskFull, LogFailed, ProtocolError, TopicNotFound, UsageError
from postdate.message import RETRY_TOPIC_PREFIX, check_group, check_topic
from postdate.server.dispatch import Dispatcher
from postdate.server.grpc.call import Call
from postdate.server.grpc.client import GrpcClient, LeaseName, RenewedLease
from postdate.server.grpc.requests import CallRequests, is_in_order, name_of
from postdate.server.grpc.statuses import OK_STATUS, common_status, make_status, status_of
from postdate.wire import codes, messaging
from postdate.wire.frame import Command
from postdate.wire.ids import encode_receipt_handle, parse_receipt_handle
from postdate.wire.messaging import CallError
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from postdate.wire.rights import SUB, ask_group, ask_topic
from postdate.wire.translation import make_message, of_ms, to_ms

_BATCH_MAX = 32  # messages of one receive, RocketMQ's
_POLLING_MS_MAX = 20_000
_MARGIN_MS = 500  # a receive ends this long before its deadline: an answer that comes later is lost on its way
_DEADLINE_MS_MIN = 1_000  # a receive that has less time would be over before it begins
_INVISIBLE_MS_MIN, _INVISIBLE_MS_MAX = 10_000, 12 * 3_600_000  # RocketMQ's, of a lease that a client asks for
_CHANGED_MS_MIN = 1_000  # clients that know no delays ask for 0, and would have all tries over in milliseconds
_RELEASED_MS = 1_000  # what a client had that is gone comes again after this, as in RocketMQ
LEASE_MS, RENEW_MS = 60_000, 20_000  # how long a renewed lease lasts, and how long before its end it is renewed
_RENEWED_MS_MAX = 3 * 3_600_000  # how long one message is renewed in all, RocketMQ's
_SILENT_MS_MAX = 120_000  # a client that has asked for nothing for so long is gone, though its connection is open
_ATTEMPT_CHARACTERS_MAX = 64  # of the id of a receive, a UUID; longer ones are not remembered
_ENTRIES_MAX = 1_024  # of one call: each costs some 30 us, and others wait for all of them
# What the bodies of one receive may unfold to, all together: some kilobytes can become gigabytes. Beyond that they are
# delivered as they are, for the client to unfold.
_UNFOLDED_BYTES_MAX = 16 << 20
_GONE = frozenset({codes.NO_MESSAGE, codes.TOPIC_NOT_EXIST, codes.SUBSCRIPTION_GROUP_NOT_EXIST})


class _Receive:
    """A receive that is not answered yet."""

    __slots__ = (
        "attempt_id", "call", "commands", "count_max", "group", "handles", "invisible_ms", "is_renewed", "messages",
        "problem", "room_bytes",
    )  # fmt: skip

    def __init__(
        self, call: Call, group: str, count_max: int, invisible_ms: int, is_renewed: bool, attempt_id: str
    ) -> None:
        self.call, self.group, self.count_max = call, group, count_max
        self.invisible_ms, self.is_renewed, self.attempt_id = invisible_ms, is_renewed, attempt_id
        self.commands: dict[int, Command] = {}  # pops whose answers did not come yet, by opaque
        self.messages: list[Any] = []
        self.handles: list[LeaseHandle] = []  # theirs
        self.problem: Any = None  # the status of a pop that failed
        self.room_bytes = _UNFOLDED_BYTES_MAX  # for bodies that are unfolded

    def unfold(self, body: bytes, sys_flag: int) -> bytes:
        """Raises ProtocolError for a body that cannot be unfolded, or not any more."""
        plain = decompress(body, sys_flag, self.room_bytes)
        self.room_bytes -= len(plain)
        return plain


class Consuming:
    """Answers calls of consumers."""

    def __init__(self, requests: CallRequests, dispatcher: Dispatcher, broker: Broker, clock: Clock) -> None:
        self._requests, self._dispatcher, self._broker, self._clock = requests, dispatcher, broker, clock
        self._holding: set[GrpcClient] = set()  # clients with leases that are renewed
        self._without_retries: dict[str, set[_Receive]] = {}  # by group: receives that look at its topic alone
        self._loop = asyncio.get_running_loop()

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, call: Call, request: Any) -> None:
        group = name_of(request.group, check_group, messaging.ILLEGAL_GROUP)
        topic = name_of(request.message_queue.topic, check_topic, messaging.ILLEGAL_TOPIC)
        expression = request.filter_expression
        if expression.type not in (0, messaging.FILTER_TAG):
            raise CallError(messaging.ILLEGAL_FILTER, "filters are by tag here, not by SQL")
        count_max = min(max(request.batch_size, 1), _BATCH_MAX)
        invisible_ms = LEASE_MS if request.auto_renew else to_ms(request.invisible_duration)
        if not request.auto_renew:
            self._check_invisible(invisible_ms, _INVISIBLE_MS_MIN)
        polling_ms = _polling_ms(call, request)
        attempt_id = request.attempt_id if len(request.attempt_id) <= _ATTEMPT_CHARACTERS_MAX else ""
        self._take_back(call.client, group, call.client.attempts.pop(attempt_id, ()))
        receive = _Receive(call, group, count_max, invisible_ms, request.auto_renew, attempt_id)
        call.on_end = partial(self._give_up, receive)
        self._requests.note_reader(call, group, topic, expression)
        if self._has_retries(group):
            self._pop(receive, RETRY_TOPIC_PREFIX + group, polling_ms)
        else:
            self._without_retries.setdefault(group, set()).add(receive)
        self._pop(receive, topic, polling_ms, expression.expression)

    def _pop(self, receive: _Receive, topic: str, polling_ms: int, expression: str = "") -> None:
        fields = {
            "consumerGroup": receive.group, "topic": topic, "queueId": -1, "maxMsgNums": receive.count_max,
            "exp": expression or "*", "expType": "TAG", "invisibleTime": receive.invisible_ms, "pollTime": polling_ms,
            "initMode": 0, "order": is_in_order(self._broker, receive.group),
        }  # fmt: skip
        command = self._requests.ask(receive.call, Request.POP_MESSAGE, fields, partial(self._take_pop, receive))
        receive.commands[command.opaque] = command

    def _has_retries(self, group: str) -> bool:
        """Whether anything was ever sent back to a group. Most have only members that fail in place."""
        topic = RETRY_TOPIC_PREFIX + group
        return self._broker.view.has_topic(topic) and self._broker.offsets(topic, 0)[1] > 0

    def note_grown(self, queue_numbers: Iterable[int]) -> None:
        """Queues have grown. Has receives that began before the first message of a retry topic look there."""
        if not self._without_retries:
            return
        for topic in {self._broker.view.topic_of_queue(number) for number in queue_numbers}:
            group = topic.removeprefix(RETRY_TOPIC_PREFIX)
            if group == topic or group not in self._without_retries:
                continue
            for receive in self._without_retries.pop(group):
                self._pop(receive, topic, 0)
            self._loop.call_soon(self._requests.handle_collected)  # not now: the batch is still being handled

    def _take_pop(self, receive: _Receive, answer: Command) -> None:
        """Takes in what a pop has brought."""
        del receive.commands[answer.opaque]
        call = receive.call
        if answer.code == codes.SUCCESS:
            self._take_messages(receive, answer)
        elif answer.code not in (codes.PULL_NOT_FOUND, codes.POLLING_TIMEOUT):
            receive.problem = status_of(answer)
        if receive.messages or receive.problem is not None:
            self._end_pops(receive)
        if receive.commands or call.is_over:
            return
        self._forget(receive)
        if receive.messages:
            call.send(status=OK_STATUS)
            for message in receive.messages:
                call.send(message=message)
            if receive.is_renewed and receive.attempt_id:
                call.client.note_attempt(receive.attempt_id, receive.handles)
        else:
            nothing = make_status(messaging.NO_MESSAGE, "no message has come in this time")
            call.send(status=receive.problem or nothing)
        call.send(delivery_timestamp=of_ms(self._clock.now_ms()))
        call.end()

    def _take_messages(self, receive: _Receive, answer: Command) -> None:
        popped_at_ms, client = int(answer.fields["popTime"]), receive.call.client
        for record in decode_records(answer.body):
            handle = LeaseHandle(record.topic, record.queue_id, record.queue_offset, popped_at_ms)
            if receive.call.is_over or len(receive.messages) >= receive.count_max:
                self._give_back(client, receive.group, handle, 0, is_begun=False)
                continue
            if receive.is_renewed:
                until_ms = popped_at_ms + receive.invisible_ms
                name = (receive.group, *handle[:3])
                stream = receive.call.stream
                client.leases[name] = RenewedLease(
                    popped_at_ms, until_ms, popped_at_ms + _RENEWED_MS_MAX, stream, stream.read_count
                )
                self._holding.add(client)
            receive.handles.append(handle)
            text, invisible_ms = encode_receipt_handle(*handle), receive.invisible_ms
            receive.messages.append(make_message(record, unfold=receive.unfold, handle=text, invisible_ms=invisible_ms))

    def _forget(self, receive: _Receive) -> None:
        waiting = self._without_retries.get(receive.group)
        if waiting is not None:
            waiting.discard(receive)
            if not waiting:
                del self._without_retries[receive.group]

    def _end_pops(self, receive: _Receive) -> None:
        """Ends the pops of a receive that still wait."""
        client = receive.call.client
        for opaque, command in list(receive.commands.items()):
            if self._requests.withdraw(client, command) or self._dispatcher.pops.cancel(client, opaque):
                client.forget_command(command)
                del receive.commands[opaque]

    def _give_up(self, receive: _Receive) -> None:
        """The client does not wait for its receive any more: what had come for it goes back, as will what still comes.
        What it was sent and has not read comes again when its lease ends.
        """
        self._forget(receive)
        self._end_pops(receive)
        self._take_back(receive.call.client, receive.group, receive.handles)

    def _take_back(self, client: GrpcClient, group: str, handles: Sequence[LeaseHandle]) -> None:
        """Gives messages back that a client was to have, and has not seen. A client that repeats a receive under the
        same id has not got the answer to the first one.
        """
        for handle in handles:
            name = (group, *handle[:3])
            lease = client.leases.get(name)
            if lease is not None and lease.popped_at_ms != handle.popped_at_ms:
                continue  # it has it by now, by another receive
            self._forget_lease(client, name)
            self._give_back(client, group, handle, 0, is_begun=False)

    def _give_back(
        self, client: GrpcClient, group: str, handle: LeaseHandle, after_ms: int, *, is_begun: bool
    ) -> None:  # fmt: skip
        """Has a message come again that a client will not answer for; one that it has not seen does not count."""
        if not self._broker.view.has_topic(handle.topic):
            return
        with suppress(DiskFull, LogFailed):  # the pulse has logged it; the message comes again when its lease ends
            now_ms, change = self._clock.now_ms(), self._broker.leases.change_invisible
            ticket = change(group, handle, after_ms, now_ms, is_begun=is_begun)
            self._dispatcher.pulse.expect(client, ticket, lambda _: None)

    # -- acknowledging ------------------------------------------------------------------------------------------

    def acknowledge(self, call: Call, request: Any) -> None:
        group = name_of(request.group, check_group, messaging.ILLEGAL_GROUP)
        if not request.entries:
            raise CallError(messaging.BAD_REQUEST, "the call acknowledges no message")
        if len(request.entries) > _ENTRIES_MAX:
            raise CallError(
                messaging.BAD_REQUEST, f"the call has {len(request.entries)} entries, the limit is {_ENTRIES_MAX}"
            )
        statuses: list[Any] = [None] * len(request.entries)

        def note(index: int, status: Any) -> None:
            statuses[index] = status
            if None not in statuses:
                entries = [
                    {"message_id": entry.message_id, "receipt_handle": entry.receipt_handle, "status": each}
                    for entry, each in zip(request.entries, statuses, strict=True)
                ]
                call.answer(status=common_status(statuses), entries=entries)

        handles: list[LeaseHandle | None] = []
        for index, entry in enumerate(request.entries):
            try:
                handles.append(self._find_handle(entry.receipt_handle))
            except CallError as error:
                handles.append(None)
                note(index, make_status(error.code, str(error)))
        for index, handle in enumerate(handles):
            if handle is not None:
                done = partial(self._take_ack, call.client, (group, *handle[:3]), partial(note, index))
                self._requests.ask(call, Request.ACK_MESSAGE, _popped_fields(group, handle), done)

    def _take_ack(self, client: GrpcClient, name: LeaseName, note: Any, answer: Command) -> None:
        if answer.code == codes.SUCCESS:
            self._forget_lease(client, name)
        note(_handle_status(answer))

    def _check_invisible(self, invisible_ms: int, least_ms: int) -> None:
        """Raises CallError."""
        limit_ms = min(_INVISIBLE_MS_MAX, self._broker.settings.invisible_ms_max)
        if not least_ms <= invisible_ms <= limit_ms:
            raise CallError(
                messaging.ILLEGAL_INVISIBLE_TIME,
                f"the invisible duration is {invisible_ms} ms, expected {least_ms} to {limit_ms}",
            )

    def _find_handle(self, text: str) -> LeaseHandle:
        """Returns the lease that a handle names. Raises CallError for one that can never be good, as its queue does not
        exist.
        """
        try:
            handle = LeaseHandle(*parse_receipt_handle(text))
            self._broker.view.queue_number(handle.topic, handle.queue_id)
        except (ProtocolError, TopicNotFound, UsageError) as error:
            raise CallError(messaging.INVALID_HANDLE, str(error)) from error
        return handle

    def change_invisible(self, call: Call, request: Any) -> None:
        """A consumer wants a message for longer, or has failed and wants it again later."""
        group = name_of(request.group, check_group, messaging.ILLEGAL_GROUP)
        try:
            handle = self._find_handle(request.receipt_handle)
            invisible_ms = to_ms(request.invisible_duration)
            self._check_invisible(invisible_ms, 0)
        except CallError as error:  # with the handle, which some clients take over from every answer
            call.answer(status=make_status(error.code, str(error)), receipt_handle=request.receipt_handle)
            return
        fields = {
            **_popped_fields(group, handle), "invisibleTime": max(invisible_ms, _CHANGED_MS_MIN),
            "notBegun": request.suspend,
        }  # fmt: skip

        def answer(reply: Command) -> None:
            text = request.receipt_handle
            if reply.code == codes.SUCCESS:
                self._forget_lease(call.client, (group, *handle[:3]))
                text = encode_receipt_handle(*handle._replace(popped_at_ms=int(reply.fields["popTime"])))
            call.answer(status=_handle_status(reply), receipt_handle=text)

        self._requests.ask(call, Request.CHANGE_MESSAGE_INVISIBLETIME, fields, answer)

    def forward(self, call: Call, request: Any) -> None:
        """A consumer that keeps order has given a message up: it becomes a dead letter."""
        group = name_of(request.group, check_group, messaging.ILLEGAL_GROUP)
        call.asker.require(ask_group(group, SUB))
        try:
            handle = self._find_handle(request.receipt_handle)
            call.asker.require(ask_topic(handle.topic, SUB))
            ticket = self._dispatcher.pops.bury(group, handle)
        except CallError:  # clients repeat everything but OK for ever
            ticket = None
        if ticket is None:
            call.answer(status=make_status(messaging.OK, _STALE))
            return

        def settle(ticket: Ticket) -> None:
            self._forget_lease(call.client, (group, *handle[:3]))
            if ticket.error is not None:
                self._requests.refuse(call, ticket.error)
            else:
                call.answer(status=OK_STATUS)

        self._dispatcher.pulse.expect(call.client, ticket, settle)
        self._dispatcher.pulse.nudge()

    # -- leases that are renewed --------------------------------------------------------------------------------

    def _forget_lease(self, client: GrpcClient, name: LeaseName) -> None:
        client.leases.pop(name, None)
        if not client.leases:
            self._holding.discard(client)

    def renew(self) -> None:
        """Renews the leases that end soon, of clients that are there. Called every few seconds."""
        now_ms, now_ns = self._clock.now_ms(), self._clock.elapsed_ns()
        for client in list(self._holding):
            if client.lost_at_ns is not None:
                continue
            if now_ns - client.called_at_ns >= _SILENT_MS_MAX * 1_000_000:
                self.release(client)
                continue
            for name, lease in list(client.leases.items()):
                if now_ms >= lease.renewed_until_ms or now_ms >= lease.until_ms:
                    self._forget_lease(client, name)
                elif lease.until_ms - now_ms <= RENEW_MS and lease.stream.read_count > lease.read_count:
                    self._renew(client, name, lease, now_ms)

    def _renew(self, client: GrpcClient, name: LeaseName, lease: RenewedLease, now_ms: int) -> None:
        client.leases[name] = lease._replace(until_ms=now_ms + LEASE_MS)
        group, topic, queue_id, offset = name
        if not self._broker.view.has_topic(topic):
            self._forget_lease(client, name)
            return
        handle = LeaseHandle(topic, queue_id, offset, lease.popped_at_ms)
        try:
            ticket = self._broker.leases.renew(group, handle, LEASE_MS, now_ms)
        except (DiskFull, LogFailed):  # the pulse has logged it; the next round tries again
            client.leases[name] = lease
            return

        def settle(ticket: Ticket) -> None:
            if ticket.error is None and not ticket.answer:
                self._forget_lease(client, name)

        self._dispatcher.pulse.expect(client, ticket, settle)

    def release(self, client: GrpcClient) -> None:
        """Gives what a client had in hand, that is gone, to others soon."""
        self._holding.discard(client)
        leases, client.leases = client.leases, {}
        for (group, topic, queue_id, offset), lease in leases.items():
            handle = LeaseHandle(topic, queue_id, offset, lease.popped_at_ms)
            self._give_back(client, group, handle, _RELEASED_MS, is_begun=True)
        self._dispatcher.pulse.nudge()


_STALE = "the handle is no longer valid, and nothing was moved: the message is acknowledged, or was given again"


def _polling_ms(call: Call, request: Any) -> int:
    """Returns how long a receive may wait. Raises CallError where it has no time at all."""
    polling_ms = to_ms(request.long_polling_timeout) or _POLLING_MS_MAX
    if call.timeout_ms is not None:
        if call.timeout_ms < _DEADLINE_MS_MIN:
            raise CallError(
                messaging.BAD_REQUEST, f"the deadline is {call.timeout_ms} ms away, expected {_DEADLINE_MS_MIN} or more"
            )
        polling_ms = min(polling_ms, call.timeout_ms - _MARGIN_MS)
    return min(polling_ms, _POLLING_MS_MAX)


def _handle_status(answer: Command) -> Any:
    """Returns the status for a handle. One that can never be good has a code of its own: clients repeat all else."""
    if answer.code in _GONE:
        return make_status(messaging.INVALID_HANDLE, answer.remark or "")
    return status_of(answer)


def _popped_fields(group: str, handle: LeaseHandle) -> dict[str, Any]:
    """Returns the fields of the older protocol that name a lease; its handle has eight words, of which we read one."""
    words = f"0 {handle.popped_at_ms} 0 0 0 0 {handle.queue_id} {handle.offset}"
    return {
        "consumerGroup": group, "topic": handle.topic, "queueId": handle.queue_id, "offset": handle.offset,
        "extraInfo": words,
    }  # fmt: skip
