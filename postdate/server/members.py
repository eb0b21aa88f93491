"""Who is connected: the members of each consumer group with what they subscribe to, and the producers of each group.
No socket is touched here.

Somebody comes with its first heartbeat and stays until it says goodbye, its connection ends or it has been silent for
too long. Every change of a consumer group's members is told to all of them, so that they share the queues out anew at
once.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from postdate.wire.bodies import Consumer, Heartbeat, Subscription

Link = TypeVar("Link", bound=Hashable)  # a connection; in tests, any value


@dataclass(frozen=True, slots=True)
class Present(Generic[Link]):
    """A client as its last heartbeat showed it."""

    client_id: str
    link: Link
    seen_at_ns: int
    language: str
    version: int


@dataclass(frozen=True, slots=True)
class Member(Present[Link]):
    consumer: Consumer


Each = TypeVar("Each", bound=Present)  # type: ignore[type-arg]  # of any link


class _Roll(Generic[Each]):
    """Groups by name, who is there by client id."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Each]] = {}
        self._groups_of: dict[Hashable, set[str]] = {}  # by link
        self.count = 0

    def put(self, group: str, each: Each) -> Each | None:
        """Returns what was known of it before."""
        known = self._groups.setdefault(group, {})
        before = known.get(each.client_id)
        known[each.client_id] = each
        self.count += before is None
        self._groups_of.setdefault(each.link, set()).add(group)
        return before

    def has(self, client_id: str, group: str) -> bool:
        return client_id in self._groups.get(group, ())

    def leave(self, client_id: str, group: str) -> bool:
        """It said goodbye; returns whether it was there."""
        known = self._groups.get(group, {})
        if known.pop(client_id, None) is None:
            return False
        self.count -= 1
        if not known:
            del self._groups[group]
        return True

    def drop(self, link: Hashable) -> set[str]:
        """A connection ended; returns the groups that lost somebody by it."""
        groups = self._groups_of.pop(link, ())
        gone = [(group, each.client_id) for group in groups for each in self.of(group) if each.link == link]
        return {group for group, client_id in gone if self.leave(client_id, group)}

    def expire(self, before_ns: int) -> set[str]:
        """Who was last seen before that instant is gone; returns the groups that lost somebody."""
        gone = [
            (group, each.client_id)
            for group, known in self._groups.items()
            for each in known.values()
            if each.seen_at_ns < before_ns
        ]
        return {group for group, client_id in gone if self.leave(client_id, group)}

    def of(self, group: str) -> list[Each]:
        return list(self._groups.get(group, {}).values())

    def names(self) -> list[str]:
        return list(self._groups)


class Members(Generic[Link]):
    """The members of consumer groups. Producers are only here to be looked at."""

    def __init__(self) -> None:
        self._consumers: _Roll[Member[Link]] = _Roll()
        self._producers: _Roll[Present[Link]] = _Roll()

    def beat(
        self, heartbeat: Heartbeat, link: Link, now_ns: int, language: str, version: int, producers_max: int
    ) -> set[str]:
        """A heartbeat came; returns the consumer groups in which something changed. Producers beyond so many are not
        kept: they send all the same.
        """
        said = (heartbeat.client_id, link, now_ns, language, version)
        for group in heartbeat.producer_groups:
            if self._producers.count < producers_max or self._producers.has(heartbeat.client_id, group):
                self._producers.put(group, Present(*said))
        changed = set()
        for consumer in heartbeat.consumers:
            before = self._consumers.put(consumer.group, Member(*said, consumer))
            if before is None or before.consumer.subscriptions != consumer.subscriptions:
                changed.add(consumer.group)
        return changed

    def leave(self, client_id: str, group: str) -> bool:
        """A member said goodbye; returns whether there was such a member."""
        return self._consumers.leave(client_id, group)

    def leave_producers(self, client_id: str, group: str) -> None:
        self._producers.leave(client_id, group)

    def drop(self, link: Link) -> set[str]:
        """A connection ended; returns the consumer groups that lost a member by it."""
        self._producers.drop(link)
        return self._consumers.drop(link)

    def expire(self, before_ns: int) -> set[str]:
        """Who was last seen before that instant is gone; returns the consumer groups that lost a member."""
        self._producers.expire(before_ns)
        return self._consumers.expire(before_ns)

    def of(self, group: str) -> list[Member[Link]]:
        return self._consumers.of(group)

    def names(self) -> list[str]:
        """Of the groups that have members."""
        return self._consumers.names()

    def producers(self, group: str) -> list[Present[Link]]:
        return self._producers.of(group)

    def producer_groups(self) -> list[str]:
        return self._producers.names()

    def subscribes(self, group: str, topic: str) -> bool:
        """Whether a member of the group wants something of the topic."""
        return any(each.topic == topic for member in self.of(group) for each in member.consumer.subscriptions)

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
