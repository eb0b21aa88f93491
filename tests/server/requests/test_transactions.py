"""Transactions over remoting: halves, ends, checks, and what operators see and do."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.access.users import make_rule
from postdate.clock import ManualClock
from postdate.message import decode_properties
from postdate.server.dispatch import Dispatcher
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.ids import encode_transaction_id, parse_message_id
from postdate.wire.requests import ClientRequest, Request
from tests.support.core import DAY_MS, T0
from tests.support.peer import (
    Peer,
    add_user,
    ask_json,
    connected,
    make_topic,
    read_all,
    read_bodies,
    send,
    send_command,
    sent,
    signed_in,
)
from tests.support.server import Served, serving

GROUP = "billing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ManualClock(T0)) as running:
        yield running


@pytest.fixture
def peer(served: Served) -> Iterator[Peer]:
    with connected(served) as one:
        make_topic(one, "orders")
        yield one


def half(peer: Peer, unique: str = "k", body: str = "paid", **more: Any) -> Command:
    """Sends a half as a Java client does; returns the answer."""
    more = {"UNIQ_KEY": unique, "TRAN_MSG": "true", "PGROUP": GROUP} | more
    return send(peer, more.pop("topic", "orders"), body, sys_flag=4, **more)


def place_of(answer: Command) -> dict[str, Any]:
    """The fields by which an end names the half of an answer."""
    assert answer.code == codes.SUCCESS, answer
    offset = parse_message_id(answer.fields["msgId"])[1]
    return {"commitLogOffset": offset, "tranStateTableOffset": answer.fields["queueOffset"], "producerGroup": GROUP}


def end(peer: Peer, place: dict[str, Any], decision: int = 8, **more: Any) -> tuple[int, str]:
    fields: dict[str, Any] = {"topic": "orders", "commitOrRollback": decision} | place | more
    answer = peer.ask(Request.END_TRANSACTION, **fields)
    return answer.code, answer.fields.get("outcome", answer.remark or "")


def come(peer: Peer, *groups: str, name: str = "producer@1") -> None:
    """Says hello as a producer of some groups."""
    body = {"clientID": name, "producerDataSet": [{"groupName": group} for group in groups], "consumerDataSet": []}
    assert peer.ask(Request.HEART_BEAT, orjson.dumps(body)).code == codes.SUCCESS


def pass_and_tick(served: Served, span_ms: int) -> None:
    served.pass_ms(span_ms)
    served.call(served.dispatcher.transactions.tick)
    served.settle()


# -- halves and ends --------------------------------------------------------------------------------------------


def test_a_half_is_answered_by_its_place_and_seen_by_nobody(served: Served, peer: Peer) -> None:
    sent(peer, "orders", "before")
    first, second = half(peer), half(peer, "l")
    assert first.fields["transactionId"] == "k"
    assert [first.fields["queueOffset"], second.fields["queueOffset"]] == ["0", "1"], "the number of the half"
    assert "recallHandle" not in first.fields
    host, offset = parse_message_id(first.fields["msgId"])
    assert host.port == served.port
    assert served.call(lambda: served.broker.transactions.find_open(offset)) is not None
    assert read_bodies(peer, "orders") == ["before"]


def test_a_commit_delivers_once_and_says_so(peer: Peer) -> None:
    place = place_of(half(peer, TAGS="t", colour="red"))
    assert end(peer, place) == (codes.SUCCESS, "committed")
    assert end(peer, place) == (codes.SUCCESS, "already_committed")
    assert end(peer, place, 12) == (codes.SYSTEM_ERROR, "already_committed")
    (record,) = read_all(peer, "orders")
    assert (record.body, record.sys_flag) == (b"paid", 8)
    assert decode_properties(record.properties) == {
        "UNIQ_KEY": "k", "PGROUP": GROUP, "TAGS": "t", "colour": "red", "__transactionId__": "k",
    }  # fmt: skip


def test_a_roll_back_delivers_nothing(peer: Peer) -> None:
    place = place_of(half(peer))
    assert end(peer, place, 12) == (codes.SUCCESS, "rolled_back")
    assert end(peer, place, 12) == (codes.SUCCESS, "already_rolled_back")
    assert end(peer, place) == (codes.SYSTEM_ERROR, "already_rolled_back")
    assert read_bodies(peer, "orders") == []


def test_an_end_without_an_answer_as_java_sends_it(served: Served, peer: Peer) -> None:
    place = place_of(half(peer))
    peer.say(Request.END_TRANSACTION, topic="orders", commitOrRollback=8, oneway=True, **place)
    peer.expect_no_more()
    served.settle()
    assert read_bodies(peer, "orders") == ["paid"]


def test_who_does_not_know_yet_changes_nothing(peer: Peer) -> None:
    place = place_of(half(peer))
    assert end(peer, place, 0)[0] == codes.SUCCESS
    assert end(peer, place) == (codes.SUCCESS, "committed")


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"commitOrRollback": 4}, codes.INVALID_PARAMETER),
        ({"producerGroup": "other"}, codes.INVALID_PARAMETER),
        ({"tranStateTableOffset": 7}, codes.INVALID_PARAMETER),
        ({"commitLogOffset": 3}, codes.SYSTEM_ERROR),
        ({"commitLogOffset": -1}, codes.SYSTEM_ERROR),
        ({"commitLogOffset": "x"}, codes.INVALID_PARAMETER),
    ],
    ids=str,
)
def test_an_end_that_names_no_open_half_changes_nothing(peer: Peer, more: dict[str, Any], code: int) -> None:
    place = place_of(half(peer))
    assert end(peer, place, **more)[0] == code
    assert end(peer, place) == (codes.SUCCESS, "committed")


def test_a_delay_counts_from_the_commit(served: Served, peer: Peer) -> None:
    place = place_of(half(peer, TIMER_DELAY_MS=2_000))
    served.pass_ms(10_000)
    assert end(peer, place) == (codes.SUCCESS, "committed")
    served.pass_ms(1_999)
    served.settle()
    assert read_bodies(peer, "orders") == []
    served.pass_ms(1)
    served.settle()
    assert read_bodies(peer, "orders") == ["paid"]


def test_the_first_half_of_a_topic_creates_it(peer: Peer) -> None:
    place = place_of(half(peer, topic="fresh"))
    assert end(peer, place, topic="fresh") == (codes.SUCCESS, "committed")
    assert read_bodies(peer, "fresh") == ["paid"]


@pytest.mark.parametrize(
    ("more", "said"),
    [({"PGROUP": ""}, "PGROUP"), ({"UNIQ_KEY": ""}, "UNIQ_KEY"), ({"POSTDATE_ONCE": "id"}, "POSTDATE_ONCE")],
    ids=str,
)
def test_a_half_that_cannot_be_ended_is_refused(peer: Peer, more: dict[str, Any], said: str) -> None:
    named = {"UNIQ_KEY": "k", "TRAN_MSG": "true", "PGROUP": GROUP} | more
    answer = send(peer, "orders", sys_flag=4, **{name: value for name, value in named.items() if value})
    assert answer.code == codes.MESSAGE_ILLEGAL
    assert said in (answer.remark or "")


def test_sends_and_halves_of_one_read_keep_their_order(peer: Peer) -> None:
    commands = [send_command(peer, "orders", name) for name in ("a", "b")]
    more: dict[str, Any] = {"UNIQ_KEY": "k", "TRAN_MSG": "true", "PGROUP": GROUP}
    commands.insert(1, send_command(peer, "orders", "half", sys_flag=4, **more))
    peer.write(*commands)
    places = [parse_message_id(peer.answer_to(command.opaque).fields["msgId"])[1] for command in commands]
    assert places == sorted(places)
    assert read_bodies(peer, "orders") == ["a", "b"]


def test_what_a_consumer_sends_back_is_no_half(served: Served, peer: Peer) -> None:
    answer = send(
        peer, "%RETRY%readers", "again", fields={"j": 1}, DELAY=1, TRAN_MSG="true", UNIQ_KEY="k", PGROUP=GROUP
    )
    assert answer.code == codes.SUCCESS, answer
    assert served.call(lambda: served.broker.transactions.open_count) == 0


def test_a_half_cannot_be_sent_back_or_cancelled_and_find_says_what_it_is(peer: Peer) -> None:
    place = place_of(half(peer))
    back = peer.ask(
        Request.CONSUMER_SEND_MSG_BACK, group="readers", offset=place["commitLogOffset"], originTopic="orders"
    )
    assert back.code != codes.SUCCESS
    cancelled = peer.ask(Request.CANCEL_KEY, topic="orders", key="k")
    assert orjson.loads(cancelled.body)["messages"] == []
    for code, named in (
        (Request.QUERY_MESSAGE, {"topic": "orders", "key": "k"}),
        (Request.VIEW_MESSAGE_BY_ID, {"offset": place["commitLogOffset"]}),
    ):
        found = peer.ask(code, **named)
        assert records.properties_of(found.body)["POSTDATE_STATE"] == "half"
    assert end(peer, place) == (codes.SUCCESS, "committed")


# -- checks -----------------------------------------------------------------------------------------------------


def check(peer: Peer) -> Command:
    notice = peer.next_notice()
    assert (notice.code, notice.is_oneway) == (ClientRequest.CHECK_TRANSACTION_STATE, True)
    return notice


def test_a_producer_is_asked_and_its_answer_ends_the_transaction(served: Served, peer: Peer) -> None:
    come(peer, GROUP, "other")
    answer = half(peer, KEYS="key")
    pass_and_tick(served, 5_999)
    peer.expect_no_more()
    assert not peer.notices
    pass_and_tick(served, 1)
    asked = check(peer)
    place = place_of(answer)
    fields = asked.fields
    assert (fields["topic"], fields["msgId"], fields["transactionId"]) == ("orders", "k", "k")
    assert int(fields["commitLogOffset"]) == place["commitLogOffset"]
    assert (fields["tranStateTableOffset"], fields["offsetMsgId"]) == ("0", answer.fields["msgId"])
    record = records.decode(asked.body)
    assert (record.topic, record.body, record.offset) == ("orders", b"paid", place["commitLogOffset"])
    properties = decode_properties(record.properties)
    assert (properties["PGROUP"], properties["KEYS"], properties["TRANSACTION_CHECK_TIMES"]) == (GROUP, "key", "1")
    assert end(peer, place, fromTransactionCheck=True) == (codes.SUCCESS, "committed")
    pass_and_tick(served, DAY_MS)
    peer.expect_no_more()
    assert not peer.notices
    assert read_bodies(peer, "orders") == ["paid"]


def test_producers_take_turns_until_the_transaction_is_given_up(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"transaction_check_times_max": 3}
    with serving(tmp_path, ManualClock(T0), **settings) as served, connected(served) as one, connected(served) as two:
        make_topic(one, "orders")
        come(one, GROUP, name="one")
        come(two, GROUP, name="two")
        half(one)
        pass_and_tick(served, 6_000)
        for _ in range(5):
            pass_and_tick(served, 30_000)
        for peer in (one, two):
            peer.round_trip()
        assert (len(one.notices), len(two.notices)) == (2, 1)
        assert ask_json(one, Request.GET_TRANSACTIONS)["givenUp"] == 1


def test_who_comes_later_is_asked_then(served: Served, peer: Peer) -> None:
    half(peer)
    for _ in range(50):
        pass_and_tick(served, 30_000)
    come(peer, GROUP)
    pass_and_tick(served, 30_000)
    assert records.properties_of(check(peer).body)["TRANSACTION_CHECK_TIMES"] == "1", "asking nobody did not count"


@pytest.mark.parametrize("way", ["says goodbye", "is gone"])
def test_who_has_left_is_not_asked(served: Served, peer: Peer, way: str) -> None:
    with connected(served) as producer:
        come(producer, GROUP)
        half(producer)
        if way == "says goodbye":
            producer.ask(Request.UNREGISTER_CLIENT, clientID="producer@1", producerGroup=GROUP)
        else:
            producer.close()
            peer.round_trip()
        pass_and_tick(served, 6_000)
        if way == "says goodbye":
            producer.expect_no_more()
            assert not producer.notices
    (known,) = ask_json(peer, Request.GET_TRANSACTIONS)["transactions"]
    assert known["checks"] == 0


def test_checks_go_on_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        make_topic(peer, "orders")
        come(peer, GROUP)
        place = place_of(half(peer))
        pass_and_tick(served, 6_000)
        check(peer)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        come(peer, GROUP)
        pass_and_tick(served, 30_000)
        assert records.properties_of(check(peer).body)["TRANSACTION_CHECK_TIMES"] == "2"
        assert end(peer, place) == (codes.SUCCESS, "committed")
        (record,) = read_all(peer, "orders")
        assert decode_properties(record.properties)["TRANSACTION_CHECK_TIMES"] == "2"


# -- users ------------------------------------------------------------------------------------------------------


def test_only_who_may_send_to_the_topic_is_asked_and_may_end(tmp_path: Path) -> None:
    add_user(tmp_path, "admin", is_super=True)
    add_user(tmp_path, "seller", make_rule("Topic:orders", ["Pub"]))
    add_user(tmp_path, "stranger", make_rule("Topic:other", ["Pub"]))
    with serving(tmp_path, ManualClock(T0), has_access=True) as served:
        with signed_in(served, "admin") as admin:
            make_topic(admin, "orders")
        with signed_in(served, "stranger") as stranger, signed_in(served, "seller") as seller:
            come(stranger, GROUP, name="stranger")
            answer = half(seller)
            place = place_of(answer)
            pass_and_tick(served, 6_000)
            stranger.expect_no_more()
            assert not stranger.notices, "a body is nothing for those who may not send to its topic"
            come(seller, GROUP, name="seller")
            pass_and_tick(served, 30_000)
            check(seller)
            assert end(stranger, place)[0] == codes.NO_PERMISSION
            assert seller.ask(Request.GET_TRANSACTIONS).code == codes.NO_PERMISSION
            refused = seller.ask(Request.RESOLVE_TRANSACTION, id="0" * 32, commit=True)
            assert refused.code == codes.NO_PERMISSION
            assert end(seller, place) == (codes.SUCCESS, "committed")


# -- operators --------------------------------------------------------------------------------------------------


def test_operators_see_open_transactions(peer: Peer) -> None:
    make_topic(peer, "other")
    for number in range(5):
        half(peer, f"k{number}", topic="other" if number % 2 else "orders", KEYS="a b")
    answer = ask_json(peer, Request.GET_TRANSACTIONS)
    assert (answer["open"], answer["givenUp"], answer["next"]) == (5, 0, -1)
    first = answer["transactions"][0]
    assert first | {"id": "", "bytes": 0} == {
        "id": "", "topic": "orders", "queueId": 0, "group": GROUP, "messageId": "k0", "keys": "a b", "storedAt": T0,
        "checks": 0, "nextCheck": T0 + 6_000, "givenUp": 0, "bytes": 0,
    }  # fmt: skip
    page = ask_json(peer, Request.GET_TRANSACTIONS, limit=2)
    assert [each["messageId"] for each in page["transactions"]] == ["k0", "k1"]
    rest = ask_json(peer, Request.GET_TRANSACTIONS, limit=100, after=page["next"])
    assert [each["messageId"] for each in rest["transactions"]] == ["k2", "k3", "k4"]
    others = ask_json(peer, Request.GET_TRANSACTIONS, topic="other")
    assert [each["messageId"] for each in others["transactions"]] == ["k1", "k3"]
    (shown,) = ask_json(peer, Request.GET_TRANSACTIONS, id=first["id"])["transactions"]
    assert base64.b64decode(shown["body"]) == b"paid"
    assert shown["properties"]["KEYS"] == "a b"


@pytest.mark.parametrize("is_commit", [True, False])
def test_an_operator_ends_a_transaction_that_was_given_up(tmp_path: Path, is_commit: bool) -> None:
    with serving(tmp_path, ManualClock(T0), transaction_check_times_max=0) as served, connected(served) as peer:
        make_topic(peer, "orders")
        half(peer)
        pass_and_tick(served, 6_000)
        (given_up,) = ask_json(peer, Request.GET_TRANSACTIONS)["transactions"]
        assert given_up["givenUp"] == T0 + 6_000
        answer = peer.ask(Request.RESOLVE_TRANSACTION, id=given_up["id"], commit=is_commit)
        assert answer.fields["outcome"] == ("committed" if is_commit else "rolled_back")
        again = peer.ask(Request.RESOLVE_TRANSACTION, id=given_up["id"], commit=is_commit)
        assert again.fields["outcome"] == ("already_committed" if is_commit else "already_rolled_back")
        shown = ask_json(peer, Request.GET_TRANSACTIONS, id=given_up["id"])
        assert (shown["transactions"], shown["outcome"]) == ([], again.fields["outcome"])
        assert read_bodies(peer, "orders") == (["paid"] if is_commit else [])


def test_an_id_of_nothing(peer: Peer) -> None:
    for text in ("", "abc", "8" + "0" * 31):
        answer = peer.ask(Request.RESOLVE_TRANSACTION, id=text, commit=True)
        assert answer.code == codes.INVALID_PARAMETER
    answer = peer.ask(Request.RESOLVE_TRANSACTION, id=encode_transaction_id(3, 0), commit=True)
    assert (answer.code, answer.fields["outcome"]) == (codes.SYSTEM_ERROR, "unknown")


def test_a_log_that_has_failed_asks_nobody(served: Served, peer: Peer) -> None:
    come(peer, GROUP)
    half(peer)

    def fail(dispatcher: Dispatcher) -> None:
        served.broker.log.fail(OSError("gone"))
        served.clock.pass_ms(6_000)  # type: ignore[attr-defined]
        dispatcher.transactions.tick()

    served.call(lambda: fail(served.dispatcher))
    peer.round_trip()
    assert not peer.notices
