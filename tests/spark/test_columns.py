"""Columns as rows of the table: records like those of a send, due times in every form, and why a row is bad."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from postdate.arrival import PART_ROWS_MAX, PARTS_MAX, job_of, own_arrival
from postdate.errors import UsageError
from postdate.keys import key_hash
from postdate.message import decode_properties, tag_hash
from postdate.spark.imports import columns
from postdate.spark.imports.columns import PROPERTIES, Converter, Faults, Job, Wanted
from postdate.spark.imports.options import fitted, named_columns, wanted_of
from postdate.storage import record as records
from postdate.table.format import SCHEMA
from tests.support.core import DAY_MS, HOUR_MS, T0, TOPIC, Data, message, send

DUE = T0 + HOUR_MS
JOB = Job("campaign-7", 3, TOPIC, ((0, 11), (1, 12)), T0, 365 * DAY_MS)
ALL = Wanted("due", "body", "key", "tag", "properties", unit="ms")


def instant(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1_000, UTC)


def batch(**given: Any) -> pa.RecordBatch:
    """Two rows, unless told otherwise."""
    usual = {
        "due": [DUE, DUE + 1],
        "body": [b"one", b"two"],
        "key": ["k1 other", None],
        "tag": ["a", None],
        "properties": pa.array([[("region", "north"), ("shop", "7")], None], PROPERTIES),
    }
    return pa.RecordBatch.from_pydict(usual | given)


def converted(rows: pa.RecordBatch, wanted: Wanted = ALL, job: Job = JOB, part: int = 0) -> tuple[pa.Table, Faults]:
    faults: Faults = {}
    return Converter(wanted, job, part).rows(rows, faults), faults


def dues(column: pa.Array, **wishes: Any) -> tuple[list[int | None], Faults]:
    faults: Faults = {}
    return columns.due_ms(column, Wanted("due", "body", **wishes), faults).to_pylist(), faults


# -- records ----------------------------------------------------------------------------------------------------


def test_a_record_is_like_that_of_a_send(data: Data) -> None:
    broker = data.open()
    broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2)
    rows, faults = converted(batch())
    assert not faults
    made = records.decode(rows["record"][0].as_py())
    unique = decode_properties(made.properties)["UNIQ_KEY"]
    sent = message("one", due=DUE, unique=unique, keys="k1 other", tag="a", region="north", shop="7")
    ticket = send(broker, T0, sent._replace(born_at_ms=T0))
    stored = records.decode(bytes(broker.log.read(ticket.offsets[0], made.size)))
    assert decode_properties(made.properties) == decode_properties(stored.properties)
    unlike: dict[str, Any] = {
        "offset": 0,
        "store_host": None,
        "properties": b"",
    }  # where it lies is known when it is promoted
    assert made._replace(**unlike) == stored._replace(**unlike)


def test_columns_beside_the_record_are_as_the_log_would_have_them() -> None:
    rows, _ = converted(batch(), part=5)
    assert rows.schema == SCHEMA
    first, second = rows.to_pylist()
    properties = [records.properties_of(row["record"]) for row in (first, second)]
    assert (first["due"], first["kind"], first["topic"], first["level"], first["flags"]) == (DUE, 1, TOPIC, 0, 1)
    assert [row["arrival"] for row in (first, second)] == [own_arrival(3, 5, 0), own_arrival(3, 5, 1)]
    assert job_of(first["arrival"]) == 3
    assert (first["key"], first["tag"], second["key"], second["tag"]) == ("k1 other", "a", None, None)
    assert first["key_hash"] % 2**64 == key_hash("k1")
    assert (first["tag_hash"], second["tag_hash"], second["key_hash"]) == (tag_hash("a"), 0, 0)
    for row, own in zip((first, second), properties, strict=True):
        assert row["unique_hash"] % 2**64 == key_hash(own["UNIQ_KEY"])
        assert row["size"] == len(row["record"])
        assert own["TIMER_DELIVER_MS"] == str(row["due"])
    assert properties[0]["UNIQ_KEY"] != properties[1]["UNIQ_KEY"]
    assert set(properties[1]) == {"UNIQ_KEY", "TIMER_DELIVER_MS"}


def test_a_key_without_spaces_has_the_hash_that_a_send_gives_it() -> None:
    rows, _ = converted(batch(key=["köln", ""]))
    assert rows["key_hash"].to_pylist()[0] % 2**64 == key_hash("köln")
    assert rows["key"].to_pylist() == ["köln", None]


def test_the_same_import_has_the_same_unique_keys_and_another_has_others() -> None:
    def unique(job: Job, part: int = 0) -> str:
        return records.properties_of(converted(batch(), job=job, part=part)[0]["record"][0].as_py())["UNIQ_KEY"]

    assert unique(JOB) == unique(JOB)
    assert len({unique(JOB), unique(JOB, 1), unique(JOB._replace(id="other")), unique(JOB._replace(number=4))}) == 4


def test_queues_are_taken_in_turn_or_by_key() -> None:
    many = batch(due=[DUE] * 6, body=[b""] * 6, key=["a", "b", "a", "b", "a", None], tag=[None] * 6,
                 properties=pa.nulls(6, PROPERTIES))  # fmt: skip
    rows, _ = converted(many)
    assert rows["queue"].to_pylist() == [11, 12] * 3
    assert [records.decode(each).queue_id for each in rows["record"].to_pylist()] == [0, 1] * 3
    by_key, _ = converted(many, ALL._replace(queue="key"))
    queues = by_key["queue"].to_pylist()
    assert queues[0] == queues[2] == queues[4] == [11, 12][key_hash("a") % 2]
    assert queues[1] == queues[3] == [11, 12][key_hash("b") % 2]


def test_rows_count_on_from_batch_to_batch_and_bad_ones_count_too() -> None:
    converter = Converter(ALL, JOB, 0)
    converter.rows(batch(body=[None, b"x"]), {})
    assert converter.rows(batch(), {})["arrival"].to_pylist() == [own_arrival(3, 0, 2), own_arrival(3, 0, 3)]


def test_parts_and_rows_that_an_arrival_has_no_room_for_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 32,768 partitions"):
        Converter(ALL, JOB, PARTS_MAX)
    converter = Converter(ALL, JOB, 0)
    converter._row = PART_ROWS_MAX - 1
    with pytest.raises(UsageError, match="more than 67,108,864 rows"):
        converter.rows(batch(), {})


def test_properties_may_be_maps_json_or_columns_of_their_own() -> None:
    def own(wanted: Wanted, rows: pa.RecordBatch) -> list[dict[str, str]]:
        found, faults = converted(rows, wanted)
        assert not faults
        all_of = [records.properties_of(each) for each in found["record"].to_pylist()]
        return [{name: value for name, value in each.items() if name in ("region", "shop")} for each in all_of]

    expected = [{"region": "north", "shop": "7"}, {}]
    assert own(ALL, batch()) == expected
    assert own(ALL, batch(properties=['{"region": "north", "shop": "7"}', None])) == expected
    named = ALL._replace(properties="", named=(("region", "area"), ("shop", "id")))
    assert own(named, batch(area=["north", None], id=["7", None])) == expected
    values = pa.array([[("region", "north"), ("shop", None)], []], PROPERTIES)
    assert own(ALL, batch(properties=values)) == [{"region": "north"}, {}]


def test_a_batch_that_is_a_slice_of_another_is_read_in_its_bounds() -> None:
    both = pa.concat_batches([batch(), batch(body=[b"three", b"four"])])
    whole, _ = converted(both)
    part, faults = converted(both.slice(2, 2))
    assert not faults
    assert [records.decode(each).body for each in part["record"].to_pylist()] == [b"three", b"four"]
    assert records.properties_of(part["record"][0].as_py())["region"] == "north"
    assert whole.num_rows == 4


def test_an_empty_batch_has_no_rows() -> None:
    rows, faults = converted(batch().slice(0, 0))
    assert (rows.num_rows, faults) == (0, {})


# -- due times --------------------------------------------------------------------------------------------------


def test_a_timestamp_is_rounded_up_to_milliseconds() -> None:
    micros = [T0 * 1_000, T0 * 1_000 + 1, T0 * 1_000 + 1_000, None, -1]
    found, faults = dues(pa.array(micros, pa.timestamp("us", "America/New_York")))
    assert (found, faults) == ([T0, T0 + 1, T0 + 1, None, 0], {})


def test_a_timestamp_without_a_zone_is_in_the_zone_that_is_said() -> None:
    local = pa.array([datetime(2027, 1, 1, 9), datetime(2027, 7, 1, 9)], pa.timestamp("us"))
    utc = [datetime(2027, 1, 1, 8, tzinfo=UTC), datetime(2027, 7, 1, 7, tzinfo=UTC)]
    assert dues(local, zone="Europe/Berlin")[0] == [int(at.timestamp() * 1_000) for at in utc]
    texts = pa.array(["2027-01-01T09:00:00", "2027-07-01 09:00"])
    assert dues(texts, zone="Europe/Berlin")[0] == [int(at.timestamp() * 1_000) for at in utc]


def test_a_time_that_clocks_skip_or_show_twice_has_one_meaning() -> None:
    skipped, twice = datetime(2027, 3, 28, 2, 30), datetime(2027, 10, 31, 2, 30)
    means = [datetime(2027, 3, 28, 1, tzinfo=UTC), datetime(2027, 10, 31, 0, 30, tzinfo=UTC)]
    expected = [int(at.timestamp() * 1_000) for at in means]
    assert dues(pa.array([skipped, twice], pa.timestamp("us")), zone="Europe/Berlin")[0] == expected
    assert dues(pa.array([skipped.isoformat(), twice.isoformat()]), zone="Europe/Berlin")[0] == expected


def test_text_has_a_zone_or_is_bad() -> None:
    texts = ["2027-01-01T09:00:00+01:00", "2027-01-01T08:00:00Z", "2027-01-01 08:00:00.0001+00:00", None]
    at = int(datetime(2027, 1, 1, 8, tzinfo=UTC).timestamp() * 1_000)
    assert dues(pa.array(texts)) == ([at, at, at + 1, None], {})
    _, faults = dues(pa.array([*texts, "2027-01-01T08:00:00", "soon"]))
    assert faults == {
        4: "column due is '2027-01-01T08:00:00', which has no zone: say it (zone, --zone)",
        5: "column due is 'soon', expected a time such as 2027-01-01T08:00:00+01:00",
    }


def test_numbers_have_the_unit_that_is_said() -> None:
    assert dues(pa.array([T0, -5, None]), unit="ms") == ([T0, -5, None], {})
    assert dues(pa.array([1_700_000_000, None], pa.int32()), unit="s") == ([T0, None], {})
    assert dues(pa.array(["1700000000", " 7 ", "x", "1.5", None]), unit="s") == (
        [T0, 7_000, None, None, None],
        {2: "column due is 'x', expected a whole number", 3: "column due is '1.5', expected a whole number"},
    )
    for wide in (2**63 - 1, -(2**63)):
        for unit in ("s", "ms"):
            found, faults = dues(pa.array([wide]), unit=unit)
            assert (found, faults) == ([None], {0: f"column due is {wide}, which is out of range"})


# -- bad rows ---------------------------------------------------------------------------------------------------

BAD = [
    ({"due": [None, DUE]}, "column due (the due time) is null"),
    ({"due": [T0 + 365 * DAY_MS + 1, DUE]}, "due 2024-11-13T22:13:20.001+00:00 is later than 2024-11-13T22:13:20.000"),
    ({"body": [None, b""]}, "column body (the body) is null"),
    ({"body": [b"x" * (4 << 20) + b"x", b""]}, "the body has 4194305 bytes, the limit is 4194304"),
    ({"key": ["a\x01", ""]}, "column key contains a separator, 0x01 or 0x02: 'a\\x01'"),
    ({"tag": ["a\x02b", ""]}, "column tag contains a separator"),
    ({"properties": ['{"REAL_TOPIC": "x"}', None]}, "property REAL_TOPIC is not for a user to set"),
    ({"properties": ['{"KEYS": "x"}', None]}, "property KEYS is not for a user to set"),
    ({"properties": ['{"a": ""}', None]}, "property a has an empty value"),
    ({"properties": ['{"": "a"}', None]}, "a property has an empty name"),
    ({"properties": ['{"a": 1}', None]}, "column properties (the properties), expected an object with values that are"),
    ({"properties": ["{", None]}, "column properties (the properties), expected an object"),
    ({"properties": ['{"a": "%s"}' % ("x" * 32_767), None]}, "properties have 32"),
    ({"key": ["x" * 32_767, None]}, "properties have 32"),
]


@pytest.mark.parametrize(("given", "sentence"), BAD)
def test_a_bad_row_is_told_and_the_others_are_made(given: dict[str, Any], sentence: str) -> None:
    rows, faults = converted(batch(**given))
    assert list(faults) == [0]
    assert faults[0].startswith(sentence)
    assert rows["arrival"].to_pylist() == [own_arrival(3, 0, 1)]


def test_text_that_is_no_utf_8_is_bad() -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"ok"], pa.binary()).buffers())
    rows, faults = converted(batch(key=broken))
    assert faults == {0: "column key is not UTF-8"}
    assert rows["key"].to_pylist() == ["ok"]


def test_a_due_time_that_has_passed_is_fine() -> None:
    rows, faults = converted(batch(due=[T0 - DAY_MS, -5]))
    assert not faults
    assert rows["due"].to_pylist() == [T0 - DAY_MS, 1]


# -- wishes -----------------------------------------------------------------------------------------------------

TYPES = {
    "at": "timestamp", "local": "timestamp_ntz", "day": "date", "number": "bigint", "text": "string", "body": "binary",
    "map": "map<string,string>",
}  # fmt: skip

WRONG = [
    ({"due": "when"}, "due: there is no column when; there are: at, local, day, number, text, body, map"),
    (
        {"due": "local"},
        "due: column local is a timestamp without a zone: say which one it is in, such as Europe/Berlin",
    ),
    ({"due": "day"}, "due: column day is date, expected a timestamp, text in ISO 8601, or ms or s"),
    ({"due": "number"}, "due: column number is bigint: say whether it counts ms or s"),
    ({"due": "at", "unit": "ms"}, "due: column at is timestamp, expected a whole number: its unit is ms"),
    ({"due": "at", "unit": "minutes"}, "due_unit is 'minutes', expected timestamp or ms or s"),
    ({"due": "at", "zone": "Nowhere/Land"}, "zone 'Nowhere/Land' is not known"),
    ({"due": "at", "body": "number"}, "body: column number is bigint, expected binary or string"),
    ({"due": "at", "key": "number"}, "key: column number is bigint, expected string"),
    ({"due": "at", "properties": "number"}, "properties: column number is bigint, expected map<string,string> or"),
    ({"due": "at", "named": (("a", "number"),)}, "property a: column number is bigint, expected string"),
    ({"due": "at", "named": (("TAGS", "text"),)}, "property TAGS is not for a user to set"),
    ({"due": "at", "named": (("a", "text"),), "properties": "map"}, "give properties in one way"),
    ({"due": "at", "queue": "key"}, "queue is key: say which column holds the key"),
    ({"due": "at", "queue": "any"}, "queue is 'any', expected round-robin or key"),
    ({"due": ""}, "due: say which column holds the due time"),
]


@pytest.mark.parametrize(("wishes", "sentence"), WRONG)
def test_a_wish_that_does_not_fit_is_refused_with_a_sentence(wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        fitted(wanted_of(wishes), TYPES)
    assert str(error.value).startswith(sentence)


def test_a_wish_that_fits_is_completed() -> None:
    assert fitted(wanted_of({"due": "at"}), TYPES).body == "body"
    assert fitted(wanted_of({"due": "local", "zone": "Europe/Berlin"}), TYPES).due == "local"
    assert fitted(wanted_of({"due": "number", "unit": "s", "body": "text"}), TYPES).columns == ["number", "text"]
    with pytest.raises(UsageError, match="body: say which column holds the body; there are: at"):
        fitted(wanted_of({"due": "at"}), {"at": "timestamp"})


def test_properties_with_their_columns_are_read_from_one_option() -> None:
    assert named_columns("region=area, shop = id") == (("region", "area"), ("shop", "id"))
    assert named_columns("") == ()
    with pytest.raises(UsageError, match="expected NAME=COLUMN"):
        named_columns("region")
