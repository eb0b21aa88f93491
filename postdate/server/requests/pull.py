"""Pulls: read what is visible, or wait for it.

A pull that finds nothing new and may wait is held. It is answered when a message that it wants becomes visible, or when
its time is over. Messages that its filter leaves out do not wake the consumer: the held pull skips them.
"""

import asyncio
from collections.abc import Callable, Mapping, Set
from functools import lru_cache
from typing import NamedTuple, TypeVar

from postdate.broker.broker import Broker
from postdate.broker.view import PERM_READ, Pulled, PullStatus, TopicInfo
from postdate.clock import Clock
from postdate.errors import FlowControl, NoPermission, PostdateError, ProtocolError, SubscriptionMissing, UsageError
from postdate.message import INT64_MAX, RETRY_TOPIC_PREFIX, tag_hash
from postdate.server.answers import refusal
from postdate.server.asker import Asker
from postdate.server.connection import Connection
from postdate.server.requests.topic import AutoCreation
from postdate.server.sessions import Sessions
from postdate.server.sessions.offsets import Place
from postdate.wire import codes
from postdate.wire.bodies import parse_subscription
from postdate.wire.frame import JSON, Command, encode_frame, plain_text, reply, show_value
from postdate.wire.requests import REQUESTS
from postdate.wire.rights import SUB, ask_group, ask_topic

_CODES = {
    PullStatus.FOUND: codes.SUCCESS,
    PullStatus.NO_NEW: codes.PULL_NOT_FOUND,
    PullStatus.NO_MATCH: codes.PULL_RETRY_IMMEDIATELY,
    PullStatus.ILLEGAL_OFFSET: codes.PULL_OFFSET_MOVED,
}
_REACHED_MAX = 100_000  # only operators look at it: beyond this it is cleared
_SUSPEND_MS_MAX = 60_000  # clients give up on an answer after 30 s


class _Ask(NamedTuple):
    group: str
    topic: str
    queue_id: int
    offset: int
    count_max: int
    sys_flag: int
    commit_offset: int
    suspend_ms: int
    bytes_max: int


class _Held:
    """A pull that waits."""

    __slots__ = ("ask", "asker", "command", "connection", "number", "offset", "tag_hashes", "timer")

    def __init__(
        self, connection: Connection, command: Command, ask: _Ask, tag_hashes: frozenset[int] | None, number: int
    ) -> None:
        self.connection, self.command, self.ask = connection, command, ask
        self.asker = connection.asker
        self.tag_hashes, self.number = tag_hashes, number
        self.offset = ask.offset
        self.timer: asyncio.TimerHandle | None = None


_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


class Pulls:
    """Answers pulls; holds those that wait, by the number of their queue."""

    def __init__(self, broker: Broker, clock: Clock, sessions: Sessions, creation: AutoCreation) -> None:
        self._broker, self._clock = broker, clock
        self._pullers = sessions.pullers
        self._meter = sessions.meter
        self._offsets = sessions.offsets
        self._members = sessions.members
        self._creation = creation
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, dict[_Held, None]] = {}
        self._held_of: dict[Connection, dict[_Held, None]] = {}
        self.held_count = 0  # of pops too (pop.py)
        self._reached: dict[tuple[str, str, int], int] = {}  # by group, topic and queue id

    def pull(self, connection: Connection, command: Command) -> bytes | None:
        """Returns the answer; None where the pull is held. Raises PostdateError for the client's mistakes."""
        ask = _ask(command)
        self.readable_topic(ask.group, ask.topic)
        tag_hashes = self._tag_hashes(connection, command, ask)
        target = self._offsets.take_move(ask.group, ask.topic, ask.queue_id)
        if target is not None and target != ask.offset:
            return self._answer_without_records(command, ask, PullStatus.ILLEGAL_OFFSET, target)
        place = (ask.topic, ask.queue_id)
        if self._members.may_pull(ask.group, ask.topic, connection):
            had_it = self._pullers.ask(ask.group, place, connection, self._clock.elapsed_ns())
            popped_end = 0 if had_it else self._pullers.popped_end(ask.group, place)
            if ask.offset < popped_end:  # it comes back, and other members have popped meanwhile
                return self._answer_without_records(command, ask, PullStatus.ILLEGAL_OFFSET, popped_end)
        if self._members.is_barred(ask.group, ask.topic, connection):
            pulled = Pulled(PullStatus.NO_NEW, ask.offset, *self._broker.offsets(ask.topic, ask.queue_id))
        else:
            pulled = self._read(connection, ask, ask.offset, tag_hashes)
        if ask.sys_flag & codes.PULL_COMMIT_OFFSET and ask.commit_offset >= 0:
            self._offsets.note(ask.group, ask.topic, ask.queue_id, ask.commit_offset)
        may_wait = ask.sys_flag & codes.PULL_SUSPEND and ask.suspend_ms > 0 and not command.is_oneway
        if pulled.status is PullStatus.NO_NEW and may_wait:
            self._hold(connection, command.without_content(), ask, tag_hashes)
            return None
        return _answer(command, pulled)

    def readable_topic(self, group: str, name: str) -> TopicInfo:
        """Returns a topic that a group may read. Raises TopicNotFound, GroupNotFound, NoPermission."""
        if name == RETRY_TOPIC_PREFIX + group:
            topic: TopicInfo = self._creation.use_retry_topic(group)
        else:
            topic = self._broker.view.topic(name)
        if not self._broker.view.has_group(group):
            self._creation.use_group(group)
        if not topic.perm & PERM_READ:
            raise NoPermission(f"topic {name!r} may not be read: its perm is {topic.perm}")
        return topic

    def _tag_hashes(self, connection: Connection, command: Command, ask: _Ask) -> frozenset[int] | None:
        if ask.sys_flag & codes.PULL_SUBSCRIPTION:
            get = command.fields.get
            try:
                expression, kind = plain_text(get("subscription") or ""), plain_text(get("expressionType") or "TAG")
            except ValueError as error:
                raise ProtocolError(f"subscription or expressionType of a pull: {error}") from error
            check_expression(expression, self._broker.limits.expression_characters_max)
            return tag_hashes_of(expression, kind)
        subscription = self._members.subscription(ask.group, ask.topic, connection)
        if subscription is None:
            raise SubscriptionMissing(f"group {ask.group!r} has no subscription to topic {ask.topic!r}")
        return tag_hashes_of(subscription.expression, subscription.kind)

    def _read(self, connection: Connection, ask: _Ask, offset: int, tag_hashes: frozenset[int] | None) -> Pulled:
        settings = self._broker.settings
        pulled = self._broker.pull(
            ask.topic, ask.queue_id, offset, count_max=min(ask.count_max, settings.pull_count_max),
            bytes_max=min(ask.bytes_max or INT64_MAX, settings.pull_bytes_max), tag_hashes=tag_hashes,
            store_host=connection.broker_host,
        )  # fmt: skip
        if pulled.record_count:
            self._meter.pulled(ask.topic, ask.group, pulled.record_count)
            if len(self._reached) >= _REACHED_MAX:
                self._reached.clear()
            self._reached[ask.group, ask.topic, ask.queue_id] = pulled.next_offset
            self._pullers.give(ask.group, (ask.topic, ask.queue_id), connection, pulled.next_offset)
        return pulled

    def reached(self, group: str, topic: str, queue_id: int) -> int:
        """Returns up to where a group has pulled a queue; 0 where that is not known."""
        return self._reached.get((group, topic, queue_id), 0)

    # -- held pulls ---------------------------------------------------------------------------------------------

    def _hold(self, connection: Connection, command: Command, ask: _Ask, tag_hashes: frozenset[int] | None) -> None:
        full = self.why_full(connection)
        if full:
            # An answer without messages would be worse: a client asks again at once after that, but waits for seconds
            # after a refusal.
            raise FlowControl(full)
        number = self._broker.view.queue_number(ask.topic, ask.queue_id)
        held = _Held(connection, command, ask, tag_hashes, number)
        self._held.setdefault(number, {})[held] = None
        self._held_of.setdefault(connection, {})[held] = None
        self.count_held(connection, 1)
        span_ms = min(ask.suspend_ms, _SUSPEND_MS_MAX)
        self._note_held(held, span_ms)
        held.timer = self._loop.call_later(span_ms / 1_000, self._give_up, held)

    def _note_held(self, held: _Held, span_ms: int) -> None:
        """Notes that the member asks for its queue for this long."""
        place, until_ns = (held.ask.topic, held.ask.queue_id), self._clock.elapsed_ns() + span_ms * 1_000_000
        self._pullers.hold(held.ask.group, place, held.connection, until_ns)

    def count_held(self, connection: Connection, change: int) -> None:
        self.held_count += change
        connection.held_count += change

    def why_full(self, connection: Connection) -> str:
        """Returns why no more pulls and pops of a connection may wait; empty where they may."""
        limits = self._broker.limits
        if self.held_count >= limits.held_pulls_max:
            return f"held_pulls_max: {self.held_count} pulls and pops wait for messages, the limit; try later"
        if connection.held_count >= limits.held_pulls_per_connection_max:
            return (
                f"held_pulls_per_connection_max: {connection.held_count} pulls and pops of this connection wait for "
                "messages, the limit; try later"
            )
        return ""

    def _release(self, held: _Held) -> None:
        discard(self._held, held.number, held)
        discard(self._held_of, held.connection, held)
        self.count_held(held.connection, -1)
        if held.timer is not None:
            held.timer.cancel()

    def wake(self, grown: Set[int]) -> None:
        """Answers the pulls that wait for these queues, which have grown."""
        for number in grown & self._held.keys():
            for held in list(self._held[number]):
                self._try(held)

    def _try(self, held: _Held) -> None:
        try:
            if held.connection.is_paused:
                # Held pulls are many: their answers must not pile up for a client that does not read.
                self._finish_without_records(held, PullStatus.NO_MATCH, held.offset)
                return
            if self._members.is_barred(held.ask.group, held.ask.topic, held.connection):
                return
            pulled = self._read(held.connection, held.ask, held.offset, held.tag_hashes)
            while pulled.status is PullStatus.NO_MATCH:
                held.offset = pulled.next_offset
                pulled = self._read(held.connection, held.ask, held.offset, held.tag_hashes)
        except (PostdateError, OSError) as error:
            self._finish(held, refusal(held.command, error))
            return
        if pulled.status is not PullStatus.NO_NEW:
            self._finish(held, _answer(held.command, pulled))

    def _give_up(self, held: _Held) -> None:
        """Ends a pull whose time is over: its answer has no messages and says from where to go on."""
        self._try(held)
        if held in self._held.get(held.number, ()):
            self._finish_without_records(held, PullStatus.NO_NEW, held.offset)

    def _finish_without_records(self, held: _Held, status: PullStatus, offset: int) -> None:
        self._finish(held, self._answer_without_records(held.command, held.ask, status, offset))

    def _answer_without_records(self, command: Command, ask: _Ask, status: PullStatus, offset: int) -> bytes:
        """Returns an answer without records, after which the client asks again from an offset."""
        low, high = self._broker.offsets(ask.topic, ask.queue_id)
        return _answer(command, Pulled(status, offset, low, high))

    def _finish(self, held: _Held, answer: bytes) -> None:
        self._release(held)
        self._note_held(held, 0)
        held.connection.write(answer)

    def move(self, group: str, targets: Mapping[Place, int]) -> None:
        """Answers the held pulls of a group that an operator has moved in these queues."""
        for (topic, queue_id), target in targets.items():
            self._reached.pop((group, topic, queue_id), None)
            number = self._broker.view.queue_number(topic, queue_id)
            for held in [each for each in self._held.get(number, ()) if each.ask.group == group]:
                self._offsets.take_move(group, topic, queue_id)
                self._finish_without_records(held, PullStatus.ILLEGAL_OFFSET, target)

    def look_again(self, group: str) -> None:
        """Answers the pulls of a group whose members have changed, as far as there is something for them."""
        for held in [held for pulls in self._held.values() for held in pulls if held.ask.group == group]:
            self._try(held)

    def end_forbidden(self) -> None:
        """Ends the pulls of users who may not read any more what they wait for."""
        problem_of = problem_finder()
        for held in [held for pulls in self._held.values() for held in pulls]:
            problem = problem_of(held.asker, held.ask.group, held.ask.topic)
            if problem:
                self._finish(held, refusal(held.command, NoPermission(problem)))

    def drop(self, connection: Connection) -> None:
        """Forgets the pulls of a connection that has ended."""
        for held in list(self._held_of.get(connection, ())):
            self._release(held)

    def release(self, connection: Connection) -> None:
        """Ends the pulls of a client whose subscriptions have changed: held pulls have the old filter."""
        for held in list(self._held_of.get(connection, ())):
            self._give_up(held)

    def release_all(self) -> None:
        """Ends all pulls, because the server stops."""
        for connection in list(self._held_of):
            self.release(connection)


def problem_finder() -> Callable[[Asker, str, str], str]:
    """Returns a function that says why somebody may not read a topic for a group; empty if they may. It decides once
    about each, for the many pulls that wait.
    """
    known: dict[tuple[int, str, str, str], str] = {}

    def find(asker: Asker, group: str, topic: str) -> str:
        key = (id(asker.user), asker.address, group, topic)  # comparing users would compare all of their rules
        if key not in known:
            asked = (ask_group(group, SUB), ask_topic(topic, SUB))
            known[key] = next((asker.explain(each) for each in asked if not asker.may(each)), "")
        return known[key]

    return find


def check_filter(kind: object) -> None:
    """Raises UsageError for all filters but tags. The kind comes from a client, and may be of any type."""
    if kind != "TAG":
        raise UsageError(f"the broker filters by tag, not by {kind if type(kind) is str else show_value(kind)}")


def check_expression(expression: str, limit: int) -> None:
    """Raises UsageError for an expression that is too long: a held pull has its tags in memory."""
    if len(expression) > limit:
        raise UsageError(
            f"expression_characters_max: a subscription has {len(expression)} characters, the limit is {limit}"
        )


def _hash_tags(expression: str, kind: str) -> frozenset[int] | None:
    check_filter(kind)
    tags = parse_subscription("", expression).tags
    return frozenset(map(tag_hash, tags)) if tags else None


# Pulls repeat a few expressions. Long ones are not cached, so that the cache stays small.
_CACHED_CHARACTERS_MAX = 256
_hash_tags_cached = lru_cache(1_024)(_hash_tags)


def tag_hashes_of(expression: str, kind: str) -> frozenset[int] | None:
    """Returns the hashes of the tags that an expression names; None for all. Raises UsageError for other filters."""
    return (_hash_tags_cached if len(expression) <= _CACHED_CHARACTERS_MAX else _hash_tags)(expression, kind)


def discard(table: dict[_Key, dict[_Item, None]], key: _Key, item: _Item) -> None:
    """Removes an item of a key, and the key after its last item."""
    del table[key][item]
    if not table[key]:
        del table[key]


def _ask(command: Command) -> _Ask:
    """Returns the fields of a pull. The usual ones are read directly: a pull of 32 messages takes some 50 us in all."""
    fields = command.fields
    try:
        get = fields.get
        ask = _Ask(
            fields["consumerGroup"], fields["topic"], int(fields["queueId"]), int(fields["queueOffset"]),
            int(fields["maxMsgNums"]), int(get("sysFlag") or 0), int(get("commitOffset") or 0),
            int(get("suspendTimeoutMillis") or 0), int(get("maxMsgBytes") or 0),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError):
        asked = REQUESTS[command.code].read_fields(command.fields)
        ask = _Ask(
            asked["consumerGroup"], asked["topic"], asked["queueId"], asked["queueOffset"], asked["maxMsgNums"],
            asked["sysFlag"], asked["commitOffset"], asked["suspendTimeoutMillis"], asked["maxMsgBytes"],
        )  # fmt: skip
    if type(ask.group) is not str or type(ask.topic) is not str:
        raise ProtocolError("consumerGroup and topic of a pull must be texts")
    if ask.commit_offset > INT64_MAX:
        raise ProtocolError("commitOffset of a pull does not fit 64 bits")
    return ask


def _answer(command: Command, pulled: Pulled) -> bytes:
    status, next_offset, low, high, body, _ = pulled
    code = _CODES[status]
    if command.serialization != JSON:
        fields = {"suggestWhichBrokerId": 0, "nextBeginOffset": next_offset, "minOffset": low, "maxOffset": high}
        return reply(command, code, fields, body=body)
    return encode_frame(
        f'{{"code":{code},"extFields":{{"suggestWhichBrokerId":"0","nextBeginOffset":"{next_offset}",'
        f'"minOffset":"{low}","maxOffset":"{high}"}},"flag":1,"language":"PYTHON","opaque":{command.opaque},'
        f'"serializeTypeCurrentRPC":"JSON","version":{codes.PROTOCOL_VERSION}}}'.encode(),
        body,
    )
