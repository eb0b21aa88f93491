"""Connected clients: the members of each consumer group with their subscriptions, and the producers of each group.

A client comes with its first heartbeat and stays until it says goodbye, its connection ends or it has been silent for
too long. The caller notifies a group's members of every change, so that they share the queues out anew at once. No
socket is touched here.

Members of a group may want different tags of one topic. A message belongs to the group, so only a member that takes
everything that any member wants may move the group on: it covers the topic.

    member    tags of "orders"       covers?
    a         paid                   no: it would leave out what b wants, for ever
    b         paid || refunded       yes

Our clients that do not cover a topic get nothing of it (they are barred) until they do: so a deployment that widens an
expression, member by member, loses nothing. Official clients read whatever they like; there we can only warn.
"""

import logging
from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import Generic, NamedTuple, TypeVar

from postdate.broker.broker import Broker
from postdate.errors import FlowControl, UsageError
from postdate.message import RETRY_TOPIC_PREFIX
from postdate.server.asker import ANYBODY, Asker
from postdate.server.lines import Lines
from postdate.wire.bodies import Consumer, Heartbeat, Subscription

Link = TypeVar("Link", bound=Hashable)  # a connection; in tests, any value


_MEMBER_BYTES = 512  # of a member without its names, in dictionaries, sets and tuples
_SUBSCRIPTION_BYTES = 512  # of a subscription without its texts


class Member(NamedTuple, Generic[Link]):
    """A consumer: one client in one group."""

    client_id: str
    link: Link
    consumer: Consumer
    seen_at_ns: int
    language: str = ""
    version: int = 0

    @property
    def size_bytes(self) -> int:
        """About what it costs in RAM. An expression is stored as text and as tags, hence twice."""
        subscriptions = self.consumer.subscriptions
        texts = sum(len(each.topic) + 2 * len(each.expression) + _SUBSCRIPTION_BYTES for each in subscriptions)
        return _MEMBER_BYTES + len(self.client_id) + len(self.consumer.group) + texts


class Conflict(NamedTuple):
    """Members of a group that take messages from each other, or leave some out that others want."""

    group: str
    topic: str  # empty where it is about the topics themselves
    members: tuple[str, ...]
    warning: str


class Verdict(NamedTuple):
    """What a change of a group's members came to."""

    conflicts: list[Conflict]  # that were not there before
    is_wider: bool  # whether members may read what they were barred from before


class Members(Generic[Link]):
    """The members of all consumer groups: groups by name, members by client id."""

    def __init__(self, broker: Broker, lines: Lines | None = None) -> None:
        self._broker = broker
        self._barred: dict[str, set[tuple[str, Link]]] = {}  # by group: (topic, connection)
        self._conflicts: dict[str, list[Conflict]] = {}  # by group
        self._lines = lines or Lines(broker.limits.complaints_max)
        self._groups: dict[str, dict[str, Member[Link]]] = {}
        self._places_of: dict[Link, set[tuple[str, str]]] = {}  # by connection: group and client id of its members
        self._size_bytes = 0

    def admit(self, heartbeat: Heartbeat, link: Link) -> None:
        """Raises FlowControl where a heartbeat asks for more than there is room for."""
        members = _members_in(heartbeat, link)
        places = {(member.consumer.group, member.client_id) for member in members} | self._places_of.get(link, set())
        if len(places) > self._broker.limits.connection_members_max:
            raise FlowControl(
                f"connection_members_max: one connection has {len(places)} members of groups, "
                f"the limit is {self._broker.limits.connection_members_max}"
            )
        if self._size_bytes + sum(member.size_bytes for member in members) > self._broker.limits.members_bytes_max:
            raise FlowControl(f"members_bytes_max: the members of all groups take {self._size_bytes} bytes; try later")

    def beat(self, heartbeat: Heartbeat, link: Link, now_ns: int, language: str, version: int) -> set[str]:
        """Takes in a heartbeat that was admitted; returns the groups in which something changed."""
        changed = set()
        for member in _members_in(heartbeat, link, now_ns, language, version):
            group = member.consumer.group
            before = self._remove(member.client_id, group)
            if before is None:
                self._lines.write(logging.INFO, "group %s: %.200s joins, from %s", group, member.client_id, link)
            self._groups.setdefault(group, {})[member.client_id] = member
            self._places_of.setdefault(link, set()).add((group, member.client_id))
            self._size_bytes += member.size_bytes
            if before is None or before.consumer.subscriptions != member.consumer.subscriptions:
                changed.add(group)
        return changed

    def drop(self, link: Link) -> set[str]:
        """Removes the members of a connection that has ended; returns the groups that lost one."""
        places = list(self._places_of.get(link, ()))
        for group, client_id in places:
            self._remove(client_id, group)
            gone = "group %s: %.200s leaves, its connection from %s has ended"
            self._lines.write(logging.INFO, gone, group, client_id, link)
        return {group for group, _ in places}

    def expire(self, before_ns: int) -> set[str]:
        """Removes the members last seen before an instant; returns the groups that lost one."""
        changed = set()
        for group in list(self._groups):
            for member in self.of(group):
                if member.seen_at_ns < before_ns:
                    self._remove(member.client_id, group)
                    changed.add(group)
                    silent = "group %s: %.200s at %s is taken for gone, it sent no heartbeat"
                    self._lines.write(logging.WARNING, silent, group, member.client_id, member.link)
        return changed

    def leave(self, client_id: str, group: str) -> Member[Link] | None:
        """Removes a member, which says goodbye; returns it if there was one."""
        member = self._remove(client_id, group)
        if member is not None:
            self._lines.write(logging.INFO, "group %s: %.200s at %s says goodbye", group, client_id, member.link)
        return member

    def _remove(self, client_id: str, group: str) -> Member[Link] | None:
        member = self._groups.get(group, {}).pop(client_id, None)
        if member is None:
            return None
        if not self._groups[group]:
            del self._groups[group]
        places = self._places_of[member.link]
        places.discard((group, client_id))
        if not places:
            del self._places_of[member.link]
        self._size_bytes -= member.size_bytes
        return member

    def of(self, group: str) -> list[Member[Link]]:
        return list(self._groups.get(group, {}).values())

    def has(self, group: str, link: Link) -> bool:
        """Returns whether a connection has a member of a group."""
        return any(name == group for name, _ in self._places_of.get(link, ()))

    def names(self) -> list[str]:
        return list(self._groups)

    def topics(self, group: str) -> set[str]:
        """Returns the topics that members of a group subscribe to."""
        return {each.topic for member in self.of(group) for each in member.consumer.subscriptions}

    def subscribes(self, group: str, topic: str) -> bool:
        return _subscription_to(topic, self._groups.get(group, {}).values()) is not None

    def subscription(self, group: str, topic: str, link: Link) -> Subscription | None:
        """Returns the subscription to a topic of a connection's own member; of any other member where it has none."""
        members = self._groups.get(group, {})
        own = [members[client_id] for name, client_id in self._places_of.get(link, ()) if name == group]
        return _subscription_to(topic, own) or _subscription_to(topic, members.values())

    # -- who shares a topic -------------------------------------------------------------------------------------

    def sharing(self, group: str, topic: str) -> list[Member[Link]]:
        """Returns the members that share a topic's work: those that subscribe to it and cover it. Official clients
        share it with the whole group, whoever subscribes; beside one of them, so must ours.
        """
        members = self.of(group)
        if not all(member.consumer.shares_by_topic for member in members):
            return members
        wanting = _wanting(members, topic)
        wanted = _union(wanting.values())
        return [member for member in members if _covers(wanting.get(member.client_id), wanted)]

    def reads(self, group: str, topic: str, *, by_pops: bool) -> bool:
        """Returns whether a member that pops, or one that only pulls, subscribes to a topic. All of our clients pop at
        least what came back.
        """
        return any(
            (member.consumer.shares_by_topic or member.consumer.consume_type == "CONSUME_POP") == by_pops
            for member in self.of(group)
            if member.client_id in _wanting([member], topic)
        )

    def is_barred(self, group: str, topic: str, link: Link) -> bool:
        """Returns whether a connection's member would leave out messages that other members want."""
        return bool(self._barred) and (topic, link) in self._barred.get(group, ())

    def barred(self, group: str) -> AbstractSet[tuple[str, Link]]:
        """Returns (topic, connection) of a group's barred members."""
        return self._barred.get(group, set())

    def may_pull(self, group: str, topic: str, link: Link) -> bool:
        """Returns whether a connection has a member of a group that is not barred from a topic."""
        return self.has(group, link) and not self.is_barred(group, topic, link)

    def refuse_contradiction(self, heartbeat: Heartbeat) -> None:
        """Raises UsageError for a client of ours that comes, or changes its tags, so that no member would cover a
        topic: all would wait for each other.
        """
        for consumer in heartbeat.consumers:
            known = self._groups.get(consumer.group, {})
            before = known.get(heartbeat.client_id)
            if not consumer.shares_by_topic or (before and before.consumer.subscriptions == consumer.subscriptions):
                continue
            others = [member for client_id, member in known.items() if client_id != heartbeat.client_id]
            for subscription in consumer.subscriptions:
                wanting = _wanting(others, subscription.topic)
                wanted = _union([*wanting.values(), subscription])
                if wanting and not any(_covers(each, wanted) for each in [*wanting.values(), subscription]):
                    raise UsageError(
                        f"group {consumer.group!r}: this member wants {_expression(subscription)} of topic "
                        f"{subscription.topic!r}, others want {_list_expressions(wanting)}, and none of them wants all "
                        "of that: a message would be left out by whoever reads it; take a group of its own, or tags "
                        "that include those of the others"
                    )

    def judge(self, group: str) -> Verdict:
        """Finds out who is barred and who is in conflict after the members of a group have changed."""
        members = [member for member in self.of(group) if member.consumer.message_model != "BROADCASTING"]
        barred: set[tuple[str, Link]] = set()
        reading: set[tuple[str, Link]] = set()
        conflicts = list(_topic_conflicts(group, members))
        for topic in {each.topic for member in members for each in member.consumer.subscriptions}:
            wanting = _wanting(members, topic)
            wanted = _union(wanting.values())
            for member in members:
                subscription = wanting.get(member.client_id)
                if subscription is not None:
                    is_free = _covers(subscription, wanted) or not member.consumer.shares_by_topic
                    (reading if is_free else barred).add((topic, member.link))
            conflicts += _tag_conflicts(group, topic, members, wanting)
        before, known = self._barred.pop(group, set()), self._conflicts.pop(group, [])
        if barred - reading:
            self._barred[group] = barred - reading
        if conflicts:
            self._conflicts[group] = conflicts
        return Verdict([each for each in conflicts if each not in known], bool(before - self._barred.get(group, set())))

    def conflicts(self, group: str | None = None) -> list[Conflict]:
        """Returns the conflicts of one group, or of all."""
        groups = sorted(self._conflicts) if group is None else [group]
        return [each for name in groups for each in self._conflicts.get(name, ())]


# -- tags that members want -------------------------------------------------------------------------------------

_NAMED_MAX = 5  # members in a sentence


def _wanting(members: Iterable[Member[Link]], topic: str) -> dict[str, Subscription]:
    """Returns the subscriptions to a topic by client id."""
    return {
        member.client_id: each
        for member in members
        for each in member.consumer.subscriptions
        if each.topic == topic and member.consumer.message_model != "BROADCASTING"
    }


def _union(subscriptions: Iterable[Subscription]) -> frozenset[str]:
    """Returns the tags that any of them takes; none means all, as in a subscription."""
    found: frozenset[str] = frozenset()
    for each in subscriptions:
        if not each.tags:
            return frozenset()
        found |= each.tags
    return found


def _covers(subscription: Subscription | None, wanted: frozenset[str]) -> bool:
    return subscription is not None and (not subscription.tags or (bool(wanted) and wanted <= subscription.tags))


def _expression(subscription: Subscription) -> str:
    return repr(" || ".join(sorted(subscription.tags)) or "*")


def _list_expressions(wanting: dict[str, Subscription]) -> str:
    shown = [f"{_expression(each)} ({client_id})" for client_id, each in list(wanting.items())[:_NAMED_MAX]]
    more = len(wanting) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _topic_conflicts(group: str, members: list[Member[Link]]) -> Iterable[Conflict]:
    """Members of different topics beside an official client, which shares queues with all of them."""
    official = [member.client_id for member in members if not member.consumer.shares_by_topic]
    topics = {
        member.client_id: sorted(
            each.topic for each in member.consumer.subscriptions if not each.topic.startswith(RETRY_TOPIC_PREFIX)
        )
        for member in members
    }
    if official and len({tuple(each) for each in topics.values()}) > 1:
        shown = [f"{', '.join(each) or 'nothing'} ({client_id})" for client_id, each in topics.items()][:_NAMED_MAX]
        yield Conflict(
            group, "", tuple(topics),
            f"group {group!r}: its members subscribe to different topics: {'; '.join(shown)}. Clients that share "
            f"queues with the whole group ({', '.join(official[:_NAMED_MAX])}) leave queues to members that do not "
            "read them: give each set of topics a group of its own",
        )  # fmt: skip


def _tag_conflicts(
    group: str, topic: str, members: list[Member[Link]], wanting: dict[str, Subscription]
) -> Iterable[Conflict]:
    """Official clients that leave out what others want, and members of which none takes everything."""
    wanted = _union(wanting.values())
    covering = [client_id for client_id, each in wanting.items() if _covers(each, wanted)]
    leaving_out = [
        member.client_id
        for member in members
        if member.client_id in wanting and member.client_id not in covering and not member.consumer.shares_by_topic
    ]
    where, all_wanted = f"group {group!r}, topic {topic!r}", _list_expressions(wanting)
    if leaving_out:
        yield Conflict(
            group, topic, tuple(wanting),
            f"{where}: its members want {all_wanted}. {', '.join(leaving_out[:_NAMED_MAX])} will leave out, for the "
            "whole group, what only others want: give all members of a group the same tags",
        )  # fmt: skip
    if wanting and not covering and len(leaving_out) < len(wanting):
        yield Conflict(
            group, topic, tuple(wanting),
            f"{where}: its members want {all_wanted}, and none of them wants all of that: those of our clients wait, "
            "and get nothing. Start a member that takes all these tags, or give each set of tags a group of its own",
        )  # fmt: skip


def _members_in(
    heartbeat: Heartbeat, link: Link, seen_at_ns: int = 0, language: str = "", version: int = 0
) -> list[Member[Link]]:
    return [
        Member(heartbeat.client_id, link, consumer, seen_at_ns, language, version) for consumer in heartbeat.consumers
    ]


def _subscription_to(topic: str, members: Iterable[Member[Link]]) -> Subscription | None:
    subscriptions = (each for member in members for each in member.consumer.subscriptions)
    return next((each for each in subscriptions if each.topic == topic), None)


# -- producers --------------------------------------------------------------------------------------------------


class Sender(NamedTuple, Generic[Link]):
    """A producer: one client in one group."""

    client_id: str
    link: Link
    seen_at_ns: int
    language: str
    version: int
    asker: Asker = ANYBODY  # who sent the heartbeat


class Senders(Generic[Link]):
    """The producers of all groups, as their heartbeats name them: for operators, and for checks of transactions.
    Producers beyond groups_max are not listed, and send all the same.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups: dict[str, dict[str, Sender[Link]]] = {}
        self._groups_of: dict[Link, set[str]] = {}
        self._count = 0

    def beat(
        self, heartbeat: Heartbeat, link: Link, now_ns: int, language: str, version: int, asker: Asker = ANYBODY
    ) -> None:
        sender = Sender(heartbeat.client_id, link, now_ns, language, version, asker)
        for group in heartbeat.producer_groups:
            is_known = heartbeat.client_id in self._groups.get(group, ())
            if is_known or self._count < self._broker.settings.groups_max:
                self._groups.setdefault(group, {})[heartbeat.client_id] = sender
                self._groups_of.setdefault(link, set()).add(group)
                self._count += not is_known

    def leave(self, client_id: str, group: str) -> None:
        """Removes a producer that says goodbye."""
        known = self._groups.get(group, {})
        if known.pop(client_id, None) is None:
            return
        self._count -= 1
        if not known:
            del self._groups[group]

    def drop(self, link: Link) -> None:
        """Removes the producers of a connection that has ended."""
        for group in self._groups_of.pop(link, ()):
            for sender in self.of(group):
                if sender.link == link:
                    self.leave(sender.client_id, group)

    def expire(self, before_ns: int) -> None:
        """Removes the producers last seen before an instant."""
        for group in self.names():
            for sender in self.of(group):
                if sender.seen_at_ns < before_ns:
                    self.leave(sender.client_id, group)

    def of(self, group: str) -> list[Sender[Link]]:
        return list(self._groups.get(group, {}).values())

    def names(self) -> list[str]:
        return list(self._groups)
