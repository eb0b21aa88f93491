"""What a pipeline asks of the broker: its place, rows, an epoch, a stage; what it reports and what operators see."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from postdate.arrival import NEVER
from postdate.clock import ManualClock
from postdate.contract import NamedQueues
from postdate.storage.layout import ENTRY, FAR, TIME
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.support.core import DAY_MS, FAR_MS, HOUR_MS, MINUTE_MS, T0, FaultyDisk, message, write_chunk
from tests.support.peer import Gate, Peer, connected, make_topic, read_bodies, sent
from tests.support.server import WAIT_S, Served, serving

DUE = T0 + FAR_MS
DELAY_MS_MAX = 87_660 * 3_600_000


def told(answer: Command) -> Any:
    assert answer.code == codes.SUCCESS, answer
    return orjson.loads(answer.body)


def state(peer: Peer) -> dict[str, Any]:
    found: dict[str, Any] = told(peer.ask(Request.GET_BULK_STATE))
    return found


def register(peer: Peer, **said: Any) -> dict[str, Any]:
    found: dict[str, Any] = told(peer.ask(Request.REGISTER_PIPELINE, orjson.dumps(said)))
    return found


def stage_body(epoch: int, far: tuple[int, int], horizon: tuple[int, int], *chunks: str, **rows: int) -> bytes:
    body = {"epoch": epoch, "far": far, "horizon": horizon, "chunks": chunks, "rows_in": 0, "rows_out": 0}
    return orjson.dumps(body | rows)


def sent_far(peer: Peer, count: int) -> None:
    make_topic(peer, "orders")
    for number in range(count):
        sent(peer, "orders", f"m{number}", UNIQ_KEY=f"K{number}", TIMER_DELIVER_MS=DUE + number)


def upload(served: Served, name: str, count: int) -> None:
    """A chunk of the first far messages, as `sent_far` sent them."""
    rows = served.call(lambda: served.broker.view.read_far(0, count))
    messages = [message(f"m{number}", unique=f"K{number}", due=DUE + number) for number in range(count)]
    places = [(int(row["due"]), int(row["arrival"]), int(row["queue"])) for row in rows]
    write_chunk(served.disk, name, [(*place, each) for place, each in zip(places, messages, strict=True)])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- where it is


def test_a_pipeline_is_told_where_it_is(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert state(peer) == {
            "now_ms": T0, "lead_ms": 60_000, "delay_ms_max": DELAY_MS_MAX,
            "epoch": 0, "taken": 0, "horizon": 0, "far_first": 0, "far_length": 0,
            "arrival_of_taken": NEVER, "rows_in": 0, "rows_out": 0, "rescued": 0, "table": "", "bulk": "",
            "commands": [], "gone": [], "identity": served.broker.identity, "rescue_lead_ms": 30_000, "queues": 18,
            "wanted": 0, "job_ms_max": 3_600_000,
        }  # fmt: skip
        sent_far(peer, 3)
        assert register(peer, table="s3://bucket/t", master="local[*]")["epoch"] == 1
        body = stage_body(1, (0, 2), (0, T0 + 2 * MINUTE_MS), rows_in=2, rows_out=0)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        body = stage_body(1, (2, 2), (T0 + 2 * MINUTE_MS, T0 + 3 * MINUTE_MS), rows_in=2, rows_out=1)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        arrival = served.call(lambda: int(served.broker.view.read_far(2, 1)["arrival"][0]))
        seen = dict(zip(("position", "mark"), served.call(lambda: served.broker.view.log_mark) or (), strict=True))
        assert state(peer) == {
            "now_ms": T0, "lead_ms": 60_000, "delay_ms_max": DELAY_MS_MAX,
            "epoch": 1, "taken": 2, "horizon": T0 + 3 * MINUTE_MS, "far_first": 0,
            "far_length": 3, "arrival_of_taken": arrival, "rows_in": 2, "rows_out": 1, "rescued": 0,
            "table": "s3://bucket/t", "bulk": "", "commands": [], "gone": [], "identity": served.broker.identity,
            "queues": served.call(lambda: served.broker.view.queue_count), "rescue_lead_ms": 30_000, "wanted": 0,
            "job_ms_max": 3_600_000, **seen,
        }  # fmt: skip


def test_what_a_pipeline_was_told_outlives_the_broker(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        sent_far(peer, 1)
        register(peer, table="s3://bucket/t", master="m")
        assert peer.ask(Request.STAGE, stage_body(1, (0, 1), (0, T0 + 1), rows_in=1)).code == codes.SUCCESS
        before = state(peer)
        served.kill()
    for _ in range(2):  # after a crash, then from a snapshot
        with serving(tmp_path, clock) as served, connected(served) as peer:
            assert state(peer) == before


def test_rescues_are_counted_since_the_start(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        sent_far(peer, 2)
        served.pass_ms(FAR_MS)
        served.settle()
        assert state(peer)["rescued"] == 2
    with serving(tmp_path, clock) as served, connected(served) as peer:
        assert state(peer)["rescued"] == 0


# ------------------------------------------------------------------------------------------------------- ranges


def ranges(peer: Peer, **fields: Any) -> tuple[dict[str, int], bytes]:
    answer = peer.ask(Request.GET_BULK_RANGE, **fields)
    assert answer.code == codes.SUCCESS, answer
    return {name: int(value) for name, value in answer.fields.items()}, answer.body


def test_rows_in_files_and_in_memory_are_all_rows(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), queue_tail_rows=4) as served, connected(served) as peer:
        sent_far(peer, 10)
        fields, body = ranges(peer)
        assert fields == {"number": -1, "first": 0, "length": 10, "stored": 8, "fileRows": 4_096}
        stored = (tmp_path / "far" / f"{0:020d}").read_bytes()[: 8 * FAR.itemsize]
        rows = np.frombuffer(stored + body, FAR)
        assert rows["due"].tolist() == [DUE + number for number in range(10)]
        assert np.frombuffer(ranges(peer, start=9)[1], FAR)["due"].tolist() == [DUE + 9]
        assert ranges(peer, start=99)[1] == b""


def test_rows_of_a_queue_are_its_entries(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        for number in range(3):
            sent(peer, "orders", f"m{number}", queue_id=1)
        fields, body = ranges(peer, topic="orders", queueId=1)
        number = served.call(lambda: served.broker.fold.topics.get("orders").numbers[1])
        of_queue = {"number": number, "first": 0, "stored": 0, "fileRows": 4_096}
        assert fields == {**of_queue, "length": 3, "timeRow": 0}
        entries = served.call(lambda: served.broker.view.entries("orders", 1, 0, 3))
        assert [tuple(entry) for entry in np.frombuffer(body, ENTRY).tolist()] == entries


def test_times_of_a_queue_are_rows_too(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for number in range(3):
            sent(peer, "orders", f"m{number}")
            served.pass_ms(10 if number else 0)
        assert ranges(peer, topic="orders", start=1)[0]["timeRow"] == 0
        assert ranges(peer, topic="orders", start=2)[0]["timeRow"] == 1
        fields, body = ranges(peer, topic="orders", times="true")
        assert (fields["length"], "timeRow" in fields) == (2, False)
        assert np.frombuffer(body, TIME).tolist() == [(T0, 0), (T0 + 10, 2)]


def test_how_far_each_queue_goes_is_told(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        sent(peer, "orders", "a", queue_id=1)
        served.pass_ms(10)
        sent(peer, "orders", "b", queue_id=1)
        numbers = served.call(lambda: served.broker.fold.topics.get("orders").numbers)
        answer = peer.ask(Request.GET_BULK_TOPIC, topic="orders", at=T0 + 1)
        queues = [[0, numbers[0], 0, 0, 0], [1, numbers[1], 0, 2, 1]]
        assert json.loads(answer.body) == {"queues": queues, "bulk": "", "permit": ""}
        assert peer.ask(Request.GET_BULK_TOPIC, topic="nowhere").code == codes.TOPIC_NOT_EXIST


def test_a_pipeline_is_told_what_queue_numbers_mean(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        served.call(lambda: served.broker.put_topic("gone", T0, read_queue_count=1, write_queue_count=1))
        served.call(lambda: served.broker.put_topic("mails", T0, read_queue_count=1, write_queue_count=2, perm=4))
        served.call(lambda: served.broker.delete_topic("gone", T0))
        queues = NamedQueues.read(json.loads(peer.ask(Request.GET_BULK_TOPIC).body))
    assert queues.topics[-1] == ("mails", 1, 2, 4, {}, [19, 20])
    assert queues.deleted == [(18, "gone", 0)]
    assert queues.given == 21


def test_ranges_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert peer.ask(Request.GET_BULK_RANGE, topic="nowhere").code == codes.TOPIC_NOT_EXIST
        assert peer.ask(Request.GET_BULK_RANGE, topic="orders", queueId=1).code == codes.INVALID_PARAMETER
        assert peer.ask(Request.GET_BULK_RANGE, start=-1).code == codes.INVALID_PARAMETER


def test_an_answer_has_only_so_many_rows(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), range_rows_max=2) as served, connected(served) as peer:
        sent_far(peer, 3)
        assert np.frombuffer(ranges(peer)[1], FAR)["due"].tolist() == [DUE, DUE + 1]
        assert np.frombuffer(ranges(peer, start=2)[1], FAR)["due"].tolist() == [DUE + 2]


ASKED = [
    lambda peer: peer.say(Request.GET_BULK_STATE),
    lambda peer: peer.say(Request.GET_BULK_RANGE),
    lambda peer: peer.say(Request.GET_CHUNKS),
    lambda peer: peer.say(Request.REGISTER_PIPELINE, b"{}"),
    lambda peer: peer.say(Request.STAGE, stage_body(1, (0, 1), (0, T0 + 1), rows_in=1)),
]
NAMES = ["state", "range", "chunks", "register", "stage"]


@pytest.mark.parametrize("ask", ASKED, ids=NAMES)
def test_in_async_mode_nothing_is_told_before_it_is_durable(tmp_path: Path, ask: Any) -> None:
    gate = Gate(tmp_path)
    how: dict[str, Any] = {"flush": "async", "flush_interval_ms": 60_000}
    with serving(tmp_path, ManualClock(T0), disk=gate.disk, **how) as served, connected(served) as peer:
        make_topic(peer, "orders")
        register(peer)
        gate.hold()
        sent(peer, "orders", TIMER_DELIVER_MS=DUE)  # answered, and not durable
        opaque = ask(peer)
        gate.wait_for_flush()
        peer.expect_no_more()
        gate.open()
        assert peer.answer_to(opaque).code == codes.SUCCESS


@pytest.mark.parametrize("ask", ASKED, ids=NAMES)
def test_in_async_mode_a_failed_flush_is_told(tmp_path: Path, ask: Any) -> None:
    gate = Gate(tmp_path)
    how: dict[str, Any] = {"flush": "async", "flush_interval_ms": 60_000}
    with serving(tmp_path, ManualClock(T0), disk=gate.disk, **how) as served, connected(served) as peer:
        make_topic(peer, "orders")
        register(peer)
        gate.hold()
        gate.error = OSError(5, "Input/output error")
        sent(peer, "orders", TIMER_DELIVER_MS=DUE)
        opaque = ask(peer)
        gate.wait_for_flush()
        gate.open()
        assert peer.answer_to(opaque).code == codes.SERVICE_NOT_AVAILABLE


# --------------------------------------------------------------------------------------------- registering, staging


def test_the_state_tells_how_far_a_batch_goes(tmp_path: Path) -> None:
    """By rows, by bytes of the log, and never beyond the durable end."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent_far(peer, 64)
        arrivals = served.call(lambda: served.broker.view.read_far(0, 64)["arrival"].tolist())
        step = arrivals[1] - arrivals[0]

        def stop(start: int, rows_max: int, bytes_max: int) -> int:
            answer = peer.ask(Request.GET_BULK_STATE, start=start, rowsMax=rows_max, bytesMax=bytes_max)
            return int(told(answer)["stop"])

        assert stop(0, 1_000, 1 << 40) == 64
        assert stop(0, 10, 1 << 40) == 10
        assert stop(60, 10, 1 << 40) == 64
        assert stop(64, 10, 1 << 40) == 64
        assert 4 <= stop(0, 1_000, 8 * step) <= 9
        assert stop(0, 1_000, 0) == 1, "one is always taken"
        assert "stop" not in state(peer)


def test_a_pipeline_that_registers_learns_what_is_staged_and_fences_older_ones(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 2)
        assert register(peer)["staged"] == []
        upload(served, "000001-a", 2)
        assert peer.ask(Request.STAGE, stage_body(1, (0, 2), (0, DUE + 1), "000001-a", rows_in=2)).code == codes.SUCCESS
        again = register(peer, table="s3://bucket/t2")
        assert (again["epoch"], again["staged"], again["table"], again["taken"]) == (
            2,
            ["000001-a"],
            "s3://bucket/t2",
            2,
        )
        answer = peer.ask(Request.STAGE, stage_body(1, (2, 2), (DUE + 1, DUE + 2)))
        assert answer.code == codes.ILLEGAL_OPERATION
        assert answer.remark == (
            "the stage is refused: epoch 1 is not the current one (2): another pipeline has registered"
        )
        served.pass_ms(FAR_MS + 1)
        served.settle()
        assert read_bodies(peer, "orders") == ["m0", "m1"]


def test_staged_chunks_are_told_by_their_offsets(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 2)
        register(peer)
        assert told(peer.ask(Request.GET_CHUNKS)) == []
        upload(served, "000001-1", 2)
        upload(served, "000001-2", 1)
        assert (
            peer.ask(Request.STAGE, stage_body(1, (0, 2), (0, DUE + 1), "000001-1", "000001-2", rows_in=2)).code
            == codes.SUCCESS
        )
        sizes = [(tmp_path / "chunks" / name).stat().st_size for name in ("000001-1", "000001-2")]
        assert told(peer.ask(Request.GET_CHUNKS)) == [
            [1 << 62, "000001-1", sizes[0]], [(1 << 62) + (sizes[0] + 7) // 8 * 8, "000001-2", sizes[1]],
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "a stage"),
        (b"{}", "a stage cannot be read: epoch is missing, expected a whole number"),
        (stage_body(1, (0, 0), (0, 0)).replace(b'"epoch":1', b'"epoch":true'), "epoch is True, expected a whole"),
        (stage_body(1, (0, 0), (0, 0)).replace(b"[0,0]", b"[0]", 1), "far is [0], expected two whole numbers"),
        (stage_body(1, (0, 0), (0, 1 << 63)), "horizon is [0, 9223372036854775808], expected two"),
        (stage_body(1, (0, 0), (0, 0)).replace(b'"rows_in":0', b'"rows_in":"0"'), "rows_in is '0', expected"),
        (stage_body(1, (0, 0), (0, 0), "../x"), "chunk name '../x' is no file name"),
    ],
)
def test_a_stage_that_cannot_be_read_is_refused(tmp_path: Path, body: bytes, said: str) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        register(peer)
        answer = peer.ask(Request.STAGE, body)
        assert answer.code == codes.INVALID_PARAMETER
        assert said in (answer.remark or "")


def test_a_stage_has_only_so_many_chunks(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_chunks_max=1) as served, connected(served) as peer:
        register(peer)
        answer = peer.ask(Request.STAGE, stage_body(1, (0, 0), (0, 1), "a", "b"))
        assert answer.code == codes.INVALID_PARAMETER
        assert answer.remark == "stage_chunks_max: the stage has 2 chunks, the limit is 1"


def test_a_stage_whose_chunk_is_damaged_or_missing_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 1)
        register(peer)
        upload(served, "000001-bad", 1)
        path = tmp_path / "chunks" / "000001-bad"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        before = state(peer)
        for name in ("000001-bad", "000001-missing"):
            answer = peer.ask(Request.STAGE, stage_body(1, (0, 1), (0, DUE), name))
            assert (answer.code, f"chunks/{name}" in (answer.remark or "")) == (codes.SYSTEM_ERROR, True)
        assert state(peer) == before


# --------------------------------------------------------------------------------------------- where the table is


@pytest.mark.parametrize(
    "uri",
    ["http://169.254.169.254/latest", "s3://attacker/t", "/etc", "file:///etc", "{data}/../beside", "{data}beside"],
)
def test_a_pipeline_points_nobody_to_another_place(tmp_path: Path, uri: str) -> None:
    """Before, bulk, imports and queries read and wrote wherever the last one that registered said."""
    data = tmp_path / "data"
    uri = uri.format(data=data)
    with serving(data, ManualClock(T0), has_access=True) as served, connected(served) as peer:
        answer = peer.ask(Request.REGISTER_PIPELINE, orjson.dumps({"table": uri}))
        assert answer.code == codes.ILLEGAL_OPERATION
        assert answer.remark == (
            f"the pipeline's table is {uri}, but by the broker's settings it is {data / 'table'}: start "
            f"the broker with --table {uri}, or the pipeline with the broker's"
        )
        assert (state(peer)["epoch"], state(peer)["table"]) == (0, "")


def test_a_pipeline_registers_with_the_table_of_the_settings_or_one_in_the_data_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, ManualClock(T0), has_access=True) as served, connected(served) as peer:
        for uri in (str(data / "table"), f"file://{data}/table", f"{data}/other/../table/", str(data / "second"), ""):
            assert register(peer, table=uri)["table"] == uri
    with (
        serving(data, ManualClock(T0), has_access=True, table="s3://bucket/t/") as served,
        connected(served) as peer,
    ):
        assert register(peer, table="s3://bucket/t")["table"] == "s3://bucket/t"
        assert peer.ask(Request.REGISTER_PIPELINE, orjson.dumps({"table": "s3://bucket/t2"})).code != codes.SUCCESS


def test_a_table_that_an_earlier_version_was_told_and_the_settings_do_not_name_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    with serving(data, ManualClock(T0)) as served, connected(served) as peer:
        register(peer, table="s3://attacker/table")
    with serving(data, ManualClock(T0), has_access=True) as served, connected(served) as peer:
        assert state(peer)["table"] == ""
        assert "kept its table at s3://attacker/table, but by the settings it is" in caplog.text
        register(peer, table=str(data / "table"))
        assert state(peer)["table"] == str(data / "table")


# ------------------------------------------------------------------------ stages that claim what they cannot know


REACH = T0 // MINUTE_MS * MINUTE_MS + 2 * MINUTE_MS  # the lead from now, rounded up: what a pipeline promotes up to
AHEAD = 5 * MINUTE_MS  # stage_ahead_ms_max


def refused(peer: Peer, body: bytes) -> str:
    """Why a stage is refused; it has changed nothing."""
    before = state(peer)
    answer = peer.ask(Request.STAGE, body)
    assert (answer.code, state(peer)) == (codes.ILLEGAL_OPERATION, before), answer
    return answer.remark or ""


def test_two_requests_cannot_make_every_far_message_vanish(tmp_path: Path) -> None:
    """Before, they took all far rows, with no chunk and a horizon of the year 2100, and no message ever came."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for number, due in enumerate((T0 + 3 * MINUTE_MS, DUE, DUE + HOUR_MS)):
            sent(peer, "orders", f"m{number}", TIMER_DELIVER_MS=due)
        register(peer, table=str(tmp_path / "table"), master="nobody")
        assert "no pipeline can be further" in refused(peer, stage_body(1, (0, 3), (0, 4_102_444_800_000)))
        assert "in none of its chunks" in refused(
            peer, stage_body(1, (0, 3), (0, REACH + AHEAD), rows_in=3, rows_out=3)
        )
        assert "only 0 came into the table" in refused(peer, stage_body(1, (0, 3), (0, REACH)))
        served.pass_ms(FAR_MS + HOUR_MS)
        served.settle()
        assert read_bodies(peer, "orders") == ["m0", "m1", "m2"]


def test_a_horizon_that_no_pipeline_can_reach_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        register(peer)
        said = refused(peer, stage_body(1, (0, 0), (0, REACH + AHEAD + 1)))
        assert said.startswith("stage_ahead_ms_max: the stage claims that everything due up to ")
        assert said.endswith(f"no pipeline can be further than {REACH + AHEAD}")
        assert peer.ask(Request.STAGE, stage_body(1, (0, 0), (0, REACH + AHEAD))).code == codes.SUCCESS


def test_a_horizon_that_was_planned_before_the_clock_stepped_back_is_believed(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        register(peer)
        served.call(lambda: clock.step_ms(DAY_MS))
        state(peer)  # the pipeline plans by this
        served.call(lambda: clock.step_ms(-DAY_MS))
        assert peer.ask(Request.STAGE, stage_body(1, (0, 0), (0, REACH + DAY_MS))).code == codes.SUCCESS
        horizon = (REACH + DAY_MS, REACH + DAY_MS)
        assert peer.ask(Request.STAGE, stage_body(1, (0, 0), horizon)).code == codes.SUCCESS, "it may stay there"


def test_a_stage_must_show_the_far_rows_that_it_takes(tmp_path: Path) -> None:
    """In files and in memory: a tail has four rows."""
    with (
        serving(tmp_path, ManualClock(T0), queue_tail_rows=4, stage_ahead_ms_max=DAY_MS) as served,
        connected(served) as peer,
    ):
        sent_far(peer, 6)
        register(peer)
        assert "takes 6 far rows, but by its rows_in only 5" in refused(
            peer, stage_body(1, (0, 6), (0, REACH), rows_in=5)
        )
        upload(served, "000001-five", 5)
        body = stage_body(1, (0, 6), (0, DUE + 5), "000001-five", rows_in=6, rows_out=6)
        assert f"takes 1 messages that are due by its horizon, the first at {DUE + 5}" in refused(peer, body)
        body = stage_body(1, (0, 6), (0, DUE + 4), "000001-five", rows_in=6, rows_out=5)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS


def test_what_was_cancelled_or_rescued_need_not_be_shown(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 2)
        register(peer)
        served.call(lambda: served.broker.cancel("orders", "K0", DUE, T0))
        served.settle()
        upload(served, "000001-both", 2)
        path = tmp_path / "chunks" / "000001-one"
        index = served.call(lambda: served.broker.view.read_far(1, 1))
        place = (int(index["due"][0]), int(index["arrival"][0]), int(index["queue"][0]))
        write_chunk(served.disk, path.name, [(*place, message("m1", unique="K1", due=DUE + 1))])  # type: ignore[arg-type]
        body = stage_body(1, (0, 3), (0, DUE + 1), path.name, rows_in=3, rows_out=3)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        sent(peer, "orders", "m2", UNIQ_KEY="K2", TIMER_DELIVER_MS=DUE + HOUR_MS)
        served.pass_ms(FAR_MS + HOUR_MS - MINUTE_MS // 2)
        served.settle()
        assert state(peer)["rescued"] == 1
        body = stage_body(1, (3, 4), (DUE + 1, DUE + HOUR_MS), rows_in=3, rows_out=0)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert read_bodies(peer, "orders") == ["m1", "m2"]


def test_chunks_of_another_epoch_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 1)
        register(peer)
        register(peer)
        for name in ("000001-a", "a"):
            upload(served, name, 1)
            body = stage_body(2, (0, 1), (0, DUE), name, rows_in=1, rows_out=1)
            assert f"chunk {name} is not of epoch 2" in refused(peer, body)


def test_no_more_rows_leave_the_table_than_ever_came_in(tmp_path: Path) -> None:
    """Else bulk takes the table for empty, and promotes nothing of it while the pipeline is away."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent_far(peer, 3)
        register(peer)
        assert peer.ask(Request.STAGE, stage_body(1, (0, 3), (0, REACH), rows_in=3)).code == codes.SUCCESS
        said = refused(peer, stage_body(1, (3, 3), (REACH, REACH + 1), rows_in=3, rows_out=4))
        assert "takes 4 rows out of the table, but of 3 that ever came in 0 are out" in said


# ------------------------------------------------------------------------------------------------ chunks that are slow


class SlowChunks(FaultyDisk):
    """Chunks are read when the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def array(self, path: str) -> np.ndarray:
        if path.startswith("chunks/"):
            self.reached.set()
            assert self.go_on.wait(WAIT_S), "the test has forgotten to let it go on"
        return super().array(path)


def test_reading_the_chunks_of_a_stage_keeps_nobody_waiting(tmp_path: Path) -> None:
    disk = SlowChunks(tmp_path)
    with serving(tmp_path, ManualClock(T0), disk=disk, stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 1)
        sent(peer, "orders", "near", TIMER_DELAY_MS=1_000)
        register(peer)
        upload(served, "000001-1", 1)
        first = peer.say(Request.STAGE, stage_body(1, (0, 1), (0, DUE), "000001-1", rows_in=1))
        assert disk.reached.wait(WAIT_S)
        second = peer.say(Request.STAGE, stage_body(1, (0, 1), (0, DUE), "000001-1", rows_in=1))
        served.pass_ms(1_000)
        served.settle()
        assert read_bodies(peer, "orders") == ["near"], "what is due is fired meanwhile"
        assert not peer.answers
        disk.go_on.set()
        assert peer.answer_to(first).code == codes.SUCCESS
        answer = peer.answer_to(second)
        assert answer.code == codes.ILLEGAL_OPERATION, "one at a time, so that no chunk is staged twice"
        assert "chunk 000001-1 is staged already" in (answer.remark or "")


def test_a_stage_that_is_overtaken_while_its_chunks_are_read_is_refused(tmp_path: Path) -> None:
    disk = SlowChunks(tmp_path)
    with serving(tmp_path, ManualClock(T0), disk=disk, stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 1)
        register(peer)
        upload(served, "000001-1", 1)
        opaque = peer.say(Request.STAGE, stage_body(1, (0, 1), (0, DUE), "000001-1", rows_in=1))
        assert disk.reached.wait(WAIT_S)
        register(peer)
        disk.go_on.set()
        answer = peer.answer_to(opaque)
        assert answer.code == codes.ILLEGAL_OPERATION
        assert "another pipeline has registered" in (answer.remark or "")
        assert state(peer)["taken"] == 0


# --------------------------------------------------------------------------------------------- reports and status


def test_the_last_reports_of_batches_are_shown(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert told(peer.ask(Request.GET_STATUS))["reports"] == []
        for number in range(130):
            assert peer.ask(Request.REPORT_BATCH, orjson.dumps({"batch": number, "ok": True})).code == codes.SUCCESS
        shown = told(peer.ask(Request.GET_STATUS))["reports"]
        assert [each["batch"] for each in shown] == list(range(110, 130))
        kept = served.call(lambda: served.dispatcher.pipelines.last_reports(1_000))
        assert [each["batch"] for each in kept] == list(range(30, 130))


def test_a_pipeline_that_is_started_again_tells_of_earlier_batches_and_each_is_shown_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for batch, seconds in ((1, 0.25), (2, 0.5), (1, 0.25), (2, 0.5), (3, 1.0)):
            peer.ask(Request.REPORT_BATCH, orjson.dumps({"epoch": 1, "batch": batch, "total_s": seconds}))
        assert [each["batch"] for each in told(peer.ask(Request.GET_STATUS))["reports"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the report of a batch"),
        (orjson.dumps({"a": {"b": 1}}), "the report of a batch has a = {'b': 1}, expected a text or a number"),
        (orjson.dumps({"a": "x" * 16_384}), "the report of a batch has 16392 bytes, the limit is 16384"),
    ],
)
def test_a_report_is_small_and_flat(tmp_path: Path, body: bytes, said: str) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        answer = peer.ask(Request.REPORT_BATCH, body)
        assert answer.code == codes.INVALID_PARAMETER
        assert said in (answer.remark or "")


def test_what_a_pipeline_waits_for_is_shown_until_it_goes_on_or_falls_silent(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:

        def heard() -> dict[str, Any]:
            found: dict[str, Any] = told(peer.ask(Request.GET_STATUS))["pipeline"]
            return found

        state(peer)  # anybody may ask for it
        assert heard() == {"at_ms": 0, "note": ""}
        told(peer.ask(Request.GET_BULK_STATE, note="waits for cores"))
        assert heard() == {"at_ms": T0, "note": "waits for cores"}
        served.pass_ms(20_001)
        assert heard() == {"at_ms": T0, "note": ""}
        told(peer.ask(Request.GET_BULK_STATE, note="waits for cores"))
        told(peer.ask(Request.GET_BULK_STATE, rowsMax=10, bytesMax=1))  # it plans a batch
        assert heard() == {"at_ms": T0 + 20_001, "note": ""}


def test_the_status_shows_all_at_a_glance(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent_far(peer, 3)
        sent(peer, "orders", TIMER_DELAY_MS=1_000)
        register(peer, table="s3://bucket/t")
        body = stage_body(1, (0, 2), (0, T0 + 2 * MINUTE_MS), rows_in=2)
        assert peer.ask(Request.STAGE, body).code == codes.SUCCESS
        parts = {"bulk": "runs (process 123)"}
        served.call(lambda: served.server.show_parts(parts))
        parts["pipeline"] = "starts"  # as it is when somebody asks
        status = told(peer.ask(Request.GET_STATUS))
        assert status["far"] == {
            "taken": 2, "length": 3, "backlog": 1, "horizon": T0 + 2 * MINUTE_MS, "epoch": 1, "is_served": True,
            "rescued": 0, "rows_in": 2, "rows_out": 0, "beside_rows": 0, "bulk_attached": False,
            "bulk_promoted": 0, "bulk_since_ms": 0, "bulk_problem": "", "bulk_problem_since_ms": 0,
        }  # fmt: skip
        assert (status["table"], status["parts"]) == ("s3://bucket/t", parts)
        broker = status["broker"]
        assert (broker["waiting_near"], broker["waiting_far"], broker["late_ms"]) == (1, 1, 0)
        assert (broker["now_ms"], broker["flush"], broker["tombstones"], broker["log_problem"]) == (T0, "sync", 0, "")
        assert broker["log_bytes"] > 0
        served.pass_ms(2 * MINUTE_MS)
        assert not told(peer.ask(Request.GET_STATUS))["far"]["is_served"]


def test_the_figures_tell_of_the_pipeline(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=DAY_MS) as served, connected(served) as peer:
        sent_far(peer, 3)
        register(peer)
        assert peer.ask(Request.STAGE, stage_body(1, (0, 2), (0, T0 + 2 * MINUTE_MS), rows_in=2)).code == codes.SUCCESS
        table = told(peer.ask(Request.GET_BROKER_RUNTIME_INFO))["table"]
        shown = {name.removeprefix("postdate_pipeline_"): value for name, value in table.items() if "pipeline" in name}
        assert shown == {
            "taken": "2", "backlog": "1", "horizon": str(T0 + 2 * MINUTE_MS), "epoch": "1", "rescued": "0",
            "bulk_promoted": "0", "serving": "true",
        }  # fmt: skip
