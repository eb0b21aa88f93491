"""Permits for bulk: who may read or write what over Arrow Flight, and until when.

    holder . expires at . topic . signature        pipeline.1800000000000..9f2c

The broker hands them out over remoting, where it knows who asks; bulk checks them without asking anybody. Both have the
token of the data folder, and a pipeline has it too. Permits are signed with a key that is made of it, so that a key
that leaks from bulk is not the token. An empty topic stands for everything.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hmac import compare_digest, digest
from typing import NamedTuple

from postdate.access.token import TOKEN_USER
from postdate.errors import UsageError

READER = "reader"  # reads, and writes nothing
LIFE_MS = 24 * 60 * 60 * 1_000  # a query may read for a day; each call needs a permit that is good when it begins
_PURPOSE = b"postdate bulk"


class Permit(NamedTuple):
    """What its holder may do. The pipeline also writes chunks and selections."""

    holder: str
    expires_at_ms: int
    topic: str

    @property
    def may_write(self) -> bool:
        return self.holder == TOKEN_USER

    def may_read(self, topic: str) -> bool:
        """Whether it is good for a topic; for everything else, where that is empty."""
        return self.topic in ("", topic)


def make_permit(token: str, holder: str, now_ms: int, topic: str = "") -> str:
    """Returns the text of a permit that is good for a day; empty where there is no token, as nobody checks it then."""
    if not token:
        return ""
    content = f"{holder}.{now_ms + LIFE_MS}.{urlsafe_b64encode(topic.encode()).decode()}"
    return f"{content}.{_sign(token, content)}"


def read_permit(token: str, text: str, now_ms: int) -> Permit:
    """Reads a permit. Raises UsageError for one that is not ours, or not good any more."""
    content, _, signature = text.rpartition(".")
    if not content or not compare_digest(_sign(token, content).encode(), signature.encode()):
        raise UsageError("the permit is not one of this broker's: ask the broker for another")
    holder, expires, topic = content.split(".")  # we have signed it, so it is as we make it
    if now_ms > int(expires):
        raise UsageError("the permit is not good any more: ask the broker for another")
    return Permit(holder, int(expires), urlsafe_b64decode(topic).decode())


def _sign(token: str, content: str) -> str:
    key = digest(token.encode(), _PURPOSE, "sha256")
    return digest(key, content.encode(errors="replace"), "sha256").hex()
