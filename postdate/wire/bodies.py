"""The bodies of requests and answers.

JSON bodies are read leniently: an enum may come as its name or its number, a number as text. A body that does not fit
its request raises ProtocolError.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from struct import Struct
from struct import error as StructError  # noqa: N812  it is a class
from typing import Any, NamedTuple

import orjson

from postdate.errors import ProtocolError
from postdate.wire.frame import plain_text, whole_number

SUBSCRIPTION_ALL = "*"
CLIENT_ID_CHARACTERS_MAX = 255  # Java's have some 40: address, process, a number


def load(body: bytes, what: str) -> dict[str, Any]:
    """Returns the JSON object in a body; `what` names the body in errors. Raises ProtocolError."""
    try:
        values = orjson.loads(body)
    except ValueError as error:
        raise ProtocolError(f"the body of {what} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ProtocolError(f"the body of {what} is no JSON object")
    return values


# -- routes -----------------------------------------------------------------------------------------------------


class Broker(NamedTuple):
    """A broker, as a route names it."""

    name: str
    cluster: str
    address: str


class QueueData(NamedTuple):
    """How many queues of a topic a broker has."""

    broker_name: str
    read_queue_count: int
    write_queue_count: int
    perm: int


class Route(NamedTuple):
    brokers: list[Broker]
    queues: list[QueueData]


def encode_route(broker: Broker, read_queue_count: int, write_queue_count: int, perm: int) -> bytes:
    """Encodes a route with one broker: we are one node."""
    queue_data = {
        "brokerName": broker.name, "perm": perm, "readQueueNums": read_queue_count,
        "topicSysFlag": 0, "writeQueueNums": write_queue_count,
    }  # fmt: skip
    return orjson.dumps({"brokerDatas": [broker_data(broker)], "filterServerTable": {}, "queueDatas": [queue_data]})


def broker_data(broker: Broker) -> dict[str, Any]:
    return {
        "brokerAddrs": {"0": broker.address}, "brokerName": broker.name, "cluster": broker.cluster,
        "enableActingMaster": False,
    }  # fmt: skip


def decode_route(body: bytes) -> Route:
    """Decodes the masters of a route and their queues. Raises ProtocolError."""
    values = load(body, "a route")
    try:
        brokers = [
            Broker(plain_text(data["brokerName"]), plain_text(data.get("cluster") or ""), plain_text(addresses["0"]))
            for data in values["brokerDatas"]
            if "0" in (addresses := data["brokerAddrs"])
        ]
        numbers = ("readQueueNums", "writeQueueNums", "perm")
        queues = [
            QueueData(plain_text(data["brokerName"]), *(whole_number(data[name]) for name in numbers))
            for data in values["queueDatas"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a route that cannot be read: {type(error).__name__} {error}") from error
    return Route(brokers, queues)


# -- heartbeats -------------------------------------------------------------------------------------------------


class Subscription(NamedTuple):
    """A group's subscription to a topic. No tags means all messages."""

    topic: str
    expression: str
    tags: frozenset[str]
    kind: str  # "TAG", or a kind of filter that we do not have


class Consumer(NamedTuple):
    """A consumer group that a client is a member of."""

    group: str
    consume_type: str
    message_model: str
    consume_from: str
    subscriptions: tuple[Subscription, ...]
    # Whether it shares a topic's work with the members that subscribe to the topic, as our clients do. Official ones
    # share it with the whole group.
    shares_by_topic: bool = False


class Heartbeat(NamedTuple):
    client_id: str
    producer_groups: tuple[str, ...]
    consumers: tuple[Consumer, ...]


# Old clients write these enums as numbers, in this order.
CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
CONSUME_FROM = ("CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
                "CONSUME_FROM_MIN_OFFSET", "CONSUME_FROM_MAX_OFFSET", "CONSUME_FROM_FIRST_OFFSET",
                "CONSUME_FROM_TIMESTAMP")  # fmt: skip


def decode_heartbeat(body: bytes) -> Heartbeat:
    """Raises ProtocolError."""
    values = load(body, "a heartbeat")
    try:
        producers = tuple(plain_text(entry["groupName"]) for entry in values.get("producerDataSet") or ())
        consumers = tuple(_read_consumer(entry) for entry in values.get("consumerDataSet") or ())
        return Heartbeat(_read_client_id(values["clientID"]), producers, consumers)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProtocolError(f"a heartbeat that cannot be read: {type(error).__name__} {error}") from error


def _read_client_id(found: object) -> str:
    """Returns a client id. It stays in memory for as long as its client is connected, so its length has a limit."""
    text = plain_text(found)
    if len(text) > CLIENT_ID_CHARACTERS_MAX:
        raise ValueError(f"a client id of {len(text)} characters, the limit is {CLIENT_ID_CHARACTERS_MAX}")
    return text


def _read_consumer(entry: dict[str, Any]) -> Consumer:
    return Consumer(
        plain_text(entry["groupName"]),
        _read_enum(CONSUME_TYPES, entry.get("consumeType"), 1),
        _read_enum(MESSAGE_MODELS, entry.get("messageModel"), 1),
        _read_enum(CONSUME_FROM, entry.get("consumeFromWhere"), 0),
        tuple(_read_subscription(each) for each in entry.get("subscriptionDataSet") or ()),
        entry.get("sharesByTopic") is True,
    )


def _read_subscription(entry: dict[str, Any]) -> Subscription:
    expression, kind = entry.get("subString") or "", entry.get("expressionType") or "TAG"
    return parse_subscription(plain_text(entry["topic"]), plain_text(expression), plain_text(kind))


def _read_enum(names: Sequence[str], found: object, default: int) -> str:
    text = plain_text(default if found is None else found)
    return names[int(text)] if text.isdigit() else text


def parse_subscription(topic: str, expression: str, kind: str = "TAG") -> Subscription:
    """Returns a subscription, given an expression such as "*" or "paid || refunded"."""
    tags: frozenset[str] = frozenset()
    if kind == "TAG":
        tags = frozenset(tag for part in expression.split("||") if (tag := part.strip()))
        if SUBSCRIPTION_ALL in tags:
            tags = frozenset()
    return Subscription(topic, expression, tags, kind)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    consumers = [
        {
            "groupName": consumer.group, "consumeType": consumer.consume_type, "messageModel": consumer.message_model,
            "consumeFromWhere": consumer.consume_from, "unitMode": False,
            "subscriptionDataSet": [subscription_data(each) for each in consumer.subscriptions],
            "sharesByTopic": consumer.shares_by_topic,
        }
        for consumer in heartbeat.consumers
    ]  # fmt: skip
    producers = [{"groupName": group} for group in heartbeat.producer_groups]
    return orjson.dumps({"clientID": heartbeat.client_id, "producerDataSet": producers, "consumerDataSet": consumers})


def subscription_data(subscription: Subscription) -> dict[str, Any]:
    return {
        "topic": subscription.topic, "subString": subscription.expression, "tagsSet": sorted(subscription.tags),
        "codeSet": [], "subVersion": 0, "expressionType": subscription.kind, "classFilterMode": False,
    }  # fmt: skip


# -- groups and locks -------------------------------------------------------------------------------------------


def encode_consumer_ids(client_ids: Iterable[str]) -> bytes:
    return orjson.dumps({"consumerIdList": list(client_ids)})


def decode_consumer_ids(body: bytes) -> list[str]:
    """Raises ProtocolError."""
    values = load(body, "a list of consumers")
    try:
        return [plain_text(each) for each in values.get("consumerIdList") or ()]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a list of consumers that cannot be read: {error}") from error


class QueueName(NamedTuple):
    """A queue, as clients name it."""

    topic: str
    broker_name: str
    queue_id: int


class LockRequest(NamedTuple):
    """Queues that a client of a group locks or unlocks."""

    group: str
    client_id: str
    queues: tuple[QueueName, ...]


def decode_lock(body: bytes) -> LockRequest:
    """Raises ProtocolError."""
    values = load(body, "a lock request")
    try:
        queues = tuple(
            QueueName(
                plain_text(each["topic"]), plain_text(each.get("brokerName") or ""), whole_number(each["queueId"])
            )
            for each in values.get("mqSet") or ()
        )
        return LockRequest(plain_text(values["consumerGroup"]), _read_client_id(values["clientId"]), queues)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a lock request that cannot be read: {type(error).__name__} {error}") from error


def encode_locked(queues: Iterable[QueueName]) -> bytes:
    return orjson.dumps({"lockOKMQSet": [_queue_data(each) for each in queues]})


def _queue_data(queue: QueueName) -> dict[str, Any]:
    return {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}


def encode_by_queue(name: str, table: Mapping[QueueName, Any], more: Mapping[str, Any] | None = None) -> bytes:
    return orjson.dumps({name: by_queue(table), **(more or {})})


def by_queue(table: Mapping[QueueName, Any]) -> orjson.Fragment:
    """Encodes a table whose keys are queues as RocketMQ does: each key is an object, which standard JSON does not
    allow. From 5.5 on the parser of Java's client accepts nothing else.
    """
    rows = (orjson.dumps(_queue_data(queue)) + b":" + orjson.dumps(row) for queue, row in table.items())
    return orjson.Fragment(b"{" + b",".join(rows) + b"}")


def decode_by_queue(body: bytes, name: str) -> dict[QueueName, dict[str, Any]]:
    """Decodes a table whose keys are queues; a queue may also be JSON within a text. Raises ProtocolError."""
    table = load(_with_text_keys(body), name).get(name) or {}
    try:
        return {
            QueueName(plain_text(key["topic"]), plain_text(key["brokerName"]), whole_number(key["queueId"])): {**row}
            for text, row in table.items()
            for key in (orjson.loads(text),)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a table by queue that cannot be read: {type(error).__name__} {error}") from error


def load_by_queue(body: bytes, what: str) -> dict[str, Any]:
    """Decodes a body that has tables whose keys are queues, beside what else it has. Raises ProtocolError."""
    return load(_with_text_keys(body), what)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


def _with_text_keys(body: bytes) -> bytes:
    """Returns the same JSON with every object in the place of a key written as a text."""
    parts: list[bytes] = []
    copied = start = 0
    before, open_brackets = b"", bytearray()  # the token before this one; the brackets around it
    key_depth = 0  # of brackets around an object that is a key; 0 outside of one
    for token in _TOKEN.finditer(body):
        found = token[0]
        if found in (b"{", b"["):
            is_key = found == b"{" and (before == b"{" or (before == b"," and open_brackets[-1:] == b"{"))
            if is_key and not key_depth:
                key_depth, start = len(open_brackets) + 1, token.start()
            open_brackets += found
        elif found in (b"}", b"]") and open_brackets:
            if len(open_brackets) == key_depth:
                text = body[start : token.end()].decode("utf-8", "replace")
                parts += (body[copied:start], orjson.dumps(text))
                copied, key_depth = token.end(), 0
            open_brackets.pop()
        before = found
    return b"".join((*parts, body[copied:]))


# -- pops -------------------------------------------------------------------------------------------------------


class AssignmentRequest(NamedTuple):
    """A client of a group asks which queues of a topic it reads."""

    topic: str
    group: str
    client_id: str
    strategy: str
    message_model: str


def decode_assignment_request(body: bytes) -> AssignmentRequest:
    """Raises ProtocolError."""
    values = load(body, "a request for an assignment")
    try:
        return AssignmentRequest(
            plain_text(values["topic"]), plain_text(values["consumerGroup"]), plain_text(values["clientId"]),
            plain_text(values.get("strategyName") or ""), _read_enum(MESSAGE_MODELS, values.get("messageModel"), 1),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"a request for an assignment that cannot be read: {error}") from error


def encode_assignments(queues: Iterable[QueueName], mode: str) -> bytes:
    """Encodes the queues that a client reads, and how: POP or PULL."""
    rows = [{"messageQueue": _queue_data(queue), "mode": mode, "attachments": None} for queue in queues]
    return orjson.dumps({"messageQueueAssignments": rows})


class ModeRequest(NamedTuple):
    """An operator sets how a group reads a topic."""

    topic: str
    group: str
    mode: str


def decode_mode_request(body: bytes) -> ModeRequest:
    """Raises ProtocolError."""
    values = load(body, "a request for a mode")
    try:
        return ModeRequest(
            plain_text(values["topic"]), plain_text(values["consumerGroup"]), plain_text(values.get("mode") or "PULL")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a request for a mode that cannot be read: {error}") from error


class Ack(NamedTuple):
    """Acknowledged messages of one queue that were popped together."""

    group: str
    topic: str
    queue_id: int
    popped_at_ms: int
    offsets: list[int]


def decode_batch_ack(body: bytes, count_max: int) -> list[Ack]:
    """Raises ProtocolError, also for more than `count_max` messages: one bit names each, so small bodies name many."""
    values = load(body, "a batch of acknowledgements")
    acks: list[Ack] = []
    try:
        for entry in values.get("acks") or ():
            start = whole_number(entry["so"])
            names = plain_text(entry["c"]), plain_text(entry["t"])
            numbers = whole_number(entry["q"]), whole_number(entry["pt"])
            bits = islice(_bits(plain_text(entry.get("b") or "")), count_max + 1)
            acks.append(Ack(*names, *numbers, [start + bit for bit in bits]))
            count_max -= len(acks[-1].offsets)
            if count_max < 0:
                raise ValueError("it has more messages than batch_messages_max")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a batch of acknowledgements that cannot be read: {error}") from error
    return acks


_ACK_SPAN = 8_192  # offsets of one entry: messages that came back may be far apart


def encode_batch_ack(broker_name: str, acks: Iterable[Ack]) -> bytes:
    rows = [
        {
            "c": ack.group, "t": ack.topic, "r": "0", "so": start, "q": ack.queue_id, "rq": 0, "pt": ack.popped_at_ms,
            "it": 0, "bn": broker_name, "b": b64encode(bits).decode(),
        }
        for ack in acks
        for start, bits in _bit_sets(ack.offsets)
    ]  # fmt: skip
    return orjson.dumps({"brokerName": broker_name, "acks": rows})


def _bit_sets(numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """Yields numbers as sets of bits, each with the number of its lowest bit, as `_bits` reads them."""
    start, bits = 0, bytearray()
    for number in sorted(numbers):
        if bits and number - start >= _ACK_SPAN:
            yield start, bytes(bits)
            bits = bytearray()
        if not bits:
            start = number
        place = number - start
        bits.extend(bytes(place // 8 + 1 - len(bits)))
        bits[place // 8] |= 1 << place % 8
    if bits:
        yield start, bytes(bits)


def _bits(text: str) -> Iterator[int]:
    """Yields the numbers in a set of bits as Java writes it: base64 of bytes, the lowest bit first."""
    for index, byte in enumerate(b64decode(text, validate=True)):
        yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


# -- batches of messages ----------------------------------------------------------------------------------------

# total, magic, crc, flag, body bytes; then the body, the length of the properties and the properties
_INNER_HEAD = Struct(">iiiii")
_INT16 = Struct(">h")


class Inner(NamedTuple):
    """A message within a batch."""

    flag: int
    body: bytes
    properties: bytes


def decode_batch(body: bytes, count_max: int | None = None) -> list[Inner]:
    """Decodes the messages of a batch, at most `count_max` of them; the rest is not read. Raises ProtocolError."""
    try:
        return list(islice(_inner_messages(body), count_max))
    except StructError as error:
        raise ProtocolError(f"a batch of {len(body)} bytes that cannot be read: {error}") from error


def _inner_messages(body: bytes) -> Iterator[Inner]:
    position = 0
    while position < len(body):
        total, _, _, flag, body_bytes = _INNER_HEAD.unpack_from(body, position)
        body_at = position + _INNER_HEAD.size
        body_end = body_at + body_bytes
        if body_bytes < 0 or body_end > len(body):
            raise ProtocolError(f"a batch has a body of {body_bytes} bytes at {position}, {len(body)} bytes in all")
        (properties_bytes,) = _INT16.unpack_from(body, body_end)
        end = body_end + _INT16.size + properties_bytes
        if properties_bytes < 0 or end > len(body) or end - position != total:
            raise ProtocolError(f"a batch has a message of {total} bytes at {position}, its parts end at {end}")
        yield Inner(flag, body[body_at:body_end], body[body_end + _INT16.size : end])
        position = end


def encode_batch(messages: Iterable[Inner]) -> bytes:
    parts: list[bytes] = []
    for flag, body, properties in messages:
        total = _INNER_HEAD.size + len(body) + _INT16.size + len(properties)
        parts += (_INNER_HEAD.pack(total, 0, 0, flag, len(body)), body, _INT16.pack(len(properties)), properties)
    return b"".join(parts)
