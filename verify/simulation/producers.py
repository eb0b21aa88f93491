"""Clients that send: their messages, the answers, and what a crash leaves of messages without an answer.

The bodies of messages are m1, m2, ... in the order in which they are made, their unique keys U1, U2, ...
"""

from postdate import message as messages
from postdate.arrival import NEVER, OWN
from postdate.broker.once import SentBefore
from postdate.broker.writing import Ticket
from postdate.errors import CorruptLog, DiskFull, FlowControl, IllegalMessage
from postdate.message import Message, encode_properties
from postdate.storage import record as records
from postdate.storage.log import Log
from postdate.storage.segment import Segments
from verify.simulation.model import Broken, Sent
from verify.simulation.site import TOPICS, Site, topic_at

OTHER_KEY = "other"  # the second user key of every message except repeated ones


class Producers:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._waiting: list[tuple[Ticket, list[Sent]]] = []  # not answered yet
        self._sending: list[Sent] = []  # while the call runs
        self._end_before = 0  # of the log, when the call began
        self.made_count = 0

    # -- sending ------------------------------------------------------------------------------------------------

    def send(self, form: int, amount: int, key: int, place: int, count: int) -> None:
        """Sends a batch. `form` chooses the property of the delay, `place` topic and queue, `key` a user key that other
        messages use too.
        """
        topic = topic_at(place)
        queue_id = place // len(TOPICS) % self._site.broker.fold.topics.get(topic).write_queue_count
        self._send([self.make_message(form, amount + index, key, topic, queue_id) for index in range(count)])

    def resend(self, pick: int) -> None:
        """Sends a message again, with the same unique key and due, as a producer does that got no answer."""
        first = self._site.pick_message(pick)
        if first is None or not first.due or not self._site.has_topic(first.topic):
            return
        properties = {
            "UNIQ_KEY": first.unique_key,
            "KEYS": first.user_key,
            "TIMER_DELIVER_MS": str(first.due),
        }
        self._send([Message(first.topic, self._next_body(), encode_properties(properties), 0)])

    def send_one(self, message: Message) -> Sent | None:
        """Sends one message; None where there is no room for it. Raises SentBefore, IllegalMessage."""
        return next(iter(self._send([message])), None)

    @property
    def sending(self) -> list[Sent]:
        """What a call sends that has not returned."""
        return self._sending

    def _send(self, batch: list[Message]) -> list[Sent]:
        """Sends a batch; returns its messages, none where there is no room for them."""
        broker = self._site.broker
        self._sending = [self.describe(message) for message in batch]
        self._end_before = broker.log.end
        try:
            ticket = broker.send(batch, self._site.now_ms())
        except (DiskFull, FlowControl) as error:
            self._site.digest.note_error(error)
            self._sending = []
            return []
        except (SentBefore, IllegalMessage):
            self._sending = []
            raise
        self._site.digest.note("send", ticket.offsets)
        for sent, offset in zip(self._sending, ticket.offsets, strict=True):
            sent.arrival = offset
            self._site.model.add(sent)
        self._waiting.append((ticket, self._sending))
        taken, self._sending = self._sending, []
        return taken

    def make_message(self, form: int, amount: int, key: int, topic: str, queue_id: int) -> Message:
        """Makes a new message."""
        body = self._next_body()
        properties = {"UNIQ_KEY": f"U{self.made_count}", "KEYS": f"k{key} {OTHER_KEY}"}
        properties |= _delay(form, amount, self._site.now_ms())
        return Message(topic, body, encode_properties(properties), queue_id)

    def _next_body(self) -> bytes:
        self.made_count += 1
        return f"m{self.made_count}".encode()

    def describe(self, message: Message, at_ms: int | None = None) -> Sent:
        """Describes a message for the model, as if it were sent now, or at an instant."""
        now, settings = self._site.now_ms() if at_ms is None else at_ms, self._site.settings
        properties = messages.decode_properties(message.properties)
        levels = messages.DelayLevels.parse(settings.message_delay_level)
        due = messages.due(properties, now, levels, settings.delay_ms_max).at_ms
        name, near = message.body.decode(), due <= now + settings.lead_ms
        key, _, other = properties["KEYS"].partition(" ")
        return Sent(name, message.topic, message.queue_id, properties["UNIQ_KEY"], key, due, now, near, other_key=other)

    # -- answers ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        for ticket, batch in self._waiting:
            if ticket.answers is not None:
                self._site.digest.note("sent", ticket.answers)
                for message in batch:
                    message.acknowledged = True
        self._waiting = [(ticket, batch) for ticket, batch in self._waiting if ticket.answers is None]

    # -- crashes ------------------------------------------------------------------------------------------------

    def settle_doubts(self) -> None:
        """After a crash: messages without an answer are in the log or are lost; all others must be there."""
        for ticket, batch in self._waiting:
            for message in batch:
                message.exists = self._is_in_log(message, ticket.end)
                message.acknowledged = message.exists
                self._site.digest.note("exists", message.name, message.exists)
        self._waiting.clear()
        self._settle_call()
        self._check_kept()

    def _is_in_log(self, message: Sent, end: int) -> bool:
        log = self._site.broker.log
        if end > log.end:
            return False
        size = int.from_bytes(log.read(message.arrival, 4), "big")
        try:
            return records.decode(log.read(message.arrival, size)).body == message.name.encode()
        except CorruptLog:
            return False  # another record is there now

    def _settle_call(self) -> None:
        """After a death during a send: finds out whether its messages are in the log."""
        if self._sending:
            places = self._bodies_in_log()
            for sent in self._sending:
                sent.arrival = places.get(sent.name, NEVER)
                sent.exists = sent.acknowledged = sent.arrival != NEVER
                self._site.model.add(sent)
            self._sending = []

    def _bodies_in_log(self) -> dict[str, int]:
        disk, settings = self._site.disk, self._site.settings
        log = Log(disk, Segments(disk, settings.segment_bytes), self._site.limits.unflushed_bytes_max)
        places = {}
        for batch in log.scan(self._end_before, 0):
            for row in batch.array():
                offset = batch.offset + int(row["position"])
                places[records.decode(log.read(offset, int(row["size"]))).body.decode()] = offset
        return places

    def _check_kept(self) -> None:
        end = self._site.broker.log.end
        for message in self._site.model.messages.values():
            if message.acknowledged and end <= message.arrival < OWN:
                raise Broken(f"{message.name} was acknowledged at {message.arrival}, the log ends at {end}")


def _delay(form: int, amount: int, now: int) -> dict[str, str]:
    """Properties that ask for a delay of about `amount` ms."""
    if form == 1:
        return {"DELAY": str(1 + amount % 5)}
    if form == 2:
        return {"TIMER_DELAY_SEC": str(amount // 1_000)}
    if form == 3:
        return {"TIMER_DELAY_MS": str(amount)}
    if form == 4:
        return {"TIMER_DELIVER_MS": str(now + amount)}
    if form == 5:
        return {"TIMER_DELIVER_MS": str(now - amount)}
    if form == 6:  # many at the same instant
        return {"TIMER_DELIVER_MS": str((now + amount) // 5_000 * 5_000 + 5_000)}
    return {}
