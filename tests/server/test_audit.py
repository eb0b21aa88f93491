"""The audit log: what is written down, and that it costs nobody anything."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.access.users import make_rule
from postdate.clock import ManualClock
from postdate.config import Limits
from postdate.server.audit import AUDIT_FOLDER, Audit, audit_files, read_audit
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import GROUP, add_user, connected, heartbeat, make_topic, notice_users, send, sent, signed_in
from tests.support.server import serving

REFUSED = Command(codes.NO_PERMISSION, {}, remark="not you")


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_audit(folder / AUDIT_FOLDER))


def short(folder: Path) -> list[tuple[str, ...]]:
    return [(line["user"], line["request"], line["resource"], line["result"]) for line in lines(folder)]


def test_changes_and_refusals_are_written_and_nothing_else(tmp_path: Path) -> None:
    add_user(tmp_path, "admin", is_super=True)
    add_user(tmp_path, "alice", make_rule("Topic:orders", ["Pub", "Sub", "Get"]), make_rule(f"Group:{GROUP}", ["Sub"]))
    with (
        serving(tmp_path, has_access=True) as served,
        signed_in(served, "admin") as admin,
        signed_in(served, "alice") as alice,
        connected(served) as stranger,
    ):
        make_topic(admin, "orders")
        sent(alice, "orders")
        heartbeat(alice, "c1", {"orders": "*"})
        alice.ask(Request.GET_MAX_OFFSET, topic="orders", queueId=0)
        alice.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        send(stranger, "orders")
        admin.ask(Request.UPDATE_BROKER_CONFIG, b"no_such_setting=1")
        admin.ask(Request.INVOKE_BROKER_TO_RESET_OFFSET, group=GROUP, topic="orders", timestamp=0)
        admin.ask(Request.AUTH_CREATE_USER, orjson.dumps({"password": "a-password-of-bob"}), username="bob")
        admin.ask(Request.JOB, orjson.dumps({"call": "list"}))
        admin.ask(Request.JOB, orjson.dumps({"call": "ask", "id": "j1", "op": "cancel", "where": "true", "by_ms": 0}))
        admin.say(Request.DELETE_TOPIC_IN_BROKER, oneway=True, topic="orders")
        admin.round_trip()
    expected = {
        ("admin", "UPDATE_AND_CREATE_TOPIC", "Topic:orders", "done"),
        ("alice", "DELETE_TOPIC_IN_BROKER", "Topic:orders", "refused"),
        ("", "SEND_MESSAGE_V2", "", "refused"),
        ("admin", "UPDATE_BROKER_CONFIG", "Cluster", "failed"),
        ("admin", "INVOKE_BROKER_TO_RESET_OFFSET", f"Group:{GROUP}, Topic:orders", "done"),
        ("admin", "AUTH_CREATE_USER", "Cluster", "done"),
        ("admin", "JOB", "Cluster", "done"),
        ("admin", "DELETE_TOPIC_IN_BROKER", "Topic:orders", "unknown"),
    }
    assert set(short(tmp_path)) == expected
    assert len(lines(tmp_path)) == len(expected)
    assert {line["address"] for line in lines(tmp_path)} == {"127.0.0.1"}
    assert ["no_such_setting" in line["reason"] for line in lines(tmp_path) if "CONFIG" in line["request"]] == [True]
    details = {line["request"]: line["detail"] for line in lines(tmp_path) if "detail" in line}
    assert details == {
        "UPDATE_BROKER_CONFIG": "no_such_setting=1", "AUTH_CREATE_USER": "bob",
        "JOB": "call=ask op=cancel id=j1 where=true",
    }  # fmt: skip
    text = b"".join(path.read_bytes() for path in (tmp_path / AUDIT_FOLDER).iterdir())
    assert b"password-of-bob" not in text
    assert b"secret-of" not in text


def test_without_users_changes_are_written_too(tmp_path: Path) -> None:
    with serving(tmp_path, has_access=True) as served, connected(served) as peer:
        sent(peer, "orders")
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
    assert short(tmp_path) == [
        ("", "DELETE_TOPIC_IN_BROKER", "Topic:orders", "done"),
        ("", "DELETE_TOPIC_IN_BROKER", "Topic:orders", "failed"),
    ]


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    with serving(tmp_path, has_access=True) as served, connected(served) as peer:
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
    folder = tmp_path / AUDIT_FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_flood_of_refusals_is_one_line_a_second_and_a_count(tmp_path: Path) -> None:
    add_user(tmp_path, "admin", is_super=True)
    with serving(tmp_path, has_access=True) as served, connected(served) as stranger:
        notice_users(served)  # another second begins
        for _ in range(100):
            send(stranger, "orders")
        notice_users(served)
    found = lines(tmp_path)
    assert len(found) < 20
    assert sum(line.get("more", 1) for line in found) == 100


# -- alone ------------------------------------------------------------------------------------------------------


@pytest.fixture
def complaints() -> list[str]:
    return []


def audit(folder: Path, complaints: list[str], **limits: int) -> Audit:
    return Audit(folder, ManualClock(T0), Limits(**limits), complaints.append)


def test_lines_are_rotated_by_size_and_count(tmp_path: Path, complaints: list[str]) -> None:
    async def work() -> None:
        log = audit(tmp_path, complaints, audit_bytes_max=1_024, audit_files_max=3)
        for number in range(60):
            log.end(log.begin("admin", "10.0.0.7", "PUT", f"Topic:{number}"), None)
            await log.close()

    asyncio.run(work())
    files = audit_files(tmp_path / AUDIT_FOLDER, "changes")
    assert len(files) == 3
    assert all(path.stat().st_size < 1_500 for path in files)
    numbers = [int(line["resource"].removeprefix("Topic:")) for line in lines(tmp_path)]
    assert numbers == list(range(numbers[0], 60))


def test_a_flood_of_refusals_pushes_no_change_out(tmp_path: Path, complaints: list[str]) -> None:
    async def work() -> None:
        log = audit(tmp_path, complaints, audit_bytes_max=1_024, audit_files_max=2)
        log.end(log.begin("admin", "10.0.0.7", "PUT", "Topic:mine"), None)
        for number in range(50):
            log.note_refusal(f"user-{number}", "10.0.0.7", "PUT", "", "not you")
            await log.close()

    asyncio.run(work())
    assert len(audit_files(tmp_path / AUDIT_FOLDER, "refusals")) == 2
    assert [line["resource"] for line in lines(tmp_path) if line["user"] == "admin"] == ["Topic:mine"]


def test_a_disk_that_takes_nothing_is_complained_about_and_counted(tmp_path: Path, complaints: list[str]) -> None:
    async def work() -> None:
        (tmp_path / AUDIT_FOLDER).write_text("no folder")
        log = audit(tmp_path, complaints)
        for number in range(5):
            log.end(log.begin("admin", "10.0.0.7", "PUT", f"Topic:{number}"), REFUSED)
            await log.close()
        (tmp_path / AUDIT_FOLDER).unlink()
        log.end(log.begin("admin", "10.0.0.7", "PUT", "Topic:last"), None)
        await log.close()

    asyncio.run(work())
    assert len(complaints) == 5
    assert "the audit log cannot be written: File exists" in complaints[0]
    lost, last = lines(tmp_path)
    assert (lost["result"], lost["more"], last["resource"]) == ("lost", 5, "Topic:last")


def test_lines_that_wait_for_the_disk_are_bounded(tmp_path: Path, complaints: list[str]) -> None:
    async def work() -> None:
        log = audit(tmp_path, complaints, audit_lines_max=10)
        for number in range(25):
            log.end(log.begin("admin", "10.0.0.7", "PUT", f"Topic:{number}"), None)
        await log.close()
        log.end(log.begin("admin", "10.0.0.7", "PUT", "Topic:last"), None)
        await log.close()

    asyncio.run(work())
    found = lines(tmp_path)
    assert len([line for line in found if line["result"] == "unknown"]) == 11
    assert sum(line["more"] for line in found if line["result"] == "lost") == 15


def test_who_is_refused_is_bounded(tmp_path: Path, complaints: list[str]) -> None:
    async def work() -> None:
        log = audit(tmp_path, complaints, audit_keys_max=5)
        for number in range(50):
            log.note_refusal(f"user-{number}", "10.0.0.7", "PUT", "", "not you")
        await log.close()

    asyncio.run(work())
    found = lines(tmp_path)
    assert len(found) == 7
    assert sum(line.get("more", 1) for line in found) == 50


def test_a_line_that_a_crash_has_cut_off_is_left_out(tmp_path: Path, complaints: list[str]) -> None:
    async def add(resource: str) -> None:
        log = audit(tmp_path, complaints)
        log.end(log.begin("admin", "10.0.0.7", "PUT", resource), None)
        await log.close()

    asyncio.run(add("Topic:a"))
    (path,) = audit_files(tmp_path / AUDIT_FOLDER, "changes")
    path.write_bytes(path.read_bytes() + b'{"at": "2026')
    asyncio.run(add("Topic:b\udcff\n" + "x" * 1_000))
    found = lines(tmp_path)
    assert [line["resource"][:7] for line in found] == ["Topic:a", "Topic:b"]
    assert len(found[1]["resource"]) == 500
