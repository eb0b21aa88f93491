"""Which queues members pull: pops of their group take nothing new from them.

A member that pulls a queue reads on from its own offset, without asking the broker who has read what. So while it does,
nobody may pop new messages of that queue: two members would get the same. A queue is pulled from the moment at which a
member asks for its offset, or pulls it, until

    it leaves its group, or its connection ends
    another member pulls the queue
    it has not asked for 30 s, and has committed what it was given, but for a few
    it has not asked for 120 s

A client asks all the time, unless it has more in hand than it likes. One that lost a queue to another member just stops
asking, and drops what its last pull brought: hence the few, which come to the next member.

A member that comes back to a queue that was popped meanwhile learns where to go on. Nothing of this is on disk.
"""

from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, TypeVar

from postdate.server.sessions.offsets import Offsets, Place

Link = TypeVar("Link", bound=Hashable)  # a connection; in tests, any value

IDLE_MS = 30_000  # of a member that has committed almost everything: longer than a pull is held by most clients
UNCOMMITTED_MAX = 32  # of such a member: what one pull of an official client brings
SILENT_MS = 120_000  # of any member: as long as a client may be silent
_NOTHING: AbstractSet[int] = frozenset()


@dataclass(slots=True)
class _Puller(Generic[Link]):
    link: Link
    asked_at_ns: int  # or when the pull that is held will be over
    given_offset: int = 0  # up to where it was given messages


class Pullers(Generic[Link]):
    """The queues that are pulled, by group, and up to where queues were popped."""

    def __init__(self, offsets: Offsets) -> None:
        self._offsets = offsets
        self._groups: dict[str, dict[Place, _Puller[Link]]] = {}
        self._popped: dict[str, dict[Place, int]] = {}  # by group: the offset after what pops took

    def ask(self, group: str, place: Place, link: Link, now_ns: int) -> bool:
        """A member asks for a queue, and has it from now on; returns whether it had it before."""
        pulled = self._groups.setdefault(group, {})
        puller = pulled.get(place)
        if puller is not None and puller.link == link:
            puller.asked_at_ns = now_ns
            return True
        pulled[place] = _Puller(link, now_ns)
        return False

    def has(self, group: str, place: Place, link: Link) -> bool:
        puller = self._groups.get(group, {}).get(place)
        return puller is not None and puller.link == link

    def hold(self, group: str, place: Place, link: Link, until_ns: int) -> None:
        """The member's pull is held until then, or was answered earlier."""
        if self.has(group, place, link):
            self._groups[group][place].asked_at_ns = until_ns

    def give(self, group: str, place: Place, link: Link, next_offset: int) -> None:
        """The member was given messages before this offset."""
        if self.has(group, place, link):
            self._groups[group][place].given_offset = next_offset

    def queue_ids(self, group: str, topic: str) -> AbstractSet[int]:
        """Returns the queues of a topic that members of a group pull."""
        pulled = self._groups.get(group)
        return {queue_id for name, queue_id in pulled if name == topic} if pulled else _NOTHING

    # -- the end of pulling -------------------------------------------------------------------------------------

    def keep(self, group: str, links: AbstractSet[Link], barred: AbstractSet[tuple[str, Link]]) -> bool:
        """Frees the queues of members that are gone, or barred from a topic; returns whether there were any."""
        gone = [
            place
            for place, puller in self._groups.get(group, {}).items()
            if puller.link not in links or (place[0], puller.link) in barred
        ]
        return self._free(group, gone)

    def expire(self, now_ns: int) -> set[str]:
        """Frees the queues of members that have stopped asking; returns their groups."""
        groups = set()
        for group, pulled in list(self._groups.items()):
            over = [place for place, puller in pulled.items() if self._is_over(group, place, puller, now_ns)]
            if self._free(group, over):
                groups.add(group)
        return groups

    def _is_over(self, group: str, place: Place, puller: _Puller[Link], now_ns: int) -> bool:
        silent_ms = (now_ns - puller.asked_at_ns) // 1_000_000
        uncommitted = puller.given_offset - (self._offsets.get(group, *place) or 0)
        return silent_ms >= (IDLE_MS if uncommitted <= UNCOMMITTED_MAX else SILENT_MS)

    def _free(self, group: str, places: list[Place]) -> bool:
        for place in places:
            del self._groups[group][place]
        if not self._groups.get(group, True):
            del self._groups[group]
        return bool(places)

    # -- what was popped ----------------------------------------------------------------------------------------

    def note_popped(self, group: str, place: Place, end: int) -> None:
        """Pops took new messages of a queue before this offset."""
        self._popped.setdefault(group, {})[place] = end

    def popped_end(self, group: str, place: Place) -> int:
        """Returns the offset after what pops took of a queue; 0 where they took nothing."""
        return self._popped.get(group, {}).get(place, 0)

    def forget_popped(self, group: str, place: Place) -> None:
        """Somebody has moved the group: what was popped before does not count any more."""
        self._popped.get(group, {}).pop(place, None)

    def forget_group(self, group: str) -> None:
        self._groups.pop(group, None)
        self._popped.pop(group, None)

    def forget_topic(self, topic: str) -> None:
        for table in (self._groups, self._popped):
            for places in table.values():
                for place in [place for place in places if place[0] == topic]:
                    del places[place]
