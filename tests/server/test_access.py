"""The gate: who may ask what, over real connections."""

import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.access.rules import Rule
from postdate.access.users import Users, make_rule, with_changed_user, with_rules, without_rules, without_user
from postdate.clock import ManualClock
from postdate.server.access import UNSIGNED
from postdate.server.audit import AUDIT_FOLDER, read_audit
from postdate.wire import bodies, codes
from postdate.wire.frame import BINARY, Command, encode
from postdate.wire.requests import REQUESTS, Request
from postdate.wire.rights import PIPELINE_CALLS, Right, RightKind
from postdate.wire.signature import Credentials, SigningKey, is_signed, sign, signature
from tests.support.core import T0
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Got,
    Peer,
    SignedPeer,
    add_user,
    connected,
    heartbeat,
    make_topic,
    notice_users,
    pull,
    pull_command,
    raw_frame,
    read_bodies,
    secret_of,
    send,
    send_batch,
    send_command,
    sent,
    signed_in,
)
from tests.support.server import Served, serving

TOKEN = "0123456789abcdef" * 4
READ_ORDERS = (make_rule("Topic:orders", ["Sub"]), make_rule(f"Group:{GROUP}", ["Sub"]))


@contextmanager
def guarded(folder: Path, **settings: Any) -> Iterator[Served]:
    """A broker with a super user `admin`, a topic `orders`, and a token."""
    folder.mkdir(exist_ok=True)
    add_user(folder, "admin", is_super=True)
    with serving(folder, token=TOKEN, has_access=True, **settings) as served:
        with signed_in(served, "admin") as admin:
            make_topic(admin, "orders")
        yield served


def allow(folder: Path, served: Served, name: str, *rules: Rule) -> None:
    """Adds a user with rules to a running broker."""
    add_user(folder, name, *rules)
    notice_users(served)


def denied(answer: Command | Got) -> bool:
    return answer.code == codes.NO_PERMISSION


def signed_fields(command: Command, name: str) -> dict[str, Any]:
    """The fields of a request as a user signs it."""
    fields = {
        field: str(value).lower() if isinstance(value, bool) else str(value) for field, value in command.fields.items()
    }
    return sign(fields, command.body, Credentials(name, secret_of(name)))


def pop(peer: Peer, topic: str, wait_ms: int = 0, **fields: Any) -> int:
    return peer.say(
        Request.POP_MESSAGE, consumerGroup=GROUP, topic=topic, queueId=-1, maxMsgNums=8, invisibleTime=60_000,
        pollTime=wait_ms, **fields,
    )  # fmt: skip


# -- the table of requests ------------------------------------------------------------------------------------------


def test_every_request_has_a_right() -> None:
    for request in Request:
        right = request.right
        assert isinstance(right, Right), request.name
        is_ruled = right.kind is RightKind.RULED
        assert bool(right.needs or right.body or right.also) is is_ruled, request.name
        for need in right.needs:
            assert need.actions, request.name
            assert not need.field or need.field in {field.name for field in request.fields}, request.name


def test_open_is_what_a_client_asks_a_name_server() -> None:
    assert {request.name for request in Request if request.right.kind is RightKind.OPEN} == {
        "GET_ROUTEINFO_BY_TOPIC", "GET_BROKER_CLUSTER_INFO",
    }  # fmt: skip


def filled(request: Request) -> dict[str, Any]:
    """Fields with which a request can be read."""
    return {field.name: {"text": "orders", "number": 0, "flag": False}[field.kind.value] for field in request.fields}


FULL_BODIES: dict[Request, Any] = {
    Request.HEART_BEAT: {"clientID": "c", "consumerDataSet": [{"groupName": GROUP, "subscriptionDataSet": []}]},
    Request.LOCK_BATCH_MQ: {"consumerGroup": GROUP, "clientId": "c", "mqSet": []},
    Request.UNLOCK_BATCH_MQ: {"consumerGroup": GROUP, "clientId": "c", "mqSet": []},
    Request.QUERY_ASSIGNMENT: {"topic": "orders", "consumerGroup": GROUP, "clientId": "c"},
    Request.SET_MESSAGE_REQUEST_MODE: {"topic": "orders", "consumerGroup": GROUP, "mode": "PULL"},
    Request.BATCH_ACK_MESSAGE: {"acks": [{"c": GROUP, "t": "orders", "so": 0, "q": 0, "pt": 1, "b": "AQ=="}]},
    Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {"groupName": GROUP},
    Request.FINISH_DEAD_LETTERS: {"group": GROUP, "letters": [[0, 0]]},
    Request.JOB: {"call": "list"},
}

# What every user may ask: it lists or counts what they may see, or says nothing.
FOR_EVERY_USER = {
    Request.CHECK_CLIENT_CONFIG, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    Request.VIEW_MESSAGE_BY_ID, Request.DELETE_KV_CONFIG,
}  # fmt: skip


@pytest.mark.parametrize("serialization", [0, BINARY], ids=["json", "binary"])
def test_a_stranger_is_refused_whatever_they_ask(tmp_path: Path, serialization: int) -> None:
    with guarded(tmp_path) as served, connected(served, serialization=serialization) as stranger:
        for request in Request:
            if serialization == BINARY and request > 32_767:
                continue
            answer = stranger.ask(request, orjson.dumps(FULL_BODIES.get(request, {})), **filled(request))
            if request.right.kind is RightKind.OPEN:
                assert not denied(answer), request.name
            else:
                assert (answer.code, answer.remark) == (codes.NO_PERMISSION, UNSIGNED), request.name


def test_a_user_without_rules_is_refused_whatever_they_ask(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "alice")
        with signed_in(served, "alice") as alice:
            for request in Request:
                body = orjson.dumps(FULL_BODIES.get(request, {}))
                answer = alice.ask(request, body, **filled(request))
                is_open = request.right.kind is RightKind.OPEN or request in FOR_EVERY_USER
                assert denied(answer) is not is_open, (request.name, answer)


def test_a_super_user_is_never_refused_but_for_what_is_internal(tmp_path: Path) -> None:
    with guarded(tmp_path) as served, signed_in(served, "admin") as admin:
        for request in Request:
            body = orjson.dumps(FULL_BODIES.get(request, {}))
            answer = admin.ask(request, body, **filled(request))
            assert denied(answer) is (request.right.kind is RightKind.INTERNAL), (request.name, answer)


# Each row that names its resources in fields: the rules that are enough, one for each need.
NAMED = [request for request in Request if request.right.needs and request not in (Request.GET_PENDING,)]


@pytest.mark.parametrize("request_", NAMED, ids=lambda request: request.name)
def test_each_need_of_a_request_is_needed_and_all_are_enough(tmp_path: Path, request_: Request) -> None:
    names = {"Topic": "orders", "Group": GROUP, "Cluster": "DefaultCluster"}
    fields = filled(request_) | {need.field: names[need.kind.value] for need in request_.right.needs if need.field}
    rules = [
        make_rule(f"{need.kind.value}:{names[need.kind.value]}", [need.actions[0].value])
        for need in request_.right.needs
    ]
    rest = [make_rule("Topic:*", ["Sub"], policy="Default")] if request_.right.also else []
    with guarded(tmp_path) as served:
        add_user(tmp_path, "enough", *rules, *rest)
        for number, rule in enumerate(rules):
            others = [other for other in rules if other is not rule]
            add_user(tmp_path, f"lacking{number}", *others, rule._replace(is_allowed=False))
        notice_users(served)
        with signed_in(served, "enough") as peer:
            answer = peer.ask(request_, **fields)
            assert not denied(answer) or "right" not in (answer.remark or ""), answer
        for number in range(len(rules)):
            with signed_in(served, f"lacking{number}") as peer:
                answer = peer.ask(request_, **fields)
                assert denied(answer), answer
                assert "has no right" in (answer.remark or "")


# -- who is it --------------------------------------------------------------------------------------------------


def test_every_mistake_with_a_signature_gets_the_same_answer(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        add_user(tmp_path, "gone")
        Users(tmp_path).change(with_changed_user("gone", is_enabled=False))
        notice_users(served)
        whose = {
            "admin": "not-the-secret", "nobody": "a secret that nobody has, for requests of nobody",
            "bob": "secret-of-bob", "gone": secret_of("gone"), "": secret_of("admin"), "pipeline": secret_of("admin"),
        }  # fmt: skip
        mistakes = [None, *(Credentials(name, secret) for name, secret in whose.items())]
        for credentials in mistakes:
            peer = SignedPeer(served.port, credentials)
            for answer in (send(peer, "orders"), peer.ask(Request.GET_STATUS)):
                assert (answer.code, answer.remark) == (codes.NO_PERMISSION, UNSIGNED), credentials
            peer.close()


def test_a_request_that_was_changed_on_its_way_is_refused(tmp_path: Path) -> None:
    with guarded(tmp_path) as served, connected(served) as thief:
        command = thief.command(Request.DELETE_TOPIC_IN_BROKER, topic="other")
        signed = sign(command.fields, b"", Credentials("admin", secret_of("admin")))
        answer = thief.ask(Request.DELETE_TOPIC_IN_BROKER, **signed | {"topic": "orders"})
        assert denied(answer)
        good = send_command(thief, "orders", b"good")
        fields = signed_fields(good, "admin")
        thief.write(good._replace(fields=fields, body=b"evil"))
        assert denied(thief.answer_to(good.opaque))
        thief.write(good._replace(fields=fields))
        assert thief.answer_to(good.opaque).code == codes.SUCCESS


def test_values_are_signed_as_their_client_has_written_them(tmp_path: Path) -> None:
    """C++ writes bare numbers, Go leaves the security token out, Java adds its zone after it has signed."""
    admin = Credentials("admin", secret_of("admin"))
    with guarded(tmp_path) as served, connected(served) as peer:
        bare = {"topic": "orders", "queueId": 0}
        for opaque, fields in enumerate(
            (
                sign(bare, b"", admin),
                {**sign(bare, b"", admin), "SecurityToken": "sts"},
                {**sign(bare, b"", admin), "__ZONE_NAME": "z1", "__ZONE_MODE": "true"},
                sign(bare, b"", admin._replace(security_token="sts")),
            ),
            1_000,
        ):
            peer.socket.sendall(raw_frame(Request.GET_MAX_OFFSET, opaque, fields))
            assert peer.answer_to(opaque).code == codes.SUCCESS, fields
        peer.socket.sendall(raw_frame(Request.GET_MAX_OFFSET, 2_000, {**sign(bare, b"", admin), "queueId": "0"}))
        assert peer.answer_to(2_000).code == codes.SUCCESS  # the same text
        peer.socket.sendall(raw_frame(Request.GET_MAX_OFFSET, 2_001, {**sign(bare, b"", admin), "queueId": 1}))
        assert denied(peer.answer_to(2_001))


@pytest.mark.parametrize("value", [None, 7, True, [], {"a": 1}, "", "é" * 30, "\x00"])
def test_a_signature_or_a_name_of_any_form_is_refused(tmp_path: Path, value: Any) -> None:
    with guarded(tmp_path) as served, connected(served) as peer:
        for opaque, fields in enumerate(
            ({"AccessKey": "admin", "Signature": value}, {"AccessKey": value, "Signature": "x"}, {"AccessKey": value}),
            1,
        ):
            for code in (Request.GET_STATUS, Request.SEND_MESSAGE_V2):
                peer.socket.sendall(raw_frame(code, opaque, fields))
                assert denied(peer.answer_to(opaque))


def test_a_certificate_may_name_the_user(tmp_path: Path) -> None:
    with guarded(tmp_path) as served, connected(served) as peer:
        peer.round_trip()

        def show(name: str) -> None:
            (connection,) = served.dispatcher.connections
            connection.certificate_name = name

        served.call(lambda: show("admin"))
        assert peer.ask(Request.GET_STATUS).code == codes.SUCCESS
        assert sent(peer, "orders").code == codes.SUCCESS
        served.call(lambda: show("nobody"))
        assert denied(peer.ask(Request.GET_STATUS))


def test_keys_sign_as_the_plain_function_does() -> None:
    for secret in ("secret-of-alice", "x" * 63, "x" * 64, "x" * 65, "x" * 128):
        for fields in ({"b": "2", "a": "ä", "AccessKey": "u"}, {"n": 7, "flag": True, "a": "x"}, {"only": "one"}, {}):
            signed = {**fields, "Signature": signature(fields, b"body", secret)}
            assert SigningKey(secret).is_signed(signed, b"body")
            assert is_signed(signed, b"body", secret)
            assert not SigningKey(secret).is_signed(signed, b"bodY")
            assert not SigningKey(secret).is_signed({**signed, "c": "3"}, b"body")
            assert not SigningKey(secret).is_signed(fields, b"body")


# -- what is internal -----------------------------------------------------------------------------------------------


def internal_asks(peer: Peer) -> list[tuple[str, Command]]:
    asks = [
        (request.name, peer.ask(request, b"{}", **filled(request)))
        for request in Request
        if request.right.kind is RightKind.INTERNAL
    ]
    return asks + [
        (call, peer.ask(Request.JOB, orjson.dumps({"call": call}))) for call in sorted(PIPELINE_CALLS)
    ]  # fmt: skip


@pytest.mark.parametrize("has_users", [False, True])
def test_only_the_token_may_ask_what_is_internal(tmp_path: Path, has_users: bool) -> None:
    tmp_path.joinpath("data").mkdir()
    folder = tmp_path / "data"
    if has_users:
        add_user(folder, "admin", is_super=True)
    with serving(folder, token=TOKEN, has_access=True, vip_port=0) as served:
        strangers = [connected(served), signed_in(served, "admin"), signed_in(served, "pipeline", "wrong-token")]
        for stranger in strangers:
            with stranger as peer:
                for name, answer in internal_asks(peer):
                    assert denied(answer), name
        with signed_in(served, "pipeline", TOKEN) as pipeline:
            for name, answer in internal_asks(pipeline):
                assert not denied(answer), name
        for address in (served.server.route_address, served.server.vip_address):
            assert address is not None
            with signed_in(served, "pipeline", TOKEN, port=int(address.rpartition(":")[2])) as pipeline:
                for name, answer in internal_asks(pipeline):
                    assert denied(answer), name


def test_two_requests_of_a_stranger_make_no_message_disappear(tmp_path: Path) -> None:
    """The attack S2 of the review: register, then stage every far row away, to a horizon of next century."""
    with serving(tmp_path, ManualClock(T0), token=TOKEN) as served, connected(served) as thief:
        make_topic(thief, "orders")
        sent(thief, "orders", TIMER_DELAY_SEC=86_400)
        assert denied(thief.ask(Request.REGISTER_PIPELINE, b'{"table":"/tmp/t","master":"local"}'))
        stage = {"epoch": 1, "far": [0, 1], "horizon": [0, T0 * 3], "chunks": [], "rows_in": 0, "rows_out": 0}
        assert denied(thief.ask(Request.STAGE, orjson.dumps(stage)))
        assert served.call(lambda: served.broker.fold.far.epoch) == 0


def test_without_a_token_what_is_internal_is_open(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert not any(denied(answer) for _, answer in internal_asks(peer))


def test_the_token_opens_nothing_else(tmp_path: Path) -> None:
    with guarded(tmp_path) as served, signed_in(served, "pipeline", TOKEN) as pipeline:
        assert pipeline.ask(Request.GET_BULK_STATE).code == codes.SUCCESS
        assert pipeline.ask(Request.GET_STATUS).code == codes.SUCCESS
        assert denied(send(pipeline, "orders"))
        assert denied(pull(pipeline, "orders"))
        assert denied(pipeline.ask(Request.UPDATE_BROKER_CONFIG, b"pull_count_max=1"))
        assert denied(pipeline.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders"))
        assert denied(pipeline.ask(Request.AUTH_DELETE_USER, username="admin"))


def test_a_user_with_rights_on_the_cluster_asks_for_jobs(tmp_path: Path) -> None:
    ask = orjson.dumps({"call": "ask", "id": "j1", "op": "cancel", "where": "true", "by_ms": 0})
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "looks", make_rule("Cluster:*", ["Get"]))
        allow(tmp_path, served, "changes", make_rule("Cluster:*", ["Update"]))
        with signed_in(served, "looks") as looks, signed_in(served, "changes") as changes:
            assert looks.ask(Request.JOB, b'{"call":"list"}').code == codes.SUCCESS
            assert denied(looks.ask(Request.JOB, ask))
            assert not denied(changes.ask(Request.JOB, ask))
            assert denied(changes.ask(Request.JOB, b'{"call":"list"}'))
            for call in PIPELINE_CALLS:
                assert denied(changes.ask(Request.JOB, orjson.dumps({"call": call})))


def test_each_user_has_a_share_of_the_jobs(tmp_path: Path) -> None:
    """However many addresses a user has, and whoever else shares one with them."""
    add_user(tmp_path, "admin", is_super=True)
    add_user(tmp_path, "many", make_rule("Cluster:*", ["Update"]))
    add_user(tmp_path, "one", make_rule("Cluster:*", ["Update"]))
    with serving(tmp_path, ManualClock(T0), has_access=True, jobs_per_user_max=2) as served:

        def ask(peer: Peer, job_id: str) -> Command:
            wish = {"call": "ask", "id": job_id, "op": "cancel", "where": "true", "by_ms": 0}
            return peer.ask(Request.JOB, orjson.dumps(wish))

        with signed_in(served, "many") as many, signed_in(served, "many") as more, signed_in(served, "one") as one:
            assert [ask(peer, name).code for peer, name in ((many, "a"), (more, "b"))] == [codes.SUCCESS] * 2
            refused = ask(more, "c")
            assert refused.code == codes.SYSTEM_BUSY
            assert refused.remark == "jobs_per_user_max: 2 jobs of many are not over yet; try later"
            assert ask(one, "d").code == codes.SUCCESS


# -- messages ---------------------------------------------------------------------------------------------------


def test_rows_of_a_topic_need_sub_and_those_of_all_the_cluster(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", make_rule("Topic:orders", ["Sub"]))
        allow(tmp_path, served, "operator", make_rule("Cluster:*", ["Get"]))
        with signed_in(served, "reader") as reader, signed_in(served, "operator") as operator:
            assert not denied(reader.ask(Request.GET_BULK_TOPIC, topic="orders"))
            assert denied(reader.ask(Request.GET_BULK_TOPIC))
            assert denied(operator.ask(Request.GET_BULK_TOPIC, topic="orders"))
            assert not denied(operator.ask(Request.GET_BULK_TOPIC))
        with signed_in(served, "pipeline", TOKEN) as pipeline:
            assert not denied(pipeline.ask(Request.GET_BULK_TOPIC, topic="orders"))
            assert not denied(pipeline.ask(Request.GET_BULK_TOPIC))


def test_sending_needs_pub_and_reading_needs_sub(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "writer", make_rule("Topic:orders", ["Pub"]))
        allow(tmp_path, served, "reader", *READ_ORDERS)
        with signed_in(served, "writer") as writer, signed_in(served, "reader") as reader:
            for body in ("one", "two"):
                sent(writer, "orders", body)
            assert send_batch(writer, "orders", [("three", {}), ("four", {})]).code == codes.SUCCESS
            assert denied(send(writer, "others"))
            assert denied(send_batch(writer, "others", [("x", {})]))
            assert denied(pull(writer, "orders"))
            assert read_bodies(reader, "orders") == ["one", "two", "three", "four"]
            assert denied(send(reader, "orders"))
            assert denied(send_batch(reader, "orders", [("x", {})]))
            assert denied(reader.answer_to(pop(reader, "others")))
            assert denied(pull(reader, "others"))
            assert reader.answer_to(pop(reader, "orders")).code == codes.SUCCESS


def test_a_refused_send_leaves_the_others_of_a_read_alone(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "writer", make_rule("Topic:orders", ["Pub"]))
        with signed_in(served, "writer") as writer, signed_in(served, "admin") as admin:
            commands = [
                send_command(writer, topic, topic) for topic in ("orders", "secret", "orders", "secret", "orders")
            ]
            oneway = send_command(writer, "secret", oneway=True)
            writer.write(*commands[:3], oneway, *commands[3:])
            found = [writer.answer_to(command.opaque).code for command in commands]
            assert found == [codes.SUCCESS, 16, codes.SUCCESS, 16, codes.SUCCESS]
            writer.expect_no_more()
            assert read_bodies(admin, "orders") == ["orders"] * 3
            assert served.call(lambda: served.broker.view.find_topic("secret")) is None


def test_a_send_cannot_name_one_topic_for_the_gate_and_another_for_the_log(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "writer", make_rule("Topic:mine", ["Pub"]))
        with signed_in(served, "admin") as admin:
            make_topic(admin, "mine")
        with signed_in(served, "writer") as writer, signed_in(served, "admin") as admin:
            send(writer, "mine", fields={"topic": "orders"})
            send(writer, "mine", fields={"topic": "orders", "resend": "true"})  # read in the general way
            send(writer, "orders", fields={"topic": "mine"})
            assert read_bodies(admin, "orders") == []
        with connected(served) as peer:
            command = send_command(peer, "mine")
            fields = signed_fields(command, "writer")
            twice = encode(command._replace(fields=fields)).replace(b'"b":"mine"', b'"b":"orders","b":"mine"', 1)
            twice = (
                (len(twice) - 4).to_bytes(4, "big")
                + (int.from_bytes(twice[4:8], "big") + 13).to_bytes(4, "big")
                + twice[8:]
            )
            swapped = twice.replace(b'"b":"orders","b":"mine"', b'"b":"mine","b":"orders"')
            for frame in (twice, swapped):
                peer.socket.sendall(frame)
                peer.answer_to(command.opaque)
        with signed_in(served, "admin") as admin:
            assert read_bodies(admin, "orders") == []


def test_what_a_group_sends_back_needs_the_group_and_the_message(tmp_path: Path) -> None:
    """A send-back copies a message to a topic that the group reads: by its offset it could be any message."""
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", *READ_ORDERS)
        with signed_in(served, "admin") as admin, signed_in(served, "reader") as reader:
            make_topic(admin, "secret")
            heartbeat(reader, "c1", {"orders": "*"})
            mine, theirs = (int(sent(admin, topic, topic).fields["msgId"][-16:], 16) for topic in ("orders", "secret"))
            assert reader.ask(Request.CONSUMER_SEND_MSG_BACK, group=GROUP, offset=mine).code == codes.SUCCESS
            answer = reader.ask(Request.CONSUMER_SEND_MSG_BACK, group=GROUP, offset=theirs)
            assert (answer.code, "Topic:secret" in (answer.remark or "")) == (codes.NO_PERMISSION, True)
            assert denied(reader.ask(Request.CONSUMER_SEND_MSG_BACK, group="others", offset=mine))
            assert denied(send(reader, "%RETRY%others"))
            assert not denied(send(reader, f"%RETRY%{GROUP}"))
            assert not denied(pull(reader, f"%RETRY%{GROUP}"))


def test_a_body_by_its_offset_needs_sub_on_its_topic(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", *READ_ORDERS)
        allow(tmp_path, served, "looker", make_rule("*", ["Get", "List"]))
        with signed_in(served, "admin") as admin:
            make_topic(admin, "secret")
            mine, theirs = (
                int(sent(admin, topic, topic, KEYS="k").fields["msgId"][-16:], 16) for topic in ("orders", "secret")
            )
        with signed_in(served, "reader") as reader, signed_in(served, "looker") as looker:
            assert reader.ask(Request.VIEW_MESSAGE_BY_ID, offset=mine).code == codes.SUCCESS
            assert denied(reader.ask(Request.VIEW_MESSAGE_BY_ID, offset=theirs))
            assert denied(looker.ask(Request.VIEW_MESSAGE_BY_ID, offset=mine))
            assert denied(looker.ask(Request.QUERY_MESSAGE, topic="orders", key="k"))
            assert looker.ask(Request.GET_MAX_OFFSET, topic="orders", queueId=0).code == codes.SUCCESS


def test_consuming_directly_needs_the_group_and_the_message(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", *READ_ORDERS)
        allow(tmp_path, served, "helper", make_rule(f"Group:{GROUP}", ["Update"]), make_rule("Topic:orders", ["Sub"]))
        with (
            signed_in(served, "admin") as admin,
            signed_in(served, "reader") as reader,
            signed_in(served, "helper") as helper,
        ):
            make_topic(admin, "secret")
            heartbeat(reader, "c1", {"orders": "*"})
            ids = {topic: sent(admin, topic, topic).fields["msgId"] for topic in ("orders", "secret")}
            fields: dict[str, Any] = {"consumerGroup": GROUP, "clientId": "c1"}
            answer = helper.ask(Request.CONSUME_MESSAGE_DIRECTLY, **fields, msgId=ids["secret"])
            assert (answer.code, "Topic:secret" in (answer.remark or "")) == (codes.NO_PERMISSION, True)
            assert denied(reader.ask(Request.CONSUME_MESSAGE_DIRECTLY, **fields, msgId=ids["orders"]))
            asked = helper.say(Request.CONSUME_MESSAGE_DIRECTLY, **fields, msgId=ids["orders"])
            while (notice := reader.next_notice()).code != Request.CONSUME_MESSAGE_DIRECTLY:
                pass
            reader.credentials = None  # no client signs its answers
            reader.write(Command(0, {}, b"{}", notice.opaque, flag=1))
            assert helper.answer_to(asked).code == codes.SUCCESS


def test_a_heartbeat_needs_its_groups_and_topics(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", *READ_ORDERS)
        with signed_in(served, "reader") as reader:
            assert heartbeat(reader, "c1", {"orders": "*", f"%RETRY%{GROUP}": "*"}).code == codes.SUCCESS
            assert denied(heartbeat(reader, "c1", {"orders": "*", "secret": "*"}))
            assert denied(heartbeat(reader, "c1", {"orders": "*"}, group="others"))
            assert served.call(lambda: served.broker.view.find_topic("secret")) is None
            assert reader.ask(Request.HEART_BEAT, b'{"clientID":"p","producerDataSet":[{"groupName":"p"}]}').code == 0


def test_acknowledging_a_batch_needs_each_group_and_topic(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", *READ_ORDERS)
        with signed_in(served, "reader") as reader:
            good = bodies.Ack(GROUP, "orders", 0, 1, [0])
            for bad in (good._replace(group="others"), good._replace(topic="secret")):
                assert denied(reader.ask(Request.BATCH_ACK_MESSAGE, bodies.encode_batch_ack("b", [good, bad])))
            assert not denied(reader.ask(Request.BATCH_ACK_MESSAGE, bodies.encode_batch_ack("b", [good])))


def test_lists_have_what_one_may_see(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "looker", make_rule("Topic:ord*", ["Get"]), make_rule("Group:w*", ["Get"]))
        with signed_in(served, "admin") as admin, signed_in(served, "looker") as looker:
            for topic in ("secret", "ordered"):
                make_topic(admin, topic)
            sent(admin, "secret", TIMER_DELAY_SEC=3_600)
            sent(admin, "orders", TIMER_DELAY_SEC=3_600)
            heartbeat(admin, "c1", {"orders": "*"})
            heartbeat(admin, "c2", {"orders": "*"}, group="others")
            names = orjson.loads(looker.ask(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)["topicList"]
            assert names == [f"%RETRY%{GROUP}", "ordered", "orders"]
            groups = orjson.loads(looker.ask(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]
            assert list(groups) == [GROUP]
            readers = orjson.loads(looker.ask(Request.QUERY_TOPIC_CONSUME_BY_WHO, topic="orders").body)["groupList"]
            assert readers == [GROUP]
            waits = orjson.loads(looker.ask(Request.GET_PENDING).body)
            assert (waits["total"], [each["topic"] for each in waits["topics"]]) == (1, ["orders"])
            assert denied(looker.ask(Request.GET_PENDING, topic="secret"))
            bars = orjson.loads(looker.ask(Request.GET_FORECAST, unit="hour", bars=3).body)["bars"]
            assert sum(bar["rows"] for bar in bars) == 1


def test_looking_makes_no_group(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "looker", make_rule("*", ["Get"]))
        with signed_in(served, "looker") as looker:
            looker.ask(Request.QUERY_CONSUMER_OFFSET, consumerGroup="new", topic="%RETRY%new", queueId=0)
            assert not served.call(lambda: served.broker.view.has_group("new"))


def test_a_route_is_open_and_makes_no_topic(tmp_path: Path) -> None:
    with guarded(tmp_path) as served, connected(served) as stranger:
        assert stranger.ask(Request.GET_ROUTEINFO_BY_TOPIC, topic="anything").code == codes.SUCCESS
        assert stranger.ask(Request.GET_BROKER_CLUSTER_INFO).code == codes.SUCCESS
        assert served.call(lambda: served.broker.view.find_topic("anything")) is None


# -- changes hold at once -------------------------------------------------------------------------------------------


def test_a_change_holds_for_the_next_request_of_an_open_connection(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "writer", make_rule("Topic:orders", ["Pub"]))
        with signed_in(served, "writer") as writer, signed_in(served, "admin") as admin:
            for _ in range(3):
                sent(writer, "orders")
            admin.ask(Request.AUTH_DELETE_ACL, subject="User:writer", resource="Topic:orders")
            assert denied(send(writer, "orders"))
            Users(tmp_path).change(with_rules("writer", [make_rule("Topic:*", ["Pub"])]))
            notice_users(served)
            sent(writer, "orders")
            Users(tmp_path).change(with_changed_user("writer", secret="another-secret"))
            notice_users(served)
            assert send(writer, "orders").remark == UNSIGNED
            writer.credentials = Credentials("writer", "another-secret")
            sent(writer, "orders")
            assert admin.ask(Request.AUTH_DELETE_USER, username="writer").code == codes.SUCCESS
            assert send(writer, "orders").remark == UNSIGNED


@pytest.mark.parametrize("how", ["removed", "disabled", "without rules", "another secret"])
def test_what_waits_for_a_user_who_may_no_more_ends(tmp_path: Path, how: str) -> None:
    change = {
        "removed": without_user("reader"),
        "disabled": with_changed_user("reader", is_enabled=False),
        "without rules": without_rules("reader", "Topic:orders"),
        "another secret": with_changed_user("reader", secret="another-secret"),
    }[how]
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "reader", *READ_ORDERS)
        allow(tmp_path, served, "other", *READ_ORDERS)
        with (
            signed_in(served, "reader") as reader,
            signed_in(served, "other") as other,
            signed_in(served, "admin") as admin,
        ):
            waits = pull_command(reader, "orders", wait_ms=LONG_POLL_MS)
            reader.write(waits)
            popped = pop(reader, "orders", LONG_POLL_MS)
            goes_on = pull_command(other, "orders", wait_ms=LONG_POLL_MS)
            other.write(goes_on)
            for peer in (reader, other):
                peer.round_trip()
            Users(tmp_path).change(change)
            notice_users(served)
            assert denied(reader.answer_to(waits.opaque))
            assert denied(reader.answer_to(popped))
            sent(admin, "orders")
            assert other.answer_to(goes_on.opaque).code == codes.SUCCESS
            reader.expect_no_more()


def test_the_first_user_closes_a_broker_that_was_open(tmp_path: Path) -> None:
    with serving(tmp_path, has_access=True) as served, connected(served) as peer, signed_in(served, "admin") as admin:
        sent(peer, "orders")
        body = orjson.dumps({"password": secret_of("admin"), "userType": "Super"})
        assert peer.ask(Request.AUTH_CREATE_USER, body, username="admin").code == codes.SUCCESS
        assert denied(send(peer, "orders"))
        sent(admin, "orders")


def test_users_that_cannot_be_read_any_more_stay_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with guarded(tmp_path) as served, connected(served) as stranger, signed_in(served, "admin") as admin:
        (tmp_path / "auth.json").unlink()
        notice_users(served)
        assert "auth.json is gone: the users stay as they were" in caplog.text
        assert denied(send(stranger, "orders"))
        sent(admin, "orders")


# -- floods -----------------------------------------------------------------------------------------------------


def test_refusals_are_logged_once_for_a_user_and_an_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        guarded(tmp_path) as served,
        signed_in(served, "admin", "wrong-secret") as peer,
        caplog.at_level(logging.WARNING),
    ):
        for _ in range(50):
            send(peer, "orders")
            peer.ask(Request.GET_STATUS)
        refusals = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
        assert len(refusals) == 1
        assert "of 'admin' from 127.0.0.1 is refused" in refusals[0]
        assert "wrong-secret" not in caplog.text


def test_what_a_connection_remembers_is_bounded(tmp_path: Path) -> None:
    with guarded(tmp_path, admitted_max=8) as served, signed_in(served, "admin") as admin:
        for number in range(30):
            admin.ask(Request.GET_MAX_OFFSET, topic=f"t{number}", queueId=0)
            admin.ask(Request.GET_MAX_OFFSET, topic="x" * 2_000, queueId=0)

        def remembered() -> list[Any]:
            return [key for connection in served.connections() for key in connection.admitted]

        keys = served.call(remembered)
        assert 0 < len(keys) <= 8
        assert not any("x" * 2_000 in key for key in keys)


def test_a_huge_body_is_refused_before_its_signature_is_checked(tmp_path: Path) -> None:
    with guarded(tmp_path) as served, connected(served) as stranger:
        answer = stranger.ask(Request.GET_STATUS, bytes(1 << 20))
        assert (answer.code, "json_bytes_max" in (answer.remark or "")) == (codes.INVALID_PARAMETER, True)
        answer = send(stranger, "orders", bytes(6 << 20))
        assert (answer.code, "body_bytes_max" in (answer.remark or "")) == (codes.MESSAGE_ILLEGAL, True)


def test_all_requests_are_known() -> None:
    assert set(REQUESTS) == {int(request) for request in Request}


def test_thousands_of_wrong_signatures_keep_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with guarded(tmp_path) as served, signed_in(served, "admin") as admin, ExitStack() as stack:
        thieves = [stack.enter_context(signed_in(served, "admin", f"wrong-secret-{n}")) for n in range(5)]
        for count in range(20):
            for thief in thieves:
                commands = [send_command(thief, "orders", bytes(100)) for _ in range(50)]
                commands += [thief.command(Request.GET_STATUS) for _ in range(50)]
                thief.write(*commands)
            sent(admin, "orders", f"number {count}")
        for thief in thieves:
            assert {thief.next_answer().code for _ in range(2_000)} == {codes.NO_PERMISSION}
            thief.expect_no_more()
        assert len(read_bodies(admin, "orders")) == 20
        assert len([record for record in caplog.records if "is refused" in record.getMessage()]) <= 2
    refused = [line for line in read_audit(tmp_path / AUDIT_FOLDER) if line["result"] == "refused"]
    assert len(refused) < 200
    assert sum(line.get("more", 1) for line in refused) == 10_000


@pytest.mark.parametrize("seed", range(3))
def test_whatever_users_and_strangers_ask_the_gate_answers(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    names = [
        "orders",
        "secret",
        GROUP,
        f"%RETRY%{GROUP}",
        "%DLQ%",
        "%RETRY%",
        "",
        "*",
        "x" * 700,
        "\udfff".encode(errors="replace").decode(),
    ]
    values: list[Any] = [*names, "0", "-1", "true", 7, True, None, [], {"a": []}, "User:alice", "User:", "Topic:a"]
    keys = [field.name for request in Request for field in request.fields] + ["AccessKey", "Signature", "SecurityToken"]
    leaves = [*values, {"topic": "secret"}, [{"c": GROUP, "t": "secret"}], [[0, 0]], "ask", "decide", "list"]
    body_keys = ["call", "id", "op", "where", "clientID", "consumerDataSet", "acks", "groupName", "group", "letters",
                 "consumerGroup", "topic", "policies", "password", "userType", "clientId", "mqSet"]  # fmt: skip
    with guarded(tmp_path) as served:
        allow(tmp_path, served, "alice", *READ_ORDERS, make_rule("Topic:*", ["Get"]), make_rule("Cluster:*", ["Get"]))
        with signed_in(served, "alice") as alice, connected(served) as stranger, signed_in(served, "admin") as admin:
            for opaque in range(1_000, 1_400):
                request = dice.choice(list(Request))
                fields = {dice.choice(keys): dice.choice(values) for _ in range(dice.randint(0, 3))}
                fields |= {field.name: dice.choice(names) for field in request.fields if dice.random() < 0.8}
                body = orjson.dumps({dice.choice(body_keys): dice.choice(leaves) for _ in range(dice.randint(0, 4))})
                body = dice.choice([body, body, body, b"", b"{", b"[" * 2_000])
                peer = dice.choice([alice, stranger])
                fields.pop("pollTime", None)
                if peer is alice and all(type(value) in (str, int, bool) for value in fields.values()):
                    fields = sign(fields, body, Credentials("alice", secret_of("alice")))
                peer.socket.sendall(raw_frame(request, opaque, fields, body))
            for peer in (alice, stranger):
                peer.round_trip()
            assert admin.ask(Request.GET_STATUS).code == codes.SUCCESS
            assert read_bodies(admin, "orders") == []
        assert set(Users(tmp_path).all) == {"admin", "alice"}
