"""Receiving, acknowledging, renewing, retrying and giving up over gRPC, beside members of the older protocol."""

import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.server.grpc.call import Call, Method
from postdate.server.grpc.connection import GrpcConnection
from postdate.server.grpc.consuming import _polling_ms
from postdate.wire import codes, messaging
from postdate.wire.ids import encode_receipt_handle, parse_receipt_handle
from postdate.wire.messaging import MESSAGES, CallError
from postdate.wire.requests import Request
from postdate.wire.translation import of_ms
from tests.server.requests.test_pop import pop
from tests.support.bulk import wait_until
from tests.support.grpc_client import (
    GROUP,
    MINUTE_MS,
    GrpcPeer,
    attempt_of,
    calling,
    handle_of,
    message,
    pass_with_ticks,
    read,
    service_of,
    serving_grpc,
)
from tests.support.peer import Gate, Peer, connected, heartbeat, make_topic, pull, read_bodies, sent
from tests.support.server import Served

DEAD = f"%DLQ%{GROUP}"
SIMPLE_MS = 30_000


def put_group(peer: Peer, **settings: Any) -> None:
    body = orjson.dumps({"groupName": GROUP, **settings})
    assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code == 0


def lease_count(served: Served) -> int:
    return served.call(lambda: len(served.broker.fold.leases.by_key))


def held_count(served: Served) -> int:
    return served.call(lambda: served.dispatcher.pulls.held_count)


# -- receiving ------------------------------------------------------------------------------------------------------


def test_a_new_group_is_given_what_was_sent_before(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "early")
        answer = client.receive()
        assert (answer.code, answer.bodies) == (messaging.OK, ["early"])
        assert answer.delivered_at_ms == served.clock.now_ms()
        assert attempt_of(answer.message) == 1


def test_a_receive_that_finds_nothing_says_so_when_its_time_is_over(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders")
        client.receive()
        answer = client.receive()
        assert (answer.code, answer.messages) == (messaging.NO_MESSAGE, [])
        assert answer.delivered_at_ms == served.clock.now_ms()
        assert held_count(served) == 0


def test_a_receive_waits_for_what_is_sent_later(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        waiting = client.begin_receive()
        client.round_trip()
        client.sent("orders", "at last")
        assert read(waiting).bodies == ["at last"]
        assert held_count(served) == 0, "the other of its pops has ended, too"


def test_a_receive_takes_no_more_than_it_has_asked_for(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        fail_of_older_member(peer)
        for number in range(5):
            client.sent("orders", f"new{number}")
        first = client.receive(count_max=1, invisible_ms=SIMPLE_MS)
        assert len(first.messages) == 1, "one of the retry topic or one of the topic"
        served.settle()
        rest = client.receive(count_max=32, invisible_ms=SIMPLE_MS)
        assert sorted(first.bodies + rest.bodies) == ["failed", *(f"new{number}" for number in range(5))]
        assert {attempt_of(each) for each in rest.messages if each.body != b"failed"} == {1}, "given back uncounted"


def fail_of_older_member(peer: Peer) -> None:
    """A member that pulls sends a message back, which is then in the group's retry topic."""
    put_group(peer)
    sent(peer, f"%RETRY%{GROUP}", "failed", RETRY_TOPIC="orders")


def test_at_most_32_messages_come_at_once(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.send("orders", *map(str, range(40)))
        assert len(client.receive(count_max=1_000).messages) == 32
        assert len(client.receive(count_max=0).messages) == 1


def test_a_message_of_a_retry_topic_comes_with_the_topic_it_was_sent_to(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        fail_of_older_member(peer)
        found = client.receive().message
        assert (found.topic.name, found.body) == ("orders", b"failed")
        assert client.acknowledge(handle_of(found)).status.code == messaging.OK
        assert lease_count(served) == 0


def test_the_first_message_of_a_retry_topic_reaches_a_receive_that_waits(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        waiting = client.begin_receive()
        client.round_trip()
        fail_of_older_member(peer)
        assert read(waiting).bodies == ["failed"]
        assert held_count(served) == 0


@pytest.mark.parametrize(
    ("tags", "bodies"), [("a", ["1"]), ("a || c", ["1", "3"]), ("*", ["1", "2", "3"]), ("", "123")]
)
def test_a_filter_chooses_by_tag(tmp_path: Path, tags: str, bodies: list[str]) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        for body, tag in (("1", "a"), ("2", "b"), ("3", "c")):
            client.sent("orders", body, tag=tag)
        assert sorted(client.receive(tags=tags).bodies) == list(bodies)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"filter_expression": {"type": messaging.FILTER_SQL, "expression": "a > 1"}}, messaging.ILLEGAL_FILTER),
        ({"invisible_ms": 9_999}, messaging.ILLEGAL_INVISIBLE_TIME),
        ({"invisible_ms": 12 * 60 * MINUTE_MS + 1}, messaging.ILLEGAL_INVISIBLE_TIME),
        ({"auto_renew": False}, messaging.ILLEGAL_INVISIBLE_TIME),
        ({"topic": "no spaces"}, messaging.ILLEGAL_TOPIC),
        ({"group": ""}, messaging.ILLEGAL_GROUP),
        ({"group": "g" * 256}, messaging.ILLEGAL_GROUP),
        ({"topic": "bills"}, messaging.TOPIC_NOT_FOUND),
    ],
)
def test_a_receive_that_cannot_be_is_refused_with_its_code(tmp_path: Path, how: dict[str, Any], code: int) -> None:
    with (
        serving_grpc(tmp_path, auto_create_topics=False) as served,
        connected(served) as peer,
        calling(served) as client,
    ):
        make_topic(peer, "orders", 1)
        answer = client.receive(**how)
        assert (answer.code, answer.messages) == (code, [])
        assert answer.status.message


def test_a_group_that_has_too_much_in_hand_is_told_to_be_patient(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, group_popped_max=1) as served, calling(served) as client:
        client.send("orders", "1", "2")
        assert len(client.receive().messages) == 1
        assert client.receive().code == messaging.TOO_MANY_REQUESTS


def test_the_lease_of_a_simple_consumer_is_as_long_as_it_asks_and_is_not_renewed(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "work")
        first = client.receive(invisible_ms=SIMPLE_MS).message
        pass_with_ticks(served, service_of(served), SIMPLE_MS - 5_000)
        assert client.receive().bodies == []
        served.pass_ms(5_000)
        served.settle()
        again = client.receive(invisible_ms=SIMPLE_MS).message
        assert (again.body, attempt_of(again)) == (b"work", 2)
        assert client.acknowledge(handle_of(first)).entries[0].status.code == messaging.INVALID_HANDLE


def test_bodies_of_older_producers_are_unfolded_up_to_a_bound(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        bomb = zlib.compress(bytes(9 << 20))
        for _ in range(2):
            sent(peer, "orders", bomb, sys_flag=codes.SYS_COMPRESSED)
        sent(peer, "orders", zlib.compress(b"small"), sys_flag=codes.SYS_COMPRESSED)
        found = client.receive().messages
        kinds = [(len(each.body), each.system_properties.body_encoding) for each in found]
        assert kinds == [(9 << 20, messaging.IDENTITY), (len(bomb), messaging.GZIP), (5, messaging.IDENTITY)]


# -- how long a receive waits ---------------------------------------------------------------------------------------


def polling_ms(timeout_ms: int | None, wait_ms: int) -> int:
    method: Any = Method("ReceiveMessage", MESSAGES["ReceiveMessageRequest"], MESSAGES["ReceiveMessageResponse"], print)
    stream: Any = None
    request = MESSAGES["ReceiveMessageRequest"](long_polling_timeout=of_ms(wait_ms)) if wait_ms else method.request()
    return _polling_ms(Call(stream, 1, method, {}, timeout_ms), request)


def test_a_receive_ends_before_its_deadline_and_waits_no_longer_than_a_push_consumer_may() -> None:
    assert polling_ms(None, 0) == 20_000
    assert polling_ms(None, 7_000) == 7_000
    assert polling_ms(None, 60_000) == 20_000
    assert polling_ms(23_000, 20_000) == 20_000
    assert polling_ms(8_000, 0) == 7_500, "a client that names no time has its deadline"
    assert polling_ms(5_000, 20_000) == 4_500
    assert polling_ms(40_000, 40_000) == 20_000


def test_a_receive_without_time_is_refused() -> None:
    with pytest.raises(CallError) as caught:
        polling_ms(999, 20_000)
    assert caught.value.code == messaging.BAD_REQUEST


# -- receives that are given up -------------------------------------------------------------------------------------


def test_a_receive_that_was_cancelled_takes_nothing(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        waiting = client.begin_receive()
        client.round_trip()
        assert held_count(served) == 1
        waiting.cancel()
        wait_until(lambda: held_count(served) == 0)
        client.sent("orders", "for another")
        assert lease_count(served) == 0
        found = client.receive().message
        assert (found.body, attempt_of(found)) == (b"for another", 1)


def test_what_comes_for_a_receive_that_is_cancelled_meanwhile_goes_back_uncounted(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving_grpc(tmp_path, disk=gate.disk) as served, calling(served) as client:
        client.sent("orders", "on its way")
        client.receive("bills")  # makes the group, which waits for the disk
        gate.hold()
        waiting = client.begin_receive()
        gate.wait_for_flush()  # the lease is written and not durable yet
        waiting.cancel()
        wait_until(lambda: not calls_of(served, "ReceiveMessage"))
        gate.open()
        found = client.receive(wait_ms=20_000).message
        assert (found.body, attempt_of(found)) == (b"on its way", 1)


def calls_of(served: Served, method: str) -> list[Call]:
    return served.call(
        lambda: [
            call
            for connection in served.dispatcher.connections
            if isinstance(connection, GrpcConnection)
            for call in connection._calls.values()
            if call.method.name == method
        ]
    )


def test_a_topic_that_is_deleted_under_a_receive_harms_nobody(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        client.sent("orders", "in hand")
        handle = client.receive().handles[0]
        waiting = client.begin_receive()
        client.round_trip()
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders").code == 0
        assert client.acknowledge(handle).entries[0].status.code == messaging.INVALID_HANDLE
        assert client.change(handle, 30_000).status.code == messaging.INVALID_HANDLE
        assert client.forward(handle) == messaging.OK, "anything else is repeated for ever"
        pass_with_ticks(served, service_of(served), MINUTE_MS)
        make_topic(peer, "orders", 1)
        client.sent("orders", "anew")
        assert read(waiting).bodies == ["anew"]


# -- members of both protocols --------------------------------------------------------------------------------------


def test_a_group_with_members_of_both_protocols_gives_each_message_once(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        for number in range(4):
            client.sent("orders", str(number))
        old = pop(peer, consumerGroup=GROUP, maxMsgNums=2)
        new = client.receive()
        assert sorted(old.bodies + new.bodies) == ["0", "1", "2", "3"]
        assert (len(old.bodies), len(new.bodies)) == (2, 2)
        assert pop(peer, consumerGroup=GROUP).bodies == []
        client.acknowledge(*new.handles)
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert sorted(client.receive().bodies) == sorted(old.bodies), "what the other has not acknowledged comes here"


def test_a_queue_that_a_member_pulls_gives_nothing_new_here(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        client.sent("orders", "for the puller")
        heartbeat(peer, "old", {"orders": "*"}, group=GROUP)
        assert pull(peer, "orders", group=GROUP, offset=0).bodies == ["for the puller"]
        assert client.receive().bodies == []


def test_a_message_acknowledged_by_one_protocol_is_done_for_the_other(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        client.sent("orders", "work")
        handle = client.receive().handles[0]
        topic, queue_id, offset, popped_at_ms = parse_receipt_handle(handle)
        words = f"0 {popped_at_ms} 0 0 0 0 {queue_id} {offset}"
        named: dict[str, Any] = {
            "consumerGroup": GROUP,
            "topic": topic,
            "queueId": queue_id,
            "offset": offset,
            "extraInfo": words,
        }
        assert peer.ask(Request.ACK_MESSAGE, **named).code == 0
        assert client.acknowledge(handle).entries[0].status.code == messaging.INVALID_HANDLE


# -- acknowledging --------------------------------------------------------------------------------------------------


def test_each_entry_of_an_acknowledgement_has_its_status(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.send("orders", "1", "2")
        first, second = client.receive().handles
        assert client.acknowledge(first).status.code == messaging.OK
        unknown = encode_receipt_handle("bills", 0, 0, 5)
        no_queue = encode_receipt_handle("orders", 900, 0, 5)
        handles = [second, first, "no handle", unknown, no_queue]
        answer = client.acknowledge(*handles)
        assert answer.status.code == messaging.MULTIPLE_RESULTS
        assert [entry.status.code for entry in answer.entries] == [messaging.OK] + [messaging.INVALID_HANDLE] * 4
        assert [entry.receipt_handle for entry in answer.entries] == handles
        assert [entry.message_id for entry in answer.entries] == [f"id-of-{handle}" for handle in handles]
        assert client.acknowledge(second).status.code == messaging.INVALID_HANDLE, "the one that all have"
        assert lease_count(served) == 0


def test_an_acknowledgement_of_nothing_or_too_much_is_refused(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        assert client.acknowledge().status.code == messaging.BAD_REQUEST
        assert client.acknowledge(*["h"] * 1_025).status.code == messaging.BAD_REQUEST
        assert client.acknowledge("h", group="no spaces").status.code == messaging.ILLEGAL_GROUP


# -- changing the invisible time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked_ms", "given_ms"), [(0, 1_000), (1, 1_000), (5_000, 5_000)])
def test_a_message_comes_again_when_its_consumer_wants_it(tmp_path: Path, asked_ms: int, given_ms: int) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "failed")
        handle = client.receive().handles[0]
        answer = client.change(handle, asked_ms)
        assert answer.status.code == messaging.OK
        served.pass_ms(given_ms - 1)
        served.settle()
        assert client.receive().bodies == []
        served.pass_ms(1)
        served.settle()
        again = client.receive().message
        assert attempt_of(again) == 2
        assert client.acknowledge(answer.receipt_handle).status.code == messaging.INVALID_HANDLE
        assert client.acknowledge(handle_of(again)).status.code == messaging.OK


def test_the_handle_of_a_change_is_good_and_the_one_before_is_not(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "slow")
        old = client.receive().handles[0]
        served.pass_ms(10)
        new = client.change(old, 60_000).receipt_handle
        assert new != old
        answer = client.change(old, 60_000)
        assert (answer.status.code, answer.receipt_handle) == (messaging.INVALID_HANDLE, old), "it is echoed"
        assert client.acknowledge(new).status.code == messaging.OK


def test_an_invisible_time_beyond_the_limit_is_refused_with_the_old_handle(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "slow")
        handle = client.receive().handles[0]
        for wrong_ms in (12 * 60 * MINUTE_MS + 1, -1):
            answer = client.change(handle, wrong_ms)
            assert (answer.status.code, answer.receipt_handle) == (messaging.ILLEGAL_INVISIBLE_TIME, handle)
        assert client.change(handle, 12 * 60 * MINUTE_MS).status.code == messaging.OK


def test_an_operators_limit_of_the_invisible_time_holds_here_too(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, invisible_ms_max=2 * MINUTE_MS) as served, calling(served) as client:
        client.sent("orders", "slow")
        assert client.receive(invisible_ms=2 * MINUTE_MS + 1).code == messaging.ILLEGAL_INVISIBLE_TIME
        handle = client.receive().handles[0]
        assert client.change(handle, 2 * MINUTE_MS + 1).status.code == messaging.ILLEGAL_INVISIBLE_TIME
        policy = (
            client.telemetry()
            .say(client_type=messaging.PUSH_CONSUMER, subscription={"group": {"name": GROUP}})
            .settings.backoff_policy
        )
        assert max(each.seconds for each in policy.customized_backoff.next) == 120, "or clients would ask in vain"
        assert client.change(handle, 2 * MINUTE_MS).status.code == messaging.OK


def test_a_try_that_was_suspended_does_not_count(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "not now")
        client.change(client.receive().handles[0], 5_000, suspend=True)
        served.pass_ms(5_000)
        served.settle()
        assert attempt_of(client.receive().message) == 1


# -- dead letters ---------------------------------------------------------------------------------------------------


def test_a_message_that_was_given_often_enough_is_a_dead_letter(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        put_group(peer, retryMaxTimes=2)
        entry = client.sent("orders", "bad", tag="t", user_properties={"color": "red"})
        for attempt in (1, 2, 3):
            found = client.receive().message
            assert attempt_of(found) == attempt
            client.change(handle_of(found), 1_000)
            served.pass_ms(1_000)
            served.settle()
        assert client.receive().bodies == []
        letter = client.receive(DEAD, group="undertakers").message
        assert (letter.body, letter.topic.name, dict(letter.user_properties)["color"]) == (b"bad", DEAD, "red")
        system = letter.system_properties
        assert (system.message_id, system.tag, system.dead_letter_queue.topic) == (entry.message_id, "t", "orders")


def test_a_consumer_gives_a_message_up_at_once(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        client.sent("orders", "bad")
        handle = client.receive().handles[0]
        assert client.forward(handle) == messaging.OK
        assert lease_count(served) == 0
        assert read_bodies(peer, DEAD) == ["bad"]
        assert client.forward(handle) == messaging.OK, "anything else is repeated for ever"
        assert read_bodies(peer, DEAD) == ["bad"]
        assert client.acknowledge(handle).status.code == messaging.INVALID_HANDLE


def test_a_message_that_is_given_up_twice_at_the_same_time_is_one_dead_letter(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving_grpc(tmp_path, disk=gate.disk) as served, connected(served) as peer, calling(served) as client:
        client.sent("orders", "bad")
        handle = client.receive().handles[0]
        client.forward(handle)
        client.sent("orders", "worse")
        handle = client.receive().handles[0]
        gate.hold()
        named: dict[str, Any] = {"group": {"name": GROUP}, "topic": {"name": "orders"}, "receipt_handle": handle}
        futures = [client.begin("ForwardMessageToDeadLetterQueue", **named) for _ in range(2)]
        gate.wait_for_flush()
        client.round_trip()
        gate.open()
        found = sorted(future.result().status.code for future in futures)
        assert found == [messaging.OK, messaging.TOO_MANY_REQUESTS], "which makes a client try again"
        assert client.forward(handle) == messaging.OK
        assert read_bodies(peer, DEAD) == ["bad", "worse"]


@pytest.mark.parametrize("handle", ["", "no handle", encode_receipt_handle("bills", 0, 0, 5)])
def test_a_handle_that_never_was_is_given_up_without_a_letter(tmp_path: Path, handle: str) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        assert client.forward(handle) == messaging.OK
        assert not served.call(lambda: served.broker.view.has_topic(DEAD))


# -- leases that are renewed ----------------------------------------------------------------------------------------


def test_a_message_of_a_push_consumer_is_its_own_as_long_as_it_works(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client, calling(served, "other") as other:
        client.sent("orders", "long work")
        handle = client.receive().handles[0]
        client.round_trip()
        service = service_of(served)
        for _ in range(10):
            pass_with_ticks(served, service, MINUTE_MS)
            client.round_trip()
            assert other.receive().bodies == []
        assert client.acknowledge(handle).status.code == messaging.OK, "the first handle is good all the time"
        assert lease_count(served) == 0


def test_a_message_is_not_renewed_where_nothing_has_come_since_from_its_connection(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client, calling(served, "other") as other:
        client.sent("orders", "perhaps lost")
        client.receive()
        (leases,) = [each.leases for each in service_of(served)._clients.values() if each.leases]
        served.call(lambda: leases.update({name: each._replace(read_count=1 << 30) for name, each in leases.items()}))
        pass_with_ticks(served, service_of(served), MINUTE_MS + 5_000)
        assert other.receive().bodies == ["perhaps lost"]


def test_a_message_is_renewed_for_three_hours_and_comes_again_then(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "for ever")
        client.receive()
        client.round_trip()
        service = service_of(served)
        for _ in range(180):
            pass_with_ticks(served, service, MINUTE_MS, step_ms=10_000)
            client.round_trip()
        assert client.receive().bodies == []
        pass_with_ticks(served, service, MINUTE_MS)
        assert attempt_of(client.receive().message) == 2


def test_a_client_that_is_gone_leaves_its_messages_to_others(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served, "other") as other:
        client = GrpcPeer(served, "gone")
        client.sent("orders", "left")
        client.receive()
        service = service_of(served)
        client.close()
        wait_until(lambda: served.call(lambda: any(each.lost_at_ns is not None for each in service._clients.values())))
        pass_with_ticks(served, service, 10_000)
        assert other.receive().bodies == []
        served.pass_ms(1_000)
        served.settle()
        found = other.receive().message
        assert (found.body, attempt_of(found)) == (b"left", 2)


def test_a_client_that_comes_back_in_time_keeps_its_messages(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served, "other") as other:
        client = GrpcPeer(served, "back")
        client.sent("orders", "mine")
        handle = client.receive().handles[0]
        client.round_trip()
        service = service_of(served)
        client.close()
        wait_until(lambda: served.call(lambda: any(each.lost_at_ns is not None for each in service._clients.values())))
        served.pass_ms(9_000)
        with calling(served, "back") as again:
            again.round_trip()
            pass_with_ticks(served, service, 2 * MINUTE_MS - 5_000)
            assert other.receive().bodies == []
            assert again.acknowledge(handle).status.code == messaging.OK


def test_a_client_that_is_silent_keeps_nothing_however_open_its_connection_is(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served, "other") as other, calling(served, "silent") as client:
        client.sent("orders", "stuck")
        client.receive()
        client.round_trip()
        service = service_of(served)
        pass_with_ticks(served, service, 115_000)
        assert other.receive().bodies == []
        pass_with_ticks(served, service, 10_000)
        assert other.receive().bodies == ["stuck"]


def test_the_first_handle_is_good_after_renewals_and_a_crash(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "work")
        handle = client.receive().handles[0]
        client.round_trip()
        pass_with_ticks(served, service_of(served), 90_000)
        at_ms = served.clock.now_ms()
        served.kill()
    with serving_grpc(tmp_path) as served, calling(served) as client:
        served.pass_ms(at_ms - served.clock.now_ms() + 1)
        assert client.receive().bodies == [], "its lease is in the log"
        assert client.acknowledge(handle).status.code == messaging.OK


def test_what_nobody_renews_after_a_crash_comes_again_soon(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "work")
        client.receive()
        served.kill()
    with serving_grpc(tmp_path) as served, calling(served) as client:
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert attempt_of(client.receive().message) == 2


# -- order ----------------------------------------------------------------------------------------------------------


def test_a_queue_of_a_group_that_keeps_order_gives_nothing_while_a_message_of_it_is_away(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        put_group(peer, consumeMessageOrderly=True)
        for number in range(3):
            client.sent("orders", str(number), message_group="g")
        first = client.receive(count_max=2)
        assert first.bodies == ["0", "1"]
        assert {each.system_properties.message_group for each in first.messages} == {"g"}
        assert client.receive().bodies == []
        client.acknowledge(first.handles[0])
        assert client.receive().bodies == [], "one of them is still away"
        waiting = client.begin_receive()
        client.round_trip()
        client.acknowledge(first.handles[1])
        client.sent("orders", "3", message_group="g")
        assert read(waiting).bodies == ["2", "3"]


def test_what_failed_comes_first_again_where_order_counts(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        put_group(peer, consumeMessageOrderly=True)
        for number in range(3):
            client.sent("orders", str(number), message_group="g")
        client.change(client.receive(count_max=1).handles[0], 5_000)
        assert client.receive().bodies == []
        served.pass_ms(5_000)
        served.settle()
        assert client.receive().bodies == ["0", "1", "2"]


# -- receives that are repeated -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_order", [False, True])
def test_a_receive_under_the_same_id_gets_the_same_again_uncounted(tmp_path: Path, is_in_order: bool) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        put_group(peer, consumeMessageOrderly=is_in_order)
        client.send("orders", "0", "1", message_group="g")
        lost = client.receive(count_max=2, attempt_id="try-1")
        served.pass_ms(5)
        found = client.receive(count_max=2, attempt_id="try-1", wait_ms=20_000)
        assert found.bodies == lost.bodies == ["0", "1"]
        assert [attempt_of(each) for each in found.messages] == [1, 1]
        assert client.acknowledge(*found.handles).status.code == messaging.OK
        client.sent("orders", "2", message_group="g")
        assert client.receive(attempt_id="try-2").bodies == ["2"]


def test_what_was_acknowledged_or_given_again_is_not_taken_back(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        client.send("orders", "done", "failed")
        first = client.receive(attempt_id="try-1")
        client.acknowledge(first.handles[0])
        client.change(first.handles[1], 1_000)
        served.pass_ms(1_000)
        served.settle()
        (second,) = client.receive(attempt_id="try-2").messages
        assert client.receive(attempt_id="try-1").bodies == []
        assert (second.body, attempt_of(second)) == (b"failed", 2)
        assert client.acknowledge(handle_of(second)).status.code == messaging.OK


def test_ids_of_receives_are_remembered_as_far_as_a_client_needs(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        for number in range(70):
            client.sent("orders", str(number))
            client.receive(attempt_id=f"try-{number}")
        client.sent("orders")
        client.receive(attempt_id="x" * 65)
        (found,) = service_of(served)._clients.values()
        assert list(found.attempts) == [f"try-{number}" for number in range(6, 70)]


def test_what_a_receive_has_got_goes_back_if_it_is_cancelled_before_its_other_pop_ends(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving_grpc(tmp_path, disk=gate.disk) as served, connected(served) as peer, calling(served) as client:
        make_topic(peer, "orders", 1)
        fail_of_older_member(peer)
        client.sent("orders", "new")
        client.receive("bills", count_max=1, group="others")
        client.round_trip()
        gate.hold()
        waiting = client.begin_receive()
        gate.wait_for_flush()
        waiting.cancel()
        wait_until(lambda: not calls_of(served, "ReceiveMessage"))
        gate.open()
        with calling(served, "other") as other:
            bodies: list[str] = []
            attempts: list[int] = []
            while len(bodies) < 2:
                found = other.receive(wait_ms=20_000)
                bodies += found.bodies
                attempts += [attempt_of(each) for each in found.messages if each.body == b"new"]
        assert sorted(bodies) == ["failed", "new"]
        assert attempts == [1]
        assert all(not client.leases for client in service_of(served)._clients.values() if client.client_id == "c1")


# -- many -----------------------------------------------------------------------------------------------------------


def test_many_receives_wait_on_one_connection(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders")
        client.acknowledge(*client.receive().handles)
        waiting = [client.begin_receive(count_max=1) for _ in range(300)]
        client.round_trip()
        wait_until(lambda: held_count(served) == 300)
        client.call("SendMessage", messages=[message("orders", str(number)) for number in range(300)])
        bodies = [body for stream in waiting for body in read(stream).bodies]
        assert sorted(bodies) == sorted(map(str, range(300)))
        assert held_count(served) == 0
