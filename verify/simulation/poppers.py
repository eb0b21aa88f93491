"""Consumers of one group that pop, and some that pull, and what must follow from the answers.

- An acknowledged message is never given again.
- A message is given to nobody else before its lease ends, and is given again after that.
- A handle is valid exactly until the message is acknowledged or given again.
- A message that was given as often as allowed becomes a dead letter, exactly once; no other message does. One that was
  given back before anybody began with it does not count as given.
- No message is given by a pop and by a pull; a pulled message that failed is given again by a pop, and once more from
  its queue if a crash came before the commit of its pull, even if it was acknowledged, or a dead letter, by then.

A consumer that pulls takes a queue, as the server lets it: after the pops in flight, at the group's offset; pops take
nothing new of it until the consumer leaves it. It commits what it was given, and what failed is retried.

A call without an answer (a crash came first) leaves a doubt: it may have worked or not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.leasing import FailedMessage, LeaseHandle, PopRequest, PopResult, RetryTicket
from postdate.broker.view import PullStatus
from postdate.broker.writing import Ticket
from postdate.errors import DiskFull, FlowControl
from postdate.message import DLQ_TOPIC_PREFIX, Message
from postdate.state.leases import NOT_GIVEN
from postdate.storage import record as records
from verify.simulation.model import Broken
from verify.simulation.site import TOPICS, Site, Watch, topic_at

GROUP = "poppers"
DEAD_LETTERS = DLQ_TOPIC_PREFIX + GROUP
TIMES_MAX = 2
_NO_HANDLE_MS = 10  # instead of when a message was popped: nobody may name its lease

Place = tuple[int, int]  # queue number, offset


@dataclass
class Lease:
    """The lease of a message that a consumer has, or had."""

    topic: str
    queue_id: int
    popped_at_ms: int
    until_ms: int  # nobody else gets it before this
    times: int
    is_acked: bool = False
    is_in_doubt: bool = False  # there may be a newer handle, or none
    may_be_returned: bool = False  # it was given back, and nobody has answered yet: it may count as given once less


class Call(NamedTuple):
    """A call that waits for its answer, and the function that takes the answer."""

    ticket: Ticket
    take_in: Callable[[Any], None]
    place: Place | None = None  # of an acknowledgement or a change
    until_ms: int = NEVER


class Poppers:
    """The consumers of one group, and their leases by the message's place in its queue."""

    def __init__(self, site: Site, watch: Watch) -> None:
        self._site = site
        self._watch = watch
        self._leases: dict[Place, Lease] = {}
        self._calls: list[Call] = []  # in the order of the log
        self._changing: tuple[Place, int] | None = None  # while the call runs: the place, and the end of its lease
        self._pulled: dict[tuple[str, int], int] = {}  # by topic and queue id: where the one who pulls goes on
        self._done: dict[Place, bool] = {}  # messages that were pulled: whether their commit is durable
        self._uncommitted: set[Place] = set()  # messages that were pulled, and may be read from their queue once more
        self._read_again: set[Place] = set()  # of those, messages that were

    # -- asking -------------------------------------------------------------------------------------------------

    def pop(self, place: int, count: int, invisible_ms: int) -> None:
        with self._site.digest.suppress(DiskFull, FlowControl):
            self._pop(topic_at(place), count, invisible_ms)

    def _pop(self, topic: str, count: int, invisible_ms: int) -> bool:
        """Pops from all queues of a topic; returns whether there are messages."""
        numbers = list(self._site.broker.fold.topics.get(topic).numbers)
        pulled = frozenset(queue_id for name, queue_id in self._pulled if name == topic)
        ask = PopRequest(GROUP, topic, range(len(numbers)), count, 1 << 20, invisible_ms, TIMES_MAX, ready_only=pulled)
        ticket = self._site.broker.leases.pop(ask, self._site.now_ms())
        self._site.digest.note("pop", ticket is not None)
        if ticket is not None:
            self._calls.append(Call(ticket, lambda popped: self._take_popped(popped, ask, numbers)))
        return ticket is not None

    def acknowledge(self, pick: int, is_wrong: int) -> None:
        place = self._pick(pick)
        if place is not None:
            with self._site.digest.suppress(DiskFull):
                self._acknowledge(place, is_wrong=bool(is_wrong))

    def _pick(self, pick: int) -> Place | None:
        return list(self._leases)[pick % len(self._leases)] if self._leases else None

    def _acknowledge(self, place: Place, *, is_wrong: bool = False) -> None:
        handle = self._handle(place, is_wrong)
        ticket = self._site.broker.leases.acknowledge(GROUP, [handle], self._site.now_ms())
        self._calls.append(Call(ticket, lambda good: self._take_acknowledgement(place, handle, good[0]), place))

    def change(self, pick: int, invisible_ms: int) -> None:
        """Makes a lease longer or shorter."""
        place = self._pick(pick)
        if place is not None:
            with self._site.digest.suppress(DiskFull):
                self._change(place, invisible_ms)

    def _change(self, place: Place, invisible_ms: int) -> None:
        now = self._site.now_ms()
        handle, until_ms = self._handle(place, False), now + invisible_ms
        self._changing = place, until_ms
        ticket = self._site.broker.leases.change_invisible(GROUP, handle, invisible_ms, now)
        self._calls.append(
            Call(ticket, lambda good: self._take_change(place, handle, good, now, until_ms), place, until_ms)
        )
        self._changing = None

    def fail(self, pick: int, delay_ms: int) -> None:
        """A consumer fails: its message comes again after a delay, or is a dead letter."""
        place = self._pick(pick)
        if place is None:
            return
        now, handle = self._site.now_ms(), self._handle(place, False)
        with self._site.digest.suppress(DiskFull):
            self._changing = place, now
            ticket = self._site.broker.leases.fail(GROUP, handle, [delay_ms], "it failed", now)
            until_ms = now + ticket.delay_ms if isinstance(ticket, RetryTicket) else now
            self._calls.append(
                Call(ticket, lambda good: self._take_change(place, handle, good, now, until_ms), place, until_ms)
            )
        self._changing = None

    def give_back(self, pick: int) -> None:
        """A consumer gives back a message that it has not begun with."""
        place = self._pick(pick)
        if place is None:
            return
        now, handle = self._site.now_ms(), self._handle(place, False)
        with self._site.digest.suppress(DiskFull):
            self._changing = place, now
            self._leases[place].may_be_returned = True
            ticket = self._site.broker.leases.change_invisible(GROUP, handle, 0, now, is_begun=False)
            self._calls.append(Call(ticket, lambda good: self._take_return(place, handle, good, now), place, now))
        self._changing = None

    def _handle(self, place: Place, is_wrong: bool) -> LeaseHandle:
        given = self._leases[place]
        return LeaseHandle(given.topic, given.queue_id, place[1], given.popped_at_ms - (1 if is_wrong else 0))

    def bury(self, count: int) -> None:
        """Turns messages that were given too often into dead letters."""
        with self._site.digest.suppress(DiskFull):
            self._bury(count)

    def _bury(self, count: int) -> None:
        leases = self._site.broker.leases
        spent = leases.spent_messages(count)
        self._site.digest.note("spent", spent)
        for (_, number, offset), data in spent:
            letter = Message(DEAD_LETTERS, f"{number}:{offset}".encode()) if data else None
            leases.move((GROUP, number, offset), letter, self._site.now_ms())
            if (number, offset) in self._leases:
                self._leases[number, offset].is_in_doubt = True  # its handle may be refused from now on

    # -- answers ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Takes in answers, in the order of the log: each answer is about its moment."""
        while self._calls and self._calls[0].ticket.answers is not None:
            call = self._calls.pop(0)
            self._site.digest.note("popper", call.ticket.answer)
            call.take_in(call.ticket.answer)

    def _take_popped(self, popped: PopResult, ask: PopRequest, numbers: list[int]) -> None:
        for given in popped.messages:
            place = (numbers[given.queue_id], given.offset)
            if self._done.get(place):
                raise Broken(f"{place} was pulled and committed, and is popped")
            self._done.pop(place, None)
            if place in self._leases:
                self._check_again(place, self._leases[place], given.times)
            if given.times > TIMES_MAX:
                raise Broken(f"{place} was given {given.times} times before, {TIMES_MAX} are allowed")
            until_ms = popped.popped_at_ms + ask.invisible_ms
            self._leases[place] = Lease(ask.topic, given.queue_id, popped.popped_at_ms, until_ms, given.times)

    def _check_again(self, place: Place, before: Lease, times: int) -> None:
        is_over = before.is_acked or (before.is_in_doubt and not times)  # in doubt: it may have become a dead letter
        if is_over and place in self._uncommitted:
            self._uncommitted.discard(place)
            self._read_again.add(place)
            return
        if before.is_acked:
            raise Broken(f"{place} was acknowledged and is given again")
        clock_max = self._site.model.clock_max
        if before.until_ms > clock_max:
            raise Broken(f"{place} is given again before {before.until_ms}, no clock has passed {clock_max}")
        if times <= before.times - before.may_be_returned:
            raise Broken(f"{place} was given {before.times + 1} times before, its consumer sees {times}")

    def _take_acknowledgement(self, place: Place, handle: LeaseHandle, is_good: bool) -> None:
        given = self._judge_handle(place, handle, is_good)
        if given is not None and is_good:
            given.is_acked = True

    def _take_change(self, place: Place, handle: LeaseHandle, is_good: bool, at_ms: int, until_ms: int) -> None:
        given = self._judge_handle(place, handle, is_good)
        if given is not None and is_good:
            given.popped_at_ms, given.until_ms, given.is_in_doubt = at_ms, until_ms, False

    def _take_return(self, place: Place, handle: LeaseHandle, is_good: bool, at_ms: int) -> None:
        given = self._judge_handle(place, handle, is_good)
        if given is not None and is_good:
            given.may_be_returned = False
            given.popped_at_ms, given.until_ms, given.times = _NO_HANDLE_MS, at_ms, given.times - 1
        elif given is not None and not given.is_in_doubt:  # else one before a crash may have counted
            given.may_be_returned = False

    def _judge_handle(self, place: Place, handle: LeaseHandle, is_good: bool) -> Lease | None:
        """Checks whether the broker was right about a handle; returns its lease, or None if that is forgotten."""
        given = self._leases.get(place)
        if given is None or given.is_in_doubt:
            return given
        is_newest = given.popped_at_ms == handle.popped_at_ms and handle.popped_at_ms != _NO_HANDLE_MS
        if is_good != (is_newest and not given.is_acked):
            raise Broken(f"{handle} was taken as {'good' if is_good else 'bad'}, the newest is of {given}")
        return given

    # -- pulling ------------------------------------------------------------------------------------------------

    def pull(self, place: int, queue: int, count: int, failing: int, delay_ms: int) -> None:
        """Pulls a queue, which nobody pops from then on, and commits; the bits of `failing` say which messages fail."""
        topic = topic_at(place)
        queue_id = queue % self._site.broker.fold.topics.get(topic).read_queue_count
        self._watch.flush()  # the answer to a query of an offset waits for pops in flight
        broker = self._site.broker
        offset = self._pulled.get((topic, queue_id), broker.fold.groups.offset(GROUP, topic, queue_id) or 0)
        pulled = broker.pull(topic, queue_id, offset, count_max=count)
        self._site.digest.note("pulled", pulled.status, pulled.next_offset, pulled.body)
        self._pulled[topic, queue_id] = pulled.next_offset
        if pulled.status is not PullStatus.FOUND:
            return
        found = [records.decode(data) for data in pulled.records]
        number = broker.fold.topics.get(topic).numbers[queue_id]
        places = [(number, record.queue_offset) for record in found]
        for each in places:
            self._check_unpopped(each)
        fresh = [each for each in places if each not in self._done]  # others were pulled, and retried, before a crash
        self._done.update(dict.fromkeys(places, False))
        self._uncommitted.update(places)
        try:
            self._retry(topic, queue_id, found, failing, delay_ms)
            broker.commit_offsets(GROUP, [(topic, queue_id, pulled.next_offset)], self._site.now_ms())
        except (DiskFull, FlowControl) as error:
            self._site.digest.note_error(error)
            del self._pulled[topic, queue_id]  # its consumer ends, and others get them again
            self._watch.flush()
            return
        self._watch.flush()
        self._uncommitted.difference_update(places)
        self._done.update((each, True) for each in fresh if each in self._done)

    def _check_unpopped(self, place: Place) -> None:
        given = self._leases.get(place)
        if self._done.get(place) or (given is not None and not given.is_in_doubt):
            raise Broken(f"{place} is pulled, and the group was given it before: {given}")

    def _retry(self, topic: str, queue_id: int, found: list[records.Record], failing: int, delay_ms: int) -> None:
        """Has those that failed given again."""
        now, number = self._site.now_ms(), self._site.broker.fold.topics.get(topic).numbers[queue_id]
        for index, record in enumerate(found):
            if failing >> index & 1:
                failed = FailedMessage(topic, queue_id, record.queue_offset, record.reconsume_times, "it failed")
                ticket = self._site.broker.leases.retry(GROUP, failed, [delay_ms], TIMES_MAX, now)
                if ticket is not None:
                    lease = Lease(topic, queue_id, now, now + ticket.delay_ms, 0)
                    self._calls.append(Call(ticket, partial(self._take_retry, (number, record.queue_offset), lease)))

    def _take_retry(self, place: Place, lease: Lease, times: list[int]) -> None:
        if times[0] != NOT_GIVEN:
            del self._done[place]
            self._leases[place] = lease
            lease.times = times[0]

    def leave(self, place: int, queue: int) -> None:
        """The consumer that pulls a queue leaves it."""
        topic = topic_at(place)
        self._pulled.pop((topic, queue % self._site.broker.fold.topics.get(topic).read_queue_count), None)

    # -- crashes and deleted topics -------------------------------------------------------------------------------

    def doubt(self) -> None:
        """A crash: calls that were not answered may have counted; a pop among them may have reached anything."""
        changes = [(call.place, call.until_ms) for call in self._calls]
        for place, until_ms in [*changes, self._changing] if self._changing else changes:
            if place in self._leases:
                self._leases[place].until_ms = min(self._leases[place].until_ms, until_ms)
        for given in self._leases.values():
            given.is_in_doubt = True
        self._calls.clear()
        self._changing = None
        self._pulled.clear()

    def note_gone(self) -> None:
        """After retention: the broker forgets a message without a record when a consumer next asks for it."""
        fold = self._site.broker.fold
        for (number, offset), given in self._leases.items():
            entries = fold.queues[number].entries
            if offset < entries.first or not fold.read(*entries.read(offset, offset + 1)[0].tolist()[:2]):
                given.is_in_doubt = True

    def forget(self, numbers: list[int]) -> None:
        """Forgets the leases of queues that were deleted with their topic."""
        self._leases = {place: given for place, given in self._leases.items() if place[0] not in numbers}
        self._pulled.clear()

    # -- the end ------------------------------------------------------------------------------------------------

    def pop_the_rest(self) -> None:
        """Pops and acknowledges everything that is left, and checks that no message is lost."""
        self._pulled.clear()
        while self._site.broker.leases.spent_messages(1):
            self._bury(50)
            self._watch.flush()
        # A topic may give nothing while the group has too many leases of the other topic.
        while any(self._pop_some(topic) for topic in TOPICS):
            self._watch.flush()
            for place, given in self._leases.items():
                if not given.is_acked:
                    self._acknowledge(place)
            self._watch.flush()
        self._check_none_lost()

    def _pop_some(self, topic: str) -> bool:
        try:
            return self._pop(topic, 50, 3_600_000)
        except FlowControl as error:
            self._site.digest.note_error(error)
            return False

    def _check_none_lost(self) -> None:
        """Every readable message was acknowledged by this group, is leased to it, or is a dead letter."""
        broker = self._site.broker
        letters = _letters(broker)
        self._site.digest.note("letters", letters)
        for topic in TOPICS:
            for queue_id, number in enumerate(broker.fold.topics.get(topic).numbers):
                for offset in _readable(broker, topic, queue_id):
                    self._check_known((number, offset), letters)

    def _check_known(self, place: Place, letters: list[str]) -> None:
        given = self._leases.get(place)
        letter_count = letters.count(f"{place[0]}:{place[1]}")
        is_again = place in self._read_again  # what was a dead letter was handled then, or is one once more
        if letter_count > 1 + is_again:
            raise Broken(f"{place} is a dead letter {letter_count} times")
        if letter_count and given is not None and given.is_acked and not is_again:
            raise Broken(f"{place} was acknowledged and is a dead letter")
        if given is None and not letter_count and place not in self._done:
            raise Broken(f"{place} can be read, and no consumer got it")


def _letters(broker: Broker) -> list[str]:
    found = []
    for offset in _readable(broker, DEAD_LETTERS, 0):
        pulled = broker.pull(DEAD_LETTERS, 0, offset, count_max=1)
        found += [records.decode(data).body.decode() for data in pulled.records]
    return found


def _readable(broker: Broker, topic: str, queue_id: int) -> list[int]:
    """The offsets of messages whose records exist."""
    offset, high = broker.offsets(topic, queue_id)
    found: list[int] = []
    while offset < high:
        pulled = broker.pull(topic, queue_id, offset, count_max=64)
        found += [records.decode(data).queue_offset for data in pulled.records]
        offset = pulled.next_offset
    return found
