"""Dead letters through both clients: listed with their reasons, resent once, deleted, also after a restart."""

import asyncio
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import Client, DeadLetter
from postdate.broker.dead_letters import DONE_GROUP
from postdate.client import admin
from postdate.clock import ManualClock
from postdate.message import PROPERTY_ORIGIN, PROPERTY_REASON
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.core import T0, snapshot
from tests.support.peer import Peer, connected, make_topic, read_bodies, sent
from tests.support.server import Served, serving

GROUP, DEAD = "billing", "%DLQ%billing"
_BORN = itertools.count(T0)  # no two sends are born at one instant: they would be one


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ManualClock(T0)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with postdate.connect(served.address) as connected:
        yield connected


def bury(peer: Peer, number: int, topic: str = "orders", **more: Any) -> None:
    """A dead letter as the broker makes it of a message that was tried three times."""
    properties = {
        "UNIQ_KEY": f"ID{number}", "KEYS": f"order-{number} shared", "TAGS": "paid", "colour": "red",
        "RETRY_TOPIC": topic, "ORIGIN_MESSAGE_ID": "ABC", PROPERTY_REASON: f"TimeoutError: no answer {number}",
        PROPERTY_ORIGIN: f"{topic}/1/{number}", **more,
    }  # fmt: skip
    known = {name: value for name, value in properties.items() if value is not None}
    sent(peer, DEAD, f"letter {number}", fields={"j": 3, "g": next(_BORN)}, **known)


@pytest.fixture
def peer(served: Served) -> Iterator[Peer]:
    with connected(served) as connection:
        make_topic(connection, "orders")
        make_topic(connection, "bills")
        make_topic(connection, DEAD)
        yield connection


def ids(letters: list[DeadLetter]) -> list[str]:
    return [letter.id for letter in letters]


def test_a_message_past_its_attempts_is_listed_with_what_it_was(served: Served, client: Client) -> None:
    sent_id = client.send("orders", "pay, please", key="order-17", tag="paid", properties={"n": 1}, queue=0).id
    invisible: dict[str, Any] = {
        "consumerGroup": GROUP,
        "topic": "orders",
        "queueId": 0,
        "maxMsgNums": 1,
        "invisibleTime": 1_000,
    }
    with connected(served) as peer:
        body = b'{"groupName": "billing", "retryMaxTimes": 1}'
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body).code == codes.SUCCESS
        for _ in range(2):
            assert peer.ask(Request.POP_MESSAGE, **invisible).code == codes.SUCCESS
            served.pass_ms(1_000)
            served.settle()
    (letter,) = client.dead_letters(GROUP)
    assert (letter.id, letter.group, letter.topic) == (sent_id, GROUP, "orders")
    assert (letter.body, letter.key, letter.tag, letter.properties["n"]) == (b"pay, please", "order-17", "paid", "1")
    assert letter.attempts == 2
    assert letter.dead_at == datetime.fromtimestamp((T0 + 2_000) / 1_000, UTC)


def test_letters_are_chosen_by_topic_key_time_and_reason(served: Served, peer: Peer, client: Client) -> None:
    for number in range(3):
        bury(peer, number)
        served.pass_ms(60_000)
    bury(peer, 3, topic="bills", POSTDATE_REASON="ValueError: no such bill")
    died = [letter.dead_at for letter in client.dead_letters(GROUP)]
    assert died == [datetime.fromtimestamp(T0 / 1_000, UTC) + timedelta(minutes=number) for number in range(4)]
    chosen: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["ID0", "ID1", "ID2", "ID3"]),
        ({"topic": "orders"}, ["ID0", "ID1", "ID2"]),
        ({"key": "order-1"}, ["ID1"]),
        ({"key": "shared", "topic": "bills"}, ["ID3"]),
        ({"reason": "timeouterror"}, ["ID0", "ID1", "ID2"]),
        ({"reason": "no such"}, ["ID3"]),
        ({"since": died[1], "until": died[3]}, ["ID1", "ID2"]),
        ({"limit": 2}, ["ID0", "ID1"]),
        ({"key": "nobody"}, []),
    ]
    for wishes, expected in chosen:
        assert ids(client.dead_letters(GROUP, **wishes)) == expected, wishes
    letter = client.dead_letters(GROUP, key="order-1")[0]
    assert (letter.reason, letter.attempts, letter.origin) == ("TimeoutError: no answer 1", 3, "orders/1/1")
    with pytest.raises(postdate.UsageError, match="time zone"):
        client.dead_letters(GROUP, since=datetime(2033, 1, 1))


def test_a_group_without_dead_letters_has_none_and_one_that_does_not_exist_is_named(client: Client) -> None:
    with pytest.raises(postdate.GroupNotFound, match="group 'billing' does not exist"):
        client.dead_letters(GROUP)


def test_a_resent_letter_is_a_message_of_its_topic_and_listed_no_more(peer: Peer, client: Client) -> None:
    for number in range(3):
        bury(peer, number)
    letters = client.dead_letters(GROUP)
    (receipt,) = client.resend_dead_letters([letters[1]])
    assert (receipt.topic, receipt.id) == ("orders", "ID1")
    assert ids(client.dead_letters(GROUP)) == ["ID0", "ID2"]
    for message in client.consume("orders", "another", idle="1s"):
        assert (message.id, message.body, message.keys, message.tag) == (
            "ID1",
            b"letter 1",
            ["order-1", "shared"],
            "paid",
        )
        assert message.attempt == 1
        names = {"UNIQ_KEY", "KEYS", "TAGS", "colour"}
        assert {name for name in message.properties if name in names or name.isupper()} == names
        break


def test_a_letter_that_is_resent_twice_is_stored_once(served: Served, peer: Peer, client: Client) -> None:
    """As after a crash between the send and the mark, or by two operators."""
    bury(peer, 0)
    letters = client.dead_letters(GROUP)
    first = client.resend_dead_letters(letters)
    assert client.resend_dead_letters(letters) == first
    assert read_bodies(peer, "orders") == ["letter 0"]
    served.pass_ms(1)
    bury(peer, 0)  # it has failed again: another letter
    client.resend_dead_letters(client.dead_letters(GROUP))
    assert read_bodies(peer, "orders") == ["letter 0"] * 2


def test_a_letter_that_cannot_be_resent_stays(peer: Peer, client: Client) -> None:
    bury(peer, 0)
    bury(peer, 1, topic="bills")
    make_topic(peer, "bills", perm=4)
    with pytest.raises(postdate.NoPermission):
        client.resend_dead_letters(client.dead_letters(GROUP))
    assert ids(client.dead_letters(GROUP)) == ["ID1"]
    bury(peer, 2, RETRY_TOPIC=None)
    with pytest.raises(postdate.UsageError, match=r"nobody knows .* dead letter ID2"):
        client.resend_dead_letters(client.dead_letters(GROUP, key="order-2"))


def test_deleted_letters_stay_deleted_in_any_order_and_after_a_restart(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0)) as served,
        connected(served) as peer,
        postdate.connect(served.address) as client,
    ):
        make_topic(peer, DEAD)
        for number in range(8):
            bury(peer, number)
        letters = client.dead_letters(GROUP)
        assert client.delete_dead_letters([letters[6], letters[2], letters[2]]) == 2
        assert client.delete_dead_letters([letters[2]]) == 0
        assert ids(client.dead_letters(GROUP)) == ["ID0", "ID1", "ID3", "ID4", "ID5", "ID7"]
        served.pass_ms(10)
        served.settle()
        assert client.delete_dead_letters(letters[:2]) == 2
        assert ids(client.dead_letters(GROUP)) == ["ID3", "ID4", "ID5", "ID7"]
        served.pass_ms(10)
        served.settle()
        assert served.call(lambda: served.broker.fold.leases.counts[DONE_GROUP]) == 1, "one lease beyond the offset"
        served.call(lambda: snapshot(served.broker))
        client.delete_dead_letters([letters[4]])
        served.kill()
    with serving(tmp_path, ManualClock(T0 + 1_000)) as served, postdate.connect(served.address) as client:
        left = client.dead_letters(GROUP)
        assert ids(left) == ["ID3", "ID5", "ID7"]
        assert client.delete_dead_letters(left) == 3
        assert client.dead_letters(GROUP) == []
        with connected(served) as peer:
            assert len(read_bodies(peer, DEAD)) == 8, "the topic itself keeps them until retention"
            bury(peer, 9)
        assert ids(client.dead_letters(GROUP)) == ["ID9"]


def test_deletions_under_way_at_once_do_not_undo_each_other(peer: Peer, served: Served, client: Client) -> None:
    for number in range(40):
        bury(peer, number)

    async def delete_all(letters: list[DeadLetter]) -> list[int]:
        async with postdate.connect_async(served.address) as client:
            return await asyncio.gather(*[client.delete_dead_letters([letter]) for letter in letters])

    letters = client.dead_letters(GROUP)
    assert sum(asyncio.run(delete_all([*letters[1:], letters[0]]))) == 40
    assert client.dead_letters(GROUP) == []


def test_many_letters_come_in_several_answers(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), pull_bytes_max=4_096) as served,
        connected(served) as peer,
        postdate.connect(served.address) as client,
    ):
        make_topic(peer, DEAD, 2)
        for number in range(300):
            sent(peer, DEAD, "x" * 50, queue_id=number % 2, UNIQ_KEY=f"ID{number}", RETRY_TOPIC="orders")
        letters = client.dead_letters(GROUP, limit=None)
        assert sorted(ids(letters)) == sorted(f"ID{number}" for number in range(300))
        assert client.delete_dead_letters(letters) == 300
        assert client.dead_letters(GROUP) == []


def test_the_asyncio_client_does_the_same(peer: Peer, served: Served) -> None:
    for number in range(3):
        bury(peer, number)

    async def manage() -> None:
        async with postdate.connect_async(served.address) as client:
            first, second, _ = await client.dead_letters(GROUP, topic="orders")
            (receipt,) = await client.resend_dead_letters([first])
            assert receipt.id == "ID0"
            assert await client.delete_dead_letters([second]) == 1
            assert ids(await client.dead_letters(GROUP)) == ["ID2"]

    asyncio.run(manage())
    assert read_bodies(peer, "orders") == ["letter 0"]


def test_the_group_that_knows_what_is_done_is_not_listed_and_not_deleted(
    served: Served, peer: Peer, client: Client
) -> None:
    bury(peer, 1)
    client.delete_dead_letters(client.dead_letters(GROUP))
    assert DONE_GROUP not in admin.group_names(served.address)
    with pytest.raises(postdate.NoPermission, match="is the broker's own"):
        admin.delete_group(served.address, DONE_GROUP)
    assert client.dead_letters(GROUP) == []


def test_nobody_pops_as_the_group_that_knows_what_is_done(peer: Peer) -> None:
    asked: dict[str, Any] = {
        "consumerGroup": DONE_GROUP,
        "topic": DEAD,
        "queueId": 0,
        "maxMsgNums": 1,
        "invisibleTime": 1_000,
    }
    answer = peer.ask(Request.POP_MESSAGE, **asked)
    assert answer.code == codes.NO_PERMISSION
    assert "which dead letters are done" in (answer.remark or "")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"group": 5, "letters": [[0, 1]]}',
        b'{"group": "g", "letters": []}',
        b'{"group": "g", "letters": [[0]]}',
    ],
)
def test_a_request_about_letters_that_cannot_be_read_is_refused(peer: Peer, body: bytes) -> None:
    assert peer.ask(Request.FINISH_DEAD_LETTERS, body=body).code == codes.INVALID_PARAMETER
