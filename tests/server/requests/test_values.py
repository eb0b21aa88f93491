"""Key-value settings, as RocketMQ's tools store, read and delete them."""

from pathlib import Path
from typing import Any

from postdate.access.users import make_rule
from postdate.server.audit import AUDIT_FOLDER, read_audit
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.peer import Peer, add_user, ask_json, connected, signed_in
from tests.support.server import serving

ORDER = "ORDER_TOPIC_CONFIG"
ORDERS: dict[str, Any] = {"namespace": ORDER, "key": "orders"}


def put(peer: Peer, namespace: str, key: str, value: str) -> int:
    return peer.ask(Request.PUT_KV_CONFIG, namespace=namespace, key=key, value=value).code


def test_a_value_is_stored_read_and_deleted(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert put(peer, ORDER, "orders", "postdate:4") == codes.SUCCESS
        assert put(peer, ORDER, "orders", "postdate:8") == codes.SUCCESS
        assert put(peer, ORDER, "bills", "postdate:2") == codes.SUCCESS
        assert put(peer, "OTHER", "orders", "x") == codes.SUCCESS
        answer = peer.ask(Request.GET_KV_CONFIG, **ORDERS)
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"value": "postdate:8"})
        told = ask_json(peer, Request.GET_KVLIST_BY_NAMESPACE, namespace=ORDER)
        assert told == {"table": {"orders": "postdate:8", "bills": "postdate:2"}}
        assert peer.ask(Request.DELETE_KV_CONFIG, **ORDERS).code == codes.SUCCESS
        answer = peer.ask(Request.GET_KV_CONFIG, **ORDERS)
        assert (answer.code, answer.remark) == (
            codes.QUERY_NOT_FOUND, "namespace 'ORDER_TOPIC_CONFIG' has no value under 'orders'",
        )  # fmt: skip
    with serving(tmp_path) as served, connected(served) as peer:
        assert ask_json(peer, Request.GET_KVLIST_BY_NAMESPACE, namespace=ORDER) == {"table": {"bills": "postdate:2"}}


def test_a_namespace_without_values_is_none(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(Request.GET_KVLIST_BY_NAMESPACE, namespace="nowhere")
        assert (answer.code, answer.remark) == (codes.QUERY_NOT_FOUND, "namespace 'nowhere' has no values")
        assert peer.ask(Request.DELETE_KV_CONFIG, **ORDERS).code == codes.SUCCESS, "afterwards there is none"


def test_a_name_that_is_missing_is_named(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for request in (Request.PUT_KV_CONFIG, Request.GET_KV_CONFIG, Request.DELETE_KV_CONFIG):
            answer = peer.ask(request, namespace=ORDER)
            assert (answer.code, answer.remark) == (codes.INVALID_PARAMETER, f"{request.name} lacks the field key")
        answer = peer.ask(Request.PUT_KV_CONFIG, **ORDERS)
        assert (answer.code, answer.remark) == (codes.INVALID_PARAMETER, "PUT_KV_CONFIG lacks the field value")


def test_only_who_may_change_the_cluster_deletes_a_value(tmp_path: Path) -> None:
    add_user(tmp_path, "admin", is_super=True)
    add_user(tmp_path, "alice", make_rule("Topic:*", ["Delete"]))
    with (
        serving(tmp_path, has_access=True) as served,
        signed_in(served, "admin") as admin,
        signed_in(served, "alice") as alice,
    ):
        assert alice.ask(Request.DELETE_KV_CONFIG, **ORDERS).code == codes.SUCCESS, "as deleteTopic asks"
        assert put(admin, ORDER, "orders", "postdate:4") == codes.SUCCESS
        answer = alice.ask(Request.DELETE_KV_CONFIG, **ORDERS)
        assert answer.code == codes.NO_PERMISSION
        assert "user 'alice' has no right Update to Cluster:DefaultCluster" in (answer.remark or "")
        assert alice.ask(Request.GET_KV_CONFIG, **ORDERS).code == codes.NO_PERMISSION
        assert put(alice, ORDER, "orders", "mine") == codes.NO_PERMISSION
        assert admin.ask(Request.GET_KV_CONFIG, **ORDERS).fields == {"value": "postdate:4"}
        assert admin.ask(Request.DELETE_KV_CONFIG, **ORDERS).code == codes.SUCCESS
    lines = [line for line in read_audit(tmp_path / AUDIT_FOLDER) if line["request"].endswith("_KV_CONFIG")]
    assert len(lines) == 6
    assert {(line["user"], line["request"], line["result"], line.get("detail")) for line in lines} == {
        ("alice", "DELETE_KV_CONFIG", "done", f"{ORDER} orders"),
        ("admin", "PUT_KV_CONFIG", "done", f"{ORDER} orders"),
        ("alice", "DELETE_KV_CONFIG", "refused", f"{ORDER} orders"),
        ("alice", "GET_KV_CONFIG", "refused", None),
        ("alice", "PUT_KV_CONFIG", "refused", None),
        ("admin", "DELETE_KV_CONFIG", "done", f"{ORDER} orders"),
    }
