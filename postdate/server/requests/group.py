"""Consumer groups: their members, offsets, locks, assignments, retries and definitions."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.dead_letters import DONE_GROUP
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import DiskFull, FlowControl, GroupNotFound, LogFailed, NoPermission, ProtocolError, UsageError
from postdate.message import (
    DLQ_TOPIC_PREFIX,
    GROUP_TOPIC_CHARACTERS_MAX,
    RETRY_TOPIC_PREFIX,
    TRIES_MAX,
    check_group,
)
from postdate.server.answers import refusal, when_settled
from postdate.server.asker import Asker
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.pop import Pops
from postdate.server.requests.pull import Pulls, check_expression, check_filter
from postdate.server.requests.retries import (
    TIMES_SETTING,
    check_retry_settings,
    delay_properties,
    retry_message,
    retry_times_max,
)
from postdate.server.requests.topic import AutoCreation, Topics
from postdate.server.sessions import Sessions
from postdate.storage import record as records
from postdate.storage.chunk import CHUNK_BIT
from postdate.wire import bodies, codes
from postdate.wire.allocation import allocate, allocate_by_circle
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, encode, reply
from postdate.wire.ids import message_id
from postdate.wire.requests import ClientRequest
from postdate.wire.rights import GET, SUB, ask_topic

logger = logging.getLogger("postdate.server")

POP, PULL = "POP", "PULL"
_MODES_SETTING = "messageRequestModes"  # a group's setting: how it reads each topic, as its operator has set it
_ANY_QUEUE = -1
_STRATEGIES = {"AVG": allocate, "AVG_BY_CIRCLE": allocate_by_circle}


class Groups:
    """Answers requests about consumer groups, pulls and pops apart."""

    def __init__(
        self, broker: Broker, clock: Clock, pulse: Pulse, sessions: Sessions, creation: AutoCreation, topics: Topics,
        pulls: Pulls, pops: Pops,
    ) -> None:  # fmt: skip
        self._broker, self._clock, self._pulse = broker, clock, pulse
        self._members = sessions.members
        self._senders = sessions.senders
        self._offsets = sessions.offsets
        self._pullers = sessions.pullers
        self._locks = sessions.locks
        self._creation, self._topics, self._pulls, self._pops = creation, topics, pulls, pops
        self._name = broker.settings.broker_name

    # -- members ------------------------------------------------------------------------------------------------

    def take_heartbeat(self, connection: Connection, command: Command, _: Mapping[str, Any]) -> bytes:
        heartbeat = bodies.decode_heartbeat(command.body)
        for consumer in heartbeat.consumers:
            check_group(consumer.group)
            for subscription in consumer.subscriptions:
                check_expression(subscription.expression, self._broker.limits.expression_characters_max)
        self._members.refuse_contradiction(heartbeat)
        self._members.admit(heartbeat, connection)
        self._create_topics(heartbeat)
        sender = (connection, self._clock.elapsed_ns(), command.language, command.version)
        self._senders.beat(heartbeat, *sender, connection.asker)
        changed = self._members.beat(heartbeat, *sender)
        answer = reply(command, codes.SUCCESS, {"IS_SUPPORT_HEART_BEAT_V2": "false", "IS_SUB_CHANGE": "true"})
        if changed:
            self._pulls.release(connection)
        self.notify(changed)
        return answer

    def _create_topics(self, heartbeat: bodies.Heartbeat) -> None:
        """Creates the groups of a heartbeat with their retry topics, and the topics that they subscribe to.

        Creating one waits for the disk, and every client waits with it, so a heartbeat creates only some. Where groups
        are left it is refused, and its client sends it again; topics that are left are created by the next heartbeats,
        or by the first request that uses them.
        """
        has_topic, left = self._broker.view.has_topic, self._broker.limits.heartbeat_topics_max
        for consumer in heartbeat.consumers:
            if not has_topic(RETRY_TOPIC_PREFIX + consumer.group):
                if not left:
                    raise FlowControl("heartbeat_topics_max: one heartbeat creates no more groups; send it again")
                self._creation.use_retry_topic(consumer.group)
                left -= 1
        for name in {each.topic for consumer in heartbeat.consumers for each in consumer.subscriptions}:
            if left and not has_topic(name):
                self._creation.subscribe(name)
                left -= has_topic(name)

    def unregister(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        group = asked["consumerGroup"]
        if group and self._members.leave(asked["clientID"], group):
            self._pops.leave(connection, group)
            self._pops.release(connection, group)
            self.notify({group})
            self._pulse.nudge()
        self._senders.leave(asked["clientID"], asked["producerGroup"])
        return reply(command, codes.SUCCESS)

    def list_members(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the members of a group; for a topic, those that share it."""
        members = self._members.of(asked["consumerGroup"])
        if not members:
            remark = f"no consumer of group {asked['consumerGroup']!r} is connected"
            return reply(command, codes.SYSTEM_ERROR, remark=remark)
        if asked["topic"]:
            members = self._members.sharing(asked["consumerGroup"], asked["topic"])
        return reply(command, codes.SUCCESS, body=bodies.encode_consumer_ids(member.client_id for member in members))

    def check_subscription(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Refuses filters that are not by tag. Clients ask only about those."""
        data = bodies.load(command.body, "a subscription").get("subscriptionData")
        check_filter(data.get("expressionType") or "TAG" if isinstance(data, dict) else "TAG")
        return reply(command, codes.SUCCESS)

    def notify(self, groups: set[str]) -> None:
        """Notifies every member of these groups that the members have changed, so that they share out anew. Logs what
        is wrong with them, and serves those that were barred and are not any more.
        """
        for group in groups:
            verdict = self._members.judge(group)
            for conflict in verdict.conflicts:
                logger.warning("%s", conflict.warning)
            if verdict.is_wider:
                self._pulls.look_again(group)
            fields = {"consumerGroup": group}
            notice = encode(Command(ClientRequest.NOTIFY_CONSUMER_IDS_CHANGED, fields, flag=codes.FLAG_ONEWAY))
            links = {member.link for member in self._members.of(group)}
            if self._pullers.keep(group, links, self._members.barred(group)) or verdict.is_wider:
                self._pops.look_again(group)
            self._pops.note_members(group)
            for connection in links:
                connection.notify(notice)
            if not links:
                self._offsets.forget_moves(group)

    def drop(self, connection: Connection) -> None:
        """Removes the clients of a connection that has ended."""
        self._senders.drop(connection)
        self.notify(self._members.drop(connection))
        self._pulse.nudge()

    def expire(self) -> None:
        """Removes clients that have been silent for too long, and locks that nobody has renewed."""
        now_ns = self._clock.elapsed_ns()
        silent_since_ns = now_ns - self._broker.limits.client_expiry_ms * 1_000_000
        self._senders.expire(silent_since_ns)
        self.notify(self._members.expire(silent_since_ns))
        for group in self._pullers.expire(now_ns):
            self._pops.look_again(group)
        self._pulse.nudge()
        self._locks.expire(now_ns)

    # -- offsets ------------------------------------------------------------------------------------------------

    def query_offset(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        """Answers where a group goes on. A member that asks has the queue from now on: pops take nothing new of it, and
        what they have taken by now comes before the answer.
        """
        group, topic, queue_id = asked["consumerGroup"], asked["topic"], asked["queueId"]
        asker = connection.asker
        if self._members.may_pull(group, topic, connection) and self._broker.view.has_topic(topic):
            pop = self._broker.leases.pop_in_flight(group, topic, queue_id)
            self._pullers.ask(group, (topic, queue_id), connection, self._clock.elapsed_ns())
            if pop is not None:
                asked_by = command.without_content()

                def settle(ticket: Ticket) -> None:
                    if isinstance(ticket.error, LogFailed):
                        connection.write(refusal(asked_by, ticket.error))
                    else:
                        connection.write(self._answer_offset(asked_by, asked, asker))

                self._pulse.expect(connection, pop, settle)
                return None
        return self._answer_offset(command, asked, asker)

    def _answer_offset(self, command: Command, asked: Mapping[str, Any], asker: Asker) -> bytes:
        group, topic, queue_id = asked["consumerGroup"], asked["topic"], asked["queueId"]
        offset = self._offsets.get(group, topic, queue_id)
        if offset is None and topic == RETRY_TOPIC_PREFIX + group and asker.may_group(group, SUB):  # not only look
            self._creation.use_retry_topic(group)
        if offset is None and asked["setZeroIfNotFound"] and self._is_fresh(topic, queue_id):
            offset = 0
        if offset is None:
            remark = f"group {group!r} has committed no offset for queue {queue_id} of topic {topic!r}"
            return reply(command, codes.QUERY_NOT_FOUND, remark=remark)
        return reply(command, codes.SUCCESS, {"offset": offset})

    def _is_fresh(self, topic: str, queue_id: int) -> bool:
        """Returns whether a new group starts this queue at its first message, wherever the group wants to start.

        A consumer learns of a new topic, or of a queue that was added, up to half a minute late. Starting at the end
        then would skip what came meanwhile.
        """
        low, high = self._broker.offsets(topic, queue_id)
        if low > 0:
            return False
        head = self._broker.view.place(topic, queue_id, 0) if high else self._broker.log.end
        return head < CHUNK_BIT and self._broker.log.end - head <= self._broker.settings.fresh_queue_bytes

    def commit_offset(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        group, topic, queue_id = asked["consumerGroup"], asked["topic"], asked["queueId"]
        if self._offsets.is_moving(group, topic, queue_id):
            return reply(command, codes.SUCCESS, remark="not written: an operator has moved the group meanwhile")
        place = (topic, queue_id)
        if asked["commitOffset"] < self._pullers.popped_end(group, place):
            if not self._members.has(group, connection):
                self._pullers.forget_popped(group, place)  # an operator moves the group back
            elif not self._pullers.has(group, place, connection):
                return reply(command, codes.SUCCESS, remark="not written: other members have popped further meanwhile")
        self._creation.use_group(group)
        if command.is_oneway:
            self._broker.offsets(topic, queue_id)  # raises for a queue that does not exist
            self._offsets.note(group, topic, queue_id, max(asked["commitOffset"], 0))
            return None
        offset, answer = asked["commitOffset"], when_settled(connection, command)
        ticket = self._offsets.commit(group, topic, queue_id, offset, self._clock.now_ms())

        def settle(ticket: Ticket) -> None:
            if ticket.error is None:
                self._offsets.mark_written(group, {(topic, queue_id): offset})
            answer(ticket)

        self._pulse.expect(connection, ticket, settle)
        return None

    def write_offsets(self) -> None:
        """Writes the offsets that clients have committed without waiting for an answer."""
        is_written = False
        with suppress(DiskFull, LogFailed):  # the pulse has logged it; the offsets stay noted until the next try
            is_written = self._offsets.write(self._clock.now_ms())
        if is_written:
            self._pulse.nudge()

    # -- locks --------------------------------------------------------------------------------------------------

    def lock(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_lock(command.body)
        check_group(request.group)
        # Locks stay in memory: a queue whose topic can have no such name is left out.
        named = {
            (queue.topic, queue.queue_id): queue
            for queue in request.queues
            if len(queue.topic) <= GROUP_TOPIC_CHARACTERS_MAX
        }
        locked = self._locks.lock(request.group, request.client_id, list(named), self._clock.elapsed_ns())
        return reply(command, codes.SUCCESS, body=bodies.encode_locked(named[queue] for queue in locked))

    def unlock(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_lock(command.body)
        queues = [(queue.topic, queue.queue_id) for queue in request.queues]
        self._locks.unlock(request.group, request.client_id, queues)
        return reply(command, codes.SUCCESS)

    # -- assignments: a consumer with clientRebalance=false asks which queues to read, and how -----------------------
    #
    # Popping, every member reads all queues; pulling, the queues are shared out by the client's strategy. Consumers are
    # told to pop, unless SET_MESSAGE_REQUEST_MODE has asked for pulls. Retry topics are always pulled.

    def assign_queues(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_assignment_request(command.body)
        modes = self._broker.view.group_settings(request.group).get(_MODES_SETTING, {})
        mode, queue_ids = POP, [_ANY_QUEUE]
        if request.message_model == "BROADCASTING":
            mode, queue_ids = PULL, list(self._all_queues(request.topic))
        elif request.topic.startswith(RETRY_TOPIC_PREFIX) or modes.get(request.topic) == PULL:
            strategy = _STRATEGIES.get(request.strategy)
            if strategy is None:
                known = ", ".join(_STRATEGIES)
                raise UsageError(f"strategy {request.strategy[:100]!r} is unknown, expected one of {known}")
            client_ids = [member.client_id for member in self._members.of(request.group)]
            mode, queue_ids = PULL, list(strategy(request.client_id, client_ids, self._all_queues(request.topic)))
        queues = (QueueName(request.topic, self._name, queue_id) for queue_id in queue_ids)
        return reply(command, codes.SUCCESS, body=bodies.encode_assignments(queues, mode))

    def _all_queues(self, topic: str) -> Sequence[int]:
        return range(self._creation.promise_topic(topic).read_queue_count)

    def set_mode(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        request = bodies.decode_mode_request(command.body)
        if request.topic.startswith(RETRY_TOPIC_PREFIX):
            raise NoPermission(f"topic {request.topic!r} is always pulled: clients send messages back to it")
        if request.mode not in (POP, PULL):
            raise UsageError(f"mode {request.mode[:100]!r}, expected {POP} or {PULL}")
        self._creation.use_group(request.group)
        settings = dict(self._broker.view.group_settings(request.group))
        modes = settings.get(_MODES_SETTING, {}) | {request.topic: request.mode}
        self._broker.put_group(request.group, settings | {_MODES_SETTING: modes}, self._clock.now_ms())
        return reply(command, codes.SUCCESS)

    # -- send-backs ---------------------------------------------------------------------------------------------

    def send_back(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        """Takes back a message that a consumer could not handle: it comes again later, or is a dead letter."""
        data = self._broker.read_record(asked["offset"])
        if not data:
            return reply(command, codes.SYSTEM_ERROR, remark=f"there is no message at offset {asked['offset']}")
        record, now_ms = records.decode(data), self._clock.now_ms()
        # Its copy can be read by whoever reads for the group.
        connection.asker.require(ask_topic(record.topic, SUB))
        due = self._broker.due_of(record)
        if due.at_ms > now_ms and not due.level:
            # Nobody has received it: the client has its offset from the producer. A message with a level is let
            # through, because the level may have meant a shorter delay when the message was sent.
            return reply(command, codes.SYSTEM_ERROR, remark=f"the message at offset {asked['offset']} is not due yet")
        group, level = asked["group"], asked["delayLevel"]
        times = min(record.reconsume_times, TRIES_MAX - 1)
        origin = asked["originMsgId"] or message_id(connection.broker_host, asked["offset"])
        if level < 0 or times >= retry_times_max(self._broker, group, asked["maxReconsumeTimes"]):
            message = retry_message(record, self._creation.use_dead_letter_topic(group).name, origin, times + 1, {})
        else:
            topic = self._creation.use_retry_topic(group).name
            delay = delay_properties(self._broker, group, level, times)
            message = retry_message(record, topic, origin, times + 1, delay)
        self._pulse.expect(connection, self._broker.send([message], now_ms), when_settled(connection, command))
        return None

    # -- definitions --------------------------------------------------------------------------------------------

    def put(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        settings = bodies.load(command.body, "a group's settings")
        name = settings.pop("groupName", None)
        if not isinstance(name, str):
            raise ProtocolError("a group's settings need the field groupName")
        # What the request does not name stays as it is: RocketMQ's tools name everything that they know, and we know
        # more. SET_MESSAGE_REQUEST_MODE alone sets how the group reads its topics.
        settings.pop(_MODES_SETTING, None)
        settings = {**self._broker.view.group_settings(name), **settings}
        settings = {key: value for key, value in settings.items() if value is not None}
        check_retry_settings(name, settings, self._broker.settings.invisible_ms_max)
        self._broker.put_group(name, settings, self._clock.now_ms())
        return reply(command, codes.SUCCESS)

    def delete(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Deletes a group with its offsets and its retry and dead letter topics."""
        name = asked["groupName"]
        if not self._broker.view.has_group(name):
            raise GroupNotFound(f"group {name!r} does not exist")
        if name == DONE_GROUP:
            raise NoPermission(f"group {name!r} is the broker's own: it knows which dead letters are done")
        for topic in (RETRY_TOPIC_PREFIX + name, DLQ_TOPIC_PREFIX + name):
            if self._broker.view.has_topic(topic):
                self._topics.remove(topic)
        self._broker.delete_group(name, self._clock.now_ms())
        self._offsets.forget_group(name)
        self._pullers.forget_group(name)
        return reply(command, codes.SUCCESS)

    def list_settings(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        defaults = {TIMES_SETTING: self._broker.settings.retry_times_max, "retryQueueNums": 1}
        table = {
            name: {"groupName": name, **defaults, **settings}
            for name, settings in self._broker.view.all_group_settings().items()
            if name != DONE_GROUP and connection.asker.may_group(name, GET)
        }
        return reply(command, codes.SUCCESS, body=orjson.dumps({"subscriptionGroupTable": table}))
