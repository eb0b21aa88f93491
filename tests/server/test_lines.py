"""Log lines for operators: what happened to topics, groups and sends, and never so many that they fill the disk."""

import logging
from pathlib import Path

import pytest

import postdate
from postdate.client import admin
from postdate.clock import ManualClock
from postdate.server.lines import Lines
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.bulk import wait_until
from tests.support.core import T0
from tests.support.server import Served, serving
from verify.faults.peer import Peer, heartbeat, send_command

SECONDS = 60


def lines_about(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [line for line in caplog.messages if line.startswith(word)]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "postdate")


# -- what is logged -----------------------------------------------------------------------------------------------


def test_a_topic_that_is_made_changed_or_deleted_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as served:
        with postdate.connect(served.address) as client:
            client.send("orders", "hello", delay="1h")
        admin.put_topic(served.address, admin.topic(served.address, "orders"))
        admin.delete_topic(served.address, "orders")
    made, changed, deleted = lines_about(caplog, "topic ")
    assert made == "topic orders is made, on its first use: 4 queues"
    assert changed.startswith("topic orders is changed by 127.0.0.1:")
    assert deleted == "topic orders is deleted, and 1 messages that waited for it are cancelled"


def test_members_that_join_and_leave_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, ManualClock(T0)) as served:
        polite, rude, silent = (Peer(served.port) for _ in range(3))
        for name, peer in (("polite", polite), ("rude", rude), ("silent", silent)):
            for _ in range(2):  # the second heartbeat is no news
                heartbeat(peer, name, {"orders": "*"})
        leave(polite, "polite")
        rude.close()
        expire(served)
        polite.close()
        silent.close()
    ports = "127.0.0.1:"
    lines = [line.partition(ports)[0] for line in lines_about(caplog, "group workers: ")]
    assert lines[:3] == [f"group workers: {name} joins, from " for name in ("polite", "rude", "silent")]
    assert set(lines[3:]) == {
        "group workers: polite at ",
        "group workers: rude leaves, its connection from ",
        "group workers: silent at ",
    }
    assert any(line.endswith("is taken for gone, it sent no heartbeat") for line in lines_about(caplog, "group "))


def leave(peer: Peer, client_id: str) -> None:
    peer.ask(Request.UNREGISTER_CLIENT, clientID=client_id, consumerGroup="workers", producerGroup="")


def expire(served: Served) -> None:
    """Lets so much time pass that silent members are gone; those whose connections ended are gone before."""
    wait_for_members(served, 1)
    served.pass_ms(served.broker.limits.client_expiry_ms + 1)
    served.call(served.dispatcher.groups.expire)


def wait_for_members(served: Served, count: int) -> None:
    wait_until(lambda: served.call(lambda: len(served.dispatcher.sessions.members.of("workers"))) == count)


def test_a_send_that_is_refused_is_logged_once_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, auto_create_topics=False) as served:
        peer = Peer(served.port)
        for _ in range(3):
            command = send_command(peer, "orders")
            peer.write(command)
            assert peer.answer_to(command.opaque).code == codes.TOPIC_NOT_EXIST
        peer.close()
    (line,) = lines_about(caplog, "a send from 127.0.0.1:")
    assert "is refused: TopicNotFound: topic 'orders' does not exist" in line


def test_a_client_that_is_connected_again_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as served, postdate.connect(served.address) as client:
        client.send("orders", "one")
        assert not lines_about(caplog, "connected to")
        served.call(lambda: abort_connections(served))
        client.send("orders", "two")
        assert lines_about(caplog, "connected to 127.0.0.1:")


def abort_connections(served: Served) -> None:
    for connection in list(served.dispatcher.connections):
        connection.abort()


# -- how many -----------------------------------------------------------------------------------------------------


def test_lines_beyond_the_bound_of_a_second_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(2)
    for number in range(5):
        lines.write(logging.INFO, "line %d", number)
    lines.sweep()
    lines.write(logging.INFO, "a second later")
    assert caplog.messages == [
        "line 0",
        "line 1",
        "complaints_max: 3 more lines like these within a second are left out",
        "a second later",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}, "nothing that was left out is worse"


def test_what_repeats_all_day_is_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(20)
    for second in range(2 * SECONDS):
        lines.write_seldom("peer", f"refused in second {second}")
        lines.sweep()
    assert caplog.messages == [
        "refused in second 0",
        "59 times more within a minute, the last time: refused in second 59",
        "60 times more within a minute, the last time: refused in second 119",
    ]


def test_what_has_ended_is_news_when_it_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(20)
    for _ in range(2):
        lines.write_seldom("peer", "refused")
        for _ in range(SECONDS):
            lines.sweep()
    assert caplog.messages == ["refused", "refused"]


def test_things_beyond_the_bound_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(10_000)
    for number in range(1_500):
        lines.write_seldom(number, f"refused {number}")
    assert len(caplog.messages) == 1_001
