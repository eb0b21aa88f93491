"""Who a client is: every request that it sends is signed, and nothing else changes."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate.access.users import make_rule
from postdate.cli.app import main
from postdate.client import admin
from postdate.client.address import parse_address
from postdate.client.connection import Connections
from postdate.client.security import NO_SECURITY, Login, Security, find_login
from postdate.errors import NoPermission, ProtocolError, UsageError
from postdate.spark.executor.broker_client import BrokerClient
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from postdate.wire.signature import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE, Credentials, is_signed
from tests.client.test_peer import SENT, WAIT_S, Peer, code, peer
from tests.support.certificates import Authority, Pair
from tests.support.peer import add_user
from tests.support.server import secured, serving

ALICE = Security(Credentials("alice", "wonderland", "a-token"))


def ask(playing: Peer, security: Security, **fields: object) -> list[Command]:
    """Asks one thing and tells one; returns what the peer has heard."""

    async def talk() -> None:
        connections = Connections(security=security)
        try:
            connection = await connections.to(parse_address(playing.address), WAIT_S)
            connection.tell(Request.HEART_BEAT, {"clientID": "1@2"})
            await connection.request(Request.QUERY_MESSAGE, {"topic": "orders", **fields}, b"body", timeout=WAIT_S)
        finally:
            await connections.close()

    asyncio.run(talk())
    return playing.asked


def test_every_request_is_signed() -> None:
    with peer(code(0)) as playing:
        told, asked = ask(playing, ALICE, maxNum=3, isOrdered=True)
    for command in (told, asked):
        assert command.fields[ACCESS_KEY] == "alice"
        assert command.fields[SECURITY_TOKEN] == "a-token"
        assert is_signed(command.fields, command.body, "wonderland")
    assert asked.body == b"body"


def test_without_credentials_nothing_is_added() -> None:
    with peer(code(0)) as playing:
        told, asked = ask(playing, NO_SECURITY, maxNum=3)
    assert told.fields == {"clientID": "1@2"}
    assert asked.fields == {"topic": "orders", "maxNum": "3"}
    assert SIGNATURE not in asked.fields


def test_a_field_that_cannot_be_signed_is_refused() -> None:
    with peer(code(0)) as playing, pytest.raises(ProtocolError, match="cannot be signed"):
        ask(playing, ALICE, share=0.5)


def test_no_secret_is_printed() -> None:
    assert "wonderland" not in repr(ALICE)


# -- where a login comes from


def file_of(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "credentials.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


ALICE_IN_FILE = "access_key = 'alice'\nsecret_key = 'wonderland'\n"


def test_a_login_is_found_in_arguments_then_in_the_environment_then_in_a_file(tmp_path: Path) -> None:
    file = file_of(tmp_path, ALICE_IN_FILE + "tls = true\nca_file = 'ca.pem'\n")
    environ = {"POSTDATE_CREDENTIALS": str(file)}
    alice = Credentials("alice", "wonderland")
    assert find_login(environ) == Login(alice, True, "ca.pem")
    environ |= {"POSTDATE_ACCESS_KEY": "bob", "POSTDATE_SECRET_KEY": "builder"}
    assert find_login(environ) == Login(Credentials("bob", "builder"), True, "ca.pem")
    environ |= {"POSTDATE_TLS": "0"}
    assert find_login(environ) == Login(Credentials("bob", "builder"))
    environ |= {"POSTDATE_TLS": "enforcing", "POSTDATE_CERT_FILE": "me.pem"}
    assert find_login(environ) == Login(Credentials("bob", "builder"), True, "", "me.pem")
    given = find_login(environ, access_key="carol", secret_key="singer", security_token="t", ca_file="other.pem")
    assert given == Login(Credentials("carol", "singer", "t"), True, "other.pem")
    assert find_login(environ, tls=False).tls is False


def test_without_anything_there_is_no_login(tmp_path: Path) -> None:
    assert find_login({"XDG_CONFIG_HOME": str(tmp_path)}) == Login()
    assert Login().open() == NO_SECURITY


def test_the_file_of_credentials_lies_with_the_settings_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "postdate").mkdir()
    file_of(tmp_path / "postdate", ALICE_IN_FILE)
    assert find_login({"XDG_CONFIG_HOME": str(tmp_path)}).credentials == Credentials("alice", "wonderland")


def test_a_secret_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    file = file_of(tmp_path, "wonderland\n")
    environ = {"POSTDATE_ACCESS_KEY": "alice", "POSTDATE_SECRET_KEY_FILE": str(file)}
    assert find_login(environ).credentials == Credentials("alice", "wonderland")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
@pytest.mark.parametrize("variable", ["POSTDATE_CREDENTIALS", "POSTDATE_SECRET_KEY_FILE"])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, variable: str, mode: int) -> None:
    file = file_of(tmp_path, ALICE_IN_FILE, mode)
    with pytest.raises(UsageError, match=f"{file} holds a secret and others can read it: run chmod 600 {file}"):
        find_login({variable: str(file)})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("access_key = 'alice'", "has access_key and no secret_key, expected both"),
        ("secret_key = 'wonderland'", "has secret_key and no access_key, expected both"),
        ("access_key = 1", "access_key in .* is no text"),
        ("tls = 'yes'", "tls in .* is no true or false"),
        ("password = 'wonderland'", "has 'password', expected one of access_key, "),
        ("secret_key = wonderland", "is not TOML, expected lines such as access_key = 'alice'"),
        ("key_file = 'me.key'", "has key_file and no cert_file"),
    ],
)
def test_a_file_of_credentials_that_is_wrong_is_refused_without_its_secrets(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as raised:
        find_login({"POSTDATE_CREDENTIALS": str(file_of(tmp_path, text))})
    assert "wonderland" not in str(raised.value)


def test_what_is_wrong_in_arguments_and_environment_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match="the arguments has access_key and no secret_key"):
        postdate.connect(access_key="alice")
    with pytest.raises(UsageError, match="the environment has access_key and no secret_key"):
        find_login(environ | {"POSTDATE_ACCESS_KEY": "alice"})
    with pytest.raises(UsageError, match="environment POSTDATE_TLS is 'maybe', expected 1 or 0"):
        find_login(environ | {"POSTDATE_TLS": "maybe"})
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        find_login(environ | {"POSTDATE_CREDENTIALS": str(tmp_path / "missing")})
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        postdate.connect(tls=True, ca_file=str(tmp_path / "missing"))


# -- clients


def test_all_that_a_client_does_is_signed() -> None:
    """Sends, batches, lookups, cancels, and all that a consumer says, on connections of its own."""
    with peer(code(0, **SENT)) as playing:
        how = {"access_key": "alice", "secret_key": "wonderland"}
        with postdate.connect(playing.address, timeout=1.0, **how) as client:  # type: ignore[arg-type]
            client.send("orders", "x" * 1_000, key="42")
            client.send_batch("orders", [postdate.Outgoing("a"), postdate.Outgoing("b")])
            client.find("orders", key="42")
            with pytest.raises(postdate.PostdateError):
                client.listen("orders", "billing", print)
        asked = {command.code for command in playing.asked}
        assert {Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE, Request.HEART_BEAT} <= asked
        for command in playing.asked:
            assert is_signed(command.fields, command.body, "wonderland"), command.code


def test_a_client_without_rights_is_told_the_sentence_and_does_not_try_again() -> None:
    with peer(code(16, "user alice may not send to topic orders")) as playing:
        with postdate.connect(playing.address) as client:
            with pytest.raises(NoPermission, match=r"^user alice may not send to topic orders$"):
                client.send("orders", "x")
            assert playing.count(Request.SEND_MESSAGE_V2) == 1
            with pytest.raises(NoPermission, match="user alice may not"):
                client.listen("orders", "billing", print)
        assert playing.count(Request.HEART_BEAT) <= 1


# -- TLS


def test_a_client_does_everything_over_tls(tmp_path: Path, pair: Pair) -> None:
    with secured(tmp_path, pair) as served, postdate.connect(served.address, tls=True, ca_file=pair.ca) as client:
        client.send("orders", "x" * 1_000_000, key="42")
        receipt = client.send("orders", "never", delay="1h")
        assert client.cancel(receipt) == postdate.Cancelled.CANCELLED
        for message in client.consume("orders", group="billing"):
            assert message.body == b"x" * 1_000_000
            break


def test_an_asyncio_client_does_everything_over_tls_with_a_certificate_of_its_own(
    tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    alice = authority.sign("alice", "alice")

    async def talk(address: str) -> None:
        how = {"cert_file": alice.certificate, "key_file": alice.key}
        async with postdate.connect_async(address, ca_file=pair.ca, **how) as client:  # type: ignore[arg-type]
            await client.send("orders", "hello")
            async for message in client.consume("orders", group="billing"):
                assert message.body == b"hello"
                break

    how = {"tls_client_ca": authority.certificate, "tls_client_cert": "required"}
    with secured(tmp_path, pair, **how) as served:
        asyncio.run(talk(served.address))


def test_a_certificate_is_enough_to_be_a_user(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    """Its common name is the user's; nothing is signed."""
    data = tmp_path / "data"
    data.mkdir()
    add_user(data, "admin", is_super=True)
    add_user(data, "alice", make_rule("Topic:orders", ["Pub"]))
    how: dict[str, Any] = {"tls_client_ca": authority.certificate, "tls_client_cert": "required", "has_access": True}
    with secured(data, pair, **how) as served:
        alice, bob = (authority.sign(name, name) for name in ("alice", "bob"))
        for shown, is_let_in in ((alice, True), (bob, False)):
            files = {"ca_file": pair.ca, "cert_file": shown.certificate, "key_file": shown.key}
            with postdate.connect(served.address, **files) as client:  # type: ignore[arg-type]
                if is_let_in:
                    client.send("orders", "hello")
                    with pytest.raises(NoPermission, match="user 'alice' has no right Pub to Topic:parcels"):
                        client.send("parcels", "hello")
                else:
                    with pytest.raises(NoPermission, match="not signed by a user who may sign in here"):
                        client.send("orders", "hello")


def test_operators_and_spark_speak_tls_by_their_environment(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTDATE_TLS", "1")
    monkeypatch.setenv("POSTDATE_CA_FILE", pair.ca)
    with secured(tmp_path, pair) as served:
        admin.put_topic(served.address, admin.Topic("orders", 4, 4, 6))
        assert "orders" in admin.topic_names(served.address)
        broker = pickle.loads(pickle.dumps(BrokerClient(served.address)))
        assert len(broker.topic("orders")) == 4
        assert main(["topic", "list", "--addr", served.address]) == 0


def refusal_of(address: str, **how: Any) -> str:
    """The sentence with which a client gives up, and Spark's in the same words."""
    with postdate.connect(address, timeout=0.5, **how) as client, pytest.raises(postdate.PostdateError) as raised:
        client.send("orders", "x")
    with pytest.raises(postdate.PostdateError) as of_spark:
        BrokerClient(address, login=find_login(**how)).topic("orders")
    if isinstance(raised.value, postdate.Untrusted):
        assert str(raised.value) == str(of_spark.value)
        assert isinstance(of_spark.value, postdate.Untrusted)
    return str(raised.value)


def test_a_broker_that_is_not_to_be_trusted_is_refused_in_a_sentence(tmp_path: Path, authority: Authority) -> None:
    trusted = {"ca_file": authority.certificate}
    stranger = Authority(tmp_path / "strangers", "strangers").sign("server")
    with secured(tmp_path / "1", stranger) as served:
        assert "no authority that we trust has signed it" in refusal_of(served.address, **trusted)
        assert "no authority that we trust has signed it" in refusal_of(served.address, tls=True)
    with secured(tmp_path / "2", authority.sign("elsewhere", san="DNS:broker.example.org")) as served:
        assert "it is for another host (" in refusal_of(served.address, **trusted)
    with secured(tmp_path / "3", authority.sign("expired", days=-1)) as served:
        assert refusal_of(served.address, **trusted).endswith("is not to be trusted: certificate has expired")


def test_plain_meets_tls_in_a_sentence(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    with serving(tmp_path / "1") as served:
        assert "does that port speak TLS" in refusal_of(served.address, ca_file=pair.ca)
    with secured(tmp_path / "2", pair) as served:
        assert "does that port want TLS" in refusal_of(served.address, tls=False)
    how = {"tls_client_ca": authority.certificate, "tls_client_cert": "required"}
    with secured(tmp_path / "3", pair, **how) as served:
        assert "certificate of the client?" in refusal_of(served.address, ca_file=pair.ca)


def test_a_broker_that_is_not_to_be_trusted_is_not_tried_again(tmp_path: Path, pair: Pair) -> None:
    stranger = Authority(tmp_path / "strangers", "strangers")
    with (
        secured(tmp_path / "data", pair) as served,
        postdate.connect(served.address, timeout=WAIT_S, ca_file=stranger.certificate) as client,
    ):
        with pytest.raises(postdate.Untrusted):
            client.send("orders", "x")
        with pytest.raises(postdate.Untrusted):
            client.listen("orders", "billing", print)
