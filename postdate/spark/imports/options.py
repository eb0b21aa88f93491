"""Options of an import: what a user says about its columns, checked against the columns that exist."""

from collections.abc import Mapping
from typing import Any

from postdate.errors import UsageError
from postdate.message import check_topic
from postdate.spark.imports.columns import (
    BY_KEY,
    MILLISECONDS,
    RESERVED_PROPERTIES,
    ROUND_ROBIN,
    SECONDS,
    TIMESTAMP,
    Wanted,
    check_zone,
)

UNITS, QUEUES = (TIMESTAMP, MILLISECONDS, SECONDS), (ROUND_ROBIN, BY_KEY)
BODY = "body"  # the column of bodies where the user names none
_WHOLE = ("bigint", "int", "smallint", "tinyint")
_TEXT = ("string",)
_MAPS = ("map<string,string>", "string")


def wanted_of(wishes: Mapping[str, Any]) -> Wanted:
    """Reads the options; the columns are not known yet. Raises UsageError for options that contradict each other."""
    wanted = Wanted(**{"body": "", **wishes})
    if not wanted.due:
        raise UsageError("due: say which column holds the due time")
    _choose("due_unit", wanted.unit, UNITS)
    _choose("queue", wanted.queue, QUEUES)
    if wanted.queue == BY_KEY and not wanted.key:
        raise UsageError("queue is key: say which column holds the key")
    if wanted.properties and wanted.named:
        raise UsageError("give properties in one way: as one column of all, or each with its own column")
    if wanted.zone:
        check_zone(wanted.zone)
    for name, _ in wanted.named:
        if name in RESERVED_PROPERTIES:
            raise UsageError(f"property {name} is not for a user to set")
        if not name or "\x01" in name or "\x02" in name:
            raise UsageError(f"property {name!r}, expected a name without 0x01 and 0x02")
    return wanted


def _choose(what: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise UsageError(f"{what} is {value!r}, expected {' or '.join(values)}")


def checked_topic(topic: str) -> str:
    """Checks the name of a topic. Raises UsageError, IllegalMessage."""
    if not topic:
        raise UsageError("topic: say which topic the messages are for")
    check_topic(topic)
    return topic


def named_columns(text: str) -> tuple[tuple[str, str], ...]:
    """Reads properties with their columns from `region=area, shop=shop_id`. Raises UsageError."""
    pairs = [each.partition("=") for each in text.split(",") if each.strip()]
    for name, sign, column in pairs:
        if not (name.strip() and sign and column.strip()):
            raise UsageError(f"property is {text!r}, expected NAME=COLUMN, NAME=COLUMN")
    return tuple((name.strip(), column.strip()) for name, _, column in pairs)


def with_body(wanted: Wanted, names: list[str]) -> Wanted:
    """Takes the column `body` where the user names none. Raises UsageError where it does not exist."""
    if wanted.body:
        return wanted
    if BODY not in names:
        raise UsageError(f"body: say which column holds the body; there are: {', '.join(names)}")
    return wanted._replace(body=BODY)


def roles_of(wanted: Wanted) -> list[tuple[str, str]]:
    """The roles of the columns, each with its column."""
    single = ("due", "body", "key", "tag", "properties")
    roles = [(role, getattr(wanted, role)) for role in single if getattr(wanted, role)]
    return roles + [(f"property {name}", column) for name, column in wanted.named]


def check_names(wanted: Wanted, names: list[str]) -> None:
    """Raises UsageError for a column that does not exist."""
    for role, name in roles_of(wanted):
        if name not in names:
            raise UsageError(f"{role}: there is no column {name}; there are: {', '.join(names)}")


def fitted(wanted: Wanted, types: Mapping[str, str]) -> Wanted:
    """Completes the columns, and checks them against the types that Spark names. Raises UsageError."""
    names = list(types)
    wanted = with_body(wanted, names)
    check_names(wanted, names)
    _check_due(wanted, types[wanted.due])
    accepted = {"body": ("binary", "string"), "properties": _MAPS}
    for role, name in roles_of(wanted):
        expected = accepted.get(role, _TEXT)
        if role != "due" and types[name] not in expected:
            raise UsageError(f"{role}: column {name} is {types[name]}, expected {' or '.join(expected)}")
    return wanted


def _check_due(wanted: Wanted, kind: str) -> None:
    if wanted.unit != TIMESTAMP:
        if kind not in (*_WHOLE, *_TEXT):
            raise UsageError(f"due: column {wanted.due} is {kind}, expected a whole number: its unit is {wanted.unit}")
    elif kind in _WHOLE:
        raise UsageError(f"due: column {wanted.due} is {kind}: say whether it counts ms or s (due_unit, --due-unit)")
    elif kind == "timestamp_ntz":
        if not wanted.zone:
            raise UsageError(
                f"due: column {wanted.due} is a timestamp without a zone: say which one it is in, such as "
                "Europe/Berlin (zone, --zone)"
            )
    elif kind not in ("timestamp", *_TEXT):
        raise UsageError(f"due: column {wanted.due} is {kind}, expected a timestamp, text in ISO 8601, or ms or s")
