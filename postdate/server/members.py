"""Who is connected: the members of each consumer group and what they subscribe to. No socket is touched here.

A member comes with its first heartbeat and stays until it says goodbye, its connection ends or it has been silent for
too long. Every change of a group's members is told to all of them, so that they share the queues out anew at once.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from postdate.wire.bodies import Consumer, Heartbeat, Subscription

Link = TypeVar("Link", bound=Hashable)  # a connection; in tests, any value


class Member(NamedTuple, Generic[Link]):
    client_id: str
    link: Link
    consumer: Consumer
    seen_at_ns: int


class Members(Generic[Link]):
    """Groups by name, members by client id."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Member[Link]]] = {}
        self._groups_of: dict[Link, set[str]] = {}

    def beat(self, heartbeat: Heartbeat, link: Link, now_ns: int) -> set[str]:
        """A heartbeat came; returns the groups in which something changed."""
        changed = set()
        for consumer in heartbeat.consumers:
            members = self._groups.setdefault(consumer.group, {})
            before = members.get(heartbeat.client_id)
            members[heartbeat.client_id] = Member(heartbeat.client_id, link, consumer, now_ns)
            self._groups_of.setdefault(link, set()).add(consumer.group)
            if before is None or before.consumer.subscriptions != consumer.subscriptions:
                changed.add(consumer.group)
        return changed

    def leave(self, client_id: str, group: str) -> bool:
        """A member said goodbye; returns whether there was such a member."""
        members = self._groups.get(group, {})
        if members.pop(client_id, None) is None:
            return False
        if not members:
            del self._groups[group]
        return True

    def drop(self, link: Link) -> set[str]:
        """A connection ended; returns the groups that lost a member by it."""
        changed = set()
        for group in self._groups_of.pop(link, ()):
            for member in self.of(group):
                if member.link == link and self.leave(member.client_id, group):
                    changed.add(group)
        return changed

    def expire(self, before_ns: int) -> set[str]:
        """Members that were last seen before that instant are gone; returns the groups that lost one."""
        changed = set()
        for group in list(self._groups):
            for member in self.of(group):
                if member.seen_at_ns < before_ns and self.leave(member.client_id, group):
                    changed.add(group)
        return changed

    def of(self, group: str) -> list[Member[Link]]:
        return list(self._groups.get(group, {}).values())

    def subscription(self, group: str, topic: str, link: Link) -> Subscription | None:
        """What the member behind a connection wants of a topic; what any other member wants, where it has not said."""
        found = None
        for member in self.of(group):
            for subscription in member.consumer.subscriptions:
                if subscription.topic == topic:
                    if member.link == link:
                        return subscription
                    found = subscription
        return found
