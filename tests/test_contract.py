"""The contract between broker, bulk and Spark: one side reads what another writes, or names what it cannot read."""

from typing import Any

import pytest

from postdate import contract
from postdate.contract import (
    BatchSize,
    Fields,
    ImportOrder,
    JobOrder,
    JobStatus,
    OpenJob,
    OrderPart,
    QueueSpan,
    Registration,
    Selection,
    Stage,
    State,
    TableFile,
    dump,
    load,
)
from postdate.errors import ProtocolError

STATE = State(1, 2, 3, 4, 5, 6, 7, 8, (1 << 63) - 1, 10, 11, 12, "s3://t", "h:1", (OpenJob(17, 5),), (3, 4))
FILE = TableFile("_job-1.parquet", 10, 2, 1, 2, 3, 4)
STATUS = JobStatus("a", 7, "cancel", "running", "", "true", 0, 3, 2, 1, 0, 5, 6, "", "writing", 1, 2)
STAGE = Stage(3, (0, 2), (0, 60_000), ("000003-a", "000003-b"), 2, 1)
BROUGHT = STAGE._replace(brought=((7, -1, 60_000),))
ORDER = JobOrder(7, "a", "postpone", "running", "key = 'ü'", 5, 99, 2, (FILE,), (OrderPart("00000007-x", 1, (0, 4)),))
SELECTION = Selection(3, 7, (("00000007-x", 1 << 62),), (FILE,))
IMPORT = ImportOrder(STATUS, True, "/t", 5, 6, ((0, 17), (1, 18)))


def travelled(plain: object) -> dict[str, Any]:
    return load(dump(plain), "a value")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (STATE, STATE.plain()),
        (STATE._replace(stop=8, staged=("c",)), STATE._replace(stop=8, staged=("c",)).plain()),
        (STAGE, STAGE._asdict()),
        (STAGE, STAGE.plain()),
        (BROUGHT, BROUGHT.plain()),
        (ORDER, ORDER.plain()),
        (SELECTION, SELECTION._asdict()),
        (STATUS, STATUS._asdict()),
        (IMPORT, IMPORT.plain()),
        (Registration("/t", "local[*]"), {"table": "/t", "master": "local[*]"}),
    ],
)
def test_what_one_side_writes_the_other_reads(value: Any, plain: object) -> None:
    assert type(value).read(travelled(plain)) == value


def test_fields_of_a_newer_peer_are_ignored() -> None:
    assert Stage.read({**travelled(STAGE._asdict()), "colour": "red"}) == STAGE


def test_a_stage_names_what_bulk_brought_only_where_it_did() -> None:
    assert "brought" not in STAGE.plain()
    assert BROUGHT.plain()["brought"] == ((7, -1, 60_000),)


def test_a_state_tells_only_what_is_known() -> None:
    assert "stop" not in STATE.plain()
    assert State.read(travelled(STATE.plain())).staged is None


@pytest.mark.parametrize(
    ("read", "good", "changed", "sentence"),
    [
        (
            State.read,
            STATE.plain(),
            {"epoch": True},
            "the state of a broker cannot be read: epoch is True, expected a wh",
        ),
        (State.read, STATE.plain(), {"commands": [[1]]}, r"commands is \[\[1\]\], expected a list of pairs"),
        (State.read, STATE.plain(), {"gone": [1.5]}, "gone is .*, expected a list of whole numbers"),
        (State.read, STATE.plain(), {"table": 1}, "table is 1, expected a text"),
        (
            Stage.read,
            STAGE._asdict(),
            {"chunks": [1]},
            "a stage cannot be read: chunks is .*, expected a list of names",
        ),
        (Stage.read, STAGE._asdict(), {"far": [1]}, "far is .*, expected two whole numbers"),
        (Stage.read, STAGE._asdict(), {"rows_in": 1 << 63}, "rows_in is 9223372036854775808, expected a whole number"),
        (
            Stage.read,
            STAGE.plain(),
            {"brought": [[1, 2]]},
            "brought is .*, expected a list of three whole numbers each",
        ),
        (JobOrder.read, ORDER.plain(), {"parts": ["x"]}, "parts is .*, expected a list of objects"),
        (JobOrder.read, ORDER.plain(), {"files": [["x"]]}, "files is .*, expected a list of files"),
        (
            Selection.read,
            SELECTION._asdict(),
            {"parts": [["x", "y"]]},
            "parts is .*, expected a list of names and arriv",
        ),
        (JobStatus.read, STATUS._asdict(), {"late": None}, "late is None, expected a whole number"),
        (ImportOrder.read, IMPORT.plain(), {"is_new": 1}, "is_new is 1, expected true or false"),
        (ImportOrder.read, IMPORT.plain(), {"job": []}, r"job is \[\], expected an object"),
        (contract.read_spans, {"queues": []}, {"queues": [[1, 2]]}, "queues is .*, expected a list of five numbers"),
        (contract.read_report, {}, {"a": [1]}, "the report of a batch has a = .*, expected a text or a number"),
    ],
)
def test_what_cannot_be_read_is_named(read: Any, good: dict[str, Any], changed: dict[str, Any], sentence: str) -> None:
    plain = travelled(good)
    read(plain)
    with pytest.raises(ProtocolError, match=sentence):
        read({**plain, **changed})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff"])
def test_a_body_that_is_no_object_is_named(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a stage"):
        load(body, "a stage")


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ProtocolError, match="a stage cannot be read: epoch is missing, expected a whole number"):
        Stage.read({})
    assert Fields({}, "a call").text("reason") == ""
    assert Fields({}, "a call").number("by_ms", 0) == 0


def test_the_queues_of_a_topic_and_the_list_of_jobs_are_read() -> None:
    assert contract.read_spans({"queues": [[0, 17, 0, 9, 4]]}) == [QueueSpan(0, 17, 0, 9, 4)]
    assert contract.read_jobs(travelled({"now_ms": 1, "jobs": [STATUS._asdict()]})) == [STATUS]
    assert not STATUS.is_over
    assert STATUS._replace(state="failed").is_over
    assert BatchSize(1, 2, 3).rows_max == 2
