"""Clients that move messages to another due, later, earlier or at once. The model checks the answers.

A message is looked up first, in the log and in the table, as the server does; then it is moved from there. Meanwhile
anything may have happened to it.

- A moved message is seen once, at its last due or later, and never at an earlier one.
- A move is refused only if its message waits no more, or not there.
"""

from postdate.broker.lookup import State
from postdate.broker.moving import Source
from postdate.broker.writing import Ticket
from postdate.errors import DiskFull, FlowControl
from postdate.message import PROPERTY_MOVED, MovedFrom
from postdate.storage import record as records
from verify.simulation.model import Broken, Sent
from verify.simulation.site import Site, Watch


def find_waiting(site: Site, topic: str, unique_key: str) -> dict[bytes, MovedFrom]:
    """Returns where what waits of a key is, by record: as the broker finds it, or the table alone. The table is asked
    first, as the server does: a message may come into the wheel meanwhile, and never goes back.
    """
    broker, places = site.broker, {}
    rows = site.table.find_key(topic, unique_key, broker.view.topic(topic).numbers)
    known = set()
    for found in broker.find(topic, unique_key, by="unique"):
        if found is not None:
            known.add(found.arrival)
            if found.state is State.WAITING:
                places[found.record] = MovedFrom(found.due_at_ms, found.arrival, found.is_near)
    for row in rows:
        place = MovedFrom(row.due, row.arrival, is_near=False)
        if row.arrival not in known and broker.moves.is_waiting(row.record, place):
            places[row.record] = place
    return places


class Movers:
    def __init__(self, site: Site, watch: Watch) -> None:
        self._site = site
        self._watch = watch
        self._waiting: list[tuple[Ticket, list[tuple[Sent, Source]]]] = []  # not answered yet
        self._moving: list[Sent] = []  # while the call runs
        self._refused: list[tuple[Sent, Source]] = []  # since the last look
        self._held: list[tuple[Sent, Source]] = []  # looked up, not yet moved

    # -- moving -------------------------------------------------------------------------------------------------

    def move(self, pick: int, way: int, amount: int) -> None:
        """Moves a message, and all others of its unique key. Ways: 0 later, 1 earlier, 2 to now + amount, 3 at once."""
        self._move(self._look_up(pick, way, amount))

    def begin(self, pick: int, way: int, amount: int) -> None:
        """Looks a message up; the next `end` moves it."""
        self._held = self._look_up(pick, way, amount)

    def end(self) -> None:
        held, self._held = self._held, []
        self._move([(message, source) for message, source in held if self._site.has_topic(message.topic)])

    def _look_up(self, pick: int, way: int, amount: int) -> list[tuple[Sent, Source]]:
        self._watch.flush()
        target = self._site.pick_message(pick)
        if target is None or not self._site.has_topic(target.topic):
            return []
        now_ms = self._site.now_ms()
        found = []
        for record, place in find_waiting(self._site, target.topic, target.unique_key).items():
            message = self._site.model.messages[records.decode(record).body.decode()]
            due = (place.due_at_ms + amount, max(place.due_at_ms - amount, 1), now_ms + amount, 0)[way % 4]
            found.append((message, Source(record, place, due)))
        return found

    def _move(self, found: list[tuple[Sent, Source]]) -> None:
        if not found:
            return
        self._moving = [message for message, _ in found]
        try:
            ticket = self._site.broker.moves.move([source for _, source in found], self._site.now_ms())
        except (DiskFull, FlowControl) as error:
            self._site.digest.note_error(error)
            self._moving = []
            return
        self._site.digest.note("move", ticket.offsets)
        self._moving = []
        self._waiting.append((ticket, found))

    # -- answers ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Takes in answers. Call it before reading queues: a move changes what may be seen there."""
        for ticket, found in self._waiting:
            if ticket.answers is not None:
                self._site.digest.note("moved", ticket.answers)
                for index, (message, source) in enumerate(found):
                    if ticket.answers[index]:
                        entry = ticket.prepared[index]
                        self._site.model.note_moved(message, source.found, entry.due_at_ms, ticket.offsets[index])
                    else:
                        self._refused.append((message, source))
        self._waiting = [(ticket, found) for ticket, found in self._waiting if ticket.answers is None]

    def judge(self) -> None:
        """Call it after reading queues: a message that was not moved does not wait there."""
        for message, source in self._refused:
            is_there = message.known_as == source.found.arrival and message.due == source.found.due_at_ms
            if is_there and self._site.model.waits(message):
                raise Broken(f"a move of {message.name} from {source.found} was refused, but it waits there")
        self._refused.clear()

    # -- crashes ------------------------------------------------------------------------------------------------

    def settle_doubts(self) -> None:
        """After a crash: moves without an answer have happened or not; a lookup says which."""
        doubtful = self._moving + [message for _, found in self._waiting for message, _ in found]
        self._moving = []
        self._waiting.clear()
        self._refused.clear()
        for message in doubtful:
            if self._site.has_topic(message.topic):
                self._settle(message)

    def _settle(self, message: Sent) -> None:
        for found in self._site.broker.find(message.topic, message.unique_key, by="unique"):
            if found is None or records.decode(found.record).body.decode() != message.name:
                continue
            source = MovedFrom.parse(records.properties_of(found.record).get(PROPERTY_MOVED, ""))
            if source is not None and source.arrival == message.known_as:
                self._site.model.note_moved(message, source, found.due_at_ms, found.arrival)
                return
