"""Ids that travel as text: message ids, recall handles and addresses."""

import base64
import binascii
import ipaddress
from typing import NamedTuple

from postdate.errors import ProtocolError
from postdate.message import INT64_MAX, PORT_MAX, Host

_HANDLE_VERSION = "v1"
_HANDLE_PARTS = 5
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_HANDLE_CHARACTERS_MAX = 65_536  # a unique key may fill the properties, 32 KB, and base64 adds a third


class RecallHandle(NamedTuple):
    """The content of a recall handle: what a producer needs to cancel its message."""

    topic: str
    broker_name: str
    due_at_ms: int
    unique_key: str


def message_id(host: Host, offset: int) -> str:
    """Returns the id of the message at an offset of the log: upper-case hex of address, port and offset."""
    return f"{id_prefix(host)}{offset:016X}"


def id_prefix(host: Host) -> str:
    return f"{host.address.hex()}{host.port:08x}".upper()


def parse_message_id(text: str) -> tuple[Host, int]:
    """Returns the broker and the offset of an id. Raises ProtocolError."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) not in (16, 28) or len(text) != 2 * len(data):  # fromhex() skips spaces
        raise ProtocolError(f"message id {text[:64]!r}, expected 32 or 56 hex digits")
    address, port, offset = data[:-12], int.from_bytes(data[-12:-8], "big"), int.from_bytes(data[-8:], "big")
    if port > PORT_MAX or offset > INT64_MAX:
        raise ProtocolError(f"message id {text!r} has port {port} and offset {offset}, which no broker has")
    return Host(address, port), offset


def encode_recall_handle(topic: str, broker_name: str, due_at_ms: int, unique_key: str) -> bytes:
    """Returns a recall handle as bytes: base64.urlsafe_b64encode by fewer calls, as every timed send needs one."""
    text = f"{_HANDLE_VERSION} {topic} {broker_name} {due_at_ms} {unique_key}"
    return binascii.b2a_base64(text.encode(), newline=False).translate(_URL_SAFE)


def parse_recall_handle(text: str) -> RecallHandle:
    """Raises ProtocolError for a text that no broker has handed out."""
    if len(text) > _HANDLE_CHARACTERS_MAX:
        raise ProtocolError(f"a recall handle of {len(text)} characters, the longest has {_HANDLE_CHARACTERS_MAX}")
    try:
        plain = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise ProtocolError("the recall handle is not base64 text") from error
    parts = plain.split(" ", _HANDLE_PARTS - 1)
    if len(parts) != _HANDLE_PARTS or parts[0] != _HANDLE_VERSION or not all(parts):
        raise ProtocolError(f"the recall handle says {plain[:64]!r}, expected 'v1 topic broker time key'")
    _, topic, broker_name, due, unique_key = parts
    if not (due.isascii() and due.isdigit() and len(due) < 19):
        raise ProtocolError(f"the recall handle has the time {due[:32]!r}, expected epoch milliseconds")
    assert int(due) <= INT64_MAX
    return RecallHandle(topic, broker_name, int(due), unique_key)


def host_of(address: str, port: int) -> Host:
    """Returns the host of a socket's address. Raises ValueError unless it is an IP address."""
    return Host(ipaddress.ip_address(address.partition("%")[0]).packed, port)


def host_text(host: Host) -> str:
    return address_text(str(ipaddress.ip_address(host.address)), host.port)


def address_text(host: str, port: int) -> str:
    """Returns host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
