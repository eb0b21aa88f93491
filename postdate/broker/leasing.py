"""Leases, as calls: pop, acknowledge, change the invisible time, retry, move.

A pop gives messages to a consumer of a group for a while. Each call writes one record and gives a ticket, like every
call of the broker; the table of leases is in state/leases.py.

Which messages a pop gives is decided here, by the `Picker`, when it is asked for, and written down message by message;
the fold gives what the record says. Between the two, a few milliseconds of disk, what was picked is promised: nobody
else may be given it. Nor may a message whose acknowledgement, change or burial is on its way: what that will do to it,
the fold does not know yet.

    ready     messages whose lease is over, in the order in which they came back
    new       messages from the group's offset on; the offset moves, and pops and pulls share it

A member that pulls shares its queue's offset with nobody: pops give nothing new of such a queue, only what came back. A
pulled message that its consumer could not handle becomes a lease, too (`retry`), and comes again by a pop.

A pop may ask for order: while a message of a queue is away, that queue gives nothing, and it gives by offset.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

from postdate.broker.dead_letters import DONE_GROUP
from postdate.broker.sending import SendCalls
from postdate.broker.settings import CurrentSettings
from postdate.broker.topics import TopicCalls
from postdate.broker.view import View
from postdate.broker.writing import Ticket, Writer
from postdate.config import Settings
from postdate.errors import NoPermission, PopsFull, PostdateError, UsageError
from postdate.message import REASON_CHARACTERS_MAX, TRIES_MAX, Host, Message, check_group
from postdate.state.fold import Fold
from postdate.state.leases import NOT_GIVEN, OVER, Key
from postdate.storage import record as records
from postdate.storage.batch import ACK, INVISIBLE, POP, Prepared
from postdate.storage.queue import FILTER_ROWS, Queue, tagged

_PASSED_MAX = 10_000  # places that `_move` remembers: forgetting them costs another look


class PopRequest(NamedTuple):
    group: str
    topic: str
    queue_ids: Sequence[int]  # where to look, in this order
    count_max: int
    bytes_max: int
    invisible_ms: int
    times_max: int  # given more often than this, a message is a dead letter
    tag_hashes: frozenset[int] | None = None
    from_end: bool = False  # where a group begins that has no offset yet
    in_order: bool = False
    store_host: Host | None = None
    ready_only: AbstractSet[int] = frozenset()  # queue ids of which it gives what came back, and nothing new
    begins: Mapping[int, int] = MappingProxyType({})  # by queue id: offsets on their way to the fold


class PoppedMessage(NamedTuple):
    queue_id: int
    offset: int
    times: int  # how often it was given before


class PopResult(NamedTuple):
    """What a pop gave: the messages and, in the same order, their records."""

    popped_at_ms: int
    messages: list[PoppedMessage]
    body: bytes


class FailedMessage(NamedTuple):
    """A pulled message that its consumer could not handle."""

    topic: str
    queue_id: int
    offset: int
    times: int  # how often it was tried before
    reason: str = ""  # why it failed, in the consumer's words


class LeaseHandle(NamedTuple):
    """Names a consumer's lease of a message."""

    topic: str
    queue_id: int
    offset: int
    popped_at_ms: int


# -- the calls ---------------------------------------------------------------------------------------------------


class PopTicket(Ticket):
    """The receipt of a pop; its answer is a PopResult."""

    __slots__ = ("_at_ms", "_leases", "_plan")

    def __init__(self, leases: "LeaseCalls", plan: "PopPlan", at_ms: int) -> None:
        super().__init__()
        self._leases, self._plan, self._at_ms = leases, plan, at_ms

    @property
    def moved(self) -> dict[int, int]:
        """By queue id: where the group goes on, in the queues of which it gives new messages."""
        return {queue_id: offset for (queue_id, _), offset in self._plan.next.items()}

    def settle(self, answers: list[list[int]]) -> None:
        """The pop is applied: the fold has answered how often each message was given before."""
        try:
            self.answers = [self._leases.hand_over(self._plan, answers[0], self._at_ms)]
        except (PostdateError, OSError) as error:
            self.answers, self.error = [], error  # the messages are given all the same, and come back


class LeaseTicket(Ticket):
    """The receipt of a record about popped messages, which nobody may be given until it is applied."""

    __slots__ = ("_answer", "_picker", "keys")

    def __init__(self, picker: "Picker", keys: list[Key], answer: Any = None) -> None:
        super().__init__()
        self._picker, self.keys = picker, keys
        self._answer = answer  # instead of the fold's

    def settle(self, answers: list[Any]) -> None:
        self._picker.leave(self.keys)
        self.answers = answers if self._answer is None else [self._answer]


class RetryTicket(LeaseTicket):
    """The receipt of a message that failed: when it comes again, or that this was its last try."""

    __slots__ = ("delay_ms", "is_last")

    def __init__(self, picker: "Picker", key: Key, delay_ms: int, is_last: bool) -> None:
        super().__init__(picker, [key])
        self.delay_ms, self.is_last = delay_ms, is_last


class LeaseCalls:
    """Gives messages to consumers for a while, and takes in what they say about them."""

    def __init__(
        self, fold: Fold, writer: Writer, sending: SendCalls, view: View, topics: TopicCalls, settings: CurrentSettings
    ) -> None:
        self._fold, self._writer, self._sending, self._view = fold, writer, sending, view
        self._topics, self._settings = topics, settings
        self._picker = Picker(fold)

    # -- popping ------------------------------------------------------------------------------------------------

    def pop(self, request: PopRequest, at_ms: int) -> PopTicket | None:
        """Gives a group messages for a while, those first that came back to it. What is not acknowledged by then is
        given again. The answer is a PopResult; None where there is nothing to give.

        Raises PopsFull where the group has too many already.
        """
        check_group(request.group)
        if request.group == DONE_GROUP:
            raise NoPermission(f"group {DONE_GROUP} is the broker's own: it says which dead letters are done")
        for queue_id in request.queue_ids:
            self._view.queue(request.topic, queue_id)
        self._check_invisible(request.invisible_ms)
        if request.count_max < 1:
            raise UsageError(f"count_max is {request.count_max}, expected at least 1")
        plan = self._picker.pick(request, self._settings.now)
        if plan.is_nothing:
            return None
        offset_of = self._fold.groups.offset
        fresh = sum(offset_of(request.group, request.topic, queue_id) is None for queue_id, _ in plan.next)
        self._topics.admit_popper(request.group, fresh)
        ticket = PopTicket(self, plan, at_ms)
        self._picker.promise(plan, ticket)
        try:
            self._writer.write_system(POP, _pop_record(plan), at_ms, ticket)
        except PostdateError:
            self._picker.end_promise(plan)  # nothing was written
            raise
        return ticket

    def _check_invisible(self, invisible_ms: int, least_ms: int = 1) -> None:
        limit = self._settings.now.invisible_ms_max
        if not least_ms <= invisible_ms <= limit:
            raise UsageError(
                f"the invisible time is {invisible_ms} ms, expected {least_ms} to invisible_ms_max ({limit})"
            )

    def hand_over(self, plan: "PopPlan", times: list[int], at_ms: int) -> PopResult:
        """Makes what the consumer reads of a pop that was just applied, by how often each message was given before."""
        self._picker.end_promise(plan)
        messages: list[PoppedMessage] = []
        places: list[tuple[int, int, int, int]] = []
        body = bytearray()
        for pick, record, count in zip(plan.picks, plan.records, times, strict=True):
            if count == NOT_GIVEN:
                continue
            messages.append(PoppedMessage(pick.queue_id, pick.offset, count))
            places.append((len(body), pick.offset, pick.place, pick.visible_at_ms))
            is_own = record[records.QUEUE_ID] == pick.queue_id.to_bytes(4, "big")
            body += record if is_own else records.moved(record, pick.queue_id)
            if count:
                records.given_again(body, places[-1][0], count)
        records.deliver(body, places, plan.request.store_host)
        return PopResult(at_ms, messages, bytes(body))

    def pop_in_flight(self, group: str, topic: str, queue_id: int) -> Ticket | None:
        """The last pop that gives a group new messages of a queue and is not applied yet."""
        return self._picker.last_pop(group, self._view.queue_number(topic, queue_id))

    def promised_places(self) -> set[int]:
        """Offsets of the records that pops, acknowledgements and changes name which are not applied yet."""
        return self._picker.promised_places()

    # -- acknowledging and changing -----------------------------------------------------------------------------

    def acknowledge(self, group: str, handles: Sequence[LeaseHandle], at_ms: int) -> Ticket:
        """A group is done with messages that it popped. The answer says of each whether its handle was good: one that
        was given again since, or acknowledged before, is not.
        """
        check_group(group)
        messages = [[self._queue_number(handle), handle.offset, handle.popped_at_ms] for handle in handles]
        ticket = LeaseTicket(self._picker, [(group, number, offset) for number, offset, _ in messages])
        return self._write(ticket, ACK, {"group": group, "messages": messages}, at_ms)

    def change_invisible(
        self, group: str, handle: LeaseHandle, invisible_ms: int, at_ms: int, *, is_begun: bool = True
    ) -> Ticket:
        """From now on a popped message is invisible for this long; its handle holds `at_ms` from then on. The answer is
        whether the handle was good. A message that its consumer has not begun with does not count as given.
        """
        self._check_invisible(invisible_ms, least_ms=1 if is_begun else 0)
        key = self._key(group, handle)
        more = {} if is_begun else {"not_begun": True}
        return self._change(LeaseTicket(self._picker, [key]), handle, invisible_ms, more, at_ms)

    def renew(self, group: str, handle: LeaseHandle, invisible_ms: int, at_ms: int) -> Ticket:
        """Lets a lease end later: from now on the message is invisible for this long, and its handle stays good. The
        answer is whether the lease was still there.
        """
        self._check_invisible(invisible_ms)
        key = self._key(group, handle)
        return self._change(LeaseTicket(self._picker, [key]), handle, invisible_ms, {"renewed": True}, at_ms)

    def _change(
        self, ticket: "LeaseTicket", handle: LeaseHandle, invisible_ms: int, more: Mapping[str, Any], at_ms: int
    ) -> Ticket:
        group, number, offset = key = ticket.keys[0]
        lease = self._fold.leases.by_key.get(key)
        if lease is not None and lease.until_ms == OVER and not self._fold.read(lease.place, lease.size):
            # It came back, nobody wanted it, and retention has removed its record: nothing is left to be given again.
            lost = {"group": group, "messages": [[number, offset, handle.popped_at_ms]]}
            return self._write(LeaseTicket(self._picker, [key], answer=False), ACK, lost, at_ms)
        body = {
            "group": group, "number": number, "offset": offset, "popped_at_ms": handle.popped_at_ms,
            "invisible_ms": invisible_ms, **more,
        }  # fmt: skip
        return self._write(ticket, INVISIBLE, body, at_ms)

    # -- messages that failed -----------------------------------------------------------------------------------

    def fail(self, group: str, handle: LeaseHandle, delays_ms: Sequence[int], reason: str, at_ms: int) -> Ticket:
        """The consumer of a popped message has failed: gives it again after the delay of its try, or makes it a dead
        letter where that was the last. The answer is whether the handle was good; the ticket is a RetryTicket, unless
        the record is gone.
        """
        key = self._key(group, handle)
        lease = self._fold.leases.by_key.get(key)
        times, is_last = 0, False
        if lease is not None:
            record = self._fold.read(lease.place, lease.size)
            times = max(lease.times, 0) + (records.reconsume_times_of(record) if record else 0)
            is_last = lease.times >= lease.times_max
        delay_ms = 0 if is_last else _delay_ms(delays_ms, times)
        self._check_invisible(delay_ms, least_ms=0)
        more = {"reason": reason[:REASON_CHARACTERS_MAX]} if reason else {}
        return self._change(RetryTicket(self._picker, key, delay_ms, is_last), handle, delay_ms, more, at_ms)

    def retry(
        self, group: str, failed: FailedMessage, delays_ms: Sequence[int], times_max: int, at_ms: int
    ) -> "RetryTicket | None":
        """Gives a pulled message again, in place, after the delay of its try: it becomes a lease, and ends as one.
        Tried more often than `times_max`, it is a dead letter. None where its record is gone. Raises PopsFull.
        """
        check_group(group)
        queue = self._view.queue(failed.topic, failed.queue_id)
        if not queue.first <= failed.offset < queue.length:
            raise UsageError(
                f"offset {failed.offset} of queue {failed.queue_id} of {failed.topic!r}, "
                f"expected one from {queue.first} to {queue.length - 1}"
            )
        place, size, _ = queue.entries.read(failed.offset, failed.offset + 1)[0].item()
        record = self._fold.read(place, size)
        if not record:
            return None
        key, limit = (group, queue.number, failed.offset), self._settings.now.group_popped_max
        if key not in self._fold.leases.by_key and self._fold.leases.counts.get(group, 0) >= limit:
            raise PopsFull(f"group_popped_max: group {group!r} has {limit} messages that wait for another try")
        self._topics.admit_popper(group, 0)
        tried = records.reconsume_times_of(record)
        times = min(max(failed.times, tried), TRIES_MAX)
        is_last = times >= times_max
        delay_ms = 0 if is_last else _delay_ms(delays_ms, times)
        self._check_invisible(delay_ms, least_ms=0)
        body = {
            "group": group, "invisible_ms": delay_ms, "times_max": times_max,
            "messages": [_message_row(queue.number, failed.offset, place, size, tried)], "lost": [], "offsets": [],
            "times": times - tried, "reason": failed.reason[:REASON_CHARACTERS_MAX],
        }  # fmt: skip
        ticket = RetryTicket(self._picker, key, delay_ms, is_last)
        self._write(ticket, POP, body, at_ms)
        return ticket

    def _key(self, group: str, handle: LeaseHandle) -> Key:
        check_group(group)
        return group, self._queue_number(handle), handle.offset

    def _queue_number(self, handle: LeaseHandle) -> int:
        return self._view.queue_number(handle.topic, handle.queue_id)

    def _write(
        self, ticket: LeaseTicket, kind: int, body: Mapping[str, Any], at_ms: int, letters: list[Prepared] | None = None
    ) -> Ticket:
        """Writes a record about popped messages and, in the same batch, their dead letters."""
        self._picker.touch(ticket.keys)
        try:
            if letters is None:
                return self._writer.write_system(kind, body, at_ms, ticket)
            return self._writer.write_mixed(letters, kind, body, at_ms, ticket)
        except PostdateError:
            self._picker.leave(ticket.keys)
            raise

    # -- messages that leave their queue ------------------------------------------------------------------------

    def spent_messages(self, count_max: int, but_of: AbstractSet[str] = frozenset()) -> list[tuple[Key, bytes]]:
        """Messages that were given as often as they may be and that nobody buries yet, with their records (empty where
        those are gone); without those of some groups.
        """
        leases = self._fold.leases.by_key
        spent = (key for key in self._fold.leases.spent if key[0] not in but_of and not self._picker.is_touched(key))
        keys = islice(spent, count_max)
        return [(key, self._fold.read(leases[key].place, leases[key].size)) for key in keys]

    def ready_messages(self, group: str, number: int, count_max: int) -> list[tuple[Key, bytes]]:
        """Messages of a queue that came back to a group and that nobody was promised, with their records likewise."""
        leases, picker = self._fold.leases, self._picker
        keys = ((group, number, offset) for offset in leases.ready.get((group, number), ()))
        free = islice((key for key in keys if not picker.is_promised(key) and not picker.is_touched(key)), count_max)
        return [(key, self._fold.read(leases.by_key[key].place, leases.by_key[key].size)) for key in free]

    def is_touched(self, key: Key) -> bool:
        """Whether an acknowledgement, change or burial of a message is written and not applied yet."""
        return self._picker.is_touched(key)

    def move(self, key: Key, copy: Message | None, at_ms: int) -> Ticket:
        """Forgets a message that is spent or ready again and, in the same batch, sends its copy to another topic: the
        dead letter queue, or the retry topic. None where its record is gone.
        """
        group, number, offset = key
        letters = [] if copy is None else [self._sending.prepare(copy, at_ms)]
        body = {"group": group, "messages": [[number, offset, self._fold.leases.by_key[key].popped_at_ms]]}
        return self._write(LeaseTicket(self._picker, [key]), ACK, body, at_ms, letters)


def _pop_record(plan: "PopPlan") -> dict[str, Any]:
    request = plan.request
    return {
        "group": request.group, "invisible_ms": request.invisible_ms, "times_max": request.times_max,
        "messages": [
            _message_row(pick.number, pick.offset, pick.place, pick.size, records.reconsume_times_of(record))
            for pick, record in zip(plan.picks, plan.records, strict=True)
        ],
        "lost": plan.lost,
        "offsets": [[request.topic, queue_id, offset] for (queue_id, _), offset in plan.next.items()],
    }  # fmt: skip


def _message_row(number: int, offset: int, place: int, size: int, tried: int) -> list[int]:
    """One message of a record. How often it was tried before it was stored, mostly never, counts for its limit."""
    return [number, offset, place, size, tried] if tried else [number, offset, place, size]


def _delay_ms(delays_ms: Sequence[int], times: int) -> int:
    """The delay before the next try of a message that was tried so often before; the last one holds for all later."""
    return delays_ms[min(times, len(delays_ms) - 1)]


# -- which messages a pop gives ----------------------------------------------------------------------------------


class Pick(NamedTuple):
    """A message that will be given."""

    queue_id: int
    number: int
    offset: int
    place: int
    size: int
    visible_at_ms: int
    is_new: bool


class PopPlan:
    """What a pop will give, with its records."""

    def __init__(self, request: PopRequest, settings: Settings) -> None:
        self.request = request
        self.popped_max = settings.group_popped_max  # of the group
        self.entries_max = settings.wheel_entries_max  # in all: leases and the entries of the wheel
        self.picks: list[Pick] = []
        self.records: list[bytes] = []
        self.lost: list[tuple[int, int]] = []  # (number, offset) of ready messages whose records are gone
        self.next: dict[tuple[int, int], int] = {}  # (queue id, number): where the group goes on
        self._bytes = 0

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to write down."""
        return not self.picks and not self.lost

    @property
    def new_count(self) -> int:
        """Messages among them that the group was never given."""
        return sum(pick.is_new for pick in self.picks)

    def has_room_for(self, size: int) -> bool:
        fits = not self.picks or self._bytes + size <= self.request.bytes_max
        return fits and len(self.picks) < self.request.count_max

    def add(self, pick: Pick, record: bytes) -> None:
        self.picks.append(pick)
        self.records.append(record)
        self._bytes += pick.size

    def keys(self) -> Iterator[Key]:
        for pick in self.picks:
            yield self.request.group, pick.number, pick.offset


class _Passed(NamedTuple):
    """Entries of a queue in which a filter has found nothing. Another filter looks at them again."""

    begin: int
    end: int
    tag_hashes: frozenset[int] | None


class Picker:
    """Chooses which messages a pop gives, and remembers what pops that are not applied yet have promised."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._promised: dict[Key, int] = {}  # by message: where its record lies
        self._touched: dict[Key, int] = {}  # by message: acknowledgements, changes and burials on their way
        self._promised_new: dict[str, int] = {}  # by group: promised messages that it was never given
        # (group, number): promised offsets and the tickets of their pops, oldest first
        self._next: dict[tuple[str, int], list[tuple[int, Ticket]]] = {}
        self._passed: dict[tuple[str, int], _Passed] = {}  # (group, number)

    # -- promises -----------------------------------------------------------------------------------------------

    def promise(self, plan: PopPlan, ticket: Ticket) -> None:
        group = plan.request.group
        self._promised.update(zip(plan.keys(), [pick.place for pick in plan.picks], strict=True))
        self._count_new(group, plan.new_count)
        for (_, number), offset in plan.next.items():
            self._next.setdefault((group, number), []).append((offset, ticket))

    def end_promise(self, plan: PopPlan) -> None:
        """The pop is applied, and the fold knows it from now on; or nothing was written."""
        group = plan.request.group
        for key in set(plan.keys()):
            del self._promised[key]
        self._count_new(group, -plan.new_count)
        for _, number in plan.next:
            promised = self._next[group, number]
            del promised[0]
            if not promised:
                del self._next[group, number]

    def promised_places(self) -> set[int]:
        """Returns where the records lie that will be given, or are changed to come again later: they must stay."""
        leases = self._fold.leases.by_key
        return {*self._promised.values(), *(leases[key].place for key in self._touched if key in leases)}

    def last_pop(self, group: str, number: int) -> Ticket | None:
        promised = self._next.get((group, number))
        return promised[-1][1] if promised else None

    def touch(self, keys: Iterable[Key]) -> None:
        """An acknowledgement, change or burial of these messages is written."""
        for key in keys:
            self._touched[key] = self._touched.get(key, 0) + 1

    def leave(self, keys: Iterable[Key]) -> None:
        """It is applied, or was not written."""
        for key in keys:
            count = self._touched.pop(key) - 1
            if count:
                self._touched[key] = count

    def is_promised(self, key: Key) -> bool:
        return key in self._promised

    def is_touched(self, key: Key) -> bool:
        return key in self._touched

    def _count_new(self, group: str, change: int) -> None:
        count = self._promised_new.pop(group, 0) + change
        if count:
            self._promised_new[group] = count

    # -- picking ------------------------------------------------------------------------------------------------

    def pick(self, request: PopRequest, settings: Settings) -> PopPlan:
        """Chooses what can be given now. Raises PopsFull where there is something and the group has too much."""
        plan = PopPlan(request, settings)
        numbers = self._fold.topics.get(request.topic).numbers
        queues = [(queue_id, self._fold.queues[numbers[queue_id]]) for queue_id in request.queue_ids]
        if request.in_order:
            queues = [(queue_id, queue) for queue_id, queue in queues if not self._is_away(request, queue.number)]
        for queue_id, queue in queues:
            self._pick_ready(plan, queue_id, queue)
        for queue_id, queue in queues:
            if len(plan.picks) < request.count_max and queue_id not in request.ready_only:
                self._pick_new(plan, queue_id, queue)
        return plan

    def _is_away(self, request: PopRequest, number: int) -> bool:
        """Whether the group has, or was promised, a message of that queue."""
        place = (request.group, number)
        return place in self._fold.leases.leased or any(
            key[:2] == place for key in chain(self._promised, self._touched)
        )

    def _pick_ready(self, plan: PopPlan, queue_id: int, queue: Queue) -> None:
        group, number = plan.request.group, queue.number
        ready = self._fold.leases.ready.get((group, number), {})
        for offset in sorted(ready) if plan.request.in_order else ready:
            lease = self._fold.leases.by_key[group, number, offset]
            if not plan.has_room_for(lease.size):
                return
            if (group, number, offset) in self._promised or (group, number, offset) in self._touched:
                continue
            record = self._fold.read(lease.place, lease.size)
            if record and offset >= queue.first:
                visible_at_ms = int(queue.visible_at_ms(offset, offset + 1)[0])
                pick = Pick(queue_id, number, offset, lease.place, lease.size, visible_at_ms, is_new=False)
                plan.add(pick, record)
            else:
                plan.lost.append((number, offset))

    def _pick_new(self, plan: PopPlan, queue_id: int, queue: Queue) -> None:
        group, leases = plan.request.group, self._fold.leases
        begin = self._begin(plan.request, queue_id, queue)
        start, passed = begin, self._passed.get((group, queue.number))
        if passed is not None and (passed.begin, passed.tag_hashes) == (begin, plan.request.tag_hashes):
            start = passed.end
        own = plan.popped_max - leases.counts.get(group, 0) - self._promised_new.get(group, 0)
        promised = sum(self._promised_new.values())
        room = min(own, plan.entries_max - self._fold.wheel.count - len(leases.by_key) - promised) - plan.new_count
        while start < queue.length:
            if room <= 0:
                if plan.is_nothing:
                    raise PopsFull(
                        f"group {group!r} has {leases.counts.get(group, 0)} messages that it has not acknowledged "
                        f"(group_popped_max: {plan.popped_max}), all groups have {len(leases.by_key)} (with what is "
                        f"due soon, wheel_entries_max: {plan.entries_max})"
                    )
                break
            count_before, start_before = len(plan.picks), start
            start = self._pick_range(plan, queue_id, queue, start, room)
            if len(plan.picks) > count_before or start == start_before:  # or the plan has no room for the next one
                break
        if start > begin:
            self._move(plan, queue_id, queue.number, begin, start)

    def _pick_range(self, plan: PopPlan, queue_id: int, queue: Queue, start: int, room: int) -> int:
        """Picks what is wanted of the next entries; returns where to go on."""
        request, leases = plan.request, self._fold.leases.by_key
        stop = min(start + (FILTER_ROWS if request.tag_hashes else min(request.count_max, room)), queue.length)
        entries = queue.entries.read(start, stop)
        visible_at = queue.visible_at_ms(start, stop)
        for index in tagged(entries, request.tag_hashes) if request.tag_hashes else range(len(entries)):
            place, size, _ = entries[index].item()
            record = self._fold.read(place, size)
            if not record or (request.group, queue.number, start + index) in leases:
                continue  # gone; or the group's offset was set back, and it has this one
            if not room or not plan.has_room_for(size):
                return start + index
            pick = Pick(queue_id, queue.number, start + index, place, size, int(visible_at[index]), is_new=True)
            plan.add(pick, record)
            room -= 1
        return stop

    def _move(self, plan: PopPlan, queue_id: int, number: int, begin: int, end: int) -> None:
        """Moves the group past what was looked at. Passing over messages alone is not worth a record: it is remembered
        here, and they are looked at again after a restart, or when the group's offset was set to another place.
        """
        if any(pick.number == number for pick in plan.picks):
            plan.next[queue_id, number] = end
            self._passed.pop((plan.request.group, number), None)
            return
        if len(self._passed) >= _PASSED_MAX:
            self._passed.clear()
        self._passed[plan.request.group, number] = _Passed(begin, end, plan.request.tag_hashes)

    def _begin(self, request: PopRequest, queue_id: int, queue: Queue) -> int:
        """Returns the first offset that nobody of the group was given, or promised."""
        promised = self._next.get((request.group, queue.number))
        if promised:
            offset: int | None = promised[-1][0]
        else:
            known = self._fold.groups.offset(request.group, request.topic, queue_id)
            offset = request.begins.get(queue_id, known)
        if offset is None:
            offset = queue.length if request.from_end else queue.first
        return max(offset, queue.first)
