"""Leases on a calendar that a test moves: what a client has in hand stays in hand while its connection lives.

A client renews its leases every few seconds of real time. A test that moves the calendar by a day would end them all in
between, and every message that waits for a handler would be handled twice. So a lease that a pop or a renewal asks for
lasts for decades here. Before the calendar moves, those whose connection has ended become as long as was asked for, and
end by the calendar. A retry, which asks for a pause of its own, ends by the calendar in any case.

The span of a lease says whose it is: each connection, with each span that it asks for, has a number, which is added.
"""

from collections.abc import Container, Mapping
from typing import Any

from postdate.broker import Broker
from postdate.broker.leasing import LeaseHandle
from postdate.server.connection import Connection
from postdate.server.peer import Peer
from postdate.state.leases import OVER, Key, Lease
from postdate.wire.requests import Request

_KEPT_MS = 36_000 * 24 * 3_600_000  # below invisible_ms_max of the in-process broker, by more than there are numbers
INVISIBLE_MS_MAX = 36_525 * 24 * 3_600_000


class KeptLeases:
    """Amends what clients ask for, and ends what they have left behind. Everything runs on the server's loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._owners: list[tuple[Connection, int]] = []  # by number: connection, and the span it asked for, in ms
        self._numbers: dict[tuple[Connection, int], int] = {}

    def amend(self, connection: Connection, code: int, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the fields of a request as the broker shall see them."""
        if code == Request.POP_MESSAGE:
            return self._kept(asked, self._number(connection, asked["invisibleTime"]))
        if code == Request.CHANGE_MESSAGE_INVISIBLETIME and not (asked.get("reason") or asked.get("notBegun")):
            number = self._numbers.get((connection, asked["invisibleTime"]))
            return asked if number is None else self._kept(asked, number)  # the span of its pops: a renewal
        return asked

    def _number(self, connection: Connection, asked_ms: int) -> int:
        owner = (connection, asked_ms)
        if owner not in self._numbers:
            self._numbers[owner] = len(self._owners)
            self._owners.append(owner)
        return self._numbers[owner]

    def _kept(self, asked: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        span_ms = _KEPT_MS + number
        is_allowed = asked["invisibleTime"] > 0 and span_ms <= self._broker.settings.invisible_ms_max
        return {**asked, "invisibleTime": span_ms} if is_allowed else asked

    def in_hand(self, group: str) -> list[Key]:
        """The messages that clients of a group have at this moment."""
        return [key for key, lease in self._broker.view.leases() if key[0] == group and _is_kept(lease)]

    def end_abandoned(self, alive: Container[Peer], now_ms: int) -> None:
        """Lets the leases of connections that have ended last as long as was asked for, from now on."""
        view = self._broker.view
        for (group, number, offset), lease in view.leases():
            if not _is_kept(lease):
                continue
            connection, asked_ms = self._owners[lease.until_ms - lease.popped_at_ms - _KEPT_MS]
            if connection not in alive:
                topic = view.topic_of_queue(number)
                queue_id = list(view.topic(topic).numbers).index(number)
                handle = LeaseHandle(topic, queue_id, offset, lease.popped_at_ms)
                self._broker.leases.change_invisible(group, handle, asked_ms, now_ms)


def _is_kept(lease: Lease) -> bool:
    return lease.until_ms != OVER and lease.until_ms - lease.popped_at_ms >= _KEPT_MS
