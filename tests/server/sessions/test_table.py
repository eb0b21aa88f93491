"""A cancel of what only the pipeline's table knows: the table is asked, and only who cancels waits for it."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.keys import key_hash
from postdate.server.sessions.table import TableFound, TableMessage
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import ClientRequest, Request
from tests.server.requests.test_pipeline import DUE, register, sent_far, stage_body
from tests.server.test_limits import IDLE_MS, sweep
from tests.support.core import DAY_MS, FAR_MS, HOUR_MS, MINUTE_MS, SECOND_MS, T0, message, write_chunk
from tests.support.handles import recall_handle
from tests.support.peer import Peer, connected, read_bodies, send_command, sent
from tests.support.server import Served, serving


def taken(served: Served, peer: Peer, count: int = 1) -> list[int]:
    """Far messages K0, K1 ... that the pipeline has taken; gives their arrivals."""
    sent_far(peer, count)
    register(peer)
    assert peer.ask(Request.STAGE, stage_body(1, (0, count), (0, T0), rows_in=count)).code == codes.SUCCESS
    arrivals: list[int] = served.call(lambda: served.broker.view.read_far(0, count)["arrival"].tolist())
    return arrivals


def attach(reader: Peer) -> None:
    assert reader.ask(Request.ATTACH_TABLE).code == codes.SUCCESS


def say_cancel(peer: Peer, key: str = "K0", due: int = DUE, *, way: str = "handle") -> int:
    if way == "marker":
        command = send_command(peer, "orders", "0", TIMER_DELIVER_MS=due, TIMER_DEL_UNIQKEY=key)
    elif way == "key":
        command = peer.command(Request.RECALL_MESSAGE, topic="orders", key=key, due=due)
    else:
        handle = recall_handle("orders", "postdate", due, key)
        command = peer.command(Request.RECALL_MESSAGE, topic="orders", recallHandle=handle)
    peer.write(command)
    return command.opaque


def answer(reader: Peer, question: Command, body: Any, code: int = codes.SUCCESS, remark: str | None = None) -> None:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    reader.write(Command(code, {}, data, question.opaque, codes.FLAG_RESPONSE, remark))


def outcome(reply: Command) -> tuple[int, str]:
    return reply.code, reply.fields["outcome"]


CANCELLED, UNKNOWN = (codes.SUCCESS, "cancelled"), (codes.ILLEGAL_OPERATION, "unknown")


@pytest.mark.parametrize("way", ["handle", "marker"])
def test_a_message_in_the_table_is_cancelled(tmp_path: Path, way: str) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        arrivals = taken(served, peer)
        attach(reader)
        opaque = say_cancel(peer, way=way)
        question = reader.next_notice()
        assert question.code == ClientRequest.FIND_IN_TABLE
        before = int(question.fields.pop("before"))
        numbers = served.call(lambda: served.broker.view.topic("orders").numbers)
        assert question.fields == {
            "topic": "orders", "key": "K0", "by": "unique", "keyHash": str(key_hash("K0")), "due": str(DUE),
            "queues": ",".join(map(str, numbers)), "table": "", "identity": served.broker.identity,
        }  # fmt: skip
        assert before > arrivals[0]
        answer(reader, question, arrivals)
        assert outcome(peer.answer_to(opaque)) == CANCELLED


def test_a_message_in_the_table_is_cancelled_by_its_user_key(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        sent(peer, "orders", KEYS="order-7", TIMER_DELIVER_MS=DUE)
        register(peer)
        assert peer.ask(Request.STAGE, stage_body(1, (0, 1), (0, T0), rows_in=1)).code == codes.SUCCESS
        attach(reader)
        opaque = say_cancel(peer, "order-7", way="key")
        question = reader.next_notice()
        assert (question.fields["by"], question.fields["key"]) == ("key", "order-7")
        answer(reader, question, served.call(lambda: served.broker.view.read_far(0, 1)["arrival"].tolist()))
        assert outcome(peer.answer_to(opaque)) == CANCELLED


def test_what_the_table_does_not_have_is_unknown(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = say_cancel(peer, "K9")
        question = reader.next_notice()
        answer(reader, question, [int(question.fields["before"])])  # used again after the cancel
        reply = peer.answer_to(opaque)
        assert outcome(reply) == UNKNOWN
        assert "no message K9 waits for that time" in (reply.remark or "")


def test_without_a_reader_of_the_table_the_answer_is_unknown_and_the_cancel_stands(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        arrivals = taken(served, peer, 2)
        reply = peer.answer_to(say_cancel(peer))
        assert outcome(reply) == UNKNOWN
        assert reply.remark == (
            "it is not known whether message K0 waits; if it does, it is cancelled: "
            "no process is attached that can read the table"
        )
        stage_both(served, peer, arrivals)
        served.pass_ms(HOUR_MS)
        served.settle()
        assert read_bodies(peer, "orders") == ["m1"]


def stage_both(served: Served, peer: Peer, arrivals: list[int]) -> None:
    """The pipeline brings K0 and K1."""
    number = served.call(lambda: served.broker.fold.topics.get("orders").numbers[0])
    rows = [
        (DUE + n, arrival, number, message(f"m{n}", unique=f"K{n}", due=DUE + n)) for n, arrival in enumerate(arrivals)
    ]
    write_chunk(served.disk, "000001-1", rows)  # type: ignore[arg-type]
    taken = served.call(lambda: served.broker.fold.far.taken)
    body = stage_body(1, (taken, taken), (T0, DUE + HOUR_MS), "000001-1", rows_in=len(arrivals), rows_out=len(arrivals))
    assert peer.ask(Request.STAGE, body).code == codes.SUCCESS


def test_what_came_into_the_wheel_while_the_table_was_asked_is_cancelled(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        arrivals = taken(served, peer, 2)
        attach(reader)
        opaque = say_cancel(peer)
        question = reader.next_notice()
        stage_both(served, peer, arrivals)
        answer(reader, question, [])
        assert outcome(peer.answer_to(opaque)) == CANCELLED
        served.pass_ms(HOUR_MS)
        served.settle()
        assert read_bodies(peer, "orders") == ["m1"]


def test_what_a_rescue_delivered_is_not_cancelled_though_the_table_still_has_it(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), delivered_search_steps=0) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        arrivals = taken(served, peer)
        served.pass_ms(FAR_MS)
        served.settle()
        assert read_bodies(peer, "orders") == ["m0"], "the pipeline is late, so it was rescued"
        attach(reader)
        opaque = say_cancel(peer)
        answer(reader, reader.next_notice(), arrivals)
        assert outcome(peer.answer_to(opaque)) == UNKNOWN


def test_what_is_rescued_after_its_cancel_is_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        arrivals = taken(served, peer, 2)
        attach(reader)
        opaque = say_cancel(peer)
        question = reader.next_notice()
        served.pass_ms(FAR_MS + 1)
        served.settle()
        assert read_bodies(peer, "orders") == ["m1"]
        answer(reader, question, arrivals[:1])
        assert outcome(peer.answer_to(opaque)) == CANCELLED


def test_nobody_else_waits_for_the_table(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        arrivals = taken(served, peer, 2)
        attach(reader)
        first = say_cancel(peer)
        question = reader.next_notice()
        sent(peer, "orders", "behind it", TIMER_DELAY_MS=SECOND_MS)
        second = say_cancel(peer, "K1", DUE + 1)
        answer(reader, reader.next_notice(), arrivals[1:])
        assert outcome(peer.answer_to(second)) == CANCELLED
        assert not peer.answers, "the first one still waits"
        answer(reader, question, arrivals[:1])
        assert outcome(peer.answer_to(first)) == CANCELLED


def test_a_table_that_does_not_answer_in_time_is_unknown(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), table_read_ms_max=10) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        arrivals = taken(served, peer)
        attach(reader)
        reply = peer.answer_to(say_cancel(peer))
        assert outcome(reply) == UNKNOWN
        assert "has not answered within 0.01 s" in (reply.remark or "")
        answer(reader, reader.next_notice(), arrivals)
        peer.expect_no_more()


def test_only_so_many_cancels_wait_for_the_table(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), table_reads_max=1) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        arrivals = taken(served, peer, 2)
        attach(reader)
        first = say_cancel(peer)
        question = reader.next_notice()
        reply = peer.answer_to(say_cancel(peer, "K1", DUE + 1))
        assert outcome(reply) == UNKNOWN
        assert "table_reads_max: 1 questions about the table wait, the limit" in (reply.remark or "")
        answer(reader, question, arrivals)
        assert outcome(peer.answer_to(first)) == CANCELLED
        again = say_cancel(peer, "K1", DUE + 1)
        answer(reader, reader.next_notice(), arrivals[1:])
        assert outcome(peer.answer_to(again)) == CANCELLED


@pytest.mark.parametrize(
    ("body", "code", "remark", "said"),
    [
        (b"", codes.SYSTEM_ERROR, "the table is damaged", "the table cannot be read: the table is damaged"),
        (b"", codes.SYSTEM_ERROR, None, "the table cannot be read: code 1"),
        (b"{", codes.SUCCESS, None, "the answer about the table cannot be read"),
        (b'["1"]', codes.SUCCESS, None, "the answer about the table cannot be read"),
        (b"[true]", codes.SUCCESS, None, "the answer about the table cannot be read"),
    ],
)
def test_a_table_that_cannot_be_read_is_unknown(
    tmp_path: Path, body: bytes, code: int, remark: str | None, said: str
) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = say_cancel(peer)
        answer(reader, reader.next_notice(), body, code, remark)
        reply = peer.answer_to(opaque)
        assert outcome(reply) == UNKNOWN
        assert said in (reply.remark or "")


def test_the_reader_that_attached_last_is_asked_until_it_goes(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as first:
        arrivals = taken(served, peer)
        attach(first)
        with connected(served) as second:
            attach(second)
            opaque = say_cancel(peer)
            second.next_notice()
        reply = peer.answer_to(opaque)
        assert outcome(reply) == UNKNOWN
        assert "is gone" in (reply.remark or "")
        reply = peer.answer_to(say_cancel(peer))
        assert "no process is attached that can read the table" in (reply.remark or "")
        attach(first)
        opaque = say_cancel(peer)
        answer(first, first.next_notice(), arrivals)
        assert outcome(peer.answer_to(opaque)) == CANCELLED


def test_the_table_is_not_asked_where_it_cannot_have_the_message(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        attach(reader)
        sent_far(peer, 1)
        assert outcome(peer.answer_to(say_cancel(peer, "K9"))) == UNKNOWN, "nothing was ever taken"
        register(peer)
        body = stage_body(1, (0, 1), (0, T0 + FAR_MS - 1), rows_in=1)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        assert outcome(peer.answer_to(say_cancel(peer, "K1", T0 - MINUTE_MS))) == UNKNOWN, "it was due long ago"
        reader.expect_no_more()
        assert not reader.notices


@pytest.mark.parametrize("after_ms", [-FAR_MS + 1, -1, 0, MINUTE_MS - 1], ids=["staged", "before", "due", "after"])
def test_a_message_that_the_table_keeps_after_its_minute_is_cancelled(tmp_path: Path, after_ms: int) -> None:
    """The broker has no record of it: a job has brought it. The pipeline has left it out of what it promoted."""
    with (
        serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        taken(served, peer)
        attach(reader)
        body = stage_body(1, (1, 1), (T0, DUE + FAR_MS), rows_in=1)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        served.pass_ms(FAR_MS + after_ms)
        served.settle()
        opaque = say_cancel(peer, "imported")
        answer(reader, reader.next_notice(), served.call(lambda: served.broker.view.read_far(0, 1)["arrival"].tolist()))
        assert outcome(peer.answer_to(opaque)) == CANCELLED


# -- lookups of a key -------------------------------------------------------------------------------------------

Asking = tuple[Future[TableFound | str], Command]


def ask_key(served: Served, reader: Peer) -> Asking:
    """Has the broker ask for a key, and gives the question."""
    asked = served.begin(served.dispatcher.sessions.table.find_key("orders", "K0", "any", (3, 4), 5))
    return asked, reader.next_notice()


def say_found(reader: Peer, question: Command, body: bytes, **fields: str) -> None:
    reader.write(Command(codes.SUCCESS, fields, body, question.opaque, codes.FLAG_RESPONSE))


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_messages_of_a_key_are_asked_for(tmp_path: Path, is_cut: bool) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as reader:
        attach(reader)
        asked, question = ask_key(served, reader)
        assert (question.code, orjson.loads(question.body)) == (ClientRequest.FIND_KEY_IN_TABLE, {"jobs": []})
        assert question.fields == {
            "topic": "orders", "key": "K0", "by": "any", "queues": "3,4", "limit": "5", "table": "",
            "identity": served.broker.identity,
        }  # fmt: skip
        say_found(reader, question, b"[[7,1,3,2,0],[8,2,4,3,1]]\nab\n12", cut=str(is_cut).lower())
        wanted = [TableMessage(7, 1, 3, b"ab"), TableMessage(8, 2, 4, b"\n12", is_cancelled=True)]
        assert asked.result(10) == TableFound(wanted, is_cut)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]\nx", b"{}\n", b"[[7,1,3,0]]\n", b"[[7,1,3,2,0]]\na", b"[[7,1,3,1,0]]\nab", b"[[7,1,3,-1,0]]\n",
        b'[[7,1,"3",1,0]]\na', b"[[7,true,3,1,0]]\na", b"[[7,1,3,1,true]]\na", b"[7]\n", b"7\n", b"[[7,1,3,1,0]",
        b"null\n",
    ],
)  # fmt: skip
def test_an_answer_about_a_key_that_makes_no_sense_is_said_to_be_so(tmp_path: Path, body: bytes) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as reader:
        attach(reader)
        asked, question = ask_key(served, reader)
        say_found(reader, question, body)
        said = asked.result(10)
        assert isinstance(said, str)
        assert said.startswith("the answer about the table cannot be read")


def test_a_lookup_of_a_key_says_why_the_table_is_not_known(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), table_reads_max=1, table_read_ms_max=200) as served,
        connected(served) as reader,
    ):

        def ask() -> TableFound | str:
            asked = served.begin(served.dispatcher.sessions.table.find_key("orders", "K0", "any", (3,), 5))
            return asked.result(10)

        assert ask() == "no process is attached that can read the table"
        attach(reader)
        first, question = ask_key(served, reader)
        assert ask() == "table_reads_max: 1 questions about the table wait, the limit"
        assert "has not answered within 0.2 s" in str(first.result(10))
        first, question = ask_key(served, reader)
        answer(reader, question, b"", codes.SYSTEM_ERROR, "it is damaged")
        assert first.result(10) == "the table cannot be read: it is damaged"


def test_a_oneway_cancel_asks_nobody(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        peer.say(Request.RECALL_MESSAGE, oneway=True, topic="orders", key="k", due=DUE)
        peer.write(send_command(peer, "orders", "0", oneway=True, TIMER_DELIVER_MS=DUE, TIMER_DEL_UNIQKEY="K0"))
        peer.round_trip()
        served.settle()
        reader.expect_no_more()
        assert not reader.notices
        peer.expect_no_more()


def test_a_reader_may_be_silent(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), idle_ms_max=IDLE_MS) as served,
        connected(served) as reader,
        connected(served) as other,
    ):
        attach(reader)
        attach(reader)
        attach(other)
        attach(reader)
        for _ in range(4):
            sweep(served, IDLE_MS - 1)
        other.expect_closed()
        reader.round_trip()


def test_a_server_that_stops_answers_who_waits_for_the_table(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = say_cancel(peer)
        reader.next_notice()
        served.stop()
        reply = peer.answer_to(opaque)
        assert outcome(reply) == UNKNOWN
        assert "before the broker stopped" in (reply.remark or "")


def test_a_cancel_is_answered_as_before_after_a_rescue_has_left_its_message_out(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        arrivals = taken(served, peer)
        attach(reader)
        opaque = say_cancel(peer)
        answer(reader, reader.next_notice(), arrivals)
        assert outcome(peer.answer_to(opaque)) == CANCELLED
        served.pass_ms(FAR_MS - SECOND_MS)
        served.settle()
        assert outcome(peer.answer_to(say_cancel(peer))) == CANCELLED, "the log knows it"
