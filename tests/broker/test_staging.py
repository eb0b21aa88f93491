"""Staging: a pipeline that lives, lags, repeats itself or dies."""

import dataclasses

import pytest

from postdate.arrival import own_arrival
from postdate.broker.broker import Broker
from postdate.contract import Stage
from postdate.errors import CorruptChunk, Refused, UsageError
from postdate.message import Cancelled, Message
from postdate.state import saved
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    LEAD_MS,
    MINUTE_MS,
    SECOND_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    cancel,
    message,
    pulled,
    registered,
    send,
    settled,
    stage,
    upload,
    waiting_count,
    write_chunk,
)


def far_pair(data: Data) -> tuple[Broker, int, list[Message]]:
    """A broker with two far messages, of which the pipeline has taken none, and the pipeline's epoch."""
    broker = data.open()
    messages = [message(str(n), unique=f"k{n}", due=T0 + FAR_MS + n) for n in range(2)]
    send(broker, T0, *messages)
    epoch = registered(broker)
    return broker, epoch, messages


def test_a_staged_message_is_delivered_on_time_once(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    stage(broker, epoch, 2, T0)
    advance_to(broker, T0, T0 + 5 * MINUTE_MS)
    assert broker.fold.wheel.count == 0, "what the pipeline has taken is not rescued while it lives"
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, T0 + FAR_MS + 1, ["c1"], T0 + 5 * MINUTE_MS)
    advance_to(broker, T0 + 5 * MINUTE_MS, T0 + FAR_MS)
    assert bodies(broker) == ["0"]
    advance_to(broker, T0 + FAR_MS, T0 + DAY_MS)
    assert bodies(broker) == ["0", "1"]
    assert [record.stored_at_ms for record in pulled(broker)] == [T0 + FAR_MS, T0 + FAR_MS + 1]
    assert (broker.fold.references.held, waiting_count(broker)) == ({}, 0)


def test_the_far_queue_shows_the_pipeline_durable_rows_alone(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    broker.send([message(due=T0 + FAR_MS)], T0)
    assert broker.fold.far.length == 1
    assert len(broker.view.read_far(0, 10)) == 0
    broker.flush()
    assert broker.view.read_far(0, 10)["due"].tolist() == [T0 + FAR_MS]
    assert len(broker.view.read_far(1, 10)) == 0
    with pytest.raises(UsageError, match="far rows from -1 and 10 of them: the first that is there is 0"):
        broker.view.read_far(-1, 10)


def test_stages_that_are_stale_repeated_or_overtaken_are_refused_by_name(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    stage(broker, epoch, 1, T0 + 100)
    end, state = broker.log.end, saved.state_json(broker.fold)
    for far, horizon, said in [
        ((0, 1), (0, T0 + 100), "it starts at far 0 and horizon 0, the broker is at far 1"),
        ((1, 2), (0, T0 + 200), "it starts at far 1 and horizon 0"),
        ((1, 3), (T0 + 100, T0 + 200), "it ends at far 3.*the far queue has 2 rows"),
        ((1, 0), (T0 + 100, T0 + 200), "it ends at far 0"),
        ((1, 2), (T0 + 100, T0 + 99), "it ends at far 2 and horizon"),
    ]:
        with pytest.raises(Refused, match=said):
            broker.stage(Stage(epoch, far, horizon, (), 0, 0), T0)
    with pytest.raises(Refused, match="epoch 0 is not the current one"):
        broker.stage(Stage(0, (1, 2), (T0 + 100, T0 + 200), (), 0, 0), T0)
    assert (broker.log.end, saved.state_json(broker.fold)) == (end, state)
    assert registered(broker) == epoch + 1
    with pytest.raises(Refused, match="another pipeline has registered"):
        stage(broker, epoch, 2, T0 + 200)
    stage(broker, epoch + 1, 2, T0 + 200)
    assert (broker.fold.far.taken, broker.fold.far.horizon_at_ms) == (2, T0 + 200)


@pytest.mark.parametrize(("count", "stored"), [(3, 0), (4, 4), (6, 4)])
@pytest.mark.parametrize("is_rescued", [False, True])
def test_rows_that_were_counted_aside_are_taken_once(data: Data, count: int, stored: int, is_rescued: bool) -> None:
    """Some in files, some in memory; and a rescue between the count and the stage makes the count worthless."""
    broker = data.open()
    send(broker, T0, *(message(str(n), due=T0 + FAR_MS + n) for n in range(count)))
    wanted = Stage(registered(broker), (0, count), (0, T0), (), count, 0)
    verified = broker.staging.verify(wanted)
    assert verified.tally is not None
    assert (verified.tally.stop, sum(verified.tally.queues.values())) == (stored, stored)
    if is_rescued:
        advance_to(broker, T0, T0 + FAR_MS - 1)
    broker.staging.write(wanted, verified, T0 + FAR_MS - 1)
    broker.flush()
    assert (broker.fold.far.taken, sum(broker.fold.untaken)) == (count, 0)
    assert sum(broker.fold.references.held.values()) == broker.fold.wheel.count == count * is_rescued


def test_a_count_that_retention_has_overtaken_is_not_used(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    broker.fold.far.rows.spill()
    (data.folder / "far" / f"{0:020d}").rename(data.folder / "aside")
    assert broker.staging.verify(Stage(epoch, (0, 2), (0, T0), (), 2, 0)).tally is None
    (data.folder / "aside").rename(data.folder / "far" / f"{0:020d}")
    stage(broker, epoch, 2, T0)
    assert (sum(broker.fold.untaken), broker.fold.references.held) == (0, {})


def test_a_chunk_that_is_not_whole_is_refused(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    upload(broker, data, "good", messages, [0, 1])
    whole = (data.folder / "chunks" / "good").read_bytes()
    end = broker.log.end
    for position in (0, 8, 60, 64, 100, len(whole) - 1):
        (data.folder / "chunks" / "bad").write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        with pytest.raises(CorruptChunk, match="chunks/bad"):
            stage(broker, epoch, 2, T0 + HOUR_MS, ["bad"])
    (data.folder / "chunks" / "bad").write_bytes(whole[:-1])
    for name in ("bad", "missing"):
        with pytest.raises(CorruptChunk, match=f"chunks/{name}"):
            stage(broker, epoch, 2, T0 + HOUR_MS, [name])
    with pytest.raises(CorruptChunk, match="after the horizon"):
        stage(broker, epoch, 2, T0 + FAR_MS, ["good"])
    for name in ("", "../FORMAT", ".hidden"):
        with pytest.raises(UsageError, match="no file name"):
            stage(broker, epoch, 2, T0 + HOUR_MS, [name])
    write_chunk(data.disk, "strange", [(T0 + FAR_MS, 1, 99, messages[0])])
    with pytest.raises(CorruptChunk, match="queue number 99"):
        stage(broker, epoch, 2, T0 + HOUR_MS, ["strange"])
    assert broker.log.end == end
    stage(broker, epoch, 2, T0 + HOUR_MS, ["good"])


def test_a_chunk_that_is_named_twice_or_was_staged_before_is_refused(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    upload(broker, data, "c1", messages[:1], [0])
    upload(broker, data, "c2", messages[1:], [1])
    end = broker.log.end
    with pytest.raises(Refused, match="chunk c1 is staged already, or named twice"):
        stage(broker, epoch, 2, T0 + HOUR_MS, ["c1", "c2", "c1"])
    assert (broker.log.end, broker.fold.far.taken) == (end, 0)
    stage(broker, epoch, 1, T0 + FAR_MS, ["c1"])
    for again in (["c1"], ["c2", "c1"]):
        with pytest.raises(Refused, match="chunk c1 is staged already, or named twice"):
            stage(broker, epoch, 2, T0 + HOUR_MS, again)
    data.crash(broker)
    broker = data.open()
    with pytest.raises(Refused, match="chunk c1 is staged already"):
        stage(broker, epoch, 2, T0 + HOUR_MS, ["c1"])
    stage(broker, epoch, 2, T0 + HOUR_MS, ["c2"])
    advance_to(broker, T0, T0 + HOUR_MS)
    assert bodies(broker) == ["0", "1"]


def test_a_cancelled_message_that_a_chunk_brings_never_comes(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    assert cancel(broker, "k0", T0 + FAR_MS, T0 + 1) == Cancelled.CANCELLED
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, T0 + HOUR_MS, ["c1"])
    assert cancel(broker, "k1", T0 + FAR_MS + 1, T0 + 2) == Cancelled.CANCELLED
    assert cancel(broker, "k1", T0 + FAR_MS + 1, T0 + 2) == Cancelled.CANCELLED
    advance_to(broker, T0 + 2, T0 + DAY_MS)
    assert bodies(broker) == []
    assert waiting_count(broker) == 0


def test_a_cancel_of_what_only_the_table_knows_is_unknown_and_still_works(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    stage(broker, epoch, 2, T0)
    assert cancel(broker, "k0", T0 + FAR_MS, T0 + 1) == Cancelled.UNKNOWN
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, T0 + HOUR_MS, ["c1"])
    advance_to(broker, T0 + 1, T0 + HOUR_MS)
    assert bodies(broker) == ["1"]


def test_a_cancelled_message_never_comes_even_if_the_pipeline_takes_it_late(data: Data) -> None:
    """The pipeline lags: it has taken the message, not yet the cancel, when the due instant passes."""
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    assert cancel(broker, "k0", due, T0 + 1) == Cancelled.CANCELLED
    stage(broker, epoch, 2, T0 + 1)
    advance_to(broker, T0 + 1, due + MINUTE_MS)
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, due + 1, ["c1"], due + MINUTE_MS)
    advance_to(broker, due + MINUTE_MS, due + HOUR_MS)
    assert bodies(broker) == ["1"]


def test_what_a_rescue_fired_is_not_fired_again_by_a_stage(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    upload(broker, data, "c1", messages, [0, 1])
    advance_to(broker, T0, due)
    assert bodies(broker) == ["0"], "untaken messages are rescued while the pipeline lives"
    stage(broker, epoch, 2, due + 1, ["c1"], due)
    advance_to(broker, due, due + HOUR_MS)
    assert bodies(broker) == ["0", "1"]
    assert (broker.fold.references.held, waiting_count(broker)) == ({}, 0)


def test_a_cancel_between_rescue_and_stage_removes_both(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    upload(broker, data, "c1", messages, [0, 1])
    advance_to(broker, T0, due - 100)
    stage(broker, epoch, 2, due + 1, ["c1"], due - 100)
    assert cancel(broker, "k0", due, due - 50) == Cancelled.CANCELLED
    advance_to(broker, due - 50, due + HOUR_MS)
    assert bodies(broker) == ["1"]


def test_a_dead_pipelines_messages_are_rescued_from_the_log_and_fire_once(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    stage(broker, epoch, 2, T0)
    advance_to(broker, T0, due + 1)
    assert bodies(broker) == ["0", "1"]

    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, registered(broker, due + 1), 2, due + 1, ["c1"], due + 1)
    advance_to(broker, due + 1, due + HOUR_MS)
    assert bodies(broker) == ["0", "1"]
    assert (broker.fold.references.held, waiting_count(broker)) == ({}, 0)


def test_a_cancel_that_the_pipeline_took_along_holds_when_the_pipeline_dies(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    due = T0 + FAR_MS
    assert cancel(broker, "k0", due, T0 + 1) == Cancelled.CANCELLED
    stage(broker, epoch, 3, T0 + 1)
    advance_to(broker, T0 + 1, due + DAY_MS)
    assert bodies(broker) == ["1"]


@pytest.mark.parametrize("by", ["unique", "key"])
def test_a_rescue_honours_the_taken_cancel_of_its_own_topic_key_and_due_alone(data: Data, by: str) -> None:
    broker = data.open()
    broker.put_topic("second", T0)
    due = T0 + FAR_MS
    unique, keys = ("k", "") if by == "unique" else ("", "k other")
    send(
        broker,
        T0,
        message("cancelled", due=due, unique=unique, keys=keys),
        message("other due", due=due + 1, unique=unique, keys=keys),
    )
    send(
        broker,
        T0,
        message("other topic", topic="second", due=due, unique=unique, keys=keys),
        message("other key", due=due, unique="x"),
    )
    assert cancel(broker, "k", due, T0 + 1, by) == Cancelled.CANCELLED
    send(broker, T0 + 2, message("key used again", due=due, unique=unique, keys=keys))
    epoch = registered(broker)
    stage(broker, epoch, broker.fold.far.length, T0 + 3)
    assert broker.fold.cancels.count == 0, "the table carries the cancel from now on"
    data.crash(broker)
    broker = data.open()
    advance_to(broker, T0 + 3, due + DAY_MS)
    assert bodies(broker) == ["other key", "key used again", "other due"]
    assert bodies(broker, "second") == ["other topic"]
    assert (broker.fold.references.held, waiting_count(broker)) == ({}, 0)


def test_a_restart_after_a_rescue_of_taken_messages_finds_the_same(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    stage(broker, epoch, 2, T0)
    advance(broker, T0 + FAR_MS - LEAD_MS)
    assert broker.fold.wheel.count == 2
    state = saved.state_json(broker.fold)
    data.crash(broker)
    broker = data.open()
    assert saved.state_json(broker.fold) == state
    advance_to(broker, T0 + FAR_MS - LEAD_MS, T0 + HOUR_MS)
    assert bodies(broker) == ["0", "1"]


def test_imported_rows_fire_though_a_rescue_covers_their_arrival(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    advance_to(broker, T0, due - 1)
    arrival = int(broker.view.read_far(0, 1)["arrival"][0])
    write_chunk(
        data.disk, "imported", [(due, arrival, int(broker.view.read_far(0, 1)["queue"][0]), messages[0])], flags=1
    )
    stage(broker, epoch, 2, due + 1, ["imported"], due - 1)
    advance(broker, due)
    assert bodies(broker) == ["0", "0"]


def test_a_burst_in_several_chunks_comes_in_order_of_arrival(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    messages = [message(f"{n:02d}", due=due) for n in range(30)]
    send(broker, T0, *messages)
    epoch = registered(broker)
    upload(broker, data, "odd", messages[1::2], list(range(1, 30, 2)))
    upload(broker, data, "even", messages[::2], list(range(0, 30, 2)))
    stage(broker, epoch, 30, due, ["odd", "even"])
    send(broker, T0 + 1, message("single", due=due))
    advance(broker, due)
    assert bodies(broker) == [f"{n:02d}" for n in range(30)] + ["single"]


# -- who is served ----------------------------------------------------------------------------------------------


RESCUE_LEAD_MS = LEAD_MS // 2


def test_a_pipeline_serves_while_its_horizon_is_far_enough_ahead(data: Data) -> None:
    broker = data.open()
    assert not broker.rescuer.is_served(T0), "there is none"
    epoch = registered(broker)
    assert not broker.rescuer.is_served(T0), "it has done nothing yet"
    stage(broker, epoch, 0, T0 + 2 * MINUTE_MS)
    last = T0 + 2 * MINUTE_MS - RESCUE_LEAD_MS
    assert broker.rescuer.is_served(last)
    assert not broker.rescuer.is_served(last + 1)
    stage(broker, epoch, 0, T0 + 3 * MINUTE_MS)
    assert broker.rescuer.is_served(last + MINUTE_MS)
    registered(broker)
    assert broker.rescuer.is_served(last + MINUTE_MS), "what the old one has staged is as good as before"


def minutes(broker: Broker, epoch: int, start: int, count: int) -> None:
    """A pipeline in normal life: at each whole minute it takes all and promotes up to the next minute but one. What it
    takes is due later than all of this.
    """
    for at_ms in range(start, start + count * MINUTE_MS, MINUTE_MS):
        advance_to(broker, at_ms - MINUTE_MS, at_ms)
        stage(broker, epoch, broker.fold.far.length, at_ms + 2 * MINUTE_MS, [], at_ms)


def test_in_normal_life_nothing_is_rescued(data: Data) -> None:
    broker = data.open()
    epoch = registered(broker)
    start = T0 // MINUTE_MS * MINUTE_MS
    minutes(broker, epoch, start, 3)
    for number in range(3):
        at_ms = start + (number + 2) * MINUTE_MS
        # The earliest due that is still far, right after a batch: it waits a whole minute to be taken.
        send(broker, at_ms + 1, message(str(number), due=broker.fold.far.horizon_at_ms + 1))
        assert broker.fold.far.length == number + 1
        advance_to(broker, at_ms + 1, at_ms + MINUTE_MS + RESCUE_LEAD_MS)  # half a minute late
        stage(broker, epoch, number + 1, at_ms + 3 * MINUTE_MS, [], at_ms + MINUTE_MS + RESCUE_LEAD_MS)
        assert broker.rescuer.rescued_count == 0


def test_what_a_serving_pipeline_has_not_taken_is_rescued_before_it_is_late(data: Data) -> None:
    """It promotes in time and lags with taking: a backlog."""
    broker, epoch, _ = far_pair(data)
    due = T0 + FAR_MS
    stage(broker, epoch, 1, due + HOUR_MS)
    advance_to(broker, T0, due + 1 - RESCUE_LEAD_MS - 1)
    assert broker.rescuer.rescued_count == 0
    assert broker.wake_at_ms == due + 1 - RESCUE_LEAD_MS
    advance(broker, due + 1 - RESCUE_LEAD_MS)
    assert broker.rescuer.rescued_count == 1
    advance_to(broker, due, due + 1)
    assert bodies(broker) == ["1"], "the other one was taken: the pipeline has said that it promoted it"


def test_a_pipeline_that_does_nothing_more_is_noticed_at_the_instant_when_it_is_late(data: Data) -> None:
    """Dead, hanging, lagging: it is one case. All that it has taken and not staged comes out of the log."""
    broker, epoch, _ = far_pair(data)
    due = T0 + FAR_MS
    horizon = due - 10 * SECOND_MS
    late_at_ms = horizon - RESCUE_LEAD_MS + 1
    stage(broker, epoch, 2, horizon)
    assert broker.wake_at_ms == late_at_ms
    advance_to(broker, T0, late_at_ms - 1)
    assert (broker.rescuer.rescued_count, broker.rescuer.is_served(late_at_ms - 1)) == (0, True)
    advance(broker, late_at_ms)
    assert (broker.rescuer.rescued_count, broker.rescuer.is_served(late_at_ms)) == (2, False)
    advance_to(broker, late_at_ms, due + 1)
    assert bodies(broker) == ["0", "1"]
    assert [record.stored_at_ms for record in pulled(broker)] == [due, due + 1]


def test_a_pipeline_that_comes_back_in_time_leaves_nothing_to_rescue(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    stage(broker, epoch, 2, T0 + 2 * MINUTE_MS)
    advance_to(broker, T0, due - LEAD_MS - 1)
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, registered(broker), 2, due + 1, ["c1"], due - LEAD_MS - 1)
    advance_to(broker, due - LEAD_MS - 1, due + MINUTE_MS)
    assert (bodies(broker), broker.rescuer.rescued_count) == (["0", "1"], 0)


def test_the_rescue_lead_is_a_limit_below_the_lead(data: Data) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, rescue_lead_ms=5_000))
    stage(broker, registered(broker), 0, T0 + MINUTE_MS)
    assert broker.rescuer.is_served(T0 + MINUTE_MS - 5_000)
    data.close(broker)
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, rescue_lead_ms=10_000))
    assert not broker.rescuer.is_served(T0 + MINUTE_MS - 5_000)
    data.close(broker)
    with pytest.raises(UsageError, match=r"rescue_lead_ms is 60000, not less than lead_ms \(60000\)"):
        data.open(limits=dataclasses.replace(SMALL_LIMITS, rescue_lead_ms=60_000))


# -- what the table must hold -----------------------------------------------------------------------------------


def test_the_rows_of_the_table_are_counted_and_do_not_go_down(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    broker.stage(Stage(epoch, (0, 1), (0, T0), (), 1, 0), T0)
    broker.stage(Stage(epoch, (1, 2), (T0, T0 + 1), (), 7, 2), T0)
    broker.stage(Stage(epoch, (2, 2), (T0 + 1, T0 + 2), (), 7, 3), T0)
    for rows_in, rows_out in ((6, 0), (7, -1)):
        with pytest.raises(Refused, match=f"rows_in is {rows_in} and rows_out {rows_out}: 7 rows came"):
            broker.stage(Stage(epoch, (2, 2), (T0 + 2, T0 + 3), (), rows_in, rows_out), T0)
    for reopen in (data.crash, data.close):
        assert (broker.fold.far.rows_in, broker.fold.far.rows_out) == (7, 5)
        reopen(broker)
        broker = data.open()


def test_a_snapshot_of_an_earlier_version_knows_no_table(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    stage(broker, epoch, 2, T0)
    state = broker.fold.far.state()
    for name in ("table", "rows_in", "rows_out"):
        del state[name]
    broker.fold.far.load(state)
    assert (broker.fold.far.table, broker.fold.far.rows_in, broker.fold.far.rows_out) == ("", 0, 0)


def test_rows_that_bulk_brings_come_once_whoever_brings_them_again(data: Data) -> None:
    broker = data.open()
    epoch, due = registered(broker), T0 + FAR_MS
    settled(broker, broker.jobs.begin("import", TOPIC, T0))
    settled(broker, broker.jobs.adopt("import", [["_import-1.parquet", 1, 1, due, due, 1, 1]], 0, T0))
    queue = broker.fold.topics.get(TOPIC).numbers[0]
    rows = [(due, own_arrival(0), queue, message("imported", due=due))]
    for name in ("c1", "c2", "c3"):
        write_chunk(data.disk, name, rows)
    brought = Stage(epoch, (0, 0), (0, due), ("c1",), 0, 0, ((0, -1, due),))
    broker.stage(brought, T0)
    with pytest.raises(Refused, match="it starts at far 0 and horizon 0"):
        broker.stage(brought._replace(chunks=("c2",)), T0)
    again = brought._replace(chunks=("c2",), horizon=(due, due))
    with pytest.raises(Refused, match=f"brought up to {due}"):
        broker.stage(again, T0)
    data.close(broker)
    broker = data.open()
    assert broker.view.find_job("import") == dataclasses.replace(broker.fold.jobs.all()[0], brought_until_ms=due)
    stage(broker, epoch, 1, due, ["c3"])  # the pipeline has taken it in
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == ["imported"]
    with pytest.raises(Refused, match="job 0 brings no messages: it is done"):
        broker.stage(again._replace(far=(1, 1), brought=((0, due, due),)), T0 + DAY_MS)
