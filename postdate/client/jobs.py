"""Jobs of a client: what a predicate selects is cancelled or postponed, and the client waits until that is done."""

import asyncio
import contextlib
import json
import uuid
from typing import Any, NamedTuple

from postdate.client.connection import Address, Connections
from postdate.client.errors import TimedOut, Unreachable, expect_success
from postdate.errors import UsageError
from postdate.wire import bodies
from postdate.wire.frame import NO_FIELDS
from postdate.wire.requests import Request

_PAUSE_SECONDS = 0.2


class Changed(NamedTuple):
    """What became of a job: how many messages it changed, and how many came too late."""

    id: str
    changed: int
    late: int


class Jobs:
    """Of one client. Every port of a broker answers: the route addresses are enough."""

    def __init__(self, connections: Connections, addresses: tuple[Address, ...], timeout: float) -> None:
        self._connections = connections
        self._addresses = addresses
        self._timeout = timeout

    async def done(self, op: str, where: str, by_ms: int, job_id: str | None) -> Changed:
        """Raises UsageError where the predicate is refused; then nothing was changed."""
        job_id = job_id or uuid.uuid4().hex
        job = await self._ask({"call": "ask", "id": job_id, "op": op, "where": where, "by_ms": by_ms})
        while job["state"] not in ("done", "failed"):
            await asyncio.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(Unreachable, TimedOut):  # a broker that is away goes on with it when it is back
                job = await self._ask({"call": "find", "id": job_id})
        if job["state"] == "failed":
            raise UsageError(f"nothing was changed: {job['reason']}")
        return Changed(job_id, job["changed"], job["late"])

    async def _ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        *others, last = self._addresses
        body = json.dumps(wish).encode()
        for address in others:
            with contextlib.suppress(Unreachable, TimedOut):
                return await self._asked(address, body)
        return await self._asked(last, body)

    async def _asked(self, address: Address, body: bytes) -> dict[str, Any]:
        connection = await self._connections.to(address, self._timeout)
        answer = await connection.request(Request.JOB, NO_FIELDS, body, timeout=self._timeout)
        return bodies.load(expect_success(answer).body, "what is said of a job")
