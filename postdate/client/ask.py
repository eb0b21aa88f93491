"""One request of an operator, one answer. Every port of a broker answers every request: the route address is enough."""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Any

from postdate.client.asynchronous import ADDRESS_DEFAULT, ADDRESS_VARIABLE, TIMEOUT_SECONDS_DEFAULT
from postdate.client.connection import Connection, Connections, parse_addresses
from postdate.client.errors import TimedOut, Unreachable, expect_success
from postdate.wire.frame import NO_FIELDS, Command

_ANSWER_SECONDS = 60.0  # counting what waits, or cancelling it with its topic, goes through all of it


def ask(address: str | None, code: int, fields: Mapping[str, Any] = NO_FIELDS, body: bytes = b"") -> Command:
    """The answer of the first address that is reached, if it is one of success. Raises PostdateError."""
    return expect_success(asyncio.run(_ask(address, code, fields, body)))


async def _ask(address: str | None, code: int, fields: Mapping[str, Any], body: bytes) -> Command:
    connections = Connections()
    try:
        connection = await _first_reached(connections, address or os.environ.get(ADDRESS_VARIABLE) or ADDRESS_DEFAULT)
        return await connection.request(code, fields, body, timeout=_ANSWER_SECONDS)
    finally:
        await connections.close()


async def _first_reached(connections: Connections, text: str) -> Connection:
    *others, last = parse_addresses(text)
    for address in others:
        with contextlib.suppress(Unreachable, TimedOut):
            return await connections.to(address, TIMEOUT_SECONDS_DEFAULT)
    return await connections.to(last, TIMEOUT_SECONDS_DEFAULT)
