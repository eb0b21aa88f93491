"""Bodies of answers to operators, as RocketMQ's tools read them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from postdate.errors import ProtocolError
from postdate.wire.bodies import Broker, Consumer, broker_data, subscription_data


class Peer(NamedTuple):
    """A client as an operator sees it."""

    client_id: str
    address: str
    language: str
    version: int


def encode_cluster(broker: Broker) -> bytes:
    """Encodes all clusters and their brokers: one of each."""
    return orjson.dumps(
        {"brokerAddrTable": {broker.name: broker_data(broker)}, "clusterAddrTable": {broker.cluster: [broker.name]}}
    )


def encode_no_replicas(log_end: int) -> bytes:
    """Encodes how far the replicas of a broker are that has none, and so is nobody's replica either."""
    as_replica = {
        "masterAddr": None, "transferredByteInSecond": 0, "maxOffset": 0, "lastReadTimestamp": 0,
        "lastWriteTimestamp": 0, "masterFlushOffset": 0,
    }  # fmt: skip
    report = {
        "master": True, "masterCommitLogMaxOffset": log_end, "inSyncSlaveNums": 0, "haConnectionInfo": [],
        "haClientRuntimeInfo": as_replica,
    }  # fmt: skip
    return orjson.dumps(report)


def encode_producers(peers: Iterable[Peer]) -> bytes:
    return orjson.dumps({"connectionSet": [_connection(peer) for peer in peers]})


def encode_consumers(peers: Iterable[Peer], consumers: Iterable[Consumer], warnings: Iterable[str] = ()) -> bytes:
    """Encodes the members of a group, at least one, and their subscriptions; of each topic the last one counts. What is
    wrong with them is our addition.
    """
    all_consumers = list(consumers)
    last = all_consumers[-1]
    subscriptions = {
        each.topic: subscription_data(each) for consumer in all_consumers for each in consumer.subscriptions
    }
    report = {
        "connectionSet": [_connection(peer) for peer in peers], "consumeFromWhere": last.consume_from,
        "consumeType": last.consume_type, "messageModel": last.message_model, "subscriptionTable": subscriptions,
        "warnings": list(warnings),
    }  # fmt: skip
    return orjson.dumps(report)


def _connection(peer: Peer) -> dict[str, Any]:
    return {
        "clientAddr": peer.address, "clientId": peer.client_id, "language": peer.language, "version": peer.version,
    }  # fmt: skip


def encode_producer_table(groups: Mapping[str, Iterable[tuple[Peer, int]]]) -> bytes:
    """Encodes all producers by group, each with the instant at which it was last seen."""
    table = {
        group: [
            {"clientId": peer.client_id, "remoteIP": peer.address, "language": peer.language, "version": peer.version,
             "lastUpdateTimestamp": seen_at_ms}
            for peer, seen_at_ms in peers
        ]
        for group, peers in groups.items()
    }  # fmt: skip
    return orjson.dumps({"data": table})


# -- properties, as Java's tools write and read them --------------------------------------------------------------

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}
_UNESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_LINE_END = re.compile(r"[\r\n]")
_LINE = re.compile(r"([^=:\s]+)\s*[=:]\s*(.*)")


def encode_properties_text(values: Mapping[str, str]) -> bytes:
    """Encodes lines of name=value. Java reads ASCII alone here, and takes a backslash as an escape."""
    return "".join(f"{name}={''.join(map(_escape, value))}\n" for name, value in values.items()).encode()


def _escape(letter: str) -> str:
    if letter in _ESCAPES or " " <= letter <= "~":
        return _ESCAPES.get(letter, letter)
    data = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


def decode_properties_text(body: bytes) -> dict[str, str]:
    """Decodes lines of name=value; a line that begins with # or ! is a comment. Raises ProtocolError."""
    try:
        lines = [line.strip() for line in _LINE_END.split(body.decode())]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the settings are not UTF-8 text: {error}") from error
    found = {}
    for line in lines:
        if not line or line[0] in "#!":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(f"the settings have the line {line[:80]!r}, expected name=value")
        value = _ESCAPED.sub(_unescape, match[2])
        found[match[1]] = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # pairs become one letter
    return found


def _unescape(match: "re.Match[str]") -> str:
    return chr(int(match[1], 16)) if match[1] else _UNESCAPES.get(match[2], match[2])
