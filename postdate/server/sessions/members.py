"""Who is connected: the members of each consumer group and what they subscribe to. No socket is touched here.

A member comes with its first heartbeat and stays until it says goodbye, its connection ends or it has been silent for
too long. Every change of a group's members is told to all of them, so that they share the queues out anew at once.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from postdate.broker.broker import Broker
from postdate.errors import FlowControl
from postdate.wire.bodies import Consumer, Heartbeat, Subscription

Link = TypeVar("Link", bound=Hashable)  # a connection; in tests, any value


_MEMBER_BYTES = 512  # of a member without its names, in dictionaries, sets and tuples
_SUBSCRIPTION_BYTES = 512  # of a subscription without its texts


class Member(NamedTuple, Generic[Link]):
    client_id: str
    link: Link
    consumer: Consumer
    seen_at_ns: int
    language: str = ""
    version: int = 0

    @property
    def size_bytes(self) -> int:
        """About what it costs in RAM. An expression is kept as it is and cut into tags."""
        wanted = self.consumer.subscriptions
        texts = sum(len(each.topic) + 2 * len(each.expression) + _SUBSCRIPTION_BYTES for each in wanted)
        return _MEMBER_BYTES + len(self.client_id) + len(self.consumer.group) + texts


class Members(Generic[Link]):
    """Groups by name, members by client id."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups: dict[str, dict[str, Member[Link]]] = {}
        self._places_of: dict[Link, set[tuple[str, str]]] = {}  # group and client id of those behind a connection
        self._size_bytes = 0

    def beat(self, heartbeat: Heartbeat, link: Link, now_ns: int, language: str, version: int) -> set[str]:
        """A heartbeat came that was admitted; returns the groups in which something changed."""
        changed = set()
        for member in _members_in(heartbeat, link, now_ns, language, version):
            group = member.consumer.group
            before = self._forget(member.client_id, group)
            self._groups.setdefault(group, {})[member.client_id] = member
            self._places_of.setdefault(link, set()).add((group, member.client_id))
            self._size_bytes += member.size_bytes
            if before is None or before.consumer.subscriptions != member.consumer.subscriptions:
                changed.add(group)
        return changed

    def admit(self, heartbeat: Heartbeat, link: Link) -> None:
        """Raises FlowControl where a heartbeat asks for more than there is room for."""
        beaten = _members_in(heartbeat, link)
        places = {(member.consumer.group, member.client_id) for member in beaten} | self._places_of.get(link, set())
        if len(places) > self._broker.limits.connection_members_max:
            raise FlowControl(
                f"connection_members_max: {len(places)} members of groups behind one connection, "
                f"the limit is {self._broker.limits.connection_members_max}"
            )
        if self._size_bytes + sum(member.size_bytes for member in beaten) > self._broker.limits.members_bytes_max:
            raise FlowControl(f"members_bytes_max: the members of all groups take {self._size_bytes} bytes; try later")

    def _forget(self, client_id: str, group: str) -> Member[Link] | None:
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

    def leave(self, client_id: str, group: str) -> bool:
        """A member said goodbye; returns whether there was such a member."""
        return self._forget(client_id, group) is not None

    def drop(self, link: Link) -> set[str]:
        """A connection ended; returns the groups that lost a member by it."""
        places = list(self._places_of.get(link, ()))
        for group, client_id in places:
            self._forget(client_id, group)
        return {group for group, _ in places}

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

    def names(self) -> list[str]:
        """Of the groups that have members."""
        return list(self._groups)

    def subscribes(self, group: str, topic: str) -> bool:
        """Whether a member of the group wants something of the topic."""
        return _wanted(self._groups.get(group, {}).values(), topic) is not None

    def subscription(self, group: str, topic: str, link: Link) -> Subscription | None:
        """What the member behind a connection wants of a topic; what any other member wants, where it has not said."""
        members = self._groups.get(group, {})
        own = [members[client_id] for name, client_id in self._places_of.get(link, ()) if name == group]
        return _wanted(own, topic) or _wanted(members.values(), topic)


def _members_in(
    heartbeat: Heartbeat, link: Link, seen_at_ns: int = 0, language: str = "", version: int = 0
) -> list[Member[Link]]:
    return [
        Member(heartbeat.client_id, link, consumer, seen_at_ns, language, version) for consumer in heartbeat.consumers
    ]


def _wanted(members: Iterable[Member[Link]], topic: str) -> Subscription | None:
    subscriptions = (each for member in members for each in member.consumer.subscriptions)
    return next((each for each in subscriptions if each.topic == topic), None)
