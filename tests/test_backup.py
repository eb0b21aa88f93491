"""Backups: a copy that is made while the broker works opens, passes `check`, and has everything that was answered."""

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import postdate
from postdate import backup
from postdate.access.users import Users
from postdate.backup import back_up
from postdate.broker.broker import Broker
from postdate.broker.leasing import LeaseHandle, PopRequest
from postdate.check import check_folder
from postdate.cli import app
from postdate.errors import CorruptLog, ForeignFolder, Refused
from postdate.storage.disk import RealDisk
from postdate.testing import BrokerProcess
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    KEEP_DAY,
    MINUTE_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    bodies,
    message,
    pulled,
    segment_of_messages,
    send,
    settled,
    snapshot,
)
from tests.support.peer import add_user
from tests.support.pipeline import BEGIN, World

WAIT_S = 60.0


@pytest.fixture
def target(tmp_path: Path) -> RealDisk:
    (tmp_path / "copy").mkdir()
    return RealDisk(tmp_path / "copy")


def opened(target: RealDisk) -> Broker:
    """A broker on the copy, which is sound."""
    assert check_folder(target).findings == []
    return Broker(target, SMALL, limits=SMALL_LIMITS)


def in_pieces(*works: Callable[[], None]) -> Callable[[int], None]:
    """Does one work after each piece that is copied, while there are some."""
    left = list(works)

    def show(_: int) -> None:
        if left:
            left.pop(0)()

    return show


def test_a_copy_of_a_running_broker_has_all_that_it_answered(data: Data, target: RealDisk) -> None:
    broker = data.open()
    send(broker, T0, message("near", due=T0 + MINUTE_MS // 2), message("far", due=T0 + FAR_MS), message("now"))
    snapshot(broker)
    send(broker, T0, message("after the snapshot"))
    done = back_up(data.disk, target)
    assert (done.end, done.at_ms, done.pass_count, done.table) == (broker.log.end, T0, 1, "")
    send(broker, T0, message("too late for the copy"))
    copy = opened(target)
    assert bodies(copy) == ["now", "after the snapshot"]
    advance(copy, T0 + FAR_MS)
    assert bodies(copy)[2:] == ["near", "far"]
    copy.close()


def test_users_are_copied_and_stay_their_owners_secret(data: Data, target: RealDisk) -> None:
    data.close(data.open())
    add_user(data.folder, "admin", is_super=True)
    (data.folder / "token").write_text("a token")
    back_up(data.disk, target)
    assert Users(target.root).all == Users(data.folder).all
    assert (target.root / "auth.json").stat().st_mode & 0o777 == 0o600
    assert not (target.root / "token").exists()


def test_a_copy_of_a_closed_folder_says_of_when_it_is(data: Data, target: RealDisk) -> None:
    broker = data.open()
    send(broker, T0 + HOUR_MS, message("one"))
    data.close(broker)
    assert back_up(data.disk, target).at_ms == T0 + HOUR_MS
    opened(target).close()


def test_a_folder_without_a_snapshot_is_copied(data: Data, target: RealDisk) -> None:
    broker = data.open()
    send(broker, T0, message("one"))
    back_up(data.disk, target)
    copy = opened(target)
    assert bodies(copy) == ["one"]
    copy.close()


def test_what_is_written_during_the_copy_does_no_harm(data: Data, target: RealDisk) -> None:
    broker = data.open()
    segment_of_messages(broker, T0, "before")
    expected = bodies(broker)
    busy = [lambda: segment_of_messages(broker, T0, "during"), lambda: snapshot(broker)]
    done = back_up(data.disk, target, show=in_pieces(*busy, *busy[:1]))
    assert done.pass_count == 2  # the first snapshot of all came during the first pass
    copy = opened(target)
    assert bodies(copy)[: len(expected)] == expected
    copy.close()


def test_a_second_pass_follows_where_the_broker_has_let_go_of_the_first_ones_snapshot(
    data: Data, target: RealDisk
) -> None:
    broker = data.open(KEEP_DAY)
    for hour in range(3):
        segment_of_messages(broker, T0 + hour * HOUR_MS, f"hour {hour}")
        snapshot(broker)
    later = T0 + 3 * DAY_MS

    def forget_old_messages() -> None:
        for number in range(2):
            segment_of_messages(broker, later, f"later {number}")
            snapshot(broker)
        assert broker.retain(later) > 0

    done = back_up(data.disk, target, show=in_pieces(forget_old_messages))
    assert done.pass_count == 2
    copy = opened(target)
    assert bodies(copy) == bodies(broker)
    copy.close()


class Busy:
    """A broker at work, step by step, by chance: sends near and far, cancels, pops, time, snapshots, retention."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self._broker, self._random, self._at_ms, self._count = broker, random.Random(seed), T0, 0
        self._steps = (self._send, self._send, self._send, self._cancel, self._pop, self._pass_time, self._snapshot)

    def work(self, _: int = 0) -> None:
        if self._random.random() < 0.3:
            self._random.choice(self._steps)()

    def _send(self) -> None:
        dues = (None, self._at_ms + MINUTE_MS // 2, self._at_ms + FAR_MS)
        for _ in range(self._random.randrange(1, 20)):
            self._count += 1
            due, body = self._random.choice(dues), f"m{self._count}".ljust(self._random.randrange(600))
            send(self._broker, self._at_ms, message(body, due=due, unique=f"u{self._count}"))

    def _cancel(self) -> None:
        settled(self._broker, self._broker.cancel(TOPIC, f"u{self._count}", self._at_ms + FAR_MS, self._at_ms))

    def _pop(self) -> None:
        ticket = self._broker.leases.pop(PopRequest("g", TOPIC, [0], 8, 1 << 20, MINUTE_MS, 16), self._at_ms)
        if ticket is not None:
            popped = settled(self._broker, ticket)
            handles = [LeaseHandle(TOPIC, 0, each.offset, popped.popped_at_ms) for each in popped.messages[::2]]
            settled(self._broker, self._broker.leases.acknowledge("g", handles, self._at_ms))

    def _pass_time(self) -> None:
        self._at_ms += self._random.choice((MINUTE_MS, DAY_MS))
        advance(self._broker, self._at_ms)
        self._broker.retain(self._at_ms)

    def _snapshot(self) -> None:
        snapshot(self._broker)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_broker_does_meanwhile_the_copy_is_sound(
    data: Data, target: RealDisk, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(backup, "_PIECE_BYTES", 4_096)
    broker = data.open(KEEP_DAY)
    busy = Busy(broker, seed)
    for _ in range(100):
        busy.work()
    answered = broker.log.end
    done = back_up(data.disk, target, show=busy.work)
    assert done.end >= answered
    assert check_folder(target).findings == []
    copy = Broker(target, KEEP_DAY, limits=SMALL_LIMITS)
    assert copy.log.end >= done.end
    length = copy.offsets(TOPIC, 0)[1] if copy.view.has_topic(TOPIC) else 0
    expected = {each.queue_offset: each.body for each in pulled(broker) if each.queue_offset < length}
    assert expected.items() <= {each.queue_offset: each.body for each in pulled(copy)}.items()
    copy.close()


def test_a_broker_that_never_rests_is_refused(data: Data, target: RealDisk) -> None:
    broker = data.open()
    count = 0

    def take_two_snapshots(_: int) -> None:
        nonlocal count
        for _ in range(2):
            count += 1
            send(broker, T0, message(f"m{count}"))
            snapshot(broker)

    send(broker, T0, message("first"))
    snapshot(broker)
    with pytest.raises(Refused, match="copy it when it is less busy"):
        back_up(data.disk, target, show=take_two_snapshots)
    with pytest.raises(ForeignFolder, match="no file FORMAT"):
        Broker(target, SMALL, limits=SMALL_LIMITS)


def test_a_copy_that_was_cut_short_is_no_folder_and_is_not_gone_on_with(data: Data, target: RealDisk) -> None:
    broker = data.open()
    send(broker, T0, message("one"))

    def die(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(data.disk, target, show=die)
    with pytest.raises(ForeignFolder, match="no file FORMAT"):
        Broker(target, SMALL, limits=SMALL_LIMITS)
    with pytest.raises(ForeignFolder, match="is not empty"):
        back_up(data.disk, target)


def test_a_plain_copy_of_a_running_broker_may_not_open(data: Data, target: RealDisk) -> None:
    """Why there is a command: a copy that reads the log while it is written has a gap."""
    broker = data.open()
    send(broker, T0, message("one"))
    shutil.copytree(data.folder, target.root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("LOCK"))
    seen = broker.log.end
    for number in range(100):
        send(broker, T0, message(f"m{number}".ljust(100)))
    gap = 4_096  # the copy reads the first of these blocks before they are written, and the others after
    log = data.disk.read("log/" + "0" * 20, 0, broker.log.end)
    target.write("log/" + "0" * 20, seen + gap, log[seen + gap :])
    with pytest.raises(CorruptLog, match="was on disk"):
        Broker(target, SMALL, limits=SMALL_LIMITS)


# -- with a table -------------------------------------------------------------------------------------------------


def test_the_table_is_copied_as_the_log_knows_it(tmp_path: Path, target: RealDisk) -> None:
    world = World(tmp_path / "data")
    try:
        world.send("before", [BEGIN + 10 * MINUTE_MS + n for n in range(4)])
        world.batch()

        def go_on() -> None:
            world.send("during", [world.clock.now_ms() + 5 * MINUTE_MS])
            world.pass_minutes(1)

        done = back_up(RealDisk(world.folder), target, show=in_pieces(*[go_on] * 6))
        assert done.table == str(world.folder / "table")
        assert check_folder(target).findings == []
        back = World(target.root, BEGIN)
        try:
            back.pass_minutes(11)
            assert {body for body in back.shown() if body.startswith("before")} == {f"before {n}" for n in range(4)}
        finally:
            back.close()
        assert check_folder(target).findings == []
    finally:
        world.close()


def test_a_table_elsewhere_is_refused_unless_it_is_left_out(data: Data, target: RealDisk) -> None:
    broker = data.open()
    settled(broker, broker.register_pipeline(T0, table="s3://bucket/table"))
    with pytest.raises(Refused, match="s3://bucket/table is not on this machine"):
        back_up(data.disk, target)
    snapshot(broker)
    with pytest.raises(Refused, match="s3://bucket/table is not on this machine"):
        back_up(data.disk, target)
    assert back_up(data.disk, target, with_table=False).table == ""


# -- the command --------------------------------------------------------------------------------------------------


def test_a_backup_under_load_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Producers send while the command copies. Everything that was answered before it began is in the copy, which a
    broker opens and delivers.
    """
    sent: list[str] = []
    is_busy, is_over = threading.Event(), threading.Event()
    (tmp_path / "one").mkdir()
    with (
        BrokerProcess(tmp_path / "one", segment_bytes=1 << 20, batch_bytes_max=1 << 20) as broker,
        postdate.connect(broker.address) as client,
    ):

        def produce() -> None:
            while not is_over.is_set():
                wishes = [postdate.Outgoing(f"{len(sent) + n}".ljust(400)) for n in range(50)]
                client.send_batch(TOPIC, wishes)
                sent.extend([f"{len(sent) + n}" for n in range(50)])
                if len(sent) >= 2_000:
                    is_busy.set()

        producer = threading.Thread(target=produce)
        producer.start()
        assert is_busy.wait(WAIT_S)
        before = len(sent)
        assert app.main(["backup", str(broker.data), str(tmp_path / "two" / "data")]) == 0
        is_over.set()
        producer.join()
    assert "copied" in capsys.readouterr().out
    assert app.main(["check", str(tmp_path / "two" / "data")]) == 0
    with BrokerProcess(tmp_path / "two") as restored, postdate.connect(restored.address) as client:
        came = {message.body.decode().strip() for message in client.consume(TOPIC, "readers", idle="1s")}
    assert came >= set(sent[:before])
    assert came <= {str(n) for n in range(len(sent) + 50)}


def test_the_command_says_what_it_cannot_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["backup", str(tmp_path / "nowhere"), str(tmp_path / "copy")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
