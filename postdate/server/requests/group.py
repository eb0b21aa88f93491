"""What consumers ask for besides pulls: heartbeats, members, offsets, locks, send-backs."""

from collections.abc import Mapping
from typing import Any

from postdate.broker.broker import Broker
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import DiskFull, FlowControl, LogFailed
from postdate.message import GROUP_TOPIC_CHARACTERS_MAX, RETRY_TOPIC_PREFIX, Message, check_group
from postdate.server.answers import when_settled
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.auto_creation import Birth
from postdate.server.requests.pull import Pulls, check_expression, check_filter
from postdate.server.requests.retries import returned
from postdate.server.requests.send import retry_times_max
from postdate.server.sessions.locks import Locks
from postdate.server.sessions.members import Members
from postdate.server.sessions.offsets import Offsets
from postdate.server.sessions.senders import Senders
from postdate.storage import record as records
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.record import Record
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, encode, reply
from postdate.wire.ids import message_id

_FIRST_RETRY_LEVEL = 3  # 10 s by default; each further retry is one level later


class Consumers:
    """Serves one broker."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        pulse: Pulse,
        pulls: Pulls,
        birth: Birth,
        members: Members[Connection],
        senders: Senders[Connection],
        offsets: Offsets,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._pulse = pulse
        self._pulls = pulls
        self._birth = birth
        self._members = members
        self._senders = senders
        self._offsets = offsets
        self._locks = Locks(broker.limits.lock_expiry_ms * 1_000_000, broker.limits.locks_max)

    # -- members ------------------------------------------------------------------------------------------------

    def heart_beat(self, connection: Connection, command: Command, _: Mapping[str, Any]) -> bytes:
        heartbeat = bodies.decode_heartbeat(command.body)
        for consumer in heartbeat.consumers:
            check_group(consumer.group)
            for subscription in consumer.subscriptions:
                check_expression(subscription.expression, self._broker.limits.expression_characters_max)
        self._members.admit(heartbeat, connection)
        self._make_topics(heartbeat)
        said = (connection, self._clock.elapsed_ns(), command.language, command.version)
        self._senders.beat(heartbeat, *said)
        changed = self._members.beat(heartbeat, *said)
        answer = reply(command, codes.SUCCESS, {"IS_SUPPORT_HEART_BEAT_V2": "false", "IS_SUB_CHANGE": "true"})
        if changed:
            self._pulls.release(connection)
        self.notify(changed)
        return answer

    def _make_topics(self, heartbeat: bodies.Heartbeat) -> None:
        """Groups with their retry topics, and topics that are subscribed to. Making one waits for the disk, and
        everybody with it. Of very many groups, some are made and the rest is refused until the next heartbeat; of very
        many subscriptions, the rest is made by the next heartbeats, or by whoever uses them first.
        """
        has_topic, left = self._broker.view.has_topic, self._broker.limits.heartbeat_topics_max
        for consumer in heartbeat.consumers:
            if not has_topic(RETRY_TOPIC_PREFIX + consumer.group):
                if not left:
                    raise FlowControl("heartbeat_topics_max: so many groups are made by one heartbeat; send it again")
                self._birth.retry_topic(consumer.group)
                left -= 1
        for name in {each.topic for consumer in heartbeat.consumers for each in consumer.subscriptions}:
            if left and not has_topic(name):
                self._birth.subscribed(name)
                left -= has_topic(name)

    def unregister(self, _connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        group = asked["consumerGroup"]
        if group and self._members.leave(asked["clientID"], group):
            self.notify({group})
        self._senders.leave(asked["clientID"], asked["producerGroup"])
        return reply(command, codes.SUCCESS)

    def consumer_list(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        members = self._members.of(asked["consumerGroup"])
        if not members:
            remark = f"no consumer of group {asked['consumerGroup']!r} is connected"
            return reply(command, codes.SYSTEM_ERROR, remark=remark)
        return reply(command, codes.SUCCESS, body=bodies.encode_consumer_ids(member.client_id for member in members))

    def check_subscription(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Asked only for filters that are not by tag, which we do not have."""
        data = bodies.load(command.body, "a subscription").get("subscriptionData")
        check_filter(data.get("expressionType") or "TAG" if isinstance(data, dict) else "TAG")
        return reply(command, codes.SUCCESS)

    def notify(self, groups: set[str]) -> None:
        """Tells every member of these groups that their company has changed, so that they share out anew."""
        for group in groups:
            notice = Command(codes.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}, flag=codes.FLAG_ONEWAY)
            frame, members = encode(notice), self._members.of(group)
            for connection in {member.link for member in members}:
                connection.notify(frame)
            if not members:
                self._offsets.forget_moves(group)

    def drop(self, connection: Connection) -> None:
        """The connection is gone, and with it the members behind it."""
        self._senders.drop(connection)
        self.notify(self._members.drop(connection))

    def expire(self) -> None:
        now_ns = self._clock.elapsed_ns()
        silent_since_ns = now_ns - self._broker.limits.client_expiry_ms * 1_000_000
        self._senders.expire(silent_since_ns)
        self.notify(self._members.expire(silent_since_ns))
        self._locks.expire(now_ns)

    # -- offsets ------------------------------------------------------------------------------------------------

    def query_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        group, topic, queue_id = asked["consumerGroup"], asked["topic"], asked["queueId"]
        offset = self._offsets.get(group, topic, queue_id)
        if offset is None and topic == RETRY_TOPIC_PREFIX + group:
            self._birth.retry_topic(group)
        if offset is None and asked["setZeroIfNotFound"] and self._is_fresh(topic, queue_id):
            offset = 0
        if offset is None:
            remark = f"group {group!r} has committed no offset for queue {queue_id} of topic {topic!r}"
            return reply(command, codes.QUERY_NOT_FOUND, remark=remark)
        return reply(command, codes.SUCCESS, {"offset": offset})

    def _is_fresh(self, topic: str, queue_id: int) -> bool:
        """Whether a new group begins this queue at its first message, whatever it says about where to begin.

        A consumer learns of a new topic, or of a queue that was added, up to half a minute late. Beginning at the end
        then would skip what came meanwhile.
        """
        low, high = self._broker.offsets(topic, queue_id)
        if low > 0:
            return False
        head = self._broker.view.place(topic, queue_id, 0) if high else self._broker.log.end
        return head < CHUNK_BIT and self._broker.log.end - head <= self._broker.limits.fresh_queue_bytes

    def update_offset(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        group, topic, queue_id = asked["consumerGroup"], asked["topic"], asked["queueId"]
        if self._offsets.is_moving(group, topic, queue_id):
            return reply(command, codes.SUCCESS, remark="not written: an operator has moved the group meanwhile")
        self._birth.group(group)
        if command.is_oneway:
            self._broker.offsets(topic, queue_id)
            self._offsets.note(group, topic, queue_id, max(asked["commitOffset"], 0))
            return None
        offset, asked_by = asked["commitOffset"], command.without_content()
        answer = when_settled(connection, asked_by, lambda _: reply(asked_by, codes.SUCCESS))
        ticket = self._offsets.commit(group, topic, queue_id, offset, self._clock.now_ms())

        def written(ticket: Ticket) -> None:
            if ticket.error is None:
                self._offsets.written(group, {(topic, queue_id): offset})
            answer(ticket)

        self._pulse.expect(connection, ticket, written)
        return None

    def write_offsets(self) -> None:
        """Writes the offsets that nobody waits for."""
        if self._offsets.is_empty:
            return
        try:
            self._offsets.write(self._clock.now_ms())
        except (DiskFull, LogFailed):
            return  # said already by whoever fires; they stay noted, and the next try comes soon
        self._pulse.nudge()

    def max_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"offset": self._bounds(asked)[1]})

    def min_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"offset": self._bounds(asked)[0]})

    def _bounds(self, asked: Mapping[str, Any]) -> tuple[int, int]:
        return self._broker.offsets(asked["topic"], asked["queueId"])

    def search_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """The first offset visible at or after an instant; the last one at or before it for boundary UPPER."""
        topic, queue_id, at_ms = asked["topic"], asked["queueId"], asked["timestamp"]
        offset = self._broker.search(topic, queue_id, at_ms)
        if asked["boundaryType"].upper() == "UPPER":
            offset = max(self._broker.search(topic, queue_id, at_ms + 1) - 1, self._bounds(asked)[0])
        return reply(command, codes.SUCCESS, {"offset": offset})

    def earliest_time(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """When the first message that is still there became visible; -1 where there is none."""
        low, high = self._bounds(asked)
        at_ms = self._broker.view.visible_at_ms(asked["topic"], asked["queueId"], low) if low < high else -1
        return reply(command, codes.SUCCESS, {"timestamp": at_ms})

    # -- locks --------------------------------------------------------------------------------------------------

    def lock(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_lock(command.body)
        check_group(request.group)
        named = {(queue.topic, queue.queue_id): queue for queue in request.queues if _may_exist(queue)}
        taken = self._locks.lock(request.group, request.client_id, list(named), self._clock.elapsed_ns())
        return reply(command, codes.SUCCESS, body=bodies.encode_locked(named[queue] for queue in taken))

    def unlock(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_lock(command.body)
        queues = [(queue.topic, queue.queue_id) for queue in request.queues]
        self._locks.unlock(request.group, request.client_id, queues)
        return reply(command, codes.SUCCESS)

    # -- send-backs ---------------------------------------------------------------------------------------------

    def send_back(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        """A consumer could not do its work: the message comes again later, or, past the limit, is a dead letter."""
        data = self._broker.read_record(asked["offset"])
        if not data:
            return reply(command, codes.SYSTEM_ERROR, remark=f"there is no message at offset {asked['offset']}")
        record, now_ms = records.decode(data), self._clock.now_ms()
        due = self._broker.due_of(record)
        if due.at_ms > now_ms and not due.level:
            # Nobody has received it: whoever asks has the offset from its producer. Of a level nobody can say, it may
            # have meant less when the message was sent.
            return reply(command, codes.SYSTEM_ERROR, remark=f"the message at offset {asked['offset']} is not due yet")
        ticket = self._broker.send([self._again(connection, record, asked)], now_ms)
        asked_by = command.without_content()
        self._pulse.expect(
            connection, ticket, when_settled(connection, asked_by, lambda _: reply(asked_by, codes.SUCCESS))
        )
        return None

    def _again(self, connection: Connection, record: Record, asked: Mapping[str, Any]) -> Message:
        """The message as it comes again."""
        group, level = asked["group"], asked["delayLevel"]
        limit = retry_times_max(self._broker, group, asked["maxReconsumeTimes"])
        origin = asked["originMsgId"] or message_id(connection.broker_host, asked["offset"])
        times = record.reconsume_times
        if level < 0 or times >= limit:
            return returned(record, self._birth.dead_letter_topic(group).name, origin, times + 1)
        topic = self._birth.retry_topic(group).name
        return returned(record, topic, origin, times + 1, level or _FIRST_RETRY_LEVEL + times)


def _may_exist(queue: bodies.QueueName) -> bool:
    """No topic has a longer name, and what is locked is kept."""
    return len(queue.topic) <= GROUP_TOPIC_CHARACTERS_MAX
