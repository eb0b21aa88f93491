"""Ids that travel as text: message ids, recall handles and addresses."""

import base64
import binascii
import ipaddress
import re
from typing import NamedTuple

from postdate.errors import ProtocolError
from postdate.message import INT64_MAX, PORT_MAX, Host

_HANDLE_VERSION = "v1"
_HANDLE_PARTS = 5
_TRANSACTION_ID = re.compile(r"(?:[0-7][0-9A-Fa-f]{15}){2}")  # two numbers of 63 bits
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


def encode_transaction_id(offset: int, number: int) -> str:
    """Returns the id by which a transaction is ended: upper-case hex of its half's place in the log and number."""
    return f"{offset:016X}{number:016X}"


def parse_transaction_id(text: str) -> tuple[int, int]:
    """Returns the place and the number of a half. Raises ProtocolError for a text that no broker has handed out."""
    if not _TRANSACTION_ID.fullmatch(text):
        raise ProtocolError(f"transaction id {text[:64]!r}, expected 32 hex digits")
    return int(text[:16], 16), int(text[16:], 16)


def encode_recall_handle(topic: str, broker_name: str, due_at_ms: int, unique_key: str) -> bytes:
    """Returns a recall handle as bytes: base64.urlsafe_b64encode by fewer calls, as every timed send needs one."""
    text = f"{_HANDLE_VERSION} {topic} {broker_name} {due_at_ms} {unique_key}"
    return binascii.b2a_base64(text.encode(), newline=False).translate(_URL_SAFE)


def parse_recall_handle(text: str) -> RecallHandle:
    """Raises ProtocolError for a text that no broker has handed out."""
    plain = _read_base64(text, "recall handle")
    parts = plain.split(" ", _HANDLE_PARTS - 1)
    if len(parts) != _HANDLE_PARTS or parts[0] != _HANDLE_VERSION or not all(parts):
        raise ProtocolError(f"the recall handle says {plain[:64]!r}, expected 'v1 topic broker time key'")
    _, topic, broker_name, due, unique_key = parts
    if not (due.isascii() and due.isdigit() and len(due) < 19):
        raise ProtocolError(f"the recall handle has the time {due[:32]!r}, expected epoch milliseconds")
    assert int(due) <= INT64_MAX
    return RecallHandle(topic, broker_name, int(due), unique_key)


def encode_receipt_handle(topic: str, queue_id: int, offset: int, popped_at_ms: int) -> str:
    """Returns the handle by which a consumer of RocketMQ 5 names a message that it has."""
    text = f"{_HANDLE_VERSION} {queue_id} {offset} {popped_at_ms} {topic}"
    return binascii.b2a_base64(text.encode(), newline=False).translate(_URL_SAFE).decode()


def parse_receipt_handle(text: str) -> tuple[str, int, int, int]:
    """Returns topic, queue id, offset and the instant of the pop. Raises ProtocolError for any other text."""
    plain = _read_base64(text, "receipt handle")
    parts = _RECEIPT.fullmatch(plain)
    if parts is None:
        raise ProtocolError(f"the receipt handle says {plain[:64]!r}, expected 'v1 queue offset time topic'")
    return parts[4], int(parts[1]), int(parts[2]), int(parts[3])


def _read_base64(text: str, what: str) -> str:
    """Returns the text in a handle. Raises ProtocolError."""
    if len(text) > _HANDLE_CHARACTERS_MAX:
        raise ProtocolError(f"a {what} of {len(text)} characters, the longest has {_HANDLE_CHARACTERS_MAX}")
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"the {what} is not base64 text") from error


_RECEIPT = re.compile(_HANDLE_VERSION + r" ([0-9]{1,9}) ([0-9]{1,18}) (-?[0-9]{1,18}) (\S+)", re.ASCII)


def host_of(address: str, port: int) -> Host:
    """Returns the host of a socket's address. Raises ValueError unless it is an IP address."""
    return Host(ipaddress.ip_address(address.partition("%")[0]).packed, port)


def host_text(host: Host) -> str:
    return address_text(str(ipaddress.ip_address(host.address)), host.port)


def address_text(host: str, port: int) -> str:
    """Returns host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
