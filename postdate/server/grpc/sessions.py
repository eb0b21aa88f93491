"""What clients of the gRPC port are and where they find what they want: routes, assignments, settings, heartbeats.

No call needs settings that came before: after a restart of the broker some clients send theirs only minutes later, and
go on all the same. What a group is comes from the group, who reads what from any call.
"""

from collections.abc import Iterable
from typing import Any

from postdate.broker.broker import Broker
from postdate.broker.view import PERM_READ, PERM_WRITE, TopicInfo
from postdate.clock import Clock
from postdate.message import check_group, check_topic
from postdate.server.dispatch import Dispatcher
from postdate.server.grpc.call import Call
from postdate.server.grpc.client import GrpcClient, OnReply
from postdate.server.grpc.requests import CallRequests, is_in_order, name_of
from postdate.server.grpc.statuses import OK_STATUS, status_of
from postdate.server.requests.retries import own_delays_ms, retry_times_max
from postdate.wire import codes, messaging
from postdate.wire.bodies import Consumer, Heartbeat, Subscription, encode_heartbeat, parse_subscription
from postdate.wire.frame import Command
from postdate.wire.grpc import INVALID_ARGUMENT
from postdate.wire.messaging import MESSAGES, PRODUCER, CallError
from postdate.wire.requests import Request
from postdate.wire.rights import GET, PUB, SUB
from postdate.wire.translation import of_ms, types_of

_ANY_QUEUE = -1
_BEAT_MS = 20_000  # a member that says nothing else is noted again after this: a third of what a heartbeat may miss
_POLLING_MS = 20_000  # how long a push consumer's receive may wait
_BATCH_COUNT = 32  # messages of one receive, RocketMQ's
# A producer tries again at once, in effect. This kind of backoff it must be: some clients start with no other.
_PRODUCER_BACKOFF = {
    "max_attempts": 3, "exponential_backoff": {"initial": of_ms(10), "max": of_ms(1_000), "multiplier": 2.0}
}  # fmt: skip


class ClientSessions:
    """Answers calls about clients and routes."""

    def __init__(self, requests: CallRequests, dispatcher: Dispatcher, broker: Broker, clock: Clock) -> None:
        self._requests, self._dispatcher, self._broker, self._clock = requests, dispatcher, broker, clock

    # -- routes -------------------------------------------------------------------------------------------------

    def query_route(self, call: Call, request: Any) -> None:
        topic, topic_perm = self._find_route(call, request)
        types = types_of(topic.attributes)
        queues = []
        for queue_id in range(max(topic.read_queue_count, topic.write_queue_count)):
            perm = (PERM_READ if queue_id < topic.read_queue_count else 0) | (
                PERM_WRITE if queue_id < topic.write_queue_count else 0
            )
            queues.append(self._queue(request, queue_id, perm & topic_perm, types))
        call.answer(status=OK_STATUS, message_queues=queues)

    def query_assignment(self, call: Call, request: Any) -> None:
        """Answers the queues of a topic that a consumer receives from: all as one, or each where order counts."""
        topic, perm = self._find_route(call, request)
        group = name_of(request.group, check_group, messaging.ILLEGAL_GROUP)
        if not perm & PERM_READ:
            raise CallError(messaging.FORBIDDEN, f"topic {topic.name!r} may not be read: its perm is {topic.perm}")
        queue_ids = range(topic.read_queue_count) if is_in_order(self._broker, group) else (_ANY_QUEUE,)
        types = types_of(topic.attributes)
        queues = [self._queue(request, queue_id, PERM_READ | PERM_WRITE, types) for queue_id in queue_ids]
        call.answer(status=OK_STATUS, assignments=[{"message_queue": queue} for queue in queues])

    def _find_route(self, call: Call, request: Any) -> tuple[TopicInfo, int]:
        """Raises CallError for a topic that the user has nothing to do with."""
        name = name_of(request.topic, check_topic, messaging.ILLEGAL_TOPIC)
        if not call.asker.may_topic(name, PUB, SUB, GET):
            raise CallError(messaging.FORBIDDEN, f"user {call.asker.name!r} has no right to topic {name!r}")
        return self._dispatcher.routes.find_route(name)

    def _queue(self, request: Any, queue_id: int, perm: int, types: Iterable[int]) -> dict[str, Any]:
        """Returns a queue as a client finds it: at the address by which it has come, whatever that is called here."""
        permission = {
            0: messaging.PERMISSION_NONE, PERM_READ: messaging.PERMISSION_READ, PERM_WRITE: messaging.PERMISSION_WRITE,
        }.get(perm, messaging.PERMISSION_BOTH)  # fmt: skip
        broker = {"name": self._broker.settings.broker_name, "id": 0, "endpoints": request.endpoints}
        return {
            "topic": request.topic, "id": queue_id, "permission": permission, "broker": broker,
            "accept_message_types": types,
        }  # fmt: skip

    # -- settings -----------------------------------------------------------------------------------------------

    def take_telemetry(self, call: Call, command: Any) -> None:
        """Takes in the settings of a client, and answers with those that hold. Answers to commands of ours, of which
        there is one that has none, are read and dropped.
        """
        if not command.HasField("settings"):
            return
        client, settings = call.client, command.settings
        if settings.HasField("publishing"):
            topics = [name_of(each, check_topic, messaging.ILLEGAL_TOPIC) for each in settings.publishing.topics]
            for topic in topics:
                if not call.asker.may_topic(topic, PUB):
                    raise CallError(messaging.FORBIDDEN, f"no right Pub to topic {topic!r}")
            client.published, before_published = tuple(topics), client.published

            def undo() -> None:
                client.published = before_published

        elif settings.HasField("subscription"):
            group = name_of(settings.subscription.group, check_group, messaging.ILLEGAL_GROUP)
            subscribed = {
                name_of(each.topic, check_topic, messaging.ILLEGAL_TOPIC): each.expression
                for each in settings.subscription.subscriptions
            }
            before = client.subscriptions.get(group)
            client.subscriptions[group] = {
                topic: _subscription(topic, expression) for topic, expression in subscribed.items()
            }

            def undo() -> None:
                client.forget_group(group)
                if before is not None:
                    client.subscriptions[group] = before

        else:
            raise CallError(messaging.BAD_REQUEST, "the settings name neither topics to publish nor subscriptions")
        client.telemetry = call

        def answer(reply: Command) -> None:
            if reply.code == codes.SUCCESS:
                call.send(status=OK_STATUS, settings=self._merge(settings))
            else:
                undo()
                call.end(INVALID_ARGUMENT, reply.remark or "")

        self._beat(call, answer)

    def _merge(self, settings: Any) -> Any:
        """Returns a client's settings with what the broker decides about."""
        merged = MESSAGES["Settings"]()
        merged.CopyFrom(settings)
        merged.metric.on = False
        if settings.HasField("publishing"):
            merged.backoff_policy.CopyFrom(MESSAGES["RetryPolicy"](**_PRODUCER_BACKOFF))
            merged.publishing.max_body_size = self._broker.settings.body_bytes_max
            merged.publishing.validate_message_type = True
        else:
            group = settings.subscription.group.name
            merged.backoff_policy.CopyFrom(self._retry_policy(group))
            merged.subscription.fifo = is_in_order(self._broker, group)
            merged.subscription.receive_batch_size = _BATCH_COUNT
            merged.subscription.long_polling_timeout.CopyFrom(MESSAGES["Duration"](**of_ms(_POLLING_MS)))
        return merged

    def _retry_policy(self, group: str) -> Any:
        levels, limit_ms = self._broker.levels, self._broker.settings.invisible_ms_max
        by_level = [levels.delay_ms(level) for level in range(1, levels.count + 1)]
        delays = [of_ms(min(delay_ms, limit_ms)) for delay_ms in own_delays_ms(self._broker, group) or by_level]
        times_max = retry_times_max(self._broker, group, None)
        return MESSAGES["RetryPolicy"](max_attempts=times_max + 1, customized_backoff={"next": delays})

    # -- heartbeats ---------------------------------------------------------------------------------------------

    def take_heartbeat(self, call: Call, request: Any) -> None:
        """Notes that a client lives. One whose settings did not come yet is known by what it has received from."""
        if request.client_type != PRODUCER:
            name_of(request.group, check_group, messaging.ILLEGAL_GROUP)
        self._beat(call, lambda reply: call.answer(status=status_of(reply)))

    def _beat(self, call: Call, on_reply: OnReply) -> None:
        client, groups = call.client, list(call.client.subscriptions)

        def note(reply: Command) -> None:
            if reply.code == codes.SUCCESS:
                client.beaten_at_ns.update(dict.fromkeys(groups, self._clock.elapsed_ns()))
            on_reply(reply)

        body = encode_heartbeat(Heartbeat(client.client_id, client.published, tuple(_consumers(client))))
        self._requests.ask(call, Request.HEART_BEAT, {}, note, body)

    def note_reader(self, call: Call, group: str, topic: str, expression: Any) -> None:
        """Notes a client that receives as a member of its group, if that was not said lately."""
        client, now_ns = call.client, self._clock.elapsed_ns()
        is_new = topic not in client.subscriptions.get(group, ())
        beaten_at_ns = client.beaten_at_ns.get(group)
        if not is_new and beaten_at_ns is not None and now_ns - beaten_at_ns < _BEAT_MS * 1_000_000:
            return
        if is_new:
            client.subscriptions.setdefault(group, {})[topic] = _subscription(topic, expression)

        def note(reply: Command) -> None:
            if is_new and reply.code != codes.SUCCESS:  # else all its heartbeats would be refused from now on
                subscriptions = client.subscriptions.get(group, {})
                subscriptions.pop(topic, None)
                if not subscriptions:
                    client.forget_group(group)

        self._beat(call, note)

    def terminate(self, call: Call, request: Any) -> None:
        """A client says goodbye. What it had in hand is given to others."""
        client, group = call.client, request.group.name
        self._requests.release(client)
        fields = {"clientID": client.client_id}
        if group in client.subscriptions:
            client.forget_group(group)
            fields["consumerGroup"] = group
        for topic in client.published:
            self._requests.ask(call, Request.UNREGISTER_CLIENT, fields | {"producerGroup": topic}, lambda _: None)
        client.published = ()
        self._requests.ask(
            call, Request.UNREGISTER_CLIENT, fields, lambda reply: call.answer(status=status_of(reply))
        )  # fmt: skip


def _subscription(topic: str, expression: Any) -> Subscription:
    """Returns a subscription. Raises CallError for a filter that is not by tag."""
    if expression.type not in (0, messaging.FILTER_TAG):
        raise CallError(messaging.ILLEGAL_FILTER, "filters are by tag here, not by SQL")
    return parse_subscription(topic, expression.expression or "*")


def _consumers(client: GrpcClient) -> Iterable[Consumer]:
    for group, subscriptions in client.subscriptions.items():
        yield Consumer(
            group, "CONSUME_POP", "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET", tuple(subscriptions.values())
        )  # fmt: skip
