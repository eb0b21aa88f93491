"""Clients of the gRPC port: routes, assignments, settings, heartbeats, goodbyes."""

from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest

from postdate.broker.view import PERM_READ, PERM_WRITE
from postdate.wire import messaging
from postdate.wire.messaging import DELAY, FIFO, NORMAL, PRODUCER, PUSH_CONSUMER, SIMPLE_CONSUMER, TRANSACTION
from postdate.wire.requests import Request
from postdate.wire.translation import of_ms, to_ms
from tests.support.bulk import wait_until
from tests.support.grpc_client import GROUP, GrpcPeer, calling, read, service_of, serving_grpc
from tests.support.peer import Peer, connected, make_topic
from tests.support.server import Served

ENDPOINTS = {"scheme": messaging.SCHEME_NAME, "addresses": [{"host": "behind.nat", "port": 443}]}
PRODUCES = {"client_type": PRODUCER, "publishing": {"topics": [{"name": "orders"}]}}


def subscribing(topic: str = "orders", tags: str = "*", *, kind: int = messaging.FILTER_TAG, **more: Any) -> Any:
    expression = {"type": kind, "expression": tags}
    return {
        "client_type": PUSH_CONSUMER,
        "subscription": {
            "group": {"name": GROUP}, "subscriptions": [{"topic": {"name": topic}, "expression": expression}],
        },
        **more,
    }  # fmt: skip


def put_group(peer: Peer, **settings: Any) -> None:
    body = orjson.dumps({"groupName": GROUP, **settings})
    assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code == 0


def members_of(served: Served) -> dict[str, str]:
    """By client id the topics and tags that a member of the group reads."""
    return {
        member.client_id: ",".join(f"{each.topic}:{each.expression}" for each in member.consumer.subscriptions)
        for member in served.call(lambda: served.dispatcher.sessions.members.of(GROUP))
    }


# -- routes ---------------------------------------------------------------------------------------------------------


def test_a_route_has_every_queue_at_the_address_by_which_the_client_has_come(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 2)
        topic = {"name": "orders", "resource_namespace": "mine"}
        answer = client.call("QueryRoute", topic=topic, endpoints=ENDPOINTS)
        assert answer.status.code == messaging.OK
        assert [queue.id for queue in answer.message_queues] == [0, 1]
        for queue in answer.message_queues:
            assert (queue.topic.name, queue.topic.resource_namespace) == ("orders", "mine")
            assert queue.permission == messaging.PERMISSION_BOTH
            assert (queue.broker.name, queue.broker.id) == (served.broker.settings.broker_name, 0)
            (address,) = queue.broker.endpoints.addresses
            assert (queue.broker.endpoints.scheme, address.host, address.port) == (3, "behind.nat", 443)
            assert list(queue.accept_message_types) == [NORMAL, FIFO, DELAY, TRANSACTION]


@pytest.mark.parametrize(("attribute", "types"), [("FIFO", [FIFO]), ("DELAY", [DELAY]), ("NORMAL", [NORMAL])])
def test_a_route_names_the_type_that_its_topic_takes(tmp_path: Path, attribute: str, types: list[int]) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_typed(peer, attribute)
        route = client.call("QueryRoute", topic={"name": "orders"}, endpoints=ENDPOINTS)
        assert [list(queue.accept_message_types) for queue in route.message_queues] == [types]
        assigned = client.call("QueryAssignment", topic={"name": "orders"}, group={"name": GROUP})
        assert [list(each.message_queue.accept_message_types) for each in assigned.assignments] == [types]


def make_typed(peer: Peer, attribute: str, queue_count: int = 1) -> None:
    answer = peer.ask(
        Request.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=queue_count, writeQueueNums=queue_count,
        attributes=f"+message.type={attribute}",
    )  # fmt: skip
    assert answer.code == 0, answer


@pytest.mark.parametrize(
    ("perm", "permission"),
    [(PERM_READ, messaging.PERMISSION_READ), (PERM_WRITE, messaging.PERMISSION_WRITE), (0, messaging.PERMISSION_NONE)],
)
def test_a_route_says_what_a_client_may_do(tmp_path: Path, perm: int, permission: int) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        peer.ask(Request.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=1, writeQueueNums=1, perm=perm)
        route = client.call("QueryRoute", topic={"name": "orders"})
        assert [queue.permission for queue in route.message_queues] == [permission]
        code = client.code("QueryAssignment", topic={"name": "orders"}, group={"name": GROUP})
        assert code == (messaging.OK if perm & PERM_READ else messaging.FORBIDDEN)


def test_queues_that_can_only_be_read_or_written_say_so(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        peer.ask(Request.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=3, writeQueueNums=1)
        route = client.call("QueryRoute", topic={"name": "orders"})
        both, read_only = messaging.PERMISSION_BOTH, messaging.PERMISSION_READ
        assert [queue.permission for queue in route.message_queues] == [both, read_only, read_only]


def test_a_topic_that_does_not_exist_and_may_not_be_made_is_not_found(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, auto_create_topics=False) as served, calling(served) as client:
        topic = {"name": "orders"}
        assert client.code("QueryRoute", topic=topic) == messaging.TOPIC_NOT_FOUND
        assert client.code("QueryAssignment", topic=topic, group={"name": GROUP}) == messaging.TOPIC_NOT_FOUND


@pytest.mark.parametrize("name", ["", "no spaces", "t" * 128, "täglich"])
def test_names_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        assert client.code("QueryRoute", topic={"name": name}) == messaging.ILLEGAL_TOPIC
        group_name = name.replace("t" * 128, "g" * 256)
        code = client.code("QueryAssignment", topic={"name": "orders"}, group={"name": group_name})
        assert code == messaging.ILLEGAL_GROUP


# -- assignments ----------------------------------------------------------------------------------------------------


def test_a_group_reads_a_topic_as_one_or_queue_by_queue_where_order_counts(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 3)
        asked: Any = {"topic": {"name": "orders"}, "group": {"name": GROUP}, "endpoints": ENDPOINTS}
        (one,) = client.call("QueryAssignment", **asked).assignments
        assert (one.message_queue.id, one.message_queue.broker.endpoints.addresses[0].port) == (-1, 443)
        put_group(peer, consumeMessageOrderly=True)
        found = client.call("QueryAssignment", **asked).assignments
        assert [each.message_queue.id for each in found] == [0, 1, 2]


# -- settings -------------------------------------------------------------------------------------------------------


def test_a_producer_gets_the_settings_without_which_clients_do_not_start(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, body_bytes_max=10_000) as served, calling(served) as client:
        answer = client.telemetry().say(**PRODUCES, user_agent={"version": "5.2.0"}, request_timeout=of_ms(3_000))
        assert answer.status.code == messaging.OK, "some clients ignore settings without a status"
        settings = answer.settings
        assert settings.client_type == PRODUCER
        assert [topic.name for topic in settings.publishing.topics] == ["orders"]
        assert (settings.publishing.max_body_size, settings.publishing.validate_message_type) == (10_000, True)
        policy = settings.backoff_policy
        assert (policy.max_attempts, policy.HasField("customized_backoff")) == (3, False)
        backoff = policy.exponential_backoff
        assert (to_ms(backoff.initial), to_ms(backoff.max), backoff.multiplier) == (10, 1_000, 2.0)
        assert (settings.metric.on, settings.HasField("metric")) == (False, True)
        assert not settings.HasField("subscription"), "another case than its own breaks a client"
        assert (settings.user_agent.version, to_ms(settings.request_timeout)) == ("5.2.0", 3_000), "the rest is echoed"


@pytest.mark.parametrize("client_type", [PUSH_CONSUMER, SIMPLE_CONSUMER])
def test_a_consumer_gets_the_settings_of_its_group(tmp_path: Path, client_type: int) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        telemetry = client.telemetry()
        settings = telemetry.say(**(subscribing() | {"client_type": client_type})).settings
        found = settings.subscription
        assert (found.group.name, found.fifo, found.receive_batch_size) == (GROUP, False, 32)
        assert to_ms(found.long_polling_timeout) == 20_000
        policy = settings.backoff_policy
        assert (policy.max_attempts, policy.HasField("exponential_backoff")) == (17, False)
        delays_s = [to_ms(each) // 1_000 for each in policy.customized_backoff.next]
        assert delays_s == [1, 5, 10, 30, *range(60, 660, 60), 1_200, 1_800, 3_600, 7_200]
        assert not settings.HasField("publishing")
        put_group(peer, consumeMessageOrderly=True, retryMaxTimes=4, retryDelaysMs=[1_500, 60_000])
        again = telemetry.say(**subscribing()).settings
        assert (again.subscription.fifo, again.backoff_policy.max_attempts) == (True, 5)
        assert [to_ms(each) for each in again.backoff_policy.customized_backoff.next] == [1_500, 60_000]


def test_settings_that_come_again_are_answered_again_and_change_what_a_member_reads(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        telemetry = client.telemetry()
        telemetry.say(**subscribing(tags="paid"))
        assert members_of(served) == {"c1": "orders:paid"}
        assert telemetry.say(**subscribing("bills")).status.code == messaging.OK
        assert members_of(served) == {"c1": "bills:*"}


def test_a_stream_answers_before_it_is_asked_anything(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        telemetry = client.telemetry()
        assert telemetry.call.initial_metadata() is not None, "some clients wait for the first headers"
        telemetry.end()
        assert telemetry.read_end()[0] is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "settings",
    [
        {"client_type": PRODUCER},
        PRODUCES | {"publishing": {"topics": [{"name": "no spaces"}]}},
        subscribing("no spaces"),
        subscribing(kind=messaging.FILTER_SQL),
        subscribing(tags="x" * 20_000),
        {"subscription": {"group": {"name": ""}}},
    ],
)
def test_settings_that_cannot_be_end_the_stream(tmp_path: Path, settings: Any) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        telemetry = client.telemetry()
        telemetry.write(settings=settings)
        code, text = telemetry.read_end()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text
        assert members_of(served) == {}
        assert client.telemetry().say(**subscribing()).status.code == messaging.OK, "they are not remembered"
        assert client.code("Heartbeat", group={"name": GROUP}, client_type=PUSH_CONSUMER) == messaging.OK


def test_answers_to_commands_of_ours_are_read_and_dropped(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        telemetry = client.telemetry()
        telemetry.write(verify_message_result={"nonce": "1"})
        telemetry.write(thread_stack_trace={"nonce": "1", "thread_stack_trace": "main"})
        assert telemetry.say(**PRODUCES).status.code == messaging.OK


# -- heartbeats -----------------------------------------------------------------------------------------------------


def test_a_heartbeat_needs_no_settings(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        assert client.code("Heartbeat", group={"name": GROUP}, client_type=PUSH_CONSUMER) == messaging.OK
        assert client.code("Heartbeat", client_type=PRODUCER) == messaging.OK
        assert client.code("Heartbeat", client_type=PUSH_CONSUMER) == messaging.ILLEGAL_GROUP


def test_a_member_that_beats_stays_and_one_that_is_silent_goes(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.telemetry().say(**subscribing())
        for _ in range(3):
            served.pass_ms(60_000)
            assert client.code("Heartbeat", group={"name": GROUP}, client_type=PUSH_CONSUMER) == messaging.OK
            served.call(served.dispatcher.groups.expire)
            assert members_of(served) == {"c1": "orders:*"}
        served.pass_ms(120_001)
        served.call(served.dispatcher.groups.expire)
        assert members_of(served) == {}


def test_a_receive_alone_makes_a_member_and_keeps_it(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders")
        client.receive(tags="*")
        assert members_of(served) == {"c1": "orders:*"}
        for _ in range(8):
            served.pass_ms(30_000)
            client.receive()
            served.call(served.dispatcher.groups.expire)
        assert members_of(served) == {"c1": "orders:*"}


def test_a_receive_of_a_topic_that_is_not_there_harms_no_heartbeat(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, auto_create_topics=False) as served, calling(served) as client:
        assert client.receive().code == messaging.TOPIC_NOT_FOUND
        assert client.code("Heartbeat", group={"name": GROUP}, client_type=SIMPLE_CONSUMER) == messaging.OK


def test_a_client_has_no_more_groups_than_a_connection_may_have(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, connection_members_max=3) as served, calling(served) as client:
        for number in range(6):
            client.receive(group=f"g{number}")
        (found,) = service_of(served)._clients.values()
        assert len(found.subscriptions) == 3
        assert client.code("Heartbeat", group={"name": "g0"}, client_type=SIMPLE_CONSUMER) == messaging.OK


def test_operators_see_clients_of_this_port_beside_others(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served, "new") as client:
        client.telemetry().say(**subscribing())
        assert peer.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=GROUP).body == b'{"consumerIdList":["new"]}'
        assert peer.ask(Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup=GROUP).code == 0
        client.telemetry().say(**PRODUCES)
        found = peer.ask(Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="orders")
        assert b'"clientId":"new"' in found.body, "its producer group is its topic"


def test_a_question_of_an_operator_that_these_clients_do_not_know_is_answered(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        client.telemetry().say(**subscribing())
        answer = peer.ask(Request.GET_CONSUMER_RUNNING_INFO, consumerGroup=GROUP, clientId="c1")
        assert answer.code != 0
        assert "gRPC" in (answer.remark or "")


# -- goodbyes -------------------------------------------------------------------------------------------------------


def test_a_client_that_says_goodbye_is_a_member_no_more_and_its_messages_come_again_soon(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path) as served, calling(served, "a") as leaving,
        calling(served, "b") as staying,
    ):  # fmt: skip
        leaving.sent("orders", "work")
        assert leaving.receive().bodies == ["work"]
        assert leaving.code("NotifyClientTermination", group={"name": GROUP}) == messaging.OK
        assert members_of(served) == {}
        waiting = staying.begin_receive()
        staying.round_trip()
        served.pass_ms(999)
        served.settle()
        assert not waiting.done()
        served.pass_ms(1)
        assert read(waiting).bodies == ["work"]
        assert members_of(served) == {"b": "orders:*"}


def test_a_goodbye_of_a_client_that_nobody_knows_is_taken(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        assert client.code("NotifyClientTermination") == messaging.OK
        assert client.code("NotifyClientTermination", group={"name": "others"}) == messaging.OK


def test_a_producer_that_says_goodbye_is_not_listed_any_more(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.telemetry().say(**PRODUCES)
        senders = served.dispatcher.sessions.senders
        assert [sender.client_id for sender in served.call(lambda: senders.of("orders"))] == ["c1"]
        client.call("NotifyClientTermination")
        assert served.call(lambda: senders.of("orders")) == []


def test_a_client_is_gone_some_time_after_its_last_connection(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served, "other") as other:
        other.round_trip()
        client = GrpcPeer(served, "c1")
        client.telemetry().say(**subscribing())
        service = service_of(served)
        client.close()
        wait_until(lambda: len(served.dispatcher.connections) == 1)
        served.call(service.tick)
        assert members_of(served) == {"c1": "orders:*"}, "it may come back"
        served.pass_ms(10_000)
        served.call(service.tick)
        assert members_of(served) == {}
