"""Whether a broker has kept its word: nine invariants over a history of what clients were told.

| | holds when |
|---|---|
| I1 | every acknowledged message that nobody cancelled is in its queue, as it was sent, and each reading group saw it |
| I2 | none was visible, or seen, before its due time by the broker's clock |
| I3 | a message whose cancel was answered "cancelled" is in no queue and no consumer saw it |
| I4 | cancel and fire of a message have one order that all answers agree with |
| I5 | away from faults, messages are on time |
| I6 | rows that wait are not written again but for a bounded number of merges |
| I7 | a restart costs what is near, not what waits |
| I8 | a message has one entry in its queue, an id one receipt, an entry never changes, an acknowledged one stays away |
| I9 | the broker's memory stays below a constant |

What was answered binds. What is in doubt (the connection ended before the answer) may have happened or not, also later
than an answer to something else.

A message that was moved has its last due time. Where the order of moves is not known, or one is in doubt, several due
times are possible: it may come at the earliest of them, and is not judged to be late.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verify.faults.driver import Cancel, Form, Moved, Sent
from verify.faults.history import Event

INVARIANTS = {
    "I1": "every acknowledged, uncancelled message is delivered",
    "I2": "none before its due time by the broker's clock",
    "I3": "cancelled means never delivered",
    "I4": "cancel and fire of one message have one order that all answers agree with",
    "I5": "lateness under declared load",
    "I6": "far data are not rewritten",
    "I7": "restart cost depends on the near window only",
    "I8": "exactly one entry per message in its queue",
    "I9": "memory under a burst stays below a stated constant",
}
_RETURNS = ("back", "backed", "returned")
SLACK_MS = 1_000.0  # around a step of the clock: when exactly the broker saw it is not known


class Violation(NamedTuple):
    invariant: str
    sentence: str
    key: str = ""  # of the message, where it is about one

    def __str__(self) -> str:
        return f"{self.invariant}: {self.sentence}"


@dataclass(frozen=True)
class Bounds:
    """What the suite declares before it runs."""

    lateness_ms_p99: float = 1_000.0
    lateness_ms_max: float = 10_000.0
    excuse_before_ms: float = 1_000.0  # around a fault
    excuse_after_ms: float = 30_000.0  # Spark takes half of that to come up on two busy cores
    writes_per_row_max: float = 3.0
    restart_cpu_s_max: float = 6.0
    resident_bytes_max: int = 512 << 20


# -- what is known ----------------------------------------------------------------------------------------------------


class CancelRequest(NamedTuple):
    """A cancel: when it was asked for and answered, and the answer."""

    began: float
    ended: float
    outcome: Cancel


class MoveRequest(NamedTuple):
    """A move: when it was asked for and answered, what for (0 is now), and the answer with the new due time."""

    began: float
    ended: float
    outcome: Moved
    asked_due: int
    due_at_ms: int

    @property
    def may_have_moved(self) -> bool:
        return self.outcome in (Moved.MOVED, Moved.IN_DOUBT)

    @property
    def until(self) -> float:
        """When it has certainly happened, if it has: one in doubt may lie in the broker's socket for minutes."""
        return self.ended if self.outcome is Moved.MOVED else float("inf")


@dataclass
class Message:
    """What clients know of one message."""

    key: str
    began: float
    form: Form
    value: int
    span_ms: int
    group: str  # messages that a job may have cancelled share one; "" otherwise
    client: str = ""
    outcome: Sent = Sent.IN_DOUBT
    answered: float = float("inf")
    due_at_ms: int = 0  # 0 if the broker did not say
    cancels: list[CancelRequest] = field(default_factory=list)
    postponed_ms: int | None = 0  # how far a job has postponed it; None if that is not known
    moves: list[MoveRequest] = field(default_factory=list)

    @property
    def is_imported(self) -> bool:
        return self.client.startswith("import")

    @property
    def known_due(self) -> int:
        """When it is due, by the broker's clock; 0 if nobody knows."""
        last, *others = self.setters()
        if others or self.postponed_ms is None:
            return 0
        if last is not None:
            return last.due_at_ms
        said = self.value if self.form is Form.INSTANT else self.due_at_ms
        return said + self.postponed_ms if said else 0

    @property
    def settled_at(self) -> float:
        """When its send and its moves were all answered."""
        return max([self.answered, *(each.until for each in self.moves if each.may_have_moved)])

    @property
    def must_come(self) -> bool:
        is_stored = any(each.outcome is Moved.MOVED for each in self.moves)  # even if its send is in doubt
        is_sure = self.outcome is Sent.ACKNOWLEDGED or is_stored
        return is_sure and not self.group and not self.may_be_cancelled(float("inf"))

    def may_be_cancelled(self, at: float) -> bool:
        doubtful = (Cancel.CANCELLED, Cancel.IN_DOUBT, Cancel.UNKNOWN)
        return any(each.outcome in doubtful and each.began <= at for each in self.cancels)

    def setters(self, start: float = float("inf"), stop: float = float("inf")) -> list[MoveRequest | None]:
        """What may have set its due time as it was between two instants; None is the send. A move that was certainly
        followed by another one, answered before, is left out.
        """
        moves = [each for each in self.moves if each.may_have_moved and each.began <= stop]
        sure = [each.began for each in moves if each.until <= start and each.outcome is Moved.MOVED]
        last = max(sure, default=float("-inf"))
        found: list[MoveRequest | None] = [each for each in moves if each.until >= last]
        return found if sure else [None, *found]

    @property
    def is_cancelled(self) -> bool:
        return any(each.outcome is Cancel.CANCELLED for each in self.cancels)


class Span(NamedTuple):
    """A span of our time during which the broker's clock was this far from ours."""

    start: float
    stop: float
    offset_ms: int


class Clock:
    """The broker's clock, from the steps that it made."""

    def __init__(self, events: Sequence[Event]) -> None:
        steps = [(float("-inf"), 0)] + [(each["at"], each["offset"]) for each in events if each["kind"] == "clock"]
        stops = [at for at, _ in steps[1:]] + [float("inf")]
        self.spans = [Span(start, stop, offset) for (start, offset), stop in zip(steps, stops, strict=True)]

    def lowest(self, start: float, stop: float) -> float:
        """The lowest time that it may have shown between two instants."""
        touched = [each for each in self.spans if each.start - SLACK_MS <= stop and each.stop + SLACK_MS >= start]
        return min(max(start, each.start - SLACK_MS) + each.offset_ms for each in touched)

    def highest(self, at: float) -> float:
        """The highest time that it may have shown until an instant."""
        return max(min(at, each.stop + SLACK_MS) + each.offset_ms for each in self.spans if each.start <= at)

    def instants(self, broker_ms: float) -> Iterator[float]:
        """When it showed this time, by our clock; it may have been several times, or never."""
        for each in self.spans:
            if each.start <= broker_ms - each.offset_ms < each.stop:
                yield broker_ms - each.offset_ms


class Case:
    """A history, sorted by what it is about."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.clock = Clock(events)
        self.messages: dict[str, Message] = {}
        self.by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_kind[event["kind"]].append(event)
        for event in self.by_kind["send"]:
            self.messages[event["key"]] = Message(
                event["key"], event["at"], Form(event["form"]), event["value"], event["span"], event["group"],
                event["client"],
            )  # fmt: skip
        for event in self.by_kind["sent"]:
            message = self.messages[event["key"]]
            message.outcome, message.answered, message.due_at_ms = Sent(event["outcome"]), event["at"], event["due"]
        for event in self.by_kind["cancelled"]:
            asked = CancelRequest(event["began"], event["at"], Cancel(event["outcome"]))
            self.messages[event["key"]].cancels.append(asked)
        for event in self.by_kind["moved"]:
            moved = MoveRequest(event["began"], event["at"], Moved(event["outcome"]), event["to"], event["due"])
            self.messages[event["key"]].moves.append(moved)
        self._note_postponements()
        self.entries = _by_key(self.by_kind["entry"])
        self.seen = _by_key(self.by_kind["saw"])
        self.troubles = list(self._find_troubles())

    def _note_postponements(self) -> None:
        """A job that says it has postponed all messages of its prefix has; of others nobody knows which ones. Nor does
        anybody know what a job did to messages that were moved meanwhile.
        """
        ends = {each["prefix"]: each for each in self.by_kind["postponed"]}
        for event in self.by_kind["postpone"]:
            found = [message for key, message in self.messages.items() if key.startswith(event["prefix"])]
            end = ends.get(event["prefix"])
            is_sure = end is not None and end["changed"] == len(found)
            for message in found:
                is_moved = end is not None and any(each.began < end["at"] for each in message.moves)
                message.postponed_ms = event["by"] if is_sure and not is_moved else None

    def _find_troubles(self) -> Iterator[tuple[float, float]]:
        ends = {(each["name"], each["began"]): each["at"] for each in self.by_kind["over"]}
        excuses = [each for each in self.by_kind["trouble"] if each.get("is_excuse", True)]
        for each in excuses:
            yield each["at"], ends.get((each["name"], each["at"]), float("inf"))
        for each in self.by_kind["clock"]:
            yield each["at"], each["at"]

    def is_troubled(self, start: float, stop: float, bounds: Bounds) -> bool:
        before, after = bounds.excuse_before_ms, bounds.excuse_after_ms
        return any(begin - before <= stop and end + after >= start for begin, end in self.troubles)

    def due_min(self, message: Message) -> float:
        """The time before which a message may not be visible."""
        return min(self.dues(message))

    def dues(self, message: Message, start: float = float("inf"), stop: float = float("inf")) -> list[float]:
        """The due times that a message may have had between two instants, each as early as possible."""
        return [
            self.first_due_min(message) if each is None else self._moved_due_min(each)
            for each in message.setters(start, stop)
        ]

    def first_due_min(self, message: Message) -> float:
        """The time before which a message that is not moved may not be visible."""
        if message.form is Form.NONE:
            return 0.0
        if message.form is Form.INSTANT:
            return float(message.value + (message.postponed_ms or 0))
        asked = int(self.clock.lowest(message.began, message.answered)) + message.span_ms
        return max(asked, float(message.due_at_ms))

    def _moved_due_min(self, move: MoveRequest) -> float:
        return float(move.asked_due) if move.asked_due else float(int(self.clock.lowest(move.began, move.ended)))


def _by_key(events: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event["key"], []).append(event)
    return found


# -- the invariants ---------------------------------------------------------------------------------------------------


def judge(events: Sequence[Event], bounds: Bounds | None = None) -> list[Violation]:
    """Returns every contradiction of what clients were told, or of what was declared."""
    case, bounds = Case(events), bounds or Bounds()
    return [
        *check_delivered(case), *check_not_early(case), *check_cancelled(case), *check_answers(case, bounds),
        *check_on_time(case, bounds), *check_not_rewritten(case, bounds), *check_restarts(case, bounds),
        *check_once(case), *check_memory(case, bounds), *report_findings(case),
    ]  # fmt: skip


def check_delivered(case: Case) -> Iterator[Violation]:
    """I1."""
    readers = {each["group"] for each in case.by_kind["read"]}
    for key, message in case.messages.items():
        if not message.must_come:
            continue
        if key not in case.entries:
            yield Violation("I1", f"{key} was acknowledged and is in no queue", key)
        for group in sorted(readers - {each["group"] for each in case.seen.get(key, ())}):
            yield Violation("I1", f"{key} was acknowledged, and group {group} has read to the end without it", key)
    yield from _check_as_sent(case)
    yield from _check_counts(case)


def _check_as_sent(case: Case) -> Iterator[Violation]:
    """Whatever is delivered was sent, and has the body that was sent."""
    for event in (*case.by_kind["entry"], *case.by_kind["saw"]):
        message, key = case.messages.get(event["key"]), event["key"]
        where = f"group {event['group']}" if event["kind"] == "saw" else f"{event['place']} at {event['offset']}"
        if message is None:
            yield Violation("I1", f"{where}: {key} was never sent", key)
        elif message.outcome is Sent.REFUSED:
            yield Violation("I1", f"{where}: the send of {key} was refused", key)
        if not event["whole"]:
            yield Violation("I1", f"{where}: {key} has another body than it was sent with", key)


def _check_counts(case: Case) -> Iterator[Violation]:
    """A job that cancelled n of its messages leaves all but n of them."""
    for job in case.by_kind["job"]:
        messages = [each for each in case.messages.values() if each.group == job["group"]]
        sure = [each for each in messages if each.outcome is Sent.ACKNOWLEDGED]
        came = sum(each.key in case.entries for each in messages)
        low, high = len(sure) - job["changed"], len(messages) - job["changed"]
        if not low <= came <= high:
            what = f"job {job['group']} cancelled {job['changed']} of {len(messages)}, and {came} came"
            yield Violation("I1" if came < low else "I3", what, messages[0].key if messages else "")


def check_not_early(case: Case) -> Iterator[Violation]:
    """I2."""
    for key, message in case.messages.items():
        due, first = case.due_min(message), case.first_due_min(message)
        if message.outcome is Sent.ACKNOWLEDGED and 0 < message.due_at_ms < first:
            yield Violation(
                "I2", f"{key} was said to be due {first - message.due_at_ms:.0f} ms before it was asked for", key
            )
        for move in message.moves:
            if move.outcome is Moved.MOVED and move.due_at_ms < move.asked_due:
                early = move.asked_due - move.due_at_ms
                yield Violation("I2", f"{key} was said to be moved to {early} ms before it was asked for", key)
        for event in (*case.entries.get(key, ()), *case.seen.get(key, ())):
            if 0 < event["visible"] < due and event.get("attempt", 0) == 0:
                yield Violation("I2", f"{key} was visible {due - event['visible']:.0f} ms before its due time", key)
        for event in case.seen.get(key, ()):
            if (shown := case.clock.highest(event["at"])) < due:
                yield Violation("I2", f"group {event['group']} saw {key} {due - shown:.0f} ms before its due time", key)


def check_cancelled(case: Case) -> Iterator[Violation]:
    """I3."""
    for key, message in case.messages.items():
        if not message.is_cancelled:
            continue
        for event in case.entries.get(key, ()):
            yield Violation("I3", f"{key} was cancelled, and is in {event['place']} at {event['offset']}", key)
        for group in sorted({event["group"] for event in case.seen.get(key, ())}):
            yield Violation("I3", f"{key} was cancelled, and group {group} saw it", key)


def check_answers(case: Case, bounds: Bounds) -> Iterator[Violation]:
    """I4."""
    for key, message in case.messages.items():
        requests: list[CancelRequest | MoveRequest] = [*message.cancels, *message.moves]
        outcomes = {str(each.outcome) for each in requests}
        if {Cancel.CANCELLED, Cancel.DELIVERED} <= outcomes:
            yield Violation("I4", f"requests for {key} were answered with cancelled and with delivered", key)
        if Cancel.DELIVERED in outcomes and key not in case.entries:
            yield Violation("I4", f"a request for {key} was answered with delivered, and it is in no queue", key)
        for asked in requests:
            if _is_untrue(case, message, asked, bounds):
                what = "move" if isinstance(asked, MoveRequest) else "cancel"
                yield Violation("I4", f"{key} waited, and its {what} was answered with {asked.outcome}", key)
        for move in message.moves:
            if move.outcome is Moved.MOVED and (reason := _why_it_did_not_wait(case, message, move)):
                yield Violation("I4", f"a move of {key} was answered with moved, but {reason} before", key)


def _is_untrue(case: Case, message: Message, asked: CancelRequest | MoveRequest, bounds: Bounds) -> bool:
    """Whether a request missed a message that certainly waited. During a fault "unknown" is a true answer: the table
    may not be readable in time. A cancel finds what another one has cancelled, a move does not.
    """
    if message.outcome is not Sent.ACKNOWLEDGED or asked.began < message.answered or message.group:
        return False
    if case.clock.highest(asked.ended) >= min(case.dues(message, asked.began, asked.ended)):
        return False
    if asked.outcome == Moved.DELIVERED:
        return True
    if isinstance(asked, MoveRequest) and message.may_be_cancelled(asked.ended):
        return False
    return asked.outcome == Moved.UNKNOWN and not case.is_troubled(asked.began, asked.ended, bounds)


def _why_it_did_not_wait(case: Case, message: Message, move: MoveRequest) -> str:
    """What clients knew, when a move began, of a message that did not wait any more; empty if it may have waited."""
    requests: list[CancelRequest | MoveRequest] = [*message.cancels, *message.moves]
    for each in requests:
        if each.ended < move.began and each.outcome in (Cancel.CANCELLED, Cancel.DELIVERED):
            return f"another request was answered with {each.outcome}"
    groups = [event["group"] for event in case.seen.get(message.key, ()) if event["at"] < move.began]
    return f"group {groups[0]} saw it" if groups else ""


def check_on_time(case: Case, bounds: Bounds) -> Iterator[Violation]:
    """I5."""
    late = sorted(lateness(case, bounds))
    imported = [each for each in late if case.messages[each[1]].is_imported]
    for what, spans in (("", late), (" of those imported", imported)):
        p99 = spans[int(len(spans) * 0.99)][0] if spans else 0
        if p99 > bounds.lateness_ms_p99:
            yield Violation(
                "I5", f"1 in 100{what} is {p99:.0f} ms late or more, declared are {bounds.lateness_ms_p99:.0f}"
            )
    if not late:
        return
    worst = late[-1]
    if worst[0] > bounds.lateness_ms_max:
        what = f"{worst[1]} is {worst[0]:.0f} ms late, declared are {bounds.lateness_ms_max:.0f} at most"
        yield Violation("I5", what, worst[1])


def lateness(case: Case, bounds: Bounds) -> Iterator[tuple[float, str]]:
    """How late each message was that was due away from faults and was stored in time, with its key."""
    for key, message in case.messages.items():
        due = message.known_due
        if message.outcome is not Sent.ACKNOWLEDGED or not due or key not in case.entries:
            continue
        for at in case.clock.instants(due):
            is_stored = message.settled_at < at
            if is_stored and not case.is_troubled(at - bounds.excuse_before_ms, at + bounds.excuse_before_ms, bounds):
                yield float(case.entries[key][0]["visible"] - due), key


def check_not_rewritten(case: Case, bounds: Bounds) -> Iterator[Violation]:
    """I6."""
    for event in case.by_kind["written"]:
        rows, writes = event["rows"], event["writes"]
        if rows and writes > bounds.writes_per_row_max * rows:
            what = f"{rows} far rows were written {writes} times, declared are {bounds.writes_per_row_max:g} each"
            yield Violation("I6", what)


def check_restarts(case: Case, bounds: Bounds) -> Iterator[Violation]:
    """I7."""
    for event in case.by_kind["start"]:
        if event["cpu_s"] > bounds.restart_cpu_s_max:
            what = f"a start with {event['waiting']} waiting took {event['cpu_s']:.1f} s of CPU"
            yield Violation("I7", f"{what}, declared are {bounds.restart_cpu_s_max:g}")


def check_once(case: Case) -> Iterator[Violation]:
    """I8."""
    offsets: dict[str, dict[int, str]] = defaultdict(dict)
    for key, found in case.entries.items():
        if len(found) > 1:
            yield Violation("I8", f"{key} has {len(found)} entries", key)
        for event in found:
            offsets[event["place"]][event["offset"]] = key
    for place, keys in offsets.items():
        if sorted(keys) != list(range(len(keys))):
            yield Violation("I8", f"{place} has {len(keys)} entries and offsets up to {max(keys)}")
    yield from _check_unchanged(case, offsets)
    yield from _check_receipts(case)
    yield from _check_not_again(case)
    if case.by_kind["returns were read"]:
        yield from _check_returns(case)


def _check_unchanged(case: Case, offsets: dict[str, dict[int, str]]) -> Iterator[Violation]:
    """A message that a consumer saw at an offset stays there."""
    for event in case.by_kind["saw"]:
        place, offset, key = event["place"], event["offset"], event["key"]
        if place in offsets and offsets[place].get(offset, key) != key:
            yield Violation("I8", f"{place} had {key} at {offset}, and has {offsets[place][offset]} there now", key)


def _check_receipts(case: Case) -> Iterator[Violation]:
    """Every send of an id is answered with the receipt of the first one."""
    receipts: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for event in case.by_kind["receipt"]:
        receipts[event["key"]].add((event["handle"], event["due"]))
    for key, found in receipts.items():
        if len(found) > 1:
            yield Violation("I8", f"{key} was to be stored once, and its sends got {len(found)} receipts", key)


def _check_not_again(case: Case) -> Iterator[Violation]:
    """A message that a group has acknowledged is not given to it again."""
    done = {(each["group"], each["key"]): each["at"] for each in reversed(case.by_kind["done"])}
    for event in case.by_kind["saw"]:
        acknowledged = done.get((event["group"], event["key"]))
        if acknowledged is not None and event["asked"] > acknowledged:
            what = f"group {event['group']} was given {event['key']}, which it had acknowledged"
            yield Violation("I8", what, event["key"])


def _check_returns(case: Case) -> Iterator[Violation]:
    """A message that a group sent back comes again as often as the broker acknowledged that. Only groups whose returns
    can be counted have any here.
    """
    counts = {kind: Counter((each["group"], each["key"]) for each in case.by_kind[kind]) for kind in _RETURNS}
    groups = {group for group, _ in counts["returned"]}
    for group, key in sorted(counts["back"].keys() | counts["returned"].keys()):
        asked, sure, found = (counts[kind][group, key] for kind in _RETURNS)
        if group in groups and not sure <= found <= asked:
            what = f"{key} came back to group {group} {found} times, it was sent back {sure} to {asked} times"
            yield Violation("I1" if found < sure else "I8", what, key)


def check_memory(case: Case, bounds: Bounds) -> Iterator[Violation]:
    """I9."""
    worst = max((each["resident"] for each in case.by_kind["sample"]), default=0)
    if worst > bounds.resident_bytes_max:
        what = f"the broker had {worst >> 20} MiB in memory, declared are {bounds.resident_bytes_max >> 20}"
        yield Violation("I9", what)


def report_findings(case: Case) -> Iterator[Violation]:
    """Mistakes that the run noticed by itself: a start that failed, a finding of `check`."""
    for event in case.by_kind["finding"]:
        yield Violation(event["invariant"], event["sentence"])
