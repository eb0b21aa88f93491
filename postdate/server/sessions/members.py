"""Connected clients: the members of each consumer group with their subscriptions, and the producers of each group.

A client comes with its first heartbeat and stays until it says goodbye, its connection ends or it has been silent for
too long. The caller notifies a group's members of every change, so that they share the queues out anew at once. No
socket is touched here.
"""

import logging
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from postdate.broker.broker import Broker
from postdate.errors import FlowControl
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


class Members(Generic[Link]):
    """The members of all consumer groups: groups by name, members by client id."""

    def __init__(self, broker: Broker, lines: Lines | None = None) -> None:
        self._broker = broker
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

    def names(self) -> list[str]:
        return list(self._groups)

    def subscribes(self, group: str, topic: str) -> bool:
        return _subscription_to(topic, self._groups.get(group, {}).values()) is not None

    def subscription(self, group: str, topic: str, link: Link) -> Subscription | None:
        """Returns the subscription to a topic of a connection's own member; of any other member where it has none."""
        members = self._groups.get(group, {})
        own = [members[client_id] for name, client_id in self._places_of.get(link, ()) if name == group]
        return _subscription_to(topic, own) or _subscription_to(topic, members.values())


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


class Senders(Generic[Link]):
    """The producers of all groups, as their heartbeats name them: only operators ask for them. Producers beyond
    groups_max are not listed, and send all the same.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups: dict[str, dict[str, Sender[Link]]] = {}
        self._groups_of: dict[Link, set[str]] = {}
        self._count = 0

    def beat(self, heartbeat: Heartbeat, link: Link, now_ns: int, language: str, version: int) -> None:
        sender = Sender(heartbeat.client_id, link, now_ns, language, version)
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
