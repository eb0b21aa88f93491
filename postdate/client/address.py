"""Addresses of brokers: how users write them, and which of several answers.

The standard library is all this module needs: it travels to Spark's executors.
"""

import os
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from postdate.client.errors import TimedOut, Unreachable
from postdate.errors import UsageError
from postdate.message import PORT_MAX
from postdate.wire.ids import address_text

ADDRESS_VARIABLE = "POSTDATE_ADDR"
ADDRESS_DEFAULT = "127.0.0.1:9876"
_LOCAL = "unix:"


class Address(NamedTuple):
    """Host and port; or the path of a socket on this machine, and 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_LOCAL}{self.host}" if self.is_local else address_text(self.host, self.port)

    @property
    def is_local(self) -> bool:
        """Whether it is a socket in a folder, which nobody reaches from elsewhere."""
        return self.host.startswith("/")


def parse_address(text: str) -> Address:
    """Reads "host:port"; an IPv6 host stands in brackets; "unix:/path" is a socket in a folder. Raises UsageError."""
    if text.startswith(f"{_LOCAL}/"):
        return Address(text.removeprefix(_LOCAL), 0)
    host, colon, port = text.strip().rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise UsageError(f"the address is {text[:64]!r}, expected host:port, such as 127.0.0.1:9876")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Reads "host:port;host:port", as RocketMQ writes a list of name servers. Raises UsageError."""
    addresses = tuple(parse_address(part) for part in text.split(";") if part.strip())
    if not addresses:
        raise UsageError(f"the address is {text[:64]!r}, expected host:port, such as 127.0.0.1:9876")
    return addresses


def route_addresses(text: str | None) -> tuple[Address, ...]:
    """The addresses that a user names, else those in POSTDATE_ADDR, else that of a broker on this machine."""
    return parse_addresses(os.environ.get(ADDRESS_VARIABLE) or ADDRESS_DEFAULT if text is None else text)


class Attempt:
    """One address to try. A `with` around the try forgives that no broker answers there."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.failure: Unreachable | TimedOut | None = None

    def __enter__(self) -> Address:
        return self.address

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if isinstance(error, Unreachable | TimedOut):
            self.failure = error
        return self.failure is not None


def attempts(addresses: tuple[Address, ...]) -> Iterator[Attempt]:
    """Yields one address after the other until one answers. Raises what the last one raised where none does.

    for attempt in attempts(addresses):
        with attempt as address:
            return ask(address)
    """
    failure: Unreachable | TimedOut | None = None
    for address in addresses:
        attempt = Attempt(address)
        yield attempt
        failure = attempt.failure
        if failure is None:
            return
    assert failure is not None, "there is at least one address"
    if len(addresses) == 1:
        raise failure
    raise Unreachable(f"none of {', '.join(map(str, addresses))} answers; the last one: {failure}") from failure
