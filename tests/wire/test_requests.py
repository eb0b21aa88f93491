"""The table of requests: which fields each has, and how leniently they are read."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.wire.frame import BINARY, Command, decode, encode, encode_frame
from postdate.wire.requests import REQUESTS, ClientRequest, Kind, Request, decode_send

# What a request must have, and what it has then. Code by code, written down from the protocol and not from the table.
SEND = {"topic": "orders", "queueId": "-1"}
SEND_VALUES = {
    "producerGroup": "", "topic": "orders", "defaultTopic": "", "defaultTopicQueueNums": 4, "queueId": -1, "sysFlag": 0,
    "bornTimestamp": 0, "flag": 0, "properties": "", "reconsumeTimes": 0, "unitMode": False, "maxReconsumeTimes": None,
    "batch": False, "brokerName": "", "resend": False,
}  # fmt: skip
PULL = {"consumerGroup": "g", "topic": "orders", "queueId": "1", "queueOffset": "20", "maxMsgNums": "32"}
PULL_VALUES = {
    "consumerGroup": "g", "topic": "orders", "queueId": 1, "queueOffset": 20, "maxMsgNums": 32, "sysFlag": 0,
    "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "", "subVersion": 0, "expressionType": "TAG",
    "maxMsgBytes": 0,
}  # fmt: skip
QUEUE = {"topic": "orders", "queueId": "1"}
QUEUE_VALUES = {"topic": "orders", "queueId": 1}
GROUP_QUEUE = {"consumerGroup": "g", **QUEUE}
GROUP_QUEUE_VALUES = {"consumerGroup": "g", **QUEUE_VALUES}
TOPIC = {"topic": "orders"}
POPPED = {**GROUP_QUEUE, "extraInfo": "handle", "offset": "7"}
POPPED_VALUES = {**GROUP_QUEUE_VALUES, "extraInfo": "handle", "offset": 7}

USER, SUBJECT = {"username": "alice"}, {"subject": "User:alice"}
LEAST: dict[int, tuple[str, dict[str, str], dict[str, Any]]] = {
    10: ("SEND_MESSAGE", SEND, SEND_VALUES),
    11: ("PULL_MESSAGE", PULL, PULL_VALUES),
    14: ("QUERY_CONSUMER_OFFSET", GROUP_QUEUE, {**GROUP_QUEUE_VALUES, "setZeroIfNotFound": True}),
    15: ("UPDATE_CONSUMER_OFFSET", {**GROUP_QUEUE, "commitOffset": "9"}, {**GROUP_QUEUE_VALUES, "commitOffset": 9}),
    17: (
        "UPDATE_AND_CREATE_TOPIC", TOPIC,
        {**TOPIC, "readQueueNums": 8, "writeQueueNums": 8, "perm": 6, "attributes": ""},
    ),
    12: (
        "QUERY_MESSAGE", {"topic": "t", "key": "k"},
        {"topic": "t", "key": "k", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": None, "_UNIQUE_KEY_QUERY": False,
         "indexType": ""},
    ),
    29: (
        "SEARCH_OFFSET_BY_TIMESTAMP", {**QUEUE, "timestamp": "1700000000000"},
        {**QUEUE_VALUES, "timestamp": 1_700_000_000_000, "boundaryType": "LOWER"},
    ),
    25: ("UPDATE_BROKER_CONFIG", {}, {}),
    26: ("GET_BROKER_CONFIG", {}, {}),
    28: ("GET_BROKER_RUNTIME_INFO", {}, {}),
    30: ("GET_MAX_OFFSET", QUEUE, QUEUE_VALUES),
    31: ("GET_MIN_OFFSET", QUEUE, QUEUE_VALUES),
    32: ("GET_EARLIEST_MSG_STORETIME", QUEUE, QUEUE_VALUES),
    33: ("VIEW_MESSAGE_BY_ID", {"offset": "1234"}, {"offset": 1234}),
    34: ("HEART_BEAT", {}, {}),
    35: ("UNREGISTER_CLIENT", {"clientID": "c"}, {"clientID": "c", "producerGroup": "", "consumerGroup": ""}),
    36: (
        "CONSUMER_SEND_MSG_BACK", {"group": "g", "offset": "1234"},
        {"group": "g", "offset": 1234, "delayLevel": 0, "originMsgId": "", "originTopic": "",
         "maxReconsumeTimes": None},
    ),
    38: ("GET_CONSUMER_LIST_BY_GROUP", {"consumerGroup": "g"}, {"consumerGroup": "g", "topic": ""}),
    41: ("LOCK_BATCH_MQ", {}, {}),
    42: ("UNLOCK_BATCH_MQ", {}, {}),
    46: ("CHECK_CLIENT_CONFIG", {}, {}),
    100: (
        "PUT_KV_CONFIG", {"namespace": "n", "key": "k", "value": "v"}, {"namespace": "n", "key": "k", "value": "v"},
    ),
    101: ("GET_KV_CONFIG", {"namespace": "n", "key": "k"}, {"namespace": "n", "key": "k"}),
    102: ("DELETE_KV_CONFIG", {"namespace": "n", "key": "k"}, {"namespace": "n", "key": "k"}),
    106: ("GET_BROKER_CLUSTER_INFO", {}, {}),
    105: ("GET_ROUTEINFO_BY_TOPIC", TOPIC, TOPIC),
    200: ("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", {}, {}),
    201: ("GET_ALL_SUBSCRIPTIONGROUP_CONFIG", {}, {}),
    202: ("GET_TOPIC_STATS_INFO", TOPIC, TOPIC),
    203: ("GET_CONSUMER_CONNECTION_LIST", {"consumerGroup": "g"}, {"consumerGroup": "g"}),
    204: ("GET_PRODUCER_CONNECTION_LIST", {"producerGroup": "g"}, {"producerGroup": "g"}),
    205: ("WIPE_WRITE_PERM_OF_BROKER", {"brokerName": "b"}, {"brokerName": "b"}),
    206: ("GET_ALL_TOPIC_LIST_FROM_NAMESERVER", {}, {}),
    207: ("DELETE_SUBSCRIPTIONGROUP", {"groupName": "g"}, {"groupName": "g"}),
    208: ("GET_CONSUME_STATS", {"consumerGroup": "g"}, {"consumerGroup": "g", "topic": ""}),
    215: ("DELETE_TOPIC_IN_BROKER", TOPIC, TOPIC),
    216: ("DELETE_TOPIC_IN_NAMESRV", TOPIC, TOPIC),
    219: ("GET_KVLIST_BY_NAMESPACE", {"namespace": "n"}, {"namespace": "n"}),
    222: (
        "INVOKE_BROKER_TO_RESET_OFFSET", {"group": "g", **TOPIC, "timestamp": "-1"},
        {"group": "g", **TOPIC, "timestamp": -1, "queueId": -1, "offset": None, "dryRun": False},
    ),
    300: ("QUERY_TOPIC_CONSUME_BY_WHO", TOPIC, TOPIC),
    306: ("CLEAN_EXPIRED_CONSUMEQUEUE", {}, {}),
    307: (
        "GET_CONSUMER_RUNNING_INFO", {"consumerGroup": "g", "clientId": "c"},
        {"consumerGroup": "g", "clientId": "c", "jstackEnable": False},
    ),
    309: (
        "CONSUME_MESSAGE_DIRECTLY", {"consumerGroup": "g", "clientId": "c", "msgId": "m"},
        {"consumerGroup": "g", "clientId": "c", "msgId": "m"},
    ),
    310: ("SEND_MESSAGE_V2", SEND, SEND_VALUES),
    315: ("VIEW_BROKER_STATS_DATA", {"statsName": "n", "statsKey": "k"}, {"statsName": "n", "statsKey": "k"}),
    316: ("CLEAN_UNUSED_TOPIC", {}, {}),
    317: ("GET_BROKER_CONSUME_STATS", {}, {"isOrder": False}),
    318: ("UPDATE_NAMESRV_CONFIG", {}, {}),
    319: ("GET_NAMESRV_CONFIG", {}, {}),
    321: (
        "QUERY_CONSUME_QUEUE", {**QUEUE, "index": "0", "count": "9"},
        {**QUEUE_VALUES, "index": 0, "count": 9, "consumerGroup": ""},
    ),
    327: ("ADD_WRITE_PERM_OF_BROKER", {"brokerName": "b"}, {"brokerName": "b"}),
    328: ("GET_ALL_PRODUCER_INFO", {}, {}),
    329: ("DELETE_EXPIRED_COMMITLOG", {}, {}),
    351: ("GET_TOPIC_CONFIG", TOPIC, TOPIC),
    320: ("SEND_BATCH_MESSAGE", SEND, SEND_VALUES),
    361: ("LITE_PULL_MESSAGE", PULL, PULL_VALUES),
    370: ("RECALL_MESSAGE", TOPIC, {**TOPIC, "producerGroup": "", "recallHandle": "", "key": "", "due": 0}),
    400: ("QUERY_ASSIGNMENT", {}, {}),
    401: ("SET_MESSAGE_REQUEST_MODE", {}, {}),
    907: ("GET_BROKER_HA_STATUS", {}, {}),
    9801: ("GET_PENDING", {}, {"topic": "", "unit": "minute", "limit": 100}),
    9802: ("GET_BULK_STATE", {}, {"start": 0, "rowsMax": 0, "bytesMax": 0, "note": None}),
    9803: ("GET_BULK_RANGE", {}, {"topic": "", "queueId": 0, "start": 0, "times": False}),
    9804: ("REGISTER_PIPELINE", {}, {}),
    9805: ("STAGE", {}, {}),
    9806: ("REPORT_BATCH", {}, {}),
    9807: ("GET_STATUS", {}, {}),
    9808: ("ATTACH_TABLE", {}, {"bulk": "", "problem": ""}),
    9810: ("GET_CHUNKS", {}, {}),
    9812: ("GET_FORECAST", {}, {"topic": "", "unit": "minute", "bars": 60}),
    9813: ("GET_NEAR", {}, {"due": -1, "arrival": -1}),
    9814: ("JOB", {}, {}),
    9820: ("GET_BULK_TOPIC", {}, {"topic": None, "at": -1}),
    9821: (
        "RETRY_MESSAGE", {**GROUP_QUEUE, "offset": "7"},
        {**GROUP_QUEUE_VALUES, "offset": 7, "delay": -1, "maxReconsumeTimes": None, "reason": "", "reconsumeTimes": 0},
    ),
    9822: (
        "GET_DEAD_LETTERS", {"consumerGroup": "g", "queueId": "0", "offset": "5"},
        {"consumerGroup": "g", "queueId": 0, "offset": 5},
    ),
    9823: ("FINISH_DEAD_LETTERS", {}, {}),
    9824: ("CANCEL_KEY", {"topic": "t", "key": "k"}, {"topic": "t", "key": "k", "only": False}),
    9825: (
        "MOVE_MESSAGE", TOPIC,
        {**TOPIC, "key": "", "recallHandle": "", "due": None, "delay": None, "by": None, "only": False},
    ),
    37: (
        "END_TRANSACTION", {"commitLogOffset": "9", "commitOrRollback": "8"},
        {"topic": "", "producerGroup": "", "tranStateTableOffset": None, "commitLogOffset": 9, "commitOrRollback": 8,
         "fromTransactionCheck": False, "msgId": "", "transactionId": ""},
    ),
    9830: ("GET_TRANSACTIONS", {}, {"id": "", "topic": "", "after": -1, "limit": 100}),
    9831: ("RESOLVE_TRANSACTION", {"id": "A", "commit": "true"}, {"id": "A", "commit": True}),
    3001: ("AUTH_CREATE_USER", USER, USER),
    3002: ("AUTH_UPDATE_USER", USER, USER),
    3003: ("AUTH_DELETE_USER", USER, USER),
    3004: ("AUTH_GET_USER", USER, USER),
    3005: ("AUTH_LIST_USERS", {}, {"filter": ""}),
    3006: ("AUTH_CREATE_ACL", SUBJECT, SUBJECT),
    3007: ("AUTH_UPDATE_ACL", SUBJECT, SUBJECT),
    3008: ("AUTH_DELETE_ACL", SUBJECT, {**SUBJECT, "policyType": "", "resource": ""}),
    3009: ("AUTH_GET_ACL", SUBJECT, SUBJECT),
    3010: ("AUTH_LIST_ACL", {}, {"subjectFilter": "", "resourceFilter": ""}),
    200050: (
        "POP_MESSAGE", {**GROUP_QUEUE, "maxMsgNums": "32", "invisibleTime": "60000"},
        {**GROUP_QUEUE_VALUES, "maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 0,
         "expType": "TAG", "exp": "", "order": False, "attemptId": "", "maxReconsumeTimes": None, "readyOnly": False},
    ),
    200051: ("ACK_MESSAGE", POPPED, POPPED_VALUES),
    200053: (
        "CHANGE_MESSAGE_INVISIBLETIME", {**POPPED, "invisibleTime": "1000"},
        {**POPPED_VALUES, "invisibleTime": 1_000, "reason": "", "notBegun": False},
    ),
    200151: ("BATCH_ACK_MESSAGE", {}, {}),
}  # fmt: skip
MUST = [(code, name) for code, (_, least, _) in LEAST.items() for name in least]
SEND_CODES = [10, 310, 320]

rows = st.sampled_from(list(REQUESTS.values()))
field_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.integers().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def number(found: object) -> Any:
    return REQUESTS[33].read_fields({"offset": found})["offset"]


def flag(found: object) -> Any:
    return REQUESTS[14].read_fields({**GROUP_QUEUE, "setZeroIfNotFound": found})["setZeroIfNotFound"]


def text(found: object) -> Any:
    return REQUESTS[105].read_fields({"topic": found})["topic"]


# -------------------------------------------------------------------------------------------------------- the rows


def test_every_row_is_tested_here() -> None:
    assert {code: row.name for code, row in REQUESTS.items()} == {code: name for code, (name, _, _) in LEAST.items()}
    assert all(row.code == code for code, row in REQUESTS.items())


def test_no_two_requests_have_one_code() -> None:
    assert [request.name for request in Request] == list(Request.__members__)
    assert {request.code for request in Request}.isdisjoint(ClientRequest)


@pytest.mark.parametrize("code", LEAST)
def test_a_request_with_the_least_has_the_defaults(code: int) -> None:
    _, least, expected = LEAST[code]
    assert REQUESTS[code].read_fields(least) == expected


@pytest.mark.parametrize(("code", "missing"), MUST, ids=lambda value: str(value))
def test_a_field_that_is_missing_is_named(code: int, missing: str) -> None:
    name, least, _ = LEAST[code]
    rest = {field: value for field, value in least.items() if field != missing}
    for fields in (rest, {**rest, missing: None}):
        with pytest.raises(ProtocolError) as refusal:
            REQUESTS[code].read_fields(fields)
        assert str(refusal.value) == f"{name} lacks the field {missing}"


@pytest.mark.parametrize("code", LEAST)
def test_fields_that_no_row_names_are_left_alone(code: int) -> None:
    _, least, expected = LEAST[code]
    foreign = {"ns": "x", "bname": "b", "AccessKey": "", "ReqT": 0, "later": {"a": [1]}}
    assert REQUESTS[code].read_fields({**least, **foreign}) == expected


@settings(deadline=None)
@given(rows, st.data())
def test_any_values_are_read_by_their_kinds_or_a_protocol_error(row: Request, data: st.DataObject) -> None:
    names = [field.name for field in row.fields] + [field.letter for field in row.fields if field.letter]
    least: dict[str, Any] = dict(LEAST[row.code][1])
    fields = least | data.draw(st.dictionaries(st.sampled_from(names or ["none"]), field_values, max_size=3))
    try:
        read = row.read_fields(fields)
    except ProtocolError:
        return
    types = {Kind.TEXT: str, Kind.NUMBER: int, Kind.FLAG: bool}
    assert all(type(read[field.name]) is types[field.kind] or read[field.name] is field.default for field in row.fields)
    assert all(-(2**63) <= value < 2**63 for value in read.values() if type(value) is int)


# ----------------------------------------------------------------------------------------------------------- sends

LETTERS = {
    "a": "producers", "b": "orders", "c": "TBW102", "d": "4", "e": "3", "f": "1", "g": "1700000000000", "h": "7",
    "i": "TAGS\x01A\x02", "j": "2", "k": "true", "l": "16", "m": "false", "n": "broker-a",
}  # fmt: skip
LONG_NAMES = {
    "producerGroup": "producers", "topic": "orders", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
    "queueId": "3", "sysFlag": "1", "bornTimestamp": "1700000000000", "flag": "7", "properties": "TAGS\x01A\x02",
    "reconsumeTimes": "2", "unitMode": "true", "maxReconsumeTimes": "16", "batch": "false", "brokerName": "broker-a",
}  # fmt: skip
SENT = {
    "producerGroup": "producers", "topic": "orders", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4,
    "queueId": 3, "sysFlag": 1, "bornTimestamp": 1_700_000_000_000, "flag": 7, "properties": "TAGS\x01A\x02",
    "reconsumeTimes": 2, "unitMode": True, "maxReconsumeTimes": 16, "batch": False, "brokerName": "broker-a",
    "resend": False,
}  # fmt: skip


@pytest.mark.parametrize("code", SEND_CODES)
@pytest.mark.parametrize("fields", [LETTERS, LONG_NAMES], ids=["letters", "long names"])
def test_each_send_is_read_by_letters_and_by_long_names(code: int, fields: dict[str, str]) -> None:
    assert REQUESTS[code].read_fields(fields) == SENT


@pytest.mark.parametrize("code", SEND_CODES)
def test_a_send_with_letters_that_lacks_one_names_the_field(code: int) -> None:
    for letter, name in (("b", "topic"), ("e", "queueId")):
        with pytest.raises(ProtocolError, match=f"lacks the field {name}$"):
            REQUESTS[code].read_fields({key: value for key, value in LETTERS.items() if key != letter})


def test_the_long_name_wins_over_the_letter() -> None:
    assert REQUESTS[10].read_fields({**LETTERS, "topic": "other"})["topic"] == "other"


def test_a_letter_means_nothing_outside_of_sends() -> None:
    with pytest.raises(ProtocolError, match="lacks the field topic"):
        REQUESTS[105].read_fields({"b": "orders"})


def test_a_send_of_the_cpp_client_is_read() -> None:
    fields = {
        "producerGroup": "producers", "topic": "orders", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4,
        "queueId": 3, "sysFlag": 1, "bornTimestamp": "1700000000000", "flag": 7, "properties": "TAGS\x01A\x02",
        "reconsumeTimes": "2", "unitMode": "1", "maxReconsumeTimes": 16, "batch": "0", "brokerName": "broker-a",
        "AccessKey": "", "OnsChannel": "ALIYUN", "Signature": "x",
    }  # fmt: skip
    assert REQUESTS[10].read_fields(fields) == SENT


# ----------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("5", 5), ("-5", -5), ("+5", 5), ("007", 7), (5, 5), (-5, -5),
        ("9223372036854775807", 2**63 - 1), ("-9223372036854775808", -(2**63)), (2**63 - 1, 2**63 - 1),
    ],
)  # fmt: skip
def test_a_number_comes_bare_or_as_text(found: object, expected: int) -> None:
    assert number(found) == expected


@pytest.mark.parametrize(
    "found",
    [
        "", " ", "five", "5 ", " 5 ", "5\n", "1_000", "٣", "0x5", "1e3", "5.0", "--5", "-", "+", "9" * 30_000,
        "9223372036854775808", "-9223372036854775809", 2**63, -(2**63) - 1, 5.0, 1e300, float("nan"), float("inf"),
        True, False, [], [5], {}, {"5": 5},
    ],
    ids=lambda found: repr(found)[:24],
)  # fmt: skip
def test_what_is_no_whole_number_of_64_bits_is_refused_with_request_and_field(found: object) -> None:
    with pytest.raises(ProtocolError, match=r"VIEW_MESSAGE_BY_ID has offset = .*, expected a number") as refusal:
        number(found)
    assert len(str(refusal.value)) < 200


def test_a_number_that_may_be_left_out_may_be_empty() -> None:
    read = REQUESTS[310].read_fields({**LETTERS, "d": "", "l": ""})
    assert (read["defaultTopicQueueNums"], read["maxReconsumeTimes"]) == (4, None)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("true", True), ("True", True), ("TRUE", True), ("1", True), (1, True), (True, True),
        ("false", False), ("False", False), ("0", False), ("", False), (0, False), (False, False), (None, True),
    ],
)  # fmt: skip
def test_a_flag_comes_bare_or_as_text_or_as_a_digit(found: object, expected: bool) -> None:
    assert flag(found) is expected


@pytest.mark.parametrize("found", ["yes", "2", " true", "none", 2, -1, 1.0, [], [True], {}])
def test_what_is_no_flag_is_refused(found: object) -> None:
    with pytest.raises(ProtocolError, match=r"QUERY_CONSUMER_OFFSET has setZeroIfNotFound = .*, expected a flag"):
        flag(found)


@pytest.mark.parametrize(("found", "expected"), [("orders", "orders"), ("", ""), ("тема", "тема"), (5, "5")])
def test_a_text_comes_as_text_or_as_a_bare_number(found: object, expected: str) -> None:
    assert text(found) == expected


@pytest.mark.parametrize("found", [True, 1.5, [], ["orders"], {}, {"topic": "orders"}])
def test_what_is_no_text_is_refused(found: object) -> None:
    with pytest.raises(ProtocolError, match=r"GET_ROUTEINFO_BY_TOPIC has topic = .*, expected a text"):
        text(found)


def test_a_value_is_shown_in_the_refusal() -> None:
    with pytest.raises(ProtocolError) as refusal:
        number("five")
    assert str(refusal.value) == "VIEW_MESSAGE_BY_ID has offset = 'five', expected a number"


def test_a_value_nested_deep_is_refused_without_walking_into_it() -> None:
    deep: list[Any] = []
    for _ in range(1000):  # no deeper than orjson reads, and too deep for repr()
        deep = [deep]
    for read in (number, flag, text):
        with pytest.raises(ProtocolError, match="= a list, expected a"):
            read(deep)


# -------------------------------------------------------------------------------------- sends, read in one step

PROPERTIES = "UNIQ_KEY\x010A0B\x02TIMER_DELAY_MS\x01500\x02"
JAVA: dict[str, Any] = {
    "a": "shop", "b": "orders", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1700000000000", "h": "7",
    "i": PROPERTIES, "j": "2", "k": "false", "m": "false", "n": "postdate",
}  # fmt: skip

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(-(2**31), 2**31 - 1).map(str)
send_values = texts | numbers | st.sampled_from(["", "0", "1_0", " 5 ", "1.5", "true", "1e3"])


def frame_of(fields: dict[str, Any], body: bytes = b"body", **more: Any) -> bytes:
    """As it comes out of a stream: without its length."""
    return encode(Command(Request.SEND_MESSAGE_V2, fields, body, 77, language="JAVA", **more))[4:]


def test_a_send_of_the_java_client_is_read() -> None:
    found = decode_send(frame_of(JAVA))
    assert found is not None
    header, body = found
    fields = header.fields
    assert (body, header.opaque, header.flag) == (b"body", 77, 0)
    assert (fields.topic, fields.queue_id, fields.sys_flag, fields.flag) == ("orders", 3, 0, 7)
    assert (fields.born_at_ms, fields.properties, fields.reconsume_times) == (1_700_000_000_000, PROPERTIES, 2)
    assert fields.batch == "false"


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcefghijn"), send_values), st.binary(max_size=20))
def test_what_is_read_in_one_step_is_what_the_general_way_reads(changed: dict[str, str], body: bytes) -> None:
    frame = frame_of(JAVA | changed, body)
    found = decode_send(frame)
    if found is None:
        return
    header, rest = found
    command = decode(frame)
    try:
        asked = REQUESTS[command.code].read_fields(command.fields)
    except ProtocolError:
        # It takes whole numbers that are written as 1.0 or 1e3 too, which no client does.
        assert any(re.fullmatch(r"-?[0-9]+(\.0+)?([eE][+-]?[0-9]+)?", text) for text in changed.values())
        return
    fields = header.fields
    assert (rest, header.opaque, header.flag) == (command.body, command.opaque, command.flag)
    assert (fields.topic, fields.properties, fields.queue_id) == (asked["topic"], asked["properties"], asked["queueId"])
    assert (fields.sys_flag, fields.flag, fields.born_at_ms, fields.reconsume_times) == (
        asked["sysFlag"], asked["flag"], asked["bornTimestamp"], asked["reconsumeTimes"],
    )  # fmt: skip


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_left_to_the_general_way(garbage: bytes) -> None:
    assert decode_send(garbage) is None
    assert decode_send(encode_frame(b'{"code":310,' + garbage)[4:]) is None


@pytest.mark.parametrize("letter", "befghij")
def test_a_send_without_a_field_is_left_to_the_general_way(letter: str) -> None:
    assert decode_send(frame_of({name: value for name, value in JAVA.items() if name != letter})) is None


def test_other_serializations_codes_and_deep_nests_are_left_to_the_general_way() -> None:
    assert decode_send(frame_of(JAVA, serialization=BINARY)) is None
    assert decode_send(encode(Command(Request.SEND_MESSAGE, JAVA))[4:]) is None
    assert decode_send(b"\x02" + frame_of(JAVA)[1:]) is None, "no serialization that there is"
    assert decode_send(encode_frame(b'{"code":310,"x":' + b"[" * 100_000)[4:]) is None
