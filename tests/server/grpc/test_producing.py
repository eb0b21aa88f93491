"""Sending and recalling over gRPC, and by the older protocol what was sent here."""

from pathlib import Path
from typing import Any

import pytest

from postdate.wire import messaging
from postdate.wire.requests import Request
from postdate.wire.translation import of_ms, to_ms
from tests.support.core import DAY_MS, T0
from tests.support.grpc_client import GrpcPeer, calling, message, read, serving_grpc
from tests.support.handles import recall_handle
from tests.support.peer import Gate, Peer, connected, make_topic, properties_of, pull, read_all, read_bodies, sent
from tests.support.server import Served


def due(at_ms: int) -> dict[str, Any]:
    return {"delivery_timestamp": of_ms(at_ms), "message_type": messaging.DELAY}


def make_typed(peer: Peer, attribute: str) -> None:
    answer = peer.ask(
        Request.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=1, writeQueueNums=1,
        attributes=f"+message.type={attribute}",
    )  # fmt: skip
    assert answer.code == 0, answer


def queues_of(served: Served, topic: str, body: str) -> list[int]:
    """The queues in which a body is."""
    with connected(served) as peer:
        count = served.call(lambda: served.broker.view.topic(topic)).read_queue_count
        return [queue for queue in range(count) for each in read_bodies(peer, topic, queue) if each == body]


# -- sending --------------------------------------------------------------------------------------------------------


def test_a_message_sent_here_is_read_by_the_older_protocol(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path) as served,
        calling(served) as client,
        connected(served) as peer,
    ):
        make_topic(peer, "orders", 1)
        entry = client.sent(
            "orders", "paid", tag="t", keys=["k1", "k2"], message_id="01AB", user_properties={"color": "red"}
        )
        assert (entry.message_id, entry.transaction_id, entry.offset, entry.recall_handle) == ("01AB", "01AB", 0, "")
        assert client.sent("orders").offset == 1
        record = read_all(peer, "orders")[0]
        assert record.body == b"paid"
        assert properties_of(record) == {"TAGS": "t", "KEYS": "k1 k2", "UNIQ_KEY": "01AB", "color": "red"}
        assert (record.born_at_ms, record.sys_flag) == (T0, 0)


def test_a_message_of_the_older_protocol_is_received_here(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client, connected(served) as peer:
        sent(peer, "orders", "paid", TAGS="t", KEYS="k1 k2", UNIQ_KEY="7F01", color="red")
        found = client.receive().message
        assert (found.body, dict(found.user_properties)) == (b"paid", {"color": "red"})
        system = found.system_properties
        assert (system.tag, list(system.keys), system.message_id) == ("t", ["k1", "k2"], "7F01")


def test_a_delayed_message_comes_in_its_millisecond(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        entry = client.sent("orders", "later", **due(T0 + 12_345))
        assert entry.recall_handle
        waiting = client.begin_receive()
        client.round_trip()
        served.pass_ms(12_344)
        served.settle()
        assert client.receive().bodies == []
        served.pass_ms(1)
        found = read(waiting).message
        assert found.body == b"later"
        assert to_ms(found.system_properties.delivery_timestamp) == T0 + 12_345
        assert found.system_properties.message_type == messaging.DELAY


@pytest.mark.parametrize("at_ms", [T0 - 1, T0, 0])
def test_a_delivery_time_that_is_past_is_now(tmp_path: Path, at_ms: int) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        entry = client.sent("orders", "now", **due(at_ms))
        assert entry.recall_handle == ""
        assert client.receive().bodies == ["now"]


def test_a_message_may_wait_as_long_as_the_broker_lets_it(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, delay_ms_max=40 * DAY_MS) as served, calling(served) as client:
        assert client.sent("orders", **due(T0 + 40 * DAY_MS)).recall_handle
        answer = client.send("orders", **due(T0 + 40 * DAY_MS + 1))
        assert answer.status.code == messaging.ILLEGAL_DELIVERY_TIME
        assert "delay_ms_max" in answer.status.message


def test_messages_of_a_group_stay_in_one_queue_from_the_first_on(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, default_queue_count=8) as served, calling(served) as client:
        for group in ("a", "b", "c", "d", "e"):
            for number in range(3):
                client.sent("orders", f"{group}{number}", message_group=group)
        found = {
            group: {queue for number in range(3) for queue in queues_of(served, "orders", f"{group}{number}")}
            for group in "abcde"
        }
        assert all(len(queues) == 1 for queues in found.values()), found
        assert len(set.union(*found.values())) > 1, "groups are spread"


def test_messages_without_a_group_are_spread_over_all_queues(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client, connected(served) as peer:
        make_topic(peer, "orders", 4)
        for number in range(8):
            client.sent("orders", str(number))
        assert [len(read_bodies(peer, "orders", queue)) for queue in range(4)] == [2, 2, 2, 2]


def test_messages_of_one_call_are_stored_each(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        answer = client.send("orders", "a", "b", "c")
        assert answer.status.code == messaging.OK
        assert [entry.status.code for entry in answer.entries] == [messaging.OK] * 3
        assert sorted(client.receive().bodies) == ["a", "b", "c"]


def test_calls_that_are_in_flight_together_share_a_flush(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving_grpc(tmp_path, disk=gate.disk) as served, calling(served) as client:
        client.sent("orders")
        gate.hold()
        futures = [client.begin("SendMessage", messages=[message("orders", str(number))]) for number in range(20)]
        gate.wait_for_flush()
        client.round_trip()
        assert not any(future.done() for future in futures)
        gate.open()
        assert {future.result().status.code for future in futures} == {messaging.OK}
        assert gate.flush_count < 20


@pytest.mark.parametrize("messages", [[], [message("orders"), message("bills")]])
def test_a_call_without_messages_or_with_several_topics_is_refused(tmp_path: Path, messages: list[Any]) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        assert client.code("SendMessage", messages=messages) == messaging.CORRUPTED
        assert client.receive().bodies == []


def test_a_call_with_too_many_messages_is_refused(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        one = message("orders")
        assert client.code("SendMessage", messages=[one] * 1_025) == messaging.BAD_REQUEST
        assert client.code("SendMessage", messages=[one] * 1_024) == messaging.OK


@pytest.mark.parametrize(
    ("topic", "body", "system", "code"),
    [
        ("", "x", {}, messaging.ILLEGAL_TOPIC),
        ("no spaces", "x", {}, messaging.ILLEGAL_TOPIC),
        ("orders", "", {}, messaging.BAD_REQUEST),
        ("orders", bytes(1_001), {}, messaging.BODY_TOO_LARGE),
        ("orders", "x", {"tag": "a|b"}, messaging.ILLEGAL_TAG),
        ("orders", "x", {"message_id": ""}, messaging.ILLEGAL_MESSAGE_ID),
        ("orders", "x", {"born_timestamp": {"seconds": 2**62}}, messaging.BAD_REQUEST),
        ("orders", "x", {"user_properties": {"REAL_TOPIC": "x"}}, messaging.ILLEGAL_PROPERTY),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_code(
    tmp_path: Path, topic: str, body: str | bytes, system: dict[str, Any], code: int
) -> None:
    with serving_grpc(tmp_path, body_bytes_max=1_000) as served, calling(served) as client:
        answer = client.send(topic, body, **system)
        assert answer.status.code == code
        assert answer.status.message
        assert not answer.entries


@pytest.mark.parametrize(
    ("attribute", "system", "code"),
    [
        ("NORMAL", {}, messaging.OK),
        ("NORMAL", due(T0 + 5_000), messaging.TYPE_MISMATCH),
        ("NORMAL", {"message_group": "g"}, messaging.TYPE_MISMATCH),
        ("FIFO", {"message_group": "g"}, messaging.OK),
        ("FIFO", {}, messaging.TYPE_MISMATCH),
        ("DELAY", due(T0 + 5_000), messaging.OK),
        ("DELAY", {}, messaging.TYPE_MISMATCH),
        ("MIXED", due(T0 + 5_000), messaging.OK),
    ],
)
def test_a_topic_takes_messages_of_its_type_alone(
    tmp_path: Path, attribute: str, system: dict[str, Any], code: int
) -> None:
    with (
        serving_grpc(tmp_path) as served,
        connected(served) as peer,
        calling(served) as client,
    ):
        make_typed(peer, attribute)
        answer = client.send("orders", **system)
        assert answer.status.code == code
        assert (attribute in answer.status.message) == (code != messaging.OK)


def test_a_topic_that_may_not_be_made_or_written_refuses(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path, auto_create_topics=False) as served, connected(served) as peer,
        calling(served) as client,
    ):  # fmt: skip
        assert client.send("orders").status.code == messaging.TOPIC_NOT_FOUND
        assert client.send("orders", message_group="g").status.code == messaging.TOPIC_NOT_FOUND
        peer.ask(Request.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=1, writeQueueNums=1, perm=4)
        assert client.send("orders").status.code == messaging.FORBIDDEN


def test_a_broker_that_has_too_much_to_do_asks_for_patience(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, wheel_entries_max=1) as served, calling(served) as client:
        client.sent("orders", **due(T0 + 5_000))
        answer = client.send("orders", **due(T0 + 5_000))
        assert (answer.status.code, answer.entries[0].status.code) == (messaging.TOO_MANY_REQUESTS,) * 2


def test_each_message_of_a_call_has_its_own_status(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, wheel_entries_max=1) as served, calling(served) as client:
        later = due(T0 + 5_000)
        messages = [message("orders", "1"), message("orders", "2", **later), message("orders", "3", **later)]
        answer = client.call("SendMessage", messages=messages)
        assert answer.status.code == messaging.MULTIPLE_RESULTS
        codes = [entry.status.code for entry in answer.entries]
        assert codes == [messaging.OK, messaging.OK, messaging.TOO_MANY_REQUESTS]
        ids = [entry.message_id for entry in answer.entries]
        assert ids == [each.system_properties.message_id for each in messages]


# -- recalling ------------------------------------------------------------------------------------------------------


def recall(client: GrpcPeer, handle: str, topic: str = "orders") -> Any:
    return client.call("RecallMessage", topic={"name": topic}, recall_handle=handle)


def test_a_recalled_message_is_never_delivered(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        entry = client.sent("orders", "late", **due(T0 + 5_000))
        answer = recall(client, entry.recall_handle)
        assert (answer.status.code, answer.message_id) == (messaging.OK, entry.message_id)
        served.pass_ms(10_000)
        served.settle()
        assert client.receive().bodies == []


def test_a_recall_says_when_it_comes_too_late_or_names_nothing(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        entry = client.sent("orders", "soon", **due(T0 + 5_000))
        served.pass_ms(5_000)
        served.settle()
        late = recall(client, entry.recall_handle)
        assert late.status.code != messaging.OK
        assert "delivered" in late.status.message
        for handle in ("", "no handle", "bm90aGluZw=="):
            assert recall(client, handle).status.code == messaging.BAD_REQUEST
        assert recall(client, entry.recall_handle, "bills").status.code == messaging.TOPIC_NOT_FOUND


def test_a_recall_of_what_never_was_says_that_it_is_unknown(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        other = client.sent("bills", **due(T0 + 5_000))
        client.sent("orders")
        name = served.broker.settings.broker_name
        answer = recall(client, recall_handle("orders", name, T0 + 5_000, other.message_id))
        assert answer.status.code != messaging.OK
        assert "unknown" in answer.status.message


def test_a_message_sent_here_is_recalled_by_the_older_protocol_and_the_other_way_round(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path) as served,
        calling(served) as client,
        connected(served) as peer,
    ):
        handle = client.sent("orders", "new", **due(T0 + 5_000)).recall_handle
        answer = peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=handle)
        assert (answer.code, answer.fields["outcome"]) == (0, "cancelled")
        old = sent(peer, "orders", "old", TIMER_DELIVER_MS=T0 + 5_000, UNIQ_KEY="7F01").fields["recallHandle"]
        found = recall(client, old)
        assert (found.status.code, found.message_id) == (messaging.OK, "7F01")
        served.pass_ms(5_000)
        served.settle()
        assert client.receive().bodies == []
        queue_count = served.broker.view.topic("orders").read_queue_count
        assert [pull(peer, "orders", queue_id=queue).bodies for queue in range(queue_count)] == [[]] * queue_count
