"""Pops: consumers take messages without owning a queue, and acknowledge each.

    POP_MESSAGE                       leases messages for a while; waits for some, as a pull does
    ACK_MESSAGE, BATCH_ACK_MESSAGE    end the leases of messages that are done
    CHANGE_MESSAGE_INVISIBLETIME      changes when a lease ends: more time, or again later
    RETRY_MESSAGE                     a pulled message failed: it becomes a lease that ends later

A message whose lease ends comes again in the same queue at the same offset, with the number of times it was given
before. RocketMQ copies it to a retry topic instead. Handles have RocketMQ's form.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from postdate.broker.broker import Broker
from postdate.broker.leasing import FailedMessage, LeaseHandle, PoppedMessage, PopRequest, PopResult, RetryTicket
from postdate.broker.view import Key
from postdate.broker.writing import Changes, Ticket
from postdate.clock import Clock
from postdate.errors import (
    DiskFull,
    FlowControl,
    GroupNotFound,
    LogFailed,
    NoPermission,
    PopsFull,
    PostdateError,
    UsageError,
)
from postdate.message import TRIES_MAX, Message, check_group
from postdate.server.answers import refusal, when_settled
from postdate.server.connection import Connection
from postdate.server.lines import Lines
from postdate.server.pulse import Pulse
from postdate.server.requests.pull import Pulls, check_expression, discard, problem_finder, tag_hashes_of
from postdate.server.requests.retries import clean_reason, one_delay, retry_message, retry_times_max
from postdate.server.requests.topic import AutoCreation
from postdate.server.sessions import Sessions
from postdate.storage import record as records
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, reply
from postdate.wire.ids import message_id

_POLL_MS_MAX = 60_000
_MOVED_AT_ONCE = 64  # messages of one step that go to another topic: their bodies are copied
_OUTCOMES = {False: "again", True: "dead"}  # of a message that failed, by whether that was its last try
_IN_ORDER_QUEUE = 999  # RocketMQ's mark of handles that were given in order


class _Held:
    """A pop that waits."""

    __slots__ = ("ask", "asker", "command", "connection", "timer")

    def __init__(self, connection: Connection, command: Command, ask: PopRequest) -> None:
        self.connection, self.command, self.ask = connection, command, ask
        self.asker = connection.asker
        self.timer: asyncio.TimerHandle | None = None


class _Ack(NamedTuple):
    """An acknowledgement that is not written yet."""

    connection: Connection
    command: Command
    handle: LeaseHandle


class _Place(NamedTuple):
    """What held pops wait for."""

    group: str
    topic: str


class Pops:
    """Answers pops and acknowledgements; holds the pops that wait, first come first served."""

    def __init__(
        self, broker: Broker, clock: Clock, pulse: Pulse, sessions: Sessions, pulls: Pulls, creation: AutoCreation,
        lines: Lines,
    ) -> None:  # fmt: skip
        self._broker, self._clock, self._pulse, self._pulls, self._lines = broker, clock, pulse, pulls, lines
        self._creation, self._meter, self._members = creation, sessions.meter, sessions.members
        self._offsets, self._pullers = sessions.offsets, sessions.pullers
        self._popping: dict[_Place, set[Connection]] = {}  # who has ever popped there
        self._popping_of: dict[Connection, set[_Place]] = {}
        self._homeless: set[tuple[str, int]] = set()  # (group, queue number) with messages that nobody pops
        # Groups for which no topic can be made, and what is homeless because of that: until the next tick.
        self._stuck: set[str] = set()
        self._waiting: set[tuple[str, int]] = set()
        self._loop = asyncio.get_running_loop()
        self._held: dict[_Place, dict[_Held, None]] = {}
        self._held_of: dict[Connection, dict[_Held, None]] = {}
        self._acks: dict[str, list[_Ack]] = {}  # by group: those of this read
        self._turn = 0  # which queue the next pop of any queue tries first

    # -- popping ------------------------------------------------------------------------------------------------

    def pop(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        self.write()  # keeps the order of the requests
        ask, command = self._ask(connection, asked), command.without_content()
        place = _Place(ask.group, ask.topic)
        self._popping.setdefault(place, set()).add(connection)
        self._popping_of.setdefault(connection, set()).add(place)
        try:
            if self._give(connection, command, ask):
                return None
        except PopsFull as error:
            return _answer_without_messages(command, codes.POLLING_FULL, ask, self._clock.now_ms(), str(error))
        if asked["pollTime"] <= 0 or command.is_oneway:
            return _answer_without_messages(command, codes.PULL_NOT_FOUND, ask, self._clock.now_ms())
        full = self._pulls.why_full(connection)
        if full:
            return _answer_without_messages(command, codes.POLLING_FULL, ask, self._clock.now_ms(), full)
        held = _Held(connection, command, ask)
        self._held.setdefault(place, {})[held] = None
        self._held_of.setdefault(connection, {})[held] = None
        self._pulls.count_held(connection, 1)
        held.timer = self._loop.call_later(min(asked["pollTime"], _POLL_MS_MAX) / 1_000, self._give_up, held)
        return None

    def _ask(self, connection: Connection, asked: Mapping[str, Any]) -> PopRequest:
        group, topic = asked["consumerGroup"], self._pulls.readable_topic(asked["consumerGroup"], asked["topic"])
        check_expression(asked["exp"] or "", self._broker.limits.expression_characters_max)
        if asked["maxMsgNums"] < 1:
            raise UsageError(f"maxMsgNums is {asked['maxMsgNums']}, expected at least 1")
        queue_ids = [asked["queueId"]]
        if asked["queueId"] < 0:
            # Any queue: starts one further than the last pop, so that no queue starves.
            count = topic.read_queue_count
            self._turn += 1
            queue_ids = [(self._turn + index) % count for index in range(count)]
        return PopRequest(
            group, topic.name, queue_ids, min(asked["maxMsgNums"], self._broker.settings.pull_count_max),
            self._broker.settings.pull_bytes_max, asked["invisibleTime"],
            retry_times_max(self._broker, group, asked["maxReconsumeTimes"]),
            tag_hashes_of(asked["exp"] or "", asked["expType"] or "TAG"),
            from_end=asked["initMode"] == codes.POP_FROM_END, in_order=asked["order"],
            store_host=connection.broker_host, ready_only=frozenset(queue_ids if asked["readyOnly"] else ()),
        )  # fmt: skip

    def _give(self, connection: Connection, command: Command, ask: PopRequest) -> bool:
        """Leases what there is; returns whether there is something. The answer follows when the lease is durable."""
        if self._members.is_barred(ask.group, ask.topic, connection):
            return False
        group, topic, now_ms = ask.group, ask.topic, self._clock.now_ms()
        begins = self._offsets.begin_pop(group, topic, now_ms)
        pulled = self._pullers.queue_ids(group, topic)
        ticket = self._broker.leases.pop(ask._replace(begins=begins, ready_only=ask.ready_only | pulled), now_ms)
        if ticket is None:
            return False
        for queue_id, offset in ticket.moved.items():
            self._offsets.leave_to_broker(group, (topic, queue_id))
            self._pullers.note_popped(group, (topic, queue_id), offset)
        self._pulse.expect(connection, ticket, lambda ticket: self._answer(connection, command, ask, ticket))
        return True

    def _answer(self, connection: Connection, command: Command, ask: PopRequest, ticket: Ticket) -> None:
        if ticket.error is not None:
            connection.write(refusal(command, ticket.error))
            return
        popped: PopResult = ticket.answer
        if not popped.messages:  # the records of returned messages are gone, or the topic is
            connection.write(_answer_without_messages(command, codes.PULL_NOT_FOUND, ask, popped.popped_at_ms))
            return
        self._meter.pulled(ask.topic, ask.group, len(popped.messages))
        view, rest_count = self._broker.view, 0  # messages that the group has not been given yet
        for queue_id in ask.queue_ids if view.has_topic(ask.topic) else ():  # the topic may be gone by now
            low, high = view.offsets(ask.topic, queue_id)
            rest_count += high - (view.committed_offset(ask.group, ask.topic, queue_id) or low)
        fields = _fields(ask, popped.popped_at_ms, rest_count) | _places(popped.messages, ask.in_order)
        connection.write(reply(command, codes.SUCCESS, fields, body=popped.body))

    # -- held pops ----------------------------------------------------------------------------------------------

    def _release(self, held: _Held) -> None:
        discard(self._held, _Place(held.ask.group, held.ask.topic), held)
        discard(self._held_of, held.connection, held)
        self._pulls.count_held(held.connection, -1)
        if held.timer is not None:
            held.timer.cancel()

    def _give_up(self, held: _Held) -> None:
        self._release(held)
        held.connection.write(
            _answer_without_messages(held.command, codes.POLLING_TIMEOUT, held.ask, self._clock.now_ms())
        )

    def wake(self, changes: Changes) -> None:
        """Serves the pops that wait for grown queues or ended leases. The pulse calls it before it may flush."""
        topic_of = self._broker.view.topic_of_queue
        topics = {topic_of(number) for number in changes.grown_queues}
        back = {_Place(group, topic_of(number)) for group, number in changes.ready_again}
        for place in [place for place in self._held if place.topic in topics or place in back]:
            self.serve(*place)
        if self._broker.view.has_spent_leases and not self._stuck:
            self._bury()
        self._homeless |= changes.ready_again
        if self._homeless:
            self._send_on()

    def serve(self, group: str, topic: str) -> None:
        """Serves the pops of a group that wait for a topic."""
        for held in list(self._held.get(_Place(group, topic), ())):
            try:
                if held.connection.is_paused or self._members.is_barred(group, topic, held.connection):
                    continue  # it has not read its last answers yet, or may not have what is there
                if not self._give(held.connection, held.command, held.ask):
                    return  # nor is there anything for the pops after it
            except FlowControl:
                return
            except (PostdateError, OSError) as error:
                held.connection.write(refusal(held.command, error))
            self._release(held)

    def look_again(self, group: str) -> None:
        """Serves the pops of a group that may have more now: of queues that nobody pulls any more, or tags."""
        for place in [place for place in self._held if place.group == group]:
            self.serve(*place)

    def note_members(self, group: str) -> None:
        """The members of a group have changed: what came back may have to go to those that pull."""
        self._homeless.update((group, number) for number in self._broker.view.ready_queues(group))
        if self._homeless:
            self._send_on()

    def cancel(self, connection: Connection, opaque: int) -> bool:
        """Ends one held pop without an answer; returns False where it is not held: it is answered, or soon will be."""
        for held in self._held_of.get(connection, ()):
            if held.command.opaque == opaque:
                self._release(held)
                return True
        return False

    def drop(self, connection: Connection) -> None:
        """Forgets the pops of a connection that has ended."""
        for held in list(self._held_of.get(connection, ())):
            self._release(held)
        self.leave(connection)
        self._popping_of.pop(connection, None)

    def leave(self, connection: Connection, group: str | None = None) -> None:
        """A member of a group, or of all, pops no more."""
        places = self._popping_of.get(connection, set())
        for place in [place for place in places if group in (None, place.group)]:
            places.discard(place)
            self._popping[place].discard(connection)
            if not self._popping[place]:
                del self._popping[place]

    def release(self, connection: Connection, group: str) -> None:
        """Ends the pops of a member that leaves: it is given nothing that it would have to give back."""
        for held in [held for held in self._held_of.get(connection, ()) if held.ask.group == group]:
            self._give_up(held)

    def end_forbidden(self) -> None:
        """Ends the pops of users who may not read any more what they wait for."""
        problem_of = problem_finder()
        for held in [held for pops in self._held_of.values() for held in pops]:
            if held not in self._held_of.get(held.connection, ()):
                continue  # the refusal of another pop has ended this one
            problem = problem_of(held.asker, held.ask.group, held.ask.topic)
            if problem:
                self._release(held)
                held.connection.write(refusal(held.command, NoPermission(problem)))

    def release_all(self) -> None:
        """Ends all pops, because the server stops."""
        for held in [held for pops in self._held_of.values() for held in pops]:
            self._give_up(held)

    # -- acknowledging ------------------------------------------------------------------------------------------

    def acknowledge(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Takes in an acknowledgement for the next `write`: those of a read are written as one record."""
        handle = _handle(asked)
        self._broker.offsets(handle.topic, handle.queue_id)  # raises for a queue that does not exist
        check_group(asked["consumerGroup"])
        self._acks.setdefault(asked["consumerGroup"], []).append(_Ack(connection, command.without_content(), handle))

    def write(self) -> None:
        """Writes the acknowledgements collected since the last write."""
        if not self._acks:
            return
        acks_of, self._acks = self._acks, {}
        for group, acks in acks_of.items():
            try:
                ticket = self._broker.leases.acknowledge(group, [ack.handle for ack in acks], self._clock.now_ms())
            except (PostdateError, OSError) as error:
                _refuse(acks, error)
            else:
                # All are of one read, hence of one connection.
                self._pulse.expect(acks[0].connection, ticket, partial(_answer_acks, acks), len(acks))

    def acknowledge_batch(self, connection: Connection, command: Command, _: Mapping[str, Any]) -> None:
        """Acknowledges messages of several groups. The answer comes with the last group, which is durable last."""
        by_group: dict[str, list[LeaseHandle]] = {}
        for ack in bodies.decode_batch_ack(command.body, self._broker.limits.batch_messages_max):
            handles = [LeaseHandle(ack.topic, ack.queue_id, offset, ack.popped_at_ms) for offset in ack.offsets]
            by_group.setdefault(ack.group, []).extend(handles)
        if not by_group:
            raise UsageError("a batch of acknowledgements names no message")
        tickets = [
            self._broker.leases.acknowledge(group, handles, self._clock.now_ms()) for group, handles in by_group.items()
        ]
        self._pulse.expect(connection, tickets[-1], when_settled(connection, command))

    def change_invisible_time(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Gives a consumer more time, or takes a message back. A reason says that its consumer has failed: it is given
        again after the time that the consumer names, or after its group's (-1), or is a dead letter.
        """
        self.write()
        handle, now_ms, command = _handle(asked), self._clock.now_ms(), command.without_content()
        group, invisible_ms, leases = asked["consumerGroup"], asked["invisibleTime"], self._broker.leases
        reason = clean_reason(asked["reason"])
        if reason:
            ticket = leases.fail(group, handle, one_delay(self._broker, group, invisible_ms), reason, now_ms)
        else:
            ticket = leases.change_invisible(group, handle, invisible_ms, now_ms, is_begun=not asked["notBegun"])
        fields = {"popTime": now_ms, "invisibleTime": invisible_ms, "reviveQid": asked["extraInfo"].split(" ")[3]}
        if isinstance(ticket, RetryTicket):
            fields |= {"invisibleTime": ticket.delay_ms, "outcome": _OUTCOMES[ticket.is_last]}

        def answer(is_good: bool) -> bytes:
            code, remark = (codes.SUCCESS, "") if is_good else (codes.NO_MESSAGE, _STALE)
            return reply(command, code, fields, remark=remark)

        self._pulse.expect(connection, ticket, when_settled(connection, command, answer))

    def retry(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        """Takes in that the consumer of a pulled message has failed: it is given again later, in place, by a pop."""
        self.write()
        group = asked["consumerGroup"]
        self._pulls.readable_topic(group, asked["topic"])
        failed = FailedMessage(
            asked["topic"], asked["queueId"], asked["offset"], asked["reconsumeTimes"], clean_reason(asked["reason"])
        )
        times_max = retry_times_max(self._broker, group, asked["maxReconsumeTimes"])
        delays_ms = one_delay(self._broker, group, asked["delay"])
        ticket = self._broker.leases.retry(group, failed, delays_ms, times_max, self._clock.now_ms())
        if ticket is None:
            return reply(command, codes.NO_MESSAGE, remark="the message is gone: retention has removed it")
        command, fields = command.without_content(), {"delay": ticket.delay_ms, "outcome": _OUTCOMES[ticket.is_last]}
        answer = when_settled(connection, command, lambda _: reply(command, codes.SUCCESS, fields))
        self._pulse.expect(connection, ticket, answer)
        return None

    # -- dead letters -------------------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Moves messages that were given as often as allowed to the dead letter queue of their group. Those of a group
        for which there can be no topic, as there are too many, stay where they are; the others do not wait for them.
        """
        with suppress(DiskFull, LogFailed):  # the pulse has logged it; the next flush or tick tries again
            for key, data in self._broker.leases.spent_messages(_MOVED_AT_ONCE, self._stuck):
                if key[0] in self._stuck:
                    continue
                try:
                    letter = self._copy(key, data, self._creation.use_dead_letter_topic(key[0]).name) if data else None
                except (FlowControl, GroupNotFound) as error:
                    self._note_stuck(key[0], error)
                else:
                    self._broker.leases.move(key, letter, self._clock.now_ms())

    def _note_stuck(self, group: str, error: PostdateError) -> None:
        self._stuck.add(group)
        self._lines.write_seldom(("stuck", group), f"group {group}: messages cannot leave their queue: {error}")

    def bury(self, group: str, handle: LeaseHandle) -> Ticket | None:
        """Makes a message that a consumer has, and has given up, a dead letter. None where its handle is not, or no
        longer, good. Raises UsageError for a queue that does not exist, FlowControl where something else happens to the
        message at the moment.
        """
        key = (group, self._broker.view.queue_number(handle.topic, handle.queue_id), handle.offset)
        lease = self._broker.view.find_lease(key)
        if lease is None or lease.popped_at_ms != handle.popped_at_ms:
            return None
        if self._broker.leases.is_touched(key):  # twice the same, perhaps: it would be two letters
            raise FlowControl("the message is being renewed, acknowledged or moved: try again")
        data = self._broker.read_record(lease.place)
        letter = self._copy(key, data, self._creation.use_dead_letter_topic(group).name) if data else None
        return self._broker.leases.move(key, letter, self._clock.now_ms())

    # -- members that only pull -----------------------------------------------------------------------------------

    def _send_on(self) -> None:
        """Moves messages that came back, and that nobody pops, to the retry topic of their group, which members that
        pull read.
        """
        homeless, self._homeless = self._homeless, set()
        view, left = self._broker.view, _MOVED_AT_ONCE
        for group, number in homeless:
            topic, _ = view.place_of_queue(number)
            is_popped = _Place(group, topic) in self._popping or self._members.reads(group, topic, by_pops=True)
            if is_popped or not self._members.reads(group, topic, by_pops=False):
                continue
            try:
                left -= self._send_on_from(group, number, left)
            except (DiskFull, LogFailed):  # the pulse has logged it; the next flush or tick tries again
                self._homeless.add((group, number))
                continue
            except (FlowControl, GroupNotFound) as error:
                self._waiting.add((group, number))
                self._note_stuck(group, error)
                continue
            if not left:
                self._homeless.add((group, number))

    def _send_on_from(self, group: str, number: int, count_max: int) -> int:
        ready = self._broker.leases.ready_messages(group, number, count_max) if count_max else []
        for key, data in ready:
            copy = self._copy(key, data, self._creation.use_retry_topic(group).name) if data else None
            self._broker.leases.move(key, copy, self._clock.now_ms())
        return len(ready)

    def _copy(self, key: Key, data: bytes, topic: str) -> Message:
        """Returns the copy of a message that leaves its queue for a retry or dead letter topic."""
        record, lease = records.decode(data), self._broker.view.lease(key)
        origin_id = message_id(record.store_host, lease.place)
        source, queue_id = self._broker.view.place_of_queue(key[1])
        times = min(record.reconsume_times + lease.times + 1, TRIES_MAX)
        return retry_message(
            record, topic, origin_id, times, {}, reason=lease.reason, origin=f"{source}/{queue_id}/{key[2]}"
        )

    def tick(self) -> None:
        """Moves what did not fit on the disk, or had no topic, before. Called from time to time."""
        self._homeless |= self._waiting
        self._waiting.clear()
        self._stuck.clear()
        if self._broker.view.has_spent_leases or self._homeless:
            self._bury()
            self._send_on()
            self._pulse.nudge()


def _handle(asked: Mapping[str, Any]) -> LeaseHandle:
    """Returns the lease that a request names. The handle, eight words in RocketMQ, says when the message was popped."""
    words = asked["extraInfo"].split(" ")
    if len(words) < 7 or not words[1].isdecimal() or len(words[1]) > 18:
        raise UsageError(f"extraInfo {asked['extraInfo'][:200]!r} is no handle of a popped message")
    return LeaseHandle(asked["topic"], asked["queueId"], asked["offset"], int(words[1]))


_STALE = "the handle is no longer valid: the message is acknowledged, or was given again"


def _answer_acks(acks: list[_Ack], ticket: Ticket) -> None:
    if ticket.error is not None:
        _refuse(acks, ticket.error)
        return
    for ack, is_good in zip(acks, ticket.answer, strict=True):
        if not ack.command.is_oneway:
            code, remark = (codes.SUCCESS, "") if is_good else (codes.NO_MESSAGE, _STALE)
            ack.connection.write(reply(ack.command, code, remark=remark))


def _refuse(acks: list[_Ack], error: PostdateError | OSError) -> None:
    for ack in acks:
        if not ack.command.is_oneway:
            ack.connection.write(refusal(ack.command, error))


def _fields(ask: PopRequest, popped_at_ms: int, rest_count: int) -> dict[str, Any]:
    mark = _IN_ORDER_QUEUE if ask.in_order else 0
    return {
        "popTime": popped_at_ms, "invisibleTime": ask.invisible_ms, "reviveQid": mark, "restNum": rest_count,
    }  # fmt: skip


def _answer_without_messages(command: Command, code: int, ask: PopRequest, now_ms: int, remark: str = "") -> bytes:
    """Returns an answer without messages. It has the fields all the same: the Java client insists on them."""
    return reply(command, code, _fields(ask, now_ms, 0), remark=remark)


def _places(messages: list[PoppedMessage], in_order: bool) -> dict[str, str]:
    """Returns the places of messages in the order of their records: of each queue the first offset, and all of them."""
    by_queue: dict[int, list[PoppedMessage]] = {}
    for message in messages:
        by_queue.setdefault(message.queue_id, []).append(message)
    places = {
        "startOffsetInfo": ";".join(f"0 {queue} {min(m.offset for m in popped)}" for queue, popped in by_queue.items()),
        "msgOffsetInfo": ";".join(
            f"0 {queue} {','.join(str(m.offset) for m in popped)}" for queue, popped in by_queue.items()
        ),
    }
    if in_order:
        places["orderCountInfo"] = ";".join(
            f"0 qo{queue}%{m.offset} {m.times}" for queue, popped in by_queue.items() for m in popped
        )
    return places
