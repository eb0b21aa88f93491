"""Leases, as calls: pop, acknowledge, change the invisible time, bury.

Each writes one record and gives a ticket, like every call of the broker. What is popped and not acknowledged is in
state/leases.py; which messages a pop gives is decided in handout.py.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from postdate.broker.handout import Handout, Picked, PopAsk
from postdate.broker.sending import Intake
from postdate.broker.writing import Finish, Ticket, Writer
from postdate.config import Settings
from postdate.errors import PostdateError, UsageError
from postdate.message import Message, check_group
from postdate.state.fold import Fold
from postdate.state.leases import NOT_GIVEN, OVER, Key
from postdate.storage import record as records
from postdate.storage.batch import ACK, INVISIBLE, POP
from postdate.storage.queue import Queue


class Given(NamedTuple):
    """A message that a pop gave."""

    queue_id: int
    offset: int
    times: int  # how often it was given before


class Popped(NamedTuple):
    """What a pop gave: the messages and, in the same order, their records."""

    popped_at_ms: int
    messages: list[Given]
    body: bytes


class Handle(NamedTuple):
    """What tells a consumer's lease of a message."""

    topic: str
    queue_id: int
    offset: int
    popped_at_ms: int


class Leasing:
    """Of one broker. `settings` gives those that hold now; `admit` lets a group commit so many offsets that are new, or
    raises FlowControl; `queue` finds a queue, or raises TopicNotFound or UsageError.
    """

    def __init__(
        self,
        fold: Fold,
        writer: Writer,
        intake: Intake,
        *,
        settings: Callable[[], Settings],
        admit: Callable[[str, int], None],
        queue: Callable[[str, int], Queue],
    ) -> None:
        self._fold = fold
        self._writer = writer
        self._intake = intake
        self._settings = settings
        self._admit = admit
        self._queue = queue
        self._handout = Handout(fold)

    def pop(self, ask: PopAsk, at_ms: int) -> Ticket | None:
        """Gives a group messages for a while, those first that came back to it. What is not acknowledged by then is
        given again. The answer is a Popped; None where there is nothing to give.

        Raises PopsFull where the group has too many already.
        """
        check_group(ask.group)
        for queue_id in ask.queue_ids:
            self._queue(ask.topic, queue_id)
        self._check_invisible(ask.invisible_ms)
        if ask.count_max < 1:
            raise UsageError(f"count_max is {ask.count_max}, expected at least 1")
        picked = self._handout.pick(ask, self._settings())
        if picked.is_nothing:
            return None
        self._admit(ask.group, self._fresh_count(picked))
        self._handout.promise(picked)
        try:
            return self._writer.write_system(
                POP, _pop_record(picked), at_ms, lambda times: self._popped(picked, times, at_ms)
            )
        except PostdateError:
            self._handout.keep(picked)  # nothing was written, so nothing is promised
            raise

    def promised_places(self) -> set[int]:
        """Offsets of records that pops and changes which are not applied yet are about."""
        return self._handout.promised_places()

    def _fresh_count(self, picked: Picked) -> int:
        """Offsets that the group has not committed before."""
        offset_of, ask = self._fold.groups.offset, picked.ask
        return sum(offset_of(ask.group, ask.topic, queue_id) is None for queue_id, _ in picked.next)

    def _check_invisible(self, invisible_ms: int) -> None:
        limit = self._settings().invisible_ms_max
        if not 0 < invisible_ms <= limit:
            raise UsageError(f"the invisible time is {invisible_ms} ms, expected 1 to invisible_ms_max ({limit})")

    def _popped(self, picked: Picked, times: list[int], at_ms: int) -> Popped:
        """The pop is applied: fills in what its consumer reads."""
        self._handout.keep(picked)
        given: list[Given] = []
        places: list[tuple[int, int, int, int]] = []
        body = bytearray()
        for pick, record, count in zip(picked.picks, picked.records, times, strict=True):
            if count == NOT_GIVEN:
                continue
            given.append(Given(pick.queue_id, pick.offset, count))
            places.append((len(body), pick.offset, pick.place, pick.visible_at_ms))
            is_own = record[records.QUEUE_ID] == pick.queue_id.to_bytes(4, "big")
            body += record if is_own else records.moved(record, pick.queue_id)
            if count:
                records.given_again(body, places[-1][0], count)
        records.deliver(body, places, picked.ask.store_host)
        return Popped(at_ms, given, bytes(body))

    def acknowledge(self, group: str, handles: Sequence[Handle], at_ms: int) -> Ticket:
        """A group is done with messages that it popped. The answer tells for each whether its handle was good: one that
        was given again since, or acknowledged before, is not.
        """
        check_group(group)
        messages = [[self._number(handle), handle.offset, handle.popped_at_ms] for handle in handles]
        keys = [(group, number, offset) for number, offset, _ in messages]
        return self._write(keys, ACK, {"group": group, "messages": messages}, at_ms)

    def change_invisible(self, group: str, handle: Handle, invisible_ms: int, at_ms: int) -> Ticket:
        """From now on a popped message is invisible for this long; its handle holds `at_ms` from then on. The answer is
        whether the handle was good.
        """
        check_group(group)
        self._check_invisible(invisible_ms)
        number = self._number(handle)
        if self._is_lost(key := (group, number, handle.offset)):
            # It came back, nobody wanted it, and retention has let its record go: nothing is left to be given again.
            lost = {"group": group, "messages": [[number, handle.offset, handle.popped_at_ms]]}
            return self._write([key], ACK, lost, at_ms, lambda _: False)
        body = {
            "group": group,
            "number": number,
            "offset": handle.offset,
            "popped_at_ms": handle.popped_at_ms,
            "invisible_ms": invisible_ms,
        }
        return self._write([key], INVISIBLE, body, at_ms)

    def _is_lost(self, key: Key) -> bool:
        """Whether a message has come back and its record is gone."""
        lease = self._fold.leases.by_key.get(key)
        return lease is not None and lease.until_ms == OVER and not self._fold.read(lease.place, lease.size)

    def _number(self, handle: Handle) -> int:
        return self._queue(handle.topic, handle.queue_id).number

    def _write(
        self, keys: list[Key], kind: int, body: Mapping[str, Any], at_ms: int, finish: Finish | None = None
    ) -> Ticket:
        """Writes about messages that nobody may be given until it is applied."""
        self._handout.touch(keys)
        try:
            return self._writer.write_system(kind, body, at_ms, self._leaving(keys, finish))
        except PostdateError:
            self._handout.leave(keys)
            raise

    def _leaving(self, keys: list[Key], finish: Finish | None = None) -> Finish:
        """Called once, when what was written about these messages is applied."""

        def leave(answer: Any) -> Any:
            self._handout.leave(keys)
            return answer if finish is None else finish(answer)

        return leave

    # -- dead letters -------------------------------------------------------------------------------------------

    def spent(self, count_max: int) -> list[tuple[Key, bytes]]:
        """Messages that were given as often as they may be, and that nobody buries yet, with their records (empty where
        those are gone).
        """
        leases = self._fold.leases.by_key
        keys = islice((key for key in self._fold.leases.spent if not self._handout.is_touched(key)), count_max)
        return [(key, self._fold.read(leases[key].place, leases[key].size)) for key in keys]

    def bury(self, key: Key, letter: Message | None, at_ms: int) -> Ticket:
        """Forgets a spent message and, in the same batch, sends its dead letter; None where its record is gone."""
        group, number, offset = key
        prepared = [] if letter is None else [self._intake.prepare(letter, at_ms)]
        body = {"group": group, "messages": [[number, offset, self._fold.leases.by_key[key].popped_at_ms]]}
        leave = self._leaving([key])
        self._handout.touch([key])
        try:
            # The ack's answer is a list; that of the letter before it is a number.
            return self._writer.write_mixed(
                prepared, ACK, body, at_ms, lambda answer: leave(answer) if isinstance(answer, list) else answer
            )
        except PostdateError:
            self._handout.leave([key])
            raise


def _pop_record(picked: Picked) -> dict[str, Any]:
    ask = picked.ask
    return {
        "group": ask.group,
        "invisible_ms": ask.invisible_ms,
        "times_max": ask.times_max,
        "messages": [[pick.number, pick.offset, pick.place, pick.size] for pick in picked.picks],
        "lost": picked.lost,
        "offsets": [[ask.topic, queue_id, offset] for (queue_id, _), offset in picked.next.items()],
    }
