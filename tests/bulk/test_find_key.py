"""The broker's question about a key, answered by bulk from a table that batches have written."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import postdate
from postdate.bulk import process
from postdate.server.sessions.table import TableFound
from postdate.table.find import KeyFound, TableMessage
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
from tests.support.pipeline import BEGIN, World

HOUR = BEGIN + HOUR_MS


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def asked(world: World, key: str, by: str = "any", limit: int = 10) -> TableFound:
    numbers = world.served.call(lambda: world.broker.view.topic(TOPIC).numbers)
    found = world.served.begin(world.served.dispatcher.sessions.table.find_key(TOPIC, key, by, numbers, limit))
    answer = found.result(30)
    assert isinstance(answer, TableFound), answer
    return answer


def dues(found: TableFound) -> list[int]:
    return [(row.due_at_ms - BEGIN) // HOUR_MS for row in found.messages if not row.is_cancelled]


def test_a_key_is_found_in_the_table(world: World) -> None:
    try:
        world.send("a", [HOUR, HOUR + HOUR_MS, HOUR + HOUR_MS], keys=["one all", "two all", "three all"])
        world.batch()
        assert [dues(asked(world, key)) for key in ("one", "a-u1", "all")] == [[1], [2], [1, 2, 2]]
        assert dues(asked(world, "all", "unique")) == []
        assert (dues(asked(world, "all", limit=2)), asked(world, "all", limit=2).is_cut) == ([1, 2], True)
        world.cancel("a-u2", HOUR + HOUR_MS, "unique")
        world.move("a-u1", HOUR + 4 * HOUR_MS)
        assert dues(asked(world, "all")) == [1, 2, 2], "the table does not know it yet: the broker does"
        world.batch()
        assert dues(asked(world, "all")) == [1, 5]
        assert [row.due_at_ms for row in asked(world, "all").messages if row.is_cancelled] == [HOUR + HOUR_MS]
    finally:
        world.close()


def test_what_jobs_bring_and_take_counts_before_the_table_has_followed(world: World) -> None:
    try:
        world.send("a", [HOUR, HOUR + HOUR_MS], keys=["one all", "two all"])
        world.batch()
        world.decide_postponement("later", 2 * HOUR_MS)
        assert dues(asked(world, "all")) == [3, 4], "from the file beside the table"
        world.batch()
        assert dues(asked(world, "all")) == [3, 4]
        world.import_messages("nightly", [HOUR])
        assert dues(asked(world, "nightly-u0")) == [1]
        world.batch()
        assert dues(asked(world, "nightly-u0")) == [1]
    finally:
        world.close()


def test_an_answer_leaves_out_what_it_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FOUND_BYTES_MAX", 1_000)
    messages = [TableMessage(1, n, 3, b"x" * 400) for n in range(3)]
    whole = process._pack_found(KeyFound(messages[:2], False))
    assert (len(whole.body), whole.fields) == (
        len(b"[[1,0,3,400,0],[1,1,3,400,0]]\n") + 800,
        {"cut": "false", "rest": "false"},
    )
    assert process._pack_found(KeyFound(messages, False)) == (whole.body, {"cut": "false", "rest": "true"})
    assert process._pack_found(KeyFound(messages[:1], True)).fields == {"cut": "true", "rest": "false"}
    large = process._pack_found(KeyFound([TableMessage(1, 1, 3, b"x" * 2_000)], False))
    assert (len(large.body) > 2_000, large.fields) == (True, {"cut": "false", "rest": "false"}), "one in any case"


# -- what only the table has, through the client ------------------------------------------------------------------


@pytest.fixture
def client(world: World) -> Iterator[postdate.Client]:
    try:
        with postdate.connect(world.served.address, timeout=60) as made:
            yield made
    finally:
        world.close()


@pytest.mark.parametrize("padding", [0, 1_000])
def test_a_key_of_very_many_messages_in_the_table_is_moved_and_cancelled(
    world: World, client: postdate.Client, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of bulk has no room for all of the larger ones."""
    monkeypatch.setattr(process, "_FOUND_BYTES_MAX", 30_000)
    world.import_messages("n", [HOUR + n % 7 for n in range(150)], "one all", padding)
    world.batch()
    moved = client.postpone(topic=TOPIC, key="all", by="3h")
    assert [each.outcome for each in moved] == [postdate.Moved.MOVED] * 150
    assert sorted({each.due_at_ms or 0 for each in moved}) == [HOUR + 3 * HOUR_MS + n for n in range(7)]
    cancelled = client.cancel(topic=TOPIC, key="all")
    assert len({each.id for each in cancelled}) == 150
    assert {each.outcome for each in cancelled} == {postdate.Cancelled.CANCELLED}
    world.batch()
    assert dues(asked(world, "all")) == []
    again = client.cancel(topic=TOPIC, key="all")
    assert {each.id: each.outcome for each in again} == {each.id: each.outcome for each in cancelled}


def test_a_key_of_more_messages_in_the_table_than_may_be_changed_is_refused(
    world: World, client: postdate.Client
) -> None:
    world.import_messages("n", [HOUR] * 1_001, "all")
    world.batch()
    with pytest.raises(postdate.Refused, match="key_messages_max: more than 1000 messages"):
        client.cancel(topic=TOPIC, key="all")
    assert len(client.find(TOPIC, "all", limit=100)) == 64, "as many as a lookup gives"


@pytest.mark.parametrize("key", ["one", "two", "three", "n-u0"])
def test_each_key_of_what_only_the_table_has_leads_to_it(world: World, client: postdate.Client, key: str) -> None:
    world.import_messages("n", [HOUR], "one two three")
    world.batch()
    (found,) = client.find(TOPIC, key)
    assert (found.id, found.state, found.place, found.due_at_ms) == ("n-u0", "waiting", "table", HOUR)
    (moved,) = client.postpone(topic=TOPIC, key=key, by="1h")
    assert (moved.outcome, moved.due_at_ms) == (postdate.Moved.MOVED, HOUR + HOUR_MS)
    (cancelled,) = client.cancel(topic=TOPIC, key=key)
    assert cancelled == ("n-u0", postdate.Cancelled.CANCELLED, HOUR + HOUR_MS)
    world.batch()
    (gone,) = client.find(TOPIC, key)
    assert gone.state == "cancelled"


@pytest.mark.parametrize("key", ["one", "two", "three", "n-u0"])
@pytest.mark.parametrize("is_followed", [True, False])
def test_each_key_leads_to_what_has_come_from_the_table_into_the_wheel(
    world: World, client: postdate.Client, key: str, is_followed: bool
) -> None:
    world.import_messages("n", [HOUR], "one two three")
    if is_followed:
        world.batch()
        world.pass_minutes(59)
    else:  # bulk brings it from the file of the import
        world.pass_without_pipeline(59 * MINUTE_MS, MINUTE_MS)
    (found,) = client.find(TOPIC, key)
    assert (found.id, found.state, found.place, found.due_at_ms) == ("n-u0", "waiting", "wheel", HOUR)
    (cancelled,) = client.cancel(topic=TOPIC, key=key)
    assert cancelled == ("n-u0", postdate.Cancelled.CANCELLED, HOUR)
    world.pass_minutes(2)
    assert world.shown() == {}


@pytest.mark.parametrize("key", ["one", "two", "n-u0"])
def test_a_cancelled_message_that_only_the_table_has_stays_cancelled(
    world: World, client: postdate.Client, key: str
) -> None:
    """A client whose answer was lost asks again, and must not be told that there is no such message."""
    world.import_messages("n", [HOUR], "one two")
    world.batch()
    first = client.cancel(topic=TOPIC, key=key)
    assert first == [("n-u0", postdate.Cancelled.CANCELLED, HOUR)]
    for _ in range(2):  # before the table has read the cancel, and after it
        assert client.cancel(topic=TOPIC, key=key) == first
        (found,) = client.find(TOPIC, key)
        assert (found.id, found.state, found.place, found.due_at_ms) == ("n-u0", "cancelled", "", HOUR)
        assert client.postpone(topic=TOPIC, key=key, by="1h") == []
        world.batch()
    world.pass_minutes(59)
    assert client.cancel(topic=TOPIC, key=key) == first, "its minute is staged without it"
    world.pass_minutes(2)
    assert world.shown() == {}


def test_a_moved_message_of_the_table_is_not_told_as_cancelled_where_it_was(
    world: World, client: postdate.Client
) -> None:
    """Its first handle cancels it where it waits now, and leaves a cancel of its first due."""
    world.import_messages("n", [HOUR], "one")
    world.batch()
    (moved,) = client.postpone(topic=TOPIC, key="one", by="1h")
    world.batch()
    assert client.cancel(topic=TOPIC, key="one") == [("n-u0", postdate.Cancelled.CANCELLED, HOUR + HOUR_MS)]
    for _ in range(2):
        (found,) = client.find(TOPIC, "one")
        assert (found.state, found.due_at_ms) == ("cancelled", moved.due_at_ms)
        world.batch()


def test_cancelled_messages_of_a_key_do_not_keep_the_others_from_being_changed(
    world: World, client: postdate.Client
) -> None:
    world.import_messages("n", [HOUR] * 1_001, "all")
    world.batch()
    for number in range(1_001):
        world.cancel(f"n-u{number}", HOUR, "unique")
    world.batch()
    world.import_messages("m", [HOUR + HOUR_MS], "all")
    world.batch()
    assert ("m-u0", postdate.Cancelled.CANCELLED, HOUR + HOUR_MS) in client.cancel(topic=TOPIC, key="all")
    world.batch()
    assert dues(asked(world, "all")) == []
