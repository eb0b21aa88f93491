"""Who calls: client ids, users and their rights, methods that are not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from postdate.access.rules import Rule
from postdate.access.users import Users, make_rule, without_user
from postdate.clock import ManualClock
from postdate.server.audit import AUDIT_FOLDER, read_audit
from postdate.wire import messaging
from postdate.wire.messaging import MESSAGES, PRODUCER, PUSH_CONSUMER, SERVICE_PATH
from postdate.wire.signature import Credentials
from tests.support.bulk import wait_until
from tests.support.core import T0
from tests.support.grpc_client import (
    DATE,
    GROUP,
    GrpcPeer,
    authorization,
    calling,
    pass_with_ticks,
    read,
    service_of,
    serving_grpc,
)
from tests.support.peer import add_user, make_topic, notice_users, secret_of, signed_in
from tests.support.server import WAIT_S, Served, serving

READS = (make_rule("Topic:orders", ["Sub"]), make_rule(f"Group:{GROUP}", ["Sub"]))
WRITES = (make_rule("Topic:orders", ["Pub"]),)


# -- methods and clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [SERVICE_PATH + "PullMessage", SERVICE_PATH + "QueryOffset", "/other.Service/QueryRoute", SERVICE_PATH]
)
def test_a_method_that_is_not_there_is_unimplemented(tmp_path: Path, path: str) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        method: Any = client.channel.unary_unary(path)
        with pytest.raises(grpc.RpcError) as caught:
            method(b"", metadata=client.metadata(), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        client.round_trip()


def test_a_message_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        answer = MESSAGES["QueryRouteResponse"]
        path = SERVICE_PATH + "QueryRoute"
        method: Any = client.channel.unary_unary(path, response_deserializer=answer.FromString)
        found = method(b"\xff\xff\xff", metadata=client.metadata(), timeout=WAIT_S)
        assert found.status.code == messaging.BAD_REQUEST


@pytest.mark.parametrize("client_id", ["", "c" * 256])
def test_a_call_without_the_id_of_a_client_is_refused(tmp_path: Path, client_id: str) -> None:
    with serving_grpc(tmp_path) as served, calling(served, client_id) as client:
        assert client.code("QueryRoute", topic={"name": "orders"}) == messaging.NO_CLIENT_ID
        assert client.code("Heartbeat") == messaging.NO_CLIENT_ID
        assert client.receive().code == messaging.NO_CLIENT_ID
        telemetry = client.telemetry()
        telemetry.write(settings={"client_type": PRODUCER, "publishing": {"topics": []}})
        assert telemetry.read_end()[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_clients_of_one_connection_are_bounded(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, connection_members_max=2) as served, calling(served) as client:
        topic = {"name": "orders"}
        for name, code in (("a", messaging.OK), ("b", messaging.OK), ("c", messaging.TOO_MANY_REQUESTS), ("a", 20_000)):
            client.client_id = name
            assert client.code("QueryRoute", topic=topic) == code, name
        with calling(served, "c") as other:
            assert other.code("QueryRoute", topic=topic) == messaging.OK, "on another connection"


def test_one_client_may_have_several_connections(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as first, calling(served) as second:
        first.sent("orders", "work")
        handle = first.receive().handles[0]
        assert second.acknowledge(handle).status.code == messaging.OK
        (client,) = service_of(served)._clients.values()
        assert len(client.peers) == 2
        first.close()
        wait_until(lambda: len(client.peers) == 1)
        assert client.lost_at_ns is None
        second.round_trip()


def test_clients_that_only_ask_are_forgotten_with_their_connection(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served, "other") as other:
        other.round_trip()
        service = service_of(served)
        for number in range(5):
            with calling(served, f"c{number}") as client:
                client.round_trip()
                client.sent("orders")
        wait_until(lambda: served.call(lambda: len(service._clients)) == 1)


# -- users ----------------------------------------------------------------------------------------------------------


@contextmanager
def guarded(folder: Path, *users: tuple[str, tuple[Rule, ...]]) -> Iterator[Served]:
    """A broker with a super user, a topic, and users with rules."""
    folder.mkdir(exist_ok=True)
    add_user(folder, "admin", is_super=True)
    for name, rules in users:
        add_user(folder, name, *rules)
    with serving(folder, ManualClock(T0), has_access=True, grpc_port=0) as served:
        with signed_in(served, "admin") as admin:
            make_topic(admin, "orders")
        yield served


def signed(served: Served, name: str, client_id: str = "c1", **how: Any) -> Any:
    return calling(served, client_id, Credentials(name, secret_of(name)), **how)


def test_a_call_that_nobody_has_signed_is_refused(tmp_path: Path) -> None:
    wrong = Credentials("admin", "not the secret")
    nobody = Credentials("nobody", secret_of("nobody"))
    with guarded(tmp_path) as served:
        for credentials in (None, wrong, nobody):
            with calling(served, credentials=credentials) as client:
                assert client.code("QueryRoute", topic={"name": "orders"}) == messaging.UNAUTHORIZED
                assert client.send("orders").status.code == messaging.UNAUTHORIZED
                assert client.receive().code == messaging.UNAUTHORIZED
                assert client.code("Heartbeat", client_type=PRODUCER) == messaging.UNAUTHORIZED
                telemetry = client.telemetry()
                telemetry.write(settings={"client_type": PRODUCER, "publishing": {"topics": []}})
                code, text = telemetry.read_end()
                assert code is grpc.StatusCode.UNAUTHENTICATED
                assert "not signed" in text
        with signed(served, "admin") as client:
            assert client.sent("orders")
            assert len(client.receive().messages) == 1


def test_a_signature_of_any_client_is_read(tmp_path: Path) -> None:
    credentials = Credentials("admin", secret_of("admin"))
    with guarded(tmp_path) as served:
        for text in (
            authorization(credentials, scope="/cn-hangzhou/Rocketmq"), authorization(credentials, is_upper=True),
        ):  # fmt: skip
            with calling(served, headers={"authorization": text}) as client:
                client.sent("orders")
        other_time = {"authorization": authorization(credentials), "x-mq-date-time": DATE.replace("2030", "2031")}
        with calling(served, headers=other_time) as client:
            assert client.send("orders").status.code == messaging.UNAUTHORIZED


def test_a_user_does_what_its_rules_say(tmp_path: Path) -> None:
    with guarded(tmp_path, ("reader", READS), ("writer", WRITES), ("guest", ())) as served:
        orders, group = {"name": "orders"}, {"name": GROUP}
        with signed(served, "writer") as writer:
            writer.sent("orders", "work")
            assert writer.send("bills").status.code == messaging.FORBIDDEN
            assert writer.receive().code == messaging.FORBIDDEN
            assert writer.code("QueryRoute", topic=orders) == messaging.OK
        with signed(served, "guest", "c3") as guest:
            assert guest.code("QueryRoute", topic=orders) == messaging.FORBIDDEN
            assert guest.code("QueryAssignment", topic=orders, group=group) == messaging.FORBIDDEN
            assert guest.code("RecallMessage", topic=orders, recall_handle="h") == messaging.FORBIDDEN
            for settings in (
                {"publishing": {"topics": [orders]}},
                {"subscription": {"group": group, "subscriptions": [{"topic": orders}]}},
            ):  # fmt: skip
                telemetry = guest.telemetry()
                telemetry.write(settings=settings)
                code, text = telemetry.read_end()
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "right" in text
        with signed(served, "reader", "c2") as reader, signed(served, "guest", "c3") as guest:
            assert reader.send("orders").status.code == messaging.FORBIDDEN
            handle = reader.receive().handles[0]
            assert guest.acknowledge(handle).status.code == messaging.FORBIDDEN
            assert guest.change(handle, 0).status.code == messaging.FORBIDDEN
            assert guest.forward(handle) == messaging.FORBIDDEN
            assert reader.acknowledge(handle).status.code == messaging.OK


def test_a_receive_of_a_user_who_is_removed_ends(tmp_path: Path) -> None:
    with guarded(tmp_path, ("reader", READS)) as served, signed(served, "reader") as reader:
        waiting = reader.begin_receive()
        reader.code("Heartbeat", client_type=PUSH_CONSUMER, group={"name": GROUP})
        Users(tmp_path).change(without_user("reader"))
        notice_users(served)
        assert read(waiting).code == messaging.FORBIDDEN
        assert reader.receive().code == messaging.UNAUTHORIZED


def test_a_client_of_another_user_is_another_client(tmp_path: Path) -> None:
    with (
        guarded(tmp_path, ("reader", READS), ("guest", READS)) as served, signed(served, "reader", "same") as reader,
        signed(served, "guest", "same") as guest, signed(served, "admin", "admin") as admin,
    ):  # fmt: skip
        admin.sent("orders", "work")
        handle = reader.receive().handles[0]
        guest.round_trip()
        assert guest.code("NotifyClientTermination", group={"name": GROUP}) == messaging.OK
        service = service_of(served)
        for _ in range(4):
            pass_with_ticks(served, service, 30_000)
            reader.code("Heartbeat", client_type=PUSH_CONSUMER, group={"name": GROUP})
            assert admin.receive().bodies == [], "what a goodbye of another user has not released"
        members = served.call(lambda: served.dispatcher.sessions.members.of(GROUP))
        assert "same" in [member.client_id for member in members]
        assert reader.acknowledge(handle).status.code == messaging.OK


def test_calls_of_several_users_on_one_connection_are_each_their_own(tmp_path: Path) -> None:
    with guarded(tmp_path, ("reader", READS), ("writer", WRITES)) as served, signed(served, "writer") as client:
        futures = []
        for name in ("writer", "reader") * 10:
            client.credentials = Credentials(name, secret_of(name))
            futures.append(client.begin("SendMessage", messages=[message_of(name)]))
        codes = [future.result().status.code for future in futures]
        assert codes == [messaging.OK, messaging.FORBIDDEN] * 10


def message_of(name: str) -> Any:
    return MESSAGES["Message"](
        topic={"name": "orders"}, body=name.encode(), system_properties={"message_id": name, "body_encoding": 1}
    )


def test_refused_calls_are_in_the_audit_log(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        with calling(served, credentials=Credentials("mallory", "x")) as client:
            client.send("orders")
        served.stop()
        lines = list(read_audit(tmp_path / AUDIT_FOLDER))
        assert any("mallory" in str(line) for line in lines), lines


def test_a_lease_that_a_consumer_has_asked_for_outlives_it(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served, "other") as other:
        client = GrpcPeer(served, "gone")
        client.sent("orders", "work")
        client.receive(invisible_ms=30_000)
        service = service_of(served)
        client.close()
        wait_until(lambda: served.call(lambda: any(each.lost_at_ns is not None for each in service._clients.values())))
        pass_with_ticks(served, service, 10_000)
        assert served.call(lambda: len(service._clients)) == 0
        assert other.receive().bodies == []
        served.pass_ms(20_000)
        served.settle()
        assert other.receive().bodies == ["work"]
