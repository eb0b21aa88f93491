"""What operators and their programs ask a broker, as values: one function per request of the protocol, and jobs.

The functions take the route address, for every port of a broker answers every request. Who asks is found in the
environment or in the file of credentials (`security.find_login`). They raise PostdateError where no broker is reached
or it refuses.
"""

import asyncio
import base64
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import orjson

from postdate import contract
from postdate.client.address import Address, attempts, route_addresses
from postdate.client.connection import Connection, Connections
from postdate.client.errors import BrokerError, TimedOut, Unreachable, expect_success
from postdate.client.received import decompress
from postdate.client.security import find_login
from postdate.contract import FAILED, JobStatus
from postdate.errors import ProtocolError, UsageError
from postdate.message import (
    PROPERTY_DUE_MS,
    PROPERTY_KEYS,
    PROPERTY_PLACE,
    PROPERTY_STATE,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    decode_properties,
)
from postdate.wire import bodies, codes
from postdate.wire.frame import NO_FIELDS, Command
from postdate.wire.ids import message_id
from postdate.wire.records import Record, decode_records
from postdate.wire.requests import Request

CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 60.0  # counting what waits, or cancelling it with its topic, goes through all of it
_POLL_SECONDS = 0.2


def ask(address: str | None, code: int, fields: Mapping[str, Any] = NO_FIELDS, body: bytes = b"") -> Command:
    """Asks the first address that is reached. Raises PostdateError where the answer is none of success."""
    return expect_success(asyncio.run(_ask(address, code, fields, body)))


async def _ask(address: str | None, code: int, fields: Mapping[str, Any], body: bytes) -> Command:
    connections = Connections(security=find_login().open())
    try:
        connection = await connect_first(connections, route_addresses(address), CONNECT_SECONDS)
        return await connection.request(code, fields, body, timeout=_ANSWER_SECONDS)
    finally:
        await connections.close()


async def connect_first(connections: Connections, addresses: tuple[Address, ...], timeout: float) -> Connection:
    """Connects to the first address that can be reached. Raises Unreachable, TimedOut."""
    for attempt in attempts(addresses):
        with attempt as address:
            return await connections.to(address, timeout)
    raise AssertionError("an attempt has succeeded, or the last one has raised")


class Topic(NamedTuple):
    """How many queues a topic has, and what may be done with them."""

    name: str
    read_queue_count: int
    write_queue_count: int
    perm: int


class QueueRange(NamedTuple):
    """The offsets of a queue: the first that is there, and the one that the next message gets."""

    queue_id: int
    min_offset: int
    max_offset: int


class Progress(NamedTuple):
    """How far a group has read a queue."""

    topic: str
    queue_id: int
    committed: int
    max_offset: int
    leased: int  # messages before the committed offset that were given by pops and are not acknowledged

    @property
    def lag(self) -> int:
        return self.max_offset - self.committed


class FoundMessage(NamedTuple):
    """A message that was looked up. `at_ms` is when it became visible, or was stored where it is not. `place` is where
    it waits: wheel, log or table; empty if it does not.
    """

    topic: str
    id: str
    keys: str
    tag: str
    state: str
    due_at_ms: int | None
    at_ms: int
    queue_id: int
    queue_offset: int
    body: bytes
    place: str


class Lookup(NamedTuple):
    """What a lookup has found. `unread` says why the table was not asked, which may have more."""

    messages: list[FoundMessage]
    unread: str


# -- jobs -------------------------------------------------------------------------------------------------------

Show = Callable[[JobStatus], None]


class Changed(NamedTuple):
    """What became of a job: how many messages it changed, and how many came too late."""

    id: str
    changed: int
    late: int


async def wait_for_job(
    find: Callable[[], Awaitable[JobStatus]], show: Show | None = None, away_seconds: float | None = None
) -> JobStatus:
    """Waits until a job is over. A broker that is away goes on with it when it is back.

    `find` asks where it is. `show` sees it each time until it is over. `away_seconds` bounds how long the broker may be
    away; then its Unreachable or TimedOut is raised.
    """
    loop = asyncio.get_running_loop()
    away_since: float | None = None
    while True:
        try:
            job = await find()
        except (Unreachable, TimedOut):
            away_since = loop.time() if away_since is None else away_since
            if away_seconds is not None and loop.time() - away_since > away_seconds:
                raise
        else:
            away_since = None
            if job.is_over:
                return job
            if show is not None:
                show(job)
        await asyncio.sleep(_POLL_SECONDS)


class Jobs:
    """The jobs of a client, over its connections."""

    def __init__(self, connections: Connections, addresses: tuple[Address, ...], timeout: float) -> None:
        self._connections, self._addresses, self._timeout = connections, addresses, timeout

    async def change(self, op: str, where: str, by_ms: int, job_id: str | None) -> Changed:
        """Cancels or postpones what a predicate selects, and waits. Raises UsageError where nothing was changed."""
        job_id = job_id or uuid.uuid4().hex
        job = await self.ask(op, where, by_ms, job_id)
        if not job.is_over:
            job = await self.wait(job_id)
        if job.state == FAILED:
            raise UsageError(f"nothing was changed: {job.reason}")
        return Changed(job_id, job.changed, job.late)

    async def ask(self, op: str, where: str, by_ms: int, job_id: str) -> JobStatus:
        return await self._status({"call": "ask", "id": job_id, "op": op, "where": where, "by_ms": by_ms})

    async def wait(self, job_id: str, show: Show | None = None, away_seconds: float | None = None) -> JobStatus:
        return await wait_for_job(lambda: self._status({"call": "find", "id": job_id}), show, away_seconds)

    async def _status(self, request: dict[str, Any]) -> JobStatus:
        connection = await connect_first(self._connections, self._addresses, self._timeout)
        answer = await connection.request(Request.JOB, NO_FIELDS, json.dumps(request).encode(), timeout=self._timeout)
        return JobStatus.read(contract.load(expect_success(answer).body, "the state of a job"))


def ask_job(address: str | None, op: str, where: str, by_ms: int, job_id: str) -> JobStatus:
    """Asks for a cancel, or a postponement by this many milliseconds, of what a predicate selects."""
    return JobStatus.read(_job(address, {"call": "ask", "id": job_id, "op": op, "where": where, "by_ms": by_ms}))


def withdraw_job(address: str | None, job_id: str) -> JobStatus:
    """Ends a job that has changed nothing yet."""
    return JobStatus.read(_job(address, {"call": "fail", "id": job_id, "reason": "withdrawn"}))


def list_jobs(address: str | None) -> tuple[int, list[JobStatus]]:
    """The broker's time in epoch ms, and the jobs that it knows."""
    plain = _job(address, {"call": "list"})
    return contract.Fields(plain, "the list of jobs").number("now_ms"), contract.read_jobs(plain)


def follow_job(
    address: str | None, job_id: str, show: Show | None = None, away_seconds: float | None = None
) -> JobStatus:
    """Waits until a job is over, as `wait_for_job` does."""

    async def follow() -> JobStatus:
        connections = Connections(security=find_login().open())
        try:
            jobs = Jobs(connections, route_addresses(address), CONNECT_SECONDS)
            return await jobs.wait(job_id, show, away_seconds)
        finally:
            await connections.close()

    return asyncio.run(follow())


def _job(address: str | None, request: dict[str, Any]) -> dict[str, Any]:
    return contract.load(ask(address, Request.JOB, body=orjson.dumps(request)).body, "the answer about a job")


# -- what waits -------------------------------------------------------------------------------------------------


def pending(address: str | None, topic: str = "", unit: str = "minute", limit: int = 100) -> dict[str, Any]:
    """{"total", "bytes", "near", "far", "table", "unread", "topics": [...], "unit", "times": [...], "truncated"}"""
    fields = {"topic": topic, "unit": unit, "limit": limit}
    return bodies.load(ask(address, Request.GET_PENDING, fields).body, "what waits")


def forecast(address: str | None, topic: str, unit: str, bars: int) -> dict[str, Any]:
    """{"unit", "topic", "unread", "bars": [{"from_ms", "rows", "busiest_ms", "busiest_rows"}]}"""
    fields = {"topic": topic, "unit": unit, "bars": bars}
    return bodies.load(ask(address, Request.GET_FORECAST, fields).body, "what is ahead")


def status(address: str | None) -> dict[str, Any]:
    """{"broker": {...}, "far": {...}, "table", "reports": [...], "parts": {...}}"""
    return bodies.load(ask(address, Request.GET_STATUS).body, "the state of a broker")


def find(address: str | None, topic: str, key: str, limit: int) -> Lookup:
    """The messages of a key, newest first."""
    fields = {"topic": topic, "key": key, "maxNum": limit}
    return read_found(asyncio.run(_ask(address, Request.QUERY_MESSAGE, fields, b"")))


def read_found(answer: Command) -> Lookup:
    """Reads the answer to QUERY_MESSAGE. Raises what it means otherwise."""
    unread = answer.fields.get("unread") or ""
    if answer.code == codes.QUERY_NOT_FOUND:
        return Lookup([], unread)
    return Lookup([_read_found(record) for record in decode_records(expect_success(answer).body)], unread)


def _read_found(record: Record) -> FoundMessage:
    try:
        body = decompress(record.body, record.sys_flag)
    except ProtocolError:  # compressed in a way that we cannot read
        body = record.body
    properties = decode_properties(record.properties)
    due_at_ms = properties.get(PROPERTY_DUE_MS)
    return FoundMessage(
        record.topic, properties.get(PROPERTY_UNIQ_KEY) or message_id(record.store_host, record.offset),
        properties.get(PROPERTY_KEYS, ""), properties.get(PROPERTY_TAGS, ""),
        properties.get(PROPERTY_STATE, "waiting" if record.queue_offset < 0 else "visible"),
        int(due_at_ms) if due_at_ms else None, record.stored_at_ms, record.queue_id, record.queue_offset, body,
        properties.get(PROPERTY_PLACE, ""),
    )  # fmt: skip


# -- topics -----------------------------------------------------------------------------------------------------


# -- transactions -----------------------------------------------------------------------------------------------


def open_transactions(
    address: str | None, topic: str = "", *, given_up: bool = False, limit: int = 100
) -> list[dict[str, Any]]:
    """Transactions that are open, the oldest first; with `given_up`, those that nobody is asked about any more."""
    found: list[dict[str, Any]] = []
    after = -1
    while len(found) < limit:
        body = ask(address, Request.GET_TRANSACTIONS, {"topic": topic, "after": after}).body
        page = bodies.load(body, "open transactions")
        found += [each for each in page["transactions"] if each["givenUp"] or not given_up]
        after = page["next"]
        if after < 0:
            break
    return found[:limit]


def open_transaction(address: str | None, id: str) -> dict[str, Any] | str:
    """One of them, with its properties and its body; how it has ended where it is not open."""
    page = bodies.load(ask(address, Request.GET_TRANSACTIONS, {"id": id}).body, "an open transaction")
    for each in page["transactions"]:
        return dict(each) | {"body": base64.b64decode(each["body"])}
    return str(page["outcome"])


def end_transaction(address: str | None, id: str, *, is_commit: bool) -> str:
    """Commits a transaction or rolls it back; returns how it has ended, by this or before."""
    answer = asyncio.run(_ask(address, Request.RESOLVE_TRANSACTION, {"id": id, "commit": is_commit}, b""))
    outcome = answer.fields.get("outcome")
    return str(outcome or expect_success(answer).fields["outcome"])


def topic_names(address: str | None) -> list[str]:
    body = ask(address, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body
    return sorted(bodies.load(body, "a list of topics").get("topicList") or ())


def topic(address: str | None, name: str) -> Topic:
    """Raises TopicNotFound, also for one that only has the route that it would have, as TBW102."""
    queue_ranges(address, name)
    route = bodies.decode_route(ask(address, Request.GET_ROUTEINFO_BY_TOPIC, {"topic": name}).body)
    _, read_queue_count, write_queue_count, perm = route.queues[0]
    return Topic(name, read_queue_count, write_queue_count, perm)


def queue_ranges(address: str | None, name: str) -> list[QueueRange]:
    """Raises TopicNotFound."""
    body = ask(address, Request.GET_TOPIC_STATS_INFO, {"topic": name}).body
    table = bodies.decode_by_queue(body, "offsetTable")
    return sorted(QueueRange(queue.queue_id, row["minOffset"], row["maxOffset"]) for queue, row in table.items())


def put_topic(address: str | None, wanted: Topic) -> None:
    """Creates a topic or changes it."""
    fields = {
        "topic": wanted.name, "defaultTopic": "TBW102", "readQueueNums": wanted.read_queue_count,
        "writeQueueNums": wanted.write_queue_count, "perm": wanted.perm, "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0, "order": "false",
    }  # fmt: skip
    ask(address, Request.UPDATE_AND_CREATE_TOPIC, fields)


def delete_topic(address: str | None, name: str) -> int:
    """Returns how many waiting messages were cancelled with it."""
    return int(ask(address, Request.DELETE_TOPIC_IN_BROKER, {"topic": name}).fields.get("cancelled") or 0)


# -- groups -----------------------------------------------------------------------------------------------------


def group_names(address: str | None) -> list[str]:
    body = ask(address, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    return sorted(bodies.load(body, "a list of groups").get("subscriptionGroupTable") or ())


def group_settings(address: str | None, name: str) -> dict[str, Any] | None:
    """The settings of a group; None where there is no such group."""
    body = ask(address, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    found: dict[str, Any] | None = (bodies.load(body, "a list of groups").get("subscriptionGroupTable") or {}).get(name)
    return found


def put_group(address: str | None, name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Creates a group or changes its settings: those that are named; None removes one."""
    body = orjson.dumps({**(settings or {}), "groupName": name})
    ask(address, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)


def delete_group(address: str | None, name: str) -> None:
    ask(address, Request.DELETE_SUBSCRIPTIONGROUP, {"groupName": name})


def members(address: str | None, group: str) -> list[str]:
    """The ids of the clients that read for a group at this moment."""
    try:
        answer = ask(address, Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    except BrokerError as error:
        if error.code != codes.SYSTEM_ERROR:
            raise
        return []  # RocketMQ's way to say that nobody is there
    return sorted(bodies.decode_consumer_ids(answer.body))


def group_warnings(address: str | None, group: str) -> list[str]:
    """What is wrong with the members of a group: subscriptions that contradict each other."""
    try:
        answer = ask(address, Request.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group})
    except BrokerError as error:
        if error.code != codes.CONSUMER_NOT_ONLINE:
            raise
        return []
    return list(bodies.load(answer.body, "the members of a group").get("warnings") or ())


def progress(address: str | None, group: str) -> list[Progress]:
    body = ask(address, Request.GET_CONSUME_STATS, {"consumerGroup": group}).body
    table = bodies.decode_by_queue(body, "offsetTable")
    return sorted(
        Progress(queue.topic, queue.queue_id, row["consumerOffset"], row["brokerOffset"], row.get("leased", 0))
        for queue, row in table.items()
    )
