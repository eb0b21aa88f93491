"""What RocketMQ's tools are told about the broker: bodies of answers to operators."""

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
    """All clusters and their brokers: one of each."""
    return orjson.dumps(
        {"brokerAddrTable": {broker.name: broker_data(broker)}, "clusterAddrTable": {broker.cluster: [broker.name]}}
    )


def encode_table(table: Mapping[str, str]) -> bytes:
    return orjson.dumps({"table": dict(table)})


def encode_groups(names: Iterable[str]) -> bytes:
    return orjson.dumps({"groupList": list(names)})


def encode_producers(peers: Iterable[Peer]) -> bytes:
    return orjson.dumps({"connectionSet": [_connection(peer) for peer in peers]})


def encode_consumers(peers: Iterable[Peer], consumers: Iterable[Consumer]) -> bytes:
    """The members of a group, of which there is one at least, and what they want. Where they want different things of a
    topic, the last one counts.
    """
    shown = list(consumers)
    subscriptions = {each.topic: subscription_data(each) for consumer in shown for each in consumer.subscriptions}
    return orjson.dumps(
        {
            "connectionSet": [_connection(peer) for peer in peers],
            "consumeFromWhere": shown[-1].consume_from,
            "consumeType": shown[-1].consume_type,
            "messageModel": shown[-1].message_model,
            "subscriptionTable": subscriptions,
        }
    )


def _connection(peer: Peer) -> dict[str, Any]:
    return {
        "clientAddr": peer.address, "clientId": peer.client_id, "language": peer.language, "version": peer.version,
    }  # fmt: skip


def encode_producer_table(groups: Mapping[str, Iterable[tuple[Peer, int]]]) -> bytes:
    """All producers by group, each with the instant at which it was last seen."""
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
_UNESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_LINE_END = re.compile(r"[\r\n]")
_LINE = re.compile(r"([^=:\s]+)\s*[=:]\s*(.*)")


def encode_properties_text(values: Mapping[str, str]) -> bytes:
    """Lines of name=value. The reader knows ASCII alone, and a backslash is special to it."""
    return "".join(f"{name}={_escaped(value)}\n" for name, value in values.items()).encode()


def _escaped(value: str) -> str:
    return "".join(_ESCAPES.get(letter) or (letter if " " <= letter <= "~" else _utf16(letter)) for letter in value)


def _utf16(letter: str) -> str:
    data = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


def decode_properties_text(body: bytes) -> dict[str, str]:
    """Raises ProtocolError for what is no line of name=value; a line that begins with # or ! is a remark."""
    try:
        lines = [line.strip() for line in _LINE_END.split(body.decode())]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"settings that are no text: {error}") from error
    found = {}
    for line in lines:
        if not line or line[0] in "#!":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(f"settings have the line {line[:80]!r}, expected name=value")
        value = _ESCAPED.sub(_unescaped, match[2])
        found[match[1]] = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # pairs become one letter
    return found


def _unescaped(match: "re.Match[str]") -> str:
    return chr(int(match[1], 16)) if match[1] else _UNESCAPED.get(match[2], match[2])
