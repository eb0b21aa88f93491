"""What operators ask about clients: who is connected, who reads a topic, what a consumer says of itself."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.server.sessions import questions
from postdate.wire import codes
from postdate.wire.frame import BINARY, Command, encode
from postdate.wire.records import decode_records
from postdate.wire.requests import ClientRequest, Request
from tests.support.core import T0
from tests.support.peer import GROUP, Peer, connected, heartbeat, make_topic, properties_of, pull, sent
from tests.support.server import Served, serving


def produce(peer: Peer, client_id: str, *groups: str, **header: Any) -> None:
    """A heartbeat of a client that only sends."""
    body = {"clientID": client_id, "producerDataSet": [{"groupName": group} for group in groups]}
    command = peer.command(Request.HEART_BEAT, orjson.dumps(body))._replace(**header)
    peer.write(command)
    assert peer.answer_to(command.opaque).code == codes.SUCCESS


def answer_notice(peer: Peer, question: Command, code: int = codes.SUCCESS, **what: Any) -> None:
    peer.write(Command(code, {}, opaque=question.opaque, flag=codes.FLAG_RESPONSE, **what))


def question(peer: Peer, code: int) -> Command:
    """The next question of the broker, behind whatever it has to tell about the group."""
    while (notice := peer.next_notice()).code != code:
        assert notice.code == ClientRequest.NOTIFY_CONSUMER_IDS_CHANGED
    return notice


# -- who is connected -----------------------------------------------------------------------------------------------


def test_the_members_of_a_group_are_told_with_what_they_want(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as first, connected(served) as second:
        heartbeat(first, "c1", {"orders": "paid || late"})
        heartbeat(second, "c2", {"orders": "paid || late", "bills": "*"})
        answer = first.ask(Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup=GROUP)
        told = orjson.loads(answer.body)
        assert answer.code == codes.SUCCESS
        assert [each["clientId"] for each in told["connectionSet"]] == ["c1", "c2"]
        addresses = [f"127.0.0.1:{peer.socket.getsockname()[1]}" for peer in (first, second)]
        assert [each["clientAddr"] for each in told["connectionSet"]] == addresses
        assert {(each["language"], each["version"]) for each in told["connectionSet"]} == {("PYTHON", 493)}
        assert told["subscriptionTable"].keys() == {"orders", "bills"}
        assert told["subscriptionTable"]["orders"]["tagsSet"] == ["late", "paid"]
        assert (told["consumeType"], told["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
        assert told["consumeFromWhere"] == "CONSUME_FROM_LAST_OFFSET"


def test_a_group_without_members_is_not_online(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup=GROUP)
        assert (answer.code, answer.remark) == (206, f"no consumer of group '{GROUP}' is connected")


def test_producers_are_told_until_they_leave_or_their_connection_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        with connected(served) as gone:
            produce(gone, "p1", "senders", language="GO", version=317)
            produce(peer, "p2", "senders", "others")
            answer = peer.ask(Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="senders")
            told = {each["clientId"]: (each["language"], each["version"]) for each in connections(answer)}
            assert told == {"p1": ("GO", 317), "p2": ("PYTHON", 493)}
        wait_until_gone(served, peer, 1)
        answer = peer.ask(Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="senders")
        assert [each["clientId"] for each in connections(answer)] == ["p2"]
        peer.ask(Request.UNREGISTER_CLIENT, clientID="p2", producerGroup="senders")
        answer = peer.ask(Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="senders")
        assert (answer.code, answer.remark) == (1, "no producer of group 'senders' is connected")


def connections(answer: Command) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(answer.body)["connectionSet"]
    return found


def wait_until_gone(served: Served, peer: Peer, count: int) -> None:
    """A socket that was closed is noticed by the broker when it reads it."""
    while served.call(lambda: len(served.dispatcher.connections)) > count:
        peer.round_trip()


def test_all_producers_are_told_with_when_they_were_seen(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        produce(peer, "p1", "senders")
        served.pass_ms(5_000)
        produce(peer, "p2", "others")
        told = orjson.loads(peer.ask(Request.GET_ALL_PRODUCER_INFO).body)["data"]
        assert {group: [(each["clientId"], each["lastUpdateTimestamp"]) for each in told[group]] for group in told} == {
            "senders": [("p1", T0)],
            "others": [("p2", T0 + 5_000)],
        }


def test_producers_beyond_the_limit_are_not_kept_and_send_all_the_same(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), groups_max=3) as served, connected(served) as peer:
        for _ in range(2):
            produce(peer, "p1", *(f"g{n}" for n in range(10)))
            served.pass_ms(100_000)
            served.call(served.dispatcher.groups.expire)
        told = orjson.loads(peer.ask(Request.GET_ALL_PRODUCER_INFO).body)["data"]
        assert told.keys() == {"g0", "g1", "g2"}, "the second heartbeat has kept them"
        sent(peer, "orders")


def test_silent_producers_are_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        produce(peer, "p1", "senders")
        served.pass_ms(120_001)
        served.call(served.dispatcher.groups.expire)
        assert orjson.loads(peer.ask(Request.GET_ALL_PRODUCER_INFO).body) == {"data": {}}


# -- who reads a topic ----------------------------------------------------------------------------------------------


def test_groups_that_read_a_topic_are_those_that_subscribe_or_have_committed(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        heartbeat(peer, "c1", {"orders": "*"}, group="subscribes")
        heartbeat(peer, "c1", {"bills": "*"}, group="reads-bills")
        pull(peer, "orders", group="committed", commit=0)
        pull(peer, "orders", group="only-looked")
        answer = peer.ask(Request.QUERY_TOPIC_CONSUME_BY_WHO, topic="orders")
        assert orjson.loads(answer.body) == {"groupList": ["committed", "subscribes"]}
        assert orjson.loads(peer.ask(Request.QUERY_TOPIC_CONSUME_BY_WHO, topic="nowhere").body) == {"groupList": []}


# -- questions to a consumer ----------------------------------------------------------------------------------------


def ask_about(peer: Peer, client_id: str = "c1", **fields: Any) -> int:
    return peer.say(Request.GET_CONSUMER_RUNNING_INFO, consumerGroup=GROUP, clientId=client_id, **fields)


@pytest.mark.parametrize("serialization", [0, BINARY])
def test_what_a_consumer_says_of_itself_is_handed_on(tmp_path: Path, serialization: int) -> None:
    with serving(tmp_path) as served, connected(served) as client:
        heartbeat(client, "c1", {"orders": "*"})
        with connected(served, serialization=serialization) as operator:
            opaque = ask_about(operator, jstackEnable="true")
            asked = question(client, Request.GET_CONSUMER_RUNNING_INFO)
            assert asked.fields == {"consumerGroup": GROUP, "clientId": "c1", "jstackEnable": "true"}
            answer_notice(client, asked, body=b'{"jstack":"..."}')
            answer = operator.answer_to(opaque)
            assert (answer.code, answer.body) == (codes.SUCCESS, b'{"jstack":"..."}')
        client.expect_no_more()


def test_a_refusal_of_a_consumer_is_handed_on_too(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as client, connected(served) as operator:
        heartbeat(client, "c1", {"orders": "*"})
        opaque = ask_about(operator)
        asked = question(client, Request.GET_CONSUMER_RUNNING_INFO)
        answer_notice(client, asked, codes.SYSTEM_ERROR, remark="I am busy")
        answer = operator.answer_to(opaque)
        assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "I am busy")


@pytest.mark.parametrize(("group", "client_id"), [(GROUP, "c2"), ("others", "c1")])
def test_a_consumer_that_is_not_there_cannot_be_asked(tmp_path: Path, group: str, client_id: str) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        heartbeat(peer, "c1", {"orders": "*"})
        answer = peer.ask(Request.GET_CONSUMER_RUNNING_INFO, consumerGroup=group, clientId=client_id)
        assert answer.code == codes.INVALID_PARAMETER
        assert answer.remark == f"no consumer '{client_id}' of group '{group}' is connected"


def test_a_consumer_that_does_not_answer_is_answered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_RELAY_S", 0.01)
    with serving(tmp_path) as served, connected(served) as client, connected(served) as operator:
        heartbeat(client, "c1", {"orders": "*"})
        answer = operator.answer_to(ask_about(operator))
        assert answer.code == codes.SYSTEM_ERROR
        assert "has not answered within" in (answer.remark or "")
        late = question(client, Request.GET_CONSUMER_RUNNING_INFO)
        answer_notice(client, late, body=b"too late")
        client.round_trip()
        operator.expect_no_more()


def test_a_consumer_that_goes_is_answered_for(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as operator:
        with connected(served) as client:
            heartbeat(client, "c1", {"orders": "*"})
            opaque = ask_about(operator)
            question(client, Request.GET_CONSUMER_RUNNING_INFO)
        answer = operator.answer_to(opaque)
        assert answer.code == codes.SYSTEM_ERROR
        assert (answer.remark or "").endswith("is gone")


def test_an_operator_that_goes_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path, relays_max=1) as served, connected(served) as client:
        heartbeat(client, "c1", {"orders": "*"})
        for _ in range(3):
            with connected(served) as operator:
                ask_about(operator)
                asked = question(client, Request.GET_CONSUMER_RUNNING_INFO)
            answer_notice(client, asked)
            client.round_trip()


def test_questions_on_their_way_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, relays_max=2) as served, connected(served) as client, connected(served) as operator:
        heartbeat(client, "c1", {"orders": "*"})
        opaques = [ask_about(operator) for _ in range(2)]
        refused = operator.answer_to(ask_about(operator))
        assert refused.code == codes.SYSTEM_BUSY
        assert (refused.remark or "").startswith("relays_max: 2 questions wait")
        questions = [question(client, Request.GET_CONSUMER_RUNNING_INFO) for _ in range(2)]
        for number, asked in reversed(list(enumerate(questions))):
            answer_notice(client, asked, body=b"%d" % number)
        assert [operator.answer_to(opaque).body for opaque in opaques] == [b"0", b"1"]


def test_an_answer_from_somebody_else_is_not_taken_for_the_client_s(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as client, connected(served) as operator:
        heartbeat(client, "c1", {"orders": "*"})
        opaque = ask_about(operator)
        asked = question(client, Request.GET_CONSUMER_RUNNING_INFO)
        with connected(served) as stranger:
            stranger.socket.sendall(encode(Command(0, {}, b"lies", asked.opaque, codes.FLAG_RESPONSE)))
            stranger.round_trip()
        operator.expect_no_more()
        answer_notice(client, asked, body=b"truth")
        assert operator.answer_to(opaque).body == b"truth"


def test_a_consumer_is_given_one_message_directly(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as client, connected(served) as operator:
        heartbeat(client, "c1", {"orders": "*"})
        message_id = sent(operator, "orders", "again, please", KEYS="k1").fields["msgId"]
        asked = {"consumerGroup": GROUP, "clientId": "c1", "msgId": message_id}
        opaque = operator.say(Request.CONSUME_MESSAGE_DIRECTLY, **asked, topic="orders")
        given = question(client, Request.CONSUME_MESSAGE_DIRECTLY)
        assert given.fields == {**asked, "brokerName": "postdate"}
        (record,) = decode_records(given.body)
        assert (record.body, properties_of(record)["KEYS"]) == (b"again, please", "k1")
        answer_notice(client, given, body=b'{"consumeResult":"CR_SUCCESS"}')
        assert operator.answer_to(opaque).body == b'{"consumeResult":"CR_SUCCESS"}'
        for bad in (message_id[:-4] + "0001", "no id"):
            answer = operator.ask(Request.CONSUME_MESSAGE_DIRECTLY, **{**asked, "msgId": bad})
            assert answer.code == codes.INVALID_PARAMETER
