"""Who sends: the producers of each group, as their heartbeats name them. They are kept to be looked at, and for nothing
else. No socket is touched here.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from postdate.broker.broker import Broker
from postdate.wire.bodies import Heartbeat

Link = TypeVar("Link", bound=Hashable)  # a connection; in tests, any value


class Sender(NamedTuple, Generic[Link]):
    client_id: str
    link: Link
    seen_at_ns: int
    language: str
    version: int


class Senders(Generic[Link]):
    """Groups by name, producers by client id. Those beyond groups_max are not kept: they send all the same."""

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
        """It said goodbye."""
        known = self._groups.get(group, {})
        if known.pop(client_id, None) is None:
            return
        self._count -= 1
        if not known:
            del self._groups[group]

    def drop(self, link: Link) -> None:
        """A connection ended."""
        for group in self._groups_of.pop(link, ()):
            for sender in self.of(group):
                if sender.link == link:
                    self.leave(sender.client_id, group)

    def expire(self, before_ns: int) -> None:
        """Who was last seen before that instant is gone."""
        for group in self.names():
            for sender in self.of(group):
                if sender.seen_at_ns < before_ns:
                    self.leave(sender.client_id, group)

    def of(self, group: str) -> list[Sender[Link]]:
        return list(self._groups.get(group, {}).values())

    def names(self) -> list[str]:
        return list(self._groups)
