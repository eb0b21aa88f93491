"""Transactions, as calls: half messages, their ends, and when their producers are asked.

    prepare_half, write_half    the two halves of a send: stores a half, which nobody sees
    end                         commits or rolls back; the answer of its ticket is the truth, an Ended
    take_due_checks             whose producers are to be asked now; halves that were asked for too often are given up
    note_checked, postpone      a producer was asked; nobody was there to be asked
    list_open                   halves that are open, for operators

    sent ----> open ----> committed      its message goes where a new message of its due goes
                 |  \\---> rolled back
                 |  \\---> asked, again and again, then given up: open, kept and shown, until somebody ends it

A commit carries the message, and its delay begins with the commit: a relative one counts from there, an absolute one
stays. The place of the commit in the log is the message's arrival. An end is written where the half is open, and counts
only if it still is when the end is applied: of two ends one comes first, and the other learns it.
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from postdate.arrival import NEVER
from postdate.broker.sending import SendCalls
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.errors import FlowControl, IllegalMessage, UsageError
from postdate.keys import key_hash
from postdate.message import (
    DLQ_TOPIC_PREFIX,
    PROPERTY_CHECK_IMMUNITY,
    PROPERTY_CHECK_TIMES,
    PROPERTY_KEYS,
    PROPERTY_ONCE,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TRANSACTION,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_UNIQ_KEY,
    RETRY_TOPIC_PREFIX,
    SYS_COMMITTED,
    SYS_HALF,
    Ended,
    Message,
    decode_properties,
    encode_properties,
)
from postdate.state.fold import Fold
from postdate.state.transactions import CHECK, GIVE_UP, ROLL_BACK, Half
from postdate.storage import record as records
from postdate.storage.batch import HALF, TRANSACTION, Prepared

_SYS_FLAG_KEPT = ~(SYS_HALF | SYS_COMMITTED)
_IMMUNITY = re.compile(r"[0-9]{1,9}")  # seconds; another text counts as none, as in RocketMQ
_CHECKS_PER_CALL, _CHECK_BYTES_PER_CALL = 1_000, 4 << 20  # some 20 ms, and what is in RAM meanwhile


class HalfTicket(Ticket):
    """The receipt of a half. Its answer is the number of the half, how many there were before it."""

    __slots__ = ("_calls",)

    def __init__(self, calls: "TransactionCalls") -> None:
        super().__init__()
        self._calls = calls

    def settle(self, answers: list[int]) -> None:
        self.answers = answers
        self._calls.note_open(self)


class EndTicket(Ticket):
    """The receipt of an end. Its answer is an Ended. Where it was known at once, nothing was written."""

    __slots__ = ()


class OpenHalf(NamedTuple):
    """A half that is open, with what its record says."""

    half: Half
    topic: str
    queue_id: int
    group: str  # whose producers are asked
    unique_key: str
    keys: str
    record: bytes


class TransactionCalls:
    """Stores halves, ends them, and says when their producers are to be asked."""

    def __init__(self, fold: Fold, writer: Writer, sending: SendCalls, settings: CurrentSettings) -> None:
        self._fold, self._writer, self._sending, self._settings = fold, writer, sending, settings
        self._agenda: list[tuple[int, int]] = []  # a heap: when to ask about a half, and its offset
        self._pending_count = self._pending_bytes = 0  # of halves that are written and not applied

    def resume(self) -> None:
        """The log is applied as far as it goes: checks go on where they were."""
        halves = self._fold.transactions.halves.values()
        self._agenda = [(half.check_at_ms, half.offset) for half in halves if not half.given_up_at_ms]
        heapq.heapify(self._agenda)

    @property
    def open_count(self) -> int:
        return len(self._fold.transactions.halves)

    @property
    def given_up_count(self) -> int:
        """How many of the open ones nobody is asked about any more."""
        return self._fold.transactions.given_up_count

    # -- halves -------------------------------------------------------------------------------------------------

    def prepare_half(self, message: Message, at_ms: int) -> Prepared:
        """Checks a half, and that the message which its commit would bring could be stored now. Changes nothing. Raises
        IllegalMessage, TopicNotFound, NoPermission.
        """
        properties = decode_properties(message.properties)
        self._refuse_properties(message.topic, properties)
        settings = self._settings.now
        # As long as it may become: what fits now fits then.
        whole = self._sending.prepare(_committed(message, properties, 0, settings.transaction_check_times_max), at_ms)
        half = message._replace(sys_flag=message.sys_flag & _SYS_FLAG_KEPT | SYS_HALF, prepared_offset=0)
        size = whole.shape.fixed_bytes + len(half.body) + len(half.properties)
        wait_ms = max(settings.transaction_timeout_ms, _immunity_ms(properties))
        return whole._replace(
            message=half, size=size, level=0, due_at_ms=at_ms + wait_ms, first_hash=0, tag_hash=0, flags=0
        )

    def _refuse_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        if properties.get(PROPERTY_TRANSACTION, "").lower() != "true":
            raise IllegalMessage(f"the half of a transaction needs the property {PROPERTY_TRANSACTION}=true")
        for name in (PROPERTY_PRODUCER_GROUP, PROPERTY_UNIQ_KEY):
            if name not in properties:
                raise IllegalMessage(
                    f"the half of a transaction needs the property {name}: its producer is asked by it"
                )
        for name in (PROPERTY_ONCE, PROPERTY_TIMER_DEL_UNIQKEY):
            if name in properties:
                raise IllegalMessage(f"property {name} and a transaction do not go together: send a plain message")
        if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
            raise IllegalMessage(f"topic {topic!r} belongs to a group: it takes no transactions")

    def write_half(self, prepared: Prepared, at_ms: int) -> HalfTicket:
        """Writes a half that was prepared for this instant. Raises FlowControl, DiskFull, LogFailed."""
        self._admit(prepared.size)
        ticket = HalfTicket(self)
        # Counted first: in flush mode async it is applied, and counted off, before the call returns.
        self._pending_count, self._pending_bytes = self._pending_count + 1, self._pending_bytes + prepared.size
        try:
            self._writer.write([prepared], at_ms, kind=HALF, ticket=ticket)
        except BaseException:
            self._forget_pending(prepared.size)
            raise
        return ticket

    def _admit(self, size: int) -> None:
        """Raises FlowControl where too many halves are open: each keeps its part of the log, and some RAM."""
        known, limits = self._fold.transactions, self._settings.limits
        count = len(known.halves) + self._pending_count
        if count >= limits.halves_max:
            raise FlowControl(
                f"halves_max: {count} transactions are open, {known.given_up_count} of them given up, the limit is "
                f"{limits.halves_max}; see which with: postdate transaction list"
            )
        held = known.bytes + self._pending_bytes
        if held + size > limits.halves_bytes_max:
            raise FlowControl(
                f"halves_bytes_max: open transactions hold {held} bytes, the limit is {limits.halves_bytes_max}; see "
                "which with: postdate transaction list"
            )

    def note_open(self, ticket: Ticket) -> None:
        """A half is applied: its producer is asked in time."""
        self._forget_pending(ticket.prepared[0].size)
        half = self._fold.transactions.halves.get(ticket.offsets[0])
        if half is not None:
            heapq.heappush(self._agenda, (half.check_at_ms, half.offset))

    def _forget_pending(self, size: int) -> None:
        self._pending_count, self._pending_bytes = self._pending_count - 1, self._pending_bytes - size

    # -- ends ---------------------------------------------------------------------------------------------------

    def end(
        self, offset: int, at_ms: int, *, is_commit: bool, number: int | None = None, group: str = "", topic: str = "",
        unique_key: str = "",
    ) -> EndTicket:  # fmt: skip
        """Ends the half at an offset of the log. What else is given must be the half's own: UsageError otherwise. An
        end of a half that is not open has its answer at once and changes nothing.

        Raises UsageError, IllegalMessage, NoPermission, FlowControl, DiskFull, LogFailed; then the half stays open.
        """
        ticket = EndTicket()
        found = self.find_open(offset)
        if found is None:
            ticket.answers = [self.how_ended(offset)]
            return ticket
        _refuse_other(found, number, group, topic, unique_key)
        if not is_commit:
            self._writer.write_system(TRANSACTION, {"call": ROLL_BACK, "half": offset}, at_ms, ticket)
            return ticket
        record = records.decode(found.record)
        half = Message(
            record.topic, record.body, record.properties, record.queue_id, record.flag, record.sys_flag,
            record.born_at_ms, record.born_host, record.reconsume_times,
        )  # fmt: skip
        message = _committed(half, decode_properties(record.properties), offset, found.half.check_count)
        prepared = self._sending.prepare_moved(message, at_ms)
        self._sending.write_committed(prepared, at_ms, ticket)
        return ticket

    # -- checks -------------------------------------------------------------------------------------------------

    @property
    def next_check_at_ms(self) -> int:
        """When a producer is to be asked next; NEVER where nobody is."""
        return self._agenda[0][0] if self._agenda else NEVER

    def take_due_checks(self, at_ms: int) -> list[OpenHalf]:
        """Returns halves whose producers are to be asked now, a bounded number. Of each the caller says `note_checked`
        or `postpone`. Those that were asked for often enough, or are too old, are given up. Raises DiskFull, LogFailed.
        """
        settings, due, over = self._settings.now, list[OpenHalf](), list[int]()
        times_max, interval_ms = settings.transaction_check_times_max, settings.transaction_check_interval_ms
        age_ms_max = max(settings.retention_ms, settings.transaction_timeout_ms + (times_max + 1) * interval_ms)
        left, bytes_left = _CHECKS_PER_CALL, _CHECK_BYTES_PER_CALL
        while left and bytes_left > 0 and self.next_check_at_ms <= at_ms:
            _, offset = heapq.heappop(self._agenda)
            found = self.find_open(offset)
            if found is None or found.half.given_up_at_ms:
                continue
            if found.half.check_count >= times_max or at_ms - found.half.stored_at_ms >= age_ms_max:
                over.append(offset)
            else:
                due.append(found)
            left, bytes_left = left - 1, bytes_left - found.half.size
        if over:
            self._write_call(GIVE_UP, over, at_ms, [found.half.offset for found in due])
        return due

    def note_checked(self, asked: Sequence[OpenHalf], at_ms: int) -> None:
        """The producers of some halves were asked: counts that, in the log. Raises DiskFull, LogFailed."""
        if asked:
            offsets = [found.half.offset for found in asked]
            self._write_call(CHECK, offsets, at_ms, ())
            self._plan(offsets, at_ms)

    def postpone(self, left: Sequence[OpenHalf], at_ms: int) -> None:
        """Nobody was there to be asked: that does not count, and is tried again."""
        self._plan([found.half.offset for found in left], at_ms)

    def _write_call(self, call: str, offsets: Sequence[int], at_ms: int, left: Sequence[int]) -> None:
        """Writes a record about some halves; where that fails, these and those that are left are tried again later."""
        values: dict[str, object] = {"call": call, "halves": list(offsets)}
        if call == CHECK:
            values["again"] = at_ms + self._settings.now.transaction_check_interval_ms
        try:
            self._writer.write_system(TRANSACTION, values, at_ms)
        except BaseException:
            self._plan({*offsets, *left}, at_ms)
            raise

    def _plan(self, offsets: "Sequence[int] | set[int]", at_ms: int) -> None:
        again_at_ms = at_ms + self._settings.now.transaction_check_interval_ms
        for offset in sorted(offsets):
            heapq.heappush(self._agenda, (again_at_ms, offset))

    # -- questions ----------------------------------------------------------------------------------------------

    def how_ended(self, offset: int) -> Ended:
        """Returns how a half that is not open has ended, as far as that is known."""
        return self._fold.transactions.how_ended(offset)

    def find_open(self, offset: int) -> OpenHalf | None:
        half = self._fold.transactions.halves.get(offset)
        return None if half is None else self._read(half)

    def list_open(self, after: int = -1, count_max: int = 100, topic: str = "") -> list[OpenHalf]:
        """Returns open halves after an offset, in the order in which they came; of one topic where it is named."""
        numbers = set(self._fold.topics.get(topic).numbers) if topic else None
        halves = (
            half
            for half in self._fold.transactions.halves.values()
            if half.offset > after and (numbers is None or half.queue in numbers)
        )
        return [self._read(half) for half in islice(halves, count_max)]

    def find_by_key(self, topic: str, unique_key: str) -> list[OpenHalf]:
        """Returns the open halves of a topic and unique key."""
        found = [self._read(half) for half in self._fold.transactions.find(key_hash(unique_key))]
        return [each for each in found if (each.topic, each.unique_key) == (topic, unique_key)]

    def _read(self, half: Half) -> OpenHalf:
        data = self._fold.read(half.offset, half.size)
        record = records.decode(data)
        properties = decode_properties(record.properties)
        return OpenHalf(
            half, record.topic, record.queue_id, properties[PROPERTY_PRODUCER_GROUP], properties[PROPERTY_UNIQ_KEY],
            properties.get(PROPERTY_KEYS, ""), data,
        )  # fmt: skip


def _committed(half: Message, properties: Mapping[str, str], offset: int, check_count: int) -> Message:
    """Returns the message that the commit of a half brings."""
    kept = {name: value for name, value in properties.items() if name != PROPERTY_TRANSACTION}
    kept[PROPERTY_TRANSACTION_ID] = properties[PROPERTY_UNIQ_KEY]
    if check_count:
        kept[PROPERTY_CHECK_TIMES] = str(check_count)
    sys_flag = half.sys_flag & _SYS_FLAG_KEPT | SYS_COMMITTED
    return half._replace(properties=encode_properties(kept), sys_flag=sys_flag, prepared_offset=offset)


def _immunity_ms(properties: Mapping[str, str]) -> int:
    text = properties.get(PROPERTY_CHECK_IMMUNITY, "")
    return int(text) * 1_000 if _IMMUNITY.fullmatch(text) else 0


def _refuse_other(found: OpenHalf, number: int | None, group: str, topic: str, unique_key: str) -> None:
    """Raises UsageError where an end names another half than the one at its offset."""
    own = (found.half.number, found.group, found.topic, found.unique_key)
    for name, asked, known in zip(
        ("number", "group", "topic", "id"), (number, group, topic, unique_key), own, strict=True
    ):
        if asked not in (None, "", known):
            raise UsageError(f"the transaction at {found.half.offset} has the {name} {known!r}, not {asked!r}")
