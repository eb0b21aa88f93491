"""What RocketMQ's clients sign, and how: HMAC-SHA1 over the values of a request's fields and its body.

The values stand in the order of the fields' names, joined without anything between them, each as it was sent: a bare
number as its digits. `Signature` itself is left out; so are code, opaque and flag. A signature says who sent the values
and no more: a request that somebody has recorded can be sent again, so connections that others can read need TLS.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from hashlib import sha1
from hmac import compare_digest, digest
from operator import itemgetter
from typing import Any, NamedTuple

ACCESS_KEY, SECURITY_TOKEN, SIGNATURE = "AccessKey", "SecurityToken", "Signature"
CALL_SCHEME = "MQv2-HMAC-SHA1"  # of calls over gRPC


class Credentials(NamedTuple):
    """Who a client is: a user's name, which RocketMQ calls an access key, and the secret that signs its requests."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r}, ...)"  # no secret reaches a log or a traceback


class CallCredentials(NamedTuple):
    """Who has made a call over gRPC, which RocketMQ 5's clients sign by the time that they send along."""

    access_key: str
    signature: bytes  # HMAC-SHA1 of the time
    date_time: str


def parse_authorization(text: str, date_time: str) -> CallCredentials | None:
    """Returns who says to have made a call; None for what is no authorization of RocketMQ's. Some clients name a region
    and a service behind the access key, and some write hex in upper case.
    """
    scheme, _, rest = text.strip().partition(" ")
    words = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    access_key = words.get("Credential", "").partition("/")[0]
    try:
        signature = bytes.fromhex(words.get("Signature", ""))
    except ValueError:
        return None
    return CallCredentials(access_key, signature, date_time) if scheme == CALL_SCHEME and access_key else None


def sign(fields: Mapping[str, Any], body: bytes, credentials: Credentials) -> dict[str, Any]:
    """Returns the fields of a request with those that say and prove who sends it."""
    signed = {name: value for name, value in fields.items() if value is not None}
    signed[ACCESS_KEY] = credentials.access_key
    if credentials.security_token:
        signed[SECURITY_TOKEN] = credentials.security_token
    signed[SIGNATURE] = signature(signed, body, credentials.secret_key)
    return signed


def signature(fields: Mapping[str, Any], body: bytes, secret_key: str) -> str:
    """Returns the signature of a request. Raises TypeError for a field that is neither text, number nor flag."""
    values = [_text(fields[name]) for name in sorted(fields) if name != SIGNATURE]
    content = "".join(values).encode(errors="surrogatepass") + body
    return b64encode(digest(secret_key.encode(), content, "sha1")).decode()


def is_signed(fields: Mapping[str, Any], body: bytes, secret_key: str) -> bool:
    """Whether a request carries the signature that this secret makes. Takes equally long for every wrong one."""
    found = fields.get(SIGNATURE)
    if type(found) is not str:
        return False
    try:
        expected = signature(fields, body, secret_key)
    except TypeError:
        return False
    return compare_digest(expected.encode(), found.encode(errors="replace"))


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    raise TypeError(f"a field of type {type(value).__name__}, expected a text, a number or a flag")


# -- many requests of one user --------------------------------------------------------------------------------------

_BLOCK_BYTES = 64  # of SHA-1
_INNER, _OUTER = 0x36, 0x5C
_Order = Callable[[Mapping[str, Any]], tuple[Any, ...]]
_orders: dict[tuple[str, ...], _Order] = {}  # by the names of fields as they came: takes the signed values in order
_ORDERS_MAX, _NAMES_CHARACTERS_MAX = 256, 1_024  # each kind of client has a few orders of fields


class SigningKey:
    """A secret that checks many signatures. It begins HMAC's two hashes once, and knows in which order the fields of a
    client stand: that is 2 us less for each request than `is_signed`.
    """

    def __init__(self, secret_key: str) -> None:
        key = secret_key.encode()
        if len(key) > _BLOCK_BYTES:
            key = sha1(key, usedforsecurity=False).digest()
        key = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = sha1(bytes(byte ^ _INNER for byte in key), usedforsecurity=False)
        self._outer = sha1(bytes(byte ^ _OUTER for byte in key), usedforsecurity=False)
        self._secret_key = secret_key

    def is_signed(self, fields: Mapping[str, Any], body: bytes) -> bool:
        """Whether a request carries the signature that this secret makes. Takes equally long for every wrong one."""
        try:
            content = "".join(_order(fields)(fields)).encode() + body
            found = fields[SIGNATURE].encode()
        except (TypeError, AttributeError, KeyError, UnicodeEncodeError):  # a bare number, or no signature at all
            return is_signed(fields, body, self._secret_key)
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(content)
        outer.update(inner.digest())
        return compare_digest(b64encode(outer.digest()), found)

    def has_signed(self, credentials: CallCredentials) -> bool:
        """Whether a call carries the signature that this secret makes."""
        expected = digest(self._secret_key.encode(), credentials.date_time.encode(errors="replace"), "sha1")
        return compare_digest(expected, credentials.signature)


def _order(fields: Mapping[str, Any]) -> _Order:
    """Returns what takes the signed values out of fields with these names. Raises TypeError for fewer than two."""
    names = tuple(fields)
    found = _orders.get(names)
    if found is None:
        ordered = sorted(name for name in names if name != SIGNATURE)
        if len(ordered) < 2:
            raise TypeError("one value alone would not come as a tuple")
        found = itemgetter(*ordered)
        if sum(map(len, names)) <= _NAMES_CHARACTERS_MAX:
            if len(_orders) >= _ORDERS_MAX:
                _orders.clear()
            _orders[names] = found
    return found
