"""What travels in bodies: routes, heartbeats, locks, tables by queue, batches of messages."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.wire.bodies import (
    Ack,
    Broker,
    Consumer,
    Heartbeat,
    Inner,
    LockRequest,
    QueueData,
    QueueName,
    Route,
    Subscription,
    decode_batch,
    decode_batch_ack,
    decode_by_queue,
    decode_consumer_ids,
    decode_heartbeat,
    decode_lock,
    decode_route,
    encode_batch,
    encode_batch_ack,
    encode_by_queue,
    encode_consumer_ids,
    encode_heartbeat,
    encode_locked,
    encode_route,
    load,
    parse_subscription,
)

BROKER = Broker("broker-a", "Cluster", "10.0.0.1:10911")

texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def shaped(*names: str) -> st.SearchStrategy[Any]:
    """Objects with some of these keys, and lists of them: nearly what a decoder expects."""
    inner = st.fixed_dictionaries({}, optional=dict.fromkeys(names, json_values))
    return st.fixed_dictionaries({}, optional={name: st.lists(inner, max_size=2) | json_values for name in names})


def decode_offset_table(body: bytes) -> dict[QueueName, dict[str, Any]]:
    return decode_by_queue(body, "offsetTable")


DECODERS: dict[Callable[[bytes], Any], st.SearchStrategy[Any]] = {
    decode_route: shaped("brokerDatas", "queueDatas", "brokerName", "brokerAddrs", "readQueueNums", "perm"),
    decode_heartbeat: shaped("clientID", "producerDataSet", "consumerDataSet", "groupName", "consumeType", "topic"),
    decode_lock: shaped("consumerGroup", "clientId", "mqSet", "topic", "brokerName", "queueId"),
    decode_consumer_ids: shaped("consumerIdList"),
    decode_offset_table: st.fixed_dictionaries(
        {"offsetTable": json_values | st.dictionaries(json_values.map(json.dumps), json_values, max_size=2)}
    ),
}
decoders = pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)


# --------------------------------------------------------------------------------------------------------- garbage


@decoders
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_bytes_are_a_body_or_a_protocol_error(decode: Callable[[bytes], Any], data: st.DataObject) -> None:
    body = data.draw(st.binary() | json_values.map(orjson.dumps))
    try:
        decode(body)
    except ProtocolError:
        return


@decoders
@settings(deadline=None)
@given(data=st.data())
def test_any_json_in_its_shape_is_a_body_or_a_protocol_error(
    decode: Callable[[bytes], Any], data: st.DataObject
) -> None:
    body = orjson.dumps(data.draw(DECODERS[decode]))
    try:
        decode(body)
    except ProtocolError:
        return


@decoders
@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"5", b'"text"', b"{", b'{"a":1}x', b'{"a":"\\ud800"}', b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(decode: Callable[[bytes], Any], body: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"the body of .* is no"):
        decode(body)


@pytest.mark.parametrize(
    ("decode", "text"),
    [
        (decode_route, '{"brokerDatas":[{"brokerName":DEEP,"brokerAddrs":{"0":"a"}}],"queueDatas":[]}'),
        (decode_heartbeat, '{"clientID":DEEP}'),
        (decode_heartbeat, '{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":DEEP}]}'),
        (decode_lock, '{"consumerGroup":"g","clientId":DEEP}'),
        (decode_consumer_ids, '{"consumerIdList":[DEEP]}'),
    ],
)
def test_a_text_nested_deep_is_refused_without_walking_into_it(decode: Callable[[bytes], Any], text: str) -> None:
    with pytest.raises(ProtocolError, match="a list is no text"):
        decode(text.replace("DEEP", "[" * 1000 + "]" * 1000).encode())


def test_a_body_is_named_in_its_refusal() -> None:
    with pytest.raises(ProtocolError, match="the body of a letter is not JSON"):
        load(b"dear", "a letter")
    with pytest.raises(ProtocolError, match="the body of a letter is no JSON object"):
        load(b"[]", "a letter")
    assert load(b'{"dear":"sir"}', "a letter") == {"dear": "sir"}


# ---------------------------------------------------------------------------------------------------------- routes


def test_a_route_is_rocketmqs() -> None:
    assert json.loads(encode_route(BROKER, 8, 4, 6)) == {
        "brokerDatas": [
            {"brokerAddrs": {"0": "10.0.0.1:10911"}, "brokerName": "broker-a", "cluster": "Cluster",
             "enableActingMaster": False}
        ],
        "filterServerTable": {},
        "queueDatas": [
            {"brokerName": "broker-a", "perm": 6, "readQueueNums": 8, "writeQueueNums": 4, "topicSysFlag": 0}
        ],
    }  # fmt: skip


def test_a_route_comes_back_as_it_was() -> None:
    assert decode_route(encode_route(BROKER, 8, 4, 6)) == Route([BROKER], [QueueData("broker-a", 8, 4, 6)])


def test_a_route_has_the_masters_alone() -> None:
    body = b"""{"orderTopicConf": "a:4", "brokerDatas": [
        {"brokerName": "a", "cluster": "C", "brokerAddrs": {"0": "10.0.0.1:10911", "1": "10.0.0.2:10911"}},
        {"brokerName": "b", "brokerAddrs": {"1": "10.0.0.3:10911"}},
        {"brokerName": "c", "brokerAddrs": {"0": "10.0.0.4:10911"}}],
        "queueDatas": [{"brokerName": "a", "perm": "7", "readQueueNums": "4", "writeQueueNums": 2}]}"""
    brokers = [Broker("a", "C", "10.0.0.1:10911"), Broker("c", "", "10.0.0.4:10911")]
    assert decode_route(body) == Route(brokers, [QueueData("a", 4, 2, 7)])


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"brokerDatas":[],"queueDatas":[{"brokerName":"a"}]}',
        b'{"brokerDatas":[{"brokerName":"a"}],"queueDatas":[]}',
        b'{"brokerDatas":[{"brokerName":null,"brokerAddrs":{"0":"x"}}],"queueDatas":[]}',
        b'{"brokerDatas":[{"brokerName":"a","brokerAddrs":{"0":["x"]}}],"queueDatas":[]}',
        b'{"brokerDatas":[],"queueDatas":[{"brokerName":"a","perm":true,"readQueueNums":4,"writeQueueNums":4}]}',
        b'{"brokerDatas":[],"queueDatas":[{"brokerName":"a","perm":6,"readQueueNums":4.5,"writeQueueNums":4}]}',
    ],
)
def test_a_route_without_its_parts_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a route that cannot be read"):
        decode_route(body)


# ------------------------------------------------------------------------------------------------------ heartbeats

ORDERS = Subscription("orders", "paid || refunded", frozenset({"paid", "refunded"}), "TAG")
RETRIES = Subscription("%RETRY%shippers", "*", frozenset(), "TAG")
HEARTBEAT = Heartbeat(
    "10.0.0.9@4711#1",
    ("producers",),
    (Consumer("shippers", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET", (ORDERS, RETRIES)),),
)


def test_a_heartbeat_of_the_java_client_is_read() -> None:
    body = b"""{"clientID":"10.0.0.9@4711#1","heartbeatFingerprint":0,"withoutSub":false,
        "producerDataSet":[{"groupName":"producers"}],
        "consumerDataSet":[{"groupName":"shippers","consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING",
            "consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","unitMode":false,"subscriptionDataSet":[
                {"topic":"orders","subString":"paid || refunded","tagsSet":["paid","refunded"],
                 "codeSet":[3433164,-707924457],"subVersion":1700000000000,"expressionType":"TAG",
                 "classFilterMode":false},
                {"topic":"%RETRY%shippers","subString":"*","tagsSet":[],"codeSet":[],"subVersion":1700000000000,
                 "expressionType":"TAG","classFilterMode":false}]}]}"""
    assert decode_heartbeat(body) == HEARTBEAT


def test_a_heartbeat_of_the_cpp_client_has_numbers_for_names_and_is_read() -> None:
    body = b"""{"clientID":"10.0.0.9@4711#1","producerDataSet":[{"groupName":"producers"}],
        "consumerDataSet":[{"groupName":"shippers","consumeType":1,"messageModel":1,"consumeFromWhere":0,
            "subscriptionDataSet":[
                {"topic":"orders","subString":"paid || refunded","tagsSet":["paid","refunded"],
                 "codeSet":["3433164","-707924457"],"subVersion":"1700000000000"},
                {"topic":"%RETRY%shippers","subString":"*","subVersion":"1700000000000"}]}]}"""
    assert decode_heartbeat(body) == HEARTBEAT


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ((0, 0, 4), ("CONSUME_ACTIVELY", "BROADCASTING", "CONSUME_FROM_FIRST_OFFSET")),
        (("1", "1", "5"), ("CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_TIMESTAMP")),
        ((None, None, None), ("CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET")),
        (("POP", "LITE", "LATER"), ("POP", "LITE", "LATER")),
    ],
)
def test_an_enum_is_its_name_or_its_number(numbers: tuple[object, ...], names: tuple[str, str, str]) -> None:
    entry = dict(zip(("consumeType", "messageModel", "consumeFromWhere"), numbers, strict=True))
    heartbeat = decode_heartbeat(orjson.dumps({"clientID": "c", "consumerDataSet": [{"groupName": "g", **entry}]}))
    assert heartbeat.consumers == (Consumer("g", *names, ()),)


def test_a_heartbeat_comes_back_as_it_was() -> None:
    assert decode_heartbeat(encode_heartbeat(HEARTBEAT)) == HEARTBEAT


def test_a_heartbeat_says_whether_its_client_pops_and_shares_by_topic() -> None:
    entry = {"groupName": "g", "consumeType": "CONSUME_POP", "sharesByTopic": True}
    (consumer,) = decode_heartbeat(orjson.dumps({"clientID": "c", "consumerDataSet": [entry]})).consumers
    assert (consumer.consume_type, consumer.shares_by_topic) == ("CONSUME_POP", True)
    assert decode_heartbeat(encode_heartbeat(Heartbeat("c", (), (consumer,)))).consumers == (consumer,)
    (official,) = decode_heartbeat(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":2}]}').consumers
    assert (official.consume_type, official.shares_by_topic) == ("CONSUME_POP", False)


def test_a_heartbeat_may_have_no_groups() -> None:
    assert decode_heartbeat(b'{"clientID":"c"}') == Heartbeat("c", (), ())
    assert decode_heartbeat(b'{"clientID":"c","producerDataSet":null,"consumerDataSet":null}') == Heartbeat("c", (), ())


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"clientID":null}',
        b'{"clientID":{"a":1}}',
        b'{"clientID":"c","producerDataSet":5}',
        b'{"clientID":"c","producerDataSet":["producers"]}',
        b'{"clientID":"c","consumerDataSet":[{}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":3}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":true}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{"subString":"*"}]}]}',
    ],
)
def test_a_heartbeat_without_its_parts_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a heartbeat that cannot be read"):
        decode_heartbeat(body)


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("*", set()),
        ("", set()),
        ("paid", {"paid"}),
        ("paid||refunded", {"paid", "refunded"}),
        (" paid  ||  paid || ", {"paid"}),
        ("paid || *", set()),
        ("||", set()),
        ("оплачен", {"оплачен"}),
    ],
)
def test_a_subscription_is_a_set_of_tags_and_no_tags_are_all(expression: str, tags: set[str]) -> None:
    assert parse_subscription("orders", expression) == Subscription("orders", expression, frozenset(tags), "TAG")


def test_a_subscription_of_another_kind_has_no_tags() -> None:
    found = parse_subscription("orders", "a > 5 || b = 3", "SQL92")
    assert found == Subscription("orders", "a > 5 || b = 3", frozenset(), "SQL92")


# ----------------------------------------------------------------------------------------------- groups and locks


def test_consumer_ids_are_rocketmqs_and_come_back() -> None:
    body = b'{"consumerIdList":["10.0.0.9@1#2","10.0.0.9@1#3"]}'
    assert encode_consumer_ids(["10.0.0.9@1#2", "10.0.0.9@1#3"]) == body
    assert decode_consumer_ids(body) == ["10.0.0.9@1#2", "10.0.0.9@1#3"]
    assert decode_consumer_ids(b"{}") == decode_consumer_ids(b'{"consumerIdList":null}') == []


@pytest.mark.parametrize("body", [b'{"consumerIdList":5}', b'{"consumerIdList":[null]}', b'{"consumerIdList":[[]]}'])
def test_consumer_ids_that_are_no_texts_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a list of consumers that cannot be read"):
        decode_consumer_ids(body)


def test_a_lock_request_is_read() -> None:
    body = b"""{"consumerGroup":"g","clientId":"c","onlyThisBroker":false,"mqSet":[
        {"topic":"orders","brokerName":"b","queueId":3},{"topic":"orders","queueId":"4"}]}"""
    queues = (QueueName("orders", "b", 3), QueueName("orders", "", 4))
    assert decode_lock(body) == LockRequest("g", "c", queues)
    assert decode_lock(b'{"consumerGroup":"g","clientId":"c","mqSet":null}') == LockRequest("g", "c", ())


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"consumerGroup":"g"}',
        b'{"consumerGroup":"g","clientId":["c"]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":7}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":["orders"]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"orders"}]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"orders","queueId":1.5}]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"orders","queueId":"1_0"}]}',
    ],
)
def test_a_lock_request_without_its_parts_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a lock request that cannot be read"):
        decode_lock(body)


def test_the_answer_to_a_lock_is_rocketmqs() -> None:
    assert json.loads(encode_locked([QueueName("orders", "b", 3)])) == {
        "lockOKMQSet": [{"brokerName": "b", "queueId": 3, "topic": "orders"}]
    }
    assert encode_locked([]) == b'{"lockOKMQSet":[]}'


# ------------------------------------------------------------------------------------------------- tables by queue


def test_a_table_by_queue_has_objects_for_keys_as_java_wants_them() -> None:
    table = {QueueName("orders", "b", 0): {"maxOffset": 5}}
    assert encode_by_queue("offsetTable", table, {"consumeTps": 0.5}) == (
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"orders"}:{"maxOffset":5}},"consumeTps":0.5}'
    )


@pytest.mark.parametrize(
    "body",
    [
        rb'{"offsetTable":{"{\"brokerName\":\"b\",\"queueId\":0,\"topic\":\"orders\"}":{"maxOffset":5}},"more":[{},{}]}',
        b'{"more":[{"a":1},{}],"offsetTable":{ {"brokerName":"b" , "queueId":"0","topic":"orders"} :{"maxOffset":5}}}',
    ],
)
def test_a_queue_may_be_a_text_or_an_object(body: bytes) -> None:
    assert decode_by_queue(body, "offsetTable") == {QueueName("orders", "b", 0): {"maxOffset": 5}}


@settings(deadline=None)
@given(
    st.dictionaries(
        st.builds(QueueName, texts, texts, st.integers(0, 2**31 - 1)),
        st.dictionaries(texts, st.integers(-(2**63), 2**63 - 1), max_size=3),
        max_size=4,
    )
)
def test_a_table_by_queue_comes_back_as_it_was(table: dict[QueueName, dict[str, int]]) -> None:
    assert decode_by_queue(encode_by_queue("offsetTable", table), "offsetTable") == table


def test_a_table_that_is_not_there_is_empty() -> None:
    assert decode_by_queue(b"{}", "offsetTable") == {}


@pytest.mark.parametrize(
    "table",
    [
        [1],
        {"orders": {}},
        {"[]": {}},
        {'{"topic":"orders","brokerName":"b"}': {}},
        {'{"topic":"orders","brokerName":"b","queueId":0}': 5},
        {'{"topic":"orders","brokerName":"b","queueId":0}': [["maxOffset", 5]]},
        {'{"topic":"orders","brokerName":null,"queueId":0}': {}},
    ],
)
def test_a_table_by_something_else_is_refused(table: Any) -> None:
    with pytest.raises(ProtocolError, match="a table by queue that cannot be read"):
        decode_by_queue(orjson.dumps({"offsetTable": table}), "offsetTable")


# --------------------------------------------------------------------------------------------- batches of messages

BATCH = bytes.fromhex(
    "0000001c"  # 28 bytes in all
    "00000000 00000000"  # magic, crc
    "00000007"  # flag
    "00000002 6869"  # body "hi"
    "0004 61013102"  # properties a = 1
    "00000016 00000000 00000000 ffffffff 00000000 0000"  # flag -1, no body, no properties
)
MESSAGES = [Inner(7, b"hi", b"a\x011\x02"), Inner(-1, b"", b"")]


def test_a_batch_is_rocketmqs() -> None:
    assert encode_batch(MESSAGES) == BATCH
    assert decode_batch(BATCH) == MESSAGES
    assert decode_batch(b"") == []


@given(st.sets(st.integers(0, 2**40), min_size=1, max_size=50), st.integers(0, 7))
def test_a_batch_of_acknowledgements_comes_back_as_it_was(offsets: set[int], more: int) -> None:
    """Offsets far apart take several entries: the bits between them would fill a frame."""
    ack = Ack("g", "orders", 3, 1_700, sorted({*offsets, *(min(offsets) + n for n in range(more))}))
    found = decode_batch_ack(encode_batch_ack("broker", [ack]), 1_000)
    assert {each[:4] for each in found} == {("g", "orders", 3, 1_700)}
    assert [offset for each in found for offset in each.offsets] == ack.offsets


@settings(deadline=None)
@given(st.lists(st.builds(Inner, st.integers(-(2**31), 2**31 - 1), st.binary(), st.binary()), max_size=5))
def test_a_batch_comes_back_as_it_was(messages: list[Inner]) -> None:
    assert decode_batch(encode_batch(messages)) == messages


def test_magic_and_crc_of_a_message_in_a_batch_are_not_looked_at() -> None:
    other = BATCH[:4] + b"\xda\xa3\x20\xa7\x12\x34\x56\x78" + BATCH[12:]
    assert decode_batch(other) == MESSAGES


@pytest.mark.parametrize("length", [length for length in range(1, len(BATCH)) if length != 28])
def test_a_batch_cut_within_a_message_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="a batch"):
        decode_batch(BATCH[:length])


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, "0000001b"), (0, "0000001d"), (0, "ffffffff"), (0, "00000000"), (16, "ffffffff"), (16, "7fffffff"),
     (16, "00000003"), (22, "ffff"), (22, "7fff"), (22, "0005")],
)  # fmt: skip
def test_a_message_in_a_batch_whose_lengths_do_not_meet_is_refused(position: int, value: str) -> None:
    damaged = bytearray(BATCH)
    damaged[position : position + len(value) // 2] = bytes.fromhex(value)
    with pytest.raises(ProtocolError, match="a batch"):
        decode_batch(bytes(damaged))


@settings(deadline=None)
@given(st.binary(), st.integers(0, len(BATCH) - 1), st.integers(0, 255))
def test_any_bytes_are_a_batch_or_a_protocol_error(data: bytes, position: int, value: int) -> None:
    damaged = BATCH[:position] + bytes([value]) + BATCH[position + 1 :]
    for body in (data, damaged, BATCH + data):
        try:
            messages = decode_batch(body)
        except ProtocolError:
            continue
        assert len(encode_batch(messages)) == len(body)
