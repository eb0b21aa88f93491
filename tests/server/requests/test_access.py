"""Users and rules over the wire, as mqadmin asks for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.access.rules import Action
from postdate.access.users import AUTH_FILE, Users, make_rule
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.support.peer import Peer, SignedPeer, add_user, connected, secret_of, signed_in
from tests.support.server import Served, serving


@contextmanager
def signed_admin(folder: Path) -> Iterator[tuple[Served, SignedPeer]]:
    add_user(folder, "admin", is_super=True)
    with serving(folder, has_access=True) as served, signed_in(served, "admin") as admin:
        yield served, admin


def create(peer: Peer, name: str, **info: Any) -> Command:
    body = {"username": name, "password": secret_of(name), **info}
    return peer.ask(Request.AUTH_CREATE_USER, orjson.dumps(body), username=name)


def update(peer: Peer, name: str, **info: Any) -> Command:
    return peer.ask(Request.AUTH_UPDATE_USER, orjson.dumps({"username": name, **info}), username=name)


def put_acl(peer: Peer, name: str, resource: str = "Topic:orders", **entry: Any) -> Command:
    entry = {"resource": resource, "actions": ["Pub", "Sub"], "sourceIps": None, "decision": "Allow", **entry}
    body = {"subject": f"User:{name}", "policies": [{"policyType": None, "entries": [entry]}]}
    return peer.ask(Request.AUTH_CREATE_ACL, orjson.dumps(body), subject=f"User:{name}")


def rows(answer: Command) -> Any:
    assert answer.code == codes.SUCCESS, answer
    return orjson.loads(answer.body) if answer.body else None


def test_users_are_made_changed_listed_and_deleted(tmp_path: Path) -> None:
    with signed_admin(tmp_path) as (_served, admin):
        assert rows(create(admin, "alice", userType=None)) is None
        assert rows(create(admin, "bob", userType="Super", userStatus="enable")) is None
        assert "already" in (create(admin, "bob").remark or "")
        found = rows(admin.ask(Request.AUTH_LIST_USERS))
        assert [tuple(each.values()) for each in found] == [
            ("admin", "Super", "enable"), ("alice", "Normal", "enable"), ("bob", "Super", "enable"),
        ]  # fmt: skip
        assert [each["username"] for each in rows(admin.ask(Request.AUTH_LIST_USERS, filter="li"))] == ["alice"]
        assert update(admin, "alice", userStatus="disable").code == codes.SUCCESS
        assert rows(admin.ask(Request.AUTH_GET_USER, username="alice"))["userStatus"] == "disable"
        assert rows(admin.ask(Request.AUTH_GET_USER, username="nobody")) is None
        assert admin.ask(Request.AUTH_DELETE_USER, username="alice").code == codes.SUCCESS
        assert "no user" in (admin.ask(Request.AUTH_DELETE_USER, username="alice").remark or "")
        assert list(Users(tmp_path).all) == ["admin", "bob"]


def test_no_answer_has_a_password(tmp_path: Path) -> None:
    with signed_admin(tmp_path) as (_served, admin):
        create(admin, "alice")
        for request in (Request.AUTH_LIST_USERS, Request.AUTH_GET_USER, Request.AUTH_LIST_ACL, Request.AUTH_GET_ACL):
            for name in ("alice", "admin"):
                answer = admin.ask(request, username=name, subject=f"User:{name}")
                assert b"secret" not in answer.body
                assert b"assword" not in answer.body


def test_a_user_that_is_copied_from_us_keeps_the_password_that_it_has_there(tmp_path: Path) -> None:
    """mqadmin copyUser updates a user with what another broker shows of it."""
    with signed_admin(tmp_path) as (_served, admin):
        create(admin, "alice")
        info = rows(admin.ask(Request.AUTH_GET_USER, username="alice"))
        assert update(admin, **{"name": "alice", **info, "userType": "Normal"}).code == codes.SUCCESS
        assert Users(tmp_path).all["alice"].secret == secret_of("alice")
        assert "secret" in (admin.ask(Request.AUTH_CREATE_USER, orjson.dumps(info), username="carol").remark or "")


def test_rules_are_made_replaced_listed_and_deleted(tmp_path: Path) -> None:
    with signed_admin(tmp_path) as (_served, admin):
        create(admin, "alice")
        assert put_acl(admin, "alice", sourceIps=["10.0.0.0/8"]).code == codes.SUCCESS
        assert put_acl(admin, "alice", "Group:g*", actions=["all"], decision="deny").code == codes.SUCCESS
        entries = [
            {"resource": "Topic:orders", "actions": ["Pub", "Sub"], "sourceIps": ["10.0.0.0/8"]}
            | {"decision": "Allow"},
            {"resource": "Group:g*", "actions": ["All"], "sourceIps": [], "decision": "Deny"},
        ]
        acl = {"subject": "User:alice", "policies": [{"policyType": "Custom", "entries": entries}]}
        assert rows(admin.ask(Request.AUTH_GET_ACL, subject="User:alice")) == acl
        assert rows(admin.ask(Request.AUTH_LIST_ACL)) == [acl]
        assert rows(admin.ask(Request.AUTH_LIST_ACL, subjectFilter="bob")) == []
        only = rows(admin.ask(Request.AUTH_LIST_ACL, resourceFilter="Group"))[0]["policies"][0]["entries"]
        assert only == entries[1:]
        put_acl(admin, "alice", actions=["Get"])
        assert Users(tmp_path).all["alice"].rules[-1].actions == {Action.GET}
        assert admin.ask(Request.AUTH_DELETE_ACL, subject="User:alice", resource="Topic:orders").code == codes.SUCCESS
        assert [rule.pattern for rule in Users(tmp_path).all["alice"].rules] == ["Group:g*"]
        assert admin.ask(Request.AUTH_DELETE_ACL, subject="User:alice").code == codes.SUCCESS
        assert rows(admin.ask(Request.AUTH_GET_ACL, subject="User:alice")) is None


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "not JSON"), (b"[]", "no JSON object"), (b"{}", "no rule is given"),
        (b'{"policies":1}', "cannot be read"),
        (b'{"policies":[{"entries":[{"resource":"Topic:a"}]}]}', "cannot be read"),
        (b'{"policies":[{"entries":[{"resource":"a","actions":["Pub"]}]}]}', "expected Topic:NAME"),
        (b'{"policies":[{"entries":[{"resource":"Topic:a","actions":["Fly"]}]}]}', "there is no action 'Fly'"),
        (b'{"policies":[{"entries":[{"resource":"Topic:a","actions":[]}]}]}', "names no action"),
        (b'{"policies":[{"entries":[{"resource":7,"actions":["Pub"]}]}]}', "cannot be read"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_read_are_refused_in_a_sentence(tmp_path: Path, body: bytes, sentence: str) -> None:
    with signed_admin(tmp_path) as (_served, admin):
        create(admin, "alice")
        answer = admin.ask(Request.AUTH_CREATE_ACL, body, subject="User:alice")
        assert answer.code == codes.INVALID_PARAMETER
        assert sentence in (answer.remark or "")
        assert "the subject 'alice' is unknown" in (put_acl_to(admin, "alice").remark or "")


def put_acl_to(peer: Peer, subject: str) -> Command:
    return peer.ask(Request.AUTH_CREATE_ACL, b"{}", subject=subject)


def test_only_a_super_user_touches_a_super_user(tmp_path: Path) -> None:
    with signed_admin(tmp_path) as (served, admin):
        create(admin, "boss", userType="Super")
        create(admin, "clerk")
        create(admin, "alice")
        put_acl(admin, "clerk", "Cluster:*", actions=["Update", "Get"])
        with signed_in(served, "clerk") as clerk:
            for answer in (
                create(clerk, "evil", userType="Super"), update(clerk, "clerk", userType="Super"),
                update(clerk, "boss", password="another-secret"), update(clerk, "boss", userStatus="disable"),
                clerk.ask(Request.AUTH_DELETE_USER, username="boss"), put_acl(clerk, "boss"),
                clerk.ask(Request.AUTH_DELETE_ACL, subject="User:boss"),
            ):  # fmt: skip
                assert (answer.code, "only a super user" in (answer.remark or "")) == (codes.NO_PERMISSION, True)
            assert create(clerk, "carol").code == codes.SUCCESS
            assert put_acl(clerk, "alice").code == codes.SUCCESS
        assert Users(tmp_path).all["boss"].secret == secret_of("boss")


def test_the_first_user_is_a_super_user(tmp_path: Path) -> None:
    with serving(tmp_path, has_access=True) as served, connected(served) as peer:
        assert "one super user must stay" in (create(peer, "alice").remark or "")
        assert rows(peer.ask(Request.AUTH_LIST_USERS)) == []
        assert create(peer, "admin", userType="Super").code == codes.SUCCESS
        assert create(peer, "alice").code == codes.NO_PERMISSION


def test_a_server_without_a_folder_keeps_no_users(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = create(peer, "admin", userType="Super")
        assert (answer.code, answer.remark) == (codes.INVALID_PARAMETER, "this broker keeps no users")


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    with signed_admin(tmp_path) as (_served, admin):
        create(admin, "alice")
        before = (tmp_path / AUTH_FILE).read_bytes()
        (tmp_path / f"{AUTH_FILE}.new").mkdir()  # a file cannot be made there
        answer = update(admin, "alice", userStatus="disable")
        assert (answer.code, "nothing has changed" in (answer.remark or "")) == (codes.SERVICE_NOT_AVAILABLE, True)
        assert str(tmp_path) not in (answer.remark or "")
        assert (tmp_path / AUTH_FILE).read_bytes() == before
        (tmp_path / f"{AUTH_FILE}.new").rmdir()
        assert update(admin, "alice", userStatus="disable").code == codes.SUCCESS


def test_a_rule_made_here_is_the_rule_that_was_asked_for(tmp_path: Path) -> None:
    with signed_admin(tmp_path) as (_served, admin):
        create(admin, "alice")
        put_acl(admin, "alice", "*", actions=["Get"], decision=None)
        assert Users(tmp_path).all["alice"].rules == (make_rule("*", ["Get"]),)
