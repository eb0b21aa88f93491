"""Clients that send messages with ids, to be stored once. The model checks the answers.

- Within the window of an id, by every clock that was ever shown, at most one message of it is stored: a send with the
  same body gets the receipt of that one, whatever has become of it, and one with another body is refused.
- A message that a crash has lost, or that went with its topic, is none.
- After the window a message is stored anew. While the clock is behind one that was shown before, both are right.
"""

from dataclasses import dataclass

from postdate.broker.once import FirstSend, SentBefore
from postdate.errors import IllegalMessage, LogFailed
from postdate.message import PROPERTY_ONCE, encode_properties
from postdate.state.fold import WAITS
from postdate.testing import Killed
from verify.simulation.model import Broken, Sent
from verify.simulation.producers import Producers
from verify.simulation.site import TOPICS, Site, topic_at


@dataclass
class Taken:
    """A message that has an id. Its place and due are those of its send: a move changes the message's own."""

    message: Sent
    arrival: int
    due: int
    until_ms: int


class Oncers:
    def __init__(self, site: Site, producers: Producers) -> None:
        self._site, self._producers = site, producers
        self._taken: dict[tuple[str, str], list[Taken]] = {}  # by topic and id
        self._answers: list[tuple[SentBefore, Taken]] = []  # to second sends, that wait for the first

    def send(self, id: int, is_other: int, form: int, amount: int, place: int) -> None:
        """Sends a message with an id: with the body of the one that has it, or with another body."""
        topic, name = topic_at(place), f"once{id}"
        known = self._living(topic, name)
        kept = [taken for taken in known if self._site.model.clock_max < taken.until_ms]
        queue_id = place // len(TOPICS) % self._site.broker.fold.topics.get(topic).write_queue_count
        message = self._producers.make_message(form, amount, id, topic, queue_id)
        if kept and not is_other:
            message = message._replace(body=kept[-1].message.name.encode())
        message = message._replace(properties=message.properties + encode_properties({PROPERTY_ONCE: name}))
        try:
            sent = self._producers.send_one(message)
        except SentBefore as before:
            if not kept or is_other:
                raise Broken(f"a send under {name} was answered as an earlier one, none has its body") from before
            self._take_first(kept[-1], before)
        except IllegalMessage as error:
            self._site.digest.note_error(error)
            if not is_other if kept else not any(map(self._may_be_kept, known)):
                raise Broken(f"a send under {name} was refused: {error}") from error
        except (Killed, LogFailed):  # whether it is in the log is found out later
            for dying in self._producers.sending:
                self._put(topic, name, dying)
            raise
        else:
            if sent is not None and kept:
                raise Broken(f"{sent.name} was stored under {name}, as {kept[-1].message.name} is")
            if sent is not None:  # else there was no room
                self._put(topic, name, sent)

    def _put(self, topic: str, name: str, sent: Sent) -> None:
        until_ms = sent.stored_at + self._site.settings.once_window_ms
        self._taken.setdefault((topic, name), []).append(Taken(sent, sent.arrival, sent.due, until_ms))

    def _living(self, topic: str, name: str) -> list[Taken]:
        """The messages of an id, without those that a crash has lost or that went with their topic."""
        born = self._site.broker.fold.topics.get(topic).born
        return [t for t in self._taken.get((topic, name), ()) if t.message.exists and t.arrival > born]

    def _may_be_kept(self, taken: Taken) -> bool:
        return self._site.now_ms() < taken.until_ms or not taken.message.acknowledged

    # -- answers ------------------------------------------------------------------------------------------------

    def _take_first(self, taken: Taken, before: SentBefore) -> None:
        self._site.digest.note("sent before", before.ticket is None)
        if before.ticket is not None:
            self._answers.append((before, taken))
            return
        if not taken.message.acknowledged:
            raise Broken(f"a second send of {taken.message.name} was answered before the first")
        self._check(taken, before.first)

    def collect(self) -> None:
        for before, taken in self._answers:
            if before.ticket is not None and before.ticket.answers is not None:
                self._check(taken, before.first)
        self._answers = [each for each in self._answers if each[0].ticket and each[0].ticket.answers is None]

    def _check(self, taken: Taken, first: FirstSend) -> None:
        self._site.digest.note("first", *first)
        message, seen_at = taken.message, taken.message.seen_at
        expected = (message.topic, message.queue_id, message.unique_key, taken.due, taken.arrival)
        if first[:-1] != expected:
            raise Broken(f"a second send of {message.name} was answered {first[:-1]}, the first {expected}")
        place = WAITS if taken.due else seen_at[1] if seen_at is not None else first.queue_offset
        if first.queue_offset != place:
            raise Broken(f"a second send of {message.name} was told offset {first.queue_offset}, it is at {place}")

    # -- crashes ------------------------------------------------------------------------------------------------

    def settle_doubts(self) -> None:
        """After a crash, when it is known which messages are in the log. Who waited for a first one is not answered."""
        self._answers.clear()
        for known in self._taken.values():
            for taken in known:
                if taken.arrival < 0:
                    taken.arrival = taken.message.arrival
