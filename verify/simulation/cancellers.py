"""Clients that cancel, by a message's handle or its key. The model checks the answers.

The broker answers a cancel alone; if the message may be in the table, a lookup in the table answers it.
"""

from postdate.arrival import NEVER
from postdate.broker.cancelling import CancelResult
from postdate.broker.lookup import State
from postdate.broker.writing import Ticket
from postdate.errors import DiskFull, FlowControl
from postdate.message import PROPERTY_MOVED, Cancelled
from postdate.storage import record as records
from verify.simulation.jobs import Jobs
from verify.simulation.model import Asked
from verify.simulation.movers import find_waiting
from verify.simulation.producers import Producers
from verify.simulation.site import Site, Watch

NONE: frozenset[str] = frozenset()


class Cancellers:
    def __init__(self, site: Site, watch: Watch, producers: Producers, jobs: Jobs) -> None:
        self._site = site
        self._watch = watch
        self._producers = producers  # a cancel may name a message that they send later
        self._jobs = jobs  # the broker need not know the messages that they import
        self._waiting: list[tuple[Ticket, Asked]] = []  # not answered yet
        self._asking: list[tuple[CancelResult, Asked]] = []  # wait for the lookup in the table
        self._cancelling: Asked | None = None  # while the call runs

    def cancel(self, pick: int, variant: int) -> None:
        """Variants: 0 by handle, 1 by user key, 2 with a wrong due, 3 of a message that is not sent yet, 4 with the due
        that a job has given it. The others use its first due.
        """
        target = self._site.pick_message(pick)
        if target is None or not target.due or not self._site.has_topic(target.topic):
            return
        due = target.due if variant == 4 else target.first_due + (1 if variant == 2 else 0)
        by = "key" if variant == 1 else "unique"
        key = target.user_key if by == "key" else target.unique_key
        if variant == 3:
            key = f"U{self._producers.made_count + 1 + pick % 3}"
        self._cancel(Asked(target.topic, key, by, due, NEVER))

    def _cancel(self, asked: Asked) -> None:
        self._cancelling = asked
        try:
            ticket = self._site.broker.cancel(asked.topic, asked.key, asked.due, self._site.now_ms(), by=asked.by)
        except (DiskFull, FlowControl) as error:
            self._site.digest.note_error(error)
            self._cancelling = None
            return
        self._site.digest.note("cancel", ticket.offsets)
        asked.arrival, self._cancelling = ticket.offsets[0], None
        self._site.model.cancels.append(asked)
        self._waiting.append((ticket, asked))
        self._watch.look()  # an async broker has fired what was due before it answered
        self._site.model.note_followed(asked)
        self.collect()

    # -- answers ------------------------------------------------------------------------------------------------

    @property
    def has_heard_all(self) -> bool:
        """Whether each cancel so far has its answer, or waits for the table alone: the model knows what they took."""
        return not self._waiting

    def collect(self) -> None:
        """Takes in answers. Call it right after a settle and a look: an answer is about that moment."""
        held = self._site.table.held_names(self._site.broker)
        answered = [(ticket, asked) for ticket, asked in self._waiting if ticket.answers is not None]
        self._waiting = [(ticket, asked) for ticket, asked in self._waiting if ticket.answers is None]
        for ticket, asked in answered:
            self._take_in(ticket.answer, asked, held)

    def _take_in(self, traced: CancelResult, asked: Asked, held: frozenset[str]) -> None:
        asked.jobs = traced.tombstone.jobs
        self._site.digest.note("cancelled", traced.outcome, traced.may_be_in_table, traced.rescues, asked.jobs)
        if not traced.may_be_in_table and self._follow(traced, asked, traced.outcome):
            return
        if not traced.may_be_in_table:
            hidden = self._jobs.messages_on_the_way() | (held if traced.outcome is Cancelled.DELIVERED else NONE)
            self._site.model.check_answer(asked, traced.outcome, in_table=hidden)
            return
        self._site.model.note_applied(asked)
        self._asking.append((traced, asked))
        if asked.arrival // 8 % 2:
            self.ask_table()  # the others are answered later, when much may have happened

    def ask_table(self) -> None:
        """Answers the broker's questions about cancels from the table, as the server does through bulk."""
        asking, self._asking = self._asking, []
        for traced, asked in asking:
            arrivals = self._site.table.find(traced.tombstone, traced.queues)
            found = self._site.broker.cancels.is_cancelled_by(traced, arrivals)
            answer = Cancelled.CANCELLED if found else Cancelled.UNKNOWN
            self._site.digest.note("table", arrivals, answer)
            if self._follow(traced, asked, answer):
                continue
            self._site.model.check_table_answer(asked, answer, set(arrivals))

    def _follow(self, traced: CancelResult, asked: Asked, outcome: Cancelled) -> bool:
        """A handle names a due that its message may have had before it was moved: then the message is looked up by its
        unique key and cancelled where it waits now. Returns whether there was one. `outcome` is that of the first due.
        """
        if not traced.must_follow(outcome) or not self._site.has_topic(asked.topic):
            return False
        found = find_waiting(self._site, asked.topic, asked.key)
        dues = {place.due_at_ms for data, place in found.items() if PROPERTY_MOVED in records.properties_of(data)}
        if not dues - {asked.due}:
            if outcome is Cancelled.UNKNOWN and self._was_cancelled(asked):
                self._site.model.check_answer(asked, Cancelled.CANCELLED, in_table=NONE)
                return True
            return False
        self._site.model.note_unanswered(asked)
        for due in sorted(dues - {asked.due}):
            self._cancel(Asked(asked.topic, asked.key, asked.by, due, NEVER))
        return True

    def _was_cancelled(self, asked: Asked) -> bool:
        """Whether a moved message of this key waits no more because another cancel has taken it."""
        found = [each for each in self._site.broker.find(asked.topic, asked.key, by="unique") if each is not None]
        return any(
            each.state is State.CANCELLED and PROPERTY_MOVED in records.properties_of(each.record) for each in found
        )

    # -- crashes ------------------------------------------------------------------------------------------------

    def settle_doubts(self) -> None:
        """After a crash: cancels without an answer may have worked."""
        called = [] if self._cancelling is None else [self._cancelling]
        for asked in called + [asked for _, asked in (*self._waiting, *self._asking)]:
            self._site.model.note_unanswered(asked)
        self._cancelling = None
        self._waiting.clear()
        self._asking.clear()
