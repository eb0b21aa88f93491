"""Messages of a key that only the pipeline's table has: found, moved and cancelled as those of the log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.broker.lookup import Found
from postdate.broker.moving import Source
from postdate.clock import ManualClock
from postdate.message import LOOPBACK, Cancelled, MovedFrom
from postdate.server.requests.recall import Recalls
from postdate.server.sessions.keys import Keys
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import ClientRequest, Request
from tests.server.requests.test_move import find_places
from tests.server.requests.test_recall import pass_and_settle
from tests.server.sessions.test_table import answer, attach, say_found, taken
from tests.support.core import HOUR_MS, T0, message
from tests.support.handles import recall_handle
from tests.support.peer import Peer, connected, read_bodies, sent
from tests.support.server import Served, serving

DUE = T0 + 2 * HOUR_MS
ARRIVAL = 16  # its record has left the log


def ask(peer: Peer, request: Request, **fields: Any) -> int:
    command = peer.command(request, topic="orders", **fields)
    peer.write(command)
    return command.opaque


def tell(served: Served, reader: Peer, due: int = DUE, arrival: int = ARRIVAL, body: str = "imported") -> None:
    """The table has one message of key order-1."""
    question = reader.next_notice()
    assert question.code == ClientRequest.FIND_KEY_IN_TABLE
    queue = served.call(lambda: served.broker.view.topic("orders").numbers[0])
    record = records.encode(message(body, unique="U1", keys="order-1", due=due), b"orders", 0, T0, LOOPBACK)
    say_found(reader, question, orjson.dumps([[due, arrival, queue, len(record), 0]]) + b"\n" + record)


def outcomes(answered: Command) -> dict[str, str]:
    assert answered.code == codes.SUCCESS, answered.remark
    return {each["id"]: each["outcome"] for each in orjson.loads(answered.body)["messages"]}


def test_a_message_that_only_the_table_has_is_found_there(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = ask(peer, Request.QUERY_MESSAGE, key="order-1")
        tell(served, reader)
        (record,) = records.split(peer.answer_to(opaque).body)
        properties = records.properties_of(record)
        assert (properties["POSTDATE_STATE"], properties["POSTDATE_PLACE"]) == ("waiting", "table")
        assert properties["POSTDATE_DUE_MS"] == str(DUE)


@pytest.mark.parametrize("named", ["key", "handle"])
def test_a_message_that_only_the_table_has_is_moved_and_comes_once(tmp_path: Path, named: str) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        handle = recall_handle("orders", "postdate", DUE, "U1")
        fields = {"key": "order-1"} if named == "key" else {"recallHandle": handle}
        opaque = ask(peer, Request.MOVE_MESSAGE, delay=0, **fields)
        tell(served, reader)
        assert outcomes(peer.answer_to(opaque)) == {"U1": "moved"}
        assert read_bodies(peer, "orders") == ["imported"]
        opaque = ask(peer, Request.MOVE_MESSAGE, delay=0, **fields)
        tell(served, reader)  # it has not read the move
        assert outcomes(peer.answer_to(opaque)) == {"U1": "delivered"}
        assert read_bodies(peer, "orders") == ["imported"]


def test_a_message_that_only_the_table_has_is_cancelled_by_its_key(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = ask(peer, Request.CANCEL_KEY, key="order-1")
        tell(served, reader)
        assert outcomes(peer.answer_to(opaque)) == {"U1": "cancelled"}
        opaque = ask(peer, Request.MOVE_MESSAGE, key="order-1", delay=0)
        tell(served, reader)
        assert outcomes(peer.answer_to(opaque)) == {}, "the table has not read the cancel, and it counts all the same"
        assert read_bodies(peer, "orders") == []


def test_what_the_table_has_promoted_does_not_wait_there(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = ask(peer, Request.MOVE_MESSAGE, key="order-1", delay=0)
        tell(served, reader, due=T0 - 1)
        assert outcomes(peer.answer_to(opaque)) == {}


@pytest.mark.parametrize("request_", [Request.CANCEL_KEY, Request.MOVE_MESSAGE], ids=lambda each: each.name)
def test_nothing_is_changed_where_the_table_cannot_say(tmp_path: Path, request_: Request) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        fields = {"delay": 0} if request_ is Request.MOVE_MESSAGE else {}
        opaque = ask(peer, request_, key="order-1", **fields)
        answer(reader, reader.next_notice(), b"", codes.SYSTEM_ERROR, "it is damaged")
        refused = peer.answer_to(opaque)
        assert refused.code == codes.SERVICE_NOT_AVAILABLE
        assert refused.remark == (
            "nothing was changed, as the table cannot be asked: the table cannot be read: it is damaged"
        )


def test_a_message_of_the_table_that_is_moved_during_a_lookup_is_found(tmp_path: Path) -> None:
    """After the lookup has taken the newest records of the log, and before it looks at what the table has said."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        broker = served.broker
        find, keys = broker.find, Keys(broker, served.dispatcher.sessions.table)

        def find_and_move(*asked: Any) -> Iterator[Found | None]:
            setattr(broker, "find", find)  # noqa: B010
            yield from find(*asked)
            record = records.encode(message("x", unique="U1", keys="order-1", due=DUE), b"orders", 0, T0, LOOPBACK)
            broker.moves.move([Source(record, MovedFrom(DUE, ARRIVAL, is_near=False), DUE + HOUR_MS)], T0)
            broker.flush()

        setattr(broker, "find", find_and_move)  # noqa: B010
        locating = served.begin(keys.find("orders", "order-1", 10))
        tell(served, reader)
        tell(served, reader)
        assert [found.due_at_ms for found in locating.result(10).waiting] == [DUE + HOUR_MS]


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_delivered_between_the_lookup_and_its_cancel_is_delivered(tmp_path: Path, is_moved: bool) -> None:
    """However short the cancel's own search is."""
    with (
        serving(tmp_path, ManualClock(T0), delivered_search_steps=0) as served,
        connected(served) as peer,
    ):
        sent(peer, "orders", "late", UNIQ_KEY="U1", KEYS="order-1", TIMER_DELAY_MS=5_000)
        if is_moved:
            assert outcomes(peer.ask(Request.MOVE_MESSAGE, topic="orders", key="order-1", by=1_000)) == {"U1": "moved"}
        dispatcher = served.dispatcher
        keys = Keys(served.broker, dispatcher.sessions.table)
        located = served.begin(keys.find("orders", "order-1", 10)).result(10)
        (found,) = located.waiting
        pass_and_settle(served, 6_000)
        assert read_bodies(peer, "orders") == ["late"]
        connection = served.call(lambda: served.connections()[0])
        recalls = Recalls(
            served.broker, served.clock, dispatcher.pulse, dispatcher.sessions.table, keys, dispatcher.pipelines.settled
        )
        cancelled = served.begin(recalls._cancel_found(connection, "orders", [found])).result(10)
        assert cancelled == {found.arrival: Cancelled.DELIVERED}


def test_a_recall_finds_a_moved_message_that_only_the_table_has(tmp_path: Path) -> None:
    """The record of its move has left the log."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        taken(served, peer)
        attach(reader)
        opaque = ask(peer, Request.MOVE_MESSAGE, key="K0", by=HOUR_MS)
        say_found(reader, reader.next_notice(), b"[]\n")
        assert outcomes(peer.answer_to(opaque)) == {"K0": "moved"}
        handle = recall_handle("orders", "postdate", T0 + HOUR_MS, "U1")
        opaque = ask(peer, Request.RECALL_MESSAGE, recallHandle=handle)
        question = reader.next_notice()
        assert question.code == ClientRequest.FIND_IN_TABLE
        answer(reader, question, [])
        question = reader.next_notice()
        assert question.code == ClientRequest.FIND_KEY_IN_TABLE
        queue = served.call(lambda: served.broker.view.topic("orders").numbers[0])
        moved = message("moved", unique="U1", due=DUE, POSTDATE_MOVED=f"{T0 + HOUR_MS} 8 0")
        record = records.encode(moved, b"orders", 0, T0, LOOPBACK)
        say_found(reader, question, orjson.dumps([[DUE, ARRIVAL, queue, len(record), 0]]) + b"\n" + record)
        answered = peer.answer_to(opaque)
        assert (answered.code, answered.fields["outcome"]) == (codes.SUCCESS, "cancelled")


def test_a_lookup_without_a_table_asks_nobody(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        attach(reader)
        peer.ask(Request.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=1, writeQueueNums=1, perm=6)
        assert find_places(peer, "order-1") == []
        assert not reader.notices
