"""Adopting a table whose data folder is lost: its messages come to the topics and queues that they were sent to."""

import shutil
from itertools import count
from pathlib import Path

import pytest
from deltalake import DeltaTable

from postdate import adoption
from postdate.broker.broker import Broker
from postdate.check import check_folder
from postdate.errors import ForeignFolder, Refused
from postdate.storage.disk import RealDisk
from postdate.table.delta import Table
from postdate.table.identity import read_identity, read_queues, read_seen
from postdate.testing import FaultPoints, Killed
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC, bodies, contents, message
from tests.support.pipeline import BEGIN, World
from tests.support.server import SERVED, configured

DUE = BEGIN + HOUR_MS
SETTINGS, LIMITS = configured(SERVED)


def send_mails(world: World, names: list[str]) -> None:
    messages = [message(name, topic="mails", due=DUE + n, queue_id=n % 3) for n, name in enumerate(names)]
    world.served.call(lambda: world.broker.send(messages, world.clock.now_ms()))
    world.served.settle()


def lived(folder: Path) -> str:
    """A broker with two topics, a deleted one between them, messages delivered and waiting; returns its identity."""
    world = World(folder)
    put = world.broker.put_topic
    world.served.call(lambda: put("gone", BEGIN, read_queue_count=4, write_queue_count=4))
    world.served.call(lambda: put("mails", BEGIN, read_queue_count=3, write_queue_count=3))
    world.served.call(lambda: world.broker.send([message("dead", topic="gone", due=DUE)], BEGIN))
    world.send("early", [BEGIN + 4 * MINUTE_MS] * 3)
    world.send("middle", [BEGIN + 7 * MINUTE_MS])  # among the last that are promoted
    world.send("late", [DUE] * 10)
    send_mails(world, [f"mail {n}" for n in range(6)])
    world.cancel("late-u4", DUE, "unique")
    world.served.call(lambda: world.broker.delete_topic("gone", BEGIN))
    world.served.settle()
    world.batch()
    world.pass_minutes(8)
    world.close()
    return str(world.broker.identity)


def lose(folder: Path) -> None:
    """Loses everything but the table."""
    for path in folder.iterdir():
        if path.name != "table":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def adopt(folder: Path) -> None:
    adoption.adopt(RealDisk(folder), str(folder / "table"), SETTINGS, LIMITS)


def delivered(world: World, topic: str) -> dict[int, list[str]]:
    """The bodies in the queues of a topic, by queue id."""
    queue_ids = range(len(world.broker.view.topic(topic).numbers))
    return world.served.call(lambda: {queue_id: bodies(world.broker, topic, queue_id) for queue_id in queue_ids})


def test_the_table_names_the_queues_of_its_broker(tmp_path: Path) -> None:
    lived(tmp_path)
    queues = read_queues(DeltaTable(str(tmp_path / "table" / "messages")))
    assert queues is not None
    assert {topic.name: len(topic.numbers) for topic in queues.topics} == {
        "SCHEDULE_TOPIC_XXXX": 18,
        TOPIC: 2,
        "mails": 3,
    }
    assert queues.given == 18 + 2 + 4 + 3
    assert next(topic.numbers for topic in queues.topics if topic.name == "mails") == [24, 25, 26]


def test_the_survey_says_what_will_be_delivered_and_changes_nothing(tmp_path: Path) -> None:
    lived(tmp_path)
    lose(tmp_path)
    before = contents(tmp_path)
    found = adoption.look_at(RealDisk(tmp_path), str(tmp_path / "table"), SETTINGS)
    assert found.deliverable == {TOPIC: 1 + 9, "mails": 6}
    assert (found.past, found.ownerless, found.cancels) == ({TOPIC: 3}, {"gone": 1}, 1)
    assert contents(tmp_path) == before


def test_adopted_messages_come_to_the_topics_and_queues_that_they_were_sent_to(tmp_path: Path) -> None:
    lost = lived(tmp_path)
    lose(tmp_path)
    adopt(tmp_path)
    report = check_folder(RealDisk(tmp_path))
    assert report.ok, report.findings
    world = World(tmp_path, DUE - 30 * MINUTE_MS)
    assert read_identity(DeltaTable(str(tmp_path / "table" / "messages"))) == world.broker.identity != lost
    world.send("new", [DUE] * 2)
    world.batch()
    state = world.control.state()
    assert state.rows_in - state.rows_out == 10 + 6 + 1 + 1 + 2  # with the cancel, and the message of a deleted topic
    world.pass_minutes(30)
    world.served.pass_ms(1_000)
    world.served.settle()
    # What was promoted last comes again, and what arrived before sorts before what came after the adoption.
    assert delivered(world, TOPIC) == {
        0: ["middle 0", *(f"late {n}" for n in (0, 2, 6, 8)), "new 0"],
        1: [*(f"late {n}" for n in (1, 3, 5, 7, 9)), "new 1"],
    }
    assert delivered(world, "mails") == {queue: [f"mail {queue}", f"mail {queue + 3}"] for queue in range(3)}
    assert not world.broker.view.has_topic("gone")
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert report.ok, report.findings


def test_adopted_messages_come_on_time_before_a_pipeline_has_started(tmp_path: Path) -> None:
    lived(tmp_path)
    lose(tmp_path)
    adopt(tmp_path)
    world = World(tmp_path, DUE - 2 * MINUTE_MS, registers=False)
    world.pass_without_pipeline(2 * MINUTE_MS + 1_000)
    assert delivered(world, "mails") == {queue: [f"mail {queue}", f"mail {queue + 3}"] for queue in range(3)}
    world.pipeline = world.registered()
    world.pass_minutes(2)
    state = world.control.state()
    assert state.rows_in == state.rows_out
    assert sum(map(len, delivered(world, TOPIC).values())) == 1 + 9
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert report.ok, report.findings


def test_jobs_of_the_new_broker_get_numbers_that_no_row_of_the_table_has(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in ("one", "two"):
        world.import_messages(name, [DUE + n for n in range(4)])
    world.batch()
    world.close()
    lose(tmp_path)
    adopt(tmp_path)
    again = World(tmp_path, BEGIN + 5 * MINUTE_MS)
    again.import_messages("three", [DUE + n for n in range(4)])
    again.batch()
    assert again.control.find_job("three").number == 2
    again.close()
    report = check_folder(RealDisk(tmp_path))  # no arrival stands twice
    assert report.ok, report.findings
    assert report.numbers["rows of the table that wait"] == 12


def test_an_adoption_that_was_killed_anywhere_is_repeated(tmp_path: Path) -> None:
    lived(tmp_path / "lived")
    lose(tmp_path / "lived")
    before = read_seen(DeltaTable(str(tmp_path / "lived" / "table" / "messages")))
    assert before is not None
    seen = before._replace(horizon=before.horizon - 2 * MINUTE_MS, epoch=before.epoch + 1)
    for step in count():
        folder = tmp_path / f"{step}"
        shutil.copytree(tmp_path / "lived", folder)
        try:
            with FaultPoints(kill_after=step):
                adopt(folder)
            break
        except Killed:
            with pytest.raises(ForeignFolder, match="the adoption of a table was cut short; repeat it"):
                Broker(RealDisk(folder), SETTINGS, limits=LIMITS)
        adopt(folder)
        report = check_folder(RealDisk(folder))
        assert report.ok, report.findings
        table = DeltaTable(str(folder / "table" / "messages"))
        assert read_identity(table) == (folder / "IDENTITY").read_text()
        assert read_seen(table) == seen  # not taken back twice
        shutil.rmtree(folder)
    assert step > 10


def test_the_lost_folder_that_comes_back_is_refused(tmp_path: Path) -> None:
    lived(tmp_path / "lost")
    (tmp_path / "new").mkdir()
    shutil.copytree(tmp_path / "lost" / "table", tmp_path / "new" / "table")
    adopt(tmp_path / "new")
    shutil.rmtree(tmp_path / "lost" / "table")
    shutil.copytree(tmp_path / "new" / "table", tmp_path / "lost" / "table")
    world = World(tmp_path / "lost", registers=False)
    with pytest.raises(Refused, match="belongs to another broker"):
        world.registered()
    world.close()


def test_a_folder_that_a_broker_has_opened_and_nobody_has_used_may_adopt(tmp_path: Path) -> None:
    lived(tmp_path)
    lose(tmp_path)
    shutil.move(tmp_path / "table", tmp_path / "kept")
    Broker(RealDisk(tmp_path / "data"), SETTINGS, limits=LIMITS).close()
    adoption.adopt(RealDisk(tmp_path / "data"), str(tmp_path / "kept"), SETTINGS, LIMITS)
    report = check_folder(RealDisk(tmp_path / "data"))
    assert report.ok, report.findings


def test_a_folder_with_a_log_or_with_other_files_is_refused(tmp_path: Path) -> None:
    lived(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(Refused, match="the folder has a log of its own"):
        adopt(tmp_path)
    assert contents(tmp_path) == before
    lose(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(Refused, match=r"the folder holds 'thesis.txt'"):
        adopt(tmp_path)


def test_a_table_that_is_not_there_or_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no table at"):
        adopt(tmp_path)
    Table(str(tmp_path / "table" / "messages"))
    with pytest.raises(Refused, match="was written by an earlier version"):
        adopt(tmp_path)
