"""postdate user, acl and audit, against a folder and against a broker."""

import json
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from postdate.access.users import Users
from postdate.cli.app import main
from postdate.client import admin
from postdate.client.connection import Connections
from postdate.client.security import Security
from postdate.wire.requests import Request
from postdate.wire.signature import Credentials
from tests.access.test_plain_acl import PLAIN_ACL
from tests.support.peer import add_user, connected, notice_users, secret_of, sent, signed_in
from tests.support.server import Served, serving

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command; returns its exit code, its output and its complaints."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A broker with a super user `admin`, as whom commands sign."""
    data = tmp_path / "data"
    data.mkdir()
    add_user(data, "admin", is_super=True)
    credentials = Credentials("admin", secret_of("admin"))
    monkeypatch.setenv("POSTDATE_ACCESS_KEY", credentials.access_key)
    monkeypatch.setenv("POSTDATE_SECRET_KEY", credentials.secret_key)
    monkeypatch.setattr(admin, "Connections", partial(Connections, security=Security(credentials)))
    with serving(data, has_access=True) as served:
        monkeypatch.setenv("POSTDATE_ADDR", served.address)
        yield served


# -- the first user -------------------------------------------------------------------------------------------------


def test_init_makes_a_super_user_whose_secret_is_printed_once(tmp_path: Path, say: Say) -> None:
    code, out, _ = say("user", "init", "--data", tmp_path / "data")
    assert code == 0
    (user,) = Users(tmp_path / "data").all.values()
    assert (user.name, user.is_super, len(user.secret) >= 32) == ("admin", True, True)
    assert f"its secret, which is not shown again: {user.secret}" in out
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    code, out, complaint = say("user", "init", "--data", tmp_path / "data")
    assert (code, out) == (1, "")
    assert "there is a user admin already" in complaint


def test_init_makes_the_certificate_that_a_folder_with_users_lacks(tmp_path: Path, say: Say) -> None:
    data = tmp_path / "data"
    say("user", "init", "--data", data)
    (user,) = Users(data).all.values()
    code, out, _ = say("user", "init", "--data", data, "--self-signed", "broker.internal")
    assert (code, f"a certificate for TLS is in {data / 'tls.crt'}" in out) == (0, True)
    assert list(Users(data).all.values()) == [user], "its secret is the same"
    certificate = (data / "tls.crt").read_bytes()
    code, _, complaint = say("user", "init", "--data", data, "--self-signed")
    assert (code, "there is a user admin already" in complaint) == (1, True)
    assert (data / "tls.crt").read_bytes() == certificate


def test_a_broker_starts_on_a_folder_that_has_users_alone(tmp_path: Path, say: Say) -> None:
    credentials = tmp_path / "admin.toml"
    assert say("user", "init", "--data", tmp_path / "data", "--credentials", credentials, "--self-signed")[0] == 0
    found = tomllib.loads(credentials.read_text())
    assert credentials.stat().st_mode & 0o777 == 0o600
    assert Path(found["ca_file"]).is_file()
    with serving(tmp_path / "data", has_access=True) as served:
        with signed_in(served, found["access_key"], found["secret_key"]) as peer:
            sent(peer, "orders")
        with connected(served) as stranger:
            assert stranger.ask(Request.GET_STATUS).code == 16


def test_init_beside_a_running_broker_closes_it(tmp_path: Path, say: Say) -> None:
    with serving(tmp_path / "data", has_access=True) as served, connected(served) as peer:
        sent(peer, "orders")
        out = say("user", "init", "--data", tmp_path / "data", "--name", "boss", "--json")[1]
        notice_users(served)
        assert peer.ask(Request.GET_STATUS).code == 16
        with signed_in(served, "boss", json.loads(out)["secret"]) as boss:
            sent(boss, "orders")


def test_init_writes_over_no_file_and_makes_no_user_then(tmp_path: Path, say: Say) -> None:
    (tmp_path / "mine").write_text("keep")
    code, _, complaint = say("user", "init", "--data", tmp_path / "data", "--credentials", tmp_path / "mine")
    assert (code, "exists: name a new one" in complaint) == (2, True)
    assert (tmp_path / "mine").read_text() == "keep"
    assert not (tmp_path / "data").exists()
    assert say("user", "init", "--data", tmp_path / "data", "--name", "a b")[0] == 2


# -- users and rules ------------------------------------------------------------------------------------------------


def test_users_are_made_changed_shown_and_deleted(served: Served, tmp_path: Path, say: Say) -> None:
    code, out, _ = say("user", "create", "billing", "--json")
    assert code == 0
    with signed_in(served, "billing", json.loads(out)["secret"]) as billing:
        assert billing.ask(Request.CHECK_CLIENT_CONFIG, b"{}").code == 0
    (tmp_path / "secret").write_text("a-secret-of-mine\n")
    assert say("user", "create", "shop", "--super", "--secret-file", tmp_path / "secret")[1] == "made super user shop\n"
    assert Users(tmp_path / "data").all["shop"].secret == "a-secret-of-mine"
    assert say("user", "update", "shop", "--normal", "--disable")[0] == 0
    out = say("user", "update", "billing", "--new-secret", "--json")[1]
    assert Users(tmp_path / "data").all["billing"].secret == json.loads(out)["secret"]
    code, out, _ = say("user", "list", "--json")
    assert json.loads(out) == [
        {"name": "admin", "kind": "Super", "status": "enable"},
        {"name": "billing", "kind": "Normal", "status": "enable"},
        {"name": "shop", "kind": "Normal", "status": "disable"},
    ]  # fmt: skip
    assert say("acl", "create", "billing", "--resource", "topic:orders", "--actions", "sub,get")[0] == 0
    code, out, _ = say("user", "show", "billing")
    assert "Topic:orders" in out
    assert "Get Sub" in out
    assert say("user", "show", "nobody")[0] == 1
    assert say("user", "update", "shop")[0] == 2
    assert say("user", "delete", "shop", "--yes")[0] == 0
    assert say("user", "delete", "shop", "--yes")[0] == 3
    assert "secret" not in say("user", "list")[1]


@pytest.mark.usefixtures("served")
def test_rules_are_made_listed_and_deleted(tmp_path: Path, say: Say) -> None:
    say("user", "create", "shop")
    words = ("--resource", "Topic:shop-*", "--resource", "Group:shop", "--actions", "Pub,Sub", "--source", "10.0.0.0/8")
    assert say("acl", "create", "shop", *words)[0] == 0
    assert say("acl", "update", "shop", "--resource", "*", "--actions", "All", "--deny", "--default")[0] == 0
    found = json.loads(say("acl", "list", "shop", "--json")[1])
    assert [(rule["resource"], rule["decision"], rule["policy"]) for rule in found] == [
        ("Topic:shop-*", "Allow", "Custom"), ("Group:shop", "Allow", "Custom"), ("*", "Deny", "Default"),
    ]  # fmt: skip
    assert say("acl", "create", "shop", "--resource", "shop", "--actions", "Pub")[0] == 2
    assert say("acl", "create", "nobody", "--resource", "*", "--actions", "Pub")[0] == 3
    assert say("acl", "delete", "shop", "--resource", "Group:shop", "--yes")[0] == 0
    assert len(Users(tmp_path / "data").all["shop"].rules) == 2
    assert say("acl", "delete", "shop", "--yes")[0] == 0
    assert say("acl", "list")[1] == "there is no rule\n"


def test_accounts_of_4_x_are_taken_over(served: Served, tmp_path: Path, say: Say) -> None:
    (tmp_path / "plain_acl.yml").write_text(PLAIN_ACL)
    code, out, complaint = say("acl", "import", tmp_path / "plain_acl.yml")
    assert (code, out) == (0, "took over 3 users: RocketMQ, rocketmq2, wide\n")
    assert "globalWhiteRemoteAddresses are not taken over" in complaint
    with signed_in(served, "wide", "12345678") as wide:
        sent(wide, "orders")


# -- the audit log --------------------------------------------------------------------------------------------------


def test_the_audit_log_is_shown_and_filtered(served: Served, tmp_path: Path, say: Say) -> None:
    say("user", "create", "shop")
    with connected(served) as stranger:
        stranger.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
    served.stop()
    data = ("--data", tmp_path / "data")
    found = [json.loads(line) for line in say("audit", *data, "--json")[1].splitlines()]
    assert [(line["user"], line["request"], line["result"]) for line in found] == [
        ("admin", "AUTH_CREATE_USER", "done"), ("", "DELETE_TOPIC_IN_BROKER", "refused"),
    ]  # fmt: skip
    assert "AUTH_CREATE_USER" in say("audit", *data)[1]
    assert "DELETE_TOPIC" not in say("audit", *data, "--user", "admin")[1]
    assert "AUTH_CREATE" not in say("audit", *data, "--refused")[1]
    assert "AUTH_CREATE" not in say("audit", *data, "--last", "1")[1]
    assert len(say("audit", *data, "--since", "1h", "--json")[1].splitlines()) == 2
    assert "there is nothing" in say("audit", *data, "--since", "0s")[1]
    assert say("audit", "--data", tmp_path / "nowhere")[0] == 2
