"""Sent once: one message of each id is stored within the window of the id, and the second send gets its receipt."""

import dataclasses

import pytest

from postdate.broker.broker import Broker
from postdate.broker.moving import Source
from postdate.broker.once import FirstSend, SentBefore
from postdate.errors import FlowControl, IllegalMessage
from postdate.message import (
    PROPERTY_ONCE,
    PROPERTY_ONCE_MS,
    Cancelled,
    Message,
    MovedFrom,
    decode_properties,
    encode_properties,
)
from postdate.state.fold import WAITS
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    SECOND_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    bodies,
    cancel,
    message,
    pulled,
    segment_of_messages,
    send,
    snapshot,
)

WINDOW_MS = 72 * HOUR_MS
SHORT = dataclasses.replace(SMALL, once_window_ms=HOUR_MS)
KEEP_LITTLE = dataclasses.replace(SHORT, retention_ms=0)


def once(
    id: str = "order-42", body: str = "hello", unique: str = "U1", due: int | None = None, level: str = ""
) -> Message:
    return message(body, unique=unique, due=due, POSTDATE_ONCE=id, DELAY=level)


def first_of(broker: Broker, at_ms: int, second: Message) -> FirstSend:
    """What a second send is answered."""
    with pytest.raises(SentBefore) as caught:
        broker.send([second], at_ms)
    broker.flush()
    return caught.value.first


# ------------------------------------------------------------------------------------------------- the second send


def test_the_second_send_gets_the_receipt_of_the_first(data: Data) -> None:
    broker = data.open(queue_count=2)
    send(broker, T0, message("other"))
    ticket = send(broker, T0, once(unique="U1"))
    expected = FirstSend(TOPIC, 0, "U1", 0, ticket.offsets[0], 1)
    again = message("hello", unique="U2", queue_id=1, POSTDATE_ONCE="order-42")
    assert first_of(broker, T0 + 5, again) == expected
    assert bodies(broker) == ["other", "hello"]


@pytest.mark.parametrize("far", [False, True])
def test_a_message_that_waits_is_the_first(data: Data, far: bool) -> None:
    broker = data.open()
    due = T0 + (FAR_MS if far else SECOND_MS)
    ticket = send(broker, T0, once(unique="U1", due=due))
    expected = FirstSend(TOPIC, 0, "U1", due, ticket.offsets[0], WAITS)
    assert first_of(broker, T0 + 5, once(unique="U2")) == expected, "its own delay does not count"
    advance(broker, due)
    assert first_of(broker, due + 5, once(unique="U3")) == expected, "it is delivered"
    assert bodies(broker) == ["hello"]


def test_a_delay_level_means_what_it_meant_when_the_first_came(data: Data) -> None:
    broker = data.open()
    send(broker, T0, once(level="1"))
    data.crash(broker)
    broker = data.open(dataclasses.replace(SMALL, message_delay_level="7s"))
    assert first_of(broker, T0 + 5, once(level="1")).due_at_ms == T0 + SECOND_MS


def test_a_cancelled_message_stays_the_first(data: Data) -> None:
    broker = data.open()
    send(broker, T0, once(unique="U1", due=T0 + SECOND_MS))
    assert cancel(broker, "U1", T0 + SECOND_MS, T0) is Cancelled.CANCELLED
    assert first_of(broker, T0 + 5, once(unique="U2")).unique_key == "U1"
    advance(broker, T0 + DAY_MS)
    assert bodies(broker) == []


def test_a_second_send_waits_until_the_first_is_durable(data: Data) -> None:
    broker = data.open()
    ticket = broker.send([message("other"), once(unique="U1")], T0)
    with pytest.raises(SentBefore) as caught:
        broker.send([once(unique="U2")], T0)
    assert caught.value.ticket is ticket
    assert ticket.answers is None
    broker.flush()
    assert caught.value.first == FirstSend(TOPIC, 0, "U1", 0, ticket.offsets[1], 1)
    assert first_of(broker, T0, once(unique="U3")) == caught.value.first


def test_a_batch_that_is_refused_takes_no_id(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, wheel_entries_max=1))
    with pytest.raises(FlowControl, match="wheel_entries_max"):
        broker.send([once(due=T0 + 5), message(due=T0 + 5)], T0)
    send(broker, T0, once(body="another"))
    assert bodies(broker) == ["another"]


@pytest.mark.parametrize("is_applied", [False, True])
def test_another_body_under_an_id_is_refused(data: Data, is_applied: bool) -> None:
    broker = data.open()
    broker.send([once()], T0)
    if is_applied:
        broker.flush()
    said = (
        "once 'order-42': topic 'orders' has another body under this id since 2023-11-14T22:13:20.000+00:00; "
        "send the same body"
    )
    with pytest.raises(IllegalMessage, match=said.replace("+", r"\+")):
        broker.send([once(body="another")], T0)
    broker.flush()
    assert bodies(broker) == ["hello"]


def test_ids_of_other_topics_and_other_ids_are_others(data: Data) -> None:
    broker = data.open()
    broker.put_topic("mails", T0, read_queue_count=1, write_queue_count=1)
    send(broker, T0, once("a"), once("b"), once("A"), message("hello"), message("hello"))
    broker.send([message("x", topic="mails", POSTDATE_ONCE="a")], T0)
    broker.flush()
    assert len(bodies(broker)) == 5
    assert bodies(broker, "mails") == ["x"]


def test_equal_hashes_are_only_a_hint(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.broker.once.once_hash", lambda _name: 7)
    broker = data.open()
    data.damaged = True  # the hashes of its rows are no hashes
    send(broker, T0, once("a", unique="U1"))
    send(broker, T0, once("b", body="other", unique="U2"))
    assert first_of(broker, T0, once("a")).unique_key == "U1"
    assert first_of(broker, T0, once("b", body="other")).unique_key == "U2"


def test_a_deleted_topic_takes_its_ids_along(data: Data) -> None:
    broker = data.open()
    send(broker, T0, once(due=T0 + SECOND_MS))
    broker.delete_topic(TOPIC, T0)
    broker.put_topic(TOPIC, T0, read_queue_count=1, write_queue_count=1)
    send(broker, T0, once(body="another"))
    assert bodies(broker) == ["another"]
    with pytest.raises(IllegalMessage):
        broker.send([once()], T0)


def test_two_messages_of_one_batch_have_two_ids(data: Data) -> None:
    broker = data.open()
    with pytest.raises(IllegalMessage, match="two messages of a batch have one POSTDATE_ONCE"):
        broker.send([once(), once()], T0)
    assert broker.log.end == broker.log.durable, "nothing was written"


def test_many_messages_with_ids_in_one_batch(data: Data) -> None:
    """By columns, as large batches are applied: the same as one by one."""
    limits = dataclasses.replace(SMALL_LIMITS, rows_by_column=2)
    broker = data.open(limits=limits)
    dues = [None, T0 + SECOND_MS, None, T0 + FAR_MS]
    batch = [once(f"id{n}", unique=f"U{n}", due=due) for n, due in enumerate(dues)]
    ticket = send(broker, T0, message("x"), *batch)
    found = [first_of(broker, T0, once(f"id{n}")) for n in range(4)]
    assert [(each.due_at_ms, each.offset, each.queue_offset) for each in found] == [
        (due or 0, offset, answer)
        for due, offset, answer in zip(dues, ticket.offsets[1:], [1, WAITS, 2, WAITS], strict=True)
    ]


# ------------------------------------------------------------------------------------------------------ the window


def test_the_window_is_written_into_the_record(data: Data) -> None:
    broker = data.open()
    send(broker, T0, once())
    (record,) = pulled(broker)
    expected = {"UNIQ_KEY": "U1", PROPERTY_ONCE: "order-42", PROPERTY_ONCE_MS: str(WINDOW_MS)}
    assert decode_properties(record.properties) == expected
    data.crash(broker)
    broker = data.open(dataclasses.replace(SMALL, once_window_ms=SECOND_MS))
    assert first_of(broker, T0 + WINDOW_MS - 1, once()).offset == record.offset
    assert send(broker, T0 + WINDOW_MS, once()).answer == 1


@pytest.mark.parametrize("properties", [b"UNIQ_KEY\x01U1\x02POSTDATE_ONCE\x01a\x02", b"POSTDATE_ONCE\x01a"])
def test_properties_with_and_without_a_last_separator_get_the_window(data: Data, properties: bytes) -> None:
    broker = data.open()
    send(broker, T0, message("x")._replace(properties=properties))
    assert decode_properties(pulled(broker)[0].properties)[PROPERTY_ONCE_MS] == str(WINDOW_MS)


def test_after_the_window_the_id_is_free(data: Data) -> None:
    broker = data.open(SHORT)
    send(broker, T0, once(unique="U1"))
    assert first_of(broker, T0 + HOUR_MS - 1, once()).unique_key == "U1"
    send(broker, T0 + HOUR_MS, once(body="another", unique="U2"))
    assert first_of(broker, T0 + HOUR_MS, once(body="another")).unique_key == "U2"
    assert bodies(broker) == ["hello", "another"]


def test_a_window_that_changes_holds_for_what_comes_then(data: Data) -> None:
    broker = data.open(SHORT)
    send(broker, T0, once("a", unique="U1"))
    broker.change_settings({"once_window_ms": "1s"})
    send(broker, T0, once("b"))
    assert first_of(broker, T0 + SECOND_MS, once("a")).unique_key == "U1"
    assert send(broker, T0 + SECOND_MS, once("b")).answer == 2, "behind a longer window, and over nevertheless"


# --------------------------------------------------------------------------------------- restarts and the disk


@pytest.mark.parametrize("ending", ["crash", "close", "snapshot and crash"])
def test_ids_survive_a_restart(data: Data, ending: str) -> None:
    broker = data.open()
    for n in range(100):
        send(broker, T0 + n, once(f"id{n}", unique=f"U{n}", due=T0 + FAR_MS if n % 3 else None))
        if n == 70 and ending != "crash":
            snapshot(broker)
    before = [first_of(broker, T0 + 200, once(f"id{n}")) for n in range(100)]
    (data.close if ending == "close" else data.crash)(broker)
    broker = data.open()
    assert [first_of(broker, T0 + 200, once(f"id{n}")) for n in range(100)] == before
    assert [each.unique_key for each in before] == [f"U{n}" for n in range(100)]


def test_the_log_keeps_a_message_until_its_window_is_over(data: Data) -> None:
    broker = data.open(KEEP_LITTLE)
    send(broker, T0, once(unique="U1"))
    for n in range(3):
        segment_of_messages(broker, T0 + n, f"{n}.")
    for _ in range(2):
        send(broker, T0 + 10, message("x"))
        snapshot(broker)
    broker.retain(T0 + HOUR_MS - 1)
    assert 0 in broker.log.segment_numbers(), "another send may ask for its receipt"
    assert first_of(broker, T0 + HOUR_MS - 1, once()).unique_key == "U1"
    for _ in range(2):
        send(broker, T0 + HOUR_MS, message("x"))
        snapshot(broker)
    assert broker.fold.once.count == 0
    broker.retain(T0 + HOUR_MS + 1)
    assert 0 not in broker.log.segment_numbers()
    data.crash(broker)
    broker = data.open(KEEP_LITTLE)
    assert send(broker, T0 + HOUR_MS, once(body="another")).answers


def test_files_of_ids_leave_when_no_snapshot_needs_them(data: Data) -> None:
    broker = data.open(KEEP_LITTLE)
    for n in range(200):
        send(broker, T0, once(f"id{n}"))
    snapshot(broker)
    segment_of_messages(broker, T0 + 1, "a")
    files = data.disk.list("once")
    later = T0 + HOUR_MS
    for _ in range(10):
        send(broker, later, message("x"))
    snapshot(broker)
    broker.retain(later + 1)
    assert data.disk.list("once") == files, "the older snapshot has those ids"
    data.crash(broker)
    broker = data.open(KEEP_LITTLE)
    for _ in range(2):
        segment_of_messages(broker, later + 1, "b")
        snapshot(broker)
    broker.retain(later + 2)
    assert len(data.disk.list("once")) < len(files)
    data.close(broker)
    broker = data.open(KEEP_LITTLE)
    assert send(broker, later + 3, once("id0")).answers


def test_a_start_from_the_older_snapshot_forgets_again_what_was_over(data: Data) -> None:
    broker = data.open(KEEP_LITTLE)
    for n in range(80):
        send(broker, T0, once(f"id{n}"))
    snapshot(broker)
    segment_of_messages(broker, T0 + 1, "a")
    for _ in range(4):
        send(broker, T0 + HOUR_MS, message("x"))
    snapshot(broker)
    broker.retain(T0 + HOUR_MS + 1)
    held, position = dict(broker.fold.references.held), broker.fold.position
    data.crash(broker)
    newest = max(name for name in data.disk.list("snapshots"))
    data.disk.remove(f"snapshots/{newest}")
    broker = data.open(KEEP_LITTLE)
    assert (broker.fold.references.held, broker.fold.position) == (held, position)
    assert broker.fold.once.count == 0


# ------------------------------------------------------------------------------------------------------- bounds


def test_too_many_ids_are_refused_with_the_limits_name(data: Data) -> None:
    broker = data.open(dataclasses.replace(SHORT, once_ids_max=3))
    send(broker, T0, once("a"))
    broker.send([once("b")], T0)
    with pytest.raises(FlowControl, match="once_ids_max: 1 ids are within their window, the limit is 3"):
        broker.send([once("c"), once("d")], T0)
    send(broker, T0 + 5, once("c"))
    with pytest.raises(FlowControl, match="once_ids_max: 3 ids are within"):
        broker.send([once("d")], T0 + HOUR_MS - 1)
    assert first_of(broker, T0 + HOUR_MS - 1, once("a")), "a second send needs no room"
    send(broker, T0 + HOUR_MS - 1, message("without one"))
    send(broker, T0 + HOUR_MS, once("d"), once("e"))
    assert broker.fold.once.count == 3
    with pytest.raises(FlowControl):
        broker.send([once("f")], T0 + HOUR_MS)


def test_a_lower_limit_than_ids_are_there_lets_no_more_in(data: Data) -> None:
    broker = data.open(SHORT)
    send(broker, T0, *[once(f"id{n}") for n in range(40)])
    data.close(broker)
    broker = data.open(dataclasses.replace(SHORT, once_ids_max=3))
    with pytest.raises(FlowControl):
        broker.send([once("more")], T0)
    assert first_of(broker, T0, once("id39"))


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"POSTDATE_ONCE": "x" * 1_025}, "key_characters_max: POSTDATE_ONCE has 1025 characters, the limit is 1024"),
        ({"POSTDATE_ONCE": "a", "POSTDATE_ONCE_MS": "5"}, "property POSTDATE_ONCE_MS = '5' is internal to the broker"),
        ({"POSTDATE_ONCE_MS": "5"}, "property POSTDATE_ONCE_MS = '5' is internal to the broker"),
        ({"POSTDATE_ONCE": "a", "x": "y" * 32_730}, "with POSTDATE_ONCE_MS, which the broker adds, the limit is 32767"),
        ({"POSTDATE_ONCE": "a", "TIMER_DEL_UNIQKEY": "k"}, "marks a cancel, not a message"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent_once_is_refused(data: Data, properties: dict[str, str], said: str) -> None:
    broker = data.open()
    with pytest.raises(IllegalMessage, match=said):
        broker.send([Message(TOPIC, b"x", encode_properties(properties))], T0)
    assert not broker.fold.once.count


# --------------------------------------------------------------------------------------------------------- moves


@pytest.mark.parametrize("far", [False, True])
def test_a_message_that_is_moved_stays_the_first_of_its_id(data: Data, far: bool) -> None:
    broker = data.open()
    due = T0 + (FAR_MS if far else SECOND_MS)
    ticket = send(broker, T0, once(unique="U1", due=due))
    (arrival,) = ticket.offsets
    record = broker.read_record(arrival)
    moved = broker.moves.move([Source(record, MovedFrom(due, arrival, is_near=not far), T0 + 2 * SECOND_MS)], T0)
    broker.flush()
    assert moved.answer is True
    assert broker.fold.once.count == 1
    assert first_of(broker, T0, once()) == FirstSend(TOPIC, 0, "U1", due, arrival, WAITS)
    advance(broker, T0 + 2 * SECOND_MS)
    assert bodies(broker) == ["hello"]
    assert first_of(broker, T0 + DAY_MS, once()).offset == arrival
