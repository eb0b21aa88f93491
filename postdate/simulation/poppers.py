"""Consumers that pop: what they were told, and what must follow from it.

- What was acknowledged is never given again.
- What was given is not given to anybody before its time is over, and is given again after it.
- A handle is good exactly as long as the message was not given again or acknowledged.
- What was given as often as it may be is a dead letter, exactly once; nothing else is.

A call without an answer (a crash came first) leaves a doubt: it may have counted or not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from postdate.broker import Broker
from postdate.handout import PopAsk
from postdate.leases import Handle, Popped
from postdate.log import record as records
from postdate.message import DLQ_TOPIC_PREFIX, Message
from postdate.simulation.model import Broken
from postdate.wheel import NEVER
from postdate.writer import Ticket

GROUP = "poppers"
DEAD_LETTERS = DLQ_TOPIC_PREFIX + GROUP
TIMES_MAX = 2

Place = tuple[int, int]  # queue number, offset


@dataclass
class Given:
    """A message that a consumer has, or had."""

    topic: str
    queue_id: int
    popped_at_ms: int
    until_ms: int  # given to nobody else before
    times: int
    is_acked: bool = False
    is_in_doubt: bool = False  # there may be a newer handle, or none


class Call(NamedTuple):
    """A call that waits for its answer, and what to do with it."""

    ticket: Ticket
    take_in: Callable[[Any], None]
    place: Place | None = None  # of an acknowledgement or a change
    until_ms: int = NEVER


@dataclass
class Poppers:
    """Every message by its place in its queue."""

    given: dict[Place, Given] = field(default_factory=dict)
    clock_max: int = 0
    _calls: list[Call] = field(default_factory=list)  # in the order of the log
    _changing: tuple[Place, int] | None = None  # inside the call: what, and until when it will be invisible

    # -- asking -------------------------------------------------------------------------------------------------

    def pop(self, broker: Broker, topic: str, count: int, invisible_ms: int, now: int) -> bool:
        """Asks for messages of all queues; returns whether there are some."""
        numbers = list(broker.fold.topics.get(topic).numbers)
        ask = PopAsk(GROUP, topic, range(len(numbers)), count, 1 << 20, invisible_ms, TIMES_MAX)
        ticket = broker.leases.pop(ask, now)
        if ticket is not None:
            self._calls.append(Call(ticket, lambda popped: self._popped(popped, ask, numbers)))
        return ticket is not None

    def chosen(self, pick: int) -> Place | None:
        return list(self.given)[pick % len(self.given)] if self.given else None

    def acknowledge(self, broker: Broker, place: Place, now: int, *, is_wrong: bool = False) -> None:
        handle = self._handle(place, is_wrong)
        ticket = broker.leases.acknowledge(GROUP, [handle], now)
        self._calls.append(Call(ticket, lambda good: self._acked(place, handle, good[0]), place))

    def acknowledge_all(self, broker: Broker, now: int) -> None:
        for place, given in self.given.items():
            if not given.is_acked:
                self.acknowledge(broker, place, now)

    def change(self, broker: Broker, place: Place, invisible_ms: int, now: int) -> None:
        handle, until_ms = self._handle(place, False), now + invisible_ms
        self._changing = place, until_ms
        ticket = broker.leases.change_invisible(GROUP, handle, invisible_ms, now)
        self._calls.append(
            Call(ticket, lambda good: self._changed(place, handle, good, now, until_ms), place, until_ms)
        )
        self._changing = None

    def _handle(self, place: Place, is_wrong: bool) -> Handle:
        given = self.given[place]
        return Handle(given.topic, given.queue_id, place[1], given.popped_at_ms - (1 if is_wrong else 0))

    def bury(self, broker: Broker, count: int, now: int) -> None:
        for (_, number, offset), data in broker.leases.spent(count):
            letter = Message(DEAD_LETTERS, f"{number}:{offset}".encode()) if data else None
            broker.leases.bury((GROUP, number, offset), letter, now)
            if (number, offset) in self.given:
                self.given[number, offset].is_in_doubt = True  # nobody is told; its handle may be refused from now on

    # -- answers ------------------------------------------------------------------------------------------------

    def collect(self, clock_max: int) -> None:
        """Takes in what is answered, in the order of the log: each answer is about its moment."""
        self.clock_max = clock_max
        while self._calls and self._calls[0].ticket.answers is not None:
            call = self._calls.pop(0)
            call.take_in(call.ticket.answer)

    def _popped(self, popped: Popped, ask: PopAsk, numbers: list[int]) -> None:
        for given in popped.messages:
            place = (numbers[given.queue_id], given.offset)
            if place in self.given:
                self._check_again(place, self.given[place], given.times)
            if given.times > TIMES_MAX:
                raise Broken(f"{place} was given {given.times} times before, {TIMES_MAX} are allowed")
            until_ms = popped.popped_at_ms + ask.invisible_ms
            self.given[place] = Given(ask.topic, given.queue_id, popped.popped_at_ms, until_ms, given.times)

    def _check_again(self, place: Place, before: Given, times: int) -> None:
        if before.is_acked:
            raise Broken(f"{place} was acknowledged and is given again")
        if before.until_ms > self.clock_max:
            raise Broken(f"{place} is given again before {before.until_ms}, no clock has passed {self.clock_max}")
        if times <= before.times:
            raise Broken(f"{place} was given {before.times + 1} times before, its consumer is told {times}")

    def _acked(self, place: Place, handle: Handle, is_good: bool) -> None:
        given = self._judged(place, handle, is_good)
        if given is not None and is_good:
            given.is_acked = True

    def _changed(self, place: Place, handle: Handle, is_good: bool, at_ms: int, until_ms: int) -> None:
        given = self._judged(place, handle, is_good)
        if given is not None and is_good:
            given.popped_at_ms, given.until_ms, given.is_in_doubt = at_ms, until_ms, False

    def _judged(self, place: Place, handle: Handle, is_good: bool) -> Given | None:
        """A handle is good while it is the newest and the message is not acknowledged; None where it is forgotten."""
        given = self.given.get(place)
        if given is None or given.is_in_doubt:
            return given
        if is_good != (given.popped_at_ms == handle.popped_at_ms and not given.is_acked):
            raise Broken(f"{handle} was taken as {'good' if is_good else 'bad'}, the newest is of {given}")
        return given

    # -- crashes and deleted topics -------------------------------------------------------------------------------

    def doubt(self) -> None:
        """A crash: calls that were not answered may have counted; a pop among them may have reached anything."""
        changes = [(call.place, call.until_ms) for call in self._calls]
        for place, until_ms in [*changes, self._changing] if self._changing else changes:
            if place in self.given:
                self.given[place].until_ms = min(self.given[place].until_ms, until_ms)
        for given in self.given.values():
            given.is_in_doubt = True
        self._calls.clear()
        self._changing = None

    def note_gone(self, broker: Broker) -> None:
        """Retention was at work: a message whose record is gone is forgotten when somebody next asks for it."""
        for (number, offset), given in self.given.items():
            entries = broker.fold.queues[number].entries
            if offset < entries.first or not broker.fold.read(*entries.read(offset, offset + 1)[0].tolist()[:2]):
                given.is_in_doubt = True

    def forget(self, numbers: list[int]) -> None:
        self.given = {place: given for place, given in self.given.items() if place[0] not in numbers}

    # -- the end ------------------------------------------------------------------------------------------------

    def check_none_lost(self, broker: Broker, topics: tuple[str, ...]) -> None:
        """At the end, when every lease was over and all was popped: what a consumer can still read was given to this
        group and acknowledged, or is with it, or is a dead letter.
        """
        letters = self._letters(broker)
        for topic in topics:
            for queue_id, number in enumerate(broker.fold.topics.get(topic).numbers):
                for offset in _readable(broker, topic, queue_id):
                    self._check_known((number, offset), letters)

    def _check_known(self, place: Place, letters: list[str]) -> None:
        given = self.given.get(place)
        letter_count = letters.count(f"{place[0]}:{place[1]}")
        if letter_count > 1:
            raise Broken(f"{place} is a dead letter {letter_count} times")
        if letter_count and given is not None and given.is_acked:
            raise Broken(f"{place} was acknowledged and is a dead letter")
        if given is None and not letter_count:
            raise Broken(f"{place} can be read, and nobody who pops was given it")

    def _letters(self, broker: Broker) -> list[str]:
        found = []
        for offset in _readable(broker, DEAD_LETTERS, 0):
            pulled = broker.pull(DEAD_LETTERS, 0, offset, count_max=1)
            found += [records.decode(data).body.decode() for data in pulled.records]
        return found


def _readable(broker: Broker, topic: str, queue_id: int) -> list[int]:
    """Offsets of messages whose records are there."""
    offset, high = broker.offsets(topic, queue_id)
    found: list[int] = []
    while offset < high:
        pulled = broker.pull(topic, queue_id, offset, count_max=64)
        found += [records.decode(data).queue_offset for data in pulled.records]
        offset = pulled.next_offset
    return found
