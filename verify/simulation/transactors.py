"""Producers with transactions: they send halves, commit, roll back, forget to, do it twice, and answer checks.

- The message of a half is never seen before a commit, exactly once after it, and never after a rollback.
- Of all ends of a half one counts; every answer says which, and no later one contradicts it.
- A half that was acknowledged is open until it is ended: it is listed, and only such halves are asked about, not before
  their time, and as often as the broker has counted.
- A relative delay counts from the commit, an absolute instant stays.

A message is in the model from the answer to its commit on; before that, seeing it breaks a promise.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from postdate.arrival import NEVER
from postdate.broker.transactions import EndTicket, HalfTicket
from postdate.check.walk import walk
from postdate.errors import DiskFull, FlowControl
from postdate.message import Ended, Message, encode_properties
from postdate.state.transactions import ROLL_BACK
from postdate.storage import record as records
from postdate.storage.batch import COMMIT, HALF, TRANSACTION, Batch
from postdate.storage.segment import Segments
from verify.simulation.model import Broken, Sent
from verify.simulation.producers import Producers
from verify.simulation.site import TOPICS, Site, topic_at

_FIRST = {Ended.COMMITTED: True, Ended.ROLLED_BACK: False}
_AGAIN = {Ended.ALREADY_COMMITTED: True, Ended.ALREADY_ROLLED_BACK: False}


@dataclass
class Transaction:
    """A half as its producer knows it."""

    message: Message
    name: str  # its body
    stored_at: int
    offset: int = -1
    acknowledged: bool = False
    is_lost: bool = False  # it was never acknowledged, and a crash has lost it
    is_committed: bool | None = None  # as the first end was answered; None: it is open
    asked_count: int = 0  # how often the broker has asked about it


@dataclass
class _End:
    """An end that waits for its answer, with the message as it would be if it is the one that counts."""

    transaction: Transaction
    is_commit: bool
    sent: Sent
    ticket: EndTicket = field(default_factory=EndTicket)


class Transactors:
    def __init__(self, site: Site, producers: Producers) -> None:
        self._site, self._producers = site, producers
        self._all: list[Transaction] = []
        self._halves: list[tuple[HalfTicket, Transaction]] = []  # not answered yet
        self._ends: list[_End] = []  # likewise

    # -- halves and ends ----------------------------------------------------------------------------------------

    def send_half(self, form: int, amount: int, key: int, place: int) -> None:
        site, topic = self._site, topic_at(place)
        queue_id = place // len(TOPICS) % site.broker.fold.topics.get(topic).write_queue_count
        message = self._producers.make_message(form, amount, key, topic, queue_id)
        marks = encode_properties({"TRAN_MSG": "true", "PGROUP": "group"})
        calls, name = site.broker.transactions, message.body.decode()
        transaction = Transaction(message, name, site.now_ms())
        half = message._replace(properties=message.properties + marks, sys_flag=4)
        # Noted first: a crash during the call leaves it in doubt.
        self._all.append(transaction)
        site.model.open_halves.add(name)
        try:
            ticket = calls.write_half(calls.prepare_half(half, site.now_ms()), site.now_ms())
        except (DiskFull, FlowControl) as error:
            site.digest.note_error(error)
            self._lose(transaction)
            return
        transaction.offset = ticket.offsets[0]
        site.digest.note("half", ticket.offsets)
        self._halves.append((ticket, transaction))

    def _lose(self, transaction: Transaction) -> None:
        transaction.is_lost = True
        self._site.model.open_halves.discard(transaction.name)

    def end(self, pick: int, way: int) -> None:
        """Ends one of the transactions. Ways: 0 commits, 1 rolls back, 2 commits twice, 3 does both."""
        known = [each for each in self._all if each.acknowledged]
        if known:
            for is_commit in ((True,), (False,), (True, True), (pick % 2 == 0, pick % 2 == 1))[way % 4]:
                self._end(known[pick % len(known)], is_commit=is_commit)

    def _end(self, transaction: Transaction, *, is_commit: bool) -> None:
        site = self._site
        end = _End(transaction, is_commit, self._producers.describe(transaction.message))
        self._ends.append(end)
        try:
            end.ticket = site.broker.transactions.end(transaction.offset, site.now_ms(), is_commit=is_commit)
        except (DiskFull, FlowControl) as error:
            site.digest.note_error(error)
            self._ends.remove(end)
        else:
            site.digest.note("end", end.ticket.offsets, end.ticket.answers)

    # -- checks -------------------------------------------------------------------------------------------------

    def take_checks(self, way: int, pick: int) -> None:
        """The broker asks. Ways: 0 a producer commits, 1 rolls back, 2 does not know, 3 nobody is there."""
        site = self._site
        calls, now_ms = site.broker.transactions, site.now_ms()
        with site.digest.suppress(DiskFull):
            due = calls.take_due_checks(now_ms)
            site.digest.note("checks", [each.half for each in due])
            by_offset = {each.offset: each for each in self._all if not each.is_lost}
            for each in due:
                self._judge_check(by_offset.get(each.half.offset), each.half.check_count, now_ms)
            if way % 4 == 3:
                calls.postpone(due, now_ms)
                return
            for each in due:
                by_offset[each.half.offset].asked_count += 1
            calls.note_checked(due, now_ms)
            for each in due[pick % 2 :] if way % 4 < 2 else []:
                self._end(by_offset[each.half.offset], is_commit=way % 4 == 0)

    def _judge_check(self, transaction: Transaction | None, count: int, now_ms: int) -> None:
        if transaction is None or not transaction.acknowledged:
            raise Broken("the broker asks about a half that nobody was told of")
        if transaction.is_committed is not None:
            raise Broken(f"the broker asks about {transaction.name}, which was ended")
        if now_ms < transaction.stored_at + self._site.settings.transaction_timeout_ms:
            raise Broken(f"the broker asks about {transaction.name}, stored at {transaction.stored_at}, at {now_ms}")
        if count > transaction.asked_count or count >= self._site.settings.transaction_check_times_max:
            raise Broken(f"{transaction.name} was asked about {transaction.asked_count} times, the broker says {count}")

    # -- answers ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Takes in answers. Call it before reading queues: a commit's message may be seen from its answer on."""
        for half, transaction in self._halves:
            if half.answers is not None:
                self._site.digest.note("half stored", half.answers)
                transaction.acknowledged = True
        self._halves = [each for each in self._halves if each[0].answers is None]
        for end in self._ends:
            if end.ticket.answers is not None:
                self._site.digest.note("ended", end.ticket.answers)
                self._take_answer(end, end.ticket.answer)
        self._ends = [end for end in self._ends if end.ticket.answers is None]

    def _take_answer(self, end: _End, answer: Ended) -> None:
        transaction, decided = end.transaction, end.transaction.is_committed
        said = f"an end of {transaction.name} was answered {answer.value}"
        if answer in _FIRST:
            if decided is not None:
                raise Broken(f"{said}, an earlier one has {'committed' if decided else 'rolled back'} it")
            if _FIRST[answer] != end.is_commit:
                raise Broken(f"{said}, it was to {'commit' if end.is_commit else 'roll back'}")
            self._decide(transaction, end.is_commit)
            if end.is_commit:
                entry = end.ticket.prepared[0]
                self._show(transaction, end.sent, end.ticket.offsets[0], entry.due_at_ms, entry.message.queue_id)
        elif answer in _AGAIN:
            if decided is not _AGAIN[answer]:
                raise Broken(f"{said}, and no earlier one was answered so")
        elif not self._is_deleted(transaction):
            raise Broken(f"{said}, it was acknowledged at {transaction.offset}")

    def _decide(self, transaction: Transaction, is_committed: bool) -> None:
        transaction.is_committed = is_committed
        self._site.model.open_halves.discard(transaction.name)

    def _show(self, transaction: Transaction, sent: Sent, arrival: int, due: int, queue_id: int) -> None:
        """From now on its message may be seen, and must be when it is due."""
        if due != sent.due:
            raise Broken(f"{transaction.name} was committed for {due}, expected {sent.due}")
        sent.arrival, sent.queue_id, sent.acknowledged = arrival, queue_id, True
        self._site.model.add(sent)

    def _is_deleted(self, transaction: Transaction) -> bool:
        """Whether it went with its topic."""
        topic = self._site.broker.fold.topics.by_name.get(transaction.message.topic)
        return topic is None or transaction.offset < topic.born

    # -- what is open -------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Compares what is open with what the broker lists, if everything is answered."""
        if self._halves or self._ends:
            return
        listed = {each.half.offset for each in self._site.broker.transactions.list_open(count_max=1_000)}
        for transaction in self._all:
            is_open = transaction.acknowledged and transaction.is_committed is None
            if is_open and not self._is_deleted(transaction) and transaction.offset not in listed:
                raise Broken(f"{transaction.name} was not ended, and is open no more")
            if transaction.is_committed is not None and transaction.offset in listed:
                raise Broken(f"{transaction.name} was ended, and is open")

    def end_all(self, flush: Callable[[], None]) -> None:
        """Ends every transaction that is open, each as its number says; one that finds no room is rolled back."""
        for share in (2, 1):
            flush()
            self.judge()
            for number, transaction in enumerate(self._all):
                if transaction.acknowledged and transaction.is_committed is None:
                    self._end(transaction, is_commit=number % share == 1)
        flush()
        self.judge()
        if self._site.broker.transactions.list_open():
            raise Broken("every transaction was ended, and some are open")

    # -- crashes ------------------------------------------------------------------------------------------------

    def settle_doubts(self) -> None:
        """After a crash: what had no answer has happened or not, as the log says."""
        halves, commits, rolled_back = self._read_log()
        for transaction in self._all:
            if transaction.acknowledged or transaction.is_lost:
                continue
            transaction.offset = halves.get(transaction.name, -1)
            transaction.acknowledged = transaction.offset >= 0
            if not transaction.acknowledged:
                self._lose(transaction)
        for transaction in {end.transaction.name: end.transaction for end in self._ends}.values():
            if transaction.is_committed is not None or transaction.is_lost or self._is_deleted(transaction):
                continue
            commit = commits.get(transaction.offset)
            place = commit[0] if commit else NEVER
            if rolled_back.get(transaction.offset, NEVER) < place:
                self._decide(transaction, is_committed=False)
            elif commit:
                self._decide(transaction, is_committed=True)
                offset, at_ms, due, queue_id = commit
                sent = self._producers.describe(transaction.message, at_ms)
                self._show(transaction, sent, offset, due, queue_id)
        self._halves.clear()
        self._ends.clear()

    def _read_log(self) -> tuple[dict[str, int], dict[int, tuple[int, int, int, int]], dict[int, int]]:
        """Returns where each half is by its name; by the offset of its half, the place, instant, due and queue of its
        first commit, and the place of its first rollback.
        """
        halves, commits, rolled_back = dict[str, int](), dict[int, tuple[int, int, int, int]](), dict[int, int]()
        for batch in self._batches():
            for row in batch.array():
                offset, kind = batch.offset + int(row["position"]), int(row["kind"])
                if kind not in (HALF, COMMIT, TRANSACTION):
                    continue
                record = records.decode(self._site.broker.log.read(offset, int(row["size"])))
                if kind == HALF:
                    halves[record.body.decode()] = offset
                elif kind == COMMIT:
                    commit = (offset, batch.at_ms, int(row["due"]), record.queue_id)
                    commits.setdefault(record.prepared_offset, commit)
                elif (body := json.loads(record.body))["call"] == ROLL_BACK:
                    rolled_back.setdefault(body["half"], offset)
        return halves, commits, rolled_back

    def _batches(self) -> Iterator[Batch]:
        """All batches of the log that are there; retention may have removed some from the middle."""
        segments = Segments(self._site.disk, self._site.settings.segment_bytes)
        for base in segments.bases:
            yield from (item for item in walk(segments, base) if isinstance(item, Batch))
