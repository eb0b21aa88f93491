"""Routes and ports: how a client finds the broker, and what it is told about topics that are not there yet."""

import asyncio
from pathlib import Path

import orjson
import pytest

from postdate.broker.broker import Broker
from postdate.clock import SystemClock
from postdate.errors import UsageError
from postdate.message import LOOPBACK
from postdate.server import Server
from postdate.storage.disk import RealDisk
from postdate.wire import codes
from postdate.wire.bodies import Route, decode_route
from postdate.wire.ids import host_of, message_id, parse_message_id
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from tests.support.peer import (
    Peer,
    ask_json,
    connected,
    heartbeat,
    make_topic,
    read_all,
    read_bodies,
    sent,
)
from tests.support.server import SERVED, Served, configured, serving


def port_of(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def route(served: Served, topic: str) -> Route:
    """The route of a topic, as the route port tells it."""
    with connected(served, port=port_of(served.server.route_address)) as peer:
        answer = peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic=topic)
        assert answer.code == codes.SUCCESS, answer
        return decode_route(answer.body)


def test_every_port_serves_everything(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        ports = [
            port_of(address)
            for address in (served.server.route_address, served.server.broker_address, served.server.vip_address)
        ]
        assert len(set(ports)) == 3
        for port in ports:
            with connected(served, port=port) as peer:
                sent(peer, "orders", str(port))
                assert str(port) in read_bodies(peer, "orders")
                assert peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="orders").code == codes.SUCCESS


def test_without_a_vip_port_there_is_none(tmp_path: Path) -> None:
    with serving(tmp_path, vip_port=-1) as served:
        assert served.server.vip_address is None
        assert len(served.server._listeners) == 2


def test_the_route_of_a_topic_names_the_broker_and_its_queues(tmp_path: Path) -> None:
    with serving(tmp_path, broker_name="b1", cluster_name="c1") as served, connected(served) as peer:
        make_topic(peer, "orders", readQueueNums=6, writeQueueNums=4, perm=4)
        answer = peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="orders")
        assert orjson.loads(answer.body) == {
            "brokerDatas": [
                {
                    "brokerAddrs": {"0": served.server.broker_address}, "brokerName": "b1", "cluster": "c1",
                    "enableActingMaster": False,
                }
            ],
            "filterServerTable": {},
            "queueDatas": [
                {"brokerName": "b1", "perm": 4, "readQueueNums": 6, "writeQueueNums": 4, "topicSysFlag": 0}
            ],
        }  # fmt: skip


def test_the_route_of_tbw102_says_how_a_new_topic_would_look(tmp_path: Path) -> None:
    with serving(tmp_path, default_queue_count=5) as served:
        (queues,) = route(served, "TBW102").queues
        assert (queues.read_queue_count, queues.write_queue_count, queues.perm) == (5, 5, 7)


def test_without_automatic_topics_tbw102_is_unknown(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_topics=False) as served, connected(served) as peer:
        assert peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="TBW102").code == codes.TOPIC_NOT_EXIST


def test_an_unknown_topic_has_no_route(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_topics=False) as served, connected(served) as peer:
        for name in ("%DLQ%workers", "", "%RETRY%", "%RETRY%not a name", "not a name", "x" * 5_000, "SELF_TEST_TOPIC"):
            answer = peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic=name)
            assert answer.code == codes.TOPIC_NOT_EXIST
            assert "does not exist" in (answer.remark or "")


def test_without_automatic_topics_an_unknown_topic_has_no_route(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_topics=False) as served, connected(served) as peer:
        assert peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="nowhere").code == codes.TOPIC_NOT_EXIST


@pytest.mark.parametrize(("default_queue_count", "promised"), [(8, 4), (2, 2)])
def test_a_new_topic_has_the_route_that_it_will_have(tmp_path: Path, default_queue_count: int, promised: int) -> None:
    with serving(tmp_path, default_queue_count=default_queue_count) as served, connected(served) as peer:
        (queues,) = route(served, "orders").queues
        assert (queues.read_queue_count, queues.write_queue_count, queues.perm) == (promised, promised, 6)
        assert served.call(lambda: "orders" not in served.broker.fold.topics.by_name), "asking makes nothing"
        heartbeat(peer, "c1", {"orders": "*"})
        assert served.call(lambda: served.broker.fold.topics.get("orders").write_queue_count) == promised


def test_a_subscription_makes_no_topic_where_that_is_switched_off(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_topics=False) as served, connected(served) as peer:
        assert heartbeat(peer, "c1", {"orders": "*"}).code == codes.SUCCESS
        assert served.call(lambda: "orders" not in served.broker.fold.topics.by_name)


def test_a_queue_that_was_promised_and_not_made_is_another_one(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        first = {"a": "g", "b": "orders", "d": 2, "e": 0, "i": "UNIQ_KEY\x01A\x02"}
        assert peer.ask(Request.SEND_MESSAGE_V2, b"made with two queues", **first).fields["queueId"] == "0"
        answer = peer.ask(Request.SEND_MESSAGE_V2, b"to the fourth", **(first | {"e": 3}))
        assert (answer.code, answer.fields["queueId"]) == (codes.SUCCESS, "1")
        answer = peer.ask(Request.SEND_MESSAGE_V2, b"to one that nobody promised", **(first | {"e": 4}))
        assert answer.code == codes.MESSAGE_ILLEGAL


def test_a_topic_that_can_never_be_has_no_route(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for name in ("%DLQ%workers", "", "two words", "%RETRY%", "%RETRY%not a name", "x" * 5_000, "SELF_TEST_TOPIC"):
            assert peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic=name).code == codes.TOPIC_NOT_EXIST


def test_a_retry_topic_has_a_route_before_anybody_made_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        (queues,) = route(served, "%RETRY%workers").queues
        assert (queues.read_queue_count, queues.write_queue_count, queues.perm) == (1, 1, 6)


def test_without_automatic_groups_only_a_known_group_has_a_retry_route(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_groups=False) as served, connected(served) as peer:
        assert peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%workers").code == codes.TOPIC_NOT_EXIST
        peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, b'{"groupName":"workers"}')
        assert route(served, "%RETRY%workers").queues[0].write_queue_count == 1


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("10.1.2.3", "10.1.2.3:{port}"),
        ("localhost:1234", "localhost:1234"),
        ("10.1.2.3:1234", "10.1.2.3:1234"),
        ("[2001:db8::1]", "[2001:db8::1]:{port}"),
        ("[2001:db8::1]:1234", "[2001:db8::1]:1234"),
    ],
)
def test_a_route_holds_the_address_that_is_advertised(tmp_path: Path, advertise: str, address: str) -> None:
    with serving(tmp_path, advertise=advertise) as served:
        (broker,) = route(served, "TBW102").brokers
        assert broker.address == address.format(port=served.port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_without_advertising_a_route_holds_the_address_that_the_client_came_to(tmp_path: Path, host: str) -> None:
    with serving(tmp_path, host="0.0.0.0") as served:
        with connected(served, host=host, port=port_of(served.server.route_address)) as peer:
            answer = peer.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")
        assert decode_route(answer.body).brokers[0].address == f"{host}:{served.port}"


@pytest.mark.parametrize(
    ("advertise", "host", "port"),
    [
        ("", "127.0.0.1", None),
        ("10.1.2.3", "10.1.2.3", None),
        ("10.1.2.3:1234", "10.1.2.3", 1_234),
        ("localhost:1234", "127.0.0.1", 1_234),
        ("x" * 64, "127.0.0.1", None),  # no name that could have an address
    ],
)
def test_ids_and_delivered_records_hold_the_address_of_the_route(
    tmp_path: Path, advertise: str, host: str, port: int | None
) -> None:
    with serving(tmp_path, advertise=advertise) as served, connected(served) as peer:
        expected = host_of(host, port or served.port)
        answer = sent(peer, "orders", b"x")
        assert answer.fields["msgId"] == message_id(expected, parse_message_id(answer.fields["msgId"])[1])
        (record,) = read_all(peer, "orders")
        assert record.store_host == expected
        viewed = peer.ask(Request.VIEW_MESSAGE_BY_ID, offset=record.offset)
        assert decode_records(viewed.body)[0].store_host == expected


def test_an_address_of_ipv6_is_in_ids_and_not_in_records_of_ipv4(tmp_path: Path) -> None:
    with serving(tmp_path, advertise="[2001:db8::1]:1234") as served, connected(served) as peer:
        expected = host_of("2001:db8::1", 1_234)
        answer = sent(peer, "orders", b"x")
        assert parse_message_id(answer.fields["msgId"])[0] == expected
        assert read_all(peer, "orders")[0].store_host == LOOPBACK


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with serving(tmp_path / "first") as first:
        settings, limits = configured(SERVED | {"broker_port": first.port})
        broker = Broker(RealDisk(tmp_path / "second"), settings, limits=limits)
        with pytest.raises(UsageError, match=rf"port {first.port} of 127.0.0.1 is in use .* --broker-port"):
            asyncio.run(Server(broker, SystemClock()).start())
        broker.close()


def perm_of(peer: Peer, topic: str) -> int:
    (queues,) = ask_json(peer, Request.GET_ROUTEINFO_BY_TOPIC, topic=topic)["queueDatas"]
    return int(queues["perm"])


def test_there_is_one_cluster_with_one_broker(tmp_path: Path) -> None:
    with serving(tmp_path, broker_name="here", cluster_name="all") as served, connected(served) as peer:
        told = ask_json(peer, Request.GET_BROKER_CLUSTER_INFO)
        assert told["clusterAddrTable"] == {"all": ["here"]}
        assert told["brokerAddrTable"]["here"]["brokerAddrs"] == {"0": served.server.broker_address}
        assert told["brokerAddrTable"]["here"]["cluster"] == "all"


def test_routes_lose_and_regain_the_permission_to_write(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        make_topic(peer, "archive", perm=4)
        answer = peer.ask(Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="postdate")
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"wipeTopicCount": "1"}), "the archive had none"
        assert (perm_of(peer, "orders"), perm_of(peer, "archive"), perm_of(peer, "TBW102")) == (4, 4, 5)
        sent(peer, "orders", "who knows the way gets through")
        answer = peer.ask(Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="postdate")
        assert answer.fields == {"wipeTopicCount": "0"}
        answer = peer.ask(Request.ADD_WRITE_PERM_OF_BROKER, brokerName="postdate")
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"addTopicCount": "1"})
        assert (perm_of(peer, "orders"), perm_of(peer, "archive"), perm_of(peer, "TBW102")) == (6, 4, 7)
        peer.ask(Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="postdate")
    with serving(tmp_path) as served, connected(served) as peer:
        assert perm_of(peer, "orders") == 6, "it was taken until the broker stops"


@pytest.mark.parametrize("code", [Request.WIPE_WRITE_PERM_OF_BROKER, Request.ADD_WRITE_PERM_OF_BROKER])
def test_only_this_broker_has_permissions_to_change(tmp_path: Path, code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(code, brokerName="another")
        assert answer.code == codes.INVALID_PARAMETER
        assert answer.remark == "there is no broker 'another', this is 'postdate'"
        assert peer.ask(code).code == codes.INVALID_PARAMETER


def test_a_route_is_forgotten_with_its_topic_and_not_before(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = peer.ask(Request.DELETE_TOPIC_IN_NAMESRV, topic="orders")
        assert answer.code == codes.ILLEGAL_OPERATION
        assert "delete it from the broker" in (answer.remark or "")
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        assert peer.ask(Request.DELETE_TOPIC_IN_NAMESRV, topic="orders").code == codes.SUCCESS
