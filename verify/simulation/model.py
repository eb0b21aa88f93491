"""The model: a dictionary of messages and the promises of the design, checked against what the broker shows.

The model knows what clients were told, and nothing of how the broker works. After each step the world shows it what has
become visible. It raises Broken with a sentence if a promise is broken.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from postdate.arrival import NEVER, OWN, came_before, job_of
from postdate.broker.lookup import Found, State
from postdate.message import Cancelled, MovedFrom


class Broken(AssertionError):
    """A promise is broken."""


@dataclass
class Sent:
    """A message as its producer knows it."""

    name: str  # its body
    topic: str
    queue_id: int
    unique_key: str
    user_key: str
    due: int  # 0 = at once
    stored_at: int
    is_near: bool
    arrival: int = -1
    acknowledged: bool = False
    exists: bool = True  # False: it was never acknowledged, and a crash has lost it
    cancelled: bool = False  # a client was told so: it must never be seen
    recalled: bool = False  # a cancel by handle or key was answered so: a repeated one must be, too
    maybe_deleted: bool = False  # with its topic: a cancel that was answered so was for others of its key
    maybe_cancelled: bool = False  # a cancel without a clear answer, or a deleted topic: it may be seen or not
    seen_at: "tuple[int, int] | None" = None  # (queue number, offset)
    other_key: str = ""  # the second user key
    own: int = -1  # the arrival that a job gave it
    postponed: bool = False  # by a job, ever
    earlier: tuple[int, ...] = ()  # its dues before jobs or moves gave it another one
    moved: bool = False  # by a move: every handle of its unique key is its handle from then on
    moved_from: tuple[tuple[int, int], ...] = ()  # due and arrival at each place from which a move has taken it

    @property
    def known_as(self) -> int:
        """Its present arrival."""
        return self.arrival if self.own < 0 else self.own

    @property
    def is_of_job(self) -> bool:
        """Whether a job has brought it, now or earlier: a lookup may find it where it was before, or not at all."""
        return self.own >= 0 or self.postponed

    @property
    def first_due(self) -> int:
        """The due in its handle."""
        return self.earlier[0] if self.earlier else self.due

    def was_brought_by(self, job: int) -> bool:
        return self.own >= 0 and bool(job_of(self.own) == job)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that find it in a lookup."""
        return (self.unique_key, self.user_key, self.other_key) if self.other_key else (self.unique_key, self.user_key)


@dataclass
class Asked:
    """A cancel that waits for its answer."""

    topic: str
    key: str
    by: str
    due: int
    arrival: int
    jobs: int = NEVER  # how many jobs came before it; known after the answer
    met: frozenset[str] = frozenset()  # others of its key, due where jobs have moved its messages
    waiting: frozenset[str] = frozenset()  # its messages that waited when it was applied, before the table answered


class Shown(NamedTuple):
    """An entry that a consumer saw, and the log position that was applied at the look before."""

    name: str
    position_before: int


@dataclass
class Model:
    """All messages by name, and the entries that each queue has shown."""

    messages: dict[str, Sent] = field(default_factory=dict)
    shown: dict[int, list[Shown]] = field(default_factory=dict)
    clock_max: int = 0
    cancels: list[Asked] = field(default_factory=list)  # all cancels ever
    open_halves: set[str] = field(default_factory=set)  # bodies of halves of transactions that may be open

    # -- sending ------------------------------------------------------------------------------------------------

    def add(self, message: Sent) -> None:
        self.messages[message.name] = message

    def matching(self, asked: Asked) -> list[Sent]:
        """The messages that a cancel names: of its topic, key and due (now, or in its handle), arrived before it."""
        return [
            m
            for m in self.messages.values()
            if m.exists and _names(asked, m) and (asked.due in _dues(asked, m) or (m.moved and asked.by == "unique"))
        ]

    # -- promise 6: the answer to a cancel is true ------------------------------------------------------------------

    def check_answer(self, asked: Asked, answer: Cancelled, *, in_table: frozenset[str]) -> None:
        """`in_table`: messages that are only in the table; the core cannot know them."""
        named = self.matching(asked)
        matching = named + self._met(asked)
        delivered = [m for m in matching if m.seen_at is not None]
        waiting = [m for m in matching if m.seen_at is None and not m.cancelled and not m.maybe_cancelled]
        if answer is Cancelled.CANCELLED:
            if not matching:
                raise Broken(f"a cancel of {asked.key} was answered 'cancelled', but there is no such message")
            if delivered and len(delivered) == len(matching):
                raise Broken(f"a cancel of {asked.key} was answered 'cancelled', but {delivered[0].name} was delivered")
        elif answer is Cancelled.DELIVERED:
            if not delivered:
                raise Broken(f"a cancel of {asked.key} was answered 'delivered', but nothing of it was seen")
            known = [m for m in waiting if m.name not in in_table]
            if known:
                raise Broken(f"a cancel of {asked.key} was answered 'delivered', but {known[0].name} still waits")
        else:
            known = [m for m in waiting if m.acknowledged and m.name not in in_table]
            if known:
                raise Broken(f"a cancel of {asked.key} was answered 'unknown', but {known[0].name} waits")
            self._check_repeated(asked)
        for message in named:
            if message.seen_at is None:
                message.recalled |= answer is Cancelled.CANCELLED and not message.maybe_deleted
                message.cancelled = message.cancelled or answer is Cancelled.CANCELLED
                message.maybe_cancelled = True

    def _check_repeated(self, asked: Asked) -> None:
        """A cancel was answered 'unknown'. Where many messages share a user's key, the broker does not look for all."""
        for message in self.matching(asked) if asked.by == "unique" else ():
            if message.recalled and message.seen_at is None and message.due > self.clock_max:
                raise Broken(
                    f"a cancel of {asked.key} was answered 'unknown', but {message.name}, which is not due, was "
                    "cancelled before"
                )

    def _met(self, asked: Asked) -> list[Sent]:
        return [self.messages[name] for name in sorted(asked.met)]

    def note_applied(self, asked: Asked) -> None:
        """The cancel is applied, and the table is yet to say which messages it has met."""
        matching = self.matching(asked)
        asked.waiting = frozenset(
            m.name
            for m in matching
            if m.seen_at is None and m.acknowledged and not m.cancelled and not m.maybe_cancelled
        )
        for message in matching:
            message.maybe_cancelled = True

    def check_table_answer(self, asked: Asked, answer: Cancelled, in_table: set[int]) -> None:
        """Checks the answer after the lookup in the table. `in_table`: arrivals found there."""
        matching = self.matching(asked)
        unseen = [m for m in matching if m.seen_at is None]
        if answer is Cancelled.CANCELLED:
            if not unseen and all(m.seen_at is not None for m in self._met(asked)):
                raise Broken(f"a cancel of {asked.key} was answered 'cancelled', but nothing of it was left to cancel")
            for message in unseen:
                message.cancelled, message.recalled = True, not message.maybe_deleted
            return
        self._check_repeated(asked)
        known = [m for m in unseen if m.name in asked.waiting and m.known_as in in_table]
        if known:
            raise Broken(f"a cancel of {asked.key} was answered 'unknown', but {known[0].name} waits in the table")

    def note_unanswered(self, asked: Asked) -> None:
        """A crash came before the answer: the cancel may have worked or not."""
        for message in self.matching(asked):
            message.maybe_cancelled = True
        self.note_followed(asked)
        self.cancels.append(asked)

    def note_followed(self, asked: Asked) -> None:
        """A handle follows its message when jobs move it to another due. It may meet other messages of its key that are
        due there.
        """
        if asked.by != "unique":
            return
        moved_to = {m.due for m in self.messages.values() if asked.due in m.earlier and _is_of_key(asked, m)}
        moved_to |= {due for m in self.messages.values() if moved_to & {*m.earlier} for due in (m.due, *m.earlier)}
        met = [m for m in self.messages.values() if m.exists and m.due in moved_to and _names(asked, m)]
        asked.met = frozenset(m.name for m in met if asked.due not in (m.due, *m.earlier))
        for name in asked.met:
            self.messages[name].maybe_cancelled = True

    def note_topic_deleting(self, topic: str) -> None:
        for message in self.messages.values():
            if message.topic == topic:
                message.maybe_cancelled, message.maybe_deleted, message.recalled = True, True, False

    def note_topic_deleted(self, topic: str) -> None:
        for message in self.messages.values():
            if message.topic == topic and message.seen_at is None:
                message.cancelled = True

    # -- promise 7: work in bulk ------------------------------------------------------------------------------------

    def note_change(self, message: Sent, is_cancel: bool, by_ms: int, own: int) -> None:
        """A job says that it has cancelled or postponed a message."""
        if message.seen_at is not None or message.cancelled:
            fate = f"is at {message.seen_at}" if message.seen_at is not None else "was cancelled"
            raise Broken(f"a job says that it has changed {message.name}, which {fate}")
        if is_cancel:
            message.cancelled = message.maybe_cancelled = True
            return
        message.earlier, message.due = (*message.earlier, message.due), message.due + by_ms
        message.own, message.is_near, message.postponed = own, False, True
        self._meet_cancels(message)

    def note_moved(self, message: Sent, source: MovedFrom, due: int, arrival: int) -> None:
        """A client was told that its message was moved; `due` is 0 where it comes at once."""
        if (message.due, message.known_as) != source[:2]:
            raise Broken(f"{message.name} was moved from {source}, it was at {message.due} and {message.known_as}")
        if message.seen_at is not None or message.cancelled:
            fate = f"is at {message.seen_at}" if message.seen_at is not None else "was cancelled"
            raise Broken(f"{message.name} was moved, but it {fate}")
        message.earlier, message.due = (*message.earlier, message.due), due
        message.arrival, message.own, message.moved, message.is_near = arrival, -1, True, False
        message.moved_from = (*message.moved_from, (source.due_at_ms, source.arrival))

    def note_adopted(self, message: Sent, is_adopted: bool) -> None:
        """The message's import is adopted, or has failed."""
        message.exists = message.acknowledged = is_adopted
        self._meet_cancels(message)

    def _meet_cancels(self, message: Sent) -> None:
        """A cancel also meets messages of earlier jobs, even if those jobs put them into the table later."""
        if any(asked.due == message.due and _names(asked, message) for asked in self.cancels):
            message.maybe_cancelled = True

    def waits(self, message: Sent) -> bool:
        """Whether the message certainly waits."""
        is_gone = message.seen_at is not None or message.cancelled or message.maybe_cancelled
        return message.exists and message.acknowledged and not is_gone

    # -- promises 1, 2, 3: what is seen -----------------------------------------------------------------------------

    def look(self, queue: int, start: int, names: list[str], position_before: int) -> None:
        """A consumer reads a queue from `start` on."""
        shown = self.shown.setdefault(queue, [])
        for offset, name in enumerate(names, start):
            if offset < len(shown):
                if shown[offset].name != name:
                    raise Broken(f"queue {queue}, offset {offset}: was {shown[offset].name}, is {name} now")
            else:
                self._show(queue, offset, name, position_before)

    def _show(self, queue: int, offset: int, name: str, position_before: int) -> None:
        message = self.messages.get(name)
        if message is None or not message.exists:
            raise Broken(f"queue {queue}, offset {offset}: {name} was never sent")
        if message.seen_at is not None:
            raise Broken(f"{name} is at {message.seen_at} and again in queue {queue}, offset {offset}")
        if message.cancelled:
            raise Broken(f"{name} was cancelled and is in queue {queue}, offset {offset}")
        if message.due > self.clock_max:
            raise Broken(f"{name} is due at {message.due} and was seen when no clock had passed {self.clock_max}")
        self._check_order(queue, message)
        message.seen_at = (queue, offset)
        self.shown[queue].append(Shown(name, position_before))

    def _check_order(self, queue: int, message: Sent) -> None:
        """A message that was in the wheel when another fired cannot come after it with a smaller (due, arrival)."""
        if not message.due or not message.is_near:
            return
        for before in reversed(self.shown[queue][-50:]):
            other = self.messages[before.name]
            was_waiting = message.arrival < before.position_before
            if other.due and was_waiting and (message.due, message.arrival) < (other.due, other.arrival):
                raise Broken(f"{message.name}, due {message.due}, comes after {other.name}, due {other.due}")

    def check_length(self, queue: int, length: int) -> None:
        """The queue has this many entries: it must not have lost an entry that was seen."""
        if length < len(self.shown.get(queue, [])):
            raise Broken(f"queue {queue} had {len(self.shown[queue])} entries and has {length} now")

    # -- lookups by key -----------------------------------------------------------------------------------------

    def messages_with_key(self, topic: str, key: str) -> list[Sent]:
        """The messages that a lookup may find."""
        return [m for m in self.messages.values() if m.exists and m.acknowledged and m.topic == topic and key in m.keys]

    def check_found(self, name: str, found: Found, place: tuple[int, int], *, is_deleted: bool) -> None:
        """Checks what a lookup says of a message. `place` is (queue number, offset), `is_deleted`: of its topic."""
        message = self.messages.get(name)
        if message is None or not message.exists:
            raise Broken(f"a lookup finds {name}, which was never sent")
        expected = _states(message, is_deleted=is_deleted)
        if found.state not in expected:
            raise Broken(f"a lookup says that {name} is {found.state}, expected {sorted(s.value for s in expected)}")
        if found.state is State.VISIBLE and message.seen_at != place:
            raise Broken(f"a lookup says that {name} is at {place}, it was seen at {message.seen_at}")
        # Of a deleted topic the records are shown as they are: that of a move may be gone before the one that it moved.
        dues = {message.due, *(message.earlier if is_deleted else ())}
        if found.due_at_ms not in dues:
            raise Broken(f"a lookup says that {name} is due at {found.due_at_ms}, it was sent for {message.due}")

    # -- promises 1 and 8: what must be seen ------------------------------------------------------------------------

    def check_complete(self, fired_at: int, excused: frozenset[str]) -> None:
        """Every acknowledged message that is due has been seen, unless it was cancelled or is excused."""
        for message in self.messages.values():
            if (
                message.exists
                and message.acknowledged
                and message.due <= fired_at
                and message.seen_at is None
                and not message.cancelled
                and not message.maybe_cancelled
                and message.name not in excused
            ):
                raise Broken(
                    f"{message.name} was due at {message.due}, everything due by {fired_at} is fired, it is not seen"
                )


def _dues(asked: Asked, message: Sent) -> tuple[int, ...]:
    """The dues by which a cancel may name a message: only a handle follows a message that jobs moved."""
    return (message.due, *message.earlier) if asked.by == "unique" else (message.due,)


def _names(asked: Asked, message: Sent) -> bool:
    """Whether a message has the topic and key of a cancel, and came before it."""
    is_earlier = message.arrival < asked.arrival if message.arrival < OWN else True
    is_earlier &= came_before(message.known_as, asked.arrival, asked.jobs)
    return is_earlier and _is_of_key(asked, message)


def _is_of_key(asked: Asked, message: Sent) -> bool:
    key = message.unique_key if asked.by == "unique" else message.user_key
    return message.topic == asked.topic and asked.key == key


def _states(message: Sent, *, is_deleted: bool) -> set[State]:
    """The states that a lookup may report for a message."""
    if is_deleted:
        return {State.DELETED}
    if message.seen_at is not None:
        return {State.VISIBLE}
    if message.cancelled:
        return {State.CANCELLED}
    return {State.WAITING, State.CANCELLED} if message.maybe_cancelled else {State.WAITING}
